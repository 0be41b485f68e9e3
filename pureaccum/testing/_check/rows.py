"""What a loss is of its rows, and how to mend it: a sum, a mean, one with weights, or coupled."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._base import all_finite
from ..._core import Weighted
from .report import Diagnosis
from .subject import Parts, Rows
from .trials import Bound, Outcome, Result, Trial, errors, norm, terms


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
                value = self.called(rows)
            except Exception:
                value = None
            self.known[rows] = value if value and all_finite(value.terms) else None
        return self.known[rows]

    def called(self, rows: Rows) -> Value:
        """Of whatever weight: an accumulator would leave out what has none."""
        subject, weights = self.trial.subject, [0.0]

        def total(params: Any, part: Any) -> Any:
            out = subject.loss_fn(params, part)
            loss = out[0] if subject.has_aux else out
            if not isinstance(loss, Weighted):
                return loss
            weights.append(float(loss.weight))
            return loss.total

        plain = subject._replace(loss_fn=total, has_aux=False, reduction="sum")
        return Value(terms(plain.sums(rows, next(self.seeds))), weights[-1])

    def own(self, *rows: int) -> Value | None:
        """The loss by itself: the total of ``Weighted`` over its weight."""
        value = self(*rows)
        if value is None or not self.weighted:
            return value
        return times(value, 1 / value.weight) if value.weight else None

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


def pairs_of(of: Of, shown: Sequence[Parts]) -> Iterator[Pair]:
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


def has_constant(of: Of, pairs: list[Pair]) -> bool:
    """Whether what two losses have more than the loss of both is always the same."""
    first = pairs[0]
    others = [p for p in pairs if p.one is not first.one and p.one is not first.two]
    excess = [(-1.0, first.one), (-1.0, first.two), (1.0, first.both)]
    return len(others) > 1 and all(
        of.agree([(1, p.one), (1, p.two), *excess], p.both) for p in others
    )


def weights_of(of: Of) -> dict[int, float] | None:
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


def times(value: Value, by: float) -> Value:
    return value._replace(terms=[by * x for x in value.terms])


# Several means ---------------------------------------------------------------------------


class Shares(NamedTuple):
    """A row's shares of what a few rows count, in each mean that it is part of."""

    beside: Rows
    row: int
    shares: tuple[float, ...]


COPIES = 6
OTHERS = 8  # rows


def several_means(of: Of) -> Shares | None:
    """The clearest row, if the loss is a sum of two means, or a total over a count."""
    rows = of.trial.subject.rows
    random = torch.Generator().manual_seed(rows)
    for size in (2, 3, 4, 5, 3, 4):  # some means are over nothing, for a few rows
        order = torch.randperm(rows, generator=random).tolist()
        beside = tuple(sorted(order[:size]))
        found: list[Shares] = []
        for row in order[-OTHERS:]:
            shares = _shares(of, beside, row)
            if shares is None:
                break
            found.append(Shares(beside, row, shares))
        else:
            if several := [it for it in found if len(it.shares) > 1]:
                return max(several, key=lambda it: it.shares[1] - it.shares[0])
            of_one = {it.shares[0] > 0: it for it in found if it.shares}
            if len(of_one) > 1:  # some rows count, and some that do not add all the same
                return of_one[False]
    return None


def _shares(of: Of, beside: Rows, row: int) -> tuple[float, ...] | None:
    """A row's shares, the smaller first; () where it adds nothing, None where it has none."""
    values = [of(*beside, *[row] * x) for x in range(COPIES + 1)]
    other = of(*[row] * COPIES, *beside)
    if other is None or any(value is None for value in values):
        return None
    start, *more = [_vector(value) for value in values if value]
    x = torch.arange(1.0, COPIES + 1, dtype=torch.float64)[:, None]
    y = (torch.stack(more) - start) / x
    noise = of.trial.bound.share * float(max(v.norm() for v in (start, *more)))
    if (more[-1] - _vector(other)).norm() > noise:
        return None  # the order of the rows counts
    if y.norm() <= noise:
        return ()
    line, bend = y.diff(dim=0), (x * y).diff(dim=0)
    share = -float((line * bend).sum() / (bend * bend).sum())
    if (line + share * bend).norm() <= noise:
        return (share if abs(share) > 1e-6 else 0.0,)
    columns = [(x**k * y).diff(n=2, dim=0).flatten() for k in range(3)]
    sum_, product = torch.linalg.lstsq(torch.stack(columns[1:], 1), -columns[0]).solution.tolist()
    if (columns[0] + sum_ * columns[1] + product * columns[2]).norm() > noise:
        return None
    gap = sum_**2 - 4 * product
    if not gap > (1e-3 * sum_) ** 2:
        return None
    low, high = (sum_ - gap**0.5) / 2, (sum_ + gap**0.5) / 2
    return (low if abs(low) > 1e-6 else 0.0, high) if low > -1e-6 else None


def _vector(value: Value) -> Tensor:
    parts = [torch.view_as_real(x) if x.is_complex() else x for x in value.terms]
    return torch.cat([x.to("cpu", torch.float64).flatten() for x in parts])


def of_rows(
    trial: Trial,
    weighted: bool,
    seeds: Iterator[int],
    outcomes: Mapping[Parts, Outcome],
    shown: Sequence[Parts],
) -> list[Diagnosis]:
    """What the loss is of its rows, in place of what it is said to be."""
    of = Of(trial, seeds, weighted, {})
    pairs = list(pairs_of(of, shown))
    if not pairs:
        return raises(outcomes)
    found = _of_weighted(of, pairs) if weighted else _of_plain(of, pairs)
    # as declared, and off all the same: by a row's place
    return [*found, *raises(outcomes)] or [_coupled(of, pairs)]


def _of_plain(of: Of, pairs: list[Pair]) -> list[Diagnosis]:
    declared = of.trial.subject.reduction
    if all(of.agree([(1, p.one), (1, p.two)], p.both) for p in pairs):
        if declared == "sum":
            return []
        return [
            Diagnosis(
                "sum as mean",
                "the losses of two microbatches add up to the loss of both: it is a sum over its "
                "rows and was declared a mean. With k equal microbatches the gradient is 1/k of "
                "the full batch's.",
                'pa.grad(loss, microbatch_size=..., reduction="sum")  # or .mean() in the loss',
            )
        ]
    if all(of.agree([(p.a, p.one), (p.b, p.two)], times(p.both, p.a + p.b)) for p in pairs):
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
    weights = weights_of(of)
    if weights is None:
        if has_constant(of, pairs):
            return [_constant("the loss", "return (per_row + penalty / rows_of_batch).sum()")]
        shares = several_means(of)
        return [_coupled(of, pairs) if shares is None else _several(shares)]
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
        return _lost(pairs)
    by = [(p.one.weight, p.two.weight, p.both.weight) for p in pairs]
    if all(
        of.agree([(a, p.one), (b, p.two)], times(p.both, c))
        for p, (a, b, c) in zip(pairs, by, strict=True)
    ):
        return [
            Diagnosis(
                "weight",
                "the total of Weighted is a mean already: it is divided by the weight once more.",
                "return pa.Weighted(per_token.sum(), mask.sum())  # a sum, not a mean",
            )
        ]
    if has_constant(of, pairs):
        mend = "return pa.Weighted(total + weight * penalty, weight)"
        return [_constant("the total of Weighted", mend)]
    weights = weights_of(of)
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


def _lost(pairs: list[Pair]) -> list[Diagnosis]:
    """All adds up, but for what a microbatch of weight zero leaves out."""
    values = [value for p in pairs for value in (p.one, p.two, p.both)]
    if not any(value.weight == 0 and any(x.any() for x in value.terms) for value in values):
        return []
    return [
        Diagnosis(
            "weight",
            "some rows have a weight of zero and a loss all the same: a microbatch of nothing but "
            "these adds nothing, whatever its total.",
            "return pa.Weighted((per_row * weight).sum(), weight.sum())  # no weight, no loss",
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


def _several(it: Shares) -> Diagnosis:
    beside = f"beside rows {', '.join(map(str, it.beside))}, row {it.row}"
    mend = "No weight is right for both; divided by what the whole batch counts, it is a sum."
    if len(it.shares) == 1:
        return Diagnosis(
            "several means",
            "it is a total over a count that some rows are no part of, a ratio of two means: "
            f"{beside} adds to the total, and nothing to the count. {mend}",
            'return per_row.sum() / batch["positives"]  # a Python number; reduction="sum"',
        )
    return Diagnosis(
        "several means",
        f"it is a sum of means over different things, such as rows and tokens: {beside} counts as "
        f"{it.shares[0]:.3g} of them in one and as {it.shares[1]:.3g} in another. {mend}",
        'return a.sum() / batch["rows"] + b.sum() / batch["tokens"]  # Python numbers; '
        'reduction="sum"',
    )


def _coupled(of: Of, pairs: list[Pair]) -> Diagnosis:
    rows = of.trial.subject.everything()
    forward, backward = of(*rows), of(*reversed(rows))
    moved = forward and backward and not of.agree([(1, backward)], forward)
    clearest = max(pairs, key=lambda p: _distance(*(float(v.terms[0]) for v in p[2:])))
    values = [float(value.terms[0]) for value in clearest[2:]]
    says = "the losses of two microbatches are {:.6g} and {:.6g}, of both together {:.6g}, neither"
    if not _distance(*values):
        says = "the gradient of two microbatches together is neither"
    return Diagnosis(
        "batch coupling",
        f"what a row adds depends on the other rows: {says.format(*values)} their sum nor a mean."
        + (" It depends on the order of the rows, too." if moved else ""),
        "z = pa.microbatch(encode, microbatch_size=...)(params, batch), and the loss of all rows "
        "in plain code; or pa.microbatch(counts, microbatch_size=..., reduce='sum'), and then a "
        "function of the sums",
    )


def _distance(one: float, two: float, both: float) -> float:
    """How far the loss of both is from the sum of two and from anything between them."""
    between = max(min(one, two) - both, both - max(one, two), 0.0)
    return min(abs(one + two - both), between) / (abs(one) + abs(two) + abs(both) or 1.0)


def raises(outcomes: Mapping[Parts, Outcome]) -> list[Diagnosis]:
    """What microbatches raise."""
    for parts, outcome in outcomes.items():
        if outcome.raised is not None:
            sizes = ", ".join(str(len(part)) for part in parts[:8])
            return [
                Diagnosis(
                    "raises",
                    f"cut into microbatches of {sizes} rows it raises "
                    f"{type(outcome.raised).__name__}: {str(outcome.raised).partition(chr(10))[0]}",
                    "x.view(len(x), -1)  # any number of rows, one as well; no size written down",
                )
            ]
    return []
