"""Sharded parameters: several ranks give what one process gives."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum.testing import assert_trees_bitwise_equal
from tests.base.sharded import CASES, checkpoints, in_mid_window
from tests.ranks import cases_on_ranks
from tests.refusals import saying


pytestmark = [pytest.mark.parity, pytest.mark.promise("ranks"), pytest.mark.promise("disk")]
ROWS = "rows are cut by each rank", "uneven rows go through whole", "functions are microbatched"
GIVEN_UP = pytest.mark.given_up("sharded batches"), pytest.mark.given_up("lbfgs and sam")


def cases_of(world, given_up):
    """Those that are given up are about samples that are sharded, or about another optimizer."""
    begins = (*ROWS, "looks uphill")
    return {name: x for name, x in CASES[world].items() if name.startswith(begins) == given_up}


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without it")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param({2: cases_of(2, False)}, id="2"),
        pytest.param({2: {}, 4: cases_of(4, False)}, id="4", marks=pytest.mark.nightly),
        pytest.param({2: cases_of(2, True)}, id="2, given up", marks=GIVEN_UP),
        pytest.param({2: {}, 4: cases_of(4, True)}, id="4, given up", marks=GIVEN_UP),
    ],
)
def test_ranks_give_what_one_process_gives(cases, tmp_path):
    """One test, since processes are started once for all cases of a mesh."""
    saving = checkpoints(str(tmp_path))
    wrong = [
        f"{name}, {told}"
        for world, some in cases.items()
        for name, texts in cases_on_ranks(world, some | saving[world]).items()
        for told in texts
        if told
    ]
    assert not wrong, "\n\n".join(wrong)
    for layout in ("replicated", "fsdp"):
        one_process_loads_what_two_ranks_saved(tmp_path, layout)
    what_does_not_fit_is_refused(tmp_path)


def one_process_loads_what_two_ranks_saved(folder, layout):
    _, *like = in_mid_window("")
    loaded = pa.load(folder / layout, like)
    kept = torch.load(folder / f"{layout}.pt")
    assert_trees_bitwise_equal(tree_leaves(loaded), kept)


def what_does_not_fit_is_refused(folder):
    _, state, window = in_mid_window("")
    with saying(FileNotFoundError, "nothing"):
        pa.load(folder / "nothing", state)
    with saying(ValueError, "another tree than like", "tree[2].rows is not in the file"):
        pa.load(folder / "fsdp", [state, window, window])
    wider = state._replace(params={**state.params, "b1": torch.zeros(9)})
    with saying(ValueError, "params['b1'] is float32 of shape (8,) in the file", "(9,) in like"):
        pa.load(folder / "fsdp", [wider, window])


@pytest.mark.slow
def test_who_has_no_dtensors_pays_nothing_for_them():
    code = "import sys, pureaccum; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
