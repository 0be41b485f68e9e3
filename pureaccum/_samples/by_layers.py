"""A chunk of samples whose gradients come from their layers, in one backward pass.

What is only multiplied and summed need not be written out: see ``layers`` and ``outer_products``.
It is the shorter way to the numbers that ``chunks`` has, up to rounding. Where it does not lead, the
chunk is computed anew, by the way that takes everything, and has the words for what is wrong.
"""

from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from .._base import (
    LARGEST_INT,
    Tree,
    accumulation_dtype,
    generators,
    read_tensors,
    restore,
    saved_tensors_hooks_refused,
    unflatten,
)
from .._core import cutting, inside_of, join_aux, onlooker, read
from .chunks import (
    OF_EACH,
    Chunk,
    SampleLoss,
    Sampling,
    needs_norms,
    norms_of_parts,
    samples_of,
    scaled_and_kept,
)
from .layers import Layers, Unfit
from .outer_products import Outer, is_short, squared_norms, written_out


def with_shortcut(how: Sampling, reduce: Any, at_least: torch.dtype) -> Sampling:
    """A sampling that takes gradients from layers, where they are only multiplied and summed."""
    if reduce not in ("sum", "mean") or callable(how.metrics):
        return how
    if callable(how.transform) or how.transform == "sign":
        return how
    return how._replace(shortcut=partial(_chunk_by_layers, at_least=at_least))


def _chunk_by_layers(
    call: SampleLoss,
    leaves: list[Tensor],
    spec: optree.PyTreeSpec,
    part: Tree,
    how: Sampling,
    parts: list[list[int]],
    *,
    at_least: torch.dtype,
) -> Chunk | None:
    """A chunk, or None where gradients do not come from layers."""
    drawn = generators({x.device for x in leaves}) if how.randomness != "error" else []
    try:
        return _by_layers(call, leaves, spec, part, how, parts, at_least)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):  # its own, or what vmap refuses of copies and not of leaves
        restore(drawn)
        return None


def _by_layers(
    call: SampleLoss,
    leaves: list[Tensor],
    spec: optree.PyTreeSpec,
    part: Tree,
    how: Sampling,
    parts: list[list[int]],
    at_least: torch.dtype,
) -> Chunk:
    tensors, sample_of = samples_of(part, how)
    layers = Layers(leaves, len(tensors[0]), at_least)
    specs: dict[str, optree.PyTreeSpec] = {}

    def one(*tensors: Tensor) -> Any:
        sample = sample_of(tensors)
        with layers:
            out = call(tuple(layers.given), sample)
        seen, shape = read(out, how.has_aux)
        aux, specs["aux"] = read_tensors(join_aux(seen.aux, shape), "aux", OF_EACH)
        return seen.total, seen.weight, aux

    grads: list[Any] = [None] * len(leaves)
    squares: list[Any] = [None] * len(leaves)

    def see(i: int, grad: Outer | Tensor) -> None:
        grads[i] = grad if isinstance(grad, Tensor) or is_short(grad) else written_out(grad)
        if wanted:
            squares[i] = squared_norms(grads[i])

    wanted = needs_norms(how)
    with (
        saved_tensors_hooks_refused("saved tensor hooks are not followed"),
        inside_of(onlooker()) as reached,
        cutting(LARGEST_INT),  # a sample is no batch
        torch.enable_grad(),
    ):
        total, weight, aux = torch.func.vmap(one, randomness=how.randomness)(*tensors)
    if reached.group is not None:
        raise Unfit("the loss reaches other ranks")
    layers.pull(total, see)

    def norm_of(its: list[int]) -> Tensor:
        dtypes = [accumulation_dtype(leaves[i].dtype).to_real() for i in its]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        none = torch.zeros_like(total, dtype=torch.float64)
        return sum((squares[i].to(none.device) for i in its), none).sqrt().to(wide)

    norms = [norm_of(its) for its in parts] if wanted else []
    value = total.detach()
    weight = weight.detach() if isinstance(weight, Tensor) else ()
    factor, keep = scaled_and_kept(norms, value, weight, how, parts)
    metric = how.metrics == "norm"
    return Chunk(
        grads=grads,
        factor=factor,
        keep=keep,
        spec=spec,
        value=value,
        weight=weight,
        aux=unflatten(specs["aux"], [x.detach() for x in aux]),
        metrics=norms_of_parts(how.transform, norms) if metric else None,
    )
