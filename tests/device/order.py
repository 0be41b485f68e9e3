"""A loss runs on the stream of its caller.

That two streams race fails every test on the device: see ``in_order``, in ``software``.
"""

import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.device.software import recorded
from tests.device.world import exact_pairs, moved, whole_numbers


def test_a_loss_on_a_stream_of_the_caller():
    """The hooks that add gradients up run on the stream of the forward pass."""
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()

    def step():
        return pa.grad_and_value(lambda p, b: exact_pairs(p, b, 3), microbatch_size=3, check=False)(
            params, batch
        )

    want = step()
    side.wait_stream(here)
    with torch.cuda.stream(side), recorded() as seen:
        got = step()
    here.wait_stream(side)
    assert {line.partition("@")[2] for line in seen.of("launch")} == {str(side.stream_id)}
    assert_trees_bitwise_equal(got, want)
