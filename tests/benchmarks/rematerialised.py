"""The contenders for a chain of blocks of which only some activations are kept.

Rule: as in ``contenders.py``; whoever rematerialises cuts the chain into the same segments.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import pureaccum as pa

from .models import Batch, Problem
from .norms import Grads, full_batch, taken


def checkpointed(problem: Problem) -> Grads:
    """``torch.utils.checkpoint`` around each segment, and ``.backward()``."""
    net, criterion = problem.net, problem.criterion
    named, size = list(net.named_parameters()), math.isqrt(len(net))
    segments = [net[start : start + size] for start in range(0, len(net), size)]

    def window(batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        for segment in segments:
            x = checkpoint(segment, x, use_reentrant=False)
        criterion(x, y).backward()
        return taken(named)

    return window


def rematerialised(problem: Problem) -> Grads:
    """``pa.remat_sequential``, differentiated by ``pa.grad_and_value``."""
    chain, criterion = chained(problem), problem.criterion
    params = blocks(problem, dict(problem.params))

    def loss(params: Any, batch: Batch) -> Tensor:
        x, y = batch
        return criterion(chain(params, x), y)

    fn = pa.grad_and_value(loss)

    def window(batch: Batch) -> dict[str, Tensor]:
        grads, _ = fn(params, batch)
        return {f"{n}.{name}": x for n, tree in enumerate(grads) for name, x in tree.items()}

    return window


def rematerialised_backward(problem: Problem) -> Grads:
    """The same chain of the module's own parameters, and ``.backward()``."""
    chain, criterion = chained(problem), problem.criterion
    named = list(problem.net.named_parameters())
    params = blocks(problem, dict(named))

    def window(batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        criterion(chain(params, x), y).backward()
        return taken(named)

    return window


def chained(problem: Problem) -> Callable[[Any, Tensor], Tensor]:
    def pure(block: torch.nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
        return lambda params, x: functional_call(block, params, (x,))

    return pa.remat_sequential([pure(block) for block in problem.net])


def blocks(problem: Problem, params: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The parameters, block by block."""
    return [
        {name: params[f"{n}.{name}"] for name, _ in block.named_parameters()}
        for n, block in enumerate(problem.net)
    ]


WITHOUT, CHECKPOINT = "no remat", "checkpoint"
REMAT, REMAT_BACKWARD = "remat", "remat, .backward()"

CHAINS: dict[str, Callable[[Problem], Grads]] = {
    WITHOUT: full_batch,
    CHECKPOINT: checkpointed,
    REMAT: rematerialised,
    REMAT_BACKWARD: rematerialised_backward,
}
