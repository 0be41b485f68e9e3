"""The contenders for a whole training step by other libraries, and by torch.func.

Rule: each as the guide of its library says, with the same numbers for AdamW as ``steps.py``.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from .absent import Absent, optional
from .in_jax import in_jax
from .models import Batch, Problem
from .steps import ADAMW, Read, Training, reader


MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # as Accelerate calls them
FABRICS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def accelerate(problem: Problem) -> Training:
    """Accelerate's ``accumulate``, which skips the optimizer in all microbatches but the last."""
    optional("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # Both are of the process, and would remember the race before this one.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        gradient_accumulation_steps=problem.model.microbatches,
        mixed_precision=MIXED[problem.model.precision],
        cpu=problem.device == "cpu",
    )
    net = copy.deepcopy(problem.net)
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW, fused=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    criterion, rows, read = problem.criterion, problem.rows, reader(accelerator.unwrap_model(net))

    def training(batch: Batch) -> Read:
        for x, y in zip(*(t.split(rows) for t in batch), strict=True):
            with accelerator.accumulate(net):
                accelerator.backward(criterion(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return read

    return training


def fabric(problem: Problem) -> Training:
    """Lightning Fabric, with ``no_backward_sync`` in all microbatches but the last."""
    lightning = optional("lightning.fabric")
    fabric = lightning.Fabric(
        accelerator=problem.device, devices=1, precision=FABRICS[problem.model.precision]
    )
    plain = copy.deepcopy(problem.net)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, fused=True)
    net, optimizer = fabric.setup(plain, optimizer)
    criterion, rows, k = problem.criterion, problem.rows, problem.model.microbatches
    read = reader(plain)

    def training(batch: Batch) -> Read:
        for n, (x, y) in enumerate(zip(*(t.split(rows) for t in batch), strict=True), 1):
            with fabric.no_backward_sync(net, enabled=n < k):
                fabric.backward(criterion(net(x), y) / k)
        optimizer.step()
        optimizer.zero_grad()
        return read

    return training


def torch_func(problem: Problem) -> Training:
    """``torch.func.grad`` for each microbatch, summed by hand, and torch's AdamW."""
    params = {name: x.clone() for name, x in problem.params.items()}
    optimizer = torch.optim.AdamW(params.values(), **ADAMW, fused=True)
    gradient = summed(problem)

    def training(batch: Batch) -> Read:
        grads = gradient(params, batch)
        for name, x in params.items():
            x.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: params

    return training


def torchopt(problem: Problem) -> Training:
    """torchopt's AdamW, a pure function as ours is, on gradients by torch.func; all in place."""
    torchopt = optional("torchopt")
    optimizer = torchopt.adamw(**ADAMW)
    params = {name: x.clone() for name, x in problem.params.items()}
    state = optimizer.init(params)
    gradient = summed(problem)

    def training(batch: Batch) -> Read:
        nonlocal params, state
        grads = gradient(params, batch)
        updates, state = optimizer.update(grads, state, params=params)
        params = torchopt.apply_updates(params, updates)
        return lambda: params

    return training


def summed(problem: Problem) -> Callable[[dict[str, Tensor], Batch], dict[str, Tensor]]:
    """The mean gradient of a window, out of those that torch.func gives for its microbatches."""
    if problem.model.precision == "fp16":
        raise Absent("it has no loss scale")
    gradient = torch.func.grad(problem.under_autocast(problem.loss))
    rows, k = problem.rows, problem.model.microbatches

    def mean(params: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        first, *rest = zip(*(t.split(rows) for t in batch), strict=True)
        sums = gradient(params, first)
        for microbatch in rest:
            torch._foreach_add_(list(sums.values()), list(gradient(params, microbatch).values()))
        torch._foreach_div_(list(sums.values()), k)
        return sums

    return mean


ACCELERATE, FABRIC, FUNC_ADAMW, TORCHOPT, JAX = (
    "Accelerate",
    "Fabric",
    "torch.func + AdamW",
    "torchopt",
    "JAX",
)

RIVALS: dict[str, Callable[[Problem], Training]] = {
    ACCELERATE: accelerate,
    FABRIC: fabric,
    FUNC_ADAMW: torch_func,
    TORCHOPT: torchopt,
    JAX: in_jax,
}
