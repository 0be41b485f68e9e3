"""How far the accumulated result of a split lies from the full batch, and whether that is rounding.

With ``c_k`` what microbatch ``k`` adds to a leaf of the result, the difference is rounding if

    ‖Σ c_k − full‖ ≤ √u₆₄ Σ ‖c_k‖ + √(u₆₄ / u₃₂) ‖full₃₂ − full‖

Rounding shrinks with the unit of the dtype and a real error does not; the bound is the geometric
mean of the two. The first term is about the sum. The second is about the loss itself: its error in
float32 shows how ill-conditioned it is. (A gradient that is zero on paper, such as that of a bias
below a softmax, is nothing but rounding and has no correct digit.)

Splits that fail are made smaller, to show the fault with as few samples as possible. Errors in the
loss's own dtypes are reported too, relative to the full batch's own, but not judged.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..._base import trees
from ..._core import ledger, losses
from .kept import Kept
from .report import Diagnosis, Indices, Leaf, Report, Split
from .subject import Subject


UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


# Results ---------------------------------------------------------------------------------


class Result(NamedTuple):
    """The value and the leaves of a gradient, and for each the sum of the norms of its terms.

    Where nobody knows the terms there are no sizes: the norms of what it should be stand for them.
    """

    leaves: list[Tensor]
    sizes: list[float]


class Bound(NamedTuple):
    """What rounding may do: a share of the terms' norms, and a number for each leaf."""

    share: float
    floor: Sequence[float]


def accumulated(subject: Subject, split: Split, seed: int | None = None) -> Result:
    """What our own accumulator makes of some microbatches: sums, divided once."""
    states = [trees.tree_map(Tensor.detach, subject.sums(rows, seed)) for rows in split]
    whole = reduce(trees.add, states)
    by = losses.divisor(whole.weight, ledger.plain_sum(whole, subject.reduction))
    value = losses.mean_value(whole.total, by)
    sizes = zip(*(value_and_gradient(state) for state in states), strict=True)
    return Result(
        [value, *(x / by.to(x.device) for x in trees.tree_leaves(whole.grads))],
        [sum(float(trees.norm(x)) for x in column) / float(by) for column in sizes],
    )


def whole_batch(subject: Subject, seed: int | None = None) -> Result:
    """What our own accumulator makes of the whole batch at once."""
    return accumulated(subject, (subject.everything(),), seed)


def value_and_gradient(state: ledger.AccumState) -> list[Tensor]:
    """What a microbatch adds to the value, and to each leaf of the gradient."""
    return [state.total, *trees.tree_leaves(state.grads)]


def errors(got: Result, want: Sequence[Tensor], bound: Bound) -> list[float]:
    """The distance of each leaf in units of its bound."""
    sizes = got.sizes or [float(trees.norm(x)) for x in want]
    return [
        _error(x, y, bound.share * size + floor)
        for x, y, size, floor in zip(got.leaves, want, sizes, bound.floor, strict=True)
    ]


def _error(got: Tensor, want: Tensor, allowed: float) -> float:
    if not trees.all_finite(got):
        both_nan = got.isnan().equal(want.isnan()) and bool(got.isnan().any())
        return 0.0 if both_nan else math.inf  # NaN: the value over no weight at all
    distance = float(trees.norm(got - want))
    if not distance:
        return 0.0
    return distance / allowed if allowed else math.inf


# A trial ---------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The error of each leaf for one split, and what a microbatch raised."""

    errors: list[float]
    raised: Exception | None = None

    @property
    def fits(self) -> bool:
        """Whether every error is rounding."""
        return max(self.errors) <= 1


class Trial(NamedTuple):
    """How to accumulate, how to find the full batch, and what rounding may do."""

    subject: Subject  # in the dtype of the comparison
    accumulate: Callable[[Split], Result]
    whole: Callable[[Indices], list[Tensor]]
    bound: Bound
    known: dict[Split, Outcome]

    def outcome(self, split: Split) -> Outcome:
        """How far one split is off, computed once; one that raises is infinitely so."""
        if split not in self.known:
            want = self.whole(tuple(sorted(itertools.chain(*split))))
            try:
                found = Outcome(errors(self.accumulate(split), want, self.bound))
            except Exception as error:
                found = Outcome([math.inf] * len(want), error)
            self.known[split] = found
        return self.known[split]

    def fits(self, splits: Sequence[Split]) -> bool:
        """Whether none of these splits is off; none is tried after one that is."""
        return all(self.outcome(split).fits for split in splits)

    def fails(self, split: Split, leaf: int) -> bool:
        """Whether a split shows a leaf's fault, if these samples alone can be computed."""
        try:
            return not self.outcome(split).errors[leaf] <= 1
        except Exception:
            return False


def raises(trial: Trial, splits: Sequence[Split]) -> Diagnosis | None:
    """What a microbatch raises in the first split in which one does."""
    for split in splits:
        if (error := trial.outcome(split).raised) is not None:
            sizes = ", ".join(str(len(part)) for part in split[:8])
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            says = f"cut into microbatches of {sizes} samples, it raises {what}"
            mend = "x.view(len(x), -1)  # any number of samples, one as well; no size written down"
            return Diagnosis("raises", says, mend)
    return None


def trial_of(subject: Subject) -> Trial:
    """A trial of a loss by our own accumulator, in float64."""
    trial = trial_by(accumulated, subject.in_dtype(torch.float64))
    full = trial.whole(subject.everything())
    try:
        lost = lost_in_float32(accumulated, subject, full)
    except Exception:  # what the loss cannot compute there is not known
        lost = [0.0] * len(full)
    return trial._replace(bound=bound_of(lost))


def native_trial(subject: Subject, narrowest: torch.dtype) -> Trial:
    """A trial of a loss by our own accumulator, in its own dtypes, of which one is the narrowest.

    What the loss itself loses cannot be measured there. A leaf that is small beside the whole
    gradient is allowed u^(3/4) of that, the geometric middle between rounding and the bound of a
    leaf as large.
    """
    trial, unit = trial_by(accumulated, subject), UNIT.get(narrowest, UNIT[torch.float32])
    grads = trial.whole(subject.everything())[1:]
    floor = unit**0.75 * math.hypot(*(float(trees.norm(g)) for g in grads))
    return trial._replace(bound=Bound(unit**0.5, [0.0, *(floor for _ in grads)]))


def trial_by(run: Callable[[Subject, Split], Result], subject: Subject) -> Trial:
    """A trial of what ``run`` makes of a subject, without a bound."""
    known: dict[Indices, list[Tensor]] = {}

    def whole(rows: Indices) -> list[Tensor]:
        if rows in known:
            return known[rows]
        found = run(subject, (rows,)).leaves
        if len(rows) >= subject.rows:
            known[rows] = found
        return found

    accumulate, bound = partial(run, subject), Bound(0.0, ())
    return Trial(subject=subject, accumulate=accumulate, whole=whole, bound=bound, known={})


def lost_in_float32(
    run: Callable[[Subject, Split], Result], subject: Subject, full: list[Tensor]
) -> list[float]:
    """How far each leaf of the whole batch is off there; 0 where it is not finite."""
    narrow = run(subject.in_dtype(torch.float32), (subject.everything(),)).leaves
    pairs = zip(narrow, full, strict=True)
    return [float(trees.norm(x - y)) if trees.all_finite(x) else 0.0 for x, y in pairs]


def bound_of(lost: Sequence[float]) -> Bound:
    """The bound in float64, from what each leaf of the whole batch loses in float32."""
    floor = [(UNIT[torch.float64] / UNIT[torch.float32]) ** 0.5 * x for x in lost]
    return Bound(UNIT[torch.float64] ** 0.5, floor)


def repeats(
    subject: Subject, call: Callable[[Subject, int], Result], bound: Bound, times: int
) -> tuple[bool, bool]:
    """Whether calls with other random numbers differ, and whether calls with the same ones do.

    Between these calls, what the loss keeps is not put back.
    """
    keeping, seed = subject._replace(kept=Kept()), next(subject.seeds)

    def differs(seed: int) -> bool:
        return max(errors(call(keeping, seed), first.leaves, bound)) > 1

    try:
        first = call(keeping, seed)
        if any(differs(seed) for _ in range(times)):
            return False, True
        return any(differs(next(subject.seeds)) for _ in range(times)), False
    finally:
        subject.kept.put_back()


# The smallest split ----------------------------------------------------------------------


def shrunk(trial: Trial, split: Split, leaf: int, calls: int = 60) -> Split:
    """The smallest split, of the fewest samples, that was found to show a leaf's fault."""
    left = iter(range(calls))

    def fails(candidate: Split) -> bool:
        return next(left, None) is not None and trial.fails(candidate, leaf)

    for alone in split if len(split) > 2 else ():
        rest = tuple(row for part in split if part is not alone for row in part)
        if fails((alone, rest)):
            split = (alone, rest)
            break
    size = max(map(len, split))
    while size:
        at = 0
        while at < sum(map(len, split)):
            fewer = _without(split, at, size)
            if len(fewer) > 1 and fails(fewer):
                split = fewer
            else:
                at += size
        size //= 2
    return split


def worst_of(
    trials: Sequence[Trial], splits: Sequence[Split], leaves: int
) -> list[tuple[float, Trial, Split]]:
    """The worst error of each leaf, its trial, and a small split that shows it, or nothing."""
    worst: list[tuple[float, Trial, Split]] = []
    for i in range(leaves):
        tried = [
            (trial.outcome(split).errors[i], trial, split) for trial in trials for split in splits
        ]
        error, trial, split = max(tried, key=lambda it: it[0])
        if error <= 1:
            split = ()
        else:  # another leaf's, where that does
            others = (small for _, its, small in worst if small and its is trial)
            split = next((small for small in others if trial.fails(small, i)), None) or shrunk(
                trial, split, i
            )
        worst.append((error, trial, split))
    return worst


def _without(split: Split, at: int, size: int) -> Split:
    """A split without so many samples from a place on, and without parts that are left empty."""
    numbered = itertools.count()
    kept = (tuple(row for row in part if not at <= next(numbered) < at + size) for part in split)
    return tuple(part for part in kept if part)


class Comparison(NamedTuple):
    """A loss, or a loop, in all splits: beside the full batch, and in its own dtypes."""

    trials: Sequence[Trial]
    splits: Sequence[Split]
    worst: Sequence[tuple[float, Trial, Split]]  # of each leaf
    native: Sequence[float]

    @property
    def fits(self) -> bool:
        """Whether no split of any trial is off."""
        return all(trial.fits(self.splits) for trial in self.trials)

    def report(
        self,
        names: Sequence[str],
        causes: Sequence[Diagnosis],
        loss: str,
        dtype: torch.dtype,
        reference: str,
    ) -> Report:
        """What is found, leaf by leaf."""
        return Report(
            fits=not causes and self.fits,
            leaves=tuple(
                Leaf(name, error, split, ratio)
                for name, (error, _, split), ratio in zip(
                    names, self.worst, self.native, strict=True
                )
            ),
            diagnoses=tuple(causes),
            samples=self.trials[0].subject.rows,
            splits=len(self.splits) * len(self.trials),
            loss=loss,
            dtype=name_of(dtype),
            reference=reference,
        )


def name_of(dtype: torch.dtype) -> str:
    """A dtype as a report names it."""
    return str(dtype).removeprefix("torch.")


# In the loss's own dtypes ------------------------------------------------------------------


def compare_natively(
    run: Callable[[Split], list[Tensor]],
    alone: Callable[[], list[Tensor]],
    full: list[Tensor],
    splits: Sequence[Split],
) -> tuple[list[float], int | None]:
    """The errors of what is accumulated, relative to the full batch's own; and what overflows.

    In the loss's own dtypes ``run`` accumulates a split, and ``alone`` takes the full batch at
    once. In the dtype of the comparison ``full`` is the full batch, and all splits are finite.
    """

    def error(got: list[Tensor]) -> list[float]:
        return [float(trees.norm(x - y)) for x, y in zip(got, full, strict=True)]

    if not splits:
        return [math.nan] * len(full), None
    own = error(alone())
    worst = [max(column) for column in zip(*(error(run(split)) for split in splits), strict=True)]
    overflow = (i for i, x in enumerate(worst) if not math.isfinite(x))
    return [_ratio(x, y) for x, y in zip(worst, own, strict=True)], next(overflow, None)


def _ratio(error: float, own: float) -> float:
    if not own < math.inf:
        return math.nan if not error < math.inf else 0.0
    return error / own if own else math.nan if error else 1.0


def is_rounding(ratios: Sequence[float]) -> bool:
    """Whether the errors are rounding in the loss's own dtype, as far as they are known."""
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return bool(known) and max(known) <= _ROUNDINGS


_ROUNDINGS = 16.0  # of the full batch's own error: a real one is thousands of times that
