"""Every private torch name that pureaccum touches, and nothing else: one file, however long.

=================================  ======================================  ================
name                               what for                                checked in
=================================  ======================================  ================
``torch._C._functorch``            is a functorch transform active?        2.11, 2.13, 2.15
``torch._C._functorch``            what its wrappers wrap, mapped or not   2.11, 2.13, 2.15
``…functorch._add_batch_dim``      wrap what was computed below a vmap     2.13
``…functorch.CVmapInterpreterPtr`` how many members a vmap has             2.13
``…functorch._vmap_increment_…``   a vmap, and no checks                   2.13
``…functorch._grad_increment_…``   a gradient, and no trees                2.13
``torch._C.DisableTorchFunction``  look at a tensor past all modes         2.13
``…functorch.push_dynamic_...``    a tensor as an outer transform sees it  2.11, 2.13
``forward_ad._set_fwd_grad_...``   forward AD inside a Function's rules    2.11, 2.13, 2.15
``forward_ad._current_level``      is torch's forward AD going on?         2.11, 2.13
``Node._sequence_nr``              was it recorded before?                 2.11, 2.13
``Node._forward_cls``              which Function recorded it?             2.13
``torch._C._functions``            the node in which a graph ends          2.11, 2.13, 2.15
``torch._C.DisableTorchFunction``  what modes are not to see               2.11, 2.13
``torch._C._DisableTorchDispatch`` what modes are not to see               2.11, 2.13
``torch._foreach_add_``            one call for many small leaves          2.11, 2.13, 2.15
``…graph._engine_run_backward``    a backward pass, and no checks          2.11, 2.13
``torch._amp_foreach_non_finite…`` are many leaves finite?                 2.11, 2.13
``torch._foreach_norm, _div_, …``  one call for many leaves                2.11, 2.13
``torch._fused_adamw_, _adam_``    the kernels of torch.optim              2.11, 2.13
``Module._parameters, _buffers``   what a module holds during a call       2.11, 2.13, 2.15
``Module._modules``                the modules below it                    2.11, 2.13, 2.15
``RNNBase._flat_weight...``        caches that functional_call leaves      2.11, 2.13, 2.15
``Tensor._version``                was it written to in place?             2.11, 2.13, 2.15
``UntypedStorage._cdata``          do two tensors share memory?            2.11, 2.13
``Tensor._is_zerotensor``          is there no memory, but a note of zero? 2.13
``torch._C._storage_Use_Count``   does only one tensor lie in a memory?   2.11, 2.13
``OpOverload._schema``             what does an operation write to?        2.11, 2.13
``…disable_proxy_modes_tracing``   compute what no tracer writes down      2.13
``OpOverload.namespace``           does it reach other ranks?              2.13
``_len_torch_dispatch_stack``      does a dispatch mode see operations?    2.13
``_get_dispatch_stack_at``         … and is it one of ours?                2.13
``_len_torch_function_stack, …``   the same of function modes              2.13
``torch.overrides._push_mode, …``  the modes that were on once             2.13
``torch.utils._device``            is it the one of a device?              2.13
``_dispatch_tls_is_dispatch_key…`` does make_fx record above autograd?     2.13
``Tensor._backward_hooks``         the hooks on a tensor                   2.11, 2.13, 2.15
``._post_accumulate_grad_hooks``   those after its gradient is there       2.11, 2.13, 2.15
``torch._C._autograd``             may tensors be saved through hooks?     2.11, 2.13, 2.15
``nn.modules.module._global_...``  the hooks of all modules                2.11, 2.13, 2.15
``torch._higher_order_ops.scan``   a loop in compiled code                 2.11, 2.13, 2.15
``torch._dynamo``                  dims that vary; the compiler's errors   2.11, 2.13, 2.15
``torch._inductor.exc``            the compiler's errors                   2.11, 2.13, 2.15
``aten._has_same_storage_numel``   what forward AD asks of a tangent       2.13
``torch.utils._python_dispatch``   see every operation                     2.11, 2.13, 2.15
``._should_skip_dynamo``           … and import no compiler for it         2.11, 2.13
``torch._C._current_graph_task``   is a backward pass going on?            2.11, 2.13, 2.15
``torch._subclasses.fake_tensor``  tensors that hold no numbers            2.11, 2.13, 2.15
=================================  ======================================  ================

``tests/base/test_private_torch.py`` fails when one of them moves.
"""

import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import count
from operator import attrgetter
from traceback import FrameSummary
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode


VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def transform_active() -> bool:
    """Whether code runs under a torch.func transform, or is being compiled or traced.

    The compiler is asked first, since dynamo cannot trace the second question; and dynamo itself is
    asked, since ``torch.compiler.is_compiling`` is true in all threads while one of them compiles.
    """
    if torch.compiler.is_dynamo_compiling() or transform_level() is not None:
        return True
    return bool(_MODES() or _FUNCTION_MODES()) and get_proxy_mode() is not None


def may_write() -> bool:
    """Whether tensors of ours may be written in place: nobody follows or traces operations."""
    if torch.compiler.is_dynamo_compiling() or transform_level() is not None:
        return False
    return not (_MODES() or _FUNCTION_MODES()) or not traced()


def may_add_in_place() -> bool:
    """Whether sums may be written to: nobody follows what is computed, nor its tangents."""
    return may_write() and not forward_ad_active()


def untraced() -> AbstractContextManager[Any]:
    """Compute what no tracer writes down."""
    return disable_proxy_modes_tracing()


def at_top_level() -> bool:
    """Whether no transform, compiler or tracer is at work, nor torch's forward AD."""
    if torch.compiler.is_dynamo_compiling() or torch.autograd.forward_ad._current_level >= 0:  # pyright: ignore
        return False
    modes = _MODES() or _FUNCTION_MODES()
    return transform_level() is None and not (modes and get_proxy_mode() is not None)


def traced() -> bool:
    """Whether a mode that is not ours sees operations: it may record them, or keep what they give.

    Of torch's own function modes only those of a tracer do; others choose a device.
    """
    count = _MODES()
    if count and not _is_of(_C._get_dispatch_stack_at(count - 1), "pureaccum"):
        return True
    functions = map(_C._get_function_stack_at, range(_FUNCTION_MODES()))
    its = [mode for mode in functions if not _is_of(mode, "pureaccum", "torch")]
    return bool(its) or get_proxy_mode() is not None


def modes_around() -> list[list[Any]]:
    """The function and dispatch modes that are on: those of the user, and the one of a device."""
    if not (_MODES() or _FUNCTION_MODES()):
        return [[], []]
    return [
        [x for x in stack() if isinstance(x, DeviceContext) or not _is_of(x, "pureaccum", "torch")]
        for stack, _, _ in _STACKS
    ]


@contextmanager
def within(then: list[list[Any]]) -> Generator[None]:
    """Run under modes that ``modes_around`` gave, and under none that came later."""
    held, later = [stack() for stack, _, _ in _STACKS], modes_around()

    def put(stacks: Iterable[list[Any]]) -> None:
        for modes, (stack, pop, push) in zip(stacks, _STACKS, strict=True):
            for _ in stack():
                pop()
            for mode in modes:
                push(mode)

    put([x for x in a if x not in b] + c for a, b, c in zip(held, later, then, strict=True))
    try:
        yield
    finally:
        put(held)


def _is_of(mode: Any, *packages: str) -> bool:
    return type(mode).__module__.partition(".")[0] in packages


_C: Any = torch._C  # pyright: ignore
_FUNCTION_MODES, _MODES = _C._len_torch_function_stack, _C._len_torch_dispatch_stack
_STACKS: Any = [
    [getattr(kind, name) for name in (stack, "_pop_mode", "_push_mode")]
    for kind, stack in (
        (torch.overrides, "_get_current_function_mode_stack"),
        (torch.utils._python_dispatch, "_get_current_dispatch_mode_stack"),  # pyright: ignore
    )
]


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
    functorch, autograd = torch._C._functorch, torch._C._autograd  # pyright: ignore
    before = autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        autograd._saved_tensors_hooks_disable(_NO_HOOKS)  # raises, and is disabled, if some are on
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
    finally:
        if before is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(before)


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


def sequence_number() -> int:
    """The number of the next operation that autograd records in this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore


def recorded_at(x: Tensor) -> int:
    """The number of the operation that gave a tensor, or -1 if none did."""
    return -1 if x.grad_fn is None else x.grad_fn._sequence_nr()  # pyright: ignore


# A context in which tensors themselves are looked at: no torch function mode takes notice.
unnoticed: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction


def unseen() -> AbstractContextManager[Any]:
    """Run operations that no dispatch mode sees."""
    return torch._C._DisableTorchDispatch()  # pyright: ignore


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


def without_history(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Detached from what autograd recorded; a tangent goes along, which ``detach`` would drop."""
    # A transform has its own way with duals.
    off = torch.autograd.forward_ad._current_level < 0  # pyright: ignore
    if off or torch.compiler.is_dynamo_compiling() or transform_level():
        return [x.detach() for x in tensors]
    pairs = map(torch.autograd.forward_ad.unpack_dual, tensors)
    make_dual = torch.autograd.forward_ad.make_dual
    return [x.detach() if t is None else make_dual(x.detach(), t.detach()) for x, t in pairs]


def gradients(
    total: Tensor, leaves: Sequence[Tensor], cotangent: Tensor, again: bool = False
) -> Sequence[Any]:
    """``torch.autograd.grad``, whose checks take the time of some operations.

    The graph is kept where the gradients of the same total are asked for ``again``.
    """
    given = (total,), (cotangent,), again, False, tuple(leaves), True
    return torch.autograd.graph._engine_run_backward(*given, accumulate_grad=False)  # pyright: ignore


def gradients_of(
    outs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    again: bool = False,
    create_graph: bool = False,
) -> Sequence[Any]:
    """``torch.autograd.grad`` of several outputs, all of which require grad."""
    if _FUNCTION_MODES():  # which are to see it as one operation
        return torch.autograd.grad(outs, leaves, cotangents, again, create_graph, allow_unused=True)
    given = tuple(outs), tuple(cotangents), again, create_graph, tuple(leaves), True
    return torch.autograd.graph._engine_run_backward(*given, accumulate_grad=False)  # pyright: ignore


def gradients_into(
    sums: Mapping[int, Tensor], total: Tensor, leaves: Sequence[Tensor], cotangent: Tensor
) -> list[Tensor | None]:
    """The gradients of leaves; autograd itself adds some of them to sums, and here they are None.

    A gradient that is added and dropped in one place leaves its memory to the next one: added by a
    hook of Python it costs a tenth of a training loop's time more.
    """
    for i, leaf in enumerate(leaves):
        leaf.grad = sums.get(i)
    try:
        given = (total,), (cotangent,), False, False, tuple(leaves), True
        torch.autograd.graph._engine_run_backward(*given, accumulate_grad=True)  # pyright: ignore
        return [None if i in sums else leaf.grad for i, leaf in enumerate(leaves)]
    finally:
        for leaf in leaves:  # else a loss that calls .backward() would add to the sums as well
            leaf.grad = None


def owns_its_memory(x: Tensor) -> bool:
    """Whether nothing but the numbers of a tensor lies in its memory."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg() or x._is_zerotensor():
        return False
    storage = x.untyped_storage()  # which holds it once more
    return torch._C._storage_Use_Count(storage._cdata) == 2  # pyright: ignore


def materialised(x: Tensor) -> Tensor:
    """The tensor itself; zeros where torch only notes that all of it is zero: nobody may write."""
    noted = not torch.compiler.is_dynamo_compiling() and innermost(x)._is_zerotensor()
    return x.clone() if noted else x


foreach_add_ = torch._foreach_add_  # pyright: ignore
foreach_copy_ = torch._foreach_copy_  # pyright: ignore
foreach_div_ = torch._foreach_div_  # pyright: ignore
foreach_lerp = torch._foreach_lerp  # pyright: ignore
foreach_mul_ = torch._foreach_mul_  # pyright: ignore
foreach_norm = torch._foreach_norm  # pyright: ignore
foreach_zero_ = torch._foreach_zero_  # pyright: ignore


def fused_adam(decoupled: bool, *columns: list[Tensor], **knobs: Any) -> None:
    """What ``torch.optim.adam.adam`` comes to for leaves of one kind, in a fifth of its time."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_  # pyright: ignore
    kernel(*columns, **knobs)


def finite_by_one_kernel(tensors: list[Tensor]) -> Tensor:
    """Whether tensors of one kind are finite. They are multiplied by 1, which changes no bit."""
    like = tensors[0]
    found, one = like.new_zeros((), dtype=torch.float32), like.new_ones((), dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)  # pyright: ignore
    return found == 0


# Modules -----------------------------------------------------------------------------------


# Where a module keeps what belongs to it, in its vars.
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"


def is_cache(attribute: str) -> bool:
    """Whether a recurrent module makes an attribute anew when its parameters are replaced."""
    return attribute.startswith("_flat_weight")


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether a module's code is scripted, or compiled, and so bound to the module itself."""
    dynamo = type(module).__module__.startswith("torch._dynamo")
    return dynamo or isinstance(module, torch.jit.ScriptModule)


Place = tuple[torch.nn.Module, dict[str, Any], str]  # a module, its vars, a name in them


def tensor_places(root: torch.nn.Module) -> list[Place]:
    """Where a module and those below it keep their tensors.

    ``functional_call`` too writes there directly; ``Module.__setattr__`` would inspect each value.
    """
    places: list[Place] = []
    seen: set[torch.nn.Module] = set()
    below: list[torch.nn.Module | None] = [root]
    while below:
        module = below.pop()
        if module is None or module in seen or is_compiled_module(module):
            continue
        seen.add(module)
        attributes = vars(module)
        for name in (PARAMETERS, BUFFERS):
            if attributes.get(name):
                places.append((module, attributes, name))
        below.extend(attributes[CHILDREN].values())
    return places


# The compiler ------------------------------------------------------------------------------


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: list[Tensor]
) -> tuple[Any, Any]:
    """The last carry and all y, stacked, of ``carry, y = body(carry, x)`` for each row of xs."""
    from torch._higher_order_ops.scan import scan  # imports the compiler: seconds

    return scan(body, carry, xs)


def compile_anew(
    function: Callable[..., Any], wrapped: bool, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Call ``torch.compile(function, fullgraph=True, **settings)`` on code of its own.

    torch keeps graphs by the code of a function: all closures made by one ``def`` share its
    ``recompile_limit``, and the ninth would not compile. By default it leaves open a size that it
    has seen with two values, and a number: that is slower, and torch.func has no dropout then.
    Here both are constants, and with ``dynamic=True`` numbers alone.
    """
    own = function.__code__.replace(co_name=f"{function.__name__}_{next(_MADE)}")
    function = FunctionType(
        own, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    options: dict[str, Any] = {"guard_filter_fn": _worth_guarding}
    inductor = settings.get("backend", "inductor") == "inductor"
    if wrapped and inductor and VERSION >= (2, 13):  # on 2.11 it asserts around a scan
        options["cpp_wrapper"] = True
    given: dict[str, Any] = {**settings, "dynamic": bool(settings.get("dynamic"))}
    if "mode" not in settings:  # torch takes one of the two
        given["options"] = options | dict(settings.get("options") or {})
    program = torch.compile(function, fullgraph=True, **given)
    if not given["dynamic"]:
        return program

    def with_constants(*args: Any) -> Any:
        with torch._dynamo.config.patch(specialize_int=True, specialize_float=True):  # pyright: ignore
            return program(*args)

    return with_constants


_MADE = count()


def _worth_guarding(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: none on what torch, optree and this package are made of.

    Those take half of a small step's time. What users may change of their own stays guarded. Anyone
    who puts another function into torch itself, or adds hooks to a module, which torch's compiler
    does not guard either, calls ``torch.compiler.reset()``.
    """
    return ["_global_" in guard.name or not _LIBRARY.search(guard.name) for guard in guards]


_LIBRARY = re.compile(
    r"G\['__import_(torch_dot_|optree_dot_|pureaccum_dot_|contextlib')|__import__\('torch'\)"
    r"|\['_tuple_new'\]"  # what the classes of NamedTuples are made of
)


def let_vary(x: Tensor) -> Tensor:
    """The tensor itself; a graph that is made for it will take any number of rows."""
    torch._dynamo.maybe_mark_dynamic(x, 0)  # pyright: ignore
    return x


def is_compiler_error(error: BaseException | None) -> bool:
    """Whether an error is the compiler's own, and not that of a graph which runs."""
    return any(
        cls.__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx.experimental"))
        for cls in type(error).__mro__
    )


def compiler_stack(error: BaseException) -> list[FrameSummary]:
    """Where in the code the compiler raised an error, outermost first."""
    return list(getattr(error, "real_stack", None) or [])


# What can be seen of a tensor, a module and torch -------------------------------------------


def version(x: Tensor) -> int | None:
    """How often a tensor was written to; None for inference tensors, and while compiling."""
    if torch.compiler.is_dynamo_compiling():
        return None
    x = innermost(x)
    return None if x.is_inference() else x._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was written to: 0 for inference tensors; foreach may not count."""
    if transform_level() is None:
        try:
            return [*map(_VERSION, tensors)]
        except RuntimeError:  # an inference tensor among them
            pass
    return [version(x) or 0 for x in tensors]


_VERSION, _GRAD_FN = attrgetter("_version"), attrgetter("grad_fn")
_END = torch._C._functions.AccumulateGrad  # pyright: ignore


def leads_to(total: Tensor, leaves: Sequence[Any]) -> bool:
    """Whether the graph of a loss ends in any of the leaves."""
    if torch._C._functorch.is_gradtrackingtensor(total):  # pyright: ignore
        return total.requires_grad  # on this level
    wanted = {id(x) for x in leaves}
    return any(id(x) in wanted for x in (total, *ends_of(total)))


def ends_of(x: Tensor) -> list[Tensor]:
    """The leaves in which the graph of a tensor ends: itself, if it is one that requires grad."""
    nodes = nodes_from([x.grad_fn], {None})
    if not nodes and x.requires_grad:
        return [x]
    # a user's Function may call something of its own ``variable``
    return [node.variable for node in nodes if type(node) is _END]


def leaves_since(
    outs: Sequence[Tensor], begun: int, inputs: Sequence[Tensor] = ()
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The leaves that outputs depend on, by id: through new operations, and through older ones.

    Those that were recorded since ``begun`` are new. What the inputs depend on is left out.
    Operations are counted per thread: one of another thread may pass for new or for old.
    """
    stops = {None, *map(_GRAD_FN, inputs)}
    ends = [x for x in outs if x.requires_grad and x.grad_fn is None]
    nodes: list[Any] = [x for x in {*map(_GRAD_FN, outs)} if x not in stops]
    known, old = stops.union(nodes), list[Any]()
    for node in nodes:  # which grows
        if type(node) is _END:
            ends.append(node.variable)
        elif node._sequence_nr() < begun:
            old.append(node)
        else:
            for parent, _ in node.next_functions:
                if parent not in known:
                    known.add(parent)
                    nodes.append(parent)
    leaves = {id(x): x for x in ends}
    for x in inputs:
        leaves.pop(id(x), None)
    older = [node.variable for node in nodes_from(old, stops) if type(node) is _END]
    return leaves, {id(x): x for x in older}


def nodes_from(begin: Iterable[Any], stops: set[Any]) -> list[Any]:
    """Nodes of a graph, and those that they lead to, but for some."""
    nodes = [node for node in dict.fromkeys(begin) if node not in stops]
    known = stops.union(nodes)
    for node in nodes:  # which grows
        for parent, _ in node.next_functions:
            if parent not in known:
                known.add(parent)
                nodes.append(parent)
    return nodes


def custom_functions(outs: Iterable[Tensor]) -> list[str]:
    """The autograd Functions, but ours, on the way to some tensors, by their names."""
    functions = (
        getattr(node, "_forward_cls", None) for node in nodes_from(map(_GRAD_FN, outs), {None})
    )
    names = (f"{x.__module__}.{x.__qualname__}" for x in functions if x is not None)
    return [*dict.fromkeys(x for x in names if not x.startswith("pureaccum."))]


def tensor_hooks(x: Tensor) -> list[Any]:
    """The hooks on a tensor's gradient, and those that run after it was accumulated."""
    held = (x._backward_hooks, x._post_accumulate_grad_hooks)  # pyright: ignore
    return [list((hooks or {}).values()) for hooks in held]


def module_vars(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds, without the caches of recurrent modules.

    ``functional_call`` itself leaves these caches stale, and each call makes them anew.
    """
    return {k: v for k, v in vars(module).items() if not is_cache(k)}


def hooks_of_all_modules() -> dict[str, list[Any]]:
    """The hooks that ``register_module_forward_hook`` and its like registered."""
    known = vars(torch.nn.modules.module).items()
    return {k: list(v.values()) for k, v in known if k.startswith("_global") and v and "hooks" in k}


def saved_tensors_hooks_allowed() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` may be entered."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore


def saved_tensors_hooks() -> tuple[Any, ...] | None:
    """The innermost ones that are entered, as a pair of functions; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore


# What can be seen of a computation ----------------------------------------------------------


def seeing(
    see: Callable[[tuple[Any, ...], Any], None] | None = None,
    before: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None] | None = None,
) -> TorchDispatchMode:
    """A mode that calls ``before(operation, args, kwargs)`` and ``see(operands, out)``.

    It does so around each operation, below torch.func's transforms and autograd: it sees forward,
    backward, in-place and foreach operations, all of them with plain tensors.
    """
    return (_Uncompiled if "torch._dynamo" in sys.modules else _Seeing)(see, before)


def answering(answer: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> Any:
    """A mode in which an operation gives ``answer(operation, args, kwargs)``."""
    mode: Any = seeing()
    mode.answer = answer
    return mode


class _Seeing(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: by default torch imports its compiler, which takes a second, to keep it out."""
        return False

    def __init__(self, see: Any, before: Any) -> None:
        super().__init__()
        self.see, self.before, self.answer = see, before, None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.before is not None:
            self.before(func, args, kwargs)
        if self.answer is not None:
            return self.answer(func, args, kwargs)
        out = func(*args, **kwargs)
        if self.see is not None:
            self.see((*args, *kwargs.values()), out)
        return out


class _Uncompiled(_Seeing):
    """The mode for where the compiler has been imported: it would compile this code otherwise."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = _Seeing.__torch_dispatch__


class Asking(TorchFunctionMode):
    """A mode that calls ``before(function, args, kwargs)`` before each function of torch.

    It changes no number (tests/core/test_operations.py), unlike one that sees operations.
    """

    def __init__(self, before: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        super().__init__()
        self.before = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.before(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def written_by(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation is about to write to."""
    schema = operation._schema
    name = schema.name.rpartition("::")[2]
    # Batch norms do not declare that in training mode they write to the running statistics.
    declared = name not in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if declared and not schema.is_mutable:
        return []
    values = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
    if not declared:
        return [x for x in values[3:5] if isinstance(x, Tensor) and values[5]]
    written: list[Tensor] = []
    for argument, value in zip(schema.arguments, values, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            several = value if isinstance(value, (list, tuple)) else [value]
            written += [x for x in several if isinstance(x, Tensor)]
    return written


@cache
def signature_of(operation: Any) -> tuple[str, dict[str, Any]]:
    """The name of an operation, without an underscore at its end, and the defaults of arguments."""
    schema = operation._schema
    name = schema.name.rpartition("::")[2].removesuffix("_")
    return name, {a.name: a.default_value for a in schema.arguments}


@cache
def effects_of(operation: Any) -> tuple[bool, bool, bool]:
    """Whether an operation draws random numbers, may write, and gives memory of its own."""
    schema = operation._schema
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    writes = schema.is_mutable or "batch_norm" in schema.name  # see above
    return draws, writes, not any(x.alias_info for x in schema.returns)


COLLECTIVES = "c10d", "_c10d_functional", "_c10d_functional_autograd"  # namespaces of operations


def pre_dispatching() -> bool:
    """Whether a tracer records what is called above autograd and torch.func."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return _C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch)


def dispatched() -> bool:
    """Whether a dispatch mode sees each operation: a tracer, a counter, or one of ours."""
    return _MODES() > 0 or get_proxy_mode() is not None


def is_taken_as_new(operation: Any) -> bool:
    """Whether an operation takes in a tensor just made from numbers, which no operation gave."""
    return operation is torch.ops.aten.lift_fresh.default


def memory_of(x: Tensor) -> int | None:
    """A number that all views of one memory have in common; None where there is no one memory."""
    x = innermost(x)
    return None if x.layout != torch.strided or x.is_nested else x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


@contextmanager
def imagining() -> Generator[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """Compute nothing: tensors have shapes and no numbers, and code that reads a number gets 1.

    Yields two functions. One makes such a tensor from another one, on a CPU if that is on no
    device; the other says which such tensor stands for a captured one.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def taken_for(x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else mode.from_tensor(x)

    def imagined(x: Tensor) -> Tensor:
        device = "cpu" if x.is_meta else x.device
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Telling():
        yield imagined, taken_for


class Telling(TorchDispatchMode):
    """Gives 1 to code that reads a number where there is none, and calls compared tensors equal."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException

        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is torch.ops.aten.equal.default:
                return True
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def compares_layouts(func: Any) -> bool:
    """Whether an operation only compares layouts, as forward AD does with a value and a tangent."""
    aten = torch.ops.aten
    return func in (aten.is_same_size.default, aten._has_same_storage_numel.default)
