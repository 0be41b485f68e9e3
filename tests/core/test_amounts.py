"""Totals and weights are float64: a token count beyond 2**24 stays exact."""

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import histories
from tests.problems import in_parts
from tests.rounding import UNIT, exact_sum, gamma


pytestmark = [pytest.mark.bounds, pytest.mark.promise("weights")]
PARAMS = torch.zeros(())


@pytest.mark.parametrize("form", [int, float, torch.tensor], ids=["int", "float", "int64 tensor"])
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=12), st.data())
@example([2**24, 1, 1], None)
def test_token_counts_add_up_exactly(form, counts, data):
    """Each sample stands for a microbatch of that many tokens, whose total is as large."""
    batch = torch.tensor(counts)

    def loss(w, rows):
        count = int(rows.sum())
        total = w * 0 + rows.sum().double()
        return pa.Weighted(total, form(count))

    acc = pa.accumulator(loss)
    if data is None:
        state = in_parts(acc, PARAMS, batch.split(1))
    else:
        state = data.draw(histories(len(counts))).run(acc, PARAMS, batch)

    assert (state.weight.dtype, state.total.dtype) == (torch.float64, torch.float64)
    assert int(state.weight) == int(state.total) == sum(counts)
    assert sum(counts) == 0 or acc.finalize(state)[1] == 1


losses = st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=1, max_size=24)


def given_sum(w, x):
    return w * 0 + x.sum()


def given_mean(w, x):
    return w * 0 + x.mean()


@given(losses)
@example([2.0**24, 1.0, 1.0])
def test_float32_losses_are_summed_in_float64(numbers):
    acc = pa.accumulator(given_sum, reduction="sum")
    x = torch.tensor(numbers)
    state = in_parts(acc, PARAMS, x.split(1))
    exact, magnitude = exact_sum(x.tolist())
    allowed = gamma(len(x) - 1, UNIT[torch.float64]) * magnitude
    for total in (state.total, acc.finalize(state)[1]):
        assert total.dtype == torch.float64
        assert abs(Fraction(total.item()) - exact) <= allowed


@pytest.mark.parametrize("mean", [False, True])
@given(losses, st.data())
def test_the_value_of_any_history_rounds_no_more_than_its_own_losses(mean, numbers, data):
    """In float32 within a microbatch, n additions and a division; little in float64 above."""
    x = torch.tensor(numbers)
    acc = pa.accumulator(given_mean if mean else given_sum, reduction="mean" if mean else "sum")
    state = data.draw(histories(len(x))).run(acc, PARAMS, x)
    exact, magnitude = exact_sum(x.tolist())
    by = len(x) if mean else 1
    error = abs(Fraction(acc.finalize(state)[1].item()) - exact / by)
    assert error <= gamma(len(x) + 1, UNIT[torch.float32]) * magnitude / by
