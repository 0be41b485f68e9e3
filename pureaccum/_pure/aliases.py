"""What a graph of torch.fx writes to in place, and what may be the same memory.

Whoever reads a tensor after such a write reads what wrote it. Where it is read under another name,
through a view perhaps, nobody can tell what that one is to read: such a module is refused.
"""

import operator
from contextlib import suppress
from inspect import signature
from typing import Any

from torch import fx, nn

from .trace import AUGMENTED, name_of, place


_SIZES = {"shape", "ndim", "dtype", "device", "size", "dim", "numel", "is_floating_point", "stride"}
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


def without_aliases(
    nodes: list[fx.Node], root: nn.Module
) -> dict[fx.Node, tuple[fx.Node, list[fx.Node]]]:
    """What is written to in place; whoever reads that afterwards now reads what wrote it."""
    at = {node: i for i, node in enumerate(nodes)}
    same: dict[fx.Node, set[fx.Node]] = {}  # what may be one piece of memory
    tensors: dict[Any, set[fx.Node]] = {}  # the same, of the module's own
    sizes: set[fx.Node] = set()
    writes: dict[fx.Node, tuple[fx.Node, list[fx.Node]]] = {}
    for node in nodes:
        target = _written(node, root)
        if node.op == "get_attr":
            same[node] = tensors.setdefault(node.target, set())
        elif _is_size(node, sizes) or (target is not None and target in sizes):
            sizes.add(node)
            target = None
        same.setdefault(node, set()).add(node)
        if target is not None:
            others = [n for n in same[target] if any(at[u] > at[node] for u in n.users)]
            if not (node.target in AUGMENTED and node.op == "call_function"):
                others = [n for n in others if n is not target]
            own = [n for n in same[target] if n.op == "get_attr"]
            if own or others:
                raise ValueError(_shared(node, min([*own, *others], key=at.__getitem__)))
            writes[node] = target, list(same[target])
            target.replace_all_uses_with(node, lambda user, node=node: at[user] > at[node])
        if target is not None or not (node in sizes or is_given(node) or _is_new(node, root)):
            its = [target] if target is not None else node.all_input_nodes
            for group in [same[n] for n in its if n not in sizes and n.op != "placeholder"]:
                group |= same[node]
                for n in list(group):
                    same[n] = group
    return writes


def _shared(node: fx.Node, other: fx.Node) -> str:
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
    its = node.all_input_nodes
    return node.op == "call_function" and bool(its) and sizes.issuperset(its)


def _is_new(node: fx.Node, root: nn.Module) -> bool:
    """Whether a value is memory of its own for certain."""
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
    """Whether nothing computes it."""
    return node.op == "placeholder" or is_input(node)


def first_of(node: fx.Node) -> Any:
    """The first argument."""
    return [*node.args, *node.kwargs.values()][0]


def _written(node: fx.Node, root: nn.Module) -> Any:
    """What a node writes to in place."""
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
    if in_place or given.get("inplace") or node.target in (*AUGMENTED, operator.setitem):
        return first_of(node)
    return given.get("out")
