"""BatchNorm over ranks: gradients and running statistics of one process that has all samples.

The oracle is the module itself, called on all samples, and torch.func; both sides are in float64.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad_and_value

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from tests.core.test_exchange import Collectives, cut_by_ranks, near
from tests.draws import generator
from tests.pure import resnets
from tests.ranks import in_step, on_ranks


pytestmark = [pytest.mark.bounds, pytest.mark.promise("ranks")]
PROMISED = 1e-10


def resnet():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resnets.resnet10(4, 3).double()


def mlp():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)]
        return nn.Sequential(*layers, nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3)).double()


def batch_of(rows, *shape):
    random = generator(rows)
    x = torch.randn(rows, *shape, generator=random, dtype=torch.float64)
    return 3 + 2 * x, torch.randn(rows, 3, generator=random, dtype=torch.float64)


def in_one_process(net, x, y):
    """Gradients, value and new buffers."""
    params = {k: p.detach() for k, p in net.named_parameters()}
    buffers = {k: b.clone() for k, b in net.named_buffers()}

    def loss(params):
        fresh = {k: b.clone() for k, b in buffers.items()}
        out = functional_call(net, (params, fresh), (x,))
        held.update(fresh)
        return ((out - y) ** 2).mean()

    held = {}
    grads, value = grad_and_value(loss)(params)
    with torch.no_grad():
        functional_call(net, (params, buffers), (x,))
    return grads, value, buffers


def check(net, x, y, rows, size, buffers):
    fn = pa.functional(net, microbatch_size=size, group=dist.group.WORLD)

    def loss(params, batch, buffers=None):
        out, new = fn.apply(params, fn.buffers if buffers is None else buffers, batch["x"])
        value = pa.Weighted(((out - batch["y"]) ** 2).mean(1).sum(), out.new_tensor(len(out)))
        return value if buffers is None else (value, new)

    own = loss if buffers else lambda params, batch: loss(params, batch)
    how = "pooled" if buffers else "freeze"
    step = pa.make_step(own, pa.sgd(1.0), group=dist.group.WORLD, buffers=how)
    state = step.init(fn.params, fn.buffers if buffers else None)
    new, info = step(state, {"x": x[rows], "y": y[rows]})
    grads, value, running = in_one_process(net, x, y)
    assert info.applied
    near(info.loss, value, PROMISED)
    came = {k: state.params[k] - new.params[k] for k in grads}
    whole = torch.cat([g.flatten() for g in tree_leaves(grads)]).norm()
    error = torch.cat([(came[k] - grads[k]).flatten() for k in grads]).norm()
    assert error <= PROMISED * whole, (error, whole)
    if buffers:
        near(new.buffers, running, PROMISED)


@pytest.mark.slow
@on_ranks(2, 3)
@in_step()
@given(data=st.data(), size=st.none() | st.integers(1, 4), buffers=st.booleans())
def test_gradients_are_those_of_all_rows(rank, world, data, size, buffers):
    rows = data.draw(st.integers(2, 9))
    x, y = batch_of(rows, 5)
    check(mlp(), x, y, cut_by_ranks(data, rows, world)[rank], size, buffers)


@pytest.mark.slow
@on_ranks(2)
def test_a_residual_network_over_uneven_ranks(rank, world):
    x, y = batch_of(11, 3, 8, 8)
    rows = (slice(0, 7), slice(7, 11))[rank]
    check(resnet(), x, y, rows, 3, True)


@pytest.mark.slow
@on_ranks(2)
def test_a_layer_costs_one_collective_on_the_way_there_and_one_back(rank, world):
    """As torch's SyncBatchNorm does; what ranks are about to exchange is compared once."""
    x, y = batch_of(6, 5)
    net = mlp()
    fn = pa.functional(net, microbatch_size=2, group=dist.group.WORLD)

    def loss(params):
        out, _ = fn.apply(params, fn.buffers, x)
        return ((out - y) ** 2).mean()

    torch.func.grad(loss)(fn.params)
    with Collectives() as counted:
        torch.func.grad(loss)(fn.params)
    assert counted.seen == {"allgather": 2, "reduce_scatter": 2}, counted.seen


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_of_no_weight_has_the_statistics_of_all(rank, world):
    """Its samples count for no loss, and are in the moments all the same, as in one process."""
    x, y = batch_of(8, 5)
    weight = torch.tensor([1.0] * 4 + [0.0] * 4).double()
    net = mlp()
    new = []
    for group, rows in ((None, slice(0, 8)), (dist.group.WORLD, slice(4 * rank, 4 * rank + 4))):
        fn = pa.functional(net, microbatch_size=2, group=group)

        def loss(params, batch, buffers):
            out, after = fn.apply(params, buffers, batch[0])  # noqa: B023
            total = (((out - batch[1]) ** 2).mean(1) * batch[2]).sum()
            return pa.Weighted(total, batch[2].sum()), after

        step = pa.make_step(loss, pa.sgd(0.1), buffers="pooled", group=group)
        state = step.init(fn.params, fn.buffers)
        for _ in range(2):
            state, info = step(state, tuple(t[rows] for t in (x, y, weight)))
            assert info.applied
        new.append(state)
    near(new[1].params, new[0].params, PROMISED)
    near(new[1].buffers, new[0].buffers, PROMISED)
