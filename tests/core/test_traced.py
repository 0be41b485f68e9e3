"""While somebody traces nothing is written in place, and the numbers are those of a plain call."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, jacfwd, jvp, linearize, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.problems import ROOT, Functions, Operations, in_a_window, in_parts, leaf
from tests.refusals import saying


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("closure"),
    # torch.func.linearize keeps constants in its graph in a way that torch itself warns of.
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def whole(seed, *shape):
    return torch.randint(-3, 4, shape, generator=generator(seed)).double()


# Points, and batches of samples that no size divides.
POINTS = [(whole(i, 4, 4), whole(10 + i, 7, 4)) for i in range(3)]


def loss(w, x):
    return (x @ w).square().sum() / 8


def rows(w, x):
    return (x @ w) * x


def weighted(w, x):
    return pa.Weighted((x @ w).square().sum(), ((x[:, 0] > 0) + 1.0).sum())


def cut(func, reduce="concat"):
    return pa.microbatch(func, microbatch_size=3, reduce=reduce)


def stepping(optimizer, **options):
    def two_steps(w, x):
        step = pa.make_step(loss, optimizer(), microbatch_size=3, **{"reduction": "sum", **options})
        state = step.init(w)
        for _ in range(2):
            state, info = step(state, x)
        return state.params, info.loss

    return two_steps


def streaming(w, x):
    step = pa.make_step(loss, pa.sgd(0.5), donate=True, reduction="sum")
    return in_a_window(step, step.init(w), x.split(3))[0].params


def folded(acc, w, x):
    return acc.finalize(in_parts(acc, w, x.split(3), donate=True))


NET = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
FN = pa.functional(NET, microbatch_size=3)


def sample(w, x):
    return (x @ w).square().sum()


def signs(w, x):
    return folded(pa.per_sample_accumulator(sample, transform="sign", reduce="sum"), w, x)


def averaged(w, x):
    average_of = pa.ema(0.75)
    average = average_of.init(w)
    for row in x:
        average = average_of.update(average, w * row)
    return average.params


def minimized(w, x):
    gradient = pa.grad_and_value(loss, microbatch_size=3, reduction="sum")
    opt = pa.sam(pa.sgd(0.5))
    return opt.apply(lambda w: gradient(w, x), opt.init(w), w)[0]


def diagonal(w, x):
    product = pa.curvature.hvp(loss, microbatch_size=3, reduction="sum")
    return pa.curvature.diagonal(lambda v: product(w, x, v)[0], w, key=KEYS[0], samples=2)


KEYS = pa.fold_in(pa.key(0), torch.arange(7))
CALLS = {
    "grad": pa.grad(loss, microbatch_size=3, reduction="sum"),
    "grad of a mean": pa.grad_and_value(weighted, microbatch_size=3),
    "grad auto": pa.grad(loss, microbatch_size=3, engine="auto", reduction="sum"),
    "grad whole": pa.grad_and_value(loss),
    "skip": pa.grad(loss, microbatch_size=3, nonfinite="skip", reduction="sum"),
    "value": pa.value(weighted, microbatch_size=3),
    "concat": cut(rows),
    "sum": cut(lambda w, x: rows(w, x).sum(0), "sum"),
    "stack": cut(lambda w, x: rows(w, x).sum(0), "stack"),
    "max": cut(lambda w, x: rows(w, x).amax(0), "max"),
    "last": cut(lambda w, x: rows(w, x).sum(0), "last"),
    "a total": cut(loss, "sum"),
    "a mean": cut(weighted),
    "one microbatch": pa.remat(rows),
    "grad of rows": lambda w, x: grad(lambda w: cut(rows)(w, x).square().sum())(w),
    "grad of grad": lambda w, x: grad(
        lambda w: pa.grad(loss, microbatch_size=3, reduction="sum")(w, x).square().sum()
    )(w),
    "accumulator": lambda w, x: folded(pa.accumulator(loss, reduction="sum"), w, x),
    "sgd": stepping(lambda: pa.sgd(0.5, momentum=0.5), donate=True),
    "adamw": stepping(lambda: pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(0.1))),
    "scale": stepping(lambda: pa.adamw(0.1), loss_scale=pa.dynamic_loss_scale(8.0)),
    "stream": streaming,
    "samples": pa.per_sample_grad(sample),
    "clipped": pa.clipped_sum(sample, 1.0, chunk_size=3),
    "hvp": lambda w, x: pa.curvature.hvp(loss, microbatch_size=3, reduction="sum")(w, x, w),
    "functional": lambda w, x: FN.apply(FN.params, FN.buffers, x @ w / 8),
    "dropout": lambda w, x: pa.dropout(x @ w, 0.5, KEYS),
    "drawn": lambda w, x: x @ w * pa.uniform(KEYS, (4,), torch.float64) + pa.normal(KEYS, (4,)),
    "many draws": lambda w, x: w.sum() * pa.uniform(KEYS[0], (70,)),
    "averages": averaged,
    "signs": signs,
    "noise": stepping(lambda: pa.sgd(0.5), noise=True, reduction="mean", check=False),
    "sam": minimized,
    "moments": pa.per_sample_grad(sample, chunk_size=3, reduce="moments"),
    "diagonal": diagonal,
}
QUICK = "concat", "a mean", "value", "grad", "sgd", "dropout"
GIVEN_UP = {"grad auto": "auto engine", "sam": "lbfgs and sam"}
calls = pytest.mark.parametrize(
    "call",
    [
        pytest.param(
            x,
            marks=[
                *([] if x in QUICK else [pytest.mark.slow]),
                *([pytest.mark.given_up(GIVEN_UP[x])] if x in GIVEN_UP else []),
            ],
        )
        for x in CALLS
    ],
)
NOT_EXACT = (
    *("adamw", "scale", "clipped", "functional", "grad of a mean", "value", "a mean"),
    *("dropout", "drawn", "many draws", "signs", "noise", "sam", "averages"),
)


def flat(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def same(call, came, want):
    """In bits where all numbers are whole; elsewhere as near as float64 is halved in digits."""
    if call not in NOT_EXACT:
        assert_trees_bitwise_equal(flat(came), flat(want))
        return
    for x, y in zip(flat(came), flat(want), strict=True):
        assert (x - y).double().norm() <= ROOT * y.double().norm()


WRITE_THEMSELVES = {
    "functional": {"aten.add_.Tensor"},  # a BatchNorm counts its calls, on a copy
    # torch's vmap, of a matmul: the shape of a view of its own
    **{call: {"aten.squeeze_.dims"} for call in ("samples", "moments", "clipped", "signs")},
}


@calls
def test_a_program_of_make_fx_gives_the_numbers_of_other_inputs(call):
    program = make_fx(lambda w, x: flat(CALLS[call](w, x)))(*POINTS[0])
    written = {
        str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and getattr(node.target, "_schema", None) is not None
        if node.target._schema.is_mutable
    }
    assert written <= WRITE_THEMSELVES.get(call, set())
    for point in (*POINTS, POINTS[1]):
        same(call, program(*point), flat(CALLS[call](*point)))


@pytest.mark.slow
@calls
def test_linearize_pushes_any_tangent_any_number_of_times(call):
    (w, x), (v, _), (u, _) = POINTS
    func = lambda w: tuple(flat(CALLS[call](w, x)))  # noqa: E731
    out, push = linearize(func, w)
    same(call, out, func(w))
    for tangent in (v, u, v):
        same(call, push(tangent), jvp(func, (w,), (tangent,))[1])


@calls
def test_functionalize_gives_the_numbers_of_a_plain_call(call):
    func = lambda w, x: tuple(flat(CALLS[call](w, x)))  # noqa: E731
    for point in POINTS:
        same(call, functionalize(func)(*point), func(*point))


AROUND = {
    "grad": grad,
    "vmap(grad)": lambda f: lambda w: vmap(grad(f))(torch.stack([w, 2 * w])),
    "jacfwd": jacfwd,
    "backward": lambda f: lambda w: torch.autograd.grad(f(v := leaf(w)), v)[0],
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("call", ["concat", "a total", "one microbatch", "grad", "max"])
def test_derivatives_go_through_functionalize(call, around):
    (w, x), *_ = POINTS
    total = lambda w: flat(CALLS[call](w, x))[0].square().sum() / 64  # noqa: E731
    assert_trees_bitwise_equal(AROUND[around](functionalize(total))(w), AROUND[around](total)(w))


WAYS = {
    "fake": {"tracing_mode": "fake"},
    "symbolic": {"tracing_mode": "symbolic"},
    "pre_dispatch": {"pre_dispatch": True},
}


# Tensors that are captured are no fake ones; torch itself raises there.
CAPTURING = "functional", "dropout", "drawn", "many draws", "diagonal"
BY_TORCH_FUNC = set(CALLS) - {
    *("value", "concat", "sum", "stack", "max", "last", "a total", "a mean", "one microbatch"),
    *("functional", "dropout", "drawn", "many draws", "averages", "grad of rows"),
}


@calls
@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_trace(call, way):
    if way == "pre_dispatch" and call in BY_TORCH_FUNC:
        with saying(RuntimeError, "pre_dispatch", "constants"):
            make_fx(lambda w, x: flat(CALLS[call](w, x)), **WAYS[way])(*POINTS[0])
        return
    if call == "grad of rows" or (way != "pre_dispatch" and call in CAPTURING):
        return
    program = make_fx(lambda w, x: flat(CALLS[call](w, x)), **WAYS[way])(*POINTS[0])
    for point in POINTS:
        same(call, program(*point), flat(CALLS[call](*point)))


@pytest.mark.promise("errors")
def test_an_engine_that_cannot_be_traced_says_so():
    gradient = pa.grad(loss, microbatch_size=3, engine="autograd")
    with saying(RuntimeError, "engine='autograd' cannot run under", "make_fx", "'auto'"):
        make_fx(gradient)(*POINTS[0])


# Modes of the user's own -------------------------------------------------------------------


@calls
@pytest.mark.parametrize("mode", [Operations, Functions])
def test_who_only_looks_changes_no_bit(call, mode):
    want = flat(CALLS[call](*POINTS[0]))
    with mode():
        came = flat(CALLS[call](*POINTS[0]))
    if call == "clipped":  # norms are those of vmap's gradients there, not those of layers
        for x, y in zip(came, want, strict=True):
            assert float((x - y).norm()) <= ROOT * float(y.norm())
        return
    assert_trees_bitwise_equal(came, want)


class Keeping(Operations):
    """Keeps what operations give, beside a copy."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, *given):
        out = super().__torch_dispatch__(func, *given)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not func._schema.is_mutable and x.layout == torch.strided:
                self.kept.append((str(func), x, x.clone()))
        return out


# torch's kernels of optimizers write to copies.
DERIVED = "concat", "sum", "stack", "max", "last", "a mean", "value"
KERNELS = "sgd", "adamw", "scale", "stream", "noise", "sam"


@calls
def test_who_keeps_what_operations_give_finds_it_unchanged(call):
    w, x = POINTS[0]
    with Keeping() as keeping:
        out = CALLS[call](w, x)
        if call in DERIVED:
            torch.func.grad(lambda w: flat(CALLS[call](w, x))[0].sum())(w)
            v = leaf(w)
            torch.autograd.grad(flat(CALLS[call](v, x))[0].sum(), v)
    if call in KERNELS:
        return
    own = WRITE_THEMSELVES.get(call, set())
    assert {str(func) for func in keeping.seen if func._schema.is_mutable} <= own
    for name, x, then in keeping.kept:
        if call == "functional" and not x.dim() and not x.is_floating_point():
            continue  # the copy of a BatchNorm's count
        assert torch.equal(x.flatten().nan_to_num(7.0), then.flatten().nan_to_num(7.0)), name
    del out


@pytest.mark.slow
@calls
def test_tensors_without_numbers_have_the_shapes_of_a_plain_call(call):
    want = [(x.shape, x.dtype) for x in flat(CALLS[call](*POINTS[0]))]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        came = CALLS[call](*map(mode.from_tensor, POINTS[0]))
    assert [(x.shape, x.dtype) for x in flat(came)] == want


# A function that is run again sees the modes that it saw --------------------------------------


class Scaling(Functions):
    def __torch_function__(self, func, *given):
        out = super().__torch_function__(func, *given)
        return out * 2 if func is torch.tanh else out


class Doubling(Operations):
    def __torch_dispatch__(self, func, *given):
        out = super().__torch_dispatch__(func, *given)
        return out * 2 if func is torch.ops.aten.tanh.default else out


AGAIN = {
    "microbatch": lambda f, w, x: cut(f)(w, x).sin().sum(),
    "remat": lambda f, w, x: pa.remat(f)(w, x).sin().sum(),
    "value": lambda f, w, x: pa.value(lambda w, x: f(w, x).sin().sum(), microbatch_size=7)(w, x),
}


@pytest.mark.parametrize("mode", [Scaling, Doubling])
@pytest.mark.parametrize(
    ("forwards", "backwards"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.given_up("restored modes")),
        pytest.param(False, True, marks=pytest.mark.given_up("restored modes")),
    ],
)
@pytest.mark.parametrize("call", AGAIN)
def test_a_backward_pass_computes_what_the_forward_pass_computed(call, mode, forwards, backwards):
    def derivative(out_of):
        w = leaf(POINTS[0][0])
        with mode() if forwards else nullcontext():
            out = out_of(w)
        with mode() if backwards else nullcontext():
            return torch.autograd.grad(out, w)[0]

    func = lambda w, x: torch.tanh(x @ w / 8)  # noqa: E731
    want = derivative(lambda w: func(w, POINTS[0][1]).sin().sum())
    came = derivative(lambda w: AGAIN[call](func, w, POINTS[0][1]))
    assert (came - want).norm() <= 2.0**-40 * want.norm()


@pytest.mark.given_up("restored modes")
def test_what_is_made_on_a_device_is_made_there_again():
    made = []

    def func(w, x):
        made.append(torch.zeros(1).device.type)
        return x @ w

    w = leaf(POINTS[0][0])
    with torch.device("meta"):
        out = cut(func)(w, POINTS[0][1])
    out.sum().backward()
    assert set(made) == {"meta"}
