"""A step that compiles itself, for a GPU: one graph a form, no wait, a known number of kernels."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from tests.device.inductor import Compiled, of_the_device
from tests.device.software import nothing_waits


# inductor says once that it could round more
pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")


class Form(NamedTuple):
    """A form of a compiled step: what it is made for, and what was counted.

    Attributes:
        table: The rows of a parameter, whose size is what the form follows from.
        rows: The rows of the batch.
        graphs: How many are compiled: without a graph break, one for each program of the form.
        kernels: The most kernels of Triton that a step launches.
        launches: The most other launches, such as products of matrices.
    """

    table: int
    rows: int
    graphs: int
    kernels: int
    launches: int


FORMS = {
    "scan": Form(8, 22, 1, 0, 0),
    "unrolled": Form(40_000, 14, 1, 0, 0),
    "loop": Form(300_000, 22, 5, 0, 0),
}


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    with of_the_device() as seen:
        yield seen


def loss(params: Any, batch: Any) -> pa.Weighted:
    h = torch.relu(batch["x"] @ params["in"] + params["table"][batch["i"]])
    error = ((h @ params["out"] - batch["y"]) ** 2).sum(-1)
    return pa.Weighted((error * batch["mask"]).sum(), batch["mask"].sum())


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_compiles_for_a_gpu(form: str, compiled: Compiled) -> None:
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
    compiled.graphs.clear()
    state, _ = step(state, batch)
    graphs = len(compiled.graphs)
    compiled.launched.clear()
    with nothing_waits() as seen:
        step(state, batch)
    assert len(compiled.graphs) == graphs == made.graphs  # and not compiled again
    found = compiled.launched.total(), seen.launches.total(), len(seen.copies)
    assert found <= (made.kernels, made.launches, 1)
