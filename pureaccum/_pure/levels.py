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

from . import batch_norm, symbols, trace


class Instruction(NamedTuple):
    """A function of symbols."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    gives: symbols.Symbol
    last: Sequence[symbols.Symbol] = ()  # what nobody reads after it

    def reads(self) -> list[symbols.Symbol]:
        """The values that it is given."""
        return symbols.values_in(*self.args, *self.kwargs.values())


class Level(NamedTuple):
    """What lies between one BatchNorm and the next."""

    steps: list[Instruction]
    takes: list[symbols.Symbol]  # what it is given
    shared: list[symbols.Symbol]  # the module's tensors that it uses, and others that are captured
    # the BatchNorm layers that it runs, since their moments are known by now
    scaled: list[symbols.Symbol]
    gives: list[symbols.Symbol]  # what later levels take, or the output is made of
    pools: list[symbols.Symbol]  # the BatchNorm layers whose moments come next


CONSTANT = -1  # the level of what does not depend on the input


def run_steps(steps: Sequence[Instruction], known: dict[symbols.Symbol, Any]) -> None:
    """Run a program; ``known`` has the values that it is given, and then those that it made."""
    for func, args, kwargs, gives, last in steps:
        its = [known[x] if type(x) is symbols.Symbol else symbols.value_of(x, known) for x in args]
        known[gives] = func(*its, **{key: symbols.value_of(x, known) for key, x in kwargs.items()})
        for value in last:
            del known[value]


def levels_of(
    operations: Sequence[trace.Operation], outputs: Sequence[symbols.Symbol], seeded: bool = False
) -> list[Level]:
    """The levels of some operations, from the input to the output, which is made of ``outputs``.

    Where it is ``seeded``, what draws random numbers draws those of its recorder.
    """
    plan = _Plan(operations, outputs, seeded)
    levels = map(plan.level_at, range(plan.last + 1))
    return [level for level in levels if level.gives or level.pools]


class _Plan:
    """In which level each value is made, and which values a level gives to later ones."""

    def __init__(
        self, operations: Sequence[trace.Operation], outputs: Sequence[symbols.Symbol], seeded: bool
    ) -> None:
        made = {symbols.Symbol("made", i): operation for i, operation in enumerate(operations)}
        self.steps = {value: _step(value, operation, seeded) for value, operation in made.items()}
        self.level: dict[symbols.Symbol, int] = {}
        read_in: dict[symbols.Symbol, int] = {}  # the last level that reads it
        for value, operation in made.items():
            reads = self.steps[value].reads()
            levels = [0 if x.kind == "input" else self.level.get(x, CONSTANT) for x in reads]
            base = max([CONSTANT, *levels])
            here = max(base, 0) if operation.draws else base + operation.is_norm()
            self.level[value] = here
            read_in |= {x: max(here, read_in.get(x, CONSTANT)) for x in reads}
        self.last = max([0, *self.level.values()])
        read_in |= dict.fromkeys(outputs, self.last)
        self.norms = [value for value, operation in made.items() if operation.is_norm()]
        self.given = self.given_by(made, read_in, outputs)

    def given_by(
        self,
        made: Mapping[symbols.Symbol, trace.Operation],
        read_in: dict[symbols.Symbol, int],
        outputs: Sequence[symbols.Symbol],
    ) -> dict[symbols.Symbol, int]:
        """The level that gives each value which a later one reads, or the output is made of."""
        of_batch = {v: x for v, x in made.items() if self.level[v] > CONSTANT}
        later = [v for v in of_batch if self.level[v] < read_in.get(v, CONSTANT)]
        again = _repeated(of_batch, later)
        handed_on = {v: self.level[v] for v in later if v not in again}
        return {v: handed_on.get(v, self.last) for v in made if v in handed_on or v in outputs}

    def level_at(self, here: int) -> Level:
        """The level that gives some values, and what some BatchNorm layers are given."""
        gives = [v for v in self.given if self.given[v] == here]
        pools = [v for v in self.norms if self.level[v] == here + 1]
        ends = {*gives, *(self.steps[v].args[0] for v in pools)}
        at_hand = {v for v in self.given if self.given[v] < here}
        mine, takes, shared = self.needed_by(ends, at_hand)
        return Level(
            steps=_forgetting([self.steps[v] for v in mine], ends),
            takes=takes or [symbols.Symbol("input", 0)],  # for how many samples there are
            shared=shared,
            scaled=[v for v in mine if self.steps[v].func is batch_norm.normalise],
            gives=gives,
            pools=pools,
        )

    def needed_by(
        self, ends: set[symbols.Symbol], at_hand: set[symbols.Symbol]
    ) -> tuple[list[symbols.Symbol], ...]:
        """The values that lead to some: those to compute, to take, and of the module."""
        mine, takes, shared, below = (
            set[symbols.Symbol](),
            set[symbols.Symbol](),
            set[symbols.Symbol](),
            [*ends],
        )
        while below:
            value = below.pop()
            if value.kind == "input" or value in at_hand:
                takes.add(value)
            elif value.kind in ("own", "captured"):
                shared.add(value)
            elif value in self.steps and value not in mine:
                mine.add(value)
                below += self.steps[value].reads()
        return sorted(mine), sorted(takes), sorted(shared)


def _forgetting(steps: Sequence[Instruction], ends: set[symbols.Symbol]) -> list[Instruction]:
    """The same program, which lets go of each value once nothing reads it any more."""
    program, later = list[Instruction](), {*ends}
    for step in reversed(steps):
        its = {step.gives, *step.reads()} - later
        program.append(step._replace(last=[v for v in its if v.kind in ("input", "made")]))
        later |= its
    return program[::-1]


def _step(value: symbols.Symbol, operation: trace.Operation, seeded: bool) -> Instruction:
    """An operation as a step of a program."""
    func, args, kwargs = operation.func, operation.args, operation.kwargs
    if operation.is_norm():
        affine = (None, None) if operation.affine() else (kwargs["weight"], kwargs["bias"])
        args = kwargs["input"], symbols.Symbol("scaling", value.at), *affine, kwargs["eps"]
        func, kwargs = batch_norm.normalise, {}
    if operation.writes is not None:
        func, args = partial(_on_copy, func), (operation.writes, *args)
    if operation.draws and seeded:
        func = partial(_seeded, value.at, func)
    return Instruction(func=func, args=args, kwargs=kwargs, gives=value)


def _on_copy(
    func: Callable[..., Any], target: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
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


def _repeated(
    made: Mapping[symbols.Symbol, trace.Operation], later: Sequence[symbols.Symbol]
) -> set[symbols.Symbol]:
    """The values that later levels compute again, from what is handed on to them in any case.

    So a residual block's sum is not kept beside what is summed, nor a dense one's concatenation
    beside its parts, nor the first convolution of an image, which is ten times as large.
    """
    repeated: set[symbols.Symbol] = set()
    costs = dict.fromkeys(later, 0)  # in operations, of what can be had from what is handed on
    for value, operation in made.items():
        if _is_cheap(operation):
            below = [v for v in operation.reads() if v.kind == "made" and v in made]
            cost = 1 + sum(costs.get(v, _MOST_OPERATIONS) for v in below)
            if cost <= _MOST_OPERATIONS:
                costs[value] = cost
                repeated.add(value)
    return repeated


def _is_cheap(operation: trace.Operation) -> bool:
    if operation.func in (F.conv1d, F.conv2d, F.conv3d):
        return operation.reads()[0].kind == "input" and operation.growth >= 4
    return operation.is_norm() or operation.name().rstrip("_") in _CHEAP.split()
