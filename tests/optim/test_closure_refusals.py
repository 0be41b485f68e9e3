"""What ``lbfgs`` and ``sam`` cannot work with is refused by name, and where nothing can be done."""

import math
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.optimizers import leaves
from tests.refusals import PARAMS, Loss, make_batch, refused, squares


pytestmark = [pytest.mark.faults, pytest.mark.given_up("lbfgs and sam"), pytest.mark.table]
BATCH = make_batch(6)
fn = pa.grad_and_value(squares, microbatch_size=4, engine="auto")
MINIMIZERS = {"lbfgs": pa.lbfgs(max_iter=2), "sam": pa.sam(pa.sgd(0.1))}
BOTH = pytest.mark.parametrize("name", MINIMIZERS)


def of_batch(params):
    return fn(params, BATCH)


def settings():
    """What is called, and what the error has to say."""
    for error, words, options in (
        (ValueError, "lr is -0.1", {"lr": -0.1}),
        (TypeError, "lr is 'fast', a str", {"lr": "fast"}),
        (ValueError, "max_iter is 0; expected an int of", {"max_iter": 0}),
        (TypeError, "max_iter is 0.5, a float", {"max_iter": 0.5}),
        (ValueError, "max_eval is 0; expected an int of", {"max_eval": 0}),
        (ValueError, "history_size is 0", {"history_size": 0}),
        (ValueError, "tolerance_grad is -1.0", {"tolerance_grad": -1.0}),
        (ValueError, "tolerance_change is nan", {"tolerance_change": math.nan}),
        (
            ValueError,
            "line_search_fn is 'armijo'; expected 'strong_wolfe' or None",
            {"line_search_fn": "armijo"},
        ),
    ):
        yield partial(pa.lbfgs, **options), error, (words,)
    yield partial(pa.sam, pa.sgd(), rho=-1), ValueError, ("rho is -1.0",)
    yield partial(pa.sam, pa.sgd(), rho=None), TypeError, ("rho is None, a NoneType",)
    yield partial(pa.sam, torch.optim.SGD), TypeError, ("expected pureaccum's sgd",)
    words = ("lr is 1e+300, which params['b'] in torch.float32 cannot hold",)
    yield partial(pa.lbfgs(1e300).init, PARAMS), ValueError, words
    words = ("LBFGS cannot become", "a closure", "lbfgs, which takes a function")
    yield partial(pa.from_torch, torch.optim.LBFGS), ValueError, words


def functions():
    """Functions that give something else than gradients and a value."""
    grads, value = of_batch(PARAMS)
    for came, error, *words in (
        (grads, TypeError, "func returned a dict", "(grads, value)"),
        ((grads, value, value), TypeError, "func returned 3 values"),
        (
            ({"w": grads["w"]}, value),
            ValueError,
            "the grads of func['b'] is missing",
            "in this order",
        ),
        (
            (grads | {"b": torch.ones(1)}, value),
            ValueError,
            "the grads of func['b'] has shape (1,)",
        ),
        ((grads, torch.ones(2)), ValueError, "the value of func has shape (2,)", "one real number"),
        ((grads, (value, 1)), TypeError, "the value of func is a tuple", "aux"),
        ((grads, torch.tensor(1j)), ValueError, "torch.complex64"),
        ((grads, True), TypeError, "the value of func is a bool"),
        ((grads, None), TypeError, "the value of func is a NoneType"),
        (
            (grads | {"w": grads["w"] + 0j}, 1.0),
            TypeError,
            "the grads of func['w'] is torch.complex64",
            "torch.float32",
        ),
        (
            (grads | {"w": 1.0}, 1.0),
            TypeError,
            "the grads of func['w'] is a float; expected a tensor",
        ),
    ):
        for opt in MINIMIZERS.values():
            run = partial(opt.apply, lambda params, came=came: came, opt.init(PARAMS), PARAMS)
            yield run, error, words
    for name, opt in MINIMIZERS.items():
        words = (f"func is a dict; {name} expects a function of the parameters",)
        yield partial(opt.apply, grads, opt.init(PARAMS), PARAMS), TypeError, words


@pytest.mark.parametrize(("run", "error", "words"), [*settings(), *functions()])
def test_what_cannot_be_minimised_is_refused(run, error, words):
    with refused(error, *words, given=(PARAMS, run.args[1:])):
        run()


@BOTH
def test_a_value_that_is_a_record_is_not_taken_for_one_with_aux(name):
    opt, weighted = MINIMIZERS[name], pa.Weighted(torch.ones(()), torch.ones(()))
    with pytest.raises(TypeError, match=r"is a Weighted; .* in this order\.$"):
        opt.apply(lambda p: (p, weighted), opt.init(PARAMS), PARAMS)


def misfits():
    """States of other params and settings."""
    lbfgs, sam, momentum = *MINIMIZERS.values(), pa.sam(pa.sgd(0.1, momentum=0.9))
    less, double = {"w": PARAMS["w"]}, {name: x.double() for name, x in PARAMS.items()}
    words = "state.move is 2 numbers in torch.float32 on cpu; expected 3"
    yield lbfgs, lbfgs.init(less), ValueError, words
    yield lbfgs, lbfgs.init(double), ValueError, "state.move is 3 numbers in torch.float64"
    yield lbfgs, pa.lbfgs(history_size=4).init(PARAMS), ValueError, "state remembers 4 moves"
    yield lbfgs, pa.lbfgs(torch.tensor(1.0)).init(PARAMS), ValueError, "state.lr is ()"
    yield momentum, momentum.init(less), ValueError, "state.optimizer.momentum", "'b'"
    yield lbfgs, sam.init(PARAMS), TypeError, "state is a SAMState; lbfgs expects"
    yield sam, lbfgs.init(PARAMS), TypeError, "state is a LBFGSState; sam expects"
    for opt in (lbfgs, sam):
        yield opt, pa.sgd(0.1).init(PARAMS), TypeError, "state is a SGDState", "State"


def test_states_that_do_not_fit_are_refused_before_any_evaluation():
    func = Loss(of_batch)
    for opt, state, error, *words in misfits():
        with refused(error, *words, given=(state, PARAMS), loss=func):
            opt.apply(func, state, PARAMS, donate=True)


# What a function may give ------------------------------------------------------------------------


@BOTH
def test_whatever_torch_takes_for_a_number_is_a_value(name):
    """Nor does anything warn of a value that has a graph."""
    opt = MINIMIZERS[name]

    def followed(params):
        leaves = {name: x.requires_grad_() for name, x in params.items()}
        value = squares(leaves, BATCH)
        grads = torch.autograd.grad(value, [*leaves.values()], create_graph=True)
        return dict(zip(leaves, grads, strict=True)), value

    for record in (True, False):  # as a closure of torch's, it is called with gradients on
        with torch.set_grad_enabled(record):
            came = opt.apply(followed, opt.init(PARAMS), PARAMS)
        assert not any(x.requires_grad for x in leaves(came))
        assert came[1].value == squares(PARAMS, BATCH)
    for value in (1, 1.0, torch.tensor(1)):
        _, state = opt.apply(lambda p, v=value: (of_batch(p)[0], v), opt.init(PARAMS), PARAMS)
        assert state.value == 1


@BOTH
def test_modes_around_a_call_change_nothing(name):
    opt = MINIMIZERS[name]
    want = opt.apply(of_batch, opt.init(PARAMS), PARAMS)
    with torch.inference_mode():
        params = {name: x.clone() for name, x in PARAMS.items()}
        came = opt.apply(of_batch, opt.init(params), params)
    assert not any(x.is_inference() for x in leaves(came))
    assert_trees_bitwise_equal(came, want)
    with torch.device("meta"):
        assert_trees_bitwise_equal(opt.apply(of_batch, opt.init(PARAMS), PARAMS), want)


@BOTH
def test_gradients_may_be_sparse_and_wider_than_parameters(name):
    opt, params = MINIMIZERS[name], {"w": torch.tensor([[1.0, -2.0], [0.5, 0.0]]).bfloat16()}
    found, seen = [], set()
    for form in (lambda g: g, lambda g: g.to_sparse(), lambda g: g.bfloat16()):

        def func(params, form=form):
            seen.add(params["w"].dtype)
            return {"w": form(params["w"].float())}, params["w"].float().square().sum() / 2

        found.append(opt.apply(func, opt.init(params), params))
    assert seen == {torch.bfloat16}
    assert_trees_bitwise_equal(found[1], found[0])
    assert_trees_bitwise_equal(found[2], found[0])


@BOTH
@pytest.mark.parametrize("bad", [1, 2])
def test_one_bad_gradient_of_two_is_enough(name, bad):
    """The first one, or the second one, of numbers that do not depend on where they are."""
    calls = []

    def func(params):
        calls.append(1)
        off = math.nan if len(calls) == bad else 0.0
        return {name: torch.full_like(x, 1.0 + off) for name, x in params.items()}, 1.0

    opt = pa.lbfgs(line_search_fn=None) if name == "lbfgs" else MINIMIZERS[name]
    state = opt.init(PARAMS)
    came, later = opt.apply(func, state, PARAMS)
    assert not later.applied
    assert_trees_bitwise_equal(came, PARAMS)
    assert len(calls) == (bad if name == "lbfgs" else 2)


@pytest.mark.parametrize(("gap", "lr"), [(1e-23, 1e37), (1e30, 1.0), (1e10, 2e28)])
def test_pairs_whose_products_no_number_holds_are_not_remembered(gap, lr):
    """float32: the change of the gradient times itself is zero or infinite, or times the move."""
    slopes = iter([gap, -gap, -gap])
    never = {"tolerance_grad": 0.0, "tolerance_change": 0.0}
    opt = pa.lbfgs(lr, max_iter=1, line_search_fn=None, **never)
    x, state = torch.zeros(1), opt.init(torch.zeros(1))
    for _ in range(2):
        x, state = opt.apply(lambda x: (torch.full_like(x, next(slopes)), 1.0), state, x)
        assert state.applied or gap > 1
        assert not state.weights.any()
        assert state.scale == 1
        assert torch.isfinite(x).all()


def test_a_rate_that_is_not_finite_is_not_applied_and_one_of_zero_stays():
    params, opt = PARAMS, MINIMIZERS["lbfgs"]
    state = opt.init(params)
    for rate in (math.nan, math.inf):
        bad = state._replace(lr=torch.tensor(rate, dtype=torch.float64))
        came, later = opt.apply(of_batch, bad, params)
        assert (later.applied, later.steps, later.evaluations) == (False, 0, 1)
        assert_trees_bitwise_equal(came, params)
    warm = pa.lbfgs(pa.linear_warmup(1.0, 2))
    came, later = warm.apply(of_batch, warm.init(params), params)
    assert (later.applied, later.steps, later.evaluations) == (True, 1, 1)
    assert_trees_bitwise_equal(came, params)
    _, later = warm.apply(of_batch, later, came)
    assert later.iterations > 0


# Where there is nothing to look at ---------------------------------------------------------------


@pytest.mark.slow
def test_lbfgs_says_so_under_forward_ad_and_in_graphs():
    opt = MINIMIZERS["lbfgs"]
    state, words = opt.init(PARAMS), ("lbfgs cannot run under", "the host reads", "adamw or sam")
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(x, torch.ones_like(x)) for name, x in PARAMS.items()}
        with refused(RuntimeError, *words):
            opt.apply(of_batch, state, dual)
    torch._dynamo.reset()
    compiled = torch.compile(lambda s, p: opt.apply(of_batch, s, p), backend="eager")
    with pytest.raises(RuntimeError, match="lbfgs cannot run under"):
        compiled(state, PARAMS)


@BOTH
def test_where_gradients_are_handed_out_it_says_what_it_takes(name):
    opt = MINIMIZERS[name]
    words = f"func is a dict; {name} expects a function", "make_step, chain and partition"
    with refused(TypeError, *words, given=PARAMS):
        opt.apply(PARAMS, opt.init(PARAMS), PARAMS)
    words = name, "takes a function of the parameters", "fn = pa.grad_and_value(loss"
    for make in (
        lambda: pa.make_step(squares, opt, microbatch_size=4),
        lambda: pa.chain(pa.clip_by_global_norm(1.0), opt),
        lambda: pa.partition({"all": opt}, lambda path: "all"),
        lambda: pa.sam(opt),
    ):
        with refused(TypeError, *words):
            make()


# Functions with walls ----------------------------------------------------------------------------


WALLS = {
    "NaN": lambda x: torch.where(x.abs().max() > 1.5, math.nan, 0.0),
    "inf": lambda x: torch.where(x.abs().max() > 1.5, math.inf, 0.0),
    "log": lambda x: -torch.log(1.5 - x).sum(),  # NaN behind the wall, where gradients are finite
    "root": lambda x: torch.sqrt(x + 1.0).sum(),
    "gradient": lambda x: 0.0,  # of which there is none behind the wall, where values are finite
}


def behind(func):
    def walled(x):
        grads, value = func(x)
        return torch.where(x.abs().max() > 1.5, math.nan, grads), value

    return walled


@pytest.mark.slow
@pytest.mark.parametrize("wall", WALLS)
@pytest.mark.parametrize("lr", [1.0, 100.0])
def test_a_search_stays_where_the_function_is_finite(wall, lr):
    """And goes down with every call, wherever the minimum without the wall would be."""
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        a = torch.randn(6, 4, generator=random, dtype=torch.float64)
        y = 3 * torch.randn(6, generator=random, dtype=torch.float64)

        def loss(x, a=a, y=y):
            return ((a @ x - y) ** 2).sum() + WALLS[wall](x)

        func = pa.grad_and_value(loss, batch_argnums=(), engine="auto")
        if wall == "gradient":
            func = behind(func)
        opt, x = pa.lbfgs(lr, max_iter=3), torch.zeros(4, dtype=torch.float64)
        state, values = opt.init(x), []
        for _ in range(8):
            before = x
            x, state = opt.apply(func, state, x)
            values.append(state.value.item())
            assert torch.isfinite(x).all()
            assert all(torch.isfinite(each).all() for each in func(x))
            assert state.applied or torch.equal(x, before)
        assert values == sorted(values, reverse=True)
        assert values[-1] < values[0]


def test_steps_without_a_search_stop_before_a_wall():
    """The call ends where the function was last finite, and the next one says that it is stuck."""

    def slope(x):
        return x + torch.where(x < -3, math.nan, 0.0)

    func = pa.grad_and_value(slope, batch_argnums=(), engine="auto")
    opt, x = pa.lbfgs(2.0, line_search_fn=None), torch.zeros((), dtype=torch.float64)
    x, state = opt.apply(func, opt.init(x), x)
    assert (x, state.applied, state.steps, state.evaluations) == (-2, True, 1, 3)
    stuck, later = opt.apply(func, state, x)
    assert (later.applied, later.steps) == (False, 1)
    assert_trees_bitwise_equal(stuck, x)
