"""A step that compiles itself, for a GPU: one graph a form, no wait, a known number of kernels."""

from typing import NamedTuple

import pytest
import torch

import pureaccum as pa
from tests.device.inductor import of_the_device
from tests.device.software import nothing_waits


# inductor says once that it could round more
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")


class Form(NamedTuple):
    """A form of a compiled step: what it is made for, and ceilings of what is counted of it.

    Attributes:
        table: The samples of a parameter, whose size is what the form follows from.
        rows: The samples of the batch.
        graphs: How many are compiled, exactly: one for each program of the form, and none breaks.
        kernels: How many kernels of Triton are compiled.
        launches: How often a step launches one.
        others: What it launches else, such as products of matrices.
    """

    table: int
    rows: int
    graphs: int
    kernels: int
    launches: int
    others: int


FORMS = {
    "scan": Form(8, 22, graphs=1, kernels=35, launches=84, others=30),
    "unrolled": Form(40_000, 14, graphs=1, kernels=33, launches=52, others=20),
    "loop": Form(300_000, 22, graphs=5, kernels=82, launches=122, others=30),
}


@pytest.fixture(scope="module")
def compiled():
    with of_the_device() as seen:
        yield seen


def loss(params, batch):
    h = torch.relu(batch["x"] @ params["in"] + params["table"][batch["i"]])
    error = ((h @ params["out"] - batch["y"]) ** 2).sum(-1)
    return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


def draw(*shape):
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_compiles_for_a_gpu(form, compiled):
    made = FORMS[form]
    params = {"in": draw(4, 8), "out": draw(8, 2), "table": draw(made.table, 8)}
    batch = {
        "x": draw(made.rows, 4),
        "y": draw(made.rows, 2),
        "i": torch.randint(0, 8, (made.rows,), device="cuda"),
        "mask": torch.ones(made.rows, device="cuda"),
    }
    step = pa.make_step(
        loss,
        pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-2)),
        microbatch_size=4,
        nonfinite="skip",
        loss_scale=pa.dynamic_loss_scale(8.0),
        compile=True,
    )
    state = step.init(params)
    assert step.form(state, batch) == form
    for each in compiled:
        each.clear()
    state, _ = step(state, batch)
    compiled.launched.clear()
    with nothing_waits() as seen:
        step(state, batch)
    assert len(compiled.graphs) == made.graphs  # also after the second call
    assert 0 < len(compiled.kernels) <= made.kernels
    assert 0 < compiled.launched.total() <= made.launches
    assert seen.launches.total() <= made.others
    assert len(seen.copies) <= 1  # the learning rate


def test_numbers_drawn_by_keys_compile_for_a_gpu(compiled):
    draws = torch.compile(lambda key: pa.uniform(key, (8,)), fullgraph=True, dynamic=False)
    assert draws(pa.key(0, "cuda")).is_cuda
