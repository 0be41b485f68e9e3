"""With ``donate=True`` the donated state is given up, and nothing else in the world changes."""

import itertools

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import ENGINES, NONFINITE, make_batch, make_params, mean_loss
from tests.exactly import copied
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


# What a step returned beside the state stays what it was in later steps ------------------------


X = torch.arange(12.0).view(6, 2) - 5


def aliases(p, b, sparse):
    """Everything that an aux may be of parameters and buffers."""
    dense = p["w"].detach()
    return {
        "parameter": p["w"],
        "large one, turned": p["large"].t(),
        "views": [p["w"].view(1, 2), p["w"][:1], p["s"].expand(3), dense],
        "buffers": b,
        "view of a buffer": b["mean"][1:],
        "sparse": torch.sparse_coo_tensor([[0, 1]], dense, (2,)) if sparse else (),
    }


OPTIMIZERS = {
    "sgd": lambda: pa.sgd(0.01),
    "adamw": lambda: pa.adamw(0.01),
    "fused adamw": lambda: pa.adamw(0.01, fused=True),
    "from_torch": lambda: pa.from_torch(torch.optim.RMSprop, lr=0.01),
    "clip and momentum": lambda: pa.chain(
        pa.clip_by_global_norm(1.0), pa.sgd(0.01, momentum=0.9, nesterov=True)
    ),
}


def step_of(optimizer, sparse, **options):
    """A step whose aux are aliases of what it is given, and its first state."""

    def loss(p, x, *, buffers):
        new = {"mean": buffers["mean"] * 0.5 + x.mean(0), "calls": buffers["calls"] + 1}
        value = ((x * p["w"]) ** 2).mean() * p["s"].exp() + buffers["mean"].sum()
        value = value + p["large"].mean()
        return value, (new, [aliases(p, b, sparse) for b in (buffers, new)])

    step = pa.make_step(
        loss,
        OPTIMIZERS[optimizer](),
        has_aux=True,
        aux_reduction="last",
        buffers="sequential",
        donate=True,
        **options,
    )
    params = {"w": torch.tensor([1.0, -0.5]), "s": torch.tensor(0.5)}
    params["large"] = torch.ones(512, 512)
    return step, step.init(params, buffers={"mean": torch.zeros(2), "calls": torch.tensor(0)})


def over_batches(step, state):
    return step(state, X)


def over_streams(step, state):
    window, aux = step.begin(state), []
    for part in pa.microbatches(X, 2):
        window, one = step.update(state, window, part)
        aux.append(one)
    state, info = step.apply(state, window)
    return state, (info, aux)


def check(forward, step, state):
    came, copies = [], []
    for _ in range(3):
        state, beside = forward(step, state)
        came.append(beside)
        copies.append(copied(beside))
    assert_trees_bitwise_equal(came, copies)


forms = pytest.mark.parametrize("forward", [over_batches, over_streams])


@forms
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_came_beside_a_donated_state_stays(forward, optimizer):
    for engine, size in itertools.product(("func", "autograd"), (None, 2)):
        check(forward, *step_of(optimizer, True, engine=engine, microbatch_size=size))


@pytest.mark.nightly
@forms
def test_what_came_beside_a_donated_state_of_a_compiled_step_stays(forward):
    torch.compiler.reset()
    options = {"compile": {"backend": "eager"}, "microbatch_size": 4}
    check(forward, *step_of("adamw", False, **options))
