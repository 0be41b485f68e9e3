"""Who is killed in a save at any moment finds a whole checkpoint, and leaves nothing for long."""

import os
from pathlib import Path

import pytest

from tests.faults.programs import told_by


pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="runs are forks of one process: not on Windows"
)
IN_CI = os.environ.get("HYPOTHESIS_PROFILE") == "ci"


def test_killed_again_and_again(tmp_path: Path) -> None:
    """A training run finds a whole file, and ends as one that was not killed."""
    kills = 66 if IN_CI else 201
    counts = told_by("killed", tmp_path, kills)
    assert counts["killed"] == kills
    assert counts["writing"] >= kills // 3
    assert counts["leftovers"] == 1


def test_ranks_that_are_killed_while_they_save(tmp_path: Path) -> None:
    kills = 12 if IN_CI else 72
    counts = told_by("killed_ranks", tmp_path, kills)
    assert counts["killed"] == kills
    assert counts["whole"] >= kills
    assert counts["left"] >= kills // 12  # so often they were in the middle of it
