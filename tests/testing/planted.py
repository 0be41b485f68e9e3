"""Tests run on a copy of the package, each time in a new process that need not import torch.

To import torch, its compiler and hypothesis takes longer than most of the tests do. One process
imports them, once, and each run is a fork of it; it never imports pureaccum or its tests.
"""

import gc
import multiprocessing
import os
import shutil
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest


# Where processes cannot be forked, or not safely once torch is loaded, each run imports anew.
CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
IMPORTED = [
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "optree",
    "hypothesis.stateful",
    "pytest",
]
SECONDS = 300
PLANTED = "TESTS_PLANTED"  # that examples which fail need not be made smaller

FAULTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))
PACKAGE = Path(__file__).parents[2] / "pureaccum"


def plant(name, directory):
    """Write a copy of the package that has a fault: ``old`` of it made ``new``."""
    fault, copy = FAULTS[name], directory / "pureaccum"
    source = (PACKAGE / fault["file"]).read_text(encoding="utf-8")
    assert source.count(fault["old"]) == 1, f"the file was changed and {name!r} was not"
    shutil.copytree(PACKAGE, copy)  # with its bytecode: all but one file need not be compiled
    changed = source.replace(fault["old"], fault["new"])
    (copy / fault["file"]).write_text(changed, encoding="utf-8")
    return copy


def run_tests(root, tests, profile):
    """The exit code of pytest and what it wrote; ``root`` has the copy, tests, pyproject.toml.

    The profile chooses among the tests, and how many examples they draw. After ``SECONDS`` the run
    is killed, which the exit code tells.
    """
    if CONTEXT.get_start_method() == "forkserver":
        CONTEXT.set_forkserver_preload(IMPORTED)
    run = CONTEXT.Process(target=_run, args=(root, tests, profile))
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # what has threads is not to be forked
        run.start()
    try:
        run.join(SECONDS)
    finally:
        run.kill()  # nothing, if it is done
        run.join()
    return run.exitcode, (root / "output").read_text(encoding="utf-8")


def _run(root, tests, profile):
    """In the new process: as if pytest had been started in ``root``."""
    gc.freeze()  # otherwise each collection goes through all that torch consists of
    output = os.open(root / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # the packages that this file was found in
    assert "pureaccum" not in sys.modules
    sys.path.insert(0, str(root))
    os.environ |= {"HYPOTHESIS_PROFILE": profile, "PYTHONPATH": str(root), PLANTED: "1"}
    os.chdir(root)
    # pytest would rewrite the assertions of hypothesis, and warns that it cannot any more.
    warned = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *warned, f"tests/{tests}"])
    found = sys.modules["pureaccum"].__file__
    assert found == str(root / "pureaccum" / "__init__.py"), found
    sys.exit(code)
