"""Per-sample gradients of a matrix, as sums of outer products that are never written out.

    gradient[r] = Σ over t of left[r, t] ⊗ right[r, t]

One factor is the layer's input, the other the cotangent of its output. t counts the layer's calls
for one sample, such as the positions of a text. Norms and sums over samples come directly from the
factors, in the memory of activations.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._base import trees


class Outer(NamedTuple):
    """The gradients of samples, in factors. Where there are several cotangents, that is dim 0.

    Attributes:
        left: (rows, t, m); or (rows, t) integers, the rows of a table that were looked up.
        right: (rows, t, n).
        shape: Of one gradient, which has m * n numbers.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size


def zero_gradients(leaf: Tensor, rows: int) -> Outer:
    """Gradients of zero, which take no memory."""
    return Outer(leaf.new_empty(rows, 0, 1), leaf.new_empty(rows, 0, leaf.numel()), leaf.shape)


def is_table(x: Outer) -> bool:
    """Whether rows were looked up: left stands for vectors with a single 1."""
    return x.left.dtype == torch.int64


def is_short(x: Outer) -> bool:
    """Whether the factors take less memory than the gradients, and their norms less time."""
    times = x.right.shape[-2]
    if is_table(x) or times <= 1:
        return True
    # The products of all pairs of t cancel one another, and so are taken in float64, of less wide
    # numbers; against writing the gradients and reading them twice. A sum needs all products of the
    # factors in any case.
    work = times**2 * (x.left.shape[-1] + x.right.shape[-1])
    return x.right.dtype != torch.float64 and work <= 4 * x.shape.numel()


def written_out(x: Outer) -> Tensor:
    """The gradients themselves."""
    if not is_table(x):
        products = x.left.mT @ x.right
        return products.reshape(*products.shape[:-2], *x.shape)
    return _summed_at(x.left, x.right, x.shape[0])


def norms_of(x: Outer | Tensor) -> Tensor:
    """The norm of each gradient, in float32 at least."""
    if isinstance(x, Tensor):
        rows, wide = x.reshape(x.shape[0], -1), trees.accumulation_dtype(x.dtype)
        rows = rows if trees.continuous(x) else rows.to(wide)
        return torch.linalg.vector_norm(rows, dim=1, dtype=wide)
    left, right, times = x.left, x.right, x.right.shape[-2]
    if is_table(x):  # each row of the table once
        return _norm(right if times <= 1 else _summed_at(_places(left), right, times))
    if times == 1:
        return _norm(left) * _norm(right)
    if not is_short(x):
        return _norm(left.mT @ right)
    left, right = left.double(), right.double()
    return ((left @ left.mT) * (right @ right.mT)).sum((-2, -1)).clamp(min=0.0).sqrt()


def add_weighted_(total: Tensor, x: Outer, factor: Tensor) -> Tensor:
    """Add the gradients to a sum in place, each times a number."""
    by = factor.to(total.device, total.dtype).view(-1, 1, 1)
    right = (x.right.to(total.dtype) * by).flatten(0, 1)
    if is_table(x):
        return total.index_add_(0, x.left.flatten(), right)
    left = x.left.flatten(0, 1).to(total.dtype)
    if total.shape == (left.shape[1], right.shape[1]):
        return total.addmm_(left.T, right)
    return total.add_((left.T @ right).view(total.shape))


def only_kept(x: Outer, keep: Tensor) -> Outer:
    """The gradients, and zero for samples that are not kept; NaN times 0 would be NaN."""
    keep = keep.to(x.right.device)[:, None, None]
    left = x.left if is_table(x) else torch.where(keep, x.left, 0.0)
    return Outer(left, torch.where(keep, x.right, 0.0), x.shape)


def sum_of_parts(parts: Sequence[Outer | Tensor]) -> Outer | Tensor:
    """The sums of gradients that came in parts: outer products lie one after the other."""
    outer = [x for x in parts if isinstance(x, Outer)]
    if len(outer) == len(parts) and len(set(map(is_table, outer))) == 1:
        if len(outer) == 1:
            return outer[0]
        left, right = _in_line([x.left for x in outer]), _in_line([x.right for x in outer])
        return Outer(left, right, outer[0].shape)
    total, *rest = (written_out(x) if isinstance(x, Outer) else x for x in parts)
    for x in rest:
        total = total + x
    return total


# Inner products ------------------------------------------------------------------------


def inner_products(x: Outer | Tensor, y: Outer | Tensor) -> Tensor:
    """The inner products of gradients by a leaf with others by the same leaf, in float32 at least.

    A tensor has two dims before those of the leaf: the samples, and the numbers of each; so has the
    result, as (samples of x * numbers, samples of y * numbers). Complex gradients are vectors of
    real and of imaginary parts.
    """
    if isinstance(x, Outer) and isinstance(y, Outer) and _is_shorter(x, y):
        return _by_factors(x, y)
    return _as_rows(x) @ _as_rows(y).T


def _is_shorter(x: Outer, y: Outer) -> bool:
    """Whether the products of factors are less work than those of gradients written out."""
    x, y = _numbers_to_the_right(x, y)
    lefts, rights, pairs = _entries(x.left, y.left), _entries(x.right, y.right), _pairs(x, y)
    wide, width = 0 if is_table(x) else x.left.shape[-1], x.right.shape[-1]
    if max(lefts) > 1:  # by _of_pairs
        work = pairs * (math.prod(lefts) * wide + math.prod(rights) * width)
    else:  # by _of_one
        summed, last = pairs * rights[1] * width, math.prod(rights) * x.right.shape[-2] * width
        work = pairs * wide + summed + last
    gradients = math.prod(map(max, lefts, rights))
    return pairs <= 1 or work <= gradients * x.shape.numel()


def _by_factors(x: Outer, y: Outer) -> Tensor:
    """Σ over pairs of <a, a'> <d, d'>. Where there are several they cancel, hence in float64."""
    if _pairs(x, y) <= 1:
        return _of_pairs(x.left, x.right, y.left, y.right)
    wide, (x, y) = trees.accumulation_dtype(x.right.dtype), _numbers_to_the_right(x, y)
    left, right, others, cotangents = (
        it if it.dtype == torch.int64 else it.double() for it in (x.left, x.right, y.left, y.right)
    )
    of = _of_pairs if max(left.dim(), others.dim()) == 4 else _of_one
    at = 0 if is_table(x) else -3
    each = zip(left.split(1, at), right.split(1, -3), strict=True)  # not all pairs at once
    return torch.cat([of(a, d, others, cotangents) for a, d in each]).to(wide)


def _numbers_to_the_right(x: Outer, y: Outer) -> tuple[Outer, Outer]:
    """The same products; where only the left factors depend on numbers, these change places."""
    if x.left.dim() == y.left.dim() == 4 and x.right.dim() == y.right.dim() == 3:
        return Outer(x.right, x.left, x.shape), Outer(y.right, y.left, y.shape)
    return x, y


def _of_one(left: Tensor, right: Tensor, others: Tensor, cotangents: Tensor) -> Tensor:
    """<d, Σ <a, a'> d'> for one sample, which never holds a number for each pair of numbers."""
    d, e = (x if x.dim() == 4 else x.unsqueeze(0) for x in (right, cotangents))
    if left.dtype == torch.int64:
        alike = (left.unsqueeze(2) == others.unsqueeze(1)).to(e.dtype)
    else:
        alike = left @ others.mT  # (samples, t, t of the others)
    (many, samples, _, n), times = e.shape, d.shape[2]
    seen = alike @ e.permute(1, 2, 0, 3).reshape(samples, -1, many * n)
    seen = seen.view(samples, times, many, n).transpose(1, 2).reshape(samples * many, times * n)
    return d.reshape(len(d), times * n) @ seen.T


def _of_pairs(left: Tensor, right: Tensor, others: Tensor, cotangents: Tensor) -> Tensor:
    products = _products(right, cotangents)
    if left.dtype == torch.int64:
        products = torch.where(left[:, :, None, None, None] == others, products, 0.0)
    else:
        products = products * _products(left, others)
    products = products.sum((2, 5)).permute(1, 0, 3, 2)
    return products.flatten(2).flatten(0, 1)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of all with all: (numbers, samples, t) of a, then those of b."""
    a, b = (x if x.dim() == 4 else x.unsqueeze(0) for x in (a, b))
    return (a.flatten(0, 2) @ b.flatten(0, 2).T).view(*a.shape[:3], *b.shape[:3])


def _pairs(x: Outer, y: Outer) -> int:
    """How often a sample goes through the layer, times how often one of the others does."""
    return x.right.shape[-2] * y.right.shape[-2]


def _entries(*factors: Tensor) -> list[int]:
    """For how many numbers of a sample each factor has entries."""
    return [x.shape[0] if x.dim() == 4 else 1 for x in factors]


def _as_rows(x: Outer | Tensor) -> Tensor:
    """Gradients as the rows of a matrix."""
    if isinstance(x, Outer):
        x, several = written_out(x), max(x.left.dim(), x.right.dim()) == 4
        x = x.movedim(0, 1) if several else x.unsqueeze(1)
    x = trees.real_parts(x)
    rows = x.shape[0] * x.shape[1]
    return x.reshape(rows, x.shape[2:].numel()).to(trees.accumulation_dtype(x.dtype))


# Pieces --------------------------------------------------------------------------------


def _in_line(factors: list[Tensor]) -> Tensor:
    """Factors one after the other, for each of several cotangents where some have them."""
    if (dims := max(x.dim() for x in factors)) == 2:
        return torch.cat(factors, -1)
    several = [len(x) for x in factors if x.dim() == 4]
    each = [x if x.dim() == dims else x.expand(several[0], *x.shape) for x in factors]
    return torch.cat(each, -2)


def _norm(x: Tensor) -> Tensor:
    """In float64: one factor may be as small as the other one is large."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64)


def _summed_at(index: Tensor, right: Tensor, size: int) -> Tensor:
    """For each sample a table of so many rows, with each row of right added at its index."""
    before, width = right.shape[:-2], right.shape[-1]
    begins = torch.arange(before.numel(), device=right.device).view(*before, 1) * size
    found = right.new_zeros(before.numel() * size, width)
    found.index_add_(0, (index + begins).flatten(), right.reshape(-1, width))
    return found.view(*before, size, width)


def _places(index: Tensor) -> Tensor:
    """Numbers from 0 on for what is looked up, the same ones where the same is looked up."""
    ordered, order = index.sort(-1)
    new = (ordered[..., 1:] != ordered[..., :-1]).cumsum(-1)
    return torch.empty_like(index).scatter_(-1, order, F.pad(new, (1, 0)))
