"""How far what is accumulated, cut in some way, lies from the full batch.

With ``c_k`` what microbatch ``k`` adds to a leaf of the result, the difference is rounding if

    ‖Σ c_k − full‖ ≤ √u₆₄ Σ ‖c_k‖ + √(u₆₄ / u₃₂) ‖full₃₂ − full‖

An honest error shrinks with the unit of the dtype, a real one does not, and the bound stands in
the geometric middle. The first term is about the sum. The second is about the loss itself: what
it loses in float32 shows how ill-conditioned it is. (A gradient that is zero on paper, such as
that of a bias below a softmax, is nothing but rounding and has no digit right.)
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..._base import add, all_finite, tree_leaves
from ..._core import AccumState, Reduction, divisor, mean_value, plain_sum
from .kept import Kept
from .subject import Parts, Rows, Subject


def natively(
    run: Callable[[Parts], list[Tensor]],
    alone: Callable[[], list[Tensor]],
    full: list[Tensor],
    tried: Sequence[Parts],
) -> tuple[list[float], int | None]:
    """Errors of what is accumulated, relative to the full batch's own; a leaf that is not finite.

    Args:
        run: Accumulates in the loss's own dtypes.
        alone: The full batch at once, in these.
        full: The full batch in the dtype of the comparison.
        tried: Some splits that are finite there.
    """

    def error(got: list[Tensor]) -> list[float]:
        return [norm(x - y) for x, y in zip(got, full, strict=True)]

    if not tried:
        return [math.nan] * len(full), None
    own = error(alone())
    worst = [max(column) for column in zip(*(error(run(parts)) for parts in tried), strict=True)]
    overflow = (i for i, x in enumerate(worst) if not math.isfinite(x))
    return [_ratio(x, y) for x, y in zip(worst, own, strict=True)], next(overflow, None)


def _ratio(error: float, own: float) -> float:
    if not own < math.inf:
        return math.nan if not error < math.inf else 0.0
    return error / own if own else math.nan if error else 1.0


def as_near_as_can_be(ratios: Sequence[float]) -> bool:
    """Whether the errors are rounding in the loss's own dtype, for all that can be told."""
    told = [ratio for ratio in ratios if not math.isnan(ratio)]
    return bool(told) and max(told) <= _ROUNDINGS


_ROUNDINGS = 16.0  # of the full batch's own error: a real one is thousands of times that


UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


# Comparing -------------------------------------------------------------------------------


class Result(NamedTuple):
    """The value and the leaves of a gradient, and for each the sum of the norms of its terms."""

    leaves: list[Tensor]
    sizes: list[float]


class Bound(NamedTuple):
    """What rounding may do: a share of the terms' norms, and a number for each leaf."""

    share: float
    floor: Sequence[float]


def joined(states: Sequence[AccumState], reduction: Reduction) -> Result:
    """Accumulated, and divided once."""
    whole = reduce(add, states)
    by = divisor(whole.weight, plain_sum(whole, reduction))
    value = mean_value(whole.total, by)
    sizes = zip(*(terms(state) for state in states), strict=True)
    return Result(
        [value, *(x / by.to(x.device) for x in tree_leaves(whole.grads))],
        [sum(norm(x) for x in column) / float(by) for column in sizes],
    )


def terms(state: AccumState) -> list[Tensor]:
    """What a microbatch adds, the value's part first."""
    return [state.total, *tree_leaves(state.grads)]


def norm(x: Tensor) -> float:
    """The Euclidean norm."""
    return float(torch.linalg.vector_norm(x.to_dense()))


def errors(got: Result, want: Sequence[Tensor], bound: Bound) -> list[float]:
    """The distance of every leaf in units of its bound."""
    return [
        _error(x, y, bound.share * size + floor)
        for x, y, size, floor in zip(got.leaves, want, got.sizes, bound.floor, strict=True)
    ]


def _error(got: Tensor, want: Tensor, allowed: float) -> float:
    if not all_finite(got):
        both_nan = got.isnan().equal(want.isnan()) and bool(got.isnan().any())
        return 0.0 if both_nan else float("inf")  # the value over no weight at all
    distance = norm(got - want)
    return distance / allowed if distance and allowed else float("inf") if distance else 0.0


class Outcome(NamedTuple):
    """The errors of one way of cutting, and what a microbatch raised."""

    errors: list[float]
    raised: Exception | None = None


class Trial(NamedTuple):
    """How to accumulate, how to find the full batch, and what rounding may do."""

    subject: Subject  # in the dtype of the comparison
    accumulate: Callable[[Parts], Result]
    whole: Callable[[Rows], list[Tensor]]
    bound: Bound
    known: dict[Parts, Outcome]

    def outcome(self, parts: Parts) -> Outcome:
        """How far one way of cutting is off; a microbatch that raises is infinitely so."""
        if parts not in self.known:
            self.known[parts] = self.compared(parts)
        return self.known[parts]

    def compared(self, parts: Parts) -> Outcome:
        """The same, not remembered."""
        want = self.whole(tuple(sorted(itertools.chain(*parts))))
        try:
            return Outcome(errors(self.accumulate(parts), want, self.bound))
        except Exception as error:
            return Outcome([float("inf")] * len(want), error)

    def fails(self, parts: Parts, leaf: int) -> bool:
        """Whether a way of cutting shows a leaf's fault; not where the rows cannot be computed."""
        try:
            return not self.outcome(parts).errors[leaf] <= 1
        except Exception:
            return False


def trial_of(subject: Subject, reference: torch.dtype, seeds: Iterator[int]) -> Trial:
    """A trial of a loss by our own accumulator, in another dtype than its own."""
    trial = _trial(subject.in_dtype(reference), seeds)
    floor = _floor(subject, trial.whole(subject.everything()), next(seeds))
    return trial._replace(bound=Bound(UNIT[reference] ** 0.5, floor))


def native_trial(subject: Subject, narrowest: torch.dtype, seeds: Iterator[int]) -> Trial:
    """The same in the loss's own dtypes, of which one is the narrowest.

    What it loses cannot be measured. A leaf that is small beside the whole gradient is allowed
    u^(3/4) of that, the geometric middle between rounding and the bound of a leaf as large.
    """
    trial, unit = _trial(subject, seeds), UNIT.get(narrowest, UNIT[torch.float32])
    grads = trial.whole(subject.everything())[1:]
    floor = unit**0.75 * math.hypot(*(norm(g) for g in grads))
    return trial._replace(bound=Bound(unit**0.5, [0.0, *(floor for _ in grads)]))


def _trial(subject: Subject, seeds: Iterator[int]) -> Trial:
    known: dict[Rows, list[Tensor]] = {}

    def accumulate(parts: Parts) -> Result:
        return accumulated(subject, parts, seeds)

    def whole(rows: Rows) -> list[Tensor]:
        if rows not in known:
            found = accumulate((rows,)).leaves
            if len(rows) < subject.rows:
                return found
            known[rows] = found
        return known[rows]

    return Trial(subject, accumulate, whole, Bound(0.0, ()), {})


def accumulated(subject: Subject, parts: Parts, seeds: Iterator[int]) -> Result:
    """What our own accumulation makes of some parts of the batch."""
    return joined([subject.sums(rows, next(seeds)) for rows in parts], subject.reduction)


def _floor(subject: Subject, full: list[Tensor], seed: int) -> list[float]:
    """The bound's second term: nothing where the loss cannot be computed in float32."""
    ratio = (UNIT[torch.float64] / UNIT[torch.float32]) ** 0.5
    try:
        narrow = subject.in_dtype(torch.float32).sums(subject.everything(), seed)
    except Exception:
        return [0.0] * len(full)
    found = joined([narrow], subject.reduction).leaves
    return [ratio * norm(x - y) if all_finite(x) else 0.0 for x, y in zip(found, full, strict=True)]


def repeats(
    subject: Subject,
    call: Callable[[Subject, int], Result],
    bound: Bound,
    seeds: Iterator[int],
    times: int,
) -> tuple[bool, bool]:
    """Whether other random numbers give another result; whether so many calls alike do."""
    keeping, seed = subject._replace(kept=Kept()), next(seeds)

    def other(seed: int) -> bool:
        return max(errors(call(keeping, seed), first.leaves, bound)) > 1

    try:
        first = call(keeping, seed)
        if any(other(seed) for _ in range(times)):
            return False, True
        return any(other(next(seeds)) for _ in range(times)), False
    finally:
        subject.kept.put_back()


def whole_batch(subject: Subject, seed: int) -> Result:
    """The loss of the whole batch at once."""
    return joined([subject.sums(subject.everything(), seed)], subject.reduction)


# Shrinking -------------------------------------------------------------------------------


def shrunk(trial: Trial, parts: Parts, leaf: int, calls: int = 60) -> Parts:
    """The smallest way of cutting, of the fewest rows, that was found to show the same fault."""
    left = iter(range(calls))

    def fails(candidate: Parts) -> bool:
        return next(left, None) is not None and trial.fails(candidate, leaf)

    for alone in parts if len(parts) > 2 else ():
        rest = tuple(row for part in parts if part is not alone for row in part)
        if fails((alone, rest)):
            parts = (alone, rest)
            break
    size = max(map(len, parts))
    while size:
        at = 0
        while at < sum(map(len, parts)):
            fewer = _without(parts, at, size)
            if len(fewer) > 1 and fails(fewer):
                parts = fewer
            else:
                at += size
        size //= 2
    return parts


def _without(parts: Parts, at: int, size: int) -> Parts:
    """Without so many rows from a place on, and without parts that are left empty."""
    numbered = itertools.count()
    kept = (tuple(row for row in part if not at <= next(numbered) < at + size) for part in parts)
    return tuple(part for part in kept if part)


# Many of them --------------------------------------------------------------------------


class Tried(NamedTuple):
    """A trial, and how every way of cutting came out."""

    trial: Trial
    outcomes: dict[Parts, Outcome]

    @property
    def wrong(self) -> bool:
        """Whether any is off."""
        return any(max(outcome.errors) > 1 for outcome in self.outcomes.values())


def tried_all(trial: Trial, tried: list[Parts]) -> Tried:
    """Try every way of cutting."""
    return Tried(trial, {parts: trial.outcome(parts) for parts in tried})


def worst_of(i: int, done: list[Tried], found: list[tuple[Trial, Parts]]) -> tuple[float, Parts]:
    """A leaf's worst error, and a small split that shows it, another leaf's where that does."""
    runs = [
        (outcome.errors[i], one.trial, parts)
        for one in done
        for parts, outcome in one.outcomes.items()
    ]
    error, trial, parts = max(runs, key=lambda run: run[0])
    if error <= 1:
        return error, ()
    for other, split in found:
        if other is trial and trial.fails(split, i):
            return error, split
    found.append((trial, shrunk(trial, parts, i)))
    return error, found[-1][1]
