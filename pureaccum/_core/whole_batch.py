"""A whole batch at hand: cut it, accumulate it, divide once.

A batch that fits into one microbatch passes through untouched: its weight is 1.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.dtensors import any_sharded, closed, opened, resolved
from .._base.sharded_rows import rows_over
from .._base.torch_internals.modes import may_add_in_place, transform_active
from .._base.trees import Tree, all_finite_of, is_finite, known, paths, scalar, unflatten
from .batches import (
    Batch,
    cut_batch,
    cutting,
    read_batch,
    read_microbatch,
    rows_to_cut,
    sizes_of_batch,
)
from .coupling import Question, question_of
from .engines import Way, by_func, detached, outside
from .exchange import any_rank, inside_of, onlooker
from .layers.order import check_rule
from .ledger import AccumState, Flow, Ledger, amounts_of, plain_sum, settle
from .losses import Reduction, divisor, join_aux, mean_value, read
from .reductions import AuxState, finish_aux
from .seams import Portion, Rule, Window
from .sums import Kinds, Sums
from .weights import divided, enter, power_of_two
from .windows import GuardedLoss, adder, run_window
from .writes import guarding


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
        alone = untouched and sizes and not any_sharded(batch.leaves)
        if size is None or sizes == [0] or alone:
            parts = [unflatten(batch.spec, batch.leaves)]
        else:
            parts = cut_batch(batch, size)
        return zip(parts, sizes, [1] * len(sizes) if untouched else sizes, strict=True)


class Accumulated(NamedTuple):
    """The sums over a batch, not yet divided."""

    state: AccumState  # of amounts; its sums are still to be multiplied by the unit
    unit: float | Tensor
    carried: Any
    aux: AuxState | None
    dtype: torch.dtype  # of the loss
    weighted: bool  # whether the loss is ``Weighted``


def question_about(cut: CutBatch, rule: Rule) -> Question | None:
    """What a loss is asked about a batch, if that is cut."""
    batch, size, sizes, untouched, _ = cut
    if size is None or untouched or not sizes:
        return None
    return question_of(batch, rule, sizes[0], len(sizes))


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


def not_cut(batch: Tree) -> CutBatch:
    """A batch that is taken as it is, and need not have rows."""
    flat = read_microbatch(batch, "args")
    return CutBatch(batch=flat, size=None, sizes=[flat.rows or 0], untouched=True, unit=1.0)


def means(
    sums: Accumulated, leaves: list[Tensor], reduction: Reduction
) -> tuple[list[Tensor], Tensor, Tree]:
    """Gradients in the dtypes of the leaves, the value in that of the loss, and the reduced aux."""
    state = sums.state
    by = divisor(state.weight, plain_sum(state, reduction))
    own = may_add_in_place()  # the sums are the engine's
    grads = divided(resolved(state.grads), by / sums.unit, own=own)
    grads = [grad.to(leaf.dtype) for grad, leaf in zip(grads, leaves, strict=True)]
    value = scalar(mean_value(state.total, by), sums.dtype, leaves[0].device)
    return grads, value, None if sums.aux is None else finish_aux(sums.aux)


def accumulate(
    loss: GuardedLoss, cut: CutBatch, window: Window, kinds: Kinds, flow: Flow
) -> Accumulated:
    """The sums over all microbatches; of the window only what the batch decides is put in here."""
    rule, leaves = window.rule, loss.given[0].leaves
    window = window._replace(unit=cut.unit if rule.reduction == "mean" else 1.0)
    if rule.has_aux and len(cut.sizes) > 1 and any_sharded(cut.batch.leaves):
        flow = flow._replace(over=rows_over(cut.batch.leaves))
    summed = partial(_summed, loss, cut, window, kinds, flow)
    if rule.nonfinite != "skip" or leaves[0].device.type != "cpu" or transform_active():
        return summed(rule)
    return speculating(summed, rule)


def _summed(
    loss: GuardedLoss, cut: CutBatch, window: Window, kinds: Kinds, flow: Flow, rule: Rule
) -> Accumulated:
    root, leaves, spec = loss.given[0]
    # What is skipped must not be NaN to a transform either, if it is a part of what counts.
    whole = cut.size is None and (rule.nonfinite != "skip" or cut.untouched)

    def run(way: Way) -> tuple[Ledger, list[Tensor]]:
        ledger, sums = Ledger(rule, flow), Sums(way.leaves, kinds)

        def name(leaf: int | None) -> str:
            what = "the loss" if leaf is None else f"the gradient of {paths(spec, root)[leaf]}"
            i = len(ledger.entries)
            return f"{what} of microbatch {i} (from row {sum(cut.sizes[:i])})"

        about = window._replace(rule=rule, name=name)
        guard = guarding(loss.known, *loss.given, question=loss.question)
        with guard as guarded, cutting(len(cut.sizes), sized=cut.size is not None):
            add = adder(guarded(loss.call), loss.known, about, sums, way, whole=whole)
            for part, rows, counts in cut.parts():
                ledger.enter(add(Portion(part, rows, ledger.flow.carried, counts)), rows)
        return ledger, sums.all()

    ledger, sums = run_window(run, leaves, rule.engine, loss.known)
    last = ledger.entries[-1] if ledger.entries else None
    return Accumulated(
        state=amounts_of(ledger.entries, rule, closed(sums, kinds.layouts)),
        unit=window.unit or 1.0,
        carried=ledger.flow.carried,
        aux=ledger.flow.aux,
        dtype=torch.get_default_dtype() if last is None else last.dtype,
        weighted=False if last is None else last.weighted,
    )


def speculating(summed: Callable[[Rule], Accumulated], rule: Rule) -> Accumulated:
    """Skip without a gradient tree for each microbatch: inf and NaN never leave a sum.

    So add everything, look once at the end, and only where something is wrong do it again the
    careful way, with the same random numbers.
    """
    random = torch.get_rng_state()
    with inside_of(onlooker()) as around:
        sums = summed(check_rule(rule._replace(nonfinite="propagate")))
    grads, layouts = opened(sums.state.grads)
    good = bool(known(all_finite_of(grads, layouts) & is_finite(sums.state.total)))
    if around.group is not None:  # the loss waits for other ranks, which have to run it again too
        good = not any_rank([not good], grads[0].device, around.group)[0]
    if good:
        return sums
    del sums, grads
    torch.set_rng_state(random)
    return summed(rule)


def evaluate(outs: Iterable[tuple[Any, int, int | None]], rule: Rule, aux_reduction: Tree) -> Any:
    """The value over all microbatches, and the reduced aux if there is any, without gradients.

    ``outs`` are what the loss returns for each, the rows it holds, and those its mean counts for.
    """
    ledger = Ledger(rule, Flow(aux_reduction=aux_reduction))
    detach = None if transform_active() else detached
    way = Way(forward=by_func, leaves=[], detach=detach)
    for out, rows, counts in outs:
        seen, shape = read(out, rule.has_aux)
        seen = outside(seen, way)
        entry = enter(seen, shape, counts, rule.reduction)
        ledger.enter(entry._replace(aux=join_aux(seen.aux, shape)), rows)
    if not (entries := ledger.entries):
        value = torch.tensor(0.0 if rule.reduction == "sum" else torch.nan)
        return (value, None) if rule.has_aux else value
    total, weight, _ = settle(entries, rule)
    by = divisor(weight, rule.reduction == "sum" and not entries[-1].weighted)
    value = scalar(mean_value(total, by), entries[-1].dtype, entries[-1].value.device)
    return value if ledger.flow.aux is None else (value, finish_aux(ledger.flow.aux))
