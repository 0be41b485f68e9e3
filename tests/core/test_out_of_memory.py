"""Memory runs out in the middle of a step: nothing is lost, nothing is kept, no bit is another."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pureaccum as pa
from pureaccum._base.torch_internals.autograd import in_backward
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.core.shortage import failing, few_to_collect, inside, shortage
from tests.draws import examples, generator
from tests.exactly import but_checked
from tests.problems import drawing
from tests.refusals import advice_on


ROWS = 8

pytestmark = [
    pytest.mark.faults,
    pytest.mark.promise("sizes"),
    pytest.mark.usefixtures(few_to_collect.__name__),
]
Tensors = dict[str, Tensor]


def make_params():
    """A small leaf and one of 1 MiB, whose gradient takes another way into the sum."""
    g = generator(0)
    return {"w": torch.randn(4, 3, generator=g), "large": torch.randn(512, 512, generator=g)}


def make_batch():
    return {"x": torch.randn(ROWS, 4, generator=generator(1))}


def rows_of(params, batch):
    hidden = nn.functional.dropout(torch.tanh(batch["x"] @ params["w"]))
    return hidden.sum(1) + (params["large"] * params["large"]).sum() * 2.0**-18


SEEN = []


def mean_loss(params, batch):
    SEEN.append(len(batch["x"]))
    return (rows_of(params, batch) ** 2).mean()


def weighted_aux(params, batch):
    rows = rows_of(params, batch)
    return pa.Weighted((rows**2).sum(), (1 + (rows > 0)).sum()), {"rows": rows}


NORMED = pa.functional(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout()))


def normed(params, batch, buffers):
    out, new = NORMED.apply(params, buffers, batch["x"])
    return (out**2).mean(), new


def dropped(params, batch):
    return nn.functional.dropout(batch["x"] @ params["w"])


def cut_inside(params, batch):
    """It is run again for its derivative, with the numbers that it drew."""
    out = pa.microbatch(dropped, microbatch_size=2)(params, batch)
    return (out**2).mean() + (params["large"] ** 2).sum() * 2.0**-18


class Made(NamedTuple):
    """A kind of step, as a function of the microbatch size."""

    loss: Any
    options: dict[str, Any]
    optimizer: Any = pa.adamw(1e-3)
    params: Callable[[], Tensors] = make_params
    buffers: Any = None

    def step(self, size):
        return pa.make_step(self.loss, self.optimizer, microbatch_size=size, **self.options)


MADE = {
    "plain": Made(mean_loss, {}),
    "autograd": Made(mean_loss, {"engine": "autograd"}),
    "half": Made(
        weighted_aux,
        {
            "has_aux": True,
            "policy": pa.Policy(compute=torch.bfloat16),
            "loss_scale": pa.dynamic_loss_scale(init_scale=4.0),
            "nonfinite": "skip",
        },
        pa.chain(pa.clip_by_global_norm(0.1), pa.sgd(0.1, momentum=0.9)),
    ),
    "keys": Made(
        lambda p, b, keys: mean_loss(p, {"x": pa.dropout(b["x"], 0.5, keys)}), {"keys": True}
    ),
    "buffers": Made(
        normed,
        {"buffers": "sequential", "check": False},
        params=lambda: NORMED.params,
        buffers=NORMED.buffers,
    ),
    "cut inside": Made(cut_inside, {}),
}


@cache
def started(name):
    """A state with something in it."""
    made = MADE[name]
    step = made.step(ROWS)
    return step(step.init(made.params(), buffers=made.buffers), make_batch())[0]


@cache
def operations(name, size):
    step, state = MADE[name].step(size), started(name)
    with shortage() as tries:
        step(state, make_batch())
    return tries.operations[0]


def check(name, *points, **options):
    """A step that runs out of memory at each point, beside one of the size that is left at last."""
    state, batch, made = started(name), make_batch(), MADE[name]
    step = made.step("auto")
    with unchanged(state, batch, draws=True), shortage(*points, **options) as tries:
        found = drawing(lambda: step(state, batch), 1)
    assert len(tries.alive) == len(points) + 1
    assert len(set(tries.alive)) == 1, "what a failed try held is alive in the next"
    size = ROWS >> len(points)
    expected = drawing(lambda: made.step(size)(state, batch), 1)
    assert_trees_bitwise_equal(but_checked(found), but_checked(expected))


# Every place --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
@examples(1 / 4)
@given(st.data())
def test_memory_may_run_out_at_any_operation(name, data):
    first = data.draw(st.integers(1, operations(name, ROWS)))
    points = [first]
    if data.draw(st.booleans()):
        points.append(data.draw(st.integers(1, operations(name, ROWS // 2))))
    check(name, *points)


def at(function):
    return partial(inside, function)


def later(point):
    return lambda: len(SEEN) == 2 and point()


def deep_in_backward():
    """Where a branch of the graph waits in autograd's queue, while another one is gone through."""
    SEEN.extend([-1] * in_backward())
    return SEEN.count(-1) == 10


PLACES = {
    "the first forward pass": ("plain", (at("mean_loss"),)),
    "the first backward pass": ("plain", (in_backward,)),
    "a branch of the backward pass": ("plain", (deep_in_backward,)),
    "autograd's backward pass": ("autograd", (in_backward,)),
    "a later forward pass": ("plain", (1, later(at("mean_loss")))),
    "a later backward pass": ("plain", (1, later(in_backward))),
    "the norm": ("plain", (at("norm_of_all"),)),
    "the clipping": ("half", (at("factor_of"),)),
    "the loss scale": ("half", (at("dynamic_loss_scale.<locals>.update"),)),
    "the update": ("plain", (at("by_kernel"),)),
    "a cut inside": ("cut inside", (1, at("dropped"))),
    "a cut inside that is run again": ("cut inside", (lambda: in_backward() and at("dropped")(),)),
    "the buffers": ("buffers", (at("collect_buffers"),)),
}


# Places that are known by the names of functions of ours.
OURS = "the norm", "the clipping", "the loss scale", "the update", "the buffers"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [pytest.param(x, marks=pytest.mark.mechanism if x in OURS else ()) for x in PLACES],
)
def test_memory_may_run_out_in_every_place(place):
    name, points = PLACES[place]
    started(name)
    SEEN.clear()
    check(name, *points)


# Every kind of error, however it is held ----------------------------------------------------

KEPT = []


def squared(rows):
    return (rows**2).mean()


def keeping(params, batch):
    """A loss that keeps what it raised, with a chain behind it and a cycle in a frame."""
    out = rows_of(params, batch)
    cycle = [out]
    cycle.append(cycle)
    try:
        return squared(out)
    except RuntimeError as error:
        KEPT.append(error)
        try:
            raise ValueError
        except ValueError as other:
            other.add_note(str(len(cycle)))
            raise torch.OutOfMemoryError("CUDA out of memory.") from error


MADE["keeping"] = Made(keeping, {})


@pytest.mark.slow
def test_an_error_that_someone_keeps_holds_no_tensors():
    KEPT.clear()
    check("keeping", at("squared"), at("squared"))
    assert len(KEPT) == 2


TEXTS = [
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 1125899906842624 bytes. Error code 12 (Cannot allocate memory)",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
]


@pytest.mark.parametrize("error", [*map(RuntimeError, TEXTS), MemoryError()], ids=repr)
def test_errors_that_say_out_of_memory_are_told(error):
    check("plain", 30, error=lambda: error)


OTHERS = [
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA out of memory."),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_taken_for_out_of_memory(error):
    """The very same error comes out, as it is, after one try."""
    step, state = MADE["plain"].step("auto"), started("plain")
    with (
        unchanged(state, draws=True),
        pytest.raises(type(error)) as caught,
        shortage(30, error=lambda: error) as tries,
    ):
        step(state, make_batch())
    assert caught.value is error
    assert not advice_on(error)
    assert len(tries.alive) == 1


def test_at_one_row_the_error_comes_out_and_says_what_was_tried():
    step, state = MADE["plain"].step("auto"), started("plain")
    errors = [failing() for _ in range(8)]
    with (
        unchanged(state, draws=True),
        pytest.raises(torch.OutOfMemoryError) as caught,
        shortage(9, 20, 40, 50, error=iter(errors).__next__),
    ):
        step(state, make_batch())
    assert caught.value is errors[3]
    assert "tried 8, 4, 2, 1 of 8 samples" in advice_on(caught.value)[0]
    assert_trees_bitwise_equal(
        step(state, {"x": torch.ones(8, 4)})[1].microbatches, torch.tensor(1)
    )


def test_an_error_that_the_caller_handles_keeps_its_frames():
    """It is the context of every error raised meanwhile."""

    def fails():
        mine = torch.ones(3)
        try:
            raise ValueError(mine)
        finally:
            check("plain", 30)

    with pytest.raises(ValueError, match="tensor") as caught:
        fails()
    assert "mine" in caught.traceback[-1].frame.f_locals


@pytest.mark.parametrize("kind", ["grad", "grad_and_value", "value"])
def test_memory_may_run_out_under_transforms(kind):
    params, batch = make_params(), make_batch()
    loss, aux = (weighted_aux, {"has_aux": True}) if kind == "value" else (mean_loss, {})

    def run(size):
        return getattr(pa, kind)(loss, microbatch_size=size, **aux)(params, batch)

    with unchanged(params, batch, draws=True), shortage(12, 20) as tries:
        found = drawing(lambda: run("auto"), 1)
    assert_trees_bitwise_equal(found, drawing(lambda: run(2), 1))
    assert len(set(tries.alive)) == 1


PROGRAM = """
import resource
import torch
import pureaccum as pa

ROWS, WIDTH = 64, 2**16  # 16 MiB for every activation of the whole batch
sizes = []

def loss(params, x):
    sizes.append(len(x))
    return (torch.tanh(torch.tanh(x * params)) ** 2).mean()

x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
explicit = pa.make_step(loss, pa.sgd(0.1), microbatch_size=8)
state = explicit.init(torch.linspace(1, 2, WIDTH))
expected = explicit(state, x)[0].params
sizes.clear()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 20 * 2**20, resource.RLIM_INFINITY))
step = pa.make_step(loss, pa.sgd(0.1), microbatch_size="auto")
found, info = step(state, x)
rows = ROWS // int(info.microbatches)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
again = pa.make_step(loss, pa.sgd(0.1), microbatch_size=rows)(state, x)[0].params
print(sizes[0], rows, torch.equal(found.params, again))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are Linux's")
@pytest.mark.slow
def test_memory_may_run_out_in_the_allocator_itself():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert not done.returncode, done.stderr
    first, rows, same = done.stdout.split()
    assert (first, same) == ("64", "True")
    assert 1 <= int(rows) < 64
