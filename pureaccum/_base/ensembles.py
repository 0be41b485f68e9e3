"""Many states as one, for ``vmap(step)``: seeds, learning rates, data orders, loss scales.

    stacked = stack([step.init(params_of(seed), seed=seed) for seed in seeds])
    stacked, info = vmap(step, in_dims=(0, None))(stacked, batch)
    states = unstack(stacked)

Nothing is shared between members: each has counts, a loss scale and an ``applied`` of its own, so
one member's overflow leaves all others alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .trees import Tree, check_same_structure, flatten, paths, unflatten


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of tensors along a new dim 0, leaf by leaf.

    The rule: ``torch.stack`` of the first leaf of each, of the second leaf of each, and so on.

    Args:
        trees: One for each member: states, parameters, batches. Of one structure, and a leaf has
            one shape, dtype and device in all of them.

    Returns:
        A tree like each of them.

    Example:
        >>> stack([{"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}])
        {'w': tensor([1., 2.])}

    References:
        `torch.func.stack_module_state
        <https://docs.pytorch.org/docs/stable/generated/torch.func.stack_module_state.html>`_, for
        any tree.
    """
    if not isinstance(trees, (list, tuple)):
        raise TypeError(f"trees is a {type(trees).__name__}; expected a list, a tree a member.")
    if not trees:
        raise ValueError("stack got no trees; expected one for each member.")
    columns: list[list[Any]] = []
    first, spec = flatten(trees[0])
    for i, tree in enumerate(trees):
        leaves, came = flatten(tree)
        names = ("trees[0]", f"trees[{i}]")
        check_same_structure(spec, came, *names, "Members are made by one and the same init.")
        for j, (x, like) in enumerate(zip(leaves, first, strict=True)):
            wanted = f"{_said(like)}, as in trees[0]" if isinstance(like, Tensor) else "a tensor"
            if not isinstance(x, Tensor) or _said(x) != _said(like):
                raise ValueError(
                    f"{paths(spec, names[1])[j]} is {_said(x)}; expected {wanted}: members differ "
                    "in the numbers that their tensors hold."
                )
        columns.append(leaves)
    return unflatten(spec, [torch.stack(column) for column in zip(*columns, strict=True)])


def unstack(tree: Tree) -> list[Tree]:
    """Take stacked trees apart, each with its own memory.

    The rule: ``unstack(stack(trees))`` is ``trees`` again.

    Args:
        tree: A tree whose leaves have one row per member along dim 0.

    Returns:
        A list with a tree for each member.

    Example:
        >>> unstack({"w": torch.tensor([1.0, 2.0])})
        [{'w': tensor(1.)}, {'w': tensor(2.)}]

    References:
        `torch.unbind <https://docs.pytorch.org/docs/stable/generated/torch.unbind.html>`_ of leaves
    """
    leaves, spec = flatten(tree)
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != len(leaves[0]):
            raise ValueError(
                f"{paths(spec, 'tree')[i]} is {_said(x)}; expected a tensor with one row per "
                "member along dim 0, as stack makes it."
            )
    if not leaves:
        raise ValueError("the tree has no leaves, so that nothing tells how many members it has.")
    return [unflatten(spec, [x.clone() for x in row]) for row in zip(*leaves, strict=True)]


def _said(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
