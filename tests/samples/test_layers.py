"""What layers see, on whole numbers: the gradients of samples, bit by bit, and sums of them.

The gradients of a loop over the samples are taken by torch.func, one sample after the other.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_map

import pureaccum as pa
from pureaccum._base.torch_internals.functorch import over_rows
from pureaccum._core.writes import known_of
from pureaccum._samples.layer_rules import RULES
from pureaccum._samples.layers import Layers
from pureaccum._samples.outer_products import (
    Outer,
    add_weighted_,
    norms_of,
    only_kept,
    written_out,
)
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.problems import function
from tests.samples.problems import ROOTS


pytestmark = [pytest.mark.exact, pytest.mark.promise("samples")]
WIDTH = 3


def whole(seed, *shape, most=3, dtype=torch.float32):
    return torch.randint(-most, most + 1, shape, generator=generator(seed)).to(dtype)


def params_of(seed):
    shapes = (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), (7, WIDTH), (WIDTH, 1, 2), (), (50, 60), (1,)
    return [whole(seed + i, *shape) for i, shape in enumerate(shapes)]


# Of (t, WIDTH) numbers and (t,) words, to WIDTH numbers.
def linear(p, x, words):
    return F.linear(F.linear(x, p[0], p[2]), p[1], p[7]).sum(0)


def product(p, x, words):
    return (p[1] @ (x @ p[0] + p[2]).mT).sum(1)


def table(p, x, words):
    h = F.embedding(words, p[3], padding_idx=2) + p[0].T[words % WIDTH]
    return (h @ p[0].T).sum(0) * p[5]


def twice(p, x, words):
    return (F.linear(x, p[0]) @ p[0] + p[3][words]).sum(0) @ p[3][1:4].T + p[0][1]


def convolved(p, x, words):
    x = torch.cat([x, x]).mT
    h = F.conv1d(x, p[4], p[2] * 2, groups=3, padding=1)
    two = F.conv1d(input=torch.stack([h, 2 * h]), weight=p[4], bias=p[2], groups=3, stride=2)
    return h.sum(-1) * p[5] + two.sum((0, 2))


FUNCTIONS = [linear, product, table, twice, convolved]


def parts_of(func, leaves, rows, cotangents=None):
    layers, seen = Layers(leaves, len(rows[0]), torch.float32, RULES), dict[int, Any]()

    def one(*row):
        with layers:
            return [func(layers.given, *row)]

    def see(i, part):
        assert i not in seen
        seen[i] = part

    with torch.enable_grad():
        (out,) = over_rows(one, rows, "error")
    layers.pull(out, see, cotangents)
    return [seen[i] for i in range(len(leaves))]


def gradients_of(part):
    return written_out(part) if isinstance(part, Outer) else part


@pytest.mark.mechanism
@pytest.mark.parametrize("func", FUNCTIONS, ids=lambda f: f.__name__)
@examples(1 / 2)
@given(seeds(), st.integers(1, 4), st.integers(1, 3))
def test_layers_see_the_gradients_of_samples_and_their_jacobians(func, seed, rows, times):
    leaves = params_of(seed)
    x, words = whole(seed, rows, times, WIDTH), whole(seed, rows, times, dtype=torch.int64) % 7
    jacobian = torch.func.jacrev(lambda leaves, *row: func(leaves, *row))
    each = [jacobian(leaves, *row) for row in zip(x, words, strict=True)]
    want = [torch.stack(leaf) for leaf in zip(*each, strict=True)]  # (rows, WIDTH, ...)

    basis = torch.eye(WIDTH)[:, None].expand(WIDTH, rows, WIDTH)
    got = [gradients_of(part) for part in parts_of(func, leaves, [x, words], basis)]
    for g, j in zip(got, want, strict=True):
        assert torch.equal(g.expand(WIDTH, *j.shape[:1], *j.shape[2:]), j.transpose(0, 1))
    of_sum = parts_of(lambda p, *row: func(p, *row).sum(), leaves, [x, words])
    for g, j in zip(map(gradients_of, of_sum), want, strict=True):
        assert torch.equal(g, j.sum(1))


@pytest.mark.parametrize("func", FUNCTIONS, ids=lambda f: f.__name__)
@examples(1 / 2)
@given(seeds(), st.integers(1, 4), st.integers(1, 3))
def test_sums_of_jacobians_have_the_bits_of_a_loop(func, seed, rows, times):
    """Of the jacobians of samples, and of the gradients of their sums."""
    leaves = params_of(seed)
    x, words = whole(seed, rows, times, WIDTH), whole(seed, rows, times, dtype=torch.int64) % 7
    each = [torch.func.jacrev(func)(leaves, *row) for row in zip(x, words, strict=True)]
    want = tree_map(lambda *j: torch.stack(j).sum(0), *each)
    summed = pa.per_sample_grad(func, reduce="sum", batch_argnums=(1, 2))(leaves, x, words)
    assert_trees_bitwise_equal(summed, want)
    clipped = pa.clipped_sum(lambda *args: func(*args).sum(), 1e9, batch_argnums=(1, 2))
    assert_trees_bitwise_equal(clipped(leaves, x, words)[0], tree_map(lambda j: j.sum(0), want))


@pytest.mark.mechanism
@examples(1 / 2)
@given(seeds(), st.integers(1, 4), st.sampled_from([0, 1, 2, 40]), st.booleans())
def test_norms_and_sums_of_outer_products_are_those_of_what_they_stand_for(
    seed, rows, times, looks_up
):
    """Products that are short and long; a sample that is not kept adds nothing though it is NaN."""
    left = whole(seed, rows, times, 4)
    if looks_up:
        left = whole(seed, rows, times, dtype=torch.int64) % 4
    right, factor = whole(seed + 1, rows, times, 5), whole(seed + 2, rows)
    x = Outer(left, right, torch.Size((4, 5)))
    each = torch.zeros(rows, 4, 5)
    for r in range(rows):
        for t in range(times):
            one = F.one_hot(left[r, t], 4).float() if looks_up else left[r, t]
            each[r] += one[:, None] * right[r, t]
    assert torch.equal(written_out(x), each)
    squares = each.double().square().sum((1, 2))
    off = (norms_of(x).double() - squares.sqrt()).abs()
    assert (off <= 2.0**-22 * squares.sqrt()).all()
    before, keep = whole(seed + 3, 4, 5), factor != 0
    nan = torch.where(keep[:, None, None], 1.0, torch.nan)
    spoiled = Outer(left if looks_up else left * nan, right * nan, x.shape)
    got = add_weighted_(before.clone(), only_kept(spoiled, keep), factor)
    assert torch.equal(got, before + torch.tensordot(factor, each, 1))
    shaped = Outer(left, right, torch.Size((2, 2, 5))) if not looks_up else x
    got = add_weighted_(torch.zeros(shaped.shape), shaped, factor)
    assert torch.equal(got.view(4, 5), torch.tensordot(factor, each, 1))


# A custom Function, which is seen as torch functions are.
Doubled = function(lambda x: 2 * x, lambda g, x: 2 * g, generate_vmap_rule=True)


UNSEEN = {
    "custom Function": lambda p, x: (x @ Doubled.apply(p["w"])).sum(),
    "and a layer": lambda p, x: (x @ p["w"]).sum() * 2 + (x @ Doubled.apply(p["w"])).sum(),
    "gradient": lambda p, x: torch.func.grad(lambda w: (x @ w).square().sum())(p["w"]).sum(),
    "captured": lambda p, x: torch.func.grad(lambda x: (x @ p["w"]).square().sum())(x).sum(),
    "vmap": lambda p, x: torch.func.vmap(lambda w: x @ w)(p["w"].T).sum(),
    "vmap of a layer": lambda p, x: torch.func.vmap(lambda x: x @ p["w"])(x[None]).sum(),
    "jvp": lambda p, x: torch.func.jvp(lambda w: (x @ w).square().sum(), (p["w"],), (p["w"],))[1],
    "no matrix": lambda p, x: torch.einsum("i,ij->j", x, p["w"]).square().sum(),
    "in place": lambda p, x: torch.zeros(2).add_(p["w"].sum(0)).square().sum() + (x @ p["w"]).sum(),
    "number": lambda p, x: (x @ p["w"]).sum() * float(p["b"].detach().sum()),
    "caught": lambda p, x: caught(p, x),
    "hook": lambda p, x: hooked(p, x),
    "gradient of autograd": lambda p, x: (
        torch.autograd.grad((x @ p["w"]).sum(), p["w"])[0].sum() * (x @ p["w"]).sum()
    ),
}


def hooked(p, x):
    """It asks whether there will be a gradient, which vmap's wrapper denies."""
    h = x @ p["w"]
    if h.requires_grad:
        h.register_hook(lambda d: 2 * d)
    return h.sum()


SEEN = "custom Function", "and a layer", "no matrix"  # the small matrix is copied


def caught(p, x):
    try:
        return torch.vmap(lambda x: x @ p["w"])(x[None]).sum()
    except RuntimeError:
        return x.sum() * p["b"].sum()  # something else


@pytest.mark.promise("samples")
@pytest.mark.promise("followed")
@pytest.mark.table
@pytest.mark.parametrize("names", [("w", "b", "large"), ("b", "large", "w")], ids=["first", "last"])
@pytest.mark.parametrize("name", UNSEEN)
def test_a_use_that_cannot_be_followed_is_found_and_never_a_wrong_number(name, names):
    """Whichever leaf it is. The first call finds it out, and the next ones know."""
    x = whole(2, 5, 3)
    leaves = {"w": whole(1, 3, 2), "b": whole(3, 2), "large": torch.zeros(40, 40)}
    params = tuple(leaves[it] for it in names)

    def loss(p, row):
        return UNSEEN[name](dict(zip(names, p, strict=True)), row)

    each = [torch.func.grad(loss)(params, row) for row in x]
    want = tree_map(lambda *g: torch.stack(g).sum(0), *each)
    norms = tree_map(lambda *g: torch.stack(g), *each)
    norms = sum(g.flatten(1).square().sum(1) for g in norms).sqrt()
    for _ in range(2):
        got, seen = pa.clipped_sum(loss, 1e9, chunk_size=2)(params, x)
        assert_trees_bitwise_equal(got, want)
        assert torch.allclose(seen, norms, rtol=ROOTS, atol=0)
    assert known_of(loss).unseen == (name not in SEEN)
