"""States on a CUDA device are saved from there and loaded to where ``like`` is."""

from pathlib import Path

import optree
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.states import batch_of, first_state, full_step


pytestmark = pytest.mark.checkpoint


@pytest.mark.cuda
def test_a_state_goes_to_the_device_of_like(tmp_path: Path) -> None:
    step = full_step()
    here, _ = step(first_state(step), batch_of(10))
    there = optree.tree_map(lambda x: x.cuda(), here, namespace="pureaccum")
    turned = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    pa.save(tmp_path / "run", [there, turned])
    for like in ([there, turned], [here, turned.cpu()]):
        state, x = pa.load(tmp_path / "run", like=like)
        assert all(
            got.device == wanted.device
            for got, wanted in zip(
                optree.tree_leaves([state, x], namespace="pureaccum"),
                optree.tree_leaves(like, namespace="pureaccum"),
                strict=True,
            )
        )
        assert_trees_bitwise_equal(state, like[0])
        assert torch.equal(x.cpu(), turned.cpu())
        assert x.stride() == turned.stride()
