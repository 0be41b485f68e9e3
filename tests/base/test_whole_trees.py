"""What is asked of a whole tree: how long it is, and whether it is finite.

Trees without a leaf, leaves without a number, None, narrow, wide, complex and sparse leaves.
"""

from fractions import Fraction

import optree
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import dtypes, seeds, shapes, trees
from tests.draws import generator
from tests.rounding import UNIT, gamma


pytestmark = [pytest.mark.bounds, pytest.mark.promise("bounds")]


@st.composite
def tensors(draw):
    """Integers, whose squares no dtype rounds where they are summed."""
    shape, dtype = draw(shapes(side=6)), draw(dtypes(complex=True))
    random = generator(draw(seeds()))

    def integers():
        return torch.randint(-15, 16, shape, generator=random)

    x = torch.complex(*(integers().double() for _ in range(2))) if dtype.is_complex else integers()
    x = x.to(dtype)
    return x.to_sparse() if draw(st.booleans()) and shape else x


leafless = st.sampled_from([None, {}, (), [], {"a": None, "b": [()]}])
any_tree = leafless | trees(tensors() | leafless)


def numbers(tree):
    """All of them as reals, leaf by leaf."""
    leaves = [x.to_dense() for x in optree.tree_leaves(tree)]
    return [(torch.view_as_real(x) if x.is_complex() else x).flatten() for x in leaves]


@given(any_tree)
@example({})
@example([torch.zeros(0)])
@example([torch.arange(9).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.complex64)])
def test_the_norm_is_rounded_no_more_than_its_sums(tree):
    leaves = numbers(tree)
    norm = pa.global_norm(tree)
    assert norm.dim() == 0
    assert norm.dtype == (
        torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32
    )
    exact = sum((Fraction(n) ** 2 for x in leaves for n in x.tolist()), Fraction(0))
    # A leaf is summed exactly, and its norm rounded once; those are squared, added and rounded.
    off = 1 + gamma(len(leaves) + 4, UNIT[torch.float32])
    assert exact / off**2 <= Fraction(norm.item()) ** 2 <= exact * off**2


@given(any_tree, st.data())
@example({}, None)
def test_one_number_that_is_not_finite_anywhere_makes_the_tree_not_finite(tree, data):
    """And no other does: the largest that there are, and integers, are finite."""
    leaves, spec = optree.tree_flatten(tree)
    flag = pa.all_finite(tree)
    assert (flag.dim(), flag.dtype) == (0, torch.bool)
    assert flag
    assert pa.all_finite([leaves, torch.tensor([2**62, -1]), torch.tensor(True)])
    full = [i for i, x in enumerate(leaves) if x.to_dense().numel()]
    if data is None:
        return
    assume(full)
    at = data.draw(st.sampled_from(full))
    bad = data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    spoiled = leaves[at].to_dense().clone()
    place = data.draw(st.integers(0, spoiled.numel() - 1))
    largest = torch.finfo(spoiled.dtype).max
    for value, finite in ((largest, True), (-largest, True), (bad, False)):
        if spoiled.is_complex() and data.draw(st.booleans()):
            value = complex(0, value)
        spoiled.view(-1)[place] = value
        leaf = spoiled.to_sparse() if leaves[at].is_sparse else spoiled
        now = optree.tree_unflatten(spec, [*leaves[:at], leaf, *leaves[at + 1 :]])
        assert bool(pa.all_finite(now)) is finite
