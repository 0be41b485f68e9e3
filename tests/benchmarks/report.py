"""The tables, the progress, and the file of raw numbers.

Rule: tables go to stdout and the progress to stderr; rich draws both where it is installed, and
plain text says the same where it is not.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, zip_longest
from pathlib import Path

from .ratios import Row
from .steps import COMPILED, HAND_STEP


try:
    import rich.console
    import rich.markup
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
UNITS = {
    "time": (1e3, "ms"),
    "memory": (1e-6, "MB"),
    "first call": (1, "s"),
    "syncs": (1, ""),
    "saving": (1e3, "ms"),
    "difference": (1, ""),
    "collectives": (1, ""),
    "bytes to them": (1e-3, "KB"),
    "bytes on the wire": (1e-3, "KB"),
}
ACROSS = 7  # columns of cells side by side


def texts(row: Row) -> tuple[str, ...]:
    """One line, column by column."""
    scale, unit = UNITS[row.measure]
    return (
        f"{row.device} {row.measure}",
        row.where,
        row.ours,
        row.theirs,
        "" if row.ratio is None else decimal(row.ratio, 3),
        "" if row.quartiles is None else "{:.2f} – {:.2f}".format(*row.quartiles),
        "" if row.target is None else f"≤ {decimal(row.target, 2)}",
        {None: "", True: "yes", False: "NO"}[row.reached],
        brief(row.failure, 40)
        if row.amounts is None
        else " / ".join(digits(amount * scale) for amount in row.amounts) + f" {unit}",
        "" if row.faults is None or max(row.faults) < 1 else "{:.0f} / {:.0f}".format(*row.faults),
    )


def brief(text: str, most: int) -> str:
    return text.partition("\n")[0][:most]


def decimal(x: float, places: int) -> str:
    return f"{x:.1e}" if 0 < x < 10**-places else f"{x:.{places}f}"


def digits(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def show(rows: Sequence[Row]) -> None:
    """The ratios that have a target, promise by promise; whole steps; then what is left."""
    judged = sorted(
        (row for row in rows if row.target is not None),
        key=lambda row: (row.device, row.measure, row.ours, row.theirs),
    )
    table("Targets", judged)
    whole = whole_steps(rows)
    for device, measure in dict.fromkeys((row.device, row.measure) for row in whole):
        these = [row for row in whole if (row.device, row.measure) == (device, measure)]
        matrix(f"Whole steps, {device} {measure}, against the {HAND_STEP}", these)
    left = [row for row in rows if row.target is None and row not in whole]
    table("Beside them, without a target", left)
    verdicts = [row.reached for row in judged if row.reached is not None]
    print(f"{sum(verdicts)} of {len(verdicts)} targets reached")


def whole_steps(rows: Sequence[Row]) -> list[Row]:
    """Those against the hand step, of the cells where everybody runs."""
    against = [row for row in rows if row.theirs == HAND_STEP]
    cells = {(row.measure, row.where) for row in against if row.ours == COMPILED}
    return [row for row in against if (row.measure, row.where) in cells]


def table(title: str, rows: Sequence[Row]) -> None:
    columns = list(zip(COLUMNS, *map(texts, rows), strict=True))
    columns = [column for column in columns if any(column[1:])]
    styles = [{True: "green", False: "red"}.get(row.reached) for row in rows]
    draw(title, columns, styles)


def matrix(title: str, rows: Sequence[Row]) -> None:
    """A column for each cell and a line for each contender; who is missing is named below."""
    names = list(dict.fromkeys(row.ours for row in rows))
    cells = list(dict.fromkeys(row.where for row in rows))
    entry = {(row.ours, row.where): row for row in rows}
    for start in range(0, len(cells), ACROSS):
        columns = [("", HAND_STEP, *names)]
        for where in cells[start : start + ACROSS]:
            column = [entry.get((name, where)) for name in names]
            amount = next((base(row) for row in column if row and row.amounts), "")
            columns.append((where.replace(", ", "\n"), amount, *map(short, column)))
        draw(title, columns, [None] * (1 + len(names)))
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.failure:
            missing.setdefault((row.ours, brief(row.failure, 120)), []).append(row.where)
    for (name, failure), where in missing.items():
        print(f"{name}, {len(where)} of {len(cells)}: {failure}")
    print()


def base(row: Row) -> str:
    scale, unit = UNITS[row.measure]
    return f"{digits(row.amounts[1] * scale)} {unit}"


def short(row: Row | None) -> str:
    if row is None:
        return ""
    if row.ratio is None:
        return "absent" if row.absent else "failed"
    return f"{row.ratio:.2f}" + (" [{:.2f}–{:.2f}]".format(*row.quartiles) if row.quartiles else "")


def draw(title: str, columns: Sequence[Sequence[str]], styles: Sequence[str | None]) -> None:
    """Columns of texts, the first of each its name, which may have several lines."""
    if not styles:
        return
    heads = [column[0].split("\n") for column in columns]
    widths = [
        max(map(len, (*head, *column[1:]))) for head, column in zip(heads, columns, strict=True)
    ]
    lines = list(zip(*(column[1:] for column in columns), strict=True))
    if rich is None:
        print(title)
        rules = ["-" * width for width in widths]
        for line in (*zip_longest(*heads, fillvalue=""), rules, *lines):
            print("  ".join(map(str.ljust, line, widths)).rstrip())
        print()
        return
    drawn = rich.table.Table(*("\n".join(h) for h in heads), title=title, title_justify="left")
    for style, line in zip(styles, lines, strict=True):
        drawn.add_row(*map(rich.markup.escape, line), style=style)
    # A file has no width of its own: there the table takes what it needs.
    width = max(len(title), sum(widths) + 3 * len(widths) + 1)
    width = None if sys.stdout.isatty() else width
    rich.console.Console(width=width).print(drawn)


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
