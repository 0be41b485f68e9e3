"""What comes out of the pieces of a batch: summed, or laid end to end."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._base.torch_internals import levels
from .._base.trees import sum_dtype
from .host import put, room_for, settle


class Rows(NamedTuple):
    """How an operand or an output is cut into pieces."""

    dim: int
    each: bool = False  # one entry a piece, and not the rows of one
    host: torch.device | None = None  # they lie on the host, and are computed with on this device


Cut = Rows | Literal["whole", "last"]  # of an output "whole" is summed
WHOLE: Cut = "whole"


class Gathered:
    """One output, of all pieces so far: summed in float32 at least, or laid end to end."""

    def __init__(self, sizes: Sequence[int], how: Cut, recorded: bool) -> None:
        self.how, self.sizes, self.recorded, self.at = how, sizes, recorded, 0
        self.sums = how == "whole" and len(sizes) > 1  # a piece alone is what it is
        self.parts: list[Tensor] = []
        self.ahead = False  # whether the piece that comes next has been added already

    def take(self, x: Tensor) -> None:
        """One piece more."""
        if self.ahead:
            self.ahead = False
        elif self.sums:
            self.add(x)
        elif isinstance(self.how, Rows) and (len(self.sizes) > 1 or self.how.host):
            self.append(x, self.how)
        else:
            self.parts = [x]

    def add(self, x: Tensor) -> None:
        """One term more."""
        if not self.parts:
            self.dtype = x.dtype
            self.parts = [x.to(sum_dtype(x), copy=not self.recorded)]  # the caller's, perhaps
        elif self.may_write(x):
            self.parts[0].add_(x)
        else:
            self.parts[0] = self.parts[0] + x

    def append(self, x: Tensor, how: Rows) -> None:
        """Some rows more."""
        size = x.shape[how.dim]
        if not self.parts and not self.recorded:
            shape = list(x.shape)
            shape[how.dim] = len(self.sizes) if how.each else sum(self.sizes)
            self.parts = [room_for(x, shape) if how.host else x.new_empty(shape)]
        if self.at >= 0 and self.may_write(x):  # so that they never lie there twice
            place = self.parts[0].narrow(how.dim, self.at, size)
            put(place, x) if how.host else place.copy_(x)
            self.at += size
            return
        if self.at > 0:  # the first that a vmap maps, say
            self.parts = [self.parts[0].narrow(how.dim, 0, self.at)]
        elif not self.recorded and self.at == 0:
            self.parts = []
        self.at = -1
        self.parts.append(x)

    def may_write(self, x: Tensor) -> bool:
        """Whether a piece may be written into what is there."""
        if self.recorded:
            return False
        return not (its := levels(x)) or its <= levels(self.parts[0])

    def end(self) -> Tensor:
        """All of it; sums in the dtype of a piece."""
        if isinstance(self.how, Rows) and self.how.host:
            settle(self.how.host)
        if isinstance(self.how, Rows) and len(self.parts) > 1:
            return torch.cat(self.parts, self.how.dim)
        return self.parts[0].to(self.dtype) if self.sums else self.parts[0]
