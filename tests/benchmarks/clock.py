"""The time of one microbatch.

Rule: contenders take turns within one process, pinned to one core, after a warm-up; what counts is
the ratio *within* a round, so that a machine which slows down slows both sides.
"""

import gc
import os
import time
from collections.abc import Iterable

import torch

from .contenders import CONTENDERS, HAND, Window
from .models import Model, build


FEWEST, MOST = 9, 200  # rounds


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


def race(model: Model, names: Iterable[str], device: str, seconds: float) -> dict:
    """Seconds per microbatch, one number a round for each contender; and why others failed."""
    problem = build(model, device)
    windows: dict[str, Window] = {}
    failures: dict[str, str] = {}
    reference = CONTENDERS[HAND](problem)(problem.batch)
    for name in names:
        try:
            windows[name] = CONTENDERS[name](problem)
            for _ in range(2):  # the first call imports, and fills caches
                off = distance(windows[name](problem.batch), reference)
            if not off <= 1e-4:  # who computes something else is no contender
                raise ArithmeticError(f"gradient off by {off:.1e} of its norm")
        except Exception as error:
            windows.pop(name, None)
            failures[name] = f"{type(error).__name__}: {error}"
    del reference

    # What stands now is not looked at again: collections inside the clock stay as short as they
    # are in a user's loop. Collecting itself stays on, as it is for users.
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {name: [] for name in windows}
    order = list(windows)
    end = time.perf_counter() + seconds
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() > end:
            break
        for name in order:
            start = clock(device)
            grads = windows[name](problem.batch)
            stop = clock(device)
            del grads
            times[name].append((stop - start) / model.microbatches)
        order = order[1:] + order[:1]  # nobody always runs behind the same neighbour
    gc.unfreeze()
    return {"seconds": times, "failures": failures}


def distance(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to the reference."""
    off = sum((grads[name].double() - g).square().sum() for name, g in reference.items())
    return float((off / sum(g.double().square().sum() for g in reference.values())).sqrt())
