"""Whoever is killed in a save at any moment finds a whole checkpoint, and leaves nothing for long.

``python -m tests.checkpoint.test_killed a_run FOLDER KILLS`` prints as JSON what came of so many
kills. What is killed is a fork of that process, which has imported torch once.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # once, and not in every fork
from hypothesis import settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.checkpoint.programs import told_by
from tests.states import batch_of, first_state, full_step


pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        not hasattr(os, "fork"), reason="runs are forks of one process: not on Windows"
    ),
    pytest.mark.promise("disk"),
]
KILLS = 3 * min(100, settings.default.max_examples)  # 30 in ci


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_goes_on(tmp_path):
    """A training run finds a whole file, and ends as one that was not killed."""
    counts = told_by("test_killed", "a_run", tmp_path, KILLS)
    assert counts["killed"] == KILLS
    assert counts["writing"] >= KILLS // 3
    assert counts["leftovers"] == 1


@pytest.mark.nightly  # three seconds for each
def test_ranks_that_are_killed_while_they_save_leave_whole_checkpoints(tmp_path):
    kills = max(6, KILLS // 6)  # each kind of kill once
    counts = told_by("test_killed", "ranks", tmp_path, kills)
    assert counts["killed"] == kills
    assert counts["whole"] >= kills
    assert counts["left"] >= kills // 12  # so often they were in the middle of it


# A run saves after each microbatch, and goes on from the file that it finds. It is killed at random
# moments, by any of three signals, or every third time where a file is being written for sure: it
# is stopped, looked at, and only then killed.


STEP = full_step(engine="autograd")
STEPS, PARTS = 5, 3
RUN_LASTS = 0.04  # seconds between a start and a kill: some saves


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


def half_written(folder):
    return {name for name in os.listdir(folder) if name.endswith(".tmp")}


def kill_at_random(child, path):
    time.sleep(random.uniform(0, RUN_LASTS))
    os.kill(child, random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    return os.waitpid(child, 0)[1]


def kill_in_a_save(child, path):
    left = half_written(path.parent)  # by one that was killed before
    while True:
        time.sleep(random.uniform(0, RUN_LASTS / 10))
        os.kill(child, signal.SIGSTOP)
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status  # it had ended
        if half_written(path.parent) - left:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        os.kill(child, signal.SIGCONT)


def a_run(folder, kills):
    """Kill a training run again and again; counts what came of it."""
    path = folder / "run"
    want = start()
    while want["done"] < STEPS:
        want = go_on(want)
    like = start()
    killed = writing = runs = without = leftovers = 0
    at = (-1, 0)  # where the file is
    while killed < kills or at != (-1, 0):
        left = half_written(path.parent)
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
        writing += bool(half_written(path.parent) - left)
        leftovers = max(leftovers, len(half_written(path.parent)))
        if path.exists():
            tree = pa.load(path, like)
            assert (tree["done"], tree["part"]) >= at
            at = (tree["done"], tree["part"])
        else:
            assert at == (-1, 0), "the file is gone"
            without += 1
    counts = {"killed": killed, "writing": writing, "runs": runs, "without": without}
    return counts | {"leftovers": leftovers}


# Ranks save under one new name after the other, as the documentation asks. At a random moment, or
# while something is being written, one of them is sent a signal, or all of them are. Then every
# folder that has its name has to be whole, and the next save of anything into that place has to
# clear away what is left.


NUMBERS = 2**18
RANKS_LAST = 0.25  # seconds between the first save and a signal


def tree_of(number):
    return {"w": torch.arange(NUMBERS) * number, "number": number}


def save_again_and_again(folder, kill, store, rank, world):
    wait = timedelta(seconds=20)
    file = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=world, timeout=wait)
    mesh = init_device_mesh("cpu", (world,))
    for number in range(1, 1000):
        tree = tree_of(number)
        tree["w"] = distribute_tensor(tree["w"], mesh, [Shard(0)])
        pa.save(folder / f"{kill}-{number}", tree)


def forked(folder, kill, world):
    store = tempfile.mktemp()
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what gloo says of ranks that died
                save_again_and_again(folder, kill, store, rank, world)
            finally:
                os._exit(1)
        children.append(child)
    return children


def ranks(folder, kills):
    """Kill ranks while they save together; counts what came of it."""
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    left = whole = 0
    for kill in range(kills):
        children = forked(folder, kill, world=1 + kill % 2)
        first = folder / f"{kill}-1"
        while not first.exists():
            time.sleep(0.005)
        time.sleep(random.uniform(0, RANKS_LAST))
        while kill % 4 > 1 and not half_written(folder):  # in the middle of a save for sure
            time.sleep(0.0002)
        for child in children if kill % 3 else children[-1:]:
            os.kill(child, signals[kill % 3] if kill % 4 else signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        left += bool(half_written(folder))
        names = [name for name in os.listdir(folder) if name.startswith(f"{kill}-")]
        for name in names:
            number = int(name.split("-")[1])
            want = tree_of(number)
            assert_trees_bitwise_equal(pa.load(folder / name, tree_of(0)), want)
            shutil.rmtree(folder / name)
            whole += 1
        pa.save(folder / "another", {"epoch": kill})
        assert os.listdir(folder) == ["another"], os.listdir(folder)
    return {"killed": kills, "whole": whole, "left": left}


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(0)
    _, what, where, count = sys.argv
    print(json.dumps({"a_run": a_run, "ranks": ranks}[what](Path(where), int(count))))
