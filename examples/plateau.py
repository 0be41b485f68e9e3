"""Lower the learning rate when a metric stops improving, with a pure function of a small state.

    better    below best * (1 - threshold)
    due       more than ``patience`` metrics in a row were not better: the rate falls

This is the rule of torch's ReduceLROnPlateau with its default modes, in float64 as there. The run
below feeds both the same metrics, and both give the same rates, bit for bit. Nothing synchronises
with a device, and the state consists of tensors: save it with the training state. If higher is
better, negate the metric. If it can be negative, compare with ``best - threshold``.

    Run:   python examples/plateau.py
    Needs: no extra
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import pureaccum as pa


class Plateau(NamedTuple):
    """The current rate, the best metric so far, and how many in a row were not better."""

    lr: Tensor
    best: Tensor
    bad: Tensor


def begin(lr: float) -> Plateau:
    """The first state."""
    numbers = torch.tensor([lr, torch.inf], dtype=torch.float64)
    return Plateau(*numbers.unbind(), torch.tensor(0))


def update(
    state: Plateau, metric: Tensor, factor: float = 0.1, patience: int = 10, threshold: float = 1e-4
) -> Plateau:
    """The next state. A metric of NaN is not better."""
    metric = metric.double()
    better = metric < state.best * (1.0 - threshold)
    bad = torch.where(better, 0, state.bad + 1)
    due, lower = bad > patience, state.lr * factor
    return Plateau(
        lr=torch.where(due & (state.lr - lower > 1e-8), lower, state.lr),
        best=torch.where(better, metric, state.best),
        bad=torch.where(due, 0, bad),
    )


def main(epochs: int = 24, lr: float = 0.5) -> dict[str, list[float]]:
    """Fit a linear model to noisy data, where a high rate soon gets no further."""
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(512, generator=torch.Generator().manual_seed(1))
    data = {"x": x, "y": x.sum(1) + noise}

    def loss(params: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (batch["x"] @ params - batch["y"]).square().mean()

    evaluated = pa.value(loss, microbatch_size=128)
    step = pa.make_step(loss, pa.sgd(lr), microbatch_size=8)
    state, tracker = step.init(torch.zeros(8)), begin(lr)
    torchs = torch.optim.SGD([torch.zeros(())], lr=lr)
    scheduler = ReduceLROnPlateau(torchs, patience=2)
    rates: dict[str, list[float]] = {"ours": [], "torch's": []}
    for epoch in range(epochs):
        part = {k: v.roll(-16 * epoch, 0)[:16] for k, v in data.items()}
        state, _ = step(state, part)
        metric = evaluated(state.params, data)
        tracker = update(tracker, metric, patience=2)
        state = pa.tree_set(state, lr=tracker.lr)
        scheduler.step(float(metric))
        rates["ours"].append(float(tracker.lr))
        rates["torch's"].append(torchs.param_groups[0]["lr"])
        if epoch == 0 or rates["ours"][-1] != rates["ours"][-2]:
            print(f"epoch {epoch:2}: loss {metric:.3f}, learning rate from here on: {tracker.lr:g}")
    assert rates["ours"] == rates["torch's"]
    return rates


if __name__ == "__main__":
    main()
