"""What comes out of the pieces of a batch: summed, or laid end to end."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._base import sharded_rows, trees
from .._base.torch_internals import functorch, kernels, modes
from . import weights


class Rows(NamedTuple):
    """How an operand or an output is cut into pieces."""

    dim: int
    each: bool = False  # one entry per piece, in place of its rows
    over: sharded_rows.Over = sharded_rows.NOWHERE  # the ranks of which each cuts its own rows


# Of an output "whole" is summed; an "own" operand is captured, and used without being given.
Cut = Rows | Literal["whole", "last", "own"]
WHOLE: Cut = "whole"
OWN: Cut = "own"


class Gathered:
    """One output of all pieces so far: summed in float32 at least, or laid end to end."""

    def __init__(self, sizes: Sequence[int], how: Cut, recorded: bool) -> None:
        self.how, self.sizes, self.recorded = how, sizes, recorded
        # Where the next rows go; -1 where they are joined at the end.
        self.at = -1 if recorded else 0
        self.sums = how == "whole" and len(sizes) > 1  # a piece alone is what it is
        self.parts: list[Tensor] = []
        self.ahead = False  # whether the next piece has been added already

    def take(self, x: Tensor) -> None:
        """Take the output of the next piece."""
        if self.ahead:
            self.ahead = False
        elif self.sums:
            self.add(x)
        elif isinstance(self.how, Rows) and len(self.sizes) > 1:
            if self.how.over == sharded_rows.NOWHERE or self.how.each:
                self.append(x, self.how)
            else:
                self.parts.append(x)
        else:
            self.parts = [x]

    def add(self, x: Tensor) -> None:
        """Add the next term."""
        if not self.parts:
            self.dtype = x.dtype
            self.parts = [x.to(trees.sum_dtype(x), copy=not self.recorded)]  # the caller's, perhaps
        elif self.may_write(x):
            self.parts[0].add_(x)
        else:
            self.parts[0] = self.parts[0] + x

    def append(self, x: Tensor, how: Rows) -> None:
        """Lay the next rows at the end."""
        if self.at == 0 and not self.parts:
            if holds_much(x, len(self.sizes)):  # then no row exists twice
                shape = list(x.shape)
                shape[how.dim] = len(self.sizes) if how.each else sum(self.sizes)
                self.parts = [x.new_empty(shape)]
            else:
                self.at = -1
        if self.at >= 0 and not self.may_write(x):  # such as the first that a vmap maps
            self.parts = [self.parts[0].narrow(how.dim, 0, self.at)] if self.at else []
            self.at = -1
        if self.at < 0:
            self.parts.append(x)
            return
        size = x.shape[how.dim]
        self.parts[0].narrow(how.dim, self.at, size).copy_(x)
        self.at += size

    def may_write(self, x: Tensor) -> bool:
        """Whether a piece may be written into what is there."""
        if self.recorded:
            return False
        return not (its := functorch.levels(x)) or its <= functorch.levels(self.parts[0])

    def end(self) -> Tensor:
        """The whole output; a sum is in the dtype of a piece."""
        if isinstance(self.how, Rows) and len(self.parts) > 1:
            if self.how.over != sharded_rows.NOWHERE and not self.how.each:
                return sharded_rows.join_rows(self.parts, self.how.over, self.how.dim)
            return torch.cat(self.parts, self.how.dim)
        return kernels.materialised(self.parts[0].to(self.dtype) if self.sums else self.parts[0])


FEW_BYTES = 2**16  # rows that have no more may exist twice; to join them at the end is faster


def holds_much(x: Tensor, times: int) -> bool:
    """Whether so many tensors like this one keep more memory than may be there twice."""
    own = functorch.innermost(x)
    return own.layout is torch.strided and own.untyped_storage().nbytes() * times > FEW_BYTES


def small_sums(gathered: Sequence[Gathered]) -> list[Tensor] | None:
    """The sums so far, if all outputs are sums that may be added to in one call."""
    if not (
        gathered and modes.may_add_in_place() and all(x.sums and not x.recorded for x in gathered)
    ):
        return None
    sums = [so_far.parts[0] for so_far in gathered]
    return None if any(map(_is_added_alone, sums)) else sums


def _is_added_alone(x: Tensor) -> bool:
    return (
        type(x) is not Tensor or x.is_sparse or functorch.is_one_of_many(x) or weights.is_large(x)
    )
