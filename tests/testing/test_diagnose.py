"""What a diagnosis adds to its kind: what is left without the norms, and which of them it names."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.testing.problems import report_of


pytestmark = [pytest.mark.laws, pytest.mark.promise("check")]
X = torch.linspace(-1, 2, 24).reshape(8, 3).sin()
NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))
PARAMS = {name: p.detach() for name, p in NET.named_parameters()}


def net(params, x):
    return functional_call(NET, params, (x,))


def linear(params, x):
    return F.linear(x, params["0.weight"], params["0.bias"])


def squares(out):
    return (out - 1).square().mean()


def diagnoses_of(loss):
    return report_of(loss, PARAMS, X.clone()).diagnoses


LOSSES = {
    "norms": (lambda p, x: squares(net(p, x)), ["batch statistics"]),
    "norms, and rows that meet": (
        lambda p, x: squares(net(p, torch.cat([x, x])).log_softmax(0)),  # one sample raises nothing
        ["batch statistics", "batch coupling"],
    ),
    "a norm that one row breaks, and rows that meet": (
        lambda p, x: squares(net(p, x).log_softmax(0)),
        ["batch statistics", "batch coupling"],
    ),
    "dropout, and rows that meet": (
        lambda p, x: squares(F.dropout(linear(p, x)).log_softmax(0)),
        ["randomness", "batch coupling"],
    ),
    "dropout": (lambda p, x: squares(F.dropout(linear(p, x))), ["randomness"]),
    "noise, and rows that meet": (  # which cannot be told: without the noise it does not run
        lambda p, x: squares(linear(p, x).log_softmax(0) + torch.rand(())),
        ["randomness"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "kinds"), LOSSES.values(), ids=LOSSES)
def test_a_cause_hides_no_other_and_adds_none(loss, kinds):
    found = diagnoses_of(loss)
    assert [cause.kind for cause in found] == kinds
    assert ("without it the loss fits" in found[0].says) == (kinds == ["batch statistics"])


@pytest.mark.slow
def test_the_first_norm_is_mended():
    (found,) = diagnoses_of(LOSSES["norms"][0])
    assert "NET.1 (BatchNorm1d), NET.3 (BatchNorm1d)" in found.says
    assert found.mend.startswith("NET.get_submodule('1').eval()")


def test_what_was_given_and_what_is_held_are_told_apart():
    held = torch.zeros(())

    def loss(params, x):
        held.add_(1)
        return squares(linear(params, x.mul_(2)))

    given, kept, *_ = diagnoses_of(loss)
    assert "changes its argument batch in place" in given.says
    assert "writes to held, which it holds" in kept.says


@pytest.mark.slow
def test_a_sum_that_is_declared_one_is_not_blamed_for_it():
    def loss(params, x):
        ascending = bool((x[:, 0].diff() >= 0).all())
        return linear(params, x).square().sum() * (1 if ascending else 2)

    x = X[X[:, 0].sort().indices]
    (found,) = report_of(loss, PARAMS, x, reduction="sum").diagnoses
    assert found.kind == "batch coupling"
    assert "depends on the order of the samples" in found.says


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("dropout", "dropout1d", "dropout2d", "dropout3d"),
        *("alpha_dropout", "feature_alpha_dropout"),
    ],
)
def test_every_dropout_is_left_out(name):
    """What is coupled besides can be told only of a loss that does not draw."""
    dims = {"dropout1d": 1, "dropout3d": 3}.get(name, 2)

    def loss(params, x):
        out = linear(params, x)
        dropped = getattr(F, name)(out.reshape(*out.shape, *[1] * dims), training=True)
        return squares(dropped.reshape(out.shape).log_softmax(0))

    found = diagnoses_of(loss)
    assert [cause.kind for cause in found] == ["randomness", "batch coupling"]
    assert name in found[0].says


def test_what_overflows_is_named():
    """The loss is finite in float16, and one of its gradients is not: it is 120000."""
    params = {"a": torch.ones((), dtype=torch.float16), "b": torch.ones(3, dtype=torch.float16)}

    def loss(params, x):
        large = (params["b"] * 60000 - 60000) * 2  # zero
        return (x.sum(1) * params["a"]).mean() + large.sum()

    report = report_of(loss, params, X.half())
    assert [cause.kind for cause in report.diagnoses] == ["overflow"]
    assert "params['b'] of a microbatch is inf or NaN in float16" in report.diagnoses[0].says
    assert max(leaf.error for leaf in report.leaves) <= 1


@pytest.mark.slow
def test_the_line_that_normalises_data_is_named():
    """And not the line that called the loss, or a helper of it."""

    def normalised(gain):
        return (gain - gain.mean()) / 2.0  # the line

    def loss(w, batch):
        gain = normalised(batch["gain"])
        return ((batch["x"] @ w) * gain).mean()

    report = report_of(loss, torch.ones(3), {"x": X, "gain": torch.arange(8.0) ** 2})
    assert [it.kind for it in report.diagnoses] == ["data statistics"]
    assert "/ 2.0  # the line" in report.diagnoses[0].says
