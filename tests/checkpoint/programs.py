"""Programs of this folder, each in a process of its own, which imports torch anew."""

import json
import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


def told_by(program, *arguments):
    """What it prints, read as JSON."""
    command = [sys.executable, "-m", f"tests.checkpoint.{program}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)
