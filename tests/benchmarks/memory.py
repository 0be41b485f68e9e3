"""The peak memory of one window, above its parameters and its batch.

Rule: a fresh process for each number. It warms up, lets everything go, notes what stands, resets
the high-water mark of the kernel, runs one window, and reads the mark.

``python -m tests.benchmarks.memory CONTENDER DEVICE MODEL`` is that process; it prints one JSON
object.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys

import torch

from .contenders import CONTENDERS
from .models import Model, build


# glibc keeps freed blocks below this size for later, and the kernel would miss an allocation.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(model: Model, name: str, device: str) -> dict:
    """The number from a process of its own: ``{"peak": bytes}``, or ``{"failure": why}``."""
    command = [sys.executable, "-m", f"{__package__}.memory", name, device, json.dumps(model)]
    done = subprocess.run(command, env=os.environ | RETURNING, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"failure": why}
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: Model, name: str, device: str) -> dict:
    """The number, in this process."""
    if device == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
        return {"failure": "not measured here"}
    torch.set_num_threads(1)
    problem = build(model, device)
    window = CONTENDERS[name](problem)
    # Two microbatches reach every branch that any number of them does.
    warm = tuple(t[: 2 * model.rows] for t in problem.batch)
    window(warm)
    gc.collect()
    before = reset(device)
    grads = window(problem.batch)
    top = high_water(device)
    size = sum(g.numel() * g.element_size() for g in grads.values())
    return {"peak": top - before, "gradients": size}


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
    print(json.dumps(measure(Model(*json.loads(_model)), _name, _device)))
