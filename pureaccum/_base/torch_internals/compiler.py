"""Torch's compiler: a loop in a graph, graphs of our own, and its errors."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from traceback import FrameSummary
from types import FunctionType
from typing import Any

import torch

from . import functorch


def scan_in_graph(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: list[torch.Tensor]
) -> tuple[Any, Any]:
    """The last carry and all y, stacked, of ``carry, y = body(carry, x)`` for each row of xs."""
    from torch._higher_order_ops.scan import scan  # imports the compiler: seconds

    return scan(body, carry, xs)


def compile_anew(
    function: Callable[..., Any], wrapped: bool, settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Call ``torch.compile(function, fullgraph=True, **settings)`` on code of its own.

    torch keeps graphs by the code of a function: all closures made by one ``def`` share its
    ``recompile_limit``, and the ninth would not compile. By default it leaves open a size that it
    has seen with two values, and a number: that is slower, and torch.func has no dropout then.
    Here both are constants, and with ``dynamic=True`` numbers alone.
    """
    own = function.__code__.replace(co_name=f"{function.__name__}_{next(_MADE)}")
    function = FunctionType(
        own, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    options: dict[str, Any] = {"guard_filter_fn": _worth_guarding}
    inductor = settings.get("backend", "inductor") == "inductor"
    if wrapped and inductor and functorch.VERSION >= (2, 13):  # on 2.11 it asserts around a scan
        options["cpp_wrapper"] = True
    given: dict[str, Any] = {**settings, "dynamic": bool(settings.get("dynamic"))}
    if "mode" not in settings:  # torch takes one of the two
        given["options"] = options | dict(settings.get("options") or {})
    program = torch.compile(function, fullgraph=True, **given)
    if not given["dynamic"]:
        return program

    def with_constants(*args: Any) -> Any:
        with torch._dynamo.config.patch(specialize_int=True, specialize_float=True):  # pyright: ignore
            return program(*args)

    return with_constants


_MADE = count()


def _worth_guarding(guards: Sequence[Any]) -> list[bool]:
    """Which guards to keep: none on what torch, optree and this package are made of.

    Those take half of a small step's time. What users may change of their own stays guarded. Anyone
    who puts another function into torch itself, or adds hooks to a module, which torch's compiler
    does not guard either, calls ``torch.compiler.reset()``.
    """
    return ["_global_" in guard.name or not _LIBRARY.search(guard.name) for guard in guards]


_LIBRARY = re.compile(
    r"G\['__import_(torch_dot_|optree_dot_|pureaccum_dot_|contextlib')|__import__\('torch'\)"
    r"|\['_tuple_new'\]"  # what the classes of NamedTuples are made of
)


def let_vary(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself; a graph that is made for it will take any number of rows."""
    torch._dynamo.maybe_mark_dynamic(x, 0)  # pyright: ignore
    return x


def is_compiler_error(error: BaseException | None) -> bool:
    """Whether an error is the compiler's own, and not that of a graph which runs."""
    return any(
        cls.__module__.startswith(("torch._dynamo", "torch._inductor", "torch.fx.experimental"))
        for cls in type(error).__mro__
    )


def compiler_stack(error: BaseException) -> list[FrameSummary]:
    """Where in the code the compiler raised an error, outermost first."""
    return list(getattr(error, "real_stack", None) or [])
