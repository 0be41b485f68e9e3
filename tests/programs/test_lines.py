"""The guide says how long the programs are."""

from pathlib import Path

import pytest

from tests.programs.lines import NAMES, pages, table


pytestmark = [pytest.mark.parity, pytest.mark.hf, pytest.mark.promise("pages")]


def test_the_guide_has_the_lines_of_each_program() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    page = Path(__file__).parents[2] / "examples/guide/coming_from.md"
    assert pages() == {*NAMES, "lines"}
    assert table() in page.read_text(encoding="utf-8")
