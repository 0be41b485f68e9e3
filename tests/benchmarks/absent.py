"""Contenders that cannot run here, which is no failure.

Rule: other packages are optional, imported when their contender is built and not before; who is
missing is named, with the reason.
"""

from importlib import import_module
from types import ModuleType


class Absent(Exception):
    def __str__(self) -> str:
        return f"absent: {self.args[0]}"


def optional(module: str) -> ModuleType:
    """The module, of a package that need not be installed."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and broken
            raise
        raise Absent(f"{package} is not installed") from None
