"""The promises of the package, and the test files that hold them.

A test file names its promise in a marker:

    pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]

A test of what the next version gives up is marked ``given_up``, with a name of ``GIVEN_UP``. One
that a correct rewrite of the inside would fail is marked ``mechanism``. The closest marker counts.

``python -m tests.project.promises`` writes the tables of the guide's page trust.md: promises,
versions and planted faults. ``pytest -m promise`` runs all of these test files.
"""

import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "guide" / "trust.md"
TEXT = """\
## The gradient
bits
    Where the arithmetic is exact, any microbatch sizes, any order and any merge tree give the
    full batch's gradient bit for bit: for `"sum"`, for `Weighted`, and for a mean over a power
    of two of samples.
bounds
    Elsewhere results differ from the full batch only by rounding, within a bound that is
    derived, not tuned.
monoid
    Accumulation is a commutative monoid: `init`, `update`, `merge`, `finalize`.
weights
    A microbatch of zero weight adds exactly nothing, even where its values are NaN. Weights
    are counted in float64.
terms
    A sum of `Weighted` terms is a sum of means over the whole batch, each over its own weight.
    If a term's weight was counted wrongly, the result is NaN.
skip
    `nonfinite="skip"` leaves out a microbatch together with its weight, and counts it.
coupled
    Contrastive losses and BatchNorm, [written for the whole batch](coupled.md), give its
    gradient and its running statistics.
torch.func
    Without a `microbatch_size`, `pa.grad` is `torch.func.grad`: same conventions, same
    structures, same bits. The bits differ for a few operations, such as silu and GroupNorm,
    which torch.func differentiates by another formula.
engines
    All engines and a hand-written `.backward()` loop give the same bits.
reductions
    Outputs of microbatches are joined, summed, averaged or reduced as asked, and so are their
    derivatives: both are those of the full batch.
values
    Values, aux and metrics are the full batch's.
batches
    Every tensor in a batch argument is cut along its samples. None, strings and Python numbers
    go to every microbatch. Any mapping and any registered node is a tree.
narrow
    Sums are float32 at least, and are cast once, at the end. In half precision nothing
    overflows that need not.
policy
    Autocast and dtype policies work inside each microbatch. Sums stay wide.
keys
    Random numbers from `pa.dropout` and its relatives depend only on a key and a position,
    never on the microbatch size.

## Derivatives
closure
    Derivatives of a microbatched function are microbatched functions. They need the memory of
    one microbatch under any nesting of transforms. Tensors that the function captures get their
    derivatives too.
followed
    What a result depends on and cannot be followed is never taken for a constant. It raises,
    and the error says what to write.
second run
    If a microbatch runs again, it sees what its first run saw: random numbers, autocast, and
    the tensors and modes of its modules. Otherwise it raises.

## Nothing else changes
purity
    No call changes an argument, a module, a mode or a generator, even when it raises.
writes
    A loss that writes to its arguments, or to tensors that it captures, raises, if possible
    before the write.
threads
    Threads do not affect each other.
frozen
    A parameter that does not require grad is never trained, decayed or moved.
donation
    Every use of a donated state raises. Nothing else changes.

## The training step
applied
    A step either applies the full-batch update, or leaves every bit of the parameters, the
    optimizer state and the buffers as it was and sets `info.applied` to false.
buffers
    After a step, buffers are frozen, sequential or pooled, as asked.
loss scale
    The loss scale follows `GradScaler`, and its state is complete before the first step.
optimizers
    Optimizers give the same bits as torch's.
compiled
    A compiled step gives the numbers of the eager step, and raises on what it cannot compile.
ensembles
    Under vmap, each member is trained as if it were alone.
together
    Any two features of a step work together, or a [table](together.md) says why not.

## Cost
one buffer
    A step holds one tree of gradients, the sums. `memory_report` predicts the memory that a
    step takes.
sizes
    `microbatch_size="auto"` finds a size that fits in memory, and remembers it.
launches
    A step does not synchronise with the device, apart from the check of the loss (calls 1, 2, 3,
    5, 8 and one in 32) and options whose documentation says so. Python calls and kernel launches
    stay below fixed limits.

## Samples, curvature and ranks
samples
    Per-sample gradients are reduced as they are computed, and give the bits of a loop over the
    samples.
curvature
    Curvature products are those of the full batch, for any microbatch size.
ranks
    Ranks are one more way to split a batch, with any number of samples on each. Ranks that
    disagree all raise.

## Files, errors and checks
disk
    `pa.load` returns what `pa.save` wrote, bit for bit, or raises, even if a process was killed
    while saving or the file was damaged.
errors
    Bad input raises before any work. The error names the leaf, and no state is lost.
refused
    A loss whose microbatches do not add up is refused at its first call, or later when it
    begins to, and no other loss is.
check
    `check_accumulation` finds the losses that must not be split, names the cause, and raises
    no false alarm.

tools
    The assertions, strategies and commands of `pureaccum.testing` do what they say.

## The project itself
pages
    Every code block of the README and the guide runs and prints what the page shows. Every
    public name has an example.
documented
    Every public name does what its docstring and the guide say.
functional
    `pa.functional` computes what the module computes, as a pure function.
programs
    Well-known programs give the same numbers when they are written with this package.
mutants
    Tests can fail: each planted fault makes the test named for it fail.
private
    The private names of torch that the package uses are in one folder, each with the versions
    in which it was checked.
"""
GIVEN_UP = {  # what the next version does no longer: its tests go with it
    "captured": "derivatives with respect to whatever a function captures, under any transform",
    "early writes": "a write that is refused before it happens",
    "retries": "a way to differentiate that fails, and another that is tried",
    "restored modes": "modes and attributes of modules that are put back for a second run",
    "stream weights": "weights of a stream for a sum of `Weighted`; skipped gradients of one",
    "cut collectives": "collectives inside a loss that is cut",
    "sharded batches": "batches of DTensors, and sharded rows",
    "caches": "what is kept for each structure of params and batch",
    "auto engine": "an engine that is chosen by trying",
    "recipes": "graphs that are unrolled",
    "lbfgs and sam": "optimizers that call the loss",
    "donation elsewhere": "donation but to a step, an accumulator and an average",
}
GROUPS = {
    title: {
        name: " ".join(lines.split())
        for name, lines in re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", part, re.M)
    }
    for title, part in re.findall(r"^## (.*)\n((?:(?!## ).*\n)+)", TEXT, re.M)
}
PROMISES = {name: text for group in GROUPS.values() for name, text in group.items()}
PLANTED = {  # part of the package: what it does, a planted fault, and that fault in words
    "_core": (
        "sums, weights, the primitive",
        "zero weight by multiplication",
        "a masked microbatch is multiplied by zero, and NaN × 0 is NaN",
    ),
    "_step": (
        "the training step",
        "a scale that is not undone",
        "gradients reach the optimizer still multiplied by the loss scale",
    ),
    "_base": (
        "trees, states, private torch",
        "sums as narrow as the parameters",
        "gradients are summed in the parameters' dtype, not in float32",
    ),
    "_samples": (
        "per-sample gradients",
        "samples summed without their factor",
        "a sum of clipped gradients is not clipped",
    ),
    "_pure": (
        "modules and random numbers",
        "frozen parameters trained",
        "the optimizer also moves parameters that do not require grad",
    ),
    "curvature": (
        "curvature products, solvers",
        "an error that does not shrink",
        "the error of an estimate does not fall with more samples",
    ),
    "_optim": (
        "optimizers",
        "an optimizer that counts steps not applied",
        "the optimizer counts a step that was not applied",
    ),
    "checkpoint": (
        "save and load",
        "a checksum that nobody compares",
        "numbers that were changed on disk are loaded",
    ),
    "testing": (
        "the checker",
        "a check of rows in order alone",
        "the checker cuts the batch at random, but never shuffles it",
    ),
}


@cache
def held():
    """The test files, by promise."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in marked(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(path)
    return found


def marked(source, kind="promise"):
    """The names in markers of that kind, of the file or of one of its tests."""
    return set(re.findall(rf'mark\.{kind}\("([^"]+)"\)', source))


def promises():
    """The tables of promises: a heading for each group, and the test files of each promise."""
    files, lines = held(), []
    for title, group in GROUPS.items():
        lines += [f"### {title}", "", "| promise | tests |", "|---|---|"]
        for name, sentence in group.items():
            places = [path.relative_to(ROOT / "tests").as_posix() for path in files[name]]
            links = (f"[{label(place)}](../../tests/{place})" for place in places)
            lines.append(f"| {sentence} | {', '.join(links)} |")
        lines.append("")
    return "\n".join(lines)


def label(place):
    return place.replace("/test_", "/").removesuffix(".py")


def versions():
    """The table of versions: what the workflow runs on which of them."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)", optree: "([\d.]+)"', workflow)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dev = project["project"]["optional-dependencies"]["dev"]
    torch, optree = (next(x for x in dev if x.startswith(f"{it}==")) for it in ("torch", "optree"))
    pinned = torch.removeprefix("torch=="), optree.removeprefix("optree==")
    lines = ["| Python | torch | optree | CI runs |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(version)} | all tests |" for version in matrix]
    what = "all tests on the installed wheel, lint, types; the simulated device"
    lines.append(f"| 3.11 | {' | '.join(pinned)} | {what} |")
    return "\n".join(lines) + "\n"


def planted():
    """The table of faults: how many are planted in each part of the package, and one of them."""
    table = (ROOT / "tests" / "testing" / "mutants.toml").read_text(encoding="utf-8")
    faults = tomllib.loads(table)
    number = Counter(fault["file"].partition("/")[0] for fault in faults.values())
    lines = ["| package | faults | one of them |", "|---|---|---|"]
    for part, (what, name, words) in PLANTED.items():
        assert faults[name]["file"].startswith(f"{part}/"), name
        lines.append(f"| `{part}`: {what} | {number.pop(part)} | {words} |")
    assert not number, f"add {sorted(number)} to PLANTED"
    lines.append(f"| in all | {len(faults)} | |")
    return "\n".join(lines) + "\n"


def filled(page):
    """The page with its tables as they have to be."""
    first, *_ = GROUPS
    tables = {rf"^### {first}\n(?:(?!## ).*\n)+": promises() + "\n"}
    for table in (versions(), planted()):
        header, _, _ = table.partition("\n")
        tables[rf"^{re.escape(header)}\n(?:\|.*\n)+"] = table
    for old, new in tables.items():
        page = re.sub(old, lambda _, new=new: new, page, flags=re.MULTILINE)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
