"""A checkpoint of several ranks: a folder with one file per rank.

    path/shard-00001-of-00004.safetensors    what one rank held, each part of a leaf once

Each file states which save it belongs to, how many files there are, and which part of which leaf
each of its tensors is, with checksums. So any number of ranks can read them, each the parts that it
needs, and no rank continues unless every file is present and whole.
"""

import itertools
import os
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from .._base import claims, dtensors
from . import file_format
from .files import whole_folder, write_file


def is_ours_to_write(x: Any, i: int) -> bool:
    """Whether this rank, among those that hold its part of leaf ``i``, is the one that writes it.

    The leaves go round, so that all ranks write about as much.
    """
    at = dtensors.layout_of(x)
    if at is None:
        return i % dist.get_world_size() == dist.get_rank()
    coordinate = at.mesh.get_coordinate()
    return coordinate is not None and all(
        here == i % size
        for p, here, size in zip(at.placements, coordinate, at.mesh.shape, strict=True)
        if p.is_replicate()
    )


def save_by_ranks(
    path: str,
    tensors: Mapping[str, tuple[file_format.Piece, torch.Tensor]],
    scalars: Mapping[str, Any],
    words: claims.Table,
) -> None:
    """Write a checkpoint, of which this rank writes the tensors, and the first one the scalars.

    All ranks call this together. ``words`` say of each leaf what has to be the same on all of them.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:

        def begin() -> Any:
            folder = None if rank else stack.enter_context(whole_folder(path))
            return crc32(repr(words).encode()), folder, os.urandom(16).hex()

        begun = _on_all_ranks(begin)
        if len({check for check, _, _ in begun}) > 1:
            found = claims.differences(tuple(_on_all_ranks(lambda: words)))
            raise ValueError(
                f"the ranks do not hold the same tree: {found} Leaves that are not DTensors are "
                "saved once for all ranks. Save the values of a single rank in a file of its own."
            )
        _, folder, save = begun[0]

        def write() -> None:
            with open(os.path.join(folder, _name(rank + 1, world)), "xb") as file:
                write_file(
                    file, tensors, {} if rank else scalars, file_format.Part(save, rank + 1, world)
                )
                file.flush()
                os.fsync(file.fileno())

        _on_all_ranks(write)
        _on_all_ranks(stack.close)  # the folder gets its name


def files_of(path: str) -> list[str]:
    """The files of a checkpoint: the path itself, or all files in a folder if none is missing."""
    if not os.path.isdir(path):
        return [path]
    found = set(filter(_NAME.fullmatch, os.listdir(path)))
    if not found:
        raise ValueError(
            not_whole(path, "it is neither a file nor a folder that several ranks saved")
        )
    count = int(min(found).removesuffix(_END).rpartition("-")[2])
    names = (_name(i, count) for i in range(1, count + 1))
    files = list(itertools.takewhile(found.__contains__, names))
    if len(files) < count:
        why = (
            f"{_name(len(files) + 1, count)} is missing. Likely cause: the folder was copied in "
            "part"
        )
        raise ValueError(not_whole(path, why))
    if more := found.difference(files):
        why = f"{min(more)} is one too many. Likely cause: two checkpoints in one folder"
        raise ValueError(not_whole(path, why))
    return [os.path.join(path, name) for name in files]


def check_parts(path: str, files: Sequence[tuple[str, file_format.Contents]]) -> None:
    """Check that all files belong to one save, and each is in its place."""
    parts = [contents.part or file_format.Part("", 0, 0) for _, contents in files]
    if files[0][0] == path:
        if parts[0].shards:
            why = f"it is shard {parts[0].shard} of {parts[0].shards}. Load their folder"
            raise ValueError(not_whole(path, why))
        return
    saves = [part.save for part in parts]
    usual = max(saves, key=saves.count)
    for i, ((name, _), part) in enumerate(zip(files, parts, strict=True), 1):
        if part.save != usual:
            why = f"it is of another save than {files[saves.index(usual)][0]!r}"
            raise ValueError(not_whole(name, f"{why}. Likely cause: it was copied from elsewhere"))
        if part != file_format.Part(usual, i, len(files)):
            why = (
                f"it was written as shard {part.shard} of {part.shards}. Likely cause: it was "
                "renamed"
            )
            raise ValueError(not_whole(name, why))


def not_whole(path: str, why: str) -> str:
    """The message of a file that cannot be loaded."""
    return f"{path!r} is not a whole pureaccum checkpoint: {why}."


@contextmanager
def all_or_none(leaves: Sequence[Any], path: str) -> Generator[list[int]]:
    """Where one rank of the meshes of these leaves raises an error, raise one on all of them.

    Yields a list to which the checksum of what is loaded is appended: all have to load the same.
    """
    error, loaded = None, [0]
    try:
        yield loaded
    except Exception as raised:
        error = raised
    named = error and _NAME.search(str(error))
    number = int(named[1]) if named else _NONE if error else 0
    told = torch.tensor([number, loaded[-1], -loaded[-1]])
    with claims.between_ranks(f"{path!r} was not loaded", "Nothing was changed."):
        worst, most, least = dtensors.largest(
            told, [dtensors.layout_of(x) for x in leaves]
        ).tolist()
    if error is not None:
        raise error
    if worst:
        which = "it" if worst == _NONE else f"shard {worst} of it"
        raise ValueError(
            f"{path!r} was not loaded, because another rank could not read {which}. Its own "
            "message says why. No rank goes on without the others."
        )
    if most != -least:
        raise ValueError(
            f"{path!r} is not the same checkpoint on all ranks. Likely cause: another path, "
            "another save, or separate folders. Load one that all ranks see."
        )


_END = ".safetensors"
_NAME = re.compile(r"shard-(\d{5,6})-of-(\d{5,6})\.safetensors")
_NONE = 10**6  # no shard has that number


def _name(shard: int, shards: int) -> str:
    return f"shard-{shard:05}-of-{shards:05}{_END}"


def _on_all_ranks(do: Callable[[], Any]) -> list[Any]:
    """What ``do`` returns on each rank; where it raises an error on one, all of them raise it."""
    result = error = None
    try:
        result = do()
    except Exception as raised:
        error = raised
    told: list[Any] = [None] * dist.get_world_size()
    says = error if isinstance(error, OSError | None) else OSError(f"{error!r}")
    with claims.between_ranks("the checkpoint was not saved", "Earlier checkpoints are unchanged."):
        dist.all_gather_object(told, (result, says))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            failure.add_note(f"pureaccum: raised on rank {rank}, so no rank saved anything.")
            raise failure
    return [result for result, _ in told]
