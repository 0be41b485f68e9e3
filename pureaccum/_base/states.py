"""States: NamedTuples of tensors that torch.load can read, and that can be donated or stacked.

Donation means that the caller gives a state up and its memory is reused. Every later use of one of
its tensors raises an error that says so.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from . import checks, dtensors, reprs
from .torch_internals import kernels
from .trees import Tree, at_once, flatten, paths, unflatten


C = TypeVar("C", bound=type)


made_with: "WeakKeyDictionary[Tensor, dict[str, Any]]" = WeakKeyDictionary()


def with_settings(x: Tensor, settings: dict[str, Any]) -> Tensor:
    """A tensor of a new state, and a note of what that was made with, which no state holds."""
    if not torch.compiler.is_dynamo_compiling():
        made_with[x] = settings
    return x


# Files ---------------------------------------------------------------------------------------


def loadable(state: C) -> C:
    """Name a class to ``torch.load(file, weights_only=True)``, which makes no other objects.

    States are tuples of tensors, which run nothing when they are made. They print in short.
    """
    torch.serialization.add_safe_globals([state])
    cast(Any, state).__repr__ = reprs.of_record
    return state


def make_public(names: dict[str, Any], module: str) -> None:
    """Let classes go by the module that users know, in messages and pickles.

    Otherwise a file that torch.save wrote could not be read after a class has moved.
    """
    ours = module.partition(".")[0]
    for value in names.values():
        if isinstance(value, type) and value.__module__.startswith(f"{ours}."):
            value.__module__ = module


# Donation ------------------------------------------------------------------------------------


class Refusing(torch.Tensor):
    """A tensor that refuses every use with a reason."""

    reason: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse."""
        raise RuntimeError(cls.reason)


class Donated(Refusing):
    """A tensor whose memory was given away."""

    reason: ClassVar[str] = (
        "this tensor belongs to a state that was given up with donate=True. Its memory now belongs "
        "to the state that the call returned. Use the returned state, or leave donate out if you "
        "still need the old one."
    )


class Spoiled(Refusing):
    """A donated tensor after an error in the middle of the work on it."""

    reason: ClassVar[str] = (
        "this tensor belongs to a state that was given up with donate=True to a call that failed "
        "in the middle, after it had changed some of the numbers. Start again from a state that "
        "was not donated, or from init."
    )


NOTHING = torch.empty(0, device="cpu")


def taken(columns: list[list[Tensor]], donate: bool) -> list[list[Tensor]]:
    """Tensors that may be written to: the donated ones under new names, or copies.

    Where two share memory (tied leaves) all are copied, so that nothing is written to twice.
    """
    if donate and kernels.lie_apart([*chain.from_iterable(columns)]):
        return [[x.detach() for x in column] for column in columns]
    return copies(columns)


def copies(columns: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copies of tensors, by one kernel for all of them where there is one."""
    every = [*chain.from_iterable(columns)]
    if at_once(every):
        made = [torch.empty_like(x, requires_grad=False) for x in every]
        kernels.foreach_copy_(made, [*map(Tensor.detach, every)])
    else:
        made = [x.detach().clone() for x in every]
    rest = iter(made)
    return [[*islice(rest, len(column))] for column in columns]


def hand_over(old: Iterable[Tensor], new: Iterable[Tensor]) -> list[Tensor]:
    """The new tensors, under new names where they are old ones; the old ones are marked."""
    given = {id(tensor): tensor for tensor in old}
    renewed = [tensor.detach() if id(tensor) in given else tensor for tensor in new]
    mark(given.values())
    return renewed


def mark(tensors: Iterable[Tensor], state: type[Refusing] = Donated) -> None:
    """Make tensors refuse every use. Subclasses other than DTensor cannot be marked."""
    for tensor in tensors:
        kind: type = type(tensor)
        if kind is torch.Tensor:
            tensor.data = NOTHING  # a third of the time of set_()
            tensor.__class__ = state
        elif kind is Donated:  # and the call failed later
            tensor.__class__ = state
        elif dtensors.is_sharded(tensor):
            # operations go by the outer tensor, to_local gives the inner one
            mark([dtensors.local(tensor)], state)
            tensor.__class__ = dtensors.refusing(state.reason)


# Ensembles: one tree of many -------------------------------------------------------------------


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of tensors along a new dim 0, leaf by leaf.

    The rule: ``torch.stack`` of the first leaf of each tree, of the second leaf of each, and so on.

    Use it for ``vmap(step)`` over seeds, learning rates or data orders::

        stacked = stack([step.init(params_of(seed), seed=seed) for seed in seeds])
        stacked, info = vmap(step, in_dims=(0, None))(stacked, batch)
        states = unstack(stacked)

    Members share nothing. Each has its own counts, loss scale and ``applied``, so one member's
    overflow does not affect the others.

    Args:
        trees: One tree per member: states, parameters, batches. All have one structure, and each
            leaf has one shape, dtype and device in all of them.

    Example:
        >>> stack([{"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}])
        {'w': tensor([1., 2.])}

    References:
        `torch.func.stack_module_state
        <https://docs.pytorch.org/docs/stable/generated/torch.func.stack_module_state.html>`_, for
        any tree.
    """
    if not isinstance(trees, (list, tuple)):
        raise TypeError(f"trees is {reprs.kind(trees)}; expected a list of one tree per member.")
    if not trees:
        raise ValueError("trees is empty; expected one tree for each member.")
    columns: list[list[Any]] = []
    first, spec = flatten(trees[0])
    for i, tree in enumerate(trees):
        leaves, came = flatten(tree)
        names = ("trees[0]", f"trees[{i}]")
        checks.check_same_structure(spec, came, *names, "Make all members with the same init.")
        for j, (x, like) in enumerate(zip(leaves, first, strict=True)):
            wanted = f"{_said(like)}, as in trees[0]" if isinstance(like, Tensor) else "a tensor"
            if not isinstance(x, Tensor) or _said(x) != _said(like):
                raise ValueError(
                    f"{paths(spec, names[1])[j]} is {_said(x)}; expected {wanted}. Members may "
                    "differ only in the numbers of their tensors."
                )
        columns.append(leaves)
    return unflatten(spec, [torch.stack(column) for column in zip(*columns, strict=True)])


def unstack(tree: Tree) -> list[Tree]:
    """Split a stacked tree into a list of trees, each with its own memory.

    The rule: ``unstack(stack(trees))`` is ``trees`` again.

    Args:
        tree: A tree whose leaves have one row per member along dim 0.

    Example:
        >>> unstack({"w": torch.tensor([1.0, 2.0])})
        [{'w': tensor(1.)}, {'w': tensor(2.)}]

    References:
        `torch.unbind <https://docs.pytorch.org/docs/stable/generated/torch.unbind.html>`_
    """
    leaves, spec = flatten(tree)
    for i, x in enumerate(leaves):
        if not isinstance(x, Tensor) or x.dim() == 0 or len(x) != len(leaves[0]):
            raise ValueError(
                f"{paths(spec, 'tree')[i]} is {_said(x)}; expected a tensor with one row per "
                "member along dim 0, as stack makes it."
            )
    if not leaves:
        raise ValueError("tree has no leaves, so the number of members is unknown.")
    return [unflatten(spec, [x.clone() for x in row]) for row in zip(*leaves, strict=True)]


def _said(x: Any) -> str:
    if not isinstance(x, Tensor):
        return reprs.kind(x)
    return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"
