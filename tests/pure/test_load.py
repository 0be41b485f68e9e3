"""``fn.load`` copies a trained state into the module; what does not fit raises before anything."""

import copy
import warnings

import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged


pytestmark = [
    pytest.mark.purity,
    pytest.mark.promise("functional"),
    pytest.mark.usefixtures("seeded"),
]
X = torch.arange(24.0).reshape(6, 4) / 16


class Tied(nn.Module):
    """A tied head, a frozen layer, a buffer that is not persistent, and a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.other = nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("offset", torch.zeros(4), persistent=False)

    def forward(self, x):
        return self.other(self.norm(self.frozen(self.one(x)))) + self.offset


def trained(net, prefix=""):
    """A function of a module, and other numbers for all that is in its state."""
    fn = pa.functional(net)
    return fn, *(
        {prefix + k: x + 1 if x.dtype == torch.int64 else x * 2 + 0.5 for k, x in tree.items()}
        for tree in (fn.params, fn.buffers)
    )


MODULES = {
    "a linear layer": lambda: nn.Linear(4, 2),
    "ties, frozen parameters and buffers": Tied,
    "half precision": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16(),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_module_computes_what_was_trained_and_fn_stays_as_it_was(name):
    net = MODULES[name]().eval()
    dtype = next(net.parameters()).dtype
    fn, params, buffers = trained(net)
    aliases = dict(fn.params)
    before = copy.deepcopy((fn.params, fn.buffers, fn.frozen))
    ties = [x is y for x in net.parameters() for y in net.parameters()]
    want, _ = fn.apply(params, buffers, X.to(dtype))
    with unchanged(params, buffers):
        assert fn.load(params, buffers) is None
    assert torch.equal(net(X.to(dtype)), want)
    assert_trees_bitwise_equal((fn.params, fn.buffers, fn.frozen), before)
    assert_trees_bitwise_equal(aliases, before[0])
    assert ties == [x is y for x in net.parameters() for y in net.parameters()]
    assert torch.equal(fn.apply(params, buffers, X.to(dtype))[0], want)
    fn.load(params)  # and once more, without buffers
    assert torch.equal(net(X.to(dtype)), want)


def test_without_buffers_the_modules_own_stay():
    net = Tied()
    fn, params, _ = trained(net)
    with unchanged(dict(net.named_buffers())):
        fn.load(params)


def test_frozen_parameters_are_loaded_where_they_are_given():
    net = Tied()
    fn, params, _ = trained(net)
    fn.load(params | {"frozen.weight": torch.eye(4)})
    assert torch.equal(net.frozen.weight, torch.eye(4))
    assert not torch.equal(fn.frozen["frozen.weight"], torch.eye(4))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_wrappers_are_known(prefix):
    net = Tied()
    fn, params, buffers = trained(net, prefix)
    fn.load(params, buffers)
    for name, x in net.named_parameters():
        assert torch.equal(x, params.get(prefix + name, x))


def test_a_function_of_a_compiled_module_loads_into_it():
    net = nn.Linear(4, 2)
    fn, params, _ = trained(torch.compile(net, backend="eager"))
    fn.load(params)
    assert torch.equal(net.weight, params["_orig_mod.weight"])
    fn.load({"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
    assert not net.weight.any()


def test_float32_states_of_a_narrow_module_are_rounded_into_it():
    net = nn.Linear(4, 2).bfloat16()
    fn = pa.functional(net)
    fn.load({name: x.float() * 1.001 for name, x in fn.params.items()})
    assert net.weight.dtype == torch.bfloat16


def stacked(params, buffers):
    return pa.stack([params, params]), buffers


REFUSED = {  # of the state of Tied
    "an ensemble": (stacked, "has shape (2, 4, 4); expected (4, 4)", "pa.unstack(state)[i]"),
    "a missing parameter": (
        lambda p, b: ({k: x for k, x in p.items() if k != "norm.bias"}, b),
        "params['norm.bias'] is missing",
    ),
    "a missing buffer": (
        lambda p, b: (p, {"offset": b["offset"]}),
        "buffers['norm.running_mean'] is missing",
    ),
    "another name": (lambda p, b: (p | {"head": torch.zeros(4)}, b), "params['head'] is not a par"),
    "a tie's second name": (
        lambda p, b: (p | {"other.weight": p["one.weight"]}, b),
        "params['other.weight'] is tied to 'one.weight'",
    ),
    "a name twice": (lambda p, b: (p | {"module.norm.bias": torch.zeros(4)}, b), "is there twice"),
    "another shape": (lambda p, b: (p | {"norm.bias": torch.zeros(3)}, b), "has shape (3,)"),
    "a complex one": (
        lambda p, b: (p | {"norm.bias": torch.zeros(4, dtype=torch.complex64)}, b),
        "is torch.complex64; expected torch.float32",
    ),
    "numbers on no device": (
        lambda p, b: (p | {"norm.bias": torch.zeros(4, device="meta")}, b),
        "params['norm.bias'] is on the meta device",
    ),
    "no tensor": (lambda p, b: (p | {"norm.bias": 3}, b), "params['norm.bias'] is an int"),
    "a list": (lambda p, b: ([*p.values()], b), "expected a dict of tensors by name"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_raises_and_nothing_is_copied(name):
    change, *words = REFUSED[name]
    net = Tied()
    fn, params, buffers = trained(net)
    with (
        unchanged(dict(net.state_dict(keep_vars=True)), fn.params),
        pytest.raises((ValueError, TypeError)) as caught,
    ):
        fn.load(*change(params, buffers))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_state_that_is_made_of_the_modules_own_tensors_is_loaded():
    """Its layers in another order: what is written first may be what is read next."""
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    fn = pa.functional(net)
    names = [*fn.params]  # a weight and a bias of each layer
    turned = dict(zip(names, map(fn.params.get, names[2:] + names[:2]), strict=True))
    for state in (turned, {name: x.t() for name, x in turned.items()}):
        wanted = {name: x.clone() for name, x in state.items()}
        fn.load(state)
        assert_trees_bitwise_equal({n: x.detach() for n, x in net.named_parameters()}, wanted)


def test_what_apply_adds_by_itself_stays_what_it_was():
    net = Tied()
    fn, params, buffers = trained(net)
    net.eval()
    before, _ = fn.apply(fn.params, fn.buffers, X)
    fn.load(params | {"frozen.weight": torch.eye(4)}, buffers)
    assert torch.equal(fn.apply(fn.params, fn.buffers, X)[0], before)


def test_a_module_that_was_replaced_since_is_named():
    net = nn.Sequential(nn.Linear(4, 2))
    fn, params, _ = trained(net)
    net[0] = nn.Linear(4, 2)
    with pytest.raises(RuntimeError, match="other parameters or modules than when functional"):
        fn.load(params)


def test_a_whole_state_is_refused_with_the_line_to_write():
    net = nn.Linear(4, 1)
    fn = pa.functional(net)
    step = pa.make_step(lambda p, x: fn.apply(p, (), x)[0].square().mean(), pa.sgd(0.1))
    with pytest.raises(TypeError, match=r"fn\.load\(state\.params, state\.buffers\)"):
        fn.load(step.init(fn.params))


# Runs that begin with fn.params ------------------------------------------------------------


def test_a_sweep_that_loads_begins_each_run_with_the_same_numbers():
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    fn = pa.functional(net)
    step = pa.make_step(lambda p, x: fn.apply(p, (), x)[0].square().mean(), pa.adamw(0.1))
    firsts = []
    for _ in range(3):
        state = step.init(fn.params)
        firsts.append(dict(state.params))
        for _ in range(3):
            state, _ = step(state, X)
        fn.load(state.params)
        assert torch.equal(net[0].weight, state.params["0.weight"])
    assert_trees_bitwise_equal(firsts[1], firsts[0])
    assert_trees_bitwise_equal(firsts[2], firsts[0])


def test_a_module_that_changed_behind_fn_params_is_told_once():
    net = nn.Linear(4, 1)
    fn, params, _ = trained(net)
    step = pa.make_step(lambda p, x: fn.apply(p, (), x)[0].square().mean(), pa.sgd(0.1))
    step.init(fn.params)
    net.load_state_dict(params)
    with pytest.warns(
        UserWarning, match=r"2 tensors of fn\.params hold other numbers.*fn\.load"
    ) as told:
        step.init(fn.params)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.init(fn.params)
        step.init({name: x.clone() for name, x in fn.params.items()})
