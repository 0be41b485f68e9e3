"""The targets, and the ratios that are held against them.

Rule: written down before measuring, in one place, and for all cells of a kind: no cell is excused.
A ratio for which there is no target is published without one.
"""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median, quantiles
from typing import NamedTuple

from .contenders import ENGINES, HAND, TORCH_FUNC
from .models import Model
from .plan import FLAT, STEP, Cell, Peak
from .steps import HAND_STEP, OUR_APPLY, OUR_STEPS, SAFE, TORCH_APPLY


class Row(NamedTuple):
    """One line of the table. ``ratio`` is ours over theirs; None where ``failure`` says why."""

    device: str
    measure: str
    where: str
    ours: str
    theirs: str
    target: float | None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    amounts: tuple[float, float] | None = None
    faults: tuple[float, float] | None = None
    failure: str = ""

    @property
    def reached(self) -> bool | None:
        """None where there is nothing to reach, or nothing to measure it with."""
        if self.target is None or self.failure == "not measured here":
            return None
        return self.ratio is not None and self.ratio <= self.target


def time_target(ours: str, theirs: str, model: Model) -> float | None:
    width, rows = model.width, model.rows
    if (ours, theirs) == ("func", HAND) and width >= 512 and rows == 256:
        return 1.08
    if (ours, theirs) == ("func", TORCH_FUNC) and width == 16:
        return 0.75
    if (ours, theirs) == ("autograd", HAND) and width <= 64:
        return 1.45
    if (ours, theirs) == ("autograd", HAND) and width >= 512:
        return 1.05
    if (ours, theirs) == ("func step", HAND_STEP):
        return 1.10
    if ours in SAFE.values():
        return 1.05
    if ours == OUR_APPLY:
        return 1.15
    return None


def memory_target(ours: str, regime: str) -> float | None:
    if regime == STEP:
        return 1.05 if ours == "func step" else None
    if ours not in ENGINES:
        return None
    return 1.02 if regime == FLAT else 1.03


def opponents(ours: str) -> tuple[str, ...]:
    """Of the clock. A variant of an engine runs against the engine itself: what does it add?"""
    match ours:
        case "func":
            return HAND, TORCH_FUNC
        case "autograd" | "torch.func":
            return (HAND,)
        case "func step" | "autograd step":
            return (HAND_STEP,)
        case name if name == OUR_APPLY:
            return (TORCH_APPLY,)
        case name if name in SAFE.values():
            return tuple(step for step in OUR_STEPS if SAFE[step] == name)
        case _:
            return tuple(engine for engine in ENGINES if ours.startswith(f"{engine},"))


def time_rows(races: Iterable[tuple[Cell, dict]]) -> Iterator[Row]:
    for cell, result in races:
        seconds, faults, failures = result["seconds"], result["faults"], result["failures"]
        # Targets of time are for one core, and for memory as the system manages it.
        promised = cell.device == "cpu" and not cell.keeping
        for ours, theirs in [(x, y) for x in cell.contenders for y in opponents(x)]:
            target = time_target(ours, theirs, cell.model) if promised else None
            row = Row(cell.device, "time", str(cell), ours, theirs, target)
            if failure := failures.get(ours) or failures.get(theirs):
                yield row._replace(failure=failure)
                continue
            a, b = seconds[ours], seconds[theirs]
            ratios = [x / y for x, y in zip(a, b, strict=True)]
            low, _, high = quantiles(ratios, n=4)
            yield row._replace(
                ratio=median(ratios),
                quartiles=(low, high),
                amounts=(median(a), median(b)),
                faults=(median(faults[ours]), median(faults[theirs])),
            )


def memory_rows(numbers: Mapping[Peak, dict]) -> Iterator[Row]:
    """Everybody beside the hand-written loop; where it should be flat, 64 beside 2 microbatches."""
    for peak in numbers:
        if peak.regime == FLAT:
            other = peak._replace(model=peak.model._replace(microbatches=2))
            where = f"{peak.model.microbatches} microbatches"
            theirs = f"{peak.contender} at 2"
        else:
            theirs = HAND_STEP if peak.regime == STEP else HAND
            other = peak._replace(contender=theirs)
            where = f"{peak.regime}, {peak.model}" if peak.regime == STEP else peak.regime
        if peak == other:
            continue
        target = memory_target(peak.contender, peak.regime)
        row = Row(peak.device, "memory", where, peak.contender, theirs, target)
        if failure := numbers[peak].get("failure") or numbers[other].get("failure"):
            yield row._replace(failure=failure)
            continue
        a, b = numbers[peak]["peak"], numbers[other]["peak"]
        yield row._replace(ratio=a / b, amounts=(a, b))
