"""Under vmap each member has its own fate: what is masked or skipped in one stays in the others.

Exact data, so every member is compared in bits with its own full batch.
"""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacfwd, jvp, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.exactly import WEIGHTED, full_batch, losses, make_batch, make_params


pytestmark = [pytest.mark.transforms, pytest.mark.promise("ensembles")]
MEMBERS = 3


def stacked(trees):
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def without(batch, start, stop):
    return {k: torch.cat([column[:start], column[stop:]]) for k, column in batch.items()}


@examples(1 / 2)
@given(seeds(), losses, st.integers(2, 12), st.data(), st.booleans())
def test_a_fault_in_one_member_stays_in_it(seed, loss, rows, data, masked):
    """``skip`` leaves a microbatch out of one member; a mask of zeros does so by itself."""
    size = data.draw(st.integers(1, rows - 1))
    at = size * data.draw(st.integers(0, (rows - 1) // size))
    bad = data.draw(st.integers(0, MEMBERS - 1))
    loss = WEIGHTED if masked else loss
    params = make_params(seed)
    batches = [make_batch(seed + i, rows) for i in range(MEMBERS)]
    expected = [full_batch(loss, params, batch) for batch in batches]
    batches[bad]["y"][at : at + size] = torch.nan
    if masked:
        batches[bad]["mask"][at : at + size] = 0
    expected[bad] = full_batch(loss, params, without(batches[bad], at, at + size))
    gradient = pa.grad(
        loss.call,
        microbatch_size=size,
        reduction=loss.reduction,
        nonfinite="propagate" if masked else "skip",
    )
    got = vmap(gradient, (None, 0))(params, stacked(batches))
    assert_trees_bitwise_equal(got, stacked(expected))


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=5, max_size=5), min_size=2))
def test_a_gradient_in_one_member_may_be_nan_where_its_loss_is_not(members):
    """The root of zero: ``skip`` under vmap looks at the gradients of each member."""
    x = torch.tensor(members)
    gradient = pa.grad(
        lambda w, x: (w * x).sqrt().sum(), microbatch_size=1, reduction="sum", nonfinite="skip"
    )
    expected = x.sqrt().sum(1) / 2  # a zero adds nothing because it is skipped
    assert_trees_bitwise_equal(vmap(gradient, (None, 0))(torch.tensor(1.0), x), expected)


@examples(1 / 4)
@given(seeds(), losses, st.integers(2, 12), st.integers(1, 4), st.integers(0, MEMBERS - 1))
def test_a_fault_propagates_in_its_member_alone(seed, loss, rows, size, bad):
    params = make_params(seed)
    batches = [make_batch(seed + i, rows) for i in range(MEMBERS)]
    batches[bad]["y"][0] = torch.nan
    batches[bad]["mask"][0] = 3  # so that its microbatch has a weight in every loss
    gradient = pa.grad_and_value(
        loss.call, microbatch_size=min(size, rows - 1), reduction=loss.reduction
    )
    grads, values = vmap(gradient, (None, 0))(params, stacked(batches))
    for i, batch in enumerate(batches):
        member = optree.tree_map(lambda g, i=i: g[i], grads)
        assert_trees_bitwise_equal(member, full_batch(loss, params, batch))
        assert pa.all_finite(member) or i == bad
        if i != bad:
            assert values[i].isfinite() or loss.weight(batch) == 0
        else:
            assert values[i].isnan()


@examples(1 / 2)
@given(seeds(), losses, st.integers(1, 3), st.integers(0, 3), st.integers(0, MEMBERS - 1))
def test_a_stream_of_stacked_states_is_that_of_its_members(seed, loss, size, poisoned, bad):
    acc = pa.accumulator(loss.call, reduction=loss.reduction, nonfinite="skip")
    several = [make_params(seed + i) for i in range(MEMBERS)]
    parts = [[make_batch(seed + 10 * i + j, size) for i in range(MEMBERS)] for j in range(4)]
    parts[poisoned][bad]["y"] = torch.full((size, 2), torch.inf)

    states = others = [acc.init(params) for params in several]
    params = stacked(several)
    state = other = vmap(acc.init)(params)
    for part in parts:
        states = [acc.update(s, p, b) for s, p, b in zip(states, several, part, strict=True)]
        state = vmap(acc.update)(state, params, stacked(part))
    assert_trees_bitwise_equal(state, stacked(states))
    merged = [acc.merge(a, b) for a, b in zip(states, others, strict=True)]
    state = vmap(acc.merge)(state, other)
    assert_trees_bitwise_equal(state, stacked(merged))
    final = [acc.finalize(s) for s in merged]
    assert_trees_bitwise_equal(vmap(acc.finalize)(state), stacked(final))
    assert state.skipped[bad] == (loss.weight(parts[poisoned][bad]) != 0)


@examples(1 / 4)
@given(seeds(), losses, st.integers(2, 12), st.data())
def test_donation_is_without_effect_under_vmap(seed, loss, rows, data):
    size = data.draw(st.integers(1, rows))
    acc = pa.accumulator(loss.call, reduction=loss.reduction)
    params, batch = make_params(seed), make_batch(seed, rows)

    def run(factor, donate):
        scaled = optree.tree_map(lambda x: x * factor, params)
        olds = [acc.init(scaled)]
        for part in pa.microbatches(batch, size):
            olds.append(acc.update(olds[-1], scaled, part, donate=donate))
        return acc.finalize(olds[-1], donate=donate), olds

    factors = torch.tensor([1.0, 0.0, -1.0])
    plain, donated = (vmap(lambda c, d=d: run(c, d))(factors) for d in (False, True))
    assert_trees_bitwise_equal(plain, donated)


@pytest.mark.promise("narrow")
@given(seeds(), st.integers(1, 40), st.integers(1, 4))
def test_bf16_params_are_summed_in_float32(seed, rows, size):
    """Each microbatch's gradient is exact in bfloat16 and their sum is not: rounded once."""
    x = torch.randint(5, 16, (rows,), generator=generator(seed)).bfloat16()
    w = torch.ones(MEMBERS, dtype=torch.bfloat16)
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    gradient = pa.grad(loss, microbatch_size=size, reduction="sum")
    expected = x.double().sum().to(torch.bfloat16).expand(MEMBERS)
    if rows > size:  # else torch.func's own sum
        assert_trees_bitwise_equal(vmap(gradient, (0, None))(w, x), expected)
    assert vmap(gradient, (0, None))(w, x).dtype == torch.bfloat16


@pytest.mark.promise("narrow")
@given(seeds(), st.integers(1, 8), st.integers(1, 8))
def test_bf16_params_have_their_derivatives(seed, rows, size):
    """Second derivatives of bfloat16 params, all numbers below 2**8 and so exact."""
    x = torch.randint(-7, 8, (rows,), generator=generator(seed)).bfloat16()
    one = torch.ones((), dtype=torch.bfloat16)
    gradient = pa.grad(lambda w, x: (w * w * x).sum(), microbatch_size=size, reduction="sum")
    expected = 2 * x.double().sum().to(torch.bfloat16)
    assert_trees_bitwise_equal(jvp(lambda w: gradient(w, x), (one,), (one,))[1], expected)
    assert_trees_bitwise_equal(grad(gradient)(one, x), expected)
    assert_trees_bitwise_equal(jacfwd(gradient)(one, x), expected)
