"""What has no Gramian says why, before any work; what cannot be followed has one all the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal
from tests.refusals import PARAMS, Loss, Old, make_batch, refused, saying


pytestmark = pytest.mark.faults
ENGINES = pytest.mark.parametrize("engine", ["vmap", "autograd"])
BATCH, OTHER = make_batch(5), make_batch(3)


def out(p: Any, row: Any) -> Tensor:
    return (row["x"] * p["w"] + p["b"]) ** 2


def written_out(func: Any) -> Tensor:
    def rows(batch: Any) -> Tensor:
        jacobians = pa.per_sample_grad(func, engine="autograd")(PARAMS, batch)
        return torch.cat([x.view(len(x), 2, -1) for x in jacobians.values()], -1)

    return torch.einsum("naf,mbf->nmab", rows(BATCH), rows(OTHER))


REFUSED: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "whole numbers": (lambda p, row: out(p, row).long(), TypeError, ("int64", "no gradient")),
    "complex": (lambda p, row: out(p, row) * 1j, TypeError, ("complex64", "torch.view_as_real")),
    "two": (lambda p, row: (out(p, row),) * 2, TypeError, ("tuple of 2", "torch.stack")),
    "Weighted": (lambda p, row: pa.Weighted(out(p, row), 1.0), ValueError, ("plain tensor",)),
}


@ENGINES
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_gradients_is_named(name: str, engine: Any) -> None:
    func, error, words = REFUSED[name]
    with refused(error, *words, given=(PARAMS, BATCH)):
        pa.gramian(func, engine=engine)(PARAMS, BATCH, other=OTHER)


ARGUMENTS: dict[str, tuple[dict[str, Any], Any, type[Exception], tuple[str, ...]]] = {
    "chunk_size": ({"chunk_size": 0}, OTHER, ValueError, ("chunk_size is 0",)),
    "engine": ({"engine": "func"}, OTHER, ValueError, ("engine is 'func'", "'vmap'")),
    "overlap": ({"batch_argnums": 0}, OTHER, ValueError, ("argument 0", "batch_argnums")),
    "one for two": ({"batch_argnums": (1, 2)}, OTHER, ValueError, ("other is a dict", "tuple of")),
    "a number": ({}, 3, ValueError, ("other holds no tensor", "rows")),
    "a tensor": ({}, torch.ones(3, 2), ValueError, ("other has the structure", "same kind")),
    "no rows": ({}, {"x": torch.tensor(1.0)}, ValueError, ("other['x'] is a 0-d tensor", "row")),
    "rows": ({}, {"x": torch.ones(3, 2), "y": torch.ones(2)}, ValueError, ("other", "rows")),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_are_named_before_any_work(name: str) -> None:
    knobs, other, error, words = ARGUMENTS[name]
    called = Loss(lambda p, row, more=None: out(p, row))
    args = (PARAMS, BATCH, BATCH) if "tuple of" in words else (PARAMS, BATCH)
    with refused(error, *words, given=(PARAMS, BATCH), loss=called):
        pa.gramian(called, **knobs)(*args, other=other)


@ENGINES
def test_a_batch_without_rows_has_products_with_none(engine: Any) -> None:
    called, none = Loss(out), make_batch(0)
    of = pa.gramian(called, engine=engine)
    for batch, other, shape in ((none, OTHER, (0, 3)), (BATCH, none, (5, 0)), (none, None, (0, 0))):
        assert of(PARAMS, batch, other=other).shape == shape
    assert called.calls == 0


FOLLOWED_OTHERWISE = {
    "a transform of a leaf": lambda p, row: torch.func.vmap(torch.square)(p["w"]) * row["x"],
    "an old Function": lambda p, row: out({k: Old.apply(x) for k, x in p.items()}, row),
    "a checkpoint": lambda p, row: checkpoint(out, p, row, use_reentrant=False),
}


@pytest.mark.parametrize("name", FOLLOWED_OTHERWISE)
@pytest.mark.parametrize("size", [None, 2])
def test_what_cannot_be_followed_is_written_out(name: str, size: int | None) -> None:
    func = FOLLOWED_OTHERWISE[name]
    by_vmap, engines = pa.gramian(func, chunk_size=size), ["autograd"]
    if name == "a transform of a leaf":
        engines.append("vmap")
    else:
        with refused(RuntimeError, "engine='autograd'", "torch said", given=(PARAMS, BATCH)):
            by_vmap(PARAMS, BATCH, other=OTHER)
    for engine in engines:
        of: Any = pa.gramian(func, chunk_size=size, engine=engine)  # pyright: ignore
        assert_trees_bitwise_equal(assert_pure(of, PARAMS, BATCH, other=OTHER), written_out(func))


def test_random_numbers_come_from_keys() -> None:
    """A mask that is another one in each block belongs to no sample."""
    net = nn.Dropout(0.5)
    with refused(RuntimeError, "Dropout", "pa.dropout"):
        pa.gramian(lambda p, row: net(out(p, row)))(PARAMS, BATCH)
    keys = pa.split_key(pa.key(0), 5)

    def masked(p: Any, row: Any, key: Tensor) -> Tensor:
        return pa.dropout(out(p, row), 0.5, key)

    whole, cut = (
        pa.gramian(masked, batch_argnums=(1, 2), chunk_size=size)(PARAMS, BATCH, keys)
        for size in (None, 2)
    )
    assert_trees_bitwise_equal(cut, whole)


def test_a_write_to_what_is_captured_is_refused_and_not_done() -> None:
    seen = torch.zeros(2)
    with refused(RuntimeError, "writes to a tensor that is no argument", given=(seen, PARAMS)):
        pa.gramian(lambda p, row: out(p, row) + seen.add_(row["x"]))(PARAMS, BATCH)


def test_an_error_of_the_function_comes_out_as_it_is() -> None:
    with saying(KeyError, "missing"):
        pa.gramian(lambda p, row: p["missing"])(PARAMS, BATCH)
