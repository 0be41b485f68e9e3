"""A step of several ranks looks at what they claim at steps 1, 2, 4, 8, …, and waits at no other.

One rank, whose collectives torch leaves out: its sums are those of all ranks.
"""

import pytest
import torch.distributed as dist

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.device.software import recorded
from tests.device.world import exact, moved, whole_numbers


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_ranks_look_at_steps_that_are_powers_of_two(engine, donate, group):
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    options = {"microbatch_size": 3, "engine": engine, "loss_scale": pa.dynamic_loss_scale(8.0)}
    options["check"] = False  # or it waits where a loss is asked
    step = pa.make_step(exact, pa.sgd(2.0**-3), group=group, donate=donate, **options)
    alone = pa.make_step(exact, pa.sgd(2.0**-3), **options)
    state, other = step.init(params), alone.init(params)
    for number in range(1, 8):
        other, _ = alone(other, batch)
        with recorded() as seen:
            state, _ = step(state, batch)
        assert bool(seen.waits) is (number in (1, 2, 4))
    assert_trees_bitwise_equal(state, other)
