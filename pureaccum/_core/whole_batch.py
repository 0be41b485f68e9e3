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
    """A batch and the rows of its microbatches, one number for all or each its own."""

    batch: Batch
    size: int | list[int] | None  # None: it is not cut
    alone: bool = True  # whether there are no rows beside these, on another rank

    @property
    def rows(self) -> int | None:
        """Of the whole batch."""
        return self.batch.rows

    @property
    def sizes(self) -> Sequence[int]:
        """The rows of every microbatch."""
        rows = self.batch.rows or 0
        return [rows] if self.size is None else sizes_of(rows, self.size)

    @property
    def untouched(self) -> bool:
        """Whether it fits into one microbatch."""
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
        whole = [unflatten(batch.spec, batch.leaves)]
        parts = whole if size is None else cut(batch, size)
        for rows, part in zip(self.sizes, parts, strict=True):
            yield part, rows, 1 if self.untouched else rows


class BatchInParts(NamedTuple):
    """A batch that came in microbatches of ``size`` rows, the last one perhaps shorter.

    Compiled code is given this: its graph does not hold the number of rows of a whole batch.
    """

    pieces: list[Tree]
    size: int | None
    untouched: bool  # there is but one

    @property
    def rows(self) -> int | None:
        """Of the whole batch, where there is but one microbatch."""
        return read_batch(self.pieces[0]).rows

    @property
    def most(self) -> int:
        """The most rows that a microbatch counts for."""
        return 1 if self.size is None or self.untouched else self.size

    def parts(self) -> Iterator[tuple[Tree, int, int]]:
        """As of a ``Cut``."""
        for part in self.pieces:
            rows = read_batch(part).rows or 0
            yield part, rows, 1 if self.untouched else rows


LossOfPart = Callable[
    [list[Tensor], Tree, Any], Any
]  # a loss: leaves, a microbatch, what is carried


class Accumulation(NamedTuple):
    """What is accumulated: a loss as a function of leaves and a microbatch, over a cut batch."""

    call: LossOfPart
    leaves: list[Tensor]
    spec: optree.PyTreeSpec
    batch: Any  # CutBatch or BatchInParts; of a scan, Stacked
    rule: Rule
    at_least: torch.dtype
    aux_reduction: Tree
    known: Known  # of the loss
    roots: tuple[str, str] = ("args", "args")  # what a user calls the leaves, and the batch
    scale: Tensor | None = None  # of the loss
    carried: Any = ()  # what goes from one microbatch to the next
    advance: Callable[[Any, Microbatch, int], tuple[Any, Microbatch]] | None = None

    def given(self) -> tuple[Given, ...]:
        """What the loss is given, where the batch is at hand."""
        if not isinstance(self.batch, CutBatch):
            return ()
        batch = self.batch.batch
        return Given(self.roots[0], self.leaves, self.spec), Given(self.roots[1], *batch[:2])


class Accumulated(NamedTuple):
    """A window as accumulated, not yet divided."""

    state: AccumState  # its sums still to be multiplied by the unit
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
    folded: Accumulated, leaves: list[Tensor], reduction: Reduction
) -> tuple[list[Tensor], Tensor, Tree]:
    """Gradients in the dtypes of the leaves, value in that of the loss, and the reduced aux."""
    state, unit, _, aux, dtype, _ = folded
    by = divisor(state.weight, plain_sum(state, reduction))
    own = not transform_active()  # the sums are the engine's
    grads = divided(resolved(state.grads), by / unit, own=own)
    grads = [grad.to(leaf.dtype) for grad, leaf in zip(grads, leaves, strict=True)]
    return grads, mean_value(state.total, by).to(dtype), aux


def fold(window: Accumulation) -> Accumulated:
    """All microbatches, summed and not yet divided."""
    check_sharded(window.leaves, window.rule)
    on_cpu = window.leaves[0].device.type == "cpu"
    if window.rule.nonfinite == "skip" and on_cpu and not transform_active():
        return _speculate(window)
    return _fold_all(window)


def evaluate(
    outs: Iterable[tuple[Any, int, int]], rule: Rule, aux_reduction: Tree
) -> tuple[Tensor, Tree]:
    """The same without gradients: the value and the reduced aux.

    Args:
        outs: What the loss returns for each microbatch, the rows that it holds, and the rows that
            its mean counts for. They are asked for where nothing is recorded.
        rule: As for a window.
        aux_reduction: As for a window.
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


def _speculate(window: Accumulation) -> Accumulated:
    """Skip without a gradient tree of its own: inf and NaN never leave a sum.

    So add everything, look once at the end, and only where something is wrong do it again the
    careful way, with the same random numbers.
    """
    random = torch.get_rng_state()
    rule = window.rule._replace(nonfinite="propagate")
    folded = _fold_all(window._replace(rule=rule))
    if known(all_finite((folded.state.grads, folded.state.total))):
        return folded
    del folded
    torch.set_rng_state(random)
    return _fold_all(window)


def _fold_all(window: Accumulation) -> Accumulated:
    call, leaves, spec, batch = window.call, window.leaves, window.spec, window.batch
    rule, aux_reduction = window.rule, window.aux_reduction
    carried, advance = window.carried, window.advance
    wrt = prepare(leaves, rule.engine, set())
    unit = power_of_two(batch.most) if rule.reduction == "mean" else 1.0
    sums, layouts = opened(zeros(leaves, window.at_least))
    straight = (
        rule.engine == "autograd"
        and rule.nonfinite == "propagate"
        and not rule.squares
        and layouts is None
        and all(x.dtype == sum_.dtype for x, sum_ in zip(leaves, sums, strict=True))
    )
    # Compilers share what is alike by themselves.
    cotangents: dict[float, Tensor] | None = None if torch.compiler.is_dynamo_compiling() else {}
    wrt = wrt._replace(unit=unit, cotangents=cotangents, scale=window.scale, straight=straight)
    seen: list[Microbatch] = []
    aux: AuxState | None = None
    with guarding(window.known, *window.given()) as guarded, cutting(not batch.untouched):
        for i, (part, rows, counts) in enumerate(batch.parts()):

            def loss(leaves: list[Tensor], part: Tree = part, carried: Any = carried) -> Any:
                return call(leaves, part, carried)

            def label(leaf: int | None, i: int = i) -> str:
                root = window.roots[0]
                what = "the loss" if leaf is None else f"the gradient of {paths(spec, root)[leaf]}"
                return f"{what} of microbatch {i} (from row {sum(batch.sizes[:i])})"

            sums, entry = add_microbatch(guarded(loss), wrt, sums, counts, rule, label=label)
            if advance is not None:
                carried, entry = advance(carried, entry, rows)
            if rule.has_aux:
                aux = fold_aux(aux, entry, rows, aux_reduction, rule.nonfinite == "skip")
                entry = entry._replace(aux=())
            seen.append(entry)
    sums = closed(sums, layouts)
    state = empty(sums, leaves[0].device, len(sums) if rule.squares else None)
    if not seen:
        return Accumulated(state, unit, carried, None, torch.get_default_dtype(), False)
    aux_tree = None if aux is None else finish_aux(aux)
    state, last = counted(state, seen, rule), seen[-1]
    return Accumulated(state, unit, carried, aux_tree, last.dtype, last.weighted)
