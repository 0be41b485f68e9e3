"""What a loss, a module or an optimizer raises says in which call, and for which samples."""

import pytest
import torch
from torch import nn

import pureaccum as pa
from tests.runs import RUNS


pytestmark = [pytest.mark.purity, pytest.mark.promise("errors")]
X, W = torch.arange(14.0).reshape(7, 2), torch.ones(2)


class Fails(nn.Module):
    """For samples 4 to 6 it raises, or so do its gradients."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, w, x):
        out = (x @ w).square().mean()
        if self.when == "forwards" and x[0, 0] == 8:
            raise KeyError("boom")
        return out


CALLS = {"grad": "in a gradient", "value": "in a value", "step": "in a step"}


@pytest.mark.parametrize("call", CALLS)
def test_a_loss_that_raises_names_the_microbatch_and_its_samples(call):
    for loss in (lambda w, x: Fails("forwards")(w, x), Fails("forwards")):
        with pytest.raises(KeyError, match="boom") as caught:
            RUNS[call](loss, W, X, size=4)
        said = f"raised by the loss of microbatch 1 (from sample 4), of 3 samples, {CALLS[call]}."
        assert [said in note for note in caught.value.__notes__] == [True]


def test_so_does_a_microbatch_of_a_stream():
    accumulator = pa.accumulator(Fails("forwards"))
    step = pa.make_step(Fails("forwards"), pa.sgd(0.1))
    state = step.init(W)
    first = accumulator.update(accumulator.init(W), W, X[:4])
    window = step.update(state, step.begin(state), X[:4])
    for run, call in (
        (lambda: accumulator.update(first, W, X[4:]), "an update"),
        (lambda: step.update(state, window, X[4:]), "a step"),
    ):
        with pytest.raises(KeyError) as caught:
            run()
        assert f"microbatch 1, of 3 samples, in {call}." in caught.value.__notes__[0]


def test_an_error_of_a_check_says_so():
    """Here one sample runs, and two do not: the reason is that of the check."""
    loss = lambda w, x, y: (x @ w - y).square().mean()  # noqa: E731
    with pytest.raises(ValueError, match="one sample, but not two") as caught:
        pa.grad(loss, microbatch_size=1)(W, X, torch.ones(7))
    assert "raised in the check of the loss" in "".join(caught.value.__cause__.__notes__)


def test_an_optimizer_that_raises_is_named():
    class Raising:
        def init(self, params):
            return ()

        def apply(self, grads, state, params):
            raise ZeroDivisionError

    step = pa.make_step(lambda w, x: (x @ w).mean(), Raising())
    with pytest.raises(ZeroDivisionError) as caught:
        step(step.init(W), X)
    assert "raised by apply of a Raising" in caught.value.__notes__[0]
