"""``python -m pureaccum``: a demo of what microbatches cost and save, and a check of your loss."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __doc__ as about_us
from . import __version__


PICTURE = Path("pureaccum-demo.png")


def demo() -> int:
    """Train on real data and show what microbatches cost and save."""
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 passed, 1 failed, 2 could not run. Set NO_COLOR for no colours.",
    )
    parser.add_argument("--version", action="version", version=f"pureaccum {__version__}")
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser(
        "demo",
        help=demo.__doc__,
        description=f"{demo.__doc__} It takes about twenty seconds, writes {PICTURE} into the "
        "current folder, and needs the packages of pureaccum[demo].",
    )
    about = "Check whether your loss can be cut into microbatches."
    command = commands.add_parser(
        "check",
        help=about,
        description=f"{about} Exit status: 0 passed, 1 failed, 2 could not run.",
        epilog="Example: write def example(): return loss_fn, params, batch into losses.py and run "
        "python -m pureaccum check losses.py:example",
    )
    command.add_argument(
        "target",
        metavar="file.py:name",
        help="or package.module:name: a function that returns the tuple (loss_fn, params, batch), "
        "or the tuple itself. A dict with the options below can be its fourth item",
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="print a JSON object")
    command.add_argument(
        "--traceback",
        action="store_true",
        dest="whole_traceback",
        help="print the whole traceback if it could not run",
    )
    # An option that is not given must not override the target's.
    options = command.add_argument_group("the loss", argument_default=argparse.SUPPRESS)
    options.add_argument(
        "--reduction", choices=("mean", "sum"), help="how a scalar loss combines its samples (mean)"
    )
    options.add_argument(
        "--has-aux", action=argparse.BooleanOptionalAction, help="whether it returns (loss, aux)"
    )
    options.add_argument(
        "--weights", metavar="LEAF", help="a mask in the batch, also set to zero at random"
    )
    options.add_argument(
        "--reference", choices=("float64", "native"), help="dtype of the comparison (float64)"
    )
    options.add_argument("--splits", type=int, metavar="N", help="random splits to try (8)")
    options.add_argument("--seed", type=int, metavar="N", help="seed of those splits (0)")
    settings = vars(parser.parse_args(argv))
    if settings.pop("command") == "demo":
        return demo()
    from .testing._check.command import check  # not earlier: the demo does not need it

    return check(**settings)


if __name__ == "__main__":
    sys.exit(main())
