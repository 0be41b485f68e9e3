"""The Jacobian of one sample: its outputs are pulled back, each number by itself.

    vmap(pull)(identity)

A number is an output without dims, whose Jacobian is its gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._base import gradients
from .._core import Pull, Wrt


def pulled_back(total: Tensor, pull: Pull | None, wrt: Wrt, by_vmap: bool) -> list[Tensor]:
    """The Jacobian of what a forward pass gave: (*total.shape, *leaf.shape) for each leaf.

    Args:
        total: What it gave.
        pull: From a cotangent to gradients; None for plain autograd.
        wrt: What to differentiate with respect to.
        by_vmap: Whether one pass back takes all numbers; else they are taken one by one.
    """

    def of(cotangent: Tensor) -> list[Tensor]:
        grads: Sequence[Tensor | None] = [None] * len(wrt.leaves)
        if pull is not None:
            grads = pull(cotangent)
        elif total.requires_grad:
            grads = gradients(total, wrt.leaves, cotangent, again=total.dim() > 0)
        return [_dense(x, g) for x, g in zip(wrt.leaves, grads, strict=True)]

    if total.dim() == 0:
        return of(torch.ones_like(total))
    many = total.numel()
    basis = torch.eye(many, dtype=total.dtype, device=total.device).view(many, *total.shape)
    if by_vmap:
        rows = torch.func.vmap(of, randomness="same")(basis)  # what is run again draws the same
    elif many:
        rows = [torch.stack(xs) for xs in zip(*map(of, basis), strict=True)]
    else:
        rows = [x.new_zeros(0, *x.shape) for x in wrt.leaves]
    return [x.view(*total.shape, *x.shape[1:]) for x in rows]


def _dense(leaf: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros_like(leaf)
    return grad.to_dense() if grad.is_sparse else grad
