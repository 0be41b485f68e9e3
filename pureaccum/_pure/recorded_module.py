"""A module that is called for one microbatch alone, to write down what it computes.

It is called once for each batch, as it is then: copies of all modules in it, which have their code
and attributes, hold plain tensors. A layer of torch's that has hooks is one operation.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function

from .._base import containers, random_state, trees
from .._base.torch_internals import autograd, functorch, kernels, modes, module_slots, operations
from .._core import called_modules
from . import batch_norm, symbols, trace
from .shell import TABLES, Places, call_itself, call_module, own_tensor, places_of, take_shell


Tensors = Mapping[str, Tensor]


class ModuleCall(NamedTuple):
    """What a module is called with."""

    places: Places  # of the module
    layers: dict[nn.Module, Any]  # for each layer with hooks, the function that calls it
    own: Tensors  # what it holds, by name
    given: Sequence[Tensor]  # the tensors that it is called with
    arguments: Callable[[Sequence[Tensor]], Any]  # makes its arguments of these
    sizes: Sequence[int]  # the samples of each microbatch

    def alone(self, p: int) -> "ModuleCall":
        """A microbatch as a batch of plain tensors; one sample of zeros in place of none."""
        begin, size = sum(self.sizes[:p]), self.sizes[p]
        rows = [plain_tensor(x)[begin : begin + size] for x in self.given]
        return self._replace(
            own={name: plain_tensor(x) for name, x in self.own.items()},
            given=rows if size else [x.new_zeros((1, *x.shape[1:])) for x in rows],
            sizes=[size or 1],
        )


class Trace(NamedTuple):
    """What a module computes."""

    operations: list[trace.Operation]
    captured: list[Tensor]  # the tensors that are read and come from elsewhere
    outs: list[Any]  # symbols of the leaves of what it returns; a leaf itself if it is no tensor
    spec: Any  # the structure of what it returns

    def norms(self) -> list[trace.Operation]:
        """The batch norms of the batch."""
        return [operation for operation in self.operations if operation.is_norm()]

    def structure(self) -> tuple[Any, ...]:
        """What it is but for numbers and the like: each operation, and of which values."""
        its = [(x.func, x.writes, x.draws, *x.reads()) for x in self.operations]
        return *its, *(x if isinstance(x, symbols.Symbol) else None for x in self.outs)


def plain_tensor(x: Tensor) -> Tensor:
    """A tensor that nothing follows; of those that a vmap maps, the first member's."""
    with modes.unnoticed():
        return functorch.one_member(x).detach()


def recorded(
    batch: ModuleCall, answer: Any = batch_norm.nearly_of_itself
) -> tuple[Trace, list[Any]]:
    """What a module computes for a microbatch by itself, and the leaves of what it returns."""
    places = batch.places
    before, drawn = random_state.generators({x.device for x in batch.given}), list[bool]()
    buffers = {
        x: batch.own[x].clone() for x in batch.own if places.slots[x][0][1] == module_slots.BUFFERS
    }
    own, rows = {**batch.own, **buffers}, [x.clone() for x in batch.given]
    recorder = _recorder(batch, own, rows, answer)
    held, leaves, outs, spec = dict[str, Any](), list[Any](), list[Any](), None
    try:
        counts = [x for name, x in buffers.items() if name.endswith("num_batches_tracked")]
        with _watched(recorder, [*rows, *counts], drawn), recorder:
            out, held = _call(recorder, batch, own, *batch.arguments(rows))
        leaves, spec = containers.open_tree(out, "out")
        outs = recorder.symbols(leaves)
    except (trace.RefusedError, Exception):
        if not recorder.refusal:
            raise
    finally:
        recorder.active = False
        if drawn:
            random_state.restore(before)
    if recorder.leads_back and not places.leads_back:
        places.leads_back.add("name")
        return recorded(batch, answer)
    if recorder.refusal:
        raise ValueError(recorder.refusal)
    _check_not_replaced(buffers, held)
    for layer in filter(batch_norm.couples, places.modules):
        _check_cut(recorder, recorder.place(layer))
    return Trace(recorder.operations, recorder.captured, outs, spec), leaves


def _recorder(
    batch: ModuleCall, own: Tensors, rows: Sequence[Tensor], answer: Any
) -> trace.Recorder:
    places, inputs = batch.places, {symbols.Symbol("input", i): x for i, x in enumerate(rows)}
    return trace.Recorder(
        paths=dict(zip(places.modules, places.paths, strict=True)),
        own={id(own_tensor(places, name)) for name in places.slots},
        rows=batch.sizes[0],
        given={symbols.Symbol("own", name): x for name, x in own.items()} | inputs,
        answer=answer,
    )


def _check_cut(recorder: trace.Recorder, place: str) -> None:
    """Check that a BatchNorm that computes anything calls the function at which there is a cut."""
    its = [x.func for x in recorder.operations if x.place == place]
    if its and F.batch_norm not in its:
        raise ValueError(_NO_NORM.format(place))


def _check_not_replaced(buffers: Tensors, held: Mapping[str, Any]) -> None:
    for name, x in buffers.items():
        if held[name] is not x:
            raise RuntimeError(_WRITTEN_TO.format(name))


def _call(recorder: trace.Recorder, batch: ModuleCall, own: Any, args: Any, kwargs: Any) -> Any:
    """Call copies of the modules, or themselves where an attribute leads back to them."""
    places, shell = batch.places, take_shell(batch.places, None)
    if shell is None:
        for module in places.modules:
            if hooks := _hooks(module):
                recorder.refuse(_HOOKS.format(hooks[0]), module)
        with called_modules.ALONE, _nothing_assigned(recorder, places.modules, places.modules):
            return call_itself(places, own, args, kwargs)
    for part, module in zip(shell.modules, places.modules, strict=True):
        _prepare(recorder, batch.layers, part, module)
    for name, tensor in own.items():
        for table, key in shell.slots[name]:
            table[key] = tensor
    with _nothing_assigned(recorder, places.modules, shell.modules):
        out = shell.modules[0](*args, **kwargs)
    return out, {name: table[key] for name in own for table, key in shell.slots[name]}


def _prepare(recorder: trace.Recorder, layers: Any, part: nn.Module, module: nn.Module) -> None:
    """Change a copy of a module, so that it can be traced."""
    its: dict[str, Any] = vars(part)
    if isinstance(module, nn.RNNBase):
        its["check_forward_args"] = lambda *_: None  # by how many samples there are
    if batch_norm.couples(module):
        its["_check_input_dim"] = lambda *_: None  # the recorder does
        its["momentum"] = module.momentum or 0.0  # it would read how many batches there were
        if type(module).forward is nn.SyncBatchNorm.forward:
            its["forward"] = MethodType(nn.BatchNorm1d.forward, part)
    if hooks := _hooks(module):
        run = layers.get(module) or partial(call_pure, places_of(module))
        layers[module] = run

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_layer(module):
                recorder.refuse(_HOOKS.format(hooks[0]), module)
            own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
            return handle_torch_function(run, (None,), own, args, kwargs)

        kind: Any = type(type(part).__name__, (type(module),), {"__call__": call})
        part.__class__ = kind


def _hooks(module: nn.Module) -> list[str]:
    """The kinds of hooks that run when a module is called."""
    ends = "ward_hooks", "ward_pre_hooks"  # forward and backward ones
    tables = [name for name, table in vars(module).items() if name.endswith(ends) and table]
    return [name.strip("_").replace("_", " ") for name in tables]


@contextmanager
def _watched(recorder: trace.Recorder, its: list[Tensor], drawn: list[bool]) -> Generator[None]:
    """See what draws, writes to what is not its own, or makes a tensor, below torch's functions."""
    made = recorder.made
    made.update(map(kernels.memory_of, its))
    fresh = False  # whether the operation that runs gives memory of its own

    def before(operation: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        nonlocal fresh
        draws, writes, fresh = operations.effects_of(operation)
        if draws:
            if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
                recorder.refuse(trace.DRAWS)
            drawn.append(True)
            if not recorder.drew:
                torch.manual_seed(len(recorder.operations))  # as it is proved
                recorder.drew = True
        if operations.is_taken_as_new(operation):
            made.add(kernels.memory_of(args[0]))
        for x in operations.written_by(operation, args, kwargs) if writes else ():
            if kernels.memory_of(x) not in made:
                recorder.refuse_write(kernels.memory_of(x))

    def see(_: tuple[Any, ...], out: Any) -> None:
        if fresh:
            made.update(
                [kernels.memory_of(x) for x in trees.tree_leaves(out) if isinstance(x, Tensor)]
            )

    with modes.seeing(see, before):
        yield


@contextmanager
def _nothing_assigned(
    recorder: trace.Recorder, modules: Sequence[nn.Module], parts: Sequence[nn.Module]
) -> Generator[None]:
    """Put back what forward assigns to attributes, and into containers of them, and refuse it."""
    tables = [(module, "", vars(part)) for module, part in zip(modules, parts, strict=True)]
    for module in modules:
        its = [(name, x) for name, x in vars(module).items() if name not in TABLES]
        tables += [(module, name, x) for name, x in its if type(x) in (list, dict, set)]
    were: list[Any] = [copy(table) for _, _, table in tables]
    try:
        yield
    finally:
        for (module, name, table), was in zip(tables, were, strict=True):
            others = [k for k in _changed_keys(table, was) if name or not module_slots.is_cache(k)]
            if others:
                table.clear()
                (table.extend if isinstance(table, list) else table.update)(was)
                where = recorder.place(module), name or others[0]
                recorder.refusal = recorder.refusal or _ASSIGNED.format(*where)


def _changed_keys(table: Any, was: Any) -> list[Any]:
    now, then = _by_key(table), _by_key(was)
    return [k for k in {**then, **now} if now.get(k, was) is not then.get(k, table)]


def _by_key(x: Any) -> dict[Any, Any]:
    """What is in a dict, a list or a set, as a dict."""
    if isinstance(x, dict):
        return x
    return dict.fromkeys(x) if isinstance(x, set) else dict(enumerate(x))


# A layer that is one operation, and a module that is called as it is ----------------------------


def call_pure(places: Places, tensors: Tensors, args: Any, kwargs: Any) -> Any:
    """Call a module, and check that it writes to none of its buffers."""
    buffers = {
        x: tensors[x].clone() for x in tensors if places.slots[x][0][1] == module_slots.BUFFERS
    }
    before = {name: autograd.version(x) for name, x in buffers.items()}
    out, held = call_module(places, {**tensors, **buffers}, buffers, tuple(args), kwargs)
    _check_not_replaced(buffers, held)
    for name, x in buffers.items():
        if autograd.version(x) != before[name]:
            raise RuntimeError(_WRITTEN_TO.format(name))
    return out


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own, in which no batch norm looks at the batch."""
    its = type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)
    return its and not any(map(batch_norm.couples, module.modules()))


_WRITTEN_TO = (
    "buffers[{!r}] is written to in forward, which runs for every microbatch and again for "
    "derivatives, so it would write each time. Only the running statistics of BatchNorm are "
    "updated. Let forward change no other buffer (eval() for it, track_running_stats=False)."
)
_HOOKS = "has {}, which would not run, because pureaccum runs the module in parts. Remove them"
_NO_NORM = (
    "{} has a forward of its own that does not call F.batch_norm, so pureaccum cannot cut at it. "
    "Call F.batch_norm or super().forward in it."
)
_ASSIGNED = (
    "{} assigns its attribute {!r} in forward, but only the result of forward can be passed on. "
    "Return it."
)
