"""``lbfgs`` and ``sam``: what is saved goes on, what is not finite changes nothing, ranks agree.

That the steps of ``lbfgs`` are those of torch's class: see optim/test_lbfgs.py.
"""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal, unchanged
from tests.draws import examples, generator
from tests.ranks import on_ranks
from tests.refusals import refused


pytestmark = [pytest.mark.exact, pytest.mark.given_up("lbfgs and sam")]
ROOT_OF_UNIT = 2.0**-26.5


def randn(seed, **shapes):
    random = generator(seed)
    return {n: torch.randn(x, generator=random, dtype=torch.float64) for n, x in shapes.items()}


def make_params(seed=0):
    return randn(seed, w1=(3, 5), b=(5,), w2=(5, 2), s=())


def loss(params, batch):
    hidden = torch.tanh(batch["x"] @ params["w1"] + params["b"])
    return ((hidden @ params["w2"] * params["s"] - batch["y"]) ** 2).mean()


BATCH = randn(100, x=(12, 3), y=(12, 2))
fn = pa.grad_and_value(loss, microbatch_size=5, engine="auto")


def of_batch(params):
    return fn(params, BATCH)


OPTIMIZERS = {
    "lbfgs": partial(pa.lbfgs, max_iter=3),
    "lbfgs without a search": partial(pa.lbfgs, 0.1, max_iter=3, line_search_fn=None),
    "lbfgs by a schedule": lambda: pa.lbfgs(pa.cosine_decay(1.0, 9), max_iter=2),
    "sam of sgd": lambda: pa.sam(pa.sgd(0.1, momentum=0.9)),
    "sam of a chain": lambda: pa.sam(pa.chain(pa.clip_by_global_norm(0.5), pa.adamw(1e-2)), 0.2),
}
EACH = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


# Any of them -----------------------------------------------------------------------------------


@EACH
def test_a_run_that_is_saved_goes_on_as_if_it_had_not_stopped(make, tmp_path):
    opt, params = make(), make_params()
    state = opt.init(params)
    for n in range(6):
        pa.save(tmp_path / str(n), (params, state))
        params, state = opt.apply(of_batch, state, params)
    for n in range(6):
        again = pa.load(tmp_path / str(n), like=(make_params(), opt.init(make_params())))
        for _ in range(6 - n):
            again = opt.apply(of_batch, again[1], again[0])
        assert_trees_bitwise_equal(again, (params, state))
    assert fn(params, BATCH)[1] < fn(make_params(), BATCH)[1]


@EACH
def test_it_is_pure_and_may_be_given_what_it_takes(make):
    opt, params = make(), make_params()
    params, state = opt.apply(of_batch, opt.init(params), params)
    kept = assert_pure(lambda state, params: opt.apply(of_batch, state, params), state, params)
    old = tree_leaves((state, params))
    donated = opt.apply(of_batch, state, params, donate=True)
    assert_trees_bitwise_equal(donated, kept)
    with pytest.raises(RuntimeError, match="given up with donate=True"):
        [x + 1 for x in old]


@EACH
def test_a_function_that_raises_or_writes_changes_nothing(make):
    opt, params, calls = make(), make_params(), []
    state = opt.init(params)

    def raises(params):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        return of_batch(params)

    with unchanged((params, state)), pytest.raises(KeyError, match="mine"):
        opt.apply(raises, state, params, donate=True)

    def writes(params):
        found = of_batch(params)
        for x in params.values():
            x.zero_()
        return found

    with unchanged((params, state)):
        came = opt.apply(writes, state, params)
    assert_trees_bitwise_equal(came, opt.apply(of_batch, state, params))


@EACH
@pytest.mark.parametrize("what", ["value", "gradient"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_is_not_applied(make, what, number):
    opt, params = make(), make_params()
    params, state = opt.apply(of_batch, opt.init(params), params)

    def bad(params):
        grads, value = of_batch(params)
        if what == "value":
            return grads, value + number
        return grads | {"w2": grads["w2"] + number}, value

    new, later = opt.apply(bad, state, params)
    assert not later.applied
    assert_trees_bitwise_equal(new, params)
    goes_on, _ = opt.apply(of_batch, later, new)
    want, _ = opt.apply(of_batch, state, params)
    assert_trees_bitwise_equal(goes_on, want)


# L-BFGS ----------------------------------------------------------------------------------------


@examples(1 / 4)
@given(st.integers(1, 8), st.integers(0, 2**20), st.booleans())
def test_calls_of_one_iteration_are_one_call_of_many(n, seed, search):
    of = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "max_eval": 10**6}
    of |= {"line_search_fn": "strong_wolfe" if search else None}
    params = make_params(seed)
    one, many = (pa.lbfgs(1.0 if search else 0.05, max_iter=k, **of) for k in (1, n))
    at, state = params, one.init(params)
    for _ in range(n):
        at, state = one.apply(of_batch, state, at)
    came, later = many.apply(of_batch, many.init(params), params)
    assert_trees_bitwise_equal(came, at)
    for name in ("iterations", "gradient", "move", "moves", "changes", "weights", "scale"):
        assert_trees_bitwise_equal(getattr(later, name), getattr(state, name))


def test_what_is_not_remembered_takes_no_memory():
    """A vector of the state takes the memory of one number until it is written, and no other's."""
    opt, params = pa.lbfgs(max_iter=1, history_size=4), make_params()
    size, state = sum(x.numel() for x in params.values()), opt.init(params)
    for n in range(4):
        moves, changes = (
            [x.untyped_storage() for x in way] for way in (state.moves, state.changes)
        )
        for way in (moves, changes):
            assert [x.nbytes() // 8 for x in way] == [1] * (4 - max(0, n - 1)) + [size] * max(
                0, n - 1
            )
        assert len({x.data_ptr() for x in (*moves, *changes)}) == 8
        old = {x.untyped_storage().data_ptr() for x in tree_leaves((state, params))}
        params, new = opt.apply(of_batch, state, params)
        assert old.isdisjoint(x.untyped_storage().data_ptr() for x in tree_leaves((new, params)))
        state = new


def test_params_that_stay_have_memory_of_their_own():
    opt, params = pa.lbfgs(), {"w": torch.ones((), dtype=torch.float64).expand(3)}
    came, _ = opt.apply(lambda p: (p, math.nan), opt.init(params), params)
    assert came["w"].add_(torch.arange(3)).tolist() == [1.0, 2.0, 3.0]


def test_parameters_without_a_number_stay():
    opt, params = pa.lbfgs(), {"w": torch.zeros(0).double()}
    came, state = opt.apply(lambda p: (p, 1.0), opt.init(params), params)
    came, state = opt.apply(lambda p: (p, 1.0), state, came)
    assert came["w"].shape == (0,)
    assert int(state.evaluations) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_what_is_remembered_is_float32_at_least(dtype):
    """Of narrow parameters and gradients, and of complex ones twice as many real numbers."""
    params = {"w": torch.arange(6.0).reshape(2, 3).to(dtype), "b": torch.ones((), dtype=dtype)}
    squares = pa.grad_and_value(
        lambda p: sum(((x - 2).abs().float() ** 2).sum() for x in p.values()), batch_argnums=()
    )
    opt = pa.lbfgs(max_iter=8)
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.apply(squares, state, params)
        numbers = [state.gradient, state.move, *state.moves, *state.changes]
        size = 14 if dtype.is_complex else 7
        assert {(x.dtype, x.shape) for x in numbers} == {(torch.float32, (size,))}
        assert {x.dtype for x in params.values()} == {dtype}
    assert all(((x - 2).abs() <= 2**-6).all() for x in params.values())  # two places of bfloat16


def test_where_it_cannot_look_it_says_so():
    opt, params = pa.lbfgs(), make_params()
    state = opt.init(params)
    words = "lbfgs cannot run under a torch.func transform", "adamw or sam"

    def value(params):
        return opt.apply(of_batch, state, params)[0]["s"]

    with refused(RuntimeError, *words, given=(params, state)):
        grad(value)(params)
    with refused(RuntimeError, *words):
        vmap(value)(pa.stack([params, params]))


@on_ranks(2)
def test_ranks_walk_together(rank, world):
    """Each has some of the samples, and all of them take the steps of one process, bit for bit."""
    acc = pa.accumulator(loss, engine="auto")
    own = {n: x[:8] if rank == 0 else x[8:] for n, x in BATCH.items()}

    def of_ranks(params):
        state = acc.init(params)
        for part in pa.microbatches(own, 4):
            state = acc.update(state, params, part, donate=True)
        return acc.finalize(pa.distributed.all_reduce(state))

    for opt in (pa.lbfgs(max_iter=4), pa.sam(pa.adam(1e-2))):
        params = make_params()
        state = opt.init(params)
        for _ in range(4):
            params, state = opt.apply(of_ranks, state, params)
        for x in tree_leaves((params, state)):
            of_all = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(of_all, x.contiguous())
            assert torch.equal(*of_all)
        assert fn(params, BATCH)[1] < fn(make_params(), BATCH)[1]


# SAM -------------------------------------------------------------------------------------------


def uphill(params, rho):
    """As it is written, in plain torch, from the gradient of the full batch."""
    grads, _ = torch.func.grad_and_value(loss)(params, BATCH)
    norm = torch.sqrt(sum((g**2).sum() for g in grads.values()))
    return {n: x + rho * grads[n] / norm for n, x in params.items()}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_sam_is_a_step_by_the_gradient_uphill(kind):
    """Of torch's own classes; to the root of the unit, of the way."""
    make = {
        "sgd": (pa.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        "adamw": (pa.adamw, torch.optim.AdamW, {"lr": 0.01}),
    }
    ours, theirs, options = make[kind]
    start, opt = make_params(), pa.sam(ours(**options), rho=0.3)
    beside = {n: x.clone().requires_grad_() for n, x in start.items()}
    optimizer, params, state = theirs(beside.values(), **options), start, opt.init(start)
    for _ in range(5):
        now = {n: x.detach() for n, x in beside.items()}
        grads = torch.func.grad(loss)(uphill(now, 0.3), BATCH)
        for n, x in beside.items():
            x.grad = grads[n]
        optimizer.step()
        params, state = opt.apply(of_batch, state, params)
        assert state.applied
        off = pa.global_norm({n: x - beside[n].detach() for n, x in params.items()})
        way = pa.global_norm({n: x - start[n] for n, x in params.items()})
        assert off <= ROOT_OF_UNIT * way


def test_sam_without_a_gradient_stays():
    """A norm of zero has no direction; and a derivative through it is no NaN."""
    opt, params = pa.sam(pa.sgd(0.5)), {"w": torch.zeros(3).double()}
    squares = pa.grad_and_value(lambda p: p["w"].square().sum(), batch_argnums=())
    new, state = opt.apply(squares, opt.init(params), params)
    assert_trees_bitwise_equal(new, params)
    assert state.applied
    through = grad(lambda p: opt.apply(squares, opt.init(p), p)[0]["w"].sum())(params)
    assert torch.equal(through["w"], torch.zeros(3).double())  # 1 - 0.5 * 2


@pytest.mark.parametrize("make", [lambda: pa.sgd(0.1, momentum=0.9), lambda: pa.adam(0.1)])
def test_sam_under_transforms(make):
    """Members of an ensemble are what each is alone; a derivative is that of differences."""
    opt = pa.sam(make(), rho=0.2)

    def two(params):
        state = opt.init(params)
        for _ in range(2):
            params, state = opt.apply(of_batch, state, params)
        return params

    members = [make_params(i) for i in range(3)]
    for came, params in zip(pa.unstack(vmap(two)(pa.stack(members))), members, strict=True):
        want = two(params)
        off = pa.global_norm({n: x - want[n] for n, x in came.items()})
        assert off <= ROOT_OF_UNIT * pa.global_norm(want)

    params, along = make_params(7), make_params(8)

    def at(h):
        moved = {n: x + h * along[n] for n, x in params.items()}
        return loss(two(moved), BATCH)

    zero = torch.zeros((), dtype=torch.float64)
    derivative = grad(at)(zero)
    # a central difference is off by h²; one of half of h by a quarter of that
    d1, d2 = ((at(zero + h) - at(zero - h)) / (2 * h) for h in (2e-4, 1e-4))
    assert abs(derivative - d2) <= abs(d1 - d2) + 1e-9 * abs(d2)


def test_a_member_that_is_not_finite_leaves_the_others_alone():
    opt = pa.sam(pa.sgd(0.1, momentum=0.9), rho=0.2)
    members = [make_params(i) for i in range(3)]
    members[1]["b"] = members[1]["b"].fill_(math.nan)
    params, states = pa.stack(members), pa.stack([opt.init(x) for x in members])
    came, later = vmap(lambda s, p: opt.apply(of_batch, s, p))(states, params)
    assert later.applied.tolist() == [True, False, True]
    assert_trees_bitwise_equal(pa.unstack(came)[1], members[1])
    assert_trees_bitwise_equal(pa.unstack(later)[1].optimizer, pa.unstack(states)[1].optimizer)
    for i in (0, 2):
        want, _ = opt.apply(of_batch, opt.init(members[i]), members[i])
        off = pa.global_norm({n: x[i] - want[n] for n, x in came.items()})
        assert off <= ROOT_OF_UNIT * pa.global_norm(want)
