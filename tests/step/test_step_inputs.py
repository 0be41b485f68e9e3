"""A step changes nothing that it was given; with ``donate=True`` only what it was given up."""

import itertools

import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import ENGINES, NONFINITE, BoomError, Explodes, make_batch, make_params, mean_loss
from tests.dropped import is_dropped
from tests.exactly import copied, same
from tests.problems import in_a_window as streamed
from tests.step.problems import EAGER, leaves


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
GIVEN_UP = r"given up with donate=True.*Use the returned state"
OPTIMIZERS = {
    "sgd": pa.sgd(0.1),
    "momentum": pa.sgd(0.1, momentum=0.9),
    "fused sgd": pa.sgd(0.1, momentum=0.9, fused=True),
    "adamw": pa.adamw(pa.linear_warmup(0.1, 3), amsgrad=True),
    "fused adam": pa.adam(0.1, fused=True),
    "chain": pa.chain(
        pa.clip_by_global_norm(0.1),
        pa.partition({"a": pa.sgd(0.1), "b": pa.adam(0.1)}, lambda p: "ab"[p == "w"]),
    ),
    "from_torch": pa.from_torch(torch.optim.RMSprop, lr=0.1),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
engines = pytest.mark.parametrize("engine", ENGINES)
donations = pytest.mark.parametrize("donate", [False, True])


def is_gone(tree):
    """Every leaf of it refuses with our words."""
    for leaf in leaves(tree):
        with pytest.raises(RuntimeError, match=GIVEN_UP):
            leaf + 1
    return True


# Arguments --------------------------------------------------------------------------------


def module_step(**options):
    """A module with parameters, buffers and a mode, and a loss that draws."""
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    fn = pa.functional(module)

    def loss(params, batch, buffers, keys):
        out, new = fn.apply(params, buffers, batch["x"])
        return ((out[:, 0] - batch["y"]) ** 2).mean(), new

    return module, fn, pa.make_step(loss, microbatch_size=2, keys=True, **options)


@engines
@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("buffers", ["freeze", "sequential", "pooled"])
def test_a_module_and_its_state_stay_what_they_were(engine, nonfinite, buffers):
    """Its dropout draws from the global generator, as under torch.func: that alone moves."""
    module, fn, step = module_step(
        optimizer=pa.adamw(0.1),
        buffers=buffers,
        engine=engine,
        nonfinite=nonfinite,
        loss_scale=pa.dynamic_loss_scale(8.0),
        check=False,  # each microbatch is normalised by itself
    )
    batch = make_batch(4)
    with unchanged(module, fn.params, fn.buffers):
        state = step.init(fn.params, fn.buffers)
    with unchanged(module, fn.params, fn.buffers, state, batch, draws=True):
        new, _ = step(state, batch)
        other, _ = streamed(step, new, list(pa.microbatches(batch, 2)))
    with unchanged(module, state, new, other):
        assert not same(new.params, other.params)


@every_optimizer
@engines
@pytest.mark.parametrize("poison", [None, torch.nan])
def test_no_argument_changes_and_nothing_is_drawn(optimizer, engine, poison):
    """Applied or not; small leaves and a large one; bits, versions and modes."""
    step = pa.make_step(
        mean_loss,
        optimizer,
        microbatch_size=2,
        engine=engine,
        policy=pa.Policy(autocast=torch.bfloat16),
        loss_scale=pa.dynamic_loss_scale(8.0),
    )
    params, batch = make_params(), make_batch(5)
    with unchanged(params):
        state = step.init(params)
    if poison is not None:
        batch["y"][-1] = poison
    parts = list(pa.microbatches(batch, 2))
    with unchanged(params, state, batch, parts):
        new, info = step(state, batch)
        windows = [step.begin(new)]
    assert bool(info.applied) is (poison is None)
    for part in parts:
        with unchanged(windows, state, new, part):
            window = step.update(new, windows[-1], part)
        windows.append(window)
    with unchanged(windows, state, new, info):
        again, _ = step.apply(new, windows[-1])
        same_again, _ = step.apply(new, windows[-1])
    assert_trees_bitwise_equal(again, same_again)


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize(
    ("mode", "compile"),
    [
        *((mode, False) for mode in MODES),
        *(pytest.param(mode, EAGER, marks=pytest.mark.nightly) for mode in MODES),
    ],
)
def test_the_mode_around_it_does_not_matter(mode, compile):
    """Nor does the first call, which tries the loss out, and compiles it where it is to."""
    step = pa.make_step(mean_loss, pa.adamw(0.1), microbatch_size=2, compile=compile)
    params, batch = make_params(), make_batch(5)
    state, parts = step.init(params), list(pa.microbatches(batch, 2))
    for _ in range(2):
        with unchanged(params, state, batch):
            want, _ = step(state, batch)
    with MODES[mode](), unchanged(params, state, batch):
        got, _ = step(state, batch)
        window = step.update(state, step.begin(state), parts[0])
        for part in parts[1:]:
            window = step.update(state, window, part)
        other, _ = step.apply(state, window)
    assert_trees_bitwise_equal(got, want)
    torch.testing.assert_close(other.params, want.params)
    assert not any(x.requires_grad or x.is_inference() for x in leaves((got, other, window)))


def test_parameters_that_require_grad_stay_out_of_it():
    """No graph reaches back from the state into the module."""
    step = pa.make_step(mean_loss, pa.adamw(0.1), microbatch_size=2)
    params = {name: x.requires_grad_() for name, x in make_params().items()}
    with unchanged(params):
        state = step.init(params)
        new, info = step(state, make_batch(5))
    assert not any(x.requires_grad or x.grad_fn for x in leaves((state, new, info)))


# Donation ---------------------------------------------------------------------------------


@pytest.mark.promise("donation")
@every_optimizer
@engines
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_all_of_a_donated_state_is_gone_and_the_new_one_is_right(optimizer, engine, nonfinite):
    """Whole and streamed, applied and not."""

    def with_all(params, batch, buffers, keys):
        new = {"n": buffers["n"] + 1, "still": buffers["still"]}
        return mean_loss(params, batch), (new, {"x": batch["x"], "keys": keys})

    def make(donate):
        return pa.make_step(
            with_all,
            optimizer,
            has_aux=True,
            microbatch_size=2,
            nonfinite=nonfinite,
            engine=engine,
            buffers="sequential",
            keys=True,
            loss_scale=pa.dynamic_loss_scale(8.0, growth_interval=1),
            donate=donate,
        )

    keeps, gives = make(donate=False), make(donate=True)
    held = {"n": torch.tensor(0), "still": torch.tensor([1.0, 2.0])}
    params, batch, bad = make_params(), make_batch(5), make_batch(5)
    bad["y"][:] = torch.nan
    kept, given = keeps.init(params, held), gives.init(params, held)
    infos = []
    for part in (batch, bad, batch):
        with unchanged(params, held, batch, infos):
            old = given
            kept, what = keeps(kept, part)
            given, info = gives(old, part)
            assert is_gone(old)
            assert_trees_bitwise_equal((given, info), (kept, what))

            parts, windows = list(pa.microbatches(part, 2)), [gives.begin(given)]
            kept_window = keeps.begin(kept)
            for one in parts:
                window, aux = gives.update(given, windows[-1], one)
                kept_window, other = keeps.update(kept, kept_window, one)
                assert is_gone(windows[-1])
                assert_trees_bitwise_equal(window, kept_window)
                assert_trees_bitwise_equal(aux, other)
                windows.append(window)
            old = given
            given, last = gives.apply(given, windows[-1])
            kept, what = keeps.apply(kept, kept_window)
            assert is_gone(old)
            assert is_gone(windows)
            assert_trees_bitwise_equal((given, last), (kept, what))
            assert bool(last.applied) is (part is not bad)
        infos.append((info, last, aux))
        assert is_gone(old)
        assert torch.equal(info.aux["x"], part["x"])


@pytest.mark.promise("donation")
@every_optimizer
def test_donated_memory_is_the_memory_of_the_new_params(optimizer):
    step = pa.make_step(mean_loss, optimizer, microbatch_size=2, donate=True)
    state = step.init(make_params())
    before = {name: x.data_ptr() for name, x in state.params.items()}
    state, _ = step(state, make_batch(5))
    assert {name: x.data_ptr() for name, x in state.params.items()} == before
    window = step.begin(state)
    sums = {name: x.data_ptr() for name, x in window.accum.grads.items()}
    window = step.update(state, window, make_batch(2))
    assert {name: x.data_ptr() for name, x in window.accum.grads.items()} == sums


def test_without_donation_any_old_state_goes_on():
    step = pa.make_step(mean_loss, pa.adamw(0.1), microbatch_size=2)
    states = [step.init(make_params())]
    for _ in range(3):
        states.append(step(states[-1], make_batch(5))[0])
    for one, two in itertools.pairwise(states):
        assert_trees_bitwise_equal(step(one, make_batch(5))[0], two)


@pytest.mark.promise("donation")
def test_a_donated_state_cannot_step_again():
    step = pa.make_step(mean_loss, pa.adamw(0.1), microbatch_size=2, donate=True)
    old = step.init(make_params())
    window = step.begin(old)
    new, _ = step(old, make_batch(5))
    for call in (
        lambda: step(old, make_batch(5)),
        lambda: step.begin(old),
        lambda: step.update(old, window, make_batch(2)),
        lambda: step.apply(old, window),
    ):
        with unchanged(new, window), pytest.raises(RuntimeError, match=GIVEN_UP):
            call()
    assert step(new, make_batch(5))[1].applied


# Exceptions -------------------------------------------------------------------------------


def failing(where, at):
    """Mean loss, but it or its backward pass fails in one microbatch."""
    calls = []

    def loss(params, batch, buffers):
        if not is_dropped():
            calls.append(0)
        value = mean_loss(params, batch)
        if len(calls) - 1 == at:
            if where == "loss":
                raise BoomError
            value = Explodes.apply(value)
        return value, {"n": buffers["n"] + 1}

    return loss


@pytest.mark.promise("errors")
@pytest.mark.parametrize("name", ["momentum", "fused adam", "chain"])
@engines
@donations
@pytest.mark.parametrize("where", ["loss", "backward"])
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_loses_nothing(name, engine, donate, where, at):
    """In the first microbatch and in a later one; the same state then takes the step."""
    options = {
        "optimizer": OPTIMIZERS[name],
        "microbatch_size": 2,
        "buffers": "sequential",
        "engine": engine,
        "donate": donate,
        "loss_scale": pa.dynamic_loss_scale(8.0),
    }
    broken, sound = (pa.make_step(failing(*it), **options) for it in ((where, at), ("", -1)))
    batch, parts = make_batch(5), list(pa.microbatches(make_batch(5), 2))
    held = {"n": torch.tensor(0)}
    state = sound.init(make_params(), held)
    want, _ = sound(sound.init(make_params(), held), batch)
    with unchanged(state, batch), pytest.raises(BoomError):
        broken(state, batch)

    broken = pa.make_step(failing(where, at), **options)
    window = broken.begin(state)
    for part in parts[:at]:
        window = broken.update(state, window, part)
    kept = copied(window)
    with unchanged(state, batch), pytest.raises(BoomError):
        broken.update(state, window, parts[at])
    if where == "loss" or not donate:  # else the sums are whole, or say that they are not
        assert_trees_bitwise_equal(window, kept)
    with unchanged(kept) if not donate else unchanged():
        got, _ = sound(state, batch)
    assert_trees_bitwise_equal(got, want)


def late(schedule):
    """Optimizers that fail where the schedule does, with all gradients there."""
    both = {"a": pa.sgd(0.1, momentum=0.9), "b": pa.sgd(schedule)}
    return {
        "alone": pa.sgd(schedule),
        "clipped": pa.chain(pa.clip_by_global_norm(0.1), pa.adamw(schedule)),
        "second of two": pa.partition(both, lambda p: "ab"[p == "w"]),
    }


@pytest.mark.promise("errors")
@pytest.mark.parametrize("name", late(0.1))
@donations
@pytest.mark.parametrize("streams", [False, True])
def test_an_exception_in_the_schedule_loses_nothing(name, donate, streams):
    """The state is whole; so is the window, or it says that it is not.

    Of several optimizers all schedules are asked before the first uses any memory.
    """
    fails = [True]

    def schedule(count):
        if fails:
            raise BoomError
        return torch.full((), 0.1)

    step = pa.make_step(mean_loss, late(schedule)[name], microbatch_size=2, donate=donate)
    state, batch = step.init(make_params()), make_batch(5)
    plain = pa.make_step(mean_loss, late(lambda count: 0.1)[name], microbatch_size=2)
    parts = list(pa.microbatches(batch, 2))
    if not streams:
        with unchanged(state), pytest.raises(BoomError):
            step(state, batch)
        fails.clear()
        want, _ = plain(copied(state), batch)
        assert_trees_bitwise_equal(step(state, batch)[0], want)
        return
    want, _ = streamed(plain, copied(state), parts)
    window = step.begin(state)
    for part in parts:
        window = step.update(state, window, part)
    with unchanged(state), pytest.raises(BoomError):
        step.apply(state, window)
    fails.clear()
    try:
        got, _ = step.apply(state, window)
    except RuntimeError as error:
        assert donate
        assert "given up with donate=True" in str(error)  # noqa: PT017
    else:
        assert_trees_bitwise_equal(got, want)


@pytest.mark.promise("frozen")
def test_a_frozen_parameter_is_not_trained_by_mistake():
    """``step.init(dict(net.named_parameters()))`` would move it; ``functional`` leaves it out."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    net[0].weight.requires_grad_(False)
    step = pa.make_step(lambda params, batch: batch.mean(), pa.sgd(0.1))
    with pytest.raises(ValueError, match=r"params\['0.weight'\] is a frozen Parameter .*"):
        step.init(dict(net.named_parameters()))
    assert "0.weight" not in step.init(pa.functional(net).params).params
