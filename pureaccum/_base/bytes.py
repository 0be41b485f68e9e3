"""The numbers of a tensor as bytes that this process can read: row by row, 1 MiB at a time.

A piece of that size is still in the core's cache when it is written after its checksum was taken.
"""

import ctypes
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor


STEP = 2**20


def rows_as_bytes(x: Tensor) -> Tensor:
    """The numbers of a tensor, or their bits, on the host and row by row; copied if need be."""
    x = x.detach().resolve_conj().resolve_neg()
    return (x if x.is_contiguous() else bits(x).contiguous()).cpu()


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: torch can hold numbers of some dtypes, and not copy them."""
    as_wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(as_wide.get(x.itemsize, x.dtype))


def memory(x: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor that ``rows_as_bytes`` gave, or of an empty one that is filled."""
    size = x.nbytes
    if size:
        whole = memoryview((ctypes.c_ubyte * size).from_address(x.data_ptr()))
        for i in range(0, size, STEP):
            yield whole[i : i + STEP] if size > STEP else whole


def checksum(x: Tensor, before: int = 0) -> int:
    """The crc32 of a tensor's bytes, continued from that of other bytes."""
    for part in memory(rows_as_bytes(x)):
        before = zlib.crc32(part, before)
    return before
