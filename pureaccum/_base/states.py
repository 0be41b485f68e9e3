"""States: NamedTuples of tensors, which ``torch.load`` reads with no word from the user."""

from typing import Any, TypeVar

import torch


C = TypeVar("C", bound=type)


def loadable(state: C) -> C:
    """Name a class to ``torch.load(file, weights_only=True)``, which makes objects of no other.

    States are tuples of tensors, which run nothing when they are made.
    """
    torch.serialization.add_safe_globals([state])
    return state


def make_public(names: dict[str, Any], module: str) -> None:
    """Let classes go by the module that users know, in messages and pickles.

    Otherwise a file that torch.save wrote could not be read once a class lies in another file.
    """
    ours = module.partition(".")[0]
    for value in names.values():
        if isinstance(value, type) and value.__module__.startswith(f"{ours}."):
            value.__module__ = module
