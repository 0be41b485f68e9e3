"""The safetensors format, written and read strictly.

    8 bytes    the length of the header
    header     JSON: dtype, shape and place of each tensor; as metadata, all that is no tensor
    tensors    row by row, those of the widest numbers first, so that each is aligned
    crc32      one more tensor: the checksum of each of the others, and last that of the header

Every reader of that format finds the right numbers in the right places. What the format has no
words for stands as JSON in the metadata, by the name of the tensor: a dtype, an order in memory,
and which part of which leaf the numbers are.

Nothing in a file decides what runs or how much memory is taken. A header is not parsed but matched,
entry by entry, against what ``header_of`` can write, so that any other bytes cost nothing.
"""

import itertools
import json
import math
import operator
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from io import BufferedReader
from typing import Any, NamedTuple

import torch


FORMAT, VERSION = "pureaccum", "2"
LONGEST = 100_000_000  # bytes of a header: other readers take no more
SCALARS = (bool, int, float, str)

DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}
# What safetensors calls a dtype, and a last dim where it has no such dtype; others are bytes to it.
NAMES: dict[torch.dtype, tuple[str, tuple[int, ...]]] = {
    torch.bool: ("BOOL", ()),
    torch.uint8: ("U8", ()),
    torch.uint16: ("U16", ()),
    torch.uint32: ("U32", ()),
    torch.uint64: ("U64", ()),
    torch.int8: ("I8", ()),
    torch.int16: ("I16", ()),
    torch.int32: ("I32", ()),
    torch.int64: ("I64", ()),
    torch.float8_e4m3fn: ("F8_E4M3", ()),
    torch.float8_e5m2: ("F8_E5M2", ()),
    torch.float16: ("F16", ()),
    torch.bfloat16: ("BF16", ()),
    torch.float32: ("F32", ()),
    torch.float64: ("F64", ()),
    torch.complex32: ("F16", (2,)),
    torch.complex64: ("F32", (2,)),
    torch.complex128: ("F64", (2,)),
}
ITSELF = {name: dtype for dtype, (name, last) in NAMES.items() if not last}


class Piece(NamedTuple):
    """A tensor in a file: a whole leaf, or the part of one that a rank held.

    Attributes:
        dtype: The dtype of the leaf.
        shape: The shape of the piece.
        whole: The shape of the leaf.
        at: Where in the leaf the piece begins.
        strides: The strides of the leaf in memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    at: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the piece in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """Which file of a checkpoint in several files: shard 1 of 4, say, of a save with a name."""

    save: str
    shard: int
    shards: int


class Contents(NamedTuple):
    """What a file holds of the leaves that are wanted.

    Attributes:
        part: Which file it is, if the checkpoint is in several.
        scalars: Python numbers and strings, by their paths.
        pieces: Tensors, by their paths, in the order of the file.
        places: For each tensor, where its bytes begin, and its number.
        checks: The checksums of all tensors, by their numbers, and that of the header.
        others: Some names of leaves that are not wanted.
        count_of_others: How many leaves are not wanted.
    """

    part: Part | None
    scalars: dict[str, Any]
    pieces: dict[str, Piece]
    places: dict[str, tuple[int, int]]
    checks: memoryview
    others: list[str]
    count_of_others: int


# Writing -----------------------------------------------------------------------------------


@lru_cache(256)  # among hundreds of thousands of leaves most look like others
def whole_piece(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Piece:
    """The piece that is a whole leaf."""
    return Piece(dtype=dtype, shape=shape, whole=shape, at=(0,) * len(shape), strides=strides)


def header_of(
    pieces: Mapping[str, Piece], scalars: Mapping[str, Any], part: Part | None = None
) -> bytes:
    """All bytes before the tensors, which follow in the order of ``pieces``.

    Args:
        pieces: The tensors by their paths, those of the widest numbers first.
        scalars: Python numbers and strings, by their paths.
        part: Which file it is, if the checkpoint is in several.
    """
    metadata = {"format": FORMAT, "version": VERSION}
    if part is not None:
        metadata |= {"save": part.save, "shard": f"{part.shard} of {part.shards}"}
    tensors: list[str] = []
    end = 0
    for path, piece in pieces.items():
        name, last = _in_words(piece.dtype)
        begin, end = end, end + piece.nbytes
        tensors.append(_entry(path, name, piece.shape + last, begin, end))
        note: dict[str, Any] = {}
        if last:
            note["dtype"] = str(piece.dtype).removeprefix("torch.")
        if piece.strides != row_by_row(piece.whole):
            note["strides"] = piece.strides
        if piece.shape != piece.whole:
            note |= {"whole": piece.whole, "at": piece.at}
        if note:
            metadata[path] = json.dumps(note)
    metadata |= {path: json.dumps(value) for path, value in scalars.items()}
    tensors.append(_entry_of_checks(len(pieces), end))
    text = f'{{"__metadata__": {json.dumps(metadata)}, {", ".join(tensors)}}}'.encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    if len(text) > LONGEST:
        raise ValueError(
            f"the names and shapes of the {len(pieces) + len(scalars)} leaves of the tree take "
            f"{len(text)} bytes; expected at most {LONGEST}, since readers of the safetensors "
            "format take no more. Save it in parts."
        )
    return len(text).to_bytes(8, "little") + text


def checks_of(header: bytes, of_tensors: list[int]) -> bytes:
    """All bytes after the tensors: their checksums, and that of the header.

    The byte order is this machine's; on a machine with the other order no checksum fits.
    """
    return struct.pack(f"={len(of_tensors) + 1}I", *of_tensors, zlib.crc32(header))


def _entry(path: str, name: str, shape: tuple[int, ...], begin: int, end: int) -> str:
    """What a header says of a tensor; written by hand, as there may be a hundred thousand."""
    sizes = ", ".join(map(str, shape))
    where = f'"shape": [{sizes}], "data_offsets": [{begin}, {end}]'
    return f'{_QUOTED(path)}: {{"dtype": "{name}", {where}}}'


def _entry_of_checks(count: int, end: int) -> str:
    size = 4 * (count + 1)
    return _entry("crc32", "U8", (size,), end, end + size)


_QUOTED = json.JSONEncoder().encode


@lru_cache(1000)
def row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose numbers lie row by row."""
    sizes = [1, *(max(1, size) for size in reversed(shape))]
    return tuple(itertools.accumulate(sizes[:-1] if shape else (), operator.mul))[::-1]


def _in_words(dtype: torch.dtype) -> tuple[str, tuple[int, ...]]:
    return NAMES.get(dtype, ("U8", (dtype.itemsize,)))


# Reading -----------------------------------------------------------------------------------

# Possessive, since what matches in one way only need not be remembered.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'  # of a string
_BEGIN = re.compile(
    rb'\{"__metadata__": \{"format": "pureaccum", "version": "([^"\\]{0,20})"'
    rb'(?:, "save": "([0-9a-f]{32})", "shard": "(\d{1,6}) of (\d{1,6})")?'
)
_NOTE = re.compile(rb', ("%s): ("\{%s)' % (_REST, _REST))
_SCALAR = re.compile(rb', ("%s): ("%s)' % (_REST, _REST))
_TENSOR = re.compile(
    rb', ("%s): \{"dtype": "(\w{1,20})", "shape": \[((?:\d{1,19}(?:, \d{1,19}){0,99})?)\], '
    rb'"data_offsets": \[(\d{1,19}), (\d{1,19})\]\}' % _REST
)
_CHECKS = b', "crc32": '
LONGEST_TEXT = 10_000  # bytes of a note, or of a number
SHOWN = 20  # leaves that an error names
MANY = 100_000  # entries about leaves that are not wanted


def read_header(file: BufferedReader, wanted: Mapping[str, Any]) -> Contents:
    """What a file holds; a ValueError says why it is not whole.

    Args:
        file: Its beginning and its end are read.
        wanted: Pieces and scalars like those that are wanted, by their paths. Nothing is kept of
            others, so that no header takes more memory than these do.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > LONGEST or 8 + length + 4 > size:
        raise ValueError(f"it ends after {size} bytes, in its header. Cut short, or something else")
    header = bytearray(8 + length)  # filled in place: it is never in memory twice
    header[:8] = start
    file.readinto(memoryview(header)[8:])
    part, at = _begun(header)
    try:
        contents, end = _matched(header, at, wanted)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("its header contradicts itself. Damaged") from None
    if not end:  # too many leaves are not wanted to look at them all
        return contents
    if size != end:
        raise ValueError(f"it has {size} bytes, and {end} were written. Cut short, or damaged")
    file.seek(size - contents.checks.nbytes)
    file.readinto(contents.checks)
    if contents.checks[-1] != zlib.crc32(header):
        raise ValueError("the checksum of its header is another. Damaged")
    return contents._replace(part=part)


def _begun(header: bytearray) -> tuple[Part | None, int]:
    """Which file it is, if there are several, and where in the header the leaves begin."""
    begin = _BEGIN.match(header, 8)
    if begin is None:
        raise ValueError("it does not begin as one. Of another program, or damaged")
    version, save, shard, shards = ((x or b"").decode(errors="replace") for x in begin.groups())
    if version != VERSION:
        raise ValueError(
            f"its version is {version!r}, and this pureaccum reads {VERSION!r}. Of a newer one, or "
            "damaged"
        )
    return Part(save, int(shard), int(shards)) if save else None, begin.end()


def _matched(header: bytearray, at: int, wanted: Mapping[str, Any]) -> tuple[Contents, int]:
    """What a header says of leaves, and how long the file should be, or 0 where there are too many.

    It raises whatever its bytes lead to, a ValueError where they contradict themselves.
    """
    names = {_QUOTED(path).encode(): path for path in wanted}
    longest = max(map(len, names), default=0)
    notes: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    pieces: dict[str, Piece] = {}
    places: dict[str, tuple[int, int]] = {}
    others: list[str] = []
    count_of_others = count = end = 0
    left = 2 * len(wanted) + MANY

    def entries(pattern: re.Pattern[bytes]) -> Iterator[re.Match[bytes]]:
        nonlocal at, left
        while left and not header.startswith(_CHECKS, at) and (it := pattern.match(header, at)):
            at, left = it.end(), left - 1
            yield it

    def path_of(entry: re.Match[bytes], among: dict[str, Any]) -> str | None:
        nonlocal count_of_others
        begin, until = entry.span(1)
        path = names.get(entry[1]) if until - begin <= longest else None
        if path in among:
            raise ValueError("twice")
        if path is None and among is not notes:
            count_of_others += 1
            if len(others) < SHOWN:
                others.append(header[begin + 1 : min(until - 1, begin + 200)].decode("ascii"))
        return path

    for entry in entries(_NOTE):
        if path := path_of(entry, notes):
            notes[path] = _text(header, entry)
    for entry in entries(_SCALAR):
        if path := path_of(entry, scalars):
            scalars[path] = _text(header, entry, type(wanted[path]))
    at = _after(header, at, b"}") if left else at
    for entry in entries(_TENSOR):
        begin, end = end, int(entry[5])
        if path := path_of(entry, pieces):
            if (note := notes.pop(path, None)) is None:
                piece = _plain_piece(entry[2], entry[3])
            else:
                piece = _noted_piece(entry[2], entry[3], note)
            if piece.nbytes != end - begin or path in scalars:
                raise ValueError(path)
            pieces[path] = piece
            places[path] = len(header) + begin, count
        if int(entry[4]) != begin or end < begin:
            raise ValueError("holes")
        count += 1
    checks = memoryview(bytearray(4 * count + 4)).cast("I")  # as this machine writes numbers
    contents = Contents(
        part=None,
        scalars=scalars,
        pieces=pieces,
        places=places,
        checks=checks,
        others=others,
        count_of_others=count_of_others,
    )
    if not left:  # it is of another tree
        return contents._replace(others=others or ["much else"]), 0
    at = _after(header, at, f", {_entry_of_checks(count, end)}}}".encode())
    if notes or len(header) - at > 7 or header[at:].strip(b" "):
        raise ValueError("something else")
    return contents, len(header) + end + 4 * count + 4


def _after(header: bytearray, at: int, what: bytes) -> int:
    """Where a header goes on after some bytes, which have to be there."""
    if not header.startswith(what, at):
        raise ValueError(what)
    return at + len(what)


def _text(header: bytearray, entry: re.Match[bytes], kind: type = dict) -> Any:
    """What the metadata say of a leaf: a note, or a scalar of that class."""
    begin, until = entry.span(2)
    is_string = header.startswith(b'"\\"', begin)
    if is_string and kind is not str:
        return ""  # nobody reads it, whatever its length
    if not is_string and until - begin > LONGEST_TEXT:
        raise ValueError("too long")
    value = json.loads(json.loads(header[begin:until]))
    if type(value) not in (*SCALARS, dict):
        raise TypeError(value)
    return value


@lru_cache(256)
def _plain_piece(name: bytes, sizes: bytes) -> Piece:
    """The piece that an entry describes alone."""
    shape = _shape_of(sizes)
    return whole_piece(ITSELF[name.decode()], shape, row_by_row(shape))


def _noted_piece(name: bytes, sizes: bytes, note: dict[str, Any]) -> Piece:
    """The piece that an entry and a note describe; a ValueError if no leaf has such a piece."""
    dtype = DTYPES[note.pop("dtype")] if "dtype" in note else ITSELF[name.decode()]
    expected, last = _in_words(dtype)
    in_file = _shape_of(sizes)
    shape = in_file[: len(in_file) - len(last)]
    whole, at = tuple(note.pop("whole", shape)), tuple(note.pop("at", (0,) * len(shape)))
    strides = tuple(note.pop("strides")) if "strides" in note else row_by_row(whole)
    piece = Piece(dtype=dtype, shape=shape, whole=whole, at=at, strides=strides)
    if note or name.decode() != expected or in_file != shape + last or not _makes_sense(piece):
        raise ValueError(name)
    return piece


def _shape_of(sizes: bytes) -> tuple[int, ...]:
    return tuple(map(int, sizes.split(b", "))) if sizes else ()


def _makes_sense(piece: Piece) -> bool:
    """Whether a piece is a part of a leaf whose every number has a place of its own."""
    shape, whole, at = piece.shape, piece.whole, piece.at
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*whole, *at, *piece.strides)):
        return False
    if any(a + n > size for a, n, size in zip(at, shape, whole, strict=True)):
        return False
    places = 1
    for stride, size in sorted(zip(piece.strides, whole, strict=True)):
        if size > 1 and stride != places and 0 not in whole:
            return False
        places *= size
    return True
