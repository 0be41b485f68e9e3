"""What no optimizer can work with is refused by name, and nothing is lost by asking."""

import math
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import pureaccum as pa
from pureaccum._base import reprs
from pureaccum._optim import updates
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.optimizers import Count, Polyak, clones, leaves, make_params, normal, unread
from tests.refusals import refused, saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
DONATE = pytest.mark.parametrize(
    "donate",
    [
        pytest.param(False, id="kept"),
        pytest.param(True, id="donated", marks=pytest.mark.given_up("donation elsewhere")),
    ],
)
PARAMS = make_params()
ADAMS = (pa.adam, pa.adamw)
BELONGS = "Pass a state that init made from these params"
OTHER = "the state comes from another configuration"
STATEFUL = {
    "sgd": (pa.sgd(0.1, 0.9), "momentum"),
    "adam": (pa.adam(0.1), "exp_avg"),
    "adamw": (pa.adamw(0.1, amsgrad=True), "max_exp_avg_sq"),
    "fused adamw": (pa.adamw(0.1, fused=True), "exp_avg_sq"),
}


def is_by(value, *numbers):
    """Numbers are of a wrong value, all else of a wrong type."""
    return ValueError if type(value) in (numbers or (float,)) else TypeError


# Settings -------------------------------------------------------------------------------


def settings():
    """What is called, and what the error has to say."""
    for make in (pa.sgd, *ADAMS):
        rate = "a float, a 0-d tensor or a schedule"
        for value in (-0.1, math.nan, math.inf):
            yield partial(make, value), ValueError, (f"lr is {value!r}", rate, "not negative")
        for value in (None, "0.1", True):
            words = (f"lr is {value!r}", rate, type(value).__name__)
            yield partial(make, value), TypeError, words
        yield partial(make, torch.ones(2)), ValueError, ("lr is a tensor of shape (2,)",)
        names = ("weight_decay", "momentum" if make is pa.sgd else "eps")
        for name, value in product(names, (-1e-3, math.inf, math.nan, None, "1", True)):
            words = (f"{name} is {value!r}", "a finite number of at least 0")
            yield partial(make, 0.1, **{name: value}), is_by(value), words
    torchs = lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 3)
    adam_of_torch = partial(pa.from_torch, torch.optim.Adam)
    for make, value in product((pa.sgd, *ADAMS, adam_of_torch), (torchs, lr_scheduler.StepLR)):
        words = ("lr is StepLR, a scheduler of torch", "a schedule", "cosine_decay")
        yield partial(make, lr=value), TypeError, words
    for value in (math.nan, None):
        words = (f"dampening is {value!r}", "a finite number")
        yield partial(pa.sgd, 0.1, 0.9, value), is_by(value), words
    for make, beta, i in product(ADAMS, (-0.1, 1.0, 1.5, math.nan, "a"), (0, 1)):
        words = (f"betas[{i}] is {beta!r}", "a number from 0 to less than 1")
        yield partial(make, 0.1, [(beta, 0.9), (0.9, beta)][i]), is_by(beta), words
    for make, betas in product(ADAMS, ((0.9,), (0.9,) * 3, 0.9)):
        words = (f"betas is {betas!r}", "two numbers from 0 to less than 1")
        yield partial(make, 0.1, betas), ValueError, words
    for momentum, dampening in ((0.0, 0.0), (0.9, 0.1), (0.0, 0.1)):
        words = ("nesterov=True", f"momentum={momentum!r}", f"dampening={dampening!r}")
        make = partial(pa.sgd, 0.1, momentum, dampening, nesterov=True)
        yield make, ValueError, (*words, "needs a momentum above zero")
    for value in (0, -1.0, math.nan, None, True, "1"):
        words = (f"max_norm is {value!r}", "a number above zero")
        yield partial(pa.clip_by_global_norm, value), is_by(value, int, float), words


def takers(opt):
    """What takes an optimizer, and what it calls it."""
    yield partial(pa.make_step, lambda params, batch: params["w"].sum(), opt), "optimizer"
    yield partial(pa.chain, pa.clip_by_global_norm(1.0), opt), "the last part of chain"
    yield partial(pa.partition, {"a": opt}, str), "the optimizer labelled 'a'"


def parts():
    """What is no optimizer, and what is no map."""
    for cls in (torch.optim.Adam, torch.optim.RMSprop):
        for opt in (cls, cls([torch.ones(1)])):
            for take, name in takers(opt):
                words = (f"{name} is torch's {cls.__name__}", "in place")
                yield take, TypeError, (*words, f"from_torch({cls.__name__}, lr=...)")
    for given, came in (
        (pa.clip_by_global_norm(1.0), "a GradientMap"),
        (Count(), "a Count"),
        (None, "a NoneType"),
        (0.1, "a float"),
        (Count, "the class Count"),
        (torch.nn.Linear(1, 1), "a Linear"),
    ):
        for take, name in takers(given):
            words = (f"{name} is {came}", "init(params)", "apply(grads, state, params)")
            yield take, TypeError, (*words, "chain(*maps, optimizer)")
    for take, name in takers(pa.sgd):
        yield take, TypeError, (f"{name} is the function sgd", "sgd(...)")
    for make, given in product((pa.sgd, *ADAMS), (torch.nn.Linear(1, 1), (x for x in ()))):
        words = (f"lr is {reprs.kind(given)}", "functional(module).params", "init")
        yield partial(make, given), TypeError, words
        yield partial(make, given, lr=0.1), TypeError, words
    for take, name in takers(Polyak):
        yield take, TypeError, (f"{name} is the class Polyak",)
    words = ("chain got no parts", "gradient maps and, last, an optimizer")
    yield pa.chain, ValueError, words
    for part, came in ((0.1, "a float"), (torch.relu, "a builtin_function_or_method")):
        words = (f"part 0 of chain is {came}", "a gradient map", "update(grads")
        yield partial(pa.chain, part, pa.sgd(0.1)), TypeError, words
    for part in (pa.sgd(0.1), Polyak()):
        words = (f"part 1 of chain is {reprs.kind(part)}",)
        run = partial(pa.chain, Count(), part, pa.sgd(0.1))
        yield run, TypeError, (*words, "Pass an optimizer last")
    words = ("part 0 of chain is the class Count",)
    yield partial(pa.chain, Count, pa.sgd(0.1)), TypeError, words
    words = ("partition got no optimizers", "one for each label")
    yield partial(pa.partition, {}, str), ValueError, words
    for label in ("none", None, 3):
        opt = pa.partition({"a": pa.sgd(0.1), "b": pa.sgd(0.1)}, lambda path, it=label: it)
        words = (f"label_of_path('b') returned {label!r}", "one of ['a', 'b']")
        yield partial(opt.init, PARAMS), ValueError, words
    # keys with dots in them: one of the leaves would be left out without a word
    params = {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}
    init = pa.partition({"x": pa.sgd(0.1)}, lambda path: "x").init
    words = ("'a.b'", "params['a']['b']", "params['a.b']")
    yield partial(init, params), ValueError, words
    words = ("the optimizer keeps 'x' under", "'name'", "tensors and numbers")
    yield partial(pa.from_torch(Strange, lr=0.1).init, PARAMS), TypeError, words


def strange(self, closure=None):
    for x in self.param_groups[0]["params"]:
        self.state[x]["name"] = "x"


Strange = type("Strange", (torch.optim.SGD,), {"step": strange})


@pytest.mark.parametrize(("run", "error", "words"), [*settings(), *parts()])
def test_what_an_optimizer_is_not_made_of_is_refused(run, error, words):
    with refused(error, *words, given=PARAMS):
        run()


@pytest.mark.parametrize("part", [0.1, torch.relu])
def test_what_is_no_part_of_a_chain_is_not_taken_for_an_optimizer(part):
    with pytest.raises(TypeError, match=r"-> \(grads, state\)\.$"):
        pa.chain(part, pa.sgd(0.1))


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


# States and gradients ---------------------------------------------------------------------


def misfits():
    """An optimizer, what it is given, and what the error has to say."""
    params = make_params()
    less, yet = {"w": params["w"], "b": params["b"]}, "one gradient for each leaf"
    for opt, name in STATEFUL.values():
        state, kind = opt.init(params), type(opt.init(PARAMS)).__name__
        for other in (None, (), {}, 3, pa.accumulator(lambda p, x: p).init(PARAMS)):
            words = (f"state is {reprs.kind(other)}", kind, OTHER)
            yield opt, (PARAMS, other, PARAMS), TypeError, words
        for path, changed in (
            ("['w']", {"w": torch.ones(2, 2)}),
            ("['in'][0]", {"in": [torch.ones(1)]}),
        ):
            other, words = params | changed, (f"has shape {tuple(leaves(changed)[0].shape)}",)
            held = state._replace(**{name: getattr(opt.init(other), name)})
            more = (f"state.{name}{path} {words[0]}", "as in params", BELONGS)
            yield opt, (PARAMS, held, params), ValueError, more
            more = (f"grads{path} {words[0]}", "as in params", yet)
            yield opt, (other, state, params), ValueError, more
        held = state._replace(**{name: getattr(opt.init(less), name)})
        missing = "['in'][0] is missing"
        words = (f"state.{name} does not have the structure of params", f"state.{name}{missing}")
        yield opt, (PARAMS, held, params), ValueError, (*words, BELONGS)
        words = ("grads does not have the structure of params", f"grads{missing}")
        yield opt, (less, state, params), ValueError, words
        wrong = params | {"b": 1.0}
        held = state._replace(**{name: wrong})
        words = (f"state.{name}['b'] is a float", BELONGS)
        yield opt, (PARAMS, held, params), TypeError, words
        words = ("grads['b'] is a float", "expected a tensor")
        yield opt, (wrong, state, params), TypeError, words
    # A cast would drop the imaginary parts.
    adam = pa.from_torch(torch.optim.Adam)
    for opt in (*(opt for opt, _ in STATEFUL.values()), adam):
        words = ("grads['w'] is torch.complex64", "torch.float32 there", "a real gradient")
        grads = params | {"w": params["w"] * 1j}
        yield opt, (grads, opt.init(params), params), TypeError, words
    for opt, other, came, expected in (
        (pa.sgd(0.1), pa.adam(0.1), "an AdamState", "sgd expects the SGDState"),
        (pa.adam(0.1), pa.sgd(0.1), "a SGDState", "adam expects the AdamState"),
        (
            pa.from_torch(torch.optim.SGD),
            pa.sgd(0.1),
            "a SGDState",
            "from_torch(SGD) expects the TorchState",
        ),
    ):
        words = (f"state is {came}", expected)
        yield opt, (PARAMS, other.init(params), params), TypeError, words
    rates = ((0.1, torch.tensor(0.1)), (pa.constant(0.1), 0.2))
    for make, (ours, theirs) in product((pa.sgd, *ADAMS), rates):
        state = make(theirs).init(params)
        words = (f"state.lr is {state.lr!r}", "made with lr=", "The state holds a number as lr")
        yield make(ours), (PARAMS, state, params), ValueError, (*words, OTHER)
    for fewer, more, name in (
        (pa.sgd(0.1), pa.sgd(0.1, 0.9), "momentum"),
        (pa.adam(0.1), pa.adam(0.1, amsgrad=True), "max_exp_avg_sq"),
    ):
        words = (f"state.{name}", "is missing", BELONGS)
        yield more, (PARAMS, fewer.init(params), params), ValueError, words
        # it would come along for ever, shared by every state after it
        yield fewer, (PARAMS, more.init(params), params), ValueError, (f"state.{name}", OTHER)
    one = {"w": params["w"]}
    words = ("state.per_leaf has 1 entries; expected 3", "that init made from these params")
    yield adam, (PARAMS, adam.init(one), params), ValueError, words
    yield adam, (one, adam.init(params), params), ValueError, ("grads", yet)
    chain = pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1))
    for state in ((), ((),), ((), (), ()), [(), ()], {}, None):
        came = f"a tuple of {len(state)}" if isinstance(state, tuple) else reprs.kind(state)
        words = (f"state is {came}", "a chain of 2 parts", OTHER)
        yield chain, (PARAMS, state, params), TypeError, words
    parts = pa.partition({"a": pa.sgd(0.1), "z": pa.adam(0.1)}, lambda path: "az"[path == "w"])
    state = parts.init(params)
    for other, came in (
        ({"a": state["a"]}, "['a']"),
        (state | {"c": ()}, "['a', 'c', 'z']"),
        ((), "a tuple"),
        (None, "a NoneType"),
    ):
        words = (f"state of partition holds {came}", "['a', 'z']", OTHER)
        yield parts, (PARAMS, other, params), TypeError, words
    yield parts, (one, state, params), ValueError, ("grads", yet)
    # a state that does not fit is found before the first part has done anything
    words = ("state['z'] is a SGDState",)
    yield parts, (PARAMS, state | {"z": state["a"]}, params), TypeError, words


@DONATE
@pytest.mark.parametrize(("opt", "given", "error", "words"), [*misfits()])
def test_a_state_or_gradients_that_do_not_fit_are_refused(opt, given, error, words, donate):
    with refused(error, *words, given=given):
        opt.apply(*given, donate=donate)


class Growing(torch.optim.SGD):
    """Keeps one thing more in its third step."""

    def step(self, closure=None):
        for x in self.param_groups[0]["params"]:
            state = self.state[x]
            state["n"] = state.get("n", 0) + 1
            if state["n"] == 3:
                state["late"] = torch.ones(1)
        return super().step(closure)


@DONATE
def test_a_class_whose_state_changes_its_structure_is_refused(donate):
    """Where its step has written to what was given up, nobody can take that for parameters."""
    opt, params = pa.from_torch(Growing, lr=0.1), make_params()
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.apply(PARAMS, state, params)
    words = ("Growing keeps other values than after its first step", "['late']")
    with refused(ValueError, *words, given=() if donate else (params, state)):
        opt.apply(PARAMS, state, params, donate=donate)
    for x in leaves((params, state)) if donate else ():
        with saying(RuntimeError, "failed in the middle", "changed some of the numbers"):
            x + 1


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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_in_half_precision_on_a_cpu_is_refused(dtype, momentum, donate):
    """torch's kernel would skip most parameters; its Adam is fine."""
    opt, params = pa.sgd(0.1, momentum, fused=True), torch.randn(65).to(dtype)
    state = opt.init(params)
    words = (
        f"sgd(fused=True) does not work with parameters in {dtype} on a CPU",
        "Use fused=False",
    )
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
    words = (
        f"{make.__name__}(fused=True) does not work with parameters in torch.complex64",
        "fused=False",
    )
    for applied in (None, torch.tensor(True), torch.tensor(False)):
        with refused(ValueError, *words, given=(params, state)):
            opt.apply(clones(params), state, params, applied=applied, donate=donate)


@DONATE
@pytest.mark.parametrize("flag", [None, torch.tensor(True), unread(torch.tensor(True))])
@pytest.mark.parametrize("make", [lambda: pa.sgd(0.1, 0.9), lambda: pa.adam(0.1)])
def test_an_error_in_the_middle_of_the_leaves_loses_nothing(make, flag, donate, monkeypatch):
    """torch's kernels know no float8. Nobody can take parameters of two steps for those of one."""
    monkeypatch.setattr(updates, "GROUP", 1)
    opt, params = make(), {"a": torch.ones(3), "b": torch.ones(3).to(torch.float8_e4m3fn)}
    state, grads = opt.init(params), {"a": torch.ones(3), "b": torch.ones(3)}
    with unchanged(*(() if donate else (params, state)), grads), pytest.raises(RuntimeError):
        opt.apply(grads, state, params, applied=flag, donate=donate)
    for x in leaves((params, state)) if donate else ():
        with saying(RuntimeError, "failed in the middle", "changed some of the numbers"):
            x + 1


# Users' own parts -------------------------------------------------------------------------


def a_map(change):
    """A user's map that returns other gradients than it has to."""
    update = lambda self, grads, state: (change(grads), state)  # noqa: E731
    return type("Other", (Count,), {"update": update})()


def an_optimizer(change):
    """A user's optimizer that returns something else than it has to."""

    def apply(self, grads, state, params):
        return change(*Polyak.apply(self, grads, state, params))

    return type("Other", (Polyak,), {"apply": apply})()


HAS_TO = "must return (params, state)"
OTHERS = {
    "loses": (
        ValueError,
        a_map(lambda grads: {"w": grads["w"]}),
        ("its grads['b'] is missing", "update of an Other"),
    ),
    "counts": (
        TypeError,
        a_map(lambda grads: grads | {"b": 1.0}),
        ("its grads['b'] is a float", "update of an Other"),
    ),
    "turns": (
        TypeError,
        a_map(lambda grads: grads | {"w": grads["w"] * 1j}),
        ("its grads['w'] is torch.complex64", "a real gradient"),
    ),
    "forgets": (
        ValueError,
        an_optimizer(lambda params, state: params),
        ("the result of apply", HAS_TO),
    ),
    "shrinks": (
        ValueError,
        an_optimizer(lambda params, state: (params, {"count": state["count"]})),
        ("the result of apply", "['average']", HAS_TO),
    ),
    # where nothing tells, a step that may not be applied has the shape of both
    "broadcasts": (
        ValueError,
        an_optimizer(lambda params, state: (params | {"w": params["w"][:1]}, state)),
        ("the result of apply[0]['w'] has shape (1, 2)", HAS_TO),
    ),
    "reads": (
        TypeError,
        an_optimizer(lambda params, state: (params, state | {"count": 1})),
        ("the result of apply[1]['count'] is an int", HAS_TO),
    ),
}


@DONATE
@pytest.mark.parametrize(("error", "part", "words"), OTHERS.values(), ids=OTHERS)
def test_what_a_users_own_parts_return_is_checked(error, part, words, donate):
    params, grads = make_params(), make_params(1)
    opt = pa.chain(part, *[pa.sgd(0.1)] * isinstance(part, Count))
    state = opt.init(params)
    for flag in (None, torch.tensor(True), torch.tensor(False)):
        with refused(error, *words, given=(params, state, grads)):
            opt.apply(grads, state, params, applied=flag, donate=donate)


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


@pytest.mark.parametrize("donate", [False, True])
def test_a_training_step_that_fails_in_the_middle_says_what_is_lost(donate):
    """Of a state that was not donated, nothing is."""
    opt = pa.partition({"a": pa.sgd(0.1, 0.9), "z": Fails()}, lambda path: "az"[path == "w"])
    step = pa.make_step(lambda p, x: (p["w"] * p["b"] * x).mean(), opt, donate=donate)
    state, batch = step.init({"w": torch.ones(2), "b": torch.ones(())}), torch.ones(3, 2)
    with unchanged(() if donate else state, batch), pytest.raises(ArithmeticError):
        step(state, batch)
    if donate:
        with saying(RuntimeError, "failed in the middle"):
            step(state, batch)


@pytest.mark.given_up("donation elsewhere")
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
