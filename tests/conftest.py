"""Profiles, and a torch that behaves the same on every machine.

``dev`` is quick, ``ci`` runs everything and always draws the same examples, ``thorough`` runs at
night.
"""

import gc
import os

import pytest
import torch
from hypothesis import Phase, settings


settings.register_profile("dev", max_examples=4, deadline=None, print_blob=True)
settings.register_profile(
    "ci", max_examples=10, deadline=None, print_blob=True, derandomize=True, database=None
)
settings.register_profile("thorough", max_examples=1000, deadline=None, print_blob=True)
# For copies of the package with a fault in them: to fail is enough, the smallest example is not
# looked for.
settings.register_profile(
    "mutants",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns unless told one or the other
gc.disable()  # until all tests are imported, of which nothing is garbage


@pytest.fixture(autouse=True)
def seeded():
    """hypothesis does not know torch's generator."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    for marker, profiles in {"slow": ("dev",), "nightly": ("dev", "ci")}.items():
        reason = f"{marker}: HYPOTHESIS_PROFILE=thorough runs it, and ci what is slow"
        for item in items:
            if PROFILE in profiles and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
