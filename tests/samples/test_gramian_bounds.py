"""Inner products of gradients of ordinary networks, and of given outer products.

What a network makes of one sample is its own affair: a product is compared with that of gradients
from a loop over samples, in float64, to the square root of the unit times both norms. Of given
factors a and d, of widths M and N with T pairs of them on either side, a product is a sum over all
pairs of <a, a'> <d, d'>. By factors that has M + T' + T N roundings, of <a, a'>, of the sum of d'
times these, and of its product with d; of single pairs, or where both factors are several numbers',
M + N + 1 + T T'; of gradients that are written out, T + 1 in either and M N in their product. All
are below M N + M + N + 3 + T T' + T N + T', times the sum over pairs of <|a|, |a'|> <|d|, |d'|>.
Which factor is called a is open, and so M and N may change places.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum._samples.outer_products import Outer, inner_products
from pureaccum.testing import assert_trees_within_bound
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.networks import NETWORKS, batch_of, params_of
from tests.rounding import UNIT, gamma
from tests.samples.problems import chunks, engines, looped


pytestmark = [pytest.mark.bounds, pytest.mark.promise("samples")]
DTYPES = pytest.mark.parametrize("dtype", UNIT, ids=["float32", "float64"])


def outputs(network):
    return lambda p, x: NETWORKS[network](p, x[None])[0]


def rows_of_jacobians(func, params, x):
    """(samples, outputs, all numbers of params)."""
    return torch.cat([j.flatten(2) for j in looped(func, params, x).values()], 2)


@pytest.mark.parametrize("network", NETWORKS)
@engines
@examples(1 / 5)
@given(seeds(), chunks)
def test_products_of_networks_gradients_are_those_of_a_loop(network, engine, seed, size):
    params, func = params_of(seed, torch.float64), outputs(network)
    x, other = (batch_of(seed + i, torch.float64, 5 - i)["x"] for i in range(2))
    j, k = (rows_of_jacobians(func, params, rows) for rows in (x, other))
    bound = UNIT[torch.float64] ** 0.5 * torch.einsum("na,mb->nmab", j.norm(dim=2), k.norm(dim=2))
    want = torch.einsum("naf,mbf->nmab", j, k)
    of = pa.gramian(func, chunk_size=size, engine=engine)
    assert_trees_within_bound(of(params, x, other=other), want, bound)
    without = {name: p for name, p in params.items() if name != "out"}
    partly = pa.gramian(lambda p, x: func(p | {"out": params["out"]}, x), engine=engine)
    with pytest.raises(AssertionError, match="times the bound"):  # the control: a leaf less
        assert_trees_within_bound(partly(without, x, other=other), want, bound)


@pytest.mark.mechanism
@pytest.mark.parametrize("several", [None, "left", "right", "both"])
@pytest.mark.parametrize("table", [False, True])
@DTYPES
@examples(1 / 2)
@given(
    seeds(),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_products_of_outer_products_are_within_a_bound(
    several,
    table,
    dtype,
    seed,
    mine,
    theirs,
    widths,
):
    """Samples and pairs of either side; factors of very different size."""
    random, (m, n) = generator(seed), widths

    def draw(*shape):
        x = torch.randn(*shape, generator=random, dtype=torch.float64)
        return (x * 10.0 ** torch.randint(-2, 3, shape, generator=random)).to(dtype)

    def outer(samples, pairs):
        k = [(3,) if several in (side, "both") else () for side in ("left", "right")]
        left = draw(*k[0], samples, pairs, m)
        if table:
            left = torch.randint(0, m, (samples, pairs), generator=random)
        return Outer(left, draw(*k[1], samples, pairs, n), torch.Size((m, n)))

    def written_out(x, signed):  # (samples, pairs, numbers, all)
        left = torch.nn.functional.one_hot(x.left, m) if table else x.left
        a, d = (it if it.dim() == 4 else it[None] for it in (left.double(), x.right.double()))
        products = (a.unsqueeze(-1) * d.unsqueeze(-2)).permute(1, 2, 0, 3, 4)
        return (products if signed else products.abs()).flatten(3)

    def product(signed):
        each = [written_out(it, signed).sum(1) for it in (x, y)]
        return each[0].flatten(0, 1) @ each[1].flatten(0, 1).T

    x, y = outer(*mine), outer(*theirs)
    roundings = m * n + m + n + 3 + mine[1] * theirs[1] + mine[1] * max(m, n) + theirs[1]
    off = float(gamma(roundings, UNIT[dtype]) + gamma(roundings, UNIT[torch.float64]))
    got = inner_products(x, y)
    assert got.dtype == dtype
    assert_trees_within_bound(got.double(), product(signed=True), off * product(signed=False))


@pytest.mark.parametrize("engine", ["vmap", "autograd"])
@pytest.mark.parametrize("table", [False, True])
@DTYPES
@examples(1 / 2)
@given(
    seeds(),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_products_of_a_layers_gradients_are_within_the_bound(
    engine, table, dtype, seed, mine, theirs, widths
):
    """Of a weight's gradient Σ a ⊗ d, where d is a number of the batch: samples and positions."""
    random, (m, n) = generator(seed), widths

    def draw(*shape):
        x = torch.randn(*shape, generator=random, dtype=torch.float64)
        return (x * 10.0 ** torch.randint(-2, 3, shape, generator=random)).to(dtype)

    def batch(samples, pairs):
        a = draw(samples, pairs, m)
        a = torch.randint(0, m, (samples, pairs), generator=random) if table else a
        return {"a": a, "d": draw(samples, pairs, n)}

    def func(w, row):
        h = torch.nn.functional.embedding(row["a"], w) if table else row["a"] @ w
        return (h * row["d"]).sum()

    def product(size):
        left = [torch.nn.functional.one_hot(it["a"], m) if table else it["a"] for it in (x, y)]
        a, b = (size(it.double()) for it in left)
        d, e = (size(it["d"].double()) for it in (x, y))
        return torch.einsum("npi,npj,mqi,mqj->nm", a, d, b, e)

    x, y = batch(*mine), batch(*theirs)
    roundings = m * n + m + n + 3 + mine[1] * theirs[1] + mine[1] * max(m, n) + theirs[1]
    off = float(gamma(roundings, UNIT[dtype]) + gamma(roundings, UNIT[torch.float64]))
    got = pa.gramian(func, engine=engine)(torch.zeros(m, n, dtype=dtype), x, other=y)
    assert got.dtype == dtype
    assert_trees_within_bound(got.double(), product(lambda x: x), off * product(torch.abs))
