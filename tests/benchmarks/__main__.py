"""``python -m tests.benchmarks [--quick | --full] [--only PART] [--row TEXT] [--json FILE]``.

Rule: memory first, in processes of its own, several at a time; then the clock, alone and pinned.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import torch

from . import chosen, clock, memory, plan, plot, ratios, report
from .facts import facts
from .first_call import first_call
from .models import SIZES
from .ranks import KINDS, OURS, talk
from .ranks_of_pairs import APART, PAIRS_OF_RANKS, pairs_of_ranks
from .saving import MEGABYTES, SAVE, saving
from .syncs import syncs


def main() -> None:
    options = arguments()
    full, size = options.full, options.size
    machine = facts()  # before our own work shows in its load
    if options.plot:
        plot.check()  # before the minutes, not after them
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    peaks, firsts, checks, cells, saves = [], [], [], [], []
    for device in devices:
        if options.only in (None, "memory"):
            peaks += plan.peaks(full, device) + plan.step_peaks(full, device)
        if options.only in (None, "memory", "microbatch"):
            peaks += plan.coupled_peaks(full, device)
        if options.only in (None, "memory", "samples"):
            peaks += plan.sample_peaks(device)
        if options.only in (None, "memory", "batch"):
            peaks += plan.growth_peaks(device)
        if options.only in (None, "memory", "curvature"):
            peaks += plan.curvature_peaks(device)
        if options.only in (None, "time", "curvature"):
            cells += plan.curvature_cells(device)
        if options.only in (None, "time"):
            cells += plan.cells(full, device)
        if options.only in (None, "time", "step"):
            cells += plan.step_cells(full, device, size)
            checks += plan.sync_checks(device, size)
        if options.only in (None, "time", "programs"):
            cells += plan.program_cells(full, device, size)
        if options.only in (None, "time", "microbatch"):
            cells += plan.coupled_cells(full, device)
        if options.only in (None, "time", "samples"):
            cells += plan.sample_cells(full, device)
        if options.only in (None, "time", "checkpoint"):
            saves.append(device)
    if options.only in (None, "time", "compile"):
        firsts = plan.first_calls(full)
    talks = KINDS if options.only in (None, "time", "ranks") else ()
    paired = bool(talks)
    if (text := options.row) is not None:
        peaks, cells = chosen.peaks(peaks, text), [*chosen.cells(cells, text)]
        firsts, checks = chosen.ones(firsts, text), chosen.ones(checks, text)
        saves = [device for device in saves if text in f"{SAVE}, {MEGABYTES} MB of float32"]
        talks = [kind for kind in talks if text in f"{OURS}, {kind}"]
        paired = paired and text in f"{APART}, {PAIRS_OF_RANKS}"
        if not any((peaks, cells, firsts, checks, saves, talks, paired)):
            raise SystemExit(f"--row: no row has {text!r} in its name or its place.")

    begin = perf_counter()
    with report.progress(sum(map(len, (peaks, firsts, checks, cells, saves, talks)))) as done:
        peaks = run_peaks(peaks, done)
        saved = {}
        for device in saves:  # before we are pinned: whoever saves may use what there is
            saved[device] = saving(device)
            done(f"saving, {device}")
        talked = {}
        for kind in talks:  # two processes, which need not share a core
            talked[kind] = talk(kind)
            done(f"ranks, {kind}")
        paired = pairs_of_ranks() if paired else None
        core = clock.pin()
        firsts = run(firsts, first_call, "first call", done)
        checks = run(checks, syncs, "syncs", done)
        races = []
        for cell in cells:
            race = clock.race_keeping_memory if cell.keeping else clock.race
            races.append((cell, race(cell.model, cell.contenders, cell.device, cell.seconds)))
            done(f"time, {cell.device}, {cell}")

    rows = [*ratios.memory_rows(peaks), *ratios.first_call_rows(firsts), *ratios.sync_rows(checks)]
    rows += [*ratios.saving_rows(saved), *ratios.rank_rows(talked), *ratios.time_rows(races)]
    rows += ratios.pairs_of_ranks_rows(paired) if paired else ()
    rows += ratios.mean_rows(rows)
    report.show(rows)
    print(f"{perf_counter() - begin:.0f} seconds")
    if options.plot:
        plot.draw(rows, machine, options.plot)
    if options.json:
        content = {
            "facts": machine | {"threads": torch.get_num_threads(), "core": core},
            "plan": "full" if full else "quick",
            "rows": [row._asdict() | {"reached": row.reached} for row in rows],
            "memory": [named(peak) | result for peak, result in peaks.items()],
            "first calls": [named(one) | result for one, result in firsts.items()],
            "syncs": [named(one) | result for one, result in checks.items()],
            "saving": saved,
            "ranks": [{"model": str(kind)} | result for kind, result in talked.items()],
            "pairs of ranks": paired,
            "time": [named(cell) | result for cell, result in races],
        }
        report.save(options.json, content)


def run(
    ones: Sequence[plan.One], measure: Callable[..., dict], name: str, done
) -> dict[plan.One, dict]:
    """One after the other."""
    results = {}
    for one in ones:
        results[one] = measure(one.model, one.contender, one.device)
        done(f"{name}, {one.device}, {one.model}, {one.contender}")
    return results


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


def named(item: plan.Cell | plan.Peak | plan.One) -> dict:
    return item._asdict() | {"model": item.model._asdict()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="about half an hour (the default)")
    length.add_argument("--full", action="store_true", help="every width, row count and window")
    parser.add_argument(
        "--only",
        choices=(
            "time",
            "memory",
            "step",
            "programs",
            "compile",
            "microbatch",
            "samples",
            "curvature",
            "checkpoint",
            "ranks",
            "batch",
        ),
        help="leave out the rest; step: only the time of whole steps, programs: of "
        "programs that people have written, compile: of first calls, "
        "microbatch: time and memory of what is computed in microbatches (rows that are coupled, a "
        "head, derivatives of derivatives), and of remat, samples: of single samples' gradients, "
        "and the time of many runs as one, curvature: of products with Hessians and their kin, "
        "checkpoint: of saving, ranks: what two ranks say to one another in a step, and its time, "
        "batch: memory, the larger the batch",
    )
    parser.add_argument(
        "--row",
        metavar="TEXT",
        help="only rows with this text in 'who, where', and what they stand beside: --row "
        "'tiled head'; --row 'default step, 2 x 16 wide'",
    )
    parser.add_argument("--size", choices=SIZES, help="of the GPT: tiny, on CUDA small by default")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every raw number, for tests.benchmarks.page"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a figure of the whole steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
