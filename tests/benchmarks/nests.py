"""The contenders for derivatives of derivatives, each of the loss of a whole batch.

Rule: as in ``contenders.py``. A nest of transforms is written once, for a loss and its gradient,
both of parameters; whose they are is all that contenders differ in.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp

import pureaccum as pa

from .models import Batch, Problem
from .norms import Grads


Params = dict[str, Tensor]
Loss = Callable[[Params], Tensor]
Gradient = Callable[[Params], Params]
Nest = Callable[[Loss, Gradient, Params, Params], Params]


def of_value(loss: Loss, _: Gradient, params: Params, _v: Params) -> Params:
    return grad(loss)(params)


def reverse_over_reverse(_: Loss, gradient: Gradient, params: Params, v: Params) -> Params:
    return vjp(gradient, params)[1](v)[0]


def forward_over_reverse(_: Loss, gradient: Gradient, params: Params, v: Params) -> Params:
    return jvp(gradient, (params,), (v,))[1]


def meta(loss: Loss, gradient: Gradient, params: Params, _v: Params) -> Params:
    """Through one step of gradient descent."""

    def after_a_step(params: Params) -> Tensor:
        grads = gradient(params)
        return loss({name: x - 0.1 * grads[name] for name, x in params.items()})

    return grad(after_a_step)(params)


def squares(problem: Problem, params: Params, batch: Batch) -> Tensor:
    """The loss, without ``F.mse_loss``, which torch cannot take forward over reverse."""
    x, y = batch
    return (functional_call(problem.net, params, (x,)) - y).square().mean()


def whole(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """By ``torch.func`` alone."""
    loss = partial(squares, problem, batch=batch)
    return loss, grad(loss)


def by_primitive(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """``pa.microbatch``, and ``torch.func``."""
    mean = pa.microbatch(partial(squares, problem), microbatch_size=problem.rows, reduce="mean")

    def loss(params: Params) -> Tensor:
        return mean(params, batch)

    return loss, grad(loss)


def by_pa(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """``pa.value`` and ``pa.grad``."""
    return of_pa(partial(squares, problem), problem.rows, batch)


def by_remat(problem: Problem, batch: Batch) -> tuple[Loss, Gradient]:
    """The same of a loss that its user rematerialises."""
    return of_pa(pa.remat(partial(squares, problem)), problem.rows, batch)


def of_pa(loss: Callable[..., Tensor], size: int, batch: Batch) -> tuple[Loss, Gradient]:
    value, gradient = pa.value(loss, microbatch_size=size), pa.grad(loss, microbatch_size=size)
    return lambda params: value(params, batch), lambda params: gradient(params, batch)


def contender(problem: Problem, nest: Nest, make: Callable[..., tuple[Loss, Gradient]]) -> Grads:
    torch.manual_seed(0)
    v = {name: torch.randn_like(x) for name, x in problem.params.items()}
    return lambda batch: nest(*make(problem, batch), problem.params, v)


OF_NEST: dict[str, Nest] = {
    "grad of value": of_value,
    "reverse over reverse": reverse_over_reverse,
    "forward over reverse": forward_over_reverse,
    "meta-gradient": meta,
}
WHOLE, PRIMITIVE, PA, REMATTED = "whole", "microbatch", "pa.grad", "pa.grad of remat"
OF_MAKER = {WHOLE: whole, PRIMITIVE: by_primitive, PA: by_pa, REMATTED: by_remat}


def named(nest: str, maker: str) -> str:
    return f"{nest}, {maker}"


NESTS: dict[str, Callable[[Problem], Grads]] = {
    named(nest, maker): partial(contender, nest=OF_NEST[nest], make=OF_MAKER[maker])
    for nest, maker in product(OF_NEST, OF_MAKER)
}
