"""A loss as a check calls it: on some rows, in some dtype, leaving nothing behind.

    rows of the batch -> the sums that an accumulator holds after this microbatch

Afterwards what the loss wrote to, or assigned to a module, is as it was. Each call begins with
random numbers of its own, so that a loss that draws cannot hide it.
"""

import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._base.trees import map, unflatten
from ..._core.accumulator import AccumState, accumulator
from ..._core.batches import Batch
from ..._core.loss import Reduction
from ..._core.writes import unguarded
from .cuts import Rows
from .in_dtype import cast, computing_in
from .kept import Kept


class Subject(NamedTuple):
    """A loss and its arguments."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Batch
    rows: int
    has_aux: bool = False
    reduction: Reduction = "mean"
    dtype: torch.dtype | None = None  # None: as the data is
    without: frozenset[str] = frozenset()  # functions that are left out
    kept: Kept = Kept()  # what the loss changes of what it holds, and what was there
    generators: Sequence[torch.Generator] = ()  # the loss's own

    def in_dtype(self, dtype: torch.dtype) -> "Subject":
        """The same loss, its data cast once."""
        batch = self.batch._replace(leaves=cast(self.batch.leaves, dtype))
        return self._replace(params=cast(self.params, dtype), batch=batch, dtype=dtype)

    def everything(self) -> Rows:
        """The rows of the whole batch."""
        return tuple(range(self.rows))

    def arguments(self, rows: Rows) -> tuple[Any, Any]:
        """Copies of the parameters and of some rows: a loss that writes to them writes to these.

        In another dtype than their own they are copies already.
        """
        at = torch.tensor(rows, dtype=torch.int64)
        columns = [
            x.detach().index_select(0, at.to(x.device)) if isinstance(x, Tensor) else x
            for x in self.batch.leaves
        ]
        own = self.dtype is None
        params = map(lambda x: x.detach().clone() if own else x.detach(), self.params)
        return params, unflatten(self.batch.spec, columns)

    @contextmanager
    def running(self, seed: int) -> Generator[None]:
        """In the dtype, with random numbers from ``seed``; afterwards all is as it was."""
        mode = nullcontext() if self.dtype is None else computing_in(self.dtype, self.without)
        reseed(seed, self.generators)
        try:
            with mode, unguarded():
                yield
        finally:
            self.kept.put_back()

    def sums(self, rows: Rows, seed: int) -> AccumState:
        """What an accumulator holds after these rows."""
        # autograd runs what torch.func refuses, and batch norms that write to captured buffers
        acc = accumulator(self.loss_fn, self.has_aux, reduction=self.reduction, engine="autograd")
        params, part = self.arguments(rows)
        with self.running(seed):
            out = acc.update(acc.init(params), params, part, donate=True)
        return out[0] if self.has_aux else out


# Random numbers --------------------------------------------------------------------------


@contextmanager
def preserving_random(generators: Sequence[torch.Generator] = ()) -> Generator[None]:
    """All generators that can be reached have the same state afterwards as before."""
    numpy = sys.modules.get("numpy")
    python, own = random.getstate(), [g.get_state() for g in generators]
    arrays = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(arrays)
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)


def reseed(seed: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Begin all generators anew."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    for generator in generators:
        generator.manual_seed(seed)
