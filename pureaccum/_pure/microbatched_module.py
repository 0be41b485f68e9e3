"""A module's call for a whole batch in the memory of one microbatch, exact through BatchNorm.

    for each level of the network:                        # see levels.py
        rows, shares = the level, of all microbatches     # a microbatched function
        moments of each BatchNorm = merged shares         # plain code
    out = rows of the last level, if one microbatch of it is what the module gives: see proof.py

All derivatives are those of the composition. A module that couples no rows is one microbatched
function, and is not traced.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from .._base import (
    Tree,
    being_traced,
    dispatched,
    flatten,
    generators,
    is_compiled_module,
    observed,
    open_tree,
    paths,
    refuse_sharded,
    restore,
    tree_map,
    unflatten,
)
from .._core import (
    Keep,
    check_sizes,
    group_of,
    microbatch,
    need_rows,
    parts_of_batch,
    read_batch,
    rows_to_cut,
    sizes_of_batch,
)
from .batch_norm import WithoutBatchNorm, couples
from .network import InParts, Network, has_rows, network_of, no_rows, proved, run_levels, update
from .recorded_module import Batch, call_pure, own_moments, plainly, recorded, some_rows
from .shell import Places, changed, own_tensor, what_changed


Tensors = dict[str, Tensor]
_MOST = 256  # structures that are remembered


class WholeBatch:
    """Calls a module with a whole batch, microbatch by microbatch."""

    def __init__(self, places: Places, size: Any, keep: Keep, group: Any) -> None:
        self.places, self.size, self.keep = places, check_sizes(size), keep
        self.group = None if group is None else group_of(group)
        self.in_parts: InParts = partial(microbatch, microbatch_size=self.size, keep=keep)
        self.plain = self.in_parts(self.call, batch_argnums=2)
        self.layers: dict[Any, Any] = {}  # see ``Batch``
        self.by_function = False  # whether it calls F.batch_norm beside its layers
        self.proved: set[Any] = set()  # structures of traces, and of how many rows
        for path, part in zip(places.paths, places.modules, strict=True):
            if isinstance(part, LazyModuleMixin):
                raise ValueError(
                    f"module.{path} is a {type(part).__name__}, which does not know its shape yet; "
                    "call the module once, on one batch, before functional(module)."
                )
            if is_compiled_module(part) and "BatchNorm" in getattr(part, "original_name", ""):
                raise ValueError(
                    f"module.{path} is scripted, so that there is no cut at this BatchNorm; "
                    "expected the module that was scripted."
                )

    def __call__(
        self, tensors: Tensors, buffers: Sequence[str], args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Any, Tensors]:
        """Call the module with a batch; returns what it returned, and its new buffers."""
        batch = read_batch({**dict(enumerate(args)), **kwargs}, "args")
        need_rows(batch, "what apply is given")
        sizes = sizes_of_batch(rows_to_cut(batch, "args", one_by_one=True), self.size)
        if not sizes and self.group is not None:  # other ranks wait for what this one has: nothing
            sizes = [0]
        new = {name: tensors[name].clone() for name in buffers}
        out = self.out_of(tensors, new, (args, kwargs), sizes)
        if self.keep == "host":  # where results were kept, and are not to be returned
            devices = (x.device for x in tensors.values() if x.device.type != "cpu")
            if (device := next(devices, None)) is not None:
                out = tree_map(lambda x: x.to(device, non_blocking=True), out)
        return out, new

    def out_of(self, tensors: Tensors, new: Tensors, arguments: Any, sizes: Sequence[int]) -> Tree:
        """What the module returns; the running statistics in ``new`` are updated."""
        if changed(self.places.kept):
            raise what_changed(self.places)
        leaves, spec = flatten(arguments)
        given = [x for x in leaves if isinstance(x, Tensor)]
        if not self.by_function and not any(map(couples, self.places.modules)):
            before = generators({x.device for x in given})
            try:
                watch = WithoutBatchNorm(lambda _: CoupledError())
                return self.plain(iter([watch]), tensors, arguments)
            except CoupledError:
                self.by_function = True
                restore(before)
        own = {name: own_tensor(self.places, name) for name in self.places.slots} | tensors
        devices = [x.device for x in own.values() if x.device.type != "cpu"]
        batch = Batch(
            places=self.places,
            layers=self.layers,
            own=own,
            given=given,
            arguments=partial(_arguments, leaves, spec),
            sizes=sizes or [0],
            device=devices[0] if devices and self.keep == "host" else None,
        )
        network = self.network(batch)
        if network is None:
            return self.plain(iter(()), tensors, arguments)
        if parts_of_batch() > 1:
            raise RuntimeError(_CUT.format(next(iter(network.norms.values())).place))
        refuse_sharded([*given, *tensors.values()], "what apply is given", _NO_RULE)
        out, notes = run_levels(network, batch, self.in_parts, self.group)
        update(network, batch, new, notes)
        return unflatten(network.trace.spec, out)

    def network(self, batch: Batch) -> Network | None:
        """The levels of the module as it is now, proved; None if it couples no rows."""
        looked_at, state = not (dispatched() or being_traced()), random.getstate()
        sizes = [size or 1 for size in batch.sizes]
        with plainly():
            trace, _ = recorded(batch.alone(sizes.index(max(sizes))), some_rows)
            if all(operation.layer is None for operation in trace.operations):
                return None
            network, structure = network_of(trace), trace.structure()
            for size in {*sizes} if looked_at else ():
                if (structure, size) not in self.proved:
                    if not self.fits(network, batch.alone(sizes.index(size)), state):
                        name = type(self.places.modules[0]).__name__
                        raise RuntimeError(_DIFFERS.format(name, size, max(sizes)))
                    if len(self.proved) >= _MOST:
                        self.proved.clear()
                    self.proved.add((structure, size))
        return network

    def fits(self, network: Network, batch: Batch, state: Any) -> bool:
        """Whether levels give a microbatch what the module gives it, by the microbatch's moments."""
        errors: list[Exception] = []

        def run() -> bool:
            random.setstate(state)
            try:
                trace, rows = recorded(batch, own_moments)
                same = trace.structure() == network.trace.structure()
                return same and proved(network, batch, rows)
            except Exception as error:
                errors.append(error)
                raise

        devices = {x.device for x in batch.given}
        before = generators(devices)
        try:
            fits, _ = observed(run, devices)
            if errors:
                raise errors[0]
            return bool(fits)
        finally:
            if any(operation.draws for operation in network.trace.operations):
                restore(before)  # those of torch, which were seeded

    def call(self, watch: Iterator[Any], tensors: Tensors, arguments: Any) -> Tree:
        args, kwargs = arguments
        with next(watch, nullcontext()):
            out = call_pure(self.places, tensors, args, kwargs)
        return _checked(out, _rows(arguments))


def _arguments(leaves: Sequence[Any], spec: Any, given: Sequence[Tensor]) -> Any:
    """The arguments of a call, with other tensors."""
    its = iter(given)
    return unflatten(spec, [next(its) if isinstance(x, Tensor) else x for x in leaves])


_DIFFERS = (
    "module ({}) computes for {} rows what its trace does not, which was made with {}. Likely "
    "causes: what it computes depends on how many rows it is given, which are those of a "
    "microbatch, or on numbers that torch does not show. Let torch's operations take all rows at "
    "once, or leave microbatch_size out, and the batch is taken whole."
)
_CUT = (
    "{} couples all rows of a batch, and this call is given some of them: a cut around a cut. "
    "Expected one: functional(module, microbatch_size=...) cuts by itself, so the function around "
    "it takes its batch whole (microbatch_size=None)."
)


_NO_RULE = (
    "torch has no rule for a batch norm of them. With plain tensors on every rank, of its own "
    "rows, functional(module, group=...) is exact over ranks."
)


class CoupledError(BaseException):
    """A batch norm looks at what it is given; only ``WholeBatch`` may catch it."""


def _rows(tree: Tree) -> int:
    """How many rows the tensors of a tree have."""
    return next(x.shape[0] for x in flatten(tree)[0] if isinstance(x, Tensor))


def _checked(out: Tree, rows: int) -> Tree:
    """What the module returned, or an error where that is no rows."""
    leaves, spec = open_tree(out, "out")
    for i, x in enumerate(leaves):
        if not has_rows(x, rows):
            raise ValueError(no_rows(paths(spec, "out")[i], x, rows))
    return out
