"""Both engines and a hand-written ``.backward()`` loop give the same bits on ordinary floats.

The three take the same gradients with the same cotangents and add them in the same order; only
the machinery differs: torch.func, ``torch.autograd.grad``, and ``.grad`` of parameters.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.core.models import MODELS, problem
from tests.draws import examples


pytestmark = [pytest.mark.parity, pytest.mark.promise("engines")]


def by_hand(given_, loss, parts, weights):
    """Sum ``weight * gradient`` of each microbatch, pulled with weight / 2**e; divide once."""
    module = given_.module
    module.load_state_dict(given_.params)
    wide = [torch.promote_types(p.dtype, torch.float32) for p in module.parameters()]
    sums = [torch.zeros_like(p, dtype=d) for p, d in zip(module.parameters(), wide, strict=True)]
    for part, weight in zip(parts, weights, strict=True):
        power = 2.0 ** (weight - 1).bit_length()
        module.zero_grad()
        out = loss(dict(module.named_parameters()), part)
        out.backward(torch.full_like(out, weight / power))
        for total, p in zip(sums, module.parameters(), strict=True):
            total += p.grad.to(total.dtype) * power
    names = dict(module.named_parameters())
    return {
        name: (total / sum(weights)).to(p.dtype)
        for (name, p), total in zip(names.items(), sums, strict=True)
    }


@pytest.mark.parametrize("name", MODELS)
@examples(1 / 2)
@example(nonfinite="propagate", dtype=torch.float32, seed=1, rows=7, size=3)
@given(
    nonfinite=st.sampled_from(["propagate", "skip", "raise"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=seeds(),
    rows=st.integers(2, 8),
    size=st.integers(1, 7),
)
def test_a_mean_has_the_bits_of_both_engines_and_of_a_loop(
    name, nonfinite, dtype, seed, rows, size
):
    given_ = problem(name, seed, rows, dtype)
    size = min(size, rows - 1)  # not the whole batch, which is not scaled at all
    func, autograd = (
        pa.grad(given_.mean, microbatch_size=size, nonfinite=nonfinite, engine=engine)(
            given_.params, given_.batch
        )
        for engine in ("func", "autograd")
    )
    parts = list(pa.microbatches(given_.batch, size))
    hand = by_hand(given_, given_.mean, parts, [len(part["x"]) for part in parts])
    assert_trees_bitwise_equal(func, autograd)
    assert_trees_bitwise_equal(func, hand)


@pytest.mark.parametrize("name", MODELS)
@examples(1 / 2)
@example(nonfinite="propagate", seed=1, rows=7, size=2)
@given(
    nonfinite=st.sampled_from(["propagate", "skip"]),
    seed=seeds(),
    rows=st.integers(1, 8),
    size=st.integers(1, 8),
)
def test_a_weighted_mean_has_the_bits_of_both_engines_and_of_a_loop(
    name, nonfinite, seed, rows, size
):
    """As streams; by hand, the totals of the microbatches that are not all masked."""
    given_ = problem(name, seed, rows)
    states = []
    for engine in ("func", "autograd"):
        acc = pa.accumulator(given_.weighted, nonfinite=nonfinite, engine=engine)
        state = acc.init(given_.params)
        for part in pa.microbatches(given_.batch, size):
            state = acc.update(state, given_.params, part)
        states.append(state)
    assert_trees_bitwise_equal(*states)
    live = [part for part in pa.microbatches(given_.batch, size) if part["mask"].sum()]
    if not live:
        assert not any(g.any() for g in states[0].grads.values())
        return
    module = given_.module
    sums = {name: torch.zeros_like(p) for name, p in given_.params.items()}
    module.load_state_dict(given_.params)
    for part in live:
        module.zero_grad()
        given_.weighted(dict(module.named_parameters()), part).total.backward()
        for name, p in module.named_parameters():
            sums[name] += p.grad
    assert_trees_bitwise_equal(states[0].grads, sums)
