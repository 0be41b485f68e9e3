"""``device.cpp`` as a library: compiled for the torch that is installed, once for each source."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


# It builds on what torch does not promise, and was checked with this one.
TORCH = "2.13.0"
SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "device"  # which git ignores
NEEDED = ("c10", "torch_cpu")


def folder_of_torch():
    """Found without an import: the device has to be there before torch is."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def compiler():
    return shlex.split(os.environ.get("CXX", "g++"))


def reason_against():
    """Why there can be no device in software here, or ""."""
    version = importlib.metadata.version("torch")
    if sys.platform != "linux":
        return f"the device in software is built on Linux, and this is {sys.platform}"
    if version.partition("+")[0] != TORCH:
        return f"the device in software was checked with torch {TORCH}, and this is {version}"
    if (folder_of_torch() / "lib" / "libtorch_cuda.so").exists():
        return f"torch {version} was built with CUDA, for which no device can stand in"
    if shutil.which(compiler()[0]) is None:
        return f"the device in software is C++, and there is no {compiler()[0]}; CXX names another"
    return ""


def build():
    """The library, compiled if that has not been done; some ten seconds."""
    torch = folder_of_torch()
    includes = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [*compiler(), "-shared", "-fPIC", "-std=c++20", "-O0", "-Wall", str(SOURCE)]
    command += [f"-isystem{folder}" for folder in includes]
    command += [f"-L{torch / 'lib'}", *(f"-l{name}" for name in NEEDED)]
    made_of = [importlib.metadata.version("torch"), *command, SOURCE.read_text()]
    name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    library = FOLDER / f"{name}.so"
    if not library.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        # Under another name first: several processes may be at it.
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            made = Path(folder) / library.name
            ended = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if ended.returncode:
                raise RuntimeError(f"{shlex.join(command)}\n{ended.stderr}")
            made.replace(library)
    return library


if __name__ == "__main__":
    print(reason_against() or build())
