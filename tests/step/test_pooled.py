"""Pooled running statistics are the full batch's, whatever the cut, to the last few bits.

The bound, for one channel of N numbers x with |x| <= A, u the unit of the statistics' dtype. The
kernel sums in float64 on a CPU and rounds once, so a mean is off by e = u A + g A at most, with
g = gamma(2 N) of float64. A sum of squares M around such a mean is off by a relative u + g and by
N e**2; where groups are merged by the squares of the distances between their means, those are off
by 2 e each, which by Cauchy and Schwarz adds no more than 4 e sqrt(N M) + 4 N e**2. Numbers
that are off themselves, behind a convolution, add to e. Last comes the momentum update.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, target
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum._pure.functional import functional
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.pure.test_functional import through
from tests.rounding import UNIT, gamma


pytestmark = [pytest.mark.bounds, pytest.mark.promise("buffers")]
DTYPES = (torch.float32, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MOMENTA = (0.1, 0.75, 1.0, None)


class Kind(NamedTuple):
    """A network whose first BatchNorm is ``norm``; what reaches it, and how large that can be."""

    make: Callable[[float | None], nn.Module]
    shape: tuple[int, ...]
    norm: str
    terms: int  # in each number that reaches it, so many products are summed


IMAGE = (2, 3, 4)
KINDS = {
    "1d": Kind(
        lambda m: nn.Sequential(nn.BatchNorm1d(3, momentum=m), nn.Linear(3, 2)), (3,), "0", 0
    ),
    "2d": Kind(
        lambda m: nn.Sequential(nn.BatchNorm2d(2, momentum=m), nn.Conv2d(2, 1, 2)), IMAGE, "0", 0
    ),
    "behind a convolution": Kind(
        lambda m: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, momentum=m)), IMAGE, "1", 9
    ),
}


def make(kind, momentum, dtype, seed):
    """With running statistics from a life before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = kind.make(momentum).to(dtype)
        norm = net.get_submodule(kind.norm)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.num_batches_tracked.fill_(3)
    return net


def batch(kind, rows, shift, dtype, seed):
    x = torch.randn(rows, *kind.shape, generator=generator(seed), dtype=torch.float64)
    return (x + shift).to(dtype)


def check(kind, net, x, got):
    """Against what the network does to its own buffers when it is given the full batch.

    Returns the largest share of the bound that was needed.
    """
    unit, wide = float(UNIT[x.dtype]), UNIT[torch.float64]
    norm = net.get_submodule(kind.norm)
    before = {k: b.double() for k, b in norm.named_buffers()}
    reaching, largest = x.double(), x.double().abs()
    if kind.terms:
        conv = net[0]
        parts = (conv.weight.detach().double(), conv.bias.detach().double())
        reaching = nn.functional.conv2d(reaching, *parts)
        largest = nn.functional.conv2d(largest, *(part.abs() for part in parts))
    reaching, largest = (t.transpose(0, 1).flatten(1) for t in (reaching, largest))
    count, a = reaching.shape[1], largest.max(1).values
    var = reaching.var(1)
    g = float(gamma(2 * count + 8, wide))
    off = (unit + g) * a + float(gamma(kind.terms, UNIT[x.dtype])) * a
    momentum = 1 / 4 if norm.momentum is None else norm.momentum
    spread = (count * var * (count - 1)).sqrt()
    of_var = (unit + g) * var + (4 * off * spread + 5 * count * off**2) / (count - 1)
    allowed = {"running_mean": 2 * momentum * off, "running_var": 2 * momentum * of_var}
    with torch.no_grad():
        net(x)
    shares = []
    for name, bound in allowed.items():
        full, here = getattr(norm, name), got[f"{kind.norm}.{name}"]
        assert here.dtype == full.dtype
        update = 8 * unit * (before[name].abs() + (a if name == "running_mean" else var))
        error = (here.double() - full.double()).abs() / (bound + update)
        assert (error <= 1).all(), (name, float(error.max()))
        shares.append(float(error.max()))
    assert torch.equal(got[f"{kind.norm}.num_batches_tracked"], norm.num_batches_tracked)
    return max(shares)


cuts = st.lists(st.integers(2, 6), min_size=1, max_size=6)
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@dtypes
@kinds
@given(cuts, st.sampled_from(MOMENTA), st.sampled_from([0.0, 1000.0]), seeds())
@example([2, 2], None, 1000.0, 0)
@example([5, 2, 6], 1.0, 1000.0, 0)
def test_any_cut_gives_the_statistics_of_the_full_batch(dtype, kind, sizes, momentum, shift, seed):
    """At 1000 deviations from zero, too, where a sum of squares would cancel."""
    net, x = make(kind, momentum, dtype, seed), batch(kind, sum(sizes), shift, dtype, seed)
    fn = functional(net)
    _, got = through(fn, "pooled", fn.params, fn.buffers, x.split(sizes))
    target(check(kind, net, x, got))


@kinds
@examples(1 / 4)
@given(cuts, st.sampled_from(MOMENTA), seeds())
@example([2, 2], None, 0)
@example([5, 2, 6], 1.0, 0)
def test_a_step_over_any_cut_has_the_statistics_of_the_full_batch(kind, sizes, momentum, seed):
    """Whole and streamed, and a microbatch that is skipped leaves no trace in them."""
    dtype = torch.float64
    net, x = make(kind, momentum, dtype, seed), batch(kind, sum(sizes), 3.0, dtype, seed)
    fn = pa.functional(net)

    def loss(params, x, buffers):
        out, new = fn.apply(params, buffers, x)
        return out.square().sum(), new

    options = {"reduction": "sum", "buffers": "pooled", "nonfinite": "skip", "check": False}
    step = pa.make_step(loss, pa.sgd(0.0), microbatch_size=sizes, **options)
    state = step.init(fn.params, fn.buffers)
    whole, _ = step(state, x)
    skipped, _ = step.window(state, [*x.split(sizes), torch.full_like(x, torch.nan)])
    for new in (whole, skipped):
        check(kind, copy.deepcopy(net), x, new.buffers)


@dtypes
@kinds
@given(cuts, st.data(), seeds())
def test_microbatches_that_do_not_count_leave_no_trace_in_the_statistics(
    dtype, kind, sizes, data, seed
):
    """They are NaN; the full batch is the rest. Where there is none, all stays as it was."""
    keeps = [data.draw(st.booleans()) for _ in sizes]
    net, x = make(kind, 0.5, dtype, seed), batch(kind, sum(sizes), 3.0, dtype, seed)
    parts = [p if keep else p * torch.nan for p, keep in zip(x.split(sizes), keeps, strict=True)]
    fn = functional(net)
    before = {k: b.clone() for k, b in fn.buffers.items()}
    _, got = through(fn, "pooled", fn.params, fn.buffers, parts, keeps)
    if any(keeps):
        rest = torch.cat([p for p, keep in zip(parts, keeps, strict=True) if keep])
        check(kind, net, rest, got)
    else:
        assert_trees_bitwise_equal(got, before)


@given(cuts, seeds())
def test_to_count_all_microbatches_is_not_to_ask_which_count(sizes, seed):
    kind = KINDS["2d"]
    fn = functional(make(kind, 0.1, torch.float32, seed))
    parts = batch(kind, sum(sizes), 0.0, torch.float32, seed).split(sizes)
    (_, asked), (_, not_asked) = (
        through(fn, "pooled", fn.params, fn.buffers, parts, keeps)
        for keeps in ([True] * len(sizes), None)
    )
    assert_trees_bitwise_equal(asked, not_asked)


@dtypes
def test_an_empty_microbatch_adds_nothing(dtype):
    kind = KINDS["1d"]
    net, x = make(kind, 0.1, dtype, 0), batch(kind, 7, 0.0, dtype, 0)
    fn = functional(net)
    _, got = through(fn, "pooled", fn.params, fn.buffers, [x[:0], x[:4], x[4:4], x[4:]])
    check(kind, net, x, got)


def test_two_layers_side_by_side_each_get_their_statistics():
    """Side by side, so neither lies above the other; their buffers in dicts of a dict."""
    kind = KINDS["1d"]
    nets = {name: make(kind, 0.25, torch.float64, i) for i, name in enumerate("ba")}
    fns = {name: functional(net) for name, net in nets.items()}
    x = batch(kind, 9, 0.0, torch.float64, 0)

    def apply(params, buffers, x):
        outs, new_buffers = {}, {}
        for name, fn in fns.items():
            outs[name], new_buffers[name] = fn.apply(params[name], buffers[name], x)
        return outs["a"] + outs["b"], new_buffers

    both = fns["a"]._replace(apply=apply)
    params, buffers = ({k: fn[i] for k, fn in fns.items()} for i in (1, 2))
    _, got = through(both, "pooled", params, buffers, x.split([2, 3, 4]))
    for name, net in nets.items():
        check(kind, net, x, got[name])


def test_a_layer_above_another_gets_other_statistics_than_the_full_batch():
    """What reaches it was normalised with the statistics of a microbatch."""
    upper = KINDS["1d"]
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3)).double()
    fn, x = functional(net), batch(upper, 12, 0.0, torch.float64, 0)
    _, got = through(fn, "pooled", fn.params, fn.buffers, x.split(3))
    check(upper, net, x, got)
    assert (got["3.running_var"] - net[3].running_var).abs().max() > 1e-3
