"""How many bytes are alive, of what was allocated since.

    with counting() as live:
        ...
    live.peak

A storage counts from the operation that returns it until the last tensor over it is gone: in
torch.func's forward and backward passes as in autograd's own, in what hooks add, in an update.
What was there before does not count, nor does what a kernel allocates for itself and frees again.
Every operation takes some ten microseconds longer.
"""

import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .torch_internals import in_backward, seeing


class Live:
    """Bytes: now, the most so far, and the most as a backward pass began."""

    __slots__ = ("before_backward", "now", "peak")

    def __init__(self) -> None:
        self.now = self.peak = self.before_backward = 0


@contextmanager
def counting(
    budget: int | None = None,
    device: torch.device | None = None,
    taken_for: Callable[[Tensor], Tensor] | None = None,
) -> Generator[Live]:
    """Count what is alive, of one device or of all; more than the budget is out of memory.

    Where operations take a tensor for another one, ``taken_for`` says for which.
    """
    live = Live()
    counted: dict[int, weakref.ref[Any]] = {}  # by id, which stays as long as the storage does
    backwards = False

    def see(arguments: tuple[Any, ...], out: Any) -> None:
        nonlocal backwards
        if in_backward() != backwards:
            backwards = not backwards
            if backwards:
                live.before_backward = max(live.before_backward, live.now)
        given: set[int] | None = None
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in counted or device not in (None, tensor.device):
                continue
            if given is None:
                found = _tensors(arguments)
                given = {id((taken_for(x) if taken_for else x).untyped_storage()) for x in found}
            if key not in given:  # a view of what was there before
                counted[key] = weakref.ref(storage, _forgetting(key, storage.nbytes()))
                live.now += storage.nbytes()
        live.peak = max(live.peak, live.now)
        if budget is not None and live.now > budget:
            raise torch.OutOfMemoryError(
                f"{live.now} bytes are alive beyond the arguments; memory_budget is {budget}."
            )

    def _forgetting(key: int, bytes_: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            del counted[key]
            live.now -= bytes_

        return forget

    try:
        with seeing(see):
            yield live
    finally:
        counted.clear()


def _tensors(tree: Any) -> Generator[Tensor]:
    """Of what an operation takes or returns; sparse ones have no storage of their own."""
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(each)
