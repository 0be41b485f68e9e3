"""All microbatches through all stages, and any of them through one leg again.

The way forward records nothing. It leaves the boundaries, the values that were pooled, and what
is needed to draw the same random numbers again.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ._legs import Leg, join, run_leg, split
from ._passes import Engine, Wrt
from ._pullback import Pullback, Sums, as_torch_func_would, pullback
from ._replay import Drawn, noting, replaying
from ._shares import is_differentiable, more, pooled_value
from ._shelf import Boundary, Shelf
from ._stage import label
from ._stages import Staged
from ._torch import transform_active, version
from ._tree import Tree, flatten, unflatten


class Pass(NamedTuple):
    """What stays the same while a batch goes through the stages and back."""

    loss: Staged
    legs: list[Leg]
    at: list[list[int]]  # the leaves of params that each leg may use
    params: optree.PyTreeSpec
    wrt: Wrt
    engine: Engine
    given: Mapping[str, Any]
    keys: list[Tensor]  # of the rows of each microbatch, if there are any
    shelf: Shelf
    devices: frozenset[torch.device]


class Kept(NamedTuple):
    """What the way forward leaves for the way back."""

    boundaries: list[list[Boundary]]  # before each leg
    drawn: list[list[list[Drawn]]]  # in each leg but the last
    values: dict[str, Tree]
    shares: dict[str, Any]  # of those values that are merged by a function


def forward(through: Pass, batch: list[Boundary]) -> Kept:
    """Everything but the last leg."""
    kept = Kept([], [], {}, {})
    parts, sizes, shelf = batch, [part.rows for part in batch], through.shelf
    for n, leg in enumerate(through.legs):
        if leg.whole:
            what = label(through.loss.stages, leg.stages[0])
            parts = [join(list(shelf.fetch(parts)), what)]
        kept.boundaries.append(parts)
        if n + 1 == len(through.legs):
            return kept
        after: list[Boundary] = []
        drawn: list[list[Drawn]] = []
        so_far: dict[str, Any] = {}
        shares: dict[str, Tree] = {}
        with unchanged(through, n, parts, kept.values):
            for p, part in enumerate(shelf.fetch(list(parts))):

                def run(p: int = p, part: Boundary = part, n: int = n) -> Any:
                    if p > 0 or through.engine == "autograd" or transform_active():
                        return run_part(through, n, p, part, kept.values)
                    return as_torch_func_would(lambda: run_part(through, n, p, part, kept.values))

                (x, shares), numbers = noting(run, through.devices)
                drawn.append(numbers)
                for stage in leg.pools:
                    so_far[stage.name] = more(stage, so_far.get(stage.name), shares[stage.name])
                if leg.moves:
                    known = list(zip(part.leaves, parts[p].leaves, strict=True))
                    after.append(Boundary(*flatten(x), part.rows))
                    if not leg.whole:
                        after[p] = shelf.put(after[p], known)
        kept.drawn.append(drawn)
        for stage in leg.pools:
            kept.values[stage.name] = pooled_value(stage, so_far[stage.name], shares[stage.name])
            if stage.merge is not None:
                kept.shares[stage.name] = so_far[stage.name]
        if leg.whole:
            after = [shelf.put(part) for part in split(after[0], sizes)]
        parts = after if leg.moves else list(parts)
    raise AssertionError("a loss has a last leg")


class Again(NamedTuple):
    """One microbatch through one leg, with a way back."""

    back: Pullback
    reads: list[tuple[str, int]]  # the leaf of a pooled value that each last gradient is of


def again(
    through: Pass,
    n: int,
    p: int,
    part: Boundary,
    kept: Kept,
    sums: Sums,
    last: Callable[[Any], tuple[list[Tensor], Any]] | None = None,
) -> Again:
    """One microbatch through one leg, with a way back.

    Args:
        through: What stays the same.
        n: Which leg.
        p: Which microbatch.
        part: The boundary before it.
        kept: What the way forward left.
        sums: What the gradients of the parameters go into.
        last: Takes apart what the last leg gives, the loss.
    """
    leg = through.legs[n]
    at = inside(through, n, part)
    read = {
        name: flatten(kept.values[name])
        for name in leg.reads
        if name in kept.values and name not in leg.fixed
    }
    places = [
        (name, i)
        for name, (values, _) in read.items()
        for i, value in enumerate(values)
        if is_differentiable(value)
    ]
    others = [*(part.leaves[i] for i in at), *(read[name][0][i] for name, i in places)]

    def run(params: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], Any]:
        own = list(part.leaves)
        for i, x in zip(at, given, strict=False):
            own[i] = x
        pooled = {name: list(values) for name, (values, _) in read.items()}
        for (name, i), x in zip(places, given[len(at) :], strict=True):
            pooled[name][i] = x
        moving = {name: unflatten(read[name][1], its) for name, its in pooled.items()}
        values = {**kept.values, **moving}
        begun = Boundary(own, part.spec, part.rows)
        out, shares = run_part(through, n, p, begun, values, params)
        if last is not None:
            return last(out)
        outs = flatten(out)[0] if leg.moves else []
        for stage in leg.pools:
            outs = outs + flatten(shares[stage.name])[0]
        return [x for x in outs if is_differentiable(x)], ()

    # At top level torch.func has seen the first microbatch, and refused what it refuses; the others
    # take half the time without it.
    by_func = transform_active() or (last is not None and p == 0 and through.engine == "func")
    with replaying(kept.drawn[n][p] if last is None else []):
        engine = "func" if by_func else "autograd"
        back = pullback(run, through.wrt, through.at[n], others, sums, engine)
    return Again(back, places)


def inside(through: Pass, n: int, part: Boundary) -> list[int]:
    """Which leaves of the boundary before a leg have a cotangent; those of the batch have none."""
    own = [] if through.legs[n].of_batch else part.leaves
    return [i for i, x in enumerate(own) if is_differentiable(x)]


def run_part(
    through: Pass,
    n: int,
    p: int,
    part: Boundary,
    values: Mapping[str, Tree],
    leaves: list[Tensor] | None = None,
) -> tuple[Any, dict[str, Tree]]:
    """One microbatch through one leg: the boundary after it, or the loss, and what it pooled."""
    leg, known = through.legs[n], _read(through, n, values)
    if through.keys and "keys" in leg.reads:
        known["keys"] = torch.cat(through.keys) if leg.whole else through.keys[p]
    params = unflatten(through.params, through.wrt.leaves if leaves is None else leaves)
    return run_leg(through.loss, leg, params, unflatten(part.spec, part.leaves), known, part.rows)


def _read(through: Pass, n: int, values: Mapping[str, Tree]) -> dict[str, Any]:
    """What a leg reads of what there was before it."""
    known = {**through.given, **values} if through.given else values
    return {name: known[name] for name in through.legs[n].reads if name in known}


@contextmanager
def unchanged(
    through: Pass, n: int, parts: list[Boundary], values: Mapping[str, Tree]
) -> Generator[None]:
    """Raise if a leg writes to what it is given: other microbatches, or it itself, need that."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    given = {
        "the boundary": [x for part in parts for x in part.leaves],
        "a value that it reads": flatten(_read(through, n, values))[0],
        "a parameter": [through.wrt.leaves[i] for i in through.at[n]],
    }
    before = [_versions(tensors) for tensors in given.values()]
    try:
        yield
    except RuntimeError as error:
        if "mutate a captured Tensor" not in str(error):
            raise
        raise _written(through, n, "what it is given or captures") from error
    for what, tensors, versions in zip(given, given.values(), before, strict=True):
        if _versions(tensors) != versions:
            raise _written(through, n, what)


def _written(through: Pass, n: int, what: str) -> RuntimeError:
    where = " or ".join(label(through.loss.stages, i) for i in through.legs[n].stages)
    return RuntimeError(
        f"{where} changed {what} in place, which other microbatches are given, too, and the stage "
        "itself when it is computed again for the gradient. Use the operation that gives a new "
        "tensor: relu in place of relu_, x = x + y in place of x += y, inplace=False; a BatchNorm "
        "in training mode is pa.batch_norm, or pa.staged_from(module, ...)."
    )


def _versions(tensors: list[Any]) -> list[int | None]:
    return [version(x) for x in tensors if isinstance(x, Tensor)]
