"""The tables, the progress, and the file of raw numbers.

Rule: tables go to stdout and the progress to stderr; rich draws both where it is installed, and
plain text says the same where it is not.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from .targets import Row


try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:
    rich = None

COLUMNS = (
    "",
    "where",
    "ours",
    "against",
    "ratio",
    "quartiles",
    "target",
    "reached",
    "amounts",
    "page faults",
)
UNITS = {"time": (1e3, "ms"), "memory": (1e-6, "MB")}


def texts(row: Row) -> tuple[str, ...]:
    """One line, column by column."""
    scale, unit = UNITS[row.measure]
    return (
        f"{row.device} {row.measure}",
        row.where,
        row.ours,
        row.theirs,
        "" if row.ratio is None else f"{row.ratio:.3f}",
        "" if row.quartiles is None else "{:.2f} – {:.2f}".format(*row.quartiles),
        "" if row.target is None else f"≤ {row.target:.2f}",
        {None: "", True: "yes", False: "NO"}[row.reached],
        row.failure[:40]
        if row.amounts is None
        else " / ".join(f"{amount * scale:.3g}" for amount in row.amounts) + f" {unit}",
        "" if row.faults is None or max(row.faults) < 1 else "{:.0f} / {:.0f}".format(*row.faults),
    )


def show(rows: Sequence[Row]) -> None:
    """The ratios that have a target, promise by promise; then those that have none."""
    judged = sorted(
        (row for row in rows if row.target is not None),
        key=lambda row: (row.device, row.measure, row.ours, row.theirs),
    )
    draw("Targets", judged)
    draw("Beside them, without a target", [row for row in rows if row.target is None])
    verdicts = [row.reached for row in judged if row.reached is not None]
    print(f"{sum(verdicts)} of {len(verdicts)} targets reached")


def draw(title: str, rows: Sequence[Row]) -> None:
    if not rows:
        return
    columns = list(zip(COLUMNS, *map(texts, rows), strict=True))
    columns = [column for column in columns if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    names, *lines = zip(*columns, strict=True)
    if rich is None:
        print(title)
        for line in (names, ["-" * width for width in widths], *lines):
            print("  ".join(map(str.ljust, line, widths)).rstrip())
        print()
        return
    table = rich.table.Table(*names, title=title, title_justify="left")
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*line, style={True: "green", False: "red"}.get(row.reached))
    # A file has no width of its own: there the table takes what it needs.
    width = None if sys.stdout.isatty() else sum(widths) + 3 * len(widths) + 1
    rich.console.Console(width=width).print(table)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields ``done(text)``, to be called once for each finished measurement."""
    if rich is not None and sys.stderr.isatty():
        console = rich.console.Console(stderr=True)
        with rich.progress.Progress(console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda text: bar.update(task, advance=1, description=text)
        return
    number = count(1)
    yield lambda text: print(f"[{next(number)}/{total}] {text}", file=sys.stderr, flush=True)


def save(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
