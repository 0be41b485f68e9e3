"""Sharded parameters: several ranks give what one process gives."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import pureaccum as pa
from pureaccum._sharded_checkpoint import load_sharded, save_sharded
from pureaccum.testing import assert_trees_bitwise_equal
from tests.faults.refusals import saying
from tests.parity.sharded import CASES, checkpoints, in_mid_window
from tests.ranks import Outcomes, cases_on_ranks


pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without it")

NAMES = [(world, name) for world in CASES for name in CASES[world] | checkpoints("")[world]]


class Ran(NamedTuple):
    outcomes: dict[int, Outcomes]
    folder: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Processes are started once for all cases of a mesh."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saving = checkpoints(str(folder))
    return Ran({n: cases_on_ranks(n, cases | saving[n]) for n, cases in CASES.items()}, folder)


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_ranks_give_what_one_process_gives(world: int, name: str, ran: Ran) -> None:
    wrong = {rank: text for rank, text in enumerate(ran.outcomes[world][name]) if text}
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())


@pytest.mark.parametrize("layout", ["replicated", "fsdp"])
def test_one_process_loads_what_two_ranks_saved(layout: str, ran: Ran) -> None:
    _, *like = in_mid_window("")
    loaded = pa.load(ran.folder / layout, like)
    kept = torch.load(ran.folder / f"{layout}.pt")
    assert_trees_bitwise_equal(pa._tree.leaves(loaded), kept)


def test_what_does_not_fit_is_refused(ran: Ran) -> None:
    _, state, window = in_mid_window("")
    with saying(FileNotFoundError, "no directory"):
        load_sharded(ran.folder / "nothing", state)
    with saying(ValueError, "has no tree[2]", "leaves were saved"):
        load_sharded(ran.folder / "fsdp", [state, window, window])
    wider = state._replace(params={**state.params, "b1": torch.zeros(9)})
    with saying(ValueError, "params['b1'] was saved with shape (8,)", "like has (9,)"):
        load_sharded(ran.folder / "fsdp", [wider, window])
    with saying(RuntimeError, "no process group", "use save"):
        save_sharded(ran.folder / "alone", state)


def test_who_has_no_dtensors_pays_nothing_for_them() -> None:
    code = "import sys, pureaccum; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
