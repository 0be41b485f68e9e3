"""Profiles of hypothesis, and a torch that behaves the same on every machine.

``chosen.py`` says which tests a profile runs, and ``moved.py`` how rounding is moved.
"""

import gc
import os
from collections import Counter

import pytest
import torch
from hypothesis import Phase, settings

from tests import chosen
from tests.moved import move_draws
from tests.testing.planted import PLANTED


# dev and ci always draw the same examples, so that what they find does not depend on luck.
SAME = {"deadline": None, "print_blob": True, "derandomize": True, "database": None}
settings.register_profile("dev", max_examples=5, **SAME)
settings.register_profile("ci", max_examples=10, **SAME)
settings.register_profile("thorough", max_examples=1000, deadline=None, print_blob=True)
MOVED = "TESTS_MOVED"
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)
if PLANTED in os.environ:  # what fails in a copy of the package with a fault need not be small
    unshrunk = settings(settings.default, phases=[Phase.explicit, Phase.generate])
    settings.register_profile("planted", unshrunk)
    settings.load_profile("planted")

torch.set_num_threads(int(os.environ.get("TESTS_THREADS", "1")))
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns unless told one or the other
gc.disable()  # until all tests are imported, of which nothing is garbage


@pytest.fixture(autouse=True)
def seeded():
    """hypothesis does not know torch's generator."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)  # the first formats a stack for each kind of device that is not there: a millisecond


def pytest_addoption(parser):
    told = "round as another processor might: tests/moved.py"
    parser.addoption("--moved", type=int, metavar="SEED", help=told)


def pytest_configure(config):
    if (seed := config.getoption("moved", None)) is not None:
        os.environ[MOVED] = str(seed)  # ranks read it
    if MOVED in os.environ:
        move_draws(int(os.environ[MOVED]))


def pytest_collection_modifyitems(config, items):
    chosen.choose(config, PROFILE, items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session):
    """A worker of xdist tells how many tests it left out; all workers leave out the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[chosen.LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[chosen.LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out"))


def pytest_terminal_summary(terminalreporter, config):
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    left_out = config.stash.get(chosen.LEFT_OUT, Counter())
    terminalreporter.section("profile", sep="=")
    for line in chosen.summary(PROFILE, left_out, skipped):
        terminalreporter.write_line(line)
