"""The contenders for a contrastive loss, in which every row meets every other.

Rule: as in ``contenders.py``. GradCache is the algorithm of Gao et al. (2021), as its authors'
package writes it, for two towers in one go and without a state of random numbers to keep.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

import pureaccum as pa

from .models import Batch, Problem
from .norms import Grads, taken
from .steps import Read


def full_batch(problem: Problem) -> Grads:
    """``.backward()`` on all pairs at once."""
    net, criterion = problem.net, problem.criterion
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        criterion(*net(*batch)).backward()
        return taken(named)

    return window


def full_func(problem: Problem) -> Grads:
    """``torch.func.grad`` on all pairs at once."""
    net, criterion, params = problem.net, problem.criterion, problem.params

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return criterion(*functional_call(net, params, batch))

    return partial(torch.func.grad(loss), params)


def gradcache(problem: Problem) -> Grads:
    """The embeddings without a graph, their gradients, and each chunk again with a graph."""
    net, criterion, rows = problem.net, problem.criterion, problem.rows
    named = list(net.named_parameters())

    def cache(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            parts = [net(*chunk) for chunk in zip(*(t.split(rows) for t in batch), strict=True)]
        embeddings = [torch.cat(column).requires_grad_() for column in zip(*parts, strict=True)]
        del parts
        criterion(*embeddings).backward()
        return [x.grad for x in embeddings]

    def window(batch: Batch) -> dict[str, Tensor]:
        cached = cache(batch)
        for *chunk, a, b in zip(*(t.split(rows) for t in (*batch, *cached)), strict=True):
            x, y = net(*chunk)
            surrogate = torch.dot(x.flatten(), a.flatten()) + torch.dot(y.flatten(), b.flatten())
            surrogate.backward()
        return taken(named)

    return window


def in_microbatches(problem: Problem, gradient: Callable[..., Any]) -> Grads:
    """``pa.microbatch`` of both towers, and the loss of what comes out."""
    params, loss = loss_of_pairs(problem, problem.rows)
    return partial(gradient(loss), params)


def loss_of_pairs(problem: Problem, rows: int | None) -> tuple[dict[str, Tensor], Any]:
    """Parameters, and the loss of what both towers give, so many rows at a time."""
    fn, criterion = pa.functional(problem.net), problem.criterion

    def embed(params: dict[str, Tensor], batch: Batch) -> Any:
        return fn.apply(params, fn.buffers, *batch)[0]

    towers = pa.microbatch(embed, microbatch_size=rows) if rows else embed

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return criterion(*towers(params, batch))

    return fn.params, loss


def step_of_pairs(problem: Problem, cut: bool, compile: bool) -> Callable[[Batch], Read]:
    """A step that is given all pairs at once; its loss may cut them."""
    params, loss = loss_of_pairs(problem, problem.rows if cut else None)
    step = pa.make_step(loss, pa.sgd(0.1), compile=compile)
    state = step.init(params)

    def run(batch: Batch) -> Read:
        new, _ = step(state, batch)
        return lambda: new.params

    return run


FULL_PAIRS, FULL_FUNC, GRADCACHE = (
    "full-batch InfoNCE",
    "full-batch InfoNCE, torch.func.grad",
    "GradCache",
)
OUR_PAIRS, OUR_PAIRS_FUNC = "InfoNCE, pa.grad", "InfoNCE, torch.func.grad"

PAIRS: dict[str, Callable[[Problem], Grads]] = {
    FULL_PAIRS: full_batch,
    FULL_FUNC: full_func,
    GRADCACHE: gradcache,
    OUR_PAIRS: partial(in_microbatches, gradient=pa.grad),
    OUR_PAIRS_FUNC: partial(in_microbatches, gradient=torch.func.grad),
}

WHOLE_STEP, CUT_STEP = "InfoNCE step, whole batch", "InfoNCE step, microbatched"
COMPILED_WHOLE, COMPILED_CUT = f"compiled {WHOLE_STEP}", f"compiled {CUT_STEP}"

PAIRS_STEPS: dict[str, Callable[[Problem], Callable[[Batch], Read]]] = {
    WHOLE_STEP: partial(step_of_pairs, cut=False, compile=False),
    CUT_STEP: partial(step_of_pairs, cut=True, compile=False),
    COMPILED_WHOLE: partial(step_of_pairs, cut=False, compile=True),
    COMPILED_CUT: partial(step_of_pairs, cut=True, compile=True),
}
