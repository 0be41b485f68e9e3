"""The ratios that are published, each beside its target.

Rule: ours over theirs within one run, and a line for each pair that was to be measured: where there
is no number, it says why.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median, quantiles
from typing import NamedTuple

from . import targets
from .contenders import ENGINES, HAND, TORCH_FUNC
from .curvature import BESIDE, PRODUCTS
from .gradcache import (
    COMPILED_CUT,
    COMPILED_WHOLE,
    CUT_STEP,
    FULL_FUNC,
    FULL_PAIRS,
    GRADCACHE,
    PAIRS,
    PAIRS_STEPS,
    WHOLE_STEP,
)
from .head import HAND_HEAD, HEADS, WHOLE_FUNC, WHOLE_HEAD
from .nests import NESTS, REMATTED, WHOLE
from .norms import CUT_VIEWS, FULL, FULL_VIEWS, NORMS, VIEWS
from .per_sample import (
    AT_ONCE,
    CLIPPED,
    COMPILED_CLIPPED,
    CONCAT,
    CUT_GHOST,
    GHOST,
    HOOKS,
    JACOBIANS,
    KERNEL,
    ONE_BY_ONE,
    ONE_GRADIENT,
    SAMPLES,
    SUM,
)
from .plan import COUPLED, FIVE, FLAT, GROWTH, SINGLE, STEP, Cell, One, Peak, at_once
from .primitive import LOOPS, by_hand
from .programs import (
    ENSEMBLING,
    HIGHER,
    LBFGS,
    MNIST,
    OUR_ENSEMBLING,
    OUR_LBFGS,
    PROGRAMS,
    THROUGH,
    THROUGH_CUT,
    TRAIN_PY,
)
from .ranks import COUNTED, DDP, OURS, Kind
from .ranks_of_pairs import ALONE, APART, DIFFERENCE, PAIRS_OF_RANKS
from .rematerialised import CHAINS, CHECKPOINT, WITHOUT
from .rivals import ACCELERATE, JAX, RIVALS
from .saving import MEGABYTES, SAFETENSORS, SAVE
from .steps import (
    COMPILED,
    COMPILED_HAND,
    HAND_STEP,
    OUR_APPLY,
    OUR_STEPS,
    SAFE,
    STEPS,
    TORCH_APPLY,
)


# Whose time is of all that a call does, and not of a microbatch.
AT_ONE_GO = STEPS | RIVALS | NESTS | NORMS | PAIRS | HEADS | CHAINS | SAMPLES | PROGRAMS | PRODUCTS
AT_ONE_GO |= VIEWS | LOOPS


WHOLE_BATCH = "the whole batch"


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
    def absent(self) -> bool:
        return self.failure.startswith("absent: ")

    @property
    def reached(self) -> bool | None:
        """None where there is nothing to reach, or nothing to measure it with."""
        if self.target is None or self.absent:
            return None
        return self.ratio is not None and self.ratio <= self.target


def opponents(ours: str) -> tuple[str, ...]:
    """A variant of an engine runs against the engine itself: what does it add?"""
    if ours in NORMS:
        return () if ours == FULL else (FULL,)
    if ours in VIEWS:
        return (FULL_VIEWS,) if ours == CUT_VIEWS else ()
    if ours in PAIRS:
        of = {FULL_PAIRS: (), FULL_FUNC: (), GRADCACHE: (FULL_PAIRS,)}
        return of.get(ours, (GRADCACHE, FULL_PAIRS, FULL_FUNC))
    if ours in PAIRS_STEPS:
        of = {WHOLE_STEP: (), COMPILED_CUT: (WHOLE_STEP, CUT_STEP, COMPILED_WHOLE)}
        return of.get(ours, (WHOLE_STEP,))
    if ours in HEADS:
        of = {WHOLE_HEAD: (), WHOLE_FUNC: (), HAND_HEAD: (WHOLE_HEAD,)}
        return of.get(ours, (WHOLE_HEAD, HAND_HEAD))
    if ours in NESTS:
        nest, _, maker = ours.partition(", ")
        return (
            () if maker == WHOLE else tuple(f"{nest}, {x}" for x in (WHOLE, REMATTED) if x != maker)
        )
    if ours in PRODUCTS:
        return BESIDE.get(ours, ())
    if ours in LOOPS:
        asked, _, maker = ours.rpartition(", ")
        return () if maker == "the loop" else (by_hand(asked),)
    if ours in CHAINS:
        return {WITHOUT: (), CHECKPOINT: (WITHOUT,)}.get(ours, (CHECKPOINT, WITHOUT))
    if ours in SAMPLES:
        of = {
            CLIPPED: (HOOKS, GHOST, CUT_GHOST),
            COMPILED_CLIPPED: (HOOKS, GHOST),
            AT_ONCE: (ONE_BY_ONE,),
            KERNEL: (JACOBIANS,),
        }
        return of.get(ours, (HOOKS,) if ours == GHOST else ())
    if ours in PROGRAMS:
        source = {
            OUR_ENSEMBLING: ENSEMBLING,
            THROUGH: HIGHER,
            THROUGH_CUT: HIGHER,
            OUR_LBFGS: LBFGS,
        }
        theirs = source.get(ours, TRAIN_PY if ours.startswith("train.py") else MNIST)
        return () if ours in (TRAIN_PY, MNIST, ENSEMBLING, HIGHER, LBFGS) else (theirs,)
    if ours == "func":
        return HAND, TORCH_FUNC
    if ours in ("autograd", TORCH_FUNC):
        return (HAND,)
    if ours == OUR_APPLY:
        return (TORCH_APPLY,)
    if ours in SAFE.values():
        return tuple(step for step in OUR_STEPS if SAFE[step] == ours)
    if ours == COMPILED:
        return HAND_STEP, COMPILED_HAND, JAX
    if ours == OUR_STEPS[0]:
        return HAND_STEP, ACCELERATE
    if ours in (COMPILED_HAND, *OUR_STEPS, *RIVALS):
        return (HAND_STEP,)
    return tuple(engine for engine in ENGINES if ours.startswith(f"{engine},"))


def time_rows(races: Iterable[tuple[Cell, dict]]) -> Iterator[Row]:
    for cell, result in races:
        seconds, faults, failures = result["seconds"], result["faults"], result["failures"]
        names = cell.contenders
        for ours, theirs in [(x, y) for x in names for y in opponents(x) if y in names]:
            # Those of time are for memory as the system manages it.
            target = targets.time_target(ours, theirs, cell.model, cell.device)
            target = None if cell.keeping else target
            if target is None and failures.get(theirs, "").startswith("absent: "):
                continue  # the absent one has a line of its own
            row = Row(cell.device, "time", str(cell), ours, theirs, target)
            if failure := failures.get(ours) or failures.get(theirs):
                yield row._replace(failure=failure)
                continue
            k = cell.model.microbatches if ours in AT_ONE_GO else 1
            a, b = seconds[ours], seconds[theirs]
            ratios = [x / y for x, y in zip(a, b, strict=True)]
            low, _, high = quantiles(ratios, n=4)
            yield row._replace(
                ratio=median(ratios),
                quartiles=(low, high),
                amounts=(k * median(a), k * median(b)),
                faults=(k * median(faults[ours]), k * median(faults[theirs])),
            )


def mean_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The geometric mean over the five cells, where all of them were run."""
    of = {
        row.where: row
        for row in rows
        if (row.device, row.measure) == ("cpu", "time")
        and (row.ours, row.theirs) == (COMPILED, COMPILED_HAND)
    }
    five = [of[str(model)] for model in FIVE if str(model) in of]
    if len(five) < len(FIVE):
        return
    row = five[0]._replace(where="geometric mean of the five", target=targets.AGAINST_COMPILED_MEAN)
    row = row._replace(ratio=None, quartiles=None, amounts=None, faults=None)
    failure = next((x.failure for x in five if x.failure), "")
    ratio = None if failure else geometric_mean(x.ratio for x in five)
    yield row._replace(ratio=ratio, failure=failure)


def memory_rows(numbers: Mapping[Peak, dict]) -> Iterator[Row]:
    """Everybody beside the hand-written loop; where it should be flat, 64 beside 2 microbatches."""
    for peak in numbers:
        if peak.regime == COUPLED:
            yield from coupled_rows(peak, numbers)
            continue
        if peak.regime == SINGLE:
            yield from sample_rows(peak, numbers)
            continue
        if peak.regime == GROWTH:
            yield from growth_rows(peak, numbers)
            continue
        if peak.regime == FLAT:
            other = peak._replace(model=peak.model._replace(microbatches=2))
            where = f"{peak.model.microbatches} microbatches"
            theirs = f"{peak.contender} at 2"
        else:
            theirs = HAND_STEP if peak.regime == STEP else HAND
            other = peak._replace(contender=theirs)
            where = str(peak.model) if peak.regime == STEP else peak.regime
        if peak == other:
            continue
        target = targets.memory_target(peak.contender, peak.regime, peak.model)
        row = Row(peak.device, "memory", where, peak.contender, theirs, target)
        yield compared(row, numbers[peak], numbers[other], "peak")


def coupled_rows(peak: Peak, numbers: Mapping[Peak, dict]) -> Iterator[Row]:
    """Beside the same opponents as on the clock."""
    for theirs in opponents(peak.contender):
        other = peak._replace(contender=theirs)
        if other in numbers:
            target = targets.coupled_memory_target(peak.contender, theirs, peak.model)
            row = Row(peak.device, "memory", str(peak.model), peak.contender, theirs, target)
            yield compared(row, numbers[peak], numbers[other], "peak")


def growth_rows(peak: Peak, numbers: Mapping[Peak, dict]) -> Iterator[Row]:
    """Everybody beside the loop that takes the batch at once."""
    batch = peak.model.rows * peak.model.microbatches
    whole = peak._replace(model=at_once(peak.model), contender=HAND_STEP)
    if peak != whole:
        where = f"{peak.model.name}, a batch of {batch}"
        row = Row(peak.device, "memory", where, peak.contender, WHOLE_BATCH, None)
        yield compared(row, numbers[peak], numbers[whole], "peak")


def sample_rows(peak: Peak, numbers: Mapping[Peak, dict]) -> Iterator[Row]:
    """Beside all gradients, or in gradients: a sum is as large as one of them."""
    theirs, size = CONCAT, numbers.get(peak._replace(contender=CONCAT))
    if size is None:
        one = numbers[peak._replace(contender=SUM)]
        theirs, size = ONE_GRADIENT, one if "failure" in one else {"peak": one["result"]}
    if theirs != peak.contender:
        target = targets.sample_memory_target(peak.contender, theirs)
        row = Row(peak.device, "memory", str(peak.model), peak.contender, theirs, target)
        yield compared(row, numbers[peak], size, "peak")


def first_call_rows(numbers: Mapping[One, dict]) -> Iterator[Row]:
    """Many microbatches beside few."""
    few = min(one.model.microbatches for one in numbers) if numbers else 0
    for one in numbers:
        if one.model.microbatches == few:
            continue
        target = targets.FIRST_CALL if one.contender == COMPILED else None
        where, theirs = str(one.model), f"{one.contender} at {few}"
        row = Row(one.device, "first call", where, one.contender, theirs, target)
        other = one._replace(model=one.model._replace(microbatches=few))
        yield compared(row, numbers[one], numbers[other], "seconds")


def saving_rows(numbers: Mapping[str, dict]) -> Iterator[Row]:
    """Device by device; the ratio of the medians, since disks have moods."""
    for device, result in numbers.items():
        where = f"{MEGABYTES} MB of float32"
        row = Row(device, "saving", where, SAVE, SAFETENSORS, targets.SAVING)
        if failure := result.get("failure"):
            yield row._replace(failure=failure)
            continue
        a, b = (result["seconds"][name] for name in (SAVE, SAFETENSORS))
        low, _, high = quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
        ratio = median(a) / median(b)
        yield row._replace(ratio=ratio, quartiles=(low, high), amounts=(median(a), median(b)))


def rank_rows(numbers: Mapping[Kind, dict]) -> Iterator[Row]:
    """What two ranks say in a step, and how long it takes."""
    for kind, result in numbers.items():
        for measure in (*COUNTED, "seconds"):
            target = targets.RANKS.get(measure)
            name = "time" if measure == "seconds" else measure
            row = Row("cpu", name, str(kind), OURS, DDP, target)
            if failure := result.get("failure"):
                yield row._replace(failure=failure)
            else:
                yield compared(row, result[OURS], result[DDP], measure)


def pairs_of_ranks_rows(result: dict) -> Iterator[Row]:
    """What a rank holds for a loss of all pairs, and how far its gradients are off."""
    row = Row("cpu", "memory", PAIRS_OF_RANKS, APART, ALONE, targets.PAIRS_OF_RANKS_MEMORY)
    off = row._replace(measure=DIFFERENCE, target=targets.PAIRS_OF_RANKS_DIFFERENCE)
    if failure := result.get("failure"):
        yield from (row._replace(failure=failure), off._replace(failure=failure))
    else:
        yield compared(row, result[APART], result[ALONE], "peak")
        yield off._replace(ratio=result[DIFFERENCE])


def compared(row: Row, ours: dict, theirs: dict, what: str) -> Row:
    if failure := ours.get("failure") or theirs.get("failure"):
        return row._replace(failure=failure)
    a, b = ours[what], theirs[what]
    return row._replace(ratio=a / b, amounts=(a, b))


def sync_rows(numbers: Mapping[One, dict]) -> Iterator[Row]:
    """A number and no ratio: none, or why not."""
    for one, result in numbers.items():
        target = targets.SYNCS if one.contender in (*OUR_STEPS, COMPILED) else None
        row = Row(one.device, "syncs", str(one.model), one.contender, "", target)
        yield row._replace(ratio=result.get("syncs"), failure=result.get("failure", ""))
