"""What a batch holds beside tensors that torch splits.

    a list with one entry, no number, per row     is cut like a tensor
    a jagged nested tensor                        is cut between its rows
    all else: None, numbers, strings, objects     goes to every microbatch as it is

What might be rows and is not cut is refused: an array, numbers in a list, an object that holds
tensors.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from .._base.trees import NAMESPACE, Flat, Tree, paths, tree_leaves


def check_object(x: Any, spec: optree.PyTreeSpec, root: str, i: int, cut: bool) -> None:
    """Refuse what might be rows, and what only one microbatch could read."""
    name = f"{paths(spec, root)[i]} is a {type(x).__module__}.{type(x).__qualname__}"
    if hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{name}; a batch holds tensors. An array becomes one that shares its memory by "
            "torch.as_tensor(x); what all samples share goes in another argument of the function."
        )
    if hasattr(x, "__next__"):
        raise TypeError(
            f"{name}, an iterator, of which the first microbatch would leave nothing to the "
            "others. Pass a tensor or a list with one entry per row; a stream of microbatches goes "
            "to step.window, or to update one by one."
        )
    if cut and (held := _held_tensor(x)):
        raise TypeError(
            f"{name}, which holds a tensor at {held}, and every microbatch would be given all of "
            "it. A mapping, a dataclass or a class that is registered in optree under the "
            f"namespace {NAMESPACE!r} is cut; what all samples share goes in another argument of "
            "the function."
        )


def _held_tensor(x: Any) -> str:
    """Where an object holds a tensor: the name of an attribute, or its place."""
    names = [*getattr(x, "__dict__", ()), *getattr(type(x), "__slots__", ())]
    for name in names:
        if any(isinstance(each, Tensor) for each in tree_leaves(getattr(x, name, None))):
            return f".{name}"
    if isinstance(x, (set, frozenset)) and any(isinstance(each, Tensor) for each in x):  # pyright: ignore
        return "one of its elements"
    return ""


def with_lists(batch: Tree, rows: int, root: str, cut: bool) -> Flat:
    """The batch taken apart, where a list with one entry for each row is a leaf."""

    def is_column(x: Any) -> bool:
        if type(x) not in (list, tuple) or len(x) != rows:
            return False
        numbers = sum(isinstance(each, (int, float, complex)) for each in x)
        if cut and numbers == rows > 1:
            leaves, spec = optree.tree_flatten(batch, lambda y: y is x, namespace=NAMESPACE)
            name = next(p for p, y in zip(paths(spec, root), leaves, strict=True) if y is x)
            raise ValueError(
                f"{name} is a {type(x).__name__} of {rows} numbers, as many as there are rows: one "
                "for each of them? Then make it a tensor, torch.tensor(x). What all samples share "
                "goes in another argument of the function."
            )
        held = any(isinstance(each, Tensor) for each in tree_leaves(x))
        return not (held or numbers) and None not in x

    return optree.tree_flatten(batch, is_column, namespace=NAMESPACE)


def column(x: Any, sizes: Sequence[int]) -> Iterable[Any]:
    """The pieces of a leaf that torch does not split: a list, a nested tensor, or what is whole."""
    ends = [*itertools.accumulate(sizes, initial=0)]
    if type(x) in (list, tuple):
        return [x[a:b] for a, b in itertools.pairwise(ends)]
    if not isinstance(x, Tensor):
        return itertools.repeat(x, len(sizes))
    nested: Any = x
    offsets, lengths = nested.offsets(), nested.lengths()
    at = offsets.tolist()
    values = x.values()
    pieces: list[Tensor] = []
    for a, b in itertools.pairwise(ends):
        piece = values[at[a] : at[b]]
        own = None if lengths is None else lengths[a:b]
        starts = offsets[a : b + 1] - at[a]
        pieces.append(torch.nested.nested_tensor_from_jagged(piece, starts, own))
    return pieces


def is_jagged(x: Tensor) -> bool:
    """Whether a nested tensor is jagged along dim 1, with its rows end to end."""
    if x.layout != torch.jagged:
        return False
    return x.dim() - x.values().dim() == 1 and isinstance(x.size(1), torch.SymInt)
