"""Tests on several ranks: processes of a group that run one function in step.

    @on_ranks(2, 4)
    def test_...(rank: int, world: int) -> None: ...  # runs in every rank

Properties too: all ranks draw the same examples, because they draw from the same seed and nothing
in them depends on time. (So nothing is made smaller: the first example that fails is shown.)

The ranks are forks of a process that has imported torch and has done nothing else: to import it
in each of four would take most of the time.

A process of a gloo group sometimes aborts when it ends right after a collective, in plain torch
too. So a rank first tells what came, and then ends without running any destructor: what has died
before that has died of a fault.

Rarely, memory of such a process is found corrupt while it runs (one in some thousand groups; under
valgrind the same work has no invalid access, so threads race). Our code is Python alone and cannot
corrupt any. So a group in which a rank dies of such a signal runs once more, and says so: what
dies twice has failed.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from torch import multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from tests.draws import examples
from tests.testing.planted import IMPORTED


# Seconds until ranks that hang are killed, and the test fails.
PATIENCE = 120.0 + 5.0 * settings.default.max_examples
TIMEOUT = 60.0  # seconds that a rank waits for another
# Exit codes of processes whose memory may have been corrupt.
CORRUPT = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
GRACE = 2.0  # seconds that a rank stays after its last collective, which others may still be in

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(IMPORTED)


class End(NamedTuple):
    """How a rank ended: with what its function returned, or with what is to be said of it."""

    returned: Any = None
    failure: str = ""
    code: int | None = None  # of a process that ended before it told


def on_ranks(*worlds):
    """Run a test function in groups of so many processes; it is given its rank and the world."""

    def decorated(test):
        def run(world):
            ends = run_on_ranks(world, partial(_test, test.__module__, test.__name__))
            failed = [end.failure for end in ends if end.failure]
            assert not failed, "\n\n".join(failed)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        # Where two ranks are asked, more of them are for the profile that runs everything.
        more = [world for world in worlds if world > 2 and 2 in worlds]
        some = [pytest.param(it, marks=pytest.mark.nightly if it in more else ()) for it in worlds]
        marked = pytest.mark.parametrize("world", some)(run)
        marked.in_rank = test
        return marked

    return decorated


def in_step(share=3 / 4, fewest=25):
    """Settings of a property that all ranks check together, with a share of the examples."""
    return settings(
        examples(share, fewest),
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[*HealthCheck],
    )


class Exchanges(TorchDispatchMode):
    """What this rank asks its group for: each operation, with the shapes and dtypes of tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append((func.__name__, [_looks(x) for x in args]))
        return func(*args, **(kwargs or {}))


def _looks(x):
    if isinstance(x, (list, tuple)):
        return [_looks(each) for each in x]
    return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None


@contextmanager
def exchanging_alike():
    """Check that all ranks exchange the same inside, in one order; yields what this one does."""
    with Exchanges() as exchanges:
        yield exchanges.seen
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, exchanges.seen)
    for n, each in enumerate(zip_longest(*of_all)):
        assert all(x == each[0] for x in each), (n, each)


def cases_on_ranks(world, cases):
    """Call all cases on every rank, one after the other; of a rank that dies, all have failed."""
    ends = run_on_ranks(world, partial(_cases, dict(cases)))
    return {name: [end.failure or end.returned[name] for end in ends] for name in cases}


def run_on_ranks(world, call, timeout=TIMEOUT, backend="gloo"):
    """Call ``call(rank, world)``, a function of a module or a partial of one, on every rank."""
    ends = _run_group(world, call, timeout, backend)
    if any(end.code in CORRUPT for end in ends):
        print(f"{call} died of a signal: all ranks run once more, {ends}", file=sys.stderr)
        ends = _run_group(world, call, timeout, backend)
    return ends


def _run_group(world, call, timeout, backend):
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(world)]
        ranks = []
        for rank, (_, writer) in enumerate(ends):
            args = rank, world, folder, call, timeout, backend, writer
            ranks.append(_context.Process(target=_serve, args=args, daemon=True))
            with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # threads are not to be forked
                ranks[-1].start()
            writer.close()
        told = []
        deadline = time.monotonic() + PATIENCE
        for process, (reader, _) in zip(ranks, ends, strict=True):
            try:
                heard = reader.poll(max(0.0, deadline - time.monotonic()))
                told.append(reader.recv() if heard else End(None, f"hung for {PATIENCE} seconds"))
            except EOFError:
                process.join(5)
                code = process.exitcode
                told.append(End(None, f"died with exit code {code}", code))
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
        return told


def _serve(rank, world, folder, call, timeout, backend, writer):
    try:
        import tests.conftest  # noqa: F401  # the profile of hypothesis, and one thread

        wait = timedelta(seconds=timeout)
        store = dist.FileStore(str(Path(folder) / "store"), world)  # no port to choose
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
        torch.manual_seed(0)
        end = End(call(rank, world))
    except BaseException:
        end = End(None, f"rank {rank} of {world}: {traceback.format_exc()}")
    writer.send(end)
    sys.stdout.flush()
    sys.stderr.flush()
    if not end.failure:  # others hear of a failure by the end of the process
        time.sleep(GRACE)
    os._exit(0)


def _test(module, name, rank, world):
    __import__(module)
    getattr(sys.modules[module], name).in_rank(rank=rank, world=world)


def _cases(cases, rank, world):
    told = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case()
            told[name] = ""
        except BaseException:
            told[name] = f"rank {rank} of {world}: {traceback.format_exc()}"
        dist.barrier()  # one that failed before a collective must not meet the next case in it
    return told
