"""What is promised, and which tests hold it: a file of tests names its promise by a marker.

    pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]

``python -m tests.project.promises`` prints the tables of the guide's page of trust; ``pytest -m
promise`` runs all of these files.
"""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path


ROOT = Path(__file__).parents[2]
TEXT = """\
bits
    Where arithmetic is exact, any cut, order and merge tree gives the bits of the full
    batch: for `"sum"`, for `Weighted`, and for a mean over samples whose number is a power of
    two.
bounds
    Elsewhere sums differ by no more than rounding may, by a bound that is derived and not
    chosen.
monoid
    Accumulation is a commutative monoid: `init`, `update`, `merge`, `finalize`.
weights
    Zero weight is exact, even where the masked microbatch is NaN; weights are counted in
    float64.
terms
    A sum of `Weighted` is a sum of means over the whole batch, each over its own weight; where
    these were counted wrong, it is NaN.
skip
    A microbatch that is skipped takes its weight along, and everything is counted.
closure
    Derivatives of a microbatched function are microbatched functions, under every nest of
    transforms, in the memory of one microbatch; what it captures has its derivatives too.
coupled
    Contrastive losses and BatchNorm have the gradient of the full batch, and its running
    statistics.
torch.func
    Without a size `pa.grad` is `torch.func.grad`: its bits (but for the few operations,
    such as silu and GroupNorm, that torch differentiates by another formula there), its
    structures, its conventions.
engines
    All engines and a hand-written `.backward()` give the same bits.
keys
    Random numbers are a function of a key and a position: no cut moves them.
purity
    No argument, module, mode or generator is changed, even when a call raises.
writes
    A loss that writes to what it is given or captures is refused, if it can be before it
    happens.
threads
    Threads do not see each other.
frozen
    What requires no gradient is never trained, decayed or moved.
donation
    A state that is given up refuses every use, and nothing else changes.
applied
    A step is applied as the full-batch update, or leaves every bit as it was and says so.
loss scale
    The loss scale is `GradScaler`'s, complete before its first use.
optimizers
    Optimizers are torch's, bit for bit.
one buffer
    There is one gradient tree, the sums; memory is predicted as it is counted.
launches
    Nothing waits for the device; functions called and kernels launched are counted, with
    ceilings.
samples
    Gradients of single samples are reduced as they come: the bits of a loop over the samples.
curvature
    Products with curvature are exact, however the batch is cut.
ranks
    Ranks are one more way to cut a batch, with any samples on each; ranks that disagree all
    say so.
disk
    What is saved is loaded to the bit or refused, whoever is killed meanwhile and whatever
    became of the file.
compiled
    A compiled step has the numbers of the eager one, and refuses what it cannot compile.
together
    Every two features go together, or a [table](together.md) says why not.
errors
    Bad input is refused before any work, by the name of the leaf, with nothing lost.
check
    The checker finds what may not be cut, names the cause, and raises no false alarm.
pages
    Every block of every page runs and prints what it says, and every public name has an
    example.
mutants
    Tests can fail: each deliberate fault of a table makes a named test fail.
private
    Private names of torch are in one folder, each with the versions it was checked in.
"""
PROMISES = {
    name: " ".join(lines.split())
    for name, lines in re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", TEXT, re.M)
}


@cache
def held():
    """The files of tests, by promise."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in marked(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(path)
    return found


def marked(source):
    """The promises that a file's markers name, of all its tests or of one."""
    for node in ast.walk(ast.parse(source)) if "promise(" in source else ():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "promise":
            yield ast.literal_eval(node.args[0])


def promises():
    """The list of the page: each promise, and what each of its files says that it holds."""
    files, lines = held(), []
    for name, sentence in PROMISES.items():
        lines.append(f"- **{sentence}**")
        for path in files[name]:
            where = path.relative_to(ROOT).as_posix()
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            says = docstring.split("\n")[0].rstrip(".").replace("``", "`")
            lines.append(f"  - [{where.removeprefix('tests/')}](../../{where}): {says}")
    return "\n".join(lines) + "\n"


def versions():
    """The table of the page: what runs on which versions, as the workflow says."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    matrix = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)", optree: "([\d.]+)"', workflow)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    dev = project["project"]["optional-dependencies"]["dev"]
    torch, optree = (next(x for x in dev if x.startswith(f"{it}==")) for it in ("torch", "optree"))
    lines = ["| Python | torch | optree | what runs |", "|---|---|---|---|"]
    for version in matrix:
        lines.append(
            f"| {' | '.join(version)} | all tests, for each change; `thorough` every night |"
        )
    pinned = torch.removeprefix("torch=="), optree.removeprefix("optree==")
    lines.append(
        f"| 3.11 | {' | '.join(pinned)} | `.ci/run`: all tests, lint, types; the wheel by itself; "
        "the device in software |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(promises())
    print(versions())
