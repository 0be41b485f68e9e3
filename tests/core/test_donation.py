"""With ``donate=True`` the donated state is given up, and nothing else in the world changes."""

import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import ENGINES, NONFINITE, make_batch, make_params, mean_loss
from tests.problems import in_parts


pytestmark = [pytest.mark.purity, pytest.mark.promise("donation")]
PARAMS, BATCH = make_params(), make_batch(2)
OPERATIONS = ("init", "update", "donated update", "merge", "finalize", "donated finalize")


def leaves(state):
    return optree.tree_leaves(state, namespace="pureaccum")


def is_donated(tensor):
    try:
        return tensor.dim() < 0
    except RuntimeError as error:
        return "given up with donate=True" in str(error)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), max_size=6
    )
)
def test_whatever_the_history_only_donated_states_are_gone(engine, nonfinite, steps):
    """States that came from each other share no tensor: giving one up takes no other along."""
    acc = pa.accumulator(mean_loss, engine=engine, nonfinite=nonfinite)
    alive, gone = [acc.init(PARAMS)], []
    for what, i, j in steps:
        donate, a = "donated" in what, alive[i % len(alive)]
        if donate:
            alive = [state for state in alive if state is not a] or [acc.init(PARAMS)]
            gone.append(a)
        with unchanged(alive, PARAMS, BATCH):
            if what == "init":
                new = acc.init(PARAMS)
            elif what == "merge":
                new = acc.merge(a, alive[j % len(alive)])
            elif "update" in what:
                new = acc.update(a, PARAMS, BATCH, donate=donate)
            else:
                new = acc.finalize(a, donate=donate)
        assert not any(map(is_donated, leaves([alive, new])))
        assert all(map(is_donated, leaves(gone)))
        if isinstance(new, pa.AccumState):
            alive.append(new)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_donation_changes_no_bit_of_the_result(engine, nonfinite):
    acc = pa.accumulator(mean_loss, engine=engine, nonfinite=nonfinite)

    def stream(donate):
        state = in_parts(acc, PARAMS, pa.microbatches(make_batch(7), 3), donate)
        return state, acc.finalize(state)

    assert_trees_bitwise_equal(stream(True), stream(False))


@pytest.mark.parametrize("engine", ENGINES)
def test_donated_memory_is_the_memory_of_the_new_state(engine):
    acc = pa.accumulator(mean_loss, engine=engine)
    state = acc.init(PARAMS)
    places = [x.data_ptr() for x in leaves(state.grads)]
    state = acc.update(state, PARAMS, BATCH, donate=True)
    assert [x.data_ptr() for x in leaves(state.grads)] == places
    grads, _ = acc.finalize(state, donate=True)
    assert [x.data_ptr() for x in leaves(grads)] == places


def test_states_share_no_memory():
    """So a caller, too, may write to one of them in place."""
    acc = pa.accumulator(mean_loss)
    states = [acc.init(PARAMS)]
    states += [acc.update(states[0], PARAMS, BATCH), acc.merge(states[0], acc.init(PARAMS))]
    grads, value = acc.finalize(states[0])
    places = [x.data_ptr() for x in leaves([states, grads, value])]
    assert len(set(places)) == len(places)
