"""Scaling and unscaling change no bit, and an overflow of the unscaled gradient is seen.

Where ``torch.amp.GradScaler`` applies what it should have skipped, it is shown beside.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = [pytest.mark.exact, pytest.mark.promise("loss scale")]
FINITE = torch.tensor(True)


# There and back -------------------------------------------------------------------------


@st.composite
def numbers_of_a_scale(draw):
    """A power of two, and float32 numbers that it neither overflows nor makes too small."""
    e = draw(st.integers(-120, 120))
    whole = st.integers(-(2**24) + 1, 2**24 - 1)
    place = st.integers(max(-149, -149 - e), min(104, 104 - e))
    pairs = draw(st.lists(st.tuples(whole, place), min_size=1, max_size=8))
    return 2.0**e, [m * 2.0**k for m, k in pairs]


@given(numbers_of_a_scale(), st.sampled_from([torch.float32, torch.float64, torch.complex64]))
def test_a_power_of_two_changes_no_bit(case, dtype):
    scale, values = case
    loss_scale = pa.static_loss_scale(scale)
    state = loss_scale.init()
    x = torch.tensor(values, dtype=dtype)
    scaled = loss_scale.scale(state, x)
    assert scaled.tolist() == [v * scale for v in values]
    if dtype.is_complex:
        x, scaled = torch.complex(x.real, x.real.flip(0)), scaled + 1j * scaled.flip(0)
    back = loss_scale.unscale(state, {"x": scaled, "one": scaled[0]})
    assert_trees_bitwise_equal(back, {"x": x, "one": x[0]})


@given(
    st.floats(2.0**-149, torch.finfo(torch.float32).max, width=32),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
)
def test_any_scale_divides_and_rounds_once(scale, values):
    """The nearest float32 to the true quotient, which a product with the reciprocal is not."""
    loss_scale = pa.static_loss_scale(scale)
    got = loss_scale.unscale(loss_scale.init(), torch.tensor(values))
    want = [nearest(Fraction(value) / Fraction(scale)) for value in values]
    assert got.tolist() == want


def nearest(x):
    """The float32 nearest to a fraction, ties to even; computed in integers."""
    if x == 0:
        return 0.0
    size = abs(x)
    place = size.numerator.bit_length() - size.denominator.bit_length() - 24
    while size / Fraction(2) ** place < 2**23:
        place -= 1
    while size / Fraction(2) ** place >= 2**24:
        place += 1
    place = max(place, -149)
    whole = round(size / Fraction(2) ** place)
    if whole * Fraction(2) ** place >= 2**128:
        return math.copysign(math.inf, x)
    return math.copysign(whole * 2.0**place, x)


@pytest.mark.parametrize("e", [-149, -140, -130, -127])
def test_a_scale_below_the_normal_numbers_is_undone(e):
    """Its reciprocal is inf, or nearly; the quotient is not."""
    loss_scale = pa.dynamic_loss_scale(2.0**e, min_scale=2.0**-149)
    state = loss_scale.init()
    x = torch.tensor([1.0, -2.0, 3.0])
    tree = {"x": loss_scale.scale(state, x), "c": torch.tensor([3.0 + 4.0j]) * 2.0**e}
    assert state.scale.item() == 2.0**e
    assert_trees_bitwise_equal(
        loss_scale.unscale(state, tree), {"x": x, "c": torch.tensor([3.0 + 4.0j])}
    )


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_small_scale_is_undone_on_cuda(where):
    """CUDA multiplies by the reciprocal where the divisor lies on the host."""
    loss_scale = pa.dynamic_loss_scale(2.0**-130, min_scale=2.0**-149)
    state = loss_scale.init(where)
    x = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    assert_trees_bitwise_equal(loss_scale.unscale(state, loss_scale.scale(state, x)), x)


@pytest.mark.cuda
def test_a_loss_scale_does_not_wait_for_the_device():
    loss_scale = pa.dynamic_loss_scale(hysteresis=2)
    x = torch.ones(2, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = loss_scale.init("cuda")
        grads = loss_scale.unscale(state, loss_scale.scale(state, x))
        loss_scale.update(state, pa.all_finite(grads))
    finally:
        torch.cuda.set_sync_debug_mode(before)


# Dtypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_half_precision_is_widened(dtype, shape):
    loss_scale = pa.dynamic_loss_scale()
    state = loss_scale.init()
    x = torch.full(shape, 1.5, dtype=dtype)
    scaled = loss_scale.scale(state, x)
    assert_trees_bitwise_equal(scaled, torch.full(shape, 1.5 * 2**16))  # inf in fp16
    small = torch.full(shape, 2.0**-14, dtype=dtype)
    assert_trees_bitwise_equal(
        loss_scale.unscale(state, small), torch.full(shape, 2.0**-30)
    )  # 0 in fp16


@pytest.mark.parametrize("shape", [(), (2,)])
def test_every_leaf_keeps_its_own_width(shape):
    loss_scale = pa.static_loss_scale(2.0**10)
    state = loss_scale.init()
    third = torch.full(shape, 1 / 3, dtype=torch.float64)
    tree = {"double": third, "complex": torch.complex(third, -third), "integer": third.int()}
    got = loss_scale.unscale(state, tree)
    want = {
        "double": third / 2**10,
        "complex": torch.complex(third / 2**10, -third / 2**10),
        "integer": torch.zeros(shape),
    }
    assert_trees_bitwise_equal(got, want)
    assert_trees_bitwise_equal(loss_scale.scale(state, third), third * 2**10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_a_sparse_leaf_stays_sparse(dtype):
    loss_scale = pa.static_loss_scale(4.0)
    x = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.tensor([4.0, 8.0, 12.0], dtype=dtype), (4,)
    )
    got = loss_scale.unscale(loss_scale.init(), x)
    assert got.is_sparse
    wide = torch.promote_types(dtype, torch.float32)
    assert_trees_bitwise_equal(got.to_dense(), torch.tensor([1.0, 0.0, 5.0, 0.0], dtype=wide))


def test_unscaled_is_a_new_tree_also_at_scale_one():
    loss_scale = pa.static_loss_scale(1.0)
    tree = {"x": torch.ones(2), "none": None, "empty": torch.ones(0)}
    got = loss_scale.unscale(loss_scale.init(), tree)
    assert_trees_bitwise_equal(got, tree)
    assert got["x"].data_ptr() != tree["x"].data_ptr()


# Where GradScaler applies what it should skip -------------------------------------------


def overflows(loss_scale, count):
    state = loss_scale.init()
    for _ in range(count):
        state = loss_scale.update(state, ~FINITE)
    return state


def after_overflows(count):
    """GradScaler's scale after so many, and its parameter (lr 1, from 0) after a gradient of 1."""
    scaler = torch.amp.GradScaler("cpu")
    w = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)
    for factor in [*[float("inf")] * count, 1.0]:
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(w * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return scale, w.item()


@pytest.mark.parametrize(
    ("count", "scale", "param"),
    [
        (10, 2.0**6, -1.0),
        (143, 2.0**-127, -1.0),
        (144, 2.0**-128, -math.inf),
        (146, 2.0**-130, -math.inf),
        (165, 2.0**-149, -math.inf),
        (200, 0.0, math.nan),
    ],
)
def test_after_overflows_in_a_row_the_scale_is_that_of_torch_or_its_floor(count, scale, param):
    """From 2**16 on, with the defaults of both."""
    theirs = after_overflows(count)
    assert torch.tensor(theirs).tolist() == pytest.approx([scale, param], rel=0, abs=0, nan_ok=True)

    for loss_scale in (pa.dynamic_loss_scale(), pa.dynamic_loss_scale(min_scale=2.0**-149)):
        state = overflows(loss_scale, count)
        scaled = torch.func.grad(lambda w, its=(loss_scale, state): its[0].scale(its[1], w * 1.0))
        grad = loss_scale.unscale(state, scaled(torch.zeros(())))
        assert torch.equal(grad, torch.tensor(1.0))
    assert overflows(pa.dynamic_loss_scale(), count).scale >= 1.0


def test_an_overflow_that_only_the_unscaled_gradient_shows_is_seen():
    """At scale 2**-120 a gradient of 2**130 is scaled to 2**10, and unscaled to inf."""
    gradient = torch.tensor([2.0**10, 1.0])  # of the scaled loss
    loss_scale = pa.dynamic_loss_scale(2.0**-120, min_scale=2.0**-120)
    state = loss_scale.init()
    grads = loss_scale.unscale(state, {"w": gradient})
    assert pa.all_finite(gradient)
    assert grads["w"].tolist() == [math.inf, 2.0**120]
    assert not pa.all_finite(grads)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-120)
    w = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.scale(torch.zeros(()))  # makes the scale
    w.grad = gradient
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [-math.inf, -(2.0**120)]  # applied
    assert scaler.get_scale() == 2.0**-120  # and not counted as an overflow
