"""Trees and batches whose sums are exact, so they have the same bits in any order and grouping.

Numbers are integers times one power of two: small enough that every sum of them fits into their
dtype, and large enough that a narrower sum shows. So a single wrong bit is a fault.
"""

import math
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..._base.trees import Tree, flatten, unflatten


def seeds() -> st.SearchStrategy[int]:
    """Seeds for torch's generators, ints below 2**32.

    Use them with ``torch.Generator().manual_seed(seed)`` to draw many numbers at once. Draw a few
    numbers with hypothesis instead, because those shrink.

    Example:
        >>> from hypothesis import find
        >>> find(seeds(), lambda seed: seed > 6)
        7
    """
    return st.integers(0, 2**32 - 1)


def dtypes(complex: bool = False) -> st.SearchStrategy[torch.dtype]:
    """The dtypes float32, float64, bfloat16 and float16; they shrink to float32.

    Args:
        complex: Whether to draw complex64 and complex128 too.

    Example:
        >>> from hypothesis import find
        >>> find(dtypes(), lambda dtype: True)
        torch.float32
    """
    real = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    return st.sampled_from([*real, torch.complex64, torch.complex128] if complex else real)


# Trees -----------------------------------------------------------------------------------


def shapes(dims: int = 2, side: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of small tensors, including 0-d and empty ones; they shrink to ``()``.

    Args:
        dims: The largest number of dimensions.
        side: The largest size of a dimension.

    Example:
        >>> from hypothesis import find
        >>> find(shapes(), lambda shape: len(shape) == 2)
        (0, 0)
    """
    return st.lists(st.integers(0, side), max_size=dims).map(tuple)


def trees(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Tree]:
    """Nested tuples, lists and dicts with at least one leaf; a tree shrinks to a leaf.

    The keys of a dict come in any order, because optree sorts them and torch's own pytree does not.

    Args:
        leaves: A strategy for the leaves. None draws small float32 tensors of ordinary numbers,
            whose sums round. For exact sums see ``exact_trees``.

    Example:
        >>> from hypothesis import find
        >>> from hypothesis import strategies as st
        >>> find(trees(st.integers()), lambda tree: isinstance(tree, dict))
        {'z': 0}
    """
    if leaves is None:
        ordinary = st.floats(-1000, 1000, width=32, allow_subnormal=False)
        leaves = shapes().flatmap(lambda shape: _tensors(shape, ordinary, torch.float32))
    return st.recursive(
        leaves,
        lambda inside: (
            st.lists(inside, min_size=1, max_size=3)
            | st.lists(inside, min_size=1, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from("zawb"), inside, min_size=1, max_size=3)
        ),
        max_leaves=5,
    )


def exact_trees(
    copies: int, terms: int | None = None, dtype: torch.dtype = torch.float32
) -> st.SearchStrategy[list[Tree]]:
    """Several trees of one structure whose sums are exact, in any order and grouping.

    The rule: all numbers are integers times one power of two, with integers up to
    ``2**digits / terms``.

    float32 has 24 digits, float16 11, bfloat16 8 and float64 53. Most integers are close to that
    limit, so sums in a narrower dtype round.

    Args:
        copies: The number of trees.
        terms: The number of trees, counting repetitions, up to which a sum is exact; None for
            ``copies``.
        dtype: The dtype of all leaves and of the sums, real and floating-point.

    Example:
        >>> from hypothesis import find
        >>> narrow = lambda tree: torch.is_tensor(tree) and bool((tree.half() != tree).any())
        >>> find(exact_trees(2), lambda trees: narrow(trees[0]))
        [tensor(2049.), tensor(0.)]
    """
    most = int(2 / torch.finfo(dtype).eps)  # the dtype has all integers up to this one
    terms = copies if terms is None else terms
    if not 1 <= terms <= most:
        raise ValueError(
            f"terms is {terms}; expected 1 to {most}, the integers that {dtype} can hold."
        )
    return _exact_trees(copies, most // terms, dtype)


@st.composite
def _exact_trees(draw: st.DrawFn, copies: int, most: int, dtype: torch.dtype) -> list[Tree]:
    likes, spec = flatten(draw(trees(shapes().map(torch.empty))))
    unit = 2.0 ** draw(st.integers(-8, 4))  # nothing overflows or is subnormal, even in float16

    def leaf(like: Tensor) -> Tensor:
        integers = draw(_tensors(like.shape, st.integers(-most, most), torch.float64))
        return (integers * unit).to(dtype)

    return [unflatten(spec, [leaf(like) for like in likes]) for _ in range(copies)]


# Batches ---------------------------------------------------------------------------------


@st.composite
def batches(  # noqa: D417
    draw: st.DrawFn, rows: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Batches of integers with one row per sample: ``"x"``, ``"tokens"`` and ``"mask"``.

    ``"x"`` holds whole numbers from -15 to 15, and ``"tokens"`` int64 from 0 to 4; both have one to
    three columns. ``"mask"`` is int64 of shape (rows,), drawn by ``weights(rows)``.

    Args:
        rows: The number of samples; 0 is allowed.
        dtype: The dtype of ``"x"``.

    Example:
        >>> from hypothesis import find
        >>> find(batches(1), lambda batch: True)
        {'x': tensor([[0.]]), 'tokens': tensor([[0]]), 'mask': tensor([1])}
    """
    x, tokens, nothing = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 9)))
    # row by row, so that whole samples are left out of a failing example
    row = st.tuples(_list(st.integers(-15, 15), x), _list(st.integers(0, 4), tokens), _weight(3))
    drawn = draw(_list(row, rows))
    return {
        "x": torch.tensor([row[0] for row in drawn], dtype=dtype).reshape(rows, x),
        "tokens": torch.tensor([row[1] for row in drawn], dtype=torch.int64).reshape(rows, tokens),
        "mask": torch.tensor([row[2] * (nothing != 9) for row in drawn], dtype=torch.int64),
    }


def weights(n: int, most: int = 3) -> st.SearchStrategy[list[int]]:
    """Lists of n whole-number weights of samples or microbatches, many 0 and sometimes all.

    They shrink to ones, so a zero in a failing example is needed for the failure.

    Args:
        n: The number of weights.
        most: The largest weight, at least 1; 2**40 is as exact as 1, with weights in float64.

    Example:
        >>> from hypothesis import find
        >>> find(weights(3), lambda weights: sum(weights) != 3)
        [1, 1, 0]
    """
    # both are drawn always: hypothesis takes an example of fewer draws for a simpler one
    return st.tuples(st.integers(0, 9), _list(_weight(most), n)).map(
        lambda drawn: [0] * n if drawn[0] == 9 else drawn[1]
    )


def _weight(most: int) -> st.SearchStrategy[int]:
    number = st.integers(0, 1) | st.integers(0, most)
    return number.map(lambda k: 1 - k if k < 2 else k)  # 1 is the simplest


# Numbers one by one, which shrink ----------------------------------------------------------


Element = TypeVar("Element")


def _list(elements: st.SearchStrategy[Element], count: int) -> st.SearchStrategy[list[Element]]:
    return st.lists(elements, min_size=count, max_size=count)


def _tensors(
    shape: tuple[int, ...], number: st.SearchStrategy[Any], dtype: torch.dtype
) -> st.SearchStrategy[Tensor]:
    return _list(number, math.prod(shape)).map(
        lambda numbers: torch.tensor(numbers, dtype=dtype).reshape(shape)
    )
