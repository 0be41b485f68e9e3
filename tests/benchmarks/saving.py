"""Saving a tree: ``pureaccum.save`` beside ``safetensors.torch.save_file`` and an fsync.

Rule: they take turns, and the time is that of the wall, for which both wait: the disk is in it. The
same bytes go to new files, of which both sides remove the one before.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import pureaccum as pa

from .absent import Absent, optional
from .apart import why


SAVE, SAFETENSORS = "save", "safetensors, fsync"
MEGABYTES = 640
TURNS = 15


def saving(device: str) -> dict:
    """``{"seconds": {name: one number a turn}}``, or ``{"failure": why}``."""
    try:
        save_file = optional("safetensors.torch").save_file
    except Absent as error:
        return {"failure": why(error)}
    tree = {f"w{i}": torch.randn(2**22, device=device) for i in range(MEGABYTES * 10**6 // 2**24)}

    def synced(path: Path) -> None:
        save_file(tree, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    sides: dict[str, Callable[[Path], None]] = {
        SAVE: lambda path: pa.save(path, tree),
        SAFETENSORS: synced,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order, shuffle = list(sides), random.Random(0).shuffle
    with TemporaryDirectory() as folder:
        for turn in range(TURNS + 1):
            shuffle(order)
            for name in order:
                path = Path(folder) / name
                path.unlink(missing_ok=True)
                start = time.perf_counter()
                sides[name](path)
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds}
