"""A batch that is sorted by label or length is asked about samples that lie far apart.

Within each of its microbatches all samples weigh alike, so that every microbatch adds up.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

import pureaccum as pa


pytestmark = [pytest.mark.faults, pytest.mark.promise("refused")]

ROWS, LENGTH = 48, 12
NET = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)).double()
FN = pa.functional(NET)
WEIGHTS = torch.tensor([1.0, 2.0, 50.0]).double()
LENGTHS = torch.arange(ROWS) // 4 + 1  # groups of four texts
BATCH = {
    "x": torch.randn(ROWS, 4).double(),
    "label": torch.arange(3).repeat_interleave(ROWS // 3),
    "text": torch.randn(ROWS, LENGTH, 4).double(),
    "words": torch.randint(3, (ROWS, LENGTH)).masked_fill(
        torch.arange(LENGTH) >= LENGTHS[:, None], -100
    ),
}


def by_class(params, batch):
    out, _ = FN.apply(params, (), batch["x"])
    return cross_entropy(out, batch["label"], weight=WEIGHTS)


def by_word(params, batch):
    out, _ = FN.apply(params, (), batch["text"])
    return cross_entropy(out.mT, batch["words"])


def step_of(loss, size, **options):
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, **options)
    return step(step.init(FN.params), BATCH)


FORMS = {
    "grad": lambda loss, size: pa.grad(loss, microbatch_size=size)(FN.params, BATCH),
    "value": lambda loss, size: pa.value(loss, microbatch_size=size)(FN.params, BATCH),
    "step": step_of,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("loss", "size"), [(by_class, 16), *((by_word, size) for size in (1, 2, 4, 16))]
)
def test_a_sorted_batch_is_refused_at_the_first_call(form, loss, size):
    with pytest.raises(pa.CoupledLossError) as caught:
        FORMS[form](loss, size)
    assert caught.value.kind == "mean of means"


def mean(params, batch):
    out, _ = FN.apply(params, (), batch["x"])
    return (out.square() * (1 + batch["label"][:, None])).mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 16, 47, [5, 40, 3]], ids=str)
def test_a_mean_over_samples_is_taken(form, size):
    FORMS[form](mean, size)


def test_samples_keep_their_keys_in_both_parts():
    """Dropout by keys is the same in the whole and in its parts."""

    def dropped(params, batch, keys):
        x = torch.func.vmap(lambda key, x: pa.dropout(x, 0.5, key=key))(keys, batch["x"])
        return FN.apply(params, (), x)[0].square().mean()

    _, info = step_of(dropped, 16, keys=True)
    assert info.applied
