"""What is refused of functions of several numbers says what helps; nothing else is."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal
from tests.refusals import PARAMS, Loss, Old, make_batch, refused


pytestmark = pytest.mark.faults
ENGINES = pytest.mark.parametrize("engine", ["vmap", "autograd"])
BATCH = make_batch(5)


def out(p: Any, row: Any) -> Tensor:
    return (row["x"] * p["w"] + p["b"]) ** 2


REFUSED: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "whole numbers": (lambda p, row: out(p, row).long(), TypeError, ("int64", "no gradient")),
    "complex": (lambda p, row: out(p, row) * 1j, TypeError, ("complex64", "torch.view_as_real")),
    "two": (lambda p, row: (out(p, row),) * 2, TypeError, ("tuple of 2", "torch.stack", "has_aux")),
    "a dict": (lambda p, row: {"a": out(p, row)}, TypeError, ("a dict", "floating-point tensor")),
    "nothing": (lambda p, row: None, TypeError, ("is None", "return statement")),
    "Weighted": (
        lambda p, row: pa.Weighted(out(p, row), 1.0),
        ValueError,
        ("total of Weighted has shape (2,)", "one number and its weight", "plain tensor"),
    ),
}


@ENGINES
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_jacobian_is_named(name: str, engine: Any) -> None:
    func, error, words = REFUSED[name]
    with refused(error, *words, given=(PARAMS, BATCH)):
        pa.per_sample_grad(func, engine=engine)(PARAMS, BATCH)


@ENGINES
def test_a_stream_takes_one_number_a_sample(engine: Any) -> None:
    acc = pa.per_sample_accumulator(out, engine=engine)
    state = acc.init(PARAMS)
    with refused(ValueError, "the loss has shape (2,)", "0-d", given=(state, PARAMS, BATCH)):
        acc.update(state, PARAMS, BATCH)
    with refused(ValueError, "the loss has shape (2,)", "0-d"):
        pa.grad(out)(PARAMS, {"x": BATCH["x"][0]})


def test_a_transform_to_nothing_is_refused_where_it_would_be_reduced() -> None:
    with refused(ValueError, "no leaves", "nothing to reduce"):
        pa.per_sample_grad(out, reduce="sum", transform=lambda jacobian: ())(PARAMS, BATCH)


@ENGINES
def test_a_batch_without_rows_is_taken_for_one_of_single_numbers(engine: Any) -> None:
    called = Loss(out)
    got = pa.per_sample_grad(called, engine=engine)(PARAMS, make_batch(0))
    assert {k: x.shape for k, x in got.items()} == {k: (0, *p.shape) for k, p in PARAMS.items()}
    sums = pa.per_sample_grad(called, engine=engine, reduce="sum")(PARAMS, make_batch(0))
    assert_trees_bitwise_equal(sums, {k: torch.zeros_like(p) for k, p in PARAMS.items()})
    assert called.calls == 0


BY_AUTOGRAD = {
    "old Function": lambda p, row: out({k: Old.apply(x) for k, x in p.items()}, row),
    "checkpoint": lambda p, row: checkpoint(out, p, row, use_reentrant=False),
    "item": lambda p, row: out(p, row) * row["x"].sum().item(),
    "selection": lambda p, row: out(p, row)[row["x"] > -1],
}


@pytest.mark.parametrize("name", BY_AUTOGRAD)
def test_what_vmap_refuses_runs_output_by_output(name: str) -> None:
    func = BY_AUTOGRAD[name]
    with refused(RuntimeError, "engine='autograd'", "torch said", given=(PARAMS, BATCH)):
        pa.per_sample_grad(func)(PARAMS, BATCH)
    got = assert_pure(pa.per_sample_grad(func, chunk_size=3, engine="autograd"), PARAMS, BATCH)
    leaves = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    for i, x in enumerate(BATCH["x"]):
        for j in range(2):
            want = torch.autograd.grad(func(leaves, {"x": x})[j], list(leaves.values()))
            its = [got[k][i, j] for k in leaves]
            assert_trees_bitwise_equal(its, list(want))
