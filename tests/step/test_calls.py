"""How many functions of ours a step calls, and how many operations it is: ceilings.

Small models pay for each of them.

A change that makes it less writes it here. Comprehensions are not counted: Python 3.12 makes no
call of one.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pureaccum as pa
from pureaccum._base.torch_internals.functorch import VERSION


pytestmark = [pytest.mark.laws, pytest.mark.promise("launches")]
HOUSE = str(Path(pa.__file__).parent)
BATCH = {"x": torch.ones(32, 8), "y": torch.ones(32, 4)}
NET = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
FN = pa.functional(NET)


def plain(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]).square().mean()


def network(params, batch):
    return (FN.apply(params, FN.buffers, batch["x"])[0] - batch["y"]).square().mean()


def calls(run):
    found = 0

    def profile(frame, event, _):
        nonlocal found
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOUSE):
            found += code.co_name == "<lambda>" or not code.co_name.startswith("<")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


CASES = {
    "sgd": (plain, {"w": torch.ones(8, 4)}, pa.sgd(0.1), {}, 177),
    "functional and adamw": (network, FN.params, pa.adamw(), {}, 206),
    "clip, scale and policy": (
        plain,
        {"w": torch.ones(8, 4)},
        pa.chain(pa.clip_by_global_norm(1.0), pa.adamw()),
        {"loss_scale": pa.dynamic_loss_scale(), "policy": pa.Policy(compute=torch.bfloat16)},
        275,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_over_four_microbatches_calls_no_more_functions_than_this(name):
    loss, params, optimizer, options, ceiling = CASES[name]
    step = pa.make_step(
        lambda params, batch: loss(params, batch), optimizer, microbatch_size=8, **options
    )
    state = step.init(params)
    for _ in range(3):  # the first call of a loss is watched, and all three are checked
        step(state, BATCH)
    assert calls(lambda: step(state, BATCH)) <= ceiling


@pytest.mark.slow
def test_a_compiled_step_calls_no_more_functions_than_this():
    """What a kind of batch decides is decided at its first call."""
    step = pa.make_step(plain, pa.sgd(0.1), microbatch_size=8, compile={"backend": "eager"})
    state = step.init({"w": torch.ones(8, 4)})
    for _ in range(3):
        step(state, BATCH)
    assert calls(lambda: step(state, BATCH)) <= 35


def layers(count, by):
    """The primitive over four microbatches, each of some layers, and what is asked of it."""
    rows, w = BATCH["x"], torch.ones(8, 8, requires_grad=True)

    def of(w, x):
        for _ in range(count):
            x = torch.tanh(x @ w)
        return x

    def captured(x):
        return of(w, x)

    micro = pa.microbatch(of, microbatch_size=8)
    if by == "torch.func.grad":
        return lambda: torch.func.grad(lambda w: micro(w, rows).sum())(w.detach())
    if by == "forwards":
        return lambda: micro(w, rows)
    if by == "captured, backwards":
        cut = pa.microbatch(captured, microbatch_size=8, batch_argnums=0)
        return lambda: cut(rows).sum().backward()
    return lambda: micro(w, rows).sum().backward()


PRIMITIVE = {"forwards": 200, "backwards": 355, "captured, backwards": 383, "torch.func.grad": 403}


@pytest.mark.parametrize("by", PRIMITIVE)
def test_the_primitive_calls_no_more_functions_for_more_operations(by):
    """Nothing of ours runs for an operation of a microbatched function."""
    found = []
    for count in (1, 20):
        run = layers(count, by)
        for _ in range(2):
            run()
        found.append(calls(run))
    assert found[0] == found[1] <= PRIMITIVE[by]


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count one, and run it."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_differentiated_costs_little_more_than_its_formula():
    """On the host numbers can be read under ``grad``: nothing is selected where all is finite."""

    def by_formula(lr):
        params, momentum = FN.params, {key: torch.zeros_like(x) for key, x in FN.params.items()}
        for _ in range(5):
            grads = torch.func.grad(network)(params, BATCH)
            momentum = {key: 0.9 * momentum[key] + grads[key] for key in params}
            params = {key: params[key] - lr * momentum[key] for key in params}
        return network(params, BATCH)

    def by_steps(lr):
        step = pa.make_step(network, pa.sgd(lr, momentum=0.9))
        state = step.init(FN.params)
        for _ in range(5):
            state, _ = step(state, BATCH)
        return network(state.params, BATCH)

    found = []
    for run in by_formula, by_steps:
        grad = torch.func.grad(run)
        grad(torch.tensor(0.1))
        with Operations() as operations:
            grad(torch.tensor(0.1))
        found.append(operations.count)
    assert found[1] <= 1.5 * found[0], found


@pytest.mark.given_up("caches")
def test_a_vmap_of_steps_selects_nothing_where_all_members_are_applied():
    """What members have in common is read once for all, on the host."""
    step = pa.make_step(network, pa.adamw(), microbatch_size=8)
    states = pa.stack([step.init(FN.params) for _ in range(3)])
    every = torch.func.vmap(step, in_dims=(0, None))
    every(states, BATCH)
    with Operations() as operations:
        every(states, BATCH)
    # whether each is finite is counted, whatever the numbers are
    assert operations.count <= (363 if VERSION < (2, 15) else 367)


def test_a_vmap_of_steps_runs_as_many_operations_for_more_members():
    step = pa.make_step(network, pa.adamw(), microbatch_size=8)
    every, found = torch.func.vmap(step, in_dims=(0, None)), []
    for members in (2, 7):
        states = pa.stack([step.init(FN.params) for _ in range(members)])
        for _ in range(2):
            every(states, BATCH)
        with Operations() as operations:
            every(states, BATCH)
        found.append(operations.count)
    assert found[0] == found[1]


@pytest.mark.given_up("early writes")
def test_the_gradients_of_samples_are_watched_once_and_not_at_every_call():
    """A loss that is made anew from the user's for each call is still the user's."""
    params, rows = {"w": torch.ones(8)}, torch.ones(16, 8)
    grad = pa.per_sample_grad(lambda params, x: (params["w"] @ x).square())
    first = calls(lambda: grad(params, rows))
    assert 2 * calls(lambda: grad(params, rows)) < first


def test_a_profile_has_named_ranges_and_only_a_profile():
    step = pa.make_step(lambda params, batch: plain(params, batch), pa.sgd(0.1), microbatch_size=8)
    state = step.init({"w": torch.ones(8, 4)})
    with torch.profiler.profile() as profile:
        step(state, BATCH)
    counts = {x.key: x.count for x in profile.key_averages() if x.key.startswith("pureaccum")}
    assert counts["pureaccum: microbatch"] == 4
    assert counts["pureaccum: optimizer"] == 1
    assert counts["pureaccum: check"] >= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.profiler, "record_function", None)
        step(state, BATCH)
