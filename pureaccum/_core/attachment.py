"""Outputs that were computed, made a function of their operands.

    outs = run(f, operands that nothing follows)
    outs = attach(f, operands, outs)    # their derivatives: f's, of rule.py, attached again

So a function sees the levels, modes and random numbers of its caller while it runs, and every order
of derivatives is one rule.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from .._base import trees
from .._base.torch_internals import functorch, modes
from . import exchange, gathered, rule, watch
from .rule import jvp


def applied(f: rule.Pieces, operands: Sequence[Tensor]) -> list[Tensor]:
    """The outputs for all pieces of some operands, differentiable where anything records."""
    if not (torch.is_grad_enabled() or modes.transform_active()):
        return rule.run(f, operands)
    # Only pieces record anything, also of what is captured and used as it is.
    plain = functorch.transform_level() is None and not functorch.forward_ad_active()
    pairs = zip(operands, f.form.operands, strict=True)
    given = [x if plain and how == gathered.OWN else x.detach() for x, how in pairs]
    with torch.no_grad() if plain else nullcontext():
        outs = rule.run(f, given)
    return attach(f, operands, outs)


def attach(f: rule.Pieces, operands: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs that were computed, made a function of their operands.

    An output that is followed itself depends on something captured, whose gradient no Function
    could give: that raises.
    """
    if functorch.graphs_tell():
        if any(map(functorch.wants_gradient, outs)):
            raise watch.UnseenError
        wrt = [i for i, x in enumerate(operands) if functorch.wants_gradient(x)]
        if not (
            wrt and outs and (torch.is_grad_enabled() or functorch.transform_level() is not None)
        ):
            return [*outs]
        call = _Attachment(f, operands, outs, wrt)
        return [*_attached_by_graphs(call, [operands[i] for i in wrt])]
    if functorch.forward_ad_active():  # it writes tangents beside them, number by number
        outs = [x.contiguous() for x in outs]
    return list(_Attach.apply(f, len(operands), *operands, *outs))


class _Attach(Function):
    """``outs`` as a function of ``operands``, called with (function, len(operands), *both)."""

    @staticmethod
    def forward(_f: Any, n: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(x.detach() for x in tensors[n:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.f, ctx.n, *tensors = inputs
        ctx.pulled = exchange.recorded_here()
        if any(ctx.needs_input_grad[2 + ctx.n :]):
            raise watch.UnseenError
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not trees.continuous(x)))
        ctx.save_for_backward(*tensors[: ctx.n])
        ctx.save_for_forward(*tensors[: ctx.n])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        wrt = [i for i in range(ctx.n) if ctx.needs_input_grad[2 + i]]
        grads = _gradients(ctx.f, ctx.saved_tensors, wrt, cotangents, ctx.pulled)
        return None, None, *map(grads.get, range(len(ctx.needs_input_grad) - 2))

    @staticmethod
    def jvp(ctx: Any, _f: Any, _n: Any, *tangents: Tensor | None) -> Any:  # pyright: ignore
        if any(x is not None for x in tangents[ctx.n :]):
            raise watch.UnseenError
        moved = [i for i, t in enumerate(tangents) if t is not None]
        primals = [unpack_dual(x).primal for x in ctx.saved_tensors]
        found = applied(jvp(ctx.f, moved), [*primals, *(tangents[i] for i in moved)])  # pyright: ignore
        return tuple(found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], f: rule.Pieces, n: int, *tensors: Tensor) -> Any:  # pyright: ignore
        dims = in_dims[2:]
        first = [x if d is None else x.movedim(d, 0) for x, d in zip(tensors, dims, strict=True)]
        dims = [None if d is None else 0 for d in dims]
        if any(f.form.groups):  # an unmapped output may count for one entry and not for another
            expanded = [d is None and trees.continuous(x) for x, d in zip(first, dims, strict=True)]
            size = info.batch_size
            pairs = [*zip(first, expanded, strict=True)]
            first = [x.expand(size, *x.shape) if more else x for x, more in pairs]
            dims = [0 if more else d for d, more in zip(dims, expanded, strict=True)]
        over = rule.mapped(f, dims[:n], dims[n:], info)
        return tuple(attach(over, first[:n], first[n:])), tuple(dims[n:])


class _Attachment:
    """Outputs that are to be a function of those of their operands that are followed."""

    def __init__(
        self, f: rule.Pieces, operands: rule.Tensors, outs: rule.Tensors, wrt: Sequence[int]
    ) -> None:
        self.f, self.wrt = f, wrt
        # What is not followed is the same on all levels.
        self.operands, self.outs = (
            [*map(functorch.innermost, operands)],
            [*map(functorch.innermost, outs)],
        )

    def begin(self, ctx: Any, followed: rule.Tensors, outs: rule.Tensors) -> None:
        """Keep what a backward pass needs, on one level."""
        ctx.f, ctx.wrt, ctx.pulled = self.f, self.wrt, exchange.recorded_here()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in outs if not trees.continuous(x)))
        operands = [*self.operands]
        for i, x in zip(self.wrt, followed, strict=True):
            operands[i] = x
        ctx.save_for_backward(*operands)


def _attached_by_graphs(call: _Attachment, followed: rule.Tensors) -> Sequence[Tensor]:
    """Outputs that the graphs of this level and of those below it lead to."""
    if functorch.transform_level() is not None:
        return functorch.on_one_level(_AttachOnLevel, call, followed)
    if torch.is_grad_enabled():
        return _AttachAtTopLevel.apply(call, *followed)  # pyright: ignore
    return [x.detach() for x in call.outs]


class _AttachOnLevel(functorch.SingleLevelFunction):
    """Outputs as a function of what is followed, on one level of ``grad``; no more is an input."""

    @staticmethod
    def forward(ctx: Any, call: _Attachment, *followed: Tensor) -> tuple[Tensor, ...]:
        outs = functorch.below_grad(partial(_attached_by_graphs, call), followed)
        call.begin(ctx, followed, outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        wrt = [i for n, i in enumerate(ctx.wrt) if ctx.needs_input_grad[1 + n]]
        grads = _gradients(ctx.f, ctx.saved_tensors, wrt, cotangents, ctx.pulled)
        return None, *map(grads.get, ctx.wrt)


class _AttachAtTopLevel(Function):
    """Outputs as a function of what plain autograd follows, below all levels of torch.func."""

    @staticmethod
    def forward(ctx: Any, call: _Attachment, *followed: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        outs = tuple(x.detach() for x in call.outs)
        call.begin(ctx, followed, outs)
        return outs

    backward = _AttachOnLevel.backward


def _gradients(
    f: rule.Pieces,
    operands: rule.Tensors,
    wrt: Sequence[int],
    cotangents: Sequence[Tensor | None],
    backward: exchange.Backward | None,
) -> dict[int, Tensor]:
    """The gradients of some operands, by their numbers, but for those that have none."""
    grads: dict[int, Tensor] = {}
    used = [i for i, c in enumerate(cotangents) if c is not None]
    if not (wrt and used):
        return grads
    # A saved tensor may be wrapped for a level that is over; a view of it is not.
    pairs = zip(operands, f.form.operands, strict=True)
    given = [x if how == gathered.OWN else x.view_as(x) for x, how in pairs]
    given += [c.view_as(c) for c in cotangents if c is not None]
    pulled = rule.vjp(f, wrt, used, backward)
    for at, g in enumerate(applied(pulled, given)):  # the gradients of one group after another's
        if (i := wrt[at % len(wrt)]) in pulled.reached:
            grads[i] = grads[i] + g if i in grads else g
    return grads
