"""A rematerialised function is the function, and so are its derivatives, wherever it is called.

To the bit where the whole of the backward pass is the same arithmetic: first derivatives, in
float32. Higher ones add their terms in another order: float64, and a bound.
"""

import optree
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn import functional as F

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.problems import leaf, pulled


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
W, X = torch.randn(3, 3, generator=generator(0)), torch.randn(4, 3, generator=generator(1))
x = X[0]
TERMS = 2 * 3 * 4  # roundings on the longest way to a number: two layers, sums of three, four kinds


def curved(w, x):
    """Its kernels have other formulas for a backward pass that is recorded (silu)."""
    return F.silu(w @ x).tanh()


def nested(w, x):
    return curved(w, curved(w, x))


lean = pa.remat(curved)
FUNCTIONS = {"one": (lean, curved), "nested": (pa.remat(lambda w, x: lean(w, lean(w, x))), nested)}
functions = pytest.mark.parametrize(("lean", "plain"), FUNCTIONS.values(), ids=FUNCTIONS)


def squared(f):
    return lambda *args: (f(*args) ** 2).sum()


def dual(f):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(W, W), x)))


def pulled_outside(f, recording=True):
    """The level of vjp is over when its backward pass runs."""
    with torch.set_grad_enabled(recording):
        return vmap(lambda x: vjp(f, W, x)[1](x))(X)


def batched_cotangents(f):
    """torch's older vmap, which no level tells of."""
    w = leaf(W)
    return torch.autograd.grad(f(w, x), w, torch.eye(3), is_grads_batched=True)


def rows(f, *in_dims):
    return vmap(f, in_dims)


def at(f):
    return lambda x: f(W, x)


FIRST = {
    "value": lambda f: f(W, x),
    "backward": lambda f: pulled(squared(f), W, x),
    "create_graph": lambda f: pulled(squared(f), W, x, create_graph=True),
    "grad": lambda f: grad(squared(f), (0, 1))(W, x),
    "grad of one argument": lambda f: grad(squared(f), 1)(W, x),
    "vjp": lambda f: vjp(f, W, x)[1](x),
    "jvp": lambda f: jvp(f, (W, x), (W, x)),
    "jvp of one argument": lambda f: jvp(at(f), (x,), (x,)),
    "dual": dual,
    "linearize": lambda f: linearize(at(f), x)[1](x),
    "jacrev": lambda f: jacrev(f)(W, x),
    "jacfwd": lambda f: jacfwd(f)(W, x),
    "vmap(grad)": lambda f: rows(grad(squared(f), (0, 1)), None, 0)(W, X),
    "vmap(grad) over columns": lambda f: rows(grad(squared(f), (0, 1)), 1, None)(W[:, None], x),
    "vmap(vmap(grad))": lambda f: rows(rows(grad(squared(f)), None, 0), 0, None)(W[None], X),
    "grad(vmap)": lambda f: grad(squared(rows(f, None, 0)), (0, 1))(W, X),
    "grad(vmap) of what is not mapped": lambda f: grad(squared(rows(f, None, 0)))(W, X),
    "grad(vmap(vmap))": lambda f: grad(squared(rows(rows(f, None, 0), 0, None)))(W[None], X),
    "jacrev(vmap)": lambda f: jacrev(at(rows(f, None, 0)))(X),
    "jvp(vmap)": lambda f: jvp(at(rows(f, None, 0)), (X,), (X,)),
    "vmap(jvp)": lambda f: vmap(lambda x: jvp(at(f), (x,), (x,)))(X),
    "vmap(vjp)": pulled_outside,
    "vmap(vjp) under no_grad": lambda f: pulled_outside(f, recording=False),
    "batched cotangents": batched_cotangents,
}


# torch.func.linearize keeps constants in its graph in a way that torch itself warns of.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@functions
@pytest.mark.parametrize("kind", FIRST)
def test_first_derivatives_have_the_bits_of_the_function(kind, lean, plain):
    ours, torchs = FIRST[kind](lean), FIRST[kind](plain)
    assert any(leaf.any() for leaf in optree.tree_leaves(torchs))
    ours = optree.tree_map(torch.detach, ours)
    if "vmap" not in kind:
        assert_trees_bitwise_equal(ours, torchs)
    else:  # matmul takes its kernel by how a vmap lays memory out: a rounding more, on some CPUs
        for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(torchs), strict=True):
            assert (a - b).norm() <= TERMS * 2.0**-24 * b.norm()


def gradient_penalty(f):
    w, y = leaf(W.double()), leaf(x.double())
    (g,) = torch.autograd.grad(squared(f)(w, y), w, create_graph=True)
    return torch.autograd.grad((g**2).sum(), (w, y))


def at_x(f):
    return lambda x: f(W.double(), x)


SECOND = {
    "hessian": lambda f, x: hessian(squared(at_x(f)))(x),
    "jacrev(jacrev)": lambda f, x: jacrev(jacrev(at_x(f)))(x),
    "jacfwd(jacfwd)": lambda f, x: jacfwd(jacfwd(at_x(f)))(x),
    "jacrev(jacfwd)": lambda f, x: jacrev(jacfwd(at_x(f)))(x),
    "jvp(jvp(jvp))": lambda f, x: jacfwd(jacfwd(jacfwd(at_x(f))))(x),
    "jvp(vmap(jvp))": lambda f, x: jacfwd(vmap(jacfwd(at_x(f))))(x[None]),
    "vmap(hessian)": lambda f, x: vmap(hessian(squared(at_x(f))))(x[None]),
    "grad(grad)": lambda f, x: grad(squared(grad(squared(at_x(f)))))(x),
    "grad(grad) through the other": lambda f, x: grad(squared(lambda w: grad(squared(f), 1)(w, x)))(
        W.double()
    ),
    "grad(grad(grad))": lambda f, x: grad(squared(grad(squared(grad(squared(at_x(f)))))))(x),
    "grad(vmap(grad))": lambda f, x: grad(squared(vmap(grad(squared(at_x(f))))))(x[None]),
    "autograd twice": lambda f, x: gradient_penalty(f),
    "grad under autograd": lambda f, x: pulled(
        squared(lambda w: grad(squared(f))(w, x)), W.double()
    ),
    "by torch.autograd.functional": lambda f, x: torch.autograd.functional.hessian(
        squared(at_x(f)), x, vectorize=True
    ),
}


@functions
@pytest.mark.parametrize("kind", SECOND)
def test_higher_derivatives_are_those_of_the_function(kind, lean, plain):
    """Third ones are as large as 100: the bound is that of float64 with room for their sums."""
    ours, torchs = SECOND[kind](lean, x.double()), SECOND[kind](plain, x.double())
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(torchs), strict=True):
        assert b.any()
        assert (a - b).abs().max() <= 1e-13 * b.abs().max()


@pytest.mark.given_up("captured")
def test_a_tensor_that_is_mapped_may_be_captured():
    """By a vmap around the differentiation, as in per-sample gradients."""

    def run(wrap):
        total = lambda w, x: squared(wrap(lambda w: curved(w, x)))(w)  # noqa: E731
        each = vmap(grad(total), (None, 0))(W, X)
        alone = vmap(lambda x: wrap(lambda w: w @ x)(W))(X)
        return each, alone, jvp(lambda w: vmap(lambda x: wrap(lambda w: w @ x)(w))(X), (W,), (W,))

    assert_trees_bitwise_equal(run(pa.remat), run(lambda f: f))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["autograd", "grad"])
def test_a_rematerialised_function_compiles_into_one_graph(transform):
    def compiled(f):
        torch.compiler.reset()
        return torch.compile(f, backend="aot_eager", fullgraph=True)

    of = lambda f: lambda w: f(w, x)  # noqa: E731
    if transform == "grad":
        ours, plain = compiled(grad(squared(of(lean))))(W), grad(squared(of(curved)))(W)
    else:
        ours, plain = pulled(squared(compiled(of(lean))), W), pulled(squared(of(curved)), W)
    torch.testing.assert_close(ours, plain)


def test_an_output_that_no_tangent_reaches_has_a_tangent_of_zero():
    """torch asserts where a Function returns None for it."""
    f = lambda w, x: (curved(w, x), 2 * x, torch.tensor(3))  # noqa: E731

    def both(f):
        primals, tangents = jvp(lambda w: f(w, x)[:2], (W,), (W,))
        return primals, tangents, jacfwd(lambda w: f(w, x)[:2])(W)

    assert_trees_bitwise_equal(both(pa.remat(f)), both(f))


# Captured tensors ----------------------------------------------------------------------------


class Inside(nn.Module):
    """Rematerialises a part of itself, which captures its parameters."""

    def __init__(self, wrap):
        super().__init__()
        self.part, self.wrap = nn.Linear(3, 3), wrap
        with torch.no_grad():
            self.part.weight.copy_(W)
            self.part.bias.zero_()

    def forward(self, x):
        return self.wrap(lambda x: self.part(x).tanh())(x)


def capturing(wrap, w):
    return wrap(lambda x: (w @ x).tanh())


def total(out, *leaves):
    return torch.autograd.grad((out**2).sum(), leaves)


def of_a_module(wrap):
    net = Inside(wrap)
    return total(net(x), net.part.weight)


def called_with_others(wrap):
    """When the backward pass runs, the module holds its own parameters again."""
    w = leaf(W * 2)
    return total(functional_call(Inside(wrap), {"part.weight": w}, (x,)), w)


def in_functional_call(wrap):
    net = Inside(wrap)
    params = {k: v.detach() * 2 for k, v in net.named_parameters()}
    return grad(lambda p: functional_call(net, p, (x,)).sum())(params)["part.weight"]


def rows_of(wrap):
    """Maps what is captured, too."""
    return lambda w: vmap(lambda w, x: wrap(lambda x: (w * x).tanh())(x))(w, X[:3])


def nested_capture(wrap, w):
    """The inner function captures what the outer one makes, and what neither is given."""

    def outer(x):
        y = w @ x
        return wrap(lambda x: (w @ x) * y)(x)

    return wrap(outer)(x)


CAPTURED = {
    "of a module": of_a_module,
    "a module called with others": called_with_others,
    "a module called with others, in grad": in_functional_call,
    "the output itself": lambda r: pulled(squared(lambda w: r(lambda x: w)(x)), W),
    "what is made of a leaf": lambda r: pulled(squared(lambda w: capturing(r, w * 2)(x)), W),
    "beside an input": lambda r: pulled(squared(lambda w, y: capturing(r, w)(y)), W, x),
    "by a nest": lambda r: pulled(squared(lambda w: nested_capture(r, w)), W),
    "in grad": lambda r: grad(lambda w: capturing(r, w)(x).sum())(W),
    "in grad, beside an input": lambda r: grad(lambda w: capturing(r, w)(w[0]).sum())(W),
    "from an outer grad": lambda r: grad(
        lambda w: grad(lambda x: capturing(r, w)(x).sum())(x).sum()
    )(W),
    "in an inner grad": lambda r: grad(lambda x: grad(lambda w: capturing(r, w)(x).sum())(W).sum())(
        x
    ),
    "in jacrev": lambda r: jacrev(lambda w: capturing(r, w)(x))(W),
    "in jvp": lambda r: jvp(lambda w: capturing(r, w)(x), (W,), (W,)),
    "from jvp in grad": lambda r: jvp(
        lambda w: grad(lambda x: capturing(r, w)(x).sum())(x), (W,), (W,)
    ),
    "from jvp in vmap": lambda r: jvp(lambda w: vmap(lambda x: capturing(r, w)(x))(X), (W,), (W,)),
    "from grad in vmap": lambda r: grad(lambda w: vmap(capturing(r, w))(X).sum())(W),
    "in vmap(grad)": lambda r: vmap(grad(lambda w: capturing(r, w)(x).sum()))(
        torch.stack([W, W * 2])
    ),
    "mapped, in grad": lambda r: grad(lambda w: rows_of(r)(w).sum())(W),
    "mapped, in vjp": lambda r: vjp(rows_of(r), W)[1](X[:3]),
    "mapped, in jacrev": lambda r: jacrev(rows_of(r))(W),
    "mapped, on the level of another vmap": lambda r: vmap(vmap(vjp(rows_of(r), W)[1]))(
        torch.ones(3, 3, 3, 3)
    ),
}


# Made before the call, followed by forward AD, or mapped.
NO_LEAVES = {
    *("what is made of a leaf", "by a nest", "in jvp", "from jvp in grad", "from jvp in vmap"),
    *("mapped, in grad", "mapped, in vjp", "mapped, in jacrev"),
    "mapped, on the level of another vmap",
}
GIVEN_UP = dict.fromkeys(NO_LEAVES, "captured") | {
    "a module called with others": "restored modes",
    "a module called with others, in grad": "restored modes",
}


@pytest.mark.table
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(it, marks=pytest.mark.given_up(GIVEN_UP[it]) if it in GIVEN_UP else ())
        for it in CAPTURED
    ],
)
def test_captured_tensors_have_their_gradients_or_are_refused(name):
    """A Function knows of none: a naive one gives them no gradient, silently."""
    plain = CAPTURED[name](lambda f: f)
    assert any(leaf.any() for leaf in optree.tree_leaves(plain))
    ours = CAPTURED[name](pa.remat)
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(plain), strict=True):
        assert (a - b).abs().max() <= 4 * 2**-24 * b.abs().max()


@pytest.mark.parametrize("frozen", [False, True])
def test_some_of_a_module_s_parameters_may_be_captured(frozen):
    """The inner run and the outer one put in different ones; the others are the module's own."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    net.requires_grad_(not frozen)
    params = {"2.weight": net[2].weight.detach() * 2}

    def loss(wrap):
        of = wrap(lambda p, x: functional_call(net, p, (x,)).square().mean())
        return lambda p: of(p, X.double())

    ours, plain = (vjp(grad(loss(wrap)), params)[1](params)[0] for wrap in (pa.remat, lambda f: f))
    apart = (ours["2.weight"] - plain["2.weight"]).norm()
    assert apart <= 2**-26 * plain["2.weight"].norm()  # sqrt(u) of float64
