"""Small real data: the license of this package as characters, and scikit-learn's digits."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor


LICENSE = Path(__file__).parents[2] / "LICENSE"


@cache
def characters() -> tuple[Tensor, int]:
    """A text as numbers, and how many different ones there are."""
    text = LICENSE.read_text(encoding="utf-8")
    known = sorted(set(text))
    return torch.tensor([known.index(c) for c in text]), len(known)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images of 8 x 8 numbers from 0 to 1, and labels."""
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def near(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference of two dicts of parameters, relative to the norm of each."""
    return max(float((got[k] - want[k]).norm() / want[k].norm().clamp(min=1e-12)) for k in want)
