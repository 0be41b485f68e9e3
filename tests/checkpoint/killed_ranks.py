"""``python -m tests.checkpoint.killed_ranks FOLDER KILLS``: kill ranks while they save together.

They are forks of this process, and save under one new name after the other, as the documentation
asks. At a random moment, or while something is being written, one of them is sent a signal, or all
of them are. Then every folder that has its name has to be whole, and the next save of anything into
that place has to clear away what is left. Prints what came of it as JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # once, and not in every fork
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


NUMBERS = 2**18
LONGEST = 0.25  # seconds between the first save and a signal


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


def leftovers(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


def main(folder, kills):
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    left = whole = 0
    for kill in range(kills):
        children = forked(folder, kill, world=1 + kill % 2)
        first = folder / f"{kill}-1"
        while not first.exists():
            time.sleep(0.005)
        time.sleep(random.uniform(0, LONGEST))
        while kill % 4 > 1 and not leftovers(folder):  # in the middle of a save for sure
            time.sleep(0.0002)
        for child in children if kill % 3 else children[-1:]:
            os.kill(child, signals[kill % 3] if kill % 4 else signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        left += bool(leftovers(folder))
        names = [name for name in os.listdir(folder) if name.startswith(f"{kill}-")]
        for name in names:
            number = int(name.split("-")[1])
            want = tree_of(number)
            assert_trees_bitwise_equal(pa.load(folder / name, tree_of(0)), want)
            shutil.rmtree(folder / name)
            whole += 1
        pa.save(folder / "another", {"epoch": kill})
        assert os.listdir(folder) == ["another"], os.listdir(folder)
    print(json.dumps({"killed": kills, "whole": whole, "left": left}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(0)
    main(Path(sys.argv[1]), int(sys.argv[2]))
