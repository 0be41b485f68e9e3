"""The gradient of a total, taken while the total is computed.

    total, gradients = sums over pieces of (f, its gradient)
    in the backward pass: cotangent * gradients

Where one number is all that comes out, its gradient costs no second forward pass. Gradients are
outputs like any other: their own derivatives are those of the rule. They are taken for a cotangent
of 1, with which half precision would lose digits: so nothing below float32 is taken early.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from .._base import continuous
from .rule import Outs, Pieces, pulled


class NotEarlyError(BaseException):
    """More than one output has a gradient. Only the caller that asked for it may catch this."""


def with_gradient(f: Pieces, wrt: Sequence[int]) -> tuple[Pieces, list[int]]:
    """A function with the gradients of its only output that has any.

    The list tells which output that is, once the function has been run.
    """
    total: list[int] = []

    def only(outs: Sequence[Tensor]) -> Sequence[int]:
        for i, x in enumerate(outs):
            if x.requires_grad and i not in total:
                total.append(i)
        if len(total) > 1:
            raise NotEarlyError
        return total or [i for i, x in enumerate(outs) if continuous(x)][:1]

    def call(p: int, operands: Sequence[Tensor]) -> Outs:
        sums = pieces.gathered[len(f.form.outs) :]
        outs, grads, keeps = pulled(f, p, operands, wrt, only, sums=sums)
        group = f.form.groups[total[0]] if total else 0
        pieces.form = form._replace(groups=(*f.form.groups, *[group] * len(wrt)))
        return [*outs, *pieces.gradients(operands, wrt, grads)], keeps

    form = f.form._replace(outs=(*f.form.outs, *(f.form.operands[i] for i in wrt)))
    pieces = Pieces(call, form, f.sizes)
    return pieces, total


def known_gradient(total: Tensor, grads: Sequence[Tensor], operands: Sequence[Tensor]) -> Tensor:
    """A total as a function of operands, of which its gradients are known."""
    return _Known.apply(len(grads), total, *grads, *operands)


class _Known(Function):
    """The total, called with (the number of gradients, total, *gradients, *operands)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_n: int, total: Tensor, *_: Tensor) -> Tensor:  # pyright: ignore
        return total.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.n = inputs[0]
        ctx.save_for_backward(*inputs[2 : 2 + ctx.n])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # pyright: ignore
        scaled = [cotangent.to(g.device, g.dtype) * g for g in ctx.saved_tensors]
        return (None, None, *[None] * ctx.n, *scaled)

    @staticmethod
    def jvp(_ctx: Any, _n: Any, tangent: Tensor, *_: Any) -> Any:  # pyright: ignore
        return tangent  # the rule has computed it from the tangents of the operands
