"""Losses that call what gives derivatives of its own: gradients, values, steps, products.

Whatever differentiates such a loss gives the bits of torch.func, on whole numbers. Sums over a
stream, the first state of a run and an optimizer keep no graph: these refuse plain autograd, to
which they would be constants, so that a gradient would silently lack a term.
"""

import itertools

import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum.curvature import fisher_vp, ggnvp, hvp
from tests.draws import generator
from tests.exactly import integers
from tests.problems import Around, in_parts, leaf, once, pulled
from tests.refusals import saying


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
RANDOM = generator(0)
W, V = integers(RANDOM, 3, bound=2).double(), integers(RANDOM, 3, bound=2).double()
X = integers(RANDOM, 4, 3, bound=2).double()
SGD = pa.sgd(0.5)


def f(w, x):
    return ((x @ w) ** 3).sum()


def accumulated(w, loss=f, **options):
    acc = pa.accumulator(loss, **{"reduction": "sum", **options})
    return acc.finalize(in_parts(acc, w, X.split(2)))[0]


def trained(w, loss=f, rate=0.5, reduction="sum"):
    step = pa.make_step(loss, pa.sgd(rate), microbatch_size=2, reduction=reduction)
    return once(step, w, X)[0].params


def by_gauss_newton(w):
    of = ggnvp(lambda w, x: (x @ w) ** 2, lambda out, x: (out**2).sum(), reduction="sum")
    return of(w, X, V)


CALLED = {
    "grad": lambda w: pa.grad(f, microbatch_size=2, reduction="sum")(w, X),
    "value": lambda w: pa.value(f, microbatch_size=2, reduction="sum")(w, X),
    "accumulator": accumulated,
    "make_step": trained,
    "sgd": lambda w: SGD.apply(torch.func.grad(f)(w, X), SGD.init(w), w)[0],
    "per_sample_grad": lambda w: pa.per_sample_grad(f, chunk_size=2, reduce="sum")(w, X),
    "gramian": lambda w: pa.gramian(f, chunk_size=2)(w, X),
    "hvp": lambda w: hvp(f, microbatch_size=2, reduction="sum")(w, X, V)[1],
    "ggnvp": by_gauss_newton,
    "fisher_vp": lambda w: fisher_vp(lambda w, x: (x @ w) ** 2, reduction="sum")(w, X, V),
}


def loss_of(called):
    """The mean over samples of what is the same for all of them, and of a term that is not."""
    return lambda w, x: (called(w) * 0.25).sum() + ((x @ w) ** 2).mean()


BY = {
    "make_step": lambda loss: W - trained(W, loss, 1.0, "mean"),
    "accumulator": lambda loss: accumulated(W, loss, reduction="mean", engine="auto"),
    "pa.grad": lambda loss: pa.grad(loss, microbatch_size=2)(W, X),
    "engine=auto": lambda loss: pa.grad(loss, microbatch_size=2, engine="auto")(W, X),
}
WITHOUT_GRAPH = ("accumulator", "make_step", "sgd")
AUTO = pytest.param("auto", marks=pytest.mark.given_up("auto engine"))


def differentiated():
    """Whatever a loss calls, by whatever differentiates it."""
    for name, by in itertools.product(CALLED, BY):
        marks = []
        if by in ("accumulator", "engine=auto"):
            marks = [pytest.mark.given_up("auto engine")]
        elif by == "make_step" and name in WITHOUT_GRAPH:
            marks = [pytest.mark.given_up("retries")]
        yield pytest.param(name, by, marks=marks, id=f"{name}-{by}")


@pytest.mark.parametrize(("name", "by"), [*differentiated()])
def test_what_a_loss_calls_is_differentiated(name, by):
    loss = loss_of(CALLED[name])
    want = torch.func.grad(loss)(W, X)
    assert not torch.equal(want, torch.func.grad(loss_of(lambda w: CALLED[name](W)))(W, X))
    for _ in range(2):  # the first call of a loss finds it out
        assert torch.equal(BY[by](loss), want)


BY_AUTOGRAD = {
    "grad": lambda loss: pa.grad(loss, microbatch_size=2, engine="autograd")(W, X),
    "per_sample_grad": lambda loss: pa.per_sample_grad(
        loss, engine="autograd", reduce="mean", keep_batch_dim=True
    )(W, X),
    "microbatch": lambda loss: pulled(
        lambda w: pa.microbatch(loss, microbatch_size=2, reduce="mean")(w, X), W
    ),
}


@pytest.mark.parametrize("by", BY_AUTOGRAD)
@pytest.mark.parametrize("name", CALLED)
def test_by_plain_autograd_too_or_refused(name, by):
    loss = loss_of(CALLED[name])
    if name in WITHOUT_GRAPH:
        with saying(RuntimeError, "keeps no graph", "engine='func'", "torch.no_grad()"):
            BY_AUTOGRAD[by](loss)
    else:
        assert torch.equal(BY_AUTOGRAD[by](loss), torch.func.grad(loss)(W, X))


@pytest.mark.parametrize("engine", ["autograd", AUTO])
@pytest.mark.parametrize("name", CALLED)
def test_a_constant_is_one_under_no_grad(name, engine):
    def constant(w):
        with torch.no_grad():
            return CALLED[name](w)

    want = torch.func.grad(loss_of(lambda w: CALLED[name](W)))(W, X)
    loss = loss_of(constant)
    assert torch.equal(pa.grad(loss, microbatch_size=2, engine=engine)(W, X), want)


@pytest.mark.given_up("retries")
def test_a_loss_that_begins_to_differentiate_after_some_microbatches():
    """What was summed until then is summed again."""
    late = loss_of(CALLED["grad"])

    def loss(w, batch):
        x, row = batch
        return late(w, x) if row[0] >= 2 else ((x @ w) ** 2).mean()

    batch = X, torch.arange(4)
    want = pa.grad(loss, microbatch_size=2, engine="func", check=False)(W, batch)
    got = pa.grad(loss, microbatch_size=2, engine="auto", check=False)(W, batch)
    assert torch.equal(got, want)


# Functions that take a gradient by torch.autograd.grad -------------------------------------


def adapted(w, x):
    """The loss after one step of the samples' own, as a task of MAML has it."""
    (g,) = torch.autograd.grad(((x @ w) ** 2).sum() / 4, w, create_graph=True)
    return (((x @ (w - g / 4)) * (x @ w)) ** 2).sum()


PIECES = {
    "microbatch": lambda w: pa.microbatch(adapted, microbatch_size=2, reduce="sum")(w, X),
    "captured": lambda w: pa.microbatch(
        lambda x: adapted(w, x), microbatch_size=2, reduce="sum", batch_argnums=0
    )(X),
    "rows": lambda w: pa.microbatch(lambda w, x: adapted(w, x).expand(len(x)), microbatch_size=2)(
        w, X
    )[::2].sum(),
    "remat": lambda w: pa.remat(adapted)(w, X[:2]) + pa.remat(lambda x: adapted(w, x))(X[2:]),
}


@pytest.mark.parametrize(
    "piece",
    [
        # a captured leaf is no argument, and may be asked for
        pytest.param(name, marks=() if name == "captured" else pytest.mark.given_up("retries"))
        for name in PIECES
    ],
)
@pytest.mark.parametrize("order", [1, 2])
def test_torch_autograd_grad_inside_is_followed_by_backward(piece, order):
    def derived(f):
        w = leaf(W)
        (g,) = torch.autograd.grad(f(w), w, create_graph=order == 2)
        return g if order == 1 else torch.autograd.grad(g.square().sum(), w)[0]

    want = derived(lambda w: sum(adapted(w, x) for x in X.split(2)))
    assert torch.equal(derived(PIECES[piece]), want)


@pytest.mark.given_up("retries")
def test_torch_autograd_grad_inside_a_module_is_followed():
    by_hand, module = (
        Around(lambda x, at: adapted(at.weight[0], x), nn.Linear(3, 1)) for _ in range(2)
    )
    for it in (by_hand, module):
        it.parts[0].weight.data = W[None].clone()
    sum(by_hand(x) for x in X.split(2)).backward()
    pa.microbatch(module, microbatch_size=2, reduce="sum", batch_argnums=0)(X).backward()
    assert torch.equal(module.parts[0].weight.grad, by_hand.parts[0].weight.grad)


@pytest.mark.promise("errors")
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("around", [torch.func.grad, torch.func.jacfwd, torch.no_grad()])
def test_where_nothing_is_recorded_the_error_says_what_to_do(piece, around):
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        around(PIECES[piece])(W.clone())
    assert "torch.func.grad" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("engine", ["func", "autograd", AUTO])
@pytest.mark.parametrize("width", [3, 400], ids=["small", "a leaf that is added by a hook"])
def test_a_loss_may_take_a_gradient_of_its_leaves_by_itself(engine, width):
    w = integers(RANDOM, width, width, bound=1).double()
    x = integers(RANDOM, 4, width, bound=1).double()

    def loss(w, x):
        (g,) = torch.autograd.grad((x @ w).square().sum() / 4, w, create_graph=True)
        return (x @ (w - g)).square().sum()

    want = pulled(lambda w: sum(loss(w, part) for part in x.split(2)), w)
    options = {"microbatch_size": 2, "reduction": "sum", "check": False}
    assert torch.equal(pa.grad(loss, engine=engine, **options)(w, x), want)
