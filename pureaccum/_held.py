"""Keep ``functional_call`` open over a backward pass.

A checkpointed module recomputes its forward pass during the backward pass. By then
``functional_call`` has put the module's own parameters back, and the recomputation would use
those: a wrong gradient, without an error. So what every module held while it was called is
remembered in the forward pass and put back for the length of the backward pass.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ._torch import Place, tensor_places


Known = dict[torch.nn.Module, list[Place]]  # the modules seen before, each walked once
Held = list[tuple[Place, Any]]  # a copy of what was in each place


@contextmanager
def remembering(known: Known) -> Generator[list[Held]]:
    """Remember, for each outermost call inside, what the modules held."""
    calls: list[Held] = []
    thread = threading.get_ident()

    def before(module: torch.nn.Module, _args: object) -> None:
        nonlocal watch
        if threading.get_ident() != thread:
            return
        # Only outermost calls are watched: a global hook takes every inner module off
        # torch's fast path.
        watch.remove()
        if module not in known:
            known[module] = tensor_places(module)
        calls.append([(place, place[1][place[2]].copy()) for place in known[module]])

        def after(*_: object) -> None:
            nonlocal watch
            done.remove()
            watch = register_module_forward_pre_hook(before)

        done = module.register_forward_hook(after, always_call=True)

    watch = register_module_forward_pre_hook(before)
    try:
        yield calls
    finally:
        watch.remove()


@contextmanager
def holding(calls: list[Held]) -> Generator[None]:
    """Let every module hold again what it held when it was called."""
    ambiguous = _ambiguous(calls) if len(calls) > 1 else set[torch.nn.Module]()

    def refuse(module: torch.nn.Module, _args: object) -> None:
        if module in ambiguous:
            raise RuntimeError(
                f"a checkpointed {type(module).__name__} was called with two different sets of "
                "parameters in one microbatch, so its recomputation cannot tell which is meant. "
                "Checkpoint a function that calls functional_call itself: "
                "checkpoint(lambda p, x: functional_call(module, p, x), p, x)"
            )

    watch = register_module_forward_pre_hook(refuse) if ambiguous else None
    own = [(place, place[1][place[2]]) for call in calls for place, _ in call]
    try:
        for call in calls:
            _put(call)
        yield
    finally:
        _put(own)
        if watch is not None:
            watch.remove()


def _put(held: Held) -> None:
    for (_, attributes, name), tensors in held:
        attributes[name] = tensors


def _ambiguous(calls: list[Held]) -> set[torch.nn.Module]:
    """The modules that did not hold the same tensors at all of their calls."""
    first: dict[tuple[torch.nn.Module, str], list[int]] = {}
    found: set[torch.nn.Module] = set()
    for call in calls:
        for (module, _, name), tensors in call:
            held = tensors.values() if isinstance(tensors, dict) else tensors
            ids = [id(tensor) for tensor in held]
            if first.setdefault((module, name), ids) != ids:
                found.add(module)
    return found
