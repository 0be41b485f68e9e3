"""What is published: one record for each pair that is measured, with its target and its reason.

Rule: what is measured, and what there is to reach, is written down before any number is seen. A
pair that was measured is shown, and one that misses its target says what takes the time or the
memory, as it was found by measuring. All targets of time are for one core.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from .coupled import COUPLED
from .derivatives import DERIVATIVES
from .gradients import GRADIENTS
from .models import Model, gpt
from .programs import PROGRAMS
from .sequences import SEQUENCES
from .steps import STEPS


CONTENDERS = GRADIENTS | STEPS | COUPLED | DERIVATIVES | PROGRAMS | SEQUENCES
ONE_GRADIENT = "one gradient"  # and no contender: what memory is counted in

# Seconds that a race takes in each of these tables of the page; with --full it takes 20.
SECONDS = {
    "curvature": 5.0,
    "derivatives": 3.0,
    "coupled": 3.0,
    "samples": 3.0,
    "programs": 5.0,
    "steps": 3.0,
    "gradients": 1.5,
}
PARTS = "batch", *SECONDS, "ranks", "checkpoint"

# Small to large: from where Python is all that counts to where the matrix product is.
FIVE = (
    Model(16, 8, 16, depth=2),
    Model(64, 16, 16, depth=4),
    Model(256, 32, 8, depth=4),
    Model(512, 64, 4, depth=6),
    Model(1024, 128, 4, depth=6),
)
CONV = Model(16, 16, 8, depth=3, kind="conv")
STEPPING = Model(512, 256, 8), Model(1024, 256, 8, depth=4), Model(2048, 256, 8, depth=2)
LARGE = Model(2048, 256, 8, depth=4)
SIXTY = Model(256, 1, 1, depth=60, bias=False)
WINDOWS = *FIVE, CONV, gpt("tiny", 4, 8, "bf16")
MORE_WINDOWS = (
    *(Model(64, 16, 2**n, depth=4) for n in range(8) if n != 4),
    *(LARGE, gpt("tiny", 4, 8)),
    *(m._replace(precision="bf16") for m in (FIVE[2], FIVE[4], CONV)),
)

# Samples that are coupled, a head with many words, derivatives of derivatives; and a chain of which
# only some activations are kept.
NORM, RESNET = Model(32, 16, 32, kind="norms"), Model(32, 16, 16, depth=18, kind="resnet")
PAIRED = Model(32, 16, 32, kind="views")
TOWERS = Model(512, 32, 128, depth=4, activation="gelu", kind="towers")
FEW_TOWERS = TOWERS._replace(rows=256, microbatches=8)  # a compiler takes seconds for each
HEAD = Model(256, 128, 16, depth=1, kind="head")
NESTED = Model(256, 128, 16, activation="gelu", bias=False)
CURVED = Model(256, 128, 16, depth=8, activation="gelu")
NARROW = CURVED._replace(width=64, rows=32, depth=4)
ALONE = tuple(Model(32, 4, 8, depth=n) for n in (2, 50))
TOKENS = Model(256, 512, 8, depth=1, activation="gelu", kind="chain")
CHAIN = Model(256, 512, 1, depth=16, activation="gelu", kind="chain")
# A row is a step in time, a microbatch a chunk of them.
CARRIED = (
    Model(128, 32, 32, depth=1, kind="lstm"),
    Model(128, 32, 32, depth=2, activation="gelu", kind="fading"),
)

# Gradients of single samples, by chunks of as many samples as are fastest; one case of smaller
# ones, which Opacus gets too; and 32 runs as one.
CLIPPING = {
    Model(256, 512, 1, depth=3, kind="dense"): 1.2,
    Model(16, 128, 1, depth=3, kind="grouped"): 0.8,
    Model(64, 64, 4, depth=1, kind="tokens"): 0.8,
}
CLIPPING_CUT = {Model(256, 64, 8, depth=3, kind="dense"): 1.2}
# 4,096 samples: 1.6 GB of gradients; and so wide that a gradient is more than what a process
# happens to hold, for memory that is counted in gradients.
MANY, WIDE = Model(128, 16, 256, depth=6), Model(512, 16, 256, depth=6)
OF_KERNEL = Model(32, 5, 5, kind="ntk")
ENSEMBLE = Model(32, 8, 4, depth=3)
# What is done to a network of the width of a tutorial, and of one that is wider.
THROUGH_STEPS = Model(32, 16, 4, depth=2), Model(256, 16, 4, depth=2)
DIGITS = Model(16, 32, 4, kind="digits")

# The gradient of a window.
QUICK = (
    *(Model(width, rows, 16) for width in (16, 64) for rows in (16, 64, 256)),
    *(Model(256, 64, 16), *(Model(512, rows, 4) for rows in (16, 64, 256))),
    *(Model(1024, 256, 4, depth=4), Model(2048, 256, 4, depth=2)),
    # The same in other windows tells the cost of a call from the cost of a microbatch.
    *(Model(16, 64, 1), Model(16, 64, 64), Model(512, 64, 1), Model(512, 64, 16)),
)
EVERY_SIZE = (16, 64, 256, 512, 1024, 2048), (16, 64, 256), (1, 4, 16, 64)
# But for windows that take more than about ten seconds.
EVERY = tuple(m for m in (Model(*size) for size in product(*EVERY_SIZE)) if m.flops <= 5e11)
KEPT = tuple(m for m in EVERY if m.width >= 512 and m.microbatches == 4)  # memory
EVERYBODY = tuple(m for m in EVERY if m[:3] in ((16, 64, 16), (512, 64, 4)))
HEAVY = {
    "weight-heavy": Model(2048, 64, 4),
    "activation-heavy": Model(1024, 2048, 3, depth=12, activation="gelu", bias=False),
}


class Pair(NamedTuple):
    """Ours beside theirs, wherever that is measured."""

    part: str
    measure: str
    ours: str
    theirs: str
    where: tuple[Model, ...]
    target: float | dict[Model, float] | Callable[[Model], float | None] | None = None
    why: str = ""  # a target is missed
    race: str = ""  # who computes something else runs in another race
    full: bool = False  # measured with --full alone

    def goal(self, model: Model) -> float | None:
        """What there is to reach."""
        if isinstance(self.target, dict):
            return self.target.get(model)
        return self.target(model) if callable(self.target) else self.target


def of(*targets: float, models: tuple[Model, ...] = FIVE) -> dict[Model, float]:
    """A target for each of them, or for the first."""
    return dict(zip(models, targets, strict=False))


PYTHON = (
    "Python around torch's kernels: 0.2 ms a step and 20 µs a microbatch beyond the loop, for what "
    "a loop does not do. It shows where a microbatch takes less than some milliseconds; there "
    "`compile=True` helps."
)
FUNC = (
    "`torch.func` itself, which each microbatch calls once, with the same loss: what is saved is a "
    "second gradient tree, and that counts where layers are wide."
)
PASS = (
    "one more pass forwards, which is what the memory costs. It varies with what the full batch "
    "pays for large tensors that come from the kernel anew."
)
CUT = "the whole batch is one call of theirs and sixteen of ours; in the same cut ours is faster."
NEST = (
    "what a second reverse pass holds of one microbatch, its inputs among them, is by a hair more "
    "than what was hoped for."
)
PROMISES = (
    "two layers take less time than what the loop by hand leaves out: what is captured, what "
    "modules hold, random numbers, modes and versions are kept, which takes some 30 µs a "
    "microbatch and 250 µs a call."
)
CHUNKS = (
    "eight chunks of 64 beside one of 512: some 0.9 ms of a chunk are Python's. A few large chunks "
    "are faster than many small ones; in the same chunks ours is faster."
)

HAND, ACCELERATE, COMPILED = "hand step", "Accelerate", "compiled step"
RIVALS = "compiled hand step", ACCELERATE, "Fabric", "torch.func + AdamW", "torchopt", "JAX"


def steps() -> Iterator[Pair]:
    """A whole training step."""

    def time(ours: str, theirs: str, *rest: Any) -> Iterator[Pair]:
        yield Pair("steps", "time", ours, theirs, WINDOWS, *rest)
        yield Pair("steps", "time", ours, theirs, MORE_WINDOWS, full=True)

    yield from time("default step", HAND, of(1.15, 1.08, 1.02, 1.02, 1.0), PYTHON)
    why = "where kernels count, Accelerate is the loop by hand and nothing more."
    yield from time("default step", ACCELERATE, of(0.7, 0.75, 0.9, 1.0, 1.0), why)
    slow = (
        "`torch.func` summed by hand takes as long, or longer; it is what composes with transforms."
    )
    yield from time("func step", HAND, of(1.9, 1.8, 1.35, 1.1), slow)
    products = (
        "the matrix products of 32 × 256 samples, which the graph calls as the loop does, are most "
        "of the time."
    )
    yield from time(COMPILED, HAND, of(0.15, 0.20, 0.72, 1.0, 1.0), products)
    why = "the loop's loss is compiled too, and its products are the same."
    yield from time(COMPILED, "compiled hand step", of(*[1.03] * 5), why)
    why = (
        "between the kernels of a step, of which there is little else at width 16, JAX spends "
        "less: 0.14 ms a step beside 0.23."
    )
    yield from time(COMPILED, "JAX", of(1.0, 1.0), why)
    for rival in RIVALS:
        yield from time(rival, HAND)

    for ours, target in (("default step", None), ("func step", 1.10)):
        yield Pair("steps", "time", ours, HAND, STEPPING, target, slow)
        scaled = f"{ours}, scaled and clipped"
        yield Pair("steps", "time", scaled, ours, STEPPING[:2], 1.05)
        yield Pair("steps", "time", scaled, ours, STEPPING[2:], 1.05, full=True)
    why = "the checks around one call of the same kernel."
    yield Pair("steps", "time", "adamw.apply", "torch.optim.AdamW", (SIXTY,), 1.15, why)
    alone = tuple(m._replace(microbatches=1) for m in (FIVE[0], FIVE[3]))
    yield Pair("steps", "time", "default step", HAND, alone, of(1.4, 1.05, models=alone), PYTHON)
    yield Pair("steps", "time", "func step", HAND, alone)

    one, two, alike = "one mean", "two means", "two means over one tensor"
    why = (
        "the forward pass that counts weights is a third of the 1.0 ms that a microbatch takes "
        "more; the rest are 120 operations on single numbers, which read the terms, twice."
    )
    pages = (
        "by torch's allocator it is 5 kB of 34.6 MB for two means, and nothing over one tensor; "
        "the rest are pages of the process, which vary by 2 % from run to run."
    )
    for ours, goals in ((two, {FIVE[2]: 1.5}), (alike, {FIVE[2]: 1.05})):
        yield Pair("steps", "time", ours, one, (FIVE[1], FIVE[2], FIVE[4]), goals, why, two)
        yield Pair("steps", "memory", ours, one, (FIVE[4],), 1.0, pages)

    goals = {"func step": of(1.05, 1.05, models=(STEPPING[0], LARGE)), COMPILED: 1.03}
    buffers = "buffers of the graph, which inductor reserves for all of it."
    for ours in ("default step", "func step", COMPILED, *RIVALS):
        eager, rival = ours != COMPILED, ours in RIVALS
        why = "" if eager else buffers
        if eager and not rival:
            yield Pair("steps", "memory", ours, HAND, STEPPING[:1], goals.get(ours))
            scaled = f"{ours}, scaled and clipped"
            yield Pair("steps", "memory", scaled, HAND, STEPPING[:1], full=True)
        yield Pair("steps", "memory", ours, HAND, FIVE[4:], goals.get(ours), why)
        yield Pair("steps", "memory", ours, HAND, (LARGE,), goals.get(ours), why, full=rival)


def coupled() -> Iterator[Pair]:
    """Samples that are coupled, a head of many words, chains of which little is kept."""

    def pair(measure: str, ours: str, theirs: str, where: Any, *rest: Any, **others: Any) -> Pair:
        where = where if type(where) is tuple else (where,)
        return Pair("coupled", measure, ours, theirs, where, *rest, **others)

    ours, full = "functional in microbatches", "full batch"
    norms = NORM, RESNET
    large = tuple(m._replace(microbatches=32) for m in norms)
    yield pair("time", ours, full, norms, of(1.6, 1.25, models=norms), PASS)
    yield pair("memory", ours, full, large, of(0.5, 0.75, models=large), PASS)
    ours, full = "InfoNCE over BatchNorm", "full-batch InfoNCE over BatchNorm"
    yield pair("time", ours, full, PAIRED, 1.7, PASS)
    yield pair("memory", ours, full, PAIRED, 0.5, PASS)

    full, func = "full-batch InfoNCE", "full-batch InfoNCE, torch.func.grad"
    why = (
        "microbatches of 32 samples are a matter of Python: the rule keeps what is captured, grad "
        "mode, autocast, random numbers and what modules hold."
    )
    goals = {
        ("time", "InfoNCE, pa.grad", "GradCache"): 1.05,
        ("memory", "InfoNCE, pa.grad", "GradCache"): 1.0,
        ("memory", "InfoNCE, pa.grad", func): 0.52,
        ("memory", "InfoNCE, torch.func.grad", func): 0.7,
    }
    for measure in ("time", "memory"):
        pairs = product(("InfoNCE, pa.grad", "InfoNCE, torch.func.grad"), ("GradCache", full, func))
        for ours, theirs in (("GradCache", full), *pairs):
            key = measure, ours, theirs
            quick = measure == "memory" or (ours, theirs) == ("InfoNCE, pa.grad", "GradCache")
            yield pair(*key, TOWERS, goals.get(key), why, full=not quick)
    whole, cut = "InfoNCE step, whole batch", "InfoNCE step, microbatched"
    for ours, theirs in (
        *((cut, whole), (f"compiled {whole}", whole), (f"compiled {cut}", whole)),
        *((f"compiled {cut}", cut), (f"compiled {cut}", f"compiled {whole}")),
    ):
        yield pair("memory", ours, theirs, FEW_TOWERS)

    head, hand = "whole head", "tiled head by hand"
    goals = {("time", hand): 1.45, ("memory", head): 0.12}  # one more product, beside three
    for measure in ("time", "memory"):
        yield pair(measure, hand, head, HEAD)
        for theirs in (head, hand):
            yield pair(measure, "tiled head", theirs, HEAD, goals.get((measure, theirs)))
            rare = measure == "time"
            yield pair(measure, "tiled head, torch.func", theirs, HEAD, full=rare)

    for measure, target in (("time", 1.1), ("memory", 1.0)):
        asked = "an MLP over tokens"
        yield pair(measure, f"{asked}, microbatch", f"{asked}, the loop", TOKENS, target)
    for asked, few, many in (
        ("forwards, no_grad", 1.5, 1.2),
        ("forwards, in grad mode", 1.6, 1.2),
        ("backwards", 1.5, 1.25),
        ("torch.func.grad", 1.4, 1.25),
    ):
        names, target = (f"{asked}, microbatch", f"{asked}, the loop"), of(few, many, models=ALONE)
        yield pair("time", *names, ALONE, target, PROMISES, race=asked)

    deep = CHAIN._replace(rows=2048)
    yield pair("memory", "checkpoint", "no remat", deep)
    for ours in ("remat", "remat, .backward()"):
        yield pair("time", ours, "checkpoint", CHAIN, 1.1)
        yield pair("memory", ours, "checkpoint", deep)
        yield pair("memory", ours, "no remat", deep)

    kept, hand = "the sequence, all kept", "a checkpoint a chunk"
    why = "one more pass forwards beside three, and the Python of each chunk."
    for ours in ("scan", "scan, .backward()"):
        yield pair("time", ours, kept, CARRIED, 1.45, why)
        yield pair("time", ours, hand, CARRIED, 1.1, why)
        yield pair("memory", ours, kept, CARRIED, 0.12)
        yield pair("memory", ours, hand, CARRIED, 1.05)


def derivatives() -> Iterator[Pair]:
    """Derivatives of derivatives, in microbatches, beside the whole batch."""
    for nest, memory in {
        "grad of value": 0.16,
        "reverse over reverse": 0.14,
        "forward over reverse": 0.11,
        "meta-gradient": 0.08,
    }.items():
        whole, primitive, ours, rematted = (
            f"{nest}, {maker}" for maker in ("whole", "microbatch", "pa.grad", "pa.grad of remat")
        )
        for name in (primitive, ours):
            yield Pair("derivatives", "memory", name, whole, (NESTED,), memory, NEST)
            yield Pair("derivatives", "memory", name, rematted, (NESTED,))
        yield Pair("derivatives", "memory", rematted, whole, (NESTED,))
        rare = nest != "meta-gradient"
        for name, theirs, target in (
            *((ours, rematted, None if rare else 1.0), (ours, whole, None)),
            (rematted, whole, None),
        ):
            pair = Pair("derivatives", "time", name, theirs, (NESTED,), target)
            yield pair._replace(race=nest, full=rare)
        for theirs in (rematted, whole):
            pair = Pair("derivatives", "time", primitive, theirs, (NESTED,))
            yield pair._replace(race=nest, full=True)


def curvature() -> Iterator[Pair]:
    """Products with curvature: in gradients, and beside curvlinops; and L-BFGS."""
    deep, gradient = (CURVED._replace(rows=1024),), "a gradient"
    for ours, library, eager, compiled in (
        ("hvp", "curvlinops, Hessian", 4.0, 2.5),
        ("ggnvp", "curvlinops, GGN", 3.0, 2.0),
    ):
        for name, theirs, target, why in (
            (ours, gradient, eager, ""),
            (f"{ours}, compiled", gradient, compiled, ""),
            (ours, f"{library}, cut", 1.0, ""),
            (f"{ours}, whole", library, 1.0, ""),
            (ours, library, {CURVED: 1.0}, CUT),  # a narrow one is cut for no reason but memory
        ):
            yield Pair("curvature", "time", name, theirs, (NARROW, CURVED), target, why, ours)
        yield Pair("curvature", "memory", ours, gradient, deep, 2.8 if ours == "hvp" else None)
        yield Pair("curvature", "memory", ours, library, deep, 0.3)
    walks = tuple(Model(width, 32, 16, depth=4, activation="gelu") for width in (64, 256, 512))
    why = (
        "the gradient: at width 64 that of a module takes 1.2 of the closure's time (35 µs more "
        "for each microbatch, 90 for each evaluation). L-BFGS itself takes as long as torch's."
    )
    yield Pair("curvature", "time", "lbfgs", "torch.optim.LBFGS", walks, 1.0, why)


def samples() -> Iterator[Pair]:
    """Gradients of single samples, and many training runs as one."""
    hooks, ghost, every = "Opacus, hooks", "Opacus, ghost", (*CLIPPING, *CLIPPING_CUT)
    convolutions = (
        "convolutions of 16 channels on small images: norms from what layers see save little "
        "beside gradients that are written."
    )
    yield Pair("samples", "time", ghost, hooks, every)
    yield Pair("samples", "time", "clipped_sum", hooks, every, 0.8, convolutions)
    yield Pair("samples", "time", "clipped_sum", ghost, every, CLIPPING | CLIPPING_CUT, CHUNKS)
    cut = tuple(CLIPPING_CUT)
    yield Pair("samples", "time", "clipped_sum", f"{ghost}, in chunks", cut, CLIPPING_CUT, CHUNKS)
    for theirs in (hooks, ghost):
        yield Pair("samples", "time", "clipped_sum, compiled", theirs, every, full=True)
    for measure, target in (("time", 1.1), ("memory", 0.2)):
        yield Pair("samples", measure, "gramian", "NTK by Jacobians", (OF_KERNEL,), target)
    yield Pair("samples", "time", "vmap(step), compiled", "32 eager steps", (ENSEMBLE,), 0.1)
    ours = "per_sample_grad, sum"
    yield Pair("samples", "memory", ours, "torch.func.vmap", (MANY,), 0.01)
    for name, target in (
        *((ours, WIDE.rows + 2.0), ("clipped_sum", None)),
        ("per_sample_grad, moments", None),
    ):
        yield Pair("samples", "memory", name, ONE_GRADIENT, (WIDE,), target)


def programs() -> Iterator[Pair]:
    """Programs that people have written."""

    def time(ours: str, theirs: str, where: Any, *rest: Any) -> Pair:
        return Pair("programs", "time", ours, theirs, where, *rest)

    trained = tuple(gpt("tiny", 12, 4, precision) for precision in ("fp32", "fp16"))
    why = (
        "the step decides, measures and watches, where the loop does nothing; fp16 is emulated by "
        "a CPU in the same kernels on both sides."
    )
    goals = of(1.0, 0.9, models=trained)
    yield time("train.py, make_step", "train.py, by hand", trained, goals, why)
    yield time("mnist, make_step", "mnist, by hand", (DIGITS,), 1.1, PYTHON)
    yield time("mnist, streamed", "mnist, by hand", (DIGITS,))
    many = ENSEMBLE, ENSEMBLE._replace(microbatches=1)
    why = (
        "a step measures, judges and selects for each member, which the code by hand does not; in "
        "one microbatch nothing else is there to pay for it."
    )
    yield time("ensembling, vmap(step)", "ensembling, by hand", many, 1.3, why)
    why = (
        "`torch.func` under a transform, which takes 1.2 to 1.4 of `higher` by itself; the rest is "
        "what a step does beyond it."
    )
    yield time("higher, by steps", "higher", THROUGH_STEPS, 1.3, why)
    yield time("higher, by steps in microbatches", "higher", THROUGH_STEPS)


def gradients() -> Iterator[Pair]:
    """The gradient of a window, without an optimizer."""
    hand, func = "hand loop", "torch.func"
    for ours, theirs, target, why in (
        ("func", hand, lambda m: 1.08 if m.width >= 512 and m.rows == 256 else None, FUNC),
        ("func", func, lambda m: 0.75 if m.width == 16 else None, FUNC),
        ("autograd", hand, lambda m: {16: 1.45, 64: 1.45, 256: None}.get(m.width, 1.05), PYTHON),
        (func, hand, None, ""),
    ):
        yield Pair("gradients", "time", ours, theirs, QUICK, target, why)
        others = tuple(m for m in EVERY if m not in QUICK)
        yield Pair("gradients", "time", ours, theirs, others, target, why, full=True)
        yield Pair("gradients", "time, memory kept", ours, theirs, KEPT, full=True)
    heavy = tuple(HEAVY.values())
    for ours in (func, "func", "autograd"):
        target = None if ours == func else 1.03
        yield Pair("gradients", "memory", ours, hand, heavy, target)
    for engine in ("func", "autograd"):
        for variant in ("streamed", "skip", "streamed, skip", "Weighted"):
            ours = f"{engine}, {variant}"
            yield Pair("gradients", "time", ours, engine, EVERYBODY, full=True)
            yield Pair("gradients", "memory", ours, hand, heavy, full=True)


PAIRS = (
    *curvature(),
    *derivatives(),
    *coupled(),
    *samples(),
    *programs(),
    *steps(),
    *gradients(),
)
