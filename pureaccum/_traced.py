"""A module's forward as a graph of torch.fx, with its BatchNorm layers as nodes.

torch.fx calls ``forward`` once, with a stand-in for the input, and writes down what it does. What
it would lose without a word is refused here: modes that forward enters, attributes that it
assigns, numbers that it draws, hooks on a module that is taken apart. The graph is of a copy of
the module that shares its tensors: what becomes of the module later changes nothing.
"""

import linecache
import operator
import random
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import wraps
from inspect import signature
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ._torch import module_vars, version
from ._tree import leaves as leaves_of


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def couples(layer: nn.Module) -> bool:
    """Whether a module is a BatchNorm that looks at the batch."""
    if not isinstance(layer, BATCH_NORMS):
        return False
    return layer.training or (layer.running_mean is None and layer.running_var is None)


class _Root(nn.Module):
    """A copy of the module, called with its arguments by name."""

    def __init__(self, module: nn.Module, args: list[str], kwargs: list[str]) -> None:
        super().__init__()
        shared: list[Any] = [*module.parameters(), *module.buffers()]
        for part in module.modules():
            shared += [x for x in module_vars(part).values() if isinstance(x, Tensor)]
            shared += [hook for _, hooks in _hooks(part) for hook in hooks]
        self.module = deepcopy(module, {id(x): x for x in shared})
        self.names = args, kwargs

    def forward(self, given: Any) -> Any:
        args, kwargs = self.names
        return self.module(
            *(given[name] for name in args), **{name: given[name] for name in kwargs}
        )


class _Proxy(fx.Proxy):
    """Records ``x[i] = y`` and ``x += y``, which torch.fx refuses and takes for ``x + y``."""

    def __setitem__(self, at: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, at, value), {})


def _record(write: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", write, (self, other), {})

    return recorded


_AUGMENTED = "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor"
AUGMENTED = {getattr(operator, name): f"__{name}__" for name in _AUGMENTED.split()}
for _write, _name in AUGMENTED.items():
    setattr(_Proxy, _name, _record(_write))


class _Tracer(fx.Tracer):
    """torch's own, with BatchNorm layers as leaves; it refuses what would be lost."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, BATCH_NORMS) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        runs = self.is_leaf_module(m, path) and not couples(m)
        if not runs and (hooks := _hooks(m)):
            raise _Lost(
                f"{path} ({type(m).__name__}) has {hooks[0][0]}, which would not run: the module "
                "is taken apart. Remove them before staged_from."
            )
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise TypeError("it computes under no_grad or autocast, which is not recorded")
        return super().create_node(*args, **kwargs)


def _hooks(module: nn.Module) -> list[tuple[str, list[Any]]]:
    """Those that run when a module is called."""
    kinds = [
        (k, v) for k, v in module_vars(module).items() if k.endswith(("ward_hooks", "_pre_hooks"))
    ]
    return [(k.strip("_").replace("_", " "), [*v.values()]) for k, v in kinds if v and "ward_" in k]


class _Lost(ValueError):
    """Its message says all."""


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


def trace(module: nn.Module, args: list[str], kwargs: list[str]) -> tuple[nn.Module, fx.Graph]:
    """A copy of a module under the name ``module``, and what its forward does, as a graph."""
    root, tracer = _Root(module, args, kwargs), _Tracer()
    before = {part: _attributes(part) for part in root.module.modules()}
    numbers, python = torch.get_rng_state(), random.getstate()
    try:
        graph = tracer.trace(root)
        _check_nodes(graph.nodes, root)
        for path, part in root.module.named_modules(prefix="module"):
            for name, held in _attributes(part).items():
                if held != before[part].get(name):
                    raise _Lost(
                        f"{path} ({type(part).__name__}) assigns its attribute {name!r} in "
                        "forward, but a stage can hand on only what forward returns. Return it."
                    )
        if not torch.equal(numbers, torch.get_rng_state()) or python != random.getstate():
            raise _Lost(
                f"forward of module ({type(module).__name__}) draws random numbers that do not "
                "depend on its input, and so would draw them once for ever: draw them like the "
                "input, torch.rand_like(x), or in a function under torch.fx.wrap."
            )
    except _Lost as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(_untraceable(root, error)) from error
    finally:
        torch.set_rng_state(numbers)
        random.setstate(python)
    return root, graph


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What stands in a module, by identity."""

    def seen(x: Any) -> Any:
        inside = x.values() if isinstance(x, dict) else x if isinstance(x, (list, set)) else [x]
        return type(x), [*map(id, inside)]

    return {name: seen(x) for name, x in module_vars(module).items()}


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
        f"{where} cannot be cut into stages, because torch.fx cannot trace it: {error}{line}. What "
        "a module computes, and in which order, must not depend on the numbers or shapes that it "
        "is given. Put the branch into a function under torch.fx.wrap, which is not looked into, "
        "or write the stages by hand: pa.staged([...]) with pa.batch_norm(...)."
    )


def name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def place(node: fx.Node) -> str:
    """The module in whose forward a node stands."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, cls = stack[-1] if stack else ("module", None)
    return f"{path} ({cls.__name__})" if isinstance(cls, type) else str(path)


# What would go wrong without a word ---------------------------------------------------------


def _check_nodes(nodes: Iterable[fx.Node], root: nn.Module) -> None:
    for node in nodes:
        if node.op == "call_module":
            layer, path = root.get_submodule(str(node.target)), str(node.target)
            if couples(layer):
                _check_batch_norm(layer, path)
                continue
            for name, inner in layer.named_modules(prefix=path):
                if couples(inner):
                    raise _Lost(
                        f"{name} ({type(inner).__name__}) lies inside {path} "
                        f"({type(layer).__name__}), which torch.fx does not look into, so that "
                        "there is no cut at it. Call it in a forward of your own."
                    )
                if (
                    isinstance(inner, _INSTANCE_NORMS)
                    and inner.training
                    and inner.track_running_stats
                ):
                    raise _Lost(written_to(name))
        elif "batch_norm" in name_of(node) and not _is_frozen(node.target, node.args, node.kwargs):
            raise _Lost(_function(place(node), node.target))


def _is_frozen(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    names = "input weight bias running_mean running_var training momentum eps cudnn_enabled"
    if func is F.batch_norm:
        call = signature(F.batch_norm).bind(*args, **kwargs).arguments
    else:
        call = dict(zip(names.split(), args, strict=False)) | {**kwargs}
    return func in (F.batch_norm, torch.batch_norm) and call.get("training", False) is False


def _check_batch_norm(layer: Any, path: str) -> None:
    what = f"{path} ({type(layer).__name__})"
    if type(layer).forward not in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward):
        raise _Lost(
            f"{what} has a forward of its own, of which nobody knows that it is a batch norm; "
            "expected nn.BatchNorm1d, 2d or 3d as it is, and what comes after it in a module of "
            "its own."
        )
    own = dict(layer.named_parameters(recurse=False))
    if any(getattr(layer, k) is not None and k not in own for k in ("weight", "bias")):
        raise _Lost(f"the weight or bias of {what} is parametrized; expected a parameter.")


def written_to(name: str) -> str:
    """A buffer, or a module with buffers, that forward changes."""
    return (
        f"{name} is written to in forward, but each stage runs twice for every microbatch, and "
        "would write twice. Only BatchNorm's running statistics are updated: expected a module "
        "that changes no other buffer (eval() for it, track_running_stats=False)."
    )


_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def watched(func: Any) -> Any:
    """A function, watched if torch.fx did not look into it."""
    if not isinstance(func, FunctionType) or func.__module__.startswith(("torch", "operator")):
        return func

    @wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        before = [version(x) for x in given]
        with _NoBatchNorm():
            out = func(*args, **kwargs)
        if [version(x) for x in given] != before:
            raise RuntimeError(
                f"{func.__name__}, which torch.fx does not look into, writes in place to what it "
                "is given, and would do it twice; expected one that gives a new tensor."
            )
        return out

    return call


class _NoBatchNorm(TorchFunctionMode):
    """Nothing that runs in here may look at the batch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.batch_norm and not _is_frozen(func, args, kwargs or {}):
            raise RuntimeError(_function("a function under torch.fx.wrap", func))
        return func(*args, **(kwargs or {}))


def _function(who: str, func: Any) -> str:
    return (
        f"{who} calls {func.__name__} as a function with training=True; expected a module, "
        "nn.BatchNorm1d, 2d or 3d, in a forward that torch.fx looks into: there the network is cut."
    )
