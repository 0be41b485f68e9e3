"""Fixtures for pytest: ``from pureaccum.testing.fixtures import accumulates`` in a ``conftest.py``.

A failing test prints the report and nothing else. There is no pytest plugin, because pytest would
then import torch in every project of the environment.
"""

from collections.abc import Callable
from typing import Any

from ._check import training_loop
from ._check.check import check_accumulation


try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pureaccum.testing.fixtures needs pytest: pip install pytest."
    ) from error


@pytest.fixture
def accumulates() -> Callable[..., Any]:
    """Return a function that fails the test if a loss, or a loop, depends on how a batch is cut.

    The rule: ``check_accumulation``, or ``check_training_loop`` if its second argument is a module,
    with the same arguments and the same report. If the report does not fit, it is the failure
    message, without a traceback.

    Example:
        >>> def test_my_loss(accumulates):
        ...     accumulates(lambda w, x: ((x @ w) ** 2).mean(), torch.ones(2), torch.ones(4, 2))

    References:
        `Fixtures <https://docs.pytest.org/en/stable/how-to/fixtures.html>`_
    """

    def check(first: Any, second: Any, *args: Any, **options: Any) -> Any:
        from torch.nn import Module

        of = training_loop.check_training_loop if isinstance(second, Module) else check_accumulation
        report = of(first, second, *args, **options, raise_on_mismatch=False)
        if not report.fits:
            pytest.fail(str(report), pytrace=False)
        return report

    return check
