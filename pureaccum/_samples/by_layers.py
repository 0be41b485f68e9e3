"""A chunk of samples whose gradients come from their layers, in one backward pass.

Gradients that are only multiplied and summed need not be materialised: see ``layers`` and
``outer_products``. This is the shorter way to the numbers of ``chunks``, up to rounding. If it does
not apply, ``chunks`` computes the chunk again: it handles every loss and raises the errors.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from .._base import checks, random_state, refusals, trees
from .._base.torch_internals import functorch
from .._core import batches, exchange, losses
from . import chunks, layer_rules, outer_products, scaling
from .layers import Layers, Unfit


def with_shortcut(how: chunks.Sampling, reduce: Any, at_least: torch.dtype) -> chunks.Sampling:
    """A sampling that takes gradients from layers, where they are only multiplied and summed."""
    scaled = not callable(how.transform) and how.transform != "sign"
    if reduce not in ("sum", "mean") or callable(how.metrics) or not scaled:
        return how
    return how._replace(shortcut=partial(_chunk_by_layers, at_least=at_least))


def with_factors(how: chunks.Sampling) -> chunks.Sampling:
    """A sampling of losses of one number or several whose outer products are not written out.

    Of several numbers these are dim 0 of a factor that depends on them.
    """
    shortcut = partial(_chunk_by_layers, at_least=torch.float32, factors=True)
    return how._replace(several=True, shortcut=shortcut)


def _chunk_by_layers(
    task: chunks.Task, part: trees.Tree, *, at_least: torch.dtype, factors: bool = False
) -> chunks.Chunk | None:
    """A chunk, or None where gradients do not come from layers."""
    draws = task.how.mapped.randomness != "error"
    drawn = random_state.generators({x.device for x in task.leaves}) if draws else []
    try:
        return _by_layers(task, part, at_least, factors)
    except (RuntimeError, ValueError) as error:
        if refusals.is_out_of_memory(error):
            raise
        random_state.restore(drawn)  # its own, or what vmap refuses of copies and not of leaves
        return None


def _by_layers(
    task: chunks.Task, part: trees.Tree, at_least: torch.dtype, factors: bool
) -> chunks.Chunk:
    leaves, parts, how = task.leaves, task.parts, task.how
    layers, total, rest, specs = _totals(task, part, at_least)
    numbers = total.shape[1:]  # no dims where a sample has one
    grads: list[Any] = [None] * len(leaves)
    norms: list[Any] = [None] * len(leaves)
    wanted = chunks.needs_norms(how)

    def see(i: int, grad: outer_products.Outer | Tensor) -> None:
        if (
            not factors
            and isinstance(grad, outer_products.Outer)
            and (numbers or not outer_products.is_short(grad))
        ):
            grad = outer_products.written_out(grad)
        if numbers and isinstance(grad, Tensor):
            grad = _rows_first(grad, leaves[i], numbers)
        grads[i] = grad
        if wanted:
            norms[i] = outer_products.norms_of(grad)

    if chunks.carries_graph(how) and not layers.all_of(total):
        raise Unfit("the loss depends on more than its leaves, and so do gradients")
    if checks.here.look is not None:
        checks.here.look([total, *rest], layers.own)
    layers.pull(total, see, _each_number(total) if numbers else None)

    of_parts = [_norm_of(norms, leaves, its, total) for its in parts] if wanted else []
    seen = losses.read_again(total.detach(), [x.detach() for x in rest], specs["shape"])
    factor, keep = scaling.scaled_and_kept(of_parts, seen.total, seen.weight, how.transform, parts)
    return chunks.Chunk(
        grads=grads,
        factor=factor,
        keep=keep,
        spec=task.spec,
        value=seen.total,
        weight=seen.weight,
        aux=trees.unflatten(specs["aux"], seen.aux),
        metrics=scaling.norms_as_tree(how.transform, of_parts) if how.metrics == "norm" else None,
    )


def _totals(
    task: chunks.Task, part: trees.Tree, at_least: torch.dtype
) -> tuple[Layers, Tensor, list[Tensor], dict[str, Any]]:
    """What the samples of a chunk come to, recorded by layers; and what comes beside it."""
    how = task.how
    tensors, sample_of = chunks.samples_of(part, how)
    layers = Layers(task.leaves, tensors[0].shape[0], at_least, layer_rules.RULES)
    specs: dict[str, Any] = {}

    def one(*tensors: Tensor) -> Any:
        sample = sample_of(tensors)
        with layers:
            out = task.call(layers.given, sample)
        seen, shape = losses.read(out, how.has_aux, how.several)
        aux, specs["aux"] = checks.read_tensors(
            losses.join_aux(seen.aux, shape), "aux", chunks.OF_EACH
        )
        specs["shape"] = shape
        return losses.in_one_list(seen._replace(aux=aux))

    with (
        disable_saved_tensors_hooks("saved tensor hooks are not followed"),
        exchange.inside_of(exchange.onlooker()) as reached,
        batches.cutting(checks.LARGEST_INT),  # a sample is no batch
        torch.enable_grad(),
    ):
        total, *rest = functorch.over_rows(one, tensors, how.mapped.randomness)
    if reached.group is not None:
        raise Unfit("the loss reaches other ranks")
    return layers, total, rest, specs


def _each_number(total: Tensor) -> Tensor:
    """A cotangent for each number of a sample, the same for all samples."""
    one = total[0]
    each = torch.eye(one.numel(), dtype=one.dtype, device=one.device)
    return each.view(len(each), 1, *one.shape).expand(len(each), *total.shape)


def _rows_first(grad: Tensor, leaf: Tensor, numbers: torch.Size) -> Tensor:
    """The gradients for each number of a sample as torch.func has them: the samples are dim 0."""
    if grad.dim() == leaf.dim() + 1:  # zero, and so the same for all numbers
        grad = grad.expand(numbers.numel(), *grad.shape)
    return grad.movedim(0, 1).unflatten(1, numbers)


def _norm_of(norms: list[Tensor], leaves: list[Tensor], its: list[int], like: Tensor) -> Tensor:
    """The norm of some leaves as one vector, for each sample, in the dtype of ``global_norm``."""
    if not its:
        return torch.zeros_like(like, dtype=torch.float32)
    double = torch.float64, torch.complex128
    wide = torch.float64 if any(leaves[i].dtype in double for i in its) else torch.float32
    together = torch.stack([norms[i].to(like.device, torch.float64) for i in its])
    return torch.linalg.vector_norm(together, dim=0).to(wide)
