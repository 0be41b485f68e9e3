"""The package is built in wings: one imports only from those on lower lines.

CONTRIBUTING.md has the picture.
"""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pureaccum


pytestmark = [pytest.mark.laws, pytest.mark.promise("documented")]
LINES = (  # lowest first; wings on one line do not know each other
    {"_base"},
    {"_core", "_optim", "checkpoint"},
    {"_pure"},
    {"_samples", "curvature", "distributed"},
    {"_step"},
    {"__init__"},
    {"testing", "_demo"},
    {"__main__"},
)
LINE = {wing: line for line, wings in enumerate(LINES) for wing in wings}
PACKAGE = Path(pureaccum.__file__).parent
TESTS = Path(__file__).parents[1]
TREES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): ast.parse(file.read_text())
    for file in sorted(PACKAGE.rglob("*.py"))
}
NAMEDTUPLE = {"_replace", "_fields", "_asdict", "_make"}  # public, in spite of their underscore


def imports(name, tree):
    """The files of the package that a file imports; a folder goes by its ``__init__``."""
    inside = ["pureaccum", *name.split(".")][:-1]
    unread = {x for node in ast.walk(tree) if is_for_types(node) for x in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node in unread:
            continue
        above = inside[: len(inside) + 1 - node.level] if node.level else []
        base = [*above, *(node.module or "").split(".")]
        if base[0] != "pureaccum":
            continue
        base = list(filter(None, base[1:]))
        for each in node.names:
            places = [[*base, each.name], [*base, each.name, "__init__"], base, [*base, "__init__"]]
            yield next(found for found in map(".".join, places) if found in TREES)


def is_for_types(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def private(tree):
    """Names with one leading underscore that are looked up on something, or imported from afar."""
    for node in ast.walk(tree):
        names = []
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


@pytest.mark.slow
@pytest.mark.mechanism
def test_a_wing_imports_only_from_lower_lines():
    for name, tree in TREES.items():
        wing = name.split(".")[0]
        for found in imports(name, tree):
            other = found.split(".")[0]
            assert other == wing or LINE[other] < LINE[wing], f"{name} imports {found}"


@pytest.mark.mechanism
def test_a_name_is_imported_from_the_file_that_has_it():
    """The ``__init__`` of a private wing says in words what is where, and has no names."""
    for wing in LINE:
        tree = TREES.get(f"{wing}.__init__")
        if tree and wing.startswith("_") and LINE[wing] < LINE["__init__"]:
            assert ast.get_docstring(tree), wing
            assert len(tree.body) == 1, wing


def test_one_word_for_one_thing():
    """No two files define one name, but for those that are a file's own."""
    found = {}
    for name, tree in TREES.items():
        if name.startswith(("_demo", "__main__", "testing.strategies.")):  # public, or a script
            continue
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                assert node.name not in found, f"{name} and {found[node.name]}: {node.name}"
                found[node.name] = name


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    graph = {name: set(imports(name, tree)) for name, tree in TREES.items()}
    tuple(TopologicalSorter(graph).static_order())


def test_a_file_is_one_idea():
    for name in TREES:
        text = PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text()
        assert len(text.splitlines()) <= 400, name


def test_a_folder_says_what_lies_in_it():
    """A private one is a map in words, and re-exports nothing."""
    for file in PACKAGE.rglob("__init__.py"):
        tree, folder = TREES[".".join(file.relative_to(PACKAGE).with_suffix("").parts)], file.parent
        names = {x.stem for x in folder.iterdir() if x.suffix == ".py"} - {"__init__", "__main__"}
        if folder != PACKAGE:
            assert not names - {*re.findall(r"\w+", ast.get_docstring(tree))}, folder
        if folder.name.startswith("_") and folder.name != "_demo":
            assert len(tree.body) == 1, folder


@pytest.mark.promise("private")
def test_private_names_of_torch_live_in_one_folder():
    found = {name: set(private(tree)) for name, tree in TREES.items()}
    files = {name for name, names in found.items() if names}
    assert {name.rpartition(".")[0] for name in files} == {"_base.torch_internals"}, files


def test_every_test_file_lies_with_its_part_and_is_marked_by_its_kind():
    """So that ``tests/samples`` is all about samples, and ``pytest -m exact`` all about bits."""
    parts = {wing.strip("_") for wings in LINES[:5] for wing in wings} | {"testing", "project"}
    kinds = {"exact", "bounds", "laws", "parity", "purity", "transforms", "faults"}
    for file in TESTS.rglob("test_*.py"):
        assert file.parent.name in parts | {"programs", "device"}, file
        marks = file.read_text().partition("\npytestmark = ")[2].partition("\n\n")[0]
        assert len(kinds.intersection(re.findall(r"pytest\.mark\.(\w+)", marks))) == 1, file


def test_the_house_is_small():
    assert len([x for x in PACKAGE.iterdir() if x.name != "__pycache__"]) <= 14
    assert len(TREES) <= 165


@pytest.mark.mechanism
def test_the_parser_sees_what_it_looks_for():
    tree = ast.parse(
        "from .trees import x\nfrom . import loss\nfrom .._base import trees\nimport torch._C\n"
        "from torch._C import y\nmodule._parameters\ngetattr(module, '_buffers')\nstate._replace\n"
        "from pureaccum.testing import check_accumulation\n"
    )
    assert set(private(tree)) == {"_C", "_parameters", "_buffers"}
    tree = ast.parse("from .losses import x\nfrom . import batches\nfrom .._base.trees import y\n")
    assert set(imports("_core.weights", tree)) == {"_core.losses", "_core.batches", "_base.trees"}
    tree = ast.parse("from pureaccum.testing import check_accumulation\nfrom torch import y\n")
    assert set(imports("_demo.__init__", tree)) == {"testing.__init__"}
