"""Every private torch name that pureaccum touches, and nothing else.

=================================  ======================================  ================
name                               what for                                checked in
=================================  ======================================  ================
``torch._C._functorch``            is a functorch transform active?        2.11, 2.13, 2.15
``torch._foreach_add_``            one call for many small leaves          2.11, 2.13, 2.15
``Module._parameters, _buffers``   what a module holds during a call       2.11, 2.13, 2.15
``Module._modules``                the modules below it                    2.11, 2.13, 2.15
``RNNBase._flat_weight...``        caches that functional_call leaves      2.11, 2.13, 2.15
``Tensor._version``                was it written to in place?             2.11, 2.13, 2.15
``Tensor._backward_hooks``         the hooks on a tensor                   2.11, 2.13, 2.15
``._post_accumulate_grad_hooks``   those after its gradient is there       2.11, 2.13, 2.15
``torch._C._autograd``             may tensors be saved through hooks?     2.11, 2.13, 2.15
``nn.modules.module._global_...``  the hooks of all modules                2.11, 2.13, 2.15
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
    return transform_level() is not None


def transform_level() -> int | None:
    """The level of the innermost torch.func transform, None outside any."""
    return torch._C._functorch.maybe_current_level()  # pyright: ignore


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


# What can be seen of a tensor, a module and torch -------------------------------------------


def version(x: Tensor) -> int | None:
    """How often a tensor was written to; nobody counts that for inference tensors."""
    return None if x.is_inference() else x._version


def tensor_hooks(x: Tensor) -> list[Any]:
    """The hooks on a tensor's gradient, and those after it has been accumulated."""
    held = (x._backward_hooks, x._post_accumulate_grad_hooks)  # pyright: ignore
    return [list((hooks or {}).values()) for hooks in held]


def module_vars(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds, without the caches of recurrent ones.

    ``functional_call`` itself leaves these stale, and each call makes them anew.
    """
    return {k: v for k, v in vars(module).items() if not k.startswith("_flat_weight")}


def hooks_of_all_modules() -> dict[str, list[Any]]:
    """What ``register_module_forward_hook`` and its kin registered."""
    known = vars(torch.nn.modules.module).items()
    return {k: list(v.values()) for k, v in known if k.startswith("_global") and v and "hooks" in k}


def saved_tensors_hooks_allowed() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` may be entered."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore
