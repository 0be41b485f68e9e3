"""Sharded parameters: several ranks give what one process gives."""

import pytest
import torch.distributed as dist

from tests.parity.sharded import CASES
from tests.ranks import Outcomes, on_ranks


pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without it")


@pytest.fixture(scope="module")
def outcomes() -> dict[int, Outcomes]:
    """Processes are started once for all cases of a mesh."""
    return {world: on_ranks(world, cases) for world, cases in CASES.items()}


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, cases in CASES.items() for name in cases]
)
def test_ranks_give_what_one_process_gives(
    world: int, name: str, outcomes: dict[int, Outcomes]
) -> None:
    wrong = {rank: text for rank, text in enumerate(outcomes[world][name]) if text}
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())
