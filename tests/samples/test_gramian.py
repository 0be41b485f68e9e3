"""Inner products of samples' gradients, on whole numbers: the bits of Jacobians written out.

The Jacobians are torch.func's, of one sample after the other. However a batch is cut, whatever its
layers are, and whether the numbers of a sample are one, several or in a matrix, no bit changes.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

import pureaccum as pa
from pureaccum._core.writes import known_of
from pureaccum._samples.outer_products import Outer, inner_products
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.dropped import is_dropped
from tests.exactly import integers
from tests.samples.problems import chunks, engines, jacobians, peak_of, rows_of


pytestmark = [pytest.mark.exact, pytest.mark.promise("samples")]
rows = st.integers(1, 5)


def whole(seed, *shape):
    return torch.randint(-3, 4, shape, generator=generator(seed)).float()


def make(seed, count, length=2):
    """So few samples of so wide layers that products of factors are less work than those of all."""
    random = generator(seed)
    shapes = {"w": (8, 6), "v": (6, 2), "b": (6,), "e": (12, 8), "c": (6, 8, 2)}
    shapes |= {"s": (), "u": (2, 2), "o": (2, 6)}
    params = {name: integers(random, *shape, bound=2) for name, shape in shapes.items()}
    batch = {
        "x": integers(random, count, length, 8, bound=2),
        "i": torch.randint(0, 12, (count, length), generator=random),
    }
    return params, batch


def hidden(p, s):
    return (s["x"] + F.embedding(s["i"], p["e"])) @ p["w"] + p["b"]


def rows_of_one(p, s):
    return (torch.relu(s["x"] @ p["w"] + p["b"]) @ p["v"]).sum(0)


def number(p, s):
    return torch.relu(s["x"] @ p["w"]).sum()


def of_one(p, s):
    return (hidden(p, s) * p["b"]).sum() * p["s"]  # the bias is used twice


def matrix(p, s):
    return torch.relu(s["x"] @ p["w"])[:2]


NOT_FOLLOWED = {
    "none": lambda p, s: number(p, s)[None][:0],
    "constant": lambda p, s: s["x"][0],
    "by_vmap_alone": lambda p, s: vmap(lambda w: (s["x"] @ w).sum())(p["w"].T),
}
FOLLOWED = {
    # a sample alone, through a linear layer and a product
    "row": lambda p, s: F.linear(torch.relu(s["x"][0] @ p["w"] + p["b"]), p["v"].T),
    "rows_of_one": rows_of_one,
    "words": lambda p, s: (F.embedding(s["i"], p["e"]) @ p["w"]).sum(0) * p["s"],
    "tied": lambda p, s: (p["e"][s["i"]] @ p["e"].T)[0],
    "filters": lambda p, s: torch.relu(F.conv1d(s["x"].mT, p["c"], p["b"])).sum(1),
    "from_the_left": lambda p, s: (p["v"].T @ torch.relu(p["w"].T @ s["x"].mT)).sum(1),
    "twice": lambda p, s: (torch.relu(s["x"] @ p["w"]) @ p["w"].T)[0] + p["w"].sum(),
    "beside_layers": lambda p, s: (s["x"].sum(0) * p["b"].sum() * p["s"])[:2] * p["u"],
    "matrix": matrix,
    "number": number,
    "of_numbers": lambda p, s: F.linear(hidden(p, s), p["o"]).sum(0) * p["s"] + 2,
    "of_one": of_one,
    "of_matrix": lambda p, s: F.linear(hidden(p, s), p["o"]),  # two times two numbers
    # a matrix of which a function is taken, and so has gradients that are written out
    "unseen": lambda p, s: (hidden(p, s) @ p["o"].abs().T).sum(0),
}
FUNCTIONS = FOLLOWED | NOT_FOLLOWED


def expected(func, params, batch, other):
    """Of Jacobians that are written out."""

    def jacobian(batch):
        numbers = func(params, rows_of(batch)[0]).shape
        pairs = zip(*map(tree_leaves, (jacobians(func, params, batch), params)), strict=True)
        return numbers, torch.cat(
            [x.reshape(len(x), numbers.numel(), p.numel()) for x, p in pairs], -1
        )

    (numbers, j), (others, k) = jacobian(batch), jacobian(other)
    size = torch.einsum("naf,mbf->nmab", j.abs().double(), k.abs().double())
    assert size.numel() == 0 or size.max() < 2**24
    found = torch.einsum("naf,mbf->nmab", j, k)
    return found.reshape(*found.shape[:2], *numbers, *others)


@pytest.mark.parametrize("name", FUNCTIONS)
@engines
@examples(1 / 6)
@example(0, 3, 5, 2)  # a line of blocks of which the last one is short
@example(1, 5, 1, 2)
@given(seeds(), rows, rows, chunks)
def test_products_are_those_of_jacobians_written_out(name, engine, seed, n, m, size):
    (params, batch), (_, other), func = make(seed, n), make(seed + 1, m), FUNCTIONS[name]
    of = pa.gramian(func, chunk_size=size, engine=engine)
    got = assert_pure(of, params, batch, other=other)
    assert_trees_bitwise_equal(got, expected(func, params, batch, other))
    itself = of(params, batch)
    assert got.dtype == itself.dtype == torch.float32
    assert_trees_bitwise_equal(itself, expected(func, params, batch, batch))
    params, batch = tree_map(lambda x: x.double() if x.is_floating_point() else x, (params, batch))
    assert pa.gramian(func)(params, batch).dtype == torch.float64


@pytest.mark.mechanism
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_layers_see_is_enough(name):
    """The function is not called again for gradients that are written out, whoever called it."""
    func = FOLLOWED[name]
    params, batch = make(0, 4)
    pa.per_sample_grad(func, reduce="sum")(params, batch)
    pa.gramian(func, chunk_size=2)(params, batch, other=make(1, 3, length=4)[1])
    assert not known_of(func).unseen


@engines
def test_numbers_that_stand_in_a_batch_are_its_own(engine):
    params, batch = make(0, 4)

    def scaled(p, s):
        return rows_of_one(p, s) * s["by"]

    of = pa.gramian(scaled, chunk_size=3, engine=engine)
    got = of(params, batch | {"by": 2.0}, other=batch | {"by": 3.0})
    assert_trees_bitwise_equal(got, 6 * expected(rows_of_one, params, batch, batch))
    with torch.inference_mode():  # a result of which a gradient may be asked later
        assert not of(params, batch | {"by": 2.0}).is_inference()


@engines
@pytest.mark.parametrize("size", [None, 2])
def test_arguments_are_those_of_the_function(engine, size):
    """Several batches, of which one is a tree, in any place; keywords; batches of one sample."""
    params, batch = make(3, 5)
    _, other = make(4, 3)
    more = {"chunk_size": size, "engine": engine}

    def func(i, p, x, by, scale=1.0):
        return rows_of_one({**p, "s": by}, {"x": x[0], "i": i["i"][0]}) * scale * by

    of = pa.gramian(func, (1, 3), batch_argnums=(2, 0), keep_batch_dim=True, **more)
    both = {"i": batch["i"]}, params, batch["x"], params["s"]
    got = of(*both, scale=2.0, other=(other["x"], {"i": other["i"]}))

    def same(p, s):
        return rows_of_one(p[0], s) * 2.0 * p[1]

    want = expected(same, (params, params["s"]), batch, other)
    assert_trees_bitwise_equal(got, want)
    itself = expected(same, (params, params["s"]), batch, batch)
    assert_trees_bitwise_equal(of(*both, scale=2.0), itself)
    negative = pa.gramian(lambda p, x: x.sum() * p["s"], batch_argnums=-1, **more)
    assert_trees_bitwise_equal(
        negative({"s": params["s"]}, batch["x"], other=other["x"]),
        batch["x"].sum((1, 2))[:, None] * other["x"].sum((1, 2)),
    )


@engines
@examples(1 / 4)
@given(seeds(), chunks)
def test_batches_may_be_of_other_shapes(engine, seed, size):
    """Texts of other lengths, and as many numbers for each as it has words."""

    def each_word(p, s):
        return (F.embedding(s["i"], p["e"]) @ p["w"]).sum(-1)

    (params, batch), (_, other) = make(seed, 4), make(seed + 1, 3, length=5)
    got = pa.gramian(each_word, chunk_size=size, engine=engine)(params, batch, other=other)
    assert got.shape == (4, 3, 2, 5)
    assert_trees_bitwise_equal(got, expected(each_word, params, batch, other))


@engines
@examples(1 / 4)
@example(0, [2, 0, 1, 0], 3)
@given(seeds(), st.lists(st.integers(0, 2), min_size=1, max_size=6), chunks)
def test_a_sample_without_weight_has_no_gradient_though_it_is_nan(engine, seed, mask, size):
    params, batch = make(seed, len(mask))
    by = torch.tensor(mask).float()

    def masked(p, s, by):
        return pa.Weighted(number(p, s) * by + number(p, s) * (0 / by), by)

    def plain(p, s):
        return number(p, s["s"]) * s["by"]

    of = pa.gramian(masked, batch_argnums=(1, 2), chunk_size=size, engine=engine)
    want = expected(plain, params, {"s": batch, "by": by}, {"s": batch, "by": by})
    assert_trees_bitwise_equal(of(params, batch, by), want)
    assert_trees_bitwise_equal(of(params, batch, by, other=(batch, by)), want)


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
def test_products_are_wide(engine, dtype):
    """And those of complex gradients are real: of vectors of twice as many numbers."""
    x = torch.randint(-255, 256, (6, 70), generator=generator(0)).to(dtype)
    x = x + 1j * x.flip(0) if dtype.is_complex else x
    w = torch.zeros(70, dtype=dtype)

    def func(w, x):
        out = torch.stack([w[:35] @ x[:35], w[35:] @ x[35:] * 2])
        return torch.view_as_real(out) if dtype.is_complex else out

    each = pa.per_sample_grad(func, engine="autograd")(w, x).flatten(1, -2)
    each = torch.view_as_real(each).flatten(2) if dtype.is_complex else each
    wide = torch.promote_types(dtype, torch.float32).to_real()
    want = torch.einsum("naf,mbf->nmab", each.to(wide), each.to(wide))
    got = pa.gramian(func, engine=engine, chunk_size=4)(w, x)
    assert_trees_bitwise_equal(got, want.view(got.shape))


def test_the_matrix_of_a_batch_with_itself_is_symmetric_to_the_bit():
    """On ordinary floats: what stands below the diagonal blocks is a mirror."""
    x = torch.randn(7, 2, 8, generator=generator(1))
    params = tree_map(lambda p: p + 0.1, make(1, 1)[0])
    got = pa.gramian(matrix, chunk_size=2)(params, {"x": x})
    assert_trees_bitwise_equal(got[0, 4], got[4, 0].permute(2, 3, 0, 1))


def test_transforms_around_it():
    """The plain way; and what it depends on is differentiated."""
    params, batch = make(0, 4)
    members = pa.stack([params, make(30, 1)[0]])
    for func in (FOLLOWED["of_numbers"], of_one):
        kernel = pa.gramian(func, chunk_size=3)
        at_once = vmap(lambda p, kernel=kernel: kernel(p, batch))(members)
        for came, one in zip(at_once, pa.unstack(members), strict=True):
            assert torch.equal(came, kernel(one, batch))

    def derivative(kernel):
        return grad(lambda s: kernel(params | {"s": s}, batch).sum())(torch.tensor(2.0))

    want = derivative(lambda params, batch: expected(of_one, params, batch, batch))
    assert torch.equal(derivative(pa.gramian(of_one, chunk_size=3)), want)


def test_batches_of_several_arguments_and_a_shared_one():
    def func(w, x, scale, y):
        return (w * x * scale).sum() * y[0]

    w, scale = whole(1, 3), torch.tensor(2.0)
    x, y, other = whole(2, 4, 3), whole(3, 4, 1), (whole(4, 2, 3), whole(5, 2, 1))
    kernel = pa.gramian(func, batch_argnums=(1, 3), chunk_size=3)
    came = kernel(w, x, scale, y, other=other)
    assert torch.equal(came, (x * scale * y) @ (other[0] * scale * other[1]).T)
    batched = pa.gramian(
        lambda w, x, scale, y: func(w, x[0], scale, y[0]), batch_argnums=(1, 3), keep_batch_dim=True
    )
    assert torch.equal(batched(w, x, scale, y, other=other), came)


def test_a_network_and_its_memory():
    """A convnet in float64; and in blocks, no more than a part of what the Jacobians take."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Softplus(), nn.Conv2d(4, 3, 3), nn.Flatten(0), nn.Linear(192, 5)
    net = nn.Sequential(*layers).double()
    params = {n: p.detach() for n, p in net.named_parameters()}
    x = torch.randn(12, 2, 12, 12).double()

    def func(params, x):
        return functional_call(net, params, (x,))

    def by_hand():
        each = vmap(jacrev(func), (None, 0))(params, x)
        flat = torch.cat([j.flatten(2) for j in each.values()], 2)
        return torch.einsum("naf,mbf->nmab", flat, flat)

    kernel = pa.gramian(func, chunk_size=2)
    came, want = kernel(params, x), by_hand()
    assert (came - want).norm() <= 2.0**-26.5 * want.norm()
    ours, theirs = (peak_of(way) for way in (lambda: kernel(params, x), by_hand))
    assert ours < theirs / 3


WIDTH, SAMPLES = 256, 32


def peak(of, samples=SAMPLES, others=0):
    random = generator(0)
    params = {"a": torch.randn(WIDTH, WIDTH, generator=random) / 9, "b": torch.zeros(WIDTH)}
    x, y = (torch.randn(n, WIDTH, generator=random) for n in (samples, others))

    def func(p, x):
        return (torch.tanh(F.linear(x, p["a"], p["b"])) @ p["a"])[:3]  # two uses

    return peak_of(lambda: of(func)(params, x, other=y if others else None))


@pytest.mark.slow
def test_no_jacobian_of_a_layer_is_ever_whole():
    """What is alive is in proportion to activations, and with chunks to those of two of them."""
    jacobian = SAMPLES * 3 * WIDTH**2 * 4
    assert peak(pa.gramian) < jacobian / 10
    assert peak(lambda f: pa.gramian(f, chunk_size=4)) < jacobian / 50
    # the control: Jacobians of two blocks that are written out
    assert peak(lambda f: pa.gramian(f, chunk_size=4, engine="autograd")) > jacobian / 4


@pytest.mark.slow
@engines
@pytest.mark.parametrize("others", [0, 12])
def test_what_is_kept_is_the_matrix_and_two_blocks(engine, others):
    def kernel(func):
        return pa.gramian(func, chunk_size=4, engine=engine)

    two = peak(kernel, 4, 4)
    matrix = 9 * 4 * SAMPLES * (others or SAMPLES)
    assert peak(kernel, SAMPLES, others) <= 1.1 * two + matrix


def test_many_numbers_of_a_narrow_layer_take_less_than_their_jacobians():
    """Seen at many positions: nothing is alive for each pair of positions and pair of numbers."""
    random = generator(0)
    p = {"w": torch.randn(256, 8, generator=random) / 16}
    x, out = torch.randn(6, 20, 256, generator=random), torch.randn(160, 50, generator=random)

    def func(p, x):
        return torch.tanh(x @ p["w"]).flatten() @ out

    def by_hand():
        each = vmap(jacrev(func), (None, 0))(p, x)["w"].flatten(2)
        return torch.einsum("naf,mbf->nmab", each, each)

    assert peak_of(lambda: pa.gramian(func)(p, x)) < peak_of(by_hand) / 2


@pytest.mark.mechanism
def test_blocks_are_computed_once_where_one_is_at_hand():
    """To and fro through the columns: the block that ends a line serves the next one."""
    params, batch = make(0, 6)
    calls = []

    def func(p, s):
        if not is_dropped():
            calls.append(1)
        return number(p, s)

    pa.gramian(func, chunk_size=2)(params, batch)
    assert len(calls) == 3 + 1  # 0 2 1, 1 2
    calls.clear()
    pa.gramian(func, chunk_size=2)(params, batch, other=make(1, 2)[1])
    assert len(calls) == 3 + 1
    calls.clear()
    pa.gramian(func, chunk_size=2)(params, batch, other=make(1, 5)[1])
    assert len(calls) == 3 + 3 + 2 + 2


def test_positions_that_cancel_leave_what_is_left():
    """4097² - 4096 · 4098 is 1, and 0 or 2 in float32, where 4097² is no number."""
    a, d, ones = torch.zeros(3, 1, 2, 256)
    a[0, :, 0], d[0, :, 0] = torch.tensor([4097.0, -4096.0]), torch.tensor([4097.0, 4098.0])
    ones[0, 0, 0] = 1.0
    of = pa.gramian(lambda w, s: ((s["a"] @ w) * s["d"]).sum())
    got = of(torch.zeros(256, 256), {"a": a, "d": d}, other={"a": ones, "d": ones})
    assert_trees_bitwise_equal(got, torch.ones(1, 1))


@pytest.mark.mechanism
@pytest.mark.parametrize("several", ["none", "right", "both"])
def test_pairs_that_cancel_leave_what_is_left(several):
    """4097² - 4096 · 4098 is 1, and 0 or 2 in float32, where 4097² is no number."""
    a, d = torch.zeros(2, 1, 2, 8)
    a[0, :, 0], d[0, :, 0] = torch.tensor([4097.0, -4096.0]), torch.tensor([4097.0, 4098.0])
    ones = torch.zeros(1, 1, 8).index_fill(2, torch.tensor(0), 1.0)
    numbers = {"none": (), "right": (1,), "both": (1, 1)}[several]

    def outer(a, d):
        a, d = (a[None] if len(numbers) > 1 else a), (d[None] if numbers else d)
        return Outer(a, d, torch.Size((8, 8)))

    assert_trees_bitwise_equal(inner_products(outer(a, d), outer(ones, ones)), torch.ones(1, 1))
