"""Rows that are kept on the host go to and from the device over one stream, in order.

That two streams race fails every test on the device: see ``in_order``, in ``software``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.device.software import recorded
from tests.device.world import exact_pairs, moved, whole_numbers


engines = pytest.mark.parametrize("gradient", [pa.grad, torch.func.grad], ids=["pa", "torch"])


def called(gradient: Any, keep: str) -> Any:
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    return gradient(lambda p, b: exact_pairs(p, b, microbatch_size=3, keep=keep))(params, batch)


@engines
def test_rows_kept_on_the_host_have_the_bits_of_those_on_the_device(gradient: Any) -> None:
    assert_trees_bitwise_equal(called(gradient, "host"), called(gradient, "device"))


@engines
def test_copies_go_over_one_other_stream_in_all_calls(gradient: Any) -> None:
    seen = []
    for _ in range(3):
        with recorded() as record:
            called(gradient, "host")
        seen += [line.split("@")[1:] for line in record.copies if "pinned" in line]
    sides = {stream for streams in seen for stream in streams}
    assert len(sides) == 1
    assert sum(map(len, seen)) > len(seen) / 2  # but for the batch itself, which goes there first


def test_a_loss_on_a_stream_of_the_caller() -> None:
    """The hooks that add gradients up run on the stream of the forward pass."""
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()

    def step() -> tuple[Any, Tensor]:
        return pa.grad_and_value(lambda p, b: exact_pairs(p, b, 3), microbatch_size=3)(
            params, batch
        )

    want = step()
    side.wait_stream(here)
    with torch.cuda.stream(side), recorded() as seen:
        got = step()
    here.wait_stream(side)
    assert {line.partition("@")[2] for line in seen.of("launch")} == {str(side.stream_id)}
    assert_trees_bitwise_equal(got, want)
