"""Read and replace the leaves of a nested state by name.

"lr"                 whatever has this name, in any part of a chain or a partition
"['decay'].lr"       a longer ending of the path, as you would write it, distinguishes several
"loss_scale.scale"   likewise
"""

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from . import reprs, trees


def tree_get(tree: trees.Tree, name: str) -> Any:
    """Return the leaf or subtree with a given name, such as a training state's learning rate.

    The rule: the one leaf, or the one subtree, whose path ends in ``name``.

    Args:
        tree: Any pytree: a training state, an optimizer's, parameters.
        name: The last part of a path, or a longer ending of it, as you would write it in code.

    Raises:
        KeyError: Nothing has that name, or several leaves have it; the message lists them.

    Example:
        >>> from pureaccum import clip_by_global_norm, adamw, chain
        >>> state = chain(clip_by_global_norm(1.0), adamw(0.25)).init({"w": torch.ones(2)})
        >>> tree_get(state, "lr"), tree_get(state, "exp_avg")
        (tensor(0.2500, dtype=torch.float64), {'w': tensor([0., 0.])})

    References:
        ``optax.tree_utils.tree_get``: `Tree
        <https://optax.readthedocs.io/en/latest/api/utilities.html>`_
    """
    nodes = _nodes(tree)
    found = [path for path in nodes if _ends_in(path, _checked(name))]
    if len(found) != 1:
        raise KeyError(_sentence(name, found, nodes))
    return nodes[found[0]](tree)


def tree_set(
    tree: trees.Tree, changes: Mapping[str, Any] | None = None, /, **named: Any
) -> trees.Tree:
    """Return a copy of a tree in which the leaves of some names have new values.

    The rule: every leaf whose path ends in a name becomes the value for that name, with the dtype,
    shape and device of the old leaf.

    It never synchronises with a device.

    Args:
        tree: Any pytree: a training state, an optimizer's, parameters.
        changes: A dict from names, or longer endings of paths, to new values: numbers, tensors
            (which are copied), or functions of the old value.
        named: The same for names that are Python identifiers.

    Raises:
        KeyError: Nothing has one of the names.

    Example:
        >>> from pureaccum import adamw, partition
        >>> groups = {"w": adamw(0.25), "b": adamw(0.5)}
        >>> state = partition(groups, lambda path: path).init(
        ...     {"w": torch.ones(2), "b": torch.ones(1)}
        ... )
        >>> state = tree_set(state, lr=lambda lr: lr / 2)
        >>> state = tree_set(state, {"['b'].lr": 1.0})
        >>> tree_get(state, "['w'].lr"), tree_get(state, "['b'].lr")
        (tensor(0.1250, dtype=torch.float64), tensor(1., dtype=torch.float64))

    References:
        ``optax.tree_utils.tree_set``: `Tree
        <https://optax.readthedocs.io/en/latest/api/utilities.html>`_
    """
    if changes is not None and not isinstance(changes, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"changes is {reprs.kind(changes)}; expected a dict from names to numbers. Or "
            "pass names as keywords: tree_set(state, lr=0.1)."
        )
    leaves, spec = trees.flatten(tree)
    paths = [accessor.codify("") for accessor in spec.accessors()]
    new = list(leaves)
    for name, value in {**(changes or {}), **named}.items():
        at = [i for i, path in enumerate(paths) if _ends_in(path, _checked(name))]
        if not at:
            raise KeyError(_sentence(name, [], paths, set(_nodes(tree)) - {*paths}))
        for i in at:
            new[i] = _like(value, leaves[i], paths[i])
    return trees.unflatten(spec, new)


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"name is {name!r}; expected the last part of a path, such as 'lr', or a longer "
            "ending of it, such as \"['decay'].lr\"."
        )
    return name


def _nodes(tree: trees.Tree) -> dict[str, Callable[[Any], Any]]:
    """The path to every leaf and every subtree, and a function that gives it."""
    spec = optree.tree_structure(tree, namespace=trees.NAMESPACE)
    found: dict[str, Callable[[Any], Any]] = {}
    for accessor in spec.accessors():
        for end in range(1, len(accessor) + 1):
            part: Any = accessor[:end]
            found.setdefault(part.codify(""), part)
    return found


def _ends_in(path: str, name: str) -> bool:
    return path.endswith((f".{name}", f"[{name!r}]", *((name,) if name[0] in ".[" else ())))


def _sentence(name: str, found: Any, paths: Any, subtrees: Any = ()) -> str:
    if found:
        return (
            f"{name!r} is the end of several paths: {', '.join(found)}. Pass a longer ending that "
            "tells them apart."
        )
    if any(_ends_in(path, name) for path in subtrees):
        return (
            f"{name!r} names a subtree, but tree_set replaces leaves only. Use state._replace(...)."
        )
    there = list(dict.fromkeys(path for path in paths if not path.endswith("]"))) or list(paths)
    more = f" and {len(there) - 12} more" if len(there) > 12 else ""
    return (
        f"{name!r} is the end of no path. The paths are {', '.join(there[:12])}{more}. A learning "
        "rate that is a tensor or a schedule is not stored in a state."
    )


def _like(value: Any, old: Any, path: str) -> Any:
    """A value as what was there: of its dtype and shape, on its device."""
    new = value(old) if callable(value) else value
    if not isinstance(old, Tensor):
        return new
    if not isinstance(new, (Tensor, bool, int, float)):
        raise TypeError(
            f"{path} is set to {reprs.of_value(new)}; expected a number, a tensor, or a "
            "function of the old value."
        )
    whole = not (old.is_floating_point() or old.is_complex())
    broken = new.is_floating_point() if isinstance(new, Tensor) else isinstance(new, float)
    if whole and broken:
        raise TypeError(
            f"{path} is set to {new!r}; expected a whole number, because the leaf is {old.dtype}."
        )
    if not isinstance(new, Tensor):
        return torch.full_like(old, new, requires_grad=False)
    if new.shape != old.shape:
        raise ValueError(
            f"{path} is set to a tensor of shape {tuple(new.shape)}; expected {tuple(old.shape)}, "
            "the shape of the leaf."
        )
    return new.to(old.device, old.dtype, copy=True)
