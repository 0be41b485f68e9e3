"""Batches whose rows lie on several ranks, as DTensors.

Each rank cuts its own rows, where they are: microbatch i is part i of every rank's rows. Nothing is
communicated. Other rows come together than in a plain batch, which changes no sum over rows.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import dtensors


Over = tuple[Any, tuple[int, ...]]  # a mesh, and its dimensions over which rows are sharded
NOWHERE: Over = (None, ())


def rows_over(leaves: Sequence[Any], dim: int = 0) -> Over:
    """Over which ranks the rows of a batch lie, along a dim; all its tensors have to agree."""
    over = [_over(dtensors.layout_of(x), dim % x.dim()) for x in leaves if isinstance(x, Tensor)]
    if over and over.count(over[0]) < len(over):
        raise ValueError(
            "the tensors of this batch place their rows on ranks in different ways: one is "
            f"sharded over a mesh along dim {dim}, and another is not. Each rank would combine "
            f"rows of different samples. Give all tensors the same placement along dim {dim} "
            "(distribute_tensor), or pass microbatch_size=None."
        )
    return over[0] if over else NOWHERE


def split_rows(x: Any, sizes: Sequence[int], over: Over, dim: int = 0) -> list[Tensor]:
    """The pieces of a tensor, of which each rank cuts its own rows."""
    ranks = prod(over[0].size(i) for i in over[1])
    for what, count in (("the batch has", sum(sizes)), *(("a microbatch has", n) for n in sizes)):
        if count % ranks:
            raise ValueError(
                f"{what} {count} rows, sharded over {ranks} ranks; expected a multiple of "
                f"{ranks}, because each microbatch takes equally many rows from every rank. Pad "
                "with rows whose weight in a pa.Weighted is 0. They add nothing."
            )
    part, at = _on_its_ranks(x, over, dim)
    parts = part.split([n // ranks for n in sizes], dim)
    return [dtensors.close(x, _of_rows(at, n, dim)) for x, n in zip(parts, sizes, strict=True)]


def join_rows(parts: Sequence[Any], over: Over, dim: int = 0) -> Tensor:
    """The tensor of which each rank has cut its own rows: they come to lie where they lay."""
    own = [_on_its_ranks(x, over, dim) for x in parts]
    rows = sum(x.shape[dim] for x in parts)
    return dtensors.close(torch.cat([x for x, _ in own], dim), _of_rows(own[0][1], rows, dim))


def _on_its_ranks(x: Any, over: Over, dim: int) -> tuple[Tensor, dtensors.Layout]:
    """This rank's rows of a tensor, and its layout if they lie on those ranks."""
    at, tensor = dtensors.layout_of(x), dtensors.module()
    if at is None:
        raise ValueError(
            f"rows that are sharded over ranks, as Shard({dim}), came back as a plain tensor; "
            "expected a DTensor of as many rows."
        )
    rows, everywhere = tensor.Shard(dim), tensor.Replicate()
    its = [
        rows if i in over[1] else everywhere if p.is_partial() or p == rows else p
        for i, p in enumerate(at.placements)
    ]
    if [*at.placements] != its:
        x = x.redistribute(at.mesh, its)
    return x.to_local(), at._replace(placements=tuple(its))


def locally(func: Callable[[Tensor], Tensor], x: Any, last: int) -> Tensor:
    """A function of the ``last`` dims of a tensor, of which each rank computes its own part."""
    if (at := dtensors.layout_of(x)) is None:
        return func(x)
    part = func(dtensors.local(x))
    lead = x.dim() - last
    shape = torch.Size([*x.shape[:lead], *part.shape[lead:]])
    stride = torch.empty(shape, device="meta").stride()
    return dtensors.close(part, at._replace(shape=shape, stride=stride))


def numbers_of_rows(x: Any, before: Any, total: int | None) -> Tensor:
    """The numbers that this rank's rows of a microbatch have in the batch.

    Args:
        x: A tensor of the microbatch.
        before: How many rows the microbatches before it have.
        total: The rows of a batch of which each rank cuts its own; None for a microbatch of a
            stream, whose rows follow those of the one before.
    """
    begin, rows = dtensors.block_of(x)[0][0], dtensors.local(x).shape[0]
    index = torch.arange(rows, dtype=torch.int64, device=dtensors.local(x).device)
    if total is None or total == x.shape[0] or not rows:
        return before + begin + index
    ranks = x.shape[0] // rows
    return (begin // rows) * (total // ranks) + before // ranks + index


def rows_like(part: Tensor, x: Any) -> Tensor:
    """A tensor of which these are this rank's rows, as those of another one lie."""
    at = dtensors.layout_of(x)
    if at is None:
        return part
    shape = torch.Size([x.shape[0], *part.shape[1:]])
    tensor = dtensors.module()
    dims = _over(at, 0)[1]
    placements = [p if i in dims else tensor.Replicate() for i, p in enumerate(at.placements)]
    return dtensors.close(
        part, at._replace(placements=tuple(placements), shape=shape, stride=part.stride())
    )


def sum_over(x: Any, over: Over) -> Any:
    """The sum of plain tensors over the ranks over which rows lie."""
    if over[0] is None or not isinstance(x, Tensor):
        return x
    tensor = dtensors.module()
    its = [tensor.Partial() if i in over[1] else tensor.Replicate() for i in range(over[0].ndim)]
    return dtensors.full_of(x, over[0], its)


def close_rows(x: Any, over: Over) -> Any:
    """The tensor of which each of the ranks over which rows lie has its own rows."""
    if over[0] is None or not isinstance(x, Tensor):
        return x
    tensor = dtensors.module()
    its = [tensor.Shard(0) if i in over[1] else tensor.Replicate() for i in range(over[0].ndim)]
    rows = int(sum_over(torch.tensor(len(x), device=x.device), over))
    shape = torch.Size([rows, *x.shape[1:]])
    return dtensors.close(
        x.contiguous(), dtensors.Layout(over[0], tuple(its), shape, x.contiguous().stride())
    )


def _of_rows(at: dtensors.Layout, rows: int, dim: int) -> dtensors.Layout:
    whole = torch.Size([*at.shape[:dim], rows, *at.shape[dim + 1 :]])
    stride = at.stride if dim == 0 else torch.empty(whole, device="meta").stride()
    return at._replace(shape=whole, stride=stride)


def _over(at: dtensors.Layout | None, dim: int) -> Over:
    if at is None:
        return NOWHERE
    dims = enumerate(getattr(p, "dim", None) for p in at.placements)
    return at.mesh, tuple(i for i, its in dims if its == dim)
