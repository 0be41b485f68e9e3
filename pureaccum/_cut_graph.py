"""A module's graph, cut at its BatchNorm layers into levels.

    level(input) = 0
    level(node)  = max(level of what it takes), and one more for a BatchNorm

The moments of what a BatchNorm is given are known at the end of its level, and it is normalised in
the next. So each level is a small module by itself, and what later ones need is handed on between
them. No level changes what it was given: it writes to a copy, and later ones read the copy.
"""

import operator
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ._batch_norm import normalise
from ._places import TABLES
from ._torch import module_vars
from ._traced import AUGMENTED, BATCH_NORMS, batch_norm_call, in_training, name_of, place, watched


class Norm(NamedTuple):
    """A BatchNorm where it is called."""

    name: str
    place: str
    layer: Any  # the module, None where it is a function that is called
    x: str  # what it is given, by name
    level: int  # at whose end its moments are known
    statistics: tuple[Tensor, Tensor] | None
    momentum: float
    eps: float


class Level(NamedTuple):
    """What lies between one BatchNorm and the next.

    Args:
        module: Called with what it takes, and with what each of ``scaled`` normalises with.
        takes: The values that it is given, by name.
        scaled: Those whose moments are known by now.
        gives: What it returns for later ones, and where in the module that is computed; the last
            one returns the output.
    """

    module: nn.Module
    takes: list[str]
    scaled: list[Norm]
    gives: dict[str, str]


class _Graph(NamedTuple):
    """A graph with its nodes' places in it."""

    root: nn.Module
    nodes: list[fx.Node]
    level: dict[fx.Node, int]  # of constants, which do not depend on the input, CONSTANT
    norms: dict[fx.Node, Norm]
    writes: dict[fx.Node, tuple[fx.Node, list[fx.Node]]]  # to what, and what may be its memory


CONSTANT = -1


def cut(root: nn.Module, graph: fx.Graph) -> tuple[list[Level], list[Norm], dict[str, int]]:
    """The levels; the BatchNorm layers in the order of their calls; which input has which name."""
    nodes = list(graph.nodes)
    whole = _Graph(root, nodes, {}, {}, _settle(nodes, root))
    for node in nodes:
        base = max((whole.level[it] for it in node.all_input_nodes), default=CONSTANT)
        if node.op == "placeholder":
            base = 0
        if node.target is F.batch_norm and in_training(F.batch_norm, node.args, node.kwargs):
            norm = _norm(node, base, root)
            if base > CONSTANT:
                whole.norms[node] = norm
                base += 1
            elif norm.statistics is not None:
                raise ValueError(
                    f"{norm.place} is given what does not depend on the batch; expected values of "
                    "its rows, or no running statistics."
                )
        whole.level[node] = base
    last = max(0, *whole.level.values())
    whole.level[nodes[-1]] = last
    inputs: dict[str, int] = {n.name: n.args[1] for n in nodes if _is_input(n)}  # pyright: ignore
    levels = [_level(whole, i, last) for i in range(last + 1)]
    return levels, [*whole.norms.values()], inputs


def _norm(node: fx.Node, level: int, root: nn.Module) -> Norm:
    call, where = batch_norm_call(node.args, node.kwargs), place(node)
    layer: Any = root.get_submodule(where.partition(" ")[0])
    pair = call["running_mean"], call["running_var"]
    if any(x is not None and x.op != "get_attr" for x in pair):
        raise ValueError(
            f"{where} calls batch_norm with running statistics that it computes; expected buffers "
            "of the module, or None."
        )
    return Norm(
        name=node.name,
        place=where,
        layer=layer if isinstance(layer, BATCH_NORMS) else None,
        x=call["input"].name,
        level=level,
        statistics=None if None in pair else tuple(_held(root, x.target) for x in pair),  # pyright: ignore
        momentum=call["momentum"],
        eps=call["eps"],
    )


def _held(root: nn.Module, path: Any) -> Any:
    return operator.attrgetter(path)(root)


# One level --------------------------------------------------------------------------------


class _Between(nn.Module):
    """The modules and tensors of a level, and its code."""

    def __init__(self, made: fx.GraphModule) -> None:
        super().__init__()
        for table in TABLES:
            vars(self)[table] = module_vars(made)[table]
        self.code: Any = type(made).forward  # the graph would lead back to its module

    def forward(self, *args: Any) -> Any:
        return self.code(self, *args)


def _level(whole: _Graph, here: int, last: int) -> Level:
    level, made = whole.level, fx.Graph()
    mine = [n for n in whole.nodes if level[n] == here and not _is_given(n) and n.op != "output"]
    ends = [whole.nodes[-1]] if here == last else []
    needed = {it for n in (*mine, *ends) for it in n.all_input_nodes}
    needed |= {_input(n) for n, norm in whole.norms.items() if norm.level == here}
    before = [n for n in whole.nodes if CONSTANT < level[n] < here or _is_input(n)]
    takes = [n for n in before if n in needed]
    env = {n: made.placeholder(n.name) for n in takes}
    norms = [n for n in mine if n in whole.norms]
    scaling = {n: made.placeholder(f"scaling_{n.name}") for n in norms}

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
        if n not in norms:
            copy(n)
            continue
        call = batch_norm_call(n.args, n.kwargs)
        affine = fx.map_arg((call["weight"], call["bias"]), of)
        given = of(call["input"]), scaling[n], *affine, call["eps"]
        env[n] = made.call_function(normalise, given)
    gives = [n for n in mine if any(level[user] > here for user in n.users)]
    result = fx.map_arg(ends[0].args[0], of) if ends else tuple(env[n] for n in gives)
    made.output(result)
    return Level(
        _Between(fx.GraphModule(whole.root, made)),
        [n.name for n in takes],
        [whole.norms[n] for n in norms],
        {n.name: place(n) for n in gives},
    )


def _input(norm: fx.Node) -> fx.Node:
    return batch_norm_call(norm.args, norm.kwargs)["input"]


def _alone(whole: _Graph, write: fx.Node) -> bool:
    """Whether nobody would see it if a level wrote to its tensor itself."""
    _, same = whole.writes[write]
    here = whole.level[write]
    return all(
        whole.level[n] == here != CONSTANT
        and not _is_given(n)
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
        if target is not None or not (node in sizes or _is_given(node) or _is_new(node, root)):
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


def _is_input(node: fx.Node) -> bool:
    return node.target is operator.getitem and getattr(node.args[0], "op", "") == "placeholder"


def _is_given(node: fx.Node) -> bool:
    return node.op == "placeholder" or _is_input(node)


def _first(node: fx.Node) -> Any:
    return [*node.args, *node.kwargs.values()][0]


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
