"""Compare three gradients: the full batch's, pureaccum's and the usual loop's.

The batch has 100 samples, in microbatches of 32 with a short one at the end. There are three cases:
ragged microbatches alone, masked tokens, and a BatchNorm, which looks at all samples. The usual
loop divides the loss of each microbatch by the number of microbatches. Everything is in float64, so
rounding explains none of the differences. The README shows the table that this prints.

    Run:   python examples/three_ways.py
    Needs: no extra
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pureaccum as pa


ROWS, SIZE, WORDS = 100, 32, 12
Tensors = dict[str, Tensor]


def usual_loop(
    net: nn.Module, loss: Callable[[nn.Module, Tensors], Tensor], batch: Tensors
) -> Tensors:
    """The gradient of the accumulation loop that most people write."""
    microbatches = list(pa.microbatches(batch, SIZE))
    net.zero_grad()
    for microbatch in microbatches:
        (loss(net, microbatch) / len(microbatches)).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def mean_error(net: nn.Module, batch: Tensors) -> Tensor:
    return ((net(batch["x"]) - batch["y"]) ** 2).mean()


def mean_over_mask(net: nn.Module, batch: Tensors) -> Tensor:
    error = ((net(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return (error * batch["mask"]).sum() / batch["mask"].sum()


def off(grads: Tensors, exact: Tensors) -> float:
    """The distance from the exact gradient, relative to its norm."""
    apart = {name: grads[name] - exact[name] for name in exact}
    return float(pa.global_norm(apart) / pa.global_norm(exact))


def main() -> dict[str, tuple[float, float]]:
    """How far pureaccum and the usual loop are off, by case."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    normed = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32, track_running_stats=False), nn.GELU(), nn.Linear(32, 8)
    ).double()
    fn, whole = pa.functional(plain), pa.functional(normed, microbatch_size=SIZE)
    x = torch.randn(ROWS, 8).double()
    rows = {"x": x, "y": x.roll(1, 1) ** 2}
    x = torch.randn(ROWS, WORDS, 8).double()
    lengths = torch.randint(1, WORDS + 1, (ROWS, 1))
    tokens = {"x": x, "y": x.cumsum(1).tanh(), "mask": torch.arange(WORDS) < lengths}

    def ragged(params: Tensors, batch: Tensors) -> Tensor:
        return ((fn.apply(params, (), batch["x"])[0] - batch["y"]) ** 2).mean()

    def masked(params: Tensors, batch: Tensors) -> pa.Weighted:
        error = ((fn.apply(params, (), batch["x"])[0] - batch["y"]) ** 2).mean(-1)
        return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())

    def batch_norm(params: Tensors, batch: Tensors) -> Tensor:
        return ((whole.apply(params, (), batch["x"])[0] - batch["y"]) ** 2).mean()

    print("| | full batch | pureaccum | the usual loop |\n|---|---|---|---|")
    found: dict[str, tuple[float, float]] = {}
    for case, net, ours, size, usual, batch in (
        ("ragged microbatches", plain, ragged, SIZE, mean_error, rows),
        ("masked tokens", plain, masked, SIZE, mean_over_mask, tokens),
        ("BatchNorm", normed, batch_norm, None, mean_error, rows),  # the network splits the batch
    ):
        net.zero_grad()
        usual(net, batch).backward()
        full = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        grads = pa.grad(ours, microbatch_size=size)(pa.functional(net).params, batch)
        of_ours, of_usual = off(grads, full), off(usual_loop(net, usual, batch), full)
        found[case] = of_ours, of_usual
        norm = float(pa.global_norm(full))
        print(f"| {case} | norm {norm:.3f} | off by {of_ours:.0e} | off by {of_usual:.0%} |")
    return found


if __name__ == "__main__":
    main()
