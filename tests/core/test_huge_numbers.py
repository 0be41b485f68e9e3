"""Numbers beyond what torch counts with are refused in words, or work as smaller ones do."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.refusals import refused
from tests.runs import RUNS, runs


pytestmark = [pytest.mark.faults]
W, X, KEY = torch.tensor(2.0), torch.arange(6.0), pa.key(0)


def loss(w, x):
    return (w * x).square().mean()


SIZES = {
    name: lambda n, run=run: run(loss, W, X, size=n)
    for name, run in runs(
        *("grad", "autograd", "skip", "value", "step", "compiled step", "samples", "clipped")
    ).items()
} | {
    "microbatch": lambda n: pa.microbatch(torch.mul, microbatch_size=n)(W, X),
    "twice": lambda n: torch.func.jacrev(pa.grad(loss, microbatch_size=n))(W, X),
    "budget": lambda n: RUNS["step"](loss, W, X, size="auto", memory_budget=n),
    "microbatches": lambda n: list(pa.microbatches({"x": X}, n)),
    "windows": lambda n: list(pa.windows([X, X], n)),
}


@pytest.mark.parametrize(
    "name", [n if n != "compiled step" else pytest.param(n, marks=pytest.mark.slow) for n in SIZES]
)
def test_a_size_may_be_any_number_above_the_rows(name):
    want = SIZES[name](1000)
    for huge in (2**63 - 1, 2**63, 2**64, 10**400, 10**5000):
        assert_trees_bitwise_equal(SIZES[name](huge), want)


COUNTS = {
    "sizes": ("microbatch_size=[", lambda n: pa.grad(loss, microbatch_size=[n, 4])(W, X)),
    "argnums": ("argnums ", lambda n: pa.grad(loss, n)(W, X)),
    "several": ("argnums[1] is", lambda n: pa.grad(loss, (0, n))(W, X)),
    "batch_argnums": ("batch_argnums ", lambda n: pa.grad(loss, batch_argnums=n)(W, X)),
    "fold_in": ("n is", lambda n: pa.fold_in(KEY, n)),
    "split_key": ("n is", lambda n: pa.split_key(KEY, n)),
    "uniform": ("shape has", lambda n: pa.uniform(KEY, (2, n))),
    "normal": ("shape has", lambda n: pa.normal(KEY, (n,))),
    "growth_interval": ("growth_interval is", lambda n: pa.dynamic_loss_scale(growth_interval=n)),
    "hysteresis": ("hysteresis is", lambda n: pa.dynamic_loss_scale(hysteresis=n)),
    "segments": ("segments is", lambda n: pa.remat_sequential([torch.mul], segments=n)),
    "warmup": ("steps is", lambda n: pa.linear_warmup(0.1, n)),
    "cosine": ("steps is", lambda n: pa.cosine_decay(0.1, n)),
    "decay": ("steps is", lambda n: pa.step_decay(0.1, n)),
    "decays": ("steps[1] is", lambda n: pa.step_decay(0.1, [3, n])),
    "exponential": ("steps is", lambda n: pa.exponential_decay(0.1, 0.5, n)),
    "cycle": ("steps is", lambda n: pa.one_cycle(0.1, n)),
    "patience": ("patience is", lambda n: pa.plateau(0.1, patience=n)),
    "cooldown": ("cooldown is", lambda n: pa.plateau(0.1, cooldown=n)),
    "joined": ("boundaries[0] is", lambda n: pa.join_schedules([pa.constant(0.1)] * 2, [n])),
}


@pytest.mark.parametrize(("root", "takes"), COUNTS.values(), ids=COUNTS)
def test_a_count_that_torch_cannot_hold_is_refused(root, takes):
    for huge in (2**63, 2**64, 10**400, 10**5000):
        with refused(ValueError, root):
            takes(huge)


def test_a_count_that_torch_can_hold():
    most = 2**63 - 1
    assert pa.linear_warmup(0.5, most)(torch.tensor(most)) == 0.5
    assert pa.step_decay(0.5, most)(torch.tensor(most)) == 0.05
    assert pa.exponential_decay(0.5, 0.5, most)(torch.tensor(most)) == 0.25
    assert pa.one_cycle(0.5, most, div_factor=1, final_div_factor=2)(torch.tensor(most)) == 0.25
    joined = pa.join_schedules([pa.constant(0.1), pa.constant(0.2)], [most])
    assert [joined(torch.tensor(n)).item() for n in (3, most)] == [0.1, 0.2]


def test_a_seed_has_64_bits():
    for huge in (2**64, -(2**63) - 1, 10**400, 10**5000):
        with refused(ValueError, "seed is", "from -2**63 to 2**64 - 1"):
            pa.key(huge)


FLOATS = {
    "lr": ("lr is inf", pa.sgd),
    "momentum": ("momentum is inf", lambda x: pa.sgd(0.1, x)),
    "weight_decay": ("weight_decay is inf", lambda x: pa.adamw(0.1, weight_decay=x)),
    "eps": ("eps is inf", lambda x: pa.adam(0.1, eps=x)),
    "constant": ("value is inf", pa.constant),
    "warmup": ("peak is inf", lambda x: pa.linear_warmup(x, 3)),
    "cosine": ("end is inf", lambda x: pa.cosine_decay(0.1, 3, x)),
    "factor": ("factor is inf", lambda x: pa.step_decay(0.1, 3, x)),
    "cycle": ("div_factor is inf", lambda x: pa.one_cycle(0.1, 3, div_factor=x)),
    "plateau": ("threshold is inf", lambda x: pa.plateau(0.1, threshold=x, threshold_mode="abs")),
    "average": ("decay is inf", pa.ema),
    "static": ("scale is inf", pa.static_loss_scale),
    "dynamic": ("init_scale is inf", pa.dynamic_loss_scale),
    "growth": ("growth_factor is inf", lambda x: pa.dynamic_loss_scale(growth_factor=x)),
    "noise": ("std is inf", lambda x: pa.add_noise({"w": W}, x, KEY)),
    "decay": ("decay is inf", pa.running_noise_scale),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_whole_number_larger_than_any_float_is_refused(name):
    root, takes = FLOATS[name]
    for huge in (10**400, 10**5000):
        with refused(ValueError, root):
            takes(huge)


def test_a_whole_number_is_a_float():
    """Those from 2**64 on too, which torch takes for no number at all."""
    for n in (3, 2**63, 2**64):
        for make in (
            lambda x: pa.sgd(x).init(W),
            lambda x: pa.constant(x)(torch.tensor(3)),
            lambda x: pa.linear_warmup(x, 4, start=x)(torch.tensor(3)),
            lambda x: pa.static_loss_scale(x).init(),
            lambda x: pa.dynamic_loss_scale(x, max_scale=x).init(),
            lambda x: pa.clip_by_global_norm(x).update({"w": W}, ()),
            lambda x: pa.add_noise({"w": W}, x, KEY),
            lambda x: (opt := pa.adamw(0.1, eps=x)).apply(W, opt.init(W), W),
        ):
            assert_trees_bitwise_equal(make(n), make(float(n)))
