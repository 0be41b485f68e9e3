"""The time of one microbatch; that of saving a tree; and whether a step waits for the device.

Rule: contenders take turns within one process, pinned to one core, after a warm-up; what counts is
the ratio *within* a round, so that a machine which slows down slows both sides. Saving takes the
time of the wall, for which both sides wait: the disk is in it.

glibc gives freed memory back to the kernel by rules that depend on what else lies in the heap, and
getting it again costs a page fault for every 4 KiB. So page faults are counted beside the time, and
some cells run a second time in a process that keeps its memory, which is this file as a program:
``python -m tests.benchmarks.clock DEVICE SECONDS MODEL CONTENDERS`` prints one JSON object.
"""

import gc
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import pureaccum as pa

from .models import Absent, Grads, Model, Problem, Training, build, optional, read
from .process import answer, ask, pin, why
from .table import CONTENDERS


try:
    import resource
except ImportError:  # not on Windows
    resource = None


FEWEST, MOST = 7, 200  # rounds


# Calls before the clock starts, or seconds. The first imports, compiles and fills caches; the
# second may compile again, since it is given what the first has made.
WARM, WARM_SECONDS = 4, 1.0


# Seconds that a turn takes at least. Called once, a short step would find its neighbour's data in
# the caches of the core, where training finds its own (2 to 3 times as slow, for the shortest): it
# is called until this is over, and the mean counts.
TURN = 20e-3


# 32 MiB is the most that glibc takes for the second.
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


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
    torch.compiler.reset()  # a graph of another race must not make this one's shapes dynamic
    problem = build(model, device)
    windows: dict[str, Grads | Training] = {}
    calls_of: dict[str, int] = {}
    failures: dict[str, str] = {}
    reference: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            windows[name] = CONTENDERS[name](problem)
            start = clock(device)
            got = read(windows[name](problem.batch))
            first = clock(device) - start
            reference = reference or {n: x.clone() for n, x in got.items()}
            off = (
                distance(got, reference) if got else 0.0
            )  # unless it is what others are counted in
            if not off <= allowed(problem, reference):  # who computes something else does not run
                raise ArithmeticError(f"result off by {off:.1e} of its norm")
            calls_of[name] = warm(windows[name], problem, device, first)
        except Exception as error:
            windows.pop(name, None)
            failures[name] = why(error)
    got = reference = None

    # What stands now is not looked at again: collections inside the clock stay as short as they
    # are in a user's loop. Collecting itself stays on, as it is for users.
    gc.collect()
    gc.freeze()
    seconds_of: dict[str, list[float]] = {name: [] for name in windows}
    faults_of: dict[str, list[float]] = {name: [] for name in windows}
    order, shuffle = list(windows), random.Random(0).shuffle
    end = time.perf_counter() + seconds
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() > end:
            break
        shuffle(order)  # nobody always runs behind the same neighbour
        for name in order:
            faults, start = page_faults(), clock(device)
            for _ in range(calls_of[name]):
                got = windows[name](problem.batch)
            stop, faults = clock(device), page_faults() - faults
            del got
            count = calls_of[name] * model.microbatches
            seconds_of[name].append((stop - start) / count)
            faults_of[name].append(faults / count)
    gc.unfreeze()
    return {"seconds": seconds_of, "faults": faults_of, "failures": failures}


def warm(window: Grads | Training, problem: Problem, device: str, first: float) -> int:
    """Call the window until that makes it no faster; returns how often to call it in a turn."""
    calls = [first]
    while len(calls) < WARM and not settled(calls):
        start = clock(device)
        window(problem.batch)
        calls.append(clock(device) - start)
    return max(1, math.ceil(TURN / max(calls[-1], 1e-6)))


def settled(calls: Sequence[float]) -> bool:
    return len(calls) > 1 and sum(calls) > WARM_SECONDS and calls[-1] > 0.7 * calls[-2]


def race_keeping_memory(model: Model, names: Sequence[str], device: str, seconds: float) -> dict:
    """The same in a process whose allocator gives nothing back: no page faults after warm-up."""
    got = ask(
        "clock", device, str(seconds), json.dumps(model), json.dumps(list(names)), env=KEEPING
    )
    if failure := got.get("failure"):
        return {"seconds": {}, "faults": {}, "failures": dict.fromkeys(names, failure)}
    return got


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def allowed(problem: Problem, reference: dict[str, torch.Tensor]) -> float:
    """How far off a result may be: rounding.

    AdamW's first step is the sign of the gradient. In half precision rounding decides it for
    entries near zero, a hundredth of them or so, and each is two steps off. A rounding also decides
    where a ReLU is cut, and BatchNorm after BatchNorm makes it larger: the full batch itself is up
    to 3e-3 off its float64, where all agree to 1e-13. Statistics of half of a batch are 0.2 off.
    """
    if problem.model.kind in ("norms", "resnet", "views"):
        return 2e-2
    if problem.model.precision == "fp32":
        return 1e-4
    return 0.25 * distance(problem.params, reference)


def distance(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to the reference."""
    off = sum((grads[name].double() - g).square().sum() for name, g in reference.items())
    return float((off / sum(g.double().square().sum() for g in reference.values())).sqrt())


SAVE, SAFETENSORS = "save", "safetensors, fsync"


MEGABYTES = 640


TURNS = 15


def saving(device: str) -> dict:
    """``{"seconds": {name: one number a turn}}``, or ``{"failure": why}``."""
    try:
        save_file = optional("safetensors.torch").save_file
    except Absent as error:
        return {"failure": why(error)}
    tree = {f"w{i}": torch.randn(2**22, device=device) for i in range(MEGABYTES * 10**6 // 2**24)}

    def synced(path: Path) -> None:
        save_file(tree, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    sides: dict[str, Callable[[Path], None]] = {
        SAVE: lambda path: pa.save(path, tree),
        SAFETENSORS: synced,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order, shuffle = list(sides), random.Random(0).shuffle
    with TemporaryDirectory() as folder:
        for turn in range(TURNS + 1):
            shuffle(order)
            for name in order:
                path = Path(folder) / name
                path.unlink(missing_ok=True)
                start = time.perf_counter()
                sides[name](path)
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds}


def syncs(model: Model, name: str, device: str) -> dict:
    """``{"syncs": 0}``, or ``{"failure": why}``."""
    try:
        problem = build(model, device)
        training = CONTENDERS[name](problem)
        for _ in range(3):
            training(problem.batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            training(problem.batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    except Exception as error:
        return {"failure": why(error)}
    return {"syncs": 0}


if __name__ == "__main__":
    _device, _seconds, *_rest = sys.argv[1:]
    _model, _names = map(json.loads, _rest)
    pin()
    answer(race, Model(*_model), _names, _device, float(_seconds))
