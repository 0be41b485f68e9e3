"""What the demo shows: a line for each run while it trains, and a table at the end.

On a terminal the lines move; anywhere else they are plain text, printed now and then. rich leaves
colours out where ``NO_COLOR`` is set.
"""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from ._outcomes import Outcome
from ._race import ROWS, Progress


WIDTH = 88
OFTEN = 20  # steps between the lines of plain text
WIDTHS = {"step": 4, "loss": 8, "scale": 11, "skipped": 8, "rows/s": 8}


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def watch(runs: dict[str, Iterator[Progress]], steps: int) -> dict[str, Progress]:
    """Take a step of each run in turn until all have applied so many.

    Args:
        runs: By name; a run stands still when it is there.
        steps: Applied ones.

    Returns:
        Where each run stopped.
    """
    console = _console()
    console.print(
        f"A network of 9,610 parameters learns {ROWS:,} handwritten digits, by the full batch and "
        "by ragged microbatches of 1 to 200 rows. A step that overflows is skipped, and taken "
        "again.\n"
    )
    at = {name: next(run) for name, run in runs.items()}
    columns = [TextColumn("{task.description:17}"), BarColumn(bar_width=12)]
    columns += [TextColumn("{task.fields[line]}")]
    live = console.is_terminal and not console.is_dumb_terminal
    heading = " ".join(name.rjust(width) for name, width in WIDTHS.items())
    console.print(" " * (31 if live else 18) + heading)
    with Bars(*columns, console=console, disable=not live) as bars:
        tasks = {name: bars.add_task(name, total=steps, line="") for name in runs}
        told = 0
        while any(len(progress.losses) < steps for progress in at.values()):
            for name, run in runs.items():
                if len(at[name].losses) < steps:
                    at[name] = next(run)
                done = len(at[name].losses)
                bars.update(tasks[name], completed=done, line=_line(at[name]))
            slowest = min(len(progress.losses) for progress in at.values())
            if not live and slowest // OFTEN > told:
                told = slowest // OFTEN
                for name, progress in at.items():
                    console.print(f"{name:17} {_line(progress)}")
                console.print()
    return at


def _line(progress: Progress) -> str:
    done = len(progress.losses)
    loss = f"{progress.losses[-1]:.4f}" if done else "-"
    cells = (done, loss, _scale(progress), progress.attempts - done, f"{progress.rate:,.0f}")
    return " ".join(
        str(cell).rjust(width) for cell, width in zip(cells, WIDTHS.values(), strict=True)
    )


def _scale(progress: Progress) -> str:
    return f"{progress.scale:,.0f}" if progress.scale != 1 else "-"


def conclude(outcomes: Sequence[Outcome], unequal: int) -> None:
    """The table, and what it says.

    Args:
        outcomes: Of all runs.
        unequal: How many numbers of the gradient differ where arithmetic is exact.
    """
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for it in outcomes:
        table.add_column(it.name.replace(", ", "\n"), justify="right")

    def row(name: str, cell: Callable[[Outcome], str]) -> None:
        table.add_row(name, *(cell(it) for it in outcomes))

    row("loss at last", lambda it: f"{it.at_last.losses[-1]:.5f}")
    row("right, of unseen digits", lambda it: f"{it.accuracy:.1%}")
    row("steps skipped", lambda it: str(it.at_last.attempts - len(it.at_last.losses)))
    row("loss scale at last", lambda it: _scale(it.at_last))
    row("peak memory", lambda it: f"{it.at_last.peak / 1e6:.2f} MB")
    row("time", lambda it: f"{it.at_last.seconds:.1f} s")
    row("last parameters, off by", lambda it: f"{it.apart:.0e}" if it.distance else "-")
    row("gradient, last bits off", _bits)
    row("gradient, error / bound", _bound)
    console = _console()
    console.print()
    console.print(table)
    console.print(
        "\nOff: from the full batch in the same dtype; of gradients, on the parameters that the "
        "runs begin and end with. An error above its bound leaves less than half of the digits "
        "right. On whole numbers, where arithmetic is exact, the gradient of ragged microbatches "
        f"differs from the full batch's in {unequal} of 9,472 numbers."
    )


def _bits(it: Outcome) -> str:
    return "-" if it.distance is None else f"{it.distance.bits} of {11 if it.half else 24}"


def _bound(it: Outcome) -> str:
    if it.distance is None:
        return "-"
    error = it.distance.bound
    color, amount = ("green", f"{error:.0e}") if error < 1 else ("red", f"{error:,.0f}")
    return f"[{color}]{amount}[/]"
