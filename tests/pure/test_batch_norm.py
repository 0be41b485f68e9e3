"""Batch norm in microbatches beside ``F.batch_norm`` over the full batch: as near to the truth.

The truth is the same in float64. Where torch itself is off by e, microbatches may be off by a few
e: they round the same numbers a few times more. Far from zero, at 1000 deviations, e is large, and
sums of squares would be off by a third of the variance.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum._pure.batch_norm import Share, merged_shares, moments_of, share_of_rows
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, merge_trees, seeds
from tests.draws import examples, generator
from tests.rounding import UNIT, gamma


pytestmark = [pytest.mark.parity, pytest.mark.promise("coupled")]
ROWS, CHANNELS = 12, 3
SHAPES = {"1d": (), "3d": (5,), "2d": (4, 3)}
FACTOR = 4.0  # as many roundings as that, where torch has one
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def data(seed, shape, shift, dtype):
    """The numbers themselves are what they are in the dtype: float64 gets the same ones."""
    g = generator(seed)
    x = torch.randn(ROWS, CHANNELS, *shape, generator=g, dtype=torch.float64) + shift
    y = torch.randn(ROWS, CHANNELS, *shape, generator=g, dtype=torch.float64)
    params = {
        "weight": 1 + torch.rand(CHANNELS, generator=g, dtype=torch.float64),
        "bias": torch.randn(CHANNELS, generator=g, dtype=torch.float64),
        "scale": 1 + torch.rand(CHANNELS, *shape, generator=g, dtype=torch.float64),
    }
    return {k: p.to(dtype) for k, p in params.items()}, {"x": x.to(dtype), "y": y.to(dtype)}


class Norm(nn.Module):
    """Something before the norm whose gradient passes through the moments."""

    def __init__(self, params, buffers=None, names="both", **options):
        super().__init__()
        for name, p in params.items():
            setattr(self, name, nn.Parameter(p))
        for name in ("mean", "var"):
            self.register_buffer(name, None if buffers is None else buffers[name])
        self.names, self.options = names, options

    def forward(self, x):
        weight = self.weight if self.names in ("both", "weight") else None
        bias = self.bias if self.names in ("both", "bias") else None
        h = x * self.scale
        return F.batch_norm(h, self.mean, self.var, weight, bias, training=True, **self.options)


def total(h, batch):
    return (h * batch["y"]).sum() / h.numel() + (h**3).mean()


def whole(params, batch):
    h = batch["x"] * params["scale"]
    h = F.batch_norm(h, None, None, params["weight"], params["bias"], training=True)
    return total(h, batch)


def cut(params, size):
    """The loss of parameters and batch."""
    fn = pa.functional(Norm(params), microbatch_size=size)
    return lambda params, batch: total(fn.apply(params, (), batch["x"])[0], batch)


def distance(got, truth):
    return float(sum((got[k].double() - truth[k]).norm() ** 2 for k in truth) ** 0.5)


@shapes
@examples(1 / 2)
@given(st.data(), seeds(), st.sampled_from([0.0, 3.0]))
def test_in_float64_batch_norm_in_microbatches_is_the_full_batch_s(shape, data_, seed, shift):
    params, batch = data(seed, shape, shift, torch.float64)
    want, want_value = torch.func.grad_and_value(whole)(params, batch)
    loss = cut(params, data_.draw(compositions(ROWS)))
    for func in (pa.grad_and_value, torch.func.grad_and_value):
        grads, value = func(loss)(params, batch)
        assert distance(grads, want) <= 1e-10 * distance(want, {k: 0 * x for k, x in want.items()})
        assert (value - want_value).abs() <= 1e-10


@pytest.mark.slow
@shapes
@pytest.mark.parametrize("size", [1, 5, 12])
def test_a_thousand_deviations_from_zero_it_is_as_near_to_the_truth(shape, size):
    """Over seeds, since one may be lucky; both are compared with the truth in float64."""
    ours = full = 0.0
    for seed in range(8):
        params, batch = data(seed, shape, 1000.0, torch.float32)
        wide = [{k: t.double() for k, t in tree.items()} for tree in (params, batch)]
        truth = torch.func.grad(whole)(*wide)
        ours += distance(pa.grad(cut(params, size))(params, batch), truth) ** 2
        full += distance(torch.func.grad(whole)(params, batch), truth) ** 2
    assert ours <= FACTOR**2 * full


@pytest.mark.mechanism
@dtypes
@examples(1 / 2)
@given(
    compositions(ROWS).flatmap(lambda sizes: st.tuples(st.just(sizes), merge_trees(len(sizes)))),
    seeds(),
    st.sampled_from([0.0, 1000.0]),
    st.sampled_from([*SHAPES.values()]),
)
def test_moments_merge_in_any_grouping(dtype, cut, seed, shift, shape):
    """Of numbers of size A, each mean is off by u A; squares of deviations by a few u of them."""
    sizes, tree = cut
    x = data(seed, shape, shift, dtype)[1]["x"]
    columns, each = x.double().transpose(0, 1).flatten(1), x[0, 0].numel()

    def at(tree):
        if isinstance(tree, int):
            part = x.split(sizes)[tree]
            return share_of_rows(part, part.dim(), dtype), len(part) * each
        shares, counts = zip(*map(at, tree), strict=True)
        flat = [Share(*(x.flatten() for x in share)) for share in shares]
        stacked = Share(*(torch.stack(x) for x in zip(*flat, strict=True)))
        return merged_shares(stacked, counts), sum(counts)

    share, count = at(tree)
    got = moments_of(Share(*(x.flatten().unsqueeze(0) for x in share)), [count])
    assert got.mean.dtype == got.var.dtype == torch.float64
    assert got.elements == columns.shape[1]
    u, largest = float(UNIT[dtype]), columns.abs().amax(1)
    n, squares = columns.shape[1], ((columns - columns.mean(1, keepdim=True)) ** 2).sum(1)
    # a mean within a microbatch is rounded once or, summed in the dtype itself, a few times
    mean_error = 4 * u * largest
    assert ((got.mean - columns.mean(1)).abs() <= mean_error).all()
    # as tests/step/test_pooled.py derives it
    allowed = 8 * u * squares + 4 * mean_error * (n * squares).sqrt() + 5 * n * mean_error**2
    assert ((got.var * n - squares).abs() <= allowed).all()


@pytest.mark.mechanism
def test_sums_of_squares_would_be_far_off():
    """The control for the two above: a third of the variance is lost."""
    x = data(0, (), 1000.0, torch.float32)[1]["x"]
    var = x.double().var(0, correction=0)
    naive = (x**2).mean(0) - x.mean(0) ** 2
    assert ((naive - var).abs() / var).max() > 0.02
    got = moments_of(Share(*(y.unsqueeze(0) for y in share_of_rows(x, 2, x.dtype))), [len(x)])
    assert ((got.var - var).abs() / var).max() < 1e-6


# Running statistics ---------------------------------------------------------------------------


@dtypes
@shapes
@examples(1 / 4)
@given(st.data(), seeds(), st.sampled_from([0.0, 1000.0]), st.sampled_from([0.1, 0.75, 1.0]))
def test_running_statistics_are_the_full_batch_s(dtype, shape, data_, seed, shift, momentum):
    """Through a step, with what the buffers held before."""
    params, batch = data(seed, shape, shift, dtype)
    g = generator(seed)
    buffers = {
        "mean": torch.randn(CHANNELS, generator=g).to(dtype),
        "var": torch.rand(CHANNELS, generator=g).to(dtype) + 0.5,
    }

    size = data_.draw(st.integers(1, ROWS + 1))
    step, fn = stepping(params, buffers, size, momentum=momentum)
    state, info = step(step.init(fn.params, fn.buffers), batch)
    assert info.applied
    full = {k: b.clone() for k, b in buffers.items()}
    h = batch["x"] * params["scale"]
    F.batch_norm(h, full["mean"], full["var"], training=True, momentum=momentum)
    columns = h.double().transpose(0, 1).flatten(1)
    n, var, unit = columns.shape[1], columns.var(1), float(UNIT[dtype])
    # as tests/step/test_pooled.py derives it
    own, largest = float(gamma(2 * n + 8, UNIT[torch.float64])), columns.abs().amax(1)
    off = (unit + own) * largest
    spread = (n * var * (n - 1)).sqrt()
    squares = (unit + own) * var + (4 * off * spread + 5 * n * off**2) / (n - 1)
    for name, error, size in (("mean", off, largest), ("var", squares, var)):
        assert (got := state.buffers[name]).dtype == dtype
        allowed = 2 * momentum * error + 8 * unit * (buffers[name].double().abs() + size)
        assert ((got.double() - full[name].double()).abs() <= allowed).all(), name


def stepping(params, buffers, size, policy="sequential", weight=None, **options):
    fn = pa.functional(Norm(params, buffers, **options), microbatch_size=size)

    def loss(params, batch, buffers):
        h, new = fn.apply(params, buffers, batch["x"])
        if weight is None:
            return total(h, batch), new
        return pa.Weighted(total(h, batch), weight), new

    return pa.make_step(loss, pa.sgd(0.0), buffers=policy), fn


@pytest.mark.promise("buffers")
@pytest.mark.parametrize(("policy", "weight"), [("sequential", 0.0), ("freeze", None)])
def test_statistics_stay_without_a_weight_or_frozen(policy, weight):
    """Where a step has no weight, and where buffers are frozen."""
    params, batch = data(0, (), 1.0, torch.float32)
    buffers = {"mean": torch.zeros(CHANNELS), "var": torch.ones(CHANNELS)}
    step, fn = stepping(params, buffers, 5, policy, weight)
    new, info = step(step.init(fn.params, fn.buffers), batch)
    assert info.applied == (weight is None)
    assert_trees_bitwise_equal(new.buffers, buffers)


# Narrow boundaries, and other arguments --------------------------------------------------------


@pytest.mark.promise("narrow")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@shapes
def test_boundaries_may_be_narrow(dtype, shape):
    """Moments are wide, whatever the samples are; samples are rounded once."""
    params, batch = data(0, shape, 3.0, torch.float32)
    batch = {k: x.to(dtype) for k, x in batch.items()}

    class Narrow(Norm):
        def forward(self, x):
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True)

    fn = pa.functional(Narrow(params), microbatch_size=5)
    wide = [{k: t.double() for k, t in tree.items()} for tree in (params, batch)]
    got, _ = fn.apply(fn.params, (), batch["x"])
    want = F.batch_norm(wide[1]["x"], None, None, wide[0]["weight"], wide[0]["bias"], True)
    assert got.dtype == dtype
    unit = float(torch.finfo(dtype).eps) / 2
    assert ((got.double() - want).abs() <= 1.01 * unit * want.abs() + 1e-5).all()

    def loss(params):
        out, _ = fn.apply(params, (), batch["x"])
        return (out.float() * params["scale"]).square().mean()

    def true(params):
        out = F.batch_norm(wide[1]["x"], None, None, params["weight"], params["bias"], True)
        return (out * params["scale"]).square().mean()

    truth = torch.func.grad(true)(wide[0])
    size = distance(truth, {k: 0 * x for k, x in truth.items()})
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss(leaves).backward()
    for grads in (torch.func.grad(loss)(params), {k: p.grad for k, p in leaves.items()}):
        assert distance(grads, truth) <= 4 * unit * size


@pytest.mark.parametrize("names", ["both", "weight", "bias", "neither"])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_affine_and_eps_are_those_of_torch(names, eps):
    params, batch = data(1, (2,), 1.0, torch.float64)
    module = Norm(params, names=names, eps=eps)
    ours, full = (pa.functional(module, microbatch_size=size) for size in (5, None))
    grads, want = (
        torch.func.grad(lambda p, fn=fn: (fn.apply(p, (), batch["x"])[0] ** 3).mean())(fn.params)
        for fn in (ours, full)
    )
    assert distance(grads, want) <= 1e-10


def test_one_value_for_each_channel_is_refused_as_torch_does():
    params, batch = data(1, (), 1.0, torch.float64)
    loss = cut(params, 1)
    with pytest.raises(ValueError, match="more than one value per channel"):
        loss(params, {k: x[:1] for k, x in batch.items()})
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(torch.ones(1, 3), None, None, training=True)
    two = pa.grad(loss)(params, {k: x[:2] for k, x in batch.items()})
    assert all(g.isfinite().all() for g in two.values())
