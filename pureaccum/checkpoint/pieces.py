"""The numbers of tensors in a file, and which part of which leaf they are.

No second copy is held of what lies row by row in memory that this process can read, and one leaf's
of what does not.
"""

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from io import BufferedReader
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._base.bytes import bits, memory, on_host
from .file_format import Part, Piece, checks_of, header_of
from .whole_file import hand_over


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
        for some in memory(on_host(x)):
            check = zlib.crc32(some, check)
            file.write(some)
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
    source, target = bits(x), bits(into)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        source = source.narrow(dim, start - piece.at[dim], size)
        target = target.narrow(dim, start - at[dim], size)
    target.copy_(source)
    return check


def _filled(file: BufferedReader, begin: int, x: Tensor) -> int:
    """Read the numbers of a tensor; gives their checksum."""
    file.seek(begin)
    check = 0
    for some in memory(x):
        file.readinto(some)
        check = zlib.crc32(some, check)
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
