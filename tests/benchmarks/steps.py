"""The contenders for a whole training step: by torch, by us, and by other libraries.

Rule: each is the code that its user would write, or as the guide of its library says, with the same
numbers for AdamW, and keeps the state of a training run. A call takes one step more, and returns a
function that gives the parameters to whoever asks for them.
"""

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import pureaccum as pa

from .models import HALVES, Absent, Batch, Problem, Read, Training, optional, parts


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
        for x, y in parts(batch, rows):
            scaler.scale(part(x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return reader(net)

    return training


def reader(net: torch.nn.Module) -> Read:
    return lambda: {name: parameter.detach() for name, parameter in net.named_parameters()}


Loss = Callable[[dict[str, Tensor], Batch], Any]


def mean_error(problem: Problem) -> Loss:
    """The problem's own loss, of a ``pa.functional``."""
    apply = pa.functional(problem.net).apply

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return problem.criterion(apply(params, (), x)[0], y)

    return loss


def two_means(problem: Problem, join: Callable[[Tensor, Tensor, int], Any]) -> Loss:
    """The error, and the size of outputs: two sums over samples, and how they become a loss."""
    apply = pa.functional(problem.net).apply

    def loss(params: dict[str, Tensor], batch: Batch) -> Any:
        x, y = batch
        out, _ = apply(params, (), x)
        error, size = (out - y).square().mean(1).sum(), out.square().mean(1).sum()
        return join(error, size, len(x))

    return loss


def in_one(a: Tensor, b: Tensor, samples: int) -> Any:
    return pa.Weighted(a + 0.1 * b, samples)


def each_over_its_own(a: Tensor, b: Tensor, samples: int) -> Any:
    """Numbers may be equal by chance, so that these are two weights, which have to be counted."""
    return pa.Weighted(a, samples) + 0.1 * pa.Weighted(b, samples)


def both_over_one_tensor(a: Tensor, b: Tensor, samples: int) -> Any:
    weight = a.new_tensor(samples)
    return pa.Weighted(a, weight) + 0.1 * pa.Weighted(b, weight)


def ours(
    engine: str = "auto",
    loss_of: Callable[[Problem], Loss] = mean_error,
    *,
    clip: bool = False,
    scaled: bool = False,
    **options: Any,
) -> Callable[[Problem], Training]:
    """``pa.make_step`` of a loss, each old state donated, with the same kernel."""

    def build(problem: Problem) -> Training:
        precision = problem.model.precision
        optimizer = pa.adamw(**ADAMW, fused=True)
        if clip:  # measured, and never at work: the steps stay the same
            optimizer = pa.chain(pa.clip_by_global_norm(1e6), optimizer)
        step = pa.make_step(
            loss_of(problem),
            optimizer,
            microbatch_size=problem.rows,
            engine=engine,
            donate=True,
            policy=pa.Policy(autocast=HALVES[precision]) if precision in HALVES else None,
            loss_scale=pa.dynamic_loss_scale() if scaled or precision == "fp16" else None,
            **options,
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
        for x, y in parts(batch, rows):
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
        for n, (x, y) in enumerate(parts(batch, rows), 1):
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
        first, *rest = parts(batch, rows)
        sums = gradient(params, first)
        for microbatch in rest:
            torch._foreach_add_(list(sums.values()), list(gradient(params, microbatch).values()))
        torch._foreach_div_(list(sums.values()), k)
        return sums

    return mean


# Read when jax is imported. Helper threads would burn their time beside the clock.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def in_jax(problem: Problem) -> Training:
    model = problem.model
    if model.kind != "mlp" or model.activation != "relu":
        raise Absent("no JAX version of this model")
    if model.precision != "fp32":
        raise Absent("no JAX version of this precision")
    if problem.device != "cpu":
        raise Absent("JAX runs on the CPU here")
    if ONE_THREAD not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_THREAD}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax, optax = optional("jax"), optional("optax")
    numpy = jax.numpy

    def loss(params, microbatch):
        x, y = microbatch
        for layer in params:
            x = jax.nn.relu(x @ layer[0] + (layer[1] if model.bias else 0))
        return numpy.mean((x - y) ** 2)

    betas = dict(zip(("b1", "b2"), ADAMW["betas"], strict=True))
    optimizer = optax.adamw(
        ADAMW["lr"], **betas, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"]
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        def add(sums, microbatch):
            value, grads = jax.value_and_grad(loss)(params, microbatch)
            return jax.tree.map(numpy.add, sums, (value, grads)), None

        zeros = numpy.zeros(()), jax.tree.map(numpy.zeros_like, params)
        (value, grads), _ = jax.lax.scan(add, zeros, batch)
        grads = jax.tree.map(lambda g: g / model.microbatches, grads)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value / model.microbatches

    def array(x: Tensor):
        return numpy.array(x.detach().numpy())  # a copy: what is donated must not be torch's

    linears = [layer for layer in problem.net if isinstance(layer, nn.Linear)]
    # JAX's own layout of a matrix is (in, out).
    params = [tuple(array(x.t()) for x in layer.parameters()) for layer in linears]
    state = optimizer.init(params)
    shape = (model.microbatches, model.rows, model.width)
    arrays = tuple(array(t).reshape(shape) for t in problem.batch)

    def training(_: Batch) -> Read:
        nonlocal params, state
        params, state, _ = jax.block_until_ready(step(params, state, arrays))
        return read

    def read() -> dict[str, Tensor]:
        leaves = [torch.from_dlpack(x).t().clone() for layer in params for x in layer]
        return dict(zip(problem.params, leaves, strict=True))

    return training


STEPS: dict[str, Callable[[Problem], Training]] = {
    "hand step": by_hand,
    "compiled hand step": partial(by_hand, compiled=True),
    "default step": ours(),
    "default step, scaled and clipped": ours(clip=True, scaled=True),
    "func step": ours("func"),
    "func step, scaled and clipped": ours("func", clip=True, scaled=True),
    "compiled step": ours("func", compile=True),
    "one mean": ours(loss_of=partial(two_means, join=in_one)),
    "two means": ours(loss_of=partial(two_means, join=each_over_its_own)),
    "two means over one tensor": ours(loss_of=partial(two_means, join=both_over_one_tensor)),
    "torch.optim.AdamW": torch_apply,
    "adamw.apply": our_apply,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "torch.func + AdamW": torch_func,
    "torchopt": torchopt,
    "JAX": in_jax,
}
