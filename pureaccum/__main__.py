"""``python -m pureaccum``: the claim checked before your eyes, and a loss of your own."""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pureaccum as pa


Params = dict[str, Tensor]
Batch = dict[str, Tensor]


def demo() -> None:
    """Cut one batch of masked tokens in many ways and compare the gradients."""
    torch.manual_seed(0)
    params = {"embed": torch.randn(50, 32).double(), "out": torch.randn(32, 50).double()}
    tokens = torch.randint(50, (16, 12))
    length = torch.tensor([12, 9, 3, 1, 0, 0, 0, 0, 7, 12, 2, 5, 1, 1, 12, 4])
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(12) >= length[:, None], -100)
    batch = {"tokens": tokens, "labels": labels}

    def logits(params: Params, batch: Batch) -> Tensor:
        return (params["embed"][batch["tokens"]].tanh() @ params["out"]).transpose(1, 2)

    def mean(params: Params, batch: Batch) -> Tensor:
        return cross_entropy(logits(params, batch), batch["labels"])  # over the unmasked tokens

    def weighted(params: Params, batch: Batch) -> pa.Weighted:
        total = cross_entropy(logits(params, batch), batch["labels"], reduction="sum")
        return pa.Weighted(total, (batch["labels"] != -100).sum())

    full = torch.func.grad(mean)(params, batch)

    def row(name: str, grads: Params) -> None:
        difference = {key: grads[key] - full[key] for key in full}
        print(f"  {name:<54}{float(pa.global_norm(difference) / pa.global_norm(full)):9.1e}")

    print("A batch of 16 sequences, 0 to 12 tokens of each unmasked, in float64.")
    print("Relative distance from the gradient of the full batch:\n")
    parts = list(pa.microbatches(batch, 4))
    loop = [torch.func.grad(mean)(params, part) for part in parts]
    row(
        "the usual loop, loss / 4 (one microbatch all masked)",
        {key: sum((g[key] for g in loop), torch.zeros(())) / len(loop) for key in full},
    )
    seen = [g for g, part in zip(loop, parts, strict=True) if (part["labels"] != -100).any()]
    row(
        "the usual loop, masked microbatch left out",
        {key: sum((g[key] for g in seen), torch.zeros(())) / len(seen) for key in full},
    )
    for size in (1, 3, 4, 16):
        name = f"pa.grad(weighted, microbatch_size={size})"
        row(name, pa.grad(weighted, microbatch_size=size)(params, batch))

    acc = pa.accumulator(weighted)
    one, two = acc.init(params), acc.init(params)
    for i, part in enumerate(pa.microbatches(batch, 5)):
        if i % 2:
            one = acc.update(one, params, part, donate=True)
        else:
            two = acc.update(two, params, part, donate=True)
    row("two accumulators, merged", acc.finalize(acc.merge(two, one))[0])

    whole = {key: (8 * value).round() for key, value in params.items()}
    x, y = torch.randint(-8, 9, (13, 32)).double(), torch.randint(-8, 9, (13, 50)).double()

    def squares(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ params["out"] - y) ** 2).sum()

    exact = torch.func.grad(squares)(whole, x, y)
    cut = {
        size: pa.grad(squares, batch_argnums=(1, 2), reduction="sum", microbatch_size=size)
        for size in (1, 2, 5, 12)
    }
    same = all(torch.equal(g(whole, x, y)["out"], exact["out"]) for g in cut.values())
    print(f"\nOn whole numbers, for microbatches of 1, 2, 5 and 12 rows: bitwise equal is {same}.")

    def direction(grad: Callable[..., Params]) -> Params:
        ones = {key: torch.ones_like(value) for key, value in params.items()}
        return torch.func.jvp(lambda p: grad(p, batch), (params,), (ones,))[1]

    print("\nThrough torch.func.jvp, the Hessian-vector product of the whole batch:\n")
    full = direction(torch.func.grad(mean))
    row(
        "jvp(pa.grad(weighted, microbatch_size=3))", direction(pa.grad(weighted, microbatch_size=3))
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line, do what it says, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pureaccum", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("demo", help=demo.__doc__)
    about = "Check whether a loss may be cut into microbatches."
    command = commands.add_parser(
        "check",
        help=about,
        description=f"{about} Exit status: 0 it fits, 1 it does not, 2 it could not be run.",
        epilog="In losses.py: def example(): return loss_fn, params, batch. Then: "
        "python -m pureaccum check losses.py:example",
    )
    command.add_argument(
        "target",
        metavar="file.py:name",
        help="or package.module:name; a function that returns (loss_fn, params, batch), and "
        "perhaps a dict of what the options below say; or such a tuple itself",
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="one JSON object")
    command.add_argument(
        "--traceback",
        action="store_true",
        dest="whole_traceback",
        help="all of it, where it could not be run",
    )
    # An option that is not given must not override what the target says.
    options = command.add_argument_group("the loss", argument_default=argparse.SUPPRESS)
    options.add_argument(
        "--reduction", choices=("mean", "sum"), help="what a scalar loss is of its rows (mean)"
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
        demo()
        return 0
    from .testing._command import check  # what the demo can do without

    return check(**settings)


if __name__ == "__main__":
    sys.exit(main())
