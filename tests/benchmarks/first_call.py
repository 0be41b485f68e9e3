"""The time of the first call, which compiles.

Rule: a fresh process for each number, nothing cached from others, and pinned to one core. What
counts is the processor time of the process and of the compilers that it starts.

``python -m tests.benchmarks.first_call CONTENDER DEVICE MODEL`` is that process.
"""

import json
import os
import sys

from .apart import answer, ask
from .clock import pin
from .contenders import CONTENDERS
from .models import Model, build


UNCACHED = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def first_call(model: Model, name: str, device: str) -> dict:
    """The number from a process of its own: ``{"seconds": ...}``, or ``{"failure": why}``."""
    return ask("first_call", name, device, json.dumps(model), env=UNCACHED)


def measure(model: Model, name: str, device: str) -> dict:
    """The number, in this process."""
    pin()  # before torch asks how many cores its compilers may have
    problem = build(model, device)
    training = CONTENDERS[name](problem)
    start = spent()
    training(problem.batch)
    return {"seconds": spent() - start}


def spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    _name, _device, _model = sys.argv[1:]
    answer(measure, Model(*json.loads(_model)), _name, _device)
