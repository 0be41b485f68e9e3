"""What only CUDA does, where there is none: tests on a device in software, ``device.cpp``.

They run in processes of their own, since torch asks but once whether there is CUDA. Of a file of
tests on the device the name does not begin with ``test_``, so that no other process collects it.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import software
from tests.device.library import reason_against


pytestmark = [
    pytest.mark.laws,
    pytest.mark.skipif(bool(reason_against()), reason=reason_against()),
    pytest.mark.promise("launches"),
]
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What runs in one process: to import torch takes longer than many of these tests.
ON_THE_DEVICE = [("itself", "bits"), ("order", "randomness", "ranks"), ("features",)]
# The tests for a GPU run here too, so that they neither rot nor are wrong by their own numbers.
FOR_A_GPU = {file.stem: file for file in sorted(HERE.glob("test_cuda*.py"))}
NOT_HERE = {
    "test_cuda_ranks": "NCCL is not modelled",
    "test_cuda_compiled": "kernels of Triton do not run; compiled.py compiles them",
}
TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="a step is compiled for a GPU by Triton, which is not installed; CI does so every night",
)
NIGHTLY = pytest.mark.nightly
FILES = [
    *(
        pytest.param([HERE / f"{name}.py" for name in names], id=", ".join(names), marks=NIGHTLY)
        for names in ON_THE_DEVICE
    ),
    pytest.param([HERE / "compiled.py"], id="compiled", marks=[NIGHTLY, TRITON]),
    *(
        pytest.param([file], id=name, marks=() if name == "test_cuda" else NIGHTLY)
        for name, file in {"launches": HERE / "launches.py", **FOR_A_GPU}.items()
        if name not in NOT_HERE
    ),
]


def run_on_the_device(files):
    plugins = ["-p", "tests.device.software", "-p", "no:cacheprovider"]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment["HYPOTHESIS_PROFILE"] = "ci" if PROFILE == "thorough" else "dev"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *map(str, files)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("files", FILES)
def test_on_the_device(files):
    ended = run_on_the_device(files)
    assert ended.returncode == 0, f"\n{ended.stdout}\n{ended.stderr}"
    assert " passed" in ended.stdout  # and not all were skipped


@pytest.mark.nightly
def test_what_a_gpu_is_asked_is_answered_in_software(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.device.gpu"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, f"\n{ended.stdout}\n{ended.stderr}"
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found) == {"versions", "tests", "launches", "steps"}
    assert "failure" not in json.dumps(found), found
    for name, line in found["tests"].items():
        assert " passed" in line and " failed" not in line, f"{name}: {line}"  # noqa: PT018


def test_what_is_not_run_here_is_there():
    assert NOT_HERE.keys() < FOR_A_GPU.keys()


def test_it_is_loaded_before_torch_or_not_at_all():
    with pytest.raises(RuntimeError, match="torch has been imported"):
        software.load()
    assert not torch.cuda.is_available()
