"""What a training step takes, gives and is made of, and how it checks what it is given."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._base.agreement import Agreement
from .._base.checks import check_same_structure, check_state, read_params, refuse_autocast_cache
from .._base.states import loadable
from .._base.torch_internals.modes import transform_active
from .._base.trees import Flat, Tree, flatten
from .._core.buckets import group_of
from .._core.history import call_with_history
from .._core.ledger import AccumState, check_belongs
from .._core.precision import Policy
from .._core.seams import Rule
from .._core.structures import Structures
from .._core.writes import Known
from .._optim.update import Begin, Optimizer
from .buffers import Threading, begin_buffers
from .loss_scale import LossScale, LossScaleState


@loadable
class TrainState(NamedTuple):
    """All that a run is, as tensors: save it, stack it, look at it.

    Attributes:
        params: The parameters.
        buffers: Running statistics and the like; ``()`` where none are configured.
        opt_state: What the optimizer keeps.
        loss_scale: A ``LossScaleState``; ``()`` without one.
        key: The key that all keyed randomness of the run comes from.
        attempts: How many steps there were, applied or not.
        applied: How many of them were applied.
        samples: How many rows they had.

    Example:
        >>> import torch
        >>> from pureaccum import make_step, sgd
        >>> step = make_step(lambda w, x: (w * x).mean(), sgd(0.5))
        >>> state, info = step(step.init(torch.tensor(1.0)), torch.tensor([1.0, 3.0]))
        >>> state.params, state.applied, state.samples
        (tensor(0.), tensor(1), tensor(2))
    """

    params: Tree
    buffers: Tree
    opt_state: Any
    loss_scale: Any
    key: Tensor
    attempts: Tensor
    applied: Tensor
    samples: Tensor


@loadable
class StepInfo(NamedTuple):
    """What happened in a step, in 0-d tensors that nothing has waited for.

    Attributes:
        loss: The loss over the whole batch, float64.
        grad_norm: The norm of the full batch's gradient: unscaled, before clipping.
        weight: What the loss was divided by: rows, or what ``Weighted`` says; 0 for sums.
        microbatches: How many microbatches there were.
        skipped: How many of them ``nonfinite="skip"`` left out.
        applied: Whether the step was applied: its gradients, loss and learning rates were finite,
            and anything had a weight.
        scale: The loss scale that it was computed with.
        aux: What the loss returned beside its value, reduced; ``()`` without ``has_aux``.
        noise: How much the microbatches' gradients scatter, for ``noise_scale`` and
            ``running_noise_scale``; ``()`` without ``noise=True``.

    Example:
        >>> import torch
        >>> from pureaccum import make_step, sgd
        >>> step = make_step(lambda w, x: (w * x).mean(), sgd(0.5))
        >>> state, info = step(step.init(torch.tensor(1.0)), torch.tensor([1.0, torch.inf]))
        >>> info.loss, info.applied
        (tensor(inf, dtype=torch.float64), tensor(False))
    """

    loss: Tensor
    grad_norm: Tensor
    weight: Tensor
    microbatches: Tensor
    skipped: Tensor
    applied: Tensor
    scale: Tensor
    aux: Tree
    noise: Any = ()


@loadable
class StepWindow(NamedTuple):
    """A step that has begun: what its microbatches have come to so far.

    Attributes:
        accum: The gradients of the *scaled* loss, the weight and the counts.
        buffers: What the next microbatch is given; ``()`` where none are configured.
        rows: How many rows they had; it begins at 0, so that windows of ranks can be merged.
    """

    accum: AccumState
    buffers: Any
    rows: Tensor


class Functions(NamedTuple):
    """The functions of a step, which ``Step`` describes."""

    init: Callable[..., TrainState]
    window: Callable[..., tuple[TrainState, StepInfo]]
    begin: Callable[[TrainState], StepWindow]
    update: Callable[..., Any]
    apply: Callable[[TrainState, StepWindow], tuple[TrainState, StepInfo]]
    whole: Callable[..., tuple[TrainState, StepInfo]]
    merge: Callable[[StepWindow, StepWindow], StepWindow]
    form: Callable[..., str] = lambda state, batch, *shared: "eager"


class Step(Functions):
    """A step: called with ``(state, batch, *shared)`` it gives ``(state, info)``.

    Attributes:
        init: ``init(params, buffers=None, seed=0)`` gives the first state, of copies.
        window: ``window(state, microbatches, *shared)`` gives ``(state, info)``: one step over the
            microbatches of a stream, such as a list that ``windows`` gave. It is ``begin``,
            ``update`` for each of them, and ``apply``, with aux reduced as by the step itself.
        begin: ``begin(state)`` gives an empty window, for a stream of microbatches.
        update: ``update(state, window, microbatch, *shared, offset=None)`` gives the window with
            one more microbatch, or ``(window, aux)``. It need not have rows, or as many in each of
            its tensors, where the loss is no mean over rows, and there are no keys: packed
            sequences, or a list of images of several sizes, with ``Weighted``. With keys,
            ``offset`` says how many rows of the step come before it, where ranks share them out or
            they come in another order.
        apply: ``apply(state, window)`` gives ``(state, info)``.
        whole: ``whole(state, batch, *shared)`` is the step itself.
        merge: ``merge(a, b)`` gives one window of two that began with the same state, such as those
            that ranks had saved: sums, counts and rows are added; pooled moments are merged in that
            order, and any other buffer is that of ``a``. Not for buffers that go sequentially.
        form: ``form(state, batch, *shared)`` gives ``"eager"``, or how ``compile`` goes through
            that batch: ``"scan"``, ``"unrolled"`` or ``"loop"``.
    """

    __slots__ = ()
    # vmap asks for a name, or else for the repr of all that the loss is bound to; dynamo has none.
    __name__ = "step"

    def __call__(self, state: TrainState, batch: Tree, *shared: Any) -> tuple[TrainState, StepInfo]:
        """One step over a whole batch.

        Args:
            state: What ``init`` or the step before gave.
            batch: A pytree whose tensors have one row per sample along dim 0.
            shared: Further arguments of the loss, which each microbatch is given whole: the
                parameters of a teacher or a discriminator, class weights, a coefficient.
        """
        return self.whole(state, batch, *shared)


class Calling(NamedTuple):
    """How the loss of a microbatch is called."""

    loss_fn: Any
    has_aux: bool
    aux_reduction: Tree
    policy: Policy | None
    buffers: Threading | None
    keys: bool
    known: Known  # what is known of it: see writes.py
    check: bool  # whether it is asked if it may be cut
    shared: tuple[Any, ...] = ()  # what a call gives it beside the batch, whole


class Plan(NamedTuple):
    """What a step is made of."""

    calling: Calling
    optimizer: Optimizer
    size: int | list[int] | None
    rule: Rule
    loss_scale: LossScale | None
    donate: bool
    structures: Structures  # what was decided for each
    group: Any = None  # the ranks that share a batch
    agreed: Agreement | None = None  # what these have to agree on: see agreement.py


def size_of(plan: Plan) -> int | None:
    """The rows of all microbatches alike: where they differ, nothing is compiled for all."""
    assert not isinstance(plan.size, list)
    return plan.size


# Checks at the entry -------------------------------------------------------------------------


T = TypeVar("T")


def recording(
    function: Callable[..., T], eager: Callable[..., T] | None = None
) -> Callable[..., T]:
    """Let plain autograd follow a function of a step, and its state, outside inference mode.

    It is given a plan first. A method of something that has a plan comes with ``eager``, the same
    function of a plan, which runs wherever results are followed: under a transform or a compiler,
    and by plain autograd.
    """
    plain = eager or function

    @wraps(function)
    def entered(made: Any, *args: Any, **kwargs: Any) -> T:
        plan: Plan = made if eager is None else made.plan
        if transform_active():
            return plain(plan, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return function(made, *args, **kwargs)

        def kept(*args: Any, **kwargs: Any) -> T:
            return plain(plan._replace(donate=False), *args, **kwargs)

        call = partial(function, made)
        return call_with_history(call, kept, plan.calling.known, args, kwargs, captured=False)

    return entered


def read_train_state(plan: Plan, state: TrainState) -> Flat:
    """Check that a state is of this plan, but for that of the optimizer; give its parameters."""
    check_state(state, TrainState, "this step")
    if plan.group is not None:
        group_of(plan.group)
    check_buffers(plan, state.buffers)
    scaled = isinstance(state.loss_scale, LossScaleState)
    if scaled != (plan.loss_scale is not None):
        raise ValueError(
            f"state.loss_scale is {state.loss_scale!r}, but this step was made "
            f"{'without' if scaled else 'with'} a loss scale. A state of another configuration?"
        )
    if not isinstance(state.key, Tensor) or state.key.shape != (2,):  # pyright: ignore[reportUnnecessaryIsInstance]
        came = tuple(state.key.shape) if isinstance(state.key, Tensor) else state.key  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"state.key is {came!r}; expected a key of shape (2,), as key(seed) makes it. States "
            "that are stacked go through torch.func.vmap."
        )
    leaves, spec = read_params(state.params, "state.params")
    refuse_autocast_cache(leaves)
    return leaves, spec


def begun_by(plan: Plan, state: TrainState, params: Flat) -> Begin:
    """Check that the optimizer's state is of this plan; give what begins its step."""
    return plan.optimizer.check(state.opt_state, params, "state.opt_state")


def check_window(plan: Plan, state: TrainState, window: StepWindow, params: Flat) -> None:
    """Check that a window is of this plan and of this state, whose parameters are given."""
    check_state(window, StepWindow, "this step", "the window")
    check_belongs(window.accum, *params, plan.rule.squares)
    if plan.calling.buffers is None and window.buffers == ():
        return
    specs = (
        flatten(begin_buffers(plan.calling.buffers, state.buffers))[1],
        flatten(window.buffers)[1],
    )
    cause = f"This step was made with buffers={plan.calling.buffers!r}; a window of another one?"
    check_same_structure(*specs, "those that step.begin(state) gives", "window.buffers", cause)


def check_buffers(plan: Plan, given: Tree) -> None:
    """Check that buffers are there if and only if the step knows what becomes of them."""
    absent, policy = given is None or (isinstance(given, tuple) and not given), plan.calling.buffers
    if absent and policy is not None:
        raise ValueError(
            f"this step was made with buffers={policy!r}, but the buffers are missing. Pass "
            "them to init: step.init(fn.params, buffers=fn.buffers)."
        )
    if not absent and policy is None:
        raise ValueError(
            "buffers came, but make_step was not told what becomes of them: make_step(..., "
            "buffers='freeze'), 'sequential' or 'pooled'."
        )
