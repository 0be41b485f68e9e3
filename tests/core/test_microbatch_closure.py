"""``pa.microbatch`` is closed: its derivatives are functions of samples, and so are theirs.

A transform of a microbatched function is the microbatched transform, to the bit on integers; and
every nest of two transforms, and of three, is what it is of plain code over the full batch. Both
sides of the latter are float64, and as everywhere in this folder the bound leaves six digits for
two graphs of one function.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, seeds
from tests.core.coupled import FAMILIES, batch_of, params_of, pieces
from tests.draws import examples, generator
from tests.exactly import integers
from tests.outer import TRANSFORMS
from tests.problems import near_together, normal, pulled


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
ROWS = 5
cuts = st.integers(1, ROWS + 1) | compositions(ROWS)


# The law itself, in bits -----------------------------------------------------------------------


def exact(seed):
    g = generator(seed)
    return integers(g, 3, 2, bound=2), integers(g, ROWS, 3, bound=2), integers(g, ROWS, 2, bound=2)


def both(w, x):
    """Samples, and a sum over them; of third order in what is shared."""
    h = x @ w
    return h * h * w[0] + h.relu() * x[:, :2], (h * h * h).sum(0)


REDUCTIONS = ("concat", "sum")


@given(cuts, seeds())
def test_the_gradient_of_a_cut_is_the_cut_of_the_gradient(cut, seed):
    """Cotangents of samples are samples, those of sums are shared;

    gradients the other way round.
    """
    w, x, c = exact(seed)
    micro = partial(pa.microbatch, microbatch_size=cut)
    s = c[0]
    pull = lambda w, x, c, s, f=both: vjp(f, w, x)[1]((c, s))  # noqa: E731
    whole = pull(w, x, c, s)
    assert_trees_bitwise_equal(pull(w, x, c, s, micro(both, reduce=REDUCTIONS)), whole)
    inside = micro(
        lambda x, c, w, s: pull(w, x, c, s), batch_argnums=(0, 1), reduce=("sum", "concat")
    )
    assert_trees_bitwise_equal(inside(x, c, w, s), whole)


@given(cuts, seeds())
def test_the_tangent_of_a_cut_is_the_cut_of_the_tangent(cut, seed):
    w, x, _ = exact(seed)
    micro = partial(pa.microbatch, microbatch_size=cut)
    push = lambda w, x, v, y, f=both: jvp(f, (w, x), (v, y))  # noqa: E731
    given_ = w, x, w.flip(0), x.flip(0)
    whole = push(*given_)
    assert_trees_bitwise_equal(push(*given_, micro(both, reduce=REDUCTIONS)), whole)
    inside = micro(push, batch_argnums=(1, 3), reduce=(REDUCTIONS, REDUCTIONS))
    assert_trees_bitwise_equal(inside(*given_), whole)


@given(cuts, seeds(), st.sampled_from([(0, None), (None, 0), (0, 1), (None, 2)]))
def test_the_map_of_a_cut_is_the_cut_of_the_map(cut, seed, dims):
    w, x, _ = exact(seed)
    micro = partial(pa.microbatch, microbatch_size=cut)
    ws = torch.stack([w, -w, w.flip(0)]) if dims[0] == 0 else w
    xs = x if dims[1] is None else torch.stack([x, -x, x.flip(0)], dims[1])
    whole = vmap(both, dims)(ws, xs)
    assert_trees_bitwise_equal(vmap(micro(both, reduce=REDUCTIONS), dims)(ws, xs), whole)
    dim = int(dims[1] == 0)  # along which the samples lie beside the map
    inside = micro(vmap(both, dims, out_dims=(1 - dim, 0)), reduce=REDUCTIONS, dim=dim)
    rows, sums = inside(ws, xs)
    assert_trees_bitwise_equal((rows.movedim(1 - dim, 0), sums), whole)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("by", ["func", "backward"])
@examples(1 / 2)
@given(cuts, seeds())
def test_derivatives_of_higher_order_have_the_bits_of_plain_code(order, by, cut, seed):
    w, x, c = exact(seed)
    micro = pa.microbatch(both, microbatch_size=cut, reduce=REDUCTIONS)

    def derived(f):
        def once(of):
            def run(w, x):
                if by == "func":
                    found = grad(of, (0, 1))(w, x)
                else:
                    found = torch.autograd.grad(of(w, x), (w, x), create_graph=True)
                return (found[0] * w.detach().flip(1)).sum() + (found[1] * x.detach().flip(1)).sum()

            return run

        value = lambda w, x: (lambda rows, s: (rows * c).sum() + s.sum())(*f(w, x))  # noqa: E731
        for _ in range(order - 1):
            value = once(value)
        return grad(value, (0, 1))(w, x) if by == "func" else pulled(value, w, x)

    assert_trees_bitwise_equal(derived(micro), derived(both))


# Every nest of two -----------------------------------------------------------------------------


def smooth(w, x):
    return torch.tanh(x @ w) * w[0].sin() + x[:, :2] ** 2


def double(seed):
    return normal(3, 2, seed=seed) / 2, normal(ROWS, 3, seed=seed + 1) / 2


FACTORS = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
Function = Callable[[Tensor, Tensor], Tensor]


def number(t):
    return (t * torch.arange(t.numel(), dtype=t.dtype).view(t.shape).cos()).sum()


def backward(f):
    """By ``.backward()``; above it anything may be, if that is autograd."""

    def run(w, x):
        w = w if w.requires_grad else w.clone().requires_grad_()
        return torch.autograd.grad(number(f(w, x)), w, create_graph=True)[0]

    return run


NESTS = {
    "grad": lambda f: grad(lambda w, x: number(f(w, x))),
    "grad of rows": lambda f: grad(lambda w, x: number(f(w, x)), 1),
    "vjp": lambda f: lambda w, x: vjp(lambda w: f(w, x), w)[1](f(w, x).detach().cos())[0],
    "jvp": lambda f: lambda w, x: jvp(lambda w: f(w, x), (w,), (w.detach().cos(),))[1],
    "jvp of rows": lambda f: lambda w, x: jvp(lambda x: f(w, x), (x,), (x.detach().cos(),))[1],
    "jacrev": lambda f: lambda w, x: jacrev(lambda b: f(w + b, x))(0 * w[0]).sum(-1),
    "jacfwd": lambda f: lambda w, x: jacfwd(lambda b: f(w + b, x))(0 * w[0]).sum(-1),
    "vmap of shared": lambda f: lambda w, x: vmap(lambda c: f(w * c, x))(FACTORS),
    "vmap of rows": lambda f: lambda w, x: vmap(lambda c: f(w, x * c))(FACTORS),
    "remat": lambda f: pa.remat(f),
    "backward": backward,
}
FUNC = [name for name in NESTS if name != "backward"]  # which sees not through autograd
FORMS = ("rows", "rows and a mean", "cut along another dim", "cut in a cut")


def coupled(micro, form, cut):
    """Plain code around a function of samples, or around two of them."""

    def of(w, x):
        if form == "rows and a mean":
            f = lambda w, x: (smooth(w, x), smooth(w, x).mean(0))  # noqa: E731
            z, mean = micro(f, cut, reduce=("concat", "mean"))(w, x)
            return (z * mean).sum(1).sin()
        if form == "cut along another dim":
            x = micro(torch.sin, 2, batch_argnums=0, dim=1)(x)
        f = smooth
        if form == "cut in a cut":
            f = lambda w, x: micro(smooth, 1)(w, x).sin()  # noqa: E731
        z = micro(f, cut)(w, x)
        return (z @ z.T).sum(0).sin()

    return of


def cut_in(func, size, **options):
    return pa.microbatch(func, microbatch_size=size, **options)


def uncut(func, _size, **_):
    return func


@pytest.mark.slow
@pytest.mark.parametrize("outer", NESTS)
@examples(1 / 4, fewest=12)  # each is ten nests: 0.3 s
@given(st.sampled_from(FORMS), cuts, seeds())
def test_every_nest_of_two_is_that_of_plain_code(outer, form, cut, seed):
    args = double(seed)
    for inner in NESTS if outer in ("backward", "remat") else FUNC:
        got, want = (NESTS[outer](NESTS[inner](coupled(m, form, cut))) for m in (cut_in, uncut))
        near_together(got(*args).detach(), want(*args).detach())


@pytest.mark.slow
@pytest.mark.parametrize("outer", FUNC)
@examples(1 / 3)
@given(st.data(), st.sampled_from(FORMS), cuts, seeds())
def test_nests_of_three_are_those_of_plain_code(outer, data, form, cut, seed):
    names = *data.draw(st.tuples(*[st.sampled_from(FUNC)] * 2)), outer
    results = []
    for m in (cut_in, uncut):
        f = coupled(m, form, cut)
        for name in names:
            f = NESTS[name](f)
        results.append(f(*double(seed)))
    near_together(*results)


# Losses of practice ------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS[:6], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["contrastive", "experts", "batch_norms"])
@examples(1 / 8)
@given(st.sampled_from(["grad", "value"]), seeds(), cuts)
def test_each_transform_of_a_coupled_loss_is_that_of_plain_code(transform, name, by, seed, cut):
    """By ``pa.grad`` and ``pa.value``: ``jvp`` is a Hessian product, ``grad`` a meta-gradient."""
    params, batch = params_of(seed, wide=4), batch_of(seed, ROWS)
    batch["scale"] = torch.ones(ROWS, dtype=torch.float64)
    params = {k: params[k] for k in params if k not in ("w", "b")}
    loss = FAMILIES[name]
    ours = getattr(pa, by)(partial(loss, cut=pieces(cut)))
    plain = grad(loss) if by == "grad" else loss
    near_together(transform(ours)(params, batch), transform(plain)(params, batch))


@pytest.mark.promise("ensembles")
@pytest.mark.parametrize("optimizer", [pa.sgd(0.1), pa.adamw(0.01)], ids=["sgd", "adamw"])
def test_an_ensemble_of_states_is_its_members(optimizer):
    def stepped(loss):
        step = pa.make_step(loss, pa.chain(pa.clip_by_global_norm(0.5), optimizer))
        batch = batch_of(0, ROWS)
        batches = {k: torch.stack([x, x.flip(0)]) for k, x in batch.items()}
        states = [step.init(params_of(seed, wide=4)) for seed in range(2)]
        stack = optree.tree_map(lambda *x: torch.stack(x), *states, namespace="pureaccum")
        return vmap(step)(stack, batches)

    loss = FAMILIES["contrastive"]
    (got, info), (want, wanted) = stepped(partial(loss, cut=pieces(2))), stepped(loss)
    near_together(got.params, want.params)
    near_together(
        (info.loss, info.grad_norm, info.weight), (wanted.loss, wanted.grad_norm, wanted.weight)
    )
    assert info.applied.all()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["func", "backward"])
def test_inside_of_a_user_s_compiler_it_is_one_graph(way):
    w, x = double(0)

    def loss(w, x):
        f = lambda w, x: (smooth(w, x), pa.Weighted(smooth(w, x).sum(), len(x)))  # noqa: E731
        z, mean = pa.microbatch(f, microbatch_size=[2, 3])(w, x)
        return (z @ z.T).sin().sum() * mean

    run = (lambda f: f(w, x)) if way == "func" else (lambda f: pulled(f, w, x)[0])
    f = grad(loss) if way == "func" else loss
    torch.compiler.reset()
    near_together(run(torch.compile(f, backend="eager", fullgraph=True)), run(f))


class Product(torch.autograd.Function):
    """Remembers which of its factors a gradient was asked for."""

    asked: ClassVar[set[tuple[bool, ...]]] = set()

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        Product.asked.add(ctx.needs_input_grad)
        a, b = ctx.saved_tensors
        return cotangent * b, cotangent * a


@pytest.mark.parametrize(("reduce", "out"), [("sum", Tensor.sum), ("concat", Tensor.clone)])
def test_no_gradient_is_taken_of_what_needs_none(reduce, out):
    f = pa.microbatch(lambda w, x: out(Product.apply(w, x)), microbatch_size=2, reduce=reduce)
    w = torch.tensor(2.0, requires_grad=True)
    Product.asked.clear()
    f(w, torch.arange(4.0)).sum().backward()
    assert Product.asked == {(True, False)}
