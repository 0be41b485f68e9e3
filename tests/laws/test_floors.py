"""The package is built in floors: a file imports only from floors below its own."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pureaccum


FLOORS = (
    {
        "_bytes",
        "_moments",
        "_python_numbers",
        "_refused",
        "_replay",
        "_safetensors",
        "_settings",
        "_sharded",
        "_torch",
        "_whole_file",
    },
    {
        "_casts",
        "_donation",
        "_host",
        "_live",
        "_pieces",
        "_places",
        "_rows_of_ranks",
        "_tree",
    },
    {
        "_agreement",
        "_batch_norm",
        "_ensemble",
        "_explain",
        "_gathered",
        "_held",
        "_inputs",
        "_kernels",
        "_loss",
        "_precision",
        "_schedules",
        "_sums",
        "_words",
    },
    {
        "_again",
        "_batches",
        "_buckets",
        "_buffers",
        "_loss_scale",
        "_passes",
        "_random",
        "_sharded_checkpoint",
        "_shell",
        "_traced",
        "_update",
        "_weights",
        "_writes",
    },
    {
        "_auto",
        "_aux",
        "_chain",
        "_from_torch",
        "_in_place",
        "_optimizers",
        "_rule",
        "checkpoint",
    },
    {
        "_cut_graph",
        "_early",
        "_outputs",
        "_partition",
        "_samples",
    },
    {"_microbatch", "_reducers"},
    {"_engine", "_remat", "_whole_batch"},
    {"_accumulator", "_module", "_together"},
    {
        "_noise_scale",
        "_per_sample",
        "_train_state",
        "_window",
        "distributed",
    },
    {
        "_call",
        "_clipped",
        "_finish",
        "_loadable",
        "_memory_report",
        "_ranks",
        "_scan",
        "_transforms",
    },
    {"_numbers", "_run"},
    {"_forms", "_programs"},
    {"_compile"},
    {"_step"},
    {
        "testing._caller",
        "testing._compare",
        "testing._cuts",
        "testing._exact_data",
        "testing._faults",
        "testing._histories",
        "testing._in_dtype",
        "testing._mutants",
        "testing._reach",
        "testing._report",
    },
    {
        "testing._assertions",
        "testing._exact_losses",
        "testing._kept",
        "testing._mutants_of_disk",
        "testing._mutants_of_microbatches",
        "testing._mutants_of_ranks",
        "testing._mutants_of_samples",
        "testing._pure",
    },
    {"testing._sight", "testing._subject", "testing.mutants", "testing.strategies"},
    {"testing._given", "testing._trials", "testing._watch", "testing._weights"},
    {"testing._loop", "testing._natively", "testing._of_data", "testing._sets"},
    {"testing._of_rows"},
    {"testing._diagnose"},
    {"testing._check"},
    {"testing", "testing._command"},
    {"__init__"},
    {"_demo._race"},
    {"_demo._distances"},
    {"_demo._outcomes"},
    {"_demo._picture", "_demo._screen"},
    {"_demo"},
    {"__main__"},
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
PACKAGE = Path(pureaccum.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
NAMEDTUPLE = {"_replace", "_fields", "_asdict", "_make"}  # public, in spite of their underscore


def name_of(file: Path) -> str:
    """``_tree``, ``testing._report``; a folder's ``__init__`` goes by the folder's name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


every_file = pytest.mark.parametrize("file", FILES, ids=name_of)


def imports(tree: ast.AST, folder: tuple[str, ...] = ()) -> Iterator[str]:
    """The files of the package that a file in one of its folders imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] != "pureaccum":
                continue
            inside = folder[: len(folder) + 1 - node.level] if node.level else ()
            module = (node.module or "").removeprefix("pureaccum" * (not node.level)).lstrip(".")
            base = ".".join(filter(None, [*inside, module]))
            names = [".".join(filter(None, [base, a.name])) for a in node.names]
            found = [name for name in names if name in FLOOR]
            yield from found or ([base] if base else [])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "pureaccum":
                    yield alias.name.removeprefix("pureaccum").lstrip(".") or "__init__"


def private(tree: ast.AST) -> Iterator[str]:
    """Names with one leading underscore that are looked up on something, or imported from afar."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [*(node.module or "").split("."), *(a.name for a in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for a in node.names for part in a.name.split(".")]
        for name in map(str, names if names[:1] != ["pureaccum"] else []):
            if name.startswith("_") and not name.startswith("__") and name not in NAMEDTUPLE:
                yield name


def test_every_file_has_a_floor() -> None:
    assert set(map(name_of, FILES)) == set(FLOOR)


@every_file
def test_imports_point_to_lower_floors(file: Path) -> None:
    folder = file.relative_to(PACKAGE).parent.parts
    found = set(imports(ast.parse(file.read_text()), folder))
    assert not {name for name in found if FLOOR[name] >= FLOOR[name_of(file)]}


@every_file
def test_a_file_is_one_idea(file: Path) -> None:
    """One that is longer says why."""
    text = file.read_text()
    assert len(text.splitlines()) <= 400 or "one file, however long" in text.splitlines()[0]


@every_file
def test_private_names_of_torch_live_in_one_file(file: Path) -> None:
    found = set(private(ast.parse(file.read_text())))
    assert bool(found) == (file.stem == "_torch"), found


def test_the_parser_sees_what_it_looks_for() -> None:
    tree = ast.parse(
        "from ._engine import x\nfrom . import _loss\nimport pureaccum._sums\nimport torch._C\n"
        "from torch._C import y\nmodule._parameters\ngetattr(module, '_buffers')\nstate._replace\n"
    )
    assert set(imports(tree)) == {"_engine", "_loss", "_sums"}
    assert set(private(tree)) == {"_C", "_parameters", "_buffers"}
    tree = ast.parse("from .._tree import map\nfrom . import _reach\nfrom ._report import Leaf\n")
    assert set(imports(tree, ("testing",))) == {"_tree", "testing._reach", "testing._report"}
