"""A microbatched function changes nothing, and draws what plain code draws.

It is run again for its derivatives, so that all this has to hold there too: when it raises, in
several threads, under random numbers, and where what it captured has changed in between.
"""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import compositions
from tests.calls import ENGINES, NONFINITE, BoomError, Explodes
from tests.draws import examples, generator
from tests.dropped import is_dropped
from tests.problems import drawing, end, in_parts, normal, pulled, together


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
ROWS = 6


def make_params():
    """A small leaf, one of 1 MiB, and one with a gradient and a hook of its own."""
    w = nn.Parameter(torch.arange(12.0).reshape(3, 4) - 5)
    w.grad = torch.ones(3, 4)
    w.register_hook(lambda grad: grad * 7)
    return {"w": w, "large": torch.ones(512, 512), "b": torch.ones(4)}


def make_batch():
    x = torch.arange(3.0 * ROWS).reshape(ROWS, 3) - 4
    return {"x": x, "k": torch.arange(ROWS), "nested": [x[:, 0] > 0]}


def loss_of(hit=lambda x: x, size=4):
    """Samples, and a sum that further samples read; ``hit`` is done to each of them."""

    def encode(p, b):
        h = hit(b["x"]) @ p["w"] + (p["large"] ** 2).sum() * 2.0**-18
        return {"h": h * T, "k": b["k"], "again": [h]}

    last = lambda p, x, s: (hit(x["h"]) - s + p["b"]).abs().sum()  # noqa: E731

    def loss(p, b):
        rows = pa.microbatch(encode, microbatch_size=size)(p, b)
        s = rows["h"].mean(0)
        return pa.microbatch(last, microbatch_size=size, reduce="sum")(p, rows, s)

    return loss


T = torch.tensor(2.0)


def backward(loss):
    by_leaf = lambda p, b: lambda *its: loss(dict(zip(p, its, strict=True)), b)  # noqa: E731
    return lambda p, b: pulled(by_leaf(p, b), *p.values())


CALLS = {
    "value": pa.value,
    "torch.func": torch.func.grad,
    "func": pa.grad,
    "autograd": lambda f: pa.grad(f, engine="autograd"),
    "backward": backward,
}
calls = pytest.mark.parametrize("call", CALLS)


@calls
@pytest.mark.parametrize("size", [1, [5, 1]], ids=str)
def test_a_call_changes_nothing_and_gives_the_same_again(call, size):
    params, batch, run = make_params(), make_batch(), CALLS[call](loss_of(size=size))
    with unchanged(params, batch, T):
        first, second = run(params, batch), run(params, batch)
    assert_trees_bitwise_equal(first, second)


@calls
def test_an_error_inside_changes_nothing(call):
    params, batch = make_params(), make_batch()
    left = 10**6

    def boom(x):
        nonlocal left
        left -= not is_dropped()
        if left < 0:
            raise BoomError
        return x

    run = CALLS[call](loss_of(boom))
    want = run(params, batch)
    for after in range(10**6 - left):
        left = after
        with unchanged(params, batch, T), pytest.raises(BoomError):
            run(params, batch)
    left = 10**6
    assert_trees_bitwise_equal(run(params, batch), want)


HITS = {  # what is done to samples of a width, and the error
    "a bad backward pass": (4, Explodes.apply, BoomError, r"^$|raised"),
    "a write to the batch": (3, torch.relu_, RuntimeError, r"in.place"),
    "a write to rows of a function before": (4, torch.relu_, RuntimeError, r"in.place"),
}


@pytest.mark.parametrize(
    "hit",
    [
        pytest.param(hit, marks=pytest.mark.given_up("early writes") if "batch" in hit else ())
        for hit in HITS
    ],
)
@calls
def test_an_error_of_the_backward_pass_or_of_a_write_changes_nothing(call, hit):
    if (call, hit) == ("value", "a bad backward pass"):
        return
    width, act, error, said = HITS[hit]
    params, batch = make_params(), make_batch()
    loss = loss_of(lambda x: act(x) if x.shape[1] == width else x)
    with unchanged(params, batch, T), pytest.raises(error, match=said):
        CALLS[call](loss)(params, batch)


@pytest.mark.promise("writes")
def test_a_write_under_vmap_is_refused_too():
    """Its wrappers count no writes; what they wrap does."""
    micro = pa.microbatch(lambda w, x: x.mul_(2) * w, microbatch_size=2)
    with pytest.raises(RuntimeError, match=r"in.place"):
        torch.func.vmap(micro, (0, None))(torch.ones(4, 3), torch.ones(6, 3))


@pytest.mark.given_up("early writes")
def test_a_captured_batch_norm_is_refused_before_it_is_written_to():
    """It would couple the samples of a microbatch, and count them twice."""
    norm = nn.BatchNorm1d(3, affine=False)
    micro = pa.microbatch(lambda w, x: norm(x * w), microbatch_size=2)
    x = torch.randn(6, 3)
    with unchanged(norm), pytest.raises(RuntimeError, match=r"in.place"):
        torch.func.grad(lambda w: micro(w, x).sum())(torch.ones(3))


@pytest.mark.promise("writes")
def test_a_captured_batch_norm_that_counts_microbatches_is_refused():
    norm = nn.BatchNorm1d(3, affine=False)
    micro = pa.microbatch(lambda w, x: norm(x * w), microbatch_size=2)
    for call in (lambda f: f, torch.func.grad):
        with pytest.raises(RuntimeError):
            call(lambda w: micro(w, torch.randn(6, 3)).sum())(torch.ones(3))


@calls
def test_a_result_shares_no_memory_with_what_was_given(call):
    params, batch = make_params(), make_batch()
    got = CALLS[call](loss_of())(params, batch)

    def storages(tree):
        return {x.untyped_storage().data_ptr() for x in optree.tree_leaves(tree)}

    assert not storages(got) & storages([params, batch, T])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_stay_and_modules_keep_their_statistics(mode):
    """A module in training mode, called through ``functional``, under no_grad and not."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), make_batch()["x"]
    linear = pa.functional(net[0])

    def loss(p, x):
        h = pa.microbatch(lambda p, x: linear.apply(p, (), x)[0], microbatch_size=4)(p, x)
        return nn.functional.batch_norm(h, None, None, training=True).pow(3).sum()

    first = pa.grad(loss)(linear.params, x)
    with unchanged(net, linear.params, x), mode():
        again = pa.grad(loss)(linear.params, x)
        assert torch.is_grad_enabled() is False
    assert_trees_bitwise_equal(again, first)
    assert not any(t.requires_grad for t in first.values())


# What has changed when it is run again -----------------------------------------------------


@pytest.mark.promise("second run")
@pytest.mark.parametrize("what", ["given", "captured", "parameter", "frozen parameter"])
def test_what_is_written_to_before_the_backward_pass_is_refused(what):
    """As plain autograd refuses it: it would be another function that is differentiated."""
    c, frozen, linear = torch.ones(3), nn.Linear(3, 3), nn.Linear(3, 3)
    frozen.requires_grad_(False)
    x = torch.ones(ROWS, 3, requires_grad=True)
    given_ = x * 1
    z = pa.microbatch(lambda x: linear(frozen(x)).tanh() * c, microbatch_size=2, batch_argnums=0)(
        given_
    )
    written = {"given": given_, "captured": c, "parameter": linear.weight}.get(what, frozen.weight)
    with torch.no_grad():
        written.mul_(2)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        z.sum().backward()


@pytest.mark.given_up("restored modes")
def test_a_recomputation_has_the_parameters_of_the_first_run():
    net, x = nn.Linear(3, 4), torch.ones(ROWS, 3, requires_grad=True)
    z = pa.microbatch(lambda x: net(x).square(), microbatch_size=4, batch_argnums=0)(x)
    want = torch.autograd.grad(net(x).square().sum(), x)[0]
    net.weight = nn.Parameter(torch.zeros(4, 3))
    assert_trees_bitwise_equal(torch.autograd.grad(z.sum(), x)[0], want)


@pytest.mark.promise("second run")
@pytest.mark.parametrize("captured", [False, True], ids=["given", "captured"])
def test_a_parameter_that_is_replaced_meanwhile_counts_as_it_was_or_raises(captured):
    net, x = nn.Linear(3, 4), torch.ones(ROWS, 3, requires_grad=True)
    func = (lambda x: net(x)) if captured else net
    z = pa.microbatch(func, microbatch_size=4, batch_argnums=0)(x)
    (want,) = torch.autograd.grad(net(x).sum(), x)
    net.weight = nn.Parameter(torch.zeros(4, 3))
    try:
        (got,) = torch.autograd.grad(z.sum(), x)
    except RuntimeError:
        return
    assert_trees_bitwise_equal(got, want)


# Random numbers of torch's own generator ------------------------------------------------------


@pytest.mark.promise("second run")
@pytest.mark.parametrize("order", [0, 1, 2])
@examples(1 / 2)
@given(st.integers(0, 2**31), compositions(ROWS))
def test_a_recomputation_draws_the_same_numbers(order, seed, sizes):
    """Masks double or drop, so all is exact; those of the way forward are those of a derivative.

    What is drawn is what plain code draws, microbatch by microbatch, and so is the generator after.
    """
    w = torch.tensor([[2.0, -3.0, 1.0], [1.0, 2.0, -1.0]])
    x = torch.randint(1, 5, (ROWS, 3), generator=generator(seed)).float()
    encode = lambda w, x: dropout(x * w[0], 0.5)  # noqa: E731
    last = lambda w, h: (dropout(h, 0.5) * w[1] * h).sum(0)  # noqa: E731

    def plain(w):
        h = torch.cat([encode(w, part) for part in x.split(sizes)])
        s = dropout(h, 0.5).cumsum(0)
        return sum(last(w, part) for part in s.split(sizes)).sum()

    def ours(w):
        h = pa.microbatch(encode, microbatch_size=sizes)(w, x)
        s = dropout(h, 0.5).cumsum(0)
        return pa.microbatch(last, microbatch_size=sizes, reduce="sum")(w, s).sum()

    def run(f):
        if order:
            f = torch.func.grad(f)
        if order == 2:
            f = torch.func.grad(lambda w, first=f: (first(w) * w.detach()).sum())
        return f(w)

    got, want = (drawing(lambda f=f: run(f), seed) for f in (ours, plain))
    assert_trees_bitwise_equal(got, want)


@pytest.mark.promise("second run")
def test_a_function_that_cannot_be_run_again_draws_once():
    """One with the parameters of a scripted module is recorded instead, from the beginning."""
    scripted = torch.jit.script(nn.Linear(3, 3))
    plain = lambda w, x: scripted(dropout(x * w, 0.5))  # noqa: E731
    w, x = torch.ones(3, requires_grad=True), torch.ones(ROWS, 3)
    got = drawing(lambda: pa.microbatch(plain, microbatch_size=4)(w, x), 1)
    want = drawing(lambda: torch.cat([plain(w, part) for part in x.split(4)]), 1)
    assert_trees_bitwise_equal(got, want)


def test_an_error_where_it_is_computed_again_puts_the_generator_back():
    """Where the way forward left it, and not in the middle of an earlier microbatch."""
    states = []

    def encode(w, x):
        h = dropout(x * w, 0.5)
        if len(states) == 2:
            raise BoomError
        if not is_dropped():
            states.append(torch.get_rng_state())
        return h

    micro = pa.microbatch(encode, microbatch_size=2)
    with pytest.raises(BoomError):
        torch.func.grad(lambda w: micro(w, torch.ones(4, 3)).sum())(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), states[-1])


@pytest.mark.promise("threads")
def test_threads_do_not_see_each_other_s_microbatches():
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    fn, x = pa.functional(net), normal(ROWS, 3)

    def loss(p):
        return end(
            pa.microbatch(lambda x: fn.apply(p, (), x)[0], microbatch_size=2, batch_argnums=0)(x)
        )

    def of(i):
        return torch.func.grad(loss)({k: v.detach() * i for k, v in fn.params.items()})

    works = [lambda i=i: [of(i) for _ in range(5)][-1] for i in range(1, 5)]
    for i, found in enumerate(together(*works), 1):
        assert_trees_bitwise_equal(found, of(i))


# Random numbers that a loss draws are those of a torch.func loop over the microbatches ---------


W = torch.tensor([1.0, -2.0, 3.0])
seeds = st.integers(0, 2**31)


def squares(w, x):
    """Integers doubled or dropped: exact, and the gradient tells which were dropped."""
    return (dropout(x * w, 0.5) ** 2).sum()


def torch_loop(x, size, loss=squares):
    """What the engine promises to be, without what is not finite."""
    grads = [torch.func.grad(loss)(W, part) for part in x.split(size)]
    return sum((grad for grad in grads if grad.isfinite().all()), torch.zeros_like(W))


def check(run, by_hand, seed):
    """That numbers and the generator after them are those of the loop."""
    assert_trees_bitwise_equal(drawing(run, seed), drawing(by_hand, seed))


def gradient(x, size, loss=squares, **options):
    return lambda: pa.grad(loss, microbatch_size=size, reduction="sum", **options)(W, x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@given(seed=seeds, rows=st.integers(1, 9), size=st.integers(1, 5))
def test_masks_and_generator_are_those_of_the_loop(engine, nonfinite, seed, rows, size):
    x = torch.randint(1, 8, (rows, 3), generator=generator(seed)).float()
    run = gradient(x, size, engine=engine, nonfinite=nonfinite)
    check(run, lambda: torch_loop(x, size), seed)


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=seeds, bad=st.sets(st.integers(0, 3), min_size=1))
def test_a_window_that_is_done_again_draws_the_same_numbers_once(engine, seed, bad):
    """``"skip"`` adds first and looks afterwards; what it does again is what it did."""
    x = torch.ones(8, 3)
    for i in bad:
        x[2 * i] = torch.inf  # a mask of three zeros makes it NaN: inf times zero
    run = gradient(x, 2, engine=engine, nonfinite="skip")
    check(run, lambda: torch_loop(x, 2), seed)


@pytest.mark.parametrize("engine", ENGINES)
@given(seed=seeds)
def test_a_stream_draws_as_the_loop_does(engine, seed):
    x = torch.ones(7, 3)
    acc = pa.accumulator(squares, reduction="sum", engine=engine)
    run = lambda: acc.finalize(in_parts(acc, W, pa.microbatches(x, 3), donate=True))[0]  # noqa: E731
    check(run, lambda: torch_loop(x, 3), seed)


def test_value_draws_as_the_loop_does():
    x = torch.ones(7, 3)
    value = pa.value(squares, microbatch_size=3, reduction="sum")
    by_hand = lambda: sum(squares(W, part) for part in x.split(3)).double()  # noqa: E731
    check(lambda: value(W, x).double(), by_hand, 3)


@pytest.mark.promise("second run")
def test_a_checkpoint_recomputes_with_the_masks_that_it_drew():
    """And what was drawn before it is drawn once."""
    plain = lambda w, x: squares(w, dropout(x, 0.5))  # noqa: E731
    lean = lambda w, x: checkpoint(squares, w, dropout(x, 0.5), use_reentrant=False)  # noqa: E731
    x = torch.ones(7, 3)
    check(gradient(x, 3, lean, engine="autograd"), lambda: torch_loop(x, 3, plain), 4)


def test_a_captured_tensor_that_requires_a_gradient_costs_no_second_draw():
    """A whole batch is computed once more where its gradients are to have a graph."""
    x, captured = torch.arange(1.0, 13.0).view(4, 3), torch.tensor(2.0, requires_grad=True)
    loss = lambda w, x: captured * squares(w, x)  # noqa: E731
    grads, after = drawing(lambda: pa.grad(loss)(W, x), 1)
    want = drawing(lambda: torch.func.grad(loss)(W, x), 1)
    assert_trees_bitwise_equal((grads.detach(), after), want)
    grads.sum().backward()
    assert captured.grad is not None
