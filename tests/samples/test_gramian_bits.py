"""Inner products of samples' gradients are those of their Jacobians, however rows are cut."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

import pureaccum as pa
from pureaccum._core.auto_size import counting
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.refusals import saying


pytestmark = pytest.mark.exact
ROOT_OF_UNIT = 2.0**-26.5
Tree = dict[str, Any]


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator(seed)).to(dtype)


def make_params(seed: int = 0) -> Tree:
    return {
        "w": whole(3, 4, seed=seed),
        "b": whole(4, seed=seed + 1),
        "words": whole(7, 3, seed=seed + 2),
        "out": whole(2, 4, seed=seed + 3),
        "s": whole(seed=seed + 4),
        "unused": whole(5, seed=seed + 5),
    }


def make_batch(rows: int, seed: int = 0) -> Tree:
    words = torch.randint(0, 7, (rows, 2), generator=generator(seed))
    return {"x": whole(rows, 2, 3, seed=seed + 9), "words": words, "k": 2}


def hidden(params: Tree, row: Tree) -> Tensor:
    return (row["x"] + F.embedding(row["words"], params["words"])) @ params["w"] + params["b"]


def of_numbers(params: Tree, row: Tree) -> Tensor:
    return F.linear(hidden(params, row), params["out"]).sum(0) * params["s"] + row["k"]


def of_one(params: Tree, row: Tree) -> Tensor:
    return (hidden(params, row) * params["b"]).sum() * params["s"]  # the bias is used twice


def of_matrix(params: Tree, row: Tree) -> Tensor:
    return F.linear(hidden(params, row), params["out"])  # two times two numbers


def unseen(params: Tree, row: Tree) -> Tensor:
    """By a use of a leaf that has to be written out: a matrix of which a function is taken."""
    return (hidden(params, row) @ params["out"].abs().T).sum(0)


FUNCTIONS = [of_numbers, of_one, of_matrix, unseen]


def by_hand(func: Any, params: Tree, batch: Tree, other: Tree | None = None) -> Tensor:
    """From Jacobians that are written out, in float64."""
    dims = {"x": 0, "words": 0, "k": None}
    params = {n: p.double() for n, p in params.items()}

    def flat(batch: Tree) -> Tensor:
        batch = batch | {"x": batch["x"].double()}
        each = vmap(jacrev(func), (None, dims))(params, batch)
        rows = len(batch["x"])
        out = each["s"].shape[1:]
        return torch.cat([x.reshape(rows, *out, -1) for x in each.values()], -1)

    a, b = flat(batch), flat(batch if other is None else other)
    k, n = a.dim() - 2, a.dim() - 1
    found = torch.tensordot(a, b, ([n], [n]))  # (rows, *output, others, *output)
    return found.movedim(k + 1, 1)


@pytest.mark.parametrize("func", FUNCTIONS, ids=lambda f: f.__name__)
@examples(1 / 2)
@example(seed=1, rows=5, others=0, size=2)
@given(seeds(), st.integers(1, 5), st.integers(0, 4), st.one_of(st.none(), st.integers(1, 4)))
def test_any_blocks_have_the_bits_of_the_jacobians(
    func: Any, seed: int, rows: int, others: int, size: int | None
) -> None:
    """With another batch, and with itself; in float32, which whole numbers do not round."""
    seed %= 2**20
    params, batch = make_params(seed), make_batch(rows, seed)
    other = make_batch(others, seed + 50) if others else None
    came = pa.gramian(func, chunk_size=size)(params, batch, other=other)
    assert came.dtype == torch.float32
    assert torch.equal(came.double(), by_hand(func, params, batch, other))
    wide = {n: p.double() for n, p in params.items()}
    batch = batch | {"x": batch["x"].double()}
    assert pa.gramian(func)(wide, batch).dtype == torch.float64


def test_transforms_around_it() -> None:
    """The plain way; and what it depends on is differentiated."""
    params, batch = make_params(), make_batch(4)
    members = pa.stack([params, make_params(30)])
    for func in (of_numbers, of_one):
        kernel = pa.gramian(func, chunk_size=3)
        at_once = vmap(lambda p, kernel=kernel: kernel(p, batch))(members)
        for came, one in zip(at_once, pa.unstack(members), strict=True):
            assert torch.equal(came, kernel(one, batch))

    def number(s: Tensor, kernel: Any) -> Tensor:
        return kernel(params | {"s": s}, batch).sum()

    s = torch.tensor(2.0)
    derivative = grad(partial(number, kernel=pa.gramian(of_one, chunk_size=3)))(s)
    want = grad(lambda s: by_hand(of_one, params | {"s": s}, batch).sum().float())(s)
    assert torch.equal(derivative, want)


def test_batches_of_several_arguments_and_a_shared_one() -> None:
    def func(w: Tensor, x: Tensor, scale: Tensor, y: Tensor) -> Tensor:
        return (w * x * scale).sum() * y[0]

    w, scale = whole(3, seed=1), torch.tensor(2.0)
    x, y, other = (
        whole(4, 3, seed=2),
        whole(4, 1, seed=3),
        (whole(2, 3, seed=4), whole(2, 1, seed=5)),
    )
    kernel = pa.gramian(func, batch_argnums=(1, 3), chunk_size=3)
    came = kernel(w, x, scale, y, other=other)
    assert torch.equal(came, (x * scale * y) @ (other[0] * scale * other[1]).T)
    batched = pa.gramian(
        lambda w, x, scale, y: func(w, x[0], scale, y[0]), batch_argnums=(1, 3), keep_batch_dim=True
    )
    assert torch.equal(batched(w, x, scale, y, other=other), came)


def test_a_network_and_its_memory() -> None:
    """A convnet in float64; and in blocks, no more than a part of what the Jacobians take."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.Softplus(), nn.Conv2d(4, 3, 3), nn.Flatten(0), nn.Linear(192, 5)
    net = nn.Sequential(*layers).double()
    params = {n: p.detach() for n, p in net.named_parameters()}
    x = torch.randn(12, 2, 12, 12).double()

    def func(params: Tree, x: Tensor) -> Tensor:
        return functional_call(net, params, (x,))

    def jacobians() -> Tensor:
        each = vmap(jacrev(func), (None, 0))(params, x)
        flat = torch.cat([j.flatten(2) for j in each.values()], 2)
        return torch.einsum("naf,mbf->nmab", flat, flat)

    kernel = pa.gramian(func, chunk_size=2)
    came, want = kernel(params, x), jacobians()
    assert (came - want).norm() <= ROOT_OF_UNIT * want.norm()
    with counting() as live:
        kernel(params, x)
    with counting() as whole_live:
        jacobians()
    assert live.peak < whole_live.peak / 3


def test_it_is_pure_and_says_what_is_wrong() -> None:
    params, batch = make_params(), make_batch(3)
    assert_pure(pa.gramian(of_numbers, chunk_size=2), params, batch)
    none = make_batch(0)
    assert pa.gramian(of_one)(params, none, other=batch).shape == (0, 3)
    with unchanged((params, batch)):
        with saying(TypeError, "the loss is a tuple", "torch.stack"):
            pa.gramian(lambda p, row: (of_one(p, row),))(params, batch)
        with saying(ValueError, "other has the structure"):
            pa.gramian(of_one)(params, batch, other=batch["x"])
        with saying(ValueError, "other is a dict", "a tuple of 1"):
            pa.gramian(of_one, batch_argnums=(1,))(params, batch, other=batch)
        with saying(ValueError, "chunk_size is 0"):
            pa.gramian(of_one, chunk_size=0)
        with pytest.raises(KeyError, match="mine"):
            pa.gramian(lambda p, row: row["mine"])(params, batch)
    assert_trees_bitwise_equal(batch["x"], make_batch(3)["x"])
