"""A whole batch at hand: cut it, accumulate it, divide once.

A batch that fits into one microbatch passes through untouched: its weight is 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import (
    Tree,
    all_finite,
    closed,
    known,
    opened,
    paths,
    resolved,
    transform_active,
    unflatten,
    zeros,
)
from .accumulator import AccumState, counted, empty, plain_sum
from .batches import Batch, cut, cutting, read_batch, rows_to_cut, sizes_of, sizes_of_batch
from .engines import prepare
from .loss import Reduction, divisor, known_to_all_ranks, mean_value, read
from .microbatch_gradient import Rule, add_microbatch, check_sharded
from .reductions import AuxState, finish_aux, fold_aux
from .weights import Microbatch, divided, enter, power_of_two, settle
from .writes import Given, Known, guarding


class CutBatch(NamedTuple):
    """A batch and the rows of its microbatches: one number for all, or one for each."""

    batch: Batch
    size: int | list[int] | None  # None: it is not cut
    alone: bool = True  # whether no other rank has rows of the same batch

    @property
    def rows(self) -> int | None:
        """The rows of the whole batch."""
        return self.batch.rows

    @property
    def sizes(self) -> Sequence[int]:
        """The rows of every microbatch."""
        rows = self.batch.rows or 0
        return [rows] if self.size is None else sizes_of(rows, self.size)

    @property
    def untouched(self) -> bool:
        """Whether the batch fits into one microbatch, which then counts as one row."""
        if not self.alone:
            return False
        if self.size is None or isinstance(self.size, int):
            return self.size is None or self.size >= (self.batch.rows or 0)
        return len(self.size) <= 1

    @property
    def most(self) -> int:
        """The most rows that a microbatch counts for."""
        if self.untouched:
            return 1
        return self.size if isinstance(self.size, int) else max(self.sizes)

    def parts(self) -> Iterator[tuple[Tree, int, int]]:
        """Each microbatch, the rows that it holds, and the rows that its mean counts for."""
        batch, size, _ = self
        untouched = self.untouched
        parts = [unflatten(batch.spec, batch.leaves)] if size is None else cut(batch, size)
        for rows, part in zip(self.sizes, parts, strict=True):
            yield part, rows, 1 if untouched else rows


# Of leaves, a microbatch, its rows, and what is carried.
LossOfPart = Callable[[list[Tensor], Tree, int, Any], Any]


class Accumulation(NamedTuple):
    """What is to be accumulated: a loss of leaves and a microbatch, over a batch that is cut."""

    call: LossOfPart
    leaves: list[Tensor]
    spec: optree.PyTreeSpec
    batch: Any  # CutBatch, or another form of a batch that is cut, for a compiler
    rule: Rule
    at_least: torch.dtype
    aux_reduction: Tree
    known: Known  # of the loss
    roots: tuple[str, str] = ("args", "args")  # what a user calls the leaves, and the batch
    scale: Tensor | None = None  # of the loss
    carried: Any = ()  # what goes from one microbatch to the next
    advance: Callable[[Any, Microbatch, int], tuple[Any, Microbatch]] | None = None

    def given(self) -> tuple[Given, ...]:
        """What the loss is given, if the batch is at hand."""
        if not isinstance(self.batch, CutBatch):
            return ()
        batch = self.batch.batch
        return Given(self.roots[0], self.leaves, self.spec), Given(self.roots[1], *batch[:2])


class Accumulated(NamedTuple):
    """The sums over a batch, not yet divided."""

    state: AccumState  # its sums are still to be multiplied by the unit
    unit: float | Tensor
    carried: Any
    aux: Tree
    dtype: torch.dtype  # of the loss
    weighted: bool  # whether the loss is ``Weighted``


def read_cut(
    batch: Tree, size: int | list[int] | None, has_aux: bool, root: str = "args"
) -> CutBatch:
    """Check a batch that is to be cut into microbatches of ``size`` rows."""
    flat = read_batch(batch, root)
    if isinstance(size, list):
        sizes_of_batch(rows_to_cut(flat, root), size)
    if size is not None and rows_to_cut(flat, root) == 0 and has_aux:
        raise ValueError(
            "the batch has no rows, so the loss is never called and there is no aux to return; "
            "has_aux=True needs one row at least."
        )
    return CutBatch(flat, size)


def means(
    sums: Accumulated, leaves: list[Tensor], reduction: Reduction
) -> tuple[list[Tensor], Tensor, Tree]:
    """Gradients in the dtypes of the leaves, the value in that of the loss, and the reduced aux."""
    state = sums.state
    by = divisor(state.weight, plain_sum(state, reduction))
    own = not transform_active()  # the sums are the engine's
    grads = divided(resolved(state.grads), by / sums.unit, own=own)
    grads = [grad.to(leaf.dtype) for grad, leaf in zip(grads, leaves, strict=True)]
    return grads, mean_value(state.total, by).to(sums.dtype), sums.aux


def accumulate(job: Accumulation) -> Accumulated:
    """The sums over all microbatches."""
    check_sharded(job.leaves, job.rule)
    on_cpu = job.leaves[0].device.type == "cpu"
    if job.rule.nonfinite == "skip" and on_cpu and not transform_active():
        return _speculate(job)
    return _accumulate(job)


def evaluate(
    outs: Iterable[tuple[Any, int, int]], rule: Rule, aux_reduction: Tree
) -> tuple[Tensor, Tree]:
    """The value and the reduced aux over all microbatches, without gradients.

    Args:
        outs: What the loss returns for each microbatch, the rows that it holds, and the rows that
            its mean counts for. They are asked for where nothing is recorded.
        rule: How the values are summed.
        aux_reduction: What becomes of aux.
    """
    seen: list[Microbatch] = []
    aux: AuxState | None = None
    with nullcontext() if transform_active() else torch.no_grad():
        for out, rows, counts in outs:
            seen_, shape = read(out, rule.has_aux)
            entry = enter(known_to_all_ranks(seen_), shape, counts, rule.reduction)
            seen.append(entry._replace(aux=()))
            if rule.has_aux:
                aux = fold_aux(aux, entry, rows, aux_reduction, skipping=False)
        if not seen:
            return torch.tensor(0.0 if rule.reduction == "sum" else torch.nan), None
        total, weight, _ = settle(seen)
        by = divisor(weight, rule.reduction == "sum" and not seen[-1].weighted)
        value = mean_value(total, by).to(seen[-1].dtype)
        return value, None if aux is None else finish_aux(aux)


def _speculate(job: Accumulation) -> Accumulated:
    """Skip without a gradient tree for each microbatch: inf and NaN never leave a sum.

    So add everything, look once at the end, and only where something is wrong do it again the
    careful way, with the same random numbers.
    """
    random = torch.get_rng_state()
    sums = _accumulate(job._replace(rule=job.rule._replace(nonfinite="propagate")))
    if known(all_finite((sums.state.grads, sums.state.total))):
        return sums
    del sums
    torch.set_rng_state(random)
    return _accumulate(job)


def _accumulate(job: Accumulation) -> Accumulated:
    call, leaves, batch, rule = job.call, job.leaves, job.batch, job.rule
    carried, advance = job.carried, job.advance
    wrt = prepare(leaves, rule.engine, set())
    unit = power_of_two(batch.most) if rule.reduction == "mean" else 1.0
    sums, layouts = opened(zeros(leaves, job.at_least))
    straight = (
        rule.engine == "autograd"
        and rule.nonfinite == "propagate"
        and not rule.squares
        and layouts is None
        and all(x.dtype == sum_.dtype for x, sum_ in zip(leaves, sums, strict=True))
    )
    # Compilers share what is alike by themselves.
    cotangents: dict[float, Tensor] | None = None if torch.compiler.is_dynamo_compiling() else {}
    wrt = wrt._replace(unit=unit, cotangents=cotangents, scale=job.scale, straight=straight)
    seen: list[Microbatch] = []
    aux: AuxState | None = None
    with guarding(job.known, *job.given()) as guarded, cutting(not batch.untouched):
        for i, (part, rows, counts) in enumerate(batch.parts()):

            def loss(
                leaves: list[Tensor], part: Tree = part, rows: int = rows, carried: Any = carried
            ) -> Any:
                return call(leaves, part, rows, carried)

            def label(leaf: int | None, i: int = i) -> str:
                names = paths(job.spec, job.roots[0])
                what = "the loss" if leaf is None else f"the gradient of {names[leaf]}"
                return f"{what} of microbatch {i} (from row {sum(batch.sizes[:i])})"

            sums, entry = add_microbatch(guarded(loss), wrt, sums, counts, rule, label=label)
            if advance is not None:
                carried, entry = advance(carried, entry, rows)
            if rule.has_aux:
                aux = fold_aux(aux, entry, rows, job.aux_reduction, rule.nonfinite == "skip")
                entry = entry._replace(aux=())
            seen.append(entry)
    sums = closed(sums, layouts)
    state = empty(sums, leaves[0].device, len(sums) if rule.squares else None)
    return Accumulated(
        state=counted(state, seen, rule, sums) if seen else state,
        unit=unit,
        carried=carried,
        aux=None if aux is None else finish_aux(aux),
        dtype=seen[-1].dtype if seen else torch.get_default_dtype(),
        weighted=seen[-1].weighted if seen else False,  # no bool(seen): torch 2.11 compiles none
    )
