"""Run functions on several ranks of gloo, all of them in one set of processes."""

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


START = "forkserver"
LIMIT = 60.0  # seconds in which a collective has to be done, and half of those for all of a run

Outcomes = dict[str, list[str]]  # by the name of a case: what went wrong, a text a rank


def on_ranks(world: int, cases: Mapping[str, Callable[[], object]]) -> Outcomes:
    """Call all cases on every rank, one after the other; what a rank raised is its text, else ''.

    Cases are functions of a module, or ``partial``s of one. The ranks are forks of a process that
    has imported it and torch, and has done nothing else: four imports would take most of the time.
    """
    functions = (case.func if isinstance(case, partial) else case for case in cases.values())
    multiprocessing.get_context(START).set_forkserver_preload(
        sorted({f.__module__ for f in functions})
    )
    with tempfile.TemporaryDirectory() as folder:
        args = (world, folder, dict(cases))
        context = mp.start_processes(_rank, args, nprocs=world, join=False, start_method=START)
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=2 * LIMIT)
        while not context.join(timeout=1.0):
            if datetime.datetime.now() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{world} ranks did not finish in {2 * LIMIT} s")
        told = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
    return {name: [of_rank[name] for of_rank in told] for name in cases}


def _rank(rank: int, world: int, folder: str, cases: dict[str, Callable[[], object]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",  # no port, which another could take
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    told: dict[str, str] = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case()
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
        dist.barrier()  # one that failed before a collective must not meet the next case in it
    torch.save(told, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
