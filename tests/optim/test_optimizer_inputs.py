"""``apply`` changes no argument; a step not applied leaves no trace; only donated states go."""

import itertools
import math

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum._core.auto_size import counting
from pureaccum._optim import updates
from pureaccum._optim.optimizers import _adam, _sgd
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.optimizers import (
    COMBINATIONS,
    KINDS,
    Copies,
    clones,
    leaves,
    make_optimizer,
    make_params,
    normal,
    unread,
)


pytestmark = [pytest.mark.purity, pytest.mark.promise("applied"), pytest.mark.promise("purity")]
EVERY = pytest.mark.parametrize("kind", KINDS)
# from_torch has to know whether a step is applied; the others need not.
UNREAD = pytest.mark.parametrize("kind", [kind for kind in KINDS if "from_torch" not in kind])
DONATE = pytest.mark.parametrize(
    "donate", [False, pytest.param(True, marks=pytest.mark.given_up("donation elsewhere"))]
)


def is_donated(tensor):
    try:
        return tensor.dim() < 0
    except RuntimeError as error:
        return "given up with donate=True" in str(error)


def started(kind, steps=2):
    """An optimizer with parameters and a state that are no longer those of the beginning."""
    opt, params = make_optimizer(kind), make_params()
    state = opt.init(params)
    for n in range(steps):
        params, state = opt.apply(make_params(n + 1), state, params)
    return opt, params, state


FLAGS = st.sampled_from([None, True, False])
STEPS = st.lists(st.tuples(FLAGS, st.booleans(), seeds()), min_size=1, max_size=5)


@pytest.mark.given_up("donation elsewhere")
@EVERY
@examples(1 / 4)
@given(STEPS)
def test_only_what_is_donated_is_gone(kind, steps):
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
@pytest.mark.parametrize("applied", [None, True, False])
def test_no_argument_changes_and_any_old_state_goes_on(kind, applied):
    opt, params, state = started(kind)
    flag = None if applied is None else torch.tensor(applied)
    for seed in (7, 8):
        grads = make_params(seed)
        with unchanged(params, state, grads, flag):
            found = [opt.apply(grads, state, params, applied=flag) for _ in range(2)]
        assert_trees_bitwise_equal(*found)
        params, state = found[0]


@pytest.mark.promise("donation")
@EVERY
def test_tied_leaves_of_a_donated_training_state_are_stepped_once(kind):
    """One memory that is two leaves is not written to twice."""

    def loss(params, batch):
        return ((batch @ params["a"]) ** 2 + (batch @ params["b"])).mean()

    def trained(alias, donate):
        step, one = pa.make_step(loss, make_optimizer(kind), donate=donate), torch.ones(2)
        state = step.init({"a": one, "b": one})
        state = state._replace(params={"a": one, "b": alias(one)})
        for _ in range(2):
            state, info = step(state, torch.tensor([[1.0, -2.0], [3.0, 0.5]]))
            assert info.applied
        return state.params, state.opt_state

    for alias in (lambda x: x, torch.detach):
        assert_trees_bitwise_equal(trained(alias, donate=True), trained(alias, donate=False))


@pytest.mark.given_up("donation elsewhere")
@EVERY
def test_what_is_given_up_is_refused(kind):
    opt, params, state = started(kind)
    new, new_state = opt.apply(make_params(7), state, params, donate=True)
    last = state[-1] if isinstance(state, tuple) and type(state) is tuple else state
    for x in leaves([params, last]):
        with pytest.raises(RuntimeError, match="given up with donate=True"):
            x + 1
    opt.apply(make_params(8), new_state, new, donate=True)


@pytest.mark.given_up("donation elsewhere")
@EVERY
def test_donation_changes_no_bit(kind):
    for steps, donate in itertools.product((0, 1, 2), (False, True)):
        opt, params, state = started(kind, steps)
        want = opt.apply(make_params(7), state, params)
        got = opt.apply(make_params(7), state, params, applied=torch.tensor(True), donate=donate)
        assert_trees_bitwise_equal(got, want)


@pytest.mark.given_up("donation elsewhere")
@EVERY
@pytest.mark.parametrize("alias", [lambda x: x, torch.detach], ids=["same", "alias"])
def test_tied_leaves_are_stepped_once(kind, alias):
    """One memory that is two leaves, as in a ``state_dict()``, is not written to twice."""
    flags = [None, torch.tensor(True)]
    for applied in flags if "from_torch" in kind else [*flags, unread(torch.tensor(True))]:
        opt, found = make_optimizer(kind), []
        for donate in (False, True):
            one = torch.tensor([1.0, -2.0])
            params, grads = (
                {"a": one, "b": alias(one)},
                {"a": torch.ones(2), "b": torch.full((2,), 2.0)},
            )
            new = opt.apply(grads, opt.init(params), params, applied=applied, donate=donate)
            found.append(optree.tree_map(lambda x: x.as_subclass(torch.Tensor), new))
        assert_trees_bitwise_equal(*found)


@EVERY
@DONATE
def test_a_step_not_applied_leaves_every_bit(kind, donate):
    for steps, factor in itertools.product((0, 1, 2), (1.0, math.nan, math.inf)):
        opt, params, state = started(kind, steps)
        before = clones((params, state))
        grads = optree.tree_map(lambda g, factor=factor: g * factor, make_params(7))
        new = opt.apply(grads, state, params, applied=torch.tensor(False), donate=donate)
        assert_trees_bitwise_equal(new, before)
        after, want = (opt.apply(make_params(8), s, p) for p, s in (new, before))
        assert_trees_bitwise_equal(after, want)


@UNREAD
@DONATE
def test_a_flag_on_an_accelerator_is_not_waited_for(kind, donate):
    """It is never read, and the bits are those of one that is."""
    for steps, applied in itertools.product((0, 1, 2), (False, True)):
        opt, params, state = started(kind, steps)
        grads = make_params(7)
        want = opt.apply(grads, state, params, applied=torch.tensor(applied))
        grads = grads if applied else optree.tree_map(lambda g: g * math.nan, grads)
        got = opt.apply(grads, state, params, applied=unread(torch.tensor(applied)), donate=donate)
        got = optree.tree_map(lambda x: x.as_subclass(torch.Tensor), got)
        assert_trees_bitwise_equal(got, want)


@EVERY
def test_optimizer_states_share_no_memory(kind):
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


@pytest.mark.given_up("donation elsewhere")
@pytest.mark.parametrize("kind", ["sgd", "fused momentum", "fused adamw", "momentum", "from_torch"])
@pytest.mark.parametrize("applied", [None, True, False])
def test_an_optimizer_writes_into_donated_memory(kind, applied):
    opt, params, state = started(kind)
    places = [x.data_ptr() for x in leaves(params)]
    flag = None if applied is None else torch.tensor(applied)
    params, state = opt.apply(make_params(7), state, params, applied=flag, donate=True)
    assert [x.data_ptr() for x in leaves(params)] == places


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "user" not in kind and kind != "chain"])
def test_of_parameters_that_require_grad_no_graph_is_recorded(kind):
    opt = make_optimizer(kind)
    for flag, donate in itertools.product((None, torch.tensor(False)), (False, True)):
        params = optree.tree_map(lambda x: x.requires_grad_(), make_params())
        grads = optree.tree_map(lambda x: x.requires_grad_() * 2, make_params(1))
        new = opt.apply(grads, opt.init(params), params, applied=flag, donate=donate)
        assert not any(x.requires_grad for x in leaves(new))


@EVERY
def test_a_state_of_inference_mode_is_like_any_other(kind):
    """Whether the state is made and stepped inside or outside: the numbers are the same."""
    opt, found = make_optimizer(kind), []
    for made, stepped, donate in itertools.product((False, True), repeat=3):
        with torch.inference_mode(made):
            params = make_params()
            state = opt.init(params)
        with torch.inference_mode(stepped):
            new = opt.apply(make_params(1), state, params, donate=donate)
        found.append(opt.apply(make_params(2), new[1], new[0], donate=donate))
    for other in found[1:]:
        assert_trees_bitwise_equal(other, found[0])


@pytest.mark.given_up("donation elsewhere")
def test_the_gradients_are_given_up_only_where_a_map_changes_them():
    params = make_params()
    plain, clipped = pa.sgd(0.1), pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1))
    for opt in (plain, clipped):
        grads = make_params(1)
        opt.apply(grads, opt.init(params), clones(params), donate=True)
        assert [is_donated(x) for x in leaves(grads)] == [opt is clipped] * 3


# The kernels themselves, also those that run off a CPU ------------------------------------


def settings_of(switches):
    numbers = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    return {flag: on * numbers[flag] if flag in numbers else on for flag, on in switches.items()}


def method_of(name, switches):
    if name == "sgd":
        return _sgd(0.1, **settings_of(switches), fused=False)
    own = {"fused": False, "decoupled": name == "adamw"}
    return _adam(0.1, (0.9, 0.99), 1e-8, **settings_of(switches), **own)


def columns_of(name, switches, sizes, seed):
    trees = switches["momentum"] if name == "sgd" else 2 + switches["amsgrad"]
    random = generator(seed)
    dtypes = (torch.float32, torch.float64)
    return [
        [normal((n,), random, dtypes[i % 2]).abs() for i, n in enumerate(sizes)]
        for _ in range(1 + trees)
    ]


@pytest.mark.mechanism
@COMBINATIONS
@examples(1 / 4)
@example([5, 9, 0, 1, 8, 3], 2, 0)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 3), seeds())
def test_every_variant_of_a_kernel_leaves_the_gradients_and_gives_the_same_bits(
    name, switches, sizes, step, seed
):
    """Donated leaves are stepped in groups; the flag is one that may not be read.

    ``foreach`` is what runs on accelerators.
    """
    method, rate = method_of(name, switches), torch.tensor(0.1, dtype=torch.float64)
    columns = columns_of(name, switches, sizes, seed)
    grads = columns_of("sgd", {"momentum": False}, sizes, seed + 1)[0]
    count = torch.tensor(step)
    stepped = updates.by_kernel(method, grads, clones(columns), count, rate, True, [], False)
    flags = (True, False, unread(torch.tensor(True)), unread(torch.tensor(False)))
    cases = itertools.product((False, True), (False, True), flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "GROUP", 96)
        for foreach, donate, applied in cases:
            old = clones(columns)
            given_up = leaves(old) if donate else []
            with unchanged(grads, () if donate else old):
                new = updates.by_kernel(method, grads, old, count, rate, applied, given_up, foreach)
            new = optree.tree_map(lambda x: x.as_subclass(torch.Tensor), new)
            flag = applied if isinstance(applied, bool) else bool(applied.as_subclass(torch.Tensor))
            assert_trees_bitwise_equal(new, stepped if flag else columns)


@pytest.mark.mechanism
def test_beside_a_donated_state_there_is_one_copy_of_a_group():
    """A kernel makes some numbers of its own, for one leaf or for all that it is given."""
    leaf = torch.ones(1024)
    columns, grads = [[leaf.clone() for _ in range(16)] for _ in range(3)], [leaf] * 16
    method = method_of("adam", {"weight_decay": False, "amsgrad": False, "maximize": False})
    flag, rate = unread(torch.tensor(True)), torch.tensor(0.1, dtype=torch.float64)
    for count, foreach, own in ((1, False, 3), (4, False, 3), (1, True, 2), (4, True, 8)):
        given_up = clones(columns)
        given = method, grads, given_up, torch.tensor(2), rate, flag, leaves(given_up), foreach
        with pytest.MonkeyPatch.context() as patch, counting() as live:
            patch.setattr(updates, "GROUP", count * 3 * leaf.nbytes)
            updates.by_kernel(*given)
        assert live.peak < (3 * count + own + 1) * leaf.nbytes


# Off the CPU ------------------------------------------------------------------------------


RATES = {
    "a number": 0.1,
    "a tensor": torch.tensor(0.1),
    "a schedule": pa.linear_warmup(0.1, 3),
    "a schedule of tensors": pa.join_schedules(
        [pa.linear_warmup(torch.tensor(0.1), 3), pa.cosine_decay(torch.tensor(0.1), 3)], [2]
    ),
}
METHODS = {
    "sgd": pa.sgd,
    "nesterov": lambda lr: pa.sgd(lr, 0.9, nesterov=True),
    "dampened": lambda lr: pa.sgd(lr, 0.9, 0.5),
    "adam": lambda lr: pa.adam(lr, weight_decay=0.1),
    "adamw": lambda lr: pa.adamw(lr, amsgrad=True),
    "clipped": lambda lr: pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(lr)),
}
MIXED = (torch.float32, torch.bfloat16)


def mixed(count, device="cpu"):
    return [torch.ones(3, dtype=dtype, device=device) for dtype in MIXED * count]


@pytest.mark.promise("launches")
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", [name for name in METHODS if "adam" not in name])
def test_off_the_cpu_nothing_waits_and_nothing_given_is_written_to(name, rate):
    """On the meta device, where nobody can read a number; torch's Adam is not for it."""
    found = []
    for count, flag in ((1, True), (3, True), (3, False)):
        params, grads, opt = mixed(count, "meta"), mixed(count, "meta"), METHODS[name](RATES[rate])
        state = opt.init(params)
        applied = torch.ones((), dtype=torch.bool, device="meta") if flag else None
        given = [*params, *grads, *leaves(state)]
        versions = [x._version for x in given]
        opt.apply(grads, state, params, applied=applied)
        assert [x._version for x in given] == versions
        with Copies() as copies:  # in which torch counts no write of its foreach kernels
            opt.apply(grads, state, params, applied=applied)
        assert not any(copy.waits for copy in copies.seen)
        found.append(sum(copy.away for copy in copies.seen))
    assert len(set(found)) == 1, "a copy to the device for every leaf"


@pytest.mark.promise("launches")
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", METHODS)
def test_what_all_leaves_of_a_dtype_share_is_cast_once(name, rate):
    """In the formulas: under vmap, and so under a compiler."""
    found = []
    for count in (1, 3):
        opt, params = METHODS[name](RATES[rate]), mixed(count)
        given = [pa.stack([tree, tree]) for tree in (params, opt.init(params), params)]
        with Copies() as copies:
            torch.func.vmap(opt.apply)(*given)
        found.append(len(copies.seen))
    assert found[0] == found[1]
