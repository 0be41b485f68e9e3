"""What a check is given: a loss, its arguments, and splits, or what is wrong with them."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..._base.checks import read_params
from ..._core.batches import need_rows, read_batch, rows_to_cut
from .cuts import Parts, parts_at, ways
from .subject import Subject


def read_subject(loss_fn: Any, params: Any, batch: Any) -> Subject:
    """The loss and its arguments, as a check calls it."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is of type {type(loss_fn).__name__}; expected a function of (params, batch)."
        )
    read_params(params)
    flat = read_batch(batch)
    layouts = {x.layout for x in flat.leaves if isinstance(x, torch.Tensor)}
    # A check takes rows one by one, which torch can do of COO tensors, too.
    rows = need_rows(flat) if torch.sparse_coo in layouts else rows_to_cut(flat)
    if rows < 2:
        raise ValueError(
            f"batch has {rows} row{'s' * (rows != 1)}; expected two at least, since one cannot be "
            "cut."
        )
    return Subject(loss_fn, params, flat, rows)


def read_splits(rows: int, splits: Any, random: torch.Generator) -> list[Parts]:
    """The ways of cutting that are asked for."""
    if isinstance(splits, int) and splits > 0 and not isinstance(splits, bool):
        return ways(rows, splits, random)
    if not isinstance(splits, Sequence) or isinstance(splits, str) or not splits:
        raise ValueError(
            f"splits is {splits!r}; expected how many random splits to try, or the splits "
            "themselves: [[4, 4], [7, 1]]."
        )
    for sizes in splits:  # pyright: ignore[reportUnknownVariableType]
        whole = isinstance(sizes, Sequence) and all(isinstance(size, int) for size in sizes)
        if not whole or len(sizes) < 2 or min(sizes) < 1 or sum(sizes) != rows:
            raise ValueError(
                f"splits holds {sizes!r}; expected sizes of two microbatches at least, whose sum "
                f"is {rows}, the rows of the batch."
            )
    everything = tuple(range(rows))
    return [parts_at(everything, list(itertools.accumulate(sizes))) for sizes in splits]
