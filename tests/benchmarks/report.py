"""The tables on the terminal, and those of the guide's page with the picture of the README.

Rule: tables go to stdout and the progress to stderr; rich draws both where it is installed, and
plain text says the same where it is not. On the page a table stands between ``<!-- NAME -->`` and
``<!-- end -->`` and has the date of its run; a target that is missed is bold, and says why. A part
that was not measured stays as it was.

``python -m tests.benchmarks --json FILE``, and then ``python -m tests.benchmarks.report FILE``.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, zip_longest
from pathlib import Path
from string import ascii_lowercase

from .models import SIZES
from .ranks import DIFFERENCE
from .rows import Row
from .table import COMPILED, HAND, PARTS


try:
    import rich.console
    import rich.markup
    import rich.progress
    import rich.table
except ImportError:
    rich = None


# On the terminal.


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
    show_table("Targets", judged)
    whole = whole_steps(rows)
    for device, measure in dict.fromkeys((row.device, row.measure) for row in whole):
        these = [row for row in whole if (row.device, row.measure) == (device, measure)]
        show_matrix(f"Whole steps, {device} {measure}, against the {HAND}", these)
    left = [row for row in rows if row.target is None and row not in whole]
    show_table("Beside them, without a target", left)
    verdicts = [row.reached for row in judged if row.reached is not None]
    print(f"{sum(verdicts)} of {len(verdicts)} targets reached")


def whole_steps(rows: Sequence[Row]) -> list[Row]:
    """Those against the hand step, of the cells where everybody runs."""
    against = [row for row in rows if row.theirs == HAND]
    cells = {(row.measure, row.where) for row in against if row.ours == COMPILED}
    return [row for row in against if (row.measure, row.where) in cells]


def show_table(title: str, rows: Sequence[Row]) -> None:
    columns = list(zip(COLUMNS, *map(texts, rows), strict=True))
    columns = [column for column in columns if any(column[1:])]
    styles = [{True: "green", False: "red"}.get(row.reached) for row in rows]
    draw(title, columns, styles)


def show_matrix(title: str, rows: Sequence[Row]) -> None:
    """A column for each cell and a line for each contender; who is missing is named below."""
    names = list(dict.fromkeys(row.ours for row in rows))
    cells = list(dict.fromkeys(row.where for row in rows))
    entry = {(row.ours, row.where): row for row in rows}
    for start in range(0, len(cells), ACROSS):
        columns = [("", HAND, *names)]
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


# On the page.


GUIDE = Path(__file__).parents[2] / "examples" / "guide"


PAGE, PICTURE = GUIDE / "benchmarks.md", GUIDE / "memory.svg"


def write(rows: Sequence[Row], facts: dict) -> None:
    """Put the tables of all parts that were measured into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name in PARTS:
        if mine := [row for row in rows if row.part == name]:
            before, begin, rest = page.partition(f"<!-- {name} -->\n")
            _, end, after = rest.partition("<!-- end -->\n")
            if not end:
                sys.exit(f"{PAGE} has no place for the table {name!r}")
            page = before + begin + table(mine, facts) + end + after
    PAGE.write_text(page, encoding="utf-8")


def table(rows: Sequence[Row], facts: dict) -> str:
    """The date, a matrix of whole steps if there are any, a line for each other row, reasons."""
    reasons: dict[str, str] = {}
    machine = f"{facts['cpu']}, torch {facts['torch'].partition('+')[0]}, Python {facts['python']}"
    text = f"*{facts['date'][:10]}, {machine}: `make bench BENCH='--only {rows[0].part}'`.*\n\n"
    whole = [row for row in whole_steps(rows) if row.measure == "time"]
    if whole:
        text += matrix(whole, reasons) + "\n"
    left = [row for row in rows if row not in whole and not row.absent]
    order = list(dict.fromkeys((row.ours, row.theirs, row.measure) for row in left))
    left.sort(key=lambda row: order.index((row.ours, row.theirs, row.measure)))
    text += "| ours | beside | where | measure | ratio | to reach |\n|---|---|---|---|---|---|\n"
    for row in left:
        target = "" if row.target is None else f"≤ {decimal(row.target, 2)}"
        cells = row.ours, row.theirs, row.where, row.measure, number(row, reasons), target
        text += f"| {' | '.join(cells)} |\n"
    if reasons:
        text += "\nMissed, and why:\n\n"
        text += "".join(f"- **{letter}** {reason}\n" for reason, letter in reasons.items())
    return text


def matrix(rows: Sequence[Row], reasons: dict[str, str]) -> str:
    """A column for each model, a line for each contender: time beside the loop by hand."""
    names, cells = (
        list(dict.fromkeys(x.ours for x in rows)),
        list(dict.fromkeys(x.where for x in rows)),
    )
    of = {(row.ours, row.where): row for row in rows}
    lines = [["time beside the " + HAND, *cells], ["---"] * (1 + len(cells))]
    for name in names:
        found = [of.get((name, cell)) for cell in cells]
        lines.append([name, *("" if row is None else goal(row, reasons) for row in found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def goal(row: Row, reasons: dict[str, str]) -> str:
    """With what there was to reach."""
    target = "" if row.target is None else f" ≤ {decimal(row.target, 2)}"
    return number(row, reasons) + target


def number(row: Row, reasons: dict[str, str]) -> str:
    if row.ratio is None:
        return "–" if row.absent else f"failed: {brief(row.failure, 60)}"
    text = amount(row.ratio, row.target if row.reached is False else None)
    text += "" if row.measure == DIFFERENCE else "×"
    if row.reached is False:
        why = row.why or "no reason is known."
        letter = reasons.setdefault(why, ascii_lowercase[len(reasons)])
        text = f"**{text}** ({letter})"
    return text if row.quartiles is None else f"{text} [{'–'.join(map(amount, row.quartiles))}]"


def amount(ratio: float, missed: float | None = None) -> str:
    """In two places, or in as many as say something, and that what is missed is missed."""
    places = 2 if ratio >= 0.1 else 3
    while missed is not None and float(f"{ratio:.{places}f}") <= missed:
        places += 1
    return decimal(ratio, places)


# The picture.


BLUE, ORANGE, TORCH, FAINT = "#0b62a4", "#c8641b", "#555555", "#bbbbbb"


BESIDE = {"textcoords": "offset points", "va": "center", "fontsize": 9}


def draw_growth(rows: Sequence[Row], path: Path) -> None:
    """The picture of the README: the peak memory of a step, and how many rows its batch has."""
    import matplotlib
    from matplotlib import pyplot

    of: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.theirs == "the whole batch" and row.amounts:
            batch = row.where.rpartition(" ")[2]
            ours, whole = row.amounts
            of.setdefault(row.ours, {})[int(batch)] = ours / 1e6
            of.setdefault("the whole batch", {})[int(batch)] = whole / 1e6
    if not of:
        return
    smallest = min(of["the whole batch"])
    of[HAND][smallest] = of["the whole batch"][smallest]  # they are the same
    matplotlib.rcParams["svg.hashsalt"] = "pureaccum"  # the same file for the same numbers
    figure, axis = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
    styles = {
        "the whole batch": (ORANGE, 2.5, "-", "the whole batch at once"),
        HAND: (FAINT, 7, "-", "the usual loop"),
        "default step": (BLUE, 2.5, "-", "pureaccum"),
    }
    for name, (line, width, style, label) in styles.items():
        sizes = sorted(of[name])
        numbers = [of[name][size] for size in sizes]
        axis.plot(sizes, numbers, style, color=line, linewidth=width, label=label, marker="o")
    sizes, largest = sorted(of["the whole batch"]), max(of["the whole batch"])
    for name in ("the whole batch", "default step"):
        text = f"{digits(of[name][largest])} MB"
        axis.annotate(text, (largest, of[name][largest]), (8, 0), **BESIDE, color=styles[name][0])
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlim(sizes[0] * 0.9, largest * 1.5)
    axis.set_ylim(0, 1.08 * of["the whole batch"][largest])
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


if __name__ == "__main__":
    run = json.loads(Path(sys.argv[1]).read_text())
    rows = [
        Row(**{name: x for name, x in row.items() if name in Row._fields}) for row in run["rows"]
    ]
    write(rows, run["facts"])
    draw_growth(rows, PICTURE)
