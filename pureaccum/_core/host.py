"""Rows that lie in pinned memory of the host while a device computes with some of them.

Pieces are copied on one side stream a device: the next one comes while this one is computed with,
and what was computed goes back while the device goes on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.torch_internals import innermost


_sides: dict[torch.device, Any] = {}


def to_host(x: Tensor) -> Tensor:
    """The same rows in pinned memory, differentiable."""
    return room_for(x, x.shape).copy_(x)


def room_for(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Pinned memory."""
    return like.new_empty(shape, device="cpu", pin_memory=True)


class Fetched(Sequence[Tensor]):
    """Pieces on a device, each asked for once, one after the other."""

    def __init__(self, pieces: Sequence[Tensor], device: torch.device) -> None:
        self.pieces, self.device = pieces, device
        self.coming: dict[int, tuple[Tensor, Any]] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, p: Any) -> Any:
        for n in (p, p + 1):
            if n < len(self) and n not in self.coming:
                side = _side(self.device)
                with _module(self.device).stream(side):
                    x = self.pieces[n].to(self.device, non_blocking=True)
                self.coming[n] = x, side.record_event()
        x, ready = self.coming.pop(p)
        here = _module(self.device).current_stream(self.device)
        here.wait_event(ready)
        innermost(x).record_stream(here)
        return x


def put(place: Tensor, x: Tensor) -> None:
    """Copy a piece to its place on the host, while the device goes on."""
    device = x.device
    if device.type == "cpu":
        place.copy_(x)
        return
    side = _side(device)
    side.wait_stream(_module(device).current_stream(device))
    with _module(device).stream(side):
        place.copy_(x, non_blocking=True)
    innermost(x).record_stream(side)  # its memory is not given away before it has been copied


def settle(device: torch.device) -> None:
    """Wait until all that was put is there: a CPU that reads it would not."""
    _side(device).synchronize()


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _side(device: torch.device) -> Any:
    if device not in _sides:
        _sides[device] = _module(device).Stream(device)
    return _sides[device]
