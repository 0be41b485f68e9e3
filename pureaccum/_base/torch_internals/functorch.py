"""Torch.func's transforms, level by level, and torch's forward AD."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


_C: Any = torch._C  # pyright: ignore


VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


# The level of the innermost torch.func transform, None outside any.
transform_level: Callable[[], int | None] = _C._functorch.maybe_current_level


def differentiating() -> bool:
    """Whether some active transform differentiates, and does not only map."""
    functorch = torch._C._functorch  # pyright: ignore
    stack = functorch.get_interpreter_stack() or ()
    return any(each.key() != functorch.TransformType.Vmap for each in stack)


def graphs_tell() -> bool:
    """Whether graphs show all that is followed: no vmap is active, nor any forward AD."""
    if transform_level() is None:
        return not forward_ad_active()
    functorch = torch._C._functorch  # pyright: ignore
    stack = functorch.get_interpreter_stack() or ()
    grads = all(each.key() == functorch.TransformType.Grad for each in stack)
    return grads and not forward_ad_active()


def functionalizing() -> bool:
    """Whether ``torch.func.functionalize`` is among the active transforms: it takes no Function."""
    functorch = torch._C._functorch  # pyright: ignore
    stack = functorch.get_interpreter_stack() or ()
    return any(each.key() == functorch.TransformType.Functionalize for each in stack)


def may_be_differentiated() -> bool:
    """Whether a derivative of what is computed here may be asked for, at any level."""
    return torch.compiler.is_dynamo_compiling() or forward_ad_active() or differentiating()


def transform_depth() -> int:
    """How many transforms are active, also while the compiler traces them.

    On torch 2.11 the compiler cannot tell, and the answer is 1.
    """
    if VERSION < (2, 13) and torch.compiler.is_dynamo_compiling():
        return 1
    return torch._C._functorch.get_dynamic_layer_stack_depth()  # pyright: ignore


# Whether a tensor is one of many, as ``torch.autograd.grad(is_grads_batched=True)`` computes them.
is_one_of_many: Callable[[Tensor], bool] = _C._functorch.is_legacy_batchedtensor


def is_wrapped(x: Tensor) -> bool:
    """Whether a transform of torch.func wraps a tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore


def innermost(x: Tensor) -> Tensor:
    """The tensor itself, without the wrappers of torch.func's transforms.

    The tensor counts every write to it, of which a wrapper of vmap counts none.
    """
    if torch.compiler.is_dynamo_compiling():
        return x
    functorch = torch._C._functorch  # pyright: ignore
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def one_member(x: Tensor) -> Tensor:
    """The tensor itself, as ``innermost``; where a vmap maps it, that of its first member."""
    functorch = torch._C._functorch  # pyright: ignore
    if not functorch.is_functorch_wrapped_tensor(x):
        return x
    below = one_member(functorch.get_unwrapped(x))
    return below.select(functorch.maybe_get_bdim(x), 0) if functorch.is_batchedtensor(x) else below


def mapped_levels(x: Tensor) -> set[int]:
    """The levels of the vmaps that map a tensor."""
    functorch, levels = torch._C._functorch, set[int]()  # pyright: ignore
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            levels.add(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return levels


def any_mapped(tensors: Iterable[Tensor]) -> bool:
    """Whether a vmap maps any of some tensors, also where the compiler traces it."""
    if not torch.compiler.is_dynamo_compiling():
        return any(map(mapped_levels, tensors))
    functorch = torch._C._functorch  # pyright: ignore
    depth = transform_depth() if VERSION >= (2, 13) else 8
    for x in tensors:
        for level in range(depth, 0, -1):
            if functorch.is_batchedtensor(x):
                return True
            x = functorch._unwrap_for_grad(x, level)
    return False


def levels(x: Tensor) -> set[int]:
    """The levels of all transforms that wrap a tensor."""
    functorch, found = torch._C._functorch, set[int]()  # pyright: ignore
    while functorch.is_functorch_wrapped_tensor(x):
        found.add(functorch.maybe_get_level(x))
        x = functorch.get_unwrapped(x)
    return found


def wants_gradient(x: Tensor) -> bool:
    """Whether a backward pass of any level will ask for a tensor's gradient."""
    functorch = torch._C._functorch  # pyright: ignore
    while not x.requires_grad and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x.requires_grad


def followed(x: Tensor, level: int, mapped: bool = True) -> tuple[bool, bool]:
    """Whether autograd or a transform up to a level differentiates a tensor, or maps it.

    The second answer is whether a transform above that level wraps it.
    """
    functorch, above = torch._C._functorch, False  # pyright: ignore
    while functorch.is_functorch_wrapped_tensor(x):
        its = functorch.maybe_get_level(x)
        if its > level:
            above = True
        elif mapped if functorch.is_batchedtensor(x) else _is_differentiated(x, its):
            return True, above
        x = functorch.get_unwrapped(x)
    return _is_differentiated(x, 0), above


def differentiated(x: Any) -> bool:
    """Whether something is a tensor, and a derivative by it may be asked for, at any level."""
    return isinstance(x, Tensor) and followed(x, transform_level() or 0, mapped=False)[0]


def zero_of_all_levels(device: torch.device) -> Tensor:
    """A zero that every active vmap maps, and that has a tangent for every active jvp."""
    functorch = torch._C._functorch  # pyright: ignore
    with down_to(0):
        zero = torch.zeros((), device=device)
    for each in functorch.get_interpreter_stack() or ():  # from the outermost on
        with down_to(each.level()):
            if each.key() == functorch.TransformType.Vmap:
                members = functorch.CVmapInterpreterPtr(each).batchSize()
                zero = as_members(zero.expand(members), each.level())
            elif each.key() == functorch.TransformType.Jvp:
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
    functorch, above = torch._C._functorch, list[Any]()  # pyright: ignore
    try:
        while (transform_level() or 0) > level:
            above.append(functorch.pop_dynamic_layer_stack())
        yield
    finally:
        for each in reversed(above):
            functorch.push_dynamic_layer_stack(each)


def members_of(x: Tensor, level: int) -> tuple[Tensor, bool] | None:
    """A tensor below the vmap of a level, and whether that maps it: then its members are rows.

    None where another transform has part in it.
    """
    functorch = torch._C._functorch  # pyright: ignore
    if not functorch.is_functorch_wrapped_tensor(x):
        return x, False
    below = functorch.get_unwrapped(x)
    if functorch.is_functorch_wrapped_tensor(below) or not functorch.is_batchedtensor(x):
        return None
    if functorch.maybe_get_level(x) != level:
        return None
    at = functorch.maybe_get_bdim(x)
    return below if at == 0 else below.movedim(at, 0), True


def as_members(x: Tensor, level: int) -> Tensor:
    """A tensor whose rows are the members that the vmap of a level maps."""
    return torch._C._functorch._add_batch_dim(x, 0, level)  # pyright: ignore


def over_rows(
    func: Callable[..., Sequence[Tensor]], rows: Sequence[Tensor], randomness: str
) -> list[Tensor]:
    """``torch.func.vmap`` of a function of tensors to tensors, in a third of its time."""
    functorch, count = torch._C._functorch, rows[0].shape[0]  # pyright: ignore
    torch._functorch.vmap.lazy_load_decompositions()  # pyright: ignore
    level = functorch._vmap_increment_nesting(count, randomness)
    try:
        outs = func(*[functorch._add_batch_dim(x, 0, level) for x in rows])
        return [functorch._remove_batch_dim(x, level, count, 0) for x in outs]
    finally:
        functorch._vmap_decrement_nesting()


def on_a_level(
    func: Callable[[list[Tensor]], Sequence[Tensor]], leaves: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Tensor], list[Tensor]]:
    """The forward pass of ``torch.func.vjp``, in half of its time: without its trees.

    Gives the leaves and all outputs as the level recorded them, which is over by then, for
    ``gradients``; and the outputs as they are outside of it.
    """
    functorch = torch._C._functorch  # pyright: ignore
    with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):  # raises if some are on
        level = functorch._grad_increment_nesting()
        try:
            with torch.enable_grad():
                functorch.set_inplace_requires_grad_allowed(True)
                own = [functorch._wrap_for_grad(x, level).requires_grad_() for x in leaves]
                functorch.set_inplace_requires_grad_allowed(False)
                outs = func(own)
                return own, outs, [functorch._unwrap_for_grad(x, level) for x in outs]
        finally:
            functorch._grad_decrement_nesting()


_NO_HOOKS = (  # in torch's own words
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. "
    "Please open an issue with your use case."
)


# An autograd Function of one level of torch.func, which torch itself makes anew for each call of a
# ``Function``: that takes most of a millisecond. It is called within ``on_one_level``.
SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction  # pyright: ignore


def on_one_level(function: Any, call: Any, tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Apply a ``SingleLevelFunction`` at the innermost level, which is one of ``grad``."""
    functorch, level = torch._C._functorch, transform_level()  # pyright: ignore
    own = [x if level_of(x) == level else functorch._wrap_for_grad(x, level) for x in tensors]
    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        return function.apply(call, *own)
    finally:
        functorch.set_single_level_autograd_function_allowed(before)


def below_grad(
    func: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Iterable[Tensor]
) -> tuple[Tensor, ...]:
    """What a function gives below the innermost level of ``grad``, in the grad mode around that.

    It is given the tensors as they are there, and what it gives comes back to the level.
    """
    functorch, level = torch._C._functorch, transform_level()  # pyright: ignore
    below = [functorch._unwrap_for_grad(x, level) for x in tensors]
    mode = functorch.CGradInterpreterPtr(functorch.get_interpreter_stack()[-1]).prevGradMode()
    innermost = functorch.pop_dynamic_layer_stack()
    try:
        with torch.set_grad_enabled(mode):
            outs = func(below)
    finally:
        functorch.push_dynamic_layer_stack(innermost)
    return tuple(functorch._wrap_for_grad(x, level) for x in outs)


def level_of(x: Tensor) -> int:
    """The level of the outermost wrapper of a tensor; -1 if it has none."""
    return torch._C._functorch.maybe_get_level(x)  # pyright: ignore


def below_vmap(func: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call a function as if the innermost transform were not there."""
    functorch = torch._C._functorch  # pyright: ignore
    innermost = functorch.pop_dynamic_layer_stack()
    try:
        return func(*args)
    finally:
        functorch.push_dynamic_layer_stack(innermost)


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
