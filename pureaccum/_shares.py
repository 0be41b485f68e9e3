"""What microbatches pool: shares that become the value for the whole batch, and the way back.

so_far = more(stage, so_far, share)   for each microbatch
value = pooled_value(stage, so_far, share)
"""

from typing import Any

import torch
from torch import Tensor

from ._stage import Stage
from ._tree import Tree, accumulation_dtype, flatten, map, unflatten


Cotangents = list[Tensor | None]


def more(stage: Stage, so_far: Any, share: Tree) -> Any:
    """One share more: added at once, or kept until all are merged."""
    if stage.merge is not None:
        return [*(so_far or []), share]
    return share if so_far is None else map(_sum, so_far, share)


def pooled_value(stage: Stage, so_far: Any, last: Tree) -> Tree:
    """The value of all microbatches; of a sum in the dtypes of a share."""
    if stage.merge is None:
        return map(_as_share, so_far, last)
    return stage.merge(stacked(so_far))


def stacked(shares: list[Tree]) -> Tree:
    """Shares along a new dim 0."""
    return map(_stack, *shares)


def _stack(*shares: Any) -> Tensor:
    if isinstance(shares[0], Tensor):
        return torch.stack(shares)
    return torch.tensor(shares, dtype=torch.float64)


def _sum(a: Any, b: Any) -> Any:
    if not is_differentiable(b):
        return a + b
    wide = accumulation_dtype(b.dtype)
    return a.to(wide) + b.to(wide)


def _as_share(total: Any, share: Any) -> Any:
    return total.to(share.dtype) if is_differentiable(share) else total


def is_differentiable(x: Any) -> bool:
    """Whether something in a boundary or a share can have a cotangent."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def through_merge(stage: Stage, shares: list[Tree], cotangents: Cotangents) -> list[Cotangents]:
    """The cotangents of each share, from those of the value that they were merged into."""
    stack, spec = flatten(stacked(shares))
    at = [i for i, x in enumerate(flatten(shares[0])[0]) if is_differentiable(x)]
    if not at or all(c is None for c in cotangents):
        return [[None] * len(at)] * len(shares)

    def merged(*given: Tensor) -> tuple[Tensor, ...]:
        own = list(stack)
        for i, x in zip(at, given, strict=True):
            own[i] = x
        assert stage.merge is not None
        value = flatten(stage.merge(unflatten(spec, own)))[0]
        return tuple(x for x in value if is_differentiable(x))

    outs, vjp = torch.func.vjp(merged, *(stack[i] for i in at))  # pyright: ignore
    pairs = zip(outs, cotangents, strict=True)
    back = vjp(tuple(torch.zeros_like(out) if c is None else c for out, c in pairs))
    return [[g[p] for g in back] for p in range(len(shares))]
