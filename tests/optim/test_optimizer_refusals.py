"""What no optimizer can work with is refused by name, and nothing is lost by asking."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import pureaccum as pa
from pureaccum._optim import update
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.optimizers import Count, Polyak, clones, leaves, make_params, normal, unread
from tests.refusals import refused, saying


pytestmark = pytest.mark.faults
DONATE = pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
MAKERS = pytest.mark.parametrize("make", [pa.sgd, pa.adam, pa.adamw])
PARAMS = make_params()


def lr_is(value):
    return (f"lr is {value!r}", "a float, a 0-d tensor or a schedule")


# Settings -------------------------------------------------------------------------------


@MAKERS
def test_learning_rates_that_make_no_sense_are_refused(make):
    for value in (-0.1, math.nan, math.inf):
        with refused(ValueError, *lr_is(value), "not negative"):
            make(value)
    for value in (None, "0.1", True):
        with refused(TypeError, *lr_is(value), type(value).__name__):
            make(value)
    with refused(ValueError, "lr is a tensor of shape (2,)"):
        make(torch.ones(2))


def torchs_scheduler():
    return lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 3)


@pytest.mark.parametrize(
    "make", [pa.sgd, pa.adam, pa.adamw, lambda lr: pa.from_torch(torch.optim.Adam, lr=lr)]
)
def test_a_scheduler_of_torch_in_place_of_a_learning_rate_is_refused(make):
    for value in (torchs_scheduler(), lr_scheduler.StepLR):
        with refused(TypeError, "lr is a scheduler of torch, StepLR", "a schedule", "cosine_decay"):
            make(value)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, Fraction])
def test_numbers_of_other_libraries_are_numbers(kind):
    """Python takes NumPy's float64 for one of its own, and no other."""
    half, bad = kind(0.5), kind(-1.0)
    for make, names in (
        (pa.sgd, ("lr", "momentum", "dampening", "weight_decay")),
        (pa.adamw, ("lr", "eps", "weight_decay")),
    ):
        found = []
        for value in (half, 0.5):
            opt, params = make(**dict.fromkeys(names, value)), make_params()
            found.append(opt.apply(make_params(1), opt.init(params), params))
        assert_trees_bitwise_equal(*found)
        for name in set(names) - {"dampening"}:
            with refused(ValueError, f"{name} is -1.0"):
                make(**{name: bad})
    with refused(ValueError, "betas[1] is -1.0"):
        pa.adam(betas=(half, bad))
    pa.adam(betas=[half, half])


@MAKERS
@pytest.mark.parametrize("name", ["weight_decay", "eps", "momentum"])
@pytest.mark.parametrize("value", [-1e-3, math.inf, math.nan, None, "1", True])
def test_settings_below_zero_or_no_numbers_are_refused(make, name, value):
    if name not in {pa.sgd: ("weight_decay", "momentum")}.get(make, ("weight_decay", "eps")):
        return
    error = ValueError if isinstance(value, float) else TypeError
    with refused(error, f"{name} is {value!r}", "a finite number of at least 0"):
        make(0.1, **{name: value})


def test_a_dampening_that_is_no_number():
    for value, error in ((math.nan, ValueError), (None, TypeError)):
        with refused(error, f"dampening is {value!r}", "a finite number"):
            pa.sgd(0.1, 0.9, value)


@pytest.mark.parametrize("make", [pa.adam, pa.adamw])
@pytest.mark.parametrize("beta", [-0.1, 1.0, 1.5, math.nan, "a"])
def test_betas_out_of_range_are_refused(make, beta):
    error = ValueError if isinstance(beta, float) else TypeError
    for i, betas in enumerate([(beta, 0.9), (0.9, beta)]):
        with refused(error, f"betas[{i}] is {beta!r}", "a number from 0 to less than 1"):
            make(0.1, betas)


@pytest.mark.parametrize("make", [pa.adam, pa.adamw])
@pytest.mark.parametrize("betas", [(0.9,), (0.9,) * 3, 0.9])
def test_betas_are_two(make, betas):
    with refused(ValueError, f"betas is {betas!r}", "two numbers from 0 to less than 1"):
        make(0.1, betas)


@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.1), (0.0, 0.1)])
def test_nesterov_needs_momentum_and_no_dampening(momentum, dampening):
    words = (f"momentum={momentum!r}", f"dampening={dampening!r}", "needs a momentum above zero")
    with refused(ValueError, "nesterov=True", *words):
        pa.sgd(0.1, momentum, dampening, nesterov=True)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, None, True, "1"])
def test_a_norm_that_clips_nothing_right_is_refused(value):
    error = ValueError if type(value) in (int, float) else TypeError
    with refused(error, f"max_norm is {value!r}", "a number above zero"):
        pa.clip_by_global_norm(value)


# States ---------------------------------------------------------------------------------


BELONGS = "belongs to the params that it was made from by init"
OTHER = "A state of another configuration?"
STATEFUL = {
    "sgd": (pa.sgd(0.1, 0.9), "momentum"),
    "adam": (pa.adam(0.1), "exp_avg"),
    "adamw": (pa.adamw(0.1, amsgrad=True), "max_exp_avg_sq"),
    "fused adamw": (pa.adamw(0.1, fused=True), "exp_avg_sq"),
}


@DONATE
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("state", [None, (), {}, 3, pa.accumulator(lambda p, x: p).init(PARAMS)])
def test_a_state_of_another_kind_is_refused(kind, state, donate):
    opt = STATEFUL[kind][0]
    expected = type(opt.init(PARAMS)).__name__
    with refused(TypeError, f"state is a {type(state).__name__}", expected, OTHER, given=PARAMS):
        opt.apply(PARAMS, state, PARAMS, donate=donate)


@DONATE
def test_states_of_each_other_are_refused(donate):
    params = make_params()
    sgd, adam = pa.sgd(0.1), pa.adam(0.1)
    given = (params, sgd.init(params), adam.init(params))
    with refused(TypeError, "state is a AdamState", "sgd expects the SGDState", given=given):
        sgd.apply(PARAMS, given[2], params, donate=donate)
    with refused(TypeError, "state is a SGDState", "adam expects the AdamState", given=given):
        adam.apply(PARAMS, given[1], params, donate=donate)
    other = pa.from_torch(torch.optim.SGD)
    with refused(TypeError, "state is a SGDState", "from_torch(SGD) expects the TorchState"):
        other.apply(PARAMS, given[1], params, donate=donate)


@DONATE
@MAKERS
@pytest.mark.parametrize(("ours", "theirs"), [(0.1, torch.tensor(0.1)), (pa.constant(0.1), 0.2)])
def test_a_rate_where_none_is_kept_is_refused(make, ours, theirs, donate):
    params, opt = make_params(), make(ours)
    state = make(theirs).init(params)
    words = (f"state.lr is {state.lr!r}", "made with lr=", "A number is kept in the state", OTHER)
    with refused(ValueError, *words, given=(params, state)):
        opt.apply(PARAMS, state, params, donate=donate)


@DONATE
@pytest.mark.parametrize("kind", STATEFUL)
def test_shapes_of_another_model_are_named_leaf_by_leaf(kind, donate):
    opt, name = STATEFUL[kind]
    params = make_params()
    for path, changed in (
        ("['w']", {"w": torch.ones(2, 2)}),
        ("['in'][0]", {"in": [torch.ones(1)]}),
    ):
        other = params | changed
        state = opt.init(params)
        held = state._replace(**{name: getattr(opt.init(other), name)})
        shapes = [tuple(x.shape) for x in (leaves(changed)[0], leaves(params)[0])]
        with refused(
            ValueError,
            f"state.{name}{path} has shape {shapes[0]}",
            "params has",
            BELONGS,
            given=(params, held),
        ):
            opt.apply(PARAMS, held, params, donate=donate)
        with refused(
            ValueError,
            f"grads{path} has shape {shapes[0]}",
            "params has",
            "one gradient for each leaf",
            given=(params, state),
        ):
            opt.apply(other, state, params, donate=donate)


@DONATE
@pytest.mark.parametrize("kind", STATEFUL)
def test_trees_of_another_model_are_refused(kind, donate):
    opt, name = STATEFUL[kind]
    params = make_params()
    state = opt.init(params)
    less = {"w": params["w"], "b": params["b"]}
    held = state._replace(**{name: getattr(opt.init(less), name)})
    with refused(
        ValueError,
        f"state.{name} does not have the structure of params",
        f"state.{name}['in'][0] is missing",
        BELONGS,
        given=(params, held),
    ):
        opt.apply(PARAMS, held, params, donate=donate)
    with refused(
        ValueError,
        "grads does not have the structure of params",
        "grads['in'][0] is missing",
        given=(params, state),
    ):
        opt.apply(less, state, params, donate=donate)


@DONATE
@pytest.mark.parametrize("kind", STATEFUL)
def test_leaves_that_are_no_tensors_are_named(kind, donate):
    opt, name = STATEFUL[kind]
    params, wrong = make_params(), make_params() | {"b": 1.0}
    state = opt.init(params)
    held = state._replace(**{name: wrong})
    with refused(TypeError, f"state.{name}['b'] is a float", BELONGS, given=(params, state)):
        opt.apply(PARAMS, held, params, donate=donate)
    with refused(TypeError, "grads['b'] is a float", "expected a tensor", given=(params, state)):
        opt.apply(wrong, state, params, donate=donate)


@DONATE
def test_a_state_that_lacks_a_tree_is_refused(donate):
    params = make_params()
    for less, more, name in (
        (pa.sgd(0.1), pa.sgd(0.1, 0.9), "momentum"),
        (pa.adam(0.1), pa.adam(0.1, amsgrad=True), "max_exp_avg_sq"),
    ):
        state = less.init(params)
        with refused(ValueError, f"state.{name}", "is missing", BELONGS, given=(params, state)):
            more.apply(PARAMS, state, params, donate=donate)


@DONATE
def test_a_state_with_a_tree_too_many_is_refused(donate):
    """It would come along for ever, shared by every state after it."""
    params = make_params()
    for less, more, name in (
        (pa.sgd(0.1), pa.sgd(0.1, 0.9), "momentum"),
        (pa.adam(0.1), pa.adam(0.1, amsgrad=True), "max_exp_avg_sq"),
    ):
        state = more.init(params)
        with refused(ValueError, f"state.{name}", OTHER, given=(params, state)):
            less.apply(PARAMS, state, params, donate=donate)


@DONATE
def test_a_state_of_from_torch_for_fewer_leaves_is_refused(donate):
    opt, params = pa.from_torch(torch.optim.Adam), make_params()
    state = opt.init({"w": params["w"]})
    words = ("state.per_leaf has 1 entries for 3 leaves of params", "made from by init")
    with refused(ValueError, *words, given=(params, state)):
        opt.apply(PARAMS, state, params, donate=donate)
    state = opt.init(params)
    with refused(ValueError, "grads", "one gradient for each leaf", given=(params, state)):
        opt.apply({"w": params["w"]}, state, params, donate=donate)


class Growing(torch.optim.SGD):
    """Keeps one thing more in its third step."""

    def step(self, closure=None):
        for x in self.param_groups[0]["params"]:
            state = self.state[x]
            state["n"] = state.get("n", 0) + 1
            if state["n"] == 3:
                state["late"] = torch.ones(1)
        return super().step(closure)


class Strange(torch.optim.SGD):
    def step(self, closure=None):
        for x in self.param_groups[0]["params"]:
            self.state[x]["name"] = "x"
        return super().step(closure)


@DONATE
def test_a_class_whose_state_changes_its_structure_is_refused(donate):
    """Where its step has written to what was given up, nobody can take that for parameters."""
    opt, params = pa.from_torch(Growing, lr=0.1), make_params()
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.apply(PARAMS, state, params)
    words = ("Growing keeps something else than after its first step", "['late']")
    with refused(ValueError, *words, given=() if donate else (params, state)):
        opt.apply(PARAMS, state, params, donate=donate)
    for x in leaves((params, state)) if donate else ():
        with saying(RuntimeError, "failed in the middle", "changed already"):
            x + 1


def test_a_class_that_keeps_what_is_no_number_is_refused():
    words = ("the optimizer keeps 'x' under", "'name'", "tensors and numbers")
    with refused(TypeError, *words, given=PARAMS):
        pa.from_torch(Strange, lr=0.1).init(PARAMS)


# Parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*STATEFUL, "from_torch", "partition", "chain"])
def test_parameters_that_cannot_be_optimized_are_refused(kind):
    opt = {
        "from_torch": pa.from_torch(torch.optim.Adam),
        "partition": pa.partition({"a": pa.sgd(0.1)}, lambda path: "a"),
        "chain": pa.chain(pa.clip_by_global_norm(1.0), pa.adam(0.1)),
    }.get(kind, STATEFUL.get(kind, [None])[0])
    with refused(ValueError, "params has no leaves"):
        opt.init({})
    with refused(TypeError, "params['n'] is torch.int64", "floating-point"):
        opt.init({"n": torch.ones(2, dtype=torch.int64)})
    with refused(TypeError, "params['n'] is a float", "expected a tensor"):
        opt.init({"n": 0.5})


@DONATE
@pytest.mark.parametrize("kind", [*STATEFUL, "from_torch"])
def test_a_complex_gradient_of_a_real_parameter_is_refused(kind, donate):
    """A cast would drop the imaginary parts."""
    opt = {"from_torch": pa.from_torch(torch.optim.Adam)}.get(kind, STATEFUL.get(kind, [None])[0])
    params = make_params()
    state, grads = opt.init(params), params | {"w": params["w"] * 1j}
    words = ("grads['w'] is torch.complex64", "torch.float32 there", "to be real")
    with refused(TypeError, *words, given=(params, state)):
        opt.apply(grads, state, params, donate=donate)


@DONATE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_in_half_precision_on_a_cpu_is_refused(dtype, momentum, donate):
    """torch's kernel would skip most parameters; its Adam is fine."""
    opt, params = pa.sgd(0.1, momentum, fused=True), torch.randn(65).to(dtype)
    state = opt.init(params)
    words = (f"sgd(fused=True) came with parameters in {dtype} on a CPU", "Use fused=False")
    with refused(ValueError, *words, given=(params, state)):
        opt.apply(params.clone(), state, params, donate=donate)
    adam = pa.adam(0.1, fused=True)
    assert (adam.apply(params.clone(), adam.init(params), params)[0] != params).all()


@DONATE
@pytest.mark.parametrize("make", [pa.sgd, pa.adam, pa.adamw])
def test_the_fused_kernels_know_no_complex_numbers(make, donate):
    opt = make(0.1, fused=True)
    params = {"a": torch.ones(3), "c": normal((3,), generator(0), torch.complex64)}
    state = opt.init(params)
    words = (f"{make.__name__}(fused=True) came with parameters in torch.complex64", "fused=False")
    for applied in (None, torch.tensor(True), torch.tensor(False)):
        with refused(ValueError, *words, given=(params, state)):
            opt.apply(clones(params), state, params, applied=applied, donate=donate)


@DONATE
@pytest.mark.parametrize("flag", [None, torch.tensor(True), unread(torch.tensor(True))])
@pytest.mark.parametrize("make", [lambda: pa.sgd(0.1, 0.9), lambda: pa.adam(0.1)])
def test_an_error_in_the_middle_of_the_leaves_loses_nothing(make, flag, donate, monkeypatch):
    """torch's kernels know no float8. Nobody can take parameters of two steps for those of one."""
    monkeypatch.setattr(update, "GROUP", 1)
    opt, params = make(), {"a": torch.ones(3), "b": torch.ones(3).to(torch.float8_e4m3fn)}
    state, grads = opt.init(params), {"a": torch.ones(3), "b": torch.ones(3)}
    with unchanged(*(() if donate else (params, state)), grads), pytest.raises(RuntimeError):
        opt.apply(grads, state, params, applied=flag, donate=donate)
    for x in leaves((params, state)) if donate else ():
        with saying(RuntimeError, "failed in the middle", "changed already"):
            x + 1


# What is no optimizer, what is no map ---------------------------------------------------


def loss(params, batch):
    return (params["w"] * batch).sum()


TAKERS = {
    "make_step": (lambda opt: pa.make_step(loss, opt), "optimizer"),
    "chain": (lambda opt: pa.chain(pa.clip_by_global_norm(1.0), opt), "the last part of chain"),
    "partition": (lambda opt: pa.partition({"a": opt}, str), "the optimizer labelled 'a'"),
}
TAKEN = pytest.mark.parametrize(("take", "name"), TAKERS.values(), ids=TAKERS)


@TAKEN
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop])
def test_torchs_own_optimizers_are_refused(take, name, cls):
    words = (f"{name} is torch's {cls.__name__}", "in place", f"from_torch({cls.__name__}, lr=...)")
    for given in (cls, cls([torch.ones(1)])):
        with refused(TypeError, *words):
            take(given)


@TAKEN
@pytest.mark.parametrize(
    ("given", "came"),
    [
        (pa.clip_by_global_norm(1.0), "a GradientMap"),
        (Count(), "a Count"),
        (None, "a NoneType"),
        (0.1, "a float"),
        (pa.sgd, "a function"),
        (Count, "the class Count"),
        (torch.nn.Linear(1, 1), "a Linear"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_chain_and_partition(take, name, given, came):
    with refused(
        TypeError,
        f"{name} is {came}",
        "init(params)",
        "apply(grads, state, params)",
        "chain(*maps, optimizer)",
    ):
        take(given)


@TAKEN
def test_a_class_in_place_of_its_object_is_refused(take, name):
    with refused(TypeError, f"{name} is the class Polyak"):
        take(Polyak)


def test_what_is_no_part_of_a_chain_is_refused():
    with refused(ValueError, "chain() got nothing", "gradient maps and, last, an optimizer"):
        pa.chain()
    for part, came in ((0.1, "a float"), (torch.relu, "a builtin_function_or_method")):
        with refused(TypeError, f"part 0 of chain is {came}", "a gradient map", "update(grads"):
            pa.chain(part, pa.sgd(0.1))
        with pytest.raises(TypeError, match=r"-> \(grads, state\)\.$"):  # it is no optimizer
            pa.chain(part, pa.sgd(0.1))
    for part in (pa.sgd(0.1), Polyak()):
        words = (
            f"part 1 of chain is a {type(part).__name__}",
            "It is an optimizer, which comes last",
        )
        with refused(TypeError, *words):
            pa.chain(Count(), part, pa.sgd(0.1))
    with refused(TypeError, "part 0 of chain is the class Count"):
        pa.chain(Count, pa.sgd(0.1))


@DONATE
@pytest.mark.parametrize("state", [(), ((),), ((), (), ()), [(), ()], {}, None])
def test_states_of_other_chains_are_refused(state, donate):
    opt, params, grads = (
        pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1)),
        make_params(),
        make_params(1),
    )
    came = f"a tuple of {len(state)}" if isinstance(state, tuple) else f"a {type(state).__name__}"
    with refused(TypeError, f"state is {came}", "a chain of 2 parts", OTHER, given=(params, grads)):
        opt.apply(grads, state, params, donate=donate)


@DONATE
def test_an_error_at_the_end_of_a_chain_loses_no_parameter(donate):
    """Gradients that clipping was given to overwrite are given up before."""
    opt, params = pa.chain(pa.clip_by_global_norm(1.0), pa.adam(0.1)), make_params()
    state, less = opt.init(params), {"w": torch.ones(3, 2)}
    other = ((), opt.init(less)[1])
    for error, words, grads, wrong in (
        (ValueError, ("state[1].exp_avg", "is missing"), make_params(1), other),
        (TypeError, ("state[1] is a tuple", "AdamState"), make_params(1), ((), ())),
        (ValueError, ("grads", "is missing"), less, state),
    ):
        kept = () if donate and grads is less else grads
        with refused(error, *words, given=(params, state, other, kept)):
            opt.apply(grads, wrong, params, donate=donate)


class Loses(Count):
    def update(self, grads, state):
        return {"w": grads["w"]}, state


class Counts(Count):
    def update(self, grads, state):
        return grads | {"b": 1.0}, state


class Turns(Count):
    def update(self, grads, state):
        return grads | {"w": grads["w"] * 1j}, state


class Forgets(Polyak):
    def apply(self, grads, state, params):
        return super().apply(grads, state, params)[0]


class Shrinks(Polyak):
    def apply(self, grads, state, params):
        params, state = super().apply(grads, state, params)
        return params, {"count": state["count"]}


class Broadcasts(Polyak):
    """Where nothing tells, a step that may not be applied has the shape of both."""

    def apply(self, grads, state, params):
        params, state = super().apply(grads, state, params)
        return params | {"w": params["w"][:1]}, state


class Reads(Polyak):
    def apply(self, grads, state, params):
        params, state = super().apply(grads, state, params)
        return params, state | {"count": 1}


@DONATE
def test_what_a_users_own_parts_return_is_checked(donate):
    params, grads = make_params(), make_params(1)
    has_to = "has to return (params, state)"
    for error, parts, words in (
        (ValueError, (Loses(), pa.sgd(0.1)), ("its grads['b'] is missing", "update of a Loses")),
        (TypeError, (Counts(), pa.sgd(0.1)), ("its grads['b'] is a float", "update of a Counts")),
        (TypeError, (Turns(), pa.sgd(0.1)), ("its grads['w'] is torch.complex64", "to be real")),
        (ValueError, (Forgets(),), ("what apply returned", has_to)),
        (ValueError, (Shrinks(),), ("what apply returned", "['average']", has_to)),
        (ValueError, (Broadcasts(),), ("what apply returned[0]['w'] has shape (1, 2)", has_to)),
        (TypeError, (Reads(),), ("what apply returned[1]['count'] is a int", has_to)),
    ):
        opt = pa.chain(*parts)
        state = opt.init(params)
        for flag in (None, torch.tensor(True), torch.tensor(False)):
            with refused(error, *words, given=(params, state, grads)):
                opt.apply(grads, state, params, applied=flag, donate=donate)


# Labels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["none", None, 3])
def test_a_label_without_an_optimizer_is_refused(label):
    opt = pa.partition({"a": pa.sgd(0.1), "b": pa.sgd(0.1)}, lambda path: label)
    with refused(ValueError, f"label_of_path('b') is {label!r}", "one of ['a', 'b']", given=PARAMS):
        opt.init(PARAMS)


def test_a_partition_of_nothing_is_refused():
    with refused(ValueError, "partition got no optimizers", "one for each label"):
        pa.partition({}, str)


def test_two_leaves_of_one_path_are_refused():
    """Keys with dots in them: one of the leaves would be left out without a word."""
    params = {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}
    opt = pa.partition({"x": pa.sgd(0.1)}, lambda path: "x")
    with refused(ValueError, "'a.b'", "params['a']['b']", "params['a.b']", given=params):
        opt.init(params)


@DONATE
def test_states_of_other_partitions_are_refused(donate):
    params, grads = make_params(), make_params(1)
    opt = pa.partition({"a": pa.sgd(0.1), "z": pa.adam(0.1)}, lambda path: "az"[path == "w"])
    state = opt.init(params)
    for other, came in (
        ({"a": state["a"]}, "['a']"),
        (state | {"c": ()}, "['a', 'c', 'z']"),
        ((), "a tuple"),
        (None, "a NoneType"),
    ):
        words = (f"state of partition holds {came}", "['a', 'z']", OTHER)
        with refused(TypeError, *words, given=(params, grads, state)):
            opt.apply(grads, other, params, donate=donate)
    with refused(ValueError, "grads", "one gradient for each leaf", given=(params, grads, state)):
        opt.apply({"w": grads["w"]}, state, params, donate=donate)


@DONATE
def test_a_state_that_does_not_fit_the_last_part_loses_nothing(donate):
    """A state that does not fit is found before the first part has done anything."""
    params, grads = make_params(), make_params(1)
    opt = pa.partition({"a": pa.sgd(0.1), "z": pa.adam(0.1)}, lambda path: "az"[path == "w"])
    state = opt.init(params)
    other = state | {"z": opt.init(params)["a"]}
    with refused(TypeError, "state['z'] is a SGDState", given=(params, state, grads)):
        opt.apply(grads, other, params, donate=donate)


class Fails(Polyak):
    """A user's optimizer that fails when it has everything."""

    def apply(self, grads, state, params):
        raise ArithmeticError


@DONATE
def test_an_error_in_the_middle_of_a_partition_loses_nothing(donate):
    """Where the first part has used the memory that it was given, every later use says so."""
    params, grads = make_params(), make_params(1)
    opt = pa.partition({"a": pa.sgd(0.1, 0.9), "z": Fails()}, lambda path: "az"[path == "w"])
    state = opt.init(params)
    with unchanged(() if donate else (params, grads, state)), pytest.raises(ArithmeticError):
        opt.apply(grads, state, params, donate=donate)
    if donate:
        with saying(RuntimeError, "failed in the middle"):
            opt.apply(grads, state, params, donate=donate)


def test_every_error_says_what_came_and_what_was_expected():
    """A given-up state is refused wherever it comes from."""
    opt, params = pa.adam(0.1), make_params()
    state = opt.init(params)
    new, later = opt.apply(PARAMS, state, params, donate=True)
    for args in ((PARAMS, state, new), (PARAMS, later, params), (params, later, new)):
        with saying(RuntimeError, "given up with donate=True"):
            opt.apply(*args)
    with unchanged(new, later):
        opt.apply(PARAMS, later, new)
