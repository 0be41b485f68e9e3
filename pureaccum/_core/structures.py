"""What follows from the structure of what a call is given, decided once for each structure.

    key = trees, and the dtype, shape, device and layout of each tensor

A call whose key is known checks nothing that its structure decides. It asks what no structure
tells: transforms and modes, autocast, what was given up, what requires a gradient, versions, the
modes of modules, every number. What is kept are decisions, and no tensor. Anything but plain
tensors, and whatever is called under a transform, has no key, and is examined at each call.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, trees
from .._base.torch_internals import modes
from . import batches, sums


class Update(NamedTuple):
    """What is decided for microbatches of one structure that enter sums of another."""

    kinds: sums.Kinds
    rows: int | None
    devices: frozenset[str]


class Structures:
    """What was decided, by key. No tuple: a compiler would look into that."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def keep(self, key: Any, decision: Any) -> None:
        """Remember what was decided."""
        if len(self.known) >= MOST:
            self.known.clear()
        self.known[key] = decision


MOST = 1000  # structures


def structure_of(beside: Any, *flats: trees.Flat) -> Any:
    """The key of some trees, and of what else decides; None where nothing may be remembered."""
    if modes.transform_active():
        return None
    leaves = [*chain.from_iterable(map(_LEAVES, flats))]
    if not dtensors.PLAIN.issuperset(map(type, leaves)):
        return None
    try:
        return beside, *map(_SPEC, flats), *map(_LOOKS, leaves)
    except RuntimeError:  # a nested tensor has no shape
        return None


_LEAVES, _SPEC = itemgetter(0), itemgetter(1)
_LOOKS: Callable[[Tensor], Any] = attrgetter("dtype", "shape", "device", "layout")


def update_of(
    structures: Structures,
    key: Any,
    params: list[Tensor],
    flat: trees.Flat,
    examine: Callable[[], tuple[batches.Batch, sums.Kinds]],
) -> tuple[batches.Batch, sums.Kinds]:
    """A microbatch as it is read, and how gradients are added: examined unless its key is known."""
    if key is None:  # a compiler is not to look into what was decided
        return examine()
    known: Update | None = structures.known.get(key)
    if known is not None:
        ask_autocast(known.devices, params)
        return batches.Batch(*flat, known.rows), known.kinds
    read, kinds = examine()
    if read.problem is None:  # an error of each microbatch is its own
        structures.keep(key, Update(kinds, read.rows, devices_of(params)))
    return read, kinds


def devices_of(leaves: Iterable[Tensor]) -> frozenset[str]:
    """The kinds of devices on which tensors lie, of those that know autocast."""
    return frozenset(filter(torch.amp.is_autocast_available, {x.device.type for x in leaves}))


def ask_autocast(devices: frozenset[str], leaves: list[Tensor]) -> None:
    """Refuse autocast around microbatches, where it is on."""
    if any(map(torch.is_autocast_enabled, devices)):
        checks.refuse_autocast_cache(leaves)
