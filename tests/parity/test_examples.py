"""The examples run, and learn what they say."""

import runpy
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_variable_length() -> None:
    main = runpy.run_path(str(EXAMPLES / "variable_length.py"))["main"]
    first, last = main(steps=1), main(steps=20)
    assert last < first


@pytest.mark.parametrize("name", ["contrastive", "triplet", "mixture_of_experts"])
def test_coupled_losses(name: str) -> None:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    first, last = main(steps=8, rows=96)
    assert last < first


def test_meta_gradients() -> None:
    main = runpy.run_path(str(EXAMPLES / "meta_gradients.py"))["main"]
    first, last = main(steps=3, rows=60)
    assert last < first
