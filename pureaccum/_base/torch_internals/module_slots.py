"""Where modules keep what they hold, and the hooks of all of them."""

from typing import Any

import torch


# Where a module keeps what belongs to it, in its vars.
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"


def is_cache(attribute: str) -> bool:
    """Whether a recurrent module makes an attribute anew when its parameters are replaced."""
    return attribute.startswith("_flat_weight")


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether a module's code is scripted, or compiled, and so bound to the module itself."""
    dynamo = type(module).__module__.startswith("torch._dynamo")
    return dynamo or isinstance(module, torch.jit.ScriptModule)


Place = tuple[torch.nn.Module, dict[str, Any], str]  # a module, its vars, a name in them


def tensor_places(root: torch.nn.Module) -> list[Place]:
    """Where a module and those below it keep their tensors.

    ``functional_call`` too writes there directly; ``Module.__setattr__`` would inspect each value.
    """
    places: list[Place] = []
    seen: set[torch.nn.Module] = set()
    below: list[torch.nn.Module | None] = [root]
    while below:
        module = below.pop()
        if module is None or module in seen or is_compiled_module(module):
            continue
        seen.add(module)
        attributes = vars(module)
        for name in (PARAMETERS, BUFFERS):
            if attributes.get(name):
                places.append((module, attributes, name))
        below.extend(attributes[CHILDREN].values())
    return places


def module_vars(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds, without the caches of recurrent modules.

    ``functional_call`` itself leaves these caches stale, and each call makes them anew.
    """
    return {k: v for k, v in vars(module).items() if not is_cache(k)}


def hooks_of_all_modules() -> dict[str, list[Any]]:
    """The hooks that ``register_module_forward_hook`` and its like registered."""
    known = vars(torch.nn.modules.module).items()
    return {k: list(v.values()) for k, v in known if k.startswith("_global") and v and "hooks" in k}
