"""Autograd: its graphs, backward passes, hooks and versions."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from . import functorch, modes


def sequence_number() -> int:
    """The number of the next operation that autograd records in this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore


def recorded_at(x: Tensor) -> int:
    """The number of the operation that gave a tensor, or -1 if none did."""
    return -1 if x.grad_fn is None else x.grad_fn._sequence_nr()  # pyright: ignore


def without_history(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Detached from what autograd recorded; a tangent goes along, which ``detach`` would drop."""
    # A transform has its own way with duals.
    off = torch.autograd.forward_ad._current_level < 0  # pyright: ignore
    if off or torch.compiler.is_dynamo_compiling() or functorch.transform_level():
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
    if modes.function_modes():  # which are to see it as one operation
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


def version(x: Tensor) -> int | None:
    """How often a tensor was written to; None for inference tensors, and while compiling."""
    if torch.compiler.is_dynamo_compiling():
        return None
    x = functorch.innermost(x)
    return None if x.is_inference() else x._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was written to: 0 for inference tensors; foreach may not count."""
    if functorch.transform_level() is None:
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


def saved_tensors_hooks_allowed() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` may be entered."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore


def saved_tensors_hooks() -> tuple[Any, ...] | None:
    """The innermost ones that are entered, as a pair of functions; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore
