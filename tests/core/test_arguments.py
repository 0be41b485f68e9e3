"""A public call changes nothing, also when it raises; and nothing outlives it but its results."""

import weakref
from contextlib import contextmanager

import optree
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import (
    CALLS,
    ENGINES,
    GRADIENTS,
    NONFINITE,
    BoomError,
    Explodes,
    combinations,
    make_batch,
    make_params,
    mean_loss,
)
from tests.dropped import is_dropped


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
every_call = pytest.mark.parametrize(("name", "options"), combinations())


def trained_params():
    """Parameters that have seen ``.backward()``: gradients, hooks and versions are theirs."""
    params = {key: torch.nn.Parameter(x) for key, x in make_params().items()}
    params["w"].grad = torch.tensor([3.0, 4.0])
    params["w"].register_hook(lambda grad: grad * 7)
    return params


@every_call
def test_a_call_changes_nothing_and_gives_the_same_again(name, options):
    params, batch = trained_params(), make_batch()
    with unchanged(params, batch):
        first, second = (CALLS[name].run(mean_loss, params, batch, **options) for _ in range(2))
    assert_trees_bitwise_equal(first, second)


@every_call
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_error_in_the_loss_changes_nothing(name, options, where):
    params, batch, calls = trained_params(), make_batch(), []
    at = 0 if where == "first" or name == "one microbatch" else 2

    def loss(params, batch):
        if not is_dropped():
            calls.append(len(batch["x"]))
        if len(calls) > at:
            raise BoomError
        return mean_loss(params, batch)

    with unchanged(params, batch), pytest.raises(BoomError):
        CALLS[name].run(loss, params, batch, **options)
    assert len(calls) == at + 1


@pytest.mark.parametrize(("name", "options"), combinations(*GRADIENTS))
@pytest.mark.parametrize("leaf", ["w", "large"])
def test_an_error_in_the_backward_pass_changes_nothing(name, options, leaf):
    params, batch = trained_params(), make_batch()

    def loss(params, batch):
        return mean_loss(params | {leaf: Explodes.apply(params[leaf])}, batch)

    with unchanged(params, batch), pytest.raises(BoomError):
        CALLS[name].run(loss, params, batch, **options)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "no_grad": torch.no_grad,
    "autocast without its cache": lambda: torch.autocast(
        "cpu", torch.bfloat16, enabled=False, cache_enabled=False
    ),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("name", "options"), combinations(nonfinite=("propagate",)))
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_mode_around_a_call_stays_and_changes_no_result(mode, name, options):
    """Autograd records nothing in inference mode: an error may say so, a zero gradient may not."""
    params, batch, engine = make_params(), make_batch(), options["engine"]
    expected = CALLS[name].run(mean_loss, params, batch, **options)
    with mode(), unchanged(params, batch):
        try:
            result = CALLS[name].run(mean_loss, params, batch, **options)
        except RuntimeError as error:
            if (engine, mode) != ("autograd", torch.inference_mode) or "inference" not in str(
                error
            ):
                raise
            return
    assert_trees_bitwise_equal(result, expected)


def test_looking_at_a_tree_changes_nothing():
    tree = trained_params()
    with unchanged(tree):
        pa.global_norm(tree)
        pa.all_finite(tree)


def test_microbatches_are_views():
    batch = make_batch()
    with unchanged(batch):
        parts = list(pa.microbatches(batch, 2))
    starts = [part["x"].storage_offset() for part in parts]
    assert starts == [0, 4, 8]
    assert {part["x"].untyped_storage().data_ptr() for part in parts} == {batch["x"].data_ptr()}
    assert_trees_bitwise_equal(torch.cat([part["y"] for part in parts]), batch["y"])


# With a size, results know what they were computed from, and nothing else outlives a call ------


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
def test_a_history_changes_no_bit_and_there_is_none_under_no_grad(name, options, kind):
    run = CALLS[name].run
    plain = run(mean_loss, make_params(), make_batch(), **options)
    assert not has_graph(plain)
    params = kind(make_params())
    again = with_a_history(lambda: run(mean_loss, params, make_batch(), **options))
    assert_trees_bitwise_equal(again, plain)


@every_call
def test_so_it_is_where_the_loss_captures_a_parameter(name, options):
    params, captured = make_params(), torch.nn.Parameter(torch.ones(2))

    def loss(params, batch):
        return mean_loss(params | {"w": params["w"] * captured}, batch)

    with_a_history(lambda: CALLS[name].run(loss, params, make_batch(), **options))


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

    options = {"aux_reduction": reduction, "microbatch_size": 2}
    acc = pa.accumulator(loss, has_aux=True, engine=engine)
    for call in (
        pa.grad_and_value(loss, has_aux=True, engine=engine, **options),
        pa.value(loss, has_aux=True, **options),
        lambda params, batch: acc.update(acc.init(params), params, batch),
    ):
        with_a_history(lambda call=call: call(params, make_batch()))


@every_call
def test_no_activation_outlives_the_call(name, options):
    """With all results still held, and before any collection of garbage."""
    activations = []

    def loss(params, batch):
        out = batch["x"] * params["w"]
        activations.append(weakref.ref(out))
        return mean_loss(params, batch) + torch.sin(out).mean()  # sin keeps what it was given

    params, batch = KINDS["parameters"](make_params()), make_batch()
    result = CALLS[name].run(loss, params, batch, **options)
    assert activations
    assert not [x for x in activations if x() is not None]
    assert result is not None


def alive_in_each_call(engine, nonfinite):
    """How many activations of earlier calls there are when the loss is called, five samples."""
    activations = []
    alive = []

    def loss(params, batch):
        alive.append(sum(x() is not None for x in activations))
        out = batch["x"] * params["w"]
        activations.append(weakref.ref(out))
        return mean_loss(params, batch) + torch.sin(out).mean()

    params = KINDS["parameters"](make_params())
    options = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": 1}
    pa.grad(loss, **options, check=False)(params, make_batch(5))
    return alive


@pytest.mark.given_up("early writes")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_no_activation_outlives_its_microbatch(engine, nonfinite):
    assert alive_in_each_call(engine, nonfinite) == [0] * 6  # the first is observed before


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_no_activation_is_alive_in_a_later_microbatch(engine, nonfinite):
    """However often the loss is called."""
    alive = alive_in_each_call(engine, nonfinite)
    assert len(alive) >= 5
    assert not any(alive)


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

    options = {"engine": engine, "nonfinite": nonfinite, "microbatch_size": 2}
    pa.grad(loss, **options)(make_params(), make_batch(5))
    assert alive == [False] * 3


def test_a_graph_that_stays_is_noticed_by_these_tests():
    """What they look at, a tensor that a graph needs, lives as long as the graph does."""
    out = torch.ones(2, requires_grad=True) * 2
    seen, value = weakref.ref(out), torch.sin(out).sum()
    del out
    assert seen() is not None
    del value
    assert seen() is None
