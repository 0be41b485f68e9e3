"""The contenders for programs that people have written, each as its source says, and as ours.

Rule: as in ``steps.py``. A program is named by where it comes from, and then by whose it is.

    train.py       nanoGPT's: warm-up and cosine, decay of matrices alone, clipping, fp16 by a scale
    mnist          pytorch/examples, on digits of 8 by 8, with windows of a loader
    ensembling     torch's tutorial: 10 networks as one, and AdamW by hand
    higher         its gradient through 5 momentum steps, with respect to the learning rate
    L-BFGS         5 iterations of torch.optim.LBFGS from the start; the closure accumulates. In
                   float64: in float32 rounding decides how long the steps are
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import pureaccum as pa

from .models import HALVES, Batch, Problem, Read, Training, optional, parts
from .steps import ADAMW, reader


# nanoGPT's train.py ----------------------------------------------------------------------------

RATE, END, WARM, LONG, DECAY, CLIP = 6e-4, 6e-5, 100, 1000, 0.1, 1.0
OF_GPT: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}


def rate_by_hand(step: int) -> float:
    if step < WARM:
        return RATE * step / WARM
    return END + 0.5 * (1 + math.cos(math.pi * (step - WARM) / (LONG - WARM))) * (RATE - END)


def train_py(problem: Problem) -> Training:
    net, rows, k = copy.deepcopy(problem.net), problem.rows, problem.model.microbatches
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    others = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, **OF_GPT)
    scaler = torch.amp.GradScaler(problem.device, enabled=problem.model.precision == "fp16")
    forward = problem.under_autocast(lambda x, y: problem.criterion(net(x), y))
    step = 0

    def training(batch: Batch) -> Read:
        nonlocal step
        for group in optimizer.param_groups:
            group["lr"] = rate_by_hand(step)
        for x, y in parts(batch, rows):
            scaler.scale(forward(x, y) / k).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        return reader(net)

    return training


def our_train_py(problem: Problem) -> Training:
    fn, precision = pa.functional(problem.net), problem.model.precision
    falling = pa.cosine_decay(RATE, LONG - WARM, END)
    rate = pa.join_schedules([pa.linear_warmup(RATE, WARM), falling], [WARM])
    of = {
        "matrices": pa.adamw(rate, weight_decay=DECAY, **OF_GPT),
        "others": pa.adamw(rate, weight_decay=0.0, **OF_GPT),
    }
    optimizer = pa.partition(of, lambda path: "matrices" if fn.params[path].dim() > 1 else "others")

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return problem.criterion(fn.apply(params, fn.buffers, x)[0], y)

    step = pa.make_step(
        loss,
        pa.chain(pa.clip_by_global_norm(CLIP), optimizer),
        microbatch_size=problem.rows,
        policy=pa.Policy(autocast=HALVES[precision]) if precision in HALVES else None,
        loss_scale=pa.dynamic_loss_scale() if precision == "fp16" else None,
        donate=True,
    )
    state = step.init(fn.params)

    def training(batch: Batch) -> Read:
        nonlocal state
        state, _ = step(state, batch)
        return lambda: state.params

    return training


# A convnet on digits ---------------------------------------------------------------------------


def mnist(problem: Problem) -> Training:
    """A backward pass for each batch of the loader, and a step after each window."""
    net, rows, k = copy.deepcopy(problem.net), problem.rows, problem.model.microbatches
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)

    def training(batch: Batch) -> Read:
        for x, y in parts(batch, rows):
            (problem.criterion(net(x), y) / k).backward()
        optimizer.step()
        optimizer.zero_grad()
        return reader(net)

    return training


def our_mnist(problem: Problem, *, streamed: bool = False) -> Training:
    fn, rows = pa.functional(problem.net), problem.rows

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return problem.criterion(fn.apply(params, fn.buffers, x)[0], y)

    step = pa.make_step(loss, pa.adamw(**ADAMW), microbatch_size=rows, donate=True)
    state = step.init(fn.params)

    def training(batch: Batch) -> Read:
        nonlocal state
        if streamed:
            window = step.begin(state)
            for microbatch in parts(batch, rows):
                window = step.update(state, window, microbatch)
            state, _ = step.apply(state, window)
        else:
            state, _ = step(state, batch)
        return lambda: state.params

    return training


# L-BFGS ----------------------------------------------------------------------------------------

OF_LBFGS: dict[str, Any] = {
    "max_iter": 5,
    "max_eval": 1000,
    "tolerance_grad": 0.0,
    "tolerance_change": 0.0,
    "history_size": 10,
    "line_search_fn": "strong_wolfe",
}


def lbfgs(problem: Problem) -> Training:
    net, rows, k = copy.deepcopy(problem.net).double(), problem.rows, problem.model.microbatches
    start = copy.deepcopy(net.state_dict())

    def training(batch: Batch) -> Read:
        net.load_state_dict(start)
        batch = batch[0].double(), batch[1].double()
        optimizer = torch.optim.LBFGS(net.parameters(), **OF_LBFGS)

        def closure() -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for x, y in parts(batch, rows):
                loss = problem.criterion(net(x), y) / k
                loss.backward()
                total += loss.detach()
            return total

        optimizer.step(closure)
        return reader(net)

    return training


def our_lbfgs(problem: Problem) -> Training:
    fn = pa.functional(copy.deepcopy(problem.net).double())

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return problem.criterion(fn.apply(params, fn.buffers, x)[0], y)

    both = pa.grad_and_value(loss, microbatch_size=problem.rows, engine="auto")
    optimizer = pa.lbfgs(**OF_LBFGS)

    def training(batch: Batch) -> Read:
        batch = batch[0].double(), batch[1].double()
        state = optimizer.init(fn.params)
        params, _ = optimizer.apply(lambda params: both(params, batch), state, fn.params)
        return lambda: params

    return training


# An ensemble -----------------------------------------------------------------------------------

MEMBERS = 10


def members_of(problem: Problem) -> list[dict[str, Tensor]]:
    """Parameters that differ, alike for every contender."""
    torch.manual_seed(0)
    params = problem.params.items()
    return [{name: x + 0.01 * torch.randn_like(x) for name, x in params} for _ in range(MEMBERS)]


def ensembling(problem: Problem) -> Training:
    params, rows, k = pa.stack(members_of(problem)), problem.rows, problem.model.microbatches
    gradient = vmap(grad(problem.loss), in_dims=(0, None))
    optimizer = torch.optim.AdamW(params.values(), **ADAMW)

    def training(batch: Batch) -> Read:
        for x, y in parts(batch, rows):
            for name, g in gradient(params, (x, y)).items():
                before = params[name].grad
                params[name].grad = g / k if before is None else before.add_(g, alpha=1 / k)
        optimizer.step()
        optimizer.zero_grad()
        return lambda: params

    return training


def our_ensembling(problem: Problem) -> Training:
    step = pa.make_step(problem.loss, pa.adamw(**ADAMW), microbatch_size=problem.rows)
    states = pa.stack([step.init(params) for params in members_of(problem)])
    every = vmap(step, in_dims=(0, None))

    def training(batch: Batch) -> Read:
        nonlocal states
        states, _ = every(states, batch)
        return lambda: states.params

    return training


# A gradient through steps ----------------------------------------------------------------------

STEPS, MOMENTUM = 5, 0.9
ThroughSteps = Callable[[Batch], dict[str, Tensor]]


def by_higher(problem: Problem) -> ThroughSteps:
    higher = optional("higher")
    net, criterion = copy.deepcopy(problem.net), problem.criterion

    def window(batch: Batch) -> dict[str, Tensor]:
        x, y = batch
        rate = torch.tensor(0.01, requires_grad=True)
        plain = torch.optim.SGD(net.parameters(), lr=0.01, momentum=MOMENTUM)
        with higher.innerloop_ctx(net, plain, override={"lr": [rate]}) as (moving, optimizer):
            for _ in range(STEPS):
                optimizer.step(criterion(moving(x), y))
            (gradient,) = torch.autograd.grad(criterion(moving(x), y), rate)
        return {"rate": gradient}

    return window


def by_our_steps(problem: Problem, *, cut: bool = False) -> ThroughSteps:
    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return problem.criterion(functional_call(problem.net, params, (x,)), y)

    def after(rate: Tensor, batch: Batch) -> Tensor:
        size = problem.rows if cut else None
        step = pa.make_step(loss, pa.sgd(rate, momentum=MOMENTUM), microbatch_size=size)
        state = step.init(problem.params)
        for _ in range(STEPS):
            state, _ = step(state, batch)
        return loss(state.params, batch)

    return lambda batch: {"rate": grad(after)(torch.tensor(0.01), batch)}


PROGRAMS: dict[str, Callable[[Problem], Training | ThroughSteps]] = {
    "train.py, by hand": train_py,
    "train.py, make_step": our_train_py,
    "mnist, by hand": mnist,
    "mnist, make_step": our_mnist,
    "mnist, streamed": partial(our_mnist, streamed=True),
    "ensembling, by hand": ensembling,
    "ensembling, vmap(step)": our_ensembling,
    "higher": by_higher,
    "higher, by steps": by_our_steps,
    "higher, by steps in microbatches": partial(by_our_steps, cut=True),
    "torch.optim.LBFGS": lbfgs,
    "lbfgs": our_lbfgs,
}
