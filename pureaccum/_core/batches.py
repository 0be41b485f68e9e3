"""How a batch is cut into microbatches.

    a tensor                                        has one row per sample along dim 0, and is cut
    a list with one entry, no number, per sample    is cut like a tensor: texts, say, or records
    a jagged nested tensor                          is cut between its samples
    all else: None, numbers, strings, objects       goes to every microbatch as it is

A microbatch is a view of some samples. The last one may be shorter, and an empty batch has none.
Values that might hold samples but are not cut raise: an array, numbers in a list, an object that
holds tensors. A microbatch of a stream is not cut, so nothing in it needs to be samples.
"""

import itertools
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import optree
import torch
from torch.utils.data import DataLoader

from .._base import checks, dtensors, reprs, sharded_rows, trees
from .._base.containers import open_tree
from .._base.sharded_rows import NOWHERE, Over


_SIZE = "an int of at least 1, the samples of a microbatch (not the number of microbatches)"


class Batch(NamedTuple):
    """A flattened batch.

    ``rows`` is None where no tensor tells, or where a ``problem`` says why.
    """

    leaves: list[Any]
    spec: optree.PyTreeSpec
    rows: int | None
    problem: ValueError | None = None


def read_microbatch(microbatch: trees.Tree, root: str = "batch") -> Batch:
    """Flatten a microbatch of a stream; without samples it has a problem, for whoever counts."""
    try:
        return read_batch(microbatch, root, cut=False)
    except NotRowsError as error:
        return Batch(*open_tree(microbatch, root), None, error)


class NotRowsError(ValueError):
    """The tensors of a batch do not have one row per sample."""


def read_batch(batch: trees.Tree, root: str = "batch", dim: int = 0, *, cut: bool = True) -> Batch:
    """Flatten a batch and count its rows along a dim, or say which leaf cannot be cut."""
    leaves, spec = trees.flatten(batch)
    rows: int | None = None
    plain = True
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() == 0:
                raise NotRowsError(
                    f"{trees.paths(spec, root)[i]} is a 0-d tensor; expected one row per sample "
                    f"along dim {dim}. Pass a value that all samples share in another argument of "
                    "the function, or as a Python scalar in the batch."
                )
            if not -leaf.dim() <= dim < leaf.dim():
                raise NotRowsError(
                    f"{trees.paths(spec, root)[i]} has shape {tuple(leaf.shape)}; expected one "
                    f"row per sample along dim {dim}, which it does not have."
                )
            if rows is None:
                rows = leaf.size(dim)  # a nested tensor may have no shape
            elif leaf.size(dim) != rows:
                raise NotRowsError(_disagreement(leaves, spec, root, i, dim))
        else:
            new = plain and not torch.compiler.is_dynamo_compiling()
            # whose classes are known from now on
            if new and open_tree(batch, root)[1] != spec:
                return read_batch(batch, root, dim, cut=cut)
            plain = False
            if not isinstance(leaf, (bool, int, float, complex, str)):
                _check_object(leaf, spec, root, i, cut)
    if not plain and rows:
        leaves, spec = _with_lists(batch, rows, root, cut)
    return Batch(leaves, spec, rows)


def _check_object(x: Any, spec: optree.PyTreeSpec, root: str, i: int, cut: bool) -> None:
    """Refuse what might be samples, and what only one microbatch could read."""
    name = f"{trees.paths(spec, root)[i]} is a {type(x).__module__}.{type(x).__qualname__}"
    if hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{name}; expected a tensor. Convert an array with torch.as_tensor(x), which shares "
            "its memory. Pass a value that all samples share in another argument of the function."
        )
    if hasattr(x, "__next__") or isinstance(x, DataLoader):
        raise TypeError(
            f"{name}, which yields items and is not a batch. Pass a tensor or a list with one "
            "entry per sample. Pass the batches of a loader one at a time, and a stream of "
            "microbatches to step.window, or to update one at a time."
        )
    if cut and (held := _held_tensor(x)):
        raise TypeError(
            f"{name}, which holds a tensor at {held}, and every microbatch would get all of it. "
            "To split it, use a mapping, a dataclass or a class registered in optree under the "
            f"namespace {trees.NAMESPACE!r}. Pass a value that all samples share in another "
            "argument of the function."
        )


def _held_tensor(x: Any) -> str:
    """Where an object holds a tensor: the name of an attribute, or its place."""
    names = [*getattr(x, "__dict__", ()), *getattr(type(x), "__slots__", ())]
    for name in names:
        leaves = trees.tree_leaves(getattr(x, name, None))
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return f".{name}"
    if isinstance(x, (set, frozenset)) and any(isinstance(each, torch.Tensor) for each in x):
        return "one of its elements"
    return ""


def _with_lists(batch: trees.Tree, rows: int, root: str, cut: bool) -> trees.Flat:
    """The batch taken apart, where a list with one entry for each sample is a leaf."""

    def is_column(x: Any) -> bool:
        if type(x) not in (list, tuple) or len(x) != rows:
            return False
        numbers = sum(isinstance(each, (int, float, complex)) for each in x)
        if cut and numbers == rows > 1:
            leaves, spec = optree.tree_flatten(batch, lambda y: y is x, namespace=trees.NAMESPACE)
            name = next(p for p, y in zip(trees.paths(spec, root), leaves, strict=True) if y is x)
            raise ValueError(
                f"{name} is {reprs.kind(x)} of {rows} numbers, as many as the batch has "
                "samples. If they are one per sample, pass a tensor: torch.tensor(x). If all "
                "samples share them, pass them in another argument of the function."
            )
        held = any(isinstance(each, torch.Tensor) for each in trees.tree_leaves(x))
        return not (held or numbers) and None not in x

    return optree.tree_flatten(batch, is_column, namespace=trees.NAMESPACE)


def refuse_in_graphs(batch: Batch, root: str, size: int | None) -> None:
    """Raise where a batch holds what no graph of a compiler can be given, or can cut."""
    for i, x in enumerate(batch.leaves):
        if size is not None and isinstance(x, torch.Tensor) and x.is_nested:
            raise TypeError(
                f"{trees.paths(batch.spec, root)[i]} is a nested tensor of layout {x.layout}, "
                "which a compiled graph cannot split into samples. Pass its microbatches to "
                "step.window, or leave compile out."
            )
        if type(x) in (list, tuple):
            raise TypeError(
                f"{_listed(batch, root, i)}. A compiler would treat it as a constant and "
                "recompile for every batch. Leave it out of the batch, or leave compile out."
            )


def _listed(batch: Batch, root: str, i: int) -> str:
    x = batch.leaves[i]
    kind = f"{reprs.kind(x)} of {len(x)} {type(x[0]).__name__}s"
    return f"{trees.paths(batch.spec, root)[i]} is {kind}, one for each sample"


def need_rows(batch: Batch, root: str = "batch") -> int:
    """The number of samples, or an error where no tensor tells it."""
    if batch.problem is not None:
        raise batch.problem
    if batch.rows is None:
        came = ", ".join(type(leaf).__name__ for leaf in batch.leaves) or "no leaf at all"
        raise ValueError(
            f"{root} holds no tensor ({came}), so it has no samples to split or to count. Every "
            "tensor of a batch has one row per sample along dim 0"
            + (". Name the arguments that are batches in batch_argnums." if root == "args" else ".")
        )
    return batch.rows


def rows_to_cut(batch: Batch, root: str = "batch", *, one_by_one: bool = False) -> int:
    """The number of samples, or an error where a batch cannot be cut into them, or mapped over.

    ``one_by_one`` says that nothing but tensors is: by a function of samples, or by a vmap.
    """
    for i, leaf in enumerate(batch.leaves):
        if one_by_one and type(leaf) in (list, tuple):
            raise TypeError(
                f"{_listed(batch, root, i)}, but this function computes on tensors, sample by "
                "sample. Leave it out, or make it a tensor."
            )
        if not isinstance(leaf, torch.Tensor) or (
            leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
        ):
            continue
        if kind := _not_cut(leaf, one_by_one):
            raise TypeError(
                f"{trees.paths(batch.spec, root)[i]} is {kind[0]}, which torch cannot split into "
                f"samples. {kind[1]}. Or take it whole: pass microbatch_size=None, or pass "
                "microbatches to the update of an accumulator or of a step."
            )
    return need_rows(batch, root)


def _not_cut(x: torch.Tensor, one_by_one: bool) -> tuple[str, str] | None:
    """What a tensor is that torch cannot cut, and what can be cut in its place."""
    if x.is_nested:
        is_jagged = x.layout == torch.jagged and x.dim() - x.values().dim() == 1
        if is_jagged and isinstance(x.size(1), torch.SymInt) and not one_by_one:
            return None  # its samples lie end to end
        return (
            f"a nested tensor of layout {x.layout}",
            "Pad its samples (x.to_padded_tensor(0.0)) with a mask, and return Weighted"
            + ("" if one_by_one else ", or make it jagged (layout=torch.jagged) along dim 1"),
        )
    if x.layout != torch.strided:
        return f"a tensor of layout {x.layout}", "Make it dense with x.to_dense()"
    per_tensor = (torch.per_tensor_affine, torch.per_tensor_symmetric)
    if x.is_quantized and x.qscheme() not in per_tensor:
        return "quantized by channel", "Quantize it as a whole, or use x.dequantize()"
    return None


def cut_batch(batch: Batch, size: int | Sequence[int]) -> Iterator[trees.Tree]:
    """The microbatches of a batch, as views."""
    sizes = sizes_of(batch.rows or 0, size)
    over = sharded_rows.rows_over(batch.leaves) if dtensors.any_sharded(batch.leaves) else NOWHERE
    columns = [
        leaf.split(size)[: len(sizes)]  # torch makes one piece of no samples
        if over == NOWHERE and isinstance(leaf, torch.Tensor) and not leaf.is_nested
        else _pieces(leaf, sizes, over)
        for leaf in batch.leaves
    ]
    return map(partial(trees.unflatten, batch.spec), zip(*columns, strict=True))


def _pieces(x: Any, sizes: Sequence[int], over: Over) -> Iterable[Any]:
    """The pieces of a leaf that torch does not split."""
    if isinstance(x, torch.Tensor) and over != NOWHERE:
        return sharded_rows.split_rows(x, sizes, over)
    spans = [*itertools.pairwise(itertools.accumulate(sizes, initial=0))]
    if isinstance(x, torch.Tensor):
        return _jagged(x, spans)
    is_list = type(x) in (list, tuple)
    return [x[a:b] for a, b in spans] if is_list else itertools.repeat(x, len(sizes))


def _jagged(x: Any, spans: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """The pieces of a jagged tensor."""
    values, offsets, lengths = x.values(), x.offsets(), x.lengths()
    at = offsets.tolist()
    return [
        torch.nested.nested_tensor_from_jagged(
            values[at[a] : at[b]],
            offsets[a : b + 1] - at[a],
            None if lengths is None else lengths[a:b],
        )
        for a, b in spans
    ]


def cut_at(batch: Batch, start: int, *sizes: int) -> list[tuple[trees.Tree, int, int]]:
    """Pieces of some sizes: each, how many samples it has, and how many come before them."""
    rest = (batch.rows or 0) - start - sum(sizes)
    pieces = [*cut_batch(batch, [start, *sizes, rest])][1:-1]
    starts = itertools.accumulate(sizes[:-1], initial=start)
    return [*zip(pieces, sizes, starts, strict=True)]


def sizes_of(rows: int, size: int | Sequence[int]) -> Sequence[int]:
    """The samples of every microbatch."""
    if isinstance(size, Sequence):  # no symbol of make_fx is an int
        return size
    return [min(size, rows - start) for start in range(0, rows, size)]


def sizes_of_batch(
    rows: int, size: int | list[int], name: str = "microbatch_size"
) -> Sequence[int]:
    """The samples of every microbatch, or an error where a list of them is not of this batch."""
    if isinstance(size, list) and sum(size) != rows:
        raise ValueError(
            f"{name}={size} adds up to {sum(size)} samples; the batch has {rows}. Pass the samples "
            "of every microbatch of this batch, or one number for all batches."
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

    No batch has more samples than torch can count, so larger sizes are all the same.
    """
    return min(checks.check_int(size, name, expected, 1), checks.LARGEST_INT)


def check_sizes(size: Any, name: str = "microbatch_size") -> int | list[int]:
    """The size of all microbatches, or a list with the size of each."""
    if isinstance(size, (list, tuple)):
        each = enumerate(cast(Sequence[Any], size))
        return [check_size(one, f"{name}[{i}]") for i, one in each]
    return check_size(size, name, f"{_SIZE}, or a list of such")


def microbatches(batch: trees.Tree, size: int | Sequence[int]) -> Iterator[trees.Tree]:
    """Cut a batch into microbatches of ``size`` samples; the last one may be shorter.

    The rule: microbatch ``i`` is ``batch[i * size : (i + 1) * size]``, for every tensor, and every
    list with one entry per sample (texts or records, not numbers).

    Args:
        batch: A pytree whose tensors have one row per sample along dim 0. Mappings and dataclasses
            are trees too. Every microbatch receives None, numbers, strings and other objects as
            they are.
        size: Samples per microbatch; or a list, the samples of each.

    Returns:
        An iterator of trees like ``batch`` whose tensors are views; empty for an empty batch. Bad
        input raises at the call, not at the first ``next``.

    Example:
        >>> batch = {"x": torch.arange(5), "training": True}
        >>> [part["x"].tolist() for part in microbatches(batch, 2)]
        [[0, 1], [2, 3], [4]]
    """
    flat = read_batch(batch)
    rows = rows_to_cut(flat)
    if not isinstance(size, (list, tuple)):
        return cut_batch(flat, check_size(size, "size", f"{_SIZE}, or a list of such"))
    expected = "an int of at least 0, the samples of a microbatch"
    most = checks.LARGEST_INT
    each = [checks.check_int(n, f"size[{i}]", expected, 0, most) for i, n in enumerate(size)]
    return cut_batch(flat, sizes_of_batch(rows, each, "size"))


def windows(loader: Iterable[Any], k: int) -> Iterator[list[Any]]:
    """Group the microbatches of a loader into lists of ``k``, one list per step.

    The rule: ``itertools.batched(loader, k)``, in lists. The last may be shorter, and a step over
    it still computes its exact mean.

    Args:
        loader: An iterable of microbatches.
        k: The number of microbatches per step.

    Example:
        >>> [len(window) for window in windows(range(7), 3)]
        [3, 3, 1]
    """
    checks.check_stream(loader, "loader", "microbatches", "Cut a batch by microbatches(batch, n).")
    rest = iter(loader)
    k = check_size(k, "k", "an int of at least 1, the microbatches of a window")
    return iter(lambda: list(itertools.islice(rest, k)), [])


def _disagreement(leaves: list[Any], spec: optree.PyTreeSpec, root: str, i: int, dim: int) -> str:
    first = next(j for j, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    came, expected = (
        f"{x.size(dim)}{rows} ({'nested' if x.is_nested else f'shape {tuple(x.shape)}'})"
        for x, rows in ((leaves[i], " samples"), (leaves[first], ""))
    )
    names = trees.paths(spec, root)
    stream = " Pass a list of microbatches to step.window." if spec.type is list else ""
    return (
        f"{names[i]} has {came}, but {names[first]} has {expected}. Every tensor of a batch has "
        f"one row per sample along dim {dim}. Pass a tensor that all samples share (class "
        f"weights, a mask of positions) in another argument of the function.{stream}"
    )
