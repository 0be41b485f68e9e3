"""The facts about the machine that a number is worth nothing without.

Rule: kinds and versions only; no names of machines, users or folders.
"""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import optree
import torch

import pureaccum


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
