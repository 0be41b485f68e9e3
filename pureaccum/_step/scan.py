"""Microbatches in one loop of the compiler, whose graph is as large for two as for a thousand.

    window = scan(the window with one more microbatch, window, the microbatches, stacked)

It is for compiled code at top level: a scan under vmap does not compile.

Small microbatches go through several at once, which costs as much as one:

    values, pull = vjp(vmap(loss of a microbatch), leaves)
    sums += pull(rows of each)

The loss remains a function of one microbatch. Several go together only while their forward passes
keep next to nothing, and only for a plain scalar loss under ``nonfinite="propagate"``: whether one
of them has no weight, or a gradient that is left out, cannot be told from a sum over several.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from .._base import trees
from .._base.torch_internals import compiler
from .._core import coupling, ledger, losses
from .._core.weights import Weighing, scaled, term_of
from . import state


LITTLE = 2**20  # bytes that the forward passes of all that go together keep

# The loss as a function of leaves, the tensors of a microbatch, and the samples before it.
One = Callable[[Sequence[Tensor], list[Tensor], Tensor], object]

# The window with one more microbatch, or several, and what is kept of their aux.
More = Callable[[state.StepWindow, trees.Tree], tuple[state.StepWindow, trees.Tree]]


def scanned(
    more: More, window: state.StepWindow, stacked: trees.Tree, like: trees.Tree
) -> tuple[state.StepWindow, trees.Tree]:
    """The window with all that is stacked along a new dim 0, and what is kept of aux, stacked.

    ``like`` is what is kept of one of them.
    """
    columns, spec = trees.flatten(stacked)
    begun, window_spec = trees.flatten(window)

    def body(carry: list[Tensor], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        part = _filled(columns, spec, tensors)
        after, kept = more(trees.unflatten(window_spec, _unpacked(carry, begun)), part)
        # Clones, because a scan may return nothing that it was given.
        return _packed(trees.flatten(after)[0]), [x.clone() for x in tensors_of(kept)]

    after, outputs = compiler.scan_in_graph(body, _packed(begun), tensors_of(stacked))
    return trees.unflatten(window_spec, _unpacked(after, begun)), _filled(
        *trees.flatten(like), outputs
    )


def _packed(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves, those without dimensions last and in few tensors: each in a carry takes time."""
    numbers: dict[Any, list[Tensor]] = {}
    for x in leaves:
        if x.dim() == 0:
            numbers.setdefault((x.dtype, x.device), []).append(x)
    return [x for x in leaves if x.dim() > 0] + [*map(torch.stack, numbers.values())]


def _unpacked(packed: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """The leaves again, of which there were those of ``like``."""
    end = sum(x.dim() > 0 for x in like)
    rest = iter(packed[:end])
    numbers = {(x.dtype, x.device): iter(x.unbind()) for x in packed[end:]}
    return [next(rest if x.dim() > 0 else numbers[x.dtype, x.device]) for x in like]


def tensors_of(tree: trees.Tree) -> list[Tensor]:
    """The leaves of a batch that are cut."""
    return [x for x in trees.flatten(tree)[0] if isinstance(x, Tensor)]


def one_of(call: coupling.LossOfPart, like: trees.Tree, rows: int) -> One:
    """A loss in the form of ``One``, for batches whose other leaves are those of ``like``."""
    columns, spec = trees.flatten(like)

    def one(leaves: Sequence[Tensor], tensors: list[Tensor], before: Tensor) -> Any:
        return call(list(leaves), _filled(columns, spec, tensors), rows, ((), before))

    return one


def _filled(columns: list[Any], spec: optree.PyTreeSpec, tensors: Sequence[Tensor]) -> trees.Tree:
    """A tree with these tensors in place of its own."""
    rest = iter(tensors)
    return trees.unflatten(spec, [next(rest) if isinstance(x, Tensor) else x for x in columns])


# Several at once ----------------------------------------------------------------------------


def how_many(one: One, leaves: list[Tensor], xs: list[Tensor]) -> int:
    """How many microbatches like those in ``xs`` go together: a power of two, found by trying.

    It is one where torch cannot vmap the loss, or warns that it would be slow, where the loss draws
    random numbers, which would be others, and where it is ``Weighted``.
    """
    params = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    sizes: list[int] = []

    def weigh(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in params:
            sizes.append(x.numel() * x.element_size())
        return x

    none = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    held = [leaf.detach().requires_grad_() for leaf in leaves]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                _values(one, leaves, xs, none.expand(len(xs[0])))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weigh, lambda x: x):
                one(held, [x[0] for x in xs], none)
    except Exception:
        return 1
    most = LITTLE // max(sum(sizes), 1)
    return 1 << max(0, most.bit_length() - 1)  # most numbers of microbatches divide by it


def add_together(
    call: coupling.LossOfPart,
    params: trees.Tree,
    window: state.StepWindow,
    group: trees.Tree,
    reduction: losses.Reduction,
    unit: float,
    scale: Tensor | None,
) -> state.StepWindow:
    """The window with several microbatches, stacked along a new dim 0."""
    xs, (leaves, spec) = tensors_of(group), trees.flatten(params)
    count, rows = xs[0].shape[:2]
    one, before = one_of(call, group, rows), window.rows
    each = before + rows * torch.arange(count, dtype=before.dtype, device=before.device)
    # pyright cannot tell the two lengths of vjp's result apart
    values, pull = torch.func.vjp(lambda *leaves: _values(one, leaves, xs, each), *leaves)  # pyright: ignore
    times = 1.0 if reduction == "sum" else float(rows)
    cotangent = scaled(torch.full_like(values, times / unit), scale)
    weighing = Weighing(cotangent, 1.0, None)
    pairs = zip(
        pull(cotangent, retain_graph=False), trees.flatten(window.accum.grads)[0], strict=True
    )
    wide, none = values.detach().double(), torch.zeros_like(before)
    weights = torch.full_like(wide, times if reduction == "mean" else 0.0)
    more = ledger.AccumState(
        grads=trees.unflatten(spec, [term_of(grad, x.dtype, weighing) for grad, x in pairs]),
        total=(wide * times).sum(),
        weight=weights.sum(),
        microbatches=none + count,
        skipped=none,
        nonfinite=((wide - wide) != 0).sum(),
        weighted=none,
    )
    accum, rows = trees.add(window.accum, more), before + count * rows
    return state.StepWindow(accum, window.buffers, rows, window.checked.clone())


def _values(one: One, leaves: Sequence[Tensor], xs: list[Tensor], each: Tensor) -> Tensor:
    def value(tensors: list[Tensor], before: Tensor) -> Tensor:
        seen, _ = losses.read(one(leaves, tensors, before), False)
        if not isinstance(seen.weight, tuple):
            raise TypeError("a Weighted loss goes alone: its weight may be zero")
        return seen.total

    return torch.func.vmap(value)(xs, each)
