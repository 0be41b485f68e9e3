"""Memory runs out at every block that is asked for: nothing is lost, and no bit is another.

The tests are in ``allocations.py``: their process begins with an allocator that can fail.
"""

from pathlib import Path

import pytest

from tests.core.allocator import SHARES, needs_a_compiler, run


pytestmark = [*(pytest.mark.faults,), pytest.mark.promise("donation"), needs_a_compiler]


FURTHER = [pytest.param(f"further{i}", marks=pytest.mark.slow) for i in range(SHARES)]


@pytest.mark.nightly
@pytest.mark.parametrize("share", ["first", *FURTHER])
def test_any_block_of_memory_may_be_refused(share):
    run(Path(__file__).with_name("allocations.py"), share)
