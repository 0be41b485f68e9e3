"""The examples run, and learn what they say."""

import runpy
from pathlib import Path


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_variable_length() -> None:
    main = runpy.run_path(str(EXAMPLES / "variable_length.py"))["main"]
    first, last = main(steps=1), main(steps=20)
    assert last < first


def test_contrastive() -> None:
    main = runpy.run_path(str(EXAMPLES / "contrastive.py"))["main"]
    first, last = main(steps=8, rows=96)
    assert last < first
