"""All microbatches in one loop of the compiler, whose graph is as large for two as for a thousand.

    carry = zeros, what is carried, nothing counted
    carry, aux = scan(one more microbatch, carry, the microbatches, stacked)
    carry, aux = one more microbatch, if the last one is shorter

It is for compiled code at top level: a scan under vmap does not compile.

Small microbatches go through several at once, which costs as much as one:

    values, pull = vjp(vmap(loss of a microbatch), leaves)
    sums += pull(rows of each)

The loss remains a function of one microbatch. Several go together only while their forward passes
keep next to nothing, and only for a plain scalar loss under ``nonfinite="propagate"``: whether one
of them has no weight, or a gradient that is left out, cannot be told from a sum over several.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base.torch_internals import scan
from .._base.trees import Tree, flatten, unflatten, zeros
from .._core.accumulator import AccumState, counted
from .._core.batches import read_batch
from .._core.engines import Wrt, prepare
from .._core.loss import read
from .._core.microbatch_gradient import Rule, add_microbatch
from .._core.reductions import AuxState, Stack, fold_aux, fold_stack, share_of
from .._core.weights import Microbatch, Tally, Weighing, power_of_two, scaled, settle, term_of
from .._core.whole_batch import Accumulated, Accumulation, LossOfPart


LITTLE = 2**20  # bytes that the forward passes of all that go together keep

# The loss as a function of leaves, the tensors of a microbatch, and the rows before it.
One = Callable[[Sequence[Tensor], list[Tensor], Tensor], object]


class Stacked(NamedTuple):
    """A batch in microbatches of ``size`` rows; what it has none of is None."""

    microbatches: Tree  # stacked along a new dim 0; where some go together, along two
    rest: Tree  # those that are too few to go together, stacked
    tail: Tree  # a shorter last one
    size: int
    together: int  # how many go through at once
    untouched: bool = False  # it is never a batch in one piece


def fold_scanned(job: Accumulation) -> Accumulated:
    """All microbatches of a batch that is ``Stacked``, summed and not yet divided."""
    batch: Stacked = job.batch
    leaves, rule, size = job.leaves, job.rule, batch.size
    unit = power_of_two(size) if rule.reduction == "mean" else 1.0
    wrt = prepare(leaves, rule.engine, job.known)._replace(unit=unit, scale=job.scale)
    amounts = [torch.zeros((), dtype=t, device=leaves[0].device) for t in _AMOUNTS]
    if rule.squares:
        amounts.append(amounts[0].new_zeros(len(leaves) + 1))
    given, carried_spec = flatten(job.carried)
    # Clones, here and below: a scan may return nothing that it was given.
    carry = zeros(leaves, job.at_least), [x.clone() for x in given], amounts
    aux: AuxState | None = None
    weighted = False
    if batch.together > 1:
        carry, count = _by_several(job, wrt, batch, carry)
    else:
        body, like = _body(job, wrt, batch, carried_spec)
        xs = tensors_of(batch.microbatches)
        entry, count = like(carry, xs), len(xs[0])
        weighted = entry.weighted
        carry, outputs = scan(body, carry, xs)
        if rule.has_aux:
            aux = fold_stack(None, _stacked(entry, outputs, rule), size, job.aux_reduction)
    sums, given, (total, weight, nonfinite, *squares) = carry
    skipped = nonfinite.clone() if rule.nonfinite == "skip" else torch.zeros_like(nonfinite)
    seen = torch.full((), count, dtype=torch.int64, device=leaves[0].device)
    state = AccumState(
        grads=sums,
        total=total,
        weight=weight,
        microbatches=seen,
        skipped=skipped,
        nonfinite=nonfinite,
        weighted=torch.full_like(seen, count * weighted),
        squares=squares[0] if rule.squares else (),
    )
    carried = unflatten(carried_spec, given)
    if batch.tail is not None:
        rows = read_batch(batch.tail).rows or 0
        sums, carried, entry = _more(job, wrt, sums, carried, batch.tail, rows)
        if aux is not None:
            aux = fold_aux(aux, entry, rows, job.aux_reduction, rule.nonfinite == "skip")
        state = counted(state, [entry], rule, sums)
    return Accumulated(
        state=state,
        unit=unit,
        carried=carried,
        aux=aux,
        dtype=torch.float32,
        weighted=weighted,
    )


def tensors_of(tree: Tree) -> list[Tensor]:
    """The leaves of a batch that are cut."""
    return [x for x in flatten(tree)[0] if isinstance(x, Tensor)]


def one_of(call: LossOfPart, like: Tree, rows: int) -> One:
    """A loss in the form of ``One``, for batches whose other leaves are those of ``like``."""
    columns, spec = flatten(like)

    def one(leaves: Sequence[Tensor], tensors: list[Tensor], before: Tensor) -> Any:
        return call(list(leaves), _filled(columns, spec, tensors), rows, ((), before))

    return one


def _filled(columns: list[Any], spec: optree.PyTreeSpec, tensors: list[Tensor]) -> Tree:
    """A tree with these tensors in place of its own."""
    rest = iter(tensors)
    return unflatten(spec, [next(rest) if isinstance(x, Tensor) else x for x in columns])


def _more(
    job: Accumulation, wrt: Wrt, sums: list[Tensor], carried: Any, part: Tree, rows: int
) -> tuple[list[Tensor], Any, Microbatch]:
    """Add one more microbatch: the sums, what is carried, and what it came to."""
    sums, entry = add_microbatch(job.call, (part, rows, carried), wrt, sums, rows, job.rule)
    if job.advance is not None:
        carried, entry = job.advance(carried, entry, rows)
    return sums, carried, entry


def _body(
    job: Accumulation, wrt: Wrt, batch: Stacked, carried_spec: optree.PyTreeSpec
) -> tuple[Callable[..., Any], Callable[..., Microbatch]]:
    """A function that adds one more microbatch, for a scan; and what the first would come to."""
    columns, spec = flatten(batch.microbatches)

    def step(carry: Any, tensors: list[Tensor]) -> tuple[list[Tensor], Any, Microbatch]:
        part = _filled(columns, spec, tensors)
        return _more(job, wrt, carry[0], unflatten(carried_spec, carry[1]), part, batch.size)

    def body(carry: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        sums, after, entry = step(carry, tensors)
        squares = [entry.squares] if job.rule.squares else []
        amounts = [x + y for x, y in zip(carry[2], [*settle([entry]), *squares], strict=True)]
        kept = [x.clone() for x in flatten(after)[0]]
        return (sums, kept, amounts), _outputs(entry, job.rule) if job.rule.has_aux else []

    def like(carry: Any, xs: list[Tensor]) -> Microbatch:
        # Traced to see what a loss returns; the compiler drops what nobody uses.
        return step(carry, [x[0] for x in xs])[2]

    return body, like


def _by_several(job: Accumulation, wrt: Wrt, batch: Stacked, carry: Any) -> tuple[Any, int]:
    """Add all microbatches, several at a time, then those that are left, and count them."""

    def body(carry: Any, xs: list[Tensor]) -> tuple[Any, list[Tensor]]:
        sums, (before,), amounts = carry
        sums, tally = add_together(one, wrt, sums, xs, before, job.rule)
        amounts = [x + y for x, y in zip(amounts, tally, strict=True)]
        return (sums, [before + len(xs[0]) * batch.size], amounts), []

    count = 0
    like = batch.rest if batch.microbatches is None else batch.microbatches
    one = one_of(job.call, like, batch.size)
    if batch.microbatches is not None:
        xs = tensors_of(batch.microbatches)
        count += xs[0].shape[0] * xs[0].shape[1]
        carry, _ = scan(body, carry, xs)
    if batch.rest is not None:
        xs = tensors_of(batch.rest)
        count += xs[0].shape[0]
        carry, _ = body(carry, xs)
    return carry, count


_AMOUNTS = (torch.float64, torch.float64, torch.int64)  # total, weight, nonfinite


def _outputs(entry: Microbatch, rule: Rule) -> list[Tensor]:
    """What a scan keeps of each microbatch: its share, whether it is finite, and its aux."""
    tensors = [x for x in flatten(entry.aux)[0] if isinstance(x, Tensor)]
    flags = [entry.finite] if rule.nonfinite == "skip" and entry.finite is not None else []
    return [x.clone() for x in (share_of(entry), *flags, *tensors)]


def _stacked(like: Microbatch, outputs: list[Tensor], rule: Rule) -> Stack:
    """The aux of all microbatches, from what a scan kept of each; ``like`` has its structure."""
    leaves, spec = flatten(like.aux)
    share, rest = outputs[0], list(outputs[1:])
    finite = rest.pop(0) if rule.nonfinite == "skip" and like.finite is not None else None
    tensors = iter(rest)
    return Stack(
        spec, [next(tensors) if isinstance(x, Tensor) else x for x in leaves], share, finite
    )


# Several at once ----------------------------------------------------------------------------


def how_many(one: One, leaves: list[Tensor], xs: list[Tensor]) -> int:
    """How many microbatches like those in ``xs`` go together: a power of two, found by trying.

    It is one where torch cannot vmap the loss, or warns that it would be slow, where the loss draws
    random numbers, which would be others, and where it is ``Weighted``.
    """
    params = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    sizes: list[int] = []

    def weigh(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in params:
            sizes.append(x.numel() * x.element_size())
        return x

    none = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    held = [leaf.detach().requires_grad_() for leaf in leaves]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                _values(one, leaves, xs, none.expand(len(xs[0])))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weigh, lambda x: x):
                one(held, [x[0] for x in xs], none)
    except Exception:
        return 1
    most = LITTLE // max(sum(sizes), 1)
    return 1 << max(0, most.bit_length() - 1)  # most numbers of microbatches divide by it


def add_together(
    one: One, wrt: Wrt, sums: list[Tensor], xs: list[Tensor], before: Tensor, rule: Rule
) -> tuple[list[Tensor], Tally]:
    """Add the gradients of several microbatches: new sums, and what all of them came to."""
    count, rows = xs[0].shape[:2]
    each = before + rows * torch.arange(count, dtype=before.dtype, device=before.device)
    # pyright cannot tell the two lengths of vjp's result apart
    values, pull = torch.func.vjp(lambda *leaves: _values(one, leaves, xs, each), *wrt.leaves)  # pyright: ignore
    times = 1.0 if rule.reduction == "sum" else float(rows)
    cotangent = scaled(torch.full_like(values, times / (wrt.unit or 1.0)), wrt.scale)
    weighing = Weighing(cotangent, 1.0, None)
    grads = pull(cotangent, retain_graph=False)
    new = [x + term_of(grad, x.dtype, weighing) for x, grad in zip(sums, grads, strict=True)]
    wide = values.detach().double()
    weights = torch.full_like(wide, times if rule.reduction == "mean" else 0.0)
    return new, Tally((wide * times).sum(), weights.sum(), ((wide - wide) != 0).sum())


def _values(one: One, leaves: Sequence[Tensor], xs: list[Tensor], each: Tensor) -> Tensor:
    def value(tensors: list[Tensor], before: Tensor) -> Tensor:
        seen, _ = read(one(leaves, tensors, before), False)
        if not isinstance(seen.weight, tuple):
            raise TypeError("a Weighted loss goes alone: its weight may be zero")
        return seen.total

    return torch.func.vmap(value)(xs, each)
