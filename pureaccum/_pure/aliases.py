"""What a graph of torch.fx writes to in place, and what may be the same memory.

    for each node that writes to a tensor:
        what reads the tensor after it now reads the node
        what reads after it what may be the same memory, under another name, is an error

Under another name there may be a view, which sees the write, or a copy, which does not: the graph
does not tell.
"""

import operator
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

from torch import fx, nn

from .trace import AUGMENTED, WRITES, name_of, place


class Write(NamedTuple):
    """A write in place."""

    target: fx.Node  # what is written to
    memory: list[fx.Node]  # all that may be the same memory, the target among it


def without_aliases(nodes: list[fx.Node], root: nn.Module) -> dict[fx.Node, Write]:
    """Let what reads a tensor after a write read the node that wrote; returns the writes."""
    at = {node: i for i, node in enumerate(nodes)}
    memory: dict[fx.Node, set[fx.Node]] = {}  # of each node: all that may be the same memory
    sizes: set[fx.Node] = set()
    writes: dict[fx.Node, Write] = {}
    for node in nodes:
        memory[node] = {node}
        target = _target(node, root)
        if _is_size(node, sizes) or target in sizes:  # n += 1 writes to nothing
            sizes.add(node)
            continue
        if target is not None:
            same = memory[target]
            names = [n for n in same if any(at[user] > at[node] for user in n.users)]
            # x.add_(y) is seen by all that read x; x += y is not where x is a tuple, and what reads
            # x after it has it under another name.
            if node.target not in AUGMENTED:
                names = [n for n in names if n is not target]
            if refused := [n for n in same if n.op == "get_attr"] + names:
                raise ValueError(_shared(node, min(refused, key=at.__getitem__)))
            writes[node] = Write(target, list(same))
            target.replace_all_uses_with(node, lambda user, node=node: at[user] > at[node])
            sources = [target]
        elif is_given(node) or _is_new(node, root):
            continue
        else:  # perhaps a view of any of them
            sources = [n for n in node.all_input_nodes if n.op != "placeholder" and n not in sizes]
        for group in [memory[n] for n in sources]:
            group |= memory[node]
            memory |= dict.fromkeys(group, group)
    return writes


# What a tensor has that is no tensor.
_SIZES = {"shape", "ndim", "dtype", "device", "size", "dim", "numel", "is_floating_point", "stride"}
# Operations whose result is new memory for certain; that of any other may be a view of its inputs.
_NEW = (
    "add sub mul truediv floordiv mod pow neg matmul div rsub abs exp log sqrt rsqrt square sin "
    "cos sigmoid tanh relu relu6 gelu silu mish elu selu leaky_relu hardtanh hardswish hardsigmoid "
    "softplus softmax log_softmax logsumexp cat stack concat sum mean amax amin var std bmm mm "
    "clone clamp where linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d layer_norm group_norm "
    "instance_norm batch_norm embedding cross_entropy mse_loss nll_loss eq ne lt le gt ge"
)
_NEW_MODULES = "activation batchnorm conv instancenorm linear loss normalization pooling sparse"


def _shared(node: fx.Node, other: fx.Node) -> str:
    """The error for a write that another value may share."""
    what = f"{place(node)} writes in place ({name_of(node)})"
    if other.op == "get_attr":
        return (
            f"{what} to its own {other.target}, but forward is run for every microbatch and again "
            "for its derivatives, and would write each time. Keep such a state outside."
        )
    return (
        f"{what} to a tensor that is read again as {other.name!r}, perhaps through a view or under "
        "another name, which cannot be followed. Use the operation that gives a new tensor: "
        "x = x + y in place of x += y, relu in place of relu_, inplace=False."
    )


def _is_size(node: fx.Node, sizes: set[fx.Node]) -> bool:
    """Whether a value is a number or the like, and no tensor."""
    name = node.args[1] if node.target is getattr else name_of(node)
    if node.op in ("call_function", "call_method") and name in _SIZES:
        return True
    its, by = node.all_input_nodes, getattr(node.target, "__module__", None)
    arithmetic = node.op == "call_function" and by in ("_operator", "math", "builtins")
    return arithmetic and bool(its) and sizes.issuperset(its)  # torch.zeros(size) is a tensor


def _is_new(node: fx.Node, root: nn.Module) -> bool:
    """Whether a value is new memory for certain."""
    if node.op != "call_module":
        return name_of(node) in _NEW.split()
    layer = root.get_submodule(str(node.target))
    *above, name = type(layer).__module__.split(".")
    known = above == ["torch", "nn", "modules"] and name in _NEW_MODULES.split()
    return known and not isinstance(layer, nn.Identity)


def is_input(node: fx.Node) -> bool:
    """Whether a value is a part of what the graph is given."""
    return node.target is operator.getitem and getattr(node.args[0], "op", "") == "placeholder"


def is_given(node: fx.Node) -> bool:
    """Whether a value is what the graph is given, or a part of that."""
    return node.op == "placeholder" or is_input(node)


def first_of(node: fx.Node) -> Any:
    """The first argument of a node, positional or not."""
    return [*node.args, *node.kwargs.values()][0]


def _target(node: fx.Node, root: nn.Module) -> Any:
    """What a node writes to in place, if it does."""
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        return first_of(node) if getattr(layer, "inplace", False) else None
    if node.op not in ("call_function", "call_method"):
        return None
    name, given = name_of(node), {**node.kwargs}
    if node.op == "call_function" and callable(node.target):
        with suppress(TypeError, ValueError):  # built in, without a signature
            given |= signature(node.target).bind(*node.args, **node.kwargs).arguments
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or given.get("inplace") or node.target in WRITES:
        return first_of(node)
    return given.get("out")
