"""What the tests themselves draw with; strategies are in pureaccum.testing.strategies."""

import itertools
from collections.abc import Sequence
from typing import Any

import optree
import torch
from hypothesis import settings
from hypothesis import strategies as st


few = st.integers(1, 12)
powers_of_two = st.sampled_from([1, 2, 4, 8, 16])


def every(share: int) -> settings:
    """The profile's examples divided by ``share``, for properties that are dear to check."""
    return settings(max_examples=max(1, settings.default.max_examples // share))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slices(sizes: Sequence[int]) -> list[slice]:
    """Which rows each microbatch has."""
    return list(
        itertools.starmap(slice, itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    )


def take(batch: Any, rows: slice) -> Any:
    return optree.tree_map(lambda x: x[rows], batch)
