"""What is refused of samples' gradients says what helps; a loss's own error stays its own."""

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.refusals import PARAMS, Loss, Old, make_batch, refused, saying


pytestmark = pytest.mark.faults
STATISTICS = "normalises with the statistics of a whole batch"
ENGINES = pytest.mark.parametrize("engine", ["vmap", "autograd"])
BATCH = make_batch(5)


def loss(params: Any, row: Any) -> Tensor:
    return (row["x"] @ params["w"] + params["b"]) ** 2


def of_net(net: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    def loss(params: Any, x: Tensor) -> Tensor:
        out = torch.func.functional_call(net, params, (x,))
        return ((out[0] if isinstance(out, tuple) else out) ** 2).sum()

    return loss, {name: p.detach() for name, p in net.named_parameters()}


def looped(loss: Any, params: Any, rows: Any) -> Any:
    """By torch.autograd, one sample after the other."""
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    each = [torch.autograd.grad(loss(leaves, row), list(leaves.values())) for row in rows]
    return {k: torch.stack(g) for k, g in zip(params, zip(*each, strict=True), strict=True)}


REFUSED = {
    "old Function": lambda p, row: loss({k: Old.apply(x) for k, x in p.items()}, row),
    "checkpoint": lambda p, row: checkpoint(loss, p, row, use_reentrant=False),
    "item": lambda p, row: loss(p, row) * row["x"].sum().item(),
    "if": lambda p, row: loss(p, row) if row["x"].sum() > 5 else p["b"] * p["w"].sum(),
    "tolist": lambda p, row: loss(p, row) * sum(row["x"].tolist()),
    "selection": lambda p, row: loss(p, row) * row["x"][row["x"] > 2].sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_vmap_refuses_run_by_the_other_engine(name):
    with refused(RuntimeError, "engine='autograd'", "torch said", given=(PARAMS, BATCH)):
        pa.per_sample_grad(REFUSED[name])(PARAMS, BATCH)
    with pytest.raises(RuntimeError, match="engine='autograd'") as caught:
        pa.per_sample_grad(REFUSED[name], chunk_size=3)(PARAMS, BATCH)
    assert not getattr(caught.value, "__notes__", ())  # it says what to do, and once is enough
    one_by_one = pa.per_sample_grad(REFUSED[name], chunk_size=3, engine="autograd")
    got = assert_pure(one_by_one, PARAMS, BATCH)
    assert_trees_bitwise_equal(got, looped(REFUSED[name], PARAMS, [{"x": x} for x in BATCH["x"]]))


@pytest.mark.parametrize("cls", [nn.GRU, nn.RNN])
def test_recurrent_modules_are_named_and_run_one_by_one(cls):
    loss, params = of_net(nn.Sequential(OrderedDict(rnn=cls(3, 4))))
    x = torch.randn(5, 6, 3)
    with refused(RuntimeError, f"{cls.__name__} 'rnn'", "engine='autograd'", "GRUCell"):
        pa.per_sample_grad(loss)(params, x)
    got = pa.per_sample_grad(loss, chunk_size=2, engine="autograd")(params, x)
    assert_trees_bitwise_equal(got, looped(loss, params, x))


NETS = {
    1: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    2: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
}
INPUTS = {1: torch.randn(5, 3, generator=generator(0)), 2: torch.ones(5, 3, 6, 6)}


@pytest.mark.parametrize("dims", NETS)
@pytest.mark.parametrize("buffers", ["captured", "passed"])
def test_batch_norm_in_training_mode_is_named(dims, buffers):
    net, x = NETS[dims].train(), INPUTS[dims]
    loss, params = of_net(net)

    def call(params: Any, x: Tensor) -> Tensor:
        held = dict(net.named_buffers()) if buffers == "passed" else {}
        return loss(params | {name: b.clone() for name, b in held.items()}, x)

    words = f"BatchNorm{dims}d '1' {STATISTICS}", "net.eval()", "GroupNorm"
    with refused(RuntimeError, *words, given=(net, x)):
        pa.per_sample_grad(call, keep_batch_dim=True)(params, x)


@pytest.mark.parametrize("dims", NETS)
def test_batch_norm_in_eval_mode_runs_and_its_other_errors_are_not_about_statistics(dims):
    """It wants a batch, which ``keep_batch_dim`` gives it, and so many channels."""
    net, x = NETS[dims].eval(), INPUTS[dims]
    loss, params = of_net(net)
    got = pa.per_sample_grad(loss, keep_batch_dim=True, chunk_size=2, engine="autograd")(params, x)
    assert_trees_bitwise_equal(got, looped(loss, params, x[:, None]))
    with saying((RuntimeError, ValueError), f"expected {2 * dims}D") as caught:
        pa.per_sample_grad(loss)(params, x)
    assert STATISTICS not in str(caught.value)
    wrong, params = of_net(nn.Sequential(net[0], type(net[1])(7)).eval())
    with saying(RuntimeError, "running_mean should contain 4 elements not 7") as caught:
        pa.per_sample_grad(wrong, keep_batch_dim=True)(params, x)
    assert STATISTICS not in str(caught.value)


def test_dropout_asks_for_randomness():
    loss, params = of_net(nn.Sequential(nn.Linear(3, 400), nn.Dropout(0.5)))
    x = torch.ones(5, 3)
    with refused(RuntimeError, "Dropout '1'", "randomness='different' or 'same'", "pa.dropout"):
        pa.per_sample_grad(loss)(params, x)
    for how, masks in (("same", 1), ("different", 5)):
        grads = pa.per_sample_grad(loss, randomness=how)(params, x)
        assert len(grads["0.bias"].ne(0).unique(dim=0)) == masks


def test_a_write_to_what_is_captured_is_refused_and_not_done():
    seen = torch.zeros(2)
    with refused(RuntimeError, "writes to a tensor that is no argument", given=(seen, PARAMS)):
        pa.per_sample_grad(lambda p, row: loss(p, row) + seen.add_(row["x"]).sum())(PARAMS, BATCH)


OWN = {
    "type": (lambda p, x: (p["w"] * x).sum() + None, {"w": torch.ones(3)}),
    "key": (lambda p, x: p["missing"], {"w": torch.ones(3)}),
    "shapes": (lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(7)}),
    "GRU": of_net(nn.GRU(7, 4)),
    "batch norm": of_net(nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))),
}


@ENGINES
@pytest.mark.parametrize("name", OWN)
def test_an_error_of_the_loss_comes_out_as_it_is(name, engine):
    loss, params = OWN[name]
    x = torch.ones(5, 6, 3)
    with saying(Exception) as alone:
        loss(params, x[0])
    with saying(type(alone.value)) as caught:
        pa.per_sample_grad(loss, engine=engine)(params, x)
    assert "engine=" not in str(caught.value)
    # vmap sees other sizes, and may call another kernel
    words = [re.sub(r"\d+", "", str(error.value)).split() for error in (alone, caught)]
    assert words[0][-5:] == words[1][-5:]


FLOATS = {"n": 3.0}
ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "chunk_size": ({"chunk_size": 0}, ValueError, ("chunk_size is 0",)),
    "randomness": ({"randomness": "some"}, ValueError, ("randomness is 'some'", "'different'")),
    "engine": ({"engine": "func"}, ValueError, ("engine is 'func'", "'vmap' or 'autograd'")),
    "transform": ({"transform": 3}, TypeError, ("transform is 3", "'normalize'")),
    "spelling": ({"transform": "Normalize"}, ValueError, ("'Normalize'", "'normalize'")),
    "reduce": ({"reduce": "avg"}, ValueError, ("reduce is 'avg'", "mean", "'concat'")),
    "four functions": ({"reduce": (len,) * 4}, ValueError, ("Reducer(init, update, merge, fin",)),
    "metrics": ({"metrics": 3}, TypeError, ("metrics is 3", "'norm'")),
    "metric": ({"metrics": "nrm"}, TypeError, ("metrics is 'nrm'", "'norm'")),
    "overlap": ({"batch_argnums": (0, 1)}, ValueError, ("argument 0", "batch_argnums")),
    "float metrics": ({"metrics": lambda *_: FLOATS}, TypeError, ("metrics['n'] is a float",)),
    "float gradient": ({"transform": lambda _: FLOATS}, TypeError, ("transform returned['n']",)),
    "float aux": ({"has_aux": True}, TypeError, ("aux['n'] is a float", "one for each sample")),
}


@pytest.mark.parametrize("reduce", ["concat", "sum"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_are_named(name, reduce):
    knobs, error, words = ARGUMENTS[name]
    func = (lambda p, row: (loss(p, row), FLOATS)) if "has_aux" in knobs else loss
    knobs = {"reduce": reduce} | knobs
    with refused(error, *words, given=(PARAMS, BATCH)):
        pa.per_sample_grad(func, **knobs)(PARAMS, BATCH)
    with refused(error if reduce == "sum" else (TypeError, ValueError)):
        acc = pa.per_sample_accumulator(func, **knobs)
        acc.update(acc.init(PARAMS), PARAMS, BATCH)


NORMS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "zero": (0.0, ValueError, ("max_norm is 0.0", "above zero")),
    "negative": ({"w": 1.0, "b": -1.0}, ValueError, ("max_norm['b'] is -1.0", "prefix of params")),
    "NaN": ({"w": float("nan"), "b": 1.0}, ValueError, ("max_norm['w'] is nan",)),
    "no number": ({"w": "1", "b": 1.0}, TypeError, ("max_norm['w'] is '1', a str",)),
    "None": (None, TypeError, ("max_norm is None",)),
    "empty": ({}, TypeError, ("max_norm is {}",)),
}
TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "missing": ({"w": 1.0}, ("no prefix of params", "extra key(s): ['b']")),
    "deeper": ({"w": {"v": 1.0}, "b": 1.0}, ("no prefix of params", "max_norm['w']")),
    "list": ([1.0, 1.0], ("no prefix of params", "list")),
}


@pytest.mark.parametrize("name", NORMS)
def test_bad_norms_are_named(name):
    norms, error, words = NORMS[name]
    with saying(error, *words):
        pa.clipped_sum(loss, norms)


@ENGINES
@pytest.mark.parametrize("name", TREES)
def test_norms_that_are_no_prefix_of_params_are_refused_before_any_work(name, engine):
    norms, words = TREES[name]
    called = Loss(loss)
    with refused(ValueError, *words, given=(PARAMS, BATCH), loss=called):
        pa.clipped_sum(called, norms, engine=engine)(PARAMS, BATCH)


@ENGINES
def test_samples_of_a_batch_without_rows_have_gradient_zero(engine):
    empty, called = make_batch(0), Loss(loss)
    zeros, none = ({k: p.new_zeros((*n, *p.shape)) for k, p in PARAMS.items()} for n in ((), (0,)))
    for reduce, want in (("sum", zeros), ("mean", zeros), ("concat", none)):
        got = pa.per_sample_grad(called, reduce=reduce, engine=engine)(PARAMS, empty)
        assert_trees_bitwise_equal(got, want)
    clipped = pa.clipped_sum(called, 1.0, engine=engine)(PARAMS, empty)
    assert_trees_bitwise_equal(clipped, (zeros, torch.zeros(0)))
    for knobs in ({"has_aux": True}, {"metrics": lambda grad, value: value}):
        with refused(ValueError, "no rows", "need one row", loss=called):
            pa.per_sample_grad(called, engine=engine, **knobs)(PARAMS, empty)


def started(**knobs: Any) -> tuple[Any, pa.AccumState]:
    acc = pa.per_sample_accumulator(loss, chunk_size=2, **knobs)
    return acc, acc.update(acc.init(PARAMS), PARAMS, make_batch(3))


@pytest.mark.parametrize(("key", "width"), [("w", 3), ("w", 1), ("c", 2)])
@pytest.mark.parametrize("reduce", ["mean", "moments"])
def test_states_of_other_params_are_refused(key, width, reduce):
    acc, state = started(reduce=reduce)
    other = acc.init({"b": PARAMS["b"], key: torch.ones(width)})
    with refused(ValueError, "state", "belongs to the params", given=other):
        acc.update(other, PARAMS, BATCH)
    for pair in ((state, other), (other, state)):
        with refused(ValueError, "state", "belongs to the params", given=pair):
            acc.merge(*pair)


def test_states_of_another_kind_are_refused():
    mean, squares, moments = started(), started(squares=True), started(reduce="moments")
    both = "squares=True", "squares=False"
    pairs = (mean, squares, both), (squares, mean, both), (mean, moments, ()), (moments, mean, ())
    for (acc, _), (_, state), words in pairs:
        with refused(ValueError, "state", *words, given=state):
            acc.update(state, PARAMS, BATCH)
        with refused(ValueError, "state", *words, given=state):
            acc.merge(state, state)
    with refused(TypeError, "the state is a tuple", "AccumState"):
        mean[0].update((mean[1], None), PARAMS, BATCH)


@ENGINES
@pytest.mark.parametrize("reduce", ["mean", "moments"])
def test_donation_marks_the_old_state_and_otherwise_nothing_changes(reduce, engine):
    acc, state = started(reduce=reduce, squares=True, engine=engine)
    want = assert_pure(acc.update, state, PARAMS, BATCH)
    with unchanged(PARAMS, BATCH):
        got = acc.update(state, PARAMS, BATCH, donate=True)
    assert_trees_bitwise_equal(got, want)
    for use in (lambda: acc.update(state, PARAMS, BATCH), lambda: state.total + 1):
        with saying(RuntimeError, "given up with donate=True"):
            use()


@pytest.mark.parametrize("at", [1, 2], ids=["first chunk", "second chunk"])
def test_an_error_leaves_a_donated_state_whole_or_says_that_it_is_not(at):
    called = Loss(lambda params, row: loss(params, row) if called.calls != at else boom)
    (acc, state), boom = started(), "no tensor"
    failing = pa.per_sample_accumulator(called, chunk_size=2)
    with saying(TypeError, "the loss is"), unchanged(*([state] if at == 1 else [])):
        failing.update(state, PARAMS, BATCH, donate=True)
    if at == 1:
        acc.update(state, PARAMS, BATCH)
    else:
        with saying(RuntimeError, "failed in the middle"):
            acc.update(state, PARAMS, BATCH)


def test_a_state_of_ones_own_may_hold_numbers():
    def count(state: Any, grads: Any, weight: Tensor) -> Any:
        return state | {"n": state["n"] + len(weight)}

    own = pa.Reducer(lambda like: {"k": 3, "n": 0}, count, max, lambda state: state)
    acc, state = started(reduce=own)
    for donate in (False, True):
        assert acc.update(state, PARAMS, BATCH, donate=donate).grads == {"k": 3, "n": 8}


def test_states_of_another_kind_are_not_finalized():
    (mean, state), (moments, other) = started(), started(reduce="moments")
    for acc, wrong in ((mean, other), (moments, state)):
        with refused(ValueError, "state.grads", "'moments'", given=wrong):
            acc.finalize(wrong)


def test_moments_of_many_runs_have_no_one_variance():
    of = pa.per_sample_grad(loss, reduce="moments")
    many = torch.func.vmap(of, in_dims=(0, None))(pa.stack([PARAMS, PARAMS]), BATCH)
    with refused(ValueError, "stacked", "vmap"):
        many.variance()
    each = torch.func.vmap(pa.Moments.variance)(many)
    assert_trees_bitwise_equal(pa.unstack(each), [of(PARAMS, BATCH).variance()] * 2)


def test_metrics_see_the_gradient_before_a_transform_that_writes_to_it():
    zero = Loss(lambda grads: {name: x.zero_() for name, x in grads.items()})
    for metrics in ("norm", lambda grads, value: pa.global_norm(grads)):
        seen = pa.per_sample_grad(loss, transform=zero, metrics=metrics)
        assert (seen(PARAMS, BATCH)[1] > 0).all()


def test_signs_may_be_integers_and_gradients_sparse():
    signs = {"transform": lambda grads: {"w": (grads["w"] > 0).long()}, "squares": True}
    acc, state = started(reduce="sum", **signs)
    assert acc.finalize(state)[0]["w"].dtype == torch.float32
    table, rows = torch.zeros(3, 2), torch.tensor([0, 2, 2])
    found = Loss(lambda w, i: nn.functional.embedding(i, w, sparse=True).sum())
    summed = pa.per_sample_grad(found, engine="autograd", reduce="sum")(table, rows)
    assert summed.tolist() == [[1, 1], [0, 0], [2, 2]]


def test_noise_wants_one_key_and_floating_point():
    with refused(TypeError, "key is 3", "pureaccum.key(seed)"):
        pa.add_noise(PARAMS, 1.0, 3)
    with refused(TypeError, "one key"):
        pa.add_noise(PARAMS, 1.0, pa.split_key(pa.key(0)))
    with refused(TypeError, "tree['n'] is torch.int64"):
        pa.add_noise({"n": torch.zeros(2).long()}, 1.0, pa.key(0))
    assert pa.add_noise(torch.zeros(3), torch.tensor(-1.0), pa.key(0)).isnan().all()
