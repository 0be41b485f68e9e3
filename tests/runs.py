"""Every way to run a loss, as ``run(loss, params, batch, *shared, size=2, **options)``.

What a way cannot be given, it leaves out: ``pa.value`` has no engine.
"""

import optree
import torch

import pureaccum as pa
from tests.problems import in_a_window, in_parts, once, pulled


def by(make, *without, **usual):
    """A transform, in microbatches or, without a size, whole."""

    def run(loss, params, *args, size=2, **options):
        options = {name: x for name, x in (usual | options).items() if name not in without}
        return make(loss, microbatch_size=size, **options)(params, *args)

    return run


def value_of_stream(loss, params, batch, *shared, size=2, engine="", **options):
    return pa.value(loss, stream=True, **options)(params, pa.microbatches(batch, size), *shared)


def summed(donate):
    """Over a stream; without a size, of one part."""

    def run(loss, params, batch, *shared, size=2, **options):
        acc, parts = (
            pa.accumulator(loss, **options),
            pa.microbatches(batch, size) if size else [batch],
        )
        return acc.finalize(in_parts(acc, params, parts, donate, *shared), donate=donate)

    return run


def stepped(**usual):
    def run(loss, params, *args, size=2, **options):
        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, **usual | options)
        return once(step, params, *args)

    return run


def streamed(**usual):
    def run(loss, params, batch, *shared, size=2, **options):
        step = pa.make_step(loss, pa.sgd(0.1), **usual | options)
        parts = pa.microbatches(batch, size) if size else [batch]
        return in_a_window(step, step.init(params), parts, *shared)

    return run


def each_alone(loss, params, *args, size=2, engine="vmap", **options):
    engine = {"func": "vmap"}.get(engine, engine)
    make = pa.per_sample_grad(loss, keep_batch_dim=True, chunk_size=size, engine=engine, **options)
    return make(params, *args)


def by_autograd(f, params, *args):
    """The gradients of a number by plain autograd."""
    leaves, spec = optree.tree_flatten(params)
    return pulled(lambda *leaves: f(optree.tree_unflatten(spec, leaves), *args), *leaves)


def total(loss, size=2, **_):
    return pa.microbatch(loss, microbatch_size=size, reduce="sum")


def mapped(loss, params, *args, size=2, **options):
    """Under vmap, over two params."""
    gradient = lambda p: pa.grad(loss, microbatch_size=size, **options)(p, *args)  # noqa: E731
    twice = optree.tree_map(lambda x: torch.stack([x, 2 * x]), params)
    return torch.func.vmap(gradient, randomness="same")(twice)


RUNS = {
    "grad": by(pa.grad),
    "grad_and_value": by(pa.grad_and_value),
    "autograd": by(pa.grad_and_value, engine="autograd"),
    "skip": by(pa.grad, nonfinite="skip"),
    "value": by(pa.value, "engine", "nonfinite"),
    "value of a stream": value_of_stream,
    "accumulator": summed(donate=False),
    "donated accumulator": summed(donate=True),
    "step": stepped(),
    "donated step": stepped(donate=True),
    "compiled step": stepped(compile={"backend": "eager"}),
    "stream": streamed(),
    "donated stream": streamed(donate=True),
    "samples": each_alone,
    "clipped": lambda f, p, *args, size=2: pa.clipped_sum(f, 1.0, chunk_size=size)(p, *args),
    "microbatch": lambda f, p, *args, **k: total(f, **k)(p, *args),
    "primitive": lambda f, p, *args, **k: torch.func.grad(total(f, **k))(p, *args),
    "backward": lambda f, p, *args, **k: by_autograd(total(f, **k), p, *args),
    "remat": lambda f, p, *args: by_autograd(pa.remat(f), p, *args),
    "vmap": mapped,
}


def runs(*names, **others):
    """Some of them, and others."""
    return {name: RUNS[name] for name in names} | others
