"""An editor shows parameters by name: pyright says what it reveals of the calls made most."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]
ROOT = Path(__file__).parents[2]
PROGRAM = """
from typing import TypedDict

import torch
from torch import Tensor

import pureaccum as pa

net = torch.nn.Linear(2, 1)
fn = pa.functional(net)


class Batch(TypedDict):
    x: Tensor


def loss(params: dict[str, Tensor], batch: Batch, scale: float = 0.5) -> Tensor:
    out, _ = fn.apply(params, fn.buffers, batch["x"])
    return scale * out.mean()


step = pa.make_step(loss, pa.adamw(1e-3))
state = step.init(fn.params)
acc = pa.accumulator(loss)
"""
# What pyright reveals of each expression.
OPTIONS = "batch: Batch, scale: float = 0.5"
REVEALED = {
    "pa.grad(loss)": f"(params: dict[str, Tensor], {OPTIONS}) -> Any",
    "pa.grad_and_value(loss, microbatch_size=2)": (
        f"(params: dict[str, Tensor], {OPTIONS}) -> tuple[Any, Any]"
    ),
    "pa.remat(loss)": f"(params: dict[str, Tensor], {OPTIONS}) -> Tensor",
    "pa.microbatch(loss, microbatch_size=2)": f"(params: dict[str, Tensor], {OPTIONS}) -> Any",
    "pa.per_sample_grad(loss)": f"(params: dict[str, Tensor], {OPTIONS}) -> Any",
    "fn.apply.__call__": ("(params: dict[str, Tensor], buffers: Any, /, ...) -> tuple[Any, Any]"),
    "fn.params": "dict[str, Tensor]",
    "step.init.__call__": "(params: Any, buffers: Any = None, seed: int = 0) -> TrainState",
    "step.__call__": (
        "(state: TrainState, batch: Any, *shared: Any) -> tuple[TrainState, StepInfo]"
    ),
    "step.window.__call__": (
        "(state: TrainState, microbatches: Iterable[Any], *shared: Any, weights: Any = None)"
        " -> tuple[TrainState, StepInfo]"
    ),
    "step.update.__call__": (
        "(state: TrainState, window: StepWindow, microbatch: Any, *shared: Any, "
        "offset: int | None = None, weights: Any = None) -> Any"
    ),
    "step(state, {'x': torch.ones(2, 2)})[1].loss": "Tensor",
    "acc.init.__call__": "(params: Any) -> AccumState",
    "acc.update.__call__": (
        "(state: AccumState, params: Any, *args: Any, donate: bool = False, weights: Any = None)"
        " -> Any"
    ),
    "acc.finalize.__call__": ("(state: AccumState, donate: bool = False) -> tuple[Any, Tensor]"),
}


@pytest.mark.slow
def test_an_editor_shows_the_parameters_of_what_is_returned(tmp_path):
    if not find_spec("pyright"):
        pytest.skip("needs pyright (the extra dev)")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM + "".join(f"reveal_type({it})\n" for it in REVEALED))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    ended = subprocess.run(
        [*command, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    found = json.loads(ended.stdout)["generalDiagnostics"]
    assert not [it for it in found if it["severity"] == "error"]
    said = [it["message"] for it in found if it["severity"] == "information"]
    shown = [it.partition(" is ")[2].strip('"') for it in said]
    assert dict(zip(REVEALED, shown, strict=True)) == REVEALED
