"""How many examples the properties of these tests draw, and small things to draw and to cut."""

import itertools

import optree
import torch
from hypothesis import settings
from hypothesis import strategies as st


few = st.integers(1, 12)
powers_of_two = st.sampled_from([1, 2, 4, 8, 16])


def examples(share, fewest=25):
    """A share of the profile's examples, for properties that are dear to check.

    No fewer than ``fewest`` where the profile itself draws so many: under ``ci`` and ``thorough``.
    """
    most = settings.default.max_examples
    return settings(max_examples=max(round(share * most), fewest if most >= 25 else 1))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def slices(sizes):
    """Which samples each microbatch has."""
    return list(
        itertools.starmap(slice, itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    )


def take(batch, rows):
    return optree.tree_map(lambda x: x[rows], batch)
