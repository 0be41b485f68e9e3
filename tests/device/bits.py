"""Whole numbers have the same bits on the device however a batch is cut, and those of the CPU.

Also where gradients are added up by hooks, on autograd's device thread, which all threads share.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.device.world import errors, exact, exact_pairs, moved, whole_numbers


ENGINES = pytest.mark.parametrize("engine", ["func", "autograd"])
SIZES = pytest.mark.parametrize("size", [1, 3, 11])


def stepped(params, batch, size, **options):
    options = {"microbatch_size": size, "loss_scale": pa.dynamic_loss_scale(8.0), **options}
    step = pa.make_step(exact, pa.sgd(2.0**-3, momentum=0.5), **options)
    state, info = step(step.init(params), batch)
    return state.params, state.opt_state, info.loss, info.grad_norm


def streamed(params, batch, size, **options):
    step = pa.make_step(exact, pa.sgd(2.0**-3), **options)
    state = step.init(params)
    window = step.begin(state)
    for part in pa.microbatches(batch, size):
        window = step.update(state, window, part)
    return step.apply(state, window)[0].params


def merged(params, batch, size, **options):
    acc = pa.accumulator(exact, **options)
    states = [acc.update(acc.init(params), params, p) for p in pa.microbatches(batch, size)]
    while len(states) > 1:
        states = [acc.merge(*states[:2]), *states[2:]]
    return acc.finalize(states[0])


def paired(params, batch, size, **options):
    return pa.grad_and_value(lambda p, b: exact_pairs(p, b, size), **options)(params, batch)


def sampled(params, batch, size, **options):
    engine = {"func": "vmap", "autograd": "autograd"}[options["engine"]]
    return pa.per_sample_grad(errors, chunk_size=size, reduce="sum", engine=engine)(params, batch)


FORMS = {
    "grad": lambda p, b, size, **options: pa.grad_and_value(exact, microbatch_size=size, **options)(
        p, b
    ),
    "step": stepped,
    "stream": streamed,
    "skip": lambda *args, **options: stepped(*args, **options, nonfinite="skip"),
    "donated": lambda *args, **options: stepped(*args, **options, donate=True),
    "merged": merged,
    "pairs": paired,
    "samples": sampled,
}


@SIZES
@ENGINES
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_the_cpu(form, engine, size):
    params, batch = whole_numbers()
    want = FORMS[form](params, batch, 11, engine=engine)
    got = FORMS[form](moved(params, "cuda"), moved(batch, "cuda"), size, engine=engine)
    assert_trees_bitwise_equal(moved(got, "cpu"), want)


class Threads(torch.autograd.Function):
    """Notes which threads go back through it."""

    seen: set[int] = set()  # noqa: RUF012

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        Threads.seen.add(threading.get_ident())
        return grads[0]


def large(seed):
    """A leaf of 1 MiB has a hook of its own, which adds its gradient to the sum."""
    random = torch.Generator().manual_seed(seed)
    w = torch.randint(-2, 3, (512, 512), generator=random).float()
    x = torch.randint(-2, 3, (7, 512), generator=random).float()
    return {"w": w, "b": w[0].clone()}, x


def of_large(params, x):
    return (Threads.apply(x @ params["w"]) + params["b"]).square().sum()  # pyright: ignore


@ENGINES
def test_hooks_of_large_leaves_run_on_the_thread_of_the_device(engine):
    def call(params, x, size):
        return pa.grad(of_large, microbatch_size=size, reduction="sum", engine=engine)(params, x)

    params, x = large(0)
    want = call(params, x, 7)
    Threads.seen.clear()
    got = call(moved(params, "cuda"), x.cuda(), 2)
    assert len(Threads.seen) == 1
    assert threading.get_ident() not in Threads.seen
    assert_trees_bitwise_equal(moved(got, "cpu"), want)


@ENGINES
def test_threads_share_the_thread_of_the_device(engine):
    def call(seed, device):
        params, x = moved(large(seed), device)
        return pa.grad(of_large, microbatch_size=2, reduction="sum", engine=engine)(params, x)

    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda seed: call(seed % 4, "cuda"), range(12)))
    for seed, each in enumerate(got):
        assert_trees_bitwise_equal(moved(each, "cpu"), call(seed % 4, "cpu"))
