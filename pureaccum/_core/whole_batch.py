"""A whole batch at hand: cut it, accumulate it, divide once.

A batch that fits into one microbatch passes through untouched: its weight is 1.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._base import dtensors, sharded_rows, trees
from .._base.torch_internals import functorch, modes
from . import (
    batches,
    coupling,
    denominators,
    engines,
    exchange,
    losses,
    reductions,
    seams,
    terms,
    weights,
    windows,
    writes,
)
from .layers import order
from .ledger import AccumState, Flow, Ledger, amounts_of, plain_sum, settle
from .sums import Kinds, Sums
from .weighted import WeightedSum


class CutBatch(NamedTuple):
    """A batch, and how it is cut into microbatches."""

    batch: batches.Batch
    size: int | list[int] | None  # the samples of each: one number for all, or one for each
    sizes: Sequence[int]  # the samples of every microbatch
    untouched: bool  # whether it fits into one microbatch, which then counts as one sample
    unit: float  # what sums of the gradients of means are multiples of: see weigh

    def parts(self) -> Iterable[tuple[trees.Tree, int, int]]:
        """Each microbatch, the samples that it holds, and the samples that its mean counts for."""
        batch, size, sizes, untouched, _ = self
        alone = untouched and sizes and not dtensors.any_sharded(batch.leaves)
        if size is None or sizes == [0] or alone:
            parts = [trees.unflatten(batch.spec, batch.leaves)]
        else:
            parts = batches.cut_batch(batch, size)
        return zip(parts, sizes, [1] * len(sizes) if untouched else sizes, strict=True)


class Accumulated(NamedTuple):
    """The sums over a batch, not yet divided."""

    state: AccumState  # of amounts; its sums are still to be multiplied by the unit
    unit: float | Tensor
    carried: Any
    aux: reductions.AuxState | None
    dtype: torch.dtype  # of the loss
    weighted: bool  # whether the loss is ``Weighted``


def question_about(cut: CutBatch, rule: seams.Rule, caller: str) -> coupling.Question | None:
    """What a loss is asked about a batch, if that is cut."""
    batch, size, sizes, untouched, _ = cut
    if size is None or untouched or not sizes:
        return None
    return coupling.question_of(batch, rule, caller, sizes[0], len(sizes))


def read_cut(
    batch: trees.Tree,
    size: int | list[int] | None,
    has_aux: bool,
    root: str = "args",
    *,
    alone: bool = True,
) -> CutBatch:
    """Check a batch that is to be cut into microbatches of ``size`` samples.

    ``alone`` says that no other rank has samples of the same batch.
    """
    flat = batches.read_batch(batch, root)
    rows = flat.rows or 0 if size is None else batches.rows_to_cut(flat, root)
    if size is not None and rows == 0 and has_aux:
        raise ValueError(
            "the batch has no samples, so the loss is never called and there is no aux; expected "
            "at least one sample, because has_aux=True."
        )
    sizes = [rows] if size is None else batches.sizes_of_batch(rows, size)
    untouched = alone and len(sizes) <= 1
    most = 1 if untouched else size if isinstance(size, int) else max(sizes, default=1)
    # Where all samples are a power of two, the sums are the gradients: nothing is left to divide
    # by.
    unit = weights.power_of_two(most if untouched or rows != weights.power_of_two(rows) else rows)
    return CutBatch(batch=flat, size=size, sizes=sizes, untouched=untouched, unit=unit)


def not_cut(batch: trees.Tree) -> CutBatch:
    """A batch that is taken as it is, and need not have samples."""
    flat = batches.read_microbatch(batch, "args")
    return CutBatch(batch=flat, size=None, sizes=[flat.rows or 0], untouched=True, unit=1.0)


def means(
    sums: Accumulated, leaves: list[Tensor], reduction: losses.Reduction
) -> tuple[list[Tensor], Tensor, trees.Tree]:
    """Gradients in the dtypes of the leaves, the value in that of the loss, and the reduced aux."""
    state = sums.state
    by = losses.divisor(state.weight, plain_sum(state, reduction))
    own = modes.may_add_in_place()  # the sums are the engine's
    grads = weights.divided(dtensors.resolved(state.grads), by / sums.unit, own=own)
    grads = [grad.to(leaf.dtype) for grad, leaf in zip(grads, leaves, strict=True)]
    value = trees.scalar(losses.mean_value(state.total, by), sums.dtype, leaves[0].device)
    return grads, value, None if sums.aux is None else reductions.finish_aux(sums.aux)


def accumulate(
    loss: windows.GuardedLoss, cut: CutBatch, window: seams.Window, kinds: Kinds, flow: Flow
) -> Accumulated:
    """The sums over all microbatches; of the window only what the batch decides is put in here."""
    rule, leaves = window.rule, loss.given[0].leaves
    window = window._replace(unit=cut.unit if rule.reduction == "mean" else 1.0)
    if rule.has_aux and len(cut.sizes) > 1 and dtensors.any_sharded(cut.batch.leaves):
        flow = flow._replace(over=sharded_rows.rows_over(cut.batch.leaves))
    summed = partial(_summed, loss, cut, window, kinds, flow)
    looks = leaves[0].device.type == "cpu" and not modes.transform_active()

    def sums(whole: denominators.Known) -> Entered:
        if rule.nonfinite == "skip" and looks and not isinstance(whole, (Tensor, list)):
            return speculating(partial(summed, whole), rule)
        return summed(whole, rule)

    if flow.whole is not None:
        return sums(flow.whole)[0]
    # of a batch in one piece the weights are known, unless a transform outside follows them
    if cut.untouched and not functorch.transform_depth() and not functorch.forward_ad_active():
        return sums("alone")[0]

    def count() -> list[weights.Microbatch]:
        own = rule._replace(nonfinite="propagate", squares=False, scaled=False)
        unasked = loss._replace(asks=writes.Asks())
        return _summed(unasked, cut, window, None, flow, "counted", order.check_rule(own))[1]

    return denominators.summed(sums, count, loss, flow.of_all_ranks, skips=rule.nonfinite == "skip")


Entered = tuple[Accumulated, list[weights.Microbatch]]


def _summed(
    loss: windows.GuardedLoss,
    cut: CutBatch,
    window: seams.Window,
    kinds: Kinds | None,
    flow: Flow,
    whole: denominators.Known,
    rule: seams.Rule,
) -> Entered:
    """The sums over all microbatches, and their entries; without ``kinds`` nothing is summed."""
    root, leaves, spec = loss.given[0]
    # What is skipped must not be NaN to a transform either, if it is a part of what counts.
    at_once = cut.size is None and (rule.nonfinite != "skip" or cut.untouched)

    def run(way: engines.Way) -> tuple[Ledger, list[Tensor]]:
        ledger, sums = Ledger(rule, flow), None if kinds is None else Sums(way.leaves, kinds)

        def name(leaf: int | None) -> str:
            what = (
                "the loss" if leaf is None else f"the gradient of {trees.paths(spec, root)[leaf]}"
            )
            i = len(ledger.entries)
            return f"{what} of microbatch {i} (from sample {sum(cut.sizes[:i])})"

        about = window._replace(rule=rule, name=name)
        with (
            writes.guarding(loss.known, *loss.given, asks=loss.asks) as guarded,
            batches.cutting(len(cut.sizes), sized=cut.size is not None),
        ):
            call = guarded(loss.call)
            if sums is None:
                add = windows.reader(call, loss.known, about, way)
            else:
                add = windows.adder(call, loss.known, about, sums, way, whole=at_once)
            for part, rows, counts in cut.parts():
                portion = seams.Portion(
                    tree=part,
                    rows=rows,
                    carried=ledger.flow.carried,
                    counts=counts,
                    whole=whole[len(ledger.entries)] if isinstance(whole, list) else whole,
                )
                try:
                    with modes.named_range("microbatch"):
                        ledger.enter(add(portion), rows)
                except Exception as error:
                    windows.add_place(error, name(None), rows, loss.given)
                    raise
        return ledger, [] if sums is None else sums.all()

    ledger, sums = windows.run_window(run, leaves, rule.engine, loss.known)
    if kinds is None:
        return cast(Any, None), ledger.entries
    last = ledger.entries[-1] if ledger.entries else None
    state = amounts_of(ledger.entries, rule, dtensors.closed(sums, kinds.layouts))
    if last is None and isinstance(whole, Tensor):  # what other ranks have is of this shape
        state = state._replace(weight=torch.zeros_like(whole))
    came = Accumulated(
        state=state,
        unit=window.unit or 1.0,
        carried=ledger.flow.carried,
        aux=ledger.flow.aux,
        dtype=torch.get_default_dtype() if last is None else last.dtype,
        weighted=False if last is None else last.weighted,
    )
    return came, ledger.entries


def speculating(summed: Callable[[seams.Rule], Entered], rule: seams.Rule) -> Entered:
    """Skip without a gradient tree for each microbatch: inf and NaN never leave a sum.

    So add everything, look once at the end, and only where something is wrong do it again the
    careful way, with the same random numbers.
    """
    random = torch.get_rng_state()
    with exchange.inside_of(exchange.onlooker()) as around:
        came = summed(order.check_rule(rule._replace(nonfinite="propagate")))
    state = came[0].state
    grads, layouts = dtensors.opened(state.grads)
    good = bool(trees.known(trees.all_finite_of(grads, layouts) & trees.is_finite(state.total)))
    if around.group is not None:  # the loss waits for other ranks, which have to run it again too
        good = not exchange.any_rank([not good], grads[0].device, around.group)[0]
    if good:
        return came
    del came, state, grads
    torch.set_rng_state(random)
    return summed(rule)


def evaluate(
    outs: Iterable[tuple[Any, int, int | None]], rule: seams.Rule, aux_reduction: trees.Tree
) -> Any:
    """The value over all microbatches, and the reduced aux if there is any, without gradients.

    ``outs`` are what the loss returns for each, the samples it holds, and those its mean counts
    for.
    """
    ledger = Ledger(rule, Flow(aux_reduction=aux_reduction))
    detach = None if modes.transform_active() else engines.detached
    way = engines.Way(forward=engines.by_func, leaves=[], detach=detach)
    each: list[Tensor] = []  # of a sum of Weighted, the totals and weights of its terms
    for out, rows, counts in outs:
        if isinstance(loss := losses.loss_in(out, rule.has_aux), WeightedSum):
            pair = terms.taken_apart(loss)[0]
            each.append(pair if detach is None else detach(pair))
            if each[-1].shape != each[0].shape:
                raise terms.other_terms(each[-1].shape[1], each[0].shape[1])
        seen, shape = losses.read(out, rule.has_aux, whole="counted")
        seen = engines.outside(seen, way)
        entry = weights.enter(seen, shape, counts, rule.reduction)
        ledger.enter(entry._replace(aux=losses.join_aux(seen.aux, shape)), rows)
    if not (entries := ledger.entries):
        value = torch.tensor(0.0 if rule.reduction == "sum" else torch.nan)
        return (value, None) if rule.has_aux else value
    if each and len(each) < len(entries):
        raise terms.other_terms(1, each[0].shape[1])
    total, weight, _ = settle(entries, rule)
    if each:
        total, weight = terms.sum_of_means(torch.stack(each).sum(0)), 1.0
    by = losses.divisor(weight, rule.reduction == "sum" and not entries[-1].weighted)
    value = trees.scalar(losses.mean_value(total, by), entries[-1].dtype, entries[-1].value.device)
    return value if ledger.flow.aux is None else (value, reductions.finish_aux(ledger.flow.aux))
