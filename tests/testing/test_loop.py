"""A loop of the user's own: every mistake is told from every other, for every kind of loss."""

import pytest
import torch

import pureaccum as pa
from tests.testing.problems import report_of


pytestmark = [pytest.mark.laws, pytest.mark.promise("check")]
W, X = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.linspace(-1, 2, 48).reshape(12, 4).sin()
BATCH = {"x": X, "mask": torch.tensor([1, 2, 1, 3, 1, 1, 2, 1, 1, 1, 2, 1])}


def rows(w, batch):
    return (batch["x"] @ w - 1) ** 2


LOSSES = {
    "mean": lambda w, batch: rows(w, batch).mean(),
    "sum": lambda w, batch: rows(w, batch).sum(),
    "weighted": lambda w, batch: pa.Weighted(
        (rows(w, batch) * batch["mask"]).sum(), batch["mask"].sum()
    ),
}


def gradients(loss_fn, w, parts):
    """Of every microbatch by itself, and its weight in the whole."""

    def value(w, part):
        loss = loss_fn(w, part)
        return loss.total / loss.weight if isinstance(loss, pa.Weighted) else loss

    weighted = isinstance(loss_fn(w, parts[0]), pa.Weighted)
    weights = [float(part["mask"].sum() if weighted else len(part["x"])) for part in parts]
    return [torch.func.grad(value)(w, part) for part in parts], weights


def loop_of(shares):
    """A loop that adds up gradients with these shares, a function of the weights."""

    def loop(loss_fn, w, parts):
        grads, weights = gradients(loss_fn, w, parts)
        return sum(a * g for a, g in zip(shares(weights), grads, strict=True))

    return loop


def right(weights):
    return [weight / sum(weights) for weight in weights]


def alike(weights):
    return [1 / len(weights)] * len(weights)


def ones(weights):
    return [1.0] * len(weights)


LOOPS = {
    # kind of loss, shares of the microbatches, what is found
    "right mean": ("mean", right, None),
    "right sum": ("sum", ones, None),
    "right weighted": ("weighted", right, None),
    "zeroed mean": ("mean", lambda w: [0.0] * (len(w) - 1) + [1.0], "gradients zeroed"),
    "zeroed sum": ("sum", lambda w: [0.0] * (len(w) - 1) + [1.0], "gradients zeroed"),
    "no tail": ("mean", lambda w: [*right(w)[:-1], 0.0], "tail dropped"),
    "no tail, weighted": ("weighted", lambda w: [*right(w)[:-1], 0.0], "tail dropped"),
    "means alike": ("mean", alike, "mean of means"),
    "weighted means alike": ("weighted", alike, "mean of means"),
    "sums divided": ("sum", alike, "sum as mean"),
    "means added": ("mean", ones, "mean as sum"),
    "weighted means added": ("weighted", ones, "mean as sum"),
    "scale not undone": ("mean", lambda w: [128 * a for a in right(w)], "factor"),
    "sum halved": ("sum", lambda w: [0.5] * len(w), "factor"),
    "weights squared": ("weighted", lambda w: [a * a for a in right(w)], "wrong weights"),
}


@pytest.mark.parametrize(("kind", "shares", "found"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    "complex_",
    [pytest.param(False, id="real"), pytest.param(True, id="complex", marks=pytest.mark.slow)],
)
def test_each_mistake_of_a_loop_is_found(kind, shares, found, complex_):
    def loss(w, batch):
        return LOSSES[kind](w.real + w.imag if complex_ else w, batch)

    w = torch.complex(W, W.flip(0)) if complex_ else W
    how = "sum" if kind == "sum" else "mean"
    report = report_of(loss, w, BATCH, loop=loop_of(shares), reduction=how)
    assert [cause.kind for cause in report.diagnoses] == ([found] if found else [])
    assert report.fits == (found is None)


def test_the_factor_of_a_loop_is_named():
    report = report_of(LOSSES["mean"], W, BATCH, loop=loop_of(LOOPS["scale not undone"][1]))
    assert "128 times as much" in report.diagnoses[0].says
    assert report.diagnoses[0].mend == "grads = grads / 128"


@pytest.mark.slow
def test_a_loss_that_is_wrong_is_not_blamed_on_the_loop():
    report = report_of(LOSSES["sum"], W, BATCH, loop=loop_of(right))
    assert report.diagnoses[0].kind == "sum as mean"
    assert "declared a mean" in report.diagnoses[0].says
