"""What clipping leaves out, and what it clips by itself: the bits of a loop.

Gradients are whole numbers, which add up in any order as long as nothing is clipped. What is
clipped adds up in one order, with chunks of one sample.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map

import pureaccum as pa
from pureaccum._core.writes import known_of
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.dropped import is_dropped
from tests.samples.problems import ROOTS, engines


pytestmark = [pytest.mark.exact, pytest.mark.promise("samples")]
BAD = [torch.nan, torch.inf, -torch.inf]
chunks = st.none() | st.integers(1, 7)


def whole(seed, *shape):
    return torch.randint(-3, 4, shape, generator=generator(seed)).float()


def params_of(seed):
    return {"in": {"w": whole(seed, 4, 3), "b": whole(seed + 1, 4)}, "out": whole(seed + 2, 4, 2)}


def loss(params, x):
    return (F.linear(x, params["in"]["w"], params["in"]["b"]) @ params["out"]).sum()


def copied(params, x):
    """The same, of which each sample has a copy of all leaves."""
    w, b, out = (x * 1 for x in (params["in"]["w"], params["in"]["b"], params["out"]))
    return (F.linear(x, w, b) @ out).sum()


LOSSES = pytest.mark.parametrize("loss", [loss, copied], ids=["layers", "copies"])


@engines
@LOSSES
@examples(1 / 2)
@given(seeds(), st.lists(st.sampled_from([*BAD, 0.0, 1.0]), min_size=1, max_size=8), chunks)
def test_a_sample_that_is_not_finite_adds_exactly_nothing_and_is_seen(
    engine, loss, seed, spoils, size
):
    """Its norm says so; those of the others, and the sums, are as if it were not there."""
    params, x = params_of(seed), whole(seed + 3, len(spoils), 3)
    spoil = torch.tensor(spoils)
    good = spoil.isfinite()
    x[:, 0] = torch.where(good, x[:, 0], spoil)

    def run(max_norm, size, x):
        return pa.clipped_sum(loss, max_norm, chunk_size=size, engine=engine)(params, x)

    for large in (1e9, {"in": 1e9, "out": 1e9}, {"in": {"w": 1e9, "b": 1e9}, "out": 1e9}):
        for max_norm, chunk in ((large, size), (tree_map(lambda x: x / 4e8, large), 1)):
            sums, norms = run(max_norm, chunk, x)
            want = run(max_norm, chunk, x[good])
            assert_trees_bitwise_equal((sums, tree_map(lambda n: n[good], norms)), want)
            some = torch.stack(tree_leaves(norms)).sum(0)
            assert torch.equal(some.isfinite(), good)


@engines
@LOSSES
@examples(1 / 2)
@given(seeds(), st.integers(1, 6))
def test_each_part_is_clipped_by_itself(engine, loss, seed, rows):
    """As if the other parameters were none."""
    params, x = params_of(seed), whole(seed + 3, rows, 3)
    norms_of = {"in": {"w": 1.5, "b": 0.5}, "out": 2.5}
    options = {"chunk_size": 1, "engine": engine}
    for max_norm in (norms_of, {"in": 1.5, "out": 2.5}):
        sums, norms = pa.clipped_sum(loss, max_norm, **options)(params, x)
        for name in ("in", "out"):

            def of_part(part, params, x, name=name):
                return loss(params | {name: part}, x)

            alone = pa.clipped_sum(of_part, max_norm[name], batch_argnums=2, **options)
            want = alone(params[name], params, x)
            assert_trees_bitwise_equal((sums[name], norms[name]), want)


@engines
def test_a_tree_over_several_arguments(engine):
    params, x = params_of(3), whole(4, 5, 3)

    def split(inner, out, x):
        return loss({"in": inner, "out": out}, x)

    options = {"argnums": (0, 1), "batch_argnums": 2, "engine": engine}
    got = pa.clipped_sum(split, (1.5, 2.5), **options)(params["in"], params["out"], x)
    sums, norms = pa.clipped_sum(loss, {"in": 1.5, "out": 2.5}, engine=engine)(params, x)
    assert_trees_bitwise_equal(got, ((sums["in"], sums["out"]), (norms["in"], norms["out"])))
    none = pa.clipped_sum(split, (1.5, 2.5), **options)(params["in"], params["out"], x[:0])
    zeros = tree_map(torch.zeros_like, (params["in"], params["out"]))
    assert_trees_bitwise_equal(none, (zeros, (torch.zeros(0), torch.zeros(0))))


@engines
@given(seeds(), st.integers(1, 4), st.integers(1, 3))
def test_a_sample_may_be_several_rows(engine, seed, users, k):
    """A user's gradient is the sum of those of the samples; the batch has one dim more."""
    params, batch = params_of(seed), {"x": whole(seed + 3, users * k, 3)}

    def of_rows(params, batch):
        return loss(params, batch["x"])

    clipped = pa.clipped_sum(of_rows, 1e9, engine=engine)
    sums, norms = clipped(params, tree_map(lambda x: x.unflatten(0, (-1, k)), batch))
    rows = batch["x"].view(users, k, 3)
    each = [torch.func.grad(of_rows)(params, {"x": x}) for x in rows]
    want = tree_map(lambda *g: torch.stack(g).sum(0), *each)
    assert_trees_bitwise_equal(sums, want)
    squares = [sum(g.double().square().sum() for g in tree_leaves(grads)) for grads in each]
    assert torch.allclose(norms.double(), torch.stack(squares).sqrt(), rtol=ROOTS, atol=0)


@engines
def test_a_weightless_sample_adds_nothing_and_one_that_counts_adds_its_total(engine):
    """Although the one is NaN, in parts as in the whole."""
    params, x = params_of(0), whole(1, 4, 3)
    x[1] = torch.nan
    mask = torch.tensor([1.0, 0.0, 2.0, 0.0])

    def weighted(params, x, mask):
        return pa.Weighted(loss(params, x) * mask, mask)

    for max_norm in (1e9, {"in": 1e9, "out": 1e9}):
        clipped = pa.clipped_sum(weighted, max_norm, batch_argnums=(1, 2), engine=engine)
        sums, _ = clipped(params, x, mask)
        want, _ = clipped(params, x[::2], mask[::2])
        assert_trees_bitwise_equal(sums, want)
        assert all(g.abs().sum() > 0 for g in tree_leaves(sums))


# By layers or not ------------------------------------------------------------------------------


def ways():
    """Losses of w and x, the dtype of sums, and whether layers are followed."""
    half, narrow = torch.bfloat16, torch.float32

    def autocast(w, x):
        with torch.autocast("cpu", half):
            return F.linear(x, w).float().sum()

    def plain(w, x):
        return F.linear(x.to(w.dtype), w).float().sum()

    return {
        "float32": (plain, narrow, True),
        "autocast": (autocast, narrow, False),
        "narrow parameters": (lambda w, x: plain(w.to(half), x), narrow, False),
        "wide sums": (plain, torch.float64, False),
    }


@pytest.mark.mechanism
@pytest.mark.parametrize("name", ways())
def test_layers_are_followed_where_their_sums_are_as_wide_as_promised(name):
    """2049 ones and as many numbers of 2**-8: more than bfloat16 holds, or float32 beside 2**24."""
    call, dtype, followed = ways()[name]
    x = torch.full((2049, 40), 2.0**-8)
    x[0] = 2.0**24 if dtype == torch.float64 else 1.0
    w = torch.zeros(60, 40)

    def mine(w, x):
        return call(w, x)

    sums, _ = pa.clipped_sum(mine, 1e12, dtype=dtype)(w, x)
    assert torch.equal(sums, x.to(sums.dtype).sum(0).expand(60, 40))
    assert known_of(mine).unseen != followed


@pytest.mark.promise("narrow")
@pytest.mark.promise("samples")
@pytest.mark.parametrize("name", ways())
def test_sums_are_wide_whatever_the_loss_computes_in(name):
    """2049 ones and as many numbers of 2**-8: more than bfloat16 holds, or float32 beside 2**24."""
    call, dtype, _ = ways()[name]
    x = torch.full((2049, 40), 2.0**-8)
    x[0] = 2.0**24 if dtype == torch.float64 else 1.0
    sums, _ = pa.clipped_sum(call, 1e12, dtype=dtype)(torch.zeros(60, 40), x)
    assert sums.dtype == dtype
    assert torch.equal(sums, x.to(sums.dtype).sum(0).expand(60, 40))


@pytest.mark.promise("narrow")
def test_leaves_of_bfloat16_have_sums_of_float32():
    w, x = torch.zeros(60, 40).bfloat16(), torch.full((2049, 40), 2.0**-8).bfloat16()
    sums, norms = pa.clipped_sum(lambda w, x: F.linear(x, w).sum(), 1e9)(w, x)
    assert sums.dtype == norms.dtype == torch.float32
    assert torch.equal(sums, torch.full((60, 40), 2049 * 2.0**-8))


@engines
def test_a_loss_may_do_something_else_in_each_chunk(engine):
    """What is a layer's in one chunk is copied in the next one."""
    params, x = params_of(1), whole(2, 8, 3)
    calls = []
    ways = [loss, copied, lambda p, x: loss(tree_map(lambda x: x * 2, p), x), loss]

    def changing(params, x):
        if is_dropped():
            return ways[0](params, x)
        calls.append(0)
        return ways[(len(calls) - 1) * 4 // steps](params, x)

    steps = 8 if engine == "autograd" else 4
    got = pa.clipped_sum(changing, 1e9, chunk_size=2, engine=engine)(params, x)
    assert len(calls) == steps
    parts = [pa.clipped_sum(way, 1e9)(params, x[2 * i : 2 * i + 2]) for i, way in enumerate(ways)]
    want = tree_map(lambda *s: torch.stack(s).sum(0), *(sums for sums, _ in parts))
    assert_trees_bitwise_equal(got[0], want)
    norms = torch.cat([norms for _, norms in parts])
    assert torch.allclose(got[1], norms, rtol=ROOTS, atol=0)


@pytest.mark.mechanism
def test_a_loss_may_turn_into_one_that_cannot_be_followed():
    """That chunk is computed again, and the rest of them as well as it."""
    params, x, calls = params_of(1), whole(2, 6, 3), list[int]()

    def odd(params, x):
        return torch.func.vmap(lambda w: (w * x).sum())(params["in"]["w"]).sum()

    def changing(params, x):
        if is_dropped():
            return loss(params, x)
        calls.append(0)
        return [loss, odd, odd, copied][len(calls) - 1](params, x)

    sums, _ = pa.clipped_sum(changing, 1e9, chunk_size=2)(params, x)
    assert len(calls) == 4
    parts = zip((loss, odd, copied), x.split(2), strict=True)
    each = [pa.clipped_sum(way, 1e9, engine="autograd")(params, rows)[0] for way, rows in parts]
    assert_trees_bitwise_equal(sums, tree_map(lambda *s: torch.stack(s).sum(0), *each))


def test_a_loss_that_turns_into_one_that_cannot_be_followed_has_the_same_sums():
    """Every call but the first computes the same by vmap, however many calls there are."""
    params, x, calls = params_of(1), whole(2, 6, 3), []

    def by_vmap(params, x):
        def of_row(w, b, out):
            return ((w * x).sum() + b) * out.sum()

        return torch.func.vmap(of_row)(params["in"]["w"], params["in"]["b"], params["out"]).sum()

    def changing(params, x):
        calls.append(0)
        return by_vmap(params, x) if len(calls) > 1 else loss(params, x)

    each = [torch.func.grad(loss)(params, row) for row in x]
    sums, norms = pa.clipped_sum(changing, 1e9, chunk_size=2)(params, x)
    assert_trees_bitwise_equal(sums, tree_map(lambda *g: torch.stack(g).sum(0), *each))
    squares = [sum(g.double().square().sum() for g in tree_leaves(grads)) for grads in each]
    assert ((norms - torch.stack(squares).sqrt()).abs() <= 2.0**-20 * norms).all()


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("of", ["params", "captured", "nothing"])
def test_plain_autograd_follows_results_with_chunks_as_without(size, of):
    params, x = tree_map(lambda x: x.requires_grad_(of == "params"), params_of(1)), whole(2, 5, 3)
    scale = torch.tensor(2.0, requires_grad=of == "captured")

    def scaled(params, x):
        return loss(params, x) * scale

    for norms in (2.0, {"in": 1.0, "out": 1e9}):
        with unchanged(params, x, scale):
            sums, _ = pa.clipped_sum(scaled, norms, chunk_size=size)(params, x)
        assert all(g.requires_grad == (of != "nothing") for g in tree_leaves(sums))
    if of == "captured":
        total = sum(g.sum() for g in tree_leaves(sums))
        (slope,) = torch.autograd.grad(total, scale)
        alone = pa.clipped_sum(lambda p, x: loss(p, x), 1e9)(params, x)[0]
        assert torch.allclose(slope, alone["out"].sum(), rtol=1e-3)
    with torch.no_grad():
        pa.clipped_sum(scaled, 2.0)(params, x)
    assert all(p.grad is None for p in tree_leaves(params))


@pytest.mark.promise("purity")
def test_it_is_pure_and_leaves_hooks_and_modes_alone():
    seen = []
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(inplace=True))
    net.register_forward_hook(lambda *_: seen.append("forward"))
    params = {name: x.detach().requires_grad_() for name, x in net.named_parameters()}
    for p in params.values():
        p.register_hook(lambda _: seen.append("gradient"))

    def of_net(params, x):
        return torch.func.functional_call(net, params, (x,)).sum()

    with torch.inference_mode():
        pa.clipped_sum(of_net, 1.0, chunk_size=2)(params, torch.ones(4, 3))
    clipped = pa.clipped_sum(of_net, 1.0, chunk_size=2)
    assert_pure(clipped, params, torch.ones(4, 3))
    assert set(seen) == {"forward"}
    assert torch.overrides._get_current_function_mode() is None
    with pytest.raises(ZeroDivisionError):
        pa.clipped_sum(lambda p, x: of_net(p, x) / (1 // 0), 1.0)(params, torch.ones(4, 3))
    assert torch.overrides._get_current_function_mode() is None
    assert torch._C._functorch.maybe_current_level() is None
