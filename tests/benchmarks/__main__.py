"""``python -m tests.benchmarks [--quick | --full] [--only time | memory] [--json FILE]``.

Rule: memory first, in processes of its own, several at a time; then the clock, alone and pinned.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from . import clock, memory, plan, report, targets
from .facts import facts


def main() -> None:
    options = arguments()
    machine = facts()  # before our own work shows in its load
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    peaks = [p for device in devices for p in plan.peaks(options.full, device)]
    cells = [c for device in devices for c in plan.cells(options.full, device)]
    if options.only == "time":
        peaks = []
    elif options.only == "memory":
        cells = []

    with report.progress(len(peaks) + len(cells)) as done:
        numbers = run_peaks(peaks, done)
        core = clock.pin()
        races = []
        for cell in cells:
            race = clock.race_keeping_memory if cell.keeping else clock.race
            result = race(cell.model, cell.contenders, cell.device, cell.seconds)
            races.append((cell, result))
            done(f"time, {cell.device}, {cell}")

    rows = [*targets.memory_rows(numbers), *targets.time_rows(races)]
    report.show(rows)
    if options.json:
        content = {
            "facts": machine | {"threads": torch.get_num_threads(), "core": core},
            "plan": "full" if options.full else "quick",
            "rows": [row._asdict() | {"reached": row.reached} for row in rows],
            "memory": [named(peak) | result for peak, result in numbers.items()],
            "time": [named(cell) | result for cell, result in races],
        }
        report.save(options.json, content)


def run_peaks(peaks: list[plan.Peak], done) -> dict[plan.Peak, dict]:
    """Side by side: one process does not change the memory of another."""
    # Not more, however many cores: each may hold a gigabyte.
    workers = min(4, os.cpu_count() or 1)

    def one(peak: plan.Peak) -> dict:
        result = memory.peak(peak.model, peak.contender, peak.device)
        done(f"memory, {peak.device}, {peak.regime}, {peak.model}, {peak.contender}")
        return result

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(peaks, pool.map(one, peaks), strict=True))


def named(item: plan.Cell | plan.Peak) -> dict:
    return item._asdict() | {"model": item.model._asdict()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="about five minutes (the default)")
    size.add_argument("--full", action="store_true", help="every width, row count and window")
    parser.add_argument("--only", choices=("time", "memory"), help="leave the other half out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every raw number")
    return parser.parse_args()


if __name__ == "__main__":
    main()
