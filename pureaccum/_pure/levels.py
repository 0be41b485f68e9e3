"""A module's graph, cut at its BatchNorm layers into levels.

    level(input) = 0
    level(node)  = max(level of what it takes), and one more for a BatchNorm

The moments of what a BatchNorm is given are known at the end of its level, and it is normalised in
the next. So each level is a small module by itself, and what later ones need is handed on to them.
No level changes what it was given: it writes to a copy, and later ones read the copy.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, fx, nn

from .._base import BUFFERS, PARAMETERS, module_vars
from .aliases import Write, first_of, is_given, is_input, without_aliases
from .batch_norm import BATCH_NORMS, batch_norm_call, in_training, normalise
from .shell import TABLES
from .trace import AUGMENTED, name_of, place, watched


class Norm(NamedTuple):
    """A BatchNorm where it is called."""

    name: str
    place: str
    layer: Any  # the BatchNorm that calls it; None where another module does
    level: int  # at whose end its moments are known
    statistics: tuple[Tensor, Tensor] | None
    affine: tuple[Tensor | None, Tensor | None] | None  # weight and bias; None: computed here
    momentum: float
    eps: float


class Level(NamedTuple):
    """What lies between one BatchNorm and the next.

    Args:
        module: Called with what it takes, and with the scaling of each of ``scaled``.
        takes: The values that it is given, by name.
        scaled: BatchNorm layers that it runs, since their moments are known by now.
        gives: What it returns first, for later levels or as a part of the output, by name.
        pools: The BatchNorm layers whose moments come next; it returns their inputs after these.
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
        inputs: For each input by name, which of the tensors that the graph is called with it is.
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
    """A graph, and the level of each of its nodes."""

    root: nn.Module
    nodes: list[fx.Node]
    level: dict[fx.Node, int]  # that of constants, which do not depend on the input, is CONSTANT
    norms: dict[fx.Node, Norm]
    writes: dict[fx.Node, Write]
    repeated: set[fx.Node]  # what later levels compute again


CONSTANT = -1


def cut_graph(root: nn.Module, graph: fx.Graph) -> CutGraph:
    """Cut a graph into levels."""
    nodes = list(graph.nodes)
    output = nodes[-1]
    whole = _Graph(
        root=root,
        nodes=nodes,
        level={},
        norms={},
        writes=without_aliases(nodes, root),
        repeated=set(),
    )
    level = whole.level
    for node in nodes:
        base = max((level[it] for it in node.all_input_nodes), default=CONSTANT)
        level[node] = 0 if node.op == "placeholder" else base
        if node.target is F.batch_norm and in_training(F.batch_norm, node.args, node.kwargs):
            norm = _norm(node, base, root)
            if base > CONSTANT:
                whole.norms[node] = norm
                level[node] += 1
            elif norm.statistics is not None:
                raise ValueError(
                    f"{norm.place} is given what does not depend on the batch; expected values of "
                    "its rows, or no running statistics."
                )
    last = level[output] = max(0, *level.values())  # all that it is made of is handed on to there
    whole.repeated.update(_repeated(whole))
    end = fx.Graph()
    ends = {n: end.placeholder(n.name) for n in output.all_input_nodes}
    end.output(fx.map_arg(output.args[0], ends.__getitem__))
    made: Any = fx.GraphModule({}, end)
    return CutGraph(
        levels=[_level(whole, here, last) for here in range(last + 1)],
        norms=[*whole.norms.values()],
        inputs={n.name: n.args[1] for n in nodes if is_input(n)},  # pyright: ignore
        outputs=[n.name for n in ends],
        made=made.forward,
        places={n.name: place(n) for n in nodes},
    )


def _norm(node: fx.Node, level: int, root: nn.Module) -> Norm:
    call, where = batch_norm_call(node.args, node.kwargs), place(node)
    layer: Any = root.get_submodule(where.partition(" ")[0])
    pair, affine = (call["running_mean"], call["running_var"]), (call["weight"], call["bias"])
    computed = any(x is not None and _tensor_of(root, x) is None for x in affine)
    if any(x is not None and _tensor_of(root, x) is None for x in pair):
        raise ValueError(
            f"{where} calls batch_norm with running statistics that are no buffers of the module; "
            "expected such, or None."
        )
    return Norm(
        name=node.name,
        place=where,
        layer=layer if isinstance(layer, BATCH_NORMS) else None,
        level=level,
        statistics=None if None in pair else (_tensor_of(root, pair[0]), _tensor_of(root, pair[1])),
        affine=None if computed else (_tensor_of(root, affine[0]), _tensor_of(root, affine[1])),
        momentum=call["momentum"],
        eps=call["eps"],
    )


def _tensor_of(root: nn.Module, node: Any) -> Any:
    """The parameter or buffer of the module that a node stands for, if it does."""
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
    if here == last:  # what the output is made of, but for what is at hand by then
        outputs = whole.nodes[-1].all_input_nodes
        gives = [n for n in outputs if not (is_input(n) or _is_handed_on(whole, n))]
    pools = {n: norm for n, norm in whole.norms.items() if norm.level == here}
    ends = [*gives, *map(_input_of, pools)]
    wanted = _wanted(whole, here, ends)
    takes = [n for n in wanted if is_input(n) or (level[n] < here and n not in whole.repeated)]
    norms = [n for n in wanted if n in whole.norms and n not in takes]
    copies = {n: made.placeholder(n.name) for n in takes}
    scaling = {n: made.placeholder(f"scaling_{n.name}") for n in norms}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # a constant is copied where it is first wanted
            copies[node] = norm(node) if node in whole.norms else copy(node)
        return copies[node]

    def norm(node: fx.Node) -> fx.Node:
        call = batch_norm_call(node.args, node.kwargs)
        affine: Any = None, None  # the layer's own is a part of the scaling
        if whole.norms[node].affine is None:
            affine = fx.map_arg((call["weight"], call["bias"]), copy_of)
        its = copy_of(call["input"]), scaling[node], *affine, call["eps"]
        return made.call_function(normalise, its)

    def copy(node: fx.Node) -> fx.Node:
        written: dict[fx.Node, fx.Node] = {}
        if node in whole.writes and not _is_unseen(whole, node):
            target = whole.writes[node].target
            written[target] = made.call_method("clone", (copy_of(target),))
        new = made.node_copy(node, lambda it: written.get(it) or copy_of(it))
        if node.target is operator.setitem:
            new.target = _set
        elif node.op == "call_function":
            new.target = watched(node.target)
        return new

    for n in wanted:
        copy_of(n)
    made.output(tuple(map(copy_of, ends)))
    return Level(
        module=_Between(fx.GraphModule(whole.root, made)),
        takes=[n.name for n in takes],
        scaled=[whole.norms[n] for n in norms],
        gives=[n.name for n in gives],
        pools=[*pools.values()],
    )


def _set(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x  # what reads x afterwards reads this node


def _wanted(whole: _Graph, here: int, ends: list[fx.Node]) -> list[fx.Node]:
    """The nodes that a level computes or takes, but for constants."""
    found: set[fx.Node] = set()
    # What nobody reads runs too, since it may raise.
    unused = (n for n in whole.nodes if whole.level[n] == here and not n.users)
    below = [n for n in unused if n.op != "output"] + ends
    while below:
        node = below.pop()
        if node in found or whole.level[node] == CONSTANT or node.op == "placeholder":
            continue
        found.add(node)
        if whole.level[node] == here or node in whole.repeated:
            below += node.all_input_nodes
    return [n for n in whole.nodes if n in found]


def _is_handed_on(whole: _Graph, node: fx.Node) -> bool:
    """Whether later levels take a node, since they neither are given it nor compute it again."""
    here = whole.level[node]
    at_hand = is_given(node) or node in whole.repeated or here == CONSTANT
    return not at_hand and any(whole.level[user] > here for user in node.users)


def _input_of(norm: fx.Node) -> fx.Node:
    return batch_norm_call(norm.args, norm.kwargs)["input"]


def _is_unseen(whole: _Graph, write: fx.Node) -> bool:
    """Whether a level may write to the tensor itself: only its own nodes could see it."""
    here = whole.level[write]
    return all(
        whole.level[n] == here != CONSTANT
        and not is_given(n)
        and all(whole.level[u] == here and u.op != "output" for u in n.users)
        for n in whole.writes[write].memory
    )


# What later levels compute again ------------------------------------------------------------


_MOST_OPERATIONS = 4  # no value is computed again by more
_CHEAP = (
    "add sub mul truediv div neg relu relu6 sigmoid tanh silu elu leaky_relu hardtanh hardswish "
    "hardsigmoid cat concat"
)
_CHEAP_MODULES = (
    "relu relu6 sigmoid tanh silu elu leakyrelu hardtanh hardswish hardsigmoid identity"
)


def _repeated(whole: _Graph) -> set[fx.Node]:
    """The nodes that later levels compute again, from what is handed on to them in any case.

    So a residual block's sum is not kept beside what is summed, nor a dense one's concatenation
    beside its parts, nor the first convolution of an image, which is ten times as large.
    """
    repeated: set[fx.Node] = set()
    costs: dict[fx.Node, int] = {}  # in operations, of what can be had from what is handed on
    for node in whole.nodes:
        here = whole.level[node]
        if here == CONSTANT or is_given(node):
            costs[node] = 0
            continue
        if _is_cheap(whole, node):
            cost = 1 + sum(costs.get(it, _MOST_OPERATIONS) for it in node.all_input_nodes)
            if cost <= _MOST_OPERATIONS:
                costs[node] = cost
                repeated.add(node)
                continue
        if any(whole.level[user] > here for user in node.users):
            costs[node] = 0
    return repeated


def _is_cheap(whole: _Graph, node: fx.Node) -> bool:
    if node in whole.writes and not _is_unseen(whole, node):
        return False
    if node in whole.norms:
        return True
    if node.op == "call_module":
        layer = whole.root.get_submodule(str(node.target))
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            even = layer.in_channels * math.prod(layer.stride)  # with an output as large as x
            return is_input(first_of(node)) and layer.out_channels >= 4 * even
        return type(layer).__name__.lower() in _CHEAP_MODULES.split()
    name = name_of(node).rstrip("_")
    if node.target in AUGMENTED:
        name = name.removeprefix("i")
    return name in _CHEAP.split()
