"""A module's call for a whole batch in the memory of one microbatch, exact through BatchNorm.

    for each level of the network:                        # see levels.py
        rows, shares = the level, of all microbatches     # a microbatched function
        moments of each BatchNorm = merged shares         # plain code
    out = rows of the last level

All derivatives are those of the composition. A module that couples no rows is one microbatched
function, and is not traced.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin

from .._base import (
    BUFFERS,
    Tree,
    flatten,
    generators,
    is_compiled_module,
    paths,
    refuse_sharded,
    restore,
    tree_map,
    unflatten,
    unnoticed,
    version,
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
from .batch_norm import (
    BatchMoments,
    Scaling,
    Share,
    WithoutBatchNorm,
    check_input,
    couples,
    moments_of,
    scaling_of,
    share_of_rows,
)
from .levels import CutGraph, Level, Norm, cut_graph
from .shell import Places, call_module, changed, contents_of, own_tensor, places_of, what_changed
from .trace import hook_tables, trace_of, written_to


Tensors = dict[str, Tensor]
InParts = Callable[..., Callable[..., Any]]  # microbatch, with its size


class WholeBatch:
    """Calls a module with a whole batch, microbatch by microbatch."""

    def __init__(self, places: Places, size: Any, keep: Keep, group: Any) -> None:
        self.places, self.size, self.keep = places, check_sizes(size), keep
        self.group = None if group is None else group_of(group)
        self.in_parts: InParts = partial(microbatch, microbatch_size=self.size, keep=keep)
        self.plain = self.in_parts(self.call)
        self.watched = self.in_parts(self.call_watched)
        # For the attributes that all modules had, and for some arguments, the levels of the module;
        # None where it couples no rows. Both in one tuple, since threads share it.
        networks: dict[Any, _Network | None] = {}
        self.known = contents_of([]), networks
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
        leaves, spec = flatten(arguments)
        given = [x for x in leaves if isinstance(x, Tensor)]
        networks = self.networks_now()
        key = spec, *(None if isinstance(x, Tensor) else (type(x), x) for x in leaves)
        if key not in networks and not any(couples(part) for part in self.places.modules):
            before = generators({x.device for x in given})
            try:
                out = self.watched(tensors, arguments)
                networks[key] = None
                return out
            except CoupledError:
                restore(before)
        if key not in networks:
            networks[key] = _network(self.places, leaves, spec, self.in_parts, self.group)
        if (network := networks[key]) is None:
            return self.plain(tensors, arguments)
        if parts_of_batch() > 1:
            raise RuntimeError(_CUT.format(network.norms[0].place))
        own = {name: own_tensor(self.places, name) for name in self.places.slots}
        refuse_sharded([*given, *tensors.values()], "what apply is given", _NO_RULE)
        out, moments = network(own | tensors, given, sizes)
        network.update(new, moments)
        return out

    def networks_now(self) -> "dict[Any, _Network | None]":
        """What is known for the modes, attributes and hooks that the module has now."""
        if changed(self.places.kept):
            raise what_changed(self.places)
        attributes, networks = self.known
        # A list: another thread may add a network meanwhile.
        hooks = (table for it in [*networks.values()] if it is not None for table in it.hooks)
        if not attributes.dicts or changed(attributes) or any(hooks):
            self.known = contents_of([vars(part) for part in self.places.modules]), {}
        return self.known[1]

    def call(self, tensors: Tensors, arguments: Any) -> Tree:
        args, kwargs = arguments
        return _checked(_call_pure(self.places, tensors, args, kwargs), _rows(arguments))

    def call_watched(self, tensors: Tensors, arguments: Any) -> Tree:
        with WithoutBatchNorm(lambda _: CoupledError()):
            return self.call(tensors, arguments)


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


def _call_pure(
    places: Places, tensors: Tensors, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a module, and check that it writes to none of its buffers."""
    given = dict(tensors)
    for name in tensors:
        if places.slots[name][0][1] == BUFFERS:
            given[name] = tensors[name].clone()
    before = {name: version(given[name]) for name in given if given[name] is not tensors[name]}
    out, held = call_module(places, given, before, tuple(args), kwargs)
    for name, then in before.items():
        if held[name] is not given[name] or version(given[name]) != then:
            raise RuntimeError(written_to(f"buffers[{name!r}]"))
    return out


def _rows(tree: Tree) -> int:
    """How many rows the tensors of a tree have."""
    return next(x.shape[0] for x in flatten(tree)[0] if isinstance(x, Tensor))


def _checked(out: Tree, rows: int) -> Tree:
    """What the module returned, or an error where that is no rows."""
    leaves, spec = flatten(out)
    for i, x in enumerate(leaves):
        if not _has_rows(x, rows):
            raise ValueError(_no_rows(paths(spec, "out")[i], x, rows))
    return out


def _has_rows(x: Any, rows: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows


def _no_rows(name: str, x: Any, rows: int | str) -> str:
    came = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is {x!r}"
    return (
        f"{name}, which the module returned for {rows} rows, {came}; expected tensors with one row "
        "per sample along dim 0. What all rows give together (a loss, a mean, a count) is computed "
        "from these, by plain code after apply."
    )


# A module that is cut ----------------------------------------------------------------------


def _network(
    places: Places, leaves: list[Any], spec: Any, in_parts: InParts, group: Any
) -> "_Network | None":
    """The levels of a module that is called with such leaves; None if it couples no rows."""
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def arguments(given: Any) -> tuple[Any, Mapping[str, Any]]:
        its = list(leaves)
        for n, i in enumerate(at):
            its[i] = given[n]
        return unflatten(spec, its)

    traced = trace_of(places.modules[0], arguments)
    graph = cut_graph(traced.root, traced.graph)
    if not graph.norms:
        return None
    names = {id(own_tensor(places, name)): name for name in places.slots}
    apart = [traced.root.get_submodule(path) for path in traced.taken_apart]
    hooks = [table for part in apart for table in hook_tables(part).values()]
    return _Network(graph, names, hooks, in_parts, group)


class _Network:
    """The levels of a module, run one after the other."""

    def __init__(
        self,
        graph: CutGraph,
        names: Mapping[int, str],
        hooks: list[dict[int, Any]],
        in_parts: InParts,
        group: Any,
    ) -> None:
        self.graph, self.norms, self.hooks, self.group = graph, graph.norms, hooks, group
        names_of, spec = flatten(graph.made(*graph.outputs))
        where = {x: f"{x!r} in {at}" for x, at in graph.places.items()}
        for x, path in zip(names_of, paths(spec, "out"), strict=True):
            if x not in where:
                raise ValueError(_no_rows(path, x, "any number of"))
            where[x] = path
        wanted = [level for level in graph.levels if level.gives or level.pools]
        self.levels = [_MicrobatchedLevel(level, names, where, in_parts) for level in wanted]
        self.last_read = {name: level for level in wanted for name in level.takes}
        self.buffers = {norm.name: _buffers_of(norm, names) for norm in self.norms}
        self.affine = {
            norm.name: [names.get(id(x)) for x in norm.affine or (None, None)]
            for norm in self.norms
        }

    def __call__(
        self, tensors: Tensors, given: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[Any, dict[str, BatchMoments]]:
        """Run all levels; returns what the module returns, and the moments of each BatchNorm."""
        if not sizes:
            raise ValueError(f"{self.norms[0].place} was given a batch without rows.")
        values = {name: [given[i]] for name, i in self.graph.inputs.items()}
        notes, moments, scaling = _Notes(), dict[str, BatchMoments](), dict[str, Scaling]()
        kept = {*self.graph.outputs}
        for microbatched in self.levels:
            level = microbatched.level
            gives, shares = microbatched.run(notes, tensors, scaling, values)
            for name in level.takes:
                if self.last_read[name] is level and name not in kept:
                    del values[name]  # its memory is free from here on
            values |= gives
            for norm, share in zip(level.pools, shares, strict=True):
                shape, dtype = notes.looks[norm.name]
                each = math.prod(shape[2:])
                if each * sum(sizes) == 1 and self.group is None:
                    raise ValueError(
                        f"{norm.place}: expected more than one value per channel when training, "
                        f"got input of shape {tuple(shape)} in a batch of one row."
                    )
                elements = [each * size for size in sizes]
                moments[norm.name] = moments_of(share, elements, self.group)
                weight, bias = (tensors[it] if it else None for it in self.affine[norm.name])
                scaling[norm.name] = scaling_of(moments[norm.name], weight, bias, norm.eps, dtype)
        outs = [notes.value_of(name, values[name], sizes[0]) for name in self.graph.outputs]
        return _checked(self.graph.made(*outs), sum(sizes)), moments

    def update(self, buffers: Tensors, moments: Mapping[str, BatchMoments]) -> None:
        """Update running statistics with the moments of a batch."""
        for norm in self.norms:  # in the order of the calls, since one layer may have several
            if (names := self.buffers[norm.name]) is None:
                continue
            mean, var, count = names
            momentum: float | Tensor = norm.momentum
            if count is not None:
                buffers[count] = buffers[count] + 1
                if norm.layer.momentum is None:  # the mean over all batches so far
                    momentum = 1.0 / buffers[count].double()
            pair = buffers[mean], buffers[var]
            buffers[mean], buffers[var] = moments[norm.name].running(*pair, momentum)


def _buffers_of(norm: Norm, names: Mapping[int, str]) -> tuple[str, str, str | None] | None:
    """The names of a BatchNorm's running mean and variance, and of its count of batches."""
    if norm.statistics is None:
        return None
    mean, var = (names[id(x)] for x in norm.statistics)
    count = getattr(norm.layer, "num_batches_tracked", None)
    return mean, var, None if count is None else names[id(count)]


class _MicrobatchedLevel:
    """A level, run one microbatch after the other."""

    def __init__(
        self, level: Level, names: Mapping[int, str], where: Mapping[str, str], in_parts: InParts
    ) -> None:
        self.level, self.where, self.places = level, where, places_of(level.module)
        own = {slot: id(own_tensor(self.places, slot)) for slot in self.places.slots}
        self.names = {slot: names[it] for slot, it in own.items() if it in names}
        self.microbatched = in_parts(self.call, batch_argnums=3, reduce=("concat", "stack"))

    def run(
        self,
        notes: "_Notes",
        tensors: Tensors,
        scaling: Mapping[str, Scaling],
        values: Mapping[str, list[Tensor]],
    ) -> Any:
        """Run it for all microbatches; returns what it gives, and the shares of its BatchNorms."""
        its = {slot: tensors[name] for slot, name in self.names.items()}
        known = [scaling[norm.name] for norm in self.level.scaled]
        return self.microbatched(notes, its, known, {k: values[k] for k in self.level.takes})

    def call(
        self,
        notes: "_Notes",
        tensors: Tensors,
        scaling: Sequence[Scaling],
        rows: Mapping[str, list[Tensor]],
    ) -> tuple[Any, list[Share]]:
        count = _rows(rows)
        taken = [notes.value_of(name, rows[name], count) for name in self.level.takes]
        out = _call_pure(self.places, tensors, (*taken, *scaling), {})
        names, pools = self.level.gives, self.level.pools
        given, pooled = out[: len(names)], out[len(names) :]
        gives = {k: notes.tensors_of(k, x, count) for k, x in zip(names, given, strict=True)}
        with unnoticed():  # each look at a shape would be asked of the modes around
            for name, several in gives.items():
                for x in several:
                    if not _has_rows(x, count):
                        raise ValueError(self.no_rows(name, x, count))
            looks = [(x.shape, x.dtype) for x in pooled]
        shares: list[Share] = []
        for norm, x, (shape, dtype) in zip(pools, pooled, looks, strict=True):
            check_input(norm.layer, norm.place, shape)
            notes.looks[norm.name] = shape, dtype
            shares.append(share_of_rows(x, len(shape), dtype))
        return gives, shares

    def no_rows(self, name: str, x: Tensor, rows: int) -> str:
        if (where := self.where[name]).startswith("out"):
            return _no_rows(where, x, rows)
        return (
            f"{where} has shape {tuple(x.shape)} for {rows} rows; what lies between two BatchNorm "
            "layers has one row per sample along dim 0."
        )


class _Notes:
    """What a call notes of the values between levels, for microbatches of so many rows."""

    def __init__(self) -> None:
        # Where a value is no tensor: its leaves but for tensors (a size, say), and its structure.
        self.others: dict[tuple[str, int], tuple[list[Any], Any]] = {}
        self.looks: dict[str, tuple[torch.Size, torch.dtype]] = {}  # of what is normalised

    def tensors_of(self, name: str, value: Any, rows: int) -> list[Tensor]:
        """The tensors in a value; the others are noted."""
        if isinstance(value, Tensor):
            return [value]
        leaves, spec = flatten(value)
        self.others[name, rows] = [None if isinstance(x, Tensor) else x for x in leaves], spec
        return [x for x in leaves if isinstance(x, Tensor)]

    def value_of(self, name: str, tensors: list[Tensor], rows: int) -> Any:
        """The value that some tensors were in."""
        if (name, rows) not in self.others:
            return tensors[0]
        (others, spec), its = self.others[name, rows], iter(tensors)
        return unflatten(spec, [next(its) if x is None else x for x in others])
