"""What a check says of a zoo of losses: no false alarm, no miss, and of each bad one the cause."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import Report, check_accumulation
from tests.laws import (  # noqa: F401
    zoo_coupled,
    zoo_impure,
    zoo_insides,
    zoo_loops,
    zoo_losses,
    zoo_means,
    zoo_networks,
    zoo_research,
    zoo_wild_bad,
    zoo_wild_good,
)
from tests.laws.zoo import ROWS, ZOO, Animal


def residents(good: bool) -> list[Any]:
    """Every one in every dtype; under the profile ci every other one, in its first."""
    return [
        pytest.param(
            animal,
            dtype,
            id=f"{animal.name}-{str(dtype).removeprefix('torch.')}",
            marks=pytest.mark.slow if i % 2 or dtype != animal.dtypes[0] else (),
        )
        for i, animal in enumerate(it for it in ZOO if (not it.kind) == good)
        for dtype in animal.dtypes
    ]


@pytest.mark.parametrize(("animal", "dtype"), residents(good=True))
def test_a_good_loss_fits(animal: Animal, dtype: torch.dtype) -> None:
    report = examined(animal, dtype)
    assert report.fits, report
    assert not report.diagnoses
    assert max(leaf.error for leaf in report.leaves) <= 1
    assert not any(leaf.split for leaf in report.leaves)


@pytest.mark.parametrize(("animal", "dtype"), residents(good=False))
def test_of_a_bad_loss_the_cause_is_found(animal: Animal, dtype: torch.dtype) -> None:
    report = examined(animal, dtype)
    assert not report.fits
    first, *_ = report.diagnoses
    assert first.kind == animal.kind, report
    assert animal.says in first.says, report
    assert all(diagnosis.mend.strip() for diagnosis in report.diagnoses)


def examined(animal: Animal, dtype: torch.dtype) -> Report:
    """The report, once it is sure that to make it has changed nothing."""
    loss, params, batch, knobs = animal.make(dtype, seed=0)
    held = list(reachable((loss, params, batch)))
    before = [bits(x) for x in held], everybodys()
    report = check_accumulation(loss, params, batch, raise_on_mismatch=False, **knobs)
    after = [bits(x) for x in held], everybodys()
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert str(report).startswith("fits" if report.fits else "does not fit")
    if not animal.kind:
        fresh, *_ = animal.make(dtype, seed=0)
        for size in range(1, ROWS + 1):
            part = next(pa.microbatches(batch, size))
            torch.testing.assert_close(
                loss(params, part), fresh(params, part), rtol=0, atol=0, equal_nan=True
            )
    return report


def reachable(x: Any) -> Iterator[Any]:
    """What may change in a tree, and in what its functions hold."""
    for leaf in optree.tree_leaves(x):
        if isinstance(leaf, (Tensor, nn.Module, torch.Generator)):
            yield leaf
        elif callable(leaf):
            cells = getattr(leaf, "__closure__", None) or ()
            yield from reachable([cell.cell_contents for cell in cells])
            yield from reachable(getattr(leaf, "__self__", None))


def bits(x: Any) -> list[Tensor]:
    if isinstance(x, torch.Generator):
        return [x.get_state()]
    tensors = [*x.parameters(), *x.buffers()] if isinstance(x, nn.Module) else [x]
    return [y.detach().clone() for x in tensors for y in (x, x.grad) if y is not None]


def everybodys() -> list[Tensor]:
    """The states of the generators that all share."""
    _, python, _ = random.getstate()
    _, words, *_ = np.random.get_state()
    return [torch.get_rng_state(), torch.tensor(python), torch.from_numpy(words).clone()]
