"""``sgd``, ``adam`` and ``adamw`` are bit for bit the classes of torch, kernel by kernel.

Every combination of flags, with random numbers for those that are numbers; parameters, moments
and counts are compared after every step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.optimizers import COMBINATIONS, Torchs, clones, leaves, normal


pytestmark = [pytest.mark.parity, pytest.mark.promise("optimizers")]
STEPS = 10
NAMES = {
    "momentum": "momentum_buffer",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
}
CLASSES = {
    "sgd": (pa.sgd, torch.optim.SGD),
    "adam": (pa.adam, torch.optim.Adam),
    "adamw": (pa.adamw, torch.optim.AdamW),
}
FULL = (torch.float32, torch.float64)
REAL = (*FULL, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
SHAPES = ((), (1,), (0, 3), (3,), (17, 5), (2, 1, 4), (64,))


# Flags ----------------------------------------------------------------------------------


NUMBERS = {
    "momentum": st.floats(0.01, 1.0),
    "dampening": st.floats(-0.5, 1.5).filter(bool),
    "weight_decay": st.floats(1e-6, 2.0),
}


@st.composite
def flags(draw, name, switches):
    """Numbers for the flags that are on; what is off is off."""
    found = {
        flag: (draw(NUMBERS[flag]) if on else 0.0) if flag in NUMBERS else on
        for flag, on in switches.items()
    }
    if name != "sgd":
        beta = st.sampled_from([0.0, 0.5, 0.9, 0.999]) | st.floats(0.0, 0.9999)
        found["betas"] = (draw(beta), draw(beta))
        found["eps"] = draw(st.sampled_from([0.0, 1e-8]) | st.floats(1e-12, 1e-2))
    return found


# Learning rates -------------------------------------------------------------------------


class Rate(NamedTuple):
    """What is given to ours, and the number that torch's class uses in each step."""

    ours: Any
    at: Callable[[int], float]


def ends_in(lr):
    schedule = pa.join_schedules([pa.linear_warmup(lr, 3), pa.cosine_decay(lr, 5, lr / 7)], [4])
    return Rate(schedule, lambda n: schedule(torch.tensor(n)).item())


def narrow(lr):
    """A schedule of the user's own, in float32."""
    return Rate(lambda count: lr / (1.0 + count), lambda n: (lr / (1.0 + torch.tensor(n))).item())


RATES = {
    "float": lambda lr: Rate(lr, lambda n: lr),
    "float32 tensor": lambda lr: Rate(torch.tensor(lr), lambda n: torch.tensor(lr).item()),
    "float64 tensor": lambda lr: Rate(torch.tensor(lr, dtype=torch.float64), lambda n: lr),
    "schedule": ends_in,
    "narrow schedule": narrow,
}
rates = st.builds(lambda kind, lr: RATES[kind](lr), st.sampled_from(sorted(RATES)), st.floats(0, 2))


# The property ---------------------------------------------------------------------------


Kinds = list[tuple[tuple[int, ...], torch.dtype]]


def trees(dtypes):
    """Shapes and dtypes of leaves, mixed in one tree."""
    pair = st.tuples(st.sampled_from(SHAPES), st.sampled_from(dtypes))
    return st.lists(pair, min_size=1, max_size=4)


def as_tree(column):
    return {"z": column[0], "a": tuple(column[1:])}


def gradients(kinds, wide, random):
    """In the dtypes of the parameters, or wider: those of an accumulator."""
    at_least = torch.float32 if wide else torch.bfloat16
    return as_tree([normal(s, random, torch.promote_types(d, at_least)) for s, d in kinds])


def check(
    name,
    given,
    theirs,
    kinds,
    rate,
    seed,
    wide=False,
    donate=False,
    fused=False,
    steps=STEPS,
):
    ours, cls = CLASSES[name]
    random = generator(seed)
    params = as_tree([normal(shape, random, dtype) for shape, dtype in kinds])
    beside = [Torchs(cls, params, lr=rate.at(0), **given, **variant) for variant in theirs]
    opt = ours(rate.ours, fused=fused, **given)
    params = clones(params)
    state = opt.init(params)
    for n in range(steps):
        grads = gradients(kinds, wide, random)
        params, state = opt.apply(grads, state, params, donate=donate)
        assert state.steps == n + 1
        for their in beside:
            their.step(grads, rate.at(n))
            their.assert_same_params(params)
            for field in set(NAMES) & set(state._fields):
                column = leaves(getattr(state, field))
                assert_trees_bitwise_equal(column, their.kept(NAMES[field]) if column else [])


@COMBINATIONS
@examples(1 / 4)
@given(st.booleans(), st.data(), rates, seeds(), st.booleans(), st.booleans())
def test_every_combination_of_flags_has_the_bits_of_the_class(
    name,
    switches,
    fused,
    data,
    rate,
    seed,
    wide,
    donate,
):
    """fused beside fused; else beside single-tensor and, for real float32 and float64, foreach.

    torch's own two round differently for bfloat16, and for complex numbers that decay. Its fused
    SGD gives wrong numbers for bfloat16 on a CPU.
    """
    given = data.draw(flags(name, switches))
    dtypes = (FULL if name == "sgd" else REAL) if fused else REAL + COMPLEX
    kinds = data.draw(trees(dtypes))
    theirs = [{"fused": True}] if fused else [{"foreach": False}]
    if not fused and all(dtype in FULL for _, dtype in kinds):
        theirs.append({"foreach": True})
    check(name, given, theirs, kinds, rate, seed, wide, donate, fused)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", RATES)
def test_every_kind_of_learning_rate_is_that_of_the_class(name, kind):
    """Twenty steps, so that a schedule passes all its pieces."""
    rate, kinds = RATES[kind](0.3), [((5,), torch.float32), ((), torch.float64)]
    for fused in (False, True):
        theirs = [{"fused": True}] if fused else [{"foreach": False}, {"foreach": True}]
        check(name, {}, theirs, kinds, rate, 1, True, donate=fused, fused=fused, steps=20)


def test_the_learning_rate_in_the_state_is_the_one_that_counts():
    params = {"w": torch.randn(5)}
    opt, their = pa.adamw(0.5), Torchs(torch.optim.AdamW, params, lr=0.5, foreach=False)
    state = opt.init(params)
    for lr in (0.5, 0.01, 0.3):
        state = state._replace(lr=torch.tensor(lr, dtype=torch.float64))
        grads = {"w": torch.randn(5)}
        params, state = opt.apply(grads, state, params)
        their.step(grads, lr)
        their.assert_same_params(params)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("fused", [False, True])
def test_sparse_gradients_are_dense_ones(name, fused):
    opt = CLASSES[name][0](0.1, fused=fused)
    dense = torch.tensor([[0.0, 0.0], [1.0, -2.0], [0.0, 3.0]])
    params = torch.randn(3, 2)
    state = opt.init(params)
    got, want = (opt.apply(g, state, params) for g in (dense.to_sparse(1), dense))
    assert_trees_bitwise_equal(got, want)


def test_gradients_that_are_wider_are_rounded_to_the_parameters():
    """An accumulator's float32 sums, and bfloat16 parameters."""
    params, grads = torch.randn(33).bfloat16(), torch.randn(33)
    for opt in (pa.adamw(0.1), pa.sgd(0.1, 0.9)):
        wide, narrow = (opt.apply(g, opt.init(params), params) for g in (grads, grads.bfloat16()))
        assert_trees_bitwise_equal(wide, narrow)
        assert wide[0].dtype == torch.bfloat16
