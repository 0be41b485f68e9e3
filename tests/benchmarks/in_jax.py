"""The contender in JAX: one ``jit`` of a ``scan`` over microbatches and optax's AdamW, donated.

Rule: the same weights, the same batch, one thread. Its arrays are made once, since in JAX's own
training they would never have been torch's.
"""

import os
from functools import partial

import torch
from torch import Tensor, nn

from .absent import Absent, optional
from .models import Batch, Problem
from .steps import ADAMW, Read, Training


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
