"""What a machine with a GPU is asked, in at most ten minutes: ``make gpu``.

    versions    of torch, CUDA and the driver, and the name of the device
    tests       of bits, steps and samples on the device: nothing waits
    launches    of a step, by torch's profiler, beside the counts of the device in software
    steps       time and peak memory beside the loop written by hand, on no core in particular
    compiled    the same for a step that is a scan, which is measured last: it compiles for a minute

A table is printed, and ``gpu.json`` has all numbers. Without a GPU everything but the compiled step
runs on the device in software, in small: to see that it works, and its times say nothing.
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from tests.device import software


ROOT = Path(__file__).parents[2]
TESTS = ("test_cuda", "test_cuda_step", "test_cuda_samples")
FORMS = ("by hand, fused", "fused", "fused, donated", "autograd, fused, donated")
MOST = 240  # seconds for the tests


def there_is_a_gpu():
    """Asked of another process: torch asks but once, and the software has to come before."""
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asks]).returncode == 0


def versions(real):
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if not real:
        return {**found, "device": "in software"}
    return {**found, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name()}


def tests(real):
    """The last line of pytest for each file; in software of a few cases, however long they take."""
    plugin = () if real else ("-p", "tests.device.software")
    environment = os.environ | {"HYPOTHESIS_PROFILE": "ci" if real else "dev"}
    found = {}
    end = time.monotonic() + MOST
    for name in TESTS:
        file = f"tests/device/{name}.py"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *plugin]
        try:
            ended = subprocess.run(
                [*command, file],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=max(end - time.monotonic(), 1) if real else None,
            )
            found[name] = ended.stdout.strip().rsplit("\n", 1)[-1]
        except subprocess.TimeoutExpired:
            found[name] = "not over in time"
    return found


def launches(real):
    """For each microbatch and beside them, as it is here and as it is in software."""
    from tests.device import launches as counted

    found = {}
    for i, (network, precision) in enumerate(counted.COLUMNS):
        for form in FORMS:
            if real:
                make = {**counted.LOOPS, **counted.FORMS}[form]
                two, three = (
                    profiled(make(counted.NETWORKS[network](), precision == "fp16", count))
                    for count in (2, 3)
                )
                here = (three - two, 3 * two - 2 * three)
            else:
                here = tuple(counted.launched(network, precision, form))
            row = {"here": here}
            if form in counted.CEILINGS:
                row["in software, at most"] = counted.CEILINGS[form][i]
            found[f"{network}, {precision}, {form}"] = row
    return found


def profiled(run):
    """How many kernels a run launches."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC")
    return sum(event.count for event in seen.key_averages() if event.key in names)


def steps(real, compiled=False):
    """The ratio of times within a round, and bytes, of each contender for each precision."""
    import torch

    from tests.benchmarks.clock import race
    from tests.benchmarks.models import gpt
    from tests.benchmarks.process import measure

    names = ("hand step", "compiled step" if compiled else "default step")
    if real and not compiled:  # by torch.func it needs the attention kernel of a GPU
        names = (*names, "func step")
    found = {}
    for precision in ("bf16",) if compiled else ("fp16", "bf16"):
        model = gpt("small", 4, 8, precision) if real else gpt("tiny", 1, 2, precision)
        raced = race(model, names, "cuda", 20.0 if real else 0.0)
        by_hand = raced["seconds"].get("hand step", [])
        for name in names:
            row = {}
            if name in raced["failures"]:
                row["failure"] = raced["failures"][name]
            else:
                pairs = zip(raced["seconds"][name], by_hand, strict=True)
                row["time / by hand"] = round(median(ours / loop for ours, loop in pairs), 3)
                row["bytes"] = measure(model, name, "cuda")["peak"]
                torch.cuda.empty_cache()
            found[f"{model.name}, {name}"] = row
    return found


def main():
    real = there_is_a_gpu()
    if not real:
        software.load()
    found = {}
    parts = {
        "versions": lambda: versions(real),
        "tests": lambda: tests(real),
        "launches": lambda: launches(real),
        "steps": lambda: steps(real),
    }
    if real:
        parts["compiled"] = lambda: steps(real, compiled=True)
    for part, ask in parts.items():
        start = time.monotonic()
        try:
            found[part] = ask()
        except Exception as error:  # the other parts are worth having
            found[part] = {"failure": f"{type(error).__name__}: {error}"}
        print(f"\n{part} ({time.monotonic() - start:.0f} s)", flush=True)
        for name, value in found[part].items():
            print(f"  {name:44s} {value}", flush=True)
        Path("gpu.json").write_text(json.dumps(found, indent=2))
    failed = [name for name, line in found["tests"].items() if "failed" in line]
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
