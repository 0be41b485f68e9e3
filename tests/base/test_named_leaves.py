"""What stands in a nested state, found and set by its name."""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged


pytestmark = [pytest.mark.exact, pytest.mark.promise("documented")]
PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}


def loss(params, x):
    return (x @ params["w"] + params["b"]).square().mean()


def optimizer(one=0.5, other=0.25):
    parts = {"decay": pa.adamw(one), "none": pa.sgd(other, momentum=0.5)}
    groups = pa.partition(parts, lambda path: "decay" if path == "w" else "none")
    return pa.chain(pa.clip_by_global_norm(1.0), groups)


def made(**options):
    step = pa.make_step(loss, optimizer(), loss_scale=pa.dynamic_loss_scale(), **options)
    return step, step.init(PARAMS)


def test_rates_are_found_and_set_in_a_partition_in_a_chain():
    _, state = made()
    assert pa.tree_get(state, "['decay'].lr") == 0.5
    assert pa.tree_get(state, "opt_state[1]['none'].lr") == 0.25
    with unchanged(state):
        slower = pa.tree_set(state, lr=lambda lr: lr / 2)
    assert pa.tree_get(slower, "['decay'].lr") == 0.25
    assert pa.tree_get(slower, "['none'].lr") == 0.125
    one = pa.tree_set(state, {"['none'].lr": 3, "loss_scale.scale": 8.0}, growth_tracker=7)
    rate = pa.tree_get(one, "['none'].lr")
    assert (rate, rate.dtype) == (3.0, torch.float64)
    assert pa.tree_get(one, "['decay'].lr") == 0.5
    assert (one.loss_scale.scale, one.loss_scale.growth_tracker) == (8.0, 7)
    assert one.loss_scale.growth_tracker.dtype == torch.int32
    kept = pa.tree_set(one, {"['none'].lr": 0.25, "loss_scale.scale": 2.0**16}, growth_tracker=0)
    assert_trees_bitwise_equal(kept, state)


def test_subtrees_are_found():
    _, state = made()
    assert pa.tree_get(state, "exp_avg") == state.opt_state[1]["decay"].exp_avg
    assert pa.tree_get(state, "momentum") is not None
    assert pa.tree_get(state, "params") == state.params
    assert pa.tree_get(state, ".applied") is state.applied
    assert pa.tree_get({"a": [1, {"b": 2}]}, "b") == 2
    assert pa.tree_get({"a": [1, {"b": 2}]}, "[1]['b']") == 2


def test_a_step_goes_on_with_what_is_set():
    x = torch.arange(8.0).reshape(4, 2)
    step, state = made(donate=True)
    rate = torch.tensor(0.5, dtype=torch.float64)
    state = pa.tree_set(state, {"['decay'].lr": rate})
    state, _ = step(state, x)
    assert rate == 0.5  # a copy of it was given up
    frozen = pa.tree_set(state, lr=0.0)
    before = {name: p.clone() for name, p in frozen.params.items()}
    new, info = step(frozen, x)
    assert info.applied
    assert_trees_bitwise_equal(new.params, before)


def test_the_state_of_an_optimizer_of_torch():
    opt = pa.from_torch(torch.optim.RMSprop, lr=0.5, alpha=0.75)
    state = opt.init(PARAMS)
    assert pa.tree_get(state, "lr") == 0.5
    state = pa.tree_set(state, lr=0.125, alpha=0.5)
    want = pa.from_torch(torch.optim.RMSprop, lr=0.125, alpha=0.5)
    grads = {"w": torch.full((2, 2), 3.0), "b": torch.ones(2)}
    new, _ = opt.apply(grads, state, PARAMS)
    assert_trees_bitwise_equal(new, want.apply(grads, want.init(PARAMS), PARAMS)[0])


def test_under_a_vmap_each_member_has_its_own():
    _, state = made()
    stacked = pa.stack([state, state])
    rates = torch.tensor([0.5, 2.0])
    set_ = torch.func.vmap(lambda s, lr: pa.tree_set(s, lr=lr))(stacked, rates)
    assert pa.tree_get(set_, "['none'].lr").tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("do", "error", "words"),
    [
        (
            lambda s: pa.tree_get(s, "lr"),
            KeyError,
            r"\['decay'\]\.lr, .*\['none'\]\.lr\. Pass a longer",
        ),
        (lambda s: pa.tree_get(s, "rate"), KeyError, r"'rate' is the end of no path\. .*lr"),
        (lambda s: pa.tree_get(s, ""), TypeError, "name is ''"),
        (lambda s: pa.tree_set(s, l=1.0), KeyError, "'l' is the end of no path"),
        (lambda s: pa.tree_set(s, {"].lr": 1.0, "r": 2.0}), KeyError, "is the end of no path"),
        (lambda s: pa.tree_set(s, params=1.0), KeyError, "names a subtree"),
        (lambda s: pa.tree_set(s, lr="fast"), TypeError, "is set to 'fast', a str"),
        (lambda s: pa.tree_set(s, lr=torch.ones(2)), ValueError, r"shape \(2,\); expected \(\)"),
        (lambda s: pa.tree_set(s, growth_tracker=0.5), TypeError, "expected a whole number"),
        (lambda s: pa.tree_set(s, attempts=torch.ones(())), TypeError, "expected a whole number"),
        (lambda s: pa.tree_set(s, 0.5), TypeError, "expected a dict"),
        (lambda s: pa.tree_set(s, {0: 0.5}), TypeError, "name is 0"),
    ],
)
def test_what_cannot_be_found_or_set_is_said(do, error, words):
    _, state = made()
    with unchanged(state), pytest.raises(error, match=words):
        do(state)


def test_a_rate_that_is_a_schedule_is_not_in_a_state():
    state = pa.adamw(pa.cosine_decay(0.5, 10)).init(PARAMS)
    with pytest.raises(KeyError, match="a schedule is not stored in a state"):
        pa.tree_set(state, lr=0.5)
