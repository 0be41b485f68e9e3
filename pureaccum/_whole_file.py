"""A file that is written whole or not at all.

    write beside it under another name  ->  fsync  ->  rename  ->  fsync of the folder

Whoever looks finds the old file or the new one, whenever the process or the machine dies. Every
writer has a name of its own, so that two never mix their bytes: the last to rename wins. What
killed writers leave behind goes with the next save: a writer holds a lock on its file for as
long as it lives.
"""

import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import BinaryIO


try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` when the block ends without an error.

    Links are followed and permissions are kept, as ``open(path, "wb")`` would.
    """
    target = os.path.realpath(os.fspath(path))
    folder, name = os.path.split(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise ValueError(f"{os.fspath(path)!r} is not a file; expected the path of one to write.")
    _remove_leftovers(folder, name)
    descriptor, temporary = _open_another(folder, name)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if os.path.exists(target):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            os.fsync(descriptor)
            os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.remove(temporary)
        raise
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


def _open_another(folder: str, name: str) -> tuple[int, str]:
    """A new file of a name that nobody else has, and a lock on it."""
    while True:
        temporary = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.tmp")
        # 0o666 is what open() asks for: the umask is taken off by the system
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _BINARY, 0o666)
        _lock(descriptor, wait=True)
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)  # somebody's _remove_leftovers came before the lock


def _remove_leftovers(folder: str, name: str) -> None:
    """Remove the files of those who died while they wrote to this name."""
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.tmp")  # as _open_another names them
    for entry in os.listdir(folder):
        if ours.fullmatch(entry):
            with suppress(OSError):  # another one removed it, or may, or it is not ours
                leftover = os.path.join(folder, entry)
                descriptor = os.open(leftover, os.O_WRONLY)
                try:
                    if _lock(descriptor, wait=False):
                        os.remove(leftover)
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
    """Wait until the new name is on the disk too; on Windows folders cannot be opened."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write "\r\n"
