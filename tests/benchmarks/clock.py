"""The time of one microbatch.

Rule: contenders take turns within one process, pinned to one core, after a warm-up; what counts is
the ratio *within* a round, so that a machine which slows down slows both sides.

glibc gives freed memory back to the kernel by rules that depend on what else lies in the heap, and
getting it again costs a page fault for every 4 KiB. So page faults are counted beside the time, and
some cells run a second time in a process that keeps its memory, which is this file as a program:
``python -m tests.benchmarks.clock DEVICE SECONDS MODEL CONTENDERS`` prints one JSON object.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from .contenders import CONTENDERS, Window
from .models import Model, build


try:
    import resource
except ImportError:  # not on Windows
    resource = None

FEWEST, MOST = 9, 200  # rounds
# 32 MiB is the most that glibc takes for the second.
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


def pin() -> int | None:
    """One thread, on one core where the system lets us say so; returns the core."""
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def clock(device: str) -> float:
    """Seconds. On the CPU those of the process, since the core may be shared with other work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def race(model: Model, names: Sequence[str], device: str, seconds: float) -> dict:
    """Seconds and page faults per microbatch, one number a round for each; and who failed.

    The first of the contenders says what is right.
    """
    problem = build(model, device)
    windows: dict[str, Window] = {}
    failures: dict[str, str] = {}
    reference = {n: x.clone() for n, x in CONTENDERS[names[0]](problem)(problem.batch).items()}
    for name in names:
        try:
            windows[name] = CONTENDERS[name](problem)
            off = distance(windows[name](problem.batch), reference)
            if not off <= 1e-4:  # who computes something else is no contender
                raise ArithmeticError(f"result off by {off:.1e} of its norm")
            windows[name](problem.batch)  # the first call imports, and fills caches
        except Exception as error:
            windows.pop(name, None)
            failures[name] = f"{type(error).__name__}: {error}"
    del reference

    # What stands now is not looked at again: collections inside the clock stay as short as they
    # are in a user's loop. Collecting itself stays on, as it is for users.
    gc.collect()
    gc.freeze()
    seconds_of: dict[str, list[float]] = {name: [] for name in windows}
    faults_of: dict[str, list[float]] = {name: [] for name in windows}
    order = list(windows)
    end = time.perf_counter() + seconds
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() > end:
            break
        for name in order:
            faults, start = page_faults(), clock(device)
            grads = windows[name](problem.batch)
            stop, faults = clock(device), page_faults() - faults
            del grads
            seconds_of[name].append((stop - start) / model.microbatches)
            faults_of[name].append(faults / model.microbatches)
        order = order[1:] + order[:1]  # nobody always runs behind the same neighbour
    gc.unfreeze()
    return {"seconds": seconds_of, "faults": faults_of, "failures": failures}


def race_keeping_memory(model: Model, names: Sequence[str], device: str, seconds: float) -> dict:
    """The same in a process whose allocator gives nothing back: no page faults after warm-up."""
    words = [device, str(seconds), json.dumps(model), json.dumps(list(names))]
    command = [sys.executable, "-m", f"{__package__}.clock", *words]
    done = subprocess.run(command, env=os.environ | KEEPING, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"seconds": {}, "faults": {}, "failures": dict.fromkeys(names, why)}
    return json.loads(done.stdout.splitlines()[-1])


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def distance(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to the reference."""
    off = sum((grads[name].double() - g).square().sum() for name, g in reference.items())
    return float((off / sum(g.double().square().sum() for g in reference.values())).sqrt())


if __name__ == "__main__":
    _device, _seconds, *_rest = sys.argv[1:]
    _model, _names = map(json.loads, _rest)
    pin()
    print(json.dumps(race(Model(*_model), _names, _device, float(_seconds))))
