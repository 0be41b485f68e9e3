"""Two figures: that of the README, of memory and batch size; and that of the whole steps.

Rule: of whole steps a panel for each cell, a line for each contender; ratios to the loop written by
hand, on a log scale, with their quartiles; who is missing is named below.
"""

import math
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from .models import SIZES
from .ratios import WHOLE_BATCH, Row
from .report import brief, digits, whole_steps
from .rivals import FUNC_ADAMW
from .steps import COMPILED, COMPILED_HAND, HAND_STEP, OUR_STEPS


OURS, RIVALS, TORCH, FAINT = "#0b62a4", "#c8641b", "#555555", "#bbbbbb"
ACROSS = 4  # panels side by side
BESIDE = {"textcoords": "offset points", "va": "center", "fontsize": 9}
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def check() -> None:
    if find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib, which is not installed.")


def draw(rows: Sequence[Row], facts: dict, path: Path) -> None:
    """Write the figure, in the format that the name of the file says."""
    from matplotlib import pyplot

    whole = [row for row in whole_steps(rows) if row.measure == "time"]
    cells = list(dict.fromkeys((row.device, row.where) for row in whole))
    entries = {(row.device, row.where, row.ours): row for row in whole}
    numbers = [row for row in whole if row.ratio is not None]
    if not numbers:
        print("--plot: no whole step was measured.", file=sys.stderr)
        return
    names = list(dict.fromkeys(row.ours for row in numbers))
    names.sort(key=list(dict.fromkeys(row.ours for row in whole)).index)
    # Room for the numbers beside the points.
    lowest = min(1, *(row.quartiles[0] for row in numbers)) / 1.3
    highest = max(1, *(row.quartiles[1] for row in numbers)) * 1.9

    across = min(ACROSS, len(cells))
    down = math.ceil(len(cells) / across)
    figure, axes = pyplot.subplots(
        down,
        across,
        sharex=True,
        sharey=True,
        squeeze=False,
        figsize=(1.6 + 2.9 * across, 1.5 + (0.5 + 0.27 * len(names)) * down),
        layout="constrained",
    )
    for axis, cell in zip(axes.flat, cells, strict=False):
        panel(axis, cell, names, entries)
        ticks = [tick for tick in TICKS if lowest <= tick <= highest]
        axis.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=8)
        axis.set_xticks([], minor=True)
        axis.set_xlim(lowest, highest)
    for axis in axes[:, 0]:
        for label, name in zip(axis.get_yticklabels(), names, strict=True):
            label.set_color(color(name))
    for axis in axes.flat[len(cells) :]:
        axis.set_visible(False)
    for axis in axes.flat[max(0, len(cells) - across) : len(cells)]:
        axis.tick_params(labelbottom=True)
    figure.suptitle("A whole training step, against the loop written by hand", fontweight="bold")
    figure.supxlabel(notes(whole, facts), fontsize=8, color=TORCH)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_growth(rows: Sequence[Row], path: Path) -> None:
    """The picture of the README: the peak memory of a step, and how many rows its batch has."""
    import matplotlib
    from matplotlib import pyplot

    of: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.theirs == WHOLE_BATCH and row.amounts:
            batch = row.where.rpartition(" ")[2]
            ours, whole = row.amounts
            of.setdefault(row.ours, {})[int(batch)] = ours / 1e6
            of.setdefault(WHOLE_BATCH, {})[int(batch)] = whole / 1e6
    if not of:
        return
    of[HAND_STEP][min(of[WHOLE_BATCH])] = of[WHOLE_BATCH][min(of[WHOLE_BATCH])]  # they are the same
    matplotlib.rcParams["svg.hashsalt"] = "pureaccum"  # the same file for the same numbers
    figure, axis = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    styles = {
        WHOLE_BATCH: (RIVALS, 2.5, "-", "the whole batch at once"),
        HAND_STEP: (FAINT, 7, "-", "the usual loop"),
        OUR_STEPS[0]: (OURS, 2.5, "-", "pureaccum"),
    }
    for name, (line, width, style, label) in styles.items():
        sizes = sorted(of[name])
        numbers = [of[name][size] for size in sizes]
        axis.plot(sizes, numbers, style, color=line, linewidth=width, label=label, marker="o")
    sizes, largest = sorted(of[WHOLE_BATCH]), max(of[WHOLE_BATCH])
    for name in (WHOLE_BATCH, OUR_STEPS[0]):
        text = f"{digits(of[name][largest])} MB"
        axis.annotate(text, (largest, of[name][largest]), (8, 0), **BESIDE, color=styles[name][0])
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlim(sizes[0] * 0.9, largest * 1.5)
    axis.set_ylim(0, 1.08 * of[WHOLE_BATCH][largest])
    axis.set_xlabel(f"sequences in a batch, in microbatches of {sizes[0]}")
    axis.set_ylabel("MB beyond parameters and optimizer")
    size = SIZES["mini"]
    axis.set_title(
        f"A training step of a GPT: {size.depth} layers, {size.width} wide, {size.context} tokens",
        fontsize=11,
    )
    axis.grid(color=FAINT, linewidth=0.5, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def panel(axis, cell: tuple[str, str], names: Sequence[str], entries: dict) -> None:
    axis.axvline(1, color=TORCH, linewidth=1, zorder=0)
    rows = [entries.get((*cell, name)) for name in names]
    beside = {"textcoords": "offset points", "va": "center", "fontsize": 8, "zorder": 1}
    beside["bbox"] = {"color": "white", "pad": 0.5}
    for line, row in enumerate(rows):
        if row is None or row.ratio is None:
            text = "failed" if row is not None and not row.absent else "absent"
            axis.annotate(text, (1, line), (5, 0), color=FAINT, **beside)
            continue
        low, high = row.quartiles
        spread = [[max(0.0, row.ratio - low)], [max(0.0, high - row.ratio)]]
        axis.errorbar(
            row.ratio, line, xerr=spread, fmt="o", markersize=5, capsize=2.5, color=color(row.ours)
        )
        axis.annotate(f"{row.ratio:.2f}", (high, line), (5, 0), **beside)
    device, where = cell
    name, _, window = where.rpartition(", ")
    hand = next((row.amounts[1] for row in rows if row and row.amounts), None)
    axis.set_title(
        (name if device == "cpu" else f"{name}, {device}")
        + f"\n{window}"
        + ("" if hand is None else f", {HAND_STEP} {digits(hand * 1e3)} ms"),
        fontsize=9,
    )
    axis.set_xscale("log")
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="x", color=FAINT, linewidth=0.5, alpha=0.5)
    axis.spines[["top", "right"]].set_visible(False)


def color(name: str) -> str:
    if name in (*OUR_STEPS, COMPILED):
        return OURS
    return TORCH if name in (COMPILED_HAND, FUNC_ADAMW) else RIVALS


def notes(rows: Sequence[Row], facts: dict) -> str:
    """What the axis is, on what it was measured, and who is missing."""
    lines = [
        f"time / time of the {HAND_STEP}, median and quartiles of the rounds; blue is ours",
        f"{facts['cpu']}, one core, torch {facts['torch']}, {facts['date'][:10]}",
    ]
    missing: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.failure:
            key = row.ours, brief(row.failure, 60)
            missing[key] = missing.get(key, 0) + 1
    cells = len({(row.device, row.where) for row in rows})
    if missing:
        told = (f"{name} ({n} of {cells}): {text}" for (name, text), n in missing.items())
        lines.append(fill("; ".join(told), 130))
    return "\n".join(lines)
