"""``from_torch`` is bit for bit the class: every one that torch has, and those of others."""

import inspect
import io
import math

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.optimizers import Torchs, clones, leaves, normal
from tests.refusals import refused


pytestmark = [pytest.mark.parity, pytest.mark.promise("optimizers")]
STEPS = 7
CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    if cls is not torch.optim.Optimizer
}
SETTINGS = {
    "ASGD": [{"lr": 0.1, "t0": 2.0, "lambd": 0.1}, {"foreach": True, "maximize": True}],
    "Adadelta": [{"rho": 0.5, "weight_decay": 0.1}, {"foreach": True, "lr": 0.3}],
    "Adafactor": [{"lr": 0.1, "weight_decay": 0.1}, {"foreach": True, "d": 1.5}],
    "Adagrad": [{"lr_decay": 0.5, "initial_accumulator_value": 0.3}, {"fused": True}],
    "Adam": [{"amsgrad": True, "lr": 0.1}, {"foreach": True, "weight_decay": 0.1}, {"fused": True}],
    "AdamW": [{"amsgrad": True, "betas": (0.5, 0.75)}, {"fused": True, "maximize": True}],
    "Adamax": [{"weight_decay": 0.1}, {"foreach": True}],
    "Muon": [{"momentum": 0.5, "nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}, {"foreach": True}],
    "RAdam": [{"betas": (0.5, 0.75), "weight_decay": 0.1}, {"foreach": True}],
    "RMSprop": [{"centered": True, "momentum": 0.5}, {"foreach": True, "weight_decay": 0.1}],
    "Rprop": [{"etas": (0.25, 2.0), "step_sizes": (1e-3, 1.0)}, {"foreach": True}],
    "SGD": [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "fused": True}],
    "SparseAdam": [{"betas": (0.5, 0.75)}, {"maximize": True}],
}
SHAPES = {"Muon": [(4, 3), (2, 7)], "SparseAdam": [(4, 3), (5,)]}
CASES = [
    pytest.param(cls, given, id=f"{name}-{','.join(given) or 'default'}")
    for name, cls in CLASSES.items()
    if name != "LBFGS"
    for given in [{}, *SETTINGS.get(name, [])]
]


class Wandering(torch.optim.Optimizer):
    """Keeps what an optimizer of others may keep, and changes its own settings, as Prodigy does.

    It also writes to the gradients that it is given, and keeps them.
    """

    def __init__(self, params, lr=0.1, d=0.5):
        defaults = {"lr": lr, "d": d, "k": 0, "betas": (0.5, 0.75), "eager": True, "name": "w"}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 1.1
            for x in group["params"]:
                self.one(x, x.grad, group, self.state[x])

    def one(self, x, grad, group, state):
        if not state:
            state["calls"], state["best"], state["never"] = 0, math.inf, None
            # What is kept depends on the leaf: a number, a tensor or nothing under one name.
            state["row"] = None if x.ndim == 0 else torch.zeros(x.shape[-1])
            state["few"] = 1.5 if x.ndim == 0 else torch.zeros(2)
            state["nested"] = [[torch.zeros_like(x), 1], (0.5, None), {"deep": False}, [], ()]
        grad.mul_(2.0 if state["nested"][2]["deep"] else 1.0).add_(0.25)
        state["calls"] += 1
        state["best"] = min(state["best"], float(grad.abs().sum()))
        state["last"] = grad
        assert state["never"] is None
        (mean, count), (scale, none), more, nothing, empty = state["nested"]
        assert (none, nothing, empty, type(count), type(scale)) == (None, [], (), int, float)
        mean.lerp_(grad, group["betas"][0])
        more = {"deep": not more["deep"]}
        state["nested"] = [[mean, count + 2], (scale / 3.0, None), more, [], ()]
        if x.ndim == 0:
            state["few"] += 0.1
        else:
            state["row"] += grad.reshape(-1, x.shape[-1]).sum(0)
            state["few"] += state["calls"]
            mean = mean + state["row"]
        assert isinstance(state["calls"], int)
        x.sub_(mean, alpha=group["lr"] * group["d"] * scale * state["calls"] / group["k"])


CASES += [
    pytest.param(Wandering, {}, id="Wandering-default"),
    pytest.param(Wandering, {"d": 0.25, "lr": 0.01}, id="Wandering-d,lr"),
]


def make_tree(cls, random):
    shapes = SHAPES.get(cls.__name__, [(4, 3), (), (5,), (1, 2, 2)])
    first, *rest = [normal(shape, random) for shape in shapes]
    return {"z": first, "a": rest}


def beside(cls, seed, **settings):
    """Ours and the class, with parameters, a state, and what gradients are drawn from."""
    random = generator(seed)
    params = make_tree(cls, random)
    opt, their = pa.from_torch(cls, **settings), Torchs(cls, params, **settings)
    return opt, their, clones(params), opt.init(params), random


def as_taken(cls, grads):
    """SparseAdam takes sparse gradients alone; ours converts dense ones."""
    if cls is torch.optim.SparseAdam:
        return optree.tree_map(lambda g: g.to_sparse(1), grads)
    return grads


def assert_same_state(state, their):
    """Tensors, and numbers as float64, int64 and bool, under the class's own names."""
    for held, x in zip(state.per_leaf, their.params, strict=True):
        assert_held(held, dict(their.optimizer.state[x]))
    group = their.optimizer.param_groups[0]
    for name, value in state.group.items():
        assert_held(value, group[name])


def assert_held(got, want):
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_held(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            assert_held(x, y)
    elif isinstance(want, Tensor):
        assert_trees_bitwise_equal(got, want.detach())
    elif want is None:
        assert got == ()
    else:
        assert got.item() == want
        assert type(got.item()) is type(want)


# The same bits --------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "settings"), CASES)
@examples(1 / 4)
@given(st.booleans(), seeds())
def test_it_has_the_bits_of_the_class(cls, settings, donate, seed):
    opt, their, params, state, random = beside(cls, seed, **settings)
    for n in range(STEPS):
        grads = make_tree(cls, random)
        taken = as_taken(cls, grads)
        their.step(taken)
        grads = taken if n % 2 else grads
        before = clones(grads)
        params, state = opt.apply(grads, state, params, donate=donate)
        if cls is not torch.optim.SparseAdam:
            assert_trees_bitwise_equal(grads, before)
        their.assert_same_params(params)
        assert_same_state(state, their)
        assert state.steps == n + 1


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_sparse_gradients_reach_the_class_as_they_are(settings):
    """SGD, which takes both, and Adagrad: only the samples that have a gradient are touched."""
    params = torch.randn(6, 2)
    for cls, options in ((torch.optim.SGD, settings), (torch.optim.Adagrad, {})):
        opt, their = pa.from_torch(cls, **options), Torchs(cls, params, **options)
        new, state = params, opt.init(params)
        for n in range(3):
            grads = (torch.arange(6.0)[:, None] % (n + 2) * torch.ones(2)).to_sparse(1)
            new, state = opt.apply(grads, state, new)
            their.step(grads)
            their.assert_same_params(new)


@pytest.mark.parametrize(
    "cls", [cls for name, cls in CLASSES.items() if name != "LBFGS"] + [Wandering]
)
def test_a_schedule_is_a_new_rate_in_each_step(cls):
    schedule = pa.join_schedules([pa.linear_warmup(0.1, 2, 0.01), pa.cosine_decay(0.1, 3)], [3])
    _, their, params, _, random = beside(cls, 3, lr=0.01)
    opt = pa.from_torch(cls, lr=schedule)
    state = opt.init(params)
    assert "lr" not in state.group
    for n in range(6):
        grads = as_taken(cls, make_tree(cls, random))
        params, state = opt.apply(grads, state, params, donate=n % 2 == 1)
        their.step(grads, schedule(torch.tensor(n)).item())
        their.assert_same_params(params)


# Steps that are not applied, saved states -----------------------------------------------


@pytest.mark.parametrize(
    "donate", [False, pytest.param(True, marks=pytest.mark.given_up("donation elsewhere"))]
)
@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_steps_that_are_not_applied_leave_no_trace(cls, settings, donate):
    """The first among them; what is not applied may hold NaN."""
    opt, their, params, state, random = beside(cls, 5, **settings)
    for applied in (False, False, True, False, True, True):
        grads = make_tree(cls, random)
        if not applied:
            before = clones((params, state))
            grads = optree.tree_map(lambda g: g * math.nan, grads)
        else:
            their.step(as_taken(cls, grads))
        flag = torch.tensor(applied)
        params, state = opt.apply(grads, state, params, applied=flag, donate=donate)
        if not applied:
            assert_trees_bitwise_equal((params, state), before)
        their.assert_same_params(params)
    assert state.steps == 3


@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_a_saved_state_goes_on_in_a_new_process(cls, settings):
    """Its leaves through a file, its structure from ``init``, and an object that never stepped."""
    opt, _, params, state, random = beside(cls, 7, **settings)
    for _ in range(3):
        params, state = opt.apply(make_tree(cls, random), state, params)
    file = io.BytesIO()
    torch.save(leaves(state), file)
    file.seek(0)
    fresh = pa.from_torch(cls, **settings)
    structure = optree.tree_structure(opt.init(params), namespace="pureaccum")
    loaded = optree.tree_unflatten(structure, torch.load(file, weights_only=True))
    assert_trees_bitwise_equal(loaded, state)
    other = params
    for _ in range(3):
        grads = make_tree(cls, random)
        params, state = opt.apply(grads, state, params)
        other, loaded = fresh.apply(grads, loaded, other)
        assert_trees_bitwise_equal((other, loaded), (params, state))


class Elsewhere(Tensor):
    """Stands for a tensor on an accelerator, which may be read, but not without waiting."""


def test_a_state_that_was_loaded_onto_another_device_is_not_forgotten():
    """``torch.load(..., map_location="cuda")`` moves the number of steps too."""
    params, grads = torch.randn(3), torch.randn(3)
    opt = pa.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    params, state = opt.apply(grads, opt.init(params), params)
    moved = state._replace(steps=state.steps.as_subclass(Elsewhere))
    want, _ = opt.apply(grads, state, params)
    got, _ = opt.apply(grads, moved, params)
    assert_trees_bitwise_equal(got, want)


class Noting(torch.optim.SGD):
    """Counts its steps."""

    steps = 0

    def step(self, closure=None):
        Noting.steps += 1
        return super().step(closure)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}])
def test_the_class_steps_once_a_step(settings):
    """And once when the state is made."""
    opt, params = pa.from_torch(Noting, lr=0.1, **settings), torch.ones(2)
    state = opt.init(params)
    Noting.steps = 0
    for _ in range(5):
        params, state = opt.apply(params, state, params)
    assert Noting.steps == 5


def test_one_object_serves_parameters_of_different_shapes():
    """What it found out about one tree's numbers does not stand for another's."""
    opt = pa.from_torch(Wandering)
    for first, second in ([(), (3,)], [(3,), ()]):
        trees = [torch.randn(first), torch.randn(second)]
        states = [opt.init(x) for x in trees]
        for x, state in zip(trees, states, strict=True):
            their, new = Torchs(Wandering, x), x
            for _ in range(3):
                grad = torch.randn(x.shape)
                new, state = opt.apply(grad, state, new)
                their.step(grad)
                their.assert_same_params(new)


def test_a_number_in_the_group_can_be_replaced():
    params, grads = torch.randn(3), torch.randn(3)
    opt = pa.from_torch(torch.optim.RMSprop, lr=0.1)
    state = opt.init(params)
    state = state._replace(group=state.group | {"lr": torch.tensor(0.7, dtype=torch.float64)})
    their = Torchs(torch.optim.RMSprop, params, lr=0.7)
    their.step(grads)
    their.assert_same_params(opt.apply(grads, state, params)[0])


# Refusals -------------------------------------------------------------------------------


def test_only_classes_that_need_a_closure_are_refused():
    with refused(ValueError, "LBFGS cannot", "closure", "evaluates the loss again"):
        pa.from_torch(torch.optim.LBFGS)
    for name, cls in CLASSES.items():
        if name != "LBFGS":
            pa.from_torch(cls)


THING = torch.optim.Adam([torch.ones(1)])


@pytest.mark.parametrize("what", [None, "Adam", torch.nn.Linear, pa.adam, THING])
def test_what_is_no_class_is_refused(what):
    words = (f"from_torch got {what!r}", "expected a class", "from_torch(torch.optim.RMSprop")
    with refused(TypeError, *words):
        pa.from_torch(what)


SENTENCE = ("from_torch(Adagrad)", "cannot run under a torch.func transform, torch.compile")


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_from_torch_is_refused_under_a_transform(transform):
    params = torch.ones(3)
    opt = pa.from_torch(torch.optim.Adagrad)
    state = opt.init(params)

    def run(x):
        return opt.apply(x, state, params)[0].sum()

    for func in (run, lambda x: opt.init(x).steps):
        with refused(RuntimeError, *SENTENCE, "Use sgd, adam or adamw", given=(params, state)):
            if transform == "vmap":
                torch.func.vmap(func)(torch.ones(2, 3))
            elif transform == "grad":
                torch.func.grad(func)(torch.ones(3))
            else:
                torch.func.jvp(func, (torch.ones(3),), (torch.ones(3),))


@pytest.mark.slow
def test_from_torch_is_refused_by_the_compiler():
    params = torch.ones(3)
    opt = pa.from_torch(torch.optim.Adagrad)
    state = opt.init(params)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda g, s, p: opt.apply(g, s, p), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"cannot run under a torch\.func transform"):
        compiled(params, state, params)
