"""torchtitan's train_step: the mean over the tokens of all ranks and microbatches.

github.com/pytorch/torchtitan
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import characters, near
from tests.ranks import on_ranks


pytestmark = [pytest.mark.parity, pytest.mark.promise("programs")]
TEXT, WORDS = characters()
STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS)).double()


def microbatches_of(step: int, rank: int) -> list[dict[str, Tensor]]:
    """Ranks have different numbers of microbatches, of different lengths."""
    found: list[dict[str, Tensor]] = []
    for i in range(1 + (step + rank) % 3):
        at = 100 * step + 40 * rank + 10 * i
        length = 4 + 3 * i + rank
        found.append({"x": TEXT[at : at + length], "y": TEXT[at + 1 : at + length + 1]})
    return found


def original(rank: int) -> dict[str, Tensor]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = microbatches_of(step, rank)
        tokens = torch.tensor(sum(len(part["y"]) for part in parts))
        dist.all_reduce(tokens)  # before the first backward pass, and the device is waited for
        for part in parts:
            loss = F.cross_entropy(model(part["x"]), part["y"], reduction="sum") / tokens
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def ported(rank: int, path: str = "", stop: int = STEPS) -> dict[str, Tensor]:
    fn = pa.functional(network())

    def loss(params: Any, part: Any) -> pa.Weighted:
        out, _ = fn.apply(params, (), part["x"])
        return pa.Weighted(F.cross_entropy(out, part["y"], reduction="sum"), len(part["y"]))

    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-2))
    step = pa.make_step(loss, optimizer, group=dist.group.WORLD)
    state = step.init(fn.params)
    if path and Path(path).exists():
        state = pa.load(path, like=state)
    for i in range(int(state.attempts), stop):
        state, _ = step.window(state, microbatches_of(i, rank))
    if path:
        pa.save(path, state)
    return state.params


ORIGINAL, PORTED = [original], [ported]


@pytest.mark.slow
@on_ranks(2)
def test_it_is_the_original_on_uneven_ranks(rank: int, world: int) -> None:
    assert near(ported(rank), original(rank)) <= 2.0**-26.5


@pytest.mark.slow
@on_ranks(2)
def test_it_goes_on_where_it_stopped(rank: int, world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "run")
        ported(rank, path, stop=1)
        assert_trees_bitwise_equal(ported(rank, path), ported(rank))
