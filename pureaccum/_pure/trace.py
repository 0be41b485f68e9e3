"""A module's forward as a graph of torch.fx, in which each BatchNorm is a call of F.batch_norm.

torch.fx calls ``forward`` once, with a stand-in for the input, and writes down what it does. What
would be lost in silence is refused here: modes that forward enters, attributes that it assigns,
numbers that it draws, hooks on a module that is taken apart. What is called is a copy of the
module, in a thread of its own, where no mode and no transform of the caller's is active.
"""

import linecache
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .._base import BUFFERS, module_vars, seeing, tree_leaves, version
from .batch_norm import BATCH_NORMS, WithoutBatchNorm, couples, in_training


# The arguments of a module, made of a list of tensors.
TracedArguments = Callable[[Any], tuple[Any, Mapping[str, Any]]]


class Trace(NamedTuple):
    """What the forward of a module does.

    Args:
        root: Where the names in the graph are looked up: the module, as ``module``, and beside it
            the tensors that its forward makes of numbers.
        graph: A graph of one argument, the list of tensors.
        taken_apart: The names of the modules whose forward was looked into.
    """

    root: nn.Module
    graph: fx.Graph
    taken_apart: list[str]


def trace_of(module: nn.Module, arguments: TracedArguments) -> Trace:
    """Trace a module that is called with some arguments."""
    # One trace at a time, since torch.fx patches nn.Module while it traces.
    with _ALONE, ThreadPoolExecutor(1) as thread:
        found = thread.submit(_traced_without_draws, module, arguments).result()
    if found is None:
        raise ValueError(
            f"forward of module ({type(module).__name__}) draws random numbers that do not depend "
            "on its input, and so would draw them once for ever: draw them like the input, "
            "torch.rand_like(x), or in a function under torch.fx.wrap."
        )
    root = nn.Module()
    for name, x in module_vars(found.root).items():
        if isinstance(x, Tensor):
            setattr(root, name, x)
    root.module = module  # in place of its copy
    return found._replace(root=root)


_ALONE = threading.Lock()


# Draws ----------------------------------------------------------------------------------------


def _traced_without_draws(module: nn.Module, arguments: TracedArguments) -> Trace | None:
    """The trace; None if forward draws random numbers, torch's or Python's, for itself."""
    python = random.getstate()
    try:
        with seeing(before=_refuse_torch_draw):
            found = _traced(module, arguments)
            if python != random.getstate():  # another thread may have drawn, so look
                sys.setprofile(_refuse_python_draw)
                try:
                    found = _traced(module, arguments)
                finally:
                    sys.setprofile(None)
        return found
    except _DrawnError as drawn:
        if drawn.args:
            random.setstate(python)
        return None


class _DrawnError(BaseException):
    """Forward draws a random number; only ``_traced_without_draws`` may catch it."""


def _refuse_torch_draw(operation: Any, *_: Any) -> None:
    if torch.Tag.nondeterministic_seeded in operation.tags:
        raise _DrawnError


def _refuse_python_draw(_: Any, event: str, called: Any) -> None:
    if event == "c_call" and isinstance(getattr(called, "__self__", None), random.Random):
        raise _DrawnError("random")


# A trace --------------------------------------------------------------------------------------


def _traced(module: nn.Module, arguments: TracedArguments) -> Trace:
    try:
        root, tracer = _Root(module, arguments), _Tracer()
    except Exception as error:
        raise ValueError(
            f"module ({type(module).__name__}) cannot be cut at its BatchNorm layers, because it "
            f"cannot be copied for torch.fx: {error}. Keep outside of it what has no copy."
        ) from error
    before = {part: _attributes(part) for part in root.module.modules()}
    try:
        graph = tracer.trace(root)
        _check_nodes(graph.nodes, root)
        for path, part in root.module.named_modules(prefix="module"):
            for name, held in _attributes(part).items():
                if held != before[part].get(name):
                    raise _Lost(
                        f"{path} ({type(part).__name__}) assigns its attribute {name!r} in "
                        "forward, but only what forward returns can be handed on. Return it."
                    )
    except _Lost as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(_untraceable(root, error)) from error
    return Trace(root, graph, tracer.taken_apart)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What each attribute of a module holds, by identity."""

    def seen(x: Any) -> Any:
        inside = x.values() if isinstance(x, dict) else x if isinstance(x, (list, set)) else [x]
        return type(x), [*map(id, inside)]

    return {name: seen(x) for name, x in module_vars(module).items()}


class _Lost(ValueError):
    """Something would be lost in silence; the message says all, so nothing is added to it."""


class _Root(nn.Module):
    """A copy of the module, called with its tensors as one list."""

    def __init__(self, module: nn.Module, arguments: TracedArguments) -> None:
        super().__init__()
        shared: list[Any] = [*module.parameters(), *module.buffers()]
        for part in module.modules():
            shared += [x for x in module_vars(part).values() if isinstance(x, Tensor)]
            shared += [hook for table in hook_tables(part).values() for hook in table.values()]
        self.module, self.arguments = deepcopy(module, {id(x): x for x in shared}), arguments
        for part in self.module.modules():
            if couples(part):  # the stand-in is no batch to count, and has no dims to check
                vars(part)[BUFFERS]["num_batches_tracked"] = None
                vars(part)["_check_input_dim"] = lambda _: None

    def forward(self, given: Any) -> Any:
        args, kwargs = self.arguments(given)
        return self.module(*args, **kwargs)


class _Proxy(fx.Proxy):
    """Records ``x[i] = y``, which torch.fx refuses, and ``x += y``, which it takes for a sum."""


def _record(write: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(self: fx.Proxy, *args: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", write, (self, *args), {})

    return recorded


_AUGMENTED = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor"
AUGMENTED = {getattr(operator, name) for name in _AUGMENTED.split()}
WRITES = AUGMENTED | {operator.setitem}
for _write in WRITES:
    setattr(_Proxy, f"__{_write.__name__}__", _record(_write))


class _Tracer(fx.Tracer):
    """torch.fx's tracer, which looks into BatchNorm layers and refuses what would be lost."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.modes, self.thread = _modes(), threading.get_ident()
        self.taken_apart: list[str] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, BATCH_NORMS):
            return not couples(m)
        return super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if threading.get_ident() != self.thread:  # it is nn.Module that torch.fx patches
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):
            self.taken_apart.append(path)
            for kind, hooks in hook_tables(m).items():
                if hooks:
                    raise _Lost(
                        f"{path} ({type(m).__name__}) has {kind}, which would not run: the module "
                        "is taken apart. Remove them."
                    )
        if not couples(m):
            return super().call_module(m, forward, args, kwargs)
        if type(m).forward in _ITS_FORWARDS:
            return super().call_module(m, partial(_batch_norm, m), args, kwargs)
        before = {n for n in self.graph.nodes if n.target is F.batch_norm}
        out = super().call_module(m, forward, args, kwargs)
        if not any(n.target is F.batch_norm and n not in before for n in self.graph.nodes):
            raise _Lost(
                f"{path} ({type(m).__name__}) has a forward of its own which does not call "
                "F.batch_norm, so that there is no cut at it. Call that, or super().forward."
            )
        return out

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise TypeError(
                "it computes under no_grad or autocast, which is not recorded (so "
                "does a torch.autograd.Function: call it in a function under torch.fx.wrap)"
            )
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


def _batch_norm(layer: Any, input: Any) -> Any:
    """What ``forward`` of torch's BatchNorm layers calls, SyncBatchNorm among them."""
    tracked = not layer.training or layer.track_running_stats
    statistics = (layer.running_mean, layer.running_var) if tracked else (None, None)
    affine = layer.weight, layer.bias
    return F.batch_norm(input, *statistics, *affine, True, layer.momentum or 0.0, layer.eps)


_ITS_FORWARDS = (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)


def hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    """The tables of hooks that run when a module is called, by the kind of hook."""
    return {
        name.strip("_").replace("_", " "): table
        for name, table in module_vars(module).items()
        if name.endswith(("ward_hooks", "ward_pre_hooks"))  # forward and backward ones
    }


# Nodes and messages ---------------------------------------------------------------------------


def name_of(node: fx.Node) -> str:
    """What the function, method, module or tensor of a node is called."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def place(node: fx.Node) -> str:
    """The module in whose forward a node stands."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, cls = stack[-1] if stack else ("module", None)
    return f"{path} ({cls.__name__})" if isinstance(cls, type) else str(path)


def _untraceable(root: nn.Module, error: Exception) -> str:
    names = {part: path for path, part in root.named_modules()}
    where, line = "module", ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame, file = trace.tb_frame, trace.tb_frame.f_code.co_filename
        its = frame.f_locals.get("self")
        if isinstance(its, nn.Module) and names.get(its):
            where = f"{names[its]} ({type(its).__name__})"
        if not file.startswith((str(Path(torch.__file__).parent), __file__)):
            code = linecache.getline(file, trace.tb_lineno).strip()
            line = f", at {Path(file).name} line {trace.tb_lineno}: `{code}`"
        trace = trace.tb_next
    return (
        f"{where} cannot be cut at its BatchNorm layers, because torch.fx cannot trace it: "
        f"{error}{line}. What a module computes, and in which order, must not depend on the "
        "numbers or shapes that it is given. Put the branch into a function under torch.fx.wrap, "
        "which is not looked into; or leave microbatch_size out, and the batch is taken whole."
    )


def _check_nodes(nodes: Iterable[fx.Node], root: nn.Module) -> None:
    for node in nodes:
        if node.op == "call_module":
            layer, path = root.get_submodule(str(node.target)), str(node.target)
            for name, inner in layer.named_modules(prefix=path):
                if couples(inner):
                    raise _Lost(
                        f"{name} ({type(inner).__name__}) lies inside {path} "
                        f"({type(layer).__name__}), which torch.fx does not look into, so that "
                        "there is no cut at it. Call it in a forward of your own."
                    )
                tracks = isinstance(inner, _INSTANCE_NORMS) and inner.track_running_stats
                if tracks and inner.training:
                    raise _Lost(written_to(name))
        elif (
            "batch_norm" in name_of(node)
            and node.target is not F.batch_norm
            and in_training(node.target, node.args, node.kwargs)
        ):
            raise _Lost(_no_cut(place(node), node.target))


def written_to(name: str) -> str:
    """The error for a buffer, or a module with buffers, that forward changes."""
    return (
        f"{name} is written to in forward, which is run for every microbatch and again for its "
        "derivatives, and would write each time. Only BatchNorm's running statistics are updated: "
        "expected a module that changes no other buffer (eval() for it, track_running_stats=False)."
    )


_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def watched(func: Any) -> Any:
    """Watch a function, if it is one that torch.fx did not look into."""
    if not isinstance(func, FunctionType) or func.__module__.startswith(("torch", "operator")):
        return func

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before, who = [version(x) for x in given], "a function under torch.fx.wrap"
        with WithoutBatchNorm(lambda norm: RuntimeError(_no_cut(who, norm))):
            out = func(*args, **kwargs)
        if [version(x) for x in given] != before:
            raise RuntimeError(
                f"{func.__name__}, which torch.fx does not look into, writes in place to what it "
                "is given, and would do it twice; expected one that gives a new tensor."
            )
        return out

    return call


def _no_cut(who: str, func: Any) -> str:
    return (
        f"{who} calls {func.__name__} with training=True, where there is no cut; expected "
        "nn.BatchNorm1d, 2d or 3d, or F.batch_norm, in a forward that torch.fx looks into."
    )
