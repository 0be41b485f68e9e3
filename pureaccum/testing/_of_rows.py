"""What a loss is of its rows, found out by calling it on some of them.

With ``f(A)`` the loss of the rows ``A`` and its gradient, ``f(AB)`` that of ``A`` and ``B``:

    a sum            f(A) + f(B) = f(AB)
    a mean           a f(A) + b f(B) = (a + b) f(AB), for a rows in A and b in B
    a constant term  f(A) + f(B) − f(AB) is the same for all A and B
    a weighted mean  the mean again, each row with a weight that single rows and pairs tell
    coupled          none of these: what a row adds depends on the other rows
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._tree import all_finite
from ._report import Diagnosis
from ._subject import Rows
from ._trials import Bound, Outcome, Parts, Result, Trial, errors, norm, terms


class Value(NamedTuple):
    """A loss and its gradient as they came, and the weight of ``Weighted``."""

    terms: list[Tensor]
    weight: float


class Of(NamedTuple):
    """A loss as a function of rows; None where it raises, or is not finite."""

    trial: Trial
    seeds: Iterator[int]
    weighted: bool
    known: dict[Rows, Value | None]

    def __call__(self, *rows: int) -> Value | None:
        if rows not in self.known:
            try:
                state = self.trial.subject._replace(reduction="sum").sums(rows, next(self.seeds))
                value = Value(terms(state), float(state.weight))
            except Exception:
                value = None
            self.known[rows] = value if value and all_finite(value.terms) else None
        return self.known[rows]

    def own(self, *rows: int) -> Value | None:
        """The loss by itself: the total of ``Weighted`` over its weight."""
        value = self(*rows)
        if value is None or not self.weighted:
            return value
        return _times(value, 1 / value.weight) if value.weight else None

    def agree(self, sum_: Sequence[tuple[float, Value]], want: Value) -> bool:
        """Whether a sum of such terms is another one, but for rounding."""
        got = [
            torch.stack([by * x for (by, _), x in zip(sum_, column, strict=True)]).sum(0)
            for column in zip(*(value.terms for _, value in sum_), strict=True)
        ]
        sizes = [
            sum(abs(by) * norm(x) for (by, _), x in zip(sum_, column, strict=True))
            for column in zip(*(value.terms for _, value in sum_), strict=True)
        ]
        share, floor = self.trial.bound
        bound = Bound(share, [self.trial.subject.rows * x for x in floor])  # of a mean; these: sums
        return max(errors(Result(got, sizes), want.terms, bound)) <= 1


class Pair(NamedTuple):
    """Two sets of rows, and the loss of each and of both."""

    a: int
    b: int
    one: Value
    two: Value
    both: Value


def of_rows(
    trial: Trial,
    weighted: bool,
    seeds: Iterator[int],
    outcomes: Mapping[Parts, Outcome],
    shown: Sequence[Parts],
) -> list[Diagnosis]:
    """What the loss is of its rows, in place of what it is said to be."""
    of = Of(trial, seeds, weighted, {})
    pairs = list(_pairs(of, shown))
    if not pairs:
        return _raises(outcomes)
    found = _of_weighted(of, pairs) if weighted else _of_plain(of, pairs)
    # as declared, and off all the same: by a row's place
    return [*found, *_raises(outcomes)] or [_coupled(of, pairs)]


def _pairs(of: Of, shown: Sequence[Parts]) -> Iterator[Pair]:
    """Disjoint sets of rows of many sizes, and those that showed what is wrong."""
    rows = of.trial.subject.rows
    random = torch.Generator().manual_seed(rows)
    drawn: list[tuple[list[int], list[int]]] = []
    for size in (rows // 2, 1, rows // 3, rows // 4, 2, rows // 2):
        order, size = torch.randperm(rows, generator=random).tolist(), max(size, 1)
        drawn.append((order[:size], order[size : 3 * size]))
    drawn += [(list(parts[0]), list(parts[1])) for parts in shown if len(parts) == 2]
    for a, b in drawn:
        one, two, both = of(*sorted(a)), of(*sorted(b)), of(*sorted(a + b))
        if a and b and one and two and both:
            yield Pair(len(a), len(b), one, two, both)


def _of_plain(of: Of, pairs: list[Pair]) -> list[Diagnosis]:
    declared = of.trial.subject.reduction
    if all(of.agree([(1, p.one), (1, p.two)], p.both) for p in pairs):
        return [
            Diagnosis(
                "sum as mean",
                "the losses of two microbatches add up to the loss of both: it is a sum over its "
                "rows and was declared a mean. With k equal microbatches the gradient is 1/k of "
                "the full batch's.",
                'pa.grad(loss, microbatch_size=..., reduction="sum")  # or .mean() in the loss',
            )
        ]
    if all(of.agree([(p.a, p.one), (p.b, p.two)], _times(p.both, p.a + p.b)) for p in pairs):
        if declared == "mean":
            return []
        return [
            Diagnosis(
                "mean as sum",
                "the loss of two microbatches is the mean of theirs, by rows: it is a mean and "
                "was declared a sum. With k equal microbatches the gradient is k times the full "
                "batch's.",
                'pa.grad(loss, microbatch_size=..., reduction="mean")  # or .sum() in the loss',
            )
        ]
    if _is_constant(of, pairs):
        mend = "return (per_row + penalty / rows_of_the_batch).sum()"
        return [_constant("the loss", mend)]
    weights = _weights(of)
    if weights is None:
        return [_coupled(of, pairs)]
    return [
        Diagnosis(
            "mean of means",
            f"it is a mean in which rows weigh {_listed(weights)}, such as a mean over "
            "tokens; the mean of its microbatches by rows is another one.",
            "return pa.Weighted(per_token.sum(), mask.sum())  # the total and what it is over",
        )
    ]


def _of_weighted(of: Of, pairs: list[Pair]) -> list[Diagnosis]:
    for p in pairs:
        gap = p.one.weight + p.two.weight - p.both.weight
        if abs(gap) > of.trial.bound.share * (abs(p.one.weight) + abs(p.two.weight)):
            return [
                Diagnosis(
                    "weight",
                    f"the weights of two microbatches are {p.one.weight:.6g} and "
                    f"{p.two.weight:.6g}, that of both together is {p.both.weight:.6g}: weights "
                    "have to add up.",
                    "return pa.Weighted(per_token.sum(), mask.sum())  # a sum over a sum",
                )
            ]
    if all(of.agree([(1, p.one), (1, p.two)], p.both) for p in pairs):
        return []
    by = [(p.one.weight, p.two.weight, p.both.weight) for p in pairs]
    if all(
        of.agree([(a, p.one), (b, p.two)], _times(p.both, c))
        for p, (a, b, c) in zip(pairs, by, strict=True)
    ):
        return [
            Diagnosis(
                "weight",
                "the total of Weighted is a mean already: it is divided by the weight once more.",
                "return pa.Weighted(per_token.sum(), mask.sum())  # a sum, not a mean",
            )
        ]
    if _is_constant(of, pairs):
        mend = "return pa.Weighted(total + weight * penalty, weight)"
        return [_constant("the total of Weighted", mend)]
    weights = _weights(of)
    if weights is None:
        return [_coupled(of, pairs)]
    return [
        Diagnosis(
            "weight",
            f"the loss is a mean in which rows weigh {_listed(weights)}; what it gives as their "
            "weight is something else.",
            "return pa.Weighted(per_token.sum(), mask.sum())  # the sum of the mask, not the rows",
        )
    ]


def _listed(weights: dict[int, float]) -> str:
    shown = [f"{weight:.3g} (row {row})" for row, weight in list(weights.items())[:6]]
    return ", ".join(shown) + (", …" if len(weights) > 6 else "")


def _constant(what: str, mend: str) -> Diagnosis:
    return Diagnosis(
        "constant term",
        f"{what} holds a term that does not depend on the rows (a penalty on the parameters?): it "
        "is counted once for every microbatch.",
        f"{mend}  # a share for every row; or add its gradient once, outside",
    )


def _is_constant(of: Of, pairs: list[Pair]) -> bool:
    """Whether what two losses have more than the loss of both is always the same."""
    first, *others = pairs
    excess = [(-1.0, first.one), (-1.0, first.two), (1.0, first.both)]
    return len(others) > 1 and all(
        of.agree([(1, p.one), (1, p.two), *excess], p.both) for p in others
    )


def _weights(of: Of) -> dict[int, float] | None:
    """Weights of a few rows, relative to the smallest, if the loss is a mean with weights.

    Of a row that has one, all the others can be told; of one that has none, nothing.
    """
    rows = range(min(of.trial.subject.rows, 12))
    return next(filter(None, (_weights_against(of, base, rows) for base in rows)), None)


def _weights_against(of: Of, base: int, rows: range) -> dict[int, float] | None:
    one, shares = of.own(base), {base: 1.0}
    if one is None:
        return None
    for row in rows:
        other, both = of.own(row), of.own(*sorted((base, row)))
        if row == base or both is None:
            continue
        if other is None or not any(x.any() for x in other.terms):
            if not of.agree([(1, one)], both):
                return None
            shares[row] = 0.0  # nothing by itself, and nothing beside another: masked
            continue
        apart = [x - y for x, y in zip(other.terms, one.terms, strict=True)]
        along = [x - y for x, y in zip(both.terms, one.terms, strict=True)]
        share = float(_inner(along, apart) / _inner(apart, apart))
        if not 0 < share < 1 or not of.agree([(1 - share, one), (share, other)], both):
            return None
        shares[row] = share / (1 - share)
    kept = {row: share for row, share in shares.items() if share}
    values = [(share, of.own(row)) for row, share in kept.items()]
    whole = of.own(*sorted(shares))
    if len(shares) < 2 or whole is None:
        return None
    sum_ = [(share / sum(kept.values()), value) for share, value in values if value]
    if not of.agree(sum_, whole):
        return None
    least = min(kept.values())
    return {row: share / least for row, share in sorted(shares.items())}


def _inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return torch.stack([(x * y.conj()).sum().real for x, y in zip(a, b, strict=True)]).sum()


def _times(value: Value, by: float) -> Value:
    return value._replace(terms=[by * x for x in value.terms])


def _coupled(of: Of, pairs: list[Pair]) -> Diagnosis:
    rows = of.trial.subject.everything()
    forward, backward = of(*rows), of(*reversed(rows))
    moved = forward and backward and not of.agree([(1, backward)], forward)
    p = pairs[0]
    values = (float(v.terms[0]) for v in (p.one, p.two, p.both))
    losses = "{:.6g} and {:.6g}, of both together {:.6g}".format(*values)
    return Diagnosis(
        "batch coupling",
        f"what a row adds depends on the other rows: the losses of two microbatches are {losses}, "
        "neither their sum nor a mean"
        + (". It depends on the order of the rows, too" if moved else "")
        + ".",
        "pa.grad(loss, microbatch_size=None)  # the batch at once; or a loss of one row at a time",
    )


def _raises(outcomes: Mapping[Parts, Outcome]) -> list[Diagnosis]:
    for parts, outcome in outcomes.items():
        if outcome.raised is not None:
            sizes = ", ".join(str(len(part)) for part in itertools.islice(parts, 8))
            return [
                Diagnosis(
                    "raises",
                    f"cut into microbatches of {sizes} rows it raises "
                    f"{type(outcome.raised).__name__}: {str(outcome.raised).partition(chr(10))[0]}",
                    "x.view(len(x), -1)  # no size of the full batch written into the loss",
                )
            ]
    return []
