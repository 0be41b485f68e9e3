"""The stages of a loss in legs: what a microbatch can go through before it has to wait.

A stage that reads what the leg pools begins a new one, since it has to wait for all microbatches;
a ``full`` stage is a leg of its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._shares import Cotangents
from ._shelf import Boundary
from ._stage import Stage, run_stage
from ._stages import Staged, given_the_batch
from ._tree import Tree, paths


class Leg(NamedTuple):
    """Some stages, one after the other."""

    stages: range
    whole: bool  # it sees the batch as a whole
    moves: bool  # the boundary after it is another one
    reads: tuple[str, ...]
    fixed: frozenset[str]  # those of them that are constants
    pools: tuple[Stage, ...]
    uses: frozenset[str] | None
    of_batch: bool  # what it is given is the batch, which has no cotangent


def legs(loss: Staged) -> list[Leg]:
    """The stages, grouped."""
    starts: list[int] = []
    pools: set[str] = set()
    for i, stage in enumerate(loss.stages):
        after_whole = i > 0 and loss.stages[i - 1].kind == "full"
        if i == 0 or after_whole or stage.kind == "full" or pools & set(stage.reads):
            starts.append(i)
            pools = set()
        pools |= {stage.name} - {""}
    stops = [*starts[1:], len(loss.stages)]
    return [_leg(loss, range(*ends)) for ends in zip(starts, stops, strict=True)]


def _leg(loss: Staged, stages: range) -> Leg:
    its: list[Stage] = [loss.stages[i] for i in stages]
    pools = tuple(stage for stage in its if stage.kind == "pooled")
    reads = dict.fromkeys(name for stage in its for name in stage.reads)
    moving = {name for stage in its for name in stage.reads if name not in stage.fixed}
    fixed = frozenset(reads) - moving
    uses = [stage.uses for stage in its]
    some = None if None in uses else frozenset[str]().union(*(names or () for names in uses))
    moves = any(stage.kind != "pooled" for stage in its)
    of_batch, whole = given_the_batch(loss)[stages[0]], its[0].kind == "full"
    return Leg(stages, whole, moves, tuple(reads), fixed, pools, some, of_batch)


def run_leg(
    loss: Staged, leg: Leg, params: Tree, x: Tree, values: Mapping[str, Any], rows: int
) -> tuple[Any, dict[str, Tree]]:
    """The boundary after a leg (of the last, the loss), and the shares that it pooled."""
    shares: dict[str, Tree] = {}
    for i in leg.stages:
        x, share = run_stage(loss.stages, i, params, x, values, rows)
        shares |= share
    return x, shares


# Boundaries ---------------------------------------------------------------


def join(parts: list[Boundary], what: str) -> Boundary:
    """The boundaries of all microbatches as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if not torch.compiler.is_dynamo_compiling() and part.spec != first.spec:
            raise ValueError(
                f"{what} sees all rows at once, but the boundary is {part.spec} in one microbatch "
                f"and {first.spec} in another; expected one structure."
            )
        for i, (x, y) in enumerate(zip(part.leaves, first.leaves, strict=True)):
            if isinstance(x, Tensor) and x.shape[1:] != y.shape[1:]:
                raise ValueError(
                    f"{what} sees all rows at once, but {paths(first.spec, 'boundary')[i]} has "
                    f"shape {tuple(x.shape)} in one microbatch and {tuple(y.shape)} in another; "
                    "expected the same but for the rows."
                )
    columns = zip(*(part.leaves for part in parts), strict=True)
    leaves = [torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns]
    return Boundary(leaves, first.spec, sum(part.rows for part in parts))


def split(whole: Boundary, sizes: list[int]) -> list[Boundary]:
    """The boundaries of microbatches of those sizes."""
    columns = zip(*(x.split(sizes) for x in whole.leaves), strict=True)
    return [
        Boundary(list(leaves), whole.spec, rows)
        for leaves, rows in zip(columns, sizes, strict=True)
    ]


def cotangents_of(parts: list[Boundary], sizes: list[int]) -> list[Boundary]:
    """The cotangents of boundaries, for microbatches of other sizes: of all rows, or of few."""
    joined: Cotangents = []
    for column in zip(*(part.leaves for part in parts), strict=True):
        some = next((x for x in column if x is not None), None)
        joined.append(
            None
            if some is None
            else torch.cat(
                [
                    some.new_zeros(part.rows, *some.shape[1:]) if x is None else x
                    for x, part in zip(column, parts, strict=True)
                ]
            )
        )
    if len(sizes) == 1:
        return [Boundary(joined, None, sizes[0])]
    pieces = [[None] * len(sizes) if x is None else x.split(sizes) for x in joined]
    return [Boundary([x[p] for x in pieces], None, rows) for p, rows in enumerate(sizes)]
