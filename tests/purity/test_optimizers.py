"""``apply`` changes no argument; a step not applied leaves no trace; only donated states go."""

import math
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.optimizers import KINDS, clones, leaves, make_optimizer, make_params, unread
from tests.strategies import every


EVERY = pytest.mark.parametrize("kind", KINDS)
# from_torch has to know whether a step is applied; the others need not.
UNREAD = pytest.mark.parametrize("kind", [kind for kind in KINDS if "from_torch" not in kind])


def is_donated(tensor: torch.Tensor) -> bool:
    try:
        return tensor.dim() < 0
    except RuntimeError as error:
        return "given up with donate=True" in str(error)


def started(kind: str, steps: int = 2) -> tuple[Any, Any, Any]:
    """An optimizer with parameters and a state that are no longer those of the beginning."""
    opt, params = make_optimizer(kind), make_params()
    state = opt.init(params)
    for n in range(steps):
        params, state = opt.apply(make_params(n + 1), state, params)
    return opt, params, state


FLAGS = st.sampled_from([None, True, False])
STEPS = st.lists(st.tuples(FLAGS, st.booleans(), seeds()), min_size=1, max_size=5)


@EVERY
@every(6)
@given(STEPS)
def test_only_what_is_donated_is_gone(kind: str, steps: Any) -> None:
    """Any history: every state of it is either given up or has its bits, versions and memory."""
    opt = make_optimizer(kind)
    params = make_params()
    with unchanged(params):
        state = opt.init(params)
    alive, gone = [(params, state)], []
    for applied, donate, seed in steps:
        (params, state), grads = alive[-1], make_params(seed)
        if donate:
            alive.pop()
            gone.append((params, state))
        flag = None if applied is None else torch.tensor(applied)
        with unchanged(list(alive), flag, () if donate else grads):
            alive.append(opt.apply(grads, state, params, applied=flag, donate=donate))
        assert not any(map(is_donated, leaves(alive)))
        if "chain" in kind or kind == "partition":
            # The states of a user's own gradient maps are not given up: nothing would use them.
            assert all(map(is_donated, leaves([pair[0] for pair in gone])))
        else:
            assert all(map(is_donated, leaves(gone)))
        if not alive[:-1]:
            alive.insert(0, (make_params(), opt.init(make_params())))


@EVERY
@pytest.mark.parametrize("donate", [False, True])
def test_what_is_given_up_is_refused(kind: str, donate: bool) -> None:
    opt, params, state = started(kind)
    new = opt.apply(make_params(7), state, params, donate=donate)
    last = state[-1] if isinstance(state, tuple) and type(state) is tuple else state
    for x in leaves([params, last]):
        if donate:
            for use in (lambda x: x + 1, lambda x: x.shape, lambda x: x.numpy(), torch.clone):
                with pytest.raises(RuntimeError, match="given up with donate=True"):
                    use(x)
        else:
            x + 1
    opt.apply(make_params(8), new[1], new[0], donate=donate)


@EVERY
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_donation_changes_no_bit(kind: str, donate: bool, steps: int) -> None:
    opt, params, state = started(kind, steps)
    want = opt.apply(make_params(7), state, params)
    applied = torch.tensor(True)
    assert_trees_bitwise_equal(
        opt.apply(make_params(7), state, params, applied=applied, donate=donate), want
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "partition"])
@pytest.mark.parametrize("applied", [None, torch.tensor(True), unread(torch.tensor(True))])
def test_tied_leaves_are_stepped_once(kind: str, applied: Any) -> None:
    """One tensor that is two leaves is not written to twice where it is donated."""
    if "from_torch" in kind and type(applied) is not torch.Tensor:
        applied = None
    opt, found = make_optimizer(kind), []
    for donate in (False, True):
        one = torch.tensor([1.0, -2.0])
        params, grads = {"a": one, "b": one}, {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
        new = opt.apply(grads, opt.init(params), params, applied=applied, donate=donate)
        found.append(optree.tree_map(lambda x: x.as_subclass(torch.Tensor), new))
    assert_trees_bitwise_equal(*found)


@EVERY
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("factor", [1.0, math.nan, math.inf])
def test_a_step_not_applied_leaves_every_bit(
    kind: str, donate: bool, steps: int, factor: float
) -> None:
    opt, params, state = started(kind, steps)
    before = clones((params, state))
    grads = optree.tree_map(lambda g: g * factor, make_params(7))
    new = opt.apply(grads, state, params, applied=torch.tensor(False), donate=donate)
    assert_trees_bitwise_equal(new, before)
    assert_trees_bitwise_equal(
        opt.apply(make_params(8), new[1], new[0]), opt.apply(make_params(8), before[1], before[0])
    )


@UNREAD
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("applied", [False, True])
def test_a_flag_that_would_have_to_be_waited_for(
    kind: str, donate: bool, steps: int, applied: bool
) -> None:
    """As a flag on an accelerator: never read, and the bits are those of one that is."""
    opt, params, state = started(kind, steps)
    grads = make_params(7)
    want = opt.apply(grads, state, params, applied=torch.tensor(applied))
    grads = grads if applied else optree.tree_map(lambda g: g * math.nan, grads)
    got = opt.apply(grads, state, params, applied=unread(torch.tensor(applied)), donate=donate)
    as_tensor = torch.Tensor
    assert_trees_bitwise_equal(optree.tree_map(lambda x: x.as_subclass(as_tensor), got), want)


@EVERY
def test_states_share_no_memory(kind: str) -> None:
    """So a caller, too, may write to one of them in place."""
    opt, params = make_optimizer(kind), make_params()
    states = [(params, opt.init(params))]
    grads = []
    for applied in (None, True, False, None, False):
        params, state = states[-1]
        grads.append(make_params(len(states)))
        flag = None if applied is None else torch.tensor(applied)
        states.append(opt.apply(grads[-1], state, params, applied=flag))
    held = [*leaves(states), *leaves(grads)]
    if "chain" in kind:  # Count keeps the gradients that it got: a user's own doing
        held = leaves([(params, state[-1]) for params, state in states])
    places = [x.data_ptr() for x in held if x.numel()]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("kind", ["sgd", "fused momentum", "fused adamw", "momentum", "from_torch"])
@pytest.mark.parametrize("applied", [None, True, False])
def test_donated_memory_is_the_memory_of_the_new_state(kind: str, applied: Any) -> None:
    opt, params, state = started(kind)
    places = [x.data_ptr() for x in leaves(params)]
    flag = None if applied is None else torch.tensor(applied)
    params, state = opt.apply(make_params(7), state, params, applied=flag, donate=True)
    assert [x.data_ptr() for x in leaves(params)] == places


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "user" not in kind and kind != "chain"])
@pytest.mark.parametrize("donate", [False, True])
def test_parameters_that_require_grad(kind: str, donate: bool) -> None:
    """No graph is recorded, and nothing new requires grad."""
    opt = make_optimizer(kind)
    for flag in (None, torch.tensor(False)):
        params = optree.tree_map(lambda x: x.requires_grad_(), make_params())
        grads = optree.tree_map(lambda x: x.requires_grad_() * 2, make_params(1))
        new = opt.apply(grads, opt.init(params), params, applied=flag, donate=donate)
        assert not any(x.requires_grad for x in leaves(new))


def test_the_gradients_are_given_up_only_where_a_map_changes_them() -> None:
    params = make_params()
    plain, clipped = pa.sgd(0.1), pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1))
    for opt in (plain, clipped):
        grads = make_params(1)
        opt.apply(grads, opt.init(params), clones(params), donate=True)
        assert [is_donated(x) for x in leaves(grads)] == [opt is clipped] * 3
