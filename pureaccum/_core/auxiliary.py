"""What becomes of auxiliary outputs, reduced as the microbatches come.

For each leaf a word, or for a subtree a ``Reducer``: see words.py. ``"mean"`` weighs each
microbatch as the loss does. Only ``"concat"`` and ``"stack"`` keep what they saw.
"""

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base.dtensors import is_sharded, local
from .._base.trees import Tree, flatten, map, paths, unflatten
from .._base.trees import leaves as leaves_of
from .weights import Microbatch
from .words import below, is_reducer, reducer_of, replaced


class AuxState(NamedTuple):
    """What has been reduced so far."""

    reduction: Tree
    spec: optree.PyTreeSpec  # of the aux
    states: list[Any]  # of each leaf, or of a Reducer
    likes: list[Any]  # what the first of them were
    specs: list[tuple[Any, Any]]  # each word, and the structure of what is below it


class Stack(NamedTuple):
    """The aux of several microbatches: their tensors stacked along a new dim 0."""

    spec: optree.PyTreeSpec
    leaves: list[Any]
    share: Tensor  # of each in a mean
    finite: Tensor | None  # whether each is, where those that are not are left out


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
    tree = unflatten(stack.spec, stack.leaves)
    if state is None:
        pairs = _below(reduction, tree)
    elif torch.compiler.is_dynamo_compiling() or stack.spec == state.spec:  # 2.11 compiles no ==
        pairs = below(reduction, tree)
    else:
        raise ValueError(
            f"the loss returned an aux of another structure than before: {stack.spec} after "
            f"{state.spec}; what is reduced over microbatches has one structure."
        )
    states: list[Any] = []
    likes: list[Any] = []
    specs: list[Any] = []
    names = iter(paths(stack.spec, "aux"))
    for word, part in pairs:
        leaves, spec = flatten(part)
        specs.append((word, spec))
        several = [map(lambda x: _numbers(x, stack.share), part)] if is_reducer(word) else leaves
        for leaf in several:
            before = None if state is None else state.states[len(states)]
            like = leaf if state is None else state.likes[len(likes)]
            name = "" if is_reducer(word) else next(names)
            states.append(_reduced(before, leaf, like, word, stack, rows, name))
            likes.append(like)
        if is_reducer(word):
            for _ in leaves:
                next(names)
    return AuxState(reduction, stack.spec, states, likes, specs)


def finish_aux(state: AuxState) -> Tree:
    """The reduced aux."""
    done = iter(zip(state.states, state.likes, strict=True))
    parts: list[Any] = []
    for word, spec in state.specs:
        if is_reducer(word):
            parts.append(word.finalize(next(done)[0]))
        else:
            pairs = [next(done) for _ in range(spec.num_leaves)]
            parts.append(unflatten(spec, [_finished(word, *pair) for pair in pairs]))
    return replaced(state.reduction, parts)


def _reduced(state: Any, leaf: Any, like: Any, how: Any, stack: Stack, rows: int, name: str) -> Any:
    reducer = reducer_of(how)
    if is_reducer(how):
        first = map(lambda x: x[0], leaf)
        return reducer.update(reducer.init(first) if state is None else state, leaf, stack.share)
    if how != "concat" and is_sharded(leaf):
        leaf = leaf.full_tensor()
    if how == "last" and not isinstance(leaf, Tensor):
        return leaf
    if how in ("concat", "stack"):
        rowless = how == "concat" and isinstance(leaf, Tensor) and leaf.shape[1:2] != (rows,)
        if not isinstance(leaf, Tensor) or rowless:
            raise ValueError(_not_joined(leaf, how, rows, name))
        if state and how == "concat" and is_sharded(leaf):
            raise ValueError(_not_in_order(name))
    elif not isinstance(leaf, (Tensor, int, float)):
        raise TypeError(
            f"{name} is a {type(leaf).__name__}, which has no {how}; name 'last' for it in "
            "aux_reduction."
        )
    leaf = _numbers(leaf, stack.share)
    at = 2 if how == "concat" else 1
    if how != "last" and isinstance(like, Tensor) and like.shape[at:] != leaf.shape[at:]:
        raise ValueError(_not_alike(like[0], leaf[0], how, name))
    if stack.finite is not None and how in ("sum", "max", "min"):
        leaf = torch.where(_along(stack.finite, leaf), leaf, _neutral(leaf, how))
    return reducer.update(state, leaf, stack.share)


def _neutral(leaf: Tensor, how: str) -> Any:
    """What changes nothing, in place of what is skipped."""
    if how == "sum" or leaf.dtype == torch.bool:
        return torch.zeros_like(leaf) if how != "min" else torch.ones_like(leaf)
    least, most = (
        (-torch.inf, torch.inf)
        if leaf.is_floating_point()
        else (torch.iinfo(leaf.dtype).min, torch.iinfo(leaf.dtype).max)
    )
    return torch.full_like(leaf, least if how == "max" else most)


def _along(each: Tensor, leaf: Tensor) -> Tensor:
    return each.view(-1, *[1] * (leaf.dim() - 1))


def _numbers(leaf: Any, like: Tensor) -> Any:
    """A number for each microbatch."""
    if isinstance(leaf, Tensor):
        return leaf
    dtype = torch.float64 if isinstance(leaf, float) else torch.int64
    return torch.full(like.shape, leaf, dtype=dtype, device=like.device)


def _finished(how: str, state: Any, like: Any) -> Any:
    if how == "last" and not isinstance(like, Tensor):
        return state
    result = reducer_of(how).finalize(state)
    if how in ("sum", "mean") and isinstance(like, Tensor):
        kind = like.dtype
        return result.to(kind) if kind.is_floating_point or kind.is_complex else result
    return result


def _below(reduction: Tree, aux: Tree) -> list[tuple[Any, Any]]:
    try:
        return below(reduction, aux)
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
