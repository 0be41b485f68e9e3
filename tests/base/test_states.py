"""Every state is tensors in NamedTuples and dicts, all its own: it flattens, stacks and is saved.

No tensor is shared between a state and the one after it, or with what the first was made of. So
either may be given up, or written to in place, and the other does not notice.
"""

import io
import pickle

import optree
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds, trees
from tests.draws import examples, generator
from tests.optimizers import Counted
from tests.states import FN, STATES, a_row, batch_of, full_step


pytestmark = [
    pytest.mark.laws,
    pytest.mark.promise("donation"),
    pytest.mark.promise("documented"),
]
OPTIMIZERS = {
    "sgd": lambda: pa.sgd(0.1),
    "sgd with everything": lambda: pa.sgd(pa.linear_warmup(0.1, 3), 0.9, 0.0, 0.01, True),
    "fused sgd": lambda: pa.sgd(0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
    "adam": lambda: pa.adam(torch.tensor(0.1), amsgrad=True, weight_decay=0.1),
    "adamw": lambda: pa.adamw(0.1),
    "chain": lambda: pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(0.1)),
    "map with a state": lambda: pa.chain(Average(), pa.sgd(0.1)),
    "partition": lambda: pa.partition(
        {"all": pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1, momentum=0.5)), "none": pa.sgd()},
        lambda path: "all",
    ),
    "Adagrad": lambda: pa.from_torch(torch.optim.Adagrad, lr=0.1),
    "NAdam": lambda: pa.from_torch(torch.optim.NAdam, lr=0.1),
    "RMSprop": lambda: pa.from_torch(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
    "somebody's": lambda: Plain(),
}
SCALES = [
    lambda: None,
    lambda: pa.static_loss_scale(4.0),
    lambda: pa.dynamic_loss_scale(8.0, growth_interval=1, hysteresis=2),
]
POLICIES = [None, pa.Policy(param=torch.float64), pa.Policy(param=None, compute=torch.bfloat16)]


class Average:
    """A gradient map with a state of its own, as optax has them."""

    def init(self, params):
        return {"mean": optree.tree_map(torch.zeros_like, params)}

    def update(self, grads, state):
        mean = optree.tree_map(lambda m, g: m + g.to(m.dtype), state["mean"], grads)
        return mean, {"mean": mean}


class Plain:
    """An optimizer that knows nothing of ours."""

    def init(self, params):
        return (torch.zeros(()),)

    def apply(self, grads, state, params):
        return optree.tree_map(lambda p, g: p - 0.1 * g.to(p.dtype), params, grads), (state[0] + 1,)


def leaves(tree):
    return optree.tree_leaves(tree, namespace="pureaccum")


def places(tree):
    return {x.untyped_storage().data_ptr() for x in leaves(tree) if x.untyped_storage().nbytes()}


def check(state):
    """Tensors only, in optree and in torch's own, from memory and from disk."""
    assert not optree.tree_is_leaf(None)  # so a None would be lost without a word
    assert leaves(state) == optree.tree_leaves(state, none_is_leaf=True, namespace="pureaccum")
    assert all(type(x) is Tensor for x in leaves(state))
    assert not any(x.requires_grad for x in leaves(state))
    for flatten, unflatten in (
        (lambda t: optree.tree_flatten(t, namespace="pureaccum"), optree.tree_unflatten),
        (pytree.tree_flatten, lambda spec, xs: pytree.tree_unflatten(xs, spec)),
    ):
        flat, spec = flatten(state)
        assert_alike(unflatten(spec, flat), state)
    assert_saved(state)
    assert len(leaves(state)) == len(pytree.tree_leaves(state))
    assert len(places(state)) == len([x for x in leaves(state) if x.numel()])


def assert_saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_alike(loaded, state)
    assert_trees_bitwise_equal(loaded, state)


def assert_alike(a, b):
    """The same classes with the same fields, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert torch.equal(a.isnan(), b.isnan())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_alike(a[key], b[key])
    else:
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_alike(x, y)


def loss(params, batch, buffers=(), keys=None):
    """A new buffer tree; and one of its leaves is what came, handed on."""
    total = sum((x.float() ** 2).sum() for x in leaves(params)) * batch["x"].float().mean()
    new = {"seen": buffers["seen"] + batch["x"].sum(), "handed on": buffers["handed on"]}
    return total, (new, {"x": batch["x"], "sum": batch["x"].sum()})


def apart(*things):
    """No two of them have a tensor in common."""
    every = [place for thing in things for place in places(thing)]
    assert len(set(every)) == len(every)


leaf = st.builds(
    lambda shape, seed: torch.randn(shape, generator=generator(seed)),
    st.sampled_from([(), (2,), (2, 3)]),
    seeds(),
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@examples(1 / 8)
@given(
    params=trees(leaf),
    scale=st.sampled_from(SCALES),
    policy=st.sampled_from(POLICIES),
    buffers=st.sampled_from(["freeze", "sequential", "pooled"]),
    keys=st.booleans(),
    donate=st.booleans(),
    x=st.sampled_from([1.0, torch.nan]),
)
def test_every_state_of_a_run_is_tensors_of_its_own(
    optimizer,
    params,
    scale,
    policy,
    buffers,
    keys,
    donate,
    x,
):
    step = pa.make_step(
        loss,
        optimizer(),
        has_aux=True,
        aux_reduction={"x": "concat", "sum": "sum"},
        microbatch_size=2,
        loss_scale=scale(),
        policy=policy,
        buffers=buffers,
        keys=keys,
        donate=donate,
    )
    held = {"seen": torch.tensor(1.0), "handed on": torch.tensor([1, 2])}
    batch = {"x": torch.tensor([1.0, 2.0, x])}
    parts = list(pa.microbatches(batch, 2))
    first = step.init(params, held, seed=5)
    check(first)
    apart(first, params, held)

    second, info = step(first, batch)
    check(second)
    check(info)
    apart(second, info, params, held, batch)
    if not donate:
        apart(first, second, info)

    window = step.begin(second)
    seen = [window]
    for part in parts:
        check(window)
        window, aux = step.update(second, window, part)
        seen = [window] if donate else [*seen, window]
        apart(*seen, second, aux, params, held)
    check(window)
    third, info = step.apply(second, window)
    check(third)
    check(info)
    apart(third, info, params, held, batch)
    if not donate:
        apart(first, second, third, info, *seen)
    assert third.attempts == 2


@examples(1 / 2)
@given(trees(leaf), st.lists(st.booleans(), max_size=3))
def test_every_average_is_tensors_of_its_own(params, flags):
    average = pa.ema(0.9)
    states = [average.init(params)]
    for flag in flags:
        states.append(average.update(states[-1], params, torch.tensor(flag)))
    for state in states:
        check(state)
    apart(*states, params)


def test_batch_norm_keeps_its_moments_as_tensors():
    module = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    fn = pa.functional(module)

    def loss(params, batch, buffers):
        out, new = fn.apply(params, buffers, batch)
        return (out**2).mean(), new

    step = pa.make_step(loss, pa.adamw(), buffers="pooled")
    first = step.init(fn.params, fn.buffers)
    window = step.begin(first)
    middle = step.update(first, window, torch.randn(3, 1))
    last, _ = step.apply(first, middle)
    for state in (first, window, middle, last):
        check(state)
    apart(first, window, middle, last, module.state_dict())


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_torch_load_knows_every_class(make):
    with torch.serialization.safe_globals([Counted]):  # a user's own class is the user's to name
        assert_saved(make())


@pytest.mark.parametrize("module", [pa, pa.distributed, pa.testing], ids=lambda m: m.__name__)
def test_public_classes_are_pickled_by_the_name_of_the_module(module):
    """So that a file can be read once the class lies somewhere else."""
    its = [x for name, x in vars(module).items() if isinstance(x, type) and name[0] != "_"]
    classes = [cls for cls in its if cls.__module__.startswith("pureaccum")]
    assert classes
    for cls in classes:
        assert cls.__module__ == module.__name__
        assert pickle.loads(pickle.dumps(cls)) is cls


# Devices --------------------------------------------------------------------------------


def step_of():
    step = full_step()

    def states(params):
        first = step.init(params, FN.buffers, seed=7)
        window = step.update(first, step.begin(first), BATCH)
        return first, step(first, BATCH), window, step.apply(first, window)

    return states


def optimizer_of(name):
    opt = OPTIMIZERS[name]()

    def states(params):
        first = opt.init(params)
        return first, opt.apply(params, first, params)

    return states


def streamed(acc):
    params = torch.ones(3, 2)
    return lambda _: (acc.init(params), acc.update(acc.init(params), params, BATCH))


BATCH = batch_of(6)
PLACED = {
    "a step": step_of(),
    "the accumulator": streamed(pa.accumulator(a_row, squares=True)),
    "that of samples": streamed(pa.per_sample_accumulator(a_row, chunk_size=2)),
    "ema": lambda params: (
        (average := pa.ema(0.9)).init(params),
        average.update(average.init(params), params),
    ),
    "the noise scale": lambda params: pa.running_noise_scale().init(params),
} | {name: optimizer_of(name) for name in OPTIMIZERS if name != "somebody's"}


@pytest.mark.parametrize("states", PLACED.values(), ids=PLACED)
def test_a_state_lies_where_its_params_lie_and_not_on_the_default_device(
    states,
):
    """As after ``torch.set_default_device``. A learning rate is on the CPU, wherever params are."""
    places = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            places.append([x.device for x in leaves(states(FN.params))])
    assert places[0] == places[1]


def test_tied_params_are_two_in_the_state():
    """A tree that holds one tensor twice: each is a parameter of its own."""
    w = torch.ones(2)
    step = pa.make_step(lambda p, x: ((p["a"] - p["b"]) * x).sum(), pa.sgd(1.0), reduction="sum")
    state = step.init({"a": w, "b": w})
    check(state)
    new, _ = step(state, torch.ones(1, 2))
    assert torch.equal(new.params["a"], torch.zeros(2))
    assert torch.equal(new.params["b"], torch.full((2,), 2.0))


def test_none_in_a_state_would_be_seen():
    with pytest.raises(AssertionError):
        check({"a": None})
    with pytest.raises(AssertionError):
        check({"a": 1.0})
    x = torch.ones(2)
    with pytest.raises(AssertionError):
        check({"a": x, "b": x[:1]})
    with pytest.raises(AssertionError):
        apart({"a": x}, {"b": x.view(2)})
