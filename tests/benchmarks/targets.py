"""The targets.

Rule: written down before measuring, in one place, and for all cells of a kind: no cell is excused.
A ratio for which there is no target is published without one. All of time are for one core.
"""

from .contenders import ENGINES, HAND, TORCH_FUNC
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
from .gradcache import FULL_FUNC, GRADCACHE, OUR_PAIRS, OUR_PAIRS_FUNC
from .head import HAND_HEAD, TILED_HEAD, WHOLE_HEAD
from .models import Model
from .nests import PA, PRIMITIVE, REMATTED, WHOLE, named
from .norms import CUT_VIEWS, EXACT, EXACT_HOST, FULL, FULL_VIEWS
from .per_sample import (
    AT_ONCE,
    CLIPPED,
    CONCAT,
    CUT_GHOST,
    GHOST,
    HOOKS,
    JACOBIANS,
    KERNEL,
    ONE_BY_ONE,
    ONE_GRADIENT,
    SUM,
)
from .plan import FIVE, FLAT, STEP, WIDE, alone, stepping_models
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
    THROUGH,
    TRAIN_PY,
)
from .rematerialised import CHECKPOINT, REMAT, REMAT_BACKWARD
from .rivals import ACCELERATE, JAX
from .steps import COMPILED, COMPILED_HAND, HAND_STEP, OUR_APPLY, SAFE


# The compiled step against the loop written by hand, from 16 wide to 1024 wide.
COMPILED_TARGETS = dict(zip(FIVE, (0.15, 0.20, 0.72, 1.0, 1.0), strict=True))
# The eager steps against it: as they are made, and by torch.func.
DEFAULT_TARGETS = dict(zip(FIVE, (1.15, 1.08, 1.02, 1.02, 1.0), strict=True))
FUNC_TARGETS = dict(zip(FIVE[:4], (1.9, 1.8, 1.35, 1.1), strict=True))
# … and of a window of one microbatch.
ALONE_TARGETS = {alone(FIVE[0]): 1.4, alone(FIVE[3]): 1.05}
ACCELERATE_TARGETS = dict(zip(FIVE, (0.7, 0.75, 0.9, 1.0, 1.0), strict=True))
# Of programs that people have written.
PROGRAM_TARGETS = {
    (OUR_MNIST, MNIST): 1.1,
    (OUR_ENSEMBLING, ENSEMBLING): 1.3,
    (THROUGH, HIGHER): 1.3,
    (OUR_LBFGS, LBFGS): 1.0,
}
TRAIN_PY_TARGETS = {"fp32": 1.0, "fp16": 0.9}
# Against that loop compiled: in each of the five, and their geometric mean.
AGAINST_COMPILED, AGAINST_COMPILED_MEAN = 1.03, 0.6
FIRST_CALL = 1.2  # with 1,024 microbatches, against 2
SYNCS = 0.0
SAVING = 1 / 0.75  # of the time of safetensors and an fsync: three quarters of their speed
# No more than DistributedDataParallel; and a loss of all pairs, against one process with all.
RANKS = {"collectives": 1.0, "bytes on the wire": 1.0, "seconds": 1.0}
PAIRS_OF_RANKS_MEMORY, PAIRS_OF_RANKS_DIFFERENCE = 0.6, 1e-12
# Of what couples its rows, and of what rematerialises: ours against theirs.
COUPLED_TIME = {
    (CUT_VIEWS, FULL_VIEWS): 1.7,
    (OUR_PAIRS, GRADCACHE): 1.05,
    (TILED_HEAD, HAND_HEAD): 1.45,  # one more product with all words, beside three
    (named("meta-gradient", PA), named("meta-gradient", REMATTED)): 1.0,
    (by_us(TILED), by_hand(TILED)): 1.1,
    (REMAT, CHECKPOINT): 1.1,
    (REMAT_BACKWARD, CHECKPOINT): 1.1,
}
COUPLED_MEMORY = {
    (EXACT_HOST, FULL): 0.35,
    (CUT_VIEWS, FULL_VIEWS): 0.5,
    (OUR_PAIRS, GRADCACHE): 1.0,
    (OUR_PAIRS, FULL_FUNC): 0.52,
    (OUR_PAIRS_FUNC, FULL_FUNC): 0.7,
    (TILED_HEAD, WHOLE_HEAD): 0.12,
    (by_us(TILED), by_hand(TILED)): 1.0,
}
# Of the primitive against the loop by hand, over 2 and over 50 layers.
PRIMITIVE_TARGETS = dict(
    zip(map(by_us, ASKED), ((1.5, 1.2), (1.6, 1.2), (1.5, 1.25), (1.4, 1.25)), strict=True)
)
# Of products with curvature: in gradients, and against curvlinops.
COUPLED_TIME |= {
    (HVP, GRADIENT): 4.0,
    (COMPILED_HVP, GRADIENT): 2.5,
    (HVP, THEIR_CUT_HVP): 1.0,
    (WHOLE_HVP, THEIR_HVP): 1.0,
    (GGNVP, GRADIENT): 3.0,
    (COMPILED_GGNVP, GRADIENT): 2.0,
    (GGNVP, THEIR_CUT_GGNVP): 1.0,
    (WHOLE_GGNVP, THEIR_GGNVP): 1.0,
}
COUPLED_MEMORY |= {
    (HVP, GRADIENT): 2.8,
    (HVP, THEIR_HVP): 0.3,
    (GGNVP, THEIR_GGNVP): 0.3,
}
# Of BatchNorm against the full batch: a chain, a ResNet-18.
NORMS_TIME, NORMS_MEMORY = {"norms": 1.6, "resnet": 1.25}, {"norms": 0.5, "resnet": 0.75}
# Of derivatives of derivatives, in microbatches against the whole batch.
NESTS_MEMORY = {
    "grad of value": 0.16,
    "reverse over reverse": 0.14,
    "forward over reverse": 0.11,
    "meta-gradient": 0.08,
}
for _nest, _target in NESTS_MEMORY.items():
    for _maker in (PRIMITIVE, PA):
        COUPLED_MEMORY[named(_nest, _maker), named(_nest, WHOLE)] = _target

# Of gradients of single samples, and of many runs as one: a chunk of gradients, the sums, the next.
SAMPLES_TIME = {(CLIPPED, HOOKS): 0.8, (AT_ONCE, ONE_BY_ONE): 0.1, (KERNEL, JACOBIANS): 1.1}
GHOST_TARGETS = {"dense": 1.2, "tokens": 0.8, "grouped": 0.8}  # against Opacus' ghost clipping
COUPLED_MEMORY[KERNEL, JACOBIANS] = 0.2
SAMPLES_MEMORY = {(SUM, CONCAT): 0.01, (SUM, ONE_GRADIENT): WIDE.rows + 2.0}


def time_target(ours: str, theirs: str, model: Model, device: str) -> float | None:
    if device != "cpu":
        return cuda_target(ours, theirs, model)
    width, rows = model.width, model.rows
    if (ours, theirs) == ("func", HAND) and width >= 512 and rows == 256:
        return 1.08
    if (ours, theirs) == ("func", TORCH_FUNC) and width == 16:
        return 0.75
    if (ours, theirs) == ("autograd", HAND) and width <= 64:
        return 1.45
    if (ours, theirs) == ("autograd", HAND) and width >= 512:
        return 1.05
    if (ours, theirs) == ("default step", HAND_STEP) and model in FIVE:
        return DEFAULT_TARGETS[model]
    if (ours, theirs) == ("default step", HAND_STEP) and model in ALONE_TARGETS:
        return ALONE_TARGETS[model]
    if (ours, theirs) == (OUR_TRAIN_PY, TRAIN_PY):
        return TRAIN_PY_TARGETS[model.precision]
    if (ours, theirs) == ("default step", ACCELERATE) and model in FIVE:
        return ACCELERATE_TARGETS[model]
    if (ours, theirs) == ("func step", HAND_STEP) and model in FUNC_TARGETS:
        return FUNC_TARGETS[model]
    if (ours, theirs) in ((HVP, THEIR_HVP), (GGNVP, THEIR_GGNVP)) and width >= 256:
        return 1.0  # narrower ones are cut for no reason but memory
    if ours == "func step" and model in stepping_models():
        return 1.10
    if ours in SAFE.values():
        return 1.05
    if ours == OUR_APPLY:
        return 1.15
    if ours == COMPILED and model in FIVE:
        return compiled_target(theirs, model)
    if (ours, theirs) == (EXACT, FULL):
        return NORMS_TIME[model.kind]
    if ours == CLIPPED and theirs in (GHOST, CUT_GHOST):
        return GHOST_TARGETS[model.kind]
    if ours in PRIMITIVE_TARGETS:
        return PRIMITIVE_TARGETS[ours][model.depth == 50]
    return (COUPLED_TIME | SAMPLES_TIME | PROGRAM_TARGETS).get((ours, theirs))


def compiled_target(theirs: str, model: Model) -> float | None:
    if theirs == HAND_STEP:
        return COMPILED_TARGETS[model]
    if theirs == COMPILED_HAND:
        return AGAINST_COMPILED
    return 1.0 if theirs == JAX and model.width <= 64 else None


def cuda_target(ours: str, theirs: str, model: Model) -> float | None:
    if model.kind != "small" or model.precision == "fp32" or theirs != HAND_STEP:
        return None
    return {"default step": 1.03, COMPILED: 0.9}.get(ours)


def memory_target(ours: str, regime: str, model: Model) -> float | None:
    if regime == STEP:
        if ours == COMPILED and model.width >= 1024:
            return 1.03
        return 1.05 if ours == "func step" and model.rows == 256 else None
    if ours not in ENGINES:
        return None
    return 1.02 if regime == FLAT else 1.03


def coupled_memory_target(ours: str, theirs: str, model: Model) -> float | None:
    if (ours, theirs) == (EXACT, FULL):
        return NORMS_MEMORY[model.kind]
    return COUPLED_MEMORY.get((ours, theirs))


def sample_memory_target(ours: str, theirs: str) -> float | None:
    return SAMPLES_MEMORY.get((ours, theirs))
