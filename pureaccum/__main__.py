"""``python -m pureaccum``: the claim before your eyes, and a check of a loss of your own."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __doc__ as about_us
from . import __version__


PICTURE = Path("pureaccum-demo.png")


def demo() -> int:
    """Train on real data, by the full batch and by ragged microbatches, and compare."""
    from . import _demo

    if packages := _demo.missing():
        print(
            f"The demo needs {' and '.join(packages)}: pip install 'pureaccum[demo]'",
            file=sys.stderr,
        )
        return 2
    try:
        return 0 if _demo.run(PICTURE) else 1
    except OSError as error:
        print(f"{PICTURE} could not be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # the status of a shell for an interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, do what it says, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pureaccum",
        description=about_us,
        epilog="Exit status: 0 as claimed, 1 not as claimed, 2 not run. NO_COLOR is honoured.",
    )
    parser.add_argument("--version", action="version", version=f"pureaccum {__version__}")
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser(
        "demo",
        help=demo.__doc__,
        description=f"{demo.__doc__} It takes some twenty seconds, writes {PICTURE}, and needs "
        "pureaccum[demo].",
    )
    about = "Check whether a loss may be cut into microbatches."
    command = commands.add_parser(
        "check",
        help=about,
        description=f"{about} Exit status: 0 it fits, 1 it does not fit, 2 it could not be run.",
        epilog="In losses.py: def example(): return loss_fn, params, batch. Then: "
        "python -m pureaccum check losses.py:example",
    )
    command.add_argument(
        "target",
        metavar="file.py:name",
        help="or package.module:name; a function that returns (loss_fn, params, batch), and "
        "perhaps a dict of the settings below; or such a tuple itself",
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="one JSON object")
    command.add_argument(
        "--traceback",
        action="store_true",
        dest="whole_traceback",
        help="the whole traceback, where it could not be run",
    )
    # An option that is not given must not override what the target says.
    options = command.add_argument_group("the loss", argument_default=argparse.SUPPRESS)
    options.add_argument(
        "--reduction", choices=("mean", "sum"), help="what a scalar loss is of its samples (mean)"
    )
    options.add_argument(
        "--has-aux", action=argparse.BooleanOptionalAction, help="whether it returns (loss, aux)"
    )
    options.add_argument(
        "--weights", metavar="LEAF", help="a mask in the batch, to set to zero at random, too"
    )
    options.add_argument(
        "--reference", choices=("float64", "native"), help="the dtype in which to compare (float64)"
    )
    options.add_argument("--splits", type=int, metavar="N", help="random splits to try (8)")
    options.add_argument("--seed", type=int, metavar="N", help="of those splits (0)")
    settings = vars(parser.parse_args(argv))
    if settings.pop("command") == "demo":
        return demo()
    from .testing._check.command import check  # not earlier: the demo does not need it

    return check(**settings)


if __name__ == "__main__":
    sys.exit(main())
