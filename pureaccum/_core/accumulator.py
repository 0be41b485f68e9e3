"""Accumulation as a commutative monoid: sums of gradients, sums of weights.

Ragged microbatches, means over tokens, short last windows, ranks and a resumed run are then one
rule. Sums are float32 at least; totals and weights are float64: token counts pass 2**24.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .._base.checks import (
    check_argnums,
    check_dtype,
    check_fits,
    check_state,
    outside_inference_mode,
    positions,
    read_params,
    refuse_autocast_cache,
)
from .._base.dtensors import closed, opened, resolved
from .._base.states import Spoiled, hand_over, loadable, mark
from .._base.torch_internals import may_write
from .._base.trees import Tree, add, flatten, paths, scalar, tree_leaves, unflatten, zeros
from .batches import Batch, read_microbatch
from .coupling import LossOfPart, Question, question_of
from .engines import Engine, Wrt, prepare, run_window
from .history import refusing_backward
from .loss import Reduction, advising, divisor, mean_value
from .microbatch_gradient import Nonfinite, Rule, add_microbatch, check_rule
from .weights import Microbatch, NoRowsError, divided, settle
from .writes import Given, LateWriteError, guarding, known_of


@loadable
class AccumState(NamedTuple):
    """What has been accumulated so far: tensors, all of them sums over the microbatches.

    Attributes:
        grads: A tree like params: sums of (weight * gradient), float32 at least.
        total: Sum of (weight * loss), float64.
        weight: Sum of weights, float64: rows, or what ``Weighted`` says. A plain
            ``reduction="sum"`` has nothing to divide by and leaves it at zero.
        microbatches: How many updates there were, skipped ones included.
        skipped: How many of them ``nonfinite="skip"`` left out.
        nonfinite: How many had an inf or NaN: in the loss for ``"propagate"``, in the loss or
            anywhere in the gradient for ``"skip"``.
        weighted: How many were ``Weighted``, which ``reduction="sum"`` has to know in the end.
        squares: With ``squares=True``, a float64 vector, for ``noise_scale``: of each leaf the sum
            of |weight * gradient|² / weight, last how many microbatches had weight; else ``()``.

    Example:
        >>> import torch
        >>> acc, w = accumulator(lambda w, x: (w * x).mean()), torch.tensor(2.0)
        >>> state = acc.update(acc.init(w), w, torch.tensor([1.0, 3.0]))
        >>> state.grads, state.weight, state.microbatches
        (tensor(4.), tensor(2., dtype=torch.float64), tensor(1))

    References:
        ``accumulator``, which makes it; ``distributed.all_reduce``; ``save`` and ``load``.
    """

    grads: Tree
    total: Tensor
    weight: Tensor
    microbatches: Tensor
    skipped: Tensor
    nonfinite: Tensor
    weighted: Tensor
    squares: Tensor | tuple[()] = ()


class Accumulator(NamedTuple):
    """The four functions that ``accumulator`` makes.

    Attributes:
        init: ``init(params)`` gives the identity: a state of zeros.
        update: ``update(state, params, *args, donate=False)`` gives the state with one more
            microbatch, or ``(state, aux)``. ``args`` is what the loss takes after params; with
            ``donate`` the old state is given up: its memory is added to, and using it raises.
        merge: ``merge(a, b)`` gives one state of two, in any order and grouping.
        finalize: ``finalize(state, donate=False)`` gives ``(grads, value)``: sums / weight, or the
            sums as they are for a plain sum, float32 at least; over no weight zeros and NaN.
    """

    init: Callable[[Tree], AccumState]
    update: Callable[..., Any]
    merge: Callable[[AccumState, AccumState], AccumState]
    finalize: Callable[..., tuple[Tree, Tensor]]


def accumulator(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    reduction: Reduction = "mean",
    dtype: torch.dtype | None = None,
    nonfinite: Nonfinite = "propagate",
    engine: Engine = "func",
    squares: bool = False,
    check: bool = True,
) -> Accumulator:
    """Accumulate the gradient of a loss over a stream of microbatches.

    The rule::

        init(params)        = zeros
        update(state, part) = state + (w * gradient, w * loss, w)    # w: rows, or of Weighted
        merge(a, b)         = a + b
        finalize(state)     = grads / weight, total / weight         # once; a sum as it is

    That is the gradient of the full batch, whatever the microbatches' sizes and order. The state
    holds one gradient tree; ``update(..., donate=True)`` adds to it during the backward pass.

    Args:
        loss_fn: ``loss_fn(params, *args)`` gives a scalar or ``Weighted``, or ``(that, aux)``.
        has_aux: Whether the loss returns ``(loss, aux)``; ``update`` then gives ``(state, aux)``.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0.
        reduction: What a scalar loss is of its rows, ``"mean"`` or ``"sum"``.
        dtype: Sums are at least this wide: ``torch.float32`` (the default) or ``torch.float64``.
        nonfinite: What becomes of a microbatch with an inf or NaN: ``"propagate"`` adds it all the
            same; ``"skip"`` leaves it out with its weight, and counts it; ``"raise"`` raises
            ``FloatingPointError`` naming the leaf (it looks, and so waits for the device).
        engine: ``"func"`` composes with transforms; ``"autograd"`` runs what torch.func refuses;
            ``"auto"`` is autograd at top level and torch.func under a transform: see ``make_step``.
        squares: Also sum the squared norms of the microbatches' gradients, for ``noise_scale``.
        check: Whether the loss is asked if microbatches add up: see ``grad_and_value``.

    Returns:
        ``init(params)``, ``update(state, params, *args, donate=False)``, ``merge(a, b)`` and
        ``finalize(state, donate=False) -> (grads, value)``.

    Example:
        >>> acc = accumulator(lambda w, x: ((w * x) ** 2).mean())
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
        >>> state = acc.init(w)
        >>> for part in (x[:2], x[2:]):
        ...     state = acc.update(state, w, part, donate=True)
        >>> acc.finalize(state)
        (tensor(9.3333), tensor(4.6667, dtype=torch.float64))

    References:
        `optax.MultiSteps <https://optax.readthedocs.io>`_, a mean of the microbatches' means.
    """
    rule = check_rule(
        Rule(
            has_aux=has_aux,
            reduction=reduction,
            nonfinite=nonfinite,
            engine=engine,
            squares=squares,
        )
    )
    at_least = check_dtype(dtype)
    batches = check_argnums(batch_argnums, "batch_argnums")
    _check_not_params(batches, batch_argnums)

    known, told = known_of(loss_fn), advising(loss_fn, *batches)

    def init(params: Tree) -> AccumState:
        """The identity: a state of zeros."""
        leaves, _ = read_params(params)
        count = len(leaves) if squares else None
        with outside_inference_mode():
            return empty(zeros(params, at_least), leaves[0].device, count)

    def update(state: AccumState, params: Tree, *args: Any, donate: bool = False) -> Any:
        """The state with one more microbatch, or ``(state, aux)``."""
        read_state(state)
        leaves, spec = read_params(params)
        check_belongs(state, leaves, spec, squares)
        called = (params, *args)
        at = positions(batches, len(called), "batch_argnums")
        _check_not_params(at, batch_argnums)
        batch = tuple(called[i] for i in at)
        read = read_microbatch(own := batch[0] if len(batch) == 1 else batch)
        refuse_autocast_cache(leaves)

        def loss(leaves: list[Tensor], part: Any, *_: Any) -> Any:
            given = dict(zip(at, (part,) if len(at) == 1 else part, strict=True))
            params = unflatten(spec, leaves)
            return told(params, *(given.get(i, x) for i, x in enumerate(args, 1)))

        question = question_of(read, rule) if check else None
        given = known, Given("params", leaves, spec), Given("batch", *read[:2])
        new, entry = updated(
            state, loss, own, leaves, spec, read, rule, given, question, donate=donate
        )
        return (new, entry.aux) if has_aux else new

    def merge(a: AccumState, b: AccumState) -> AccumState:
        """One state of two, in any order and grouping."""
        names = "the first state's grads", "the second state's grads"
        return merged(read_state(a), read_state(b), squares, names)

    def finalize(state: AccumState, donate: bool = False) -> tuple[Tree, Tensor]:
        """The gradients and the value: sums divided once."""
        by = divisor(read_state(state).weight, plain_sum(state, reduction))
        value = mean_value(state.total, by)
        sums, spec = flatten(state.grads)
        own = donate and may_write()
        grads = divided(resolved(sums), by, own=own)
        return unflatten(spec, hand_over(tree_leaves(state), grads) if own else grads), value

    return Accumulator(init, *(refusing_backward(f, *NO_GRAPH) for f in (update, merge, finalize)))


NO_GRAPH = (
    "what an accumulator has summed",
    "grad and grad_and_value of a batch at hand are followed by .backward(), and torch.func's "
    "transforms follow an accumulator too. As constants they are x.detach().",
)


def _check_not_params(at: tuple[int, ...], batch_argnums: Any) -> None:
    if 0 in at:
        raise ValueError(
            f"batch_argnums={batch_argnums!r} names argument 0, which is params: what is "
            "differentiated is the same for every microbatch, and what is cut is not."
        )


def merged(a: AccumState, b: AccumState, squares: bool, names: tuple[str, str]) -> AccumState:
    """One state of two; ``names`` are what errors call their gradients."""
    check_fits(*flatten(b.grads), *flatten(a.grads), (names[1], names[0]))
    check_squares(a, squares)
    check_squares(b, squares)
    return add(a, b)


def read_state(state: Any) -> AccumState:
    """The state itself, or an error that says what a state is."""
    cause = "With has_aux=True, update returns a pair, (state, aux)."
    return check_state(state, AccumState, "an accumulator", "the state", cause)


# What a whole batch at hand shares with a stream ------------------------------------------


def plain_sum(state: AccumState, reduction: Reduction) -> Tensor | bool:
    """Whether what was summed has no weight to be divided by."""
    return reduction == "sum" and state.weighted == 0


def check_belongs(state: Any, leaves: list[Tensor], spec: optree.PyTreeSpec, squares: bool) -> None:
    """Check that a state is an ``AccumState``, and belongs to these params."""
    sums, sums_spec = flatten(read_state(state).grads)
    check_fits(sums, sums_spec, leaves, spec, ("state.grads", "params"))
    check_squares(state, squares)


def updated(
    state: AccumState,
    loss: LossOfPart,
    part: Tree,
    leaves: list[Tensor],
    spec: optree.PyTreeSpec,
    batch: Batch,  # the same, as it was read
    rule: Rule,
    given: tuple[Any, ...],  # what is known of the loss, and all that it is given
    question: Question | None,
    *,
    carried: Any = (),
    donate: bool,
    scale: Tensor | None = None,
    unit: float | None = None,
    counts: int | None = None,  # the rows that a mean counts for, if not those of the batch
) -> tuple[AccumState, Microbatch]:
    """The state with one more microbatch, and the entry of that microbatch."""

    def label(leaf: int | None) -> str:
        what = "the loss" if leaf is None else f"the gradient of {paths(spec, 'params')[leaf]}"
        return f"{what} of microbatch {int(state.microbatches)}"

    held = flatten(state.grads)[0]
    sums, layouts = opened(held)
    before: list[Tensor] | None = None
    in_place = may_write()
    with outside_inference_mode():
        if in_place and not donate:
            before, sums = sums, [x.clone() for x in sums]
        wrt = prepare(leaves, rule.engine, given[0])._replace(scale=scale, unit=unit)

        def window(wrt: Wrt) -> tuple[list[Tensor], Microbatch]:
            args, rows = (part, batch.rows or 0, carried), counts or batch.rows
            with guarding(*given, question=question) as guarded:
                return add_microbatch(
                    guarded(loss), args, wrt, sums, rows, rule, before=before, label=label
                )

        added = False
        try:
            grads, entry = run_window(window, wrt)
            added = True
            grads = closed(grads, layouts)
            if in_place and donate:
                grads = [x.detach() for x in grads]
            new = counted(state, [entry], rule, unflatten(spec, grads))
        except BaseException as error:
            late = added or isinstance(error, LateWriteError)
            if type(sums[0]) is Spoiled or (late and in_place and donate):
                mark(held, Spoiled)
            if batch.problem is not None:
                if isinstance(error, NoRowsError):
                    raise batch.problem from None
                error.add_note(f"The microbatch has no rows: {batch.problem}")
            raise
        if in_place and donate:
            mark(tree_leaves(state))
    return new, entry


def check_squares(state: AccumState, squares: bool) -> None:
    """Check that a state has squares where they are asked for."""
    if isinstance(state.squares, Tensor) != squares:
        raise ValueError(
            f"the state was made with squares={not squares}; expected squares={squares}, as in a "
            f"state of this accumulator's own init (of a step: noise={squares}, its own begin)."
        )


def empty(grads: Tree, device: torch.device, squares: int | None = None) -> AccumState:
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


def counted(state: AccumState, seen: Sequence[Microbatch], rule: Rule, grads: Tree) -> AccumState:
    """The state with some more microbatches; ``grads`` are the sums with their gradients."""
    more, squares = amounts_of(seen, rule, ()), state.squares
    if isinstance(squares, Tensor):
        squares = squares + (more.squares if isinstance(more.squares, Tensor) else 0.0)
    return AccumState(  # not _replace, from which torch 2.11's compiler returns broken tuples
        grads=grads,
        total=state.total + more.total,
        weight=state.weight + more.weight,
        microbatches=state.microbatches + more.microbatches,
        skipped=state.skipped + more.skipped,
        nonfinite=state.nonfinite + more.nonfinite,
        weighted=state.weighted + more.weighted,
        squares=squares,
    )


def amounts_of(seen: Sequence[Microbatch], rule: Rule, grads: Tree) -> AccumState:
    """What some microbatches came to; ``grads`` are the sums of their gradients.

    Its amounts are numbers of Python where the host knows them: see ``in_tensors``.
    """
    total, weight, nonfinite = settle(seen)
    amounts: Any = {
        "total": total,
        "weight": weight,
        "microbatches": len(seen),
        "skipped": nonfinite if rule.nonfinite == "skip" else 0,
        "nonfinite": nonfinite,
        "weighted": sum([x.weighted for x in seen]),
    }
    squares = [x.squares for x in seen if isinstance(x.squares, Tensor)]
    amounts["squares"] = sum(squares) if squares else ()
    return AccumState(grads=grads, **amounts)


def in_tensors(amounts: AccumState, device: torch.device, squares: bool) -> AccumState:
    """Amounts as a state, whose tensors lie on a device."""
    zeros = empty(amounts.grads, device, len(amounts.grads) if squares else None)
    filled: dict[str, Any] = {}
    for name, zero in zeros._asdict().items():
        came = getattr(amounts, name)
        is_number = isinstance(zero, Tensor) and zero.dim() == 0 and name != "grads"
        filled[name] = scalar(came, zero.dtype, device) if is_number else came
    if squares and not isinstance(amounts.squares, Tensor):
        filled["squares"] = zeros.squares
    return AccumState(**filled)
