"""The accumulator is a commutative monoid, to the bit where the data are exact."""

from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

import pureaccum as pa
from tests.laws.exactly import (
    LOSSES,
    Loss,
    copied,
    folded,
    losses,
    make_batch,
    make_params,
    pieces,
    same,
    sizes,
)
from tests.strategies import seeds


class World:
    """An accumulator, its params, and microbatches some of which have a NaN in them."""

    def __init__(self, seed: int, loss: Loss, sizes: list[int], poisoned: int, donate: bool):
        self.acc = pa.accumulator(loss.call, reduction=loss.reduction, nonfinite="skip")
        self.params = make_params(seed)
        self.parts = list(pieces(make_batch(seed, sum(sizes)), sizes))
        self.donate = donate
        if poisoned < len(self.parts) and sizes[poisoned]:
            self.parts[poisoned]["y"] = torch.full_like(self.parts[poisoned]["y"], torch.nan)

    def state(self, parts: Any = None) -> pa.AccumState:
        return folded(
            self.acc,
            self.acc.init(self.params),
            self.params,
            self.parts if parts is None else parts,
        )

    def singles(self) -> list[pa.AccumState]:
        return [self.state([part]) for part in self.parts]


worlds = st.builds(World, seeds, losses, sizes, st.integers(0, 8), st.booleans())


@given(worlds)
def test_init_is_the_identity(world: World) -> None:
    state, nothing = world.state(), world.acc.init(world.params)
    assert same(world.acc.merge(nothing, state), state)
    assert same(world.acc.merge(state, nothing), state)


@given(worlds)
def test_update_is_merge_with_the_state_of_one_microbatch(world: World) -> None:
    *earlier, last = world.parts
    before = world.state(earlier)
    merged = world.acc.merge(before, world.state([last]))
    updated = world.acc.update(before, world.params, last, donate=world.donate)
    assert same(updated, merged)


@given(worlds, st.data())
def test_merge_is_associative_and_commutative(world: World, data: st.DataObject) -> None:
    """Any order, and any tree of merges."""
    states = data.draw(st.permutations(world.singles()))
    while len(states) > 1:
        a = states.pop(data.draw(st.integers(0, len(states) - 1)))
        b = states.pop(data.draw(st.integers(0, len(states) - 1)))
        states.append(world.acc.merge(a, b))
    assert same(states[0], world.state())


@given(worlds)
def test_finalize_leaves_the_state_as_it_was(world: World) -> None:
    state = world.state()
    before = copied(state)
    first, second = world.acc.finalize(state), world.acc.finalize(state)
    assert same(state, before)
    assert same(first, second)


@given(worlds)
def test_a_state_survives_both_tree_libraries(world: World) -> None:
    """All six fields, tensors only, and one can go on from what came back."""
    state = world.state()
    for flatten, unflatten in (
        (optree.tree_flatten, lambda leaves, spec: optree.tree_unflatten(spec, leaves)),
        (torch_pytree.tree_flatten, torch_pytree.tree_unflatten),
    ):
        leaves, spec = flatten(state)
        assert len(leaves) == len(world.params) + len(pa.AccumState._fields) - 1
        assert all(type(leaf) is torch.Tensor for leaf in leaves)
        back = unflatten([leaf.clone() for leaf in leaves], spec)
        assert type(back) is pa.AccumState
        assert same(back, state)
        again = folded(world.acc, back, world.params, world.parts)
        assert same(again, folded(world.acc, state, world.params, world.parts))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@given(seeds, sizes)
def test_counts(loss: Loss, seed: int, sizes: list[int]) -> None:
    """What a state says of itself, by hand."""
    batch = make_batch(seed, sum(sizes))
    parts = list(pieces(batch, sizes))
    poisoned = sizes.index(max(sizes))
    parts[poisoned]["y"] = torch.full_like(parts[poisoned]["y"], torch.nan)
    acc = pa.accumulator(loss.call, reduction=loss.reduction, nonfinite="skip")
    params = make_params(seed)
    state = folded(acc, acc.init(params), params, parts)
    # A microbatch of no weight is no fault: whether its numbers are finite does not matter.
    skipped = int(loss.weight(parts[poisoned]) != 0)
    weight = sum(loss.weight(part) for i, part in enumerate(parts) if i != poisoned)
    assert state.microbatches.item() == len(sizes)
    assert state.skipped.item() == state.nonfinite.item() == skipped
    assert state.weight.item() == (0 if loss.name == "sum" else weight)
