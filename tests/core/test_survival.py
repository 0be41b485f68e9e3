"""An error during ``update(donate=True)`` loses nothing, or says that it did."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import ENGINES, NONFINITE, BoomError, Explodes, make_batch, make_params, mean_loss
from tests.refusals import saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("donation")]
PARAMS = make_params()
SPOILED = ("given up with donate=True", "failed in the middle", "state that was not donated")
engines = pytest.mark.parametrize("engine", ENGINES)
modes = pytest.mark.parametrize("nonfinite", NONFINITE)


def exploding(at):
    """A backward pass that fails at one leaf, ``large`` or ``w``, having done the other or not."""
    first, last = ("w", "large") if at == "last" else ("large", "w")

    def loss(params, batch):
        exploded = params | {last: Explodes.apply(params[last])}
        return mean_loss(exploded, batch) + 0 * params[first].sum()

    return loss


def begun(engine, nonfinite="propagate"):
    acc = pa.accumulator(mean_loss, engine=engine, nonfinite=nonfinite)
    state = acc.update(acc.init(PARAMS), PARAMS, make_batch(3), donate=True)
    return state, acc.finalize(state)


def update(loss, state, engine, nonfinite, params=PARAMS):
    acc = pa.accumulator(loss, engine=engine, nonfinite=nonfinite)
    return acc.update(state, params, make_batch(2), donate=True)


def whole_or_gone(state, expected, *uses):
    """A state that is whole, or of which each of the uses says that it is gone."""
    acc = pa.accumulator(mean_loss)
    try:
        result = acc.finalize(state)
    except RuntimeError:
        for use in uses:
            with saying(RuntimeError, *SPOILED):
                use(acc)
    else:
        assert_trees_bitwise_equal(result, expected)


@engines
@modes
def test_an_error_in_the_loss_loses_nothing(engine, nonfinite):
    def loss(params, batch):
        mean_loss(params, batch)
        raise BoomError

    state, expected = begun(engine, nonfinite)
    with unchanged(state, PARAMS), pytest.raises(BoomError):
        update(loss, state, engine, nonfinite)
    assert_trees_bitwise_equal(pa.accumulator(mean_loss).finalize(state), expected)


@engines
@modes
@pytest.mark.parametrize("at", ["first", "last"])
def test_an_error_in_the_backward_pass_loses_nothing_or_says_so(engine, nonfinite, at):
    """Where one sum says so all do: a state is whole or gone."""
    state, expected = begun(engine, nonfinite)
    with unchanged(PARAMS), pytest.raises(BoomError):
        update(exploding(at), state, engine, nonfinite)
    whole_or_gone(
        state,
        expected,
        lambda acc: acc.finalize(state),
        lambda acc: acc.finalize(state, donate=True),
        lambda acc: acc.update(state, PARAMS, make_batch()),
        lambda acc: acc.merge(acc.init(PARAMS), state),
        *(lambda _, x=x: x + 1 for x in state.grads.values()),
    )


@engines
@pytest.mark.parametrize("at", ["first", "last"])
def test_skip_adds_nothing_before_all_is_known(engine, at):
    state, _ = begun(engine, "skip")
    with unchanged(state), pytest.raises(BoomError):
        update(exploding(at), state, engine, "skip")


# nonfinite="raise" -----------------------------------------------------------------------


def make_bad(leaf):
    """Finite, but for the gradient of one leaf at the rows from the fourth on."""

    def loss(params, batch):
        zero = params[leaf] - params[leaf].detach()
        return mean_loss(params, batch) + (zero.sqrt().sum() if batch["y"].max() >= 4 else 0)

    return loss


def nan_loss(params, batch):
    return mean_loss(params, batch) * (torch.nan if batch["y"].max() >= 4 else 1)


CAUSES = ("inf or NaN", "nonfinite='raise'", "learning rate", "Weighted")


@engines
@pytest.mark.parametrize("leaf", ["w", "large"])
def test_raise_names_the_leaf_and_the_microbatch(engine, leaf):
    other = {"w": "large", "large": "w"}[leaf]
    gradient = pa.grad(make_bad(leaf), microbatch_size=2, nonfinite="raise", engine=engine)
    named = f"gradient of args[0]['{leaf}'] of microbatch 2 (from row 4)"
    with unchanged(PARAMS), saying(FloatingPointError, named, *CAUSES) as caught:
        gradient(PARAMS, make_batch(6))
    assert f"'{other}'" not in str(caught.value)


@engines
def test_raise_names_a_loss(engine):
    gradient = pa.grad(nan_loss, microbatch_size=2, nonfinite="raise", engine=engine)
    named = "the loss of microbatch 2 (from row 4)"
    with unchanged(PARAMS), saying(FloatingPointError, named, *CAUSES):
        gradient(PARAMS, make_batch(6))


@engines
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("leaf", ["w", "large"])
def test_raise_names_the_leaf_in_a_stream(engine, donate, leaf):
    acc = pa.accumulator(make_bad(leaf), nonfinite="raise", engine=engine)
    state = acc.update(acc.init(PARAMS), PARAMS, make_batch(2))
    expected = acc.finalize(state)
    with saying(FloatingPointError, f"params['{leaf}'] of microbatch 1:", *CAUSES):
        acc.update(state, PARAMS, make_batch(6), donate=donate)
    if donate:
        whole_or_gone(state, expected, lambda acc: acc.finalize(state))
    else:
        assert_trees_bitwise_equal(acc.finalize(state), expected)


@engines
@pytest.mark.parametrize("donate", [False, True])
def test_raise_for_a_loss_leaves_the_state_whole(engine, donate):
    acc = pa.accumulator(nan_loss, nonfinite="raise", engine=engine)
    state = acc.update(acc.init(PARAMS), PARAMS, make_batch(2))
    with unchanged(state), saying(FloatingPointError, "the loss of microbatch 1:", *CAUSES):
        acc.update(state, PARAMS, make_batch(6), donate=donate)
