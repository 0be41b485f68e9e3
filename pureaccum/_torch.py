"""Every private torch name that pureaccum touches, and nothing else.

=================================  ======================================  ================
name                               what for                                checked in
=================================  ======================================  ================
``torch._C._functorch``            is a functorch transform active?        2.11, 2.13, 2.15
``torch._foreach_add_``            one call for many small leaves          2.11, 2.13, 2.15
``Module._parameters, _buffers``   what a module holds during a call       2.11, 2.13, 2.15
``Module._modules``                the modules below it                    2.11, 2.13, 2.15
=================================  ======================================  ================

``tests/parity/test_private_torch.py`` fails when one of them moves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def transform_active() -> bool:
    """Whether code runs under a torch.func transform or is being compiled.

    Asked in that order: dynamo cannot trace the second question.
    """
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore


def foreach_add_(sums: list[Tensor], terms: Sequence[Tensor], alpha: float = 1.0) -> None:
    """``sum += alpha * term`` for every pair; torch's own raises on empty lists."""
    if sums:
        torch._foreach_add_(sums, terms, alpha=alpha)  # pyright: ignore


Place = tuple[torch.nn.Module, dict[str, Any], str]  # a module, its vars, a name in them


def tensor_places(root: torch.nn.Module) -> list[Place]:
    """Where a module and those below it keep their tensors.

    Writing there directly is what ``functional_call`` does; ``Module.__setattr__`` would inspect.
    """
    places: list[Place] = []
    seen: set[torch.nn.Module] = set()
    below: list[torch.nn.Module | None] = [root]
    while below:
        module = below.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        attributes = vars(module)
        for name in ("_parameters", "_buffers"):
            if attributes.get(name):
                places.append((module, attributes, name))
        below.extend(attributes["_modules"].values())
    return places
