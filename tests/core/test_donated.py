"""Every use of a state that was given up says that it was, and none sees its memory."""

import copy
import io
import pickle
from contextlib import nullcontext

import numpy as np
import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree
from torch.utils.data import default_collate

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests import calls
from tests.refusals import PARAMS, Loss, make_batch, refused, saying, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("donation")]
X = torch.ones(2)
USES = {
    "+": lambda t: t + 1,
    "reflected +": lambda t: 1 + t,
    "+=": lambda t: t.__iadd__(1),
    "-": lambda t: -t,
    "==": lambda t: t == t,
    "@": lambda t: X @ t,
    "other's method": lambda t: X.add(t),
    "other's memory": lambda t: X.clone().copy_(t),
    "out=": lambda t: torch.add(X, X, out=t),
    "in a list": lambda t: torch.stack([t, t]),
    "foreach": lambda t: torch._foreach_add([t], 1.0),
    "where": lambda t: torch.where(X > 0, X, t),
    "index": lambda t: t[0],
    "assignment": lambda t: t.__setitem__(0, 1.0),
    "as an index": lambda t: X[t],
    "shape": lambda t: t.shape,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "requires_grad": lambda t: t.requires_grad,
    "requires_grad_": lambda t: t.requires_grad_(),
    "grad": lambda t: t.grad,
    "data": lambda t: t.data,
    "data_ptr": lambda t: t.data_ptr(),
    "storage": lambda t: t.untyped_storage(),
    "numel": lambda t: t.numel(),
    "len": len,
    "iter": lambda t: list(t),
    "in": lambda t: 1.0 in t,
    "repr": repr,
    "str": str,
    "format": lambda t: f"{t:.2f}",
    "dir": dir,
    "item": lambda t: t.item(),
    "float": float,
    "bool": bool,
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "numpy's function": lambda t: np.add(t, 1),
    "dlpack": torch.from_dlpack,
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "to": lambda t: t.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "Parameter": nn.Parameter,
    "functional": lambda t: nn.functional.linear(X, t),
    "collate": lambda t: default_collate([t, t]),
    "vmap": lambda t: torch.func.vmap(torch.sin)(t),
    "jvp": lambda t: torch.func.jvp(torch.sin, (t,), (t,)),
    "autograd": lambda t: torch.autograd.grad(t, X),
    "backward": lambda t: t.backward(),
    "assert_close": lambda t: torch.testing.assert_close(t, X),
    "norm": pa.global_norm,
    "all_finite": pa.all_finite,
    "cut": lambda t: pa.microbatches({"x": t}, 1),
    "differentiated": lambda t: pa.accumulator(squares).init({"w": t}),
}
# These look at nothing, and what they give back is given up all the same.
IDLE = {"as_tensor": torch.as_tensor, "optree": lambda t: optree.tree_map(lambda x: x, t)}
# torch reads these tensors in C++ and asks no subclass: they find nothing there.
EMPTY = {
    "torch.tensor": lambda t: torch.tensor(t),
    "torch.func.grad": lambda t: torch.func.grad(torch.sum)(t),
    "torch.func.vjp": lambda t: torch.func.vjp(torch.sin, t)[0],
    "as_subclass": lambda t: t.as_subclass(torch.Tensor),
}


def donated(by="update"):
    acc = pa.accumulator(squares, squares=True)
    state = acc.update(acc.init(PARAMS), PARAMS, make_batch())
    if by == "update":
        acc.update(state, PARAMS, make_batch(), donate=True)
    else:
        acc.finalize(state, donate=True)
    return state


either = pytest.mark.parametrize("by", ["update", "finalize"])
GIVEN_UP = ("given up with donate=True", "Use the returned state", "leave donate out")


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_says_so(use):
    with saying(RuntimeError, *GIVEN_UP):
        use(donated().grads["w"])


@pytest.mark.parametrize("field", pa.AccumState._fields)
@either
def test_every_field_is_given_up(field, by):
    tensors = optree.tree_leaves(getattr(donated(by), field))
    assert tensors
    for tensor in tensors:
        with saying(RuntimeError, *GIVEN_UP):
            tensor + 1


@pytest.mark.parametrize("use", EMPTY.values(), ids=EMPTY)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_use_that_never_asks_sees_no_memory(use):
    assert use(donated().grads["w"]).numel() == 0


@pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)
def test_a_tensor_that_is_only_handed_on_stays_donated(idle):
    with saying(RuntimeError, *GIVEN_UP):
        idle(donated().grads["w"]) + 1


@either
@pytest.mark.parametrize("flatten", [optree.tree_leaves, torch_pytree.tree_leaves])
def test_flattening_is_not_a_use_but_what_comes_out_is(by, flatten):
    for leaf in flatten(donated(by)):
        with saying(RuntimeError, *GIVEN_UP):
            leaf + 1
    for mapped in (optree.tree_map, torch_pytree.tree_map):
        with saying(RuntimeError, *GIVEN_UP):
            mapped(torch.clone, donated(by))


@either
@pytest.mark.parametrize(
    "use",
    [copy.deepcopy, pickle.dumps, lambda s: torch.save(s, io.BytesIO())],
    ids=["deepcopy", "pickle", "save"],
)
def test_a_use_of_a_whole_state_says_so(by, use):
    with saying(RuntimeError, *GIVEN_UP):
        use(donated(by))


@either
@pytest.mark.parametrize("donate", [False, True])
def test_our_own_functions_refuse_a_donated_state(by, donate):
    loss, batch = Loss(squares), make_batch()
    acc = pa.accumulator(loss)
    state, other = donated(by), acc.init(PARAMS)
    for call in (
        lambda: acc.update(state, PARAMS, batch, donate=donate),
        lambda: acc.merge(state, other),
        lambda: acc.merge(other, state),
        lambda: acc.finalize(state, donate=donate),
    ):
        with refused(RuntimeError, *GIVEN_UP, loss=loss), unchanged(other, PARAMS, batch):
            call()


@either
def test_a_donated_state_can_be_thrown_away(by):
    """``is``, ``id``, ``isinstance``, hashing and ``del`` need no number."""
    state = donated(by)
    assert all(x is x and isinstance(x, Tensor) and hash(x) for x in optree.tree_leaves(state))
    del state


# An error during update(donate=True) loses nothing, or says that it did ------------------------


LEAVES = calls.make_params()
SPOILED = ("given up with donate=True", "failed in the middle", "state that was not donated")
engines = pytest.mark.parametrize("engine", calls.ENGINES)
modes = pytest.mark.parametrize("nonfinite", calls.NONFINITE)


def exploding(at):
    """A backward pass that fails at one leaf, ``large`` or ``w``, having done the other or not."""
    first, last = ("w", "large") if at == "last" else ("large", "w")

    def loss(params, batch):
        exploded = params | {last: calls.Explodes.apply(params[last])}
        return calls.mean_loss(exploded, batch) + 0 * params[first].sum()

    return loss


def begun(engine, nonfinite="propagate"):
    acc = pa.accumulator(calls.mean_loss, engine=engine, nonfinite=nonfinite)
    state = acc.update(acc.init(LEAVES), LEAVES, calls.make_batch(3), donate=True)
    return state, acc.finalize(state)


def update(loss, state, engine, nonfinite, params=LEAVES):
    acc = pa.accumulator(loss, engine=engine, nonfinite=nonfinite)
    return acc.update(state, params, calls.make_batch(2), donate=True)


def whole_or_gone(state, expected, *uses):
    """A state that is whole, or of which each of the uses says that it is gone."""
    acc = pa.accumulator(calls.mean_loss)
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
        calls.mean_loss(params, batch)
        raise calls.BoomError

    state, expected = begun(engine, nonfinite)
    with unchanged(state, LEAVES), pytest.raises(calls.BoomError):
        update(loss, state, engine, nonfinite)
    assert_trees_bitwise_equal(pa.accumulator(calls.mean_loss).finalize(state), expected)


@engines
@modes
@pytest.mark.parametrize("at", ["first", "last"])
def test_an_error_in_the_backward_pass_loses_nothing_or_says_so(engine, nonfinite, at):
    """Where one sum says so all do: a state is whole or gone."""
    state, expected = begun(engine, nonfinite)
    with unchanged(LEAVES), pytest.raises(calls.BoomError):
        update(exploding(at), state, engine, nonfinite)
    whole_or_gone(
        state,
        expected,
        lambda acc: acc.finalize(state),
        lambda acc: acc.finalize(state, donate=True),
        lambda acc: acc.update(state, LEAVES, calls.make_batch()),
        lambda acc: acc.merge(acc.init(LEAVES), state),
        *(lambda _, x=x: x + 1 for x in state.grads.values()),
    )


@engines
@pytest.mark.parametrize("at", ["first", "last"])
def test_skip_adds_nothing_before_all_is_known(engine, at):
    state, _ = begun(engine, "skip")
    with unchanged(state), pytest.raises(calls.BoomError):
        update(exploding(at), state, engine, "skip")


# nonfinite="raise" -----------------------------------------------------------------------


def make_bad(leaf):
    """Finite, but for the gradient of one leaf at the samples from the fourth on."""

    def loss(params, batch):
        zero = params[leaf] - params[leaf].detach()
        return calls.mean_loss(params, batch) + (zero.sqrt().sum() if batch["y"].max() >= 4 else 0)

    return loss


def nan_loss(params, batch):
    return calls.mean_loss(params, batch) * (torch.nan if batch["y"].max() >= 4 else 1)


CAUSES = ("inf or NaN", "nonfinite='raise'", "learning rate", "Weighted")


LOSSES = {leaf: make_bad(leaf) for leaf in ("w", "large")} | {"the loss": nan_loss}


@pytest.mark.promise("errors")
@engines
@pytest.mark.parametrize("bad", LOSSES)
def test_raise_names_the_leaf_or_the_loss_and_the_microbatch(engine, bad):
    gradient = pa.grad(LOSSES[bad], microbatch_size=2, nonfinite="raise", engine=engine)
    what = bad if bad == "the loss" else f"gradient of args[0]['{bad}']"
    named = f"{what} of microbatch 2 (from sample 4)"
    with unchanged(LEAVES), saying(FloatingPointError, named, *CAUSES) as caught:
        gradient(LEAVES, calls.make_batch(6))
    assert not any(f"'{leaf}'" in str(caught.value) for leaf in LEAVES if leaf != bad)


@pytest.mark.promise("errors")
@engines
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("bad", LOSSES)
def test_raise_names_it_in_a_stream(engine, donate, bad):
    """A state that was given up for a bad gradient is whole or gone; for a bad loss it is whole."""
    acc = pa.accumulator(LOSSES[bad], nonfinite="raise", engine=engine)
    state = acc.update(acc.init(LEAVES), LEAVES, calls.make_batch(2))
    expected, whole = acc.finalize(state), bad == "the loss" or not donate
    what = bad if bad == "the loss" else f"params['{bad}']"
    with (
        unchanged(state) if whole else nullcontext(),
        saying(FloatingPointError, f"{what} of microbatch 1:", *CAUSES),
    ):
        acc.update(state, LEAVES, calls.make_batch(6), donate=donate)
    if whole:
        assert_trees_bitwise_equal(acc.finalize(state), expected)
    else:
        whole_or_gone(state, expected, lambda acc: acc.finalize(state))
