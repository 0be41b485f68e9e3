"""A module's graph, cut at its BatchNorm layers into levels.

    level(input) = 0
    level(node)  = max(level of what it takes), and one more for a BatchNorm

What a BatchNorm is given is pooled at the end of its level and normalised in the next. So each
level is a small module by itself, and what later ones need is handed on between them. No level
changes what it was given: it writes to a copy, and later ones read the copy.
"""

import operator
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from ._batch_norm import normalise
from ._traced import AUGMENTED, couples, name_of, place, watched


class Call(NamedTuple):
    """A BatchNorm where it is called: ``x`` is what it is given, by name."""

    path: str
    layer: Any
    x: str
    level: int  # at whose end x is pooled
    moments: str


class Level(NamedTuple):
    """What lies between one BatchNorm and the next.

    Args:
        module: Called with what it takes, and with the moments that it normalises with.
        takes: The values that it is given.
        moments: The names of the moments.
        gives: What it returns for later ones; the last one returns the output.
        passes: What earlier ones gave and later ones need.
    """

    module: fx.GraphModule
    takes: list[str]
    moments: list[str]
    gives: list[str]
    passes: list[str]


class _Graph(NamedTuple):
    """A graph with its nodes' places in it."""

    root: nn.Module
    nodes: list[fx.Node]
    level: dict[fx.Node, int]  # of constants, which do not depend on the input, CONSTANT
    calls: dict[fx.Node, Call]
    writes: dict[fx.Node, tuple[fx.Node, list[fx.Node]]]  # to what, and what may be its memory


CONSTANT = -1
INPUTS = "given"  # the one argument of the graph


def cut(root: nn.Module, graph: fx.Graph) -> tuple[list[Level], list[Call]]:
    """The levels, and the BatchNorm layers in the order in which they are called."""
    nodes = list(graph.nodes)
    whole = _Graph(root, nodes, {}, {}, _settle(nodes, root))
    for node in nodes:
        base = max((whole.level[it] for it in node.all_input_nodes), default=CONSTANT)
        layer = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.op == "placeholder":
            base = 0
        if layer is not None and couples(layer):
            x, path = _first(node), str(node.target)
            if base == CONSTANT:
                raise ValueError(
                    f"{path} (BatchNorm) is given what does not depend on the batch; expected "
                    "values of its rows, which are pooled over all microbatches."
                )
            times = sum(call.layer is layer for call in whole.calls.values()) + 1
            moments = f"moments of {path}" + (f", call {times}" if times > 1 else "")
            whole.calls[node] = Call(path, layer, x.name, base, moments)
            base += 1
        whole.level[node] = base
    last = max(0, *whole.level.values())
    whole.level[nodes[-1]] = last
    levels = [_level(whole, i, last) for i in range(last + 1)]
    return levels, list(whole.calls.values())


def _first(node: fx.Node) -> Any:
    return [*node.args, *node.kwargs.values()][0]


# One level --------------------------------------------------------------------------------


def _level(whole: _Graph, here: int, last: int) -> Level:
    level, made = whole.level, fx.Graph()
    mine = [n for n in whole.nodes if level[n] == here and n.op not in ("placeholder", "output")]
    ends = [whole.nodes[-1]] if here == last else []
    before = [n for n in whole.nodes if CONSTANT < level[n] < here]
    needed = {it for n in (*mine, *ends) for it in n.all_input_nodes}
    takes = [n for n in whole.nodes if n in needed and (n in before or n.op == "placeholder")]
    env = {n: made.placeholder(n.name) for n in takes}
    calls = [n for n in mine if n in whole.calls]
    moments = {n: made.placeholder(f"moments_{n.name}") for n in calls}

    def of(node: fx.Node) -> fx.Node:
        return env[node] if node in env else copy(node)  # a constant: wherever it is wanted

    def copy(node: fx.Node) -> fx.Node:
        own = of
        if node in whole.writes and not _alone(whole, node):
            target = whole.writes[node][0]
            aside = made.call_method("clone", (of(target),))
            own = lambda it: aside if it is target else of(it)  # noqa: E731
        env[node] = made.node_copy(node, own)
        if node.target is operator.setitem:
            env[node].target = _set
        elif node.op == "call_function":
            env[node].target = watched(node.target)
        return env[node]

    for n in mine:
        if n not in whole.calls:
            copy(n)
            continue
        layer = whole.calls[n].layer
        has = dict(layer.named_parameters(recurse=False))
        pair = [made.get_attr(f"{n.target}.{k}") if k in has else None for k in ("weight", "bias")]
        env[n] = made.call_function(normalise, (of(_first(n)), moments[n], *pair, layer.eps))
    gives, passes = (
        [n for n in some if any(level[user] > here for user in n.users)] for some in (mine, before)
    )
    result = fx.map_arg(ends[0].args[0], of) if ends else tuple(env[n] for n in gives)
    made.output(result)
    return Level(
        fx.GraphModule(whole.root, made),
        [n.name for n in takes],
        [whole.calls[n].moments for n in calls],
        [n.name for n in gives],
        [n.name for n in passes if n.op != "placeholder"],
    )


def _alone(whole: _Graph, write: fx.Node) -> bool:
    """Whether nobody would see it if a level wrote to its tensor itself."""
    _, same = whole.writes[write]
    here = whole.level[write]
    return all(
        whole.level[n] == here != CONSTANT
        and not _is_input(n)
        and all(whole.level[u] == here and u.op != "output" for u in n.users)
        for n in same
    )


def _set(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x


# What is written to, and what may be the same memory ------------------------------------------


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


def _settle(nodes: list[fx.Node], root: nn.Module) -> dict[fx.Node, tuple[fx.Node, list[fx.Node]]]:
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
        if target is not None or not (node in sizes or _is_input(node) or _is_new(node, root)):
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
            f"{what} to its own {other.target}, but each stage runs twice, and would write twice. "
            "Keep such a state outside of the module."
        )
    return (
        f"{what} to a tensor that is read again as {other.name!r}, perhaps through a view or under "
        "another name, which stages cannot follow. Use the operation that gives a new tensor: "
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


def _is_input(node: fx.Node) -> bool:
    its = node.all_input_nodes
    return len(its) == 1 and its[0].op == "placeholder"


def _written(node: fx.Node, root: nn.Module) -> Any:
    """What a node writes to in place."""
    if node.op == "call_module":
        layer = root.get_submodule(str(node.target))
        return _first(node) if getattr(layer, "inplace", False) else None
    if node.op not in ("call_function", "call_method"):
        return None
    name, given = name_of(node), {**node.kwargs}
    if node.op == "call_function" and callable(node.target):
        with suppress(TypeError, ValueError):  # built in, without a signature
            given |= signature(node.target).bind(*node.args, **node.kwargs).arguments
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or given.get("inplace") or node.target in (*AUGMENTED, operator.setitem):
        return _first(node)
    return given.get("out")
