"""With a size, results know what they were computed from, and nothing else outlives a call."""

import weakref

import optree
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.calls import CALLS, ENGINES, NONFINITE, combinations, make_batch, make_params, mean_loss


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
every_call = pytest.mark.parametrize(("name", "knobs"), combinations())
KINDS = {
    "parameters": lambda p: {k: torch.nn.Parameter(x) for k, x in p.items()},
    "of a graph": lambda p: {k: x.requires_grad_() * 1 for k, x in p.items()},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def has_graph(tree):
    return [x for x in optree.tree_leaves(tree) if x.requires_grad or x.grad_fn is not None]


def with_a_history(run):
    """What comes out has a graph, and no bit of it is another under no_grad, where it has none."""
    result = run()
    assert has_graph(result)
    with torch.no_grad():
        plain = run()
    assert not has_graph(plain)
    assert_trees_bitwise_equal(optree.tree_map(torch.detach, result), plain)
    return plain


@every_call
@every_kind
def test_a_history_changes_no_bit_and_there_is_none_under_no_grad(name, knobs, kind):
    run = CALLS[name].run
    plain = run(mean_loss, make_params(), make_batch(), **knobs)
    assert not has_graph(plain)
    params = kind(make_params())
    again = with_a_history(lambda: run(mean_loss, params, make_batch(), **knobs))
    assert_trees_bitwise_equal(again, plain)


@every_call
def test_so_it_is_where_the_loss_captures_a_parameter(name, knobs):
    params, captured = make_params(), torch.nn.Parameter(torch.ones(2))

    def loss(params, batch):
        return mean_loss(params | {"w": params["w"] * captured}, batch)

    with_a_history(lambda: CALLS[name].run(loss, params, make_batch(), **knobs))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduction", ["concat", "sum", "mean", "last"])
def test_so_it_is_with_aux_whatever_it_is_made_from(engine, reduction):
    params = KINDS["parameters"](make_params())
    captured = torch.nn.Parameter(torch.ones(2))

    def loss(params, batch):
        rows = batch["x"] @ params["w"]
        if reduction in ("concat", "last"):
            return mean_loss(params, batch), [rows, batch["x"] @ captured, batch["y"]]
        return mean_loss(params, batch), [rows.sum(), captured.sum(), batch["y"].sum()]

    knobs = {"aux_reduction": reduction, "microbatch_size": 2}
    acc = pa.accumulator(loss, has_aux=True, engine=engine)
    for call in (
        pa.grad_and_value(loss, has_aux=True, engine=engine, **knobs),
        pa.value(loss, has_aux=True, **knobs),
        lambda params, batch: acc.update(acc.init(params), params, batch),
    ):
        with_a_history(lambda call=call: call(params, make_batch()))


@every_call
def test_no_activation_outlives_the_call(name, knobs):
    """With all results still held, and before any collection of garbage."""
    activations = []

    def loss(params, batch):
        out = batch["x"] * params["w"]
        activations.append(weakref.ref(out))
        return mean_loss(params, batch) + torch.sin(out).mean()  # sin keeps what it was given

    params, batch = KINDS["parameters"](make_params()), make_batch()
    result = CALLS[name].run(loss, params, batch, **knobs)
    assert activations
    assert not [x for x in activations if x() is not None]
    assert result is not None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_no_activation_outlives_its_microbatch(engine, nonfinite):
    activations = []
    alive = []

    def loss(params, batch):
        alive.append(sum(x() is not None for x in activations))
        out = batch["x"] * params["w"]
        activations.append(weakref.ref(out))
        return mean_loss(params, batch) + torch.sin(out).mean()

    params = KINDS["parameters"](make_params())
    knobs = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": 1}
    pa.grad(loss, **knobs, check=False)(params, make_batch(5))
    assert alive == [0] * 6  # the first is observed before


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_an_activation_is_gone_once_the_backward_pass_has_passed_it(engine, nonfinite):
    alive = []

    def loss(params, batch):
        early = batch["x"] * params["w"]
        late = 2 * early
        seen = weakref.ref(late)
        early.register_hook(lambda _: alive.append(seen() is not None))
        return mean_loss(params, batch) + torch.sin(late).mean()

    knobs = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": 2}
    pa.grad(loss, **knobs)(make_params(), make_batch(5))
    assert alive == [False] * 3


def test_a_graph_that_stays_is_noticed_by_these_tests():
    """What they look at, a tensor that a graph needs, lives as long as the graph does."""
    out = torch.ones(2, requires_grad=True) * 2
    seen, value = weakref.ref(out), torch.sin(out).sum()
    del out
    assert seen() is not None
    del value
    assert seen() is None
