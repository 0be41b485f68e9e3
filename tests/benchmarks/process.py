"""A measurement in a process of its own: the peak memory of one window or one step, above what
stands (parameters, batch, optimizer); and the time of the first call, which compiles.

Rule: a fresh process for each number; words go in, one JSON object comes out, and what fails there
is told here. For memory it warms up, lets everything go, notes what stands, resets the high-water
mark of the kernel, runs once, and reads the mark. For a first call nothing is cached from others,
and what counts is the processor time of the process and of the compilers that it starts.

``python -m tests.benchmarks.process peak|first CONTENDER DEVICE MODEL`` is that process.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .models import Absent, Model, build, read
from .steps import STEPS
from .table import CONTENDERS


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


# glibc keeps freed blocks below this size for later, and the kernel would miss an allocation.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def peak(model: Model, name: str, device: str) -> dict:
    """The number from a process of its own: ``{"peak": bytes}``, or ``{"failure": why}``."""
    return ask("process", "peak", name, device, json.dumps(model), env=RETURNING)


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
    if name in STEPS or "InfoNCE step" in name:
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


UNCACHED = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


def first_call(model: Model, name: str, device: str) -> dict:
    """The number from a process of its own: ``{"seconds": ...}``, or ``{"failure": why}``."""
    return ask("process", "first", name, device, json.dumps(model), env=UNCACHED)


def measure_first(model: Model, name: str, device: str) -> dict:
    """The number, in this process."""
    pin()  # before torch asks how many cores its compilers may have
    problem = build(model, device)
    training = CONTENDERS[name](problem)
    start = spent()
    training(problem.batch)
    return {"seconds": spent() - start}


def pin() -> int | None:
    """One thread, on one core where the system lets us say so; returns the core."""
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def spent() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    _what, _name, _device, _model = sys.argv[1:]
    _measure = measure if _what == "peak" else measure_first
    answer(_measure, Model(*json.loads(_model)), _name, _device)
