"""A module's graph, cut at its BatchNorm layers into levels.

    level(input) = 0
    level(node)  = max(level of what it takes), and one more for a BatchNorm

The moments of what a BatchNorm is given are known at the end of its level, and it is normalised in
the next. So each level is a small module by itself, and what later ones need is handed on between
them. No level changes what it was given: it writes to a copy, and later ones read the copy.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, fx, nn

from .._base import BUFFERS, PARAMETERS, module_vars
from .aliases import first_of, is_given, is_input, without_aliases
from .batch_norm import BATCH_NORMS, batch_norm_call, in_training, normalise
from .shell import TABLES
from .trace import AUGMENTED, name_of, place, watched


class Norm(NamedTuple):
    """A BatchNorm where it is called."""

    name: str
    place: str
    layer: Any  # the module, None where it is a function that is called
    level: int  # at whose end its moments are known
    statistics: tuple[Tensor, Tensor] | None
    affine: tuple[Tensor | None, Tensor | None] | None  # weight and bias; None: computed here
    momentum: float
    eps: float


class Level(NamedTuple):
    """What lies between one BatchNorm and the next.

    Args:
        module: Called with what it takes, and with what each of ``scaled`` normalises with.
        takes: The values that it is given, by name.
        scaled: BatchNorm layers whose moments are known by now.
        gives: What it returns first, for later ones or as a part of the output, by name.
        pools: What it returns after these: the BatchNorm layers whose moments come next.
    """

    module: nn.Module
    takes: list[str]
    scaled: list[Norm]
    gives: list[str]
    pools: list[Norm]


class CutGraph(NamedTuple):
    """A graph in levels.

    Args:
        levels: From the input to the output.
        norms: The BatchNorm layers in the order of their calls.
        inputs: Which of the tensors that it is called with has which name.
        outputs: The values that the output is made of, by name.
        made: Makes the output of these.
        places: Where in the module a value is computed.
    """

    levels: list[Level]
    norms: list[Norm]
    inputs: dict[str, int]
    outputs: list[str]
    made: Callable[..., Any]
    places: dict[str, str]


class _Graph(NamedTuple):
    """A graph with its nodes' places in it."""

    root: nn.Module
    nodes: list[fx.Node]
    level: dict[fx.Node, int]  # of constants, which do not depend on the input, CONSTANT
    norms: dict[fx.Node, Norm]
    writes: dict[fx.Node, tuple[fx.Node, list[fx.Node]]]  # to what, and what may be its memory
    again: set[fx.Node]  # what later levels compute again


CONSTANT = -1


def cut_graph(root: nn.Module, graph: fx.Graph) -> CutGraph:
    """The levels of a graph, and what else is needed to run them."""
    nodes = list(graph.nodes)
    whole = _Graph(root, nodes, {}, {}, without_aliases(nodes, root), set())
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
    whole.again.update(_again(whole))
    inputs: dict[str, int] = {n.name: n.args[1] for n in nodes if is_input(n)}  # pyright: ignore
    outputs, end = nodes[-1].all_input_nodes, fx.Graph()
    env = {n: end.placeholder(n.name) for n in outputs}
    end.output(fx.map_arg(nodes[-1].args[0], env.__getitem__))
    made: Any = fx.GraphModule({}, end)
    return CutGraph(
        [_level(whole, i, last) for i in range(last + 1)],
        [*whole.norms.values()],
        inputs,
        [n.name for n in outputs],
        made.forward,
        {n.name: place(n) for n in nodes},
    )


def _norm(node: fx.Node, level: int, root: nn.Module) -> Norm:
    call, where = batch_norm_call(node.args, node.kwargs), place(node)
    layer: Any = root.get_submodule(where.partition(" ")[0])
    pair, affine = (call["running_mean"], call["running_var"]), (call["weight"], call["bias"])
    computed = any(x is not None and _own(root, x) is None for x in affine)
    if any(x is not None and _own(root, x) is None for x in pair):
        raise ValueError(
            f"{where} calls batch_norm with running statistics that are no buffers of the module; "
            "expected such, or None."
        )
    return Norm(
        name=node.name,
        place=where,
        layer=layer if isinstance(layer, BATCH_NORMS) else None,
        level=level,
        statistics=None if None in pair else (_own(root, pair[0]), _own(root, pair[1])),
        affine=None if computed else (_own(root, affine[0]), _own(root, affine[1])),
        momentum=call["momentum"],
        eps=call["eps"],
    )


def _own(root: nn.Module, node: Any) -> Any:
    """The parameter or buffer that a node stands for, if it does."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    path, _, key = str(node.target).rpartition(".")
    own = module_vars(root.get_submodule(path))
    return own[PARAMETERS].get(key, own[BUFFERS].get(key)) if path else None


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
    gives = [n for n in whole.nodes if level[n] == here and _is_handed_on(whole, n)]
    if here == last:
        outputs = whole.nodes[-1].all_input_nodes
        gives = [n for n in outputs if not (is_input(n) or _is_handed_on(whole, n))]
    pools = {n: norm for n, norm in whole.norms.items() if norm.level == here}
    ends = [*gives, *map(_input, pools)]
    wanted = _wanted(whole, here, ends)
    takes = [n for n in wanted if is_input(n) or (level[n] < here and n not in whole.again)]
    norms = [n for n in wanted if n in whole.norms and n not in takes]
    env = {n: made.placeholder(n.name) for n in takes}
    scaling = {n: made.placeholder(f"scaling_{n.name}") for n in norms}

    def of(node: fx.Node) -> fx.Node:
        return env[node] if node in env else copy(node)  # a constant: wherever it is wanted

    def copy(node: fx.Node) -> fx.Node:
        own = of
        if node in whole.norms:
            call = batch_norm_call(node.args, node.kwargs)
            outside = whole.norms[node].affine is not None
            affine = (None, None) if outside else fx.map_arg((call["weight"], call["bias"]), of)
            its = of(call["input"]), scaling[node], *affine, call["eps"]
            env[node] = made.call_function(normalise, its)
            return env[node]
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

    for n in wanted:
        if n not in env:
            copy(n)
    made.output(tuple(map(of, ends)))
    return Level(
        _Between(fx.GraphModule(whole.root, made)),
        [n.name for n in takes],
        [whole.norms[n] for n in norms],
        [n.name for n in gives],
        [*pools.values()],
    )


def _set(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x


def _wanted(whole: _Graph, here: int, ends: list[fx.Node]) -> list[fx.Node]:
    """The nodes that a level has to do with, but for constants."""
    found: set[fx.Node] = set()
    unused = (n for n in whole.nodes if whole.level[n] == here and not n.users)
    below = [n for n in unused if n.op != "output"] + ends
    while below:
        node = below.pop()
        if node in found or whole.level[node] == CONSTANT or node.op == "placeholder":
            continue
        found.add(node)
        if whole.level[node] == here or node in whole.again:
            below += node.all_input_nodes
    return [n for n in whole.nodes if n in found]


def _is_handed_on(whole: _Graph, node: fx.Node) -> bool:
    here = whole.level[node]
    given = is_given(node) or node in whole.again or here == CONSTANT
    return not given and any(whole.level[user] > here for user in node.users)


def _input(norm: fx.Node) -> fx.Node:
    return batch_norm_call(norm.args, norm.kwargs)["input"]


def _alone(whole: _Graph, write: fx.Node) -> bool:
    """Whether nobody would see it if a level wrote to its tensor itself."""
    _, same = whole.writes[write]
    here = whole.level[write]
    return all(
        whole.level[n] == here != CONSTANT
        and not is_given(n)
        and all(whole.level[u] == here and u.op != "output" for u in n.users)
        for n in same
    )


# What is computed again where it is wanted ---------------------------------------------------


CHEAP_OPERATIONS = 4  # operations, for one value
_CHEAP = (
    "add sub mul truediv div neg relu relu6 sigmoid tanh silu elu leaky_relu hardtanh hardswish "
    "hardsigmoid cat concat"
)


def _again(whole: _Graph) -> set[fx.Node]:
    """What later levels compute again, from what is handed on to them all the same.

    So neither the sum in a residual block is kept beside what is summed, nor what is laid side by
    side in a dense one, nor the first convolution of an image, ten times as large.
    """
    again: set[fx.Node] = set()
    costs: dict[fx.Node, int] = {}  # of what can be computed from what is there in any case
    for node in whole.nodes:
        here = whole.level[node]
        if here == CONSTANT or is_given(node):
            costs[node] = 0
            continue
        if _is_cheap(whole, node):
            cost = 1 + sum(costs.get(it, CHEAP_OPERATIONS) for it in node.all_input_nodes)
            if cost <= CHEAP_OPERATIONS:
                costs[node] = cost
                again.add(node)
                continue
        if any(whole.level[user] > here for user in node.users):
            costs[node] = 0
    return again


def _is_cheap(whole: _Graph, node: fx.Node) -> bool:
    if node in whole.writes and not _alone(whole, node):
        return False
    if node in whole.norms:
        return True
    if node.op == "call_module":
        layer = whole.root.get_submodule(str(node.target))
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            few = layer.in_channels * math.prod(layer.stride)
            return is_input(first_of(node)) and layer.out_channels >= 4 * few
        return type(layer).__name__.lower() in _CHEAP_MODULES.split()
    name = name_of(node).rstrip("_")
    return name in _CHEAP.split() or (node.target in AUGMENTED and name[1:] in _CHEAP.split())


_CHEAP_MODULES = (
    "relu relu6 sigmoid tanh silu elu leakyrelu hardtanh hardswish hardsigmoid identity"
)
