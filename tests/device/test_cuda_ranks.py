"""Ranks with a GPU each, by NCCL: as many as there are."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import pureaccum as pa
from pureaccum import distributed
from pureaccum.testing import assert_trees_bitwise_equal
from tests.ranks import run_on_ranks


pytestmark = [pytest.mark.parity, pytest.mark.cuda, pytest.mark.promise("ranks")]


def shares_a_batch(donate, compile, rank, world):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    w = {"w": torch.ones(64, 64, device=device), "b": torch.zeros(64, device=device)}
    x = torch.randint(-3, 4, (8, 64), device=device, generator=torch.Generator(device)).float()

    def loss(w, x):
        return ((x @ w["w"] + w["b"]).relu()).sum(1).mean()

    options = {"microbatch_size": 2, "loss_scale": pa.dynamic_loss_scale(8.0)}
    alone = pa.make_step(loss, pa.sgd(2.0**-4), **options)
    want, seen = alone(alone.init(w), x)
    group = dist.group.WORLD
    step = pa.make_step(
        loss, pa.sgd(2.0**-4), group=group, donate=donate, compile=compile, **options
    )
    new, info = step(step.init(w), distributed.shard_batch(x, rank, world))
    assert_trees_bitwise_equal(new, want)
    assert_trees_bitwise_equal(info.grad_norm, seen.grad_norm)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_all_gpus_share_a_batch(donate, compile):
    call = partial(shares_a_batch, donate, compile)
    ends = run_on_ranks(torch.cuda.device_count(), call, backend="nccl")
    assert not [end.failure for end in ends if end.failure]


def disagrees(rank, world):
    """Where no rank looks the step is not applied; where all look they raise."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    options = {"loss_scale": pa.dynamic_loss_scale(8.0), "group": dist.group.WORLD}
    step = pa.make_step(lambda w, x: (w * x).mean(), pa.sgd(0.5), **options)
    state = step.init(torch.ones(4, device=device))
    x = torch.ones(2, 4, device=device)
    for _ in range(2):
        state, info = step(state, x)
        assert info.applied
    if rank == world - 1:
        state = state._replace(samples=state.samples + 1)
    new, info = step(state, x)
    assert bool(info.applied) is (world == 1)
    if world > 1:
        assert_trees_bitwise_equal(new.params, state.params)
        with pytest.raises(ValueError, match=r"state\.samples is"):
            step(new, x)


def test_gpus_that_disagree_all_raise():
    ends = run_on_ranks(torch.cuda.device_count(), disagrees, backend="nccl")
    assert not [end.failure for end in ends if end.failure]


@pytest.mark.promise("launches")
@pytest.mark.promise("ranks")
def test_ranks_do_not_wait_for_the_device():
    """One rank, in this process: a reduction is put on the stream, and that is all."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step = pa.make_step(lambda w, x: (w * x).mean(), pa.sgd(0.5), group=dist.group.WORLD)
        state = step.init(torch.ones(4, device="cuda"))
        x = torch.ones(2, 4, device="cuda")
        for _ in range(2):  # the first builds NCCL's communicator; steps 1, 2, 4, … look at claims
            state, _ = step(state, x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(state, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    finally:
        dist.destroy_process_group()
