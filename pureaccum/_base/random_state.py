"""Call something again with the random numbers that it drew the first time.

    before = generators(devices)
    call()
    with replaying(before):
        call()  # again: the same numbers, and the generators stand where they stood

Nothing is put back where nothing was drawn (``were_drawn_from``): other threads may draw, too.
"""

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from .torch_internals import modes


class Drawn(NamedTuple):
    """The state of a device's generator before numbers were drawn from it."""

    device: torch.device
    state: torch.Tensor


def were_drawn_from(before: list[Drawn], now: list[Drawn]) -> bool:
    """Whether numbers were drawn from generators between two looks at them."""
    with modes.unseen():
        return not all(torch.equal(a.state, b.state) for a, b in zip(before, now, strict=True))


@contextmanager
def replaying(drawn: list[Drawn]) -> Generator[None]:
    """Let the generators draw the same numbers again; afterwards they stand where they stood."""
    now = states([it.device for it in drawn])
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
    return states([_CPU, *drawing - {_CPU}])


def states(devices: Sequence[torch.device]) -> list[Drawn]:
    """The states of the generators of devices that have one."""
    with _ONE_AT_A_TIME, modes.unseen():  # what counts the tensors of a step is not to count these
        return [Drawn(device, _state(device)) for device in devices]


_CPU = torch.device("cpu")

# torch makes a tensor of a state while it has the generator's lock. If garbage is collected there,
# another thread may run, and wait for that lock without ever letting the first one go on.
_ONE_AT_A_TIME = threading.RLock()


def restore(states: Iterable[Drawn]) -> None:
    """Let generators go on from noted states."""
    if not (noted := [*states]):  # by a compiler, which cannot enter what follows
        return
    with _ONE_AT_A_TIME:
        for it in noted:
            _owner(it.device).set_rng_state(it.state, *_which(it.device))


def _state(device: torch.device) -> torch.Tensor:
    if device == _CPU:
        return torch.default_generator.get_state()
    return _owner(device).get_rng_state(*_which(device))


def _owner(device: torch.device) -> Any:
    return torch if device.type == "cpu" else getattr(torch, device.type, None)


def _which(device: torch.device) -> list[torch.device]:
    return [] if device.type in ("cpu", "mps") else [device]
