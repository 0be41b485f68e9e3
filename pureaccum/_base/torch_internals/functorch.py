"""Torch.func's transforms, level by level, and torch's forward AD."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


_functorch: Any = torch._C._functorch  # pyright: ignore


VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


# The level of the innermost torch.func transform, None outside any.
transform_level: Callable[[], int | None] = _functorch.maybe_current_level


def differentiating() -> bool:
    """Whether some active transform differentiates, and does not only map."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(each.key() != _functorch.TransformType.Vmap for each in stack)


def graphs_tell() -> bool:
    """Whether graphs show all that is followed: no vmap is active, nor any forward AD."""
    if transform_level() is None:
        return not forward_ad_active()
    stack = _functorch.get_interpreter_stack() or ()
    grads = all(each.key() == _functorch.TransformType.Grad for each in stack)
    return grads and not forward_ad_active()


def functionalizing() -> bool:
    """Whether ``torch.func.functionalize`` is among the active transforms: it takes no Function."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(each.key() == _functorch.TransformType.Functionalize for each in stack)


def may_be_differentiated() -> bool:
    """Whether a derivative of what is computed here may be asked for, at any level."""
    return torch.compiler.is_dynamo_compiling() or forward_ad_active() or differentiating()


def transform_depth() -> int:
    """How many transforms are active, also while the compiler traces them.

    On torch 2.11 the compiler cannot tell, and the answer is 1.
    """
    if VERSION < (2, 13) and torch.compiler.is_dynamo_compiling():
        return 1
    return _functorch.get_dynamic_layer_stack_depth()


# Whether a tensor is one of many, as ``torch.autograd.grad(is_grads_batched=True)`` computes them.
is_one_of_many: Callable[[Tensor], bool] = _functorch.is_legacy_batchedtensor


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func wraps a tensor."""
    return _functorch.is_functorch_wrapped_tensor(x)


def innermost(x: Tensor) -> Tensor:
    """The tensor itself, without the wrappers of torch.func's transforms.

    The tensor counts every write to it, of which a wrapper of vmap counts none.
    """
    if torch.compiler.is_dynamo_compiling():
        return x
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def one_member(x: Tensor) -> Tensor:
    """The tensor itself, as ``innermost``; where a vmap maps it, that of its first member."""
    if not _functorch.is_functorch_wrapped_tensor(x):
        return x
    below = one_member(_functorch.get_unwrapped(x))
    return (
        below.select(_functorch.maybe_get_bdim(x), 0) if _functorch.is_batchedtensor(x) else below
    )


def mapped_levels(x: Tensor) -> set[int]:
    """The levels of the vmaps that map a tensor."""
    levels = set[int]()
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            levels.add(_functorch.maybe_get_level(x))
        x = _functorch.get_unwrapped(x)
    return levels


def any_mapped(tensors: Iterable[Tensor]) -> bool:
    """Whether a vmap maps any of some tensors, also where the compiler traces it."""
    if not torch.compiler.is_dynamo_compiling():
        return any(map(mapped_levels, tensors))
    depth = transform_depth() if VERSION >= (2, 13) else 8
    for x in tensors:
        for level in range(depth, 0, -1):
            if _functorch.is_batchedtensor(x):
                return True
            x = _functorch._unwrap_for_grad(x, level)
    return False


def levels(x: Tensor) -> set[int]:
    """The levels of all transforms that wrap a tensor."""
    found = set[int]()
    while _functorch.is_functorch_wrapped_tensor(x):
        found.add(_functorch.maybe_get_level(x))
        x = _functorch.get_unwrapped(x)
    return found


def wants_gradient(x: Tensor) -> bool:
    """Whether a backward pass of any level will ask for a tensor's gradient."""
    while not x.requires_grad and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x.requires_grad


def followed(x: Tensor, level: int, mapped: bool = True) -> tuple[bool, bool]:
    """Whether autograd or a transform up to a level differentiates a tensor, or maps it.

    The second answer is whether a transform above that level wraps it.
    """
    above = False
    while _functorch.is_functorch_wrapped_tensor(x):
        its = _functorch.maybe_get_level(x)
        if its > level:
            above = True
        elif mapped if _functorch.is_batchedtensor(x) else _is_differentiated(x, its):
            return True, above
        x = _functorch.get_unwrapped(x)
    return _is_differentiated(x, 0), above


def differentiated(x: Any) -> bool:
    """Whether something is a tensor, and a derivative by it may be asked for, at any level."""
    return isinstance(x, Tensor) and followed(x, transform_level() or 0, mapped=False)[0]


def zero_of_all_levels(device: torch.device) -> Tensor:
    """A zero that every active vmap maps, and that has a tangent for every active jvp."""
    with down_to(0):
        zero = torch.zeros((), device=device)
    for each in _functorch.get_interpreter_stack() or ():  # from the outermost on
        with down_to(each.level()):
            if each.key() == _functorch.TransformType.Vmap:
                members = _functorch.CVmapInterpreterPtr(each).batchSize()
                zero = as_members(zero.expand(members), each.level())
            elif each.key() == _functorch.TransformType.Jvp:
                zero = torch.autograd.forward_ad.make_dual(zero, torch.zeros_like(zero))
    return zero


def _is_differentiated(x: Tensor, level: int) -> bool:
    if x.requires_grad or not forward_ad_active():
        return x.requires_grad
    with down_to(level):  # seen from another level it has no tangent
        return torch.autograd.forward_ad.unpack_dual(x).tangent is not None


@contextmanager
def down_to(level: int) -> Generator[None]:
    """Run as if the transforms above a level were not there."""
    above = list[Any]()
    try:
        while (transform_level() or 0) > level:
            above.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        for each in reversed(above):
            _functorch.push_dynamic_layer_stack(each)


def members_of(x: Tensor, level: int) -> tuple[Tensor, bool] | None:
    """A tensor below the vmap of a level, and whether that maps it: then its members are rows.

    None where another transform has part in it.
    """
    if not _functorch.is_functorch_wrapped_tensor(x):
        return x, False
    below = _functorch.get_unwrapped(x)
    if _functorch.is_functorch_wrapped_tensor(below) or not _functorch.is_batchedtensor(x):
        return None
    if _functorch.maybe_get_level(x) != level:
        return None
    at = _functorch.maybe_get_bdim(x)
    return below if at == 0 else below.movedim(at, 0), True


def as_members(x: Tensor, level: int) -> Tensor:
    """A tensor whose rows are the members that the vmap of a level maps."""
    return _functorch._add_batch_dim(x, 0, level)


def over_rows(
    func: Callable[..., Sequence[Tensor]], rows: Sequence[Tensor], randomness: str
) -> list[Tensor]:
    """``torch.func.vmap`` of a function of tensors to tensors, in a third of its time."""
    count = rows[0].shape[0]
    torch._functorch.vmap.lazy_load_decompositions()  # pyright: ignore
    level = _functorch._vmap_increment_nesting(count, randomness)
    try:
        outs = func(*[_functorch._add_batch_dim(x, 0, level) for x in rows])
        return [_functorch._remove_batch_dim(x, level, count, 0) for x in outs]
    finally:
        _functorch._vmap_decrement_nesting()


def on_a_level(
    func: Callable[[list[Tensor]], Sequence[Tensor]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
    """The forward pass of ``torch.func.vjp``, in half of its time: without its trees.

    Gives the leaves and all outputs as the level recorded them, which is over by then, for
    ``gradients``; and the outputs as they are outside of it.
    """
    with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):  # raises if some are on
        level = _functorch._grad_increment_nesting()
        try:
            with torch.enable_grad():
                _functorch.set_inplace_requires_grad_allowed(True)
                own = [_functorch._wrap_for_grad(x, level).requires_grad_() for x in leaves]
                _functorch.set_inplace_requires_grad_allowed(False)
                outs = func(own)
                return own, outs, [_functorch._unwrap_for_grad(x, level) for x in outs]
        finally:
            _functorch._grad_decrement_nesting()


_NO_HOOKS = (  # in torch's own words
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. "
    "Please open an issue with your use case."
)


# An autograd Function of one level of torch.func, which torch itself makes anew for each call of a
# ``Function``: that takes most of a millisecond. It is called within ``on_one_level``.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction  # pyright: ignore


def on_one_level(function: Any, call: Any, tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Apply a ``SingleLevelFunction`` at the innermost level, which is one of ``grad``."""
    level = transform_level()
    own = [x if level_of(x) == level else _functorch._wrap_for_grad(x, level) for x in tensors]
    before = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        return function.apply(call, *own)
    finally:
        _functorch.set_single_level_autograd_function_allowed(before)


def below_grad(
    func: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """What a function gives below the innermost level of ``grad``, in the grad mode around that.

    It is given the tensors as they are there, and what it gives comes back to the level.
    """
    level = transform_level()
    below = [_functorch._unwrap_for_grad(x, level) for x in tensors]
    mode = _functorch.CGradInterpreterPtr(_functorch.get_interpreter_stack()[-1]).prevGradMode()
    innermost = _functorch.pop_dynamic_layer_stack()
    try:
        with torch.set_grad_enabled(mode):
            outs = func(below)
    finally:
        _functorch.push_dynamic_layer_stack(innermost)
    return tuple(_functorch._wrap_for_grad(x, level) for x in outs)


def level_of(x: Tensor) -> int:
    """The level of the outermost wrapper of a tensor; -1 if it has none."""
    return _functorch.maybe_get_level(x)


def below_vmap(func: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function as if the innermost transform were not there."""
    innermost = _functorch.pop_dynamic_layer_stack()
    try:
        return func(*args)
    finally:
        _functorch.push_dynamic_layer_stack(innermost)


def forward_ad_active() -> bool:
    """Whether torch's forward AD is active, outside of any transform."""
    return torch.autograd.forward_ad._current_level >= 0  # pyright: ignore


def forward_ad() -> AbstractContextManager[None]:
    """Keep forward AD on where torch turns it off: in the rules of an autograd Function."""
    return torch.autograd.forward_ad._set_fwd_grad_enabled(True)  # pyright: ignore


def any_tangent(tensors: Iterable[Tensor]) -> bool:
    """Whether some tensor has a tangent of torch's forward AD, outside of any transform."""
    unpack = torch.autograd.forward_ad.unpack_dual
    return forward_ad_active() and any(unpack(x).tangent is not None for x in tensors)
