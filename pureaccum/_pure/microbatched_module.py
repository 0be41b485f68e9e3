"""A module's call for a whole batch in the memory of one microbatch, exact through BatchNorm.

    trace = what the module does now, for one microbatch   # see recorded_module.py
    for each level of the trace:                           # see levels.py
        samples, shares = the level, of all microbatches      # a microbatched function
        moments of each BatchNorm = merged shares          # plain code
    out = rows of the last level

All derivatives are those of the composition. A module that couples no rows is one microbatched
function, and is not traced.

That levels do what the module does, with merged moments and nothing written to, is proved in
numbers: where a trace has another structure than those before, or microbatches have another size,
the levels of one microbatch alone have to give the samples that the module gives it.
"""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from .._base import checks, containers, dtensors, observation, random_state, reprs, trees
from .._base.torch_internals import functorch, modes, module_slots
from .._core import batches, buckets, closures, writes
from .._core.microbatch import microbatch
from . import batch_norm, recorded_module, shell, symbols
from .levels import Level, levels_of, run_steps
from .trace import Operation


Tensors = dict[str, Tensor]
_MOST = 256  # structures that are remembered


class WholeBatch:
    """Calls a module with a whole batch, microbatch by microbatch."""

    def __init__(self, places: shell.Places, size: Any, group: Any) -> None:
        self.places, self.size = places, batches.check_sizes(size)
        self.group = None if group is None else buckets.group_of(group)
        self.plain = microbatch(self.call, microbatch_size=size, batch_argnums=2)
        self.layers: dict[Any, Any] = {}  # see ``ModuleCall``
        self.by_function = False  # whether it calls F.batch_norm beside its layers
        self.proved: set[Any] = set()  # structures of traces, and of how many samples
        for path, part in zip(places.paths, places.modules, strict=True):
            if isinstance(part, LazyModuleMixin):
                raise ValueError(
                    f"module.{path} is {reprs.kind(part)}, which has no shape yet. Call the "
                    "module once, on one batch, before functional(module)."
                )
            if module_slots.is_compiled_module(part) and "BatchNorm" in getattr(
                part, "original_name", ""
            ):
                raise ValueError(
                    f"module.{path} is scripted, so pureaccum cannot cut at this BatchNorm. Pass "
                    "the module that was scripted."
                )

    def __call__(
        self, tensors: Tensors, buffers: Sequence[str], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any, Tensors]:
        """Call the module with a batch; returns what it returned, and its new buffers."""
        batch = batches.read_batch({**dict(enumerate(args)), **kwargs}, "args")
        batches.need_rows(batch, "the input of apply")
        sizes = batches.sizes_of_batch(
            batches.rows_to_cut(batch, "args", one_by_one=True), self.size
        )
        if not sizes and self.group is not None:  # other ranks wait for what this one has: nothing
            sizes = [0]
        new = {name: tensors[name].clone() for name in buffers}
        return self.out_of(tensors, new, (args, kwargs), sizes), new

    def out_of(
        self, tensors: Tensors, new: Tensors, arguments: Any, sizes: Sequence[int]
    ) -> trees.Tree:
        """What the module returns; the running statistics in ``new`` are updated."""
        shell.check_unchanged(self.places)
        leaves, spec = trees.flatten(arguments)
        given = [x for x in leaves if isinstance(x, Tensor)]
        if not self.by_function and not any(map(batch_norm.couples, self.places.modules)):
            before = random_state.generators({x.device for x in given})
            try:
                watch = batch_norm.refusing_batch_norm(lambda _: CoupledError())
                return self.plain(iter([watch]), tensors, arguments)
            except CoupledError:
                self.by_function = True
                random_state.restore(before)
        own = {name: shell.own_tensor(self.places, name) for name in self.places.slots} | tensors
        batch = recorded_module.ModuleCall(
            places=self.places,
            layers=self.layers,
            own=own,
            given=given,
            arguments=partial(_arguments, leaves, spec),
            sizes=sizes or [0],
        )
        trace = self.trace(batch)
        if not (norms := trace.norms()):
            return self.plain(iter(()), tensors, arguments)
        place = norms[0].place
        if batches.parts_of_batch() > 1:
            raise RuntimeError(_CUT.format(place))
        if not sum(batch.sizes) and self.group is None:
            raise ValueError(f"{place} got a batch without samples; expected at least one.")
        dtensors.refuse_sharded([*given, *tensors.values()], "the input of apply", _NO_RULE)
        in_parts = partial(microbatch, microbatch_size=self.size)
        out, moments, notes = _run(trace, batch, in_parts, self.group)
        _update(trace, batch, new, moments, notes)
        return trees.unflatten(trace.spec, out)

    def trace(self, batch: recorded_module.ModuleCall) -> recorded_module.Trace:
        """What the module does now, proved."""
        looked_at, state = not modes.dispatched(), random.getstate()
        sizes = [size or 1 for size in batch.sizes]
        recording = torch.is_grad_enabled()
        # No transform, no tracer and no inference mode around follows it.
        with (
            functorch.down_to(0),
            modes.untraced(),
            checks.outside_inference_mode(),
            torch.set_grad_enabled(recording),
        ):
            trace, _ = recorded_module.recorded(batch.alone(sizes.index(max(sizes))))
            structure = trace.structure()
            for size in {*sizes} if looked_at and trace.norms() else ():
                if (structure, size) in self.proved:
                    continue
                before = random_state.generators({x.device for x in batch.given})
                error = _disproof(trace, batch.alone(sizes.index(size)), state)
                if any(operation.draws for operation in trace.operations):
                    random_state.restore(before)
                if isinstance(error, ValueError):  # one of ours, which says what to do
                    raise error
                if error is not None:
                    name = type(self.places.modules[0]).__name__
                    raise RuntimeError(_DIFFERS.format(name, size, max(sizes), error)) from error
                if len(self.proved) >= _MOST:
                    self.proved.clear()
                self.proved.add((structure, size))
        return trace

    def call(self, watch: Iterator[Any], tensors: Tensors, arguments: Any) -> trees.Tree:
        args, kwargs = arguments
        with next(watch, nullcontext()):
            out = recorded_module.call_pure(self.places, tensors, args, kwargs)
        rows = next(x.shape[0] for x in trees.flatten(arguments)[0] if isinstance(x, Tensor))
        leaves, spec = containers.open_tree(out, "out")
        for i, x in enumerate(leaves):
            if not _has_rows(x, rows):
                raise ValueError(_NO_ROWS.format(trees.paths(spec, "out")[i], rows, _came(x)))
        return out


# Operations hold symbols, of which each call is given the tensors.
closures.telling[WholeBatch] = lambda whole: (whole.places,)
closures.telling[Operation] = closures.telling[Level] = lambda _: ()


class CoupledError(BaseException):
    """A batch norm looks at what it is given; only ``WholeBatch`` may catch it."""


def _arguments(leaves: Sequence[Any], spec: Any, given: Sequence[Tensor]) -> Any:
    """The arguments of a call, with other tensors."""
    its = iter(given)
    return trees.unflatten(spec, [next(its) if isinstance(x, Tensor) else x for x in leaves])


# The levels of a module -----------------------------------------------------------------------


class _Notes:
    """What a call notes of its levels; it holds no tensor, since each level's graph holds it."""

    def __init__(self) -> None:  # no tuple, which would be copied as one argument is not
        # Of what is normalised: its shape, its dtype, and how many numbers a sample has per
        # channel.
        self.looks: dict[symbols.Symbol, tuple[torch.Size, torch.dtype, int]] = {}
        self.folded: set[symbols.Symbol] = set()  # what has several samples for each of the batch


def _run(
    trace: recorded_module.Trace,
    batch: recorded_module.ModuleCall,
    in_parts: Any,
    group: Any,
    seeded: bool = False,
) -> tuple[list[Tensor], dict[symbols.Symbol, batch_norm.BatchMoments], _Notes]:
    """Run all levels; returns the leaves of what the module returns, and the moments."""
    outs = _outs_of(trace)
    levels = levels_of(trace.operations, trace.outs, seeded)
    last_read = {value: k for k, level in enumerate(levels) for value in level.takes}
    notes, moments, scaling = (
        _Notes(),
        dict[symbols.Symbol, batch_norm.BatchMoments](),
        dict[symbols.Symbol, batch_norm.Scaling](),
    )
    shared = {symbols.Symbol("own", name): x for name, x in batch.own.items()}
    shared |= {symbols.Symbol("captured", i): x for i, x in enumerate(trace.captured)}
    values = {symbols.Symbol("input", i): x for i, x in enumerate(batch.given)}
    for k, level in enumerate(levels):
        call = partial(_call_level, trace.operations, outs, level)
        microbatched = in_parts(call, batch_argnums=3, reduce=("concat", "stack"))
        its = [[shared[v] for v in level.shared], [scaling[v] for v in level.scaled]]
        rows = [values[v] for v in level.takes]
        with writes.unguarded():  # what would be written to was seen when it was traced
            gives, shares = microbatched(notes, *its, rows)
        for value in level.takes:
            if last_read[value] == k and value not in outs:
                del values[value]  # its memory is free from here on
        values |= zip(level.gives, gives, strict=True)
        for value, share in zip(level.pools, shares, strict=True):
            (_, dtype, each), norm = notes.looks[value], trace.operations[value.at]
            moments[value] = batch_norm.moments_of(
                share, [each * size for size in batch.sizes], group
            )
            scaling[value] = _scaling(norm, moments[value], shared, dtype)
    return [values[value] for value in trace.outs], moments, notes


def _scaling(
    norm: Operation, moments: batch_norm.BatchMoments, shared: Any, dtype: torch.dtype
) -> batch_norm.Scaling:
    """What a BatchNorm does to samples, up to a weight and a bias that are computed there."""
    weight, bias = [x and shared[x] for x in norm.affine() or (None, None)]
    return batch_norm.scaling_of(moments, weight, bias, norm.kwargs["eps"], dtype)


def _outs_of(trace: recorded_module.Trace) -> dict[symbols.Symbol, str]:
    """What the leaves of what the module returns are called; all of them have to be samples."""
    outs = dict(zip(trace.outs, trees.paths(trace.spec, "out"), strict=True))
    for out, name in outs.items():
        if not isinstance(out, symbols.Symbol) or out.kind in ("own", "captured"):
            raise ValueError(_NO_ROWS.format(name, "any number of", _came(out)))
    return outs


def _call_level(
    operations: Sequence[Operation],
    outs: dict[symbols.Symbol, str],
    level: Level,
    notes: _Notes,
    shared: Sequence[Tensor],
    scaling: Sequence[batch_norm.Scaling],
    rows: Sequence[Tensor],
) -> tuple[list[Tensor], list[batch_norm.Share]]:
    """Run a level for one microbatch."""
    count = rows[0].shape[0]
    known: dict[symbols.Symbol, Any] = {
        symbols.ROWS: count,
        **dict(zip(level.shared, shared, strict=True)),
    }
    taken = zip(level.takes, rows, strict=True)
    known |= {v: x.flatten(0, 1) if v in notes.folded else x for v, x in taken}
    known |= {
        symbols.Symbol("scaling", v.at): x for v, x in zip(level.scaled, scaling, strict=True)
    }
    run_steps(level.steps, known)
    gives: list[Tensor] = []
    for value in level.gives:
        x = known[value]
        if value not in outs and x.dim() and x.shape[0] > count > 0 == x.shape[0] % count:
            notes.folded.add(value)
            x = x.unflatten(0, (count, -1))
        if not _has_rows(x, count):
            name, place = operations[value.at].name(), operations[value.at].place
            between = _BETWEEN.format(name, place, tuple(x.shape), count)
            out = value in outs and _NO_ROWS.format(outs[value], count, _came(x))
            raise ValueError(out or between)
        gives.append(x)
    shares: list[batch_norm.Share] = []
    for value in level.pools:
        x = known[operations[value.at].kwargs["input"]]
        with modes.unnoticed():  # each look at a shape would be asked of the modes around
            shape, dtype = x.shape, x.dtype
        each = shape.numel() // (shape[1] * count) if count else math.prod(shape[2:])
        notes.looks[value] = shape, dtype, each
        shares.append(batch_norm.share_of_rows(x, len(shape), dtype))
    return gives, shares


def _update(
    trace: recorded_module.Trace,
    batch: recorded_module.ModuleCall,
    buffers: Tensors,
    found: Any,
    notes: _Notes,
) -> None:
    """Update running statistics with the moments of a batch."""
    names = {id(shell.own_tensor(batch.places, name)): name for name in batch.places.slots}
    for value, moments in sorted(found.items()):  # since a layer may be called twice
        norm, (shape, _, each) = trace.operations[value.at], notes.looks[value]
        if each * sum(batch.sizes) == 1 and isinstance(moments.elements, int):
            raise ValueError(
                f"{norm.place}: expected more than one value per channel when training, "
                f"got input of shape {tuple(shape)} in a batch of one sample."
            )
        if norm.kwargs["running_mean"] is None or norm.kwargs["running_var"] is None:
            continue
        mean, var = norm.kwargs["running_mean"].at, norm.kwargs["running_var"].at
        momentum = norm.kwargs["momentum"]
        count = names.get(id(getattr(norm.layer, "num_batches_tracked", None)))
        if count is not None:
            buffers[count] = buffers[count] + 1
            if momentum is None:  # the mean over all batches so far
                momentum = 1.0 / buffers[count].double()
        buffers[mean], buffers[var] = moments.running(buffers[mean], buffers[var], momentum)


# The proof ------------------------------------------------------------------------------------


def _disproof(
    trace: recorded_module.Trace, batch: recorded_module.ModuleCall, state: Any
) -> Exception | None:
    """An error where the levels do not give for a microbatch what the module gives."""
    captured, errors = [*map(recorded_module.plain_tensor, trace.captured)], list[Exception]()
    in_parts = partial(microbatch, microbatch_size=batch.sizes)

    def run() -> None:
        random.setstate(state)
        try:
            its, rows = recorded_module.recorded(batch, batch_norm.of_itself)
            if [x.func for x in its.operations] != [x.func for x in trace.operations]:
                raise RuntimeError("it takes another path")
            mine, *_ = _run(trace._replace(captured=captured), batch, in_parts, None, seeded=True)
            if not _near(mine, rows):
                raise RuntimeError("it returns other numbers for samples")
        except Exception as error:
            errors.append(error)

    observation.observed(run, {x.device for x in batch.given})
    return next(iter(errors), None)


def _near(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether numbers are the same, but for kernels that round otherwise: in half of the digits."""
    for x, y in zip(mine, theirs, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        unit = torch.finfo(x.dtype).eps ** 0.5 if x.dtype.is_floating_point else 0.0
        same = (x == y) | ((x != x) & (y != y)) | ((x - y).abs() <= unit * y.abs().amax())
        if not same.all():
            return False
    return True


def _has_rows(x: Any, rows: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows


def _came(x: Any) -> str:
    return f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {x!r}"


_NO_ROWS = (
    "{}, which the module returned for {} samples, {}; expected tensors with one row per sample "
    "along dim 0. Compute results of all samples together (a loss, a mean, a count) from these, "
    "in plain code after apply."
)
_BETWEEN = (
    "{!r} in {} has shape {} for {} samples; expected one row per sample along dim 0 between two "
    "BatchNorm layers."
)
_DIFFERS = (
    "module ({}) computes for {} samples another result than its trace of {} samples: {}. Likely "
    "causes: its result depends on how many samples a microbatch has, or on numbers that torch "
    "does not show. Use torch's operations on all samples at once, or omit microbatch_size to "
    "take the batch whole."
)
_CUT = (
    "{} couples all samples of a batch, but this call gets only some of them, because the "
    "function around it splits the batch too. Pass microbatch_size=None to the function around "
    "it: functional(module, microbatch_size=...) splits the batch by itself."
)
_NO_RULE = (
    "torch has no rule for a batch norm of them. Pass plain tensors on every rank, with its own "
    "samples: functional(module, group=...) is exact over ranks."
)
