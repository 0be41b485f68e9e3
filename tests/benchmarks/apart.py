"""A measurement in a process of its own.

Rule: words go in, one JSON object comes out, and what fails there is told here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .absent import Absent


def ask(module: str, *words: str, env: Mapping[str, str]) -> dict[str, Any]:
    """What the module answers as a program; ``{"failure": why}`` where it does not."""
    command = [sys.executable, "-m", f"{__package__}.{module}", *words]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failure": why[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def answer(measure: Callable[..., dict], *arguments: Any) -> None:
    try:
        result = measure(*arguments)
    except Exception as error:
        result = {"failure": why(error)}
    print(json.dumps(result))


def why(error: Exception) -> str:
    return str(error) if isinstance(error, Absent) else f"{type(error).__name__}: {error}"
