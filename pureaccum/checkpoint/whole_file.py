"""A file, or a folder of them, that is written whole or not at all.

    write beside it under another name  ->  fsync  ->  rename  ->  fsync of the folder

Whoever looks finds the old file or the new one, whenever the process or the machine dies. Every
writer has a name of its own, so that two never mix their bytes: the last to rename wins. What
killed writers leave behind goes with the next save into that folder, whatever its name: a writer
holds a lock on what it writes for as long as it lives.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import BinaryIO


try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends without an error.

    Links are followed, permissions are kept, and what is no file or may not be written to is
    refused, as ``open(path, "wb")`` would.
    """
    name = os.fsdecode(path)
    mode = _mode_of_file(name)
    target = os.path.realpath(name)
    folder = os.path.dirname(target)
    _remove_leftovers(folder)
    descriptor, temporary = _open_another(folder, _new_file)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(temporary, mode)
            os.fsync(descriptor)
            os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(temporary)
        raise
    _sync_folder(folder)


@contextmanager
def whole_folder(path: Path) -> Generator[str]:
    """The name of a folder to fill, which becomes ``path`` when the block ends without an error.

    There must be nothing of that name: a folder that is not empty cannot be replaced in one move.
    """
    target = os.path.abspath(os.fsdecode(path))  # which takes a slash at the end away
    with suppress(FileNotFoundError):
        os.lstat(target)
        raise FileExistsError(
            f"{target} exists, and a directory cannot be replaced in one move. Save under a new "
            "name, and remove the old one afterwards."
        )
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    _remove_leftovers(folder)
    descriptor, temporary = _open_another(folder, _new_folder)
    try:
        yield temporary
        _sync_folder(temporary)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)
    _sync_folder(folder)


def hand_over(file: BinaryIO, begin: int) -> int:
    """Let the disk begin with what was written from there on; returns from where on it has not.

    It would begin at the fsync, and the writer wait for all of it then. By 16 MiB, without waiting.
    """
    end = file.tell()
    if end - begin < 2**24:
        return begin
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
    return end


def _mode_of_file(name: str) -> int | None:
    """The permissions of a file that may be written to; None where there is none yet."""
    if name.endswith(("/", os.sep)):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        if not name:
            raise
        return None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{name!r} is not a file; expected the path of one to write.")
    os.close(os.open(name, os.O_WRONLY))  # raises what open() would
    return stat.S_IMODE(mode)


_OURS = re.compile(r"\.pureaccum-[0-9a-f]{8}\.tmp")  # as the names that _open_another gives


def _open_another(folder: str, make: Callable[[str], int]) -> tuple[int, str]:
    """What ``make`` opens under a name that nobody else has, and a lock on it."""
    while True:
        temporary = os.path.join(folder, f".pureaccum-{os.urandom(4).hex()}.tmp")
        descriptor = make(temporary)
        _lock(descriptor, wait=True)
        if os.path.lexists(temporary):
            return descriptor, temporary
        os.close(descriptor)  # somebody's _remove_leftovers came before the lock


def _new_file(name: str) -> int:
    # 0o666 is what open() asks for: the umask is taken off by the system
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _BINARY, 0o666)


def _new_folder(name: str) -> int:
    os.mkdir(name)
    try:  # on Windows folders cannot be opened, nor are those of others removed there
        return os.open(name if fcntl else os.devnull, os.O_RDONLY)
    except FileNotFoundError:  # _remove_leftovers of another one again
        return _new_folder(name)


def _remove_leftovers(folder: str) -> None:
    """Remove what those who died while they wrote into this folder left there.

    What only has such a name, a pipe or a link, stays, and is not waited for.
    """
    for name in filter(_OURS.fullmatch, os.listdir(folder)):
        leftover = os.path.join(folder, name)
        with suppress(OSError, RecursionError):  # others removed it, or may, or it is not ours
            is_folder = stat.S_ISDIR(os.lstat(leftover).st_mode)
            descriptor = os.open(leftover, _CAREFULLY | (os.O_RDONLY if is_folder else os.O_WRONLY))
            try:
                if _lock(descriptor, wait=False):
                    (shutil.rmtree if is_folder else os.remove)(leftover)
            finally:
                os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    """Whether this process now has the lock on an open file; the system takes it from the dead."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody has it, or a file system without locks, where leftovers stay
        return False
    return True


def _sync_folder(folder: str) -> None:
    """Wait until the names in it are on the disk too; on Windows folders cannot be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write "\r\n"
# A link is an error then, and so is a pipe, which otherwise would be waited for.
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
