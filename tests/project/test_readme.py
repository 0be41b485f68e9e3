"""The Python of the README and of the guide runs as written, and prints what the page says.

The blocks of a page are one program, top to bottom. A ```text block directly below a ```python
block is what that block printed; ``...`` in it stands for anything. ```python optax is a listing of
another package, which runs where that is installed.
"""

import doctest
import io
import re
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch


pytestmark = [pytest.mark.parity, pytest.mark.promise("pages")]
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "examples" / "guide").glob("*.md"))]
SLOW = ("training", "coupled", "checking", "batch_size")
FENCE = re.compile(r"^```(\w*)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"\s*^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    above: int  # lines
    code: str
    needs: str | None
    said: str | None


def blocks(page):
    """The Python of a page."""
    for fence in FENCE.finditer(page):
        if fence[1] == "python":
            below = PRINTED.match(page, fence.end())
            above = page.count("\n", 0, fence.start(3))
            yield Block(above, fence[3], fence[2], below and below[1])


def as_param(page):
    return pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in SLOW else ())


def run(page, name):
    """Run a page: wherever a block did not print what is said, what it printed instead."""
    namespace = {}
    differ = []
    checker = doctest.OutputChecker()
    for above, code, needs, said in blocks(page):
        if needs and not find_spec(needs):
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * above + code, name, "exec"), namespace)  # errors name their line
        got, flags = printed.getvalue(), doctest.ELLIPSIS
        if said is not None and not checker.check_output(said, got, flags):
            differ.append(checker.output_difference(doctest.Example("", said), got, flags))
    return differ


@pytest.mark.table
@pytest.mark.parametrize("page", [*map(as_param, PAGES)])
def test_pages_run_as_written(page):
    differ = run(page.read_text(encoding="utf-8"), str(page))
    assert not differ, "\n".join(differ)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_all_code_is_run(page):
    text = page.read_text(encoding="utf-8")
    assert {fence[1] for fence in FENCE.finditer(text)} <= {"python", "text", "sh", ""}
    needed = {block.needs for block in blocks(text) if block.needs}
    missing = [package for package in sorted(needed) if not find_spec(package)]
    if missing:
        pytest.skip(f"its listings of {' and '.join(missing)} did not run: not installed")


def test_the_readme_has_python():
    assert len(list(blocks(README.read_text(encoding="utf-8")))) >= 4


def test_a_page_that_is_wrong_is_found():
    page = "```python\nx = 2\n```\nand\n```py\nx = 3\n```\n```python\nprint(x, 0.12)\n```\n"
    assert not run(page, "right")
    assert not run(page + "\n```text\n2 0.1...\n```\n", "right")
    assert not run(page + "```python no_such_package\n1 / 0\n```\n", "left out")
    assert not run(page + "\nfrom elsewhere:\n\n```text\n3\n```\n", "right")
    [difference] = run(page + "\n```text\n3 0.1...\n```\n", "wrong")
    assert difference == "Expected:\n    3 0.1...\nGot:\n    2 0.12\n"
    with pytest.raises(ZeroDivisionError):
        run(page + "```python\n1 / 0\n```\n", "raises")
