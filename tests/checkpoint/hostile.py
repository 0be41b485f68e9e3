"""``python -m tests.checkpoint.hostile FOLDER``: what loading a hostile file costs.

Each file is loaded in a fork of this process. Prints, as JSON, what came of each, how much memory
it took beyond the size of the file, and how long.
"""

import json
import os
import resource
import sys
import time
import zlib
from functools import partial
from pathlib import Path

import torch

import pureaccum as pa


LIKE = {"epoch": 3, "name": "run", "w": torch.arange(4.0)}
BEGIN = '{"__metadata__": {"format": "pureaccum", "version": "2"'
W = """, "tree['w']": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}"""
END = ', "crc32": {"dtype": "U8", "shape": [8], "data_offsets": [16, 24]}}'
MANY = 28 * 10**6  # bytes


def filled(pattern, size=MANY):
    return pattern * (size // len(pattern))


def sealed(text):
    """A header that says what it likes, and ends as all do, with a checksum that fits."""
    text = text.removesuffix("}") + END
    header = len(text).to_bytes(8, "little") + text.encode()
    return header + bytes(16) + zlib.crc32(bytes(16)).to_bytes(4, "little") + sum_of(header)


def sum_of(header):
    return zlib.crc32(header).to_bytes(4, "little")


HEADERS = {
    "multiplied text": lambda: BEGIN + '}, "tree": {"shape": ["a", 500000000]}}',
    "multiplied list": lambda: BEGIN + '}, "tree": {"shape": [[0], 100000000]}}',
    "many dims": lambda: BEGIN + "}" + W.replace("4", filled("9, ", 900_000) + "9") + "}",
    "long sizes": lambda: BEGIN + "}" + W.replace("4", filled("9" * 18 + ", ", 900_000) + "9"),
    "long number of a size": lambda: BEGIN + "}" + W.replace("4", filled("9")),
    "tiny lists": lambda: filled("[],"),
    "deep lists": lambda: filled("["),
    "deep objects": lambda: filled('{"a":'),
    "tiny lists in the metadata": lambda: BEGIN + filled(', "a": []'),
    "many others": lambda: BEGIN + filled(', "a": "1"') + "}" + W + "}",
    "many other notes": lambda: BEGIN + filled(', "a": "{"') + "}" + W + "}",
    "many other tensors": lambda: (
        BEGIN + "}" + filled(', "a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}') + "}"
    ),
    "one leaf again and again": lambda: BEGIN + filled(""", "tree['epoch']": "3\"""") + "}" + W,
    "one tensor again and again": lambda: BEGIN + "}" + filled(W),
    "a long name": lambda: BEGIN + ', "' + filled("a") + '": "1"}' + W + "}",
    "a long name of a tensor": lambda: BEGIN + "}" + W.replace("w", filled("w")) + "}",
    "a name of escapes": lambda: BEGIN + ', "' + filled("\\\\") + '": "1"}' + W + "}",
    "a name that does not end": lambda: BEGIN + ', "' + filled("\\\\"),
    "a long number": lambda: BEGIN + f""", "tree['epoch']": "{filled("9")}"}}""" + W + "}",
    "a long text for a number": lambda: (
        BEGIN + f""", "tree['epoch']": "\\"{filled("9")}\\""}}""" + W + "}"
    ),
    "a long note": lambda: BEGIN + f""", "tree['w']": "{{{filled("[],")}}}"}}""" + W + "}",
    "a note of many strides": lambda: (
        BEGIN + f""", "tree['w']": "{{\\"strides\\": [{filled("1, ", 9000)}1]}}"}}""" + W + "}"
    ),
    "a long dtype": lambda: BEGIN + "}" + W.replace("F32", filled("F")) + "}",
    "a long version": lambda: BEGIN.replace("2", filled("2")) + "}" + W + "}",
    "spaces": lambda: BEGIN + "}" + W + "}" + filled(" "),
}


def sparse(size, length):
    """A file that is long and takes no room, whose header says that it is long."""

    def write(path):
        with open(path, "wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(size)

    return write


def shards(path):
    path.mkdir()
    (path / "shard-000001-of-999999.safetensors").write_bytes(b"")
    (path / "shard-00001-of-99999.safetensors").write_bytes(b"")


FILES = {
    **{
        name: lambda path, header=header: path.write_bytes(sealed(header()))
        for name, header in HEADERS.items()
    },
    "a sparse file of 1 GB": sparse(10**9, 10**9 - 16),
    "a sparse file of 1 TB": sparse(10**12, 10**12 - 16),
    "a sparse header of 100 MB": sparse(10**9, 10**8),
    "a sparse file, an impossible length": sparse(10**9, 2**64 - 1),
    "a folder of a million shards": shards,
}


def in_a_fork(do):
    """What it returns, as JSON: memory that it takes, and gives back, is not that of others."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(do()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    return json.loads(told)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loaded(path):
    """How it ends, the bytes that it took, and the seconds."""
    before, start = peak(), time.perf_counter()
    try:
        pa.load(path, LIKE)
        end = "loaded"
    except BaseException as error:
        end = type(error).__name__
    return end, peak() - before, time.perf_counter() - start


def main(folder):
    path = Path(folder) / "run"
    pa.save(path, LIKE)
    pa.load(path, LIKE)  # what a first call imports is no cost of a file
    path.unlink()
    found = {}
    for name, write in FILES.items():
        in_a_fork(partial(write, path))
        size = path.stat().st_size if path.is_file() else 0
        # Of a long file only the header is read, which has at most 100 MB.
        end, took, seconds = in_a_fork(partial(loaded, path))
        found[name] = {"end": end, "beyond": took - min(size, 10**8), "seconds": seconds}
        if path.is_dir():
            for shard in path.iterdir():
                shard.unlink()
            path.rmdir()
        else:
            path.unlink()
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
