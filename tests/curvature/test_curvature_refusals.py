"""What is refused of curvature says what helps, and nothing is lost or changed."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.curvature import Operator, cg, diagonal, fisher_vp, ggnvp, hvp, trace
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal, unchanged
from tests.problems import function
from tests.refusals import PARAMS, advice_on, make_batch, refused, saying, squares


pytestmark = [
    pytest.mark.faults,
    pytest.mark.promise("errors"),
    pytest.mark.promise("curvature"),
    pytest.mark.table,
]
BATCH, V = make_batch(4), {"b": torch.tensor(2.0), "w": torch.tensor([1.0, 0.5])}


def forward(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def rows(params, batch):
    return forward(params, batch) ** 2


def mean(out, batch):
    return (out**2).mean()


MAKERS = {
    "hvp": lambda **options: hvp(squares, **options),
    "ggnvp": lambda **options: ggnvp(forward, mean, **options),
    "fisher_vp": lambda **options: fisher_vp(rows, **options),
}
MAKER = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)

VECTORS = {
    "another structure": ({"w": V["w"]}, ValueError, ("v['b'] is missing", "like params")),
    "another shape": (V | {"w": torch.zeros(3)}, ValueError, ("v['w'] has shape (3,)", "(2,)")),
    "another dtype": (
        V | {"w": V["w"].double()},
        TypeError,
        ("v['w'] is torch.float64", "float32"),
    ),
    "integers": (V | {"w": torch.tensor([1, 2])}, TypeError, ("v['w'] is torch.int64",)),
    "the batch": (BATCH, ValueError, ("v does not have the structure of params",)),
}


@MAKER
@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_that_is_none_of_these_params(make, name):
    v, error, words = VECTORS[name]
    with refused(error, *words, given=(PARAMS, BATCH, v)):
        make(microbatch_size=2)(PARAMS, BATCH, v)


@MAKER
def test_calls(make):
    with saying(TypeError, "params alone", "(params, *args, v)"):
        make()(PARAMS)
    with saying(ValueError, "params has no leaves"):
        make()({}, BATCH, {})
    with saying(ValueError, "batch_argnums names argument 7"):
        make(batch_argnums=7)(PARAMS, BATCH, V)
    with saying(ValueError, "batch_argnums names argument -1", "from the left", "v comes after"):
        make(batch_argnums=-1)
    with saying(ValueError, "microbatch_size", "stream", "a number of samples"):
        make(microbatch_size="auto", stream=True)
    with saying(ValueError, "reduction is 'max'"):
        make(reduction="max")(PARAMS, BATCH, V)
    with saying(TypeError, "args[1] is a dict", "iterable of batches", "stream=True"):
        make(stream=True)(PARAMS, BATCH, V)
    with saying(TypeError, "args[1] is a Tensor", "iterable of batches"):
        make(stream=True)(PARAMS, BATCH["x"], V)
    product, used = make(stream=True), iter([BATCH])
    product(PARAMS, used, V)
    with saying(ValueError, "the stream gave no batch", "used up", "a DataLoader"):
        product(PARAMS, used, V)


def test_streams_that_do_not_end_together():
    def loss(params, x, y):
        return ((x @ params["w"] - y) ** 2).mean()

    product = hvp(loss, batch_argnums=(1, 2), stream=True)
    x, y = BATCH["x"], BATCH["x"][:, 0]
    params, v = {"w": PARAMS["w"]}, {"w": V["w"]}
    assert product(params, [x, x], iter([y, y]), v)[1]["w"].isfinite().all()
    with saying(ValueError, "args[2] has no batch 1, counted from 0, but args[1] has one"):
        product(params, [x, x], [y], v)
    with saying(ValueError, "args[1] has no batch 2, counted from 0, but args[2] has one"):
        product(params, iter([x, x]), [y] * 3, v)


@MAKER
def test_a_batch_without_rows_or_weight_has_no_curvature(make):
    """NaN, and no error: nothing looks at a weight."""
    none = {"x": torch.zeros(0, 2)}
    for options in ({}, {"microbatch_size": 2}, {"microbatch_size": 2, "stream": True}):
        product = make(**options)(PARAMS, [none] if "stream" in options else none, V)
        product = product[1] if isinstance(product, tuple) else product
        assert all(x.isnan().all() for x in product.values())


@pytest.mark.promise("purity")
@MAKER
def test_it_is_pure(make):
    assert_pure(make(microbatch_size=3), PARAMS, BATCH, V)


@pytest.mark.given_up("early writes")
def test_a_write_is_refused_before_it_happens():
    def writes(params, batch):
        batch["x"].mul_(2.0)
        return squares(params, batch)

    with refused(RuntimeError, "['x']", given=(PARAMS, BATCH, V)):
        hvp(writes, microbatch_size=2)(PARAMS, BATCH, V)


@pytest.mark.promise("writes")
def test_a_write_is_named():
    def writes(params, batch):
        batch["x"].mul_(2.0)
        return squares(params, batch)

    with saying(RuntimeError, "['x']"):
        hvp(writes, microbatch_size=2)(PARAMS, make_batch(4), V)


def test_losses():
    args = PARAMS, BATCH, V
    with saying(ValueError, "the loss has shape (4,)", "0-d tensor"):
        hvp(rows)(*args)
    with saying(ValueError, "the loss has shape (4,)", "0-d tensor"):
        ggnvp(forward, lambda out, batch: out**2)(*args)
    with saying(TypeError, "the result of forward", "is a float", "only tensors"):
        ggnvp(lambda p, b: (forward(p, b), 3.0), lambda out, b: mean(out[0], b))(*args)
    with saying(ValueError, "losses returned ()", "shape (rows,)", "reduction='none'"):
        fisher_vp(squares)(*args)
    with saying(ValueError, "losses returned a tuple", "shape (rows,)"):
        fisher_vp(lambda p, b: (rows(p, b), 1))(*args)
    with saying(ValueError, "the weights of the losses are 1.0", "(4,)", "each sample"):
        fisher_vp(lambda p, b: pa.Weighted(rows(p, b), 1.0))(*args)

    def own(params, batch):
        raise KeyError("mine")

    for product in (hvp(own), ggnvp(own, mean), fisher_vp(own)):
        with pytest.raises(KeyError, match="mine"):
            product(*args)


def test_a_loss_that_does_not_depend_on_params():
    zeros = {name: torch.zeros_like(x) for name, x in PARAMS.items()}
    args = PARAMS, BATCH, V

    def of_one(params, batch):  # linear in w, and without b
        return (batch["x"] @ params["w"]).mean()

    for size in (None, 2):
        for loss in (lambda params, batch: batch["x"].square().mean(), of_one):
            with unchanged(args, "it"):
                _, came = hvp(loss, microbatch_size=size)(*args)
            assert all(torch.equal(came[n], zeros[n]) for n in zeros)
        came = ggnvp(forward, lambda out, batch: out.mean(), microbatch_size=size)(*args)
        assert all(torch.equal(came[n], zeros[n]) for n in zeros)
        came = fisher_vp(lambda p, b: b["x"][:, 0] ** 2, microbatch_size=size)(*args)
        assert all(torch.equal(came[n], zeros[n]) for n in zeros)


# Functions without forward AD: one that torch.func does not take, and one that it takes.
Tanh = function(torch.tanh, lambda g, x: g * (1 - x.tanh() ** 2), old=True)
Cubed = function(lambda x: x**3, lambda g, x: g * 3 * x**2, generate_vmap_rule=True)


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x):
        return self.cells(x.unsqueeze(1))[0][:, 0, :1].squeeze(1)


def test_what_torch_has_no_forward_ad_of():
    """Then a product goes back twice: an LSTM on a CPU, a checkpoint, a custom Function."""
    lstm = pa.functional(LSTM())
    layer = {"w": torch.randn(2), "b": torch.randn(())}
    ways = {
        "LSTM": (lstm.params, lambda p, b: lstm.apply(p, (), b["x"])[0], None),
        "checkpoint": (
            layer,
            lambda p, b: checkpoint(
                lambda x: forward(p, {"x": x}).tanh(), b["x"], use_reentrant=False
            ),
            lambda p, b: forward(p, b).tanh(),
        ),
        "custom Function": (
            layer,
            lambda p, b: Tanh.apply(forward(p, b)),
            lambda p, b: forward(p, b).tanh(),
        ),
        "random numbers": (
            layer,
            lambda p, b: Tanh.apply(forward(p, b) * (torch.rand(2) < 0.5)),
            lambda p, b: (forward(p, b) * (torch.rand(2) < 0.5)).tanh(),
        ),
    }
    batch = {"x": BATCH["x"] / 4}
    for name, (params, way, plain) in ways.items():
        v = {n: torch.randn_like(p) for n, p in params.items()}
        torch.manual_seed(0)
        came = ggnvp(way, mean, microbatch_size=2)(params, batch, v)
        if plain is None:  # of the cells in plain operations
            j = jacrev(way)(params, batch)
            moved = sum((j[n] * v[n]).flatten(1).sum(1) for n in v)
            want = {n: torch.tensordot(moved, j[n], 1) * 2 / 4 for n in v}
        else:
            torch.manual_seed(0)
            want = ggnvp(plain, mean, microbatch_size=2)(params, batch, v)
        for n in v:
            assert (came[n] - want[n]).norm() <= 2**-12 * (1e-3 + want[n].norm()), name


def test_what_has_no_forward_ad_under_transforms():
    """On whole numbers: several vectors at once, and a derivative of the product."""

    def cubed(params, batch):
        return Cubed.apply(forward(params, batch))

    several, batch = pa.stack([V, {n: 3 * x for n, x in V.items()}]), make_batch(4)
    batch["x"] = batch["x"].remainder(3)

    def both(way):
        of = ggnvp(way, lambda out, batch: (out**2).sum(), microbatch_size=2, reduction="sum")

        def number(params):
            return sum((x * V[n]).sum() for n, x in of(params, batch, V).items())

        return vmap(lambda v: of(PARAMS, batch, v))(several), grad(number)(PARAMS)

    assert_trees_bitwise_equal(both(cubed), both(lambda p, b: forward(p, b) ** 3))


def test_params_that_share_memory_with_themselves():
    """Expanded ones, which torch gives no tangent."""
    apart = {"w": torch.tensor([2.0, 2.0]), "b": torch.tensor(1.0)}
    expanded = apart | {"w": torch.tensor(2.0).expand(2)}
    for make in MAKERS.values():
        of = make(microbatch_size=2)
        assert_trees_bitwise_equal(of(expanded, BATCH, V), of(apart, BATCH, V))


def test_what_torch_has_no_second_derivative_of():
    def attention(params, batch):
        q = (batch["x"] @ params["w"] + params["b"]).reshape(-1, 1, 1, 1).repeat(1, 1, 3, 4)
        return F.scaled_dot_product_attention(q, q, q * params["w"][0]).mean((1, 2, 3))

    for product in (
        hvp(lambda p, b: attention(p, b).square().mean()),
        ggnvp(attention, mean),
        fisher_vp(lambda p, b: attention(p, b) ** 2),
    ):
        with pytest.raises(RuntimeError, match="derivative") as caught:
            product(PARAMS, BATCH, V)
        assert "SDPBackend.MATH" in advice_on(caught.value)[0]
        with sdpa_kernel(SDPBackend.MATH):
            product(PARAMS, BATCH, V)

    def once_more(params, batch):
        grads, _ = hvp(lambda p, b: attention(p, b).square().mean())(params, batch, V)
        return grads["b"]

    with pytest.raises(RuntimeError, match="derivative") as caught:
        hvp(once_more)(PARAMS, BATCH, V)
    assert "".join(advice_on(caught.value)).count("SDPBackend.MATH") == 1


# What takes products ----------------------------------------------------------------------------


def test_conjugate_gradients_that_cannot_be():
    b = torch.tensor([1.0, 2.0])

    def run(product, **options):
        solver = cg(product, **options)
        return solver.run(solver.init(b))

    with saying(ArithmeticError, "step 1", "<p, A p> is -5", "not positive definite", "damping"):
        run(lambda v: -v)
    with saying(ArithmeticError, "step 1", "<p, A p> is 0", "not positive definite"):
        run(lambda v: 0 * v)
    with saying(ArithmeticError, "step 2", "not positive definite"):
        run(lambda v: torch.tensor([3.0, -0.5]) * v)
    with saying(ArithmeticError, "inf or NaN"):
        run(lambda v: v / 0)
    with saying(ArithmeticError, "inf or NaN"):
        run(lambda v: torch.nan * v)
    with saying(ArithmeticError, "the preconditioner is not positive definite"):
        run(lambda v: v, preconditioner=lambda r: -r)
    rotation = torch.tensor([[1.0, 5.0], [-5.0, 1.0]])
    with saying(ArithmeticError, "20 steps", "not symmetric", "run(state, steps=...)"):
        run(lambda v: rotation @ v)
    with saying(ValueError, "damping is -1.0"):
        cg(lambda v: v, damping=-1.0)
    with saying(ValueError, "the result of product has shape (1,)", "structure of b"):
        run(lambda v: v[:1])
    with saying(ValueError, "x has shape (3,)"):
        cg(lambda v: v).init(b, torch.zeros(3))
    with saying(TypeError, "the CGState"):
        cg(lambda v: v).run(b)


def test_a_step_that_is_not_taken_leaves_the_state():
    """A curvature that is negative, and a system that is solved; what was reached stays."""
    solver = cg(lambda v: torch.tensor([3.0, -0.5]) * v)
    one = solver.update(solver.init(torch.tensor([1.0, 2.0])))
    two = solver.update(one)
    assert two.curvature <= 0
    assert torch.equal(two.x, one.x)
    assert two.steps == one.steps == 1
    assert all(torch.equal(x, y) for x, y in zip(solver.update(two), two, strict=True))
    solver = cg(lambda v: 2 * v)
    done = solver.run(solver.init(torch.tensor([1.0, 2.0])))
    assert all(torch.equal(x, y) for x, y in zip(solver.update(done), done, strict=True))
    nothing = solver.run(solver.init(torch.zeros(2)))
    assert nothing.steps == 0
    assert torch.equal(nothing.x, torch.zeros(2))
    some = cg(lambda v: torch.tensor([3.0, 0.5]) * v)
    assert some.run(some.init(torch.tensor([1.0, 2.0])), 1).steps == 1


def test_estimates_and_operators(monkeypatch):
    like = {"w": torch.zeros(2), "b": torch.zeros(())}
    for estimate in (diagonal, trace):
        with saying(ValueError, "samples is 0", "at least 1"):
            estimate(lambda v: v, like, key=pa.key(0), samples=0)
        with saying(ValueError, "the result of product['b'] is missing", "like v"):
            estimate(lambda v: {"w": v["w"]}, like, key=pa.key(0), samples=1)
    operator = Operator(lambda v: v, like)
    assert operator.shape == (3, 3)
    with saying(ValueError, "3 × 3", "(2,)", "a matrix (3, k)"):
        operator @ torch.zeros(2)
    assert (operator @ torch.zeros(3, 0)).shape == (3, 0)
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with saying(ImportError, "pip install 'pureaccum[scipy]'"):
        operator.to_scipy()
    with saying(TypeError, "like is torch.complex64", "real"):
        Operator(lambda v: v, torch.zeros(2, dtype=torch.complex64)).to_scipy()
