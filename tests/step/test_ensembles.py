"""``vmap(step)`` over stacked states is the loop over its members, each with a fate of its own.

Numbers that pass through other kernels under vmap are compared to the bound of test_step.py; bits
where the arithmetic is exact, where nothing is computed, and between two runs of one ensemble that
differ in another member.
"""

from functools import partial

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds, trees
from tests import exactly
from tests.draws import examples, generator, take
from tests.problems import in_a_window
from tests.refusals import refused
from tests.step.problems import (
    assert_close,
    leaves,
    loss,
    make_batch,
    make_params,
    member,
    poisoned,
)


pytestmark = [pytest.mark.transforms, pytest.mark.promise("ensembles")]
MEMBERS = 3


# Stack and unstack ------------------------------------------------------------------------


def fill_(tree, number):
    for x in leaves(tree):
        x.fill_(number)
    return tree


@given(trees(), st.integers(1, 4))
def test_states_are_stacked_and_taken_apart_again(tree, count):
    """The bits of each, and memory of their own: what is written to one stays there."""
    each = [tree, *(fill_(exactly.copied(tree), i) for i in range(1, count))]
    before = exactly.copied(each)
    many = pa.stack(each)
    for i in range(count):
        assert_trees_bitwise_equal(member(many, i), each[i])
    apart = pa.unstack(many)
    assert_trees_bitwise_equal(apart, each)
    kept = exactly.copied(many)
    fill_(apart[0], 9)
    assert_trees_bitwise_equal(many, kept)
    assert_trees_bitwise_equal(apart[1:], each[1:])
    fill_(many, 8)
    assert_trees_bitwise_equal(each, before)
    assert_trees_bitwise_equal(apart[1:], each[1:])


@pytest.mark.promise("donation")
def test_a_member_that_is_given_up_leaves_the_others():
    step = pa.make_step(loss, pa.adamw(0.1, fused=True), donate=True)
    many = pa.stack([step.init(make_params(i), seed=i) for i in range(MEMBERS)])
    kept, (first, *rest) = exactly.copied(many), pa.unstack(many)
    new, _ = step(first, make_batch())
    with pytest.raises(RuntimeError, match="given up"):
        first.params["w"].sum()
    assert not exactly.same(new.params, member(kept, 0).params)
    assert_trees_bitwise_equal(many, kept)
    assert_trees_bitwise_equal(rest, [member(kept, i) for i in range(1, MEMBERS)])


x, y = torch.ones(2), torch.ones(3)
STACKED = {
    "nothing": ([], ("trees is empty",)),
    "another key": ([{"a": x}, {"b": x}], ("trees[1]['a'] is missing",)),
    "another container": ([[x], (x,)], ("trees[1]", "containers differ")),
    "another shape": ([{"a": x}, {"a": x}, {"a": y}], ("trees[2]['a']", "(3,)", "(2,)")),
    "another dtype": ([[x, x], [x, x.double()]], ("trees[1][1]", "float64", "float32")),
    "a number": ([{"a": x}, {"a": 1.0}], ("trees[1]['a'] is a float", "float32 tensor")),
    "numbers alone": ([{"a": 1}, {"a": 1}], ("trees[0]['a'] is an int", "expected a tensor")),
    "a tensor": (torch.ones(2, 2), ("trees", "Tensor")),
    "a dict": ({"a": x}, ("trees", "dict")),
}
UNSTACKED = {
    "0-d": ({"a": x, "b": x[0]}, ("tree['b']", "shape ()", "dim 0")),
    "0-d first": ({"a": x[0], "b": x}, ("tree['a']", "shape ()", "dim 0")),
    "another length": ([x, (x, y)], ("tree[1][1]", "(3,)", "one row per member")),
    "a number beside": ({"a": x, "b": 2}, ("tree['b'] is an int", "expected a tensor")),
    "no leaf": ((), ("no leaves",)),
}


@pytest.mark.promise("errors")
@pytest.mark.parametrize("name", [*STACKED, *UNSTACKED])
def test_what_cannot_be_stacked_or_taken_apart_is_named(name):
    call, table = (pa.stack, STACKED) if name in STACKED else (pa.unstack, UNSTACKED)
    tree, words = table[name]
    with refused((ValueError, TypeError) if name in STACKED else ValueError, *words, given=tree):
        call(tree)


# Ensembles --------------------------------------------------------------------------------


def divided(lr, **momentum):
    parts = {"a": pa.sgd(lr, **momentum), "b": pa.adamw(lr)}
    return pa.partition(parts, lambda p: "ab"[p == "w"])


RULES = {
    "nesterov": lambda lr: pa.sgd(lr, momentum=0.9, nesterov=True),
    "adamw": pa.adamw,
    "clipped": lambda lr: pa.chain(pa.clip_by_global_norm(0.3), pa.adam(lr)),
    "divided": divided,
    "divided, momentum": lambda lr: divided(lr, momentum=0.9),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@examples(1 / 8)
@given(
    seed=seeds(),
    size=st.sampled_from([None, 1, 2, 3, 4]),
    options=st.sampled_from([{}, {"noise": True}, {"nonfinite": "skip"}]),
    bad=st.none() | st.integers(0, MEMBERS - 1),
    shared=st.booleans(),
)
def test_members_have_seeds_rates_orders_and_scales_of_their_own(
    rule, seed, size, options, bad, shared
):
    """Each member beside a step that was made for it alone, on the data in its own order.

    One of them may overflow in all samples, so that nothing is left to skip, and only that.
    """
    data = make_batch(seed, 12)

    def make_step(lr, scale):
        scaling = pa.dynamic_loss_scale(scale, growth_interval=2)
        return pa.make_step(
            loss, rule(lr), microbatch_size=size, loss_scale=scaling, keys=True, **options
        )

    steps = [make_step(0.1 / 10**i, 4.0**i) for i in range(MEMBERS)]
    states = [step.init(make_params(seed + i), seed=i) for i, step in enumerate(steps)]
    orders = [torch.randperm(12, generator=generator(seed + i)).split(4) for i in range(MEMBERS)]
    ensemble = vmap(steps[0], (0, None if shared else 0))
    many = pa.stack(states)
    for turn in range(3):
        if turn == 1 and bad is not None:
            many.params["b"][bad, 0] = states[bad].params["b"][0] = torch.nan
        parts = [take(data, order[turn]) for order in (orders[:1] * MEMBERS if shared else orders)]
        before = many
        many, infos = ensemble(many, parts[0] if shared else pa.stack(parts))
        alone = [step(state, x) for step, state, x in zip(steps, states, parts, strict=True)]
        assert_close(pa.unstack((many, infos)), alone)
        states = [state for state, _ in alone]
        assert infos.applied.tolist() == [turn == 0 or i != bad for i in range(MEMBERS)]
        if turn and bad is not None:
            assert_trees_bitwise_equal(member(many, bad)[:3], member(before, bad)[:3])
            halved = (before.loss_scale.scale[bad] / 2).clamp(min=1)
            assert many.loss_scale.scale[bad] == halved
    if bad is None:
        assert many.loss_scale.scale.tolist() == [2.0, 8.0, 32.0]
    assert many.samples.tolist() == [12] * MEMBERS


def test_a_skipped_microbatch_in_one_member_stays_in_it():
    """The other members count theirs."""
    step = pa.make_step(loss, pa.adam(0.1), microbatch_size=2, nonfinite="skip")
    state, batches = step.init(make_params()), [make_batch(i, 5) for i in range(MEMBERS)]
    batches[1] = poisoned(batches[1], 3)
    got = _, info = vmap(step, (None, 0))(state, pa.stack(batches))
    assert info.skipped.tolist() == [0, 1, 0]
    assert info.weight.tolist() == [5, 3, 5]
    assert_close(pa.unstack(got), [step(state, batch) for batch in batches])


def test_a_stream_of_an_ensemble_is_that_of_its_members():
    step = pa.make_step(loss, pa.adamw(0.1), keys=True, loss_scale=pa.dynamic_loss_scale(8.0))
    states = [step.init(make_params(i), seed=i) for i in range(MEMBERS)]
    parts = [make_batch(i, rows) for i, rows in enumerate((2, 3, 1))]
    run = partial(in_a_window, step, parts=parts)
    assert_close(pa.unstack(vmap(run)(pa.stack(states))), [*map(run, states)])


def test_an_ensemble_is_made_by_vmap():
    step = pa.make_step(loss, pa.adamw(0.1), loss_scale=pa.dynamic_loss_scale())
    params = [make_params(i) for i in range(MEMBERS)]
    assert_trees_bitwise_equal(
        vmap(step.init)(pa.stack(params)), pa.stack([*map(step.init, params)])
    )


@examples(1 / 2)
@given(seeds(), exactly.losses, st.integers(1, 12), st.data())
def test_exact_steps_are_those_of_the_loop(seed, case, size, data):
    """Rates and scales that are powers of two: in bits, in an ensemble of any number."""
    options = {"microbatch_size": size, "reduction": case.reduction}
    step = pa.make_step(case.call, pa.sgd(1.0), loss_scale=pa.dynamic_loss_scale(1.0), **options)
    states = []
    for i in range(MEMBERS):
        state = step.init(exactly.make_params(seed + i))
        rate, scale = 2.0 ** -data.draw(st.integers(0, 4)), 2.0 ** data.draw(st.integers(0, 20))
        scaling = pa.static_loss_scale(scale).init()
        opt_state = pa.sgd(rate).init(state.params)
        states.append(state._replace(opt_state=opt_state, loss_scale=scaling))
    batches = [exactly.make_batch(seed + i, 8) for i in range(MEMBERS)]
    want = [step(*pair) for pair in zip(states, batches, strict=True)]
    for count in (MEMBERS, 1):
        got = vmap(step)(pa.stack(states[:count]), pa.stack(batches[:count]))
        assert_trees_bitwise_equal(*map(exactly.but_checked, (pa.unstack(got), want[:count])))


def test_masks_are_each_members_own():
    """A member's seed alone decides; the numbers are integers, and so the same bits anywhere."""

    def masked(p, batch, keys):
        mask = pa.dropout(torch.ones_like(batch), 0.5, keys)
        return (p * mask).mean(), mask

    step = pa.make_step(masked, pa.sgd(0.0), has_aux=True, microbatch_size=2, keys=True)
    states, batch = [step.init(torch.ones(64), seed=seed) for seed in (0, 1, 0)], torch.ones(5, 64)
    many, before = pa.stack(states), None
    for _ in range(3):
        many, infos = vmap(step, (0, None))(many, batch)
        alone = [step(state, batch) for state in states]
        states = [state for state, _ in alone]
        assert_trees_bitwise_equal(infos.aux, torch.stack([info.aux for _, info in alone]))
        assert torch.equal(infos.aux[0], infos.aux[2])
        assert not torch.equal(infos.aux[0], infos.aux[1])
        assert before is None or not torch.equal(infos.aux, before)
        before = infos.aux


@examples(1 / 2)
@given(seeds(), st.integers(0, MEMBERS - 1), st.booleans(), st.integers(1, 4))
def test_one_member_overflows_and_no_other_notices(seed, bad, poison, size):
    """By a sample, or a scale beyond fp16: its parameters stay, and its scale alone backs off."""
    step = pa.make_step(
        loss,
        pa.adamw(0.1),
        microbatch_size=size,
        policy=pa.Policy(compute=torch.float16),
        loss_scale=pa.dynamic_loss_scale(2.0**4),
    )
    single = optree.tree_map(Tensor.float, [make_params(seed + i) for i in range(MEMBERS)])
    healthy = pa.stack([step.init(params, seed=i) for i, params in enumerate(single)])
    batches = pa.stack([make_batch(seed + i, 4) for i in range(MEMBERS)])
    sick, poisoned = exactly.copied(healthy), exactly.copied(batches)
    if poison:
        poisoned["y"][bad, seed % 4] = torch.nan
    else:
        sick.loss_scale.scale[bad] = 2.0**40
    rest = [i for i in range(MEMBERS) if i != bad]
    for turn in range(2):
        before = sick
        healthy, well = vmap(step)(healthy, batches)
        sick, infos = vmap(step)(sick, poisoned)
        assert well.applied.all()
        assert infos.applied.tolist() == [i != bad for i in range(MEMBERS)]
        for i in rest:
            assert_trees_bitwise_equal(*(member(z, i) for z in ((sick, infos), (healthy, well))))
        assert_trees_bitwise_equal(member(sick, bad)[:3], member(before, bad)[:3])
        assert sick.loss_scale.scale[bad] == before.loss_scale.scale[bad] / 2
        assert sick.attempts.tolist() == [turn + 1] * MEMBERS
        assert sick.applied.tolist() == [(turn + 1) * (i != bad) for i in range(MEMBERS)]


def test_the_noise_of_many_members_is_no_noise_of_one():
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=1, noise=True)
    many = pa.stack([step.init(make_params(i)) for i in range(MEMBERS)])
    with refused(ValueError, "vmap"):
        pa.noise_scale(vmap(step, (0, None))(many, make_batch())[1].noise)


class Model:
    """Whose loss is a method, bound to what no compiler can write out."""

    def loss(self, params, batch):
        return loss(params, batch)


@pytest.mark.slow
def test_a_step_has_a_name_for_vmap():
    """Where there is none, vmap asks for the ``repr`` of all that the loss is bound to."""
    step = pa.make_step(Model().loss, pa.sgd(0.1))
    many = pa.stack([step.init(make_params(i), seed=i) for i in range(2)])
    every = torch.func.vmap(step, in_dims=(0, None))
    graph = torch.compile(every, backend="eager", fullgraph=True)
    assert_trees_bitwise_equal(graph(many, make_batch())[0].attempts, torch.ones(2).long())
