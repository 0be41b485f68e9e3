"""What goes into a rematerialised function and comes out, and how much is held in between."""

import gc
import weakref

import optree
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.problems import leaf, pulled
from tests.refusals import Old


pytestmark = [pytest.mark.purity, pytest.mark.promise("closure")]
W, X = torch.randn(3, 3, generator=generator(0)), torch.randn(4, 3, generator=generator(1))
x = X[0]


# What goes in and out ------------------------------------------------------------------


def test_any_tree_goes_in_and_out():
    given = {"w": leaf(W), "n": 3, "none": None, "i": torch.arange(3)}

    def func(tree, /, *, scale, text):
        y = tree["w"][tree["i"]] * scale * tree["n"]
        return {"y": y, "i": tree["i"] + 1, "text": text, "none": None, "tuple": (y.sum(), 2)}

    out, expected = (f(given, scale=2.0, text="t") for f in (pa.remat(func), func))
    assert optree.tree_structure(out, none_is_leaf=True) == optree.tree_structure(
        expected, none_is_leaf=True
    )
    assert out["text"] == "t"
    assert out["tuple"][1] == 2
    assert_trees_bitwise_equal(
        torch.autograd.grad(out["y"].sum() + out["tuple"][0], given["w"]),
        torch.autograd.grad(expected["y"].sum() + expected["tuple"][0], given["w"]),
    )
    assert torch.equal(out["i"], expected["i"])
    assert not out["i"].requires_grad


def test_an_output_or_an_input_may_be_unused():
    w, y = leaf(W), leaf(x)
    first, second = pa.remat(lambda w, y: (w.exp(), (w @ w).detach()))(w, y)
    grads = torch.autograd.grad(first.sum(), (w, y), allow_unused=True, retain_graph=True)
    assert_trees_bitwise_equal(grads, (w.detach().exp(), None))
    assert torch.autograd.grad(second.sum(), w, allow_unused=True)[0] is None


def test_inputs_without_a_gradient_cost_none():
    seen = []

    def func(w, x):
        seen.append((w.requires_grad, x.requires_grad))
        return x @ w

    pa.remat(func)(leaf(W), X).sum().backward()
    assert seen == [(False, False), (False, False), (True, False)]  # observed, forward, backward


@pytest.mark.parametrize("transform", ["autograd", "grad"])
def test_one_tensor_may_be_two_arguments_and_an_output(transform):
    whole = torch.arange(-4.0, 5.0).reshape(3, 3)
    func = lambda a, b: (a, a.t(), a * b, b[0])  # noqa: E731

    def total(f):
        return lambda w: sum((i + 1) * (out**2).sum() for i, out in enumerate(f(w, w)))

    by = pulled if transform == "autograd" else lambda f, w: grad(f)(w)
    assert_trees_bitwise_equal(by(total(pa.remat(func)), whole), by(total(func), whole))


def test_what_comes_out_may_be_written_to():
    """As an activation in place does."""
    w = leaf(W)
    (grads,) = torch.autograd.grad(pa.remat(lambda w: w * 2)(w).relu_().sum(), w)
    assert_trees_bitwise_equal(grads, 2.0 * (W > 0))


def test_a_function_may_have_no_output_and_no_tensor():
    assert pa.remat(lambda x: ())(leaf(W)) == ()
    assert pa.remat(lambda n: n + 1)(1) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_function(mode):
    module = nn.Linear(3, 3)
    with mode():
        assert_trees_bitwise_equal(pa.remat(module)(x), module(x))


def test_a_function_that_torch_func_cannot_run_is_rematerialised_by_autograd():
    """Plain autograd runs the backward pass where no transform is active."""

    y = leaf(x)
    for create_graph in (False, True):
        (g,) = torch.autograd.grad(pa.remat(Old.apply)(y).sum(), y, create_graph=create_graph)
        assert torch.equal(g, torch.full((3,), 2.0))


# Memory --------------------------------------------------------------------------------


def held(f, n, transform):
    """The largest number of intermediate tensors of a chain that are alive at once."""
    alive = most = 0

    class Noted(torch.autograd.Function):
        """The identity, whose node dies with the graph that it is in."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            nonlocal alive, most
            if ctx.needs_input_grad[0]:
                ctx.token = Token()
                alive += 1
                most = max(most, alive)

        @staticmethod
        def backward(ctx, g):
            return g.clone()

    class Token:
        def __del__(self):
            nonlocal alive
            alive -= 1

    fs = [lambda p, x: Noted.apply(x) * p] * n
    params = [torch.ones(3)] * n
    loss = lambda params: f(fs)(params, x).sum()  # noqa: E731
    if transform == "grad":
        grad(loss)(params)
    elif transform == "pa.grad":
        pa.grad(lambda p, b: loss(p) * b.sum(), microbatch_size=1)(params, torch.ones(1))
    else:
        loss([p.clone().requires_grad_() for p in params]).backward()
    return most


def in_a_row(fs):
    def chain(params, x):
        for f, p in zip(fs, params, strict=True):
            x = f(p, x)
        return x

    return chain


@pytest.mark.slow
def test_nothing_is_held_but_inputs():
    inside = []

    def func(w):
        h = w.exp()
        inside.append(weakref.ref(h))
        return h.sin()

    out = pa.remat(func)(leaf(W))
    gc.collect()
    assert inside[0]() is None
    out.sum().backward()
    gc.collect()
    assert inside[1]() is None


@pytest.mark.parametrize("donate", [False, True])
def test_a_step_rematerialises_its_loss(donate):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]
    params = [{k: v.detach() for k, v in b.named_parameters()} for b in blocks]
    fs = [lambda p, x, b=b: functional_call(b, p, (x,)) for b in blocks]
    batch = torch.randn(5, 4)

    def run(call):
        loss = lambda p, batch: (call(p, batch) ** 2).mean()  # noqa: E731
        step = pa.make_step(loss, pa.adamw(1e-2), microbatch_size=2, donate=donate)
        state = step.init(params)
        for _ in range(2):
            state, info = step(state, batch)
        return state.params, info.loss

    assert_trees_bitwise_equal(run(in_a_row([*map(pa.remat, fs)])), run(in_a_row(fs)))


@pytest.mark.given_up("restored modes")
def test_modes_are_those_of_the_first_run():
    """A module is asked for its mode when the function is called, and again for its gradient."""
    net = torch.nn.Dropout(0.5)
    w = torch.ones(64, requires_grad=True)
    out = pa.remat(lambda w: net(w))(w)
    net.eval()
    (grad_,) = torch.autograd.grad(out.sum(), w)
    assert torch.equal(grad_, out.detach())
    assert not net.training
