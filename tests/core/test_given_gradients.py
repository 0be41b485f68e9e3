"""Sums of given gradients: within gamma(n - 1) * sum|g| of the exact sum, in any history.

The loss is linear, so the gradient of sample i is ``x[i]`` itself, and every rounding on the way is
an addition of n numbers in some order.
"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing.strategies import histories, seeds
from tests.draws import examples, generator
from tests.problems import in_parts
from tests.rounding import UNIT, exact_sum, gamma, ulps


pytestmark = [pytest.mark.bounds, pytest.mark.promise("bounds")]
REAL = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
dtypes = pytest.mark.parametrize("dtype", list(REAL), ids=str)


@st.composite
def addends(draw, dtype):
    """Chosen number by number, or many of very different size; the least stays far from 0."""
    real = REAL[dtype]
    width = 2 if dtype.is_complex else 1
    if draw(st.booleans()):
        number = st.floats(2.0**-60, 2.0**90, width=32)
        signed = st.builds(float.__mul__, number, st.sampled_from([-1.0, 0.0, 1.0]))
        row = st.lists(signed, min_size=width, max_size=width)
        rows = draw(st.lists(row, min_size=1, max_size=12))
        x = torch.tensor(rows, dtype=real)
    else:
        random, n = generator(draw(seeds())), draw(st.integers(1, 40))
        spread = draw(st.integers(0, 40))
        size = 2.0 ** torch.randint(-spread, spread + 1, (n, width), generator=random).to(real)
        x = torch.randn(n, width, generator=random, dtype=real) * size
    return torch.view_as_complex(x) if dtype.is_complex else x[:, 0]


def real_numbers(x):
    """The last dimension is the real and imaginary part."""
    return torch.view_as_real(x) if x.is_complex() else x[..., None]


def inner(w, x):
    """Its gradient is the sum of x."""
    product = (w * x.conj()).sum()
    return product.real if product.is_complex() else product


def check(got, x, operations, by=1):
    """Hold real and imaginary part to the bound, and tell hypothesis how near they come."""
    unit, worst = UNIT[REAL[x.dtype]], 0.0
    parts = zip(real_numbers(got).tolist(), real_numbers(x).T.tolist(), strict=True)
    for number, addends in parts:
        exact, magnitude = exact_sum(addends)
        error, magnitude = abs(Fraction(number) - exact / by), magnitude / by
        worst = max(worst, ulps(error, magnitude, unit))
        assert error <= gamma(operations, unit) * magnitude
    target(worst, label="error in u * sum|g|")


@dtypes
@pytest.mark.parametrize("engine", ["func", "autograd"])
@examples(1 / 2)
@given(data=st.data(), donate=st.booleans())
def test_a_sum_of_n_gradients_rounds_n_minus_1_times(dtype, engine, data, donate):
    x = data.draw(addends(dtype))
    w = torch.zeros((), dtype=dtype)
    acc = pa.accumulator(inner, reduction="sum", engine=engine)
    state = data.draw(histories(len(x))).run(acc, w, x, donate)
    check(acc.finalize(state)[0], x, len(x) - 1)


@dtypes
@examples(1 / 2)
@given(data=st.data())
def test_a_weighted_mean_rounds_twice_more(dtype, data):
    """The weight to the gradient's dtype, and the division; the n - 1 sums of float64 weights."""
    x = data.draw(addends(dtype))
    weights = (
        torch.rand(len(x), dtype=torch.float64, generator=generator(data.draw(seeds()))) + 2**-9
    )
    w = torch.zeros((), dtype=dtype)

    loss = lambda w, batch: pa.Weighted(inner(w, batch["x"]), batch["weights"].sum())  # noqa: E731
    acc = pa.accumulator(loss)
    state = data.draw(histories(len(x))).run(acc, w, {"x": x, "weights": weights})
    grads, _ = acc.finalize(state)
    check(grads, x, 2 * len(x), by=exact_sum(weights.tolist())[0])


@examples(1 / 2)
@given(data=st.data())
def test_float32_parameters_summed_in_float64_round_as_float64_does(data):
    """``dtype=torch.float64``: row by sample, so that no microbatch sums in float32."""
    x = data.draw(addends(torch.float32))
    w = torch.zeros(())
    acc = pa.accumulator(inner, reduction="sum", dtype=torch.float64)
    state = in_parts(acc, w, x.split(1))
    check(state.grads, x.double(), len(x) - 1)
