"""A loss that states the weight that it is a mean over, and sums of such losses.

Weighted(a, n)                            a / n, of the whole batch
Weighted(a, n) + 0.3 * Weighted(b, k)     a / n + 0.3 * b / k: each over its own weight
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import dtensors, reprs, trees
from .._base.torch_internals import functorch


class Weighted(NamedTuple):
    """A loss that is ``total / weight``: a mean over tokens, over a mask, over anything you count.

    The rule, for the microbatches of a batch::

        value = Σ total / Σ weight        gradient = Σ d total / d params / Σ weight

    Return it from a loss in place of a scalar. It overrides ``reduction``, and gives the mean over
    the whole batch however unevenly the weight is spread. A microbatch of weight zero adds its
    total if that is a non-zero number (for example a sum over all anchors, divided by the number of
    positives). Otherwise it adds exactly nothing, even if its total is NaN. A batch of weight zero
    has the value NaN, and a step over it is not applied. The gradient treats the weight as a
    constant, and one that depends on the parameters raises: pass ``weight.detach()`` if that is
    meant. An outer transform (a meta-gradient with respect to sample weights) differentiates
    through the weight.

    ``number * Weighted``, ``-Weighted`` and ``Weighted / number`` scale the total. A sum of several
    is a loss too, in which each term is a mean over its own weight::

        Weighted(loss, tokens) + 0.3 * Weighted(balance, sequences) - Weighted(kl, positions)

    A term without weight in the whole batch adds nothing; the value is NaN only if no term has
    weight. The weights must be known before the first gradient, so a batch that is cut goes through
    the loss twice, first for its weights. That takes about 1.5 times as long and no more memory.
    (It goes through once if all terms share one tensor as weight.) A stream cannot be counted
    first: pass ``weights=`` to ``update``. Every microbatch, on every rank, must have the same
    number of terms.

    Attributes:
        total: The sum of the losses, a 0-d tensor.
        weight: The divisor: a 0-d tensor or a number, not negative.

    Example:
        >>> import torch
        >>> from pureaccum import value
        >>> def loss(w, batch):
        ...     return Weighted((w * batch["x"] * batch["mask"]).sum(), batch["mask"].sum())
        >>> batch = {"x": torch.tensor([1.0, 3.0, 7.0]), "mask": torch.tensor([1, 1, 0])}
        >>> value(loss, microbatch_size=1)(torch.tensor(2.0), batch)
        tensor(4.)
        >>> def both(w, batch):
        ...     return loss(w, batch) + 0.5 * Weighted(w * len(batch["x"]), len(batch["x"]))
        >>> value(both, microbatch_size=1)(torch.tensor(2.0), batch)
        tensor(5.)
    """

    total: Tensor
    weight: Tensor | float

    __repr__ = reprs.of_record

    def __mul__(self, factor: Any) -> "Weighted":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Weighted(self.total * _number(factor, "*"), self.weight)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Weighted":
        return Weighted(self.total / _number(divisor, "/"), self.weight)

    def __neg__(self) -> "Weighted":
        return Weighted(-self.total, self.weight)

    def __add__(self, other: Any) -> Any:
        return WeightedSum((self,)) + other

    def __sub__(self, other: Any) -> Any:
        return self + _negative(other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __radd__ = __add__


class WeightedSum(NamedTuple):
    """A sum of means, each over its own weight: the result of adding ``Weighted``."""

    terms: tuple[Weighted, ...]  # each with its coefficient in the total

    __repr__ = reprs.of_record

    def __mul__(self, factor: Any) -> "WeightedSum":  # pyright: ignore[reportIncompatibleMethodOverride]
        return WeightedSum(tuple([term * factor for term in self.terms]))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "WeightedSum":
        return WeightedSum(tuple([term / divisor for term in self.terms]))

    def __neg__(self) -> "WeightedSum":
        return WeightedSum(tuple([-term for term in self.terms]))

    def __add__(self, other: Any) -> Any:
        if type(other) is int and other == 0:  # where Python's sum() begins
            return self.terms[0] if len(self.terms) == 1 else self
        if not isinstance(other, (Weighted, WeightedSum)):
            raise TypeError(
                f"{describe(other)} and a Weighted were added or subtracted, but the other has no "
                "weight. Use Weighted(other, weight). Put a penalty on params into a total as "
                "weight * penalty, or use Weighted(rows * penalty, rows)."
            )
        terms = [*self.terms]
        for term in (other,) if isinstance(other, Weighted) else other.terms:
            # Numbers may be equal by chance.
            plain = type(term.weight) is type(term.total) is Tensor
            alike = [i for i, x in enumerate(terms) if plain and x.weight is term.weight]
            if alike:
                terms[alike[0]] = _over_one_weight(terms[alike[0]], term)
            else:
                terms.append(term)
        return terms[0] if len(terms) == 1 else WeightedSum(tuple(terms))

    def __sub__(self, other: Any) -> Any:
        return self + _negative(other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    __radd__ = __add__


def _negative(x: Any) -> Any:
    return -x if isinstance(x, (Weighted, WeightedSum)) else x


def _over_one_weight(a: Weighted, b: Weighted) -> Weighted:
    """The sum of two means over one weight, of whose totals each counts as it does by itself."""
    weight: Any = a.weight
    first, second = (counted_total(x, counts(x, weight)) for x in (a.total, b.total))
    return Weighted(first + second, weight)


def _number(factor: Any, sign: str) -> Any:
    if isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.dim() == 0):
        return factor
    raise TypeError(
        f"Weighted {sign} {describe(factor)} is not defined; expected a number or a 0-d tensor, "
        "which scales the total."
    )


# What of it counts ----------------------------------------------------------------------------


def counts(total: Tensor, weight: Tensor) -> Tensor:
    """Whether a ``Weighted`` adds anything: it has a weight, or else a total that is a number.

    A total without a weight is the numerator of a ratio whose denominator is elsewhere in the
    batch. A total that is zero or not finite comes from a microbatch that is masked throughout.
    """
    # all ranks know that of a DTensor: see known_to_all_ranks
    total = dtensors.local(total.detach())
    return (weight != 0) | ((total != 0) & ((total - total) == 0))


def counted_total(total: Tensor, keep: Tensor) -> Tensor:
    """A total or zero; where the host can look, without its graph, whose zeros may be NaN."""
    known = trees.known(keep)
    if known is None:
        # with a number in its place, tangents of a 0-d tensor are float64
        return torch.where(keep, total, torch.zeros_like(total))
    return total if known else torch.zeros_like(total)


# What a loss may return -----------------------------------------------------------------------


def checked_total(loss: Any, what: str, several: bool, weighted: bool = False) -> Tensor:
    """A loss that is a number, or ``several`` where that is allowed, or an error about it."""
    if not isinstance(loss, Tensor):
        kind = "" if several else "0-d "
        cause = (
            "Likely cause: the function has no return statement."
            if loss is None
            else "If it has an auxiliary output, pass has_aux=True."
            + several * " Join several outputs in one tensor: torch.stack or torch.cat."
            if isinstance(loss, tuple)
            else ""
        )
        raise TypeError(
            f"{what} is {describe(loss)}; expected a {kind}floating-point tensor. {cause}".rstrip()
        )
    if loss.dim() != 0 and (weighted or not several):
        cause = (
            "Weighted holds one number and its weight. For a Jacobian, return a plain tensor."
            if several
            else "Reduce it over its microbatch: .mean() (or .sum() with reduction='sum'). Or "
            "return Weighted(total, weight) for a mean over something other than samples."
        )
        raise ValueError(f"{what} has shape {tuple(loss.shape)}; expected a 0-d tensor. {cause}")
    if not loss.is_floating_point():
        cause = (
            ("Take torch.view_as_real of it, " if several else "Take ")
            + "its real part or its absolute value."
            if loss.is_complex()
            else "An integer has no gradient. Likely cause: an accuracy, or a cast."
        )
        raise TypeError(f"{what} is {loss.dtype}; expected a real floating-point tensor. {cause}")
    return loss


def checked_weight(weight: Any, total: Tensor) -> Tensor:
    """A weight; NaN if it is none, unless that is for all ranks to say."""
    weight = weight_as_float(weight, total)
    return weight if dtensors.is_sharded(functorch.innermost(weight)) else sane(weight)


def weight_as_float(weight: Any, total: Tensor) -> Tensor:
    """A weight as float64, on the device of a total, or an error that says what one is."""
    if isinstance(weight, (bool, int, float)):
        known = float(weight) if 0 <= weight < float("inf") else float("nan")
        return torch.full((), known, dtype=torch.float64, device=total.device)
    if not isinstance(weight, Tensor) or weight.dim() != 0 or weight.is_complex():
        came = (
            f"a {weight.dtype} tensor of shape {tuple(weight.shape)}"
            if isinstance(weight, Tensor)
            else describe(weight)
        )
        raise TypeError(
            f"the weight of Weighted is {came}; expected a real 0-d tensor or a number, such as "
            "the sum of a mask, not the mask itself."
        )
    return weight.to(total.device, torch.float64)


def sane(weight: Tensor) -> Tensor:
    """A weight; NaN in place of one that is negative or infinite.

    There is no mean over such a weight, and nothing may stop to look at it: so the result is NaN.
    """
    return torch.where((weight >= 0) & (weight < torch.inf), weight, torch.nan)


def describe(value: Any) -> str:
    """What a loss returned, or a Weighted was computed with, in words."""
    if value is None:
        return "None"
    if isinstance(value, (Weighted, WeightedSum)):
        return "a Weighted" if isinstance(value, Weighted) else "a sum of Weighted"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    return reprs.kind(value)
