"""The contenders for the primitive alone: small microbatches, in which Python is all there is; and
an MLP over many tokens, some of them at a time.

Rule: as in ``contenders.py``. By hand it is the loop without any promise: over captured tensors,
random numbers, modes, modules that change, writes. Its backward pass runs each microbatch again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import functional_call, grad, vjp

import pureaccum as pa

from .models import Batch, Problem
from .norms import Grads


Params = dict[str, Tensor]
Rows = Callable[[Params, Tensor], Tensor]  # of parameters and rows, row by row


class _ByBackward(Function):
    """The loop, called with (pure function, rows of a microbatch, names, rows, *parameters)."""

    @staticmethod
    def forward(ctx: Any, pure: Rows, size: int, names: Any, x: Tensor, *leaves: Tensor) -> Tensor:  # type: ignore[override]
        ctx.pure, ctx.size, ctx.names = pure, size, names
        ctx.save_for_backward(x, *leaves)
        return _loop(pure, size, dict(zip(names, leaves, strict=True)), x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, *leaves = ctx.saved_tensors
        sums: Sequence[Tensor] = ()
        of_rows: list[Tensor] = []
        for part, c in zip(x.split(ctx.size), cotangent.split(ctx.size), strict=True):
            with torch.enable_grad():
                own = [p.detach().requires_grad_() for p in leaves]
                tokens = part.detach().requires_grad_(ctx.needs_input_grad[3])
                out = ctx.pure(dict(zip(ctx.names, own, strict=True)), tokens)
            wanted = [*own, tokens] if tokens.requires_grad else own
            grads = [*torch.autograd.grad(out, wanted, c)]
            if tokens.requires_grad:
                of_rows.append(grads.pop())
            if sums:
                torch._foreach_add_(sums, grads)
            sums = sums or grads
        return None, None, None, torch.cat(of_rows) if of_rows else None, *sums


class _ByFunc(Function):
    """The same under torch.func."""

    @staticmethod
    def forward(pure: Rows, size: int, names: Any, x: Tensor, *leaves: Tensor) -> Tensor:  # type: ignore[override]
        return _loop(pure, size, dict(zip(names, leaves, strict=True)), x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.pure, ctx.size, ctx.names, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, *leaves = ctx.saved_tensors
        params, sums = dict(zip(ctx.names, leaves, strict=True)), {}
        for part, c in zip(x.split(ctx.size), cotangent.split(ctx.size), strict=True):
            _, pull = vjp(partial(_of_rows, ctx.pure, part), params)  # pyright: ignore
            (grads,) = pull(c)
            sums = {name: sums[name] + g for name, g in grads.items()} if sums else grads
        return None, None, None, None, *sums.values()


def _of_rows(pure: Rows, x: Tensor, params: Params) -> Tensor:
    return pure(params, x)


def _loop(pure: Rows, size: int, params: Params, x: Tensor) -> Tensor:
    return torch.cat([pure(params, part) for part in x.split(size)])


def _by_hand(function: Any, pure: Rows, size: int) -> Rows:
    return lambda params, x: function.apply(pure, size, (*params,), x, *params.values())


def _by_us(_: Any, pure: Rows, size: int) -> Rows:
    return pa.microbatch(pure, microbatch_size=size)


def _without_grad(rows: Rows, params: Params, x: Tensor) -> Params:
    with torch.no_grad():
        return {"out": rows(params, x)}


def _forwards(rows: Rows, params: Params, x: Tensor) -> Params:
    return {"out": rows(params, x)}


def _pairs(rows: Rows, x: Tensor, params: Params) -> Tensor:
    """A loss of all pairs of rows."""
    z = rows(params, x)
    return (z @ z.T).sin().sum()


def _through(rows: Rows, params: Params, x: Tensor) -> Params:
    """From within a network: tokens are followed too."""
    x = x.detach().requires_grad_()
    grads = torch.autograd.grad(rows(params, x).square().sum(), [x, *params.values()])
    return dict(zip(("tokens", *params), grads, strict=True))


def _backwards(rows: Rows, params: Params, x: Tensor) -> Params:
    grads = torch.autograd.grad(_pairs(rows, x, params), [*params.values()])
    return dict(zip(params, grads, strict=True))


def _by_grad(rows: Rows, params: Params, x: Tensor) -> Params:
    return grad(partial(_pairs, rows, x))(params)


ASKED = {
    "forwards, no_grad": (_without_grad, _ByBackward),
    "forwards, in grad mode": (_forwards, _ByBackward),
    "backwards": (_backwards, _ByBackward),
    "torch.func.grad": (_by_grad, _ByFunc),
}
TILED = "an MLP over tokens"
MAKERS = {"the loop": _by_hand, "microbatch": _by_us}


def _contender(asked: str, maker: str, problem: Problem) -> Grads:
    ask, function = (ASKED | {TILED: (_through, _ByBackward)})[asked]

    def pure(params: Params, x: Tensor) -> Tensor:
        return functional_call(problem.net, params, (x,))

    rows = MAKERS[maker](function, pure, problem.rows)
    params = {name: x.detach() for name, x in problem.params.items()}
    if function is _ByBackward:
        params = {name: x.requires_grad_() for name, x in params.items()}

    def window(batch: Batch) -> Params:
        return ask(rows, params, batch[0])

    return window


def by_hand(asked: str) -> str:
    return f"{asked}, the loop"


def by_us(asked: str) -> str:
    return f"{asked}, microbatch"


LOOPS = {
    f"{asked}, {maker}": partial(_contender, asked, maker)
    for asked in (*ASKED, TILED)
    for maker in MAKERS
}
