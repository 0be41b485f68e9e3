"""What a training step takes and returns, and its functions."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .._base import reprs, states, trees
from .._core import ledger


@states.loadable
class TrainState(NamedTuple):
    """The whole state of a run, in tensors: save it, stack it, look at it.

    Attributes:
        params: The parameters.
        buffers: Running statistics and the like; ``()`` without ``buffers=``.
        opt_state: The state of the optimizer.
        loss_scale: A ``LossScaleState``; ``()`` without one.
        key: The key of the run, from which the keys of samples are made.
        attempts: How many steps were taken, applied or not.
        applied: How many of them were applied.
        samples: How many samples they had in all.

    Example:
        >>> import torch
        >>> from pureaccum import make_step, sgd
        >>> step = make_step(lambda w, x: (w * x).mean(), sgd(0.5))
        >>> state, info = step(step.init(torch.tensor(1.0)), torch.tensor([1.0, 3.0]))
        >>> state.params, state.applied, state.samples
        (tensor(0.), tensor(1), tensor(2))
    """

    params: trees.Tree
    buffers: trees.Tree
    opt_state: Any
    loss_scale: Any
    key: Tensor
    attempts: Tensor
    applied: Tensor
    samples: Tensor


@states.loadable
class StepInfo(NamedTuple):
    """What happened in a step, in 0-d tensors; nothing has synchronised with the device yet.

    Attributes:
        loss: The loss over the whole batch, float64.
        grad_norm: The norm of the full batch's gradient: unscaled, before clipping.
        weight: What the loss was divided by: samples, or the weight of ``Weighted``; 0 for sums.
        microbatches: How many microbatches the batch had.
        skipped: How many of them ``nonfinite="skip"`` left out.
        applied: Whether the step was applied: its gradients, loss and learning rates were finite,
            and the weight was not zero.
        checked: Whether this call checked that microbatches add up to the batch: see ``checks``.
        scale: The loss scale of the step.
        lr: The learning rate of the step; with ``partition`` a dict with one per label; ``()`` if
            the optimizer does not tell.
        aux: The aux of the loss, reduced; ``()`` without ``has_aux``.
        noise: How much the gradients of the microbatches scatter, for ``noise_scale`` and
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
    checked: Tensor
    scale: Tensor
    lr: Any
    aux: trees.Tree
    noise: Any = ()


@states.loadable
class StepWindow(NamedTuple):
    """A step that has begun: the sums over its microbatches so far.

    Attributes:
        accum: The gradients of the *scaled* loss, the weight and the counts.
        buffers: The buffers for the next microbatch; ``()`` without ``buffers=``.
        rows: How many samples the microbatches had, from 0, so that windows of ranks can be merged.
        checked: Whether any update checked its loss: see ``checks``.
    """

    accum: ledger.AccumState
    buffers: Any
    rows: Tensor
    checked: Tensor


class StepInit(Protocol):
    """Begins a run."""

    def __call__(
        self, params: trees.Tree, buffers: trees.Tree = None, seed: int = 0
    ) -> TrainState: ...


class StepOverBatch(Protocol):
    """Takes a step over a batch."""

    def __call__(
        self, state: TrainState, batch: trees.Tree, *shared: Any
    ) -> tuple[TrainState, StepInfo]: ...


class StepOverStream(Protocol):
    """Takes a step over the microbatches of a stream."""

    def __call__(
        self,
        state: TrainState,
        microbatches: Iterable[trees.Tree],
        *shared: Any,
        weights: Any = None,
    ) -> tuple[TrainState, StepInfo]: ...


class StepBegin(Protocol):
    """Begins a window."""

    def __call__(self, state: TrainState) -> StepWindow: ...


class StepUpdate(Protocol):
    """Adds a microbatch to a window."""

    def __call__(
        self,
        state: TrainState,
        window: StepWindow,
        microbatch: trees.Tree,
        *shared: Any,
        offset: int | None = None,
        weights: Any = None,
    ) -> Any: ...


class StepApply(Protocol):
    """Ends a window."""

    def __call__(self, state: TrainState, window: StepWindow) -> tuple[TrainState, StepInfo]: ...


class StepMerge(Protocol):
    """Merges two windows."""

    def __call__(self, a: StepWindow, b: StepWindow) -> StepWindow: ...


class StepForm(Protocol):
    """Tells how a batch is compiled."""

    def __call__(self, state: TrainState, batch: trees.Tree, *shared: Any) -> str:
        """``"eager"``, ``"scan"``, ``"unrolled"`` or ``"loop"``."""
        ...


class Functions(NamedTuple):
    """The functions of a step, which ``Step`` describes."""

    init: StepInit
    window: StepOverStream
    begin: StepBegin
    update: StepUpdate
    apply: StepApply
    whole: StepOverBatch
    merge: StepMerge
    form: StepForm = lambda state, batch, *shared: "eager"


class Step(Functions):
    """A training step: ``step(state, batch, *shared)`` returns ``(state, info)``.

    Attributes:
        init: ``init(params, buffers=None, seed=0)`` returns the first state, made of copies.
        window: ``window(state, microbatches, *shared, weights=None)`` takes one step over the
            microbatches of a stream, such as a list from ``windows``, and returns
            ``(state, info)``. It calls ``begin``, ``update`` for each microbatch, and ``apply``,
            and reduces aux as the step does. A tuple is a batch, not a stream, and raises.
        begin: ``begin(state)`` returns an empty window, for a stream of microbatches.
        update: ``update(state, window, microbatch, *shared, offset=None, weights=None)`` returns
            the window with one more microbatch, or ``(window, aux)``. If the loss is not a mean
            over samples and there are no keys, the tensors of a microbatch may differ in length,
            or have none: packed sequences, or a list of images of several sizes, with
            ``Weighted``. With keys, ``offset`` is the number of samples of the step that come
            before this microbatch, if ranks share them or they come in another order. For a sum
            of ``Weighted``, ``weights`` lists the weight of each term over the whole step.
        apply: ``apply(state, window)`` applies the step and returns ``(state, info)``.
        whole: ``whole(state, batch, *shared)`` is the step itself.
        merge: ``merge(a, b)`` returns one window made of two that began with the same state, such
            as windows that ranks have saved. Sums, counts and samples are added, pooled moments
            are merged in that order, and any other buffer is that of ``a``. It raises with
            ``buffers="sequential"``.
        form: ``form(state, batch, *shared)`` returns ``"eager"``, or how a compiled step runs that
            batch: ``"scan"``, ``"unrolled"`` or ``"loop"``.
    """

    __slots__ = ()
    # vmap asks for a name, or else for the repr of all that the loss is bound to; dynamo has none.
    __name__ = "step"
    __repr__ = reprs.of_made

    def __call__(
        self, state: TrainState, batch: trees.Tree, *shared: Any
    ) -> tuple[TrainState, StepInfo]:
        """Take one step over a whole batch.

        Args:
            state: The state that ``init`` or the last step returned.
            batch: A pytree whose tensors have one row per sample along dim 0.
            shared: Further arguments of the loss, which each microbatch receives whole: the
                parameters of a teacher or a discriminator, class weights, a coefficient.
        """
        return self.whole(state, batch, *shared)
