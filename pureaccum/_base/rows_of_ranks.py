"""Cutting a batch whose rows lie on several ranks: each rank cuts the rows that it has.

    microbatch i of a sharded batch = part i of every rank's rows

Nothing is communicated. Other rows come together than in a plain batch, which no sum over rows
can tell.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .dtensors import Layout, close, layout_of, local


def cut_rows(leaves: Sequence[Any], sizes: Sequence[int], rows: int) -> list[Any]:
    """Each leaf of a batch with DTensors in it, in pieces of so many rows."""
    layouts = [layout_of(x) for x in leaves]
    over = [_over(at) for x, at in zip(leaves, layouts, strict=True) if isinstance(x, Tensor)]
    if over.count(over[0]) < len(over):
        raise ValueError(
            "the rows of a batch that is cut lie on ranks in different ways: in one tensor they "
            "are sharded over a mesh, in another they are not, or it is no DTensor. Each rank "
            "cuts the rows that it has, so rows of the one would come together with other rows of "
            "the other. Give all of them one placement along dim 0 (distribute_tensor), or take "
            "the batch whole."
        )
    mesh, dims = over[0]
    ranks = prod(mesh.size(i) for i in dims)
    for what, count in (("the batch has", rows), *(("a microbatch has", n) for n in sizes)):
        if count % ranks:
            raise ValueError(
                f"{what} {count} rows, sharded over {ranks} ranks; expected a multiple of {ranks}, "
                "since each microbatch takes the same share of the rows of every rank."
            )
    pieces = [n // ranks for n in sizes]
    return [
        [x] * len(sizes) if at is None else _pieces(local(x), pieces, sizes, at)
        for x, at in zip(leaves, layouts, strict=True)
    ]


def _over(at: Layout | None) -> tuple[Any, tuple[int, ...]]:
    """The mesh, and its dimensions over which rows are sharded."""
    if at is None:
        return None, ()
    dims = enumerate(getattr(p, "dim", None) for p in at.placements)
    return at.mesh, tuple(i for i, dim in dims if dim == 0)


def _pieces(part: Tensor, pieces: Sequence[int], sizes: Sequence[int], at: Layout) -> list[Tensor]:
    wholes = (at._replace(shape=torch.Size([n, *at.shape[1:]])) for n in sizes)
    return [close(x, whole) for x, whole in zip(part.split(pieces), wholes, strict=True)]
