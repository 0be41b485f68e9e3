"""A learning rate that is not finite is a step not applied: counted, shown, and nothing changed."""

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum._base.trees import flatten
from pureaccum.testing import assert_trees_bitwise_equal
from tests.optimizers import Copies, Count, by_name, clones, make_params, unread
from tests.refusals import refused


pytestmark = [pytest.mark.faults, pytest.mark.promise("applied")]


# The optimizer of a learning rate; one of two in a partition.
KINDS = {
    "sgd": pa.sgd,
    "momentum": lambda lr: pa.sgd(lr, 0.9, 0.5, 0.1),
    "fused sgd": lambda lr: pa.sgd(lr, 0.9, fused=True),
    "adam": lambda lr: pa.adam(lr, maximize=True),
    "adamw": lambda lr: pa.adamw(lr, amsgrad=True),
    "fused adamw": lambda lr: pa.adamw(lr, fused=True),
    "from_torch": lambda lr: pa.from_torch(torch.optim.RMSprop, lr=lr, momentum=0.9),
    "from_torch, no state": lambda lr: pa.from_torch(torch.optim.SGD, lr=lr),
    "chain": lambda lr: pa.chain(pa.clip_by_global_norm(1.0), Count(), pa.adamw(lr)),
    "partition": lambda lr: pa.partition(
        {"bias": pa.sgd(0.1, 0.9), "rest": pa.chain(Count(), pa.adam(lr))}, by_name
    ),
    "partition in a chain": lambda lr: pa.chain(
        Count(), pa.partition({"bias": pa.sgd(lr), "rest": pa.adam(0.1)}, by_name)
    ),
}
OURS = [kind for kind in KINDS if "torch" not in kind]
BAD = (math.nan, math.inf, -math.inf, 1e39)  # the last is finite, and inf in float32
GOOD = 2  # steps before the rate is bad


class Way(NamedTuple):
    """How a rate gets bad: what the optimizer is made with, and what is put into its state.

    A compiler takes no Python number for a rate.
    """

    lr: Callable[[float], Any]
    put: bool = False
    compiles: bool = True


def ready_of(opt, state, params):
    flat = flatten(params)
    return opt.check(state, flat, "state")(state, flat)


def bad_later(bad, count):
    return torch.where(count < GOOD, torch.tensor(0.1).double(), torch.tensor(bad).double())


WAYS = {
    "schedule": Way(lambda bad: lambda count: bad_later(bad, count)),
    "schedule in float32": Way(lambda bad: lambda count: bad_later(bad, count).float()),
    "schedule in float16": Way(lambda bad: lambda count: bad_later(bad, count).half()),
    "joined": Way(
        lambda bad: pa.join_schedules([pa.constant(0.1), lambda _: bad], [GOOD]), compiles=False
    ),
    "number": Way(lambda bad: lambda count: 0.1 if int(count) < GOOD else bad, compiles=False),
    "in the state": Way(lambda bad: 0.1, put=True),
}


def loss(params, batch, buffers):
    value = sum((x * x).sum() for x in optree.tree_leaves(params))
    return (value * batch).mean(), buffers + batch.sum()


def put(opt_state, bad):
    """The state of an optimizer with another rate in it, wherever one stands."""
    paths, leaves, spec = optree.tree_flatten_with_accessor(opt_state, namespace="pureaccum")
    is_rate = [path.codify("").endswith((".lr", "['lr']")) for path in paths]
    assert sum(is_rate) >= 1
    new = [torch.full_like(x, bad) if at else x for at, x in zip(is_rate, leaves, strict=True)]
    return optree.tree_unflatten(spec, new)


@cache
def make(kind, way, bad, how):
    return pa.make_step(
        loss,
        KINDS[kind](WAYS[way].lr(bad)),
        microbatch_size=2,
        buffers="sequential",
        loss_scale=pa.dynamic_loss_scale(2.0, growth_interval=1),
        compile={"backend": "eager"} if how == "compiled" else False,
        donate=how == "donated",
    )


BATCH = torch.tensor([1.0, 2.0, 3.0])


def check(kind, way, bad, how):
    step = make(kind, way, bad, how)
    state = step.init(make_params(), buffers=torch.zeros(()))
    for _ in range(GOOD):
        state, info = step(state, BATCH)
        assert info.applied
    if WAYS[way].put:
        state = state._replace(opt_state=put(state.opt_state, bad))
    for n in range(2):
        before = clones(state)
        state, info = step(state, BATCH)
        assert not info.applied
        assert torch.isfinite(info.loss)
        assert torch.isfinite(info.grad_norm)
        for name in ("params", "buffers", "opt_state", "key", "applied"):
            assert_trees_bitwise_equal(getattr(state, name), getattr(before, name))
        assert state.attempts == GOOD + n + 1
        assert state.samples == before.samples + 3
        # the gradients were finite at that scale, which is all that a scale is about
        assert state.loss_scale.scale == 2 * before.loss_scale.scale
    if WAYS[way].put:  # and once the rate is good again, nothing is lost
        state = state._replace(opt_state=put(state.opt_state, 0.1))
        want = step.init(make_params(), buffers=torch.zeros(()))
        for _ in range(GOOD + 1):
            want, _ = step(want, BATCH)
        state, info = step(state, BATCH)
        assert info.applied
        assert_trees_bitwise_equal((state.params, state.opt_state), (want.params, want.opt_state))


@pytest.mark.parametrize(
    ("kind", "way", "how"),
    [
        (kind, way, how)
        for kind, way, how in itertools.product(KINDS, WAYS, ["kept", "donated"])
        # Every kind by its schedule and by its state, every way in two kinds, donated either.
        if (way in ("schedule", "in the state") and (how == "kept" or way == "schedule"))
        or (kind in ("sgd", "adamw") and how == "kept")
    ],
)
def test_a_bad_rate_is_a_step_not_applied(kind, way, how):
    for bad in BAD:
        check(kind, way, bad, how)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "way", "bad"),
    [
        ("momentum", "schedule", math.nan),
        *(
            (kind, way, bad)
            for kind, way, bad in [
                ("partition in a chain", "in the state", math.nan),
                *(("adamw", way, 1e39) for way in WAYS if WAYS[way].compiles),
            ]
        ),
    ],
)
def test_a_bad_rate_is_a_compiled_step_not_applied(kind, way, bad):
    check(kind, way, bad, "compiled")


@pytest.mark.nightly
def test_a_bad_rate_is_a_step_not_applied_by_inductor():
    step = pa.make_step(
        lambda p, x: (p * x).mean(), pa.adamw(WAYS["schedule"].lr(math.nan)), compile=True
    )
    state = step.init(torch.ones(3))
    for n in range(4):
        before = clones(state)
        state, info = step(state, torch.ones(2, 3))
        assert info.applied == (n < GOOD)
        if n >= GOOD:
            assert_trees_bitwise_equal(state.params, before.params)


@pytest.mark.promise("ensembles")
@given(st.lists(st.sampled_from([0.1, 0.2, *BAD]), min_size=1, max_size=5))
def test_members_of_an_ensemble_have_rates_of_their_own(rates):
    """Under vmap a bad rate stops its own member alone."""
    step = pa.make_step(lambda p, x: (p * x).mean(), pa.adamw(0.1))
    state, batch = step.init(torch.tensor([1.0, 2.0])), torch.ones(2, 2)
    members = [state._replace(opt_state=put(state.opt_state, rate)) for rate in rates]
    new, info = torch.func.vmap(step, in_dims=(0, None))(pa.stack(members), batch)
    assert info.applied.tolist() == [0 < rate < 1 for rate in rates]
    for i, rate in enumerate(rates):
        if not info.applied[i]:
            assert_trees_bitwise_equal(pa.unstack(new)[i].params, state.params)
        else:
            assert (pa.unstack(new)[i].params != state.params).all(), rate


def test_a_rate_that_is_learned_has_gradient_zero_where_it_is_bad():
    """A rate that is learned: where it is bad the parameters do not depend on it."""

    def after(rate):
        step = pa.make_step(lambda p, x: (p * x).mean(), pa.sgd(rate))
        new, _ = step(step.init(torch.ones(2)), torch.ones(2, 2))
        return new.params.sum()

    for rate, want in ((0.5, -1.0), (math.nan, 0.0), (math.inf, 0.0)):
        grad, value = torch.func.grad_and_value(after)(torch.tensor(rate))
        assert (grad, value) == (want, 1.5 if want else 2.0)


@pytest.mark.parametrize("bad", BAD)
def test_a_stream_of_microbatches_is_no_other_step(bad):
    step = pa.make_step(lambda p, x: (p * x).mean(), pa.sgd(lambda _: bad, 0.9))
    state = step.init(torch.ones(2))
    window = step.update(state, step.begin(state), torch.ones(2, 2))
    new, info = step.apply(state, window)
    assert not info.applied
    assert_trees_bitwise_equal((new.params, new.opt_state), (state.params, state.opt_state))


# What it costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OURS)
def test_a_schedule_is_asked_once_a_step(kind):
    calls = []

    def lr(count):
        calls.append(count)
        return torch.full((), 0.1, dtype=torch.float64)

    step = pa.make_step(lambda p, x: p["w"].sum() * x.mean(), KINDS[kind](lr))
    state = step.init(make_params())
    calls.clear()
    for n in range(3):
        state, _ = step(state, BATCH)
        assert len(calls) == n + 1


@pytest.mark.promise("launches")
@pytest.mark.parametrize("bad", BAD)
def test_a_rate_on_a_device_is_not_waited_for(bad):
    step = pa.make_step(lambda p, x: (p * x).mean(), pa.adamw(lambda _: unread(torch.tensor(bad))))
    state = step.init(torch.ones(2))
    new, info = step(state, torch.ones(2, 2))
    assert not info.applied.as_subclass(Tensor)
    assert_trees_bitwise_equal(new.params.as_subclass(Tensor), state.params)


@pytest.mark.mechanism
@pytest.mark.parametrize("kind", OURS)
def test_a_number_costs_a_device_nothing(kind):
    """On the meta device: what is judged on the host makes no tensor there."""
    found = []
    for lr in (0.1, math.nan):
        opt = KINDS[kind](0.1)
        params = {"w": torch.ones(3, device="meta"), "b": torch.ones(3, device="meta")}
        state = put(opt.init(params), lr)
        with Copies() as copies:
            found.append(ready_of(opt, state, params).sound)
        assert not copies.seen
    assert found == [True, False]


@pytest.mark.mechanism
@pytest.mark.parametrize("make", [pa.sgd, pa.adam, pa.adamw])
def test_a_transform_moves_a_number_to_a_device_once(make):
    """For the judgement, and for the parameters of all dtypes."""
    opt = make(0.1)
    params = [torch.ones(3, dtype=x, device="meta") for x in (torch.float32, torch.bfloat16)]
    given = [pa.stack([tree, tree]) for tree in (opt.init(params), params)]

    def stepped(state, params):
        ready = ready_of(opt, state, params)
        return ready.apply(flatten(params)[0], ready.sound, False, None)

    with Copies() as copies:
        torch.func.vmap(stepped)(*given)
    assert sum(copy.away for copy in copies.seen) == 1


# Outside of a step, and at its door -------------------------------------------------------


def test_an_optimizer_alone_computes_with_what_it_is_given():
    """As optax does: without an info nobody would see that a step was left out."""
    for make in (pa.sgd, pa.adam, pa.adamw):
        opt, params = make(lambda count: count * math.nan), torch.ones(2)
        new, state = opt.apply(torch.ones(2), opt.init(params), params)
        assert new.isnan().all()
        assert state.steps == 1


@pytest.mark.promise("errors")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "partition" not in kind])
def test_a_rate_that_the_parameters_cannot_hold_is_refused(kind):
    params = {"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}
    opt = KINDS[kind](1e308)
    words = "lr is 1e+308", "params['b'] in torch.float32", "at most 3.4e+38"
    with refused(ValueError, *words, given=params):
        opt.init(params)
    opt.init({"w": params["w"]})
    with refused(ValueError, "lr is 70000.0", "params in torch.float16", "at most 6.55e+04"):
        KINDS[kind](70000.0).init(torch.ones(2, dtype=torch.float16))


@pytest.mark.mechanism
def test_each_label_of_a_partition_has_dtypes_of_its_own():
    params = {"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}
    for bias, fits in ((0.1, True), (1e308, False)):
        opt = pa.partition({"bias": pa.sgd(pa.constant(bias)), "rest": pa.sgd(1e300)}, by_name)
        assert ready_of(opt, opt.init(params), params).sound is fits


def test_a_rate_is_judged_by_the_dtypes_of_its_own_label():
    params = {"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}
    for bias, fits in ((0.1, True), (1e308, False)):
        opt = pa.partition({"bias": pa.sgd(pa.constant(bias)), "rest": pa.sgd(1e300)}, by_name)
        step = pa.make_step(lambda p, x: (p["w"].sum() + p["b"].sum()) * x.mean(), opt)
        state = step.init(params)
        new, info = step(state, BATCH)
        assert info.applied == fits
        if not fits:
            assert_trees_bitwise_equal(new.params, params)


@pytest.mark.promise("errors")
def test_rates_larger_than_any_float_are_refused():
    with refused(ValueError, "lr is ", "finite and not negative"):
        pa.sgd(10**400)
    with refused(ValueError, "value is ", "finite and not negative"):
        pa.constant(10**400)
