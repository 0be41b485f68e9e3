"""Tests on several ranks: processes of a gloo group that run one function in step.

    @on_ranks(2, 4)
    def test_...(rank: int, world: int) -> None: ...  # runs in every rank

Properties too: all ranks draw the same examples, because they draw from the same seed and nothing
in them depends on time. (So nothing is made smaller: the first example that fails is shown.)
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from torch import multiprocessing


PATIENCE = 120.0  # seconds until ranks that hang are killed, and the test fails
TIMEOUT = 30.0  # seconds that a rank waits for another

ENDED = "ended"

_context = multiprocessing.get_context("forkserver")  # torch is imported once, in a clean process
_context.set_forkserver_preload(["torch.distributed", "hypothesis", "pytest", "optree"])


def on_ranks(*worlds: int, timeout: float = TIMEOUT) -> Callable[[Any], Any]:
    """Run a test function in groups of so many processes; it is given its rank and the world."""

    def decorated(test: Any) -> Any:
        def run(world: int) -> None:
            ends = run_on_ranks(world, test.__module__, test.__name__, timeout)
            failed = [end for end in ends if end != ENDED]
            assert not failed, "\n\n".join(failed)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        marked = pytest.mark.parametrize("world", worlds)(run)
        marked.in_rank = test
        return marked

    return decorated


def in_step(share: int = 1) -> settings:
    """Settings of a property that all ranks check together."""
    return settings(
        max_examples=max(1, settings.default.max_examples // share),
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[*HealthCheck],
    )


def run_on_ranks(world: int, module: str, name: str, timeout: float = TIMEOUT) -> list[str]:
    """How each rank ended: ``ENDED``, the traceback of its error, or how it died."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(world)]
        ranks: list[Any] = []
        for rank, (_, writer) in enumerate(ends):
            args = rank, world, folder, module, name, timeout, writer
            ranks.append(_context.Process(target=_serve, args=args, daemon=True))
            ranks[-1].start()
            writer.close()
        said: list[str] = []
        deadline = time.monotonic() + PATIENCE
        for process, (reader, _) in zip(ranks, ends, strict=True):
            try:
                heard = reader.poll(max(0.0, deadline - time.monotonic()))
                said.append(reader.recv() if heard else f"hung for {PATIENCE} seconds")
            except EOFError:
                process.join(5)
                said.append(f"died with exit code {process.exitcode}")
        for process in ranks:
            process.join(5)
            process.kill()
            process.join()
        return said


def _serve(
    rank: int, world: int, folder: str, module: str, name: str, timeout: float, writer: Any
) -> None:
    try:
        import tests.conftest  # noqa: F401  # the profile of hypothesis, and one thread

        wait = timedelta(seconds=timeout)
        store = dist.FileStore(str(Path(folder) / "store"), world)  # no port to choose
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
        __import__(module)
        test = getattr(sys.modules[module], name)
        torch.manual_seed(0)
        test.in_rank(rank=rank, world=world)
        dist.destroy_process_group()
        writer.send(ENDED)
    except BaseException:
        writer.send(f"rank {rank} of {world}: {traceback.format_exc()}")
