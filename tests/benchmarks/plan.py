"""What is measured, quick and full.

Rule: cells are chosen before any number is seen, and a cell that was measured is shown.
"""

from typing import NamedTuple

from .contenders import ALL, ENGINES, HAND, MAIN
from .models import Model
from .steps import HAND_STEP, OUR_APPLY, OUR_STEPS, SAFE, TORCH_APPLY


WIDTHS, ROWS, WINDOWS = (16, 64, 256, 512, 1024, 2048), (16, 64, 256), (1, 4, 16, 64)

WEIGHTS, ACTIVATIONS, FLAT = "weight-heavy", "activation-heavy", "flat"
STEP = "whole step"

STEPPING = (HAND_STEP, *OUR_STEPS, *SAFE.values())


class Cell(NamedTuple):
    """One race."""

    device: str
    model: Model
    contenders: tuple[str, ...]
    seconds: float
    keeping: bool = False  # in a process that keeps its memory

    def __str__(self) -> str:
        return f"{self.model}, memory kept" if self.keeping else str(self.model)


class Peak(NamedTuple):
    """One number of memory."""

    device: str
    regime: str
    model: Model
    contender: str


def cells(full: bool, device: str) -> list[Cell]:
    """The races. The main contenders run in all of them, everybody in two."""
    seconds = 20.0 if full else 2.5
    models = every_model() if full else quick_models()
    plan = [Cell(device, m, ALL if everybody(m) else MAIN, seconds) for m in models]
    if device == "cpu":  # smaller tensors never leave the heap; CUDA keeps its memory anyway
        large = (m for m in models if m.width >= 512 and m.microbatches == 4 and m.depth == 8)
        plan += [Cell(device, m, MAIN, seconds, keeping=True) for m in large]
    plan += [Cell(device, m, STEPPING, 2 * seconds) for m in stepping_models()]
    sixty = Model(256, 1, 1, depth=60, bias=False)
    return [*plan, Cell(device, sixty, (TORCH_APPLY, OUR_APPLY), seconds)]


def stepping_models() -> list[Model]:
    return [Model(512, 256, 8), Model(1024, 256, 8, depth=4), Model(2048, 256, 8, depth=2)]


def quick_models() -> list[Model]:
    small = [Model(width, rows, 16) for width in (16, 64) for rows in ROWS]
    middle = [Model(256, 64, 16), *(Model(512, rows, 4) for rows in ROWS)]
    large = [Model(1024, 256, 4, depth=4), Model(2048, 256, 4, depth=2)]
    # The same cell in other windows tells the cost of a call from the cost of a microbatch.
    windows = [Model(16, 64, 1), Model(16, 64, 64), Model(512, 64, 1), Model(512, 64, 16)]
    return small + middle + large + windows


def every_model() -> list[Model]:
    """All of them, but for windows that take more than about ten seconds."""
    models = [Model(width, rows, k) for width in WIDTHS for rows in ROWS for k in WINDOWS]
    return [model for model in models if model.flops <= 5e11]


def everybody(model: Model) -> bool:
    return model.rows == 64 and (model.width, model.microbatches) in {(16, 16), (512, 4)}


def peaks(full: bool, device: str) -> list[Peak]:
    """The memory: heavy in weights, heavy in activations, and 64 microbatches beside 2."""
    weights = Model(2048, 64, 4, depth=12 if full else 8)
    activations = Model(1024, 2048, 3, depth=12, activation="gelu", bias=False)
    plan = [Peak(device, WEIGHTS, weights, name) for name in ALL]
    plan += [Peak(device, ACTIVATIONS, activations, name) for name in (ALL if full else MAIN)]
    for model in (Model(512, 256, 8), Model(2048, 256, 8, depth=4)):
        plan += [Peak(device, STEP, model, name) for name in STEPPING]
    flat = Model(2048, 16, 2, depth=4)
    for name in (HAND, *ENGINES, *(f"{engine}, streamed" for engine in ENGINES)):
        plan += [Peak(device, FLAT, flat._replace(microbatches=k), name) for k in (2, 64)]
    return plan
