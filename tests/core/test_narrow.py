"""Parameters of 16 bits, sums of 32.

Each microbatch's own gradient is an integer that 16 bits hold (below 2**8 in bfloat16, 2**11 in
float16) while the batch's is not; and a sum may leave the range of float16 where its mean does not.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import KINDS, History, reduction, seeds
from tests.draws import examples, generator
from tests.problems import in_parts, once


pytestmark = [pytest.mark.exact, pytest.mark.promise("bits"), pytest.mark.promise("narrow")]
MOST = {torch.bfloat16: 15, torch.float16: 127}  # in a row; 16 samples stay below 2**8, 2**11
narrow = pytest.mark.parametrize("dtype", list(MOST))
engines = pytest.mark.parametrize("engine", ["func", "autograd"])
sizes_up_to_16 = st.lists(st.integers(8, 16), min_size=12, max_size=20)


def linear(kind):
    def loss(w, batch):
        rows = (batch["x"] @ w).float()
        if kind == "weighted":
            return pa.Weighted((rows * batch["mask"]).sum(), batch["mask"].sum())
        return rows.mean() if kind == "mean" else rows.sum()

    return loss


def narrow_batch(seed, rows, dtype):
    random, high = generator(seed), MOST[dtype]
    x = torch.randint(high // 2, high + 1, (rows, 3), generator=random).to(dtype)
    return {"x": x, "mask": torch.randint(0, 2, (rows,), generator=random).float()}


def sums_of(kind, batch):
    """The sum in float32, and what it is divided by."""
    mask = batch["mask"] if kind == "weighted" else torch.ones(len(batch["x"]))
    return mask @ batch["x"].float(), 1.0 if kind == "sum" else mask.sum()


@narrow
@engines
@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 3)
@given(seed=seeds(), sizes=sizes_up_to_16, donate=st.booleans())
def test_sums_are_float32_and_right_beyond_the_parameters_range(
    kind, engine, dtype, seed, sizes, donate
):
    batch, w = narrow_batch(seed, sum(sizes), dtype), torch.ones(3, dtype=dtype)
    acc = pa.accumulator(linear(kind), reduction=reduction(kind), engine=engine)

    groups = [[*range(5)], [*range(5, len(sizes))]]
    state = History(sizes, groups, (0, 1)).run(acc, w, batch, donate)
    grads, value = acc.finalize(state)

    want, by = sums_of(kind, batch)
    assert_trees_bitwise_equal(state.grads, want)
    assert_trees_bitwise_equal(grads, want / by)
    if kind != "mean":  # its samples are not a power of two: it rounds in the loss
        assert_trees_bitwise_equal(value, want.sum().double() / by)


@narrow
@engines
@pytest.mark.parametrize("kind", KINDS)
@examples(1 / 3)
@given(seed=seeds(), rows=st.integers(100, 200), size=st.integers(1, 16))
def test_grad_rounds_to_the_parameters_dtype_once(kind, engine, dtype, seed, rows, size):
    batch, w = narrow_batch(seed, rows, dtype), torch.ones(3, dtype=dtype)
    options = {"microbatch_size": size, "reduction": reduction(kind), "engine": engine}
    want, by = sums_of(kind, batch)
    assert_trees_bitwise_equal(pa.grad(linear(kind), **options)(w, batch), (want / by).to(dtype))


@narrow
def test_the_same_sum_in_16_bits_is_another_number(dtype):
    x = narrow_batch(0, 192, dtype)["x"]
    total = torch.zeros(3, dtype=dtype)
    for part in x.split(16):
        total += part.float().sum(0).to(dtype)  # each of which is exact
    assert (total.float() != x.float().sum(0)).all()


# The range of float16 --------------------------------------------------------------------


TOKENS = 4096


def dense(kind):
    def loss(w, x):
        if kind == "weighted":
            return pa.Weighted((w * x).float().sum(), len(x))
        return (w * x).mean()

    return loss


def around_50(seed):
    """Samples in pairs 50 + d, 50 - d: all means over pairs are 50."""
    d = torch.randint(-14, 15, (TOKENS // 2, 1), generator=generator(seed))
    return torch.cat([50 + d, 50 - d], 1).reshape(-1).half()


@engines
@pytest.mark.parametrize("kind", ["mean", "weighted"])
@examples(1 / 6)
@given(seed=seeds(), size=st.sampled_from([16, 64, 2048, 4095, 4096]))
def test_a_gradient_whose_sum_overflows_float16_is_right(kind, engine, seed, size):
    """Pulled with 1, the sum of a microbatch of 2048 is inf; the mean of all is 50."""
    x, w = around_50(seed), torch.zeros((), dtype=torch.float16)
    acc = pa.accumulator(dense(kind), engine=engine)
    grads, value = acc.finalize(in_parts(acc, w, pa.microbatches(x, size)))
    got = pa.grad(dense(kind), microbatch_size=size, engine=engine)(w, x)

    # Where a microbatch of pairs is a power of two, nothing rounds. Of 4095 samples the gradient
    # rounds to 11 bits, once.
    off = 50 * 2.0**-11 if size == 4095 else 0.0
    assert (grads - 50).abs() <= off
    assert (got.float() - 50).abs() <= 2 * off
    assert value == 0


def test_the_plain_sum_of_those_gradients_overflows():
    x, w = around_50(0), torch.zeros((), dtype=torch.float16)
    assert torch.func.grad(lambda w: (w * x).sum())(w) == torch.inf


# Microbatched functions ----------------------------------------------------------------------


def in_bfloat16(loss):
    return pa.make_step(loss, pa.sgd(1.0), policy=pa.Policy(compute=torch.bfloat16))


FINE = torch.tensor([1.0, 2.0**-12])  # their sum has more digits than bfloat16


def test_gradients_of_a_microbatched_function_are_summed_wide():
    """In float32, and rounded once, to the parameter's dtype."""
    ones = torch.full((300,), 1.0, dtype=torch.bfloat16)
    total = pa.microbatch(lambda w, x: (w * x).sum(), microbatch_size=1, reduce="sum")
    w = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    total(w, ones).backward()
    assert w.grad == torch.tensor(300.0, dtype=torch.bfloat16)  # 256 + 1 is 256


@pytest.mark.parametrize(
    "captured",
    [
        pytest.param(False, id="given"),
        pytest.param(True, id="captured", marks=pytest.mark.given_up("captured")),
    ],
)
@pytest.mark.parametrize("reduction", ["sum", "concat"])
def test_a_cast_gives_way_to_its_master(reduction, captured):
    """A policy's cast is made in each microbatch, so that the master's gradient stays wide."""

    def loss(params, batch):
        of, w = (lambda w, x: (w * x).sum() if reduction == "sum" else w * x), params["w"]
        options = {"microbatch_size": 1, "reduce": reduction}
        if captured:
            return pa.microbatch(lambda x: of(w, x), batch_argnums=0, **options)(batch).sum()
        return pa.microbatch(of, **options)(w, batch).sum()

    state, _ = once(in_bfloat16(loss), {"w": torch.zeros(())}, FINE)
    assert state.params["w"] == -(1 + 2**-12)


@pytest.mark.promise("policy")
def test_a_cast_that_was_written_to_is_a_tensor_of_its_own():
    """What its master would give in its place is what it was before."""

    def loss(params, batch):
        with torch.no_grad():
            params["w"].mul_(2)
        return pa.microbatch(lambda w, x: w * x, microbatch_size=1)(params["w"], batch).sum()

    _, info = once(in_bfloat16(loss), {"w": torch.ones(())}, torch.ones(2))
    assert info.loss == 4


@pytest.mark.parametrize("later", [False, True], ids=["at once", "in a later microbatch"])
def test_a_loss_scale_rides_on_the_cotangent(later):
    """A gradient pulled with 1 is lost in float16 before the scale multiplies it."""

    def of(w, x):
        product = w * x if later and x < 2 else (w.half() * x.half()).float()
        return product.sum() * 2.0**-20

    total = pa.microbatch(of, microbatch_size=1, reduce="sum")
    w, x = torch.zeros((), requires_grad=True), torch.tensor([1 + 2.0**-10, 2 + 2.0**-9])
    (total(w, x) * 2.0**20).backward()
    assert w.grad == x.sum()
