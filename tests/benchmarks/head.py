"""The contenders for the head of a language model: of each token, a logit for every word.

Rule: as in ``contenders.py``; what is computed are the gradients of the words' weights and of the
hidden states.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa

from .models import Batch, Problem
from .norms import Grads


def total(weight: Tensor, batch: Batch) -> Tensor:
    hidden, words = batch
    return F.cross_entropy(hidden @ weight.T, words, reduction="sum")


def backward(problem: Problem, loss: Callable[..., Tensor]) -> Grads:
    """``.backward()``, as from within a network."""
    (weight,) = problem.net.parameters()

    def window(batch: Batch) -> dict[str, Tensor]:
        hidden, words = batch[0].detach().requires_grad_(), batch[1]
        (loss(weight, (hidden, words)) / len(hidden)).backward()
        got = {"weight": weight.grad, "hidden": hidden.grad}
        weight.grad = None
        return got

    return window


def by_func(problem: Problem, loss: Callable[..., Tensor]) -> Grads:
    """``torch.func.grad``."""
    (weight,) = problem.params.values()

    def window(batch: Batch) -> dict[str, Tensor]:
        hidden, words = batch

        def mean(weight: Tensor, hidden: Tensor) -> Tensor:
            return loss(weight, (hidden, words)) / len(hidden)

        weights, states = torch.func.grad(mean, argnums=(0, 1))(weight, hidden)
        return {"weight": weights, "hidden": states}

    return window


def by_hand(problem: Problem) -> Grads:
    """The loop over tokens that a user would have written, each with its ``.backward()``."""
    (weight,) = problem.net.parameters()

    def window(batch: Batch) -> dict[str, Tensor]:
        tiles = [x.detach().requires_grad_() for x in batch[0].split(problem.rows)]
        for hidden, words in zip(tiles, batch[1].split(problem.rows), strict=True):
            (total(weight, (hidden, words)) / len(batch[0])).backward()
        got = {"weight": weight.grad, "hidden": torch.cat([x.grad for x in tiles])}
        weight.grad = None
        return got

    return window


def tiled(problem: Problem, by: Callable[..., Grads], **knobs: Any) -> Grads:
    """``pa.microbatch`` over the tokens."""
    return by(problem, pa.microbatch(total, microbatch_size=problem.rows, reduce="sum", **knobs))


WHOLE_HEAD, WHOLE_FUNC = "whole head", "whole head, torch.func"
HAND_HEAD = "tiled head by hand"
TILED_HEAD, TILED_FUNC = "tiled head", "tiled head, torch.func"

HEADS: dict[str, Callable[[Problem], Grads]] = {
    WHOLE_HEAD: partial(backward, loss=total),
    WHOLE_FUNC: partial(by_func, loss=total),
    HAND_HEAD: by_hand,
    TILED_HEAD: partial(tiled, by=backward),
    TILED_FUNC: partial(tiled, by=by_func),
}
