"""The safetensors format, with a header that follows from the leaves of a tree.

    8 bytes    the length of the header
    header     JSON: dtype, shape and place of each tensor; as metadata, the leaves of the tree
    tensors    their memory, those of the widest numbers first, so that each is aligned
    8 bytes    the crc32 of all before the tensors, and that of the tensors

Every reader of that format opens the file. Nothing in it decides what runs or how much memory is
taken: a header is believed only where it is, byte for byte, the one that ``header_of`` writes for
the leaves that it names, and where the file is as long as that.
"""

import json
import math
import os
import sys
import zlib
from typing import Any, BinaryIO

import torch


FORMAT, VERSION = "pureaccum", "1"
SCALARS = (bool, int, float, str)
Leaf = dict[str, Any]  # path, and dtype, shape and strides of a tensor or the value of a scalar

DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}
# What safetensors calls a dtype, and a last dim where it has none such; all others go as bytes.
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


def in_file(leaves: list[Leaf]) -> list[Leaf]:
    """The tensors, in the order in which they stand in a file."""
    tensors = [leaf for leaf in leaves if "value" not in leaf]
    return sorted(tensors, key=lambda leaf: -DTYPES[leaf["dtype"]].itemsize)


def header_of(leaves: list[Leaf]) -> bytes:
    """All that stands before the tensors: what it says follows from the leaves alone."""
    tensors: dict[str, Any] = {}
    end = 0
    for leaf in in_file(leaves):
        dtype = DTYPES[leaf["dtype"]]
        kind, last = NAMES.get(dtype, ("U8", (dtype.itemsize,)))
        begin, end = end, end + math.prod(leaf["shape"]) * dtype.itemsize
        shape = [*leaf["shape"], *last]
        tensors[leaf["path"]] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    tensors["crc32"] = {"dtype": "U8", "shape": [8], "data_offsets": [end, end + 8]}
    metadata = {"format": FORMAT, "version": VERSION, "leaves": json.dumps(leaves)}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def checks_of(header: bytes, of_tensors: int) -> bytes:
    """As this machine writes numbers: on one that writes them the other way they do not fit."""
    return b"".join(check.to_bytes(4, sys.byteorder) for check in (zlib.crc32(header), of_tensors))


def read_header(file: BinaryIO) -> tuple[list[Leaf], int]:
    """The leaves in a file, and the checksum of its tensors, which come next."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if 8 + length + 8 > size:
        raise ValueError(f"it ends after {size} bytes, in its header. Cut short, or something else")
    header = start + file.read(length)
    leaves = _read_leaves(header)
    bytes_of = (math.prod(x["shape"]) * DTYPES[x["dtype"]].itemsize for x in in_file(leaves))
    whole = len(header) + sum(bytes_of) + 8
    if size != whole:
        raise ValueError(f"it has {size} bytes, and {whole} were written. Cut short, or damaged")
    file.seek(size - 8)
    checks = file.read(8)
    file.seek(len(header))
    of_tensors = int.from_bytes(checks[4:], sys.byteorder)
    if checks != checks_of(header, of_tensors):
        raise ValueError("the checksum of its header is another. Damaged")
    return leaves, of_tensors


def _read_leaves(header: bytes) -> list[Leaf]:
    """The leaves that a header names, where it is the header of just these."""
    try:
        metadata = json.loads(header[8:])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise KeyError
        version = metadata["version"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("it does not begin as one. Of another program, or damaged") from None
    if version != VERSION:
        raise ValueError(
            f"its version is {version!r}, and this pureaccum reads {VERSION!r}. Of a newer one, or "
            "damaged"
        )
    try:
        leaves: list[Leaf] = json.loads(metadata["leaves"])
        once = len({leaf["path"] for leaf in leaves}) == len(leaves)
        if once and header_of(leaves) == header and all(map(_makes_sense, leaves)):
            return leaves
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        pass
    raise ValueError("its header contradicts itself. Damaged")


def _makes_sense(leaf: Leaf) -> bool:
    """Whether a leaf is a scalar, or a tensor whose every number has a place of its own."""
    if "value" in leaf:
        return leaf.keys() == {"path", "value"} and type(leaf["value"]) in SCALARS
    shape, strides = leaf["shape"], leaf["strides"]
    if not all(type(n) is int and 0 <= n < 2**63 for n in [*shape, *strides]):
        return False
    places = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != places and 0 not in shape:
            return False
        places *= size
    return True
