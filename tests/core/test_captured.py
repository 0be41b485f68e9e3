"""What a microbatched function captures has the derivatives that it has in plain code.

It is drawn where a tensor comes from, in which microbatches it is used, and which transform is
around. The program is then what it is without ``pa.microbatch``, or refused by an error that names
the cause: never another number.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

import pureaccum as pa
from pureaccum._core.watch import captures_are_sought
from pureaccum.testing.strategies import seeds
from tests.core.derivatives import DERIVATIVES, FACTORS
from tests.draws import examples
from tests.dropped import is_dropped
from tests.problems import ROOT, Around, end, function, leaf, normal, pulled
from tests.refusals import saying


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
ROWS = 5


def tangent(ctx, c, x):
    was, at = ctx.saved_tensors
    return c * at + was * x


# Of a captured tensor, with all that torch asks of a Function; and as they were before.
TIMES = (lambda c, x: c * x), (lambda g, c, x: ((g * x).sum(0), g * c))
Times = function(*TIMES, generate_vmap_rule=True, jvp=staticmethod(tangent))
OldTimes = function(*TIMES, old=True)


class Layer(nn.Module):
    """A parameter in a module that is called inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.c = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return x * self.inner.c


@torch.jit.script
def scripted(c, x):
    return c * x


def written(c, x):
    h = x.clone()
    h *= c
    h[:, 0] += c[1]
    return h


def unrecorded(c, x):
    with torch.no_grad():
        constant = c.sin()
    return x * c * constant


def helper(c):
    """Several functions up."""
    return lambda x: (lambda y: y * c)(x)


layer, functional_layer = Layer(), pa.functional(Layer())
BODIES = {
    "closure": lambda c, x: x * c,
    "a closure's closure": lambda c, x: helper(c)(x),
    "view": lambda c, x: x * c[None].T.T[0],
    "detached too": lambda c, x: x * c * c.detach(),
    "list": lambda c, x: torch.cat([x * c, torch.stack([c] * len(x))], 1),
    "keyword": lambda c, x: nn.functional.layer_norm(x, [3], weight=c, bias=c),
    "iterated": lambda c, x: x * sum(k for k in c) + torch.stack([*c]),
    "written into rows": written,
    "under no_grad": unrecorded,
    "module": lambda c, x: functional_call(layer, {"inner.c": c}, (x,)),
    "functional": lambda c, x: functional_layer.apply({"inner.c": c}, (), x)[0],
    "Function": Times.apply,
    "old Function": OldTimes.apply,
    "script": scripted,
    "inner grad": lambda c, x: grad(lambda y: (y.sin() * c).sum())(x),
    "inner grad of it": lambda c, x: x * grad(lambda k: (k.sin() * c).sum())(c),
    "inner vjp": lambda c, x: vjp(lambda y: y.sin() * c, x)[1](x)[0],
    "inner jvp": lambda c, x: jvp(lambda y: y.sin() * c, (x,), (x * c,))[1],
    "inner vmap": lambda c, x: vmap(lambda r: (r * c).cumsum(0))(x),
    "inner vmap of it": lambda c, x: x * vmap(lambda k: k.sin() * c)(c).sum(0),
    "per-sample gradients": lambda c, x: vmap(grad(lambda r: (r.sin() * c).sum()))(x),
    "microbatch": lambda c, x: pa.microbatch(lambda x: x * c, microbatch_size=1, batch_argnums=0)(
        x
    ),
    "remat": lambda c, x: pa.remat(lambda x: x * c)(x),
}


def step_with_rate(f, c):
    """With respect to a learning rate, after a step whose loss captures the tensor and it."""

    def after(rate):
        step = pa.make_step(lambda p, b: f(p * rate.cos()), pa.sgd(lambda _: rate))
        return f(step(step.init(c), torch.zeros(1, 1, dtype=c.dtype))[0].params)

    return grad(after)(torch.tensor(0.1, dtype=c.dtype))


AROUND = {
    "pa.grad": lambda f, c: pa.grad(lambda c, _: f(c))(c, torch.zeros(1)),
    "a step's rate": step_with_rate,
    "grad of vmap": lambda f, c: grad(lambda c: vmap(lambda s: f(s * c))(FACTORS).sum())(c),
    "backward of grad": lambda f, c: pulled(lambda c: grad(f)(c).square().sum(), c),
    "backward of jvp": lambda f, c: pulled(lambda c: jvp(f, (c,), (c.detach(),))[1], c),
} | {
    name: DERIVATIVES[name]
    for name in (
        *("grad", "jvp", "vmap", "backward", "double backward", "hessian", "jacfwd twice"),
        *("jacrev twice", "grad of jvp", "vmap of grad"),
    )
}
REFUSED = (
    "did not use a captured tensor",  # ours
    "must override the setup_context",  # torch's, of Functions under torch.func
    "failed in the TorchScript interpreter",  # torch's own, whatever is around
)


@pytest.mark.nightly
@pytest.mark.promise("closure")
@pytest.mark.promise("followed")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@examples(1 / 4, fewest=8)  # each is fifteen transforms: 0.2 s
@given(st.sampled_from([1, 2, 3, [1, 4], 5]), st.sampled_from(["all", "the last"]), seeds())
def test_a_captured_tensor_has_its_derivatives(body, size, where, seed):
    """In all microbatches, or in the last alone: an expert that the others do not need."""
    c, x = normal(3, seed=seed), normal(ROWS, 3, seed=seed + 1)
    used = torch.arange(ROWS) == ROWS - 1

    def of(cut):
        def loss(c):
            def rows(x, used):
                if where == "all" or used.any():
                    h = body(c, x)[:, :3]
                    return torch.where(used[:, None], h, h if where == "all" else x)
                return x * 1

            micro = pa.microbatch(rows, microbatch_size=size, batch_argnums=(0, 1))
            z = (micro if cut else rows)(x, used)
            return end(z)

        return loss

    for around in AROUND.values():
        try:
            want = around(of(False), c)
        except RuntimeError:  # torch itself cannot
            continue
        try:
            got = around(of(True), c)
        except RuntimeError as error:
            if not any(said in str(error) for said in REFUSED):
                raise
            continue
        assert (got - want).norm() <= ROOT * (1 + want.norm())
        assert want.norm() > 0


def network(cut):
    """Its MLP is cut inside of ``forward``, and called twice."""

    def run(x, first, mlp):
        mlp = pa.microbatch(mlp, microbatch_size=2, batch_argnums=0) if cut else mlp
        h = first(x)
        return (h + mlp(mlp(h))).tanh()

    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    return Around(run, nn.Linear(3, 4), mlp).double()


@pytest.mark.parametrize(
    ("around", "by"),
    [
        ("backward", "its own"),
        *itertools.product(
            [*("grad", "jvp", "vmap", "backward"), "hessian", "vmap of grad", "backward of grad"],
            ["apply", "functional_call"],
        ),
    ],
)
def test_a_part_of_a_network_is_cut_inside_of_it(around, by):
    x, results = normal(ROWS, 3), []
    for cut in (True, False):
        net = network(cut)
        fn = pa.functional(net)
        sizes = [p.numel() for p in fn.params.values()]

        def loss(flat, net=net, fn=fn, sizes=sizes):
            parts = zip(fn.params.items(), flat.split(sizes), strict=True)
            params = {k: v.view_as(p) for (k, p), v in parts}
            if by == "apply":
                return end(fn.apply(params, (), x)[0])
            return end(functional_call(net, params, (x,)))

        if by == "its own":
            end(net(x)).backward()
            results.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        else:
            point = torch.linspace(-1, 1, sum(sizes), dtype=torch.float64)
            results.append(AROUND[around](loss, point))
    got, want = results
    assert want.norm() > 0
    assert (got - want).norm() <= ROOT * want.norm()


@pytest.mark.given_up("captured")
def test_a_tensor_that_cannot_be_exchanged_is_refused():
    """One that was made in a call before, from what is differentiated, and kept."""
    kept = []

    def rows(c, x):
        if is_dropped():
            return x
        if not kept or (captures_are_sought() and len(kept) == 1):  # anew where it is watched
            kept.append(c * 2)
        return x * kept[-1]

    def loss(c):
        kept.clear()
        return pa.microbatch(lambda x: rows(c, x), microbatch_size=2, batch_argnums=0)(x).sum()

    x = torch.ones(ROWS, 3)
    with saying(RuntimeError, "did not use a captured tensor"):
        grad(loss)(torch.ones(3))


def product(c, x):
    return (c * x).sum()


def assigned(c, x):
    new = torch.zeros_like(x)
    new[:] = c
    return (new * x).sum()


# No operation, so that nobody sees what it is given.
Product = function(
    product, lambda g, c, x: (g * x.sum(0), g * c.expand_as(x)), generate_vmap_rule=True
)
HANDED_ON = {
    "to an assignment": lambda c, w, x: assigned(c, x),
    "to remat": lambda c, w, x: pa.remat(product)(c, x),
    "to remat, and more": lambda c, w, x: pa.remat(product)(c, x) * (w * x).sum(),
    "to a microbatched function": lambda c, w, x: pa.microbatch(
        product, microbatch_size=1, reduce="sum"
    )(c, x),
    "to a Function": lambda c, w, x: Product.apply(c, x),
    "to a Function, and more": lambda c, w, x: Product.apply(c, x) + (w * x).sum(),
    "to a Function, later": lambda c, w, x: (
        Product.apply(c, x) if x[0, 0] == ROWS - 1 else (c * w * x).sum()
    ),
}


RISING = torch.arange(ROWS, dtype=torch.float64).unsqueeze(1).expand(ROWS, 3).clone()


def total_of(name, reduction, c, w):
    func = lambda w, x: HANDED_ON[name](c, w, x)  # noqa: E731
    return pa.microbatch(func, microbatch_size=1, reduce=reduction)(w, RISING).sum()


@pytest.mark.parametrize("by", ["backward", "torch.func"])
@pytest.mark.parametrize("reduction", ["sum", "stack"])
@pytest.mark.parametrize("name", HANDED_ON)
def test_a_captured_tensor_that_is_handed_on(name, reduction, by):
    """To what is no operation, or to one that returns nothing: another function, a Function."""
    c, w = torch.tensor([1.0, 2, 3]).double(), torch.tensor([2.0, -1, 1]).double()
    each = HANDED_ON[name]
    plain = lambda c, w: torch.stack([each(c, w, part) for part in RISING.split(1)]).sum()  # noqa: E731
    got = []
    for loss in (plain, lambda c, w: total_of(name, reduction, c, w)):
        if by == "torch.func":
            got.append(grad(loss, (0, 1))(c, w))
        else:
            got.append(pulled(loss, c, w, allow_unused=True, materialize_grads=True))
    assert all(torch.equal(a, b) for a, b in zip(*got, strict=True))


@pytest.mark.given_up("captured")
@pytest.mark.parametrize("reduction", ["sum", "stack"])
@pytest.mark.parametrize("name", ["to a Function, and more", "to a Function, later"])
def test_a_function_inside_of_torch_func_that_autograd_goes_back_through(name, reduction):
    """Torch.func lets modes see what a Function is given, and autograd, run again, does not."""
    c, w = leaf(torch.tensor([1.0, 2, 3]).double()), torch.ones(3).double()
    gradient = grad(lambda w: total_of(name, reduction, c, w).sin())(w)
    with saying(RuntimeError, "did not use a captured tensor"):
        gradient.sum().backward()


@pytest.mark.promise("followed")
@pytest.mark.parametrize("reduction", ["sum", "stack"])
@pytest.mark.parametrize("name", HANDED_ON)
def test_a_leaf_below_a_transform_that_is_handed_on_is_never_a_constant(name, reduction):
    """Its derivative through a gradient of torch.func is right, or something raises."""
    w, own = torch.tensor([2.0, -1, 1]).double(), leaf(torch.tensor([1.0, 2, 3]).double())
    each = HANDED_ON[name]
    plain = lambda c, w: torch.stack([each(c, w, part) for part in RISING.split(1)]).sum()  # noqa: E731
    of = lambda total, w: (total * w.sum() / 64).sin()  # noqa: E731
    want = pulled(lambda c: grad(lambda w: of(plain(c, w), w))(w).sum(), own)
    try:
        got = grad(lambda w: of(total_of(name, reduction, own, w), w))(w)
        assert got.requires_grad
        got.sum().backward()
    except RuntimeError:
        return
    assert (own.grad - want).norm() <= ROOT * want.norm()


OF_PARTS = {
    "sum": lambda outs: sum(outs),
    "stack": torch.stack,
    "last": lambda outs: outs[-1],
}


@pytest.mark.parametrize("reduction", OF_PARTS)
def test_the_first_backward_finds_what_pieces_capture(reduction):
    """Also where the result depends on one of them alone."""
    c = torch.tensor([1.0, 2, 3]).double()
    options = {"microbatch_size": 4, "reduce": reduction, "batch_argnums": 0}

    def plain(func):
        return OF_PARTS[reduction]([func(x) for x in RISING.split(4)])

    found = []
    for run in (lambda func: pa.microbatch(func, **options)(RISING), plain):
        own = leaf(c)
        run(lambda x, own=own: (own * x).sum()).square().sum().backward()
        found.append(own.grad)
    assert torch.equal(*found)
