"""A rematerialised network is the network, in every engine: its kernels, its random numbers.

The kernels of some have two formulas for a backward pass, one for where it is recorded. And what
is computed again sees the random numbers and the autocast of the first time.
"""

import gc
import weakref

import optree
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.problems import drawing, leaf, pulled


pytestmark = [
    pytest.mark.parity,
    pytest.mark.promise("second run"),
    pytest.mark.promise("closure"),
]
W, X = torch.randn(3, 3, generator=generator(0)), torch.randn(4, 3, generator=generator(1))


NETWORKS = {
    "silu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 6)), (4, 6)),
    "mish": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Mish()), (4, 6)),
    "groups": (lambda: nn.Sequential(nn.Conv1d(6, 6, 3), nn.GroupNorm(2, 6)), (4, 6, 9)),
    "layers": (lambda: nn.Sequential(nn.LayerNorm(6), nn.GELU()), (4, 6)),
    "recurrent": (lambda: nn.LSTM(6, 6, 2, batch_first=True), (4, 2, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), (4, 2, 6)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), (4, 6)),
}


def first_of(out):
    return optree.tree_leaves(out)[0]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ["func", "autograd", "torch.func", "backward"])
def test_a_rematerialised_module_has_its_bits(name, engine):
    """Kernels with two formulas, and random numbers; the generator stands where it would."""
    make, shape = NETWORKS[name]
    net, rows = make(), torch.randn(shape)
    params = {k: v.detach() for k, v in net.named_parameters()}
    lean = pa.remat(lambda p, x: first_of(functional_call(net, p, (x,))))

    def run(call):
        loss = lambda p, x: (call(p, call(p, x) if name == "dropout" else x) ** 2).mean()  # noqa: E731
        return {
            "backward": lambda: pulled(
                lambda *its: loss(dict(zip(params, its, strict=True)), rows), *params.values()
            ),
            "torch.func": lambda: grad(loss)(params, rows),
        }.get(engine, lambda: pa.grad(loss, microbatch_size=2, engine=engine)(params, rows))()

    expected = drawing(lambda: run(lambda p, x: first_of(functional_call(net, p, (x,)))))
    with unchanged(net, params, [rows]):
        assert_trees_bitwise_equal(drawing(lambda: run(lean)), expected)


def test_keys_may_be_passed_or_captured():
    keys = pa.fold_in(pa.key(0), torch.arange(4))

    def loss(drop):
        return lambda w, x: (drop(x @ w) ** 2).sum()

    expected = grad(loss(lambda h: pa.dropout(h, 0.5, keys)))(W, X)
    passed, captured = pa.remat(pa.dropout), pa.remat(lambda h: pa.dropout(h, 0.5, keys))
    assert_trees_bitwise_equal(grad(loss(lambda h: passed(h, 0.5, keys)))(W, X), expected)
    assert_trees_bitwise_equal(grad(loss(captured))(W, X), expected)
    each = vmap(
        grad(loss(lambda h: pa.remat(lambda h, key: pa.dropout(h, 0.5, key))(h, keys[0]))),
        (None, 0),
    )
    plain = vmap(grad(loss(lambda h: pa.dropout(h, 0.5, keys[0]))), (None, 0))
    assert_trees_bitwise_equal(each(W, X), plain(W, X))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_the_random_numbers_of_a_vmap_are_drawn_again(randomness):
    def run(drop):
        each = vmap(grad(lambda x: (drop(x) ** 2).sum()), randomness=randomness)(X)
        whole = grad(lambda X: (vmap(drop, randomness=randomness)(X) ** 2).sum())(X)
        return each, whole

    ours, plain = (drawing(lambda f=f: run(f), 1) for f in (pa.remat(F.dropout), F.dropout))
    assert_trees_bitwise_equal(ours, plain)


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_autocast_is_that_of_the_first_time(cache, backward_inside):
    """A weight that is used twice shows whether its cast is cached: its gradients are added."""
    twice = lambda w, x: ((x @ w).relu() @ w).float()  # noqa: E731

    def run(f):
        w = leaf(W)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            total = f(w, X).sum()
            if backward_inside:
                return torch.autograd.grad(total, w)
        with torch.autocast("cpu", torch.float16, enabled=not cache):
            return torch.autograd.grad(total, w)

    assert_trees_bitwise_equal(run(pa.remat(twice)), run(twice))


def test_autocast_around_the_backward_pass_alone_changes_nothing():
    def in_float32(w):
        with torch.autocast("cpu", enabled=False):
            return (w @ w).sin().sum()

    def run(f):
        w = leaf(W)
        total = f(w)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.autograd.grad(total, w)

    assert_trees_bitwise_equal(run(pa.remat(lambda w: (w @ w).sin().sum())), run(in_float32))


@pytest.mark.slow
def test_the_cache_of_autocast_lets_go_of_what_is_computed_again():
    """It would hold the casts, and with them the weights, until the region around it ends."""
    seen = []

    def func(w):
        seen.append(weakref.ref(w))
        return (X @ w).sum()

    with torch.autocast("cpu", torch.bfloat16):
        pa.remat(func)(leaf(W)).backward()
        gc.collect()
        assert [ref() for ref in seen] == [None] * 3  # observed, forwards, and back
