"""Kernels of torch for many tensors at once, and the memory in which tensors lie."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import functorch


def owns_its_memory(x: Tensor) -> bool:
    """Whether nothing but the numbers of a tensor lies in its memory."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg() or x._is_zerotensor():
        return False
    storage = x.untyped_storage()  # which holds it once more
    return torch._C._storage_Use_Count(storage._cdata) == 2  # pyright: ignore


def materialised(x: Tensor) -> Tensor:
    """The tensor itself; zeros where torch only notes that all of it is zero: nobody may write."""
    noted = not torch.compiler.is_dynamo_compiling() and functorch.innermost(x)._is_zerotensor()
    return x.clone() if noted else x


foreach_add_ = torch._foreach_add_  # pyright: ignore


foreach_copy_ = torch._foreach_copy_  # pyright: ignore


foreach_div_ = torch._foreach_div_  # pyright: ignore


foreach_lerp = torch._foreach_lerp  # pyright: ignore


foreach_lerp_ = torch._foreach_lerp_  # pyright: ignore


foreach_mul_ = torch._foreach_mul_  # pyright: ignore


foreach_norm = torch._foreach_norm  # pyright: ignore


foreach_zero_ = torch._foreach_zero_  # pyright: ignore


def fused_adam(decoupled: bool, *columns: list[Tensor], **options: Any) -> None:
    """What ``torch.optim.adam.adam`` comes to for leaves of one kind, in a fifth of its time."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore
    kernel(*columns, **options)


def finite_by_one_kernel(tensors: list[Tensor]) -> Tensor:
    """Whether tensors of one kind are finite. They are multiplied by 1, which changes no bit."""
    like = tensors[0]
    found, one = like.new_zeros((), dtype=torch.float32), like.new_ones((), dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)  # pyright: ignore
    return found == 0


def memory_of(x: Tensor) -> int | None:
    """A number that all views of one memory have in common; None where there is no one memory."""
    x = functorch.innermost(x)
    return None if x.layout != torch.strided or x.is_nested else x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def lie_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two tensors share a number: views that interleave count as if they did."""
    try:
        memories = [x.untyped_storage()._cdata for x in tensors]  # pyright: ignore[reportPrivateUsage]
    except NotImplementedError:  # a sparse one has several
        return len({*map(id, tensors)}) == len(tensors)
    if len({*memories}) == len(memories):
        return True
    spans = sorted((memory, *_span(x)) for memory, x in zip(memories, tensors, strict=True))
    return all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))


def _span(x: Tensor) -> tuple[int, int]:
    """The bytes of its memory between which a tensor lies."""
    start = int(x.storage_offset()) * x.element_size()
    if x.is_contiguous() or not x.numel():
        return start, start + x.nbytes
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()
