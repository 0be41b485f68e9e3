"""The contenders for losses whose samples are coupled, for a head with many words, and for a chain
of blocks of which only some activations are kept.

Rule: all compute the gradient of the full batch, which is also what they run against: here it fits
in memory. GradCache is the algorithm of Gao et al. (2021), as its authors' package writes it, for
two towers in one go and without a state of random numbers to keep.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import pureaccum as pa

from .models import Batch, Grads, Problem, Read, parts, taken


# Networks with BatchNorm.


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


def in_microbatches(problem: Problem) -> Grads:
    """``pa.functional`` with a size, and ``pa.grad``: also gives new running statistics."""
    criterion, params = problem.criterion, problem.params
    fn = pa.functional(problem.net, microbatch_size=problem.rows)
    buffers = fn.buffers

    def loss(params: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        out, after = fn.apply(params, buffers, x)
        return criterion(out, y), after

    gradient = pa.grad(loss, has_aux=True, aux_reduction="last")
    return lambda batch: gradient(params, batch)[0]


# All pairs: every sample meets every other.


def all_pairs(problem: Problem) -> Grads:
    """``.backward()`` on all pairs at once."""
    net, criterion = problem.net, problem.criterion
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        criterion(*net(*batch)).backward()
        return taken(named)

    return window


def all_pairs_by_func(problem: Problem) -> Grads:
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
            embedded = [net(*chunk) for chunk in parts(batch, rows)]
        embeddings = [torch.cat(column).requires_grad_() for column in zip(*embedded, strict=True)]
        del embedded
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


def pairs_in_microbatches(problem: Problem, gradient: Callable[..., Any]) -> Grads:
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


# The head of a language model: of each token, a logit for every word.


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


def tiled(problem: Problem, by: Callable[..., Grads], **options: Any) -> Grads:
    """``pa.microbatch`` over the tokens."""
    return by(problem, pa.microbatch(total, microbatch_size=problem.rows, reduce="sum", **options))


# A chain of blocks.


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
    """A chain under ``pa.remat``, differentiated by ``pa.grad_and_value``."""
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
    nets = list(problem.net)
    length = math.isqrt(len(nets))

    def segment(start: int) -> Callable[[Any, Tensor], Tensor]:
        def run(params: Any, x: Tensor) -> Tensor:
            for net, own in zip(nets[start : start + length], params, strict=True):
                x = functional_call(net, own, (x,))
            return x

        return pa.remat(run)

    segments = {start: segment(start) for start in range(0, len(nets), length)}

    def chain(params: Any, x: Tensor) -> Tensor:
        for start, run in segments.items():
            x = run(params[start : start + length], x)
        return x

    return chain


def blocks(problem: Problem, params: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The parameters, block by block."""
    return [
        {name: params[f"{n}.{name}"] for name, _ in block.named_parameters()}
        for n, block in enumerate(problem.net)
    ]


COUPLED: dict[str, Callable[[Problem], Any]] = {
    "full batch": full_batch,
    "functional in microbatches": in_microbatches,
    "full-batch InfoNCE over BatchNorm": full_views,
    "InfoNCE over BatchNorm": cut_views,
    "full-batch InfoNCE": all_pairs,
    "full-batch InfoNCE, torch.func.grad": all_pairs_by_func,
    "GradCache": gradcache,
    "InfoNCE, pa.grad": partial(pairs_in_microbatches, gradient=pa.grad),
    "InfoNCE, torch.func.grad": partial(pairs_in_microbatches, gradient=torch.func.grad),
    "InfoNCE step, whole batch": partial(step_of_pairs, cut=False, compile=False),
    "InfoNCE step, microbatched": partial(step_of_pairs, cut=True, compile=False),
    "compiled InfoNCE step, whole batch": partial(step_of_pairs, cut=False, compile=True),
    "compiled InfoNCE step, microbatched": partial(step_of_pairs, cut=True, compile=True),
    "whole head": partial(backward, loss=total),
    "tiled head by hand": by_hand,
    "tiled head": partial(tiled, by=backward),
    "tiled head, torch.func": partial(tiled, by=by_func),
    "no remat": full_batch,
    "checkpoint": checkpointed,
    "remat": rematerialised,
    "remat, .backward()": rematerialised_backward,
}
