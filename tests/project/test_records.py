"""A record of five fields or more is built by keyword, and no record is sliced by position.

Otherwise a new field would shift all others in silence.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

import pureaccum


pytestmark = [pytest.mark.laws, pytest.mark.promise("documented")]

PACKAGE = Path(pureaccum.__file__).parent


@cache
def trees():
    files = PACKAGE.rglob("*.py")
    return {str(file.relative_to(PACKAGE)): ast.parse(file.read_text()) for file in files}


def fields(node):
    """How many fields a class has, if it is a NamedTuple."""
    if not isinstance(node, ast.ClassDef) or "NamedTuple" not in map(ast.unparse, node.bases):
        return 0
    return sum(isinstance(x, ast.AnnAssign) for x in node.body)


@cache
def records():
    """The number of fields of each record that has five or more."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    return {node.name: fields(node) for node in nodes if fields(node) >= 5}


def by_position(tree):
    """Records that are built with positional arguments, but for ``Record(*fields of one kind)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            if isinstance(node.args[0], ast.Starred) and len(node.args) + len(node.keywords) == 1:
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name in records():
                yield f"line {node.lineno}: {name}"


def sliced(tree):
    """Arguments that are records, and have a part taken out by its position."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = [*function.args.args, *function.args.kwonlyargs]
        its = {x.arg for x in arguments if x.annotation and ast.unparse(x.annotation) in records()}
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) in its:
                yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.slow
def test_records_are_built_by_keyword():
    assert not {name: found for name, tree in trees().items() if (found := [*by_position(tree)])}


@pytest.mark.slow
def test_records_are_not_sliced():
    assert not {name: found for name, tree in trees().items() if (found := [*sliced(tree)])}


@pytest.mark.slow
def test_the_parser_sees_what_it_looks_for():
    assert records()["AccumState"] == 8
    assert "Weighted" not in records()
    tree = ast.parse("def f(a: AccumState, b: Any):\n  AccumState(1, grads=2)\n  a[1:]\n  b[1:]\n")
    assert [*by_position(tree)] == ["line 2: AccumState"]
    assert [*sliced(tree)] == ["line 3: a[1:]"]
