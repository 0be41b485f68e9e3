"""What is refused of samples' gradients says what helps; a loss's own error stays its own."""

import re
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import assert_pure, assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.refusals import PARAMS, Loss, Old, advice_on, make_batch, refused, saying
from tests.samples.problems import engines, looped


pytestmark = [
    pytest.mark.faults,
    pytest.mark.promise("errors"),
    pytest.mark.promise("samples"),
    pytest.mark.table,
]
STATISTICS = "normalises with the statistics of the whole batch"
BATCH, OTHER = make_batch(5), make_batch(3)


def loss(params, row):
    return (row["x"] @ params["w"] + params["b"]) ** 2


def out(params, row):
    return (row["x"] * params["w"] + params["b"]) ** 2


def of_net(net):
    def loss(params, x):
        out = torch.func.functional_call(net, params, (x,))
        return ((out[0] if isinstance(out, tuple) else out) ** 2).sum()

    return loss, {name: p.detach() for name, p in net.named_parameters()}


def written_out(func):
    def rows(batch):
        jacobians = pa.per_sample_grad(func, engine="autograd")(PARAMS, batch)
        return torch.cat([x.view(len(x), 2, -1) for x in jacobians.values()], -1)

    return torch.einsum("naf,mbf->nmab", rows(BATCH), rows(OTHER))


# What vmap refuses, or layers do not show ------------------------------------------------------

REFUSED = {
    "old Function": lambda p, row: loss({k: Old.apply(x) for k, x in p.items()}, row),
    "checkpoint": lambda p, row: checkpoint(loss, p, row, use_reentrant=False),
    "item": lambda p, row: loss(p, row) * row["x"].sum().item(),
    "if": lambda p, row: loss(p, row) if row["x"].sum() > 5 else p["b"] * p["w"].sum(),
    "tolist": lambda p, row: loss(p, row) * sum(row["x"].tolist()),
    "selection": lambda p, row: loss(p, row) * row["x"][row["x"] > 2].sum(),
    "old Function of two": lambda p, row: out({k: Old.apply(x) for k, x in p.items()}, row),
    "checkpoint of two": lambda p, row: checkpoint(out, p, row, use_reentrant=False),
    "item of two": lambda p, row: out(p, row) * row["x"].sum().item(),
    "selection of two": lambda p, row: out(p, row)[row["x"] > -1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_vmap_refuses_run_by_the_other_engine(name):
    with refused(RuntimeError, "engine='autograd'", "torch says", given=(PARAMS, BATCH)):
        pa.per_sample_grad(REFUSED[name])(PARAMS, BATCH)
    with pytest.raises(RuntimeError, match="engine='autograd'") as caught:
        pa.per_sample_grad(REFUSED[name], chunk_size=3)(PARAMS, BATCH)
    assert not getattr(caught.value, "__notes__", ())  # it says what to do, and once is enough
    one_by_one = pa.per_sample_grad(REFUSED[name], chunk_size=3, engine="autograd")
    got = assert_pure(one_by_one, PARAMS, BATCH)
    assert_trees_bitwise_equal(got, looped(REFUSED[name], PARAMS, [{"x": x} for x in BATCH["x"]]))


FOLLOWED_OTHERWISE = {
    "a transform of a leaf": lambda p, row: torch.func.vmap(torch.square)(p["w"]) * row["x"],
    "an old Function": REFUSED["old Function of two"],
    "a checkpoint": REFUSED["checkpoint of two"],
}


@pytest.mark.parametrize("name", FOLLOWED_OTHERWISE)
@pytest.mark.parametrize("size", [None, 2])
def test_what_cannot_be_followed_is_written_out(name, size):
    func, engines = FOLLOWED_OTHERWISE[name], ["autograd"]
    if name == "a transform of a leaf":
        engines.append("vmap")
    else:
        with refused(RuntimeError, "engine='autograd'", "torch says", given=(PARAMS, BATCH)):
            pa.gramian(func, chunk_size=size)(PARAMS, BATCH, other=OTHER)
    for engine in engines:
        of = pa.gramian(func, chunk_size=size, engine=engine)
        assert_trees_bitwise_equal(assert_pure(of, PARAMS, BATCH, other=OTHER), written_out(func))


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

    def call(params, x):
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


def test_random_numbers_of_a_gramian_come_from_keys():
    """A mask that is another one in each block belongs to no sample."""
    net = nn.Dropout(0.5)
    with refused(RuntimeError, "Dropout", "pa.dropout"):
        pa.gramian(lambda p, row: net(out(p, row)))(PARAMS, BATCH)
    keys = pa.split_key(pa.key(0), 5)

    def masked(p, row, key):
        return pa.dropout(out(p, row), 0.5, key)

    whole, cut = (
        pa.gramian(masked, batch_argnums=(1, 2), chunk_size=size)(PARAMS, BATCH, keys)
        for size in (None, 2)
    )
    assert_trees_bitwise_equal(cut, whole)


@pytest.mark.promise("writes")
@pytest.mark.promise("errors")
@pytest.mark.parametrize("of", [pa.per_sample_grad, pa.gramian])
def test_a_write_to_what_is_captured_is_refused_and_not_done(of):
    seen = torch.zeros(2)
    with refused(RuntimeError, "writes to a tensor that is not an argument", given=(seen, PARAMS)):
        of(lambda p, row: out(p, row) + seen.add_(row["x"]))(PARAMS, BATCH)


OWN = {
    "type": (lambda p, x: (p["w"] * x).sum() + None, {"w": torch.ones(3)}),
    "key": (lambda p, x: p["missing"], {"w": torch.ones(3)}),
    "shapes": (lambda p, x: (p["w"] * x).sum(), {"w": torch.ones(7)}),
    "GRU": of_net(nn.GRU(7, 4)),
    "batch norm": of_net(nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4))),
}


@engines
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


@engines
def test_what_apply_returns_is_a_pair_for_samples_too(engine):
    fn = pa.functional(nn.Linear(3, 1))
    x = torch.ones(5, 3)

    def mean(params, x):
        return nn.functional.mse_loss(fn.apply(params, (), x), x)

    acc = pa.per_sample_accumulator(mean, engine=engine)
    for run in (
        lambda: pa.per_sample_grad(mean, engine=engine)(fn.params, x),
        lambda: pa.gramian(mean, engine=engine)(fn.params, x),
        lambda: acc.update(acc.init(fn.params), fn.params, x),
    ):
        with saying((TypeError, AttributeError), "tuple") as caught:
            run()
        (note,) = advice_on(caught.value)
        assert "out, new_buffers" in note


def test_an_error_of_the_function_of_a_gramian_comes_out_as_it_is():
    with saying(KeyError, "missing"):
        pa.gramian(lambda p, row: p["missing"])(PARAMS, BATCH)


# What has no gradients -------------------------------------------------------------------------

NONE = {
    "whole numbers": (lambda p, row: out(p, row).long(), TypeError, ("int64", "no gradient")),
    "complex": (lambda p, row: out(p, row) * 1j, TypeError, ("complex64", "torch.view_as_real")),
    "two": (lambda p, row: (out(p, row),) * 2, TypeError, ("tuple of 2", "torch.stack", "has_aux")),
    "one": (lambda p, row: (out(p, row),), TypeError, ("the loss is a tuple", "torch.stack")),
    "a dict": (lambda p, row: {"a": out(p, row)}, TypeError, ("a dict", "floating-point tensor")),
    "nothing": (lambda p, row: None, TypeError, ("is None", "return statement")),
    "Weighted": (
        lambda p, row: pa.Weighted(out(p, row), 1.0),
        ValueError,
        ("total of Weighted has shape (2,)", "one number and its weight", "plain tensor"),
    ),
}


@engines
@pytest.mark.parametrize("name", NONE)
@pytest.mark.parametrize("of", [pa.per_sample_grad, pa.gramian])
def test_what_has_no_gradients_is_named(of, name, engine):
    func, error, words = NONE[name]
    other = {"other": OTHER} if of is pa.gramian else {}
    with refused(error, *words, given=(PARAMS, BATCH)):
        of(func, engine=engine)(PARAMS, BATCH, **other)


@engines
def test_a_stream_takes_one_number_a_sample(engine):
    acc = pa.per_sample_accumulator(out, engine=engine)
    state = acc.init(PARAMS)
    with refused(ValueError, "the loss has shape (2,)", "0-d", given=(state, PARAMS, BATCH)):
        acc.update(state, PARAMS, BATCH)
    with refused(ValueError, "the loss has shape (2,)", "0-d"):
        pa.grad(out)(PARAMS, {"x": BATCH["x"][0]})


def test_a_transform_to_nothing_is_refused_where_it_would_be_reduced():
    with refused(ValueError, "no leaves", "nothing to reduce"):
        pa.per_sample_grad(out, reduce="sum", transform=lambda jacobian: ())(PARAMS, BATCH)


# Arguments -------------------------------------------------------------------------------------

FLOATS = {"n": 3.0}
ARGUMENTS = {
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
    "float gradient": (
        {"transform": lambda _: FLOATS},
        TypeError,
        ("the result of transform['n']",),
    ),
    "float aux": (
        {"has_aux": True},
        TypeError,
        ("aux['n'] is a float", "one tensor for each sample"),
    ),
}


@pytest.mark.parametrize("reduce", ["concat", "sum"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_bad_arguments_are_named(name, reduce):
    options, error, words = ARGUMENTS[name]
    func = (lambda p, row: (loss(p, row), FLOATS)) if "has_aux" in options else loss
    options = {"reduce": reduce} | options
    with refused(error, *words, given=(PARAMS, BATCH)):
        pa.per_sample_grad(func, **options)(PARAMS, BATCH)
    with refused(error if reduce == "sum" else (TypeError, ValueError)):
        acc = pa.per_sample_accumulator(func, **options)
        acc.update(acc.init(PARAMS), PARAMS, BATCH)


OTHERS = {
    "chunk_size": ({"chunk_size": 0}, OTHER, ValueError, ("chunk_size is 0",)),
    "engine": ({"engine": "func"}, OTHER, ValueError, ("engine is 'func'", "'vmap'")),
    "overlap": ({"batch_argnums": 0}, OTHER, ValueError, ("argument 0", "batch_argnums")),
    "one for two": ({"batch_argnums": (1, 2)}, OTHER, ValueError, ("other is a dict", "tuple of")),
    "one": ({"batch_argnums": (1,)}, OTHER, ValueError, ("other is a dict", "a tuple of 1")),
    "a number": ({}, 3, ValueError, ("other holds no tensor", "samples")),
    "a tensor": ({}, torch.ones(3, 2), ValueError, ("other has the structure", "as in the batch")),
    "no rows": ({}, {"x": torch.tensor(1.0)}, ValueError, ("other['x'] is a 0-d tensor", "row")),
    "rows": ({}, {"x": torch.ones(3, 2), "y": torch.ones(2)}, ValueError, ("other", "samples")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_bad_arguments_of_a_gramian_are_named_before_any_work(name):
    options, other, error, words = OTHERS[name]
    called = Loss(lambda p, row, more=None: out(p, row))
    args = (PARAMS, BATCH, BATCH) if "tuple of" in words else (PARAMS, BATCH)
    with refused(error, *words, given=(PARAMS, BATCH), loss=called):
        pa.gramian(called, **options)(*args, other=other)


NORMS = {
    "zero": (0.0, ValueError, ("max_norm is 0.0", "above zero")),
    "negative": ({"w": 1.0, "b": -1.0}, ValueError, ("max_norm['b'] is -1.0", "prefix of params")),
    "NaN": ({"w": float("nan"), "b": 1.0}, ValueError, ("max_norm['w'] is nan",)),
    "no number": ({"w": "1", "b": 1.0}, TypeError, ("max_norm['w'] is '1', a str",)),
    "None": (None, TypeError, ("max_norm is None",)),
    "empty": ({}, TypeError, ("max_norm is {}",)),
}
TREES = {
    "missing": ({"w": 1.0}, ("not a prefix of params", "extra key(s): ['b']")),
    "deeper": ({"w": {"v": 1.0}, "b": 1.0}, ("not a prefix of params", "max_norm['w']")),
    "list": ([1.0, 1.0], ("not a prefix of params", "list")),
}


@pytest.mark.parametrize("name", NORMS)
def test_bad_norms_are_named(name):
    norms, error, words = NORMS[name]
    with saying(error, *words):
        pa.clipped_sum(loss, norms)


@engines
@pytest.mark.parametrize("name", TREES)
def test_norms_that_are_no_prefix_of_params_are_refused_before_any_work(name, engine):
    norms, words = TREES[name]
    called = Loss(loss)
    with refused(ValueError, *words, given=(PARAMS, BATCH), loss=called):
        pa.clipped_sum(called, norms, engine=engine)(PARAMS, BATCH)


@engines
@pytest.mark.parametrize("func", [loss, out])
def test_samples_of_a_batch_without_rows_have_gradient_zero(func, engine):
    """Of several numbers a batch is taken for one of single numbers."""
    empty, called = make_batch(0), Loss(func)
    zeros, none = ({k: p.new_zeros((*n, *p.shape)) for k, p in PARAMS.items()} for n in ((), (0,)))
    for reduce, want in (("sum", zeros), ("mean", zeros), ("concat", none)):
        got = pa.per_sample_grad(called, reduce=reduce, engine=engine)(PARAMS, empty)
        assert_trees_bitwise_equal(got, want)
    clipped = pa.clipped_sum(called, 1.0, engine=engine)(PARAMS, empty)
    assert_trees_bitwise_equal(clipped, (zeros, torch.zeros(0)))
    for options in ({"has_aux": True}, {"metrics": lambda grad, value: value}):
        with refused(ValueError, "no samples", "at least one sample", loss=called):
            pa.per_sample_grad(called, engine=engine, **options)(PARAMS, empty)
    assert called.calls == 0


@engines
def test_a_batch_without_rows_has_products_with_none(engine):
    called, none = Loss(out), make_batch(0)
    of = pa.gramian(called, engine=engine)
    for batch, other, shape in ((none, OTHER, (0, 3)), (BATCH, none, (5, 0)), (none, None, (0, 0))):
        assert of(PARAMS, batch, other=other).shape == shape
    assert called.calls == 0


# States ----------------------------------------------------------------------------------------


def started(**options):
    acc = pa.per_sample_accumulator(loss, chunk_size=2, **options)
    return acc, acc.update(acc.init(PARAMS), PARAMS, make_batch(3))


@pytest.mark.parametrize(("key", "width"), [("w", 3), ("w", 1), ("c", 2)])
@pytest.mark.parametrize("reduce", ["mean", "moments"])
def test_states_of_other_params_are_refused(key, width, reduce):
    acc, state = started(reduce=reduce)
    other = acc.init({"b": PARAMS["b"], key: torch.ones(width)})
    with refused(ValueError, "state", "that init made from these params", given=other):
        acc.update(other, PARAMS, BATCH)
    for pair in ((state, other), (other, state)):
        with refused(ValueError, "state", "that init made from these params", given=pair):
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


@pytest.mark.promise("donation")
@engines
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


@pytest.mark.promise("donation")
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
    def count(state, grads, weight):
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


def test_a_loss_of_a_batch_is_told_what_it_was_given():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    fn = pa.functional(net)
    x, y = torch.ones(5, 3), torch.arange(5) % 4
    of_batch = lambda p, x, y: nn.functional.cross_entropy(  # noqa: E731
        fn.apply(p, fn.buffers, x)[0], y.view(len(x))
    )
    with pytest.raises(Exception, match=r".") as caught:
        pa.per_sample_grad(of_batch, batch_argnums=(1, 2))(fn.params, x, y)
    assert "without its batch dimension" in "".join(caught.value.__notes__)
    assert "keep_batch_dim=True" in "".join(caught.value.__notes__)
    grads = pa.per_sample_grad(of_batch, batch_argnums=(1, 2), keep_batch_dim=True)
    assert grads(fn.params, x, y)["0.bias"].shape == (5, 4)
