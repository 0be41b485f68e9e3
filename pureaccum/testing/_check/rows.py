"""What a loss is of its rows, and how to mend it: a sum, a mean, one with weights, or coupled."""

from collections.abc import Iterator, Mapping, Sequence

from .cuts import Parts
from .report import Diagnosis
from .sets import Of, Pair, Shares, has_constant, pairs_of, several_means, times, weights_of
from .trials import Outcome, Trial


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
