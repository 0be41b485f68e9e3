"""A tensor that was cast, and what it was cast from.

A function that takes a batch in parts casts inside each of them, and so sums gradients in the dtype
of the original: the sum of those of a cast would be rounded to it.
"""

import torch
from torch import Tensor


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same tensor in another dtype, which knows of it."""
    low = x.to(dtype)
    if low is not x and not torch.compiler.is_dynamo_compiling():
        setattr(low, _ORIGINAL, x)
    return low


def original(x: Tensor) -> Tensor:
    """What a tensor was cast from, or the tensor itself."""
    return getattr(x, _ORIGINAL, x)


_ORIGINAL = "cast_from"
