"""What a microbatch weighs, how its gradient is pulled, and how that enters a sum.

    sum += where(keep, factor * pull(cotangent), 0)

The gradient of a mean is pulled with its samples and that of ``Weighted`` as it is, because sums
add up where means do not. But a sum over 2,000 tokens overflows in fp16 where their mean does not.
So the cotangent is the weight divided by a power of two, and that power is the factor, which
multiplies the gradient once it has been cast to the sum's dtype: exact, with the range of a mean.
What adds nothing is selected and never multiplied away, since NaN * 0 is NaN; and no temporary is
as large as a leaf.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import dtensors, trees
from .._base.torch_internals import kernels
from . import losses, weighted


LARGE = 2**20  # bytes; smaller gradients are added in one foreach call, which is faster
CHUNK = 2**18  # elements of a temporary; whole leaves would cost 8 % of a training loop's peak


def is_large(x: Tensor) -> bool:
    """Whether a gradient is added by itself, as soon as it is there."""
    return x.numel() * x.itemsize >= LARGE  # a sparse one has no ``nbytes``


# A gradient enters a sum ---------------------------------------------------------------------


class Weighing(NamedTuple):
    """What a microbatch's gradient is pulled with and multiplied by, and whether it counts."""

    cotangent: Tensor
    factor: float | Tensor
    keep: Tensor | None  # None: it counts


def add_gradient_(total: Tensor, grad: Tensor, weighing: Weighing) -> None:
    """Add one gradient in place."""
    factor, keep = weighing.factor, weighing.keep
    if keep is None and not isinstance(factor, Tensor):
        total.add_(grad, alpha=factor)
    elif grad.is_sparse:
        grad = grad.coalesce()
        values = term_of(grad.values(), total.dtype, weighing)
        total.index_put_(tuple(grad.indices()), values, accumulate=True)
    elif grad.numel() <= CHUNK:
        total.add_(term_of(grad, total.dtype, weighing))
    else:
        longest = max(range(grad.dim()), key=lambda d: grad.shape[d])
        size = max(1, CHUNK * grad.shape[longest] // grad.numel())
        for piece, term in zip(total.split(size, longest), grad.split(size, longest), strict=True):
            piece.add_(term_of(term, total.dtype, weighing))


def add_gradients_(totals: list[Tensor], grads: list[Tensor], weighing: Weighing) -> None:
    """Add many small gradients in place, in few calls whatever their number."""
    factor, keep = weighing.factor, weighing.keep
    if keep is None and not isinstance(factor, Tensor):
        if totals:  # torch's own raises on empty lists
            kernels.foreach_add_(totals, grads, alpha=factor)
        return
    alike: dict[Any, list[int]] = {}
    for i, (total, grad) in enumerate(zip(totals, grads, strict=True)):
        if grad.is_sparse:
            add_gradient_(total, grad, weighing)
        else:
            alike.setdefault((grad.dtype, total.dtype, grad.device), []).append(i)
    for members in alike.values():
        flat = torch.cat([grads[i].reshape(-1) for i in members])
        terms = term_of(flat, totals[members[0]].dtype, weighing).split(
            [grads[i].numel() for i in members]
        )
        kernels.foreach_add_(
            [totals[i] for i in members],
            [term.view(grads[i].shape) for i, term in zip(members, terms, strict=True)],
        )


def divided(sums: list[Tensor], *by: Any, own: bool, same: bool = False) -> list[Tensor]:
    """Sums divided by one number after the other, in place if they are the caller's own.

    ``same`` says that what is divided by 1 may come out as it is, which its own always may.
    Complex sums are divided as pairs of real numbers: torch's complex division by a number rounds
    more often, and so the bits of a parameter would depend on how it is written down.
    """
    parts = [trees.real_parts(x) if x.is_complex() else x for x in sums]
    together = own and trees.at_once(parts)
    for x in by:  # one at a time, as their product may overflow
        if not isinstance(x, Tensor) and x == 1 and (own or same):
            continue
        number = trees.scalars_of(x)
        if together:
            kernels.foreach_div_(parts, number(parts[0]))
        else:
            divide = Tensor.div_ if own else torch.div
            parts = [divide(x, number(x)) for x in parts]
    pairs = zip(parts, sums, strict=True)
    return [torch.view_as_complex(x) if total.is_complex() else x for x, total in pairs]


def nothing_like(grad: Tensor) -> Tensor:
    """A gradient without memory, which a backward pass hands on in place of the one added."""
    return torch.zeros_like(grad) if grad.is_sparse else grad.new_zeros(()).expand_as(grad)


def term_of(grad: Tensor, dtype: torch.dtype, weighing: Weighing) -> Tensor:
    """What is added to a sum, for one gradient: a dense tensor of the dtype of the sum."""
    factor, keep = weighing.factor, weighing.keep
    grad = grad.to_dense() if grad.is_sparse else grad
    term = grad if grad.dtype == dtype else grad.to(dtype)  # a vmap asks for its time
    if isinstance(factor, Tensor):
        term = term * trees.as_scalar_of(term, factor)
    elif factor != 1.0:  # compilers keep a product with 1, and miss that mm and a sum are addmm
        term = term * factor
    return term if keep is None else torch.where(keep.to(term.device), term, 0.0)


# What a microbatch weighs --------------------------------------------------------------------


class Microbatch(NamedTuple):
    """What a microbatch came to, beside its gradient. Nothing is computed before ``settle``."""

    value: Tensor
    times: float  # its total is value * times
    weight: float | Tensor  # of its mean, and of its aux; its samples where the loss is a plain sum
    dtype: torch.dtype  # of the loss
    weighted: bool  # whether the loss is ``Weighted``
    terms: Tensor | tuple[()] = ()  # of a sum of such: see losses.read
    finite: Tensor | None = None  # None: the total tells
    aux: Any = ()
    squares: Tensor | tuple[()] = ()  # see with_squares
    reached: bool = False  # whether the loss reached other ranks


class NoRowsError(ValueError):
    """A loss is a mean over samples, of which nothing tells how many there are."""


def power_of_two(rows: int) -> float:
    """The power of two at or above a number of samples."""
    return float(1 << max(rows - 1, 0).bit_length())


def enter(
    seen: losses.Read, shape: losses.Shape, rows: int | None, reduction: losses.Reduction
) -> Microbatch:
    """The entry of a microbatch, from what its loss returned."""
    value, times = seen.total, 1.0
    if isinstance(seen.weight, Tensor):
        value = torch.where(weighted.counts(seen.total, seen.weight), seen.total, 0.0)
        weight = seen.weight
    elif reduction == "sum":
        weight = float(rows or 0)
    elif rows is None:
        raise NoRowsError(
            "the loss is a mean over samples, but no batch argument holds a tensor that tells how "
            "many. Return Weighted(total, weight), pass reduction='sum', or name the batch "
            "arguments in batch_argnums."
        )
    else:
        times = weight = float(rows)
        value = value if rows else torch.zeros_like(value)  # the mean of nothing is NaN
    return Microbatch(
        value=value,
        times=times,
        weight=weight,
        dtype=shape.dtype,
        weighted=shape.weighted,
        terms=seen.terms,
    )


def weigh(
    seen: losses.Read, rows: int | None, reduction: losses.Reduction, unit: float | None = None
) -> Weighing | None:
    """How the gradient of a microbatch enters the sums; None where it is known to add nothing.

    The sums are multiples of ``unit``, a power of two that is the same for a whole window, unless
    it is None: then nothing but the cotangent of a mean differs between its microbatches.
    """
    total = seen.total
    if not isinstance(seen.weight, tuple):
        weight = seen.weight
        power = _power_of_two(weight.detach())
        cotangent = torch.ones_like(total) * (1 / power).to(total.dtype)
        return Weighing(cotangent, power / (unit or 1.0), weighted.counts(total, weight))
    if reduction == "sum":
        return Weighing(torch.ones_like(total), 1.0 / (unit or 1.0), None)
    if not rows:
        return None
    if unit is None and torch.compiler.is_dynamo_compiling():
        # As a tensor, since a graph may be made for any number of samples.
        count = torch.full((), rows, dtype=torch.float64, device=total.device)
        power = _power_of_two(count)
        return Weighing(torch.ones_like(total) * (count / power).to(total.dtype), power, None)
    power = unit or power_of_two(rows)
    return Weighing(torch.full_like(total, rows / power), power / (unit or 1.0), None)


def with_squares(
    entry: Microbatch, norms: Sequence[Tensor | None], weighing: Weighing, unit: float | None
) -> Microbatch:
    """A microbatch with |s|² / w for each s that it adds to a sum, and last a 1 if w is not 0.

    Summed over microbatches, these tell how much gradients scatter: see noise_scale.py.
    """
    none = torch.zeros_like(dtensors.local(entry.value), dtype=torch.float64)
    weight = none + entry.weight
    wide = torch.stack([none if n is None else n.to(none.device).double() for n in norms])
    wide = wide * (weighing.factor * (unit or 1.0))
    squares = quotient(wide * wide, weight)
    return entry._replace(squares=torch.cat([squares, (weight != 0).double().unsqueeze(0)]))


def quotient(x: Any, by: Tensor) -> Tensor:
    """``x / by``, and zero where ``by`` is zero: there the derivative is zero too.

    That of ``where(by != 0, x / by, 0)`` would be 0 times infinity.
    """
    some = by != 0
    return torch.where(some, x / torch.where(some, by, 1.0), 0.0)


def scaled(cotangent: Tensor, scale: Tensor | None) -> Tensor:
    """The cotangent that pulls a gradient of the scaled loss."""
    return cotangent if scale is None else cotangent * trees.as_scalar_of(cotangent, scale)


def _power_of_two(weight: Tensor) -> Tensor:
    """The power of two at or above a weight, computed where it lies: nothing may wait for it."""
    mantissa, _ = torch.frexp(weight)
    # The lower end keeps the reciprocal of a tiny weight inside float32.
    power = torch.where(mantissa == 0.5, weight, weight / mantissa).clamp(min=2.0**-24)
    return torch.where(weight > 0, power, 1.0)


def finite_wholly(
    entry: Microbatch,
    flags: Iterable[Tensor],
    keep: Tensor | None,
    layouts: dtensors.Layouts | None,
) -> Tensor:
    """Whether the total of a microbatch and all of its gradient are finite, or have no weight.

    With layouts, of gradients of which each rank has its part, all ranks say so together.
    """
    ok = trees.is_finite(dtensors.local(entry.value))
    for flag in flags:
        ok = ok & flag.to(ok.device)
    if layouts is not None:
        ok = dtensors.true_on_all_ranks(ok, layouts)
    return ok if keep is None else ok | ~keep


def without_skipped(entry: Microbatch, finite: Tensor) -> Microbatch:
    """An entry that is zero unless it is finite: a skipped microbatch takes its weight along."""
    none = torch.zeros_like(finite, dtype=torch.float64)
    value = torch.where(dtensors.replicated(finite, entry.value), entry.value, 0.0)
    squares, terms = (
        torch.where(finite, x, 0.0) if isinstance(x, Tensor) else x
        for x in (entry.squares, entry.terms)
    )
    return entry._replace(
        value=value,
        weight=torch.where(finite, none + entry.weight, none),
        finite=finite,
        terms=terms,
        squares=squares,
    )
