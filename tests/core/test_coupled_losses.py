"""Losses whose samples are coupled: the full batch's gradient, where plain accumulation is far off.

In float64 two graphs of one loss differ by some hundred roundings. 1e-10 of the gradient's norm
leaves six digits for those, and is a millionth of what plain accumulation misses.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, target
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import pureaccum as pa
from pureaccum.testing.strategies import compositions, seeds
from tests.core.coupled import FAMILIES, ROWS, batch_of, params_of, pieces, towers, whole
from tests.draws import examples
from tests.problems import leaf, once


pytestmark = [pytest.mark.bounds, pytest.mark.promise("coupled")]
BOUND = 1e-10
MISSED = 1e-4  # at least, by what is no bound but a wrong gradient
families = pytest.mark.parametrize("name", FAMILIES)


def norm(tree):
    return torch.stack([x.double().norm() for x in tree.values()]).norm()


def off(got, want):
    """Against the norm of all of it: some leaves, such as a bias below a batch norm, are zero."""
    assert got.keys() == want.keys()
    return float(norm({k: got[k] - want[k] for k in want}) / norm(want))


def by_backward(loss):
    def run(params, batch):
        leaves = {k: leaf(x) for k, x in params.items()}
        value = loss(leaves, batch)
        value.backward()
        grads = {k: torch.zeros_like(x) if x.grad is None else x.grad for k, x in leaves.items()}
        return grads, value.detach()

    return run


def by_step(loss):
    """A step of the length 1 of plain descent, from which the gradient is read."""

    def run(params, batch):
        step = pa.make_step(loss, pa.sgd(1.0))
        new, info = once(step, params, batch)
        return {k: x - new.params[k] for k, x in params.items()}, info.loss

    return run


WAYS = {
    "func": pa.grad_and_value,
    "autograd": partial(pa.grad_and_value, engine="autograd"),
    "torch.func": torch.func.grad_and_value,
    "backward": by_backward,
    "step": by_step,
}


@families
@examples(1 / 2)
@given(st.data(), seeds(), st.sampled_from(list(WAYS)))
def test_any_cut_is_the_full_batch(name, data, seed, way):
    loss, params, batch = FAMILIES[name], params_of(seed), batch_of(seed)
    want, want_value = torch.func.grad_and_value(loss)(params, batch)
    cut = pieces(data.draw(st.integers(1, ROWS) | compositions(ROWS)))
    grads, value = WAYS[way](partial(loss, cut=cut))(params, batch)
    alone = pa.value(partial(loss, cut=cut))(params, batch)
    target(error := off(grads, want))
    assert error <= BOUND
    for got in (value, alone):
        assert (got - want_value).abs() <= BOUND * want_value.abs().clamp(min=1.0)


@families
def test_plain_accumulation_is_far_off(name):
    """The control: the same function, its samples taken for uncoupled."""
    loss, params, batch = FAMILIES[name], params_of(0), batch_of(0)
    want = torch.func.grad(loss)(params, batch)
    asked = pa.grad(loss, microbatch_size=4)
    with pytest.raises(pa.CoupledLossError):  # parts of the first microbatch of experts do add up
        [asked(params, batch) for _ in range(2)]
    plain = pa.grad(loss, microbatch_size=4, check=False)(params, batch)
    assert off(plain, want) > MISSED > 1e5 * BOUND
    used = {k for k, x in want.items() if x.norm() > 0}
    got = pa.grad(partial(loss, cut=pieces(5)))(params, batch)
    assert len(used) >= 2
    assert used == {k for k, x in got.items() if x.norm() > 0}


def test_a_contrastive_loss_of_two_towers_is_the_full_batch_s():
    """InfoNCE over 1,024 pairs, in microbatches of 32."""

    def one_way(params, batch, cut=whole):
        a, b = cut(towers)(params, batch)
        logits = params["temperature"].exp() * a @ b.T
        return cross_entropy(logits, torch.arange(len(logits)))

    params, batch = params_of(0), batch_of(0, rows=1024)
    want, want_value = torch.func.grad_and_value(one_way)(params, batch)
    grads, value = pa.grad_and_value(partial(one_way, cut=pieces(32)))(params, batch)
    assert off(grads, want) <= BOUND
    assert (value - want_value).abs() <= BOUND
    other, easier = pa.grad_and_value(one_way, microbatch_size=32, check=False)(params, batch)
    assert easier < value - 1  # among 32 the right one is found more easily
    assert off(other, want) > MISSED


@families
def test_in_float32_it_is_as_near_the_truth_as_the_full_batch(name):
    """Roundings of the same kind, as many of them: at most a few times its own error."""
    loss, errors = FAMILIES[name], {"ours": 0.0, "full": 0.0}
    for seed in range(5):
        params, batch = params_of(seed, torch.float32), batch_of(seed, dtype=torch.float32)
        wide = {k: x.double() for k, x in params.items()}
        batch64 = {k: x.double() if x.is_floating_point() else x for k, x in batch.items()}
        truth = torch.func.grad(loss)(wide, batch64)
        ours = pa.grad(partial(loss, cut=pieces(5)))(params, batch)
        assert {x.dtype for x in ours.values()} == {torch.float32}
        errors["ours"] += off(ours, truth) ** 2
        errors["full"] += off(torch.func.grad(loss)(params, batch), truth) ** 2
    assert errors["ours"] <= 3**2 * errors["full"]
