"""Stages, breadth-first: the exact gradient of a loss whose rows are coupled.

    for each leg but the last:         # a leg: stages between which no microbatch has to wait
        for each microbatch:
            boundary, share = leg(params, boundary, values)      # nothing is recorded
        values += the sum of the shares
    the last leg: loss and gradients, microbatch by microbatch
    for each leg before it, backwards:
        for each microbatch:
            pull the cotangents of its boundary and of its share through the leg, computed again
        the cotangents of what it read are the sums over the microbatches

All that is kept of the whole batch is the boundaries, and the cotangents of one of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from torch import Tensor

from ._accumulator import counted, empty
from ._aux import AuxState, finish_aux, fold_aux
from ._breadth import Kept, Pass, again, forward, inside, run_part, unchanged
from ._donation import NOTHING
from ._engine import Rule, not_finite, refuse_to_look
from ._legs import cotangents_of, legs
from ._loss import Read, Shape, detached, read
from ._passes import Wrt, prepare
from ._pullback import Sums
from ._sharded import refuse_sharded
from ._shares import Cotangents, is_differentiable, through_merge
from ._shelf import Boundary, shelf
from ._stage import Stage
from ._stages import Staged, check_call, sees_all_at_once
from ._sums import Weighing, added_to
from ._torch import transform_active
from ._tree import Tree, accumulation_dtype, as_scalar_of, finite, flatten, paths
from ._weights import Microbatch, enter, power_of_two, total_finite, weigh
from ._window import Cut, Folded, Window


Values = dict[tuple[str, int], Tensor]  # the cotangents of pooled values, wide, leaf by leaf


class Ended(NamedTuple):
    """What the last leg gives."""

    entries: list[Microbatch]
    aux: Tree
    unit: float | Tensor
    cotangents: list[Boundary]  # of what stands before it


def fold_staged(
    window: Window, loss: Staged, given: Mapping[str, Any], keys: Tensor | None = None
) -> Folded:
    """All microbatches of a batch through all stages, and the gradients summed.

    Args:
        window: What is accumulated; its ``call`` is not used.
        loss: The stages.
        given: Values that stages may read by name.
        keys: One for each row, for stages that read ``"keys"``.
    """
    leaves, rule = window.leaves, window.rule
    refuse_sharded(leaves, "params", "a loss in stages is not cut for them.")
    if rule.nonfinite == "raise" and transform_active():
        refuse_to_look()
    with nullcontext() if transform_active() else torch.no_grad():
        sums = Sums(leaves, window.at_least)
        straight = all(x.dtype == accumulation_dtype(x.dtype, window.at_least) for x in leaves)
        engine = rule.engine if transform_active() else "autograd"
        wrt = prepare(leaves, engine, set())._replace(straight=straight)
        through, batch = _begin(loss, wrt, window.spec, window.batch, rule, given, keys)
        if not batch:
            state = empty(sums.all(), leaves[0].device)
            return Folded(state, 1.0, (), None, torch.get_default_dtype(), False)
        values: Values = {}
        count, kept = len(batch), forward(through, batch)
        entries, aux, unit, cotangents = _last_leg(through, window, kept, sums, values)
        for n in reversed(range(len(through.legs) - 1)):
            cotangents = _leg_back(through, n, kept, sums, cotangents, values)
        grads = sums.all()
        if rule.nonfinite == "raise":
            names = zip(paths(window.spec, "params"), grads, strict=True)
            if where := [f"the gradient of {name}" for name, x in names if not finite(x)]:
                raise FloatingPointError(not_finite(where))
        state = counted(empty(grads, leaves[0].device), entries, rule)
        # A last stage that is given all rows at once is called once for all microbatches.
        state = state._replace(microbatches=torch.full_like(state.microbatches, count))
        return Folded(state, unit, (), aux, entries[-1].dtype, entries[-1].weighted)


def goes_by_stages(loss: Any, cut: Cut) -> TypeGuard[Staged]:
    """Whether a loss is staged, and its batch does not simply go through at once."""
    return isinstance(loss, Staged) and not (cut.untouched and cut.rows)


def outs_staged(
    loss: Staged,
    leaves: list[Any],
    spec: optree.PyTreeSpec,
    cut: Cut,
    rule: Rule,
    given: Mapping[str, Any],
) -> Iterator[tuple[Any, int, int]]:
    """What the loss returns for each microbatch, its rows, and how many its mean counts for."""
    wrt = Wrt(leaves, [], None, set(), frozenset())
    through, batch = _begin(loss, wrt, spec, cut, rule, given, None)
    if batch:
        kept, last = forward(through, batch), len(through.legs) - 1
        for p, part in enumerate(through.shelf.fetch(kept.boundaries.pop())):
            with unchanged(through, last, [part], kept.values):
                out, _ = run_part(through, last, p, part, kept.values)
            yield out, part.rows, _counts(through, part)


def _begin(
    loss: Staged,
    wrt: Wrt,
    spec: optree.PyTreeSpec,
    cut: Cut,
    rule: Rule,
    given: Mapping[str, Any],
    keys: Tensor | None,
) -> tuple[Pass, list[Boundary]]:
    check_call(loss, cut.rows or 0, given if keys is None else {**given, "keys": keys})
    leaves = wrt.leaves
    batch = [Boundary(*flatten(part), rows) for part, rows, _ in cut.parts()]
    its = legs(loss)
    entries = [path[:1] for path in spec.paths()]
    at = [
        [i for i in range(len(leaves)) if leg.uses is None or leg.uses & set(entries[i])]
        for leg in its
    ]
    tensors = [x for x in [*leaves, *cut.batch.leaves] if isinstance(x, Tensor)]
    through = Pass(
        loss,
        its,
        at,
        spec,
        wrt,
        rule.engine,
        given,
        [] if keys is None else list(keys.split([part.rows for part in batch])),
        shelf(loss.boundaries, tensors[0].device),
        frozenset(x.device for x in tensors),
    )
    return through, batch


def _counts(through: Pass, part: Boundary) -> int:
    """The rows that the mean of a microbatch counts for: the whole batch passes untouched."""
    return 1 if sees_all_at_once(through.loss) else part.rows


# Backwards --------------------------------------------------------------------------------


def _last_leg(through: Pass, window: Window, kept: Kept, sums: Sums, values: Values) -> Ended:
    """Loss and gradients of every microbatch, as of a loss that is no more than this leg."""
    rule, parts, n = window.rule, kept.boundaries.pop(), len(through.legs) - 1
    most = max(_counts(through, part) for part in parts)
    unit: float | Tensor = power_of_two(most) if rule.reduction == "mean" else 1.0
    known: dict[float, Tensor] | None = None if torch.compiler.is_dynamo_compiling() else {}
    shape: Shape | None = None
    aux: AuxState | None = None
    entries: list[Microbatch] = []
    weighings: list[Weighing] = []
    cotangents: list[Boundary] = []

    def taken(out: Any) -> tuple[list[Tensor], Any]:
        nonlocal shape
        seen, shape = read(out, rule.has_aux)
        return [seen.total], (seen.weight, seen.aux)

    for p, part in enumerate(through.shelf.fetch(parts)):
        with unchanged(through, n, [part], kept.values):
            (outs, (weight, tensors), pull), reads = again(through, n, p, part, kept, sums, taken)
        seen, counts = Read(outs[0], weight, tensors), _counts(through, part)
        seen = seen if transform_active() else detached(seen)
        assert shape is not None
        entry = enter(seen, shape, counts, rule.reduction)
        if rule.nonfinite == "raise" and not total_finite(entry):
            raise FloatingPointError(not_finite([f"the loss of microbatch {p}"]))
        weighing = weigh(seen, counts, rule.reduction, unit, known, window.scale)
        assert weighing is not None
        grads = pull([weighing.cotangent], weighing)
        inner = grads[: len(grads) - len(reads)]
        cotangents.append(through.shelf.put(Boundary(inner, None, part.rows)))
        _add_values(values, reads, grads[len(inner) :], weighing)
        weighings.append(weighing)
        if rule.has_aux:
            aux = fold_aux(aux, entry, part.rows, window.aux_reduction, skipping=False)
        entries.append(entry._replace(aux=()))
    reduced = None if aux is None else finish_aux(aux)
    factors = [it.factor for it in weighings if isinstance(it.factor, Tensor)]
    if not factors:
        return Ended(entries, reduced, unit, cotangents)
    # Weighted: each microbatch was pulled with a power of two of its own, which keeps float16 in
    # range; from here on they go together, and the largest of them is kept for the end.
    largest = torch.stack(factors).amax()
    for i, sum_ in sums.items():
        times = torch.mul if transform_active() else Tensor.mul_
        sums[i] = times(sum_, as_scalar_of(sum_, 1 / largest))
    for place, x in values.items():
        values[place] = x * as_scalar_of(x, 1 / largest)
    weighed: list[Boundary] = []
    for part, it in zip(through.shelf.fetch(cotangents), weighings, strict=True):
        leaves = [_weighed(x, it.factor / largest, it.keep) for x in part.leaves]
        weighed.append(through.shelf.put(part._replace(leaves=leaves)))
    return Ended(entries, reduced, unit * largest, weighed)


def _weighed(x: Tensor | None, factor: Tensor, keep: Tensor | None) -> Tensor | None:
    """A microbatch without weight has no cotangent, even where it is NaN."""
    if x is None:
        return None
    x = x * as_scalar_of(x, factor)
    return x if keep is None else torch.where(keep.to(x.device), x, 0.0)


def _leg_back(
    through: Pass,
    n: int,
    kept: Kept,
    sums: Sums,
    cotangents: list[Boundary],
    values: Values,
) -> list[Boundary]:
    """The cotangents of what stands before a leg, from those of what stands after it."""
    leg, parts, shelf = through.legs[n], kept.boundaries.pop(), through.shelf
    sizes = [part.rows for part in parts]
    if [part.rows for part in cotangents] != sizes:  # a leg that sees the whole batch
        cotangents = cotangents_of(list(shelf.fetch(cotangents)), sizes)
    for i in through.at[n]:
        sums[i]  # so that autograd itself may add to it
    shares = [_of_shares(stage, kept, values, len(parts)) for stage in leg.pools]
    before: list[Boundary] = []
    fetched = zip(shelf.fetch(parts), shelf.fetch(cotangents), strict=True)
    for p, (part, (after, _, rows)) in enumerate(fetched):
        given = [*(after if leg.moves else []), *(c for share in shares for c in share[p])]
        inner: Cotangents = [None] * len(inside(through, n, part))
        if any(c is not None for c in given):
            (_, _, pull), reads = again(through, n, p, part, kept, sums)
            grads = pull(given, _AS_IT_IS)
            count = len(inner)
            inner = list(grads[:count])
            _add_values(values, reads, grads[count:], _AS_IT_IS)
        if not leg.moves:
            inner = [_plus(a, b) for a, b in zip(inner, after, strict=True)]
        before.append(shelf.put(Boundary(inner, None, rows)))
    return before


_AS_IT_IS = Weighing(NOTHING, 1.0, None)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _add_values(
    values: Values, reads: list[tuple[str, int]], grads: Cotangents, weighing: Weighing
) -> None:
    """What one microbatch adds to the cotangents of the values that it read."""
    for place, grad in zip(reads, grads, strict=True):
        if grad is not None:
            zero = torch.zeros((), dtype=accumulation_dtype(grad.dtype), device=grad.device)
            values[place] = added_to(values.get(place, zero), grad, weighing)


def _of_shares(stage: Stage, kept: Kept, values: Values, count: int) -> list[Cotangents]:
    """The cotangents of what each microbatch pooled."""
    leaves = flatten(kept.values[stage.name])[0]
    cotangents: Cotangents = []
    for i, leaf in enumerate(leaves):
        if is_differentiable(leaf):
            c = values.pop((stage.name, i), None)
            cotangents.append(None if c is None else c.to(leaf.dtype))
    if stage.merge is None:
        return [cotangents] * count
    return through_merge(stage, kept.shares.pop(stage.name), cotangents)
