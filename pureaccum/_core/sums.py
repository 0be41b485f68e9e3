"""How a gradient enters a sum: ``sum += where(keep, factor * grad, 0)``.

Selected and never multiplied away, since NaN * 0 is NaN; scaled only after the cast to the
sum's dtype; and no temporary is as large as a leaf.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.torch_internals import foreach_add_
from .._base.trees import as_scalar_of, scalars_of


LARGE = 2**20  # bytes; smaller gradients are added in one foreach call, which is faster
CHUNK = 2**18  # elements of a temporary; whole leaves would cost 8 % of a training loop's peak


class Weighing(NamedTuple):
    """What a microbatch's gradient is pulled with, multiplied by, and whether it counts."""

    cotangent: Tensor
    factor: float | Tensor
    keep: Tensor | None  # None: it does


def add_(total: Tensor, grad: Tensor, weighing: Weighing) -> None:
    """Add one gradient in place."""
    factor, keep = weighing.factor, weighing.keep
    if keep is None and not isinstance(factor, Tensor):
        total.add_(grad, alpha=factor)
    elif grad.is_sparse:
        grad = grad.coalesce()
        values = _term(grad.values(), total, weighing)
        total.index_put_(tuple(grad.indices()), values, accumulate=True)
    elif grad.numel() <= CHUNK:
        total.add_(_term(grad, total, weighing))
    else:
        longest = max(range(grad.dim()), key=lambda d: grad.shape[d])
        size = max(1, CHUNK * grad.shape[longest] // grad.numel())
        for piece, term in zip(total.split(size, longest), grad.split(size, longest), strict=True):
            piece.add_(_term(term, total, weighing))


def add_all_(totals: list[Tensor], grads: list[Tensor], weighing: Weighing) -> None:
    """Add many small gradients in place, in few calls whatever their number."""
    factor, keep = weighing.factor, weighing.keep
    if keep is None and not isinstance(factor, Tensor):
        foreach_add_(totals, grads, alpha=factor)
        return
    alike: dict[Any, list[int]] = {}
    for i, (total, grad) in enumerate(zip(totals, grads, strict=True)):
        if grad.is_sparse:
            add_(total, grad, weighing)
        else:
            alike.setdefault((grad.dtype, total.dtype, grad.device), []).append(i)
    for members in alike.values():
        flat = torch.cat([grads[i].reshape(-1) for i in members])
        terms = _term(flat, totals[members[0]], weighing).split([grads[i].numel() for i in members])
        foreach_add_(
            [totals[i] for i in members],
            [term.view(grads[i].shape) for i, term in zip(members, terms, strict=True)],
        )


def added_to(total: Tensor, grad: Tensor, weighing: Weighing) -> Tensor:
    """The sum with one gradient added, a new tensor: what transforms can see through."""
    if grad.is_sparse:
        grad = grad.to_dense()
    return total + _term(grad, total, weighing)


def divided(sums: list[Tensor], *by: Tensor, own: bool) -> list[Tensor]:
    """Sums divided by one number after the other, in place where they may be written to.

    The real and the imaginary part of complex ones apart: torch's complex division by a number
    rounds more often, and so the bits of a parameter would depend on how it is written down.
    """
    divide, numbers = Tensor.div_ if own else torch.div, [*map(scalars_of, by)]
    quotients: list[Tensor] = []
    for total in sums:
        parts = torch.view_as_real(total.resolve_conj()) if total.is_complex() else total
        for number in numbers:  # one at a time: their product may overflow
            parts = divide(parts, number(parts))
        quotients.append(torch.view_as_complex(parts) if total.is_complex() else parts)
    return quotients


def nothing_like(grad: Tensor) -> Tensor:
    """A gradient without memory, for a backward pass to hand on in place of the one added."""
    return torch.zeros_like(grad) if grad.is_sparse else grad.new_zeros(()).expand_as(grad)


def _term(grad: Tensor, total: Tensor, weighing: Weighing) -> Tensor:
    factor, keep = weighing.factor, weighing.keep
    term = grad.to(total.dtype)
    if isinstance(factor, Tensor):
        term = term * as_scalar_of(total, factor)
    elif factor != 1.0:  # compilers keep a product with 1, and miss that mm and a sum are addmm
        term = term * factor
    return term if keep is None else torch.where(keep.to(total.device), term, 0.0)
