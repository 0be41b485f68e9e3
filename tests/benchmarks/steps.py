"""The contenders for a whole training step by torch alone and by us, and for the optimizer alone.

Rule: as in ``contenders.py``; each keeps the state of a training run. A call takes one step more,
and returns a function that gives the parameters to whoever asks for them.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pureaccum as pa

from .models import HALVES, Batch, Problem


Read = Callable[[], dict[str, Tensor]]
Training = Callable[[Batch], Read]
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def by_hand(problem: Problem, *, compiled: bool = False) -> Training:
    """The hand-written loop with torch's fused AdamW; ``GradScaler`` passes through but in fp16.

    Compiled is the loss of a microbatch, and with it its backward pass.
    """
    net, rows, k = copy.deepcopy(problem.net), problem.rows, problem.model.microbatches
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW, fused=True)
    scaler = torch.amp.GradScaler(problem.device, enabled=problem.model.precision == "fp16")
    criterion = problem.criterion

    @problem.under_autocast
    def part(x: Tensor, y: Tensor) -> Tensor:
        return criterion(net(x), y) / k

    part = torch.compile(part) if compiled else part

    def training(batch: Batch) -> Read:
        for x, y in zip(*(t.split(rows) for t in batch), strict=True):
            scaler.scale(part(x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return reader(net)

    return training


def reader(net: torch.nn.Module) -> Read:
    return lambda: {name: parameter.detach() for name, parameter in net.named_parameters()}


def ours(
    engine: str = "auto", *, clip: bool = False, scaled: bool = False, **knobs: Any
) -> Callable[[Problem], Training]:
    """``pa.make_step`` of a ``pa.functional``, each old state donated, with the same kernel."""

    def build(problem: Problem) -> Training:
        precision = problem.model.precision
        optimizer = pa.adamw(**ADAMW, fused=True)
        if clip:  # measured, and never at work: the steps stay the same
            optimizer = pa.chain(pa.clip_by_global_norm(1e6), optimizer)
        apply = pa.functional(problem.net).apply

        def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
            x, y = batch
            return problem.criterion(apply(params, (), x)[0], y)

        step = pa.make_step(
            loss,
            optimizer,
            microbatch_size=problem.rows,
            engine=engine,
            donate=True,
            policy=pa.Policy(autocast=HALVES[precision]) if precision in HALVES else None,
            loss_scale=pa.dynamic_loss_scale() if scaled or precision == "fp16" else None,
            **knobs,
        )
        state = step.init(problem.params)

        def training(batch: Batch) -> Read:
            nonlocal state
            state, _ = step(state, batch)
            return lambda: state.params

        return training

    return build


def torch_apply(problem: Problem) -> Training:
    """``torch.optim.AdamW.step`` alone, on gradients that stand."""
    params = {name: x.clone() for name, x in problem.params.items()}
    for x in params.values():
        x.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW(params.values(), **ADAMW, fused=True)

    def training(_: Batch) -> Read:
        optimizer.step()
        return lambda: params

    return training


def our_apply(problem: Problem) -> Training:
    """``adamw(...).apply`` alone, donated."""
    params = {name: x.clone() for name, x in problem.params.items()}
    grads = {name: torch.ones_like(x) for name, x in params.items()}
    optimizer = pa.adamw(**ADAMW, fused=True)
    state = optimizer.init(params)

    def training(_: Batch) -> Read:
        nonlocal params, state
        params, state = optimizer.apply(grads, state, params, donate=True)
        return lambda: params

    return training


HAND_STEP, COMPILED_HAND, COMPILED = "hand step", "compiled hand step", "compiled step"
OUR_STEPS = ("default step", "func step")
ENGINE_OF = dict(zip(OUR_STEPS, ("auto", "func"), strict=True))
TORCH_APPLY, OUR_APPLY = "torch.optim.AdamW", "adamw.apply"
SAFE = {name: f"{name}, scaled and clipped" for name in OUR_STEPS}

STEPS: dict[str, Callable[[Problem], Training]] = {
    HAND_STEP: by_hand,
    COMPILED_HAND: partial(by_hand, compiled=True),
    COMPILED: ours("func", compile=True),
    TORCH_APPLY: torch_apply,
    OUR_APPLY: our_apply,
}
for _name, _engine in ENGINE_OF.items():
    STEPS[_name] = ours(_engine)
    STEPS[SAFE[_name]] = ours(_engine, clip=True, scaled=True)
