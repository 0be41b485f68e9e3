"""Targets that are not cut broadcast against one sample, which is no error of torch's: we raise."""

import pytest
import torch

import pureaccum as pa
from tests.refusals import refused


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
FN = pa.functional(torch.nn.Linear(3, 1))
X, Y = torch.randn(6, 3), torch.randn(6, 1)
SENTENCE = (
    "the loss accepts a microbatch of one sample, but not two samples: argument 2 has 6 samples",
    "check=False skips this check",
)


def loss(params, x, y):
    return ((FN.apply(params, (), x)[0] - y) ** 2).mean()


def by_step(size, **options):
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, **options)
    return step(step.init(FN.params), X, Y)


FORMS = {
    "grad": lambda size, **options: pa.grad(loss, microbatch_size=size, **options)(FN.params, X, Y),
    "value": lambda size, **options: pa.value(loss, microbatch_size=size, **options)(
        FN.params, X, Y
    ),
    "step": by_step,
}


@pytest.mark.parametrize("form", FORMS)
def test_microbatches_of_one_sample_beside_all_targets_are_refused(form):
    with refused(ValueError, *SENTENCE):
        FORMS[form](1)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_not_refused_without_the_check(form):
    FORMS[form](1, check=False)


def test_targets_that_are_cut_are_taken():
    both = {"batch_argnums": (1, 2)}
    ours = pa.grad(loss, microbatch_size=1, **both)(FN.params, X, Y)
    whole = torch.func.grad(loss)(FN.params, X, Y)
    assert pa.global_norm({n: ours[n] - g for n, g in whole.items()}) < 2**-12


def test_a_loss_of_one_sample_beside_other_tensors_is_taken():
    """A bank of another length says nothing of targets, even where torch's error names it."""
    bank = torch.randn(5, 3)

    def of_one(params, x, bank):
        if len(x) > 1:
            raise RuntimeError(f"the sizes {len(x)} and {len(bank)} do not fit")
        return FN.apply(params, (), x)[0].mean() + 0 * bank.sum()

    pa.grad(of_one, microbatch_size=1)(FN.params, X, bank)
