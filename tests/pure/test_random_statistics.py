"""Random numbers look random: no statistic is further from its expectation than six sigma.

The seeds are fixed, so a test passes always or never. Had they been drawn, one statistic of an
ideal generator would be that far off once in 500 million times; the largest test looks at 8192.
"""

import math

import pytest
import torch

from pureaccum._pure import keys as random_keys
from pureaccum._pure.keys import dropout, fold_in, key, normal, split_key, uniform


pytestmark = [pytest.mark.bounds, pytest.mark.promise("keys")]
SIGMAS = 6.0
N = 2**16
SEED = 20


def first(keys):
    """One number from each key: what keys of neighbouring samples give to the same place."""
    return uniform(keys, (), torch.float64)


def seeds(n):
    return torch.stack([key(seed) for seed in range(n)])


# Every way to come by a sequence of numbers, each in float64 to look at 53 bits.
SEQUENCES = {
    "positions": lambda: uniform(key(SEED), (N,), torch.float64),
    "32-bit positions": lambda: uniform(key(SEED), (N,)).double(),
    "folded keys": lambda: first(fold_in(key(SEED), torch.arange(N))),
    "folded far apart": lambda: first(fold_in(key(SEED), torch.arange(N) << 40)),
    "folded twice": lambda: first(
        fold_in(fold_in(key(SEED), torch.arange(256)[:, None]), torch.arange(256)).flatten(0, 1)
    ),
    "split keys": lambda: first(split_key(key(SEED), N)),
    "seeds": lambda: first(seeds(N)),
}


@pytest.fixture(params=SEQUENCES)
def u(request):
    return SEQUENCES[request.param]()


def assert_even(counts):
    """Chi-square against equal shares, with d = bins - 1: of mean d and variance 2 d.

    Too even is a fault as well.
    """
    expected, d = counts.sum() / counts.numel(), counts.numel() - 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - d) <= SIGMAS * math.sqrt(2 * d)


def assert_uncorrelated(a, b):
    """The mean of n products of independent numbers of variance 1 has variance 1 / n."""
    products = (a - 0.5) * (b - 0.5) * 12
    assert abs(products.mean().item()) <= SIGMAS / math.sqrt(len(products))


def assert_fair(flips, n):
    """Shares of n coins: mean 1/2, variance 1 / (4 n)."""
    assert (flips - 0.5).abs().max().item() <= SIGMAS / (2 * math.sqrt(n))


def bits(words, width):
    return (words[..., None] >> torch.arange(width)) & 1


# Uniform ---------------------------------------------------------------------------------


def test_uniform_fills_its_bins(u):
    assert u.min() >= 0
    assert u.max() < 1
    assert_even(torch.bincount((u * 256).long(), minlength=256))


def test_neighbours_fill_the_square(u):
    x, y = (u.reshape(-1, 2) * 16).long().unbind(-1)
    assert_even(torch.bincount(16 * x + y, minlength=256))


def test_neighbours_are_uncorrelated(u):
    for lag in (1, 2, 3, 4, 8, 256):
        assert_uncorrelated(u[lag:], u[:-lag])


@pytest.mark.parametrize("name", [name for name in SEQUENCES if name != "32-bit positions"])
def test_every_bit_is_fair_and_changes_fairly(name):
    drawn = bits((SEQUENCES[name]() * 2**53).long(), 53)
    assert_fair(drawn.double().mean(0), N)
    assert_fair((drawn[1:] ^ drawn[:-1]).double().mean(0), N - 1)


@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)]
)
def test_every_bit_of_a_dtype_is_fair(dtype, width):
    drawn = uniform(key(SEED), (N,), dtype).double() * 2**width
    assert_fair(bits(drawn.long(), width).double().mean(0), N)


# Keys ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("i", [0, 1, 2**31 - 1, 2**32 - 1])
def test_draws_of_neighbouring_keys_are_unrelated(i):
    k = key(SEED)
    for a, b in (
        (fold_in(k, i), fold_in(k, i + 1)),
        (key(i), key(i + 1)),
        (k, fold_in(k, i)),
        (k, split_key(k)[0]),
        (fold_in(k, i), split_key(k)[0]),
        (fold_in(fold_in(k, 1), i), fold_in(fold_in(k, i), 2)),
    ):
        x, y = uniform(a, (N,), torch.float64), uniform(b, (N,), torch.float64)
        assert_uncorrelated(x, y)
        assert_uncorrelated(x[1:], y[:-1])
        flips = bits((x * 2**53).long() ^ (y * 2**53).long(), 53)
        assert_fair(flips.double().mean(0), N)


def test_what_a_key_is_used_for_is_unrelated():
    """Folding in i, the i-th split and the i-th block have counters that differ in two bits."""
    k, n = key(SEED), 4096
    folded, split = fold_in(k, torch.arange(n)), split_key(k, n)
    drawn = (uniform(k, (n,), torch.float64) * 2**53).long()
    made = [(x[:, 0] << 21 | x[:, 1] >> 11) for x in (folded, split)] + [drawn]
    assert len(torch.cat(made).unique()) == 3 * n
    for i in range(3):
        assert_fair(bits(made[i] ^ made[i - 1], 53).double().mean(0), n)


@pytest.mark.slow
def test_no_two_keys_coincide():
    """Of 3 * 2**16 keys two coincide with a probability of 2**-30: (3 * 2**16)**2 / 2**65."""
    k = key(SEED)
    keys = torch.cat((fold_in(k, torch.arange(N)), split_key(k, N), fold_in(seeds(N), N)))
    assert len(keys.unique(dim=0)) == 3 * N


@pytest.mark.mechanism
def test_one_flipped_bit_flips_half_of_the_block():
    """Each of 128 bits of key and counter flips each of the block's 64 in half of the cases."""
    n = 4096
    drawn = (uniform(key(SEED), (n, 4)).double() * 2**24).long()  # 24 random bits a word …
    keys, words = drawn.split(2, -1)
    keys = keys << 8 | keys >> 16  # … spread over 32
    counters = words[:, 0] << 40 ^ words[:, 1] << 8 ^ words[:, 0] >> 16
    plain = random_keys._threefry(keys, counters)
    for place in range(64):
        flip = torch.zeros(2, dtype=torch.int64)
        flip[place // 32] = 1 << place % 32
        for other in (
            random_keys._threefry(keys ^ flip, counters),
            random_keys._threefry(keys, counters ^ (-(2**63) if place == 63 else 1 << place)),
        ):
            flips = bits((plain ^ other).long(), 32).double()
            assert_fair(flips.mean(0), n)
            assert_fair(flips.mean(), 64 * n)


# Normal and dropout ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_has_its_moments(dtype):
    """The k-th power has the variance E x^2k - (E x^k)^2, and E x^2k is 1 * 3 * ... * (2k - 1)."""
    x = normal(key(SEED), (N,), dtype).double()
    for k, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**k).mean().item() - mean) <= SIGMAS * math.sqrt(variance / N)
    assert abs((x[1:] * x[:-1]).mean().item()) <= SIGMAS / math.sqrt(N - 1)


def test_normal_is_distributed_normally():
    """Kolmogorov-Smirnov, by Massart: P(D > d) <= 2 exp(-2 n d^2), here 2e-9 as at six sigma."""
    for x in (normal(key(SEED), (N,)), normal(fold_in(key(SEED), torch.arange(N)))):
        cdf = torch.special.ndtr(x.double().sort().values)
        steps = torch.arange(N + 1) / N
        distance = max((cdf - steps[:-1]).max().item(), (steps[1:] - cdf).max().item())
        assert distance <= math.sqrt(math.log(1e9) / (2 * N))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("rows", [1, 256])
def test_dropout_drops_its_share(p, rows):
    """Of n elements n p, with a variance of n p (1 - p)."""
    keys = fold_in(key(SEED), torch.arange(rows))
    dropped = dropout(torch.ones(rows, N // rows), p, keys) == 0
    assert abs(dropped.sum().item() - N * p) <= SIGMAS * math.sqrt(N * p * (1 - p))
    across = dropped.reshape(256, -1).sum(0) if rows == 1 else dropped.sum(0)
    variance = across.double().var().item() / (256 * p * (1 - p))
    kurtosis = (1 - 6 * p * (1 - p)) / (256 * p * (1 - p))  # of a binomial of 256
    assert abs(variance - 1) <= SIGMAS * math.sqrt((2 + kurtosis) / len(across))
