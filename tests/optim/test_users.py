"""Optimizers and gradient maps of a user's own: what writes in place, or returns otherwise."""

from typing import Any, NamedTuple

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged


pytestmark = [pytest.mark.purity, pytest.mark.promise("optimizers")]
PARAMS = {"w": torch.tensor([0.5, -1.0, 0.25]), "b": torch.tensor([[1.0], [2.0]])}
BATCH = torch.arange(12.0).reshape(4, 3) / 8


def loss(params, x):
    return (x * params["w"]).sum(1).square().mean() + params["b"].square().mean()


def mapped(function, *trees):
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


class Lion:
    """As a user writes it: new tensors, and a state of tensors."""

    def init(self, params):
        return {"m": mapped(torch.zeros_like, params), "steps": torch.tensor(0)}

    def apply(self, grads, state, params):
        new = mapped(
            lambda p, m, g: p - 0.1 * (0.9 * m + 0.1 * g).sign(), params, state["m"], grads
        )
        m = mapped(lambda m, g: 0.99 * m + 0.01 * g, state["m"], grads)
        return new, {"m": m, "steps": state["steps"] + 1}


class Wrong(Lion):
    """One that does something to what it is given, and perhaps returns something else."""

    def __init__(self, does):
        self.does = does

    def apply(self, grads, state, params):
        right = super().apply(grads, state, params)
        other = self.does(grads, state, params)
        return other(*right) if callable(other) else right


class Map(NamedTuple):
    does: Any

    def init(self, params):
        return {"m": params["w"].clone()}

    def update(self, grads, state):
        other = self.does(grads, state)
        return other if isinstance(other, tuple) else (grads, state)


WRITES = {
    "params": ("params['w']", lambda g, s, p: p["w"].sub_(g["w"])),
    "one number": ("params['b']", lambda g, s, p: p["b"].__setitem__((1, 0), 3.0)),
    "state": ("state['m']['b']", lambda g, s, p: s["m"]["b"].mul_(0.9).add_(1)),
    "a count": ("state['steps']", lambda g, s, p: s["steps"].add_(1)),
    "grads": ("grads['w']", lambda g, s, p: g["w"].clamp_(-1, 1)),
    ".data": ("params['w']", lambda g, s, p: p["w"].data.sub_(g["w"])),
    "foreach": ("params['b']", lambda g, s, p: torch._foreach_add_([p["b"]], 1.0)),
}
RETURNS = {  # in place of the next params and state
    "a dtype": ("[0]['w'] is torch.bfloat16", lambda p, s: ({**p, "w": p["w"].bfloat16()}, s)),
    "a shape": ("[0]['b'] has shape (2,)", lambda p, s: ({**p, "b": p["b"][:, 0]}, s)),
    "a state's dtype": ("[1]['steps'] is torch.float32", lambda p, s: (p, s | with_steps(1.0))),
    "a state's shape": ("[1]['steps'] has shape (1,)", lambda p, s: (p, s | with_steps([1]))),
    "a leaf too few": ("[1]['steps']", lambda p, s: (p, {"m": s["m"]})),
    "a number": ("[1]['steps'] is an int", lambda p, s: (p, s | {"steps": 1})),
}


def with_steps(steps):
    return {"steps": torch.tensor(steps)}


def step_of(optimizer, **options):
    step = pa.make_step(loss, optimizer, microbatch_size=2, **options)
    return step, step.init(PARAMS)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_place_names_the_leaf(name, donate):
    where, does = WRITES[name]
    step, state = step_of(Wrong(does), donate=donate)
    with pytest.raises(RuntimeError, match="apply of a Wrong") as caught:
        step(state, BATCH)
    assert f"written to {where} in place; expected new tensors" in str(caught.value)


@pytest.mark.parametrize("way", ["in a chain", "in a partition", "vmap", "NaN"])
def test_wherever_it_stands(way):
    wrong, batch = Wrong(WRITES["state"][1]), BATCH
    if way == "in a chain":
        wrong = pa.chain(pa.clip_by_global_norm(1.0), wrong)
    elif way == "in a partition":
        wrong = pa.partition({"w": pa.sgd(0.1), "b": wrong}, lambda path: path)
    elif way == "NaN":
        batch = BATCH * torch.nan
    step, state = step_of(wrong)
    run = step
    if way == "vmap":
        run, state = torch.func.vmap(step, (0, None)), pa.stack([state, state])
    with pytest.raises(RuntimeError, match="has written to"):
        run(state, batch)


def test_a_map_that_writes_in_place_or_returns_another_state_raises():
    for does, words in (
        (lambda g, s: g["w"].clamp_(-0.1, 0.1), "update of a Map has written to grads"),
        (lambda g, s: s["m"].add_(1), "update of a Map has written to state['m']"),
        (lambda g, s: (g, {"m": s["m"].double()}), "['m'] is torch.float64"),
    ):
        step, state = step_of(pa.chain(Map(does), pa.sgd(0.1)))
        with pytest.raises((RuntimeError, ValueError)) as caught:
            step(state, BATCH)
        assert words in str(caught.value)


@pytest.mark.parametrize("name", RETURNS)
def test_what_it_returns_is_like_what_it_was_given(name):
    words, does = RETURNS[name]
    step, state = step_of(Wrong(lambda *_: does))
    with unchanged(state), pytest.raises((TypeError, ValueError)) as caught:
        step(state, BATCH)
    assert f"the result of apply{words}" in str(caught.value)
    assert "(params, state) like those that it gets" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
def test_in_a_graph_what_is_written_in_place_is_a_copy(donate):
    """So a step that is not applied changes nothing there either."""
    bad = Wrong(lambda g, s, p: [x.sub_(1) for x in p.values()] and None)
    step, state = step_of(bad, compile={"backend": "eager"}, donate=donate)
    with unchanged(PARAMS):
        state, info = step(state, BATCH * torch.nan)
    assert not info.applied
    assert_trees_bitwise_equal(state.params, PARAMS)


def test_what_versions_do_not_show_is_found_in_a_later_call():
    """At calls 1, 2, 3, 5, 8 and one in 32: sums of leaves are compared."""
    calls = []

    def late(grads, state, params):
        calls.append(len(calls))
        if len(calls) > 20:
            params["w"].data.mul_(2)

    step, state = step_of(Wrong(late))

    def run():
        nonlocal state
        for _ in range(80):
            state, _ = step(state, BATCH)

    with pytest.raises(RuntimeError, match="has written to params"):
        run()


@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "stream",
        "donated",
        "vmap",
        "grad",
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_one_that_is_pure_is_never_blamed(way):
    options = {"donated": {"donate": True}, "compiled": {"compile": {"backend": "eager"}}}
    step, state = step_of(pa.chain(Map(lambda g, s: None), Lion()), **options.get(way, {}))
    plain, want = step_of(Lion())
    for _ in range(5):
        want, _ = plain(want, BATCH)
    if way == "grad":
        torch.func.grad(lambda p: step(state._replace(params=p), BATCH)[0].params["w"].sum())(
            PARAMS
        )
    if way == "vmap":
        state = pa.stack([state, state])
    for _ in range(5):
        if way == "vmap":
            state, info = torch.func.vmap(step, (0, None))(state, BATCH)
        else:
            run = step.window if way == "stream" else step
            batch = pa.microbatches(BATCH, 2) if way == "stream" else BATCH
            state, info = run(state, batch)
        assert info.applied.all()
    state = pa.unstack(state)[0] if way == "vmap" else state
    assert_trees_bitwise_equal(state.params, want.params)
