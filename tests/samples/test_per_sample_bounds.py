"""Moments, norms, clipped and normalised sums of ordinary networks, and noise.

What a network makes of one sample is its own affair: its gradient is that of a loop over samples,
in float64, but for the square root of the unit. What is made of given gradients is off by no more
roundings than are counted here, each of a sum of absolute values. With g what a sample adds to the
sum, w its weight, W the sum of the n weights, L leaves and at most N numbers in one,

    mean      sum g / W: n - 1 sums, W, its cast, the quotient               n + 2
    second    sum (g g / w) / W: g g, 1 / w and its cast besides             n + 5
    variance  (second - mean mean) W / (n - 1), mean mean being at most second: that is n + 5
              and 2 (n + 2) + 1; the difference, the factor, a cast, a product   3 n + 14, of second
    norm      N + 1 of each leaf, then L + 1                                 N + L + 2
    clipped   max_norm / (norm + 1e-6): two casts, a sum, a quotient; n      N + L + 6 + n
    unit      1 / norm; n                                                    N + L + 3 + n
    power     second of clipped ones: both                               2 (N + L + 6) + n + 5
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_map

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, assert_trees_within_bound
from pureaccum.testing.strategies import pieces, seeds
from tests.draws import examples, generator
from tests.networks import NETWORKS, ROWS, batch_of, params_of
from tests.rounding import UNIT, gamma
from tests.samples.problems import engines, looped


pytestmark = [pytest.mark.bounds, pytest.mark.promise("samples")]
DTYPES = pytest.mark.parametrize("dtype", UNIT, ids=["float32", "float64"])


def embedding(p, x):
    tokens = (x.flatten(1).abs() * 10).long() % 12
    h = F.layer_norm(F.embedding(tokens, p["into"]).sum(1), (8,), p["gain"], p["bias"])
    return torch.tanh(h) @ p["out"]


ALL = NETWORKS | {"embedding": embedding}


def loss_of(network, weighted):
    def loss(params, batch):
        rows = ((ALL[network](params, batch["x"]) - batch["y"]) ** 2).sum(-1)
        by = batch["weights"]
        return pa.Weighted((rows * by).sum(), by.sum()) if weighted else rows.mean()

    return loss


def in_float64(loss, params, batch):
    """Each sample's gradient by torch.autograd, in float64."""
    params, batch = tree_map(torch.Tensor.double, (params, batch))
    return looped(loss, params, pieces(batch, [1] * ROWS))


def norms_of(grads):
    return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)


def expected(grads, weights, max_norm, dtype):
    """What gradients come to in float64, and how far from it rounding may go, on either side."""
    n, total = len(weights), weights.sum()
    size = max(g[0].numel() for g in grads.values()) + len(grads)

    def off(roundings):
        return float(gamma(roundings, UNIT[dtype]) + gamma(roundings, UNIT[torch.float64]))

    def summed(by, roundings):
        sums = {k: torch.tensordot(by, g, 1) for k, g in grads.items()}
        return sums, {k: off(roundings) * torch.tensordot(by, g.abs(), 1) for k, g in grads.items()}

    norms, of_one = norms_of(grads), float(total / (n - 1))
    clip = (max_norm / (norms + 1e-6)).clamp(max=1.0)

    def squares(by):
        return {k: torch.tensordot(by / (weights * total), g * g, 1) for k, g in grads.items()}

    second, power = squares(torch.ones_like(weights)), squares(clip**2)
    mean, mean_off = summed(torch.ones_like(weights) / total, n + 2)
    variance = {k: (second[k] - mean[k] ** 2) * of_one for k in grads}
    return {
        "mean": (mean, mean_off),
        "second": (second, {k: off(n + 5) * x for k, x in second.items()}),
        "variance": (variance, {k: off(3 * n + 14) * x * of_one for k, x in second.items()}),
        "norms": (norms, off(size + 2) * norms),
        "clipped": summed(clip, size + 6 + n),
        "power": (power, {k: off(2 * (size + 6) + n + 5) * x for k, x in power.items()}),
        "unit": summed(torch.where(norms > 0, 1 / norms, 0.0), size + 3 + n),
    }


@pytest.mark.parametrize("network", ALL)
@engines
@DTYPES
@examples(1 / 5)
@given(seeds(), st.booleans(), st.none() | st.integers(1, ROWS + 1))
def test_reduced_gradients_are_those_of_a_loop_over_the_samples(
    network, engine, dtype, seed, weighted, size
):
    params, batch = params_of(seed, dtype), batch_of(seed, dtype)
    loss = loss_of(network, weighted)
    options = {"chunk_size": size, "keep_batch_dim": True, "engine": engine}

    each = pa.per_sample_grad(loss, **options)(params, batch)
    loop = in_float64(loss, params, batch)
    norms = norms_of(loop)
    apart = norms_of({k: each[k].double() - loop[k] for k in loop})
    # where a residual cancels, one of float32 is far off by itself
    scale = norms if dtype == torch.float64 else norms.sum()
    near = float(UNIT[dtype]) ** 0.5 * scale
    assert (apart <= near).all()

    max_norm = float(norms.median())
    grads = {k: g.double() for k, g in each.items()}
    weights = batch["weights"].double() if weighted else torch.ones(ROWS, dtype=torch.float64)
    want = expected(grads, weights, max_norm, dtype)
    moments = pa.per_sample_grad(loss, reduce="moments", **options)(params, batch)
    of_power = options | {"reduce": "moments", "transform": pa.clip_by_global_norm(max_norm)}
    power = pa.per_sample_grad(loss, **of_power)(params, batch).second
    clipped, seen = pa.clipped_sum(loss, max_norm, **options)(params, batch)
    unit = pa.per_sample_grad(loss, reduce="sum", transform="normalize", **options)(params, batch)
    got = {"mean": moments.mean, "second": moments.second, "variance": moments.variance()}
    got |= {"norms": seen, "clipped": clipped, "unit": unit, "power": power}
    # What is only summed has gradients that come another way, each as near to the loop's.
    other = {"norms": near, "clipped": near.sum(), "unit": (2 * near / norms).sum()}
    for name, (numbers, bound) in want.items():
        more = 2 * other.get(name, 0.0) if engine == "vmap" else 0.0
        assert_trees_within_bound(got[name], numbers, tree_map(lambda x, y=more: x + y, bound))


@DTYPES
def test_wrong_reductions_lie_outside_of_the_bound(dtype):
    params, batch = params_of(0, dtype), batch_of(0, dtype)
    grads = in_float64(loss_of("gelu_mlp", weighted=False), params, batch)
    weights, norms = torch.ones(ROWS, dtype=torch.float64), norms_of(grads)
    max_norm = float(norms.median())
    want = expected(grads, weights, max_norm, dtype)
    sums = {k: g.sum(0) for k, g in grads.items()}
    of_sum = norms_of({k: x[None] for k, x in sums.items()})
    first = {k: g[:-1] for k, g in grads.items()}
    without_tail = expected(first, weights[:-1], max_norm, dtype)
    wrong = [
        ("clipped", {k: x * max_norm / of_sum for k, x in sums.items()}),  # the sum, not samples
        ("clipped", sums),
        ("unit", {k: x / of_sum for k, x in sums.items()}),
        ("variance", {k: x * (1 - 1 / ROWS) for k, x in want["variance"][0].items()}),  # biased
        ("second", {k: x**2 for k, x in want["mean"][0].items()}),
        ("norms", norms_of({"into": grads["into"]})),  # of one leaf
        *[(k, x) for k, (x, _) in without_tail.items() if k != "norms"],
    ]
    for what, numbers in wrong:
        assert_trees_within_bound(want[what][0], *want[what])
        with pytest.raises(AssertionError, match="times the bound"):
            assert_trees_within_bound(numbers, *want[what])


@pytest.mark.parametrize("by", [None, "sign", "clip"])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_one_sample_has_no_variance(by, weight):
    def loss(w, x):
        return pa.Weighted((w * x).sum() ** 2 * weight, weight)

    w, x = torch.randn(2, 50).unbind()
    transform = pa.clip_by_global_norm(0.7) if by == "clip" else by
    moments = pa.per_sample_grad(loss, reduce="moments", transform=transform)(w, x[None])
    assert moments.variance().isnan().all()


MANY = 2**16


def noise_on(tree, std=2.0, seed=0):
    return pa.add_noise(tree, std, pa.key(seed))


@pytest.mark.parametrize("std", [0.5, torch.tensor(3.0).double()], ids=["float", "tensor"])
def test_noise_has_its_mean_and_variance_and_leaves_are_independent(std):
    """Each within five of its own standard deviations."""
    zeros = {"a": torch.zeros(MANY), "b": torch.zeros(MANY)}
    zeros["c"] = torch.zeros(MANY, dtype=torch.complex64)
    noise = noise_on(zeros, std)
    parts = [noise["a"], noise["b"], noise["c"].real, noise["c"].imag, noise_on(zeros, std, 1)["a"]]
    unit = torch.stack(parts).double() / float(std)
    assert (unit.mean(1).abs() <= 5 / MANY**0.5).all()
    assert ((unit.var(1) - 1).abs() <= 5 * (2 / MANY) ** 0.5).all()
    products = (unit @ unit.T / MANY).fill_diagonal_(0.0)
    assert (products.abs() <= 5 / MANY**0.5).all()


def test_noise_is_a_function_of_the_key_and_is_added():
    tree = {"a": torch.randn(5, 3), "b": [torch.randn(7, dtype=torch.float64)]}
    zeros = tree_map(torch.zeros_like, tree)
    noise = noise_on(zeros)
    torch.manual_seed(5)
    assert_trees_bitwise_equal(noise_on(zeros), noise)
    assert_trees_bitwise_equal(noise_on(zeros, torch.tensor(2.0)), noise)
    assert_trees_bitwise_equal(noise_on(tree), tree_map(torch.add, tree, noise))
    assert_trees_bitwise_equal(noise_on(tree, 0.0), tree)
    assert not torch.equal(noise_on(zeros, seed=1)["a"], noise["a"])
    half = tree["a"].bfloat16()
    want = (half.float() + noise["a"]).bfloat16()  # drawn and added in float32
    assert_trees_bitwise_equal(noise_on({"a": half})["a"], want)


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf"), "1"], ids=str)
def test_a_standard_deviation_is_a_number_of_at_least_zero(std):
    error = TypeError if std == "1" else ValueError
    with pytest.raises(error, match=r"std is .*expected a finite number of at least 0"):
        noise_on(torch.zeros(3), std)


@pytest.mark.parametrize("centre", [0.0, 1e3, 1e5])
def test_the_variance_around_a_large_mean_is_that_of_float64(centre):
    """Moments are merged centred: in chunks, by merge, whole."""
    x = centre + torch.randn(300, 4, generator=generator(0))
    want = x.double().var(0)
    loss = lambda w, x: (w * x).sum()  # noqa: E731
    w, options = torch.zeros(4), {"reduce": "moments", "chunk_size": 7}
    whole = pa.per_sample_grad(loss, **options)(w, x)
    acc = pa.per_sample_accumulator(loss, **options)
    halves = [acc.update(acc.init(w), w, part) for part in (x[:100], x[100:])]
    merged, _ = acc.finalize(acc.merge(*halves))
    # rounding of a mean in float32, beside a deviation of 1
    bound = 300 * 2.0**-24 * (1 + centre * 2.0**-7)
    for moments in (whole, merged):
        assert ((moments.variance() - want).abs() <= bound * want).all()
