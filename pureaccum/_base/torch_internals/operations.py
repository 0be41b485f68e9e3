"""Operations of torch, as a dispatch mode sees them: what each writes to, draws and returns."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor


def written_by(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation is about to write to."""
    schema = operation._schema
    name = schema.name.rpartition("::")[2]
    # Batch norms do not declare that in training mode they write to the running statistics.
    declared = name not in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if declared and not schema.is_mutable:
        return []
    values = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
    if not declared:
        return [x for x in values[3:5] if isinstance(x, Tensor) and values[5]]
    written: list[Tensor] = []
    for argument, value in zip(schema.arguments, values, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            several = value if isinstance(value, (list, tuple)) else [value]
            written += [x for x in several if isinstance(x, Tensor)]
    return written


@cache
def signature_of(operation: Any) -> tuple[str, dict[str, Any]]:
    """The name of an operation, without an underscore at its end, and the defaults of arguments."""
    schema = operation._schema
    name = schema.name.rpartition("::")[2].removesuffix("_")
    return name, {a.name: a.default_value for a in schema.arguments}


@cache
def effects_of(operation: Any) -> tuple[bool, bool, bool]:
    """Whether an operation draws random numbers, may write, and gives memory of its own."""
    schema = operation._schema
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    writes = schema.is_mutable or "batch_norm" in schema.name  # see above
    return draws, writes, not any(x.alias_info for x in schema.returns)


COLLECTIVES = "c10d", "_c10d_functional", "_c10d_functional_autograd"  # namespaces of operations


def is_taken_as_new(operation: Any) -> bool:
    """Whether an operation takes in a tensor just made from numbers, which no operation gave."""
    return operation is torch.ops.aten.lift_fresh.default


def compares_layouts(func: Any) -> bool:
    """Whether an operation only compares layouts, as forward AD does with a value and a tangent."""
    aten = torch.ops.aten
    return func in (aten.is_same_size.default, aten._has_same_storage_numel.default)
