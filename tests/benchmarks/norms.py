"""The contenders for networks with BatchNorm, whose rows are coupled.

Rule: as in ``contenders.py``. All compute the gradient of the full batch, which is also what they
run against: here it fits in memory.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pureaccum as pa

from .absent import Absent
from .models import Batch, Problem


Grads = Callable[[Batch], dict[str, Tensor]]


def full_batch(problem: Problem) -> Grads:
    """``.backward()`` on the batch as a whole."""
    net, criterion = problem.net, problem.criterion
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        criterion(net(x), y).backward()
        return taken(named)

    return window


def full_views(problem: Problem) -> Grads:
    """A contrastive loss of two views, by ``.backward()`` on all of them."""
    net, criterion = problem.net, problem.criterion
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        criterion(*net(torch.cat(batch)).chunk(2)).backward()
        return taken(named)

    return window


def cut_views(problem: Problem) -> Grads:
    """The same, with ``pa.functional`` for the network: BatchNorm sees all rows of both views."""
    criterion, params = problem.criterion, problem.params
    fn = pa.functional(problem.net, microbatch_size=problem.rows)

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        out, _ = fn.apply(params, fn.buffers, torch.cat(batch))
        return criterion(*out.chunk(2))

    return partial(pa.grad(loss), params)


def taken(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The gradients; ``zero_grad(set_to_none=True)`` is done here, so that nothing stays behind."""
    grads = {name: parameter.grad for name, parameter in named}
    for _, parameter in named:
        parameter.grad = None
    return grads


def in_microbatches(problem: Problem, **knobs: Any) -> Grads:
    """``pa.functional`` with a size, and ``pa.grad``: also gives new running statistics."""
    if knobs.get("keep") == "host" and problem.device == "cpu":
        raise Absent("a CPU's memory is the host's")
    criterion, params = problem.criterion, problem.params
    fn = pa.functional(problem.net, microbatch_size=problem.rows, **knobs)
    buffers = fn.buffers

    def loss(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        out, after = fn.apply(params, buffers, x)
        return criterion(out, y), after

    gradient = pa.grad(loss, has_aux=True, aux_reduction="last")
    return lambda batch: gradient(params, batch)[0]


FULL, EXACT, EXACT_HOST = "full batch", "functional in microbatches", "the same, kept on the host"

NORMS: dict[str, Callable[[Problem], Grads]] = {
    FULL: full_batch,
    EXACT: in_microbatches,
    EXACT_HOST: partial(in_microbatches, keep="host"),
}

FULL_VIEWS, CUT_VIEWS = "full-batch InfoNCE over BatchNorm", "InfoNCE over BatchNorm"

VIEWS: dict[str, Callable[[Problem], Grads]] = {FULL_VIEWS: full_views, CUT_VIEWS: cut_views}
