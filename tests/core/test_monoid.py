"""The accumulator is a commutative monoid, to the bit where the data are exact."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import faults, merge_along, merge_trees, pieces, seeds
from tests.exactly import folded, losses, make_batch, make_params, sizes


pytestmark = [pytest.mark.laws, pytest.mark.promise("monoid")]


class World:
    """An accumulator, its params, and microbatches, of which one may be spoilt."""

    def __init__(self, seed, loss, sizes, fault, donate):
        self.acc = pa.accumulator(loss.call, reduction=loss.reduction, nonfinite="skip")
        self.params = make_params(seed)
        self.parts = pieces(make_batch(seed, sum(sizes)), sizes)
        self.donate = donate
        if fault:
            self.parts = fault.spoil(self.parts)

    def state(self, parts=None):
        return folded(
            self.acc,
            self.acc.init(self.params),
            self.params,
            self.parts if parts is None else parts,
        )

    def singles(self):
        return [self.state([part]) for part in self.parts]


@st.composite
def worlds(draw):
    cut = draw(sizes)
    fault = draw(st.none() | faults(len(cut)))
    return World(draw(seeds()), draw(losses), cut, fault, draw(st.booleans()))


@given(worlds())
def test_init_is_the_identity(world):
    state, nothing = world.state(), world.acc.init(world.params)
    assert_trees_bitwise_equal(world.acc.merge(nothing, state), state)
    assert_trees_bitwise_equal(world.acc.merge(state, nothing), state)


@given(worlds())
def test_update_is_merge_with_the_state_of_one_microbatch(world):
    *earlier, last = world.parts
    before = world.state(earlier)
    merged = world.acc.merge(before, world.state([last]))
    updated = world.acc.update(before, world.params, last, donate=world.donate)
    assert_trees_bitwise_equal(updated, merged)


@given(worlds(), st.data())
def test_merge_is_associative_and_commutative(world, data):
    """Any order, and any tree of merges."""
    states = world.singles()
    merges = data.draw(merge_trees(len(states)))
    assert_trees_bitwise_equal(merge_along(merges, states, world.acc.merge), world.state())


@given(worlds())
def test_a_state_survives_both_tree_libraries(world):
    """All six fields, tensors only, and one can go on from what came back."""
    state = world.state()
    for flatten, unflatten in (
        (optree.tree_flatten, lambda leaves, spec: optree.tree_unflatten(spec, leaves)),
        (torch_pytree.tree_flatten, torch_pytree.tree_unflatten),
    ):
        leaves, spec = flatten(state)
        assert len(leaves) == len(world.params) + len(pa.AccumState._fields[1:-1])
        assert all(type(leaf) is torch.Tensor for leaf in leaves)
        back = unflatten([leaf.clone() for leaf in leaves], spec)
        assert type(back) is pa.AccumState
        assert_trees_bitwise_equal(back, state)
        again = folded(world.acc, back, world.params, world.parts)
        assert_trees_bitwise_equal(again, folded(world.acc, state, world.params, world.parts))
