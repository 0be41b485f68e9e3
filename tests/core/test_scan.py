"""``pa.scan`` is the loop over its chunks, and so are its derivatives, of any order.

Both sides are float64, and as everywhere in this folder the bound leaves half of the digits for two
graphs of one function; on integers they have the same bits.
"""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, seeds
from tests.core.derivatives import DERIVATIVES
from tests.draws import examples, generator
from tests.exactly import integers
from tests.problems import ROOT, drawing, near_together, normal, once, pulled
from tests.refusals import saying


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
STEPS = 7
cuts = st.integers(1, STEPS + 1) | compositions(STEPS)
REDUCE = {"ys": "concat", "sum": "sum", "mean": "concat", "last": "last", "most": "max"}


def recurrent(params, carry, xs):
    """A state of two parts, a count, and outputs of all kinds."""
    h, seen = carry["h"], carry["seen"]
    ys = []
    for x in xs.unbind():
        h = params["a"] * h + x @ params["b"]
        ys.append(h)
    ys = torch.stack(ys) if ys else xs @ params["b"]
    out = {
        "ys": ys,
        "sum": ys.square().sum(),
        "mean": pa.Weighted((ys.sum(-1) * (xs[:, 0] > 0)).sum(), (xs[:, 0] > 0).sum()),
        "last": h,
        "most": ys.sum(-1).amax(),
    }
    return {"h": h, "seen": seen + len(xs), "any": carry["any"] | (xs > 2).any()}, out


def plain(params, carry, xs):
    """The same over the whole sequence."""
    carry, out = recurrent(params, carry, xs)
    total, weight = out["mean"]
    return carry, out | {"mean": total / weight}


def start(dtype=torch.float64):
    return {"h": torch.zeros(3, dtype=dtype), "seen": torch.tensor(0), "any": torch.tensor(False)}


def exact(seed):
    g = generator(seed)
    params = {"a": integers(g, 3, bound=1), "b": integers(g, 2, 3, bound=2)}
    xs = integers(g, STEPS, 2, bound=3)
    xs[:, 0] = torch.tensor([1.0, -1, 2, -2, 1, 1, -3])  # four count: a power of two
    return params, start(torch.float32), xs


def of_outs(run):
    """One number of all that is differentiable, but for the largest: ties share by chunks."""

    def number(params, h, xs):
        carry, out = run(params, start(h.dtype) | {"h": h}, xs)
        each = [carry["h"], out["ys"], out["sum"], 2 * out["mean"], out["last"]]
        return sum((i + 1) * x.sum() for i, x in enumerate(each))

    return number


@given(cuts, seeds())
def test_it_has_the_bits_of_the_loop(cut, seed):
    params, carry, xs = exact(seed)
    run = pa.scan(recurrent, chunk_size=cut, reduce=REDUCE)
    assert_trees_bitwise_equal(run(params, carry, xs), plain(params, carry, xs))
    given_ = params, carry["h"] + 1, xs
    for number in (grad(of_outs(run), (0, 1, 2)), lambda *a: by_backward(of_outs(run), *a)):
        assert_trees_bitwise_equal(number(*given_), grad(of_outs(plain), (0, 1, 2))(*given_))


def by_backward(f, params, h, xs):
    names = [*params]
    *ps, gh, gx = pulled(
        lambda *leaves: f(dict(zip(names, leaves[:-2], strict=True)), *leaves[-2:]),
        *params.values(), h, xs,
    )  # fmt: skip
    return dict(zip(names, ps, strict=True)), gh, gx


@given(cuts, st.permutations(range(STEPS)))
def test_the_largest_of_all_chunks_alone_has_a_gradient(cut, order):
    xs, w = torch.tensor([float(x) for x in order]), torch.tensor(3.0)

    def largest(w, xs):
        run = pa.scan(lambda w, h, x: (h + x.sum(), (w * x).amax()), chunk_size=cut, reduce="max")
        return run(w, torch.zeros(()), xs)[1]

    of_w, of_xs = grad(largest, (0, 1))(w, xs)
    assert of_w == STEPS - 1
    assert torch.equal(of_xs, 3.0 * (xs == STEPS - 1))


# Every derivative ------------------------------------------------------------------------------


def cell(w, h, x):
    return torch.tanh(h @ w + x)


def over_time(w, h, xs):
    """Of a chunk: rows lie along dim 1, so that time may be cut and rows as well."""
    ys = []
    for x in xs.unbind():
        h = cell(w, h, x)
        ys.append(h)
    return h, torch.stack(ys)


W, H, XS = normal(3, 3) / 2, normal(4, 3, seed=1), normal(STEPS, 4, 3, seed=2)
scanned = pa.scan(over_time, chunk_size=3)


def time_inside(run):
    """Rows outside, time inside."""
    return pa.microbatch(run, microbatch_size=3, batch_argnums=(1, 2), dim=-2, reduce="concat")


def rows_inside(w, h, xs):
    """Time outside, rows inside."""
    inner = pa.microbatch(over_time, microbatch_size=3, batch_argnums=(1, 2), dim=-2)
    return pa.scan(inner, chunk_size=2)(w, h, xs)


def two_deep(w, h, xs):
    """A scan in a scan: of each chunk, steps."""
    return pa.scan(pa.scan(over_time, chunk_size=1), chunk_size=3)(w, h, xs)


def captured(w, h, xs):
    return pa.scan(lambda _, h, x: over_time(w, h, x), chunk_size=3)((), h, xs)


def in_remat(w, h, xs):
    return pa.remat(scanned)(w, h, xs)


FORMS = {
    "scan": scanned,
    "time inside": time_inside(scanned),
    "rows inside": rows_inside,
    "two deep": two_deep,
    "captured": captured,
    "in remat": in_remat,
}
BY = {  # what is differentiated
    "params": lambda f: (lambda w: f(w, H, XS), W),
    "carry": lambda f: (lambda h: f(W, h, XS), H),
    "sequence": lambda f: (lambda xs: f(W, H, xs), XS),
    "all": lambda f: (lambda w: f(w, H * w[0], XS * w[1].sin()), W),
}


def joined(run):
    return lambda *given: (lambda h, ys: torch.cat([h.flatten(), ys.sin().flatten()]))(*run(*given))


QUICK = [("scan", "params"), ("scan", "sequence"), ("time inside", "all")]
CASES = [*((form, by) for form in FORMS for by in ("params", "all")), ("scan", "carry")]
# What it captures, as forward AD or a vmap follows it.
GIVEN_UP = {
    *("jvp", "dual numbers", "jvp of grad", "grad of jvp", "jvp of jvp", "vmap", "vmap of hvp"),
    *("jacfwd", "hessian", "jacfwd twice"),
}


def of_every_form():
    slow, given_up = pytest.mark.slow, pytest.mark.given_up("captured")
    for form, by in [*QUICK, *(it for it in CASES if it not in QUICK)]:
        for derivative in DERIVATIVES:
            marks = [] if (form, by) in QUICK else [slow]
            marks += [given_up] if form == "captured" and derivative in GIVEN_UP else []
            yield pytest.param(derivative, form, by, marks=marks)


@pytest.mark.parametrize(("derivative", "form", "by"), [*of_every_form()])
def test_every_derivative_is_that_of_the_loop(derivative, form, by):
    ours, theirs = (DERIVATIVES[derivative](*BY[by](joined(f))) for f in (FORMS[form], over_time))
    near_together(ours, theirs)


PROGRAMS = {
    "pa.grad": lambda loss, w, rows: pa.grad(loss, microbatch_size=3)(w, rows),
    "autograd": lambda loss, w, rows: pa.grad(loss, microbatch_size=3, engine="autograd")(w, rows),
    "grad of pa.grad": lambda loss, w, rows: grad(
        lambda w: pa.grad(loss, microbatch_size=3)(w, rows).square().sum()
    )(w),
    "value": lambda loss, w, rows: grad(pa.value(loss, microbatch_size=3))(w, rows),
    "step": lambda loss, w, rows: (
        once(pa.make_step(loss, pa.sgd(0.5), microbatch_size=3), w, rows)[0].params
    ),
    "compiled step": lambda loss, w, rows: (
        once(
            pa.make_step(loss, pa.sgd(0.5), microbatch_size=3, compile={"backend": "eager"}),
            w,
            rows,
        )[0].params
    ),
    "samples": lambda loss, w, rows: pa.per_sample_grad(loss, keep_batch_dim=True)(w, rows),
    "Hessian product": lambda loss, w, rows: pa.curvature.hvp(loss, microbatch_size=3)(w, rows, w),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_of_our_own_functions_hold_it(name):
    rows = XS.transpose(0, 1)  # samples first

    def loss(run):
        return lambda w, rows: pa.Weighted(
            run(w, torch.zeros(len(rows), 3).double(), rows.transpose(0, 1))[1].sin().sum(),
            len(rows),
        )

    ours, theirs = (PROGRAMS[name](loss(f), W, rows) for f in (scanned, over_time))
    near_together(ours, theirs)


@examples(1 / 2)
@given(seeds(), cuts, st.permutations(["grad", "jvp", "vmap", "scan", "rows"]), st.integers(1, 4))
def test_random_nests_are_those_of_the_loop(seed, cut, order, depth):
    """Transforms around a scan of a microbatched function of a scan, in any order."""
    w, h, xs = normal(3, 3, seed=seed) / 2, normal(4, 3, seed=seed + 1), normal(STEPS, 4, 3, seed=2)

    def nest(run):
        f = lambda w: run(w, h, xs)[1].square().sum(-1).mean()  # noqa: E731
        for name in order[:depth]:
            f = AROUND[name](f)
        return f(w)

    AROUND = {
        "grad": lambda f: lambda w: grad(lambda w: f(w).square().sum())(w).square().sum(),
        "jvp": lambda f: lambda w: jvp(f, (w,), (w.cos(),))[1],
        "vmap": lambda f: lambda w: vmap(lambda s: f(w * s))(torch.tensor([1.0, -0.5]).double()),
        "scan": lambda f: lambda w: f(w) * 2,
        "rows": lambda f: lambda w: f(w.sin()),
    }
    inner = over_time
    for name in order:
        if name == "scan":
            inner = pa.scan(inner, chunk_size=cut)
        if name == "rows":
            inner = pa.microbatch(inner, microbatch_size=3, batch_argnums=(1, 2), dim=-2)
    if isinstance(cut, list):  # a list is of the whole sequence
        inner = pa.scan(over_time, chunk_size=cut)
    near_together(nest(inner), nest(over_time))


# What a chunk does ------------------------------------------------------------------------------


@pytest.mark.promise("second run")
@pytest.mark.parametrize("by", ["func", "backward", "forward alone"])
def test_what_a_chunk_draws_it_draws_again(by):
    def noisy(w, h, xs):
        h, ys = over_time(w, h, xs * torch.rand(xs.shape[-1]).double())
        return h, nn.functional.dropout(ys, 0.3)

    def loop(w, h, xs):
        outs = []
        for chunk in xs.split(3):
            h, ys = noisy(w, h, chunk)
            outs.append(ys)
        return h, torch.cat(outs)

    def of(run):
        f = lambda w: run(w, H, XS)[1].sin().sum()  # noqa: E731
        return {"func": grad(f), "backward": lambda w: pulled(f, w), "forward alone": f}[by](W)

    ours, theirs = (drawing(lambda f=f: of(f)) for f in (pa.scan(noisy, chunk_size=3), loop))
    near_together(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("by", ["func", "backward"])
def test_a_module_goes_through_a_sequence(by):
    """An LSTM, whose carry is a pair, with its parameters given or its own."""
    torch.manual_seed(0)
    net = nn.LSTM(3, 5).double()
    carry = (torch.zeros(1, 4, 5).double(), torch.zeros(1, 4, 5).double())

    def chunk(params, carry, xs):
        ys, carry = functional_call(net, params, (xs, carry))
        return carry, ys

    params = {name: x.detach() for name, x in net.named_parameters()}

    def of(run):
        f = lambda p: run(p, carry, XS)[1].square().sum()  # noqa: E731
        if by == "func":
            return grad(f)(params)
        found = pulled(lambda *its: f(dict(zip(params, its, strict=True))), *params.values())
        return dict(zip(params, found, strict=True))

    near_together(of(pa.scan(chunk, chunk_size=2)), of(chunk))

    def own(_, carry, xs):
        ys, carry = net(xs, carry)
        return carry, ys

    if by == "backward":
        leaves = [*net.parameters()]
        got, want = (
            torch.autograd.grad(f((), carry, XS)[1].square().sum(), leaves)
            for f in (pa.scan(own, chunk_size=2), own)
        )
        near_together(got, want)


@pytest.mark.promise("weights")
def test_a_mean_of_no_weight_in_a_chunk_adds_nothing_even_where_it_is_nan():
    def masked(w, h, xs):
        mask = (xs > 0).double()
        mean = (xs * mask * w).sum() / mask.sum()  # NaN where nothing is masked, and its gradient
        return h + mean.detach().nan_to_num(), pa.Weighted(mean * mask.sum(), mask.sum())

    xs, w = torch.tensor([1.0, 2, -1, -2, 4]).double(), torch.tensor(3.0).double()
    f = lambda w: pa.scan(masked, chunk_size=2)(w, torch.zeros(()).double(), xs)[1]  # noqa: E731
    for got in (grad(f)(w), pulled(f, w)):
        assert got == pytest.approx(7 / 3, rel=ROOT)
    assert f(w) == 7


@pytest.mark.promise("reductions")
def test_a_reducer_of_the_users_own_and_stacked_outputs():
    longest = pa.Reducer(
        lambda like: like.new_zeros(()),
        lambda state, values, weights: torch.maximum(state, values.amax()),
        torch.maximum,
        lambda state: state,
    )
    run = pa.scan(
        lambda w, h, x: (h + x.sum(), {"most": x.amax(), "sums": x.sum(), "mean": x.sum()}),
        chunk_size=2,
        reduce={"most": longest, "sums": "stack", "mean": "mean"},
    )
    h, out = run((), torch.tensor(0.0), torch.tensor([1.0, 5, 2, 2, 3]))
    assert h == 13
    assert out["most"] == 5
    assert out["sums"].tolist() == [6, 4, 3]
    assert out["mean"] == pytest.approx((6 * 2 + 4 * 2 + 3) / 5)


def test_an_empty_sequence_leaves_the_carry_and_says_what_outputs_are_like():
    carry, ys = pa.scan(lambda w, h, x: (h + 1, x @ w), chunk_size=3)(W, H, XS[:0])
    assert carry is H
    assert ys.shape == (0, 4, 3)


def test_along_any_dim_with_more_sequences_and_arguments_by_name():
    def both(w, h, x, mask, *, scale):
        h = h + (x * mask.unsqueeze(-1) @ w).sum(1) * scale
        return h, x[..., 0] * scale

    run = pa.scan(both, chunk_size=3, dim=1, batch_argnums=(2, -1))
    xs, mask = XS.transpose(0, 1), (XS[..., 0] > 0).double().T
    for f in (run, lambda *a, **k: both(*a, **k)):
        found = f(W, H, xs, mask, scale=2.0)
        near_together(found, both(W, H, xs, mask, scale=2.0))


@pytest.mark.slow
def test_a_compiler_of_the_user_takes_it_in_one_graph():
    f = lambda w: joined(scanned)(w, H, XS).sum()  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend="eager")
    near_together(compiled(W), f(W))
    leaf = W.clone().requires_grad_()
    near_together(torch.autograd.grad(compiled(leaf), leaf)[0], grad(f)(W))
    by_func = torch.compile(grad(f), fullgraph=True, backend="eager")
    near_together(by_func(W), grad(f)(W))


# Refusals ---------------------------------------------------------------------------------------

CARRY = {"h": torch.zeros(3), "n": torch.tensor(0), "name": "state"}
X = torch.zeros(5, 3)
BAD = {
    "no pair": (lambda c, x: c, TypeError, ("a dict", "expected a pair, (carry, out)")),
    "a triple": (lambda c, x: (c, x, x), TypeError, ("a tuple of 3", "(carry, out)")),
    "another structure": (
        lambda c, x: ({"h": c["h"]}, x),
        ValueError,
        ("carry", "'n'", "is missing", "like the one that func gets"),
    ),
    "another shape": (
        lambda c, x: (c | {"h": c["h"][:2]}, x),
        ValueError,
        ("carry['h'] came back as", "(2,)", "(3,)", "keeps its shapes and dtypes"),
    ),
    "another dtype": (
        lambda c, x: (c | {"h": c["h"].double()}, x),
        ValueError,
        ("carry['h']", "torch.float64", "expected a torch.float32", "h.to(carry.dtype)"),
    ),
    "a growing carry": (
        lambda c, x: (c | {"h": torch.cat([c["h"], x[:, 0]])}, x),
        ValueError,
        ("carry['h']", "(5,)"),
    ),
    "a number for a tensor": (
        lambda c, x: (c | {"n": 2}, x),
        TypeError,
        ("carry['n'] came back as 2", "torch.tensor(0)"),
    ),
    "another name": (
        lambda c, x: (c | {"name": "other"}, x),
        TypeError,
        ("carry['name']", "stays"),
    ),
    "a sum that is no row": (
        lambda c, x: (c, x.sum()),
        ValueError,
        ("out", "concat"),
    ),
}


@pytest.mark.promise("errors")
@pytest.mark.parametrize("case", BAD)
def test_what_a_chunk_may_not_return_is_refused_by_its_leaf(case):
    func, error, words = BAD[case]
    with saying(error, *words):
        pa.scan(lambda _, c, x: func(c, x), chunk_size=2)((), CARRY, X)


def held(_, c, x):
    return c, x


MADE = {
    "a size of none": (
        lambda: pa.scan(held, chunk_size=0),
        ValueError,
        ("chunk_size", "at least 1"),
    ),
    "sizes of another length": (
        lambda: pa.scan(held, chunk_size=[2, 2])((), CARRY, X),
        ValueError,
        ("chunk_size=[2, 2]", "adds up to 4", "the batch has 5"),
    ),
    "no function": (lambda: pa.scan(3, chunk_size=2), TypeError, ("func is 3",)),
    "the carry as a sequence": (
        lambda: pa.scan(held, chunk_size=2, batch_argnums=(1, 2)),
        ValueError,
        ("argument 1", "the carry"),
    ),
    "no such sequence": (
        lambda: pa.scan(held, chunk_size=2, batch_argnums=3)((), CARRY, X),
        ValueError,
        ("batch_argnums",),
    ),
    "another reduction": (
        lambda: pa.scan(held, chunk_size=2, reduce="median"),
        ValueError,
        ("reduce", "median"),
    ),
}


@pytest.mark.promise("errors")
@pytest.mark.parametrize("case", MADE)
def test_what_it_is_not_made_of_is_refused_by_name(case):
    run, error, words = MADE[case]
    with saying(error, *words):
        run()


@pytest.mark.given_up("early writes")
def test_a_chunk_that_writes_to_what_it_is_given_is_refused():
    def writes(w, h, x):
        h.add_(x.sum())
        return h, x

    before = H.clone()
    with saying(RuntimeError, "writes to"):
        pa.scan(writes, chunk_size=2)(W, H, XS)
    assert torch.equal(H, before)


@pytest.mark.promise("writes")
@pytest.mark.parametrize("which", [1, 2])
def test_a_chunk_that_has_written_to_what_it_is_given_raises(which):
    """Before it is written or after: in either case nothing comes out."""
    args = W, H.clone(), XS.clone()

    def writes(*given):
        given[which].add_(1)
        return over_time(*given)

    with pytest.raises(RuntimeError):
        pa.scan(writes, chunk_size=2)(*args)


@pytest.mark.promise("purity")
def test_no_argument_is_changed():
    params, carry, xs = exact(0)
    before = optree.tree_map(torch.clone, (params, carry, xs), namespace="pureaccum")
    run = pa.scan(recurrent, chunk_size=3, reduce=REDUCE)
    grad(of_outs(run))(params, carry["h"], xs)
    assert_trees_bitwise_equal((params, carry, xs), before)
