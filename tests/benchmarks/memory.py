"""The peak memory of one window or one step, above what stands: parameters, batch, optimizer.

Rule: a fresh process for each number. It warms up, lets everything go, notes what stands, resets
the high-water mark of the kernel, runs once, and reads the mark.

``python -m tests.benchmarks.memory CONTENDER DEVICE MODEL`` is that process; it prints one JSON
object.
"""

import ctypes
import gc
import json
import os
import sys

import torch

from .absent import Absent
from .apart import answer, ask
from .contenders import CONTENDERS, read
from .gradcache import PAIRS_STEPS
from .models import Model, build
from .rivals import RIVALS
from .steps import STEPS


# glibc keeps freed blocks below this size for later, and the kernel would miss an allocation.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(model: Model, name: str, device: str) -> dict:
    """The number from a process of its own: ``{"peak": bytes}``, or ``{"failure": why}``."""
    return ask("memory", name, device, json.dumps(model), env=RETURNING)


def measure(model: Model, name: str, device: str) -> dict:
    """The number, in this process."""
    if device == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
        raise Absent("not measured on this system")
    for variable in RETURNING:  # read when the process began; compilers need not be as thrifty
        os.environ.pop(variable, None)
    torch.set_num_threads(1)
    problem = build(model, device)
    call = CONTENDERS[name](problem)
    # A compiled step is compiled for this batch, perhaps once more for its own results.
    if name in STEPS | RIVALS | PAIRS_STEPS:
        call(problem.batch)
        call(problem.batch)
    else:  # two microbatches reach every branch that any number of them does
        call(tuple(t[: 2 * model.rows] for t in problem.batch))
    gc.collect()
    before = reset(device)
    got = call(problem.batch)
    top = high_water(device)
    size = sum(x.numel() * x.element_size() for x in read(got).values())
    return {"peak": top - before, "standing": before, "result": size}


def reset(device: str) -> int:
    """Start the high-water mark anew; returns the bytes that stand."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


def high_water(device: str) -> int:
    if device != "cpu":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


if __name__ == "__main__":
    _name, _device, _model = sys.argv[1:]
    answer(measure, Model(*json.loads(_model)), _name, _device)
