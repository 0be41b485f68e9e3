"""``fn.load`` between plain tensors and DTensors, whichever of state and module has them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pureaccum as pa
from tests.ranks import cases_on_ranks


pytestmark = [pytest.mark.purity, pytest.mark.promise("functional"), pytest.mark.promise("ranks")]
NEW = {"0.weight": torch.arange(12.0).reshape(3, 4), "0.bias": torch.arange(3.0)}


def placed(tree, placement):
    mesh = init_device_mesh("cpu", (2,))
    return {name: distribute_tensor(x, mesh, [placement]) for name, x in tree.items()}


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3))


def sharded():
    net = plain()
    for name, x in placed(dict(net.named_parameters()), Shard(0)).items():
        setattr(net[0], name.removeprefix("0."), nn.Parameter(x.detach()))
    return net


def loads(make, placement, shards_later):
    """The module holds the new numbers, and ``fn.params`` the old ones."""
    net = make()
    fn = pa.functional(net)
    old = {name: whole(x).clone() for name, x in fn.params.items()}
    if shards_later:
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    fn.load(NEW if placement is None else placed(NEW, placement))
    for name, x in net.named_parameters():
        assert torch.equal(whole(x).detach(), NEW[name])
        assert torch.equal(whole(fn.params[name]), old[name])


CASES = {
    "sharded into plain": partial(loads, plain, Shard(0), False),
    "plain into sharded": partial(loads, sharded, None, False),
    "replicated into sharded": partial(loads, sharded, Replicate(), False),
    "into what was sharded since": partial(loads, plain, None, True),
}


@pytest.mark.nightly
def test_a_state_is_loaded_wherever_it_lies():
    for name, texts in cases_on_ranks(2, CASES).items():
        assert not any(texts), f"{name}: " + "\n".join(texts)
