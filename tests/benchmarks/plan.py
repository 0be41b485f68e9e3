"""What is measured, quick and full.

Rule: cells are chosen before any number is seen, and a cell that was measured is shown.
"""

from typing import NamedTuple

from .contenders import ALL, ENGINES, HAND, MAIN
from .curvature import (
    COMPILED_GGNVP,
    COMPILED_HVP,
    GGNVP,
    GRADIENT,
    HVP,
    THEIR_CUT_GGNVP,
    THEIR_CUT_HVP,
    THEIR_GGNVP,
    THEIR_HVP,
    WHOLE_GGNVP,
    WHOLE_HVP,
)
from .gradcache import GRADCACHE, OUR_PAIRS, PAIRS, PAIRS_STEPS
from .head import HAND_HEAD, HEADS, TILED_HEAD, WHOLE_HEAD
from .models import Model, gpt
from .nests import NESTS, OF_NEST, PA, REMATTED, named
from .nests import WHOLE as WHOLE_META
from .norms import EXACT, FULL, NORMS, VIEWS
from .per_sample import (
    AT_ONCE,
    CLIPPED,
    COMPILED_CLIPPED,
    CONCAT,
    CUT_GHOST,
    GHOST,
    HOOKS,
    JACOBIANS,
    KERNEL,
    MOMENTS,
    ONE_BY_ONE,
    SUM,
)
from .primitive import ASKED, TILED, by_hand, by_us
from .programs import (
    ENSEMBLING,
    HIGHER,
    LBFGS,
    MNIST,
    OUR_ENSEMBLING,
    OUR_LBFGS,
    OUR_MNIST,
    OUR_TRAIN_PY,
    STREAMED_MNIST,
    THROUGH,
    THROUGH_CUT,
    TRAIN_PY,
)
from .rematerialised import CHAINS, CHECKPOINT, REMAT, REMAT_BACKWARD
from .rivals import ACCELERATE, FABRIC, FUNC_ADAMW, JAX, TORCHOPT
from .steps import COMPILED, COMPILED_HAND, HAND_STEP, OUR_APPLY, OUR_STEPS, SAFE, TORCH_APPLY


WIDTHS, ROWS, WINDOWS = (16, 64, 256, 512, 1024, 2048), (16, 64, 256), (1, 4, 16, 64)

WEIGHTS, ACTIVATIONS, FLAT = "weight-heavy", "activation-heavy", "flat"
STEP, COUPLED, SINGLE = "whole step", "coupled", "single samples"
GROWTH = "growth"  # of memory, with the batch

# Whole steps: with what scaling and clipping add to them, and beside everybody.
STEPPING = (HAND_STEP, *OUR_STEPS, *SAFE.values())
WHOLE = (
    HAND_STEP,
    COMPILED_HAND,
    ACCELERATE,
    FABRIC,
    FUNC_ADAMW,
    TORCHOPT,
    JAX,
    *OUR_STEPS,
    COMPILED,
)

# Small to large: from where Python is all that counts to where the matrix product is.
FIVE = (
    Model(16, 8, 16, depth=2),
    Model(64, 16, 16, depth=4),
    Model(256, 32, 8, depth=4),
    Model(512, 64, 4, depth=6),
    Model(1024, 128, 4, depth=6),
)

# Rows that are coupled, a head with many words, derivatives of derivatives; and a chain of which
# only some activations are kept.
NORM, RESNET = Model(32, 16, 32, kind="norms"), Model(32, 16, 16, depth=18, kind="resnet")
PAIRED = Model(32, 16, 32, kind="views")
TOWERS = Model(512, 32, 128, depth=4, activation="gelu", kind="towers")
FEW_TOWERS = TOWERS._replace(rows=256, microbatches=8)  # a compiler takes seconds for each
HEAD = Model(256, 128, 16, depth=1, kind="head")
NESTED = Model(256, 128, 16, activation="gelu", bias=False)
CURVED = Model(256, 128, 16, depth=8, activation="gelu")
# Of which a microbatch is Python alone.
ALONE_IN_PYTHON = tuple(Model(32, 4, 8, depth=n) for n in (2, 50))
TOKENS = Model(256, 512, 8, depth=1, activation="gelu", kind="chain")
CHAIN = Model(256, 512, 1, depth=16, activation="gelu", kind="chain")

# Gradients of single samples, by chunks of as many rows as are fastest; one case of smaller ones,
# which Opacus gets too; and 32 runs as one.
CLIPPING = (
    Model(256, 512, 1, depth=3, kind="dense"),
    Model(16, 128, 1, depth=3, kind="grouped"),
    Model(64, 64, 4, depth=1, kind="tokens"),
)
CLIPPING_CUT = Model(256, 64, 8, depth=3, kind="dense")
# 4,096 samples: 1.6 GB of gradients; and so wide that a gradient is more than what a process
# happens to hold, for memory that is counted in gradients.
MANY = Model(128, 16, 256, depth=6)
WIDE = Model(512, 16, 256, depth=6)
OF_KERNEL = Model(32, 5, 5, kind="ntk")
ENSEMBLE = Model(32, 8, 4, depth=3)
# What is done to a network of the width of a tutorial, and of one that is wider.
THROUGH_STEPS = Model(32, 16, 4, depth=2), Model(256, 16, 4, depth=2)
DIGITS = Model(16, 32, 4, kind="digits")


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


class One(NamedTuple):
    """One number of one contender: of its first call, or of the syncs in a step."""

    device: str
    model: Model
    contender: str


def cells(full: bool, device: str) -> list[Cell]:
    """The races for a gradient. The main contenders run in all of them, everybody in two."""
    seconds = 20.0 if full else 1.5
    models = every_model() if full else quick_models()
    plan = [Cell(device, m, ALL if full and everybody(m) else MAIN, seconds) for m in models]
    # Smaller tensors never leave the heap; CUDA keeps its memory anyway.
    if full and device == "cpu":
        large = (m for m in models if m.width >= 512 and m.microbatches == 4 and m.depth == 8)
        plan += [Cell(device, m, MAIN, seconds, keeping=True) for m in large]
    for model in stepping_models():
        names = STEPPING if full or model.width < 2048 else (HAND_STEP, *OUR_STEPS)
        plan.append(Cell(device, model, names, 2 * seconds))
    sixty = Model(256, 1, 1, depth=60, bias=False)
    return [*plan, Cell(device, sixty, (TORCH_APPLY, OUR_APPLY), seconds)]


def step_cells(full: bool, device: str, size: str | None) -> list[Cell]:
    """The races for a whole step, of everybody."""
    seconds = 20.0 if full else 3.0
    if device == "cpu":
        models = [*FIVE, conv(), gpt(size or "tiny", 4, 8, "bf16")]
    else:
        models = [gpt(size or "small", 4, 8, precision) for precision in ("bf16", "fp16")]
    if full:
        models += [Model(64, 16, 2**n, depth=4) for n in range(8) if n != 4]
        models += [Model(2048, 256, 8, depth=4), gpt(size or "tiny", 4, 8)]
        models += [m._replace(precision="bf16") for m in (FIVE[2], FIVE[4], conv())]
        models += FIVE if device != "cpu" else ()
    return [Cell(device, model, WHOLE, seconds) for model in models]


def coupled_cells(full: bool, device: str) -> list[Cell]:
    """The races of ``microbatch`` and ``remat``."""
    seconds = 20.0 if full else 3.0
    nests = [tuple(name for name in NESTS if name.startswith(nest)) for nest in OF_NEST]
    learning = tuple(named("meta-gradient", maker) for maker in (WHOLE_META, REMATTED, PA))
    return [
        Cell(device, NORM, (FULL, EXACT), seconds),
        Cell(device, RESNET, (FULL, EXACT), seconds),
        Cell(device, PAIRED, tuple(VIEWS), seconds),
        Cell(device, TOWERS, tuple(PAIRS) if full else (GRADCACHE, OUR_PAIRS), seconds),
        Cell(device, HEAD, tuple(HEADS) if full else (WHOLE_HEAD, HAND_HEAD, TILED_HEAD), seconds),
        *(Cell(device, NESTED, names, seconds) for names in (nests if full else [learning])),
        Cell(device, TOKENS, (by_hand(TILED), by_us(TILED)), seconds),
        Cell(device, CHAIN, (CHECKPOINT, REMAT, REMAT_BACKWARD), seconds),
        *(Cell(device, x, (by_hand(a), by_us(a)), seconds) for x in ALONE_IN_PYTHON for a in ASKED),
    ]


def sample_cells(full: bool, device: str) -> list[Cell]:
    """The races of ``clipped_sum``, and of many runs as one."""
    seconds = 20.0 if full else 3.0
    names = (HOOKS, GHOST, CLIPPED, COMPILED_CLIPPED) if full else (HOOKS, GHOST, CLIPPED)
    plan = [Cell(device, model, names, seconds) for model in CLIPPING]
    plan.append(Cell(device, CLIPPING_CUT, (*names, CUT_GHOST), seconds))
    plan.append(Cell(device, OF_KERNEL, (JACOBIANS, KERNEL), seconds))
    return [*plan, Cell(device, ENSEMBLE, (ONE_BY_ONE, AT_ONCE), seconds)]


def curvature_cells(device: str) -> list[Cell]:
    """The races of products with curvature, of a network that is narrow and of one that is not."""
    hessian = THEIR_HVP, THEIR_CUT_HVP, HVP, WHOLE_HVP, COMPILED_HVP, GRADIENT
    gauss_newton = THEIR_GGNVP, THEIR_CUT_GGNVP, GGNVP, WHOLE_GGNVP, COMPILED_GGNVP, GRADIENT
    models = CURVED._replace(width=64, rows=32, depth=4), CURVED
    plan = [Cell(device, x, names, 5.0) for x in models for names in (hessian, gauss_newton)]
    walks = (Model(width, 32, 16, depth=4, activation="gelu") for width in (64, 256, 512))
    return plan + [Cell(device, model, (LBFGS, OUR_LBFGS), 5.0) for model in walks]


def curvature_peaks(device: str) -> list[Peak]:
    """Their memory, beside that of the whole batch and of the gradient of a microbatch."""
    names = GRADIENT, THEIR_HVP, HVP, THEIR_GGNVP, GGNVP
    return [Peak(device, COUPLED, CURVED._replace(rows=1024), name) for name in names]


def program_cells(full: bool, device: str, size: str | None) -> list[Cell]:
    """The races of programs that people have written, and of windows of one microbatch."""
    seconds = 20.0 if full else 5.0
    models = [gpt(size or "tiny", 12, 4, precision) for precision in ("fp32", "fp16")]
    plan = [Cell(device, model, (TRAIN_PY, OUR_TRAIN_PY), seconds) for model in models]
    plan.append(Cell(device, DIGITS, (MNIST, OUR_MNIST, STREAMED_MNIST), seconds))
    for model in (ENSEMBLE, ENSEMBLE._replace(microbatches=1)):
        plan.append(Cell(device, model, (ENSEMBLING, OUR_ENSEMBLING), seconds))
    for model in THROUGH_STEPS:
        plan.append(Cell(device, model, (HIGHER, THROUGH, THROUGH_CUT), seconds))
    for model in (FIVE[0], FIVE[3]):
        plan.append(Cell(device, alone(model), (HAND_STEP, *OUR_STEPS), seconds))
    return plan


def alone(model: Model) -> Model:
    """In a window of one microbatch."""
    return model._replace(microbatches=1)


def conv() -> Model:
    return Model(16, 16, 8, depth=3, kind="conv")


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
    flat = Model(2048, 16, 2, depth=4)
    names = ALL if full else MAIN
    plan = [Peak(device, WEIGHTS, weights, name) for name in names]
    plan += [Peak(device, ACTIVATIONS, activations, name) for name in names]
    streamed = tuple(f"{engine}, streamed" for engine in ENGINES if full)
    for name in (HAND, *ENGINES, *streamed):
        plan += [Peak(device, FLAT, flat._replace(microbatches=k), name) for k in (2, 64)]
    return plan


def step_peaks(full: bool, device: str) -> list[Peak]:
    """The memory of a whole step: with a loss scale, and beside everybody."""
    small, large = Model(512, 256, 8), Model(2048, 256, 8, depth=4)
    ours = (HAND_STEP, *OUR_STEPS)
    plan = [Peak(device, STEP, small, name) for name in (STEPPING if full else ours)]
    plan += [Peak(device, STEP, FIVE[4], name) for name in WHOLE]
    names = WHOLE if full else (*ours, COMPILED)
    return plan + [Peak(device, STEP, large, name) for name in names]


def coupled_peaks(full: bool, device: str) -> list[Peak]:
    """The memory of BatchNorm at batch 512, of all pairs, a head, nests and ``remat``."""
    plan: list[Peak] = []
    for model in (NORM, RESNET):
        plan += [Peak(device, COUPLED, model._replace(microbatches=32), name) for name in NORMS]
    plan += [Peak(device, COUPLED, PAIRED, name) for name in VIEWS]
    plan += [Peak(device, COUPLED, TOWERS, name) for name in PAIRS]
    plan += [Peak(device, COUPLED, FEW_TOWERS, name) for name in PAIRS_STEPS]
    plan += [Peak(device, COUPLED, HEAD, name) for name in HEADS]
    plan += [Peak(device, COUPLED, TOKENS, make(TILED)) for make in (by_hand, by_us)]
    plan += [Peak(device, COUPLED, NESTED, name) for name in NESTS]
    return plan + [Peak(device, COUPLED, CHAIN._replace(rows=2048), name) for name in CHAINS]


def growth_peaks(device: str) -> list[Peak]:
    """The memory of a step, the larger the batch: at once, by the loop, and by us."""
    models = [gpt("mini", 2, 2**n) for n in range(5)]
    plan = [Peak(device, GROWTH, at_once(model), HAND_STEP) for model in models]
    names = HAND_STEP, OUR_STEPS[0]
    plan += [Peak(device, GROWTH, model, name) for name in names for model in models]
    return list(dict.fromkeys(plan))


def at_once(model: Model) -> Model:
    """The same batch in one microbatch."""
    return model._replace(rows=model.rows * model.microbatches, microbatches=1)


def sample_peaks(device: str) -> list[Peak]:
    """The memory of gradients of single samples."""
    plan = [Peak(device, SINGLE, MANY, name) for name in (CONCAT, SUM)]
    plan += [Peak(device, COUPLED, OF_KERNEL, name) for name in (JACOBIANS, KERNEL)]
    return plan + [Peak(device, SINGLE, WIDE, name) for name in (SUM, CLIPPED, MOMENTS)]


def first_calls(full: bool) -> list[One]:
    """One model with few and with many microbatches, on the CPU."""
    few = Model(64, 16, 2, depth=4)
    names = (COMPILED, COMPILED_HAND, JAX) if full else (COMPILED,)
    pairs = (few, few._replace(microbatches=1024))
    return [One("cpu", model, name) for name in names for model in pairs]


def sync_checks(device: str, size: str | None) -> list[One]:
    """Whether a step waits for the device."""
    if device == "cpu":
        return []
    models = [gpt(size or "small", 4, 8, precision) for precision in ("bf16", "fp16")]
    names = (HAND_STEP, *OUR_STEPS, COMPILED)
    return [One(device, model, name) for model in models for name in names]
