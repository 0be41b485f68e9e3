"""Cutting a batch into microbatches.

Every tensor in a batch has one row per sample along dim 0. A microbatch is a view of some
rows; the last one may be shorter; a batch without rows has no microbatches. None and Python
scalars are the same for every sample.
"""

import itertools
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import optree
import torch

from .._base import (
    LARGEST_INT,
    Tree,
    any_sharded,
    check_int,
    flatten,
    paths,
    rows_over,
    split_rows,
    unflatten,
)


_SIZE = "an int of at least 1, the rows of a microbatch (not the number of microbatches)"


class Batch(NamedTuple):
    """A flattened batch. ``rows`` is None where no tensor tells."""

    leaves: list[Any]
    spec: optree.PyTreeSpec
    rows: int | None


def read_batch(batch: Tree, root: str = "batch", dim: int = 0) -> Batch:
    """Flatten a batch and count its rows along a dim, or say which leaf cannot be cut."""
    leaves, spec = flatten(batch)
    rows: int | None = None
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0:
                raise ValueError(
                    f"{paths(spec, root)[i]} is a 0-d tensor; every tensor of a batch has one row "
                    f"per sample along dim {dim}. A value that all samples share goes in another "
                    "argument of the function, or into the batch as a Python scalar."
                )
            if not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(
                    f"{paths(spec, root)[i]} has shape {tuple(leaf.shape)}; expected rows along "
                    f"dim {dim}, which it does not have."
                )
            if rows is None:
                rows = leaf.size(dim)  # a nested tensor may have no shape
            elif leaf.size(dim) != rows:
                raise ValueError(_disagreement(leaves, spec, root, i, dim))
        elif not isinstance(leaf, (bool, int, float, complex, str)):
            raise TypeError(
                f"{paths(spec, root)[i]} is a {type(leaf).__module__}.{type(leaf).__qualname__}; a "
                "batch holds tensors, Python scalars, strings and None, in any pytree. Convert it "
                "(an array: torch.as_tensor; a mapping that is no dict: dict(...)), or pass it in "
                "another argument of the function."
            )
    return Batch(leaves, spec, rows)


def need_rows(batch: Batch, root: str = "batch") -> int:
    """The number of rows, or an error where no tensor tells it."""
    if batch.rows is None:
        came = ", ".join(type(leaf).__name__ for leaf in batch.leaves) or "no leaf at all"
        raise ValueError(
            f"{root} holds no tensor ({came}), so it has no rows to cut or to count. Every tensor "
            "of a batch has one row per sample along dim 0"
            + ("; batch_argnums says which arguments are batches." if root == "args" else ".")
        )
    return batch.rows


def rows_to_cut(batch: Batch, root: str = "batch") -> int:
    """The number of rows, or an error where a batch cannot be cut into them."""
    for i, leaf in enumerate(batch.leaves):
        if not isinstance(leaf, torch.Tensor) or (
            leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
        ):
            continue
        if kind := _not_cut(leaf):
            raise TypeError(
                f"{paths(batch.spec, root)[i]} is {kind[0]}, which torch cannot cut into rows. "
                f"{kind[1]}. Where nothing is cut it is taken as it is: microbatch_size=None, or "
                "the update of an accumulator or of a step, microbatch by microbatch."
            )
    return need_rows(batch, root)


def _not_cut(x: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is that torch cannot cut, and what can be cut in its place."""
    if x.is_nested:
        return (
            f"a nested tensor of layout {x.layout}",
            "Pad its rows (x.to_padded_tensor(0.0)), with a mask beside them and Weighted in the "
            "loss",
        )
    if x.layout != torch.strided:
        return f"a tensor of layout {x.layout}", "Make it dense: x.to_dense()"
    per_tensor = (torch.per_tensor_affine, torch.per_tensor_symmetric)
    if x.is_quantized and x.qscheme() not in per_tensor:
        return "quantized by channel", "Quantize it as a whole, or x.dequantize()"
    return None


def cut(batch: Batch, size: int | Sequence[int]) -> Iterator[Tree]:
    """The microbatches of a batch, as views."""
    sizes = sizes_of(batch.rows or 0, size)
    if any_sharded(batch.leaves):
        over = rows_over(batch.leaves)
        columns = [
            split_rows(x, sizes, over) if isinstance(x, torch.Tensor) else [x] * len(sizes)
            for x in batch.leaves
        ]
    else:
        columns = [
            leaf.split(size)[: len(sizes)]  # torch makes one piece of no rows
            if isinstance(leaf, torch.Tensor)
            else itertools.repeat(leaf, len(sizes))
            for leaf in batch.leaves
        ]
    return map(partial(unflatten, batch.spec), zip(*columns, strict=True))


def sizes_of(rows: int, size: int | Sequence[int]) -> Sequence[int]:
    """The rows of every microbatch."""
    if not isinstance(size, int):
        return size
    return [min(size, rows - start) for start in range(0, rows, size)]


def sizes_of_batch(rows: int, size: int | list[int]) -> Sequence[int]:
    """The rows of every microbatch, or an error where a list of them is not of this batch."""
    if isinstance(size, list) and sum(size) != rows:
        raise ValueError(
            f"microbatch_size={size} are {sum(size)} rows; the batch has {rows}. Give the rows of "
            "every microbatch of this batch, or one number for all batches."
        )
    return sizes_of(rows, size)


_here = threading.local()


def cutting(parts: int, *, sized: bool = False) -> AbstractContextManager[None]:
    """Say that what runs inside, in this thread, is given one of so many parts of a batch.

    One part is the whole, unless it was ``sized``: then another rank may have several.
    """
    some = parts > (0 if sized else 1) and not torch.compiler.is_dynamo_compiling()
    return _cutting(parts) if some else nullcontext()


@contextmanager
def _cutting(parts: int) -> Generator[None]:
    before, _here.parts = parts_of_batch(), parts
    try:
        yield
    finally:
        _here.parts = before


def parts_of_batch() -> int:
    """Of how many parts of a batch the function that runs is given one; 0 where nobody cuts it."""
    return getattr(_here, "parts", 0)


def check_size(size: Any, name: str = "microbatch_size", expected: str = _SIZE) -> int:
    """The size itself, or an error that says what a size is.

    No batch has more rows than torch can count, so larger sizes are all the same.
    """
    return min(check_int(size, name, expected, 1), LARGEST_INT)


def check_sizes(size: Any) -> int | list[int]:
    """The size of all microbatches, or a list with the size of each."""
    if isinstance(size, (list, tuple)):
        each = enumerate(cast(Sequence[Any], size))
        return [check_size(one, f"microbatch_size[{i}]") for i, one in each]
    return check_size(size, "microbatch_size", f"{_SIZE}, or a list of such")


def microbatches(batch: Tree, size: int) -> Iterator[Tree]:
    """Cut a batch into microbatches of ``size`` rows, the last one possibly shorter.

    The rule: microbatch ``i`` is ``batch[i * size : (i + 1) * size]``, of every tensor.

    Args:
        batch: A pytree whose tensors have one row per sample along dim 0. None and Python
            scalars are handed to every microbatch as they are.
        size: Rows per microbatch.

    Returns:
        An iterator of trees like ``batch`` whose tensors are views; empty where the batch has
        no rows. Bad input raises here, not at the first ``next``.

    Example:
        >>> batch = {"x": torch.arange(5), "training": True}
        >>> [part["x"].tolist() for part in microbatches(batch, 2)]
        [[0, 1], [2, 3], [4]]

    References:
        `torch.split <https://docs.pytorch.org/docs/stable/generated/torch.split.html>`_
    """
    flat = read_batch(batch)
    rows_to_cut(flat)
    return cut(flat, check_size(size, "size"))


def windows(loader: Iterable[Any], k: int) -> Iterator[list[Any]]:
    """Lists of ``k`` microbatches; the last may be shorter, and is right.

    The rule: ``itertools.batched(loader, k)``, in lists.

    Args:
        loader: Yields microbatches.
        k: How many make up one step.

    Returns:
        An iterator over lists.

    Example:
        >>> [len(window) for window in windows(range(7), 3)]
        [3, 3, 1]

    References:
        `itertools.batched <https://docs.python.org/3/library/itertools.html#itertools.batched>`_
    """
    try:
        rest = iter(loader)
    except TypeError as error:
        raise TypeError(
            f"loader is a {type(loader).__name__}; expected an iterable of microbatches."
        ) from error
    k = check_size(k, "k", "an int of at least 1, the microbatches of a window")
    return iter(lambda: list(itertools.islice(rest, k)), [])


def _disagreement(leaves: list[Any], spec: optree.PyTreeSpec, root: str, i: int, dim: int) -> str:
    first = next(j for j, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    names = paths(spec, root)
    came, expected = (
        (x.size(dim), "nested" if x.is_nested else f"shape {tuple(x.shape)}")
        for x in (leaves[i], leaves[first])
    )
    return (
        f"{names[i]} has {came[0]} rows ({came[1]}) where "
        f"{names[first]} has {expected[0]} ({expected[1]}); every "
        f"tensor of a batch has one row per sample along dim {dim}. A tensor that all samples "
        "share (class weights, a mask of positions) goes in another argument of the function."
    )
