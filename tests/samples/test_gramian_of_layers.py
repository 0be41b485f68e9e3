"""Inner products of samples' gradients, on whole numbers: the bits of Jacobians written out.

The Jacobians are torch.func's, of one sample after the other. However a batch is cut, whatever its
layers are, and whether the numbers of a sample are one, several or in a matrix, no bit changes.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map
from torch import Tensor
from torch.func import jacrev, vmap

import pureaccum as pa
from pureaccum._core.auto_size import counting
from pureaccum._core.writes import known_of
from pureaccum._samples.outer_products import Outer, inner_products
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.dropped import is_dropped
from tests.exactly import integers


pytestmark = pytest.mark.exact
rows, chunks = st.integers(1, 5), st.none() | st.integers(1, 6)
engines = pytest.mark.parametrize("engine", ["vmap", "autograd"])
Params = dict[str, Tensor]
Batch = dict[str, Tensor]


def make(seed: int, count: int, length: int = 2) -> tuple[Params, Batch]:
    """So few rows of so wide layers that products of factors are less work than those of all."""
    random = generator(seed)
    shapes = {"w": (8, 6), "v": (6, 2), "b": (6,), "e": (12, 8), "c": (6, 8, 2)}
    shapes |= {"s": (), "u": (2, 2)}
    params = {name: integers(random, *shape, bound=2) for name, shape in shapes.items()}
    batch = {
        "x": integers(random, count, length, 8, bound=2),
        "i": torch.randint(0, 12, (count, length), generator=random),
    }
    return params, batch


def row(p: Params, s: Batch) -> Tensor:  # a row alone, through a linear layer and a product
    return F.linear(torch.relu(s["x"][0] @ p["w"] + p["b"]), p["v"].T)


def rows_of_one(p: Params, s: Batch) -> Tensor:
    return (torch.relu(s["x"] @ p["w"] + p["b"]) @ p["v"]).sum(0)


def words(p: Params, s: Batch) -> Tensor:
    return (F.embedding(s["i"], p["e"]) @ p["w"]).sum(0) * p["s"]


def tied(p: Params, s: Batch) -> Tensor:
    return (p["e"][s["i"]] @ p["e"].T)[0]


def filters(p: Params, s: Batch) -> Tensor:
    return torch.relu(F.conv1d(s["x"].mT, p["c"], p["b"])).sum(1)


def from_the_left(p: Params, s: Batch) -> Tensor:
    return (p["v"].T @ torch.relu(p["w"].T @ s["x"].mT)).sum(1)


def twice(p: Params, s: Batch) -> Tensor:
    return (torch.relu(s["x"] @ p["w"]) @ p["w"].T)[0] + p["w"].sum()


def beside_layers(p: Params, s: Batch) -> Tensor:
    return (s["x"].sum(0) * p["b"].sum() * p["s"])[:2] * p["u"]


def matrix(p: Params, s: Batch) -> Tensor:
    return torch.relu(s["x"] @ p["w"])[:2]


def number(p: Params, s: Batch) -> Tensor:
    return torch.relu(s["x"] @ p["w"]).sum()


def none(p: Params, s: Batch) -> Tensor:
    return number(p, s)[None][:0]


def constant(p: Params, s: Batch) -> Tensor:
    return s["x"][0]


def by_vmap_alone(p: Params, s: Batch) -> Tensor:  # its leaf cannot be followed
    return vmap(lambda w: (s["x"] @ w).sum())(p["w"].T)


FUNCTIONS = (row, rows_of_one, words, tied, filters, from_the_left, twice, beside_layers, matrix)
FUNCTIONS += (number, none, constant, by_vmap_alone)
functions = pytest.mark.parametrize("func", FUNCTIONS, ids=lambda f: f.__name__)


def expected(func: Any, params: Any, batch: Any, other: Any) -> Tensor:
    """Of Jacobians that are written out."""

    def jacobian(batch: Any) -> tuple[torch.Size, Tensor]:
        count = len(tree_leaves(batch)[0])
        samples = [tree_map(lambda x, i=i: x[i], batch) for i in range(count)]
        numbers = func(params, samples[0]).shape
        each = [tree_leaves(jacrev(func)(params, s)) for s in samples]
        pairs = zip(zip(*each, strict=True), tree_leaves(params), strict=True)
        shape = count, numbers.numel()
        flat = [torch.stack(xs).reshape(*shape, leaf.numel()) for xs, leaf in pairs]
        return numbers, torch.cat(flat, -1)

    (numbers, j), (others, k) = jacobian(batch), jacobian(other)
    size = torch.einsum("naf,mbf->nmab", j.abs().double(), k.abs().double())
    assert size.numel() == 0 or size.max() < 2**24
    found = torch.einsum("naf,mbf->nmab", j, k)
    return found.reshape(*found.shape[:2], *numbers, *others)


@functions
@engines
@examples(1 / 6)
@example(0, 3, 5, 2)  # a line of blocks of which the last one is short
@given(seeds(), rows, rows, chunks)
def test_products_are_those_of_jacobians_written_out(
    func: Any, engine: Any, seed: int, n: int, m: int, size: int | None
) -> None:
    (params, batch), (_, other) = make(seed, n), make(seed + 1, m)
    of = pa.gramian(func, chunk_size=size, engine=engine)
    got = assert_pure(of, params, batch, other=other)
    assert_trees_bitwise_equal(got, expected(func, params, batch, other))
    assert_trees_bitwise_equal(of(params, batch), expected(func, params, batch, batch))


FOLLOWED = [f for f in FUNCTIONS if f not in (by_vmap_alone, none, constant)]


@pytest.mark.parametrize("func", FOLLOWED, ids=lambda f: f.__name__)
def test_what_layers_see_is_enough(func: Any) -> None:
    """The function is not called again for gradients that are written out, whoever called it."""
    params, batch = make(0, 4)
    pa.per_sample_grad(func, reduce="sum")(params, batch)
    pa.gramian(func, chunk_size=2)(params, batch, other=make(1, 3, length=4)[1])
    assert not known_of(func).unseen


@engines
def test_numbers_that_stand_in_a_batch_are_its_own(engine: Any) -> None:
    params, batch = make(0, 4)

    def scaled(p: Params, s: Any) -> Tensor:
        return rows_of_one(p, s) * s["by"]

    of = pa.gramian(scaled, chunk_size=3, engine=engine)
    got = of(params, batch | {"by": 2.0}, other=batch | {"by": 3.0})
    assert_trees_bitwise_equal(got, 6 * expected(rows_of_one, params, batch, batch))
    with torch.inference_mode():  # a result of which a gradient may be asked later
        assert not of(params, batch | {"by": 2.0}).is_inference()


@engines
@pytest.mark.parametrize("size", [None, 2])
def test_arguments_are_those_of_the_function(engine: Any, size: int | None) -> None:
    """Several batches, of which one is a tree, in any place; keywords; batches of one row."""
    params, batch = make(3, 5)
    _, other = make(4, 3)
    more = {"chunk_size": size, "engine": engine}

    def func(i: Any, p: Any, x: Any, by: Any, scale: float = 1.0) -> Tensor:
        return rows_of_one({**p, "s": by}, {"x": x[0], "i": i["i"][0]}) * scale * by

    of = pa.gramian(func, (1, 3), batch_argnums=(2, 0), keep_batch_dim=True, **more)
    both = {"i": batch["i"]}, params, batch["x"], params["s"]
    got = of(*both, scale=2.0, other=(other["x"], {"i": other["i"]}))

    def same(p: Any, s: Any) -> Tensor:
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
def test_batches_may_be_of_other_shapes(engine: Any, seed: int, size: int | None) -> None:
    """Texts of other lengths, and as many numbers for each as it has words."""

    def each_word(p: Params, s: Batch) -> Tensor:
        return (F.embedding(s["i"], p["e"]) @ p["w"]).sum(-1)

    (params, batch), (_, other) = make(seed, 4), make(seed + 1, 3, length=5)
    got = pa.gramian(each_word, chunk_size=size, engine=engine)(params, batch, other=other)
    assert got.shape == (4, 3, 2, 5)
    assert_trees_bitwise_equal(got, expected(each_word, params, batch, other))


@engines
@examples(1 / 4)
@example(0, [2, 0, 1, 0], 3)
@given(seeds(), st.lists(st.integers(0, 2), min_size=1, max_size=6), chunks)
def test_a_sample_without_weight_has_no_gradient_though_it_is_nan(
    engine: Any, seed: int, mask: list[int], size: int | None
) -> None:
    params, batch = make(seed, len(mask))
    by = torch.tensor(mask).float()

    def masked(p: Params, s: Batch, by: Tensor) -> Any:
        return pa.Weighted(number(p, s) * by + number(p, s) * (0 / by), by)

    def plain(p: Params, s: Any) -> Tensor:
        return number(p, s["s"]) * s["by"]

    of = pa.gramian(masked, batch_argnums=(1, 2), chunk_size=size, engine=engine)
    want = expected(plain, params, {"s": batch, "by": by}, {"s": batch, "by": by})
    assert_trees_bitwise_equal(of(params, batch, by), want)
    assert_trees_bitwise_equal(of(params, batch, by, other=(batch, by)), want)


@engines
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.float64])
def test_products_are_wide(engine: Any, dtype: torch.dtype) -> None:
    """And those of complex gradients are real: of vectors of twice as many numbers."""
    x = torch.randint(-255, 256, (6, 70), generator=generator(0)).to(dtype)
    x = x + 1j * x.flip(0) if dtype.is_complex else x
    w = torch.zeros(70, dtype=dtype)

    def func(w: Tensor, x: Tensor) -> Tensor:
        out = torch.stack([w[:35] @ x[:35], w[35:] @ x[35:] * 2])
        return torch.view_as_real(out) if dtype.is_complex else out

    each = pa.per_sample_grad(func, engine="autograd")(w, x).flatten(1, -2)
    each = torch.view_as_real(each).flatten(2) if dtype.is_complex else each
    wide = torch.promote_types(dtype, torch.float32).to_real()
    want = torch.einsum("naf,mbf->nmab", each.to(wide), each.to(wide))
    got = pa.gramian(func, engine=engine, chunk_size=4)(w, x)
    assert_trees_bitwise_equal(got, want.view(got.shape))


def test_the_matrix_of_a_batch_with_itself_is_symmetric_to_the_bit() -> None:
    """On ordinary floats: what stands below the diagonal blocks is a mirror."""
    x = torch.randn(7, 2, 8, generator=generator(1))
    params = tree_map(lambda p: p + 0.1, make(1, 1)[0])
    got = pa.gramian(matrix, chunk_size=2)(params, {"x": x})
    assert_trees_bitwise_equal(got[0, 4], got[4, 0].permute(2, 3, 0, 1))


WIDTH, SAMPLES = 512, 32


def peak(of: Any, samples: int = SAMPLES, others: int = 0) -> int:
    random = generator(0)
    params = {"a": torch.randn(WIDTH, WIDTH, generator=random) / 9, "b": torch.zeros(WIDTH)}
    x, y = (torch.randn(n, WIDTH, generator=random) for n in (samples, others))

    def func(p: Params, x: Tensor) -> Tensor:
        return (torch.tanh(F.linear(x, p["a"], p["b"])) @ p["a"])[:3]  # two uses

    with counting() as live:
        of(func)(params, x, other=y if others else None)
    return live.peak


def test_no_jacobian_of_a_layer_is_ever_whole() -> None:
    """What is alive is in proportion to activations, and with chunks to those of two of them."""
    jacobian = SAMPLES * 3 * WIDTH**2 * 4
    assert peak(pa.gramian) < jacobian / 10
    assert peak(lambda f: pa.gramian(f, chunk_size=4)) < jacobian / 50
    # the control: Jacobians of two blocks that are written out
    assert peak(lambda f: pa.gramian(f, chunk_size=4, engine="autograd")) > jacobian / 4


@engines
@pytest.mark.parametrize("others", [0, 12])
def test_what_is_kept_is_the_matrix_and_two_blocks(engine: Any, others: int) -> None:
    def kernel(func: Any) -> Any:
        return pa.gramian(func, chunk_size=4, engine=engine)

    two = peak(kernel, 4, 4)
    matrix = 9 * 4 * SAMPLES * (others or SAMPLES)
    assert peak(kernel, SAMPLES, others) <= 1.1 * two + matrix


def test_many_numbers_of_a_narrow_layer_take_less_than_their_jacobians() -> None:
    """Seen at many positions: nothing is alive for each pair of positions and pair of numbers."""
    random = generator(0)
    p = {"w": torch.randn(256, 8, generator=random) / 16}
    x, out = torch.randn(6, 20, 256, generator=random), torch.randn(160, 50, generator=random)

    def func(p: Params, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"]).flatten() @ out

    def jacobians() -> Tensor:
        each = vmap(jacrev(func), (None, 0))(p, x)["w"].flatten(2)
        return torch.einsum("naf,mbf->nmab", each, each)

    peaks = []
    for way in (lambda: pa.gramian(func)(p, x), jacobians):
        with counting() as live:
            way()
        peaks.append(live.peak)
    assert peaks[0] < peaks[1] / 2


def test_blocks_are_computed_once_where_one_is_at_hand() -> None:
    """To and fro through the columns: the block that ends a line serves the next one."""
    params, batch = make(0, 6)
    calls: list[int] = []

    def func(p: Params, s: Batch) -> Tensor:
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


@pytest.mark.parametrize("several", ["none", "right", "both"])
def test_pairs_that_cancel_leave_what_is_left(several: str) -> None:
    """4097² - 4096 · 4098 is 1, and 0 or 2 in float32, where 4097² is no number."""
    a, d = torch.zeros(2, 1, 2, 8)
    a[0, :, 0], d[0, :, 0] = torch.tensor([4097.0, -4096.0]), torch.tensor([4097.0, 4098.0])
    ones = torch.zeros(1, 1, 8).index_fill(2, torch.tensor(0), 1.0)
    numbers = {"none": (), "right": (1,), "both": (1, 1)}[several]

    def outer(a: Tensor, d: Tensor) -> Outer:
        a, d = (a[None] if len(numbers) > 1 else a), (d[None] if numbers else d)
        return Outer(a, d, torch.Size((8, 8)))

    assert_trees_bitwise_equal(inner_products(outer(a, d), outer(ones, ones)), torch.ones(1, 1))
