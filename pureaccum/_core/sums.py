"""Where gradients end: in sums that are written to, or in the terms of sums that are not.

``Sums`` are written to at top level, and begin with the gradients of the first microbatch.
``Terms`` are taken wherever somebody follows or records what happens: each sum is a new tensor.
"""

from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import dtensors, trees
from .._base.torch_internals import kernels, modes
from . import weights


class Kinds(NamedTuple):
    """What of leaves, and of their sums, decides how gradients are added."""

    dtypes: list[torch.dtype]  # of the sums
    alike: bool  # whether each leaf has the dtype of its sum
    large: list[int]  # the leaves whose gradients do not wait for the others …
    # … and those to whose sums autograd adds them. On a CPU, which launches nothing, all of them if
    # they are large together: added as they come, gradients are in the cache, and leave their
    # memory to the next one.
    added: Sequence[int]
    layouts: dtensors.Layouts | None  # where the gradients of DTensors are summed


def kinds_of(leaves: list[Tensor], dtypes: list[torch.dtype]) -> Kinds:
    """What follows from leaves and the dtypes of their sums."""
    # there a size may be a symbol
    parts, at = ([], None) if modes.transform_active() else dtensors.opened(leaves)
    # a shard's gradient is communicated by itself, so nothing is gained by letting it wait
    shards = {i for i, its in enumerate(at or []) if its and dtensors.is_cut(its)}
    large = [i for i, x in enumerate(parts) if x.nbytes >= weights.LARGE or i in shards]
    together = sum([x.nbytes for x in parts]) >= weights.LARGE
    return Kinds(
        dtypes=dtypes,
        alike=dtypes == [x.dtype for x in leaves],
        large=large,
        added=range(len(leaves)) if together and leaves[0].device.type == "cpu" else large,
        layouts=dtensors.sum_layouts(leaves),
    )


class Sums:
    """Sums of the gradients of leaves, in place."""

    __slots__ = ("begun", "kinds", "leaves", "tensors", "written")

    def __init__(self, leaves: list[Tensor], kinds: Kinds, tensors: Any = None) -> None:
        self.leaves, self.kinds = leaves, kinds
        self.begun = tensors is not None  # whether there is a sum for each leaf
        self.tensors: list[Any] = tensors if self.begun else [None] * len(leaves)
        self.written = False  # whether anything was added

    def add(
        self, which: Sequence[int], grads: Sequence[Tensor], weighing: weights.Weighing
    ) -> None:
        """Add the gradients of some leaves."""
        self.written = True
        if not self.begun:
            self.fill(which)
        tensors = self.tensors
        if len(which) == 1:
            weights.add_gradient_(tensors[which[0]], grads[0], weighing)
        elif len(which) == len(tensors):
            weights.add_gradients_(tensors, [*grads], weighing)
        else:
            weights.add_gradients_([tensors[i] for i in which], [*grads], weighing)

    def adopt(self, grads: Sequence[Tensor | None]) -> None:
        """Begin with gradients that nobody else holds, whose memory becomes that of the sums.

        Unless something else lies in it: a gradient may be a view of what the loss was given.
        """
        tensors, rest = self.tensors, list[tuple[int, Tensor]]()
        for i, grad in enumerate(grads):
            if grad is not None and tensors[i] is None and kernels.owns_its_memory(grad):
                tensors[i] = grad
            elif grad is not None:
                rest.append((i, grad))
        self.begun = NoneType not in map(type, tensors)
        if not self.begun:
            self.fill(range(len(tensors)))
        for i, grad in rest:
            tensors[i].add_(grad)

    def fill(self, which: Sequence[int]) -> None:
        """Begin some sums with zeros, where there are none yet."""
        tensors, dtypes = self.tensors, self.kinds.dtypes
        missing = [i for i in which if tensors[i] is None]
        for dtype in {dtypes[i] for i in missing}:
            alike = [i for i in missing if dtypes[i] == dtype]
            zeros = trees.zeros_for_sums([self.leaves[i] for i in alike], dtype)
            for i, zero in zip(alike, zeros, strict=True):
                tensors[i] = zero
        self.begun = NoneType not in map(type, tensors)

    def all(self) -> list[Tensor]:
        """All sums; zeros where nothing was added."""
        if not self.begun:
            self.fill(range(len(self.tensors)))
        return self.tensors


class Terms:
    """What one microbatch adds to sums: None where that is nothing."""

    def __init__(self, leaves: list[Tensor], kinds: Kinds) -> None:
        self.leaves, self.kinds = leaves, kinds
        self.tensors: list[Any] = [None] * len(leaves)
        self.keep: Tensor | None = None  # whether it counts

    def add(
        self, which: Sequence[int], grads: Sequence[Tensor], weighing: weights.Weighing
    ) -> None:
        """Keep the terms of some leaves."""
        self.keep = weighing.keep
        for i, grad in zip(which, grads, strict=True):
            self.tensors[i] = weights.term_of(grad, self.kinds.dtypes[i], weighing)
