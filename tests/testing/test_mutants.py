"""The tests of the tests: each deliberate fault makes the test named beside it fail.

The faults are those of ``mutants.toml``; each copy of the package with one in it is tested in a
process of its own. A fault whose text is no longer there fails too, so the table follows the code.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.planted import FAULTS, PACKAGE, plant, run_tests


pytestmark = [pytest.mark.laws, pytest.mark.promise("mutants")]
ROOT = Path(__file__).parents[2]


def when(place):
    """Eight under ci, all every night: what this tests is the other tests."""
    return pytest.mark.slow if place % 17 == 3 else pytest.mark.nightly


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=when(place)) for place, name in enumerate(FAULTS)]
)
def test_the_fault_is_found(name, tmp_path):
    plant(name, tmp_path)
    unused = shutil.ignore_patterns("benchmarks")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=unused)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code, output = run_tests(tmp_path, FAULTS[name]["test"], FAULTS[name]["profile"])
    assert code == 1, output[-2000:]
    assert " failed" in output.splitlines()[-1], output[-2000:]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_and_says_which(name):
    fault = FAULTS[name]
    source = (PACKAGE / fault["file"]).read_text(encoding="utf-8")
    assert source.count(fault["old"]) == 1
    assert fault["new"] not in (fault["old"], source)
    assert fault["says"].endswith(".")
    assert fault["profile"] in ("dev", "ci", "thorough")
    compile(source.replace(fault["old"], fault["new"]), fault["file"], "exec")


def test_planting_copies_the_package_and_changes_one_file(tmp_path):
    copy = plant("the short tail dropped", tmp_path / "new")
    assert copy == tmp_path / "new" / "pureaccum"
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert files == {path.relative_to(copy) for path in copy.rglob("*.py")}
    assert (copy / "py.typed").exists()
    changed = [str(f) for f in files if (copy / f).read_bytes() != (PACKAGE / f).read_bytes()]
    assert changed == [FAULTS["the short tail dropped"]["file"]]


@pytest.mark.slow
def test_python_finds_the_copy_first(tmp_path):
    copy = plant("a scale that is not undone", tmp_path)
    script = "import pureaccum, pureaccum.testing; print(pureaccum.testing.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).parents[1] == copy
