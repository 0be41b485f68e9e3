"""Memory that runs out where a test says."""

import gc
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from pureaccum._base.torch_internals.modes import seeing
from pureaccum._core.auto_size import counting


Point = int | Callable[[], bool]


class Tries(NamedTuple):
    """For each try: the bytes alive before its first operation, and how many operations it had.

    Those of the engine, and not what is done between tries.
    """

    alive: list[int]
    operations: list[int]


def inside(*functions):
    """Whether one of them is being called, by the end of its qualified name."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_qualname.endswith(functions):
        frame = frame.f_back
    return frame is not None


def failing():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@contextmanager
def shortage(*points, error=failing):
    """One point for each try that fails: an operation's number, or the first where it is true."""
    left, tries, begins = list(points), Tries([], []), True

    def before(operation, arguments, more):
        nonlocal begins
        if begins and inside("step_over", "evaluate", "accumulate", "parts"):
            tries.alive.append(live.now)
            tries.operations.append(0)
            begins = False

    def see(arguments, out):
        nonlocal begins
        if begins:
            return
        tries.operations[-1] += 1
        if left and (left[0]() if callable(left[0]) else tries.operations[-1] >= left[0]):
            del left[0]
            begins = True
            raise error()

    with counting() as live, seeing(see, before):
        yield tries


@pytest.fixture(scope="module")
def few_to_collect():
    """Each try that fails is followed by a collection: not of all that a test session imports."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
