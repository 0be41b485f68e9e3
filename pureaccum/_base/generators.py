"""Call something again with the random numbers that it drew the first time.

    with noted(devices) as drawn:
        call()
    with replaying(drawn):
        call()  # again: the same numbers, and the generators stand where they stood

A generator's state is kept only where numbers were drawn, since most calls draw none.
"""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .torch_internals import unseen


class Drawn(NamedTuple):
    """The state of a device's generator before numbers were drawn from it."""

    device: torch.device
    state: Tensor


@contextmanager
def noted(devices: Iterable[torch.device]) -> Generator[list[Drawn]]:
    """Note from which of torch's generators numbers are drawn inside; filled in at the end."""
    before, drawn = generators(devices), list[Drawn]()
    yield drawn
    with unseen():
        drawn += [it for it in before if not torch.equal(it.state, _state(it.device))]


@contextmanager
def replaying(drawn: list[Drawn]) -> Generator[None]:
    """Let the generators draw the same numbers again; afterwards they stand where they stood."""
    now = [Drawn(it.device, _state(it.device)) for it in drawn]
    try:
        restore(drawn)
        yield
    finally:
        restore(now)


def put_back(device: torch.device) -> AbstractContextManager[None]:
    """Put the generators of the CPU and of a device back, at the end, to where they stood."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def generators(devices: Iterable[torch.device]) -> list[Drawn]:
    """The states of the CPU's generator and of those of some devices."""
    drawing = {device for device in devices if hasattr(_owner(device), "get_rng_state")}
    return [Drawn(device, _state(device)) for device in {torch.device("cpu"), *drawing}]


def restore(states: Iterable[Drawn]) -> None:
    """Let generators go on from noted states."""
    for it in states:
        _owner(it.device).set_rng_state(it.state, *_which(it.device))


def _state(device: torch.device) -> Tensor:
    with unseen():  # what counts the tensors of a step is not to count this one
        return _owner(device).get_rng_state(*_which(device))


def _owner(device: torch.device) -> Any:
    return torch if device.type == "cpu" else getattr(torch, device.type, None)


def _which(device: torch.device) -> list[torch.device]:
    return [] if device.type in ("cpu", "mps") else [device]
