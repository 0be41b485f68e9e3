"""The page of trust: its promises, versions and planted faults are those of the project."""

import re

import pytest

from tests.chosen import UNMARKED
from tests.project.promises import (
    GIVEN_UP,
    PAGE,
    PROMISES,
    ROOT,
    filled,
    held,
    marked,
    planted,
    promises,
    versions,
)


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]


def test_every_promise_is_held_and_every_marker_is_a_promise():
    assert set(held()) == set(PROMISES)


def test_the_page_has_the_tables():
    page = PAGE.read_text(encoding="utf-8")
    for table in (promises(), versions(), planted()):
        assert table in page, "python -m tests.project.promises writes the tables of the page"
    assert filled(page) == page


def test_old_tables_are_rewritten():
    page = PAGE.read_text(encoding="utf-8")
    old = page.replace("| 3.14 |", "| 3.15 |").replace("Threads do not", "Threads")
    old = old.replace("| one of them |\n", "| one of them |\n| x | 1 | |\n")
    assert filled(old) == page


def test_markers_of_files_and_of_single_tests_are_found():
    source = 'pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]\n'
    source += '@pytest.mark.promise("keys")\ndef test_it(): ...\n'
    assert marked(source) == {"bits", "keys"}


def test_every_test_says_what_it_protects(request):
    assert not request.config.stash[UNMARKED], "mark them promise, given_up or mechanism"


def test_what_is_given_up_is_named_once():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    assert set().union(*(marked(source, "given_up") for source in sources)) == set(GIVEN_UP)


def test_the_versions_are_those_that_the_package_says():
    """All Pythons of the classifiers, and the oldest torch and optree that it accepts."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    run = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \|", versions(), re.MULTILINE)
    assert sorted({python for python, _, _ in run}) == sorted(pythons)
    [oldest] = re.findall(r'"torch>=([\d.]+)", "optree>=([\d.]+)"', project)
    assert (f"{oldest[0]}.0", f"{oldest[1]}.0") in {(torch, optree) for _, torch, optree in run}


def test_every_page_says_what_it_is_for_and_what_to_read_before():
    """In one paragraph below its title; it names a page to read before, or says that none is."""
    for path in sorted(PAGE.parent.glob("*.md")):
        title, about, *_ = path.read_text(encoding="utf-8").split("\n\n")
        assert title.startswith("# "), path.name
        assert re.match(r"\*[A-Z]", about), path.name
        before = r"Read\s[^.]*\[\w+\]\(\w+\.md\)\s(before|first)|No\sprior\sreading"
        assert re.search(before, about), path.name
        assert about.endswith("*"), path.name
