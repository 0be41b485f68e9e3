"""Ranks compare functions of the user's own by their names and by what is bound to them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import pureaccum as pa
from tests.ranks import on_ranks


pytestmark = [pytest.mark.faults, pytest.mark.promise("ranks")]
W, X = torch.tensor(3.0), torch.ones(2)


def loss(w, x):
    return (w * x).mean()


def decayed(by, count):
    return by / (1 + count)


def moved(by, grads, state, params):
    return params - by * grads, state


def stepped(optimizer):
    step = pa.make_step(loss, optimizer, group=dist.group.WORLD)
    return step(step.init(W), X)[0].params


@pytest.mark.slow
@on_ranks(2)
def test_functions_of_the_user_agree_by_name_and_by_what_they_bind(rank, world):
    def rate(count):  # made anew on each rank
        return decayed(0.5, count)

    assert stepped(pa.sgd(rate)) == 2.5
    assert stepped(pa.sgd(partial(decayed, 0.5))) == 2.5
    apply = partial(moved, 0.5)  # which has no name
    assert stepped(SimpleNamespace(init=lambda params: (), apply=apply)) == 2.5
    with pytest.raises(ValueError, match=r"0\.5 on rank 0 and 1\.5 on rank 1"):
        stepped(pa.sgd(partial(decayed, 0.5 + rank)))
    with pytest.raises(ValueError, match="decayed on rank 0 and "):
        stepped(pa.sgd(rate if rank else partial(decayed, 0.5)))
    assert stepped(pa.sgd(rate)) == 2.5
