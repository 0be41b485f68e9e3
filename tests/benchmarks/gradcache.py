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
from .staged import Grads, taken


def full_batch(problem: Problem) -> Grads:
    """``.backward()`` on all pairs at once."""
    net, criterion = problem.net, problem.criterion
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        criterion(*net(*batch)).backward()
        return taken(named)

    return window


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


def by_stages(problem: Problem, **knobs: Any) -> Grads:
    """``pa.staged``: the towers row by row, the loss at once."""
    net, criterion, params = problem.net, problem.criterion, problem.params
    loss = pa.staged(
        [
            pa.rowwise(lambda params, batch: functional_call(net, params, batch)),
            pa.full(lambda params, embeddings: criterion(*embeddings)),
        ]
    )
    fn = pa.grad_and_value(loss, microbatch_size=problem.rows, **knobs)
    return lambda batch: fn(params, batch)[0]


FULL_PAIRS, GRADCACHE = "full-batch InfoNCE", "GradCache"
STAGED_PAIRS, STAGED_PAIRS_AUTOGRAD = "staged InfoNCE", "staged InfoNCE, autograd"

PAIRS: dict[str, Callable[[Problem], Grads]] = {
    FULL_PAIRS: full_batch,
    GRADCACHE: gradcache,
    STAGED_PAIRS: by_stages,
    STAGED_PAIRS_AUTOGRAD: partial(by_stages, engine="autograd"),
}
