"""Of all that is planned, what one row of the tables needs: ``--row TEXT``.

Rule: a row is found by any part of ``who, where``, as the table has them, and measured in one run
with all that it stands beside.
"""

from collections.abc import Iterable, Iterator

from .contenders import HAND
from .per_sample import CONCAT, SUM
from .plan import ACTIVATIONS, FLAT, WEIGHTS, Cell, One, Peak
from .ratios import opponents
from .steps import HAND_STEP


def cells(every: Iterable[Cell], text: str) -> Iterator[Cell]:
    """The races that it is in, of those that it runs against."""
    for cell in every:
        found = [name for name in cell.contenders if text in f"{name}, {cell}"]
        names = {*found, *(other for name in found for other in opponents(name))}
        if found:
            yield cell._replace(contenders=tuple(x for x in cell.contenders if x in names))


def peaks(every: Iterable[Peak], text: str) -> list[Peak]:
    """Its memory and that of what it stands beside, whatever the number of microbatches."""
    every = list(every)
    found = [peak for peak in every if text in f"{peak.contender}, {place(peak)}"]

    def beside(other: Peak, peak: Peak) -> bool:
        names = {peak.contender, *opponents(peak.contender), HAND, HAND_STEP, CONCAT, SUM}
        alike = (other.regime, other.model.name) == (peak.regime, peak.model.name)
        return alike and other.contender in names

    return [other for other in every if any(beside(other, peak) for peak in found)]


def place(peak: Peak) -> str:
    if peak.regime == FLAT:
        return f"{peak.model.microbatches} microbatches"
    return peak.regime if peak.regime in (WEIGHTS, ACTIVATIONS) else str(peak.model)


def ones(every: Iterable[One], text: str) -> list[One]:
    """All numbers of a contender: they stand beside each other."""
    every = list(every)
    names = {one.contender for one in every if text in f"{one.contender}, {one.model}"}
    return [one for one in every if one.contender in names]
