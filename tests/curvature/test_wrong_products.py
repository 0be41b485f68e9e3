"""Products that miss what nobody saw are told from those that are right, and from kinks.

A custom Function that makes its gradient in its forward pass has no second derivative. With a head
of that kind alone a product is zero; on a body some of its leaves are a few percent off.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import jvp, vmap

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum._core.differences import SecondOrder, misses
from pureaccum.curvature import diagonal, fisher_vp, ggnvp, hvp, trace
from pureaccum.curvature.passes import WrongProductError
from pureaccum.testing import check_accumulation
from tests.draws import examples
from tests.problems import function


pytestmark = [pytest.mark.faults, pytest.mark.promise("curvature")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
DTYPE = pytest.mark.parametrize(
    "dtype", [*DTYPES[1:2], *(pytest.param(x, marks=pytest.mark.slow) for x in DTYPES[::2])]
)
try:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
except ImportError:  # torch 2.11 has no loss in chunks
    CHUNKED = None
else:
    CHUNKED = LinearCrossEntropyOptions(batch_chunk_size=2)
ROWS = 10


def some_of(names, each=3):
    """Every third one where time is short."""
    return [
        pytest.param(x, marks=pytest.mark.slow if i % each else ()) for i, x in enumerate(names)
    ]


# Functions whose derivative of second order is wrong ---------------------------------------------


class Fused(Function):
    """A head that makes its gradient in its forward pass, as Liger's."""

    @staticmethod
    def forward(h, w, y):
        h, w = (x.detach().requires_grad_() for x in (h, w))
        with torch.enable_grad():
            loss = F.cross_entropy(h @ w.T, y)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, grad, *_):
        return *(x * grad for x in ctx.saved_tensors), None


class FusedInGradMode(Function):
    """The same, which detaches in grad mode."""

    @staticmethod
    def forward(ctx, h, w, y):
        with torch.enable_grad():
            h, w = (x.detach().requires_grad_() for x in (h, w))
            loss = F.cross_entropy(h @ w.T, y)
        ctx.grads = torch.autograd.grad(loss, (h, w))
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        return *(x * grad for x in ctx.grads), None


class FusedInFloat32(FusedInGradMode):
    """The same, which runs in float32 alone."""

    @staticmethod
    def forward(ctx, h, w, y):
        if h.dtype != torch.float32:
            raise TypeError("float32 alone")
        return FusedInGradMode.forward(ctx, h, w, y)


class RoundedToFloat32(Function):
    """The same, which computes in float32 whatever it is given, by code that torch does not see."""

    @staticmethod
    def forward(ctx, h, w, y):
        h_, w_ = (x.detach().numpy().astype("float32").astype("float64") for x in (h, w))
        z = h_ @ w_.T
        p = torch.from_numpy(z).softmax(1)
        off = (p - F.one_hot(y, len(w))) / len(y)
        grads = off @ torch.from_numpy(w_), off.T @ torch.from_numpy(h_)
        ctx.grads = [x.float().to(h.dtype) for x in grads]
        return F.cross_entropy(torch.from_numpy(z), y).float().to(h.dtype)

    backward = FusedInGradMode.backward


class SavesItsSlope(Function):
    """An activation that saves its derivative, and not its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = 1 - x.tanh() ** 2
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.slope


class Once(SavesItsSlope):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.slope


class WrongTangent(Function):
    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 0.97


class FusedLoss(Function):
    @staticmethod
    def forward(ctx, z, y):
        ctx.grad = (z.softmax(-1) - F.one_hot(y, z.shape[-1])) / len(y)
        return F.cross_entropy(z, y)

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad * grad, None


def by_hand(h, w, y):
    """No Function, but the same: gradients as constants of a surrogate."""
    h_, w_ = (x.detach().requires_grad_() for x in (h, w))
    loss = F.cross_entropy(h_ @ w_.T, y)
    g, k = torch.autograd.grad(loss, (h_, w_))
    return loss.detach() + ((h - h.detach()) * g).sum() + ((w - w.detach()) * k).sum()


def plain(h, w, y):
    return F.cross_entropy(h @ w.T, y)


HEADS = {  # and what the error has to name
    "fused": (lambda h, w, y: Fused.apply(h, w, y)[0], "test_wrong_products.Fused"),
    "fused, detached in grad mode": (FusedInGradMode.apply, "FusedInGradMode"),
    "by hand": (by_hand, "no_grad"),
    "beside another": (
        lambda h, w, y: plain(h, w, y) + Fused.apply(h.sin(), w, y)[0] / 100,
        "Fused",
    ),
    "beside what is detached": (lambda h, w, y: Fused.apply(rounded(h), w, y)[0], "Fused"),
}
if CHUNKED is not None:
    HEADS["chunked by torch"] = (
        partial(F.linear_cross_entropy, options=CHUNKED),
        "linear_cross_entropy",
    )
    HEADS["chunked by torch, a loss a row"] = (
        lambda h, w, y: F.linear_cross_entropy(h, w, y, options=CHUNKED, reduction="none").mean(),
        "linear_cross_entropy",
    )
IN_FLOAT32 = {
    "raises in float64": (FusedInFloat32.apply, "FusedInFloat32"),
    "rounds to float32": (RoundedToFloat32.apply, "RoundedToFloat32"),
}


ACTIVATIONS = {x.__name__: x for x in (SavesItsSlope, Once, WrongTangent)}


# Losses ------------------------------------------------------------------------------------------


def problem(dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 5), "b": (7,), "c": (4, 7), "w": (9, 4)}
    params, v = (
        {n: (torch.randn(s, generator=random) / 2).to(dtype) for n, s in shapes.items()}
        for _ in "pv"
    )
    x = torch.randn(ROWS, 5, generator=random).to(dtype)
    return params, {"x": x, "y": torch.randint(0, 9, (ROWS,), generator=random)}, v


def body(params, batch, activation=torch.tanh):
    return activation(F.relu(batch["x"] @ params["a"].T + params["b"]) @ params["c"].T)


def with_head(head):
    """Products of a loss that ends in a head, for Gauss-Newton a function of what it is given."""
    return {
        "hvp": partial(hvp, lambda p, b: head(body(p, b), p["w"], b["y"])),
        "ggnvp": partial(
            ggnvp, lambda p, b: (body(p, b), p["w"]), lambda out, b: head(*out, b["y"])
        ),
    }


def rounded(h):
    """Straight through: the derivative of what is rounded is left out on purpose."""
    return h + ((h * 8).round() / 8 - h).detach()


def products(loss, activation=torch.tanh):
    def logits(params, batch):
        return body(params, batch, activation) @ params["w"].T

    def each(params, batch):
        return F.cross_entropy(logits(params, batch), batch["y"], reduction="none")

    return {
        "hvp": partial(hvp, lambda p, b: loss(logits(p, b), b)),
        "ggnvp": partial(ggnvp, logits, loss),
        "fisher_vp": partial(fisher_vp, each),
    }


def mean(out, batch):
    return F.cross_entropy(out, batch["y"])


def refused(make, *args, leaf="params['", cause=""):
    """It raises, and raises once more; and does not where nobody wants to know."""
    product = make(microbatch_size=4)
    for _ in range(2):
        with pytest.raises(WrongProductError) as caught:
            product(*args)
        said = str(caught.value)
        assert all(x in said for x in (leaf, cause, "central differences", "check=False")), said
    make(microbatch_size=4, check=False)(*args)


# What is found -----------------------------------------------------------------------------------


@pytest.mark.nightly
@DTYPE
@pytest.mark.parametrize("name", some_of(HEADS))
def test_a_head_that_makes_its_gradient_in_its_forward_pass(name, dtype):
    head, cause = HEADS[name]
    for make in with_head(head).values():
        refused(make, *problem(dtype), cause=cause)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_head_in_float32(name):
    head, cause = IN_FLOAT32[name]
    for make in with_head(head).values():
        refused(make, *problem(torch.float32), cause=cause)


def test_some_leaves_are_a_few_percent_off_and_none_is_zero():
    params, batch, v = problem()
    wrong = with_head(HEADS["beside another"][0])["hvp"](check=False)(params, batch, v)[1]
    head = lambda h, w, y: plain(h, w, y) + plain(h.sin(), w, y) / 100  # noqa: E731
    right = with_head(head)["hvp"]()(params, batch, v)[1]
    off = {n: float((wrong[n] - right[n]).norm() / right[n].norm()) for n in v}
    assert all(1e-4 < x < 0.05 for x in off.values()), off


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hvp", "ggnvp", "fisher_vp"])
@pytest.mark.parametrize("name", some_of(ACTIVATIONS, 2))
def test_an_activation_in_a_body(name, kind):
    """What a product takes as linear needs a tangent, and a Hessian the slope's derivative."""
    make, args = products(mean, ACTIVATIONS[name].apply)[kind], problem()
    right = {"SavesItsSlope": ["ggnvp", "fisher_vp"], "WrongTangent": ["hvp"]}
    if kind not in right.get(name, []):
        refused(make, *args, cause=name)
        return
    came, want = (of(microbatch_size=4)(*args) for of in (make, products(mean)[kind]))
    for x, y in zip(tree_leaves(came), tree_leaves(want), strict=True):
        assert (x - y).norm() <= 1e-12 * y.norm()


@pytest.mark.slow
@pytest.mark.parametrize("share", some_of([0.05, 1.0]))
def test_the_loss_of_outputs(share):
    def loss(out, batch):
        return share * FusedLoss.apply(out, batch["y"]) + (1 - share) * mean(out, batch)

    refused(products(loss)["ggnvp"], *problem(), cause="FusedLoss")
    refused(products(loss)["hvp"], *problem(), cause="FusedLoss")


@pytest.mark.slow
def test_the_programs_of_the_finding():
    """One matrix, float64: torch's own chunked head, Liger's kind, and a loss of outputs."""
    torch.manual_seed(0)
    h, w, v = (torch.randn(s, dtype=torch.float64) for s in ((8, 6), (9, 6), (9, 6)))
    batch = {"h": h, "t": torch.randint(0, 9, (8,))}
    for head in [HEADS[name][0] for name in ("chunked by torch", "fused") if name in HEADS]:
        make = partial(hvp, lambda w, b, head=head: head(b["h"], w, b["t"]))
        refused(make, w, batch, v, leaf="in params:")
    fused = partial(ggnvp, lambda w, b: b["h"] @ w.T, lambda z, b: FusedLoss.apply(z, b["t"]))
    refused(fused, w, batch, v, leaf="in params:")


@pytest.mark.slow
def test_what_torch_itself_has_wrong():
    """Its _weight_norm twice backwards, and forward AD of some operations (torch 2.13)."""
    params, batch, v = problem()
    normed = partial(torch._weight_norm, dim=0)

    def loss(params, batch):
        w = normed(params["w"], params["w"].norm(dim=1, keepdim=True).sin())
        return plain(body(params, batch), w, batch["y"])

    refused(partial(hvp, loss), params, batch, v, leaf="params['w']", cause="torch itself")

    def multiplied(params, batch):
        at = torch.zeros(len(batch["x"]), 4, dtype=torch.int64)
        one = torch.ones(len(batch["x"]), 1, dtype=torch.float64)
        return one.scatter_reduce(1, at, body(params, batch), "prod")

    make = partial(ggnvp, multiplied, lambda out, batch: (out**2).mean())
    refused(make, params, batch, v, cause="torch itself")


# What is not --------------------------------------------------------------------------------------


RoundedByFunction = function(lambda h: (h * 8).round() / 8, lambda g, h: g, old=True)
Reversed = function(torch.clone, lambda g, h: -g, old=True)


def ratio(h, w, y):
    """Of probabilities on policy: its value is one, and its gradient is not."""
    chosen = torch.log_softmax(h @ w.T, 1).gather(1, y[:, None])[:, 0]
    return -((chosen - chosen.detach()).exp() * (y.to(h) - 1)).mean()


def chaos(x):
    for _ in range(60):
        x = 3.99 * x * (1 - x)
    return x


RANDOM = torch.Generator()
RIGHT = {
    "plain": plain,
    "straight through": lambda h, w, y: plain(rounded(h), w, y),
    "straight through, by a Function": lambda h, w, y: plain(RoundedByFunction.apply(h), w, y),
    "reversed gradients": lambda h, w, y: plain(Reversed.apply(h), w, y),
    "a ratio of probabilities": ratio,
    "its own targets": lambda h, w, y: (h @ w.T - (h @ w.T).detach().sin()).square().mean(),
    "a padding token": lambda h, w, y: (
        (F.embedding(y % 4, w, padding_idx=2).sin() * h).square().mean()
    ),
    "abs at zero": lambda h, w, y: (h * w.sum(0)).abs().mean() + (w - w.detach()).abs().sum(),
    "max of equals": lambda h, w, y: (
        torch.cat([h, h], 1).amax(1).square().mean() + w.square().sum()
    ),
    "a hinge on whole numbers": lambda h, w, y: F.relu(
        1 - h.round() @ w.round().T + w[0, 0]
    ).mean(),
    "square of a hinge at zero": lambda h, w, y: (
        F.relu(h * 0 + w.sum() - w.detach().sum()).square().mean()
    ),
    "dropout": lambda h, w, y: plain(F.dropout(h, 0.5), w, y),
    "a generator of its own": lambda h, w, y: plain(
        h * torch.rand(4, generator=RANDOM, dtype=h.dtype), w, y
    ),
    "of as many rows as there are": lambda h, w, y: plain(h, w, y[torch.arange(ROWS)]),
    "not finite": lambda h, w, y: plain(h, w, y) / (w.sum() - w.sum()),
    "linear": lambda h, w, y: w.sum(),
    "chaos": lambda h, w, y: chaos((h.sin() ** 2) @ w.softmax(1).T).mean(),
    "constant": lambda h, w, y: y.to(w).mean(),
}


@pytest.mark.slow
@DTYPE
@pytest.mark.parametrize("name", some_of(RIGHT))
def test_no_false_alarm(name, dtype):
    params, batch, v = problem(dtype)
    params["b"].zero_()
    sizes = {"microbatch_size": None if "as many rows" in name else 4}
    for make in with_head(RIGHT[name]).values():
        make(**sizes)(params, batch, v)

    def each(params, batch):
        return RIGHT[name](body(params, batch), params["w"], batch["y"]).expand(len(batch["x"]))

    fisher_vp(each, **sizes)(params, batch, v)


@pytest.mark.slow
def test_what_is_detached_is_a_constant():
    for name in ("straight through", "a ratio of probabilities", "its own targets"):
        for make in with_head(RIGHT[name]).values():
            make()(*problem())


def test_complex_parameters():
    random = torch.Generator().manual_seed(0)
    w, v, x = (torch.randn(4, 4, generator=random, dtype=torch.complex64) for _ in range(3))

    def loss(w, x, slope):
        return slope(torch.view_as_real(x @ w)).square().mean()

    hvp(partial(loss, slope=torch.tanh), microbatch_size=2)(w, x, v)
    refused(partial(hvp, partial(loss, slope=SavesItsSlope.apply)), w, x, v, leaf="in params:")


# When ---------------------------------------------------------------------------------------------


COST = 6  # calls of a loss: five gradients and a product, of a few samples


@pytest.mark.given_up("early writes")
def test_once_a_loss_and_kind():
    """However products of it are made; and again where a module changed its mode.

    Of a batch that is not cut: a loss that is cut is asked whether it may be, too.
    """
    params, batch, v = problem()
    net, calls = nn.Dropout(0.5).eval(), list[int]()

    def loss(params, batch):
        calls.append(len(batch["x"]))
        return plain(net(body(params, batch)), params["w"], batch["y"])

    def count(make, *args):
        calls.clear()
        make()(*args)
        return len(calls)

    make = partial(hvp, loss)
    once = 1 + 1  # a new product computes its first microbatch twice
    assert count(make, params, batch, v) == once + COST
    assert count(make, params, batch, v) == once
    assert count(partial(make, check=False), params, batch, v) == once
    assert count(partial(hvp, loss), params, batch, v) == once
    net.train()
    assert count(make, params, batch, v) == once + COST
    assert count(make, params, batch, v) == once
    wide = {n: torch.cat([x, x], -1) if n == "a" else x for n, x in params.items()}
    other = batch | {"x": torch.cat([batch["x"]] * 2, 1)}
    assert count(make, wide, other, {n: x + 1 for n, x in wide.items()}) == once + COST


def test_a_product_is_compared_once_a_loss_and_kind():
    """And again where a module changed its mode, or params are of another shape."""
    params, batch, v = problem()
    net, calls = nn.Dropout(0.5).eval(), list[int]()

    def loss(params, batch):
        calls.append(len(batch["x"]))
        return plain(net(body(params, batch)), params["w"], batch["y"])

    def count(*args, **options):
        calls.clear()
        hvp(loss, **options)(*args)
        return len(calls)

    steady = count(params, batch, v, check=False)
    wide = {n: torch.cat([x, x], -1) if n == "a" else x for n, x in params.items()}
    other = batch | {"x": torch.cat([batch["x"]] * 2, 1)}
    moved = {n: x + 1 for n, x in wide.items()}
    for mode, args in (
        (False, (params, batch, v)),
        (True, (params, batch, v)),
        (True, (wide, other, moved)),
    ):
        net.train(mode)
        assert count(*args) > steady
        assert count(*args) == count(*args, check=False) == steady


@pytest.mark.slow
def test_a_function_is_kept_no_longer_than_its_products():
    params, batch, v = problem()

    def forward(params, batch):
        return body(params, batch) @ params["w"].T

    seen = weakref.ref(forward)
    ggnvp(forward, mean)(params, batch, v)
    del forward
    gc.collect()
    assert seen() is None


@pytest.mark.mechanism
def test_verdicts_are_kept_no_longer_than_functions():
    from pureaccum.curvature.passes import _verdicts

    params, batch, v = problem()
    gc.collect()
    before = len(_verdicts)
    ggnvp(lambda p, b: body(p, b) @ p["w"].T, mean)(params, batch, v)
    gc.collect()
    assert len(_verdicts) == before


def test_where_the_first_rows_have_no_weight():
    """Nothing can be said of them, and nothing is: the next batch is asked."""
    params, batch, v = problem()
    head, _ = HEADS["fused"]

    def loss(params, batch):
        total = head(body(params, batch), params["w"], batch["y"]) * batch["mask"].sum()
        return pa.Weighted(total, batch["mask"].sum())

    product = hvp(loss, microbatch_size=2)
    masked = batch | {"mask": torch.tensor([0, 0] + [1] * 8).double()}
    product(params, masked, v)
    with pytest.raises(WrongProductError):
        product(params, masked | {"mask": masked["mask"].flip(0)}, v)


@pytest.mark.slow
def test_streams_estimates_modes_and_generators():
    params, batch, v = problem()
    parts = [{n: x[i : i + 4] for n, x in batch.items()} for i in (0, 4)]
    wrong, right = with_head(HEADS["fused"][0]), with_head(RIGHT["dropout"])
    for make in wrong.values():
        with pytest.raises(WrongProductError):
            make(stream=True, microbatch_size=2)(params, iter(parts), v)
        with torch.no_grad(), torch.inference_mode(), pytest.raises(WrongProductError):
            make()(params, batch, v)
    for estimate in (diagonal, trace):
        of = partial(wrong["ggnvp"](), params, batch)
        with pytest.raises(WrongProductError):
            estimate(of, params, key=pa.key(0), samples=1)
        estimate(of, params, key=pa.key(0), samples=1, check=False)
    for make in right.values():
        torch.manual_seed(3)
        want, then = tree_leaves(make(check=False)(params, batch, v)), torch.rand(2)
        for again in (True, False):
            torch.manual_seed(3)
            came = tree_leaves(make(check=again)(params, batch, v))
            assert all(x.equal(y) for x, y in zip(came, want, strict=True))
            assert torch.rand(2).equal(then)


Mapped = type("Mapped", (WrongTangent,), {"generate_vmap_rule": True})


def test_it_is_not_asked_under_transforms():
    params, batch, v = problem()
    of = products(mean, Mapped.apply)["ggnvp"](microbatch_size=4)
    vmap(lambda v: of(params, batch, v))(pa.stack([v, v]))
    jvp(lambda v: of(params, batch, v), (v,), (v,))
    with pytest.raises(WrongProductError):
        of(params, batch, v)


# How far ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("share", [1e-2, 1e-4, 1e-6])
def test_a_product_that_misses_a_small_share_is_refused(share):
    """Of the curvature of an activation, of which so much saves its slope."""

    def activation(x):
        return (1 - share) * x.tanh() + share * SavesItsSlope.apply(x)

    refused(products(mean, activation)["hvp"], *problem(), cause="SavesItsSlope")


@pytest.mark.mechanism
@examples(1 / 4)
@given(st.integers(0, 2**20), st.sampled_from(["a", "b", "c", "w"]), st.floats(-6, 0))
def test_a_part_of_a_leaf_in_a_million(seed, leaf, digits):
    """A product that is right fits, and one that misses so much of one leaf misses it there."""
    params, batch, _ = problem()
    random = torch.Generator().manual_seed(seed)
    params = {n: torch.randn(x.shape, generator=random).double() for n, x in params.items()}

    def loss(params):
        return plain(body(params, batch), params["w"], batch["y"])

    def product(off, params, v):
        found = jvp(torch.func.grad(loss), (params,), (v,))[1]
        return found | {leaf: found[leaf] * (1 - off)}

    def missed(off):
        return misses(SecondOrder(lambda params: params, loss, partial(product, off)), params)

    assert missed(0.0) == {}
    assert list(missed(10**digits)) == [1 + sorted(params).index(leaf)]


# In the check -------------------------------------------------------------------------------------


def normalised(z):
    off = z - z.mean(-1, keepdim=True)
    return off / (off.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def with_jvp_inside(norm):
    def loss(params, x):
        def net(x):
            return (norm(x @ params["a"].T) * params["b"]).sum(-1)

        return jvp(net, (x,), (torch.ones_like(x),))[1].square().mean()

    return loss


def report(loss, params, batch, **options):
    found = check_accumulation(
        loss, params, batch, finite_differences=True, raise_on_mismatch=False, splits=1, **options
    )
    assert found.fits == (not found.diagnoses)
    assert check_accumulation(loss, params, batch, splits=1).fits
    yield from found.diagnoses


@pytest.mark.nightly
@pytest.mark.promise("check")
@pytest.mark.parametrize("dtype", some_of(DTYPES[:2]))
def test_the_check_finds_what_both_sides_have_wrong(dtype):
    """LayerNorm inside of a jvp is wrong in torch 2.13, and _weight_norm's second derivative."""
    params, batch, _ = problem(dtype)
    some = {n: params[n] for n in "ab"}
    (wrong,) = report(
        with_jvp_inside(partial(F.layer_norm, normalized_shape=(7,))), some, batch["x"]
    )
    assert wrong.kind == "wrong derivative"
    assert "central differences of the loss" in wrong.says
    assert "params['a']" in wrong.says
    assert not [*report(with_jvp_inside(normalised), some, batch["x"])]

    def loss(params, batch):
        w = torch._weight_norm(params["w"], params["w"].norm(dim=1, keepdim=True).sin(), 0)
        return plain(body(params, batch), w, batch["y"])

    (wrong,) = report(loss, params, batch)
    assert "central differences of its gradient" in wrong.says
    assert "params['w']" in wrong.says
    head, _ = HEADS["fused"]
    (wrong,) = report(lambda p, b: head(body(p, b), p["w"], b["y"]), params, batch)
    assert "test_wrong_products.Fused" in wrong.says
    for name in ("straight through", "a padding token", "a hinge on whole numbers"):
        right = RIGHT[name]
        assert not [*report(lambda p, b, f=right: f(body(p, b), p["w"], b["y"]), params, batch)]


@pytest.mark.promise("check")
def test_what_has_no_second_derivative_is_compared_once():
    """Attention's kernel, of which torch has none, and says so."""
    q = torch.randn(4, 3, 2, 5, generator=torch.Generator().manual_seed(0))

    def loss(w, q):
        return F.scaled_dot_product_attention(q @ w, q, q).square().mean()

    assert not [*report(loss, torch.eye(5) + 0.1, q)]
