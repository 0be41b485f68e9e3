"""The accumulator is a commutative monoid, to the bit where the data are exact.

Beside a list of Fractions it goes through any sequence of calls: integers keep every sum exact, so
what a state holds is compared in bits; a division is rounded once. A state that was not donated
never changes.
"""

from fractions import Fraction
from typing import NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from torch.utils import _pytree as torch_pytree

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import faults, merge_along, merge_trees, pieces, seeds
from tests.exactly import copied, folded, losses, make_batch, make_params, sizes


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


# Any sequence of calls ---------------------------------------------------------------------------


MOST = 256  # microbatches in a state: 256 * 3 rows * 2 * 3 * 315 * 7 < 2**24


class Term(NamedTuple):
    """What one microbatch brought."""

    grad: tuple[int, ...]
    total: int
    weight: int
    skipped: bool


class Kept(NamedTuple):
    """A state, what it should be, and a copy of its bits."""

    state: pa.AccumState
    terms: list[Term]
    bits: pa.AccumState


def kept(state, terms):
    return Kept(state, terms, copied(state))


row = st.tuples(st.lists(st.integers(-7, 7), min_size=3, max_size=3), st.integers(0, 3))
microbatches = st.lists(row, max_size=3)


class Accumulation(RuleBasedStateMachine):
    states = Bundle("states")

    def __init__(self):
        super().__init__()
        self.live = []

    @initialize(
        target=states,
        w=st.tuples(*[st.integers(-15, 15)] * 3),
        engine=st.sampled_from(["func", "autograd"]),
    )
    def begin(self, w, engine):
        def loss(params, x, m):
            return pa.Weighted((m * (x @ params["w"]) ** 2).sum(), m.sum())

        self.w = w
        self.params = {"w": torch.tensor(w, dtype=torch.float32)}
        self.acc = pa.accumulator(
            loss, batch_argnums=(1, 2), nonfinite="skip", engine=engine, squares=True
        )
        return self.remember(self.acc.init(self.params), [])

    def remember(self, state, terms):
        self.live.append(kept(state, terms))
        return self.live[-1]

    def microbatch(self, rows, poison):
        x = torch.tensor([r for r, _ in rows]).reshape(-1, 3).float()
        m = torch.tensor([m for _, m in rows], dtype=torch.float32)
        weight = sum(m for _, m in rows)
        if poison != "no" and rows:
            x[0, 0] = float(poison)
            if weight:
                return (x, m), Term((0, 0, 0), 0, 0, skipped=True)
            return (x, m), Term((0, 0, 0), 0, 0, skipped=False)
        grad, total = [0, 0, 0], 0
        for r, m_ in rows:
            out = sum(a * b for a, b in zip(r, self.w, strict=True))
            total += m_ * out**2
            grad = [g + 2 * m_ * out * a for g, a in zip(grad, r, strict=True)]
        return (x, m), Term(tuple(grad), total, weight, skipped=False)

    @rule(
        target=states, kept=states, rows=microbatches, poison=st.sampled_from(["no"] * 3 + ["nan"])
    )
    def update(self, kept, rows, poison):
        args, term = self.microbatch(rows, poison)
        return self.remember(self.acc.update(kept.state, self.params, *args), [*kept.terms, term])

    @rule(
        target=states,
        kept=consumes(states),
        rows=microbatches,
        poison=st.sampled_from(["no"] * 3 + ["inf"]),
    )
    def update_donated(self, kept, rows, poison):
        args, term = self.microbatch(rows, poison)
        new = self.acc.update(kept.state, self.params, *args, donate=True)
        self.gone(kept)
        return self.remember(new, [*kept.terms, term])

    @rule(target=states, a=states, b=states)
    def merge(self, a, b):
        if len(a.terms) + len(b.terms) > MOST:
            return multiple()
        return self.remember(self.acc.merge(a.state, b.state), a.terms + b.terms)

    @rule(kept=states)
    def finalize(self, kept):
        self.check_result(*self.acc.finalize(kept.state), kept.terms)

    @rule(kept=consumes(states))
    @precondition(lambda self: len(self.live) > 1)
    def finalize_donated(self, kept):
        result = self.acc.finalize(kept.state, donate=True)
        self.gone(kept)
        self.check_result(*result, kept.terms)

    def gone(self, kept):
        self.live = [other for other in self.live if other.state is not kept.state]
        for leaf in (kept.state.grads["w"], *kept.state[1:]):
            with pytest.raises(RuntimeError, match="given up with donate=True"):
                leaf + 1

    def check_result(self, grads, value, terms):
        weight = sum(term.weight for term in terms)
        if weight == 0:
            assert torch.equal(grads["w"], torch.zeros(3))
            assert value.isnan()
            return
        exact = Fraction(sum(term.total for term in terms), weight)
        assert abs(Fraction(value.item()) - exact) <= exact / 2**53
        for i, got in enumerate(grads["w"].tolist()):
            exact = Fraction(sum(term.grad[i] for term in terms), weight)
            assert abs(Fraction(got) - exact) <= abs(exact) / 2**24

    @invariant()
    def every_state_is_what_it_should_be(self):
        for state, terms, bits in self.live:
            assert_trees_bitwise_equal(state, bits)
            sums = [sum(term.grad[i] for term in terms) for i in range(3)]
            assert state.grads["w"].tolist() == sums
            assert state.total.item() == sum(term.total for term in terms)
            assert state.weight.item() == sum(term.weight for term in terms)
            assert state.microbatches.item() == len(terms)
            skipped = sum(term.skipped for term in terms)
            assert state.skipped.item() == state.nonfinite.item() == skipped


TestAccumulation = Accumulation.TestCase
