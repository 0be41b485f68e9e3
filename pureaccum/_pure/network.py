"""The levels of a module, each a microbatched function, and the proof that they are the module.

A trace is made for each batch, so that it is what the module does now. That its levels do the same,
with moments that are merged and nothing written to, is proved by numbers: where a trace has another
structure than those before, or microbatches have another size, the levels are run for one of them,
by its own moments, and have to return the rows that the module returned.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base import generators, paths, restore, unnoticed
from .._core import unguarded
from .batch_norm import (
    BatchMoments,
    Scaling,
    Share,
    moments_of,
    scaling_of,
    share_of_rows,
)
from .levels import Level, Norm, Step, levels_of, run_steps
from .recorded_module import Batch, Trace, plain_tensor
from .shell import own_tensor
from .symbols import ROWS, Value


InParts = Callable[..., Callable[..., Any]]  # microbatch, with its size


class Network(NamedTuple):
    """The levels of a module that couples rows."""

    trace: Trace
    outs: dict[Value, str]  # what the module returns, by name
    levels: list[Level]
    norms: dict[Value, Norm]
    last_read: dict[Value, int]  # the level after which nobody reads a value


class Notes:
    """What a call notes of its levels. No tuple: it is one argument, which is not copied."""

    def __init__(self) -> None:
        self.moments: dict[Value, BatchMoments] = {}
        # Of what is normalised: its shape, its dtype, and how many numbers a row has per channel.
        self.looks: dict[Value, tuple[torch.Size, torch.dtype, int]] = {}
        self.folded: set[Value] = set()  # what has several rows for each of the batch


def network_of(trace: Trace) -> Network:
    """The levels of a trace."""
    names = paths(trace.spec, "out")
    for name, out in zip(names, trace.outs, strict=True):
        if not isinstance(out, Value) or out.kind in ("own", "captured"):
            raise ValueError(no_rows(name, out, "any number of"))
    levels, norms = levels_of(trace.operations, trace.outs, trace.sizes)
    levels = [level for level in levels if level.gives or level.pools]
    return Network(
        trace=trace,
        outs=dict(zip(trace.outs, names, strict=True)),
        levels=levels,
        norms=norms,
        last_read={value: k for k, level in enumerate(levels) for value in level.takes},
    )


def run_levels(
    network: Network, batch: Batch, in_parts: InParts, group: Any
) -> tuple[list[Tensor], Notes]:
    """Run all levels; returns the leaves of what the module returns."""
    if not sum(batch.sizes) and group is None:
        place = next(iter(network.norms.values())).place
        raise ValueError(f"{place} was given a batch without rows.")
    notes, scaling = Notes(), dict[Value, Scaling]()
    shared = {Value("own", name): x for name, x in batch.own.items()}
    shared |= {Value("captured", i): x for i, x in enumerate(network.trace.captured)}
    values = {Value("input", i): x for i, x in enumerate(batch.given)}
    for k, level in enumerate(network.levels):
        call = partial(_call_level, network, level)
        microbatched = in_parts(call, batch_argnums=3, reduce=("concat", "stack"))
        known = [scaling[norm.value] for norm in level.scaled]
        with unguarded():  # what would be written to was seen when it was traced
            gives, shares = microbatched(
                notes, [shared[v] for v in level.shared], known, [values[v] for v in level.takes]
            )
        for value in level.takes:
            if network.last_read[value] == k and value not in network.outs:
                del values[value]  # its memory is free from here on
        values |= zip(level.gives, gives, strict=True)
        for norm, share in zip(level.pools, shares, strict=True):
            _, dtype, each = notes.looks[norm.value]
            moments = moments_of(share, [each * size for size in batch.sizes], group)
            affine = [None if x is None else batch.own[x] for x in norm.affine() or (None, None)]
            notes.moments[norm.value] = moments
            scaling[norm.value] = scaling_of(moments, *affine, norm.call["eps"], dtype)
    return [values[value] for value in network.trace.outs], notes


def _call_level(
    network: Network,
    level: Level,
    notes: Notes,
    shared: Sequence[Tensor],
    scaling: Sequence[Scaling],
    rows: Sequence[Tensor],
) -> tuple[list[Tensor], list[Share]]:
    """Run a level for one microbatch."""
    count = rows[0].shape[0]
    known: dict[Value, Any] = {ROWS: count, **dict(zip(level.shared, shared, strict=True))}
    taken = zip(level.takes, rows, strict=True)
    known |= {v: x.flatten(0, 1) if v in notes.folded else x for v, x in taken}
    scaled = zip(level.scaled, scaling, strict=True)
    known |= {Value("scaling", norm.value.at): its for norm, its in scaled}
    run_steps(level.steps, known)
    gives: list[Tensor] = []
    for value in level.gives:
        x = known[value]
        if value not in network.outs and x.dim() and x.shape[0] > count > 0 == x.shape[0] % count:
            notes.folded.add(value)
            x = x.unflatten(0, (count, -1))
        if not has_rows(x, count):
            operation = network.trace.operations[value.at]
            raise ValueError(
                no_rows(network.outs[value], x, count)
                if value in network.outs
                else f"{operation.name()!r} in {operation.place} has shape {tuple(x.shape)} for "
                f"{count} rows; what lies between two BatchNorm layers has one row per sample "
                "along dim 0."
            )
        gives.append(x)
    with unnoticed():  # each look at a shape would be asked of the modes around
        pooled = [known[norm.call["input"]] for norm in level.pools]
        looks = [(x.shape, x.dtype) for x in pooled]
    shares: list[Share] = []
    for norm, x, (shape, dtype) in zip(level.pools, pooled, looks, strict=True):
        each = shape.numel() // (shape[1] * count) if count else math.prod(shape[2:])
        notes.looks[norm.value] = shape, dtype, each
        shares.append(share_of_rows(x, len(shape), dtype))
    return gives, shares


def update(network: Network, batch: Batch, buffers: dict[str, Tensor], notes: Notes) -> None:
    """Update running statistics with the moments of a batch."""
    names = {id(own_tensor(batch.places, name)): name for name in batch.places.slots}
    for value, norm in network.norms.items():  # since one layer may be called several times
        shape, _, each = notes.looks[value]
        if each * sum(batch.sizes) == 1 and isinstance(notes.moments[value].elements, int):
            raise ValueError(
                f"{norm.place}: expected more than one value per channel when training, "
                f"got input of shape {tuple(shape)} in a batch of one row."
            )
        if norm.call["running_mean"] is None or norm.call["running_var"] is None:
            continue
        mean, var = norm.call["running_mean"].at, norm.call["running_var"].at
        momentum = norm.call["momentum"]
        count = names.get(id(getattr(norm.layer, "num_batches_tracked", None)))
        if count is not None:
            buffers[count] = buffers[count] + 1
            if momentum is None:  # the mean over all batches so far
                momentum = 1.0 / buffers[count].double()
        pair = buffers[mean], buffers[var]
        buffers[mean], buffers[var] = notes.moments[value].running(*pair, momentum)


# The proof ------------------------------------------------------------------------------------


def proved(network: Network, batch: Batch, want: Sequence[Any]) -> bool:
    """Whether the levels give a microbatch alone the rows that the module gives it."""

    def in_parts(func: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            gives, shares = func(*args)
            return gives, [Share(*(x.unsqueeze(0) for x in share)) for share in shares]

        return call

    steps = [[_as_recorded(network, step) for step in level.steps] for level in network.levels]
    levels = [level._replace(steps=its) for level, its in zip(network.levels, steps, strict=True)]
    before = generators({x.device for x in batch.given})
    captured = [*map(plain_tensor, network.trace.captured)]
    network = network._replace(levels=levels, trace=network.trace._replace(captured=captured))
    try:
        mine, _ = run_levels(network, batch, in_parts, None)
    finally:
        if any(operation.draws for operation in network.trace.operations):
            restore(before)
    return _near(mine, want)


def _as_recorded(network: Network, step: Step) -> Step:
    """A step that draws the random numbers that it drew when it was recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(step.gives.at)
        return step.func(*args, **kwargs)

    return step._replace(func=call) if network.trace.operations[step.gives.at].draws else step


def _near(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether numbers are the same, but for kernels that round otherwise: in half of the digits."""
    checks: list[Tensor] = []
    for x, y in zip(mine, theirs, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        unit = torch.finfo(x.dtype).eps ** 0.5 if x.dtype.is_floating_point else 0.0
        same = (x == y) | ((x != x) & (y != y))
        checks.append((same | ((x - y).abs() <= unit * y.abs().amax())).all())
    return not checks or bool(torch.stack(checks).all())  # the host waits for that, once


def has_rows(x: Any, rows: int) -> bool:
    """Whether something is a tensor of so many rows."""
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows


def no_rows(name: str, x: Any, rows: int | str) -> str:
    """The error for a leaf of the output that has not one row for each."""
    came = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {x!r}"
    return (
        f"{name}, which the module returned for {rows} rows, {came}; expected tensors with one row "
        "per sample along dim 0. What all rows give together (a loss, a mean, a count) is computed "
        "from these, by plain code after apply."
    )
