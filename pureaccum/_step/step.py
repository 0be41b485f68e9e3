"""A whole optimizer step as one pure function: ``state, info = step(state, batch)``.

    gradients of the scaled loss, microbatch by microbatch, summed
    / weight, / scale; all finite, and any weight at all? then the step is applied:
    gradient maps (clipping), optimizer, buffers; at last the loss scale

The same step takes its microbatches from a stream: ``begin``, ``update``, ``apply``. Nothing waits
for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any, Literal

import torch

from .._base import checks, reprs, trees
from .._base.settings import records
from .._base.torch_internals import autograd, modes
from .._core import auto_size, batches, buckets, precision, reductions, seams, structures, writes
from .._core.layers import order
from .._core.losses import Reduction
from .._optim import users
from .._pure import keys, loading
from . import compiled, constants, plans, ranks, whole_step, windows
from .buffers import Threading, begin_buffers, check_policy, takes_buffers
from .loss_scale import LossScale
from .state import Step, StepInfo, TrainState


@records
def make_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    microbatch_size: int | Sequence[int] | Literal["auto"] | None = None,
    has_aux: bool = False,
    policy: precision.Policy | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = False,
    compile: bool | Mapping[str, Any] = False,
    group: Any = None,
    buffers: Threading | None = None,
    keys: bool = False,
    reduction: Reduction = "mean",
    aux_reduction: trees.Tree = "concat",
    nonfinite: seams.Nonfinite = "propagate",
    check: bool = True,
    noise: bool = False,
    engine: seams.Engine = "auto",
) -> Step:
    """Make a training step out of a loss and an optimizer.

    The rule::

        sums, total, weight = those of an accumulator, with the gradients of scale * loss
        grads, loss = sums / weight / scale, total / weight
        applied = grads, loss and learning rate are finite, and the weight is not zero
        params, opt_state = optimizer.apply(grads, opt_state, params)    # and buffers: if applied
        loss_scale = update(loss_scale, grads, loss and every microbatch are finite)

    Most programs need ``microbatch_size`` and perhaps ``has_aux``. The options are about

    - memory: ``microbatch_size``, ``donate``
    - precision: ``policy``, ``loss_scale``, ``nonfinite``
    - speed: ``compile``, ``engine``
    - the loss: ``has_aux``, ``aux_reduction``, ``reduction``, ``buffers``, ``keys``
    - several processes: ``group``
    - diagnosis: ``check``, ``noise``

    Args:
        loss_fn: ``loss_fn(params, batch, *shared)`` returns a scalar or ``Weighted``; with
            ``has_aux``, a pair of that and anything else. With ``buffers`` it also takes
            ``buffers=`` and returns ``(loss, new_buffers)``, or ``(loss, (new_buffers, aux))``.
            With ``keys`` it also takes ``keys=``, one key per sample. A batch of several tensors
            is one tree: ``x, y = batch`` or ``batch["x"]``.
        optimizer: ``sgd``, ``adam``, ``adamw``, ``from_torch``, ``chain``, ``partition``, or
            anything with ``init(params)`` and ``apply(grads, state, params)``.
        microbatch_size: Samples per microbatch; the last one may be shorter. Or a list, the samples
            of each microbatch, for batches of that many samples; None takes a batch whole.
            ``"auto"`` tries the whole batch, and after an out-of-memory error half of that size,
            and so on; later batches begin with the size that succeeded. The result is exactly that
            of the size that succeeded. The loss is rerun with the same random numbers after an
            out-of-memory error; if one sample does not fit, the error is raised. ``"auto"`` cuts
            the microbatches of a stream in the same way. With ``noise`` it begins with half of a
            batch, because ``noise`` needs two microbatches.
        has_aux: Whether the loss returns ``(loss, aux)``.
        policy: Mixed precision: see ``Policy``.
        loss_scale: ``dynamic_loss_scale`` or ``static_loss_scale``; None scales nothing. The scale
            multiplies the gradient that flows into the loss, not the loss. Compute the loss itself
            in float32: 65536, the default scale, is inf in float16.
        donate: Whether each call gives up the state that it receives, so that its memory can be
            used again. A later use of that state raises an error.
        compile: Whether the step compiles itself when it is first called with a batch of new sizes:
            True, or the arguments of ``torch.compile``, such as ``{"mode": "reduce-overhead"}``.
            The microbatches become a loop inside one graph; where gradients are large, one graph
            runs once per microbatch. ``step.form(state, batch)`` tells which. A Python number is a
            constant of a graph, and may take eight values at most; a tensor may change every step.
        group: The ranks that share each batch, such as ``torch.distributed.group.WORLD`` once it
            is initialised. Every rank calls the step with its own samples, any number of them,
            even none. The ranks add up their sums once per step, and all reach the same state.
            Counts are those of all ranks; ``aux`` is this rank's own. Ranks whose states or
            settings differ all raise a ``ValueError`` that names the difference. On a CPU the ranks
            compare settings, counts, scales and rates at every step, and everything that a state
            holds at steps 1, 2, 4, 8, …. On a GPU the ranks synchronise only at those steps, and
            only the first compares everything; at other steps a mismatch makes all ranks skip the
            update.
        buffers: How buffers pass through the microbatches: ``"freeze"`` leaves them as they are
            (of a loss without ``buffers=``, too), ``"sequential"`` hands them from one microbatch
            to the next, and ``"pooled"`` updates BatchNorm's running statistics once, from the
            moments of all microbatches. Those are the full batch's for a BatchNorm with no other
            above it, and for every BatchNorm with ``functional(module, microbatch_size=...)`` and
            no size here. With a size here a BatchNorm normalises by microbatch, which needs
            ``check=False``.
        keys: Whether the loss receives one key per sample, made of the run's seed, the number of
            the step and the sample's position. Dropout masks then do not depend on how a batch is
            cut.
        reduction: What a scalar loss is of its samples, ``"mean"`` or ``"sum"``.
        aux_reduction: What becomes of aux: see ``grad_and_value``.
        nonfinite: What becomes of a microbatch with an inf or NaN: see ``accumulator``. In any
            case a step whose gradient is not finite is not applied.
        check: Whether the step checks that microbatches add up to the batch: see
            ``grad_and_value``.
        noise: Whether to measure how much the gradients of microbatches scatter: ``info.noise``,
            for ``noise_scale`` and ``running_noise_scale``.
        engine: ``"auto"`` is autograd at top level, which is faster and runs every loss. It is
            torch.func under a transform or a compiler, and for a loss that itself calls a gradient
            or a step. ``"func"`` and ``"autograd"`` force that engine. All give the same bits,
            except for the few operations that torch.func differentiates by another formula: see
            ``grad_and_value``.

    Returns:
        The step: ``init(params, buffers=None, seed=0)``, ``step(state, batch, *shared)``, and for a
        stream ``window(state, microbatches, *shared)``, or piece by piece ``begin(state)``,
        ``update(state, window, microbatch, *shared)``, ``apply(state, window)`` and ``merge(a, b)``
        of two windows. ``help(step)`` explains each of them.

    Example:
        >>> from pureaccum import sgd
        >>> step = make_step(lambda w, x: ((w * x) ** 2).mean(), sgd(0.1), microbatch_size=2)
        >>> state = step.init(torch.tensor(1.0))
        >>> state, info = step(state, torch.tensor([1.0, 2.0, 3.0]))
        >>> state.params, info.applied
        (tensor(0.0667), tensor(True))
        >>> step.form(state, torch.tensor([1.0, 2.0, 3.0]))  # with compile: scan, unrolled or loop
        'eager'

    References:
        `torch.amp <https://docs.pytorch.org/docs/stable/amp.html>`_
    """
    serves_frozen = buffers == "freeze" and not takes_buffers(loss_fn)
    rule = order.check_rule(
        seams.Rule(
            has_aux=has_aux or (buffers is not None and not serves_frozen),
            reduction=reduction,
            nonfinite=nonfinite,
            engine=engine,
            squares=noise,
            scaled=loss_scale is not None,
        )
    )
    auto = auto_size.is_auto(microbatch_size)
    size = None if auto or microbatch_size is None else batches.check_sizes(microbatch_size)
    _check_parts(loss_fn, aux_reduction, loss_scale, buffers, group)
    calling = plans.Calling(
        loss_fn=precision.under(policy, loss_fn),
        has_aux=has_aux,
        aux_reduction=aux_reduction,
        policy=policy,
        buffers=None if serves_frozen else buffers,
        keys=keys,
        known=writes.known_of(loss_fn),
        check=check,
        keeps_buffers=buffers is None,
    )
    plan = plans.Plan(
        calling=calling,
        optimizer=users.as_optimizer(optimizer),
        size=size,
        rule=rule,
        loss_scale=loss_scale,
        donate=donate,
        group=group,
        structures=structures.Structures(),
    )
    plan = plan if group is None else plan._replace(agreed=ranks.agreement_of(plan, compile))
    step, graphs = _eager(plan), None
    if compile is not False:
        step, graphs = _compiled(plan, step, compile)
    return _in_any_size(plan, step, graphs) if auto else step


# What it is given -------------------------------------------------------------------------------


def _check_parts(
    loss_fn: object, aux_reduction: trees.Tree, loss_scale: object, buffers: Any, group: Any
) -> None:
    reductions.check_reduce(aux_reduction, "aux_reduction")
    check_policy(buffers)
    if not callable(loss_fn):
        came = reprs.of_value(loss_fn)
        raise TypeError(f"loss_fn is {came}; expected a function of (params, batch).")
    if isinstance(loss_fn, torch.nn.Module):
        try:
            signature(loss_fn.forward).bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"loss_fn is a module, {type(loss_fn).__name__}; expected a function of (params, "
                "batch) that calls fn.apply(params, fn.buffers, x), where fn = functional(module)."
            ) from error
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"loss_scale is {reprs.of_value(loss_scale)}; expected dynamic_loss_scale(), "
            "static_loss_scale(...) or None."
        )
    if group is not None:
        buckets.group_of(group)
        if buffers == "sequential":
            raise ValueError(
                "buffers='sequential' does not work with group, because ranks run at the same "
                "time. Use 'pooled', one update from the samples of all ranks, or 'freeze'."
            )


# Its layers -------------------------------------------------------------------------------------


def _eager(plan: plans.Plan) -> Step:
    apply = partial(windows.apply_window, plan)
    return Step(
        init=partial(_init, plan),
        begin=partial(windows.begin_window, plan),
        update=partial(windows.update_window, plan),
        apply=apply,
        whole=partial(whole_step.step_whole, plan),
        window=partial(windows.step_over_stream, plan, partial(windows.folded_window, plan), apply),
        merge=partial(windows.merge_windows, plan),
    )


def _compiled(
    plan: plans.Plan, step: Step, compile: Literal[True] | Mapping[str, Any]
) -> tuple[Step, Callable[[int], compiled.CompiledStep]]:
    """The step in graphs, and the same for any size of microbatches."""
    constants.check_compilable(plan.rule, compile)
    settings: Mapping[str, Any] = {} if compile is True else compile
    size = plan.size
    graphs_of = cache(lambda size: compiled.CompiledStep(plan._replace(size=size), settings))
    # With a list of sizes each microbatch goes through the graph of its size, as in a stream.
    graphs = graphs_of(None if isinstance(size, list) else size)
    window = partial(windows.step_over_stream, plan, graphs.folded, graphs.apply)
    made = step._replace(update=graphs.update, apply=graphs.apply, window=window)
    if not isinstance(size, list):
        return made._replace(whole=graphs.whole, form=graphs.form), graphs_of

    def in_sizes(state: TrainState, batch: trees.Tree, *shared: Any) -> tuple[TrainState, StepInfo]:
        flat = batches.read_batch(batch)
        batches.sizes_of_batch(batches.rows_to_cut(flat), size)
        return window(state, batches.cut_batch(flat, size), *shared)

    return made._replace(whole=in_sizes, form=lambda *_: "loop"), graphs_of


def _in_any_size(
    plan: plans.Plan, step: Step, graphs_of: Callable[[int], compiled.CompiledStep] | None
) -> Step:
    """A step that finds by itself in which size it takes a batch, or a microbatch of a stream.

    A size is tried without the compiler, and without giving anything up: that follows the sums.
    """
    parts = 2 if plan.rule.squares else 1  # one microbatch does not scatter
    search = partial(auto_size.by_memory, look=_looked_at, parts=parts)
    sums = search(partial(whole_step.sums_of_rows, plan))
    more = search(partial(whole_step.sums_of_microbatch, plan))
    whole = partial(whole_step.step_in_sums, plan, sums.run)
    if graphs_of is not None:

        def whole(
            state: TrainState, batch: trees.Tree, *shared: Any
        ) -> tuple[TrainState, StepInfo]:
            size = None if modes.transform_active() else sums.size_of(state, batch)
            if size is None:
                return whole_step.step_in_sums(plan, sums.run, state, batch, *shared)
            return graphs_of(size).whole(state, batch, *shared)

    elif plan.group is None and not plan.donate:  # the next state is a part of what has to fit

        def in_size(size: int, *args: Any) -> tuple[TrainState, StepInfo]:
            return whole_step.step_whole(plan._replace(size=size), *args)

        whole = search(in_size).run
    folded = partial(whole_step.folded_in_sums, plan, more.run)
    return step._replace(
        whole=whole,
        update=partial(whole_step.update_in_sums, plan, more.run),
        window=partial(windows.step_over_stream, plan, folded, step.apply),
    )


def _looked_at(state: TrainState, batch: trees.Tree, *_: Any) -> tuple[trees.Tree, trees.Tree]:
    checks.check_state(state, TrainState, "this step")
    return batch, state.params


# Its first state --------------------------------------------------------------------------------


def _init(
    plan: plans.Plan, params: trees.Tree, buffers: trees.Tree = None, seed: int = 0
) -> TrainState:
    """The first state; it shares no memory with what it is made of, and has no history."""
    leaves, spec = checks.read_params(params)
    _refuse_frozen(leaves, spec)
    loading.warn_of_changes(leaves)
    if torch.is_grad_enabled() and not modes.transform_active():
        _check_beginning(leaves, spec)
    with checks.outside_inference_mode():
        return _begun(plan, params, buffers, seed)


def _refuse_frozen(leaves: list[torch.Tensor], spec: Any) -> None:
    for i, x in enumerate(leaves):
        if isinstance(x, torch.nn.Parameter) and not x.requires_grad:
            raise ValueError(
                f"{trees.paths(spec, 'params')[i]} is a frozen Parameter (requires_grad=False), "
                "but a step trains everything that init gets. Pass functional(module).params, "
                "which leaves frozen parameters out; to train this one, pass x.detach()."
            )


def _check_beginning(leaves: list[torch.Tensor], spec: Any) -> None:
    """Check that params may be copied as numbers, as those of a module are."""
    for i, x in enumerate(leaves):
        if x.requires_grad:
            checks.refuse_without_graph("the first state of a run")
        if x.grad_fn is not None:
            raise ValueError(
                f"{trees.paths(spec, 'params')[i]} was computed from tensors that require grad "
                f"({x.grad_fn.name()}), but a run begins with numbers. Pass x.detach(). To "
                "differentiate a step with respect to it, use state._replace(params=params)."
            )


def _begun(plan: plans.Plan, params: trees.Tree, buffers: trees.Tree, seed: int) -> TrainState:
    device = trees.tree_leaves(params)[0].device
    plans.check_buffers(plan, buffers)
    begin_buffers(plan.calling.buffers, buffers)  # names what is no tensor
    buffers = () if buffers is None else buffers
    seeded = keys.key(seed, device)
    if plan.agreed is not None:
        buckets.group_of(plan.group)
        ranks.check_same(plan.agreed, params, buffers, seeded, plan.group)
    if plan.calling.policy is not None:
        params = plan.calling.policy.cast_to_param(params)
    params = trees.tree_map(_own, params)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return TrainState(
        params=params,
        buffers=trees.tree_map(_own, buffers),
        opt_state=plan.optimizer.init(params),
        loss_scale=() if plan.loss_scale is None else plan.loss_scale.init(device),
        key=seeded,
        attempts=zero,
        applied=zero.clone(),
        samples=zero.clone(),
    )


def _own(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if modes.transform_active() else autograd.without_history([x])[0].clone()
