"""Ranks that were set up wrongly, that raise, and that die."""

import functools
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

import pureaccum as pa
from pureaccum import distributed
from pureaccum.testing import assert_trees_bitwise_equal
from tests.dropped import is_dropped
from tests.ranks import End, on_ranks, run_on_ranks


pytestmark = [pytest.mark.faults, pytest.mark.promise("ranks"), pytest.mark.table]


def loss(w, x):
    return (w * x).mean()


def test_a_group_that_is_not_there_is_refused():
    state = pa.accumulator(loss).init(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"init_process_group\(\.\.\.\) first"):
        distributed.all_reduce(state)
    with pytest.raises(RuntimeError, match="torchrun"):
        pa.make_step(loss, pa.sgd(), group="world")


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_of_no_rank_is_refused(rank, world):
    with pytest.raises(ValueError, match=f"rank is {rank} and world {world}; expected a rank from"):
        distributed.shard_batch(torch.ones(4), rank, world)


def test_a_shard_of_what_has_no_rows_is_refused():
    with pytest.raises(ValueError, match="a 0-d tensor"):
        distributed.shard_batch(torch.tensor(1.0), 0, 2)


@on_ranks(2)
def test_what_ranks_cannot_do_is_refused(rank, world):
    everyone = dist.group.WORLD
    acc = pa.accumulator(loss)
    state = acc.init(torch.ones(2))
    with pytest.raises(
        TypeError, match=r"group is a str; expected a process group\. Pass dist\.group"
    ):
        distributed.all_reduce(state, "world")
    with pytest.raises(TypeError, match="expects the AccumState"):
        distributed.all_reduce((state, ()))
    with pytest.raises(ValueError, match="async_op=True does not work with merge"):
        distributed.all_reduce(state, merge=acc.merge, async_op=True)
    flags = state._replace(grads={"seen": torch.ones(2, dtype=torch.bool)})
    with pytest.raises(TypeError, match=r"state\.grads\['seen'\] is torch\.bool, which has no sum"):
        distributed.all_reduce(flags)
    with pytest.raises(RuntimeError, match="all_reduce does not work under a transform"):
        torch.func.vmap(lambda g: distributed.all_reduce(state._replace(grads=g)).grads)(
            torch.ones(3, 2)
        )
    with pytest.raises(ValueError, match="buffers='sequential' does not work with group"):
        pa.make_step(loss, pa.sgd(), group=everyone, buffers="sequential")

    step = pa.make_step(lambda w, x, keys: loss(w, x), pa.sgd(), keys=True, group=everyone)
    begun = step.init(torch.ones(2))
    window = step.begin(begun)
    with pytest.raises(
        ValueError, match=r"the same keys\. Pass the number of samples before it, on"
    ):
        step.update(begun, window, torch.ones(3, 2))
    for offset, error in (
        (-1, ValueError),
        (2**63, ValueError),
        (1.0, TypeError),
        (True, TypeError),
    ):
        with pytest.raises(
            error, match=f"offset is {offset!r}.*; expected the samples of this step"
        ):
            step.update(begun, window, torch.ones(3, 2), offset=offset)
    mesh = init_device_mesh("cpu", (world,))
    spread = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    with pytest.raises(
        ValueError, match=r"params holds DTensors .* Omit group: a step sums a batch that"
    ):
        step.init({"w": spread})
    with pytest.raises(
        ValueError, match=r"state\.grads holds DTensors .*\. finalize and the end of a step"
    ):
        distributed.all_reduce(acc.init({"w": spread}))
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not a rank of the group"):
            distributed.all_reduce(state, alone)


@on_ranks(2)
def test_ranks_that_begin_apart_all_raise(rank, world):
    """The error comes on all of them, and names the leaf."""
    step = pa.make_step(loss, pa.sgd(), group=dist.group.WORLD)
    apart = {"a": torch.ones(2), "b": torch.tensor([1.0, 2.0 + rank])}
    said = r"params\['b'\] is \[1\.0, 2\.0\] on rank 0 and \[1\.0, 3\.0\] on rank 1\. "
    with pytest.raises(ValueError, match=said + r".*torch\.manual_seed"):
        step.init(apart)
    shapes = {"a": torch.ones(2 + rank)}
    with pytest.raises(
        ValueError, match=r"params\['a'\] is torch\.float32 of shape \(2,\) on rank 0"
    ):
        step.init(shapes)
    with pytest.raises(
        ValueError, match=r"params\['a1'\] is absent on rank 0 and torch\.float32 of"
    ):
        step.init({f"a{rank}": torch.ones(2)})
    with pytest.raises(ValueError, match=r"the same values: key is "):
        step.init({"a": torch.ones(2)}, seed=rank)
    kinds = torch.float16, torch.bfloat16, torch.float64, torch.complex64
    alike = [
        torch.tensor([torch.nan, -0.0]),
        torch.ones(()),
        torch.ones(0, 2),
        torch.ones(2, 3).t(),
    ]
    step.init([*alike, *(torch.ones(2, dtype=kind) for kind in kinds)])  # the same bits


def raises_in_mid_window(rank, world):
    step = pa.make_step(loss, pa.sgd(0.5), group=dist.group.WORLD, donate=bool(rank % 2))
    state = step.init(torch.ones(2))
    state, _ = step(state, torch.ones(2, 2))
    before = state.params.clone()
    window = step.update(state, step.begin(state), torch.ones(2, 2))
    if rank == 0:
        raise ZeroDivisionError("a fault of rank 0")
    with pytest.raises(RuntimeError) as caught:
        step.apply(state, window)
    assert any("could not add up" in note for note in caught.value.__notes__)
    assert_trees_bitwise_equal(state.params, before)  # usable
    pa.make_step(loss, pa.sgd(0.5))(state, torch.ones(2, 2))


def dies_in_mid_window(folder, rank, world):
    """What the ranks had saved is enough to end the window, with what the dead one did."""
    step = pa.make_step(loss, pa.sgd(0.5), group=dist.group.WORLD)
    state = step.init(torch.ones(2))
    window = step.update(state, step.begin(state), torch.full((2, 2), 1.0 + rank))
    pa.save(f"{folder}/{rank}", {"state": state, "window": window})
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        step.apply(state, window)
    assert any("could not add up" in note for note in caught.value.__notes__)
    alone = pa.make_step(loss, pa.sgd(0.5))
    like = {"state": state, "window": step.begin(state)}
    saved = [pa.load(f"{folder}/{r}", like) for r in range(world)]
    assert_trees_bitwise_equal(saved[rank], {"state": state, "window": window})
    new, info = alone.apply(state, functools.reduce(alone.merge, (it["window"] for it in saved)))
    rows = torch.tensor([[1.0 + r] * 2 for r in range(world) for _ in range(2)])
    assert_trees_bitwise_equal(new, alone(state, rows)[0])
    assert info.microbatches == world


def dies_inside_of_a_loss(rank, world):
    """Between two sums over ranks, of which the others wait in the second."""
    calls = 0

    def of_all(w, x):
        nonlocal calls
        calls += not is_dropped()
        total = pa.distributed.psum((w * x).sum())
        if rank == 1 and calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return pa.distributed.psum(total**2)

    step = pa.make_step(of_all, pa.sgd(2.0**-9), group=dist.group.WORLD)
    state, _ = step(step.init(torch.ones(2)), torch.ones(2, 2))
    state, _ = step(state, torch.ones(2, 2))
    before = state.params.clone()
    with pytest.raises(RuntimeError) as caught:
        step(state, torch.ones(2, 2))
    assert any("rank" in note for note in caught.value.__notes__)
    assert_trees_bitwise_equal(state.params, before)
    assert pa.make_step(loss, pa.sgd(0.5))(state, torch.ones(2, 2))[1].applied


def late(step, state, rank):
    if rank == 1:
        time.sleep(0.5)
    return step(state, torch.ones(2, 2))


def hung(step, state, rank):
    if rank == 1:  # catches its own error, say, and goes on without the step
        return None
    return step(state, torch.ones(2, 2))


def one_step_more(step, state, rank):
    state, _ = step(state, torch.ones(2, 2))
    return None if rank == 1 else step(state, torch.ones(2, 2))


def other_group(step, state, rank):
    if rank == 1:
        same_ranks = pa.make_step(loss, pa.sgd(0.5), group=GROUPS[1])
        return same_ranks(state, torch.ones(2, 2))
    return step(state, torch.ones(2, 2))


GROUPS = []


def do_not_meet(rank, world):
    """Each kind in a group of its own, which is of no use afterwards."""
    alone = pa.make_step(loss, pa.sgd(0.5))
    state = alone.init(torch.ones(2))
    before = state.params.clone()
    wait = timedelta(seconds=2)
    for kind in (late, hung, one_step_more, other_group):
        GROUPS[:] = [dist.new_group(timeout=wait), dist.new_group(timeout=wait)]
        step = pa.make_step(loss, pa.sgd(0.5), group=GROUPS[0])
        dist.barrier()
        if kind is late:
            new, _ = late(step, state, rank)
            assert_trees_bitwise_equal(new.params, alone(state, torch.ones(2, 2))[0].params)
        elif rank == 1 and kind is not other_group:
            kind(step, state, rank)
        else:  # torch's timeout tells, with a note of ours
            with pytest.raises(RuntimeError) as caught:
                kind(step, state, rank)
            assert any("could not add up" in note for note in caught.value.__notes__)
        assert_trees_bitwise_equal(state.params, before)
        alone(state, torch.ones(2, 2))
        dist.barrier()


def aborts(times, folder, rank, world):
    """Abort the second rank in so many runs of its group; returns how many came before."""
    ran = Path(folder) / str(rank)
    before = len(ran.read_text()) if ran.exists() else 0
    ran.write_text("." * (before + 1))
    dist.barrier()
    if rank == 1 and before < times:
        os.abort()
    return before


@pytest.mark.slow
def test_a_group_that_aborts_runs_once_more_and_only_once(tmp_path):
    """Of tests/ranks.py: what aborts twice has failed."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    assert run_on_ranks(2, functools.partial(aborts, 1, str(once))) == [End(1), End(1)]
    _, second = run_on_ranks(2, functools.partial(aborts, 2, str(twice)))
    assert second.failure == "died with exit code -6"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_after_a_rank_raised_the_others_raise_and_can_go_on(world):
    first, *others = run_on_ranks(world, raises_in_mid_window)
    assert "a fault of rank 0" in first.failure
    assert others == [End()] * (world - 1), others


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_after_a_rank_died_in_mid_window_the_others_can_go_on(world, tmp_path):
    dying = functools.partial(dies_in_mid_window, str(tmp_path))
    first, second, *others = run_on_ranks(world, dying)
    assert second.failure == "died with exit code -9"
    assert {first, *others} == {End()}, [first, *others]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_after_a_rank_died_inside_of_a_loss_the_others_can_go_on(world):
    first, second, *others = run_on_ranks(world, dies_inside_of_a_loss)
    assert second.failure == "died with exit code -9"
    assert {first, *others} == {End()}, [first, *others]


@pytest.mark.nightly  # ranks wait for each other until their time is over
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_do_not_meet_raise_and_can_go_on(world):
    assert run_on_ranks(world, do_not_meet) == [End()] * world


@on_ranks(2)
def test_a_group_that_was_destroyed_is_refused(rank, world):
    group = dist.new_group()
    step = pa.make_step(loss, pa.sgd(0.5), group=group)
    state = step.init(torch.ones(2))
    step(state, torch.ones(2, 2))
    dist.destroy_process_group(group)
    for call in (lambda: step.init(torch.ones(2)), lambda: step(state, torch.ones(2, 2))):
        with pytest.raises(RuntimeError, match="group was destroyed"):
            call()
