"""``python -m tests.benchmarks [--full] [--only PART] [--row TEXT] [--json FILE]``.

Rule: memory first, in processes of its own, several at a time; then the clock, alone and pinned. Of
the machine kinds and versions are noted only, no names of machines, users or folders.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from time import perf_counter

import optree
import torch

import pureaccum

from . import clock, process, ranks, report, rows
from .models import Model, gpt
from .table import COMPILED, HAND, PARTS, SECONDS, WINDOWS


Numbers = dict[tuple[Model, str], dict]


def main() -> None:
    options = arguments()
    machine = facts()  # before our own work shows in its load
    begin = perf_counter()
    every = []
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        every += measured(options, device)
    if not every:
        raise SystemExit(f"--row: no row has {options.row!r} in its name or its place.")
    every += rows.mean_rows(every)
    report.show(every)
    print(f"{perf_counter() - begin:.0f} seconds")
    if options.json:
        content = {
            "facts": machine | {"threads": torch.get_num_threads()},
            "plan": "full" if options.full else "quick",
            "rows": [row._asdict() | {"reached": row.reached} for row in every],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def measured(options: argparse.Namespace, device: str) -> list[rows.Row]:
    """All rows that are asked for, on one device."""
    full, text = options.full, options.row
    pairs = rows.pairs_of(options.only, text, full)
    if device == "cuda":  # a GPT in half precision in place of what a CPU is given
        windows = tuple(gpt("small", 4, 8, precision) for precision in ("bf16", "fp16"))
        pairs = [x._replace(where=windows) if x.where == WINDOWS else x for x in pairs]

    def asked(part: str, *names: str) -> bool:
        """Whether a row that is no pair is asked for."""
        return options.only in (None, part) and (text is None or any(text in x for x in names))

    races, peaks = rows.races(pairs), rows.peaks(pairs)
    growing = rows.growing() if asked("batch", "the whole batch") else []
    flat = [*product(rows.FLAT, rows.flat(full))] if asked("gradients", "64 microbatches") else []
    calls: list[tuple[Model, str]] = []
    if device == "cpu" and asked("steps", f"{COMPILED}, {rows.MANY_CALLS}"):
        calls = [*product((rows.FEW, rows.MANY_CALLS), rows.compiling(full))]
    checks: list[tuple[Model, str]] = []
    if device == "cuda" and asked("steps", "syncs"):
        checks = [*product(windows, (HAND, "default step", "func step", COMPILED))]
    saves = asked("checkpoint", f"{clock.SAVE}, {clock.MEGABYTES} MB of float32")
    kinds = [x for x in ranks.KINDS if device == "cpu" and asked("ranks", f"{ranks.OURS}, {x}")]
    paired = device == "cpu" and asked("ranks", f"{ranks.APART}, {ranks.PAIRS_OF_RANKS}")

    total = len(races) + len(calls) + len(checks) + len({*peaks, *growing, *flat})
    with report.progress(total) as done:
        numbers = of_processes({*peaks, *growing, *flat}, process.peak, device, done)
        found = [*rows.memory_rows(pairs, numbers, device)]
        found += rows.growth_rows({key: numbers[key] for key in growing}, device)
        found += rows.flat_rows({key: numbers[key] for key in flat}, device)
        # Before we are pinned: whoever saves may use what there is, and ranks need two cores.
        found += [rows.saving_row(clock.saving(device), device)] if saves else []
        found += rows.rank_rows({kind: ranks.talk(kind) for kind in kinds})
        found += rows.pairs_of_ranks_rows(ranks.pairs_of_ranks()) if paired else []
        process.pin()
        found += rows.first_call_rows(one_by_one(calls, process.first_call, device, done))
        found += rows.sync_rows(one_by_one(checks, clock.syncs, device, done), device)
        results = {}
        for race in races:
            run = clock.race_keeping_memory if race.keeping else clock.race
            seconds = 20.0 if full else SECONDS[race.part]
            results[race] = run(race.model, race.contenders, device, seconds)
            done(f"time, {device}, {race}")
        found += rows.time_rows(pairs, results, device)
    return found


def one_by_one(keys: Iterable, measure: Callable, device: str, done) -> Numbers:
    numbers = {}
    for model, name in keys:
        numbers[model, name] = measure(model, name, device)
        done(f"{device}, {model}, {name}")
    return numbers


def of_processes(
    keys: Iterable[tuple[Model, str]], measure: Callable, device: str, done
) -> Numbers:
    """Side by side: one process does not change the memory of another."""
    # Not more, however many cores: each may hold a gigabyte.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(
            pair
            for one in pool.map(lambda key: one_by_one([key], measure, device, done), keys)
            for pair in one.items()
        )


OPTIONAL = ("accelerate", "jax", "lightning", "opacus", "optax", "safetensors", "torchopt")


def facts() -> dict:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "optree": optree.__version__,
        "pureaccum": pureaccum.__version__,
        **{name: installed(name) for name in OPTIONAL},
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = (
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            )
            return next(names, "unknown")
    except OSError:
        return platform.processor() or "unknown"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every width, row count and window")
    parser.add_argument("--only", choices=PARTS, help="one table of the page, its time and memory")
    parser.add_argument(
        "--row",
        metavar="TEXT",
        help="only rows with this text in 'who, where', and what they stand beside: --row "
        "'tiled head'; --row 'default step, 2 x 16 wide'",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every row, for tests.benchmarks.report"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
