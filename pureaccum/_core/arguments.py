"""What a function is called with: its tensors, how they are cut, and the way back.

    arguments = Arguments.of(args, kwargs, batches)
    args, kwargs = arguments.filled(tensors)  # of one piece, for example

A cast of a policy gives way to the tensor that it was made from, and is made anew in each piece.
"""

from collections.abc import Callable, Container, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import sharded_rows, trees
from . import gathered, precision


class Arguments(NamedTuple):
    """What a function is called with: its tensors, how they are cut, and the way back."""

    tensors: list[Tensor]
    cuts: list[gathered.Cut]
    filled: Callable[[Sequence[Tensor]], tuple[list[Any], dict[str, Any]]]
    over: sharded_rows.Over  # over which ranks the rows of what is cut lie

    @staticmethod
    def of(
        args: Sequence[Any], kwargs: dict[str, Any], batches: Container[Any] = (), dim: int = 0
    ) -> "Arguments":
        """The arguments of a call; ``batches`` are the positions and names of what is cut."""
        keys, names, count = [*range(len(args)), *kwargs], [*kwargs], len(args)
        flat = [_flat(x) for x in (*args, *kwargs.values())]
        over = sharded_rows.rows_over(
            [x for k, (its, _) in zip(keys, flat, strict=True) if k in batches for x in its], dim
        )
        tensors: list[Tensor] = []
        cuts: list[gathered.Cut] = []
        casts: dict[int, torch.dtype] = {}
        makers: list[Callable[[Sequence[Tensor]], Any]] = []
        for key, (leaves, spec) in zip(keys, flat, strict=True):
            is_cut, start = key in batches, len(tensors)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    x = leaf if is_cut else precision.original(leaf)
                    if x is not leaf:
                        casts[len(tensors)] = leaf.dtype
                    tensors.append(x)
                    cuts.append(gathered.Rows(dim % leaf.dim(), over=over) if is_cut else "whole")
                    leaves[i] = _TENSOR  # ``filled`` is kept, and must hold no tensor
            makers.append(_tree_of(leaves, spec, start, len(tensors)))

        def filled(tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
            if casts:
                pairs = enumerate(tensors)
                tensors = [x.to(casts[i]) if i in casts else x for i, x in pairs]
            given = [make(tensors) for make in makers]
            return given[:count], dict(zip(names, given[count:], strict=True))

        return Arguments(tensors, cuts, filled, over)


_TENSOR = object()


def _flat(x: Any) -> tuple[list[Any], Any]:
    """The leaves of an argument, and its structure; None for one that is handed on as it is.

    torch 2.13 cannot compile optree's functions for an empty dict, such as no buffers are.
    """
    empty = torch.compiler.is_dynamo_compiling() and type(x) is dict and len(x) == 0
    return ([x], None) if empty else trees.flatten(x)


def _tree_of(
    leaves: list[Any], spec: Any, start: int, stop: int
) -> Callable[[Sequence[Tensor]], Any]:
    """A function that makes an argument of all tensors, of which it has some."""
    if spec is None:
        return lambda _: leaves[0]
    if spec.is_leaf() and start < stop:
        return itemgetter(start)
    if len(leaves) == stop - start:
        return lambda tensors: trees.unflatten(spec, tensors[start:stop])

    def tree(tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors[start:stop])
        return trees.unflatten(spec, [next(rest) if x is _TENSOR else x for x in leaves])

    return tree
