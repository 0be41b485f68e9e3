"""Microbatches so small that several of them go through at once, and cost what one does.

    values, pull = vjp(vmap(loss of a microbatch), leaves)
    sums += pull(rows of each)

The loss remains a function of one microbatch. Several go together only as far as what their
forward passes keep is next to nothing, and only a plain scalar loss under
``nonfinite="propagate"``: what else a microbatch may come to (no weight, a gradient that is left
out) cannot be told from a sum over several.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._core.engines import Wrt
from .._core.loss import read
from .._core.microbatch_gradient import Rule
from .._core.sums import Weighing, added_to
from .._core.weights import Tally, scaled


LITTLE = 2**20  # bytes that forward passes keep for their backward passes, all of them together

# The loss, of leaves, the tensors of a microbatch, and the number of samples before it.
One = Callable[[Sequence[Tensor], list[Tensor], Tensor], object]


def how_many(one: One, leaves: list[Tensor], xs: list[Tensor], samples: Tensor) -> int:
    """How many microbatches like those in ``xs``, which are tried, go together; a power of two.

    One, where anything speaks against it: torch cannot vmap the loss, or would take a slow way and
    warns of it; the loss draws random numbers, which would be others; it is ``Weighted``.
    """
    params = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    sizes: list[int] = []

    def weigh(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in params:
            sizes.append(x.numel() * x.element_size())
        return x

    held = [leaf.detach().requires_grad_() for leaf in leaves]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                _values(one, leaves, xs, samples.expand(len(xs[0])))
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weigh, lambda x: x):
                one(held, [x[0] for x in xs], samples)
    except Exception:
        return 1
    most = LITTLE // max(sum(sizes), 1)
    return 1 << max(0, most.bit_length() - 1)  # most numbers of microbatches divide by it


def add_together(
    one: One, wrt: Wrt, sums: list[Tensor], xs: list[Tensor], samples: Tensor, rule: Rule
) -> tuple[list[Tensor], Tally]:
    """Add the gradients of some microbatches; new sums, and what they came to."""
    count, rows = xs[0].shape[:2]
    before = samples + rows * torch.arange(count, dtype=samples.dtype, device=samples.device)
    # pyright cannot tell the two lengths of vjp's result apart
    values, pull = torch.func.vjp(lambda *leaves: _values(one, leaves, xs, before), *wrt.leaves)  # pyright: ignore
    times = 1.0 if rule.reduction == "sum" else float(rows)
    cotangent = scaled(torch.full_like(values, times / (wrt.unit or 1.0)), wrt.scale)
    weighing = Weighing(cotangent, 1.0, None)
    grads = pull(cotangent, retain_graph=False)
    new = [added_to(total, grad, weighing) for total, grad in zip(sums, grads, strict=True)]
    wide = values.detach().double()
    weights = torch.full_like(wide, times if rule.reduction == "mean" else 0.0)
    return new, Tally((wide * times).sum(), weights.sum(), ((wide - wide) != 0).sum())


def _values(one: One, leaves: Sequence[Tensor], xs: list[Tensor], samples: Tensor) -> Tensor:
    def value(tensors: list[Tensor], before: Tensor) -> Tensor:
        seen, _ = read(one(leaves, tensors, before), False)
        if not isinstance(seen.weight, tuple):
            raise TypeError("a Weighted loss goes alone: its weight may be zero")
        return seen.total

    return torch.func.vmap(value)(xs, samples)
