"""Buffers that a step's loss changes and drops raise at its first call, and say what to write."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.refusals import refused


pytestmark = [pytest.mark.transforms, pytest.mark.promise("buffers")]
WORDS = "drops the new buffers", 'buffers="pooled"', "fn.apply(params, buffers, x)"
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 2


def batch_norm():
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def spectral_norm():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), nn.Linear(4, 2))


class Counting(nn.Module):
    """A buffer of the user's own, which forward assigns anew."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + len(x)
        return self.layer(x)


COMPILED = pytest.param("compiled", marks=pytest.mark.slow)
MODULES = {"batch norm": batch_norm, "spectral norm": spectral_norm, "a counter": Counting}


def plainly(fn):
    def loss(params, batch):
        out, _ = fn.apply(params, fn.buffers, batch[0])
        return cross_entropy(out, batch[1])

    return loss


def stepping(fn, loss=None, **options):
    """A step over the whole batch, so that nothing else is wrong with it."""
    loss = plainly(fn) if loss is None else loss
    return pa.make_step(loss, pa.sgd(0.1), **options), fn.params


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("way", ["whole", "cut", "stream", "has_aux", COMPILED])
def test_dropped_buffers_raise_at_the_first_call(name, way):
    fn, options = pa.functional(MODULES[name]()), {}
    loss = plainly(fn)
    if way == "has_aux":
        loss, options = lambda p, b: (plainly(fn)(p, b), {"n": b[1]}), {"has_aux": True}
    if way in ("cut", "stream"):
        options = {"microbatch_size": 4 if way == "cut" else None, "check": False}
    if way == "compiled":
        options = {"compile": {"backend": "eager"}}
    step, params = stepping(fn, loss, **options)
    state = step.init(params)
    for _ in range(2):
        with unchanged(state), refused(ValueError, *WORDS):
            step.window(state, [(X, Y)] * 2) if way == "stream" else step(state, (X, Y))


def test_a_batch_norm_inside_of_a_microbatched_function_counts_too():
    fn = pa.functional(batch_norm())
    encode = pa.microbatch(lambda p, x: fn.apply(p, fn.buffers, x)[0], microbatch_size=4)
    step, params = stepping(fn, lambda p, b: cross_entropy(encode(p, b[0]), b[1]))
    with refused(ValueError, *WORDS):
        step(step.init(params), (X, Y))


def test_so_does_one_that_takes_the_whole_batch():
    fn = pa.functional(batch_norm(), microbatch_size=4)
    step, params = stepping(fn)
    with refused(ValueError, *WORDS, "'1.running_mean' of Sequential"):
        step(step.init(params), (X, Y))


def test_another_function_of_the_loss_that_was_called_before_hides_nothing():
    fn = pa.functional(batch_norm())
    loss = plainly(fn)
    pa.accumulator(loss, check=False).update(
        pa.accumulator(loss).init(fn.params), fn.params, (X, Y)
    )
    frozen, params = stepping(fn, loss, buffers="freeze")
    frozen(frozen.init(params), (X, Y))
    step, params = stepping(fn, loss)
    with refused(ValueError, *WORDS):
        step(step.init(params), (X, Y))


def returned(fn):
    def loss(params, batch):
        out, new = fn.apply(params, fn.buffers, batch[0])
        return cross_entropy(out, batch[1]), new

    return loss


def logged(fn):
    def loss(params, batch):
        out, new = fn.apply(params, fn.buffers, batch[0])
        return cross_entropy(out, batch[1]), {name: x.double().mean() for name, x in new.items()}

    return loss


def in_turn(fn):
    def loss(params, batch):
        one, new = fn.apply(params, fn.buffers, batch[0][:8])
        two, new = fn.apply(params, new, batch[0][8:])
        return cross_entropy(torch.cat([one, two]), batch[1]), new

    return loss


def without_statistics():
    return nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2, track_running_stats=False))


def partly_in_eval():
    return nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2).eval())


def beside_an_adversary(fn):
    """What a pass for the sake of a penalty does to the statistics is dropped on purpose."""

    def loss(params, batch):
        out, new = fn.apply(params, fn.buffers, batch[0])
        other, _ = fn.apply(params, fn.buffers, batch[0] + 1)
        return cross_entropy(out, batch[1]) + (out - other).square().mean(), new

    return loss


SAID = {"has_aux": True, "aux_reduction": "last"}
SILENT = {
    "in eval mode": (lambda: batch_norm().eval(), plainly, {}),
    "without statistics": (without_statistics, plainly, {}),
    "frozen": (batch_norm, plainly, {"buffers": "freeze"}),
    "returned as aux": (batch_norm, returned, SAID),
    "logged": (batch_norm, logged, SAID),
    "in turn": (batch_norm, in_turn, SAID),
    "beside an adversary": (batch_norm, beside_an_adversary, SAID),
    "a layer in eval mode": (partly_in_eval, plainly, {}),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 2)), plainly, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_where_nothing_is_lost(name):
    make, loss_of, options = SILENT[name]
    fn = pa.functional(make())
    step, params = stepping(fn, loss_of(fn), **options)
    state = step.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            state, info = step(state, (X, Y))
    assert info.applied


def test_freeze_serves_a_loss_without_buffers_and_one_that_has_them():
    fn = pa.functional(batch_norm())

    def with_buffers(params, batch, buffers):
        out, new = fn.apply(params, buffers, batch[0])
        return cross_entropy(out, batch[1]), new

    plain, params = stepping(fn, buffers="freeze")
    given, _ = stepping(fn, with_buffers, buffers="freeze")
    for state in (plain.init(params), plain.init(params, buffers=fn.buffers)):
        got, _ = plain(state, (X, Y))
        want, _ = given(given.init(params, buffers=fn.buffers), (X, Y))
        assert_trees_bitwise_equal(got.params, want.params)
        assert_trees_bitwise_equal(got.buffers, state.buffers)


@pytest.mark.slow
def test_the_two_lines_train_what_plain_torch_trains():
    """A newcomer's net, with the statistics of the whole batch in microbatches of 16."""
    torch.manual_seed(0)
    x = 5 + 3 * torch.randn(512, 8)
    y = (x.sum(1) > 40).long()

    def accuracy(net):
        return float((net.eval()(x).argmax(1) == y).float().mean())

    torch.manual_seed(0)
    by_hand = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(by_hand.parameters(), 1e-2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    fn = pa.functional(net, microbatch_size=16)

    def loss(params, batch, buffers):
        out, new_buffers = fn.apply(params, buffers, batch[0])
        return cross_entropy(out, batch[1]), new_buffers

    step = pa.make_step(loss, pa.adamw(1e-2), buffers="pooled")
    state = step.init(fn.params, fn.buffers)
    for _ in range(10):
        for i in range(0, 512, 64):
            optimizer.zero_grad()
            cross_entropy(by_hand(x[i : i + 64]), y[i : i + 64]).backward()
            optimizer.step()
            state, _ = step(state, (x[i : i + 64], y[i : i + 64]))
    fn.load(state.params, state.buffers)
    assert net[1].num_batches_tracked == 80
    assert accuracy(net) > 0.95
    assert abs(accuracy(net) - accuracy(by_hand)) < 0.02
