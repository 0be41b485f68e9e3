"""The Jacobian of several losses over one batch in microbatches.

On whole numbers it has the bits of the whole batch, by jacrev, jacfwd and at second order. However
many losses there are, each microbatch runs once forwards and once more for the pass back, and what
is alive is what one microbatch takes and the Jacobian.
"""

import pytest
import torch
from optree import tree_map
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vjp, vmap

import pureaccum as pa
from pureaccum._core.auto_size import counting
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.dropped import is_dropped
from tests.exactly import integers


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("closure"),
    pytest.mark.promise("reductions"),
]
ROWS, SIZE = 16, 4
Params = dict[str, Tensor]


def make():
    random = generator(0)
    params = {"w": integers(random, 3, 4, bound=3), "b": integers(random, 4, bound=3)}
    return params, integers(random, ROWS, 3, bound=3)


def outputs(p, x):
    return torch.relu(x @ p["w"] + p["b"])


def sums(p, x):
    z = outputs(p, x)
    return torch.stack([z.sum(), (z**2).sum(), (z[:, 0] * x[:, 1]).sum()])


def weighted(p, x):
    """Of which one weighs nothing in some microbatches, and is NaN there."""
    z, on = outputs(p, x), x[:, 0] > 1
    ratio = (z[:, 0] * on).sum() * (on.sum() / on.sum())
    return {"all": pa.Weighted((z**2).sum(), len(x)), "on": pa.Weighted(ratio, on.sum())}


def means(p, x):
    return sums(p, x) / len(x)


def rows(p, x):
    z = outputs(p, x)
    return torch.stack([z[:, 0], z.sum(1)], 1)


def numbers(p, x):
    return (*sums(p, x),)


def tree(p, x):
    return {"one": sums(p, x)[0], "two": [means(p, x)[1:]]}


FORMS = {  # and the words for what comes out
    sums: "sum",
    means: "mean",
    rows: "concat",
    numbers: "sum",
    tree: {"one": "sum", "two": "mean"},
}


def flat_hessian(f):
    return lambda p: hessian(lambda b: f({**p, "b": b}))(p["b"])


JACOBIANS = {
    "jacrev": jacrev,
    "jacrev in parts": lambda f: jacrev(f, chunk_size=2),
    "jacfwd": jacfwd,
    "hessian": flat_hessian,
    "jacrev of jacrev": lambda f: lambda p: jacrev(jacrev(lambda b: f({**p, "b": b})))(p["b"]),
    "vmap": lambda f: lambda p: vmap(jacrev(f))(tree_map(lambda x: torch.stack([x, 2 * x]), p)),
}


@pytest.mark.parametrize("jacobian", JACOBIANS)
@pytest.mark.parametrize("func", FORMS, ids=lambda f: f.__name__)
def test_the_jacobian_of_several_losses_has_the_bits_of_the_whole_batch(func, jacobian):
    params, x = make()
    of = pa.microbatch(func, microbatch_size=SIZE, reduce=FORMS[func])
    got = JACOBIANS[jacobian](lambda p: of(p, x))(params)
    assert_trees_bitwise_equal(got, JACOBIANS[jacobian](lambda p: func(p, x))(params))


@pytest.mark.parametrize("jacobian", JACOBIANS)
def test_a_loss_without_weight_leaves_the_others_as_they_are(jacobian):
    params, x = make()
    x[:SIZE, 0] = 0  # NaN in the first microbatch, where it weighs nothing
    on = x[:, 0] > 1

    def whole(p):
        z = outputs(p, x)
        return {"all": (z**2).sum() / ROWS, "on": (z[:, 0] * on).sum() / on.sum()}

    assert 0 < on.sum() == 2 ** int(on.sum().log2())  # so that the division is exact
    of = pa.microbatch(weighted, microbatch_size=SIZE, reduce="sum")
    assert weighted(params, x[:SIZE])["on"].total.isnan()
    got = JACOBIANS[jacobian](lambda p: of(p, x))(params)
    assert_trees_bitwise_equal(got, JACOBIANS[jacobian](whole)(params))


def counted(many):
    """So many losses, and the samples of each call."""
    calls = []

    def losses(p, x):
        if not is_dropped():
            calls.append(len(x))
        return torch.stack([(outputs(p, x) * (i + 1)).sum() for i in range(many)])

    return losses, calls


@pytest.mark.parametrize("many", [2, 9])
def test_each_microbatch_runs_once_forwards_and_once_for_the_pass_back(many):
    (params, x), (losses, calls) = make(), counted(many)
    cut = pa.microbatch(losses, microbatch_size=SIZE, reduce="sum")
    of, once = lambda p: cut(p, x), [SIZE] * (ROWS // SIZE)

    def during(run):
        calls.clear()
        out = run()
        return calls[:], out

    seen, (_, pull) = during(lambda: vjp(of, params))
    assert seen == once
    for _ in range(2):
        assert during(lambda: vmap(pull)(torch.eye(many)))[0] == once
    assert during(lambda: jacrev(of)(params))[0] == once * 2
    assert during(lambda: jvp(of, (params,), (params,)))[0] == once * 2


WIDTH, LAYERS, LOSSES = 48, 6, 3


def peak(cut, pieces):
    random = generator(0)
    params = [torch.randn(WIDTH, WIDTH, generator=random) / 7 for _ in range(LAYERS)]
    x = torch.randn(pieces * 16, WIDTH, generator=random)

    def losses(params, x):
        for w in params:
            x = torch.tanh(x @ w)
        return torch.stack([(x * (i + 1)).sin().sum() for i in range(LOSSES)])

    of = pa.microbatch(losses, microbatch_size=16, reduce="sum") if cut else losses
    with counting() as live:
        jacrev(of)(params, x)
    return live.peak


def test_a_jacobian_takes_the_memory_of_one_microbatch():
    assert peak(cut=True, pieces=64) <= 1.1 * peak(cut=True, pieces=4)
    assert peak(cut=False, pieces=64) > 4 * peak(cut=False, pieces=4)  # the control
