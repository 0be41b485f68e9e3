"""The contenders for networks with BatchNorm, whose rows are coupled.

Rule: as in ``contenders.py``. All compute the gradient of the full batch, which is also what they
run against: here it fits in memory.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

import pureaccum as pa

from .absent import Absent
from .models import Batch, Problem


Grads = Callable[[Batch], dict[str, Tensor]]


def full_batch(problem: Problem) -> Grads:
    """``.backward()`` on the batch as a whole."""
    net, criterion = problem.net, problem.criterion
    named = list(net.named_parameters())

    def window(batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        criterion(net(x), y).backward()
        return taken(named)

    return window


def taken(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The gradients; ``zero_grad(set_to_none=True)`` is done here, so that nothing stays behind."""
    grads = {name: parameter.grad for name, parameter in named}
    for _, parameter in named:
        parameter.grad = None
    return grads


def by_stages(problem: Problem, *, boundaries: str = "device", **knobs: Any) -> Grads:
    """``pa.staged_from``: gradients, and new running statistics."""
    if boundaries == "host" and problem.device == "cpu":
        raise Absent("a CPU's memory is the host's")
    criterion, params = problem.criterion, problem.params
    loss = pa.staged_from(
        problem.net,
        lambda out, batch: criterion(out, batch[1]),
        inputs=lambda batch: batch[0],
        boundaries=boundaries,
    )
    buffers = pa.functional(problem.net).buffers
    fn = pa.grad_and_value(
        loss, has_aux=True, aux_reduction="last", microbatch_size=problem.rows, **knobs
    )
    return lambda batch: fn(params, batch, buffers=buffers)[0]


FULL, STAGED = "full batch", "staged"
STAGED_AUTOGRAD, STAGED_HOST = "staged, autograd", "staged, on the host"

NORMS: dict[str, Callable[[Problem], Grads]] = {
    FULL: full_batch,
    STAGED: by_stages,
    STAGED_AUTOGRAD: partial(by_stages, engine="autograd"),
    STAGED_HOST: partial(by_stages, boundaries="host"),
}
