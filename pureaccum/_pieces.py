"""The numbers of tensors in a file, and which part of which leaf they are.

Written and read piece by piece of 1 MiB, which is still in the cache of the core when its checksum
is made: no second copy is held of what lies row by row in memory that this process can read, and
one leaf's of what does not.
"""

import ctypes
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ._safetensors import Part, Piece, checks_of, header_of
from ._whole_file import hand_over


STEP = 2**20  # bytes


def write_file(
    file: BinaryIO,
    tensors: Mapping[str, tuple[Piece, Tensor]],
    scalars: Mapping[str, Any],
    part: Part | None = None,
) -> None:
    """Write a whole file, of tensors and scalars by their paths."""
    tensors = dict(sorted(tensors.items(), key=lambda it: -it[1][0].dtype.itemsize))
    header = header_of({path: piece for path, (piece, _) in tensors.items()}, scalars, part)
    file.write(header)
    checks: list[int] = []
    handed = 0
    for _, x in tensors.values():
        check = 0
        host = _row_by_row(x)
        for memory in _memory(host):
            check = zlib.crc32(memory, check)
            file.write(memory)
            handed = hand_over(file, handed)
        checks.append(check)
    file.write(checks_of(header, checks))


def read_piece(
    file: BufferedReader, begin: int, piece: Piece, into: Tensor, at: tuple[int, ...] | None
) -> int | None:
    """Read what a piece has of a block of its leaf.

    Args:
        file: To read from.
        begin: Where the numbers of the piece begin in the file.
        piece: Which part of the leaf it is.
        into: The block.
        at: Where in the leaf the block begins; None where it is all of it.

    Returns:
        The checksum of the piece; None where it has nothing of the block, and nothing was read.
    """
    is_all = piece.shape == into.shape and at in (None, piece.at)
    if is_all and into.is_cpu and into.is_contiguous():
        return _filled(file, begin, into)
    if not piece.nbytes:
        return 0
    if not into.numel():  # on a rank outside the mesh, not even of so many dims
        return None
    shape, at = tuple(into.shape), at or (0,) * into.dim()
    edges = list(zip(piece.at, piece.shape, at, shape, strict=True))
    starts = [max(a, b) for a, _, b, _ in edges]
    sizes = [min(a + n, b + m) - s for (a, n, b, m), s in zip(edges, starts, strict=True)]
    if not all(size > 0 for size in sizes):
        return None
    x = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    check = _filled(file, begin, x)
    source, target = _bits(x), _bits(into)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        source = source.narrow(dim, start - piece.at[dim], size)
        target = target.narrow(dim, start - at[dim], size)
    target.copy_(source)
    return check


def _filled(file: BufferedReader, begin: int, x: Tensor) -> int:
    """Read the numbers of a tensor; gives their checksum."""
    file.seek(begin)
    check = 0
    for memory in _memory(x):
        file.readinto(memory)
        check = zlib.crc32(memory, check)
    return check


def tile(pieces: Sequence[Piece], whole: tuple[int, ...]) -> bool:
    """Whether pieces are all of a leaf, each of its numbers once: the cells of a grid.

    That is what ranks hold, whose tensors are cut along each dim on its own.
    """
    if len(pieces) == 1:
        return pieces[0].shape == whole
    held = [tuple(zip(x.at, x.shape, strict=True)) for x in pieces if math.prod(x.shape)]
    if not math.prod(whole):
        return not held
    sides: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(whole):
        cuts = sorted({0, *(cell[dim][0] for cell in held)})
        sides.append([(a, b - a) for a, b in itertools.pairwise([*cuts, size])])
    cells = math.prod(map(len, sides)) == len(held)  # asked first: there may be very many
    return cells and sorted(held) == sorted(itertools.product(*sides))


# Memory ------------------------------------------------------------------------------------


def _row_by_row(x: Tensor) -> Tensor:
    """The numbers of a tensor, or their bits, row by row in memory that this process can read."""
    x = x.detach().resolve_conj().resolve_neg()
    return (x if x.is_contiguous() else _bits(x).contiguous()).cpu()


def _bits(x: Tensor) -> Tensor:
    """As integers, which can be copied: torch can only hold numbers of some dtypes."""
    as_wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(as_wide.get(x.itemsize, x.dtype))


def _memory(x: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor, piece by piece."""
    size = x.nbytes
    if size:
        memory = memoryview((ctypes.c_ubyte * size).from_address(x.data_ptr()))
        for i in range(0, size, STEP):
            yield memory[i : i + STEP] if size > STEP else memory
