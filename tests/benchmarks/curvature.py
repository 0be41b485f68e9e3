"""The contenders for products with the Hessian and with the Gauss-Newton matrix.

Rule: as in ``contenders.py``. Each takes the batch whole and in microbatches, which curvlinops is
given one by one, as by a loader. ``GRADIENT`` is what time and memory are counted in, and gives
nothing to compare.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import pureaccum as pa

from .absent import optional
from .models import Batch, Problem
from .nests import squares
from .norms import Grads


GRADIENT = "a gradient"
HVP, COMPILED_HVP, WHOLE_HVP = "hvp", "hvp, compiled", "hvp, whole"
GGNVP, COMPILED_GGNVP, WHOLE_GGNVP = "ggnvp", "ggnvp, compiled", "ggnvp, whole"
THEIR_HVP, THEIR_CUT_HVP = "curvlinops, Hessian", "curvlinops, Hessian, cut"
THEIR_GGNVP, THEIR_CUT_GGNVP = "curvlinops, GGN", "curvlinops, GGN, cut"


def vector(problem: Problem) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn_like(x) for name, x in problem.params.items()}


def gradient(problem: Problem) -> Grads:
    """By the engine that is fastest; the same of the loop by hand is within a tenth."""
    of = pa.grad(partial(squares, problem), microbatch_size=problem.rows, engine="auto")

    def window(batch: Batch) -> dict[str, Tensor]:
        of(problem.params, batch)
        return {}

    return window


def product(problem: Problem, kind: str, *, compiled: bool = False, whole: bool = False) -> Grads:
    v, size = vector(problem), None if whole else problem.rows

    def forward(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return functional_call(problem.net, params, (batch[0],))

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return (out - batch[1]).square().mean()

    if kind == HVP:
        both = pa.curvature.hvp(partial(squares, problem), microbatch_size=size)
        of: Any = lambda batch: both(problem.params, batch, v)[1]  # noqa: E731
    else:
        alone = pa.curvature.ggnvp(forward, loss, microbatch_size=size)
        of = lambda batch: alone(problem.params, batch, v)  # noqa: E731
    return torch.compile(of, fullgraph=True) if compiled else of


def theirs(problem: Problem, operator: str, *, cut: bool = False) -> Grads:
    of = getattr(optional("curvlinops"), operator)
    v = [*vector(problem).values()]
    params = [*problem.net.parameters()]

    def window(batch: Batch) -> dict[str, Tensor]:
        data = [*pa.microbatches(batch, problem.rows)] if cut else [batch]
        it = of(problem.net, nn.MSELoss(), params, data, check_deterministic=False)
        return {n: x.detach() for n, x in zip(problem.params, it @ v, strict=True)}

    return window


PRODUCTS: dict[str, Callable[[Problem], Grads]] = {
    GRADIENT: gradient,
    HVP: partial(product, kind=HVP),
    COMPILED_HVP: partial(product, kind=HVP, compiled=True),
    WHOLE_HVP: partial(product, kind=HVP, whole=True),
    THEIR_HVP: partial(theirs, operator="HessianLinearOperator"),
    THEIR_CUT_HVP: partial(theirs, operator="HessianLinearOperator", cut=True),
    GGNVP: partial(product, kind=GGNVP),
    COMPILED_GGNVP: partial(product, kind=GGNVP, compiled=True),
    WHOLE_GGNVP: partial(product, kind=GGNVP, whole=True),
    THEIR_GGNVP: partial(theirs, operator="GGNLinearOperator"),
    THEIR_CUT_GGNVP: partial(theirs, operator="GGNLinearOperator", cut=True),
}
BESIDE = {  # beside whom each of ours is measured
    HVP: (GRADIENT, THEIR_CUT_HVP, THEIR_HVP),
    COMPILED_HVP: (GRADIENT,),
    WHOLE_HVP: (THEIR_HVP,),
    GGNVP: (GRADIENT, THEIR_CUT_GGNVP, THEIR_GGNVP),
    COMPILED_GGNVP: (GRADIENT,),
    WHOLE_GGNVP: (THEIR_GGNVP,),
}
