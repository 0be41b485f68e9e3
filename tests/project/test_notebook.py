"""The notebook runs from top to bottom, and each cell asserts what the text around it claims.

It is run as plain Python, its cells in one namespace: that needs no Jupyter, and an error names the
cell and its line.
"""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.project.test_links import links, wrong


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]
FILE = Path(__file__).parents[2] / "examples" / "costs.ipynb"
NOTEBOOK = json.loads(FILE.read_text(encoding="utf-8"))
CELLS = [(cell, "".join(cell["source"])) for cell in NOTEBOOK["cells"]]
CODE = [(cell, source) for cell, source in CELLS if cell["cell_type"] == "code"]


def printed(cell):
    return "".join(line for output in cell["outputs"] for line in output["text"])


@pytest.mark.slow  # it trains four times
def test_the_cells_run_and_what_they_assert_holds():
    """What they print has the stored words and rows; numbers differ between machines."""
    namespace = {}
    for i, (cell, source) in enumerate(CODE, 1):
        out = io.StringIO()
        with redirect_stdout(out):
            exec(compile(source, f"{FILE.name}, code cell {i}", "exec"), namespace)
        assert words(out.getvalue()) == words(printed(cell))


def words(text):
    return [[word for word in line.split() if word[0].isalpha()] for line in text.splitlines()]


def test_every_code_cell_has_run_once_in_order_and_printed_no_error():
    assert [cell["execution_count"] for cell, _ in CODE] == list(range(1, len(CODE) + 1))
    assert {output["output_type"] for cell, _ in CODE for output in cell["outputs"]} == {"stream"}
    assert all(printed(cell) for cell, _ in CODE)


def test_every_code_cell_but_the_first_asserts_something():
    assert [i for i, (_, source) in enumerate(CODE) if "\nassert " not in source] == [0]


def test_the_links_lead_somewhere():
    text = "\n".join(source for cell, source in CELLS if cell["cell_type"] == "markdown")
    found = {link: wrong(link, FILE) for link in links(text)}
    assert len(found) > 5
    assert not {link: why for link, why in found.items() if why}


def test_no_metadata_of_a_machine_is_stored():
    """A kernel's version or a time would change whenever somebody opens it."""
    assert set(NOTEBOOK["metadata"]) == {"kernelspec", "language_info"}
    assert NOTEBOOK["metadata"]["language_info"] == {"name": "python"}
    assert all(cell["metadata"] == {} for cell, _ in CELLS)
