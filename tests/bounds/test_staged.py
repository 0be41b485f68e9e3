"""Losses of practice in stages: the full batch's gradient, where plain accumulation is far off.

In float64 two graphs of one loss differ by some hundred roundings. 1e-10 of the gradient's norm
leaves six digits for those, and is a millionth of what plain accumulation misses.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing.strategies import compositions, seeds
from tests.bounds.staged_losses import FAMILIES, ROWS, batch_of, info_nce, params_of, towers
from tests.strategies import every


BOUND = 1e-10
MISSED = 1e-4  # at least, by what is no bound but a wrong gradient
families = pytest.mark.parametrize("name", FAMILIES)


def norm(tree: dict[str, Tensor]) -> Tensor:
    return torch.stack([x.double().norm() for x in tree.values()]).norm()


def off(got: Any, want: Any) -> float:
    """Against the norm of all of it: some leaves, such as a bias below a batch norm, are zero."""
    assert got.keys() == want.keys()
    return float(norm({k: got[k] - want[k] for k in want}) / norm(want))


@families
@every(2)
@given(st.data(), seeds(), st.sampled_from(["func", "autograd"]))
def test_any_cut_is_the_full_batch(name: str, data: st.DataObject, seed: int, engine: Any) -> None:
    family, params, batch = FAMILIES[name], params_of(seed), batch_of(seed)
    want, want_value = torch.func.grad_and_value(family.whole)(params, batch)
    size = data.draw(st.integers(1, ROWS) | compositions(ROWS))
    run = pa.grad_and_value(family.loss(), microbatch_size=size, engine=engine)
    grads, value = run(params, batch)
    alone = pa.value(family.loss(), microbatch_size=size)(params, batch)
    target(error := off(grads, want))
    assert error <= BOUND
    for got in (value, alone):
        assert (got - want_value).abs() <= BOUND * want_value.abs().clamp(min=1.0)


@families
def test_plain_accumulation_is_far_off(name: str) -> None:
    """The control: the same function, its rows taken for uncoupled."""
    params, batch = params_of(0), batch_of(0)
    want = torch.func.grad(FAMILIES[name].whole)(params, batch)
    plain = pa.grad(FAMILIES[name].whole, microbatch_size=4)(params, batch)
    assert off(plain, want) > MISSED > 1e5 * BOUND
    assert off(pa.grad(FAMILIES[name].whole, microbatch_size=ROWS)(params, batch), want) == 0


@families
def test_all_parameters_of_a_loss_have_a_gradient(name: str) -> None:
    """What the full batch says is no zero, so that the comparisons above say something."""
    params, batch = params_of(0), batch_of(0)
    got = pa.grad(FAMILIES[name].loss(), microbatch_size=5)(params, batch)
    want = torch.func.grad(FAMILIES[name].whole)(params, batch)
    used = {k for k, x in want.items() if x.norm() > 0}
    assert len(used) >= 2
    assert used == {k for k, x in got.items() if x.norm() > 0}


def test_the_case_that_grad_cache_was_written_for() -> None:
    """InfoNCE over 4,096 pairs, in microbatches of 32."""

    def one_way(params: Any, pair: Any) -> Tensor:
        logits = params["temperature"].exp() * pair[0] @ pair[1].T
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))

    params, batch = params_of(0), batch_of(0, rows=4096)
    want, want_value = torch.func.grad_and_value(lambda p: one_way(p, towers(p, batch)))(params)
    loss = pa.staged([pa.rowwise(towers), pa.full(one_way)])
    grads, value = pa.grad_and_value(loss, microbatch_size=32)(params, batch)
    assert off(grads, want) <= BOUND
    assert (value - want_value).abs() <= BOUND
    plain = pa.grad_and_value(lambda p, b: one_way(p, towers(p, b)), microbatch_size=32)
    other, easier = plain(params, batch)
    assert easier < value - 1  # among 32 the right one is found more easily
    assert off(other, want) > MISSED


def test_in_float32_it_is_as_near_the_truth_as_the_full_batch() -> None:
    """Roundings of the same kind, as many of them: at most a few times its own error."""
    for name, family in FAMILIES.items():
        errors = {"ours": 0.0, "full": 0.0}
        for seed in range(5):
            params, batch = params_of(seed, torch.float32), batch_of(seed, dtype=torch.float32)
            wide = {k: x.double() for k, x in params.items()}
            batch64 = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
            truth = torch.func.grad(family.whole)(wide, batch64)
            full = torch.func.grad(family.whole)(params, batch)
            ours = pa.grad(family.loss(), microbatch_size=5)(params, batch)
            assert {x.dtype for x in ours.values()} == {torch.float32}
            errors["ours"] += off(ours, truth) ** 2
            errors["full"] += off(full, truth) ** 2
        assert errors["ours"] <= 3**2 * errors["full"], name


def test_a_contrastive_loss_may_be_split_in_the_middle() -> None:
    """``full`` hands the logits of each row on, and the last stage is a mean over rows."""

    def logits(params: Any, pair: Any) -> Any:
        a, b = pair
        both = params["temperature"].exp() * a @ b.T
        return both, both.T, torch.arange(len(a))

    def rows(params: Any, x: Any) -> Tensor:
        one, other, right = x
        losses = torch.nn.functional.cross_entropy
        return (losses(one, right) + losses(other, right)) / 2

    loss = pa.staged([pa.rowwise(towers), pa.full(logits), pa.rowwise(rows)])
    params, batch = params_of(1), batch_of(1)
    want = torch.func.grad(lambda p: info_nce(p, towers(p, batch)))(params)
    for size in (1, 5, [3, 9]):
        assert off(pa.grad(loss, microbatch_size=size)(params, batch), want) <= BOUND
