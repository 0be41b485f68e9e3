"""The ledger of a window: what its microbatches came to, as a product of commutative monoids.

    sums of gradients, total, weight, counts, squares      added
    buffers and moments, the samples so far                carried from one microbatch to the next
    aux                                                    reduced by its reductions

Each begins with nothing, is entered microbatch by microbatch, and is finished once; two of them are
merged by ``merged`` and its kin, wherever they come from: another rank, a file.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import isfinite
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import checks, dtensors, sharded_rows, states, trees
from .._base.torch_internals import modes
from . import losses, reductions, seams, terms
from .weights import Microbatch


@states.loadable
class AccumState(NamedTuple):
    """The sums over the microbatches so far, all of them tensors.

    Attributes:
        grads: A tree like params: sums of (weight * gradient), float32 at least.
        total: Sum of (weight * loss), float64.
        weight: Sum of weights, float64: samples, or the weight of ``Weighted``. Zero for a plain
            ``reduction="sum"``, which is not divided. For a sum of ``Weighted``, a vector with the
            share of each term's weight that has arrived; it ends at 1.
        microbatches: How many updates there were, including skipped ones.
        skipped: How many of them ``nonfinite="skip"`` left out.
        nonfinite: How many had an inf or NaN: in the loss for ``"propagate"``, in the loss or
            anywhere in the gradient for ``"skip"``.
        weighted: How many were ``Weighted``; ``reduction="sum"`` needs that at the end.
        squares: With ``squares=True`` a float64 vector for ``noise_scale``: for each leaf the sum
            of |weight * gradient|² / weight, and last the number of microbatches with any weight.
            Otherwise ``()``.

    Example:
        >>> import torch
        >>> acc, w = accumulator(lambda w, x: (w * x).mean()), torch.tensor(2.0)
        >>> state = acc.update(acc.init(w), w, torch.tensor([1.0, 3.0]))
        >>> state.grads, state.weight, state.microbatches
        (tensor(4.), tensor(2., dtype=torch.float64), tensor(1))
    """

    grads: trees.Tree
    total: Tensor
    weight: Tensor
    microbatches: Tensor
    skipped: Tensor
    nonfinite: Tensor
    weighted: Tensor
    squares: Tensor | tuple[()] = ()


class Flow(NamedTuple):
    """What goes from one microbatch to the next."""

    carried: Any = ()  # what the next one is given
    # ``advance(carried, entry, rows)``: what the one after it is given, and the entry with its own
    # aux alone.
    advance: Callable[[Any, Microbatch, int], tuple[Any, Microbatch]] | None = None
    aux: reductions.AuxState | None = None  # what was reduced before
    aux_reduction: trees.Tree = None  # how aux is reduced, where there is any
    over: sharded_rows.Over = sharded_rows.NOWHERE  # the ranks of which each cuts its own samples
    whole: terms.Whole = None  # the weights of a sum of ``Weighted``, where the caller counted them
    of_all_ranks: Callable[[Tensor], Tensor] = lambda weights: weights  # of those of this rank


class Ledger:
    """What the microbatches of one window have come to so far, beside their gradients."""

    __slots__ = ("entries", "flow", "rule")

    def __init__(self, rule: seams.Rule, flow: Flow) -> None:
        self.rule, self.flow = rule, flow
        self.entries: list[Microbatch] = []

    def enter(self, entry: Microbatch, rows: int) -> None:
        """Enter one more microbatch, of so many samples."""
        flow = self.flow
        if flow.advance is not None:
            carried, entry = flow.advance(flow.carried, entry, rows)
            self.flow = flow = flow._replace(carried=carried)
        if self.rule.has_aux:
            skipping = self.rule.nonfinite == "skip"
            aux = reductions.fold_aux(
                flow.aux, entry, rows, flow.aux_reduction, skipping, flow.over
            )
            self.flow, entry = flow._replace(aux=aux), entry._replace(aux=())
        self.entries.append(entry)


# Amounts -------------------------------------------------------------------------------------


def plain_sum(state: AccumState, reduction: losses.Reduction) -> Tensor | bool:
    """Whether what was summed has no weight to be divided by."""
    return reduction == "sum" and state.weighted == 0


def check_belongs(state: Any, leaves: list[Tensor], spec: optree.PyTreeSpec, squares: bool) -> None:
    """Check that a state is an ``AccumState``, and belongs to these params."""
    sums, sums_spec = trees.flatten(read_state(state).grads)
    checks.check_fits(sums, sums_spec, leaves, spec, ("state.grads", "params"))
    check_squares(state, squares)


def merged(a: AccumState, b: AccumState, squares: bool, names: tuple[str, str]) -> AccumState:
    """One state of two; ``names`` are what errors call their gradients."""
    checks.check_fits(*trees.flatten(b.grads), *trees.flatten(a.grads), (names[1], names[0]))
    check_squares(a, squares)
    check_squares(b, squares)
    return trees.add(a, b)


def read_state(state: Any) -> AccumState:
    """The state itself, or an error that says what a state is."""
    cause = "With has_aux=True, update returns a pair, (state, aux)."
    return checks.check_state(state, AccumState, "an accumulator", "the state", cause)


def check_squares(state: AccumState, squares: bool) -> None:
    """Check that a state has squares where they are asked for."""
    if isinstance(state.squares, Tensor) != squares:
        raise ValueError(
            f"the state was made with squares={not squares}; expected squares={squares}. Pass a "
            "state from this accumulator's own init (of a step: from its begin, with "
            f"noise={squares})."
        )


def empty(grads: trees.Tree, device: torch.device, squares: int | None = None) -> AccumState:
    """A state of these sums with nothing else counted yet, and squares for so many leaves."""

    def zero(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return AccumState(
        grads=grads,
        total=zero(torch.float64),
        weight=zero(torch.float64),
        microbatches=zero(torch.int64),
        skipped=zero(torch.int64),
        nonfinite=zero(torch.int64),
        weighted=zero(torch.int64),
        squares=() if squares is None else zero(torch.float64, squares + 1),
    )


def counted(
    state: AccumState, seen: Sequence[Microbatch], rule: seams.Rule, grads: trees.Tree
) -> AccumState:
    """The state with some more microbatches; ``grads`` are the sums with their gradients."""
    more: Any = amounts_of(seen, rule, ())
    return AccumState(  # not _replace, from which torch 2.11's compiler returns broken tuples
        grads=grads,
        total=state.total + more.total,
        weight=state.weight + more.weight,
        microbatches=state.microbatches + more.microbatches,
        skipped=state.skipped + more.skipped,
        nonfinite=state.nonfinite + more.nonfinite,
        weighted=state.weighted + more.weighted,
        squares=state.squares + more.squares if isinstance(state.squares, Tensor) else (),
    )


def amounts_of(seen: Sequence[Microbatch], rule: seams.Rule, grads: trees.Tree) -> AccumState:
    """What some microbatches came to; ``grads`` are the sums of their gradients.

    Its amounts are numbers of Python where the host knows them: see ``in_tensors``.
    """
    total, weight, nonfinite = settle(seen, rule)
    amounts: Any = {
        "total": total,
        "weight": weight,
        "microbatches": len(seen),
        "skipped": nonfinite if rule.nonfinite == "skip" else 0,
        "nonfinite": nonfinite,
        "weighted": sum([x.weighted for x in seen]),
        "squares": (),
    }
    if rule.squares:
        amounts["squares"] = sum([x.squares for x in seen if isinstance(x.squares, Tensor)])
    return AccumState(grads=grads, **amounts)


def in_tensors(amounts: AccumState, device: torch.device, squares: bool) -> AccumState:
    """Amounts as a state, whose tensors lie on a device."""
    scatter = amounts.squares
    if squares and not isinstance(scatter, Tensor):  # of no microbatch
        scatter = torch.zeros(len(amounts.grads) + 1, dtype=torch.float64, device=device)
    return amounts._replace(
        squares=scatter,
        total=trees.scalar(amounts.total, torch.float64, device),
        weight=trees.scalar(amounts.weight, torch.float64, device),
        microbatches=trees.scalar(amounts.microbatches, torch.int64, device),
        skipped=trees.scalar(amounts.skipped, torch.int64, device),
        nonfinite=trees.scalar(amounts.nonfinite, torch.int64, device),
        weighted=trees.scalar(amounts.weighted, torch.int64, device),
    )


def settle(seen: Sequence[Microbatch], rule: seams.Rule) -> tuple[Any, Any, Any]:
    """Total, weight and the number of microbatches that are not finite, in float64 and int64.

    They are Python's numbers where the host has them, and else tensors.
    """
    if seen and not modes.at_top_level():
        return _settled_in_tensors(seen, rule)
    total = weight = 0.0
    good, has_weight = 0, rule.reduction == "mean"
    for entry in seen:  # in Python: a tenth of the time of tensors
        value = entry.value
        there = type(value) is Tensor and value.is_cpu
        if not there or isinstance(entry.terms, Tensor):
            return _settled_in_tensors(seen, rule)
        term = value.item() * entry.times
        total += term
        if has_weight or entry.weighted:
            weight += float(entry.weight)
        good += isfinite(term) if entry.finite is None else bool(entry.finite)
    return total, weight, len(seen) - good


def _settled_in_tensors(seen: Sequence[Microbatch], rule: seams.Rule) -> tuple[Any, Any, Any]:
    totals = _totals(seen)
    total = totals.sum()
    # The weights to divide by: a plain sum has none.
    counted = [x for x in seen if x.weighted or rule.reduction == "mean"]
    weight = _sum([x.terms if isinstance(x.terms, Tensor) else x.weight for x in counted])
    if torch.compiler.is_dynamo_compiling() and not isinstance(weight, Tensor):
        weight = torch.full_like(total, weight)  # else there is a graph for each number of samples
    flags = [entry.finite for entry in seen if entry.finite is not None]
    # inf - inf is NaN; a third of the time of isfinite
    nonfinite = ~torch.stack(flags) if flags else (totals - totals) != 0
    return total, weight, nonfinite.sum()


def _totals(seen: Sequence[Microbatch]) -> Tensor:
    """The totals of all entries, in few operations.

    A compiler sees to that by itself, and would take the number of samples for a constant if two of
    them were compared.
    """
    values = [x.value for x in seen]
    if dtensors.any_sharded(values):
        values = dtensors.with_all_terms(values)  # one reduction for all of them
    pairs = [(x.times, value) for x, value in zip(seen, values, strict=True)]
    if torch.compiler.is_dynamo_compiling():
        alike = ((times, [(times, value)]) for times, value in pairs)
    else:
        alike = groupby(pairs, key=itemgetter(0))
    groups = [torch.stack([x for _, x in group]).double() * times for times, group in alike]
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _sum(weights: Sequence[float | Tensor]) -> float | Tensor:
    """The sum of weights, of which the host knows some."""
    known = sum([0.0, *(x for x in weights if not isinstance(x, Tensor))])
    others = [x for x in weights if isinstance(x, Tensor)]
    return torch.stack(others).sum(0) + known if others else known
