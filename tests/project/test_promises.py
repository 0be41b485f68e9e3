"""The page of trust: every promise names the tests that hold it, and every version what runs."""

import re
from pathlib import Path

import pytest

from tests.project.promises import PROMISES, ROOT, held, marked, promises, versions


pytestmark = pytest.mark.laws
PAGE = ROOT / "examples" / "guide" / "trust.md"


def test_every_promise_is_held_and_every_marker_is_a_promise():
    assert set(held()) == set(PROMISES)


def test_the_page_has_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    for table in (promises(), versions()):
        assert table in page, "python -m tests.project.promises prints the tables of the page"


def test_markers_are_found_of_files_and_of_single_tests():
    source = 'pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]\n'
    source += '@pytest.mark.promise("keys")\ndef test_it(): ...\n'
    assert sorted(marked(source)) == ["bits", "keys"]


def test_the_versions_are_those_that_the_package_says():
    """Every Python of the classifiers, and as the oldest torch and optree those it asks for."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    run = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \|", versions(), re.MULTILINE)
    assert sorted({python for python, _, _ in run}) == sorted(pythons)
    [oldest] = re.findall(r'"torch>=([\d.]+)", "optree>=([\d.]+)"', project)
    assert (f"{oldest[0]}.0", f"{oldest[1]}.0") in {(torch, optree) for _, torch, optree in run}


def test_every_page_says_what_it_is_for_and_what_to_read_before():
    """Below its title, in one paragraph; what is to be read before is a page, or nothing."""
    for path in sorted(Path(PAGE.parent).glob("*.md")):
        title, about, *_ = path.read_text(encoding="utf-8").split("\n\n")
        assert title.startswith("# "), path.name
        assert about.startswith("*For "), path.name
        assert re.search(r"Read\s(\[\w+\]\(\w+\.md\)|nothing)\sbefore", about), path.name
        assert about.endswith("*"), path.name
