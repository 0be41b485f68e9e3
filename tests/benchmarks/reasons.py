"""Why a target is missed.

Rule: of each pair that misses one somewhere, what takes the time or the memory, as it was found by
measuring. The page of benchmarks prints it below the table. A third word is the measure, where the
reason is another one for time than for memory.
"""

from .contenders import HAND, TORCH_FUNC
from .curvature import GGNVP, HVP, THEIR_GGNVP, THEIR_HVP
from .gradcache import GRADCACHE, OUR_PAIRS
from .nests import PA, PRIMITIVE, WHOLE, named
from .norms import CUT_VIEWS, EXACT, FULL, FULL_VIEWS
from .per_sample import CLIPPED, GHOST, HOOKS
from .primitive import ASKED, by_hand, by_us
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
from .ranks import DDP, OURS
from .rivals import ACCELERATE, JAX
from .steps import COMPILED, COMPILED_HAND, HAND_STEP, OUR_APPLY, TORCH_APPLY


PYTHON = (
    "Python around torch's kernels: 0.2 ms a step and 20 µs a microbatch beyond the loop, for what "
    "a loop does not do. It shows where a microbatch takes less than some milliseconds; there "
    "`compile=True` helps."
)
FUNC = (
    "`torch.func` itself, which each microbatch calls once, with the same loss: what is saved is a "
    "second gradient tree, and that counts where layers are wide."
)
WHOLE_BATCH = (
    "one more pass forwards, which is what the memory costs. It varies with what the full batch "
    "pays for large tensors that come from the kernel anew."
)
CUT = "the whole batch is one call of theirs and sixteen of ours; in the same cut ours is faster."
NEST = (
    "what a second reverse pass holds of one microbatch, its inputs among them, is by a hair more "
    "than what was hoped for."
)

REASONS: dict[tuple[str, ...], str] = {
    ("func", TORCH_FUNC): FUNC,
    ("autograd", HAND): PYTHON,
    ("func", HAND): FUNC,
    ("default step", HAND_STEP): PYTHON,
    ("func step", HAND_STEP): (
        "`torch.func` summed by hand takes as long, or longer; it is what composes with transforms."
    ),
    ("default step", ACCELERATE): (
        "where kernels count, Accelerate is the loop by hand and nothing more."
    ),
    (COMPILED, HAND_STEP): (
        "the matrix products of 32 × 256 rows, which the graph calls as the loop does, are most of "
        "the time."
    ),
    (COMPILED, HAND_STEP, "memory"): "buffers of the graph, which inductor reserves for all of it.",
    (COMPILED, COMPILED_HAND): "the loop's loss is compiled too, and its products are the same.",
    (COMPILED, JAX): (
        "between the kernels of a step, of which there is little else at width 16, JAX spends "
        "less: 0.14 ms a step beside 0.23."
    ),
    (COMPILED, f"{COMPILED} at 2"): "the first step itself has 1,024 microbatches to compute.",
    (OUR_APPLY, TORCH_APPLY): "the checks around one call of the same kernel.",
    (OUR_TRAIN_PY, TRAIN_PY): (
        "the step decides, measures and watches, where the loop does nothing; fp16 is emulated by "
        "a CPU in the same kernels on both sides."
    ),
    (OUR_MNIST, MNIST): PYTHON,
    (OUR_ENSEMBLING, ENSEMBLING): (
        "a step measures, judges and selects for each member, which the code by hand does not; in "
        "one microbatch nothing else is there to pay for it."
    ),
    (THROUGH, HIGHER): (
        "`torch.func` under a transform, which takes 1.2 to 1.4 of `higher` by itself; the rest is "
        "what a step does beyond it."
    ),
    (named("reverse over reverse", PA), named("reverse over reverse", WHOLE)): NEST,
    (named("reverse over reverse", PRIMITIVE), named("reverse over reverse", WHOLE)): NEST,
    (EXACT, FULL): WHOLE_BATCH,
    (CUT_VIEWS, FULL_VIEWS): WHOLE_BATCH,
    (OUR_PAIRS, GRADCACHE): (
        "microbatches of 32 rows are a matter of Python: the rule keeps what is captured, grad "
        "mode, autocast, random numbers and what modules hold."
    ),
    **{
        (by_us(asked), by_hand(asked)): (
            "two layers take less time than what the loop by hand leaves out: what is captured, "
            "what modules hold, random numbers, modes and versions are kept, which takes some 30 "
            "µs a microbatch and 250 µs a call."
        )
        for asked in ASKED
    },
    (CLIPPED, GHOST): (
        "eight chunks of 64 beside one of 512: some 0.9 ms of a chunk are Python's. A few large "
        "chunks are faster than many small ones; in the same chunks ours is faster."
    ),
    (CLIPPED, HOOKS): (
        "convolutions of 16 channels on small images: norms from what layers see save little "
        "beside gradients that are written."
    ),
    (HVP, THEIR_HVP): CUT,
    (GGNVP, THEIR_GGNVP): CUT,
    (OUR_LBFGS, LBFGS): (
        "the gradient: at width 64 that of a module takes 1.2 of the closure's time (35 µs more "
        "for each microbatch, 90 for each evaluation). L-BFGS itself takes as long as torch's."
    ),
    (OURS, DDP): (
        "weights, counts and a checksum of what ranks hold: 320 bytes, and at 34 MB one small "
        "collective, since nothing else may be sent before ranks are known to agree."
    ),
    (OURS, DDP, "time"): (
        "the Python of microbatches, as without ranks (0.5 ms beside a loop of 1.4 at 0.07 MB), "
        "and what is packed and compared (0.6 ms beside 0.35 of the collective)."
    ),
}
