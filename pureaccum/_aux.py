"""What becomes of auxiliary outputs: one reduction a leaf, applied as the microbatches come.

``"concat"`` joins leaves with one row per sample; ``"sum"`` adds; ``"mean"`` weighs each
microbatch as the loss does; ``"stack"`` keeps one entry a microbatch; ``"last"`` forgets all
but the last. Only ``"concat"`` and ``"stack"`` keep what they saw.
"""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ._inputs import check_choice
from ._sharded import is_sharded, local
from ._tree import Tree, accumulation_dtype, flatten, map, paths, unflatten
from ._tree import leaves as leaves_of
from ._weights import Microbatch


REDUCTIONS = ("concat", "sum", "mean", "stack", "last")


class AuxState(NamedTuple):
    """What has been reduced so far, leaf by leaf."""

    spec: optree.PyTreeSpec
    how: list[str]
    parts: list[Any]
    dtypes: list[torch.dtype | None]
    share: Tensor


class Stack(NamedTuple):
    """The aux of several microbatches: their tensors stacked along a new dim 0."""

    spec: optree.PyTreeSpec
    leaves: list[Any]
    share: Tensor  # of each in a mean
    finite: Tensor | None  # whether each is, where those that are not are left out


def check_aux_reduction(reduction: Tree) -> None:
    """Check the words of a prefix tree."""
    for word in flatten(reduction)[0]:
        check_choice(word, REDUCTIONS, "aux_reduction")


def fold_aux(
    state: AuxState | None, added: Microbatch, rows: int, reduction: Tree, skipping: bool
) -> AuxState:
    """One microbatch's aux more."""
    stack = stack_of_one(added.aux, share_of(added), added.finite if skipping else None)
    return fold_stack(state, stack, rows, reduction)


def share_of(added: Microbatch) -> Tensor:
    """What a microbatch weighs in a mean of its aux."""
    share = added.share
    if isinstance(share, Tensor):
        return share
    return torch.full_like(local(added.value), share, dtype=torch.float64)


def stack_of_one(aux: Tree, share: Tensor, finite: Tensor | None) -> Stack:
    """The aux of a single microbatch."""
    leaves, spec = flatten(aux)
    leaves = [x.unsqueeze(0) if isinstance(x, Tensor) else x for x in leaves]
    return Stack(spec, leaves, share.unsqueeze(0), None if finite is None else finite.unsqueeze(0))


def fold_stack(state: AuxState | None, stack: Stack, rows: int, reduction: Tree) -> AuxState:
    """The aux of several microbatches of as many rows each."""
    spec = stack.spec
    if state is None:
        how = _broadcast(reduction, unflatten(spec, stack.leaves))
        dtypes = [x.dtype if isinstance(x, Tensor) else None for x in stack.leaves]
        none = torch.zeros_like(stack.share[0])
        state = AuxState(spec, how, [None] * len(stack.leaves), dtypes, none)
    elif (
        not torch.compiler.is_dynamo_compiling() and spec != state.spec
    ):  # torch 2.11 cannot compile it
        raise ValueError(
            f"the loss returned an aux of another structure than before: {spec} after "
            f"{state.spec}; what is reduced over microbatches has one structure."
        )
    parts = [
        _reduced(part, leaf, how, stack, rows, i)
        for i, (part, leaf, how) in enumerate(
            zip(state.parts, stack.leaves, state.how, strict=True)
        )
    ]
    return AuxState(spec, state.how, parts, state.dtypes, state.share + stack.share.sum())


def finish_aux(state: AuxState) -> Tree:
    """The reduced aux."""
    return unflatten(
        state.spec,
        [
            _finished(part, how, dtype, state.share)
            for part, how, dtype in zip(state.parts, state.how, state.dtypes, strict=True)
        ],
    )


def _reduced(part: Any, leaf: Any, how: str, stack: Stack, rows: int, i: int) -> Any:
    if how != "concat" and is_sharded(leaf):
        leaf = leaf.full_tensor()
    if how == "last":
        return leaf[-1] if isinstance(leaf, Tensor) else leaf
    if how in ("concat", "stack"):
        if not isinstance(leaf, Tensor) or (
            how == "concat" and (leaf.dim() == 1 or leaf.shape[1] != rows)
        ):
            raise ValueError(_not_joined(leaf, how, rows, paths(stack.spec, "aux")[i]))
        if part and how == "concat" and is_sharded(leaf):
            raise ValueError(_not_in_order(paths(stack.spec, "aux")[i]))
        entries = leaf.flatten(0, 1) if how == "concat" else leaf
        if part and part[0].shape[1:] != entries.shape[1:]:
            before = part[0] if how == "concat" else part[0][0]
            raise ValueError(_not_alike(before, leaf[0], how, paths(stack.spec, "aux")[i]))
        return [*(part or []), entries]
    if not isinstance(leaf, (Tensor, int, float)):
        raise TypeError(
            f"{paths(stack.spec, 'aux')[i]} is a {type(leaf).__name__}, which has no {how}; name "
            "'last' for it in aux_reduction."
        )
    terms = _widened(leaf, stack.share)
    each = (-1, *[1] * (terms.dim() - 1))
    if how == "mean":
        share = stack.share.to(terms.device).view(each)
        terms = torch.where(share != 0, terms * share, 0.0)
    elif stack.finite is not None:
        terms = torch.where(stack.finite.view(each), terms, torch.zeros_like(terms))
    term = terms.sum(0)
    if part is not None and part.shape != term.shape:
        raise ValueError(_not_alike(part, term, how, paths(stack.spec, "aux")[i]))
    return term if part is None else part + term


def _widened(leaf: Tensor | float, like: Tensor) -> Tensor:
    """A number for each microbatch, or tensors, in the dtype in which it is summed."""
    if not isinstance(leaf, Tensor):
        dtype = torch.float64 if isinstance(leaf, float) else None
        return torch.full(like.shape, leaf, dtype=dtype, device=like.device)
    if leaf.is_floating_point() or leaf.is_complex():
        return leaf.to(accumulation_dtype(leaf.dtype))
    return leaf.to(torch.int64)


def _finished(part: Any, how: str, dtype: torch.dtype | None, share: Tensor) -> Any:
    if how in ("concat", "stack"):
        return torch.cat(part)
    if how == "last":
        return part
    result = part / share.to(part.device) if how == "mean" else part
    if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
        return result.to(dtype)
    return result


def _broadcast(reduction: Tree, aux: Tree) -> list[str]:
    try:  # optree.broadcast_prefix does the same, and cannot be compiled
        return leaves_of(map(lambda word, below: [word] * len(leaves_of(below)), reduction, aux))
    except ValueError as error:
        if not leaves_of(aux):
            raise ValueError(
                f"aux_reduction={reduction!r} is a tree, and the loss returned no aux that has "
                "leaves. With has_aux=True it returns some beside the loss; without, leave "
                "aux_reduction out."
            ) from error
        raise ValueError(
            f"aux_reduction={reduction!r} is no prefix of the aux that the loss returned: {error}"
        ) from error


def _not_alike(before: Tensor, leaf: Tensor, how: str, name: str) -> str:
    return (
        f"{name} has shape {tuple(leaf.shape)} after {tuple(before.shape)} in a microbatch before, "
        f"and aux_reduction={how!r} needs one shape. A leaf with one row per sample takes 'concat'."
    )


def _not_in_order(name: str) -> str:
    return (
        f"{name} is a DTensor, and aux_reduction='concat' was asked for over several microbatches: "
        "each of them holds some rows of every rank, so rows would come in another order than in "
        "the batch. Name 'sum', 'mean', 'stack' or 'last', or take the batch whole."
    )


def _not_joined(leaf: Any, how: str, rows: int, name: str) -> str:
    came = (
        f"has shape {tuple(leaf.shape[1:])} for a microbatch of {rows} rows"
        if isinstance(leaf, Tensor)
        else f"is a {type(leaf).__name__}"
    )
    expected = "one row per sample" if how == "concat" else "a tensor"
    return (
        f"{name} {came}, and aux_reduction={how!r} needs {expected}. Name what is meant in "
        "aux_reduction: 'sum', 'mean' (weighted as the loss is), 'stack' (one entry a microbatch) "
        "or 'last', for all of aux or as a tree of words."
    )
