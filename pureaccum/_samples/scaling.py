"""The factor that multiplies a sample's gradient, computed from the norms of its parts.

    factor = scaling(norm)        one for the whole gradient, or one for each part of it
    keep   = norm is finite       if parts are clipped; and the sample has a weight

Samples that are not kept are left out by selection, not multiplied by zero: they may be NaN.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import optree
import torch
from torch import Tensor

from .._base import trees
from .._core import weighted, weights
from .._optim import combinators


Transform = (
    Callable[[trees.Tree], trees.Tree]
    | combinators.GradientMap
    | Literal["normalize", "sign"]
    | None
)


class Clip(NamedTuple):
    """A transform: scale each part of a gradient by its norm; one that is not finite adds nothing.

    A part is all that lies below one leaf of a tree that is a prefix of params.
    """

    order: trees.Tree  # that tree, whose leaves are the numbers of the parts
    scalings: list[Callable[[Tensor], Tensor]]  # by what a part of a norm is multiplied


def parts_of(transform: Transform | Clip, params: trees.Tree) -> list[list[int]]:
    """The leaves of each part that is scaled by a norm of its own: all, unless it is said."""
    if not isinstance(transform, Clip):
        return [[*range(len(trees.tree_leaves(params)))]]

    def of_part(k: int, below: trees.Tree) -> list[int]:
        return [k] * len(trees.tree_leaves(below))

    try:
        of = trees.tree_leaves(trees.tree_map(of_part, transform.order, params))
    except ValueError as error:
        first = optree.prefix_errors(transform.order, params, namespace=trees.NAMESPACE)[0](
            "max_norm"
        )
        raise ValueError(
            "max_norm is a tree of numbers that is not a prefix of params. A number is for all "
            "leaves below it, and a subtree has the keys of params. optree says: "
            f"{' '.join(str(first).split())}"
        ) from error
    return [[i for i, part in enumerate(of) if part == k] for k in range(len(transform.scalings))]


def norms_as_tree(transform: Transform | Clip, norms: list[Tensor]) -> trees.Tree:
    """The norms of parts as a user has them: one, or a tree like the prefix."""
    if not isinstance(transform, Clip):
        return norms[0]
    return trees.tree_map(lambda k: norms[k], transform.order)


def scaled_and_kept(
    norms: list[Tensor],
    value: Tensor,
    weight: Tensor | tuple[()],
    transform: Transform | Clip,
    parts: list[list[int]],
) -> tuple[Tensor | tuple[()], Tensor | tuple[()]]:
    """By what the gradients of samples are multiplied, and which of them are kept."""
    keep = weighted.counts(value, weight) if isinstance(weight, Tensor) else None
    if isinstance(transform, Clip):
        for norm in norms:
            finite = ((norm - norm) == 0).to(value.device)
            keep = finite if keep is None else keep & finite
    factors = [scaling(x) for scaling, x in zip(scalings_of(transform), norms, strict=False)]
    if not factors:
        factor: Tensor | tuple[()] = ()
    elif len(factors) == 1:
        (factor,) = factors
    else:
        of = {i: factors[k].to(value.device) for k, part in enumerate(parts) for i in part}
        factor = torch.stack([of[i] for i in range(len(of))], -1)
    if keep is None or trees.on_host(keep.all())[0] is True:
        return factor, ()
    if isinstance(factor, Tensor):  # NaN where the gradient is NaN
        at = keep.to(factor.device)
        factor = torch.where(at if factor.dim() == 1 else at.unsqueeze(-1), factor, 0.0)
    return factor, keep


def scalings_of(transform: Transform | Clip) -> list[Callable[[Tensor], Tensor]]:
    """What each part is multiplied by, as a function of its norm, if a transform is no more."""
    if transform == "normalize":
        return [lambda norm: weights.quotient(1.0, torch.where(norm > 0, norm, 0.0))]
    if isinstance(transform, Clip):
        return transform.scalings
    factor = transform.factor if isinstance(transform, combinators.GradientMap) else None
    return [] if factor is None else [factor]
