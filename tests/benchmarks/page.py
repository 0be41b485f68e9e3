"""The page of benchmarks and the picture of the README, from one run.

``python -m tests.benchmarks --json FILE``, and then ``python -m tests.benchmarks.page FILE``.

Rule: a table stands between ``<!-- NAME -->`` and ``<!-- end -->`` and has the date of its run; a
target that is missed is bold, and says why. A part that was not measured stays as it was.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase

from . import plot, report
from .curvature import PRODUCTS
from .gradcache import PAIRS, PAIRS_STEPS
from .head import HEADS
from .nests import NESTS
from .norms import NORMS, VIEWS
from .per_sample import SAMPLES
from .primitive import LOOPS
from .programs import OUR_LBFGS, PROGRAMS
from .ranks import OURS
from .ranks_of_pairs import APART, DIFFERENCE
from .ratios import WHOLE_BATCH, Row
from .reasons import REASONS
from .rematerialised import CHAINS
from .rivals import RIVALS
from .saving import SAVE
from .steps import HAND_STEP, STEPS


GUIDE = Path(__file__).parents[2] / "examples" / "guide"
PAGE, PICTURE = GUIDE / "benchmarks.md", GUIDE / "memory.svg"

# Of each part: how it is asked for alone, and whose rows are in it; the first that fits has a row.
PARTS = {
    "batch": ("batch", ()),
    "curvature": ("curvature", (*PRODUCTS, OUR_LBFGS)),
    "derivatives": ("microbatch", tuple(NESTS)),
    "coupled": ("microbatch", (*NORMS, *VIEWS, *PAIRS, *PAIRS_STEPS, *HEADS, *CHAINS, *LOOPS)),
    "samples": ("samples", tuple(SAMPLES)),
    "programs": ("programs", tuple(PROGRAMS)),
    "ranks": ("ranks", (OURS, APART)),
    "checkpoint": ("checkpoint", (SAVE,)),
    "steps": ("step", (*STEPS, *RIVALS)),
    "gradients": ("time", ()),
}


def part(row: Row) -> str:
    if row.theirs == WHOLE_BATCH:
        return "batch"
    return next((name for name, (_, who) in PARTS.items() if row.ours in who), "gradients")


def write(rows: Sequence[Row], facts: dict) -> None:
    """Put the tables of all parts that were measured into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, (only, _) in PARTS.items():
        if mine := [row for row in rows if part(row) == name]:
            before, begin, rest = page.partition(f"<!-- {name} -->\n")
            _, end, after = rest.partition("<!-- end -->\n")
            if not end:
                sys.exit(f"{PAGE} has no place for the table {name!r}")
            page = before + begin + table(mine, only, facts) + end + after
    PAGE.write_text(page, encoding="utf-8")


def table(rows: Sequence[Row], only: str, facts: dict) -> str:
    """The date, a matrix of whole steps if there are any, a line for each other row, reasons."""
    reasons: dict[str, str] = {}
    machine = f"{facts['cpu']}, torch {facts['torch'].partition('+')[0]}, Python {facts['python']}"
    text = f"*{facts['date'][:10]}, {machine}: `make bench BENCH='--only {only}'`.*\n\n"
    whole = [row for row in report.whole_steps(rows) if row.measure == "time"]
    if whole:
        text += matrix(whole, reasons) + "\n"
    left = [row for row in rows if row not in whole and not row.absent]
    order = list(dict.fromkeys((row.ours, row.theirs, row.measure) for row in left))
    left.sort(key=lambda row: order.index((row.ours, row.theirs, row.measure)))
    text += "| ours | beside | where | measure | ratio | to reach |\n|---|---|---|---|---|---|\n"
    for row in left:
        target = "" if row.target is None else f"≤ {report.decimal(row.target, 2)}"
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
    lines = [["time beside the " + HAND_STEP, *cells], ["---"] * (1 + len(cells))]
    for name in names:
        found = [of.get((name, cell)) for cell in cells]
        lines.append([name, *("" if row is None else goal(row, reasons) for row in found)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def goal(row: Row, reasons: dict[str, str]) -> str:
    """With what there was to reach."""
    target = "" if row.target is None else f" ≤ {report.decimal(row.target, 2)}"
    return number(row, reasons) + target


def number(row: Row, reasons: dict[str, str]) -> str:
    if row.ratio is None:
        return "–" if row.absent else f"failed: {report.brief(row.failure, 60)}"
    text = amount(row.ratio, row.target if row.reached is False else None)
    text += "" if row.measure == DIFFERENCE else "×"
    if row.reached is False:
        why = reason(row)
        letter = reasons.setdefault(why, ascii_lowercase[len(reasons)])
        text = f"**{text}** ({letter})"
    return text if row.quartiles is None else f"{text} [{'–'.join(map(amount, row.quartiles))}]"


def amount(ratio: float, missed: float | None = None) -> str:
    """In two places, or in as many as say something, and that what is missed is missed."""
    places = 2 if ratio >= 0.1 else 3
    while missed is not None and float(f"{ratio:.{places}f}") <= missed:
        places += 1
    return report.decimal(ratio, places)


def reason(row: Row) -> str:
    for key in ((row.ours, row.theirs, row.measure), (row.ours, row.theirs)):
        if key in REASONS:
            return REASONS[key]
    print(f"--page: {row.ours} / {row.theirs}, {row.measure}, has no reason", file=sys.stderr)
    return "no reason is known."


if __name__ == "__main__":
    run = json.loads(Path(sys.argv[1]).read_text())
    names = Row._fields
    rows = [Row(**{name: x for name, x in row.items() if name in names}) for row in run["rows"]]
    write(rows, run["facts"])
    plot.draw_growth(rows, PICTURE)
