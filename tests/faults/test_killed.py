"""A training run that is killed with SIGKILL at any moment finds a whole file and ends as ever."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks of one process: not on Windows")
def test_killed_again_and_again(tmp_path: Path) -> None:
    kills = 66 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 201
    command = [sys.executable, "-m", "tests.faults.killed", str(tmp_path), str(kills)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    ended = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert counts["killed"] == kills
    assert counts["writing"] >= kills // 3
    assert counts["leftovers"] == 1
