"""A module's operations, cut at its BatchNorm layers into levels.

    level(input)     = 0
    level(operation) = max(level of what it reads), and one more for a BatchNorm

The moments of what a BatchNorm is given are known at the end of its level, and it is normalised in
the next. So each level is a small program by itself, and what later ones need is handed on to them.
No level writes to what it was given: where forward writes in place, its program writes to a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch_norm import normalise
from .symbols import Symbol, value_of, values_in
from .trace import Operation


class Instruction(NamedTuple):
    """A function of symbols."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    gives: Symbol
    last: list[Symbol]  # what nobody reads after it


class Level(NamedTuple):
    """What lies between one BatchNorm and the next."""

    steps: list[Instruction]
    takes: list[Symbol]  # what it is given
    shared: list[Symbol]  # the module's tensors that it uses, and others that are captured
    scaled: list[Symbol]  # the BatchNorm layers that it runs, since their moments are known by now
    gives: list[Symbol]  # what later levels take, or the output is made of
    pools: list[Symbol]  # the BatchNorm layers whose moments come next


class _Graph(NamedTuple):
    """Operations, and what is known of each of them, by its value."""

    made: dict[Symbol, Operation]
    users: dict[Symbol, list[Symbol]]
    level: dict[Symbol, int]  # that of constants, which do not depend on the input, is CONSTANT
    repeated: set[Symbol]  # what later levels compute again
    seeded: bool


CONSTANT = -1
_OUTPUT = Symbol("output", None)


def run_steps(steps: Sequence[Instruction], known: dict[Symbol, Any]) -> None:
    """Run a program; ``known`` has the values that it is given, and then those that it made."""
    for func, args, kwargs, gives, last in steps:
        its = [known[x] if type(x) is Symbol else value_of(x, known) for x in args]
        known[gives] = func(*its, **{key: value_of(x, known) for key, x in kwargs.items()})
        for value in last:
            del known[value]


def levels_of(
    operations: Sequence[Operation], outputs: Sequence[Symbol], seeded: bool = False
) -> list[Level]:
    """The levels of some operations, from the input to the output, which is made of ``outputs``.

    Where it is ``seeded``, what draws random numbers draws those of its recorder.
    """
    made = {Symbol("made", i): operation for i, operation in enumerate(operations)}
    reads = [read for operation in operations for read in operation.reads()]
    inputs = {read: 0 for read in (*reads, *outputs) if read.kind == "input"}
    graph = _Graph(made=made, users={}, level=inputs, repeated=set(), seeded=seeded)
    users, level = graph.users, graph.level
    for value, operation in made.items():
        reads = operation.reads()
        for read in reads:
            users.setdefault(read, []).append(value)
        base = max((level.get(read, CONSTANT) for read in reads), default=CONSTANT)
        level[value] = base + operation.is_norm() if not operation.draws else max(base, 0)
    last = level[_OUTPUT] = max(0, *level.values())
    for value in outputs:  # all that the output is made of is handed on to the last level
        users.setdefault(value, []).append(_OUTPUT)
    graph.repeated.update(_repeated(graph))
    levels = [_level(graph, here, last) for here in range(last + 1)]
    return [level for level in levels if level.gives or level.pools]


# One level --------------------------------------------------------------------------------


def _level(graph: _Graph, here: int, last: int) -> Level:
    level, made, users = graph.level, graph.made, graph.users
    gives = [v for v in made if level[v] == here and _is_handed_on(graph, v)]
    if here == last:  # what the output is made of, but for what is at hand by then
        outputs = (v for v in made if _OUTPUT in users.get(v, ()))
        gives = [v for v in outputs if not _is_handed_on(graph, v)]
    pools = [v for v in made if made[v].is_norm() and level[v] == here + 1]
    ends = {*gives, *(made[v].kwargs["input"] for v in pools)}
    wanted = _wanted(graph, here, ends)
    takes = [v for v in wanted if v.kind == "input" or _is_taken(graph, v, here)]
    mine = sorted(v for v in wanted if v.kind == "made" and v not in takes)
    steps, left = [_step(graph, v) for v in mine], ends
    for step in reversed(steps):
        its = {step.gives, *values_in(*step.args, *step.kwargs.values())} - left
        step.last.extend(v for v in its if v.kind in ("input", "made"))
        left = left | its
    return Level(
        steps=steps,
        takes=sorted(takes) or [Symbol("input", 0)],  # for how many rows there are
        shared=sorted(v for v in wanted if v.kind in ("own", "captured")),
        scaled=[v for v in mine if made[v].is_norm()],
        gives=gives,
        pools=pools,
    )


def _wanted(graph: _Graph, here: int, ends: set[Symbol]) -> set[Symbol]:
    """The values that a level computes or takes."""
    found, below = set[Symbol](), [*ends]
    while below:
        value = below.pop()
        if value not in found:
            found.add(value)
            if value.kind == "made" and not _is_taken(graph, value, here):
                step = _step(graph, value)
                below += values_in(*step.args, *step.kwargs.values())
    return found


def _is_taken(graph: _Graph, value: Symbol, here: int) -> bool:
    """Whether a level is given what another one made."""
    return CONSTANT < graph.level.get(value, CONSTANT) < here and value not in graph.repeated


def _is_handed_on(graph: _Graph, value: Symbol) -> bool:
    """Whether later levels take a value, since they do not compute it again."""
    here = graph.level[value]
    if here == CONSTANT or value in graph.repeated:
        return False
    return any(graph.level[user] > here for user in graph.users.get(value, ()))


def _step(graph: _Graph, value: Symbol) -> Instruction:
    """An operation as a step of a program."""
    operation = graph.made[value]
    func, args, kwargs = operation.func, operation.args, operation.kwargs
    if operation.is_norm():
        affine = (None, None) if operation.affine() else (kwargs["weight"], kwargs["bias"])
        args = kwargs["input"], Symbol("scaling", value.at), *affine, kwargs["eps"]
        func, kwargs = normalise, {}
    if operation.writes is not None:
        func, args = partial(_on_copy, func), (operation.writes, *args)
    if operation.draws and graph.seeded:
        func = partial(_seeded, value.at, func)
    return Instruction(func=func, args=args, kwargs=kwargs, gives=value, last=[])


def _on_copy(func: Callable[..., Any], target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    copy = target.clone()
    named = {key: copy if x is target else x for key, x in kwargs.items()}
    func(*[copy if x is target else x for x in args], **named)
    return copy


def _seeded(seed: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return func(*args, **kwargs)


# What later levels compute again ------------------------------------------------------------


_MOST_OPERATIONS = 4  # no value is computed again by more
_CHEAP = (
    "add sub rsub mul truediv div neg relu relu6 sigmoid tanh silu elu leaky_relu hardtanh "
    "hardswish hardsigmoid cat concat"
)


def _repeated(graph: _Graph) -> set[Symbol]:
    """The values that later levels compute again, from what is handed on to them in any case.

    So a residual block's sum is not kept beside what is summed, nor a dense one's concatenation
    beside its parts, nor the first convolution of an image, which is ten times as large.
    """
    repeated: set[Symbol] = set()
    costs: dict[Symbol, int] = {}  # in operations, of what can be had from what is handed on
    for value, operation in graph.made.items():
        here = graph.level[value]
        if here == CONSTANT:
            costs[value] = 0
            continue
        if _is_cheap(operation):
            made = [v for v in operation.reads() if v.kind == "made"]
            cost = 1 + sum(costs.get(v, _MOST_OPERATIONS) for v in made)
            if cost <= _MOST_OPERATIONS:
                costs[value] = cost
                repeated.add(value)
                continue
        if any(graph.level[user] > here for user in graph.users.get(value, ())):
            costs[value] = 0
    return repeated


def _is_cheap(operation: Operation) -> bool:
    if operation.func in (F.conv1d, F.conv2d, F.conv3d):
        return operation.reads()[0].kind == "input" and operation.growth >= 4
    return operation.is_norm() or operation.name().rstrip("_") in _CHEAP.split()
