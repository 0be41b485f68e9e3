"""What a training step is made of, and how it checks what it is given."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch

from .._base import checks, claims, trees
from .._base.torch_internals import modes
from .._core import buckets, history, ledger, precision, seams, terms, writes
from .._core.structures import Structures
from .._optim import updates
from .buffers import Threading, begin_buffers
from .loss_scale import LossScale, LossScaleState
from .state import StepWindow, TrainState


class Calling(NamedTuple):
    """How the loss of a microbatch is called."""

    loss_fn: Any
    has_aux: bool
    aux_reduction: trees.Tree
    policy: precision.Policy | None
    buffers: Threading | None
    keys: bool
    known: writes.Known  # what is known of it: see writes.py
    check: bool  # whether it is asked if it may be cut
    keeps_buffers: bool  # whether new buffers of modules have to reach what it returns
    shared: tuple[Any, ...] = ()  # what a call gives it beside the batch, whole
    whole: terms.Whole = None  # the weights of the whole batch, of a sum of ``Weighted``


class Plan(NamedTuple):
    """What a step is made of."""

    calling: Calling
    optimizer: updates.Optimizer
    size: int | list[int] | None
    rule: seams.Rule
    loss_scale: LossScale | None
    donate: bool
    structures: Structures  # what was decided for each
    group: Any = None  # the ranks that share a batch
    agreed: claims.Agreement | None = None  # what these have to agree on: see claims.py


def size_of(plan: Plan) -> int | None:
    """The samples of all microbatches alike: where they differ, nothing is compiled for all."""
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
        if modes.transform_active():
            return plain(plan, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return function(made, *args, **kwargs)

        def kept(*args: Any, **kwargs: Any) -> T:
            return plain(plan._replace(donate=False), *args, **kwargs)

        call = partial(function, made)
        return history.call_with_history(
            call, kept, plan.calling.known, args, kwargs, captured=False
        )

    return entered


def read_train_state(plan: Plan, state: TrainState) -> trees.Flat:
    """Check that a state is of this plan, but for that of the optimizer; give its parameters."""
    checks.check_state(state, TrainState, "this step")
    if plan.group is not None:
        buckets.group_of(plan.group)
    check_buffers(plan, state.buffers)
    scaled = isinstance(state.loss_scale, LossScaleState)
    if scaled != (plan.loss_scale is not None):
        raise ValueError(
            f"state.loss_scale is {state.loss_scale!r}, but this step was made "
            f"{'without' if scaled else 'with'} a loss scale. Likely cause: the state comes from "
            "another configuration."
        )
    if not isinstance(state.key, torch.Tensor) or state.key.shape != (2,):  # pyright: ignore[reportUnnecessaryIsInstance]
        came = tuple(state.key.shape) if isinstance(state.key, torch.Tensor) else state.key  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"state.key is {came!r}; expected a key of shape (2,), as key(seed) makes it. For "
            "stacked states, use torch.func.vmap."
        )
    leaves, spec = checks.read_params(state.params, "state.params")
    checks.refuse_autocast_cache(leaves)
    return leaves, spec


def begun_by(plan: Plan, state: TrainState, params: trees.Flat) -> updates.Begin:
    """Check that the optimizer's state is of this plan; give what begins its step."""
    return plan.optimizer.check(state.opt_state, params, "state.opt_state")


def check_window(plan: Plan, state: TrainState, window: StepWindow, params: trees.Flat) -> None:
    """Check that a window is of this plan and of this state, whose parameters are given."""
    checks.check_state(window, StepWindow, "this step", "the window")
    ledger.check_belongs(window.accum, *params, plan.rule.squares)
    if plan.calling.buffers is None and window.buffers == ():
        return
    specs = (
        trees.flatten(begin_buffers(plan.calling.buffers, state.buffers))[1],
        trees.flatten(window.buffers)[1],
    )
    cause = (
        f"This step was made with buffers={plan.calling.buffers!r}. Likely cause: the window "
        "comes from another step."
    )
    checks.check_same_structure(*specs, "the buffers of step.begin(state)", "window.buffers", cause)


def check_buffers(plan: Plan, given: trees.Tree) -> None:
    """Check that buffers are there if and only if the step knows what becomes of them."""
    absent, policy = given is None or (isinstance(given, tuple) and not given), plan.calling.buffers
    if absent and policy is not None:
        raise ValueError(
            f"this step was made with buffers={policy!r}, but the buffers are missing. Pass them "
            "to init: step.init(fn.params, buffers=fn.buffers)."
        )
    if not absent and policy is None and plan.calling.keeps_buffers:
        raise ValueError(
            "buffers were passed, but make_step does not know how to update them. Use "
            "make_step(..., buffers='freeze'), 'sequential' or 'pooled'."
        )
