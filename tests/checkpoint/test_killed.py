"""Who is killed in a save at any moment finds a whole checkpoint, and leaves nothing for long."""

import os

import pytest
from hypothesis import settings

from tests.checkpoint.programs import told_by


pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not hasattr(os, "fork"), reason="runs are forks of one process: not on Windows"
    ),
    pytest.mark.promise("disk"),
]
KILLS = 3 * min(100, settings.default.max_examples)  # 24 in dev, 75 in ci


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_goes_on(tmp_path):
    """A training run finds a whole file, and ends as one that was not killed."""
    counts = told_by("killed", tmp_path, KILLS)
    assert counts["killed"] == KILLS
    assert counts["writing"] >= KILLS // 3
    assert counts["leftovers"] == 1


@pytest.mark.slow  # three seconds for each
def test_ranks_that_are_killed_while_they_save_leave_whole_checkpoints(tmp_path):
    kills = KILLS // 4
    counts = told_by("killed_ranks", tmp_path, kills)
    assert counts["killed"] == kills
    assert counts["whole"] >= kills
    assert counts["left"] >= kills // 12  # so often they were in the middle of it
