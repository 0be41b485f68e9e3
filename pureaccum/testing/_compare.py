"""Two tensors beside each other: which numbers differ, by how much, and what may have caused it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """The numbers of a tensor, whatever its layout."""
    x = x.detach()
    if x.is_quantized:
        return x.dequantize()
    x = x if x.layout == torch.strided else x.to_dense()
    return x.resolve_conj().resolve_neg()


def differing(x: Tensor, y: Tensor) -> Tensor:
    """Where the numbers differ: a NaN does not from a NaN, nor -0 from 0."""
    if x.is_complex() and y.is_complex():
        return differing(torch.view_as_real(x), torch.view_as_real(y)).any(-1)
    return (x != y) & ((x == x) | (y == y))


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two dense tensors of one dtype have the same shape and numbers."""
    return x.shape == y.shape and not bool(differing(x, y).any())


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ranks(x: Tensor) -> Tensor | None:
    """The place of each number among those that its dtype can hold, counted from 0.

    Differences of ranks are units in the last place. None where that means nothing.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    # bits count numbers where there is one for the sign: not in float8_e8m0fnu
    if not x.is_floating_point() or torch.finfo(x.dtype).min >= 0:
        return None
    word = _WORDS[x.element_size()]
    bits = x.contiguous().view(word).long()
    return torch.where(bits < 0, -(bits & torch.iinfo(word).max), bits)


# Causes ----------------------------------------------------------------------------------


def shape_cause(x: Tensor, y: Tensor) -> str:
    """Why two dense tensors may be of different shapes."""
    if x.dtype == y.dtype and x.ndim > 1 and same(x.mT, y):
        return "it is transposed"
    if x.dtype == y.dtype and x.numel() == y.numel() and same(x.reshape(y.shape), y):
        return "the numbers are the same, in another shape"
    if x.dtype == y.dtype and x.ndim == y.ndim + 1 and same(x.sum(0).to(y.dtype), y):
        return "a sum over dimension 0 is missing"
    return ""


def dtype_cause(x: Tensor, y: Tensor) -> str:
    """Why two dense tensors may be of different dtypes."""
    if same(x.to(y.dtype).to(x.dtype), x) and same(x.to(y.dtype), y):
        return "the numbers are the same: only a cast is missing, or one too many"
    if same(x.to(y.dtype), y):
        return "a cast is missing: after it, the numbers are the same"
    if same(y.to(x.dtype), x):
        return "a cast too many, which rounded: before it, the numbers were the same"
    return ""


def cause(x: Tensor, y: Tensor) -> str:
    """Why the numbers of two dense tensors of one dtype and shape differ: the first that fits."""
    return next(_causes(x, y), "")


def _causes(x: Tensor, y: Tensor) -> Iterator[str]:
    if x.dtype == torch.bool:
        return
    wide = torch.complex128 if x.is_complex() else torch.float64
    a, b = x.to(wide), y.to(wide)
    if not bool((a != 0).any()):
        yield "every number that came is zero: it may never have been written to"
    if count := int((a.isnan() & ~b.isnan()).sum()):
        yield f"{count} of them came as NaN: a 0 / 0, an inf - inf, or memory never written to"
    for narrow in _narrower(x.dtype):
        if same(y.to(narrow).to(x.dtype), x):
            yield f"it was rounded to {narrow} on the way"
    for scaled, says in _scaled(a, b):
        units = _most_units_apart(x, scaled.to(x.dtype))
        if same(scaled.to(x.dtype), x) or units <= _ROUNDING:
            yield f"it is {says}" + (", up to rounding" if units else ", everywhere")
    if x.ndim > 1 and same(x, y.mT):
        yield "it is transposed"
    if not x.is_complex() and same(a.flatten().sort().values, b.flatten().sort().values):
        yield "the numbers are the same, in another order"
    if (units := _most_units_apart(x, y)) <= _FEW:
        yield (
            f"never more than {units:.0f} units in the last place apart: rounding, as of another "
            "order of summation or another kernel"
        )


_ROUNDING = 4  # units in the last place: of a number that was rounded twice
_FEW = 64


def _most_units_apart(x: Tensor, y: Tensor) -> float:
    """Inf where some number is not finite, or where units mean nothing."""
    a, b = ranks(x), ranks(y)
    wide = torch.complex128 if x.is_complex() else torch.float64
    if a is None or b is None or not bool((x.to(wide) - y.to(wide)).isfinite().all()):
        return 0.0 if same(x, y) else math.inf
    # of float64s on both sides of zero this may wrap, but never to a few
    return float((a - b).abs().max())


def _narrower(dtype: torch.dtype) -> list[torch.dtype]:
    if dtype == torch.complex128:
        return [torch.complex64]
    narrow = [torch.float32, torch.float16, torch.bfloat16]
    return [n for n in narrow if dtype.is_floating_point and n.itemsize < dtype.itemsize]


def _scaled(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, str]]:
    """What was expected times or divided by the whole number that its largest number suggests."""
    size = torch.where(a.isfinite() & b.isfinite(), b.abs(), 0.0).flatten()
    if not bool((size > 0).any()):
        return
    at = size.argmax()
    ratio = (a.flatten()[at] / b.flatten()[at]).item().real
    if ratio == -1:
        yield -b, "the negative of what was expected"
    elif 1 < abs(ratio) < _LARGEST and abs(round(ratio)) > 1:
        yield b * round(ratio), f"{round(ratio)} times what was expected"
    elif 1 / _LARGEST < abs(ratio) < 1 and abs(round(1 / ratio)) > 1:
        yield b / round(1 / ratio), f"what was expected divided by {round(1 / ratio)}"


_LARGEST = 2.0**32
