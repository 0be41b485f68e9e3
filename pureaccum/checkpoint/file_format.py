"""The safetensors format, written and read strictly.

    8 bytes    the length of the header
    header     JSON: dtype, shape and place of each tensor; as metadata, all that is no tensor
    tensors    row by row, those of the widest numbers first, so that each is aligned
    crc32      one more tensor: the checksum of each of the others, and last that of the header

Every reader of that format finds the right numbers in the right places. Facts that the format
cannot express are JSON in the metadata, under the name of the tensor: a dtype, an order in memory,
and which part of which leaf the numbers are.

Nothing in a file decides which code runs or how much memory is allocated. Only the header entries
of the requested leaves are read, and only if ``header_of`` makes the same bytes of them.
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
    """A tensor in a file: a whole leaf, or the part of one that a rank held."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # the shape of the leaf
    at: tuple[int, ...]  # where in the leaf the piece begins
    strides: tuple[int, ...]  # of the leaf in memory

    @property
    def nbytes(self) -> int:
        """The number of bytes of the piece in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """Which file it is of a checkpoint in several: shard 1 of 4, say, of a save with a name."""

    save: str
    shard: int
    shards: int


class Contents(NamedTuple):
    """What a file holds of the leaves that are wanted, each by its path."""

    part: Part | None  # which file it is, if the checkpoint is in several
    scalars: dict[str, Any]
    pieces: dict[str, Piece]  # in the order of the file
    begin: int  # where the bytes of the first piece do
    checks: memoryview  # the checksums of all pieces, by their numbers, and that of the header
    others: list[str]  # some names of leaves that are not wanted
    count_of_others: int  # how many leaves are not wanted


# Writing -----------------------------------------------------------------------------------


@lru_cache(256)  # among hundreds of thousands of leaves most look like others
def whole_piece(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Piece:
    """The piece that is a whole leaf."""
    return Piece(dtype=dtype, shape=shape, whole=shape, at=(0,) * len(shape), strides=strides)


def header_of(
    pieces: Mapping[str, Piece], scalars: Mapping[str, Any], part: Part | None = None
) -> bytes:
    """All bytes before the tensors, which follow in the order of ``pieces``: the widest first."""
    metadata = {"format": FORMAT, "version": VERSION}
    if part is not None:
        metadata |= {"save": part.save, "shard": f"{part.shard} of {part.shards}"}
    tensors: list[str] = []
    end = 0
    for path, piece in pieces.items():
        words, note, size = _in_words(piece)
        begin, end = end, end + size
        tensors.append(_entry(path, words, begin, end))
        if note:
            metadata[path] = note
    metadata |= {path: json.dumps(value) for path, value in scalars.items()}
    size = 4 * (len(pieces) + 1)
    tensors.append(_entry("crc32", f'"dtype": "U8", "shape": [{size}]', end, end + size))
    text = f'{{"__metadata__": {json.dumps(metadata)}, {", ".join(tensors)}}}'.encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    if len(text) > LONGEST:
        raise ValueError(
            f"the names and shapes of the {len(pieces) + len(scalars)} leaves of the tree take "
            f"{len(text)} bytes; expected at most {LONGEST}, because readers of the safetensors "
            "format take no more. Save it in parts."
        )
    return len(text).to_bytes(8, "little") + text


def checks_of(header: bytes | bytearray, of_tensors: list[int]) -> bytes:
    """All bytes after the tensors: their checksums, and that of the header.

    The byte order is this machine's; on a machine with the other order no checksum fits.
    """
    return struct.pack(f"={len(of_tensors) + 1}I", *of_tensors, zlib.crc32(header))


def _entry(path: str, words: str, begin: int, end: int) -> str:
    """What a header says of a tensor; written by hand, as there may be a hundred thousand."""
    return f'{_QUOTED(path)}: {{{words}, "data_offsets": [{begin}, {end}]}}'


@lru_cache(256)
def _in_words(piece: Piece) -> tuple[str, str, int]:
    """What a header says of a piece: in its entry, and in a note if it needs one; and its bytes."""
    name, last = _dtype_in_words(piece.dtype)
    sizes = ", ".join(map(str, piece.shape + last))
    note: dict[str, Any] = {}
    if last:
        note["dtype"] = str(piece.dtype).removeprefix("torch.")
    if piece.strides != row_by_row(piece.whole):
        note["strides"] = piece.strides
    if piece.shape != piece.whole:
        note |= {"whole": piece.whole, "at": piece.at}
    words = f'"dtype": "{name}", "shape": [{sizes}]'
    return words, json.dumps(note) if note else "", piece.nbytes


_QUOTED = json.JSONEncoder().encode


@lru_cache(1000)
def row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose numbers lie row by row."""
    sizes = [1, *(max(1, size) for size in reversed(shape))]
    return tuple(itertools.accumulate(sizes[:-1] if shape else (), operator.mul))[::-1]


def _dtype_in_words(dtype: torch.dtype) -> tuple[str, tuple[int, ...]]:
    return NAMES.get(dtype, ("U8", (dtype.itemsize,)))


# Reading -----------------------------------------------------------------------------------

# Possessive, since what matches in one way only need not be remembered.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+"'  # of a string
_BEGIN = re.compile(
    rb'\{"__metadata__": \{"format": "pureaccum", "version": "([^"\\]{0,20})"'
    rb'(?:, "save": "([0-9a-f]{32})", "shard": "(\d{1,6}) of (\d{1,6})")?'
)
_ENTRY = re.compile(  # only a string may be long, which is read where one is wanted
    rb"""\}?,\ (?P<path>"%(rest)s):\ (?:
        (?P<note>"\{(?:[^"\\]|\\.){0,9999}+")
        | (?P<string>"\\"%(rest)s)
        | (?P<number>"(?!null)[\w.+-]{1,4999}")
        | \{(?P<tensor>"dtype":\ "\w{1,20}",\ "shape":\ \[[\d,\ ]{0,2100}\]),
            \ "data_offsets":\ \[[\d,\ ]{1,50}\]\}
    )"""
    % {b"rest": _REST},
    re.VERBOSE,
)
_LAST = re.compile(rb'\}?, "crc32": \{[^{}]{1,99}, (\d{1,19})\]\}\} {0,7}\Z')
SHOWN = 20  # leaves that an error names
MANY = 100_000  # entries about leaves that are not wanted
CONTRADICTS = "its header contradicts itself. Likely cause: a damaged file"


def read_header(file: BufferedReader, wanted: Mapping[str, Any] | None) -> Contents:
    """What a file holds of leaves like the wanted ones; a ValueError says why it is not whole.

    Nothing is kept of other leaves, so that no header takes more memory than the wanted ones do.
    None wants all.
    """
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > LONGEST or 8 + length + 4 > size:
        raise ValueError(
            f"it ends after {size} bytes, in its header. Likely cause: it was cut short, or is "
            "another kind of file"
        )
    header = bytearray(8 + length)  # filled in place: it is never in memory twice
    header[:8] = start
    file.readinto(memoryview(header)[8:])
    part, at = _begun(header)
    if (last := _LAST.search(header, max(at, len(header) - 200))) is None:
        raise ValueError(CONTRADICTS)
    if size != (end := len(header) + int(last[1])):
        raise ValueError(
            f"it has {size} bytes; expected {end}. Likely cause: it was cut short, or is damaged"
        )
    file.seek(size - 4)
    if file.read(4) != checks_of(header, []):
        raise ValueError("the checksum of its header differs. Likely cause: a damaged file")
    try:
        contents = _contents(header, at, last.start(), wanted, part)
        _check_as_written(header, contents, wanted)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(CONTRADICTS) from None
    file.seek(size - contents.checks.nbytes)
    file.readinto(contents.checks)
    return contents


def _begun(header: bytearray) -> tuple[Part | None, int]:
    """Which file it is, if there are several, and where in the header the leaves begin."""
    begin = _BEGIN.match(header, 8)
    if begin is None:
        raise ValueError(
            "it does not begin as one. Likely cause: a file of another program, or a damaged one"
        )
    version, save, shard, shards = ((x or b"").decode(errors="replace") for x in begin.groups())
    if version != VERSION:
        raise ValueError(
            f"its version is {version!r}; expected {VERSION!r}. Likely cause: a file of a newer "
            "pureaccum, or a damaged one"
        )
    return Part(save, int(shard), int(shards)) if save else None, begin.end()


def _contents(
    header: bytearray, at: int, until: int, wanted: Mapping[str, Any] | None, part: Part | None
) -> Contents:
    """What a header says of leaves; it raises whatever its bytes lead to.

    A header with other leaves is refused in any case, and need not make sense.
    """
    names = {_QUOTED(path).encode(): path for path in wanted or ()}
    longest = max(map(len, names), default=0)
    most = LONGEST if wanted is None else 2 * len(wanted) + MANY
    notes: dict[str, bytes] = {}
    scalars: dict[str, Any] = {}
    pieces: dict[str, Piece] = {}
    others: list[str] = []
    count_of_others = 0
    for entry in _entries(header, at, until, most):
        (start, stop), kind = entry.span("path"), entry.lastgroup or ""
        path = names.get(entry["path"]) if stop - start <= longest else None
        path = json.loads(entry["path"]) if wanted is None else path
        if path is None and kind != "note":  # after a note its tensor is still to come
            count_of_others += 1
            if len(others) < SHOWN:
                others.append(header[start + 1 : min(stop - 1, start + 200)].decode("ascii"))
        elif path is None:
            continue
        elif kind == "note":
            notes[path] = entry[kind]
        elif kind == "tensor":
            pieces[path] = _piece(entry[kind], notes.get(path, b'"{}"'))
        elif kind == "string" and wanted is not None and type(wanted[path]) is not str:
            scalars[path] = ""  # nobody reads it, whatever its length
        else:
            scalars[path] = json.loads(json.loads(entry[kind]))
    return Contents(
        part=part,
        scalars=scalars,
        pieces=pieces,
        begin=len(header),
        checks=memoryview(bytearray(4 * len(pieces) + 4)).cast("I"),  # as this machine writes
        others=others,
        count_of_others=count_of_others,
    )


def _check_as_written(
    header: bytearray, contents: Contents, wanted: Mapping[str, Any] | None
) -> None:
    """Raise where our writer would make other bytes of the wanted leaves."""
    part, scalars, pieces, *_ = contents
    alike = wanted is None or all(type(x) is type(wanted[at]) for at, x in scalars.items())
    if alike and not contents.others and header != header_of(pieces, scalars, part):  # pyright: ignore[reportUnnecessaryComparison]
        raise ValueError("not as it is written")


def _entries(header: bytearray, at: int, until: int, most: int) -> Iterator[re.Match[bytes]]:
    """The entries of a header, up to one that does not look like ours."""
    while most and at < until and (entry := _ENTRY.match(header, at)):
        yield entry
        at, most = entry.end(), most - 1


@lru_cache(256)
def _piece(entry: bytes, text: bytes) -> Piece:
    """The piece that an entry and a note describe; a ValueError if no leaf has such a piece."""
    said, note = json.loads(b"{%s}" % entry), json.loads(json.loads(text))
    dtype = DTYPES[note["dtype"]] if "dtype" in note else ITSELF[said["dtype"]]
    shape = tuple(said["shape"])
    shape = shape[: len(shape) - len(_dtype_in_words(dtype)[1])]
    whole, at = tuple(note.get("whole", shape)), tuple(note.get("at", (0,) * len(shape)))
    strides = tuple(note["strides"]) if "strides" in note else row_by_row(whole)
    piece = Piece(dtype=dtype, shape=shape, whole=whole, at=at, strides=strides)
    if not _makes_sense(piece):
        raise ValueError(entry)
    return piece


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
