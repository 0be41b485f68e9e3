"""How a loss combines its samples, and how to fix it: a sum, a mean, a weighted mean, or coupled.

With ``f(A)`` the loss of the samples ``A`` and its gradient, ``f(AB)`` that of ``A`` and ``B``:

    a sum            f(A) + f(B) = f(AB)
    a mean           a f(A) + b f(B) = (a + b) f(AB), for a samples in A and b in B
    a constant term  f(A) + f(B) − f(AB) is the same for all A and B
    a weighted mean  the mean again, with weights found from single samples and pairs
    several means    y(x) = (f(A, and x copies of a row) − f(A)) / x is Σ c / (1 + x s), with s the
                     sample's share of what A counts in a mean: of one mean y(x) (1 + x s) is the
                     same for all x, and of two y(x) (1 + x s)(1 + x s') is a straight line in x
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._base import trees
from ..._core.weighted import Weighted
from .report import Diagnosis, Indices, Split
from .trials import Bound, Result, Trial, errors, raises, value_and_gradient


def of_rows(trial: Trial, splits: Sequence[Split], shown: Sequence[Split]) -> list[Diagnosis]:
    """What the loss is of its samples, in place of what it is said to be."""
    loss = LossOfRows(trial, {})
    pairs = list(_draw_pairs(loss, shown))
    cause = (_weighted if trial.subject.weighted else _plain)(loss, pairs) if pairs else None
    causes = [it for it in (cause, raises(trial, splits)) if it]
    if pairs and not causes:  # as declared, and off all the same: by a sample's place
        causes.append(_coupled(loss, pairs))
    return causes


# Values ----------------------------------------------------------------------------------


class Value(NamedTuple):
    """A loss and its gradient as they came, and the weight of ``Weighted``."""

    terms: list[Tensor]
    weight: float

    def times(self, by: float) -> "Value":
        """The loss and its gradient, multiplied by a number."""
        return self._replace(terms=[by * x for x in self.terms])


class LossOfRows(NamedTuple):
    """A loss as a function of samples; None where it raises, or is not finite."""

    trial: Trial
    known: dict[Indices, Value | None]

    def __call__(self, *rows: int) -> Value | None:
        if rows not in self.known:
            value = None
            with suppress(Exception):
                value = self.compute(rows)
            self.known[rows] = value if value and trees.all_finite(value.terms) else None
        return self.known[rows]

    def compute(self, rows: Indices) -> Value:
        """The value, whatever its weight: an accumulator would leave out what has none."""
        subject, weights = self.trial.subject, [0.0]

        def total(params: Any, part: Any) -> Any:
            loss = subject.loss_fn(params, part)
            loss = loss[0] if subject.has_aux else loss
            if not isinstance(loss, Weighted):
                return loss
            weights.append(float(loss.weight))
            return loss.total

        plain = subject._replace(loss_fn=total, has_aux=False, reduction="sum")
        return Value(value_and_gradient(plain.sums(rows)), weights[-1])

    def mean(self, *rows: int) -> Value | None:
        """The loss by itself: the total of ``Weighted`` over its weight."""
        value = self(*rows)
        if value is None or not self.trial.subject.weighted:
            return value
        return value.times(1 / value.weight) if value.weight else None

    def agree(self, terms: Sequence[tuple[float, Value]], want: Value) -> bool:
        """Whether a sum of values, each times a number, is another value, but for rounding."""
        columns = [*zip(*(value.times(by).terms for by, value in terms), strict=True)]
        sums = [torch.stack(column).sum(0) for column in columns]
        sizes = [sum(float(trees.norm(x)) for x in column) for column in columns]
        share, floor = self.trial.bound
        # of a mean; these: sums
        bound = Bound(share, [self.trial.subject.rows * x for x in floor])
        return max(errors(Result(sums, sizes), want.terms, bound)) <= 1


class Pair(NamedTuple):
    """Two sets of samples, and the loss of each and of both."""

    a: int
    b: int
    one: Value
    two: Value
    both: Value


def _draw_pairs(loss: LossOfRows, shown: Sequence[Split]) -> Iterator[Pair]:
    """Disjoint sets of samples of many sizes, and those that showed what is wrong."""
    rows = loss.trial.subject.rows
    random = torch.Generator().manual_seed(rows)
    drawn: list[tuple[list[int], list[int]]] = []
    for size in (rows // 2, 1, rows // 3, rows // 4, 2, rows // 2):
        order, size = torch.randperm(rows, generator=random).tolist(), max(size, 1)
        drawn.append((order[:size], order[size : 3 * size]))
    drawn += [(list(split[0]), list(split[1])) for split in shown if len(split) == 2]
    for a, b in drawn:
        one, two, both = loss(*sorted(a)), loss(*sorted(b)), loss(*sorted(a + b))
        if a and b and one and two and both:
            yield Pair(a=len(a), b=len(b), one=one, two=two, both=both)


# What it is ------------------------------------------------------------------------------


def _plain(loss: LossOfRows, pairs: list[Pair]) -> Diagnosis | None:
    declared = loss.trial.subject.reduction
    if _hold(loss, pairs, lambda p: (1, 1, 1)):
        return None if declared == "sum" else _SUM_AS_MEAN
    if _hold(loss, pairs, lambda p: (p.a, p.b, p.a + p.b)):
        return None if declared == "mean" else _MEAN_AS_SUM
    if weights := _weights_of_rows(loss):
        return Diagnosis(
            "mean of means",
            f"it is a mean in which samples weigh {_in_words(weights)}, such as a mean over "
            "tokens; the mean of its microbatches by samples is another one.",
            "return pa.Weighted(per_token.sum(), mask.sum())  # the total and what it is over",
        )
    if _has_constant(loss, pairs):
        return _constant("the loss", "return (per_row + penalty / rows_of_batch).sum()")
    shares = several_means(loss)
    return _coupled(loss, pairs) if shares is None else _several(shares)


def _hold(
    loss: LossOfRows, pairs: list[Pair], weights: Callable[[Pair], tuple[float, float, float]]
) -> bool:
    """Whether a f(A) + b f(B) = c f(AB) for all pairs, with their weights a, b and c."""
    found = ((p, *weights(p)) for p in pairs)
    return all(loss.agree([(a, p.one), (b, p.two)], p.both.times(c)) for p, a, b, c in found)


_SUM_AS_MEAN = Diagnosis(
    "sum as mean",
    "the losses of two microbatches add up to the loss of both: it is a sum over its samples and "
    "was declared a mean. With k equal microbatches the gradient is 1/k of the full batch's.",
    'pa.grad(loss, microbatch_size=..., reduction="sum")  # or .mean() in the loss',
)
_MEAN_AS_SUM = Diagnosis(
    "mean as sum",
    "the loss of two microbatches is the mean of theirs, by rows: it is a mean and was declared a "
    "sum. With k equal microbatches the gradient is k times the full batch's.",
    'pa.grad(loss, microbatch_size=..., reduction="mean")  # or .sum() in the loss',
)


def _weighted(loss: LossOfRows, pairs: list[Pair]) -> Diagnosis | None:
    for p in pairs:
        one, two, both = p.one.weight, p.two.weight, p.both.weight
        if abs(one + two - both) > loss.trial.bound.share * (abs(one) + abs(two)):
            says = (
                f"the weights of two microbatches are {one:.6g} and {two:.6g}, that of both "
                f"together is {both:.6g}: weights have to add up."
            )
            return _wrong_weight(says, "a sum over a sum")
    if _hold(loss, pairs, lambda p: (1, 1, 1)):
        return _lost(pairs)
    if _hold(loss, pairs, lambda p: (p.one.weight, p.two.weight, p.both.weight)):
        says = "the total of Weighted is a mean already: it is divided by the weight once more."
        return _wrong_weight(says, "a sum, not a mean")
    if _has_constant(loss, pairs):
        mend = "return pa.Weighted(total + weight * penalty, weight)"
        return _constant("the total of Weighted", mend)
    weights = _weights_of_rows(loss)
    if weights is None:
        return _coupled(loss, pairs)
    says = f"it is a mean in which samples weigh {_in_words(weights)}; it returns other weights."
    return _wrong_weight(says, "the sum of the mask, not the samples")


def _wrong_weight(says: str, why: str) -> Diagnosis:
    return Diagnosis("weight", says, f"return pa.Weighted(per_token.sum(), mask.sum())  # {why}")


def _lost(pairs: list[Pair]) -> Diagnosis | None:
    """What a microbatch of weight zero leaves out, where all adds up."""
    values = [value for p in pairs for value in (p.one, p.two, p.both)]
    if not any(value.weight == 0 and any(x.any() for x in value.terms) for value in values):
        return None
    return Diagnosis(
        "weight",
        "some samples have a weight of zero, but a loss: a microbatch of only such samples adds "
        "nothing, whatever its total.",
        "return pa.Weighted((per_row * weight).sum(), weight.sum())  # no weight, no loss",
    )


def _coupled(loss: LossOfRows, pairs: list[Pair]) -> Diagnosis:
    rows = loss.trial.subject.everything()
    forward, backward = loss(*rows), loss(*reversed(rows))
    moved = forward and backward and not loss.agree([(1, backward)], forward)
    values = [[float(value.terms[0]) for value in (p.one, p.two, p.both)] for p in pairs]
    one, two, both = clearest = max(values, key=lambda numbers: _distance(*numbers))
    what = "the gradient of two microbatches together is"
    if _distance(*clearest):
        what = f"two microbatches have losses of {one:.6g} and {two:.6g}, both together {both:.6g},"
    return Diagnosis(
        "batch coupling",
        f"the contribution of a sample depends on the other samples: {what} neither their sum nor "
        "a mean." + (" It depends on the order of the samples, too." if moved else ""),
        "z = pa.microbatch(encode, microbatch_size=...)(params, batch), and the loss of all "
        "samples in plain code; or pa.microbatch(counts, microbatch_size=..., reduce='sum'), and "
        "then a function of the sums",
    )


def _distance(one: float, two: float, both: float) -> float:
    """How far the loss of both is from the sum of two and from anything between them."""
    between = max(min(one, two) - both, both - max(one, two), 0.0)
    return min(abs(one + two - both), between) / (abs(one) + abs(two) + abs(both) or 1.0)


# A constant term, weights ------------------------------------------------------------------


def _has_constant(loss: LossOfRows, pairs: list[Pair]) -> bool:
    """Whether f(A) + f(B) − f(AB) is the same for all pairs."""
    first = pairs[0]
    others = [p for p in pairs if p.one is not first.one and p.one is not first.two]
    excess = [(-1.0, first.one), (-1.0, first.two), (1.0, first.both)]
    return len(others) > 1 and all(
        loss.agree([(1, p.one), (1, p.two), *excess], p.both) for p in others
    )


def _constant(what: str, mend: str) -> Diagnosis:
    return Diagnosis(
        "constant term",
        f"{what} holds a term that does not depend on the samples (a penalty on the parameters?): "
        "it is counted once for every microbatch.",
        f"{mend}  # a share for every sample; or add its gradient once, outside",
    )


def _weights_of_rows(loss: LossOfRows) -> dict[int, float] | None:
    """Weights of a few samples, relative to the smallest; one tells those of all others."""
    rows = range(min(loss.trial.subject.rows, 12))
    return next(filter(None, (_weights_against(loss, base, rows) for base in rows)), None)


def _weights_against(loss: LossOfRows, base: int, rows: range) -> dict[int, float] | None:
    """The weights of samples relative to one's; None where it tells none, or they are none."""
    weights = {base: 1.0}
    for row in (row for row in rows if row != base):
        weight = _weight_beside(loss, base, row)
        if weight is None:
            return None
        if weight == weight:
            weights[row] = weight
    all_, least = sum(weights.values()), min(filter(None, weights.values()))
    parts = [(w / all_, value) for row, w in weights.items() if w and (value := loss.mean(row))]
    whole = loss.mean(*sorted(weights))
    if len(weights) < 2 or whole is None or not loss.agree(parts, whole):
        return None
    return {row: weight / least for row, weight in sorted(weights.items())}


def _weight_beside(loss: LossOfRows, base: int, row: int) -> float | None:
    """The weight of a sample relative to another's: NaN where not known, None where none fits.

    The mean of both lies between theirs, the nearer to the one that weighs more.
    """
    one = loss.mean(base)
    if one is None:
        return None
    other, both = loss.mean(row), loss.mean(*sorted((base, row)))
    if both is None:
        return math.nan
    if other is None or not any(x.any() for x in other.terms):
        # nothing by itself, and nothing beside another: masked
        return 0.0 if loss.agree([(1, one)], both) else None
    apart, along = (_vector(value) - _vector(one) for value in (other, both))
    share = float(along @ apart / (apart @ apart))
    if not 0 < share < 1 or not loss.agree([(1 - share, one), (share, other)], both):
        return None
    return share / (1 - share)


def _in_words(weights: dict[int, float]) -> str:
    shown = [f"{weight:.3g} (sample {row})" for row, weight in list(weights.items())[:6]]
    return ", ".join(shown) + (", …" if len(weights) > 6 else "")


# Several means ---------------------------------------------------------------------------


class Shares(NamedTuple):
    """A sample's shares of what a few samples count, in each mean that it is part of."""

    beside: Indices
    row: int
    shares: tuple[float, ...]


COPIES, OTHERS = 6, 8  # of a sample; samples
_NUMBERS = torch.arange(1.0, COPIES + 1, dtype=torch.float64)[:, None]


def several_means(loss: LossOfRows) -> Shares | None:
    """The clearest sample, if the loss is a sum of two means, or a total over a count."""
    rows = loss.trial.subject.rows
    random = torch.Generator().manual_seed(rows)
    for size in (2, 3, 4, 5, 3, 4):  # some means are over nothing, for a few samples
        order = torch.randperm(rows, generator=random).tolist()
        beside = tuple(sorted(order[:size]))
        found: list[Shares] = []
        for row in order[-OTHERS:]:
            shares = _shares(loss, beside, row)
            if shares is None:
                break
            found.append(Shares(beside, row, tuple(x if abs(x) > 1e-6 else 0.0 for x in shares)))
        else:
            if several := [it for it in found if len(it.shares) > 1]:
                return max(several, key=lambda it: it.shares[1] - it.shares[0])
            of_one = {it.shares[0] > 0: it for it in found if it.shares}
            if len(of_one) > 1:  # some samples count, and some that do not add all the same
                return of_one[False]
    return None


def _shares(loss: LossOfRows, beside: Indices, row: int) -> tuple[float, ...] | None:
    """A sample's shares, the smaller first; () where it adds nothing, None where it has none."""
    measured = _added_by_copies(loss, beside, row)
    if measured is None:
        return None
    y, noise = measured
    if y.norm() <= noise:
        return ()
    line, bend = y.diff(dim=0), (_NUMBERS * y).diff(dim=0)
    share = -float((line * bend).sum() / (bend * bend).sum())
    if (line + share * bend).norm() <= noise:
        return (share,)
    columns = [(_NUMBERS**k * y).diff(n=2, dim=0).flatten() for k in range(3)]
    sum_, product = torch.linalg.lstsq(torch.stack(columns[1:], 1), -columns[0]).solution.tolist()
    if (columns[0] + sum_ * columns[1] + product * columns[2]).norm() > noise:
        return None
    gap = sum_**2 - 4 * product
    if not gap > (1e-3 * sum_) ** 2:
        return None
    low, high = (sum_ - gap**0.5) / 2, (sum_ + gap**0.5) / 2
    return (low, high) if low > -1e-6 else None


def _added_by_copies(loss: LossOfRows, beside: Indices, row: int) -> tuple[Tensor, float] | None:
    """y(x) for each number of copies, and what of it is rounding; None where it cannot be told."""
    values = [loss(*beside, *[row] * x) for x in range(COPIES + 1)]
    other = loss(*[row] * COPIES, *beside)
    if other is None or any(value is None for value in values):
        return None
    start, *more = [_vector(value) for value in values if value]
    noise = loss.trial.bound.share * float(max(v.norm() for v in (start, *more)))
    if (more[-1] - _vector(other)).norm() > noise:
        return None  # the order of the samples counts
    return (torch.stack(more) - start) / _NUMBERS, noise


def _vector(value: Value) -> Tensor:
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in value.terms]
    return torch.cat([x.to("cpu", torch.float64).flatten() for x in parts])


def _several(it: Shares) -> Diagnosis:
    beside = f"beside samples {', '.join(map(str, it.beside))}, sample {it.row}"
    if len(it.shares) == 1:
        return Diagnosis(
            "several means",
            "it is a total over a count that some samples are no part of, a ratio of two means: "
            f"{beside} adds to the total, and nothing to the count. Both are sums.",
            "return pa.Weighted(per_row.sum(), positives)  # of the microbatch",
        )
    return Diagnosis(
        "several means",
        f"it is a sum of means over different things, such as samples and tokens: {beside} counts "
        f"as {it.shares[0]:.3g} of them in one and as {it.shares[1]:.3g} in another. No weight is "
        "right for both; each has its own.",
        "return pa.Weighted(a.sum(), samples) + pa.Weighted(b.sum(), tokens)",
    )
