"""A sum of ``Weighted``, term by term: what a microbatch adds to it, once its weights are known.

    total = Σ total of term / its weight in the whole batch
    terms = how much of each term's weight is here: all together 1, over a batch

A microbatch of no weight adds nothing to a term whose total is zero or no number, and a term of no
weight in the whole batch adds nothing at all.
"""

from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from .._base import dtensors
from .weighted import (
    WeightedSum,
    checked_total,
    checked_weight,
    counted_total,
    counts,
    describe,
    sane,
    weight_as_float,
)


# A share of a sum: what rounding in float32 leaves is less than a tenth of it.
MOST = 1e-6
# The weights of a sum of ``Weighted`` over the whole batch. "alone": what it says itself, of a
# batch that is not cut; "counted": they are about to be counted; None: nobody has counted them.
Whole = Tensor | Literal["alone", "counted"] | None


def read_sum(loss: WeightedSum, whole: Whole) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """The total of a sum of ``Weighted``, a weight to pull it by, its terms' weights, its dtype.

    That is the sum of means over the whole batch, and for each term the share of its weight that is
    here; or, where these are about to be counted, the sum of totals, and the weights themselves.
    """
    if whole is None:
        raise UncountedError(len(loss.terms))
    totals, own, keeps, dtype = _apart(loss)
    if isinstance(whole, Tensor) and len(whole) != len(own):
        raise other_terms(len(own), len(whole))
    if isinstance(whole, str) and whole == "counted":
        return _added(totals, keeps, torch.ones_like(own)), own.amax(), own, dtype
    over = own.detach() if isinstance(whole, str) else whole
    there = over != 0
    over = torch.where(there, over, 1.0)
    keeps, shares = keeps & there, torch.where(there, own / over, 0.0)
    weight = shares.amax()
    # anything, where totals count that have no weight here
    weight = torch.where(keeps.any() & (weight == 0), 1.0, weight)
    return _added(totals, keeps, over), weight, shares, dtype


def _apart(loss: WeightedSum) -> tuple[list[Tensor], Tensor, Tensor, torch.dtype]:
    """The totals of the terms of a loss, their weights, which of them count, and its dtype."""
    totals = [
        checked_total(x.total, f"the total of term {i} of the loss", False, True)
        for i, x in enumerate(loss.terms)
    ]
    weights = [weight_as_float(x.weight, totals[0]) for x in loss.terms]
    values = dtensors.with_all_terms([*weights, *totals])  # not those of this rank alone
    own = sane(torch.stack(values[: len(weights)]))
    seen = torch.stack([x.detach().to(own) for x in values[len(weights) :]])
    return totals, own, counts(seen, own), reduce(torch.promote_types, [x.dtype for x in totals])


def taken_apart(loss: WeightedSum) -> tuple[Tensor, torch.dtype]:
    """The totals of the terms of a loss and their weights, two rows; and the dtype of the loss."""
    totals, own, keeps, dtype = _apart(loss)
    pairs = zip(dtensors.with_all_terms(totals), keeps, strict=True)
    kept = [counted_total(x, keep).to(own) for x, keep in pairs]
    return torch.stack([torch.stack(kept), own]), dtype


def sum_of_means(terms: Tensor) -> Tensor:
    """A sum of means, of totals and weights in two rows; NaN where no term has any weight."""
    totals, weights = terms
    value = (totals / torch.where(weights == 0, torch.inf, weights)).sum()
    return torch.where((weights != 0).any(), value, torch.nan)


def _added(totals: list[Tensor], keeps: Tensor, over: Tensor) -> Tensor:
    """The sum of what counts of some totals, each divided."""
    terms: list[Any] = []
    for total, keep, by in zip(totals, keeps, over, strict=True):
        kept = counted_total(total, dtensors.replicated(keep, total))
        kept = kept.float() if kept.dtype.itemsize < 4 else kept
        terms.append(kept / dtensors.replicated(by.to(kept.dtype), total))
    return reduce(torch.add, terms)


def whole_weight(weight: Any) -> Any:
    """What the sums of a window are divided by, from its weight as it was summed.

    For a sum of ``Weighted`` that is a vector, how much of each term's weight was there: all of it
    but for rounding, or the gradients are wrong, and NaN. Each was divided by then. Of no weight at
    all it is 0.
    """
    if not isinstance(weight, Tensor) or not weight.dim():
        return weight
    there = weight.amax() > 0
    whole = (((weight - 1).abs() < MOST) | (weight == 0)).all()
    return torch.where(whole, there.double(), torch.nan)


def given_weights(weights: Any, device: torch.device) -> Tensor | None:
    """The weights of a sum of ``Weighted`` over a whole batch, as a caller counted them."""
    if weights is None:
        return None
    each = [*weights] if isinstance(weights, (list, tuple, Tensor)) else []
    if not each or any(isinstance(x, Tensor) and x.dim() for x in each):
        raise TypeError(
            f"weights is {describe(weights)}; expected a list of numbers, the weight of each term "
            "of the loss over the whole batch."
        )
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([checked_weight(x, zero) for x in each])


def number_of(loss: Any) -> int:
    """How many terms a loss has whose weights have to be counted; 0 of one that is no such sum."""
    return len(loss.terms) if isinstance(loss, WeightedSum) else 0


def skipping_error() -> RuntimeError:
    """The error where nobody can look which microbatches are left out."""
    return RuntimeError(
        "nonfinite='skip' does not work with a sum of Weighted under a transform or "
        "torch.compile, which cannot tell whose weights to leave out. Use 'propagate', or call it "
        "outside."
    )


class UncountedError(TypeError):
    """A loss is a sum of so many ``Weighted``, and nobody has counted their weights."""

    def __str__(self) -> str:
        (count,) = self.args
        return (
            f"the loss is a sum of {count} Weighted, each a mean over its own weight, but the "
            "weights of the whole batch are not known here. For a batch, call step(state, batch), "
            "grad(loss, microbatch_size=...) or value, which count them first. For a stream, "
            f"count them beforehand and pass {count} numbers: update(..., weights=[...]). "
            "Elsewhere, return each term separately."
        )


def other_terms(came: int, expected: int) -> ValueError:
    """The error for a microbatch whose loss has other terms than those of others."""
    return ValueError(
        f"the loss is a sum of {came} Weighted; expected {expected}, as in the weights that were "
        "counted or given. Return the same number of terms for every microbatch, on every rank. A "
        "term without weight is Weighted(total, 0)."
    )
