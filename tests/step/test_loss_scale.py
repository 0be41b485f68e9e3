"""The loss scale beside torch's GradScaler, and beside a model with floor and hysteresis."""

import inspect
from ctypes import c_float
from typing import NamedTuple

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.exactly import copied


pytestmark = [pytest.mark.laws, pytest.mark.promise("loss scale")]
SMALLEST, LARGEST = 2.0**-149, torch.finfo(torch.float32).max
NO_BOUNDS = {"min_scale": SMALLEST, "max_scale": LARGEST}

powers = st.integers(-149, 127).map(lambda e: 2.0**e)
scales = powers | st.floats(SMALLEST, LARGEST, width=32)
growths = st.sampled_from([2.0, 2.0, 4.0, 2.0**40, 1.001, 1e30])
backoffs = st.sampled_from([0.5, 0.5, 0.25, 2.0**-40, 0.999, 1e-30])
intervals = st.integers(1, 4)
flags = st.lists(st.booleans(), max_size=12)


def rounded(x):
    """The nearest float32."""
    return c_float(x).value


# Beside GradScaler ----------------------------------------------------------------------


def test_options_that_are_not_said_are_as_in_torch():
    ours = inspect.signature(pa.dynamic_loss_scale).parameters
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # it has no scale before
    assert {name: ours[name].default for name in list(ours)[:4]} == {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }


class Scaling(RuleBasedStateMachine):
    """Ours, the tensor transitions of GradScaler, and a GradScaler that trains a parameter.

    Nothing binds: no hysteresis, and no overflow where less than the smallest number would be
    left. Real steps are taken where the reciprocal of the scale is finite.
    """

    @initialize(scale=scales, grow=growths, back=backoffs, interval=intervals, fused=st.booleans())
    def begin(self, scale, grow, back, interval, fused):
        self.options = (grow, back, interval)
        self.ours = pa.dynamic_loss_scale(scale, *self.options, **NO_BOUNDS)
        self.state = self.ours.init()
        self.scale, self.tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
        self.scaler = torch.amp.GradScaler("cpu", scale, *self.options)
        self.w = nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.w], lr=1.0, fused=fused)

    def room(self):
        return rounded(self.scale.item() * self.options[1]) >= SMALLEST

    def move(self, finite):
        """One update of ours, and of torch's tensors."""
        before = self.state
        bits = copied(before)
        self.state = self.ours.update(before, torch.tensor(finite))
        assert_trees_bitwise_equal(before, bits)
        assert not {x.data_ptr() for x in before} & {x.data_ptr() for x in self.state}
        found = torch.tensor(float(not finite))
        torch._amp_update_scale_(self.scale, self.tracker, found, *self.options)

    @rule(flags=flags)
    def transitions(self, flags):
        """Tensors only; GradScaler goes on from there."""
        for finite in flags:
            self.move(finite or not self.room())
        held = self.scaler.state_dict()
        held |= {"scale": self.state.scale.item(), "_growth_tracker": self.state[1].item()}
        self.scaler.load_state_dict(held)

    @rule(
        x=st.tuples(*[st.integers(1, 8).map(float)] * 2),
        poison=st.sampled_from([None, None, None, "inf", "-inf", "nan"]),
        half=st.booleans(),
    )
    @precondition(lambda self: self.scale >= 2.0**-126)
    def step(self, x, poison, half):
        """The same gradient on both sides, which a large scale may overflow, in fp16 the sooner."""
        poisoned = poison is not None and self.room()
        data = torch.tensor([float(poison) if poisoned else x[0], x[1]])
        dtype = torch.float16 if half and self.scale >= 2.0**-14 else torch.float32

        def loss(w):
            return (w.to(dtype) * data.to(dtype)).sum().float()

        value, pull = torch.func.vjp(loss, self.w.detach())
        (scaled,) = pull(self.ours.scale(self.state, torch.ones_like(value)))
        grads = self.ours.unscale(self.state, scaled)
        finite = bool(pa.all_finite(grads))

        before = self.w.detach().clone()
        self.optimizer.zero_grad()
        self.scaler.scale(loss(self.w)).backward()
        assert torch.equal(self.w.grad.isfinite(), scaled.isfinite())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert torch.equal(self.w, before) is not finite
        if finite and torch.frexp(self.scale).mantissa == 0.5:  # a power of two: exact
            assert torch.equal(grads, data)
            assert torch.equal(self.w, -data)
        self.w.data.zero_()
        self.move(finite)

    @invariant()
    def all_agree(self):
        assert torch.equal(self.state.scale, self.scale)
        assert torch.equal(self.state.growth_tracker, self.tracker)
        assert self.state.hysteresis_tracker.dtype == torch.int32
        assert self.scaler.get_scale() == self.scale.item()
        assert self.scaler.state_dict()["_growth_tracker"] == self.tracker.item()


TestScaling = Scaling.TestCase
TestScaling.settings = settings(
    # at night five times as many: this is the machine that says "as GradScaler does"
    max_examples=settings.default.max_examples
    * (5 if settings.default.max_examples >= 1000 else 1),
    stateful_step_count=20,
)


# Beside a model -------------------------------------------------------------------------


class Options(NamedTuple):
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    hysteresis: int

    def loss_scale(self):
        return pa.dynamic_loss_scale(**self._asdict())


@st.composite
def options(draw):
    low, first, high = sorted(draw(st.tuples(scales, scales, scales)))
    return Options(
        first, draw(growths), draw(backoffs), draw(intervals), low, high, draw(st.integers(1, 3))
    )


def model(options, flags):
    """The rule in Python numbers; a float32 is the double nearest to it."""
    scale, tracker, budget = options.init_scale, 0, options.hysteresis
    states = [(scale, tracker, budget)]
    for finite in flags:
        if finite:
            tracker += 1
            if tracker == options.growth_interval:
                tracker, budget = 0, options.hysteresis
                grown = rounded(scale * options.growth_factor)
                scale = grown if grown != float("inf") else scale
        else:
            tracker, budget = 0, max(budget - 1, 0)
            if budget == 0:
                scale = rounded(scale * options.backoff_factor)
        scale = min(max(scale, options.min_scale), options.max_scale)
        states.append((scale, tracker, budget))
    return states


def run(loss_scale, state, flags):
    states = [state]
    for finite in flags:
        states.append(loss_scale.update(states[-1], torch.tensor(finite)))
    return states


def numbers(state):
    return tuple(x.item() for x in state)


long = st.lists(st.booleans(), max_size=30)


@given(options(), long)
def test_floor_ceiling_and_hysteresis_are_those_of_the_model(options, flags):
    loss_scale = options.loss_scale()
    states = run(loss_scale, loss_scale.init(), flags)
    assert [numbers(state) for state in states] == model(options, flags)
    assert all(options.min_scale <= state.scale <= options.max_scale for state in states)


def test_each_option_does_what_it_says():
    """The model could share a fault with the code; a reader sees these numbers."""
    loss_scale = pa.dynamic_loss_scale(4.0, 2.0, 0.5, 2, min_scale=2.0, max_scale=8.0, hysteresis=2)
    flags = [False, False, False, True, True, True, True, False, True, False, False]
    scales = [4.0, 4.0, 2.0, 2.0, 2.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0, 2.0]
    budget = [2, 1, 0, 0, 0, 2, 2, 2, 1, 1, 0, 0]
    states = run(loss_scale, loss_scale.init(), flags)
    assert [state.scale.item() for state in states] == scales
    assert [state.hysteresis_tracker.item() for state in states] == budget


@pytest.mark.parametrize("most", [8.0, LARGEST])
def test_overflows_are_counted_anew_where_only_a_ceiling_stops_the_growth(most):
    """The ceiling is the option, or the largest number."""
    loss_scale = pa.dynamic_loss_scale(most, growth_interval=1, max_scale=most, hysteresis=2)
    states = run(loss_scale, loss_scale.init(), [False, True, False, False])
    assert [state.scale.item() / most for state in states] == [1, 1, 1, 1, 0.5]


def test_a_state_from_a_longer_interval_grows_at_once():
    before = pa.dynamic_loss_scale(growth_interval=100)
    state = run(before, before.init(), [True] * 50)[-1]
    after = pa.dynamic_loss_scale(growth_interval=10)
    assert numbers(after.update(state, torch.tensor(True))) == (2.0**17, 0, 1)


@given(scales, flags)
def test_a_static_scale_never_changes(scale, flags):
    loss_scale = pa.static_loss_scale(scale)
    first = loss_scale.init()
    states = run(loss_scale, first, flags)
    for state in states:
        assert_trees_bitwise_equal(state, first)
    assert first.scale == scale
    assert len({x.data_ptr() for state in states for x in state}) == 3 * len(states)


# As a pure function of tensors ----------------------------------------------------------


DYNAMIC = pa.dynamic_loss_scale(8.0, growth_interval=2, min_scale=2.0, max_scale=32.0, hysteresis=2)
KINDS = pytest.mark.parametrize(
    "loss_scale", [DYNAMIC, pa.static_loss_scale(8.0)], ids=["dynamic", "static"]
)


def stacked(states):
    return pa.LossScaleState(*map(torch.stack, zip(*states, strict=True)))


@given(options(), st.lists(flags, min_size=1, max_size=4), st.data())
def test_many_states_update_at_once_under_vmap(options, histories, data):
    loss_scale = options.loss_scale()
    states = [run(loss_scale, loss_scale.init(), history)[-1] for history in histories]
    finite = torch.tensor([data.draw(st.booleans()) for _ in states])
    got = torch.func.vmap(loss_scale.update)(stacked(states), finite)
    assert_trees_bitwise_equal(got, stacked(list(map(loss_scale.update, states, finite))))

    shared = torch.func.vmap(loss_scale.update, (None, 0))(states[0], finite)
    assert_trees_bitwise_equal(
        shared, stacked([loss_scale.update(states[0], flag) for flag in finite])
    )

    x = torch.arange(3.0 * len(states)).reshape(-1, 3)
    for there in (loss_scale.scale, loss_scale.unscale):
        got = torch.func.vmap(there)(stacked(states), x)
        assert_trees_bitwise_equal(got, torch.stack(list(map(there, states, x))))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_loss_scale_compiles_into_one_graph(loss_scale, backend):
    """Scale, unscale and update compile into one graph, the same for every state."""

    def step(state, x):
        grads = loss_scale.unscale(state, {"x": loss_scale.scale(state, x)})
        return grads, loss_scale.update(state, pa.all_finite(grads))

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    state = loss_scale.init()
    for poison in [1.0, 2.0, float("inf"), float("nan"), 3.0, float("inf"), 4.0, 5.0, 6.0]:
        x = torch.tensor([poison, 2.0])
        want = step(state, x)
        assert_trees_bitwise_equal(compiled(state, x), want)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_trees_bitwise_equal(compiled(state, x), want)
        state = want[1]


@KINDS
def test_a_state_is_a_tree_with_all_its_fields(loss_scale):
    state = loss_scale.init()
    assert [x.dtype for x in state] == [torch.float32, torch.int32, torch.int32]
    assert all(x.shape == () for x in state)
    ways = (
        (optree.tree_flatten, lambda leaves, spec: optree.tree_unflatten(spec, leaves)),
        (pytree.tree_flatten, pytree.tree_unflatten),
    )
    for flatten, unflatten in ways:
        leaves, spec = flatten(state)
        back = unflatten(leaves, spec)
        assert len(leaves) == 3
        assert isinstance(back, pa.LossScaleState)
        assert_trees_bitwise_equal(back, state)


@KINDS
def test_no_call_changes_what_it_is_given(loss_scale):
    state, tree = loss_scale.init(), {"w": torch.ones(2), "half": torch.ones((), dtype=torch.half)}
    with unchanged(state, tree):
        loss_scale.unscale(state, tree)
        loss_scale.scale(state, tree["w"])
        loss_scale.update(state, torch.tensor(False))


@KINDS
def test_a_state_lives_where_init_is_told(loss_scale):
    assert {x.device.type for x in loss_scale.init("meta")} == {"meta"}
    meta = loss_scale.init(torch.device("meta"))
    flag = torch.ones((), dtype=torch.bool, device="meta")
    assert {x.device.type for x in loss_scale.update(meta, flag)} == {"meta"}  # nobody looks at it


def test_the_scale_can_ride_on_the_cotangent():
    """``pull(scale)`` has the bits of the gradient of ``scale * loss``."""
    loss_scale = pa.dynamic_loss_scale()
    state = loss_scale.init()
    w, x = torch.tensor([0.3, -1.7]), torch.tensor([[1.1, 2.3], [0.7, -0.2]])

    def loss(w):
        return torch.tanh(x @ w).mean()

    value, pull = torch.func.vjp(loss, w)
    (scaled,) = pull(loss_scale.scale(state, torch.ones_like(value)))
    assert torch.equal(scaled, torch.func.grad(lambda w: loss_scale.scale(state, loss(w)))(w))
    assert torch.equal(loss_scale.unscale(state, scaled), torch.func.grad(loss)(w))


def test_a_batch_of_no_weight_teaches_the_loss_scale_nothing():
    """It says nothing of overflow: the scale neither grows nor counts it."""

    def loss(w, batch):
        x, mask = batch
        return pa.Weighted((mask * (w * x)).sum(), mask.sum())

    scaling = pa.dynamic_loss_scale(4.0, growth_interval=2)
    step = pa.make_step(loss, pa.sgd(0.5), microbatch_size=2, loss_scale=scaling)
    state = step.init(torch.tensor(1.0))
    x, seen = torch.ones(4), []
    for mask in (1.0, 0.0, 0.0, 1.0):
        state, info = step(state, (x, torch.full_like(x, mask)))
        assert bool(info.applied) == bool(mask)
        seen.append((state.loss_scale.scale.item(), state.loss_scale.growth_tracker.item()))
    assert seen == [(4.0, 1), (4.0, 1), (4.0, 1), (8.0, 0)]
