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
from ._tree import NAMESPACE, Tree, accumulation_dtype, flatten, paths, unflatten
from ._weights import Microbatch


REDUCTIONS = ("concat", "sum", "mean", "stack", "last")


class AuxState(NamedTuple):
    """What has been reduced so far, leaf by leaf."""

    spec: optree.PyTreeSpec
    how: list[str]
    parts: list[Any]
    dtypes: list[torch.dtype | None]
    share: Tensor


def check_aux_reduction(reduction: Tree) -> None:
    """Check the words of a prefix tree."""
    for word in flatten(reduction)[0]:
        check_choice(word, REDUCTIONS, "aux_reduction")


def fold_aux(
    state: AuxState | None, added: Microbatch, rows: int, reduction: Tree, skipping: bool
) -> AuxState:
    """One microbatch's aux more."""
    leaves, spec = flatten(added.aux)
    share = added.share
    if not isinstance(share, Tensor):
        share = torch.full_like(added.value, share, dtype=torch.float64)
    if state is None:
        how = _broadcast(reduction, added.aux)
        dtypes = [x.dtype if isinstance(x, Tensor) else None for x in leaves]
        state = AuxState(spec, how, [None] * len(leaves), dtypes, torch.zeros_like(share))
    elif spec != state.spec:
        raise ValueError(
            f"the loss returned an aux of another structure than before: {spec} after "
            f"{state.spec}; what is reduced over microbatches has one structure."
        )
    parts = [
        _reduced(part, leaf, how, share, added.finite if skipping else None, rows, i, spec)
        for i, (part, leaf, how) in enumerate(zip(state.parts, leaves, state.how, strict=True))
    ]
    return state._replace(parts=parts, share=state.share + share)


def finish_aux(state: AuxState) -> Tree:
    """The reduced aux."""
    return unflatten(
        state.spec,
        [
            _finished(part, how, dtype, state.share)
            for part, how, dtype in zip(state.parts, state.how, state.dtypes, strict=True)
        ],
    )


def _reduced(
    part: Any,
    leaf: Any,
    how: str,
    share: Tensor,
    finite: Tensor | None,
    rows: int,
    i: int,
    spec: optree.PyTreeSpec,
) -> Any:
    if how == "last":
        return leaf
    if how in ("concat", "stack"):
        if not isinstance(leaf, Tensor) or (
            how == "concat" and (leaf.dim() == 0 or leaf.shape[0] != rows)
        ):
            raise ValueError(_not_joined(leaf, how, rows, paths(spec, "aux")[i]))
        part = [] if part is None else part
        skip = 1 if how == "concat" else 0
        if part and part[0].shape[skip:] != leaf.shape[skip:]:
            raise ValueError(_not_alike(part[0], leaf, how, paths(spec, "aux")[i]))
        part.append(leaf)
        return part
    if not isinstance(leaf, (Tensor, int, float)):
        raise TypeError(
            f"{paths(spec, 'aux')[i]} is a {type(leaf).__name__}, which has no {how}; name 'last' "
            "for it in aux_reduction."
        )
    term = _widened(leaf, share.device)
    if how == "mean":
        term = torch.where(share != 0, term * share.to(term.device), 0.0)
    elif finite is not None:
        term = torch.where(finite, term, torch.zeros_like(term))
    if part is not None and part.shape != term.shape:
        raise ValueError(_not_alike(part, term, how, paths(spec, "aux")[i]))
    return term if part is None else part + term


def _widened(leaf: Tensor | float, device: torch.device) -> Tensor:
    """A number or a tensor in the dtype in which it is summed."""
    if not isinstance(leaf, Tensor):
        return torch.full(
            (), leaf, dtype=torch.float64 if isinstance(leaf, float) else None, device=device
        )
    if leaf.is_floating_point() or leaf.is_complex():
        return leaf.to(accumulation_dtype(leaf.dtype))
    return leaf.to(torch.int64)


def _finished(part: Any, how: str, dtype: torch.dtype | None, share: Tensor) -> Any:
    if how == "concat":
        return torch.cat(part)
    if how == "stack":
        return torch.stack(part)
    if how == "last":
        return part
    result = part / share.to(part.device) if how == "mean" else part
    if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
        return result.to(dtype)
    return result


def _broadcast(reduction: Tree, aux: Tree) -> list[str]:
    try:
        return optree.broadcast_prefix(reduction, aux, namespace=NAMESPACE)
    except ValueError as error:
        raise ValueError(
            f"aux_reduction={reduction!r} is no prefix of the aux that the loss returned: {error}"
        ) from error


def _not_alike(before: Tensor, leaf: Tensor, how: str, name: str) -> str:
    return (
        f"{name} has shape {tuple(leaf.shape)} after {tuple(before.shape)} in a microbatch before, "
        f"and aux_reduction={how!r} needs one shape. A leaf with one row per sample takes 'concat'."
    )


def _not_joined(leaf: Any, how: str, rows: int, name: str) -> str:
    came = (
        f"has shape {tuple(leaf.shape)} for a microbatch of {rows} rows"
        if isinstance(leaf, Tensor)
        else f"is a {type(leaf).__name__}"
    )
    expected = "one row per sample" if how == "concat" else "a tensor"
    return (
        f"{name} {came}, and aux_reduction={how!r} needs {expected}. Name what is meant in "
        "aux_reduction: 'sum', 'mean' (weighted as the loss is), 'stack' (one entry a microbatch) "
        "or 'last', for all of aux or as a tree of words."
    )
