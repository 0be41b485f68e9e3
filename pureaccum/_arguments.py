"""What a module that was traced is called with: its arguments, parameters and buffers, checked."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

from ._tree import Tree, flatten, paths


class Arguments:
    """What a module is called with, made of a batch."""

    def __init__(self, module: nn.Module, inputs: Callable[[Tree], Any] | None) -> None:
        self.inputs = inputs or (lambda batch: batch)
        self.signature, self.module = signature(module.forward), type(module).__name__
        self.positional: list[str] = []
        self.by_name: list[str] = []
        for name, it in self.signature.parameters.items():
            if it.kind is Parameter.VAR_POSITIONAL:
                raise ValueError(
                    f"forward of module ({self.module}) takes *{name}; expected arguments with "
                    "names, which are the inputs of the first stage."
                )
            if it.kind is not Parameter.VAR_KEYWORD and it.default is Signature.empty:
                to = self.by_name if it.kind is Parameter.KEYWORD_ONLY else self.positional
                to.append(name)

    def of(self, batch: Tree) -> dict[str, Any]:
        """The arguments by name."""
        given = self.inputs(batch)
        args = () if isinstance(given, dict) else given
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        forward = f"forward{self.signature} of module ({self.module})"
        try:
            bound = self.signature.bind(*args, **(given if isinstance(given, dict) else {}))
        except TypeError as error:
            raise TypeError(
                f"{forward} does not take what inputs(batch) gave: {error}. Say which part of the "
                "batch it is given: inputs=lambda batch: batch['x'], or a tuple, or a dict by name."
            ) from None
        for name, x in bound.arguments.items():
            if name not in (*self.positional, *self.by_name):
                raise ValueError(
                    f"{name} came for {forward}, which was traced with its default; expected an "
                    "argument without one. Wrap the module in one whose forward needs it."
                )
            leaves, spec = flatten(x)
            for at, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    raise TypeError(_no_tensor(paths(spec, name)[at], leaf, forward))
            if not leaves:
                raise TypeError(_no_tensor(name, x, forward))
        return bound.arguments


def _no_tensor(name: str, x: Any, forward: str) -> str:
    return (
        f"{name} is {x!r} for {forward}; expected tensors with one row per sample: it was traced "
        "with tensors. What all rows share is an attribute of the module."
    )


def check_tensors(given: Any, shapes: Mapping[str, torch.Size], root: str, kind: str) -> None:
    if not isinstance(given, Mapping) and (given != () or shapes):
        raise TypeError(
            f"{root} is a {type(given).__name__}; expected a dict of tensors by name, as "
            f"functional(module).{root} is."
        )
    for name, shape in shapes.items():
        x = given.get(name)
        if not isinstance(x, Tensor):
            what = "missing" if x is None else f"a {type(x).__name__}"
            raise ValueError(
                f"{root}[{name!r}] is {what}; expected all {len(shapes)} of "
                f"functional(module).{root}."
            )
        if x.shape != shape:
            raise ValueError(
                f"{root}[{name!r}] has shape {tuple(x.shape)}; the module has {tuple(shape)} "
                "there. The state of another model?"
            )
    for name in given:
        if name not in shapes:
            raise ValueError(
                f"{root}[{name!r}] is no {kind} of the module; expected functional(module).{root}, "
                "where tied ones go by their first name. The state of another model?"
            )
