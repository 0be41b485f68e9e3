"""Files of tensors: their bytes, and how a file or a folder appears whole or not at all.

    write next to it under another name  ->  fsync  ->  rename  ->  fsync of the folder

Readers find the old file or the new one, whenever the process or the machine dies. Every writer
uses a name of its own, so two writers never mix their bytes: the last to rename wins. A writer
locks what it writes for as long as it lives. So the next save into a folder can remove the remains
of killed writers, whatever their names.

A tensor that is contiguous in memory that this process can read is not copied. Others are copied
one leaf at a time.
"""

import errno
import itertools
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._base import claims
from . import file_format


try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


# The bytes of tensors ------------------------------------------------------------------------


def write_file(
    file: BinaryIO,
    tensors: Mapping[str, tuple[file_format.Piece, Tensor]],
    scalars: Mapping[str, Any],
    part: file_format.Part | None = None,
) -> None:
    """Write all of a file: tensors and scalars by their paths."""
    tensors = dict(sorted(tensors.items(), key=lambda it: -it[1][0].dtype.itemsize))
    header = file_format.header_of(
        {path: piece for path, (piece, _) in tensors.items()}, scalars, part
    )
    file.write(header)
    checks: list[int] = []
    begun = 0
    for _, x in tensors.values():
        check = 0
        for some in claims.memory(claims.rows_as_bytes(x)):
            check = zlib.crc32(some, check)
            file.write(some)
            begun = _begin_writing(file, begun)
        checks.append(check)
    file.write(file_format.checks_of(header, checks))


def _begin_writing(file: BinaryIO, begun: int) -> int:
    """Let the disk begin with 16 MiB as soon as they are there; gives up to where it has begun.

    Otherwise it would begin at the fsync, for which the writer waits: a save takes 7 % less.
    """
    end = file.tell()
    if end - begun < 2**24 or not hasattr(os, "posix_fadvise"):
        return begun
    os.posix_fadvise(file.fileno(), begun, end - begun, os.POSIX_FADV_DONTNEED)
    return end


def read_piece(
    file: BufferedReader,
    begin: int,
    piece: file_format.Piece,
    into: Tensor,
    at: tuple[int, ...] | None,
) -> int | None:
    """Read the numbers that a piece and a block of its leaf have in common; gives their checksum.

    Where they have nothing in common nothing is read, and it gives None. The numbers of the piece
    begin at ``begin`` in the file; the block begins at ``at`` in the leaf, or is all of it.
    """
    is_all = piece.shape == into.shape and at in (None, piece.at)
    if is_all and into.is_cpu and into.is_contiguous():
        return _filled(file, begin, into)
    if not piece.nbytes:
        return 0
    if not into.numel():  # on a rank outside the mesh, where it need not have as many dims
        return None
    shape, at = tuple(into.shape), at or (0,) * into.dim()
    edges = list(zip(piece.at, piece.shape, at, shape, strict=True))
    starts = [max(a, b) for a, _, b, _ in edges]
    sizes = [min(a + n, b + m) - s for (a, n, b, m), s in zip(edges, starts, strict=True)]
    if not all(size > 0 for size in sizes):
        return None
    x = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    check = _filled(file, begin, x)
    source, target = claims.bits(x), claims.bits(into)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        source = source.narrow(dim, start - piece.at[dim], size)
        target = target.narrow(dim, start - at[dim], size)
    target.copy_(source)
    return check


def _filled(file: BufferedReader, begin: int, x: Tensor) -> int:
    """Read all numbers of a tensor; gives their checksum."""
    file.seek(begin)
    check = 0
    for some in claims.memory(x):
        file.readinto(some)
        check = zlib.crc32(some, check)
    return check


def tile(pieces: Sequence[file_format.Piece], whole: tuple[int, ...]) -> bool:
    """Whether pieces hold each number of a leaf once, as the cells of a grid do.

    The pieces of several ranks are such cells, since a tensor is cut along each dim on its own.
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
    cells = math.prod(map(len, sides)) == len(held)  # first, as there may be very many cells
    return cells and sorted(held) == sorted(itertools.product(*sides))


# There whole, or not at all --------------------------------------------------------------------


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends without an error.

    Links are followed and permissions are kept. As with ``open(path, "wb")``, it is an error if
    there is something at ``path`` that is no file, or that may not be written to.
    """
    name = os.fsdecode(path)
    mode = _mode_of_file(name)
    with (
        _beside(os.path.realpath(name), _new_file) as (descriptor, temporary),
        open(descriptor, "wb", closefd=False) as file,
    ):
        yield file
        file.flush()
        if mode is not None:
            os.chmod(temporary, mode)
        os.fsync(descriptor)


@contextmanager
def whole_folder(path: Path) -> Generator[str]:
    """The name of a folder to fill, which becomes ``path`` when the block ends without an error.

    Nothing of that name may be there: a folder that is not empty cannot be replaced in one move.
    """
    target = os.path.abspath(os.fsdecode(path))  # without a slash at the end
    with suppress(FileNotFoundError):
        os.lstat(target)
        raise FileExistsError(
            f"{target} exists, and a directory cannot be replaced in one move. Save under a new "
            "name, and remove the old one afterwards."
        )
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with _beside(target, _new_folder) as (_, temporary):
        yield temporary
        _sync_folder(temporary)


@contextmanager
def _beside(target: str, make: Callable[[str], int]) -> Generator[tuple[int, str]]:
    """Something new, open and locked, that gets its name when the block ends without an error."""
    folder = os.path.dirname(target)
    _remove_leftovers(folder)
    descriptor, temporary = _open_another(folder, make)
    try:
        yield descriptor, temporary
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            (shutil.rmtree if os.path.isdir(temporary) else os.remove)(temporary)
        raise
    finally:
        os.close(descriptor)
    _sync_folder(folder)


def _mode_of_file(name: str) -> int | None:
    """The permissions of a file, which has to be writable; None if there is no file yet."""
    if name.endswith(("/", os.sep)):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        if not name:
            raise
        return None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{name!r} is not a file; expected the path of a file to write.")
    os.close(os.open(name, os.O_WRONLY))  # raises what open() would
    return stat.S_IMODE(mode)


_OURS = re.compile(r"\.pureaccum-[0-9a-f]{8}\.tmp")  # the names that _open_another gives


def _open_another(folder: str, make: Callable[[str], int]) -> tuple[int, str]:
    """Open and lock what ``make`` makes under a name that nobody else has; gives both."""
    while True:
        temporary = os.path.join(folder, f".pureaccum-{os.urandom(4).hex()}.tmp")
        descriptor = make(temporary)
        _lock(descriptor, wait=True)
        if os.path.lexists(temporary):
            return descriptor, temporary
        os.close(descriptor)  # another writer's _remove_leftovers came before the lock


def _new_file(name: str) -> int:
    # 0o666 is what open() asks for: the system takes the umask off
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _BINARY, 0o666)


def _new_folder(name: str) -> int:
    os.mkdir(name)
    try:  # on Windows folders cannot be opened, nor are those of other writers removed
        return os.open(name if fcntl else os.devnull, os.O_RDONLY)
    except FileNotFoundError:  # another writer's _remove_leftovers again
        return _new_folder(name)


def _remove_leftovers(folder: str) -> None:
    """Remove from a folder what writers have left that died while they wrote into it.

    Something else of such a name, a pipe or a link, stays, and nobody waits for it.
    """
    for name in filter(_OURS.fullmatch, os.listdir(folder)):
        leftover = os.path.join(folder, name)
        with suppress(OSError, RecursionError):  # others removed it or may, or it is not ours
            is_folder = stat.S_ISDIR(os.lstat(leftover).st_mode)
            descriptor = os.open(leftover, _CAREFULLY | (os.O_RDONLY if is_folder else os.O_WRONLY))
            try:
                if _lock(descriptor, wait=False):
                    (shutil.rmtree if is_folder else os.remove)(leftover)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    """Whether this process now has the lock on an open file; when it dies the system frees it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another has it, or the file system has no locks, and leftovers stay
        return False
    return True


def _sync_folder(folder: str) -> None:
    """Wait until the names in a folder are on the disk too; Windows cannot open a folder."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write "\r\n"
# It is then an error to open a link, or a pipe, which would otherwise be waited for.
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
