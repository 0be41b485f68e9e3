"""Clipping, chains and partitions beside what torch does with the same gradients."""

import math

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds, shapes, trees
from tests.draws import examples, generator
from tests.optimizers import Count, Polyak, Torchs, by_name, clones, leaves, make_params, normal


pytestmark = [
    pytest.mark.laws,
    pytest.mark.promise("optimizers"),
    pytest.mark.promise("documented"),
]


def clipped_by_torch(grads, max_norm, foreach):
    params = [torch.zeros_like(g).requires_grad_() for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    nn.utils.clip_grad_norm_(params, max_norm, foreach=foreach)
    return [param.grad for param in params]


# Clipping -------------------------------------------------------------------------------


@given(
    trees(shapes(3, 4).map(torch.empty)),
    st.sampled_from([torch.float32, torch.float64, torch.complex64]),
    st.floats(1e-3, 1e3),
    seeds(),
    st.booleans(),
    st.booleans(),
)
def test_clipping_has_the_bits_of_torch(tree, dtype, max_norm, seed, foreach, donate):
    random = generator(seed)
    grads = optree.tree_map(lambda x: normal(x.shape, random, dtype), tree)
    want = clipped_by_torch(leaves(grads), max_norm, foreach)
    clip = pa.clip_by_global_norm(max_norm)
    got, state = clip.update(grads, clip.init(grads), donate=donate)
    assert state == ()
    assert_trees_bitwise_equal(leaves(got), want)


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_of_zero_inf_and_nan_is_torchs(value, foreach):
    grads = [torch.full((3,), value), torch.ones(2) * (value == value)]
    got, _ = pa.clip_by_global_norm(0.5).update(grads, ())
    assert_trees_bitwise_equal(got, clipped_by_torch(grads, 0.5, foreach))


def test_the_norm_is_that_of_all_leaves():
    """And gradients below it keep their bits."""
    grads = {"a": torch.tensor([3.0]), "b": [torch.tensor(4.0), torch.zeros(0)]}
    assert pa.global_norm(grads) == 5.0
    for max_norm in (5.1, 1e9):
        got, _ = pa.clip_by_global_norm(max_norm).update(grads, ())
        assert_trees_bitwise_equal(got, grads)
    got, _ = pa.clip_by_global_norm(1.0).update(grads, ())
    assert pa.global_norm(got) < 1.0


def test_clipping_goes_through_transforms():
    """vmap: a norm for each member; grad: through the norm."""
    clip = pa.clip_by_global_norm(1.0)
    grads = {"w": torch.randn(4, 3) * torch.tensor([[0.01], [0.1], [1.0], [10.0]])}
    got = torch.func.vmap(lambda g: clip.update(g, (), donate=True)[0])(grads)
    alone = [clip.update({"w": g}, ())[0]["w"] for g in grads["w"]]
    torch.testing.assert_close(got["w"], torch.stack(alone), rtol=2**-20, atol=0)
    found = torch.func.grad(lambda g: clip.update(g, ())[0].sum())(torch.tensor([3.0, 4.0]))
    # of (3 + 4) / norm: 1 / 5 - 7 * x / 125
    torch.testing.assert_close(found, torch.tensor([0.2 - 0.168, 0.2 - 0.224]), rtol=0, atol=2**-20)


# Chains ---------------------------------------------------------------------------------


class Times:
    """A map without a state."""

    def __init__(self, factor):
        self.factor = factor

    def init(self, params):
        return ()

    def update(self, grads, state):
        return optree.tree_map(lambda g: g * self.factor, grads), state


def test_maps_come_one_after_the_other_and_then_the_optimizer():
    params, grads = torch.zeros(2), torch.tensor([3.0, 4.0])
    clip, double = pa.clip_by_global_norm(1.0), Times(2.0)
    cases = [
        ((clip, double), 2.0 * clip.update(grads, ())[0]),
        ((double, clip), clip.update(2.0 * grads, ())[0]),
        ((double, double), 4.0 * grads),
        ((), grads),
    ]
    for maps, want in cases:
        opt = pa.chain(*maps, pa.sgd(1.0))
        new, state = opt.apply(grads, opt.init(params), params)
        assert_trees_bitwise_equal(new, params - want)
        assert len(state) == len(maps) + 1


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.booleans(), seeds())
def test_a_chain_is_its_parts_by_hand(flags, donate, seed):
    """A map's state is taken over only where the step is applied."""
    clip, count, last = pa.clip_by_global_norm(1.0), Count(), pa.adamw(0.1)
    opt, params = pa.chain(clip, count, last), make_params(seed)
    state = opt.init(params)
    want, counted, held = clones(params), count.init(params), last.init(params)
    for n, flag in enumerate(flags):
        grads = make_params(seed + n)
        if flag:
            scaled, _ = clip.update(grads, ())
            scaled, counted = count.update(scaled, counted)
            want, held = last.apply(scaled, held, want)
        applied = torch.tensor(flag)
        params, state = opt.apply(grads, state, params, applied=applied, donate=donate)
        assert_trees_bitwise_equal((params, state), (want, ((), counted, held)))
    assert state[1].count == sum(flags)


def test_chains_may_hold_chains_and_users_optimizers():
    """``chain(a, chain(b, opt))`` is ``chain(a, b, opt)``, whoever made the optimizer."""
    for last in (pa.adam(0.1), Polyak(), pa.from_torch(torch.optim.Adagrad, lr=0.1)):
        flat = pa.chain(Times(3.0), pa.clip_by_global_norm(1.0), last)
        nested = pa.chain(Times(3.0), pa.chain(pa.clip_by_global_norm(1.0), last))
        params, found = make_params(), []
        for opt in (flat, nested):
            new, state = params, opt.init(params)
            for n in range(3):
                new, state = opt.apply(make_params(n + 1), state, new)
            found.append((new, leaves(state)))
        assert_trees_bitwise_equal(*found)


@pytest.mark.parametrize("applied", [None, True, False])
def test_a_users_own_optimizer_is_called_with_three_arguments(applied):
    params, grads = make_params(), make_params(1)
    plain, opt = Polyak(), pa.chain(Polyak())
    state = plain.init(params)
    want = (params, state) if applied is False else plain.apply(grads, state, params)
    flag = None if applied is None else torch.tensor(applied)
    new, kept = opt.apply(grads, (state,), params, applied=flag)
    assert_trees_bitwise_equal((new, kept), (want[0], (want[1],)))


# Partitions -----------------------------------------------------------------------------


def named(module):
    return {name: x.detach().clone() for name, x in module.named_parameters()}


GROUPS = {
    "sgd": (pa.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.5, "momentum": 0.5}),
    "adamw": (pa.adamw, torch.optim.AdamW, {"weight_decay": 0.3}, {"weight_decay": 0.0}),
    "fused": (pa.adam, torch.optim.Adam, {"fused": True}, {"lr": 0.1, "fused": True}),
}


@pytest.mark.parametrize("name", GROUPS)
@examples(1 / 4)
@given(seeds(), st.booleans())
def test_a_partition_is_torch_with_groups(name, seed, donate):
    make, cls, rest, bias = GROUPS[name]
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    params = named(module)
    is_bias = lambda path: "bias" if path.endswith("bias") or path.startswith("1.") else "rest"  # noqa: E731
    opt = pa.partition({"rest": make(**rest), "bias": make(**bias)}, is_bias)
    groups = [
        {"params": [x for n, x in module.named_parameters() if is_bias(n) == label], **given}
        for label, given in (("rest", rest), ("bias", bias))
    ]
    optimizer = cls(groups)
    state = opt.init(params)
    assert state.keys() == {"rest", "bias"}
    for _ in range(4):
        grads = {name: torch.randn_like(x) for name, x in params.items()}
        for n, x in module.named_parameters():
            x.grad = grads[n].clone()
        optimizer.step()
        params, state = opt.apply(grads, state, params, donate=donate)
        assert_trees_bitwise_equal(params, named(module))


def test_a_partition_of_partitions_is_one():
    """Inside, a path is that of the whole tree: leaves come as a flat dict from path to leaf."""
    seen = []

    def inner(path):
        seen.append(path)
        return "slow" if path == "in.0" else "fast"

    nested = pa.partition(
        {
            "bias": pa.sgd(0.5),
            "rest": pa.partition({"slow": pa.sgd(0.01), "fast": pa.adam(0.1)}, inner),
        },
        by_name,
    )
    flat = pa.partition(
        {"bias": pa.sgd(0.5), "slow": pa.sgd(0.01), "fast": pa.adam(0.1)},
        lambda path: "bias" if path == "b" else inner(path),
    )
    found = []
    for opt in (nested, flat):
        params = make_params()
        state = opt.init(params)
        for n in range(3):
            params, state = opt.apply(
                make_params(n + 1), state, params, applied=torch.tensor(n != 1)
            )
        found.append(params)
    assert_trees_bitwise_equal(*found)
    assert set(seen) == {"in.0", "w"}


def test_a_partition_of_one_label_is_the_optimizer_itself():
    for opt in (pa.adamw(0.1), pa.from_torch(torch.optim.NAdam, lr=0.1), pa.chain(Polyak())):
        part = pa.partition({"all": opt, "unused": pa.sgd(0.1)}, lambda path: "all")
        params = make_params()
        new, _ = part.apply(make_params(1), part.init(params), params)
        want, _ = opt.apply(make_params(1), opt.init(params), params)
        assert_trees_bitwise_equal(new, want)
        assert part.init(params).keys() == {"all"}


def test_a_map_inside_a_partition_sees_its_own_leaves():
    """The norm is that of the part."""
    params = {"a": torch.zeros(1), "b": torch.zeros(2)}
    grads = {"a": torch.tensor([100.0]), "b": torch.tensor([0.3, 0.4])}
    clipped = pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(1.0))
    opt = pa.partition({"a": clipped, "b": clipped}, str)
    new, _ = opt.apply(grads, opt.init(params), params)
    assert_trees_bitwise_equal(new["b"], -grads["b"])
    assert new["a"].item() == pytest.approx(-1.0, abs=1e-6)


def test_a_tree_that_is_one_tensor_has_an_empty_path():
    opt = pa.partition({"": pa.sgd(1.0)}, str)
    assert opt.apply(torch.ones(2), opt.init(torch.ones(2)), torch.ones(2))[0].tolist() == [0, 0]


def test_partitions_go_through_vmap():
    opt = pa.partition({"bias": pa.sgd(0.1, 0.9), "rest": pa.adam(0.1)}, by_name)
    trees = [make_params(n) for n in range(3)]
    states, grads = [opt.init(x) for x in trees], [make_params(9 + n) for n in range(3)]
    stacked = [optree.tree_map(lambda *xs: torch.stack(xs), *x) for x in (grads, states, trees)]
    new, _ = torch.func.vmap(opt.apply)(*stacked)
    for n in range(3):
        want, _ = opt.apply(grads[n], states[n], trees[n])
        got = optree.tree_map(lambda x, n=n: x[n], new)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_partition_serves_classes_of_torch():
    """One from_torch a label."""
    params, grads = make_params(), make_params(1)
    cls = torch.optim.RMSprop
    made = {"bias": pa.from_torch(cls, lr=0.5), "rest": pa.from_torch(cls, lr=0.1)}
    opt = pa.partition(made, by_name)
    new, _ = opt.apply(grads, opt.init(params), params)
    for names, lr in ((("b",), 0.5), (("w", "in"), 0.1)):
        their = Torchs(cls, {k: params[k] for k in names}, lr=lr)
        their.step({k: grads[k] for k in names})
        their.assert_same_params({k: new[k] for k in names})


@pytest.mark.slow
def test_a_dict_is_its_keys_and_not_their_order_in_a_graph_too():
    """Of gradients and of params, in another order than those that the state was made from."""
    random = generator(0)
    params, grads = (
        {name: torch.randn(3, generator=random) for name in order} for order in ("bac", "cab")
    )
    opt = pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.5, momentum=0.5))
    alike = [{name: tree[name] for name in "abc"} for tree in (grads, params)]
    state = opt.init(alike[1])
    torch.compiler.reset()
    compiled = torch.compile(opt.apply, fullgraph=True, backend="aot_eager")
    got, _ = compiled(grads, state, params)
    want, _ = compiled(alike[0], state, alike[1])
    assert_trees_bitwise_equal(got, want)
