"""A whole batch at hand: cut it, accumulate it, divide once.

A batch that fits into one microbatch passes through untouched: its weight is 1.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base.dtensors import NOWHERE, any_sharded, closed, opened, resolved, rows_over
from .._base.torch_internals import may_write, transform_active
from .._base.trees import (
    Tree,
    all_finite_of,
    is_finite,
    known,
    paths,
    scalar,
    unflatten,
    zeros_for_sums,
)
from .accumulator import AccumState, amounts_of, plain_sum
from .batches import Batch, cut_batch, cutting, read_batch, rows_to_cut, sizes_of_batch
from .coupling import FEW, LossOfPart, Question
from .engines import Wrt, alone, as_they_are, detached, prepare, run_window
from .exchange import any_rank, inside_of, onlooker
from .loss import Reduction, divisor, mean_value, read
from .microbatch_gradient import Rule, add_microbatch
from .reductions import AuxState, finish_aux, fold_aux
from .weights import Microbatch, divided, enter, power_of_two, settle
from .writes import Given, Known, guarding


class CutBatch(NamedTuple):
    """A batch, and how it is cut into microbatches."""

    batch: Batch
    size: int | list[int] | None  # the rows of each: one number for all, or one for each
    sizes: Sequence[int]  # the rows of every microbatch
    untouched: bool  # whether it fits into one microbatch, which then counts as one row
    unit: float  # what sums of the gradients of means are multiples of: see weigh

    def parts(self) -> Iterable[tuple[Tree, int, int]]:
        """Each microbatch, the rows that it holds, and the rows that its mean counts for."""
        batch, size, sizes, untouched, _ = self
        if untouched and sizes and not any_sharded(batch.leaves):
            return [(unflatten(batch.spec, batch.leaves), sizes[0], 1)]
        if size is None or sizes == [0]:
            parts = [unflatten(batch.spec, batch.leaves)]
        else:
            parts = cut_batch(batch, size)
        return zip(parts, sizes, [1] * len(sizes) if untouched else sizes, strict=True)


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
    beside: tuple[Given, ...] = ()  # what else the loss is given
    scale: Tensor | None = None  # of the loss
    check: bool = False  # whether the loss is asked if it may be cut: see coupling.py
    alone: bool = False  # whether the sums are divided, and not added to those of other ranks
    carried: Any = ()  # what goes from one microbatch to the next
    aux: AuxState | None = None  # what was reduced before
    advance: Callable[[Any, Microbatch, int], tuple[Any, Microbatch]] | None = None

    def given(self) -> tuple[tuple[Given, ...], Question | None]:
        """What the loss is given, if the batch is at hand, and what it is asked if that is cut."""
        if not isinstance(self.batch, CutBatch):
            return (), None
        batch, size, sizes, untouched, _ = self.batch
        leaves = Given(self.roots[0], self.leaves, self.spec)
        given = leaves, *self.beside, Given(self.roots[1], batch.leaves, batch.spec)
        if not self.check or size is None or untouched or not sizes:
            return given, None
        few = min(sizes[0], FEW) if type(sizes[0]) is int else FEW
        return given, Question(batch, len(sizes), (self.rule.has_aux, self.rule.reduction, few))


class Accumulated(NamedTuple):
    """The sums over a batch, not yet divided."""

    state: AccumState  # of amounts; its sums are still to be multiplied by the unit
    unit: float | Tensor
    carried: Any
    aux: AuxState | None
    dtype: torch.dtype  # of the loss
    weighted: bool  # whether the loss is ``Weighted``


def read_cut(
    batch: Tree,
    size: int | list[int] | None,
    has_aux: bool,
    root: str = "args",
    *,
    alone: bool = True,
) -> CutBatch:
    """Check a batch that is to be cut into microbatches of ``size`` rows.

    ``alone`` says that no other rank has rows of the same batch.
    """
    flat = read_batch(batch, root)
    rows = flat.rows or 0 if size is None else rows_to_cut(flat, root)
    if size is not None and rows == 0 and has_aux:
        raise ValueError(
            "the batch has no rows, so the loss is never called and there is no aux to return; "
            "has_aux=True needs one row at least."
        )
    sizes = [rows] if size is None else sizes_of_batch(rows, size)
    untouched = alone and len(sizes) <= 1
    most = 1 if untouched else size if isinstance(size, int) else max(sizes, default=1)
    # Where all rows are a power of two, the sums are the gradients: nothing is left to divide by.
    unit = power_of_two(most if untouched or rows != power_of_two(rows) else rows)
    return CutBatch(batch=flat, size=size, sizes=sizes, untouched=untouched, unit=unit)


def means(
    sums: Accumulated, leaves: list[Tensor], reduction: Reduction
) -> tuple[list[Tensor], Tensor, Tree]:
    """Gradients in the dtypes of the leaves, the value in that of the loss, and the reduced aux."""
    state = sums.state
    by = divisor(state.weight, plain_sum(state, reduction))
    own = may_write()  # the sums are the engine's
    grads = divided(resolved(state.grads), by / sums.unit, own=own)
    grads = [grad.to(leaf.dtype) for grad, leaf in zip(grads, leaves, strict=True)]
    value = scalar(mean_value(state.total, by), sums.dtype, leaves[0].device)
    return grads, value, None if sums.aux is None else finish_aux(sums.aux)


def accumulate(job: Accumulation) -> Accumulated:
    """The sums over all microbatches."""
    on_cpu = job.leaves[0].device.type == "cpu"
    if job.rule.nonfinite == "skip" and on_cpu and not transform_active():
        return _speculate(job)
    return _accumulate(job)


def evaluate(
    outs: Iterable[tuple[Any, int, int | None]], rule: Rule, aux_reduction: Tree
) -> tuple[Tensor, Tree]:
    """The value and the reduced aux over all microbatches, without gradients.

    Args:
        outs: What the loss returns for each microbatch, the rows that it holds, and the rows that
            its mean counts for.
        rule: How the values are summed.
        aux_reduction: What becomes of aux.
    """
    seen: list[Microbatch] = []
    aux: AuxState | None = None
    wrt = as_they_are([])._replace(detach=None if transform_active() else detached)
    for out, rows, counts in outs:
        seen_, shape = read(out, rule.has_aux)
        entry = enter(alone(seen_, wrt), shape, counts, rule.reduction)
        seen.append(entry._replace(aux=()))
        if rule.has_aux:
            aux = fold_aux(aux, entry, rows, aux_reduction, skipping=False)
    if not seen:
        return torch.tensor(0.0 if rule.reduction == "sum" else torch.nan), None
    total, weight, _ = settle(seen)
    by = divisor(weight, rule.reduction == "sum" and not seen[-1].weighted)
    value = scalar(mean_value(total, by), seen[-1].dtype, seen[-1].value.device)
    return value, None if aux is None else finish_aux(aux)


def _speculate(job: Accumulation) -> Accumulated:
    """Skip without a gradient tree for each microbatch: inf and NaN never leave a sum.

    So add everything, look once at the end, and only where something is wrong do it again the
    careful way, with the same random numbers.
    """
    random = torch.get_rng_state()
    with inside_of(onlooker()) as around:
        sums = _accumulate(job._replace(rule=job.rule._replace(nonfinite="propagate")))
    good = all_finite_of(*opened(sums.state.grads)) & is_finite(sums.state.total)
    good = bool(known(good))
    if around.group is not None:  # the loss waits for other ranks, which have to run it again too
        good = not any_rank([not good], job.leaves[0].device, around.group)[0]
    if good:
        return sums
    del sums
    torch.set_rng_state(random)
    return _accumulate(job)


def _accumulate(job: Accumulation) -> Accumulated:
    leaves, batch, rule = job.leaves, job.batch, job.rule
    unit = batch.unit if rule.reduction == "mean" else 1.0
    over = NOWHERE
    if isinstance(batch, CutBatch) and rule.has_aux and any_sharded(batch.batch.leaves):
        over = rows_over(batch.batch.leaves) if len(batch.sizes) > 1 else NOWHERE
    wrt = prepare(leaves, rule.engine, job.known)
    # What is skipped must not be NaN to a transform either, if it is a part of what counts.
    whole = batch.size is None and (rule.nonfinite != "skip" or batch.untouched)
    wrt = wrt._replace(unit=unit, scale=job.scale, at_least=job.at_least, whole=whole)
    if job.alone:
        wrt = wrt._replace(rows=1.0 if batch.untouched else float(sum(batch.sizes)))
    seen: list[Microbatch] = []

    def label(leaf: int | None) -> str:
        names = paths(job.spec, job.roots[0])
        what = "the loss" if leaf is None else f"the gradient of {names[leaf]}"
        i = len(seen)
        return f"{what} of microbatch {i} (from row {sum(batch.sizes[:i])})"

    def window(wrt: Wrt) -> tuple[list[Tensor], Any, AuxState | None]:
        seen.clear()
        sums: list[Tensor] = []  # the first microbatch begins them
        carried: Any = job.carried
        aux = job.aux
        cut_here = cutting(len(batch.sizes), sized=batch.size is not None)
        given, question = job.given()
        with guarding(job.known, *given, question=question) as guarded, cut_here:
            loss = guarded(job.call)
            for part, rows, counts in batch.parts():
                sums, entry = add_microbatch(
                    loss, (part, rows, carried), wrt, sums, counts, rule, label=label
                )
                if job.advance is not None:
                    carried, entry = job.advance(carried, entry, rows)
                if rule.has_aux:
                    skipping = rule.nonfinite == "skip"
                    aux = fold_aux(aux, entry, rows, job.aux_reduction, skipping, over)
                    entry = entry._replace(aux=())
                seen.append(entry)
        if len(sums) == 0:  # nothing was added
            sums = zeros_for_sums(leaves, job.at_least)
        return sums, carried, aux

    sums, carried, aux = run_window(window, wrt)
    sums = closed(sums, wrt.layouts)
    return Accumulated(
        state=amounts_of(seen, rule, sums),
        unit=unit,
        carried=carried,
        aux=aux,
        dtype=seen[-1].dtype if seen else torch.get_default_dtype(),
        weighted=seen[-1].weighted if seen else False,  # no bool(seen): torch 2.11 compiles none
    )
