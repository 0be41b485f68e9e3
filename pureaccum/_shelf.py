"""Where the boundaries of a whole batch lie between a stage and the next.

On the device they are simply kept. On the host they lie in pinned memory: each is copied there
while the device goes on computing, and the next one that is wanted comes back in the meantime.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Away(NamedTuple):
    """A tensor that was put away."""

    pinned: Tensor
    device: torch.device
    copied: Any  # the event after which it is there


class Boundary(NamedTuple):
    """What stands between two legs, of one microbatch."""

    leaves: list[Any]  # or what stands for them on the shelf
    spec: Any
    rows: int


class Shelf(NamedTuple):
    """Somewhere to put boundaries.

    Args:
        put: What stands for a boundary that is put away; perhaps given pairs of a tensor and what
            stands for it already.
        fetch: The boundaries again, one after the other. The list is emptied.
    """

    put: Callable[..., Boundary]
    fetch: Callable[[list[Boundary]], Iterator[Boundary]]


def shelf(boundaries: str, device: torch.device) -> Shelf:
    """On the device itself, or on the host, which for a CPU is the same."""
    if boundaries == "device" or device.type == "cpu":
        return Shelf(lambda boundary, known=(): boundary, _each)
    module: Any = getattr(torch, device.type)
    side = module.Stream(device)

    def away(x: Any, known: dict[int, Any]) -> Any:
        if id(x) in known:  # handed through untouched: there already
            return known[id(x)]
        if not isinstance(x, Tensor) or x.device.type != device.type:
            return x
        pinned = torch.empty_like(x, device="cpu", pin_memory=True)
        side.wait_stream(module.current_stream(device))
        with module.stream(side):
            pinned.copy_(x, non_blocking=True)
        x.record_stream(side)  # its memory is not given to another before it has been copied
        return Away(pinned, x.device, side.record_event())

    def put(boundary: Boundary, known: Iterable[tuple[Any, Any]] = ()) -> Boundary:
        already = {id(x): put for x, put in known}
        return Boundary([away(x, already) for x in boundary.leaves], *boundary[1:])

    def back(x: Any) -> Any:
        if not isinstance(x, Away):
            return x
        with module.stream(side):
            side.wait_event(x.copied)
            return x.pinned.to(x.device, non_blocking=True)

    def arrived(boundary: Boundary, ready: Any) -> Boundary:
        here = module.current_stream(device)
        here.wait_event(ready)
        for x in boundary.leaves:
            if isinstance(x, Tensor) and x.device.type == device.type:
                x.record_stream(here)
        return boundary

    def fetch(kept: list[Boundary]) -> Iterator[Boundary]:
        coming: tuple[Boundary, Any] | None = None
        for boundary in _each(kept):
            now = coming
            here = Boundary([back(x) for x in boundary.leaves], *boundary[1:])
            coming = here, side.record_event()
            if now is not None:
                yield arrived(*now)
        if coming is not None:
            yield arrived(*coming)

    return Shelf(put, fetch)


def _each(kept: list[Boundary]) -> Iterator[Boundary]:
    """One after the other, and none is held any longer."""
    kept.reverse()
    while kept:
        yield kept.pop()
