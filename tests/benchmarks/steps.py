"""The contenders for a whole training step, and for the optimizer alone.

Rule: as in ``contenders.py``; each keeps the state of a training run, and what a call gives is the
parameters after one step more.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa

from .models import Batch, Problem


Training = Callable[[Batch], dict[str, Tensor]]
LR = 1e-4


def hand(problem: Problem) -> Training:
    """The hand-written loop with torch's fused AdamW."""
    net, rows = copy.deepcopy(problem.net), problem.rows
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    named = dict(net.named_parameters())

    def training(batch: Batch) -> dict[str, Tensor]:
        k = -(-len(batch[0]) // rows)
        for x, y in zip(*(t.split(rows) for t in batch), strict=True):
            (F.mse_loss(net(x), y) / k).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {name: parameter.detach() for name, parameter in named.items()}

    return training


def ours(engine: str, *, clip: bool = False, **knobs: Any) -> Callable[[Problem], Training]:
    """``pa.make_step``, each old state donated, with the same kernel."""

    def build(problem: Problem) -> Training:
        optimizer = pa.adamw(LR, fused=True)
        if clip:  # measured, and never at work: the steps stay the same
            optimizer = pa.chain(pa.clip_by_global_norm(1e6), optimizer)
        step = pa.make_step(
            problem.loss,
            optimizer,
            microbatch_size=problem.rows,
            engine=engine,
            donate=True,
            **knobs,
        )
        state = step.init(problem.params)

        def training(batch: Batch) -> dict[str, Tensor]:
            nonlocal state
            state, _ = step(state, batch)
            return state.params

        return training

    return build


def torch_apply(problem: Problem) -> Training:
    """``torch.optim.AdamW.step`` alone, on gradients that stand."""
    params = {name: x.clone() for name, x in problem.params.items()}
    for x in params.values():
        x.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW(params.values(), lr=LR, fused=True)

    def training(_: Batch) -> dict[str, Tensor]:
        optimizer.step()
        return params

    return training


def our_apply(problem: Problem) -> Training:
    """``adamw(...).apply`` alone, donated."""
    params = {name: x.clone() for name, x in problem.params.items()}
    grads = {name: torch.ones_like(x) for name, x in params.items()}
    optimizer = pa.adamw(LR, fused=True)
    state = optimizer.init(params)

    def training(_: Batch) -> dict[str, Tensor]:
        nonlocal params, state
        params, state = optimizer.apply(grads, state, params, donate=True)
        return params

    return training


HAND_STEP, OUR_STEPS = "hand step", ("func step", "autograd step")
TORCH_APPLY, OUR_APPLY = "torch.optim.AdamW", "adamw.apply"
SAFE = {engine: f"{engine}, scaled and clipped" for engine in OUR_STEPS}

STEPS: dict[str, Callable[[Problem], Training]] = {
    HAND_STEP: hand,
    TORCH_APPLY: torch_apply,
    OUR_APPLY: our_apply,
}
for _name in OUR_STEPS:
    _engine = _name.split()[0]
    STEPS[_name] = ours(_engine)
    STEPS[SAFE[_name]] = ours(_engine, clip=True, loss_scale=pa.dynamic_loss_scale())
