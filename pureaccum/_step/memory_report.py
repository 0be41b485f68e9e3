"""The memory of a training step: predicted before it is run, and measured.

    predicted: the step is run on tensors that have shapes and no numbers
    measured:  the step is run

Both count the storages that are alive at every operation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import checks, dtensors, random_state, reprs, trees
from .._base.torch_internals import modes
from .._core import auto_size
from .state import TrainState


class Memory(NamedTuple):
    """The bytes of a step, on the device of the parameters; for DTensors those of this rank.

    The rule: ``beyond_arguments``, the memory that the step itself holds at its peak, is the sum of
    ``gradients``, ``activations`` and ``workspace``.

    Attributes:
        parameters: The parameters in the state passed to the step.
        buffers: The buffers in that state.
        optimizer: The optimizer state in that state.
        gradients: The gradient sums over the microbatches.
        activations: The tensors that the forward pass of one microbatch stores for its backward
            pass; for a microbatched function, its inputs and outputs.
        workspace: Everything else at the peak: temporaries, gradients that are not yet summed, and
            the next state if the peak is in the update. Negative if gradients take the place of
            activations, in a batch of one microbatch.

    Example:
        >>> Memory(1000, 0, 2000, 1000, 300, 60).beyond_arguments
        1360
    """

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    activations: int
    workspace: int

    @property
    def beyond_arguments(self) -> int:
        """The bytes that the step itself holds at its peak."""
        return self.gradients + self.activations + self.workspace


class MemoryReport(NamedTuple):
    """The result of ``memory_report``; it prints as a table.

    Attributes:
        predicted: The memory of a step on tensors without numbers; ``()`` for DTensors, whose ranks
            communicate.
        measured: The memory of a real step; ``()`` if the tensors have no numbers.

    Example:
        >>> print(MemoryReport(Memory(1000, 0, 2000, 1000, 300, 60), ()))
        bytes                      predicted
        parameters                     1,000
        buffers                            0
        optimizer                      2,000
        gradients                      1,000
        activations                      300
        workspace                         60
        together                       4,360
        beyond the arguments           1,360
    """

    predicted: Memory | tuple[()]
    measured: Memory | tuple[()]

    def __str__(self) -> str:
        named = zip(self._fields, self, strict=True)
        columns = {name: it for name, it in named if isinstance(it, Memory)}
        names = (*Memory._fields, "together", "beyond the arguments")
        rows = [[*it, sum(it), it.beyond_arguments] for it in columns.values()]
        lines = ["bytes".ljust(20) + "".join(f"{it:>16}" for it in columns)]
        for name, *numbers in zip(names, *rows, strict=True):
            lines.append(name.ljust(20) + "".join(f"{number:>16,}" for number in numbers))
        return "\n".join(lines)


def memory_report(
    step: Callable[..., Any], state: TrainState, batch: trees.Tree, *shared: Any
) -> MemoryReport:
    """Predict and measure the peak memory of a training step.

    The rule::

        predicted: the step is run on tensors that have shapes and no numbers
        measured:  the step is run once, on copies if it donates, and its results are dropped

    The prediction computes and allocates nothing, so the model need not fit into memory. If the
    state and the batch are on the ``meta`` device, there is only a prediction. Code that reads a
    number from a tensor then gets 1 or True, and operations whose shapes depend on numbers
    (``nonzero``) cannot be predicted. On a CPU the measurement counts live tensors, without the
    internal buffers of kernels. On CUDA it is ``torch.cuda.max_memory_allocated``, whose peak
    counter is reset.

    With DTensors, all ranks must call it together, nothing is predicted, and the bytes are those of
    this rank.

    For a stream, report the step over its microbatches joined into one batch, with their size.

    Args:
        step: A step made by ``make_step``, without ``compile``.
        state: A state of that step.
        batch: A batch.
        shared: The further arguments of the step.

    Example:
        >>> from pureaccum import adamw, make_step
        >>> step = make_step(lambda w, x: ((x @ w) ** 2).mean(), adamw(), microbatch_size=32)
        >>> report = memory_report(step, step.init(torch.ones(64, 32)), torch.ones(128, 64))
        >>> report.measured.parameters, report.measured.gradients, report.measured.activations
        (8192, 8192, 4116)
        >>> round(report.predicted.beyond_arguments / report.measured.beyond_arguments, 2)
        1.0

    References:
        `The meta device <https://docs.pytorch.org/docs/stable/meta.html>`_
    """
    if not callable(step):
        raise TypeError(f"step is {reprs.kind(step)}; expected the result of make_step.")
    checks.check_state(state, TrainState, "make_step")
    params, _ = checks.read_params(state.params, "state.params")
    if hasattr(step, "form") and step.form(state, batch, *shared) != "eager":  # pyright: ignore
        raise ValueError(
            "memory_report does not work with a step that compiles itself, because graphs plan "
            "their own memory. Report the same step without compile."
        )
    held = [dtensors.local(x) for x in params]
    sums = sum(x.numel() * trees.accumulation_dtype(x.dtype).itemsize for x in held)
    tensors = [x for x in trees.tree_leaves((state, batch, shared)) if isinstance(x, Tensor)]
    before = random_state.generators({x.device for x in tensors if not x.is_meta})
    try:
        predicted = ()
        if not dtensors.any_sharded(tensors):
            with modes.imagining() as (imagined, taken_for):
                given = state, batch, *shared
                given = trees.tree_map(lambda x: imagined(x) if isinstance(x, Tensor) else x, given)
                predicted = _memory(state, sums, *_run(step, *given, taken_for=taken_for))
        if any(x.untyped_storage().device.type == "meta" for x in tensors):
            return MemoryReport(predicted, ())
        given = trees.tree_map(torch.clone, state), batch, *shared
        return MemoryReport(predicted, _memory(state, sums, *_run(step, *given)))
    finally:
        random_state.restore(before)


def _run(
    step: Callable[..., Any],
    state: TrainState,
    *given: Any,
    taken_for: Callable[[Tensor], Tensor] | None = None,
) -> tuple[auto_size.Live, int]:
    """The bytes that were alive as backward passes began, and at the peak."""
    device = state.samples.device
    on_cuda = device.type == "cuda" and type(state.samples) is Tensor
    with auto_size.counting(device=device, taken_for=taken_for) as live:
        if not on_cuda:
            step(state, *given)
            return live, live.peak
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        step(state, *given)
        return live, torch.cuda.max_memory_allocated(device) - start


def _memory(state: TrainState, sums: int, live: auto_size.Live, peak: int) -> Memory:
    # The sums begin with the gradient of the first microbatch.
    activations = max(live.before_first, live.before_backward - sums)
    return Memory(
        parameters=_bytes(state.params),
        buffers=_bytes(state.buffers),
        optimizer=_bytes(state.opt_state),
        gradients=sums,
        activations=activations,
        workspace=peak - sums - activations,
    )


def _bytes(tree: trees.Tree) -> int:
    return sum(dtensors.local(x).nbytes for x in trees.tree_leaves(tree) if isinstance(x, Tensor))
