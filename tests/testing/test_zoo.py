"""What a check says of a zoo of losses: no false alarm, no miss, and each cause is named."""

import random
from contextlib import nullcontext

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.curvature.passes import WrongProductError
from pureaccum.testing import check_accumulation
from tests.zoo.residents import residents
from tests.zoo.species import ROWS, ZOO


pytestmark = [pytest.mark.slow, pytest.mark.laws, pytest.mark.promise("check")]


@pytest.mark.parametrize(("species", "dtype"), residents(lambda it: not it.kind))
def test_a_loss_that_fits_is_said_to_fit(species, dtype):
    report = examined(species, dtype)
    assert report.fits, report
    assert not report.diagnoses
    assert max(leaf.error for leaf in report.leaves) <= 1
    assert not any(leaf.split for leaf in report.leaves)


@pytest.mark.parametrize(("species", "dtype"), residents(lambda it: bool(it.kind)))
def test_of_a_loss_that_fails_the_cause_is_found(species, dtype):
    report = examined(species, dtype)
    assert not report.fits
    first, *_ = report.diagnoses
    assert first.kind == species.kind, report
    assert species.says in first.says, report
    assert all(diagnosis.mend.strip() for diagnosis in report.diagnoses)


# Derivatives are compared in float64, whatever the dtype was: each species in one of its dtypes.
IN_TURN = [
    param
    for param in residents(lambda it: not it.kind)
    for species, dtype in [param.values]
    if dtype == species.dtypes[ZOO.index(species) % len(species.dtypes)]
]


@pytest.mark.parametrize(("species", "dtype"), IN_TURN)
def test_no_derivative_of_a_loss_that_fits_is_said_to_be_wrong(species, dtype):
    """By differences, but of weight_norm, whose second derivative is wrong in torch itself."""
    loss, params, batch, options = species.make(dtype, seed=0)
    report = check_accumulation(
        loss,
        params,
        batch,
        finite_differences=True,
        raise_on_mismatch=False,
        **options | {"splits": 1},
    )
    is_wrong = species.name == "weight_norm"
    assert report.fits == (not is_wrong), report
    v = optree.tree_map(torch.ones_like, params)

    def total(params, batch):
        out = loss(params, batch)
        out = out[0] if options.get("has_aux") else out
        return out.total if isinstance(out, pa.Weighted) else out

    def row(params, batch):
        return total(params, batch).reshape(1)

    for make, *funcs in (
        (pa.curvature.hvp, total),
        (pa.curvature.ggnvp, row, lambda out, batch: (out.sum() - 1) ** 2),
        (pa.curvature.fisher_vp, row),
    ):
        try:
            make(*funcs, check=False)(params, batch, v)
        except RuntimeError:  # torch has no second derivative of it, and says so
            continue
        with (
            pytest.raises(WrongProductError)
            if is_wrong and make is pa.curvature.hvp
            else nullcontext()
        ):
            make(*funcs)(params, batch, v)


def examined(species, dtype):
    """The report, once it is sure that to make it has changed nothing."""
    loss, params, batch, options = species.make(dtype, seed=0)
    held = list(reachable((loss, params, batch)))
    before = [bits(x) for x in held], everybodys()
    report = check_accumulation(loss, params, batch, raise_on_mismatch=False, **options)
    after = [bits(x) for x in held], everybodys()
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
    assert str(report).startswith("fits" if report.fits else "does not fit")
    if not species.kind:
        fresh, *_ = species.make(dtype, seed=0)
        for size in range(1, ROWS + 1):
            part = next(pa.microbatches(batch, size))
            torch.testing.assert_close(
                loss(params, part), fresh(params, part), rtol=0, atol=0, equal_nan=True
            )
    return report


def reachable(x):
    """What may change in a tree, and in what its functions hold."""
    for leaf in optree.tree_leaves(x):
        if isinstance(leaf, (Tensor, nn.Module, torch.Generator)):
            yield leaf
        elif callable(leaf):
            cells = getattr(leaf, "__closure__", None) or ()
            yield from reachable([cell.cell_contents for cell in cells])
            yield from reachable(getattr(leaf, "__self__", None))


def bits(x):
    if isinstance(x, torch.Generator):
        return [x.get_state()]
    tensors = [*x.parameters(), *x.buffers()] if isinstance(x, nn.Module) else [x]
    return [y.detach().clone() for x in tensors for y in (x, x.grad) if y is not None]


def everybodys():
    """The states of the generators that all share."""
    _, python, _ = random.getstate()
    _, words, *_ = np.random.get_state()
    return [torch.get_rng_state(), torch.tensor(python), torch.from_numpy(words).clone()]
