"""torch's own allocator of CPU memory, which fails where a test says: ``allocator.c``."""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest


SOURCE = Path(__file__).with_suffix(".c")
SHARES = 2  # of the programs that are too many for one process
FOLDER = Path(__file__).parents[2] / "build" / "allocator"  # which git ignores
COMPILER = shlex.split(os.environ.get("CC", "gcc"))
REASON = (
    "the allocator that fails is Linux's"
    if sys.platform != "linux"
    else f"the allocator that fails is C, and there is no {COMPILER[0]}; CC names another"
    if shutil.which(COMPILER[0]) is None
    else ""
)


def build():
    """The library, compiled if that has not been done."""
    library = FOLDER / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        # Under another name first: several processes may be at it.
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / library.name
            flags = "-shared", "-fPIC", "-O1", "-Wall"
            subprocess.run([*COMPILER, *flags, str(SOURCE), "-o", str(made), "-ldl"], check=True)
            made.replace(library)
    return library


class Counted:
    """How many blocks were asked for, once the block of code has ended."""

    blocks = 0


@contextmanager
def refusing(which):
    """Refuse that block of memory, counted from 1; none if it is 0. Not to be nested."""
    library, counted = ctypes.CDLL(str(build())), Counted()
    library.count_from_here(ctypes.c_long(which))
    try:
        yield counted
    finally:
        counted.blocks = library.count_until_here()


def run(file, share):
    """Run a share of a file of tests in a process of its own, in which ``refusing`` refuses."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k", share],
        cwd=Path(__file__).parents[2],
        env={name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
        | {"LD_PRELOAD": str(build())},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, f"\n{ended.stdout}\n{ended.stderr}"
    assert " passed" in ended.stdout


needs_a_compiler = pytest.mark.skipif(bool(REASON), reason=REASON)
