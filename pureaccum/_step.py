"""A whole optimizer step as one pure function: ``state, info = step(state, batch)``.

    gradients of the scaled loss, microbatch by microbatch, summed
    / weight, / scale; all finite, and any weight at all? then the step is applied:
    gradient maps (clipping), optimizer, buffers; at last the loss scale

The same step takes its microbatches from a stream: ``begin``, ``update``, ``apply``. Nothing waits
for the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ._accumulator import check_belongs, empty, updated
from ._aux import check_aux_reduction
from ._batches import check_size, read_batch
from ._buffers import Threading, begin, check_policy
from ._call import caller, onwards
from ._chain import as_optimizer
from ._donation import Spoiled, hand_over, mark
from ._engine import Nonfinite, Rule, check_rule
from ._finish import finished
from ._inputs import check_state, read_params, refuse_autocast_cache
from ._loss import Reduction
from ._loss_scale import LossScale
from ._passes import Engine, outside_inference_mode
from ._precision import Policy, check_precision, under
from ._random import key
from ._torch import transform_active
from ._train_state import Plan, StepInfo, StepWindow, TrainState, check_buffers, check_train_state
from ._tree import Tree, check_same_structure, flatten, map, unflatten, zeros
from ._tree import leaves as leaves_of
from ._window import Window, fold, read_cut


class Step(NamedTuple):
    """``step(state, batch)``, and the functions that it is made of: see ``make_step``."""

    init: Callable[..., TrainState]
    begin: Callable[[TrainState], StepWindow]
    update: Callable[[TrainState, StepWindow, Tree], Any]
    apply: Callable[[TrainState, StepWindow], tuple[TrainState, StepInfo]]
    whole: Callable[[TrainState, Tree], tuple[TrainState, StepInfo]]

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepInfo]:
        """One step over a whole batch."""
        return self.whole(state, batch)


def make_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    has_aux: bool = False,
    microbatch_size: int | None = None,
    reduction: Reduction = "mean",
    aux_reduction: Tree = "concat",
    loss_scale: LossScale | None = None,
    policy: Policy | None = None,
    nonfinite: Nonfinite = "propagate",
    buffers: Threading | None = None,
    keys: bool = False,
    engine: Engine = "func",
    donate: bool = False,
) -> Step:
    """Make a training step out of a loss and an optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch)`` gives a scalar or ``Weighted``; with ``has_aux``,
            that and anything else. With ``buffers`` it also takes ``buffers=`` and returns
            ``(loss, new_buffers)``, or ``(loss, (new_buffers, aux))``. With ``keys`` it also takes
            ``keys=``, one key a row.
        optimizer: ``sgd``, ``adam``, ``adamw``, ``from_torch``, ``chain``, ``partition``, or
            anything with ``init(params)`` and ``apply(grads, state, params)``.
        has_aux: Whether the loss returns aux.
        microbatch_size: Rows per microbatch; None takes a batch whole.
        reduction: What a scalar loss is of its rows, ``"mean"`` or ``"sum"``.
        aux_reduction: What becomes of aux: see ``grad_and_value``.
        loss_scale: ``dynamic_loss_scale`` or ``static_loss_scale``; None scales nothing.
        policy: Mixed precision.
        nonfinite: What becomes of a microbatch with an inf or NaN: see ``accumulator``. Whatever
            it is, a step whose gradient is not finite is not applied.
        buffers: How buffers go through the microbatches: ``"freeze"``, ``"sequential"`` or
            ``"pooled"``, which updates BatchNorm's running statistics once, from the moments of
            all microbatches: the full batch's, for a BatchNorm with no other above it.
        keys: Hand each row of a batch a key of its own, made of the run's seed, the number of the
            step and the number of the row: masks do not depend on how a batch is cut.
        engine: ``"func"`` composes with transforms; ``"autograd"`` runs what torch.func refuses.
        donate: Each call gives up the state that it is given, and its memory is used again.

    Returns:
        The step: ``init(params, buffers=None, seed=0)``, ``step(state, batch)``, and the same for
        a stream of microbatches: ``begin(state)``, ``update(state, window, microbatch)``, which
        with ``has_aux`` returns ``(window, aux)``, and ``apply(state, window)``.

    >>> from pureaccum import sgd
    >>> step = make_step(lambda w, x: ((w * x) ** 2).mean(), sgd(0.1), microbatch_size=2)
    >>> state = step.init(torch.tensor(1.0))
    >>> state, info = step(state, torch.tensor([1.0, 2.0, 3.0]))
    >>> state.params, info.applied
    (tensor(0.0667), tensor(True))
    """
    rule = check_rule(Rule(has_aux or buffers is not None, reduction, nonfinite, engine))
    check_aux_reduction(aux_reduction)
    check_policy(buffers)
    if microbatch_size is not None:
        check_size(microbatch_size)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is {loss_fn!r}; expected a function of (params, batch).")
    if loss_scale is not None and not isinstance(loss_scale, LossScale):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"loss_scale is {loss_scale!r}; expected dynamic_loss_scale(), static_loss_scale(...) "
            "or None."
        )
    if policy is not None:
        check_precision(policy)
    plan = Plan(
        under(policy, loss_fn),
        as_optimizer(optimizer),
        has_aux,
        microbatch_size,
        rule,
        aux_reduction,
        loss_scale,
        policy,
        buffers,
        keys,
        donate,
        set(),
    )
    made = (partial(function, plan) for function in (_init, _begin, _update, _apply, _whole))
    return Step(*made)


def _init(plan: Plan, params: Tree, buffers: Tree = None, seed: int = 0) -> TrainState:
    """The first state; it shares no memory with what it is made of."""
    check_buffers(plan, buffers)
    if plan.buffers:
        begin(plan.buffers, buffers)  # names what is no tensor
    leaves, _ = read_params(params)
    device = leaves[0].device
    if plan.policy is not None:
        params = plan.policy.cast_to_param(params)
    params = map(_own, params)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return TrainState(
        params,
        () if buffers is None else map(_own, buffers),
        plan.optimizer.init(params),
        () if plan.loss_scale is None else plan.loss_scale.init(device),
        key(seed, device),
        zero,
        zero.clone(),
        zero.clone(),
    )


def _whole(plan: Plan, state: TrainState, batch: Tree) -> tuple[TrainState, StepInfo]:
    leaves, spec = _read(plan, state)
    cut = read_cut(batch, plan.size, plan.has_aux, "batch")
    weighted: set[bool] = set()
    window = Window(
        caller(plan, state, spec, weighted),
        leaves,
        spec,
        cut,
        plan.rule,
        torch.float32,
        plan.aux_reduction,
        _scale(plan, state),
        (begin(plan.buffers, state.buffers) if plan.buffers else (), state.samples),
        partial(onwards, plan),
    )
    with outside_inference_mode():
        accum, unit, carried, aux, _ = fold(window)
        # A batch in one microbatch passes through untouched, and its mean weighs 1.
        rows = float(cut.batch.rows or 1) if cut.untouched and weighted == {False} else 1.0
        return finished(plan, state, accum, carried, aux, unit=unit, rows=rows, own=True)


def _begin(plan: Plan, state: TrainState) -> StepWindow:
    leaves, _ = _read(plan, state)
    with outside_inference_mode():
        buffers = begin(plan.buffers, state.buffers) if plan.buffers else ()
        sums = empty(zeros(state.params), leaves[0].device)
        return StepWindow(sums, map(torch.clone, buffers), state.samples.clone())


def _update(plan: Plan, state: TrainState, window: StepWindow, microbatch: Tree) -> Any:
    leaves, spec = _read(plan, state)
    carried = _carried_by(plan, state, window, leaves, spec)
    rows = read_batch(microbatch, "microbatch").rows
    call = caller(plan, state, spec, set())

    def loss(leaves: list[Tensor]) -> Any:
        return call(leaves, microbatch, carried)

    accum, entry = updated(
        window.accum,
        loss,
        leaves,
        spec,
        rows,
        plan.rule,
        plan.recomputes,
        donate=plan.donate,
        scale=_scale(plan, state),
    )
    after, entry = onwards(plan, carried, entry, rows or 0)
    if plan.donate and not transform_active():
        new, carried_spec = flatten(after)
        after = unflatten(carried_spec, hand_over(leaves_of(carried), new))
    else:  # no two states may share a tensor
        after = map(torch.clone, after)
    window = StepWindow(accum, *after)
    return (window, entry.aux) if plan.has_aux else window


def _apply(plan: Plan, state: TrainState, window: StepWindow) -> tuple[TrainState, StepInfo]:
    leaves, spec = _read(plan, state)
    carried = _carried_by(plan, state, window, leaves, spec)
    own = plan.donate and not transform_active()
    sums = flatten(window.accum.grads)[0]
    accum = window.accum._replace(grads=[x.detach() for x in sums] if own else sums)
    try:
        with outside_inference_mode():
            result = finished(plan, state, accum, carried, (), own=own)
    except BaseException:
        if own:
            mark(sums, Spoiled)
        raise
    if own:
        mark(leaves_of(window))
    return result


# Pieces --------------------------------------------------------------------------------


def _own(x: Tensor) -> Tensor:
    return x.clone() if transform_active() else x.detach().clone()


def _read(plan: Plan, state: TrainState) -> tuple[list[Tensor], optree.PyTreeSpec]:
    check_train_state(plan, state)
    leaves, spec = read_params(state.params, "state.params")
    refuse_autocast_cache(leaves)
    return leaves, spec


def _carried_by(
    plan: Plan, state: TrainState, window: Any, leaves: list[Tensor], spec: optree.PyTreeSpec
) -> tuple[Any, Tensor]:
    check_state(window, StepWindow, "this step", "the window")
    check_belongs(window.accum, leaves, spec)
    expected = begin(plan.buffers, state.buffers) if plan.buffers else ()
    specs = flatten(expected)[1], flatten(window.buffers)[1]
    cause = f"This step was made with buffers={plan.buffers!r}; a window of another one?"
    check_same_structure(*specs, "those that step.begin(state) gives", "window.buffers", cause)
    return window.buffers, window.samples


def _scale(plan: Plan, state: TrainState) -> Tensor | None:
    return None if plan.loss_scale is None else state.loss_scale.scale
