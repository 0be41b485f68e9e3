"""A loss as a check calls it: on some samples, in some dtype, leaving nothing behind.

    samples of the batch -> the sums that an accumulator holds after this microbatch

After each call, everything that the loss wrote to or assigned is restored. Each call starts with
different random numbers, so a loss that draws cannot hide it.

In a dtype other than its own, every floating-point number that the loss touches is cast to that
dtype, which is also the default dtype.
"""

import itertools
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ..._base import deterministic, observation, trees
from ..._core import batches, ledger, losses, precision, terms, writes
from ..._core.accumulator import accumulator
from . import report
from .kept import Kept


class Setting(NamedTuple):
    """In what a loss is called."""

    dtype: torch.dtype | None = None  # None: each tensor in its own
    without: frozenset[str] = frozenset()  # names of functions that are left out
    generators: Sequence[torch.Generator] = ()  # the loss's own


class Subject(NamedTuple):
    """A loss and its arguments."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: batches.Batch
    seeds: Iterator[int]  # of the random numbers of each call
    has_aux: bool = False
    reduction: losses.Reduction = "mean"
    weighted: bool = False  # whether it returns Weighted
    kept: Kept = Kept()  # what the loss changes of what it holds, and what was there
    setting: Setting = Setting()

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.batch.rows or 0

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which the loss is called, if that is not each tensor's own."""
        return self.setting.dtype

    def in_dtype(self, dtype: torch.dtype) -> "Subject":
        """The same loss in another dtype, its data cast once."""
        batch = self.batch._replace(leaves=deterministic.cast_tree(self.batch.leaves, dtype))
        setting = self.setting._replace(dtype=dtype)
        return self._replace(
            params=deterministic.cast_tree(self.params, dtype), batch=batch, setting=setting
        )

    def leaving_out(self, functions: frozenset[str]) -> "Subject":
        """The same loss, in which functions of these names return their first argument."""
        return self._replace(setting=self.setting._replace(without=functions))

    def everything(self) -> report.Indices:
        """All samples of the batch."""
        return tuple(range(self.rows))

    def arguments(self, rows: report.Indices) -> tuple[Any, Any]:
        """Parameters and some samples that the loss may write to: copies of what the caller has.

        In another dtype than their own, parameters are copies already.
        """
        at = torch.tensor(rows, dtype=torch.int64)
        columns = [
            x.detach().index_select(0, at.to(x.device)) if isinstance(x, torch.Tensor) else x
            for x in self.batch.leaves
        ]
        own = self.dtype is None
        params = trees.tree_map(lambda x: x.detach().clone() if own else x.detach(), self.params)
        return params, trees.unflatten(self.batch.spec, columns)

    @contextmanager
    def running(self, seed: int | None = None) -> Generator[None]:
        """Run what is inside in the dtype, with random numbers of its own; put back the rest."""
        seed = next(self.seeds) if seed is None else seed
        dtype, without, generators = self.setting
        mode = nullcontext() if dtype is None else computing_in(dtype, without)
        reseed(seed, generators)
        try:
            with mode, writes.unguarded():
                yield
        finally:
            self.kept.put_back()

    def sums(self, rows: report.Indices, seed: int | None = None) -> ledger.AccumState:
        """What an accumulator holds after a microbatch of these samples."""
        # autograd runs what torch.func refuses, and batch norms that write to captured buffers
        acc = accumulator(self.loss_fn, self.has_aux, reduction=self.reduction, engine="autograd")
        params, part = self.arguments(rows)
        with self.running(seed):
            out = acc.update(acc.init(params), params, part, donate=True)
        return out[0] if self.has_aux else out


def redrawn(subject: Subject, leaf: int, random: torch.Generator) -> Subject:
    """The same loss on a batch in which some samples of a leaf are zero, and one of them is not."""
    leaves = list(subject.batch.leaves)
    x: torch.Tensor = leaves[leaf]
    weigh = x.detach().reshape(subject.rows, -1).any(1).nonzero()[:, 0].cpu()
    keep = torch.randint(0, 2, (subject.rows,), generator=random)
    order = weigh[torch.randperm(len(weigh), generator=random)]
    keep[order[1:2]], keep[order[:1]] = 0, 1
    factor = keep.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1))
    leaves[leaf] = x * factor
    return subject._replace(batch=subject.batch._replace(leaves=leaves))


def one_term(loss_fn: Callable[..., Any], i: int, count: int, has_aux: bool) -> Callable[..., Any]:
    """Term ``i`` of a loss that is a sum of ``count`` ``Weighted``, as a loss."""

    def term(*args: Any) -> Any:
        out = loss_fn(*args)
        loss = out[0] if has_aux else out
        if terms.number_of(loss) != count:
            raise terms.other_terms(max(1, terms.number_of(loss)), count)
        return (loss.terms[i], out[1]) if has_aux else loss.terms[i]

    return term


# Splits ----------------------------------------------------------------------------------


def ways(rows: int, count: int, random: torch.Generator) -> list[report.Split]:
    """Halves, all but one sample, quarters, single samples; then random parts in random order."""
    everything = tuple(range(rows))
    halves, quarters, few = (
        split_at(everything, range(size, rows, size))
        for size in (-(-rows // 2), -(-rows // 4), -(-rows // 16))
    )
    found = [halves, split_at(everything, [rows - 1]), quarters, few]
    for _ in range(count):
        order = torch.randperm(rows, generator=random).tolist()
        cuts = int(torch.randint(1, min(rows, 8), (), generator=random))
        edges = 1 + torch.randperm(rows - 1, generator=random)[:cuts].sort().values
        found.append(split_at(tuple(order), edges.tolist()))
    return list(dict.fromkeys(split for split in found if len(split) > 1))


def split_at(rows: report.Indices, edges: Iterable[int]) -> report.Split:
    """Cut samples into parts that end at these edges, and one of the samples that are left."""
    ends = itertools.pairwise([0, *edges, len(rows)])
    return tuple(rows[a:b] for a, b in ends if a < b)


def uneven(rows: report.Indices) -> report.Split:
    """Three microbatches of different sizes; two, where samples are few."""
    sizes = [len(rows) // 2, len(rows) // 3] if len(rows) > 5 else [len(rows) - 1]
    return split_at(rows, itertools.accumulate(sizes))


# Random numbers --------------------------------------------------------------------------


@contextmanager
def preserving_random(generators: Sequence[torch.Generator] = ()) -> Generator[None]:
    """Leave the global generators, and these, as they were."""
    put_back, own = observation.random_states(), [g.get_state() for g in generators]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        put_back()
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)


def reseed(seed: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Begin the global generators, and these, anew."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 1 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    for generator in generators:
        generator.manual_seed(seed)


# In another dtype ------------------------------------------------------------------------


@contextmanager
def computing_in(dtype: torch.dtype, without: Iterable[str] = ()) -> Generator[None]:
    """Run what is inside in ``dtype``; functions ``without`` return their first argument."""
    default, names = torch.get_default_dtype(), frozenset(without)
    torch.set_default_dtype(dtype)
    try:
        with precision.InDtype(
            dtype, lambda name, *given: name in names and is_active(name, *given)
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled code as it is written: a compiler would trace our modes, too."""
    if "torch._dynamo" not in sys.modules:  # whose import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


# Functions that a check may leave out ----------------------------------------------------


BATCH_NORM = "batch_norm"
DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout"),
}


def is_active(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of batch_norm or dropout does what it does in training."""
    if name == BATCH_NORM:  # (input, running_mean, running_var, weight, bias, training, …)
        return bool(kwargs.get("training", args[5] if len(args) > 5 else False))
    if name in DROPOUTS:
        default = "alpha" not in name  # torch's functions do not agree
        return bool(kwargs.get("training", args[2] if len(args) > 2 else default))
    return False
