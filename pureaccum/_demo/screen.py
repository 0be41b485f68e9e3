"""What the demo shows: a line for each run while it trains, a table at the end, and a picture.

On a terminal the lines move; anywhere else they are plain text, printed now and then. rich leaves
colours out where ``NO_COLOR`` is set. In the picture, loss curves lie on top of each other,
those through BatchNorm so near that their distance is drawn, and memory is drawn against microbatch
size.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

import pureaccum as pa

from .._base import trees
from ..checkpoint import files
from . import race


# While it trains ----------------------------------------------------------------------------


WIDTH = 88
EVERY = 20  # steps between the lines of plain text
WIDTHS = {"step": 4, "loss": 8, "scale": 11, "skipped": 8, "rows/s": 8}


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def train_all(
    runs: dict[race.Run, Iterator[race.Progress]], steps: int
) -> dict[race.Run, race.Progress]:
    """Take a step of each run in turn until all have applied so many; where each then stands."""
    console = _console()
    console.print(
        f"A network of 9,610 parameters learns {race.ROWS:,} handwritten digits, by the full batch "
        "and by ragged microbatches of 1 to 200 rows; another one, with BatchNorm, by the full "
        f"batch and {race.SIZE} rows at a time. A step that overflows is skipped, and taken "
        "again.\n"
    )
    at = {run: next(steps_of) for run, steps_of in runs.items()}
    columns = [TextColumn("{task.description:21}"), BarColumn(bar_width=12)]
    columns += [TextColumn("{task.fields[line]}")]
    live = console.is_terminal and not console.is_dumb_terminal
    heading = " ".join(name.rjust(width) for name, width in WIDTHS.items())
    console.print(" " * (35 if live else 22) + heading)
    with Bars(*columns, console=console, disable=not live) as bars:
        tasks = {run: bars.add_task(run.name, total=steps, line="") for run in runs}
        told = 0
        while any(len(progress.losses) < steps for progress in at.values()):
            for run, steps_of in runs.items():
                if len(at[run].losses) < steps:
                    at[run] = next(steps_of)
                done = len(at[run].losses)
                bars.update(tasks[run], completed=done, line=_line(at[run]))
            slowest = min(len(progress.losses) for progress in at.values())
            if not live and slowest // EVERY > told:
                told = slowest // EVERY
                for run, progress in at.items():
                    console.print(f"{run.name:21} {_line(progress)}")
                console.print()
    return at


def _line(progress: race.Progress) -> str:
    done = len(progress.losses)
    loss = f"{progress.losses[-1]:.4f}" if done else "-"
    scale = f"{progress.scale:,.0f}" if progress.scale != 1 else "-"
    cells = (done, loss, scale, progress.attempts - done, f"{progress.rate:,.0f}")
    return " ".join(
        str(cell).rjust(width) for cell, width in zip(cells, WIDTHS.values(), strict=True)
    )


# The table -----------------------------------------------------------------------------------


class RunSummary(NamedTuple):
    """How a run ended."""

    run: race.Run
    at_last: race.Progress
    accuracy: float  # the share of unseen rows that it gets right
    distance: race.Distance | None  # of its gradient from the full batch's, on the same parameters
    apart: float  # its last parameters from the full batch's in the same dtype, relative to them


def summaries(
    at_last: dict[race.Run, race.Progress], batch: race.Tensors, test: race.Tensors
) -> list[RunSummary]:
    """How all runs ended, with some rows to train on and others to test with."""
    found: list[RunSummary] = []
    for run, progress in at_last.items():
        fn, full = pa.functional(race.network(run.normed)), at_last[race.beside(run)]
        right = fn.apply(progress.params, (), test["x"])[0].argmax(1) == test["y"]
        difference = {key: x - full.params[key] for key, x in progress.params.items()}
        found.append(
            RunSummary(
                run=run,
                at_last=progress,
                accuracy=float(right.float().mean()),
                distance=None
                if run.cut == "whole"
                else race.worst(run, [fn.params, full.params], batch),
                apart=float(pa.global_norm(difference) / pa.global_norm(full.params)),
            )
        )
    return found


COLUMNS: dict[str, Callable[[RunSummary], str]] = {
    "loss\nat last": lambda it: f"{it.at_last.losses[-1]:.5f}",
    "unseen\nright": lambda it: f"{it.accuracy:.1%}",
    "steps\nskipped": lambda it: str(it.at_last.attempts - len(it.at_last.losses)),
    "peak\nMB": lambda it: f"{it.at_last.peak / 1e6:.2f}",
    "time\ns": lambda it: f"{it.at_last.seconds:.1f}",
    "params\noff by": lambda it: f"{it.apart:.0e}" if it.distance else "-",
    "gradient\nbits off": lambda it: (
        f"{it.distance.bits} of {11 if it.run.half else 24}" if it.distance else "-"
    ),
    "gradient\nerror / bound": lambda it: _bound(it),
}


def conclude(found: Sequence[RunSummary], unequal: int) -> None:
    """Print the table, and how many numbers are unequal where arithmetic is exact."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for it, after in zip(found, [*found[1:], None], strict=True):
        last = after is None or race.beside(after.run) != race.beside(it.run)
        table.add_row(it.run.name, *(cell(it) for cell in COLUMNS.values()), end_section=last)
    console = _console()
    console.print()
    console.print(table)
    console.print(
        "\nOff: from the full batch with the same network and dtype; of gradients, on the "
        "parameters that the runs begin and end with. An error above its bound leaves less than "
        "half of the digits right. On whole numbers, where arithmetic is exact, the gradient of "
        f"ragged microbatches differs from the full batch's in {unequal} of 9,472 numbers."
    )


def _bound(it: RunSummary) -> str:
    if it.distance is None:
        return "-"
    error = it.distance.bound
    color, amount = ("green", f"{error:.0e}") if error < 1 else ("red", f"{error:,.0f}")
    return f"[{color}]{amount}[/]"


# The picture ---------------------------------------------------------------------------------

SIZES = (50, 100, 200, 500, race.ROWS)
BLUE, ORANGE, GREY = "#0b62a4", "#c8641b", "#999999"
STYLES: dict[str, dict[str, Any]] = {  # the wide lines lie below the narrow ones
    "full batch": {"color": BLUE, "linewidth": 6, "alpha": 0.3},
    "full batch, fp16": {"color": ORANGE, "linewidth": 3.5, "alpha": 0.4},
    "ragged": {"color": BLUE, "linewidth": 1.2},
    "ragged, fp16": {"color": ORANGE, "linewidth": 1.2, "linestyle": "--"},
    "usual loop": {"color": GREY, "linewidth": 1},
    "BatchNorm, usual loop": {"color": GREY, "linewidth": 1},
    "BatchNorm, in 100s": {"color": BLUE, "linewidth": 1.2},
}
LEAST = 1e-8  # the smallest distance that is drawn: none at all has no place on a log scale


def draw(found: Sequence[RunSummary], batch: race.Tensors, path: Path) -> None:
    """Write the picture to a file."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    losses = {it.run: it.at_last.losses for it in found}
    _losses(left, {run: it for run, it in losses.items() if not run.normed})
    _distances(middle, {run: it for run, it in losses.items() if run.normed})
    _memory(right, batch)
    with files.whole_file(path) as file:
        figure.savefig(file, format="png", dpi=140)


def _losses(axes: Axes, losses: dict[race.Run, Sequence[float]]) -> None:
    for run, values in sorted(losses.items(), key=lambda it: [*STYLES].index(it[0].name)):
        axes.plot(range(1, len(values) + 1), values, label=run.name, **STYLES[run.name])
    axes.set(yscale="log", xlabel="steps applied", ylabel="loss of the whole batch")
    axes.set_title("Ragged microbatches train as the full batch does")
    axes.legend(frameon=False)


def _distances(axes: Axes, losses: dict[race.Run, Sequence[float]]) -> None:
    """Loss curves are too near to be told apart, so that what is drawn is how near they are."""
    for run, values in losses.items():
        if run != race.beside(run):
            pairs = zip(values, losses[race.beside(run)], strict=True)
            off = [max(LEAST, abs(loss / full - 1)) for loss, full in pairs]
            axes.plot(range(1, len(off) + 1), off, label=run.name, **STYLES[run.name])
    axes.set(yscale="log", xlabel="steps applied", ylim=(LEAST, 1))
    axes.set_ylabel("loss, off from the full batch's by")
    axes.set_title(f"Through BatchNorm too, {race.SIZE} rows at a time")
    axes.legend(frameon=False, loc="center right")
    axes.grid(color=GREY, alpha=0.3, linewidth=0.5)


def _memory(axes: Axes, batch: race.Tensors) -> None:
    net = race.network()
    for name, color, policy in (
        ("float32", BLUE, None),
        ("float16", ORANGE, pa.Policy(compute=torch.float16)),
    ):
        bytes_: list[int] = []
        for size in SIZES:
            step = pa.make_step(
                race.loss_of(net), pa.adamw(race.RATE), microbatch_size=size, policy=policy
            )
            state = step.init(pa.functional(net).params)
            imagined = pa.memory_report(
                step, *trees.tree_map(lambda x: x.to("meta"), (state, batch))
            )
            bytes_.append(cast(pa.Memory, imagined.predicted).beyond_arguments)
        axes.plot(SIZES, [it / 1e6 for it in bytes_], "o-", color=color, label=name, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="rows in a microbatch")
    axes.set_ylabel("MB that a step needs")
    axes.set_title("Memory is that of one microbatch")
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(color=GREY, alpha=0.3, linewidth=0.5)
