"""Copy a trained state into its module, and notice a module that changed behind fn.params.

``fn.params`` are views of the module's tensors until something is loaded: then they get copies of
the old numbers first. What a user writes to the module in another way changes them, so each is
remembered with its sum, and a run that begins with changed ones is warned of.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._base import dtensors, reprs
from .._base.torch_internals import kernels, modes


class Target(NamedTuple):
    """A tensor to be copied, the module's, and the view of that which was handed out."""

    name: str
    new: Tensor
    own: Tensor
    view: Tensor


def by_own_names(given: Any, names: Iterable[str], root: str) -> dict[str, Tensor]:
    """Return what is given under the names of the module, with or without those of wrappers."""
    if given == ():
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{root} is {reprs.kind(given)}; expected a dict of tensors by name. Write "
            "fn.load(state.params, state.buffers)."
        )
    own = {*names}
    plain: dict[str, str] = {_without_wrappers(name): name for name in own}
    found: dict[str, Tensor] = {}
    for name, x in dict[str, Any](given).items():
        key = name if name in own else plain.get(_without_wrappers(name), name)
        if key in found:
            raise ValueError(f"{root}[{key!r}] is there twice, with and without a wrapper's name.")
        found[key] = x
    return found


def _without_wrappers(name: str) -> str:
    return ".".join(x for x in name.split(".") if x not in ("_orig_mod", "module"))


def copy_into(targets: list[Target]) -> None:
    """Copy tensors into a module; the views that were handed out keep the old numbers."""
    for name, new, own, _ in targets:
        if new.is_meta or own.is_meta:
            raise ValueError(f"{name} is on the meta device, where tensors hold no numbers.")
        if not torch.can_cast(new.dtype, own.dtype):
            raise TypeError(f"{name} is {new.dtype}; expected {own.dtype}, as in the module.")
    with torch.no_grad():
        owned = {kernels.memory_of(dtensors.local(x.own)) for x in targets}
        placed = [_placed_like(x.new.detach(), x.own) for x in targets]
        # What lies in the module is about to be written over.
        at = [kernels.memory_of(dtensors.local(x)) for x in placed]
        placed = [x.clone() if i in owned else x for x, i in zip(placed, at, strict=True)]
        for each in targets:
            view = dtensors.local(each.view)
            if kernels.memory_of(view) == kernels.memory_of(dtensors.local(each.own)):
                view.data = view.clone()
        for x, each in zip(placed, targets, strict=True):
            each.own.copy_(x)
        for x, each in zip(placed, targets, strict=True):
            now = dtensors.local(each.own)
            then = dtensors.local(x).to(now.device, now.dtype)
            if not ((now == then) | (now != now) & (then != then)).all():
                raise RuntimeError(
                    f"{each.name} was not written into the module, which would go on with other "
                    "numbers. Likely cause: tensors of the module that share memory."
                )


def _placed_like(x: Any, own: Any) -> Any:
    """Return a tensor as one that lies as the module's does: plain, or on its mesh."""
    if not dtensors.is_sharded(own):
        return dtensors.whole(x)
    if not dtensors.is_sharded(x):
        return dtensors.module().distribute_tensor(x, own.device_mesh, own.placements)
    return dtensors.placed_like([x], [own])[0]


# Modules that changed -------------------------------------------------------------------------


_sums: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # of the views that were handed out


def note_sums(views: Iterable[Tensor]) -> None:
    """Remember the sum of each tensor that was handed out."""
    if not torch.compiler.is_dynamo_compiling() and modes.at_top_level():
        for view in views:
            if type(view) is Tensor and not view.is_meta:
                _sums[view] = _sum(view)


def warn_of_changes(tensors: Iterable[Any]) -> None:
    """Warn, once for each change, where tensors that were handed out hold other numbers now."""
    changed = [x for x in tensors if x in _sums and not torch.equal(_sum(x), _sums[x])]
    if changed:
        note_sums(changed)
        warnings.warn(
            f"{len(changed)} tensors of fn.params hold other numbers than when functional(module) "
            "was called, because they share memory with the module, which was trained or loaded "
            "since. So this run does not begin where the last one began. To copy a trained state "
            "into the module, use fn.load(state.params), which leaves fn.params as they were; to "
            "begin with the new numbers, call functional(module) again.",
            stacklevel=3,
        )


def _sum(x: Tensor) -> Tensor:
    wide = torch.complex128 if x.is_complex() else torch.float64
    with torch.no_grad():
        return x.sum(dtype=wide).nan_to_num()
