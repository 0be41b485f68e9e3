"""``ema.update(donate=True)``: the same bits, in the memory of the state that is given up."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum._optim import updates
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import generator
from tests.optimizers import clones, leaves, normal, unread
from tests.refusals import saying


pytestmark = [pytest.mark.purity, pytest.mark.promise("donation")]
DTYPES = {
    "alike": [torch.float32] * 3,
    "mixed": [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64],
}
DECAYS = {
    "number": 0.9,
    "function": lambda n: ((1 + n.double()) / (10 + n)).clamp(max=0.9),
    "of a device": lambda n: unread(torch.tensor(0.9, dtype=torch.float64)),
}
FLAGS = {
    "none": None,
    "applied": torch.tensor(True),
    "not applied": torch.tensor(False),
    "applied, unread": unread(torch.tensor(True)),
    "not applied, unread": unread(torch.tensor(False)),
}
GIVEN_UP = "given up with donate=True"


def params_of(seed, dtypes=DTYPES["mixed"]):
    random = generator(seed)
    made = [(8 * normal((2, 3), random)).to(dtype) for dtype in dtypes]
    return {"all": made, "0-d": normal((), random), "empty": torch.zeros(0)}


def begun(average, updates=1, dtypes=DTYPES["mixed"]):
    """A state after so many updates."""
    state = average.init(params_of(0, dtypes))
    for seed in range(updates):
        state = average.update(state, params_of(seed + 1, dtypes))
    return state


def told(tree):
    """Its leaves, which may now be read."""
    return [x.as_subclass(torch.Tensor) for x in leaves(tree)]


def is_donated(tensor):
    try:
        return tensor.dim() < 0
    except RuntimeError as error:
        return GIVEN_UP in str(error)


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_donation_changes_no_bit_and_makes_no_second_average(decay, flag, dtypes, monkeypatch):
    """Whatever the host knows: of the flag, of the decay, and whether it is the first update."""
    monkeypatch.setattr(updates, "GROUP", 32)
    average = pa.ema(decay)
    for count, hidden in itertools.product((0, 1, 2), (False, True)):
        state, params = begun(average, count, dtypes), params_of(7, dtypes)
        if hidden:
            state = state._replace(updates=unread(state.updates))
        want = average.update(state, params, flag)
        places = [x.data_ptr() for x in leaves(state.params)]
        with unchanged(params, flag):
            got = average.update(state, params, flag, donate=True)
        assert [x.data_ptr() for x in leaves(got.params)] == places
        assert_trees_bitwise_equal(told(got), told(want))


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_applied_leaves_the_donated_bits(flag, number):
    average = pa.ema(0.9)
    state = begun(average)
    before, poison = clones(state), params_of(3)
    for x in leaves(poison):
        x.fill_(number if x.is_floating_point() else 1)
    got = told(average.update(state, poison, flag, donate=True))
    if flag is None or flag.as_subclass(torch.Tensor):
        assert not torch.isfinite(got[0]).any()
    else:
        assert_trees_bitwise_equal(got, leaves(before))


@given(
    st.lists(st.tuples(st.sampled_from([None, True, False]), st.booleans()), max_size=6), seeds()
)
def test_only_what_is_donated_is_gone(steps, seed):
    """Any history: each state of it is given up as a whole, or has its bits and memory."""
    average = pa.ema(0.9)
    alive, gone = [average.init(params_of(seed))], []
    for n, (applied, donate) in enumerate(steps):
        state, params = alive[-1], params_of(seed + n)
        if donate:
            gone.append(alive.pop())
        flag = None if applied is None else torch.tensor(applied)
        with unchanged([*alive], params, flag):
            alive.append(average.update(state, params, flag, donate=donate))
        assert not any(map(is_donated, leaves(alive)))
        assert all(map(is_donated, leaves(gone)))


@pytest.mark.parametrize("use", [lambda x: x + 1, torch.clone, lambda x: x.shape])
def test_a_state_that_was_given_up_says_so(use):
    average, params = pa.ema(0.9), params_of(1)
    state = begun(average)
    average.update(state, params, donate=True)
    for x in leaves(state):
        with saying(RuntimeError, GIVEN_UP, "Use the returned state"):
            use(x)
    for donate in (False, True):
        with saying(RuntimeError, GIVEN_UP), unchanged(params):
            average.update(state, params, donate=donate)


def test_leaves_that_share_memory_are_averaged_once():
    """One tensor twice; an alias of it, as ``state_dict()`` gives tied weights; a part of it."""
    average = pa.ema(0.5)
    aliases = (lambda x: x, torch.detach, lambda x: x[1:])
    for alias, flag in itertools.product(aliases, FLAGS.values()):
        one = torch.tensor([1.0, -2.0])
        state = average.init({"a": one, "b": alias(one)})
        state = average.update(state, {"a": one, "b": alias(one)})
        state = state._replace(params={"a": one, "b": alias(one)})
        latest = {"a": torch.zeros(2), "b": torch.zeros(len(alias(one)))}
        want = average.update(state, latest, flag)
        assert_trees_bitwise_equal(
            told(average.update(state, latest, flag, donate=True)), told(want)
        )


def test_an_error_before_anything_is_written_loses_nothing():
    def decay(n):
        raise ArithmeticError

    for average, params, flag in (
        (pa.ema(decay), params_of(1), None),
        (pa.ema(0.9), params_of(1, DTYPES["alike"]), None),
        (pa.ema(0.9), params_of(1), torch.tensor(1.0)),
    ):
        state = begun(pa.ema(0.9))
        with unchanged(state, params), pytest.raises((TypeError, ValueError, ArithmeticError)):
            average.update(state, params, flag, donate=True)


class Lost(torch.Tensor):
    """Parameters that can no longer be read."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.lerp:
            raise MemoryError
        return super().__torch_function__(func, types, args, kwargs)


def test_after_an_error_in_the_middle_all_of_a_donated_state_says_so():
    average, params = pa.ema(0.9), params_of(1)
    state = begun(average)
    last = params["empty"].as_subclass(Lost)
    with pytest.raises(MemoryError):
        average.update(state, params | {"empty": last}, donate=True)
    for x in leaves(state):
        with saying(RuntimeError, "failed in the middle"):
            x.clone()


# Where nobody may write -----------------------------------------------------------------


def through(transform):
    """An update that is donated, or is not, under a transform; and the state that it was given."""

    def run(donate):
        average, params = pa.ema(0.9), params_of(7, DTYPES["alike"])
        state = begun(average, dtypes=DTYPES["alike"])
        update = lambda s, p: average.update(s, p, donate=donate)  # noqa: E731
        return transform(update, state, params), state

    return run


def vmapped(update, state, params):
    return torch.func.vmap(update)(pa.stack([state, state]), pa.stack([params, params]))


def differentiated(update, state, params):
    return torch.func.grad(lambda s, p: update(s, p).params["0-d"], argnums=1)(state, params)


def pushed(update, state, params):
    return torch.func.jvp(lambda p: update(state, p).params, (params,), (params,))


def forward_ad(update, state, params):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(params["0-d"], torch.ones(()))
        new = update(state, {**params, "0-d": dual}).params
        tangent = torch.autograd.forward_ad.unpack_dual(new.pop("0-d")).tangent
    return new, tangent


def compiled(update, state, params):
    torch.compiler.reset()
    return torch.compile(update, fullgraph=True, backend="aot_eager")(state, params)


@pytest.mark.parametrize("transform", [vmapped, differentiated, pushed, forward_ad, compiled])
def test_under_transforms_donation_does_nothing(transform):
    run = through(transform)
    (want, _), (got, state) = run(False), run(True)
    assert_trees_bitwise_equal(leaves(got), leaves(want))
    assert not any(map(is_donated, leaves(state)))


def test_states_of_inference_mode_are_like_any_other():
    found = []
    for made, updated, donate in itertools.product((False, True), repeat=3):
        average = pa.ema(0.9)
        with torch.inference_mode(made):
            state = begun(average)
        with torch.inference_mode(updated):
            state = average.update(state, params_of(5), donate=donate)
        found.append(average.update(state, params_of(6)))
    for other in found[1:]:
        assert_trees_bitwise_equal(other, found[0])


def test_no_graph_is_recorded():
    average, params = pa.ema(0.9), [torch.ones(2, requires_grad=True)]
    state = average.update(average.init(params), params)
    own = state._replace(params=[state.params[0].requires_grad_()])
    assert not any(x.requires_grad for x in leaves(average.update(own, params, donate=True)))
