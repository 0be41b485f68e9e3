"""A tensor that was cast, and what it was cast from.

A function that takes a batch in parts casts inside each of them, and so sums gradients in the dtype
of the original: the sum of those of a cast would be rounded to it. One that has been written to
since is a tensor of its own.
"""

import torch
from torch import Tensor

from .torch_internals import version


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same tensor in another dtype, which knows of it."""
    low = x.to(dtype)
    if low is not x and not torch.compiler.is_dynamo_compiling():
        setattr(low, _ORIGINAL, (x, version(x), version(low)))
    return low


def original(x: Tensor) -> Tensor:
    """What a tensor was cast from, or the tensor itself."""
    if (cast_from := getattr(x, _ORIGINAL, None)) is None:
        return x
    first, *then = cast_from
    return first if then == [version(first), version(x)] else x


_ORIGINAL = "cast_from"
