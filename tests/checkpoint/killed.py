"""``python -m tests.checkpoint.killed FOLDER KILLS``: kill a training run again and again.

A run saves after each microbatch, and goes on from the file that it finds. It is a fork of this
process, which has imported torch once, and is killed at random moments, by any of three signals,
or every third time where a file is being written for sure: it is stopped, looked at, and only then
killed. Prints what came of it as JSON.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.states import batch_of, first_state, full_step


STEP = full_step(engine="autograd")
STEPS, PARTS = 5, 3
LONGEST = 0.04  # seconds between a start and a kill: some saves


def start():
    state = first_state(STEP)
    return {"state": state, "window": STEP.begin(state), "done": 0, "part": 0}


def go_on(tree):
    """One microbatch; after the last of a window, the step."""
    state, done, part = tree["state"], tree["done"], tree["part"] + 1
    window = STEP.update(state, tree["window"], batch_of(2 + part, 3 * done + part))
    if part == PARTS:
        state, _ = STEP.apply(state, window)
        window, done, part = STEP.begin(state), done + 1, 0
    return {"state": state, "window": window, "done": done, "part": part}


def train(path):
    tree = pa.load(path, like=start()) if path.exists() else start()
    while tree["done"] < STEPS:
        tree = go_on(tree)
        pa.save(path, tree)


def was_interrupted(error):
    """Whether an error is Ctrl-C, or was caused by it.

    Ctrl-C while torch pushes or pops a function mode leaves torch's stack of modes one mode short,
    and the next pop raises a RuntimeError.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def fork(path):
    child = os.fork()
    if child == 0:
        try:
            train(path)
            os._exit(0)
        except BaseException as error:
            if was_interrupted(error):
                os._exit(128 + signal.SIGINT)
            traceback.print_exc()
        os._exit(1)
    return child


def is_killed(status):
    """Whether a process ended by one of the signals that it was sent."""
    return os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 128 + signal.SIGINT


def half_written(path):
    return {name for name in os.listdir(path.parent) if name.endswith(".tmp")}


def kill_at_random(child, path):
    time.sleep(random.uniform(0, LONGEST))
    os.kill(child, random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    return os.waitpid(child, 0)[1]


def kill_in_a_save(child, path):
    left = half_written(path)  # by one that was killed before
    while True:
        time.sleep(random.uniform(0, LONGEST / 10))
        os.kill(child, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status  # it had ended
        if half_written(path) - left:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        os.kill(child, signal.SIGCONT)


def main(folder, kills):
    path = Path(folder) / "run"
    want = start()
    while want["done"] < STEPS:
        want = go_on(want)
    like = start()
    killed = writing = runs = without = leftovers = 0
    at = (-1, 0)  # where the file is
    while killed < kills or at != (-1, 0):
        left = half_written(path)
        child = fork(path)
        if killed < kills:
            status = (kill_in_a_save if killed % 3 == 2 else kill_at_random)(child, path)
        else:
            status = os.waitpid(child, 0)[1]
        if not is_killed(status):
            assert status == 0, "a run failed"
            assert_trees_bitwise_equal(pa.load(path, like), want)
            path.unlink()
            at, runs = (-1, 0), runs + 1
            assert runs <= killed + 3, "runs end, and nothing was seen being written"
            continue
        killed += 1
        writing += bool(half_written(path) - left)
        leftovers = max(leftovers, len(half_written(path)))
        if path.exists():
            tree = pa.load(path, like)
            assert (tree["done"], tree["part"]) >= at
            at = (tree["done"], tree["part"])
        else:
            assert at == (-1, 0), "the file is gone"
            without += 1
    counts = {"killed": killed, "writing": writing, "runs": runs, "without": without}
    print(json.dumps(counts | {"leftovers": leftovers}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(0)
    main(sys.argv[1], int(sys.argv[2]))
