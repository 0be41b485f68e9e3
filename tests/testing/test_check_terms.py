"""A sum of ``Weighted`` is checked term by term, and the check says what cutting it does."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import AccumulationMismatch, check_accumulation
from tests.problems import ROOT
from tests.testing.problems import W, X, report_of


pytestmark = [pytest.mark.laws, pytest.mark.promise("check")]
MASK = torch.arange(8) % 3 < 1
BATCH = {"x": X.double(), "mask": MASK.double()}


def first(w, batch):
    h = batch["x"] @ w
    return pa.Weighted(h.square().sum(), len(h))


SECOND = {  # beside it: what the second term is, and what the check calls that
    "masked": (lambda h, m: pa.Weighted((h * m).sum(), m.sum()), ""),
    "a ratio whose weight is elsewhere": (lambda h, m: pa.Weighted(h.sum(), m.sum()), ""),
    "a mean as total": (lambda h, m: pa.Weighted(h.exp().mean(), len(h)), "weight"),
    "weights that do not add up": (lambda h, m: pa.Weighted(h.exp().sum(), 1), "weight"),
    "coupled": (lambda h, m: pa.Weighted(len(h) * h.var(unbiased=False), len(h)), "batch coupling"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SECOND)
@pytest.mark.parametrize("has_aux", [False, True])
def test_the_check_says_what_cutting_does(case, has_aux):
    second, kind = SECOND[case]

    def loss(w, batch):
        total = first(w, batch) + 0.5 * second(batch["x"] @ w, batch["mask"])
        return (total, {"rows": batch["x"]}) if has_aux else total

    w = W.double()
    whole, cut = (
        pa.grad(loss, has_aux=has_aux, microbatch_size=size, check=False)(w, BATCH)
        for size in (None, 3)
    )
    whole, cut = (x[0] if has_aux else x for x in (whole, cut))
    report = report_of(loss, w, BATCH, has_aux=has_aux)
    assert report.fits == bool((cut - whole).norm() <= ROOT * whole.norm()) == (not kind)
    assert report.loss == "sum of Weighted"
    if kind:
        assert report.diagnoses[0].says.startswith("in term 1, ")
        with pytest.raises(AccumulationMismatch, match="in term 1, "):
            check_accumulation(loss, w, BATCH, has_aux=has_aux)


def unlabelled(w, batch):
    """A term of no weight in the whole batch has nothing to compare."""
    return first(w, batch) + pa.Weighted((batch["x"] @ w).sum() * 0, 0)


REFUSED = {
    "no weight": (unlabelled, {}, ValueError, "nothing to compare"),
    "a loop": (
        lambda w, batch: first(w, batch) - first(w, batch),
        {"loop": lambda loss, w, parts: w},
        TypeError,
        "a sum of 2 Weighted",
    ),
}


def test_a_microbatch_without_a_term_is_found():
    def uneven(w, batch):
        more = pa.Weighted((batch["x"] @ w).sum(), len(batch["x"]))
        return first(w, batch) + more if len(batch["x"]) > 1 else first(w, batch)

    report = report_of(uneven, W.double(), BATCH)
    assert report.diagnoses[0].kind == "raises"
    assert "a sum of 1 Weighted; expected 2" in report.diagnoses[0].says


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked_is_refused(case):
    loss, options, error, words = REFUSED[case]
    with pytest.raises(error, match=words) as caught:
        check_accumulation(loss, W.double(), BATCH, **options)
    if not options:
        assert "term" in "".join(caught.value.__notes__)
