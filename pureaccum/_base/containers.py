"""Mappings and dataclasses as trees, of whichever class they are.

    a mapping      its values, by key;   made again as   cls({key: value, ...})
    a dataclass    its fields, by name;  made again as it was, without ``__init__``

optree knows dicts, lists and tuples. A class of the user's own, such as the batches of a tokenizer,
is made known to it when one is first met, in the namespace of this package alone.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from threading import Lock
from typing import Any

import optree
from torch import Tensor, nn

from . import trees


_known: set[type] = set()
_lock = Lock()


def open_tree(tree: trees.Tree, root: str = "args") -> trees.Flat:
    """The leaves and the structure of a tree, in which mappings and dataclasses are trees too."""
    leaves, spec = trees.flatten(tree)
    while found := [x for x in leaves if type(x) is not Tensor and _is_closed(x)]:
        for x in found:
            _make_known(x, root)
        leaves, spec = trees.flatten(tree)
    return leaves, spec


def _is_closed(x: Any) -> bool:
    """Whether a leaf is a container that optree does not know."""
    if isinstance(x, (Tensor, int, float, str, nn.Module)):
        return False
    return isinstance(x, Mapping) or (is_dataclass(x) and not isinstance(x, type))


def _make_known(x: Any, root: str) -> None:
    cls: type = type(x)
    with _lock:
        if cls in _known:
            return
        options: Any = {"namespace": trees.NAMESPACE}
        if isinstance(x, Mapping):
            entry, taken, made = optree.MappingEntry, _items, partial(_mapping, cls)
            _check_made(x, root)
        else:
            entry, taken, made = optree.GetAttrEntry, _fields, partial(_filled, cls)
        options |= {"path_entry_type": entry, "unflatten_func": made, "flatten_func": taken}
        optree.register_pytree_node(cls, **options)  # pyright: ignore
        _known.add(cls)


def _fields(x: Any) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
    names = tuple(field.name for field in fields(x) if hasattr(x, field.name))
    return [getattr(x, name) for name in names], names, names


def _filled(cls: type, names: tuple[str, ...], values: Any) -> Any:
    """A dataclass without its ``__init__``, which may check or convert what is whole."""
    x = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(x, name, value)  # frozen or not
    return x


def _items(x: Any) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    try:
        keys = tuple(sorted(x))  # as optree sorts those of dicts
    except TypeError:
        keys = tuple(x)
    return [x[key] for key in keys], keys, keys


def _mapping(cls: type, keys: tuple[Any, ...], values: Any) -> Any:
    items = dict(zip(keys, values, strict=True))
    return cls(**items) if is_dataclass(cls) else cls(items)


def _check_made(x: Any, root: str) -> None:
    """Check that a mapping can be made again of its items, as each microbatch's is."""
    cls: type = type(x)
    values, keys, _ = _items(x)
    try:
        again = _mapping(cls, keys, values)
        if set(again) == set(keys):
            return
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
    else:
        cause = "the new mapping has other keys"
    raise TypeError(
        f"{root} holds a {cls.__module__}.{cls.__qualname__}, a mapping that "
        f"{cls.__name__}({{...}}) cannot rebuild from its own items ({cause}). Pass dict(...) of "
        "it."
    )
