"""The autograd Function that makes outputs which are there already a function of inputs.

    outs = attach(func(*detached inputs), inputs, func)

Only the inputs are kept. ``func`` is run again for a backward pass or a tangent, and has been run
outside of the Function, at the level of torch.func's transforms where it was called: an output
that wants a gradient there is one that something captured gave it, which no Function could.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from ._torch import forward_ad, mapped_levels, transform_active


def attach(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], rerun: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """``outs``, differentiable as ``rerun(*inputs)``."""
    return _Attach.apply(rerun, len(inputs), *inputs, *outs)


class _Attach(Function):
    """``outs`` as a function of ``inputs``; ``rerun(*inputs)`` would compute them again.

    Called with (rerun, number of inputs, *inputs, *outs).
    """

    @staticmethod
    def forward(_rerun: Any, n: int, *operands: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(x.detach() for x in operands[n:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        rerun, n, *operands = inputs
        if any(ctx.needs_input_grad[2 + n :]):
            raise RuntimeError(_CAPTURED)
        ctx.n = n
        ctx.again = partial(_again, rerun, _mapped(operands[n:]) - _mapped(operands[:n]))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands[:n])
        ctx.save_for_forward(*operands[:n])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        wrt = [i for i in range(ctx.n) if ctx.needs_input_grad[2 + i]]
        used = [i for i, x in enumerate(cotangents) if x is not None]
        if not wrt or not used:
            return tuple(grads)
        pull = _pull_through_levels if transform_active() else _pull
        given: Any = [cotangents[i] for i in used]
        found = pull(ctx.again, ctx.saved_tensors, wrt, used, given)
        for i, grad in zip(wrt, found, strict=True):
            grads[2 + i] = grad
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, _rerun: Any, _n: Any, *tangents: Tensor | None) -> Any:  # pyright: ignore
        if any(x is not None for x in tangents[ctx.n :]):
            raise RuntimeError(_CAPTURED)
        with forward_ad():  # which torch turns off for the rules of Functions
            outs = ctx.again([x.view_as(x) for x in ctx.saved_tensors])
            # torch takes no None for an output that no tangent reaches
            pairs = [(x, unpack_dual(x).tangent) for x in outs]
            return tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rerun: Any, n: int, *operands: Tensor) -> Any:  # pyright: ignore
        dims, out_dims = in_dims[2 : 2 + n], in_dims[2 + n :]
        # One more operand, since vmap wants one that is mapped and the inputs need not be.
        mapped: Any = torch.func.vmap(
            lambda _, *inputs: rerun(*inputs), (0, *dims), out_dims, info.randomness
        )
        size = torch.empty(info.batch_size)
        return _Attach.apply(lambda *inputs: mapped(size, *inputs), n, *operands), out_dims


Again = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def _pull(
    again: Again,
    saved: Sequence[Tensor],
    wrt: list[int],
    used: list[int],
    cotangents: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Gradients by plain autograd: the formulas, hence the bits, of ``.backward()``."""
    record = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [x.view_as(x) if record else x.detach() for x in saved]
        onward = any(x.requires_grad for x in (*inputs, *cotangents))
        for i in wrt:
            if not inputs[i].requires_grad:
                inputs[i].requires_grad_()
        outs = again(inputs)
    reached = [(outs[i], x) for i, x in zip(used, cotangents, strict=True) if outs[i].requires_grad]
    if not reached:
        return [None] * len(wrt)
    tops, cotangents = zip(*reached, strict=True)
    xs = [inputs[i] for i in wrt]
    grads: Any = torch.autograd.grad(tops, xs, cotangents, create_graph=record, allow_unused=True)
    if record and not onward:  # torch.func's pull records at top level, too, what leads nowhere
        return [x if x is None else x.detach() for x in grads]
    return grads


def _pull_through_levels(
    again: Again, saved: Sequence[Tensor], wrt: list[int], used: list[int], cotangents: list[Tensor]
) -> Sequence[Tensor]:
    """Gradients by torch.func, themselves functions of inputs and cotangents that keep no more.

    ``torch.func.grad`` records its backward pass, and would hold all that is computed here.
    """

    def pulled(*operands: Tensor) -> tuple[Tensor, ...]:
        inputs, cotangents = list(operands[: len(saved)]), operands[len(saved) :]

        def of(*some: Tensor) -> tuple[Tensor, ...]:
            filled = list(inputs)
            for i, x in zip(wrt, some, strict=True):
                filled[i] = x
            outs = again(filled)
            return tuple(outs[i] for i in used)

        pull: Any = torch.func.vjp(of, *(inputs[i] for i in wrt))[1]
        return pull(cotangents, retain_graph=False)

    # A saved tensor may be wrapped for a level that is over; what an operation returns is not.
    operands = [x.view_as(x) for x in (*saved, *cotangents)]
    if not torch.is_grad_enabled():
        return pulled(*operands)
    return attach(pulled(*(x.detach() for x in operands)), operands, pulled)


def _again(
    rerun: Callable[..., tuple[Tensor, ...]], captured: set[int], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The outputs, computed again; ``captured`` are the vmaps that mapped them and no input."""
    try:
        outs = rerun(*inputs)
    except RuntimeError as error:
        if not any(words in str(error) for words in _LOST):
            raise
        raise RuntimeError(_MAPPED) from error
    if _mapped(outs) - _mapped(inputs) - captured:  # by another vmap, on the level of the first
        raise RuntimeError(_MAPPED)
    return outs


def _mapped(tensors: Sequence[Tensor]) -> set[int]:
    return set[int]().union(*map(mapped_levels, tensors))


_CAPTURED = (
    "a tensor that func captures needs a gradient, and only arguments of a rematerialised function "
    "get one. Pass it as an argument, remat(lambda p, x: functional_call(block, p, (x,)))(params, "
    "x) where it is a module's parameter, or detach it where it is a constant."
)
_MAPPED = (
    "func captures a tensor that is mapped by a vmap inside of the differentiation, and when it is "
    "run again in the backward pass that vmap is over. Pass it as an argument, or have the vmap "
    "around the gradient: vmap(grad(...))."
)
_LOST = "batched == nullptr", "escaped from inside a function being vmapped"  # what torch says
