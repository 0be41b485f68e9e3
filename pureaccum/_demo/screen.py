"""What the demo prints, and its picture.

On a terminal a bar moves while it trains; anywhere else the output is plain text. rich leaves out
colours if ``NO_COLOR`` is set.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from ..checkpoint import files
from . import training
from .training import EVEN, HALF, NORMED, RAGGED, Run, Runs, Setting


NUMBERS = training.WIDTH * (64 + 10)  # of the gradient on whole numbers, which has no biases
HEADING = """
                gradient off at     training      test    time of  memory of
             first step  last step      loss  accuracy     a step     a step"""


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=88)


def train(batch: training.Tensors, steps: int) -> Runs:
    """Take a step of each run in turn."""
    console = _console()
    runs = training.all_runs(batch)
    console.print(
        f"{training.SAMPLES:,} scanned digits from scikit-learn, one hidden layer of "
        f"{training.WIDTH}, {sum(p.numel() for p in runs[EVEN]['full batch'].first.values()):,} "
        f"parameters. Each row begins with the same parameters and takes {steps} steps of AdamW "
        "over all samples, on one thread. Time is the median CPU time, memory the most bytes that "
        "a step allocates at once. Gradients are compared with the full batch's, relative to it, "
        "in the worst parameter tensor."
    )
    still = not console.is_terminal or console.is_dumb_terminal
    for _ in track(range(steps), "Training", console=console, transient=True, disable=still):
        for ways in runs.values():
            for run in ways.values():
                run.step()
    training.compare(runs)
    return runs


# The table ---------------------------------------------------------------------------------------


def conclude(runs: Runs, test: training.Tensors, unequal: int) -> bool:
    """Print the table and what it shows; return whether the claim held."""
    console = _console()
    console.print(HEADING)
    for setting, sentences in _sentences(runs).items():
        console.print(f"[bold]{setting.title}[/]")
        for run in runs[setting].values():
            console.print(_row(run, test), soft_wrap=True)
        console.print(f"{sentences}\n")
    console.print(
        f"Whole numbers, where arithmetic is exact: {unequal} of {NUMBERS:,} numbers of the "
        "gradient differ between ragged microbatches and the full batch."
    )
    wrong = [setting.title for setting in runs if not runs[setting]["pureaccum"].is_near]
    wrong += ["whole numbers"] * (unequal > 0)
    if wrong:
        console.print(f"[red]Failed:[/] not the full batch's gradient: {'; '.join(wrong)}.")
    else:
        console.print(
            "[green]Passed:[/] in every setting pureaccum's gradient is the full batch's to at "
            "least half of its bits, and exactly on whole numbers."
        )
    return not wrong


def _row(run: Run, test: training.Tensors) -> str:
    first, last = (_share(off) for off in run.off) if run.off else ("-", "-")
    return (
        f"  {run.name:10} {first:>10} {last:>10} {run.losses[-1]:9.4f} {run.accuracy(test):9.1%} "
        f"{_time(run) * 1e3:7.1f} ms {run.peak / 1e6:7.2f} MB"
    )


def _share(off: float) -> str:
    return f"{off:.0%}" if off > 0.01 else f"{off:.0e}"


def _time(run: Run) -> float:
    return median(run.times[2:])  # without those that warm up and count


def _sentences(runs: Runs) -> dict[Setting, str]:
    full, loop, ours = runs[EVEN].values()
    full_bn, loop_bn, ours_bn = runs[NORMED].values()
    full_16, ours_16 = runs[HALF].values()
    bits = sum(max(ours_16.off or (1,)) < 2.0**-i for i in range(1, HALF.bits + 1))
    return {
        EVEN: (
            "Here the usual loop is right too. pureaccum computes the same gradient in "
            f"{_time(ours) / _time(loop):.2f} times the loop's time and "
            f"{ours.peak / loop.peak:.2f} times its memory. The full batch takes "
            f"{_time(full) / _time(ours):.2f} times pureaccum's time and "
            f"{full.peak / ours.peak:.0f} times its memory."
        ),
        RAGGED: (
            "The usual loop gives each microbatch the same weight. The more the sizes differ, the "
            "further its gradient is off. Near the end the full batch's gradient is small, so that "
            "the error is a larger share of it. pureaccum gives each sample the same weight."
        ),
        NORMED: (
            "The usual loop normalises each microbatch by its own statistics. That is another "
            "training method: a different gradient is not necessarily a worse training. The losses "
            "above are of all samples normalised together. With each microbatch normalised alone, "
            f"the loop's is {loop_bn.loss_in_parts():.4f} and the full batch's "
            f"{full_bn.loss_in_parts():.4f}. pureaccum uses the statistics of all samples, at "
            f"{_time(ours_bn) / _time(loop_bn):.2f} times the loop's time and "
            f"{ours_bn.peak / full_bn.peak:.0%} of the full batch's memory, because it stores "
            "BatchNorm's inputs."
        ),
        HALF: (
            f"pureaccum agrees with the full batch's float16 gradient to {bits} of {HALF.bits} "
            "bits. The loss scale starts too high on purpose. Steps that overflow are skipped and "
            f"repeated: {full_16.skipped} of the full batch and {ours_16.skipped} of pureaccum."
        ),
    }


# The picture -------------------------------------------------------------------------------------

BLUE, ORANGE, GREY = "#0b62a4", "#c8641b", "#999999"
WIDE: dict[str, Any] = {"linewidth": 6, "alpha": 0.3}  # lies below the narrow lines
STYLES: dict[str, dict[str, Any]] = {
    "full batch": {"color": BLUE, **WIDE},
    "usual loop": {"color": GREY},
    "pureaccum": {"color": BLUE},
    "pureaccum, float16": {"color": ORANGE, "linestyle": "--"},
}


def draw(runs: Runs, memory: Mapping[str, Mapping[int, int]], path: Path) -> None:
    """Write the picture to a file."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    _panels(figure, runs, memory)
    with files.whole_file(path) as file:
        figure.savefig(file, format="png", dpi=140)


def _panels(figure: Figure, runs: Runs, memory: Mapping[str, Mapping[int, int]]) -> None:
    left, middle, right = figure.subplots(1, 3)
    half = {"pureaccum, float16": runs[HALF]["pureaccum"]}
    _losses(left, RAGGED, {"full batch": runs[EVEN]["full batch"], **runs[RAGGED], **half})
    _losses(middle, NORMED, runs[NORMED])
    _memory(right, memory)


def _losses(axes: Axes, setting: Setting, runs: Mapping[str, Run]) -> None:
    for name, run in runs.items():
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=name, **STYLES[name])
    axes.set(title=setting.title, yscale="log", xlabel="step")
    axes.set_ylabel("loss, all samples normalised together" if setting.normed else "training loss")
    axes.legend(frameon=False)


def _memory(axes: Axes, memory: Mapping[str, Mapping[int, int]]) -> None:
    styles = {"usual loop": STYLES["usual loop"] | WIDE, "pureaccum": STYLES["pureaccum"]}
    for name, peaks in memory.items():
        megabytes = [peak / 1e6 for peak in peaks.values()]
        axes.plot(list(peaks), megabytes, label=name, **styles[name])
    sizes = list(memory["pureaccum"])
    axes.set(title="Memory of a step", xscale="log", yscale="log", ylabel="MB")
    axes.set_xlabel(f"samples in a microbatch, of {training.SAMPLES:,}")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(color=GREY, alpha=0.3, linewidth=0.5)
