"""What ranks compare: everything that they have to hold alike, and nothing that is their own."""

from functools import cache, partial
from itertools import count
from types import SimpleNamespace

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum._base.claims import (
    NOT_READ,
    _mixed,
    agreement,
    claim,
    compare,
    differences,
)
from pureaccum._base.settings import settings_of
from tests.states import STATES


pytestmark = [pytest.mark.laws, pytest.mark.mechanism]
HERE = torch.device("cpu")


@cache
def state_of(name):
    return STATES[name]()


def leaves_of(tree):
    return optree.tree_leaves(tree, namespace="pureaccum")


def claimed(tree, **options):
    return claim(agreement({}), "here", {}, {"state": tree}, HERE, "", **options)


def flipped(x, bit):
    """A tensor with one bit of its memory changed."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    flat = x.view(-1).view(torch.uint8)
    flat[bit // 8 % len(flat)] ^= 1 << bit % 8 if x.dtype != torch.bool else 1
    return x


@pytest.mark.parametrize("name", STATES)
@given(data=st.data())
def test_any_bit_is_seen_where_all_is_read(name, data):
    leaves, spec = optree.tree_flatten(state_of(name), namespace="pureaccum")
    at = data.draw(st.sampled_from([i for i, x in enumerate(leaves) if x.numel()]))
    other = [*leaves]
    other[at] = flipped(leaves[at], data.draw(st.integers(0, 2**16)))
    one, two = claimed(state_of(name)), claimed(optree.tree_unflatten(spec, other))
    assert one.kind == two.kind
    assert one.bits != two.bits
    again = claimed(optree.tree_map(torch.clone, state_of(name), namespace="pureaccum"))
    assert (again.kind, again.bits, again.few) == (one.kind, one.bits, one.few)


@given(data=st.data(), name=st.sampled_from(["trained", "first", "loss scale"]))
def test_small_leaves_are_seen_at_every_call(name, data):
    """Counts, scales, rates and keys: by the host, and the same on a device."""
    leaves, spec = optree.tree_flatten(state_of(name), namespace="pureaccum")
    small = [i for i, x in enumerate(leaves) if 0 < x.numel() <= 2]
    at = data.draw(st.sampled_from(small))
    other = [*leaves]
    other[at] = leaves[at] * 2 + 1 if leaves[at].dtype != torch.bool else ~leaves[at]
    one, two = (claimed(optree.tree_unflatten(spec, some), whole=False) for some in (leaves, other))
    assert one.bits == two.bits == NOT_READ
    assert one.few != two.few
    mixed = partial(_mixed, device=HERE)
    few, changed = ([some[i] for i in small] for some in (leaves, other))
    assert mixed(few) != mixed(changed)
    assert mixed(few) == mixed([x.clone() for x in few])
    assert abs(mixed(few)) <= 2**52


@given(numbers=st.lists(st.integers(0, 9), min_size=2, max_size=6), data=st.data())
def test_the_order_of_numbers_counts_on_a_device(numbers, data):
    other = data.draw(st.permutations(numbers))
    one, two = (_mixed([torch.tensor(n) for n in some], HERE) for some in (numbers, other))
    assert (one == two) == (numbers == other)


def test_all_is_read_at_the_first_call_and_more_and_more_seldom():
    agreed = agreement({})
    state = state_of("first")
    read = [
        claim(agreed, "here", {}, {"state": state}, HERE, "").bits != NOT_READ for _ in range(20)
    ]
    assert [i for i, it in zip(count(1), read, strict=False) if it] == [1, 2, 4, 8, 16]
    agreed = agreement({})
    far = torch.device("meta")  # no numbers to wait for
    claims = [claim(agreed, "here", {}, {"state": state}, far, "") for _ in range(20)]
    assert [i for i, it in zip(count(1), claims, strict=False) if it.look] == [1, 2, 4, 8, 16]
    assert [it.bits != NOT_READ for it in claims] == [True] + [False] * 19
    other = state_of("trained")._replace(params=torch.ones(3))
    new = claim(agreed, "here", {}, {"state": other}, HERE, "")
    assert new.bits != NOT_READ  # of another structure


def test_claims_that_nobody_looks_at_are_compared_on_the_device():
    one, other = claimed(state_of("first")), claimed(state_of("trained"))
    unseen = one._replace(look=False)
    of_all = torch.stack([one.numbers(), one.numbers()])
    assert compare(one, of_all, None) is None
    assert compare(unseen, of_all, None)
    assert not compare(unseen, torch.stack([one.numbers(), other.numbers()]), None)
    seldom = one._replace(bits=NOT_READ)  # another rank need not have read all
    assert compare(one, torch.stack([one.numbers(), seldom.numbers()]), None) is None


OPTIMIZERS = {
    "sgd": (pa.sgd(0.5, momentum=0.25), {"lr": "0.5", "momentum": "0.25", "nesterov": "False"}),
    "adamw": (
        pa.adamw(0.5, (0.5, 0.75), eps=0.25, amsgrad=True),
        {"": "adamw", "betas": "(0.5, 0.75)", "eps": "0.25", "amsgrad": "True"},
    ),
    "a tensor for a rate": (pa.sgd(torch.tensor(0.5)), {"lr": "0.5"}),
    "a schedule": (
        pa.sgd(pa.cosine_decay(0.5, 9)),
        {"lr": "cosine_decay", "lr.peak": "0.5", "lr.steps": "9", "lr.end": "0.0"},
    ),
    "schedules": (
        pa.sgd(pa.join_schedules([pa.constant(0.5), pa.constant(0.25)], [3])),
        {"lr.boundaries": "[3]", "lr.schedules[0].value": "0.5", "lr.schedules[1].value": "0.25"},
    ),
    "chain": (
        pa.chain(pa.clip_by_global_norm(2.0), pa.sgd(0.5)),
        {"parts[0].max_norm": "2.0", "parts[1].lr": "0.5"},
    ),
    "partition": (
        pa.partition({"a": pa.sgd(0.5), "b": pa.sgd(0.25)}, lambda path: "a"),
        {"optimizers.a.lr": "0.5", "optimizers.b.lr": "0.25"},
    ),
    "torch's": (
        pa.from_torch(torch.optim.RMSprop, lr=0.5, alpha=0.25),
        {"cls": "torch.optim.rmsprop.RMSprop", "settings.lr": "0.5", "settings.alpha": "0.25"},
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_was_made_with_is_compared(name):
    optimizer, want = OPTIMIZERS[name]
    found = settings_of(optimizer, "optimizer")
    assert {
        f"optimizer.{key}".rstrip("."): text for key, text in want.items()
    }.items() <= found.items()
    params = {"a": torch.ones(2)}
    optimizer.apply(params, optimizer.init(params), params)
    assert settings_of(optimizer, "optimizer") == found  # nothing of what it learned meanwhile


def test_a_user_s_function_counts_by_its_name():
    def made(rank):
        def rate(count):
            return count * 0.5 if rank else count * 0.25

        return pa.sgd(rate)

    assert settings_of(made(0), "optimizer") == settings_of(made(1), "optimizer")
    assert ".made.<locals>.rate" in settings_of(made(0), "optimizer")["optimizer.lr"]


class Plain:
    def init(self, params):
        return ()

    def apply(self, grads, state, params):
        return params, state

    def __call__(self, *given):
        return self.apply(*given)


def test_a_user_s_optimizer_counts_by_its_name():
    step = pa.make_step(lambda w, x: (w * x).mean(), Plain())
    found = settings_of(step.begin.args[0].optimizer, "optimizer")
    assert found["optimizer"] == "Plain"
    assert found["optimizer.apply"].endswith("test_agreement.Plain.apply")


def test_what_a_partial_of_a_user_binds_is_compared():
    rates = [settings_of(pa.sgd(partial(decayed, by, start=1.0)), "optimizer") for by in (0.5, 2.0)]
    assert [found["optimizer.lr[0]"] for found in rates] == ["0.5", "2.0"]
    assert rates[0]["optimizer.lr"].endswith("test_agreement.decayed")
    assert rates[0]["optimizer.lr.start"] == "1.0"


def decayed(by, count, start):
    return start / (1 + by * count)


@pytest.mark.parametrize("apply", [partial(Plain.apply, None), Plain()], ids=["partial", "object"])
def test_an_apply_without_a_name_is_one_too(apply):
    """As those are that a user has bound, or written as a class."""
    optimizer = SimpleNamespace(init=lambda params: (), apply=apply)
    step = pa.make_step(lambda w, x: (w * x).mean(), optimizer, check=False)
    state, info = step(step.init(torch.tensor(3.0)), torch.ones(2))
    assert (state.params.item(), info.applied.item()) == (3.0, True)
    assert "optimizer.apply" in settings_of(step.begin.args[0].optimizer, "optimizer")


def test_ranks_that_differ_are_named():
    tables = ({"lr": "0.1"}, {"lr": "0.2"}, {"lr": "0.1"}, {"lr": "0.1", "new": "1"})
    assert differences(tables) == (
        "lr is 0.1 on ranks 0, 2, 3 and 0.2 on rank 1; "
        "new is absent on ranks 0, 1, 2 and 1 on rank 3."
    )
    assert differences(tables[:1] * 2) == ""
