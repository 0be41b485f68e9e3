"""Accumulation as a commutative monoid: sums of gradients, sums of weights.

Ragged microbatches, means over tokens, short last windows, ranks and a resumed run are then one
rule. Sums are float32 at least; totals and weights are float64: token counts pass 2**24.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._base import checks, dtensors, reprs, states, trees
from .._base.settings import records
from .._base.torch_internals import modes
from . import (
    batches,
    engines,
    history,
    ledger,
    losses,
    seams,
    structures,
    terms,
    weights,
    windows,
    writes,
)
from .coupling import question_of
from .layers import order
from .ledger import AccumState
from .sums import Kinds, Sums, kinds_of


class AccumulatorInit(Protocol):
    """Begins to accumulate."""

    def __call__(self, params: trees.Tree) -> AccumState: ...


class AccumulatorUpdate(Protocol):
    """Adds a microbatch."""

    def __call__(
        self,
        state: AccumState,
        params: trees.Tree,
        *args: Any,
        donate: bool = False,
        weights: Any = None,
    ) -> Any: ...


class AccumulatorMerge(Protocol):
    """Adds two states."""

    def __call__(self, a: AccumState, b: AccumState) -> AccumState: ...


class AccumulatorFinalize(Protocol):
    """Divides the sums."""

    def __call__(self, state: AccumState, donate: bool = False) -> tuple[trees.Tree, Tensor]: ...


class Accumulator(NamedTuple):
    """The four functions that ``accumulator`` makes.

    Attributes:
        init: ``init(params)`` returns the identity: a state of zeros.
        update: ``update(state, params, *args, donate=False, weights=None)`` returns the state with
            one more microbatch, or ``(state, aux)``. ``args`` are the loss's arguments after
            params. With ``donate`` the call adds to the old state's memory, and a later use of the
            old state raises. For a sum of ``Weighted``, ``weights`` lists the weight of each term
            over the whole stream.
        merge: ``merge(a, b)`` returns the sum of two states, in any order and grouping.
        finalize: ``finalize(state, donate=False)`` returns ``(grads, value)``, the sums divided by
            the weight (or as they are, for a plain sum), in float32 at least. If the weight is
            zero, the gradients are zero and the value is NaN.
    """

    init: AccumulatorInit
    update: AccumulatorUpdate
    merge: AccumulatorMerge
    finalize: AccumulatorFinalize

    __repr__ = reprs.of_made


@records
def accumulator(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    reduction: losses.Reduction = "mean",
    dtype: torch.dtype | None = None,
    nonfinite: seams.Nonfinite = "propagate",
    engine: seams.Engine = "func",
    squares: bool = False,
    check: bool = True,
) -> Accumulator:
    """Accumulate the gradient of a loss over a stream of microbatches.

    The rule::

        init(params)        = zeros
        update(state, part) = state + (w * gradient, w * loss, w)    # w: samples, or of Weighted
        merge(a, b)         = a + b
        finalize(state)     = grads / weight, total / weight         # once; a sum as it is

    The result is the gradient of the full batch, for any sizes and order of the microbatches. The
    state holds one gradient tree; ``update(..., donate=True)`` adds to it during the backward pass.

    Args:
        loss_fn: ``loss_fn(params, *args)`` returns a scalar or ``Weighted``; with ``has_aux``, a
            pair of that and anything else.
        has_aux: Whether the loss returns ``(loss, aux)``; ``update`` then returns ``(state, aux)``.
        batch_argnums: Which positional arguments are batches: their tensors have one row per
            sample along dim 0.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``.
        dtype: Sums are at least this wide: ``torch.float32`` (the default) or ``torch.float64``.
        nonfinite: What becomes of a microbatch with an inf or NaN: ``"propagate"`` adds it;
            ``"skip"`` leaves it out, with its weight, and counts it; ``"raise"`` raises a
            ``FloatingPointError`` that names the leaf, and synchronises with the device.
        engine: ``"func"`` composes with transforms; ``"autograd"`` runs losses that torch.func
            refuses; ``"auto"`` is autograd at top level and torch.func under a transform: see
            ``make_step``.
        squares: Whether to sum the squared norms of the microbatches' gradients too, for
            ``noise_scale``.
        check: Whether to check that microbatches add up to the batch: see ``grad_and_value``.

    Returns:
        ``init(params)``, ``update(state, params, *args, donate=False, weights=None)``,
        ``merge(a, b)`` and ``finalize(state, donate=False) -> (grads, value)``.

    Example:
        >>> acc = accumulator(lambda w, x: ((w * x) ** 2).mean())
        >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
        >>> state = acc.init(w)
        >>> for part in (x[:2], x[2:]):
        ...     state = acc.update(state, w, part, donate=True)
        >>> acc.finalize(state)
        (tensor(9.3333), tensor(4.6667, dtype=torch.float64))

    References:
        `optax.MultiSteps <https://optax.readthedocs.io>`_, which takes a mean of means.
    """
    rule = order.check_rule(
        seams.Rule(
            has_aux=has_aux,
            reduction=reduction,
            nonfinite=nonfinite,
            engine=engine,
            squares=squares,
        )
    )
    at_least = checks.check_dtype(dtype)
    cut = _not_params(checks.check_argnums(batch_argnums, "batch_argnums"), batch_argnums)
    making = Accumulating(
        told=losses.advising(loss_fn, *cut),
        known=writes.known_of(loss_fn),
        batches=(cut, batch_argnums),
        rule=rule,
        check=check,
        decided=structures.Structures(),
    )

    def init(params: trees.Tree) -> AccumState:
        """Make the identity: a state of zeros."""
        leaves = checks.read_params(params)[0]
        count = len(leaves) if squares else None
        with checks.outside_inference_mode():
            return ledger.empty(trees.zeros(params, at_least), leaves[0].device, count)

    def update(
        state: AccumState, params: trees.Tree, *args: Any, donate: bool = False, weights: Any = None
    ) -> Any:
        """Add a microbatch: the state, or ``(state, aux)``."""
        return _update(making, state, params, args, donate, weights)

    def merge(a: AccumState, b: AccumState) -> AccumState:
        """Merge two states, in any order and grouping."""
        names = "the first state's grads", "the second state's grads"
        return ledger.merged(ledger.read_state(a), ledger.read_state(b), squares, names)

    def finalize(state: AccumState, donate: bool = False) -> tuple[trees.Tree, Tensor]:
        """Divide the sums once: the gradients and the value."""
        by = losses.divisor(ledger.read_state(state).weight, ledger.plain_sum(state, reduction))
        value = losses.mean_value(state.total, by)
        (sums, spec), own = trees.flatten(state.grads), donate and modes.may_write()
        grads = weights.divided(dtensors.resolved(sums), by, own=own)
        grads = states.hand_over(trees.tree_leaves(state), grads) if own else grads
        return trees.unflatten(spec, grads), value

    return Accumulator(init, *map(not_followed, (update, merge, finalize)))


class Accumulating(NamedTuple):
    """What an accumulator is made of: its loss, which arguments are batches, its rule."""

    told: Callable[..., Any]  # the loss
    known: writes.Known
    batches: tuple[tuple[int, ...], Any]  # as positions, and as the user wrote them
    rule: seams.Rule
    check: bool
    decided: structures.Structures  # for each structure of what an update is given


def _update(
    making: Accumulating,
    state: AccumState,
    params: trees.Tree,
    args: tuple[Any, ...],
    donate: bool,
    weights: Any,
) -> Any:
    ledger.read_state(state)
    called, rule = (params, *args), making.rule
    leaves, spec = trees.flatten(params)
    sums, is_vector = trees.flatten(state.grads), isinstance(state.squares, Tensor)
    at = checks.positions(making.batches[0], len(called), "batch_argnums")
    own = called[at[0]] if len(at) == 1 else tuple(called[i] for i in at)
    key = structures.structure_of(is_vector, (leaves, spec), sums, flat := trees.flatten(own))

    def examined() -> tuple[batches.Batch, Kinds]:
        checks.read_params(params)
        ledger.check_belongs(state, leaves, spec, rule.squares)
        _not_params(at, making.batches[1])
        read = batches.read_microbatch(own)
        checks.refuse_autocast_cache(leaves)
        return read, kinds_of(leaves, [x.dtype for x in sums[0]])

    read, kinds = structures.update_of(making.decided, key, leaves, flat, examined)

    def loss(leaves: list[Tensor], part: Any, *_: Any) -> Any:
        arguments = [trees.unflatten(spec, leaves), *args]
        for i, x in zip(at, (part,) if len(at) == 1 else part, strict=True):
            arguments[i] = x
        return making.told(*arguments)

    question = question_of(read, rule, "accumulator") if making.check else None
    given = writes.Given("params", leaves, spec), writes.Given("batch", *read[:2])
    guarded = windows.GuardedLoss(loss, making.known, given, writes.Asks(question))
    part = seams.Portion(
        tree=own,
        rows=read.rows or 0,
        carried=(),
        counts=read.rows,
        whole=terms.given_weights(weights, state.total.device),
    )
    new, entry = updated(state, guarded, read, part, seams.Window(rule=rule), kinds, donate)
    return (new, entry.aux) if rule.has_aux else new


def not_followed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function of an accumulator, whose results raise where ``.backward()`` reaches them."""
    return history.refusing_backward(
        method,
        "the state of an accumulator",
        "Use grad or grad_and_value of a whole batch, which .backward() can follow, or torch.func "
        "transforms, which follow an accumulator too. For a constant, use x.detach().",
    )


def _not_params(at: tuple[int, ...], batch_argnums: Any) -> tuple[int, ...]:
    if 0 in at:
        raise ValueError(
            f"batch_argnums={batch_argnums!r} names argument 0, which is params. The parameters "
            "are the same for every microbatch, so they cannot be split."
        )
    return at


# A window of one microbatch ------------------------------------------------------------------


def updated(
    state: AccumState,
    loss: windows.GuardedLoss,
    batch: batches.Batch,
    part: seams.Portion,
    window: seams.Window,
    kinds: Kinds,
    donate: bool,
) -> tuple[AccumState, weights.Microbatch]:
    """The state with one more microbatch, and the entry of that microbatch.

    ``batch`` is the microbatch as it was read, and ``part`` as the loss is given it.
    """
    in_place = modes.may_add_in_place()
    held, spec = trees.flatten(state.grads)
    parts, layouts = dtensors.opened(held)
    sums: Sums | None = None

    def name(leaf: int | None) -> str:
        what = (
            "the loss" if leaf is None else f"the gradient of {trees.paths(spec, 'params')[leaf]}"
        )
        return f"{what} of microbatch {int(state.microbatches)}"

    def added(way: engines.Way) -> weights.Microbatch:
        nonlocal sums
        sums = Sums(way.leaves, kinds, [*own])
        with writes.guarding(loss.known, *loss.given, asks=loss.asks) as guarded:
            add = windows.adder(guarded(loss.call), loss.known, window, sums, way)
            with modes.named_range("microbatch"):
                return add(part)

    with checks.outside_inference_mode():
        own = parts
        if in_place and not donate:
            own = [x.clone() for x in parts]
            window = window._replace(before=parts)
        window = window._replace(name=name)
        try:
            entry = windows.run_window(added, loss.given[0].leaves, window.rule.engine, loss.known)
            assert sums is not None
            grads = dtensors.closed(sums.all(), layouts)
            if gives_up := donate and modes.may_write():
                grads = [x.detach() for x in grads]
            new = ledger.counted(state, [entry], window.rule, trees.unflatten(spec, grads))
        except BaseException as error:
            if donate and in_place and sums is not None and sums.written:
                states.mark(held, states.Spoiled)
            if isinstance(error, Exception) and not modes.transform_active():
                windows.add_place(error, name(None), part.rows, loss.given)
            if batch.problem is not None:
                if isinstance(error, weights.NoRowsError):
                    raise batch.problem from None
                error.add_note(f"pureaccum: the microbatch has no samples: {batch.problem}")
            raise
        if gives_up:
            states.mark(trees.tree_leaves(state))
    return new, entry
