"""The demo's picture: loss curves on top of each other, and memory against microbatch size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import pureaccum as pa

from .._base.trees import map as tree_map
from ..checkpoint.whole_file import whole_file
from ._outcomes import Outcome
from ._race import RATE, ROWS, Tensors, loss_of, network


SIZES = (50, 100, 200, 500, ROWS)
BLUE, ORANGE, GREY = "#0b62a4", "#c8641b", "#999999"
STYLES: dict[str, dict[str, Any]] = {  # the wide lines lie below the narrow ones
    "full batch": {"color": BLUE, "linewidth": 6, "alpha": 0.3},
    "full batch, fp16": {"color": ORANGE, "linewidth": 3.5, "alpha": 0.4},
    "ragged": {"color": BLUE, "linewidth": 1.2},
    "ragged, fp16": {"color": ORANGE, "linewidth": 1.2, "linestyle": "--"},
    "usual loop": {"color": GREY, "linewidth": 1},
}


def draw(outcomes: Sequence[Outcome], batch: Tensors, path: Path) -> None:
    """Write the picture.

    Args:
        outcomes: Of all runs.
        batch: What they trained on.
        path: The file.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _losses(left, {it.name: it.at_last.losses for it in outcomes})
    _memory(right, batch)
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=140)


def _losses(axes: Axes, losses: dict[str, Sequence[float]]) -> None:
    for name, style in STYLES.items():
        axes.plot(range(1, len(losses[name]) + 1), losses[name], label=name, **style)
    axes.set(yscale="log", xlabel="steps applied", ylabel="loss of the whole batch")
    axes.set_title("Ragged microbatches train as the full batch does")
    axes.legend(frameon=False)


def _memory(axes: Axes, batch: Tensors) -> None:
    net = network()
    for name, color, policy in (
        ("float32", BLUE, None),
        ("float16", ORANGE, pa.Policy(compute=torch.float16)),
    ):
        bytes_: list[int] = []
        for size in SIZES:
            step = pa.make_step(loss_of(net), pa.adamw(RATE), microbatch_size=size, policy=policy)
            state = step.init(pa.functional(net).params)
            imagined = pa.memory_report(step, *tree_map(_without_numbers, (state, batch)))
            bytes_.append(imagined.predicted.beyond_arguments)
        axes.plot(SIZES, [it / 1e6 for it in bytes_], "o-", color=color, label=name, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="rows in a microbatch")
    axes.set_ylabel("MB that a step needs")
    axes.set_title("Memory is that of one microbatch")
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(color=GREY, alpha=0.3, linewidth=0.5)


def _without_numbers(tensor: Tensor) -> Tensor:
    return tensor.to("meta")
