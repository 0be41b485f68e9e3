"""The buffers of a module after a training step are those that its policy promises."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import BoomError
from tests.pure.networks import Checkpointed
from tests.pure.test_functional import (
    MODULES,
    RELEASE,
    every_module,
    own,
    policies,
    wide,  # noqa: F401
)
from tests.refusals import refused


pytestmark = [pytest.mark.parity, pytest.mark.promise("buffers")]
SIZES = [4, 2, 5]
OFF = {"compile": False}


def rows():
    return torch.randn(sum(SIZES), 3)


def stepping(fn, policy, change=lambda new: new, **options):
    """A step that leaves parameters alone, and its first state."""

    def loss(params, x, buffers):
        out, new_buffers = fn.apply(params[0], buffers, x)
        return (out * out).sum() * params[1], change(new_buffers)

    options = {"microbatch_size": SIZES, "reduction": "sum", "check": False} | options
    step = pa.make_step(loss, pa.sgd(0.0), buffers=policy, **options)
    return step, step.init((fn.params, torch.ones(())), fn.buffers)


def pointers(tree):
    return [x.untyped_storage().data_ptr() for x in tree.values()]


def skip_twice(name, policy):
    if name == "tied" and policy == "pooled":
        pytest.skip("its BatchNorm is called twice")


@every_module
def test_sequential_buffers_are_those_of_a_loop_of_calls(name):
    module, x = MODULES[name](), rows()
    step, state = stepping(pa.functional(module), "sequential")
    new, _ = step(state, x)
    for part in x.split(SIZES):
        module(part)
    assert_trees_bitwise_equal(new.buffers, own(module)[1])


@every_module
def test_a_skipped_microbatch_leaves_no_trace_in_buffers(name):
    module, x = MODULES[name](), rows()
    x[5] = torch.nan
    step, state = stepping(pa.functional(module), "sequential", nonfinite="skip")
    new, info = step(state, x)
    assert info.skipped == 1
    first, _, last = x.split(SIZES)
    module(first)
    module(last)
    assert_trees_bitwise_equal(new.buffers, own(module)[1])


@policies
@every_module
def test_a_step_changes_no_module_and_shares_no_buffer(name, policy):
    """Frozen buffers stay as they were."""
    skip_twice(name, policy)
    module, x = MODULES[name](), rows()
    step, state = stepping(pa.functional(module), policy)
    with unchanged(module, state, x):
        new, _ = step(state, x)
    if policy == "freeze":
        assert_trees_bitwise_equal(new.buffers, state.buffers)
    else:
        held = [*pointers(new.buffers), *pointers(state.buffers), *pointers(own(module)[1])]
        assert len({*held}) == len(held)


def test_layers_that_are_no_batch_norm_go_sequentially_when_pooled():
    module, x = MODULES["instance norm"](), rows()
    step, state = stepping(pa.functional(module), "pooled")
    new, _ = step(state, x)
    for part in x.split(SIZES):
        module(part)
    assert_trees_bitwise_equal(new.buffers, own(module)[1])


def test_pooled_buffers_of_a_layer_that_does_not_train_stay():
    module = nn.BatchNorm1d(3).eval()
    module.running_var.fill_(torch.inf)
    step, state = stepping(pa.functional(module), "pooled")
    new, _ = step(state, rows())
    assert_trees_bitwise_equal(new.buffers, state.buffers)


@policies
def test_a_layer_that_the_backward_pass_runs_again_counts_once(policy):
    module, x = Checkpointed(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), rows()
    step, state = stepping(pa.functional(module), policy, engine="autograd")
    new, _ = step(state, x)
    module.on = False
    want, _ = step(state, x)
    assert_trees_bitwise_equal(new.buffers, want.buffers)


@pytest.mark.promise("ensembles")
@policies
@pytest.mark.parametrize("name", ["1d", "2d", "reassigned", "tied"])
def test_members_have_the_buffers_that_each_has_alone(name, policy):
    """Up to the order of sums in batched kernels."""
    skip_twice(name, policy)
    step, _ = stepping(pa.functional(MODULES[name]()), policy)
    states = [stepping(pa.functional(MODULES[name]()), policy)[1] for _ in range(3)]
    x = rows()
    many, _ = torch.func.vmap(step, (0, None))(pa.stack(states), x)
    for state, member in zip(states, pa.unstack(many), strict=True):
        want, _ = step(state, x)
        torch.testing.assert_close(member.buffers, want.buffers, rtol=2**-26, atol=2**-26)


@pytest.mark.promise("compiled")
@pytest.mark.nightly
@pytest.mark.skipif(RELEASE < (2, 12), reason="dynamo cannot compare structures before")
def test_a_compiled_step_has_the_buffers_of_the_eager_one():
    """Sequential ones: step/test_pairs.py has those that are pooled."""
    fn, x = pa.functional(MODULES["1d"]()), rows()[:9]
    options = {"microbatch_size": 3, "compile": {"backend": "aot_eager"}}
    torch.compiler.reset()
    (step, state), (eager, _) = (
        stepping(fn, "sequential", **(options | more)) for more in ({}, OFF)
    )
    for _ in range(2):
        (state, _), (want, _) = step(state, x), eager(state, x)
        torch.testing.assert_close(state.buffers, want.buffers, rtol=2**-26, atol=2**-26)


# What goes wrong ------------------------------------------------------------------------


def test_after_a_loss_that_raises_batch_norm_is_torch_s_own():
    fn = pa.functional(nn.BatchNorm1d(3))

    def fail(_):
        raise BoomError

    step, state = stepping(fn, "pooled", fail)
    mean, var, x = torch.zeros(3), torch.ones(3), rows()
    with unchanged(state), pytest.raises(BoomError):
        step(state, x)
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(var, x.var(0))


@policies
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda b: {}, ValueError, "new_buffers['num_batches_tracked'] is missing"),
        (lambda b: {**b, "z": b["running_mean"]}, ValueError, "new_buffers['z'] is not in buffers"),
        (lambda b: {**b, "running_var": 3}, TypeError, "new_buffers['running_var'] is an int"),
        (lambda b: {**b, "running_var": b["running_var"][:1]}, ValueError, "has shape (1,)"),
        (lambda b: {**b, "running_var": b["running_var"].float()}, ValueError, "torch.float32"),
    ],
    ids=["nothing", "one more", "a number", "shape", "dtype"],
)
def test_new_buffers_unlike_those_that_were_given_are_refused(policy, change, error, words):
    x, usual = rows(), "With buffers, aux is (new_buffers, aux)"
    step, state = stepping(pa.functional(nn.BatchNorm1d(3)), policy, change)
    with refused(error, words, usual, given=state):
        step(state, x)


def test_buffers_that_are_no_tensors_are_refused():
    step, state = stepping(pa.functional(nn.BatchNorm1d(3)), "sequential")
    with refused(TypeError, "buffers['n'] is a float", "expected a tensor"):
        step.init(state.params, {"n": 1.0})


def twice(fn):
    """A function that calls another one two times, with the buffers of the first."""

    def apply(params, buffers, x):
        out, new_buffers = fn.apply(params, buffers, x)
        return fn.apply(params, new_buffers, out)

    return fn._replace(apply=apply)


def under_other_names(fn):
    """Running statistics that batch norm gets under names that no module gives them."""

    def apply(params, buffers, x):
        new = {name: b.clone() for name, b in buffers.items()}
        return F.batch_norm(x, new["mean"], new["var"], training=True), new

    return fn._replace(apply=apply, buffers={"mean": torch.zeros(3), "var": torch.ones(3)})


def one(fn):
    return fn


STRAY = ("running mean(s) that are not in new_buffers", "functional(module).apply")
NOT_POOLED = {
    "called twice": ("tied", one, dict, ("calls of batch norm", "buffers='sequential'")),
    "copied": ("1d", one, lambda b: {k: x.clone() for k, x in b.items()}, STRAY),
    "detached": ("1d", one, lambda b: {k: x.detach() for k, x in b.items()}, STRAY),
    "two calls": ("cumulative", twice, dict, STRAY),
    "other names": ("1d", under_other_names, dict, (*STRAY, "'running_mean' with 'running_var'")),
}


@pytest.mark.parametrize(("name", "around", "change", "words"), NOT_POOLED.values(), ids=NOT_POOLED)
def test_statistics_that_cannot_be_pooled_are_refused(name, around, change, words):
    """Of a layer that is called twice, and of calls whose buffers are not those returned."""
    x = rows()
    step, state = stepping(around(pa.functional(MODULES[name]())), "pooled", change)
    with refused(ValueError, *words, given=state):
        step(state, x)
