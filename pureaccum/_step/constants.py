"""Python numbers that a compiled step is given: each is a constant of its graphs.

    step(state, {"x": x, "t": 0.3})     one graph for 0.3, and another one for 0.4

So they are computed with as Python does. A graph of a value that came before is used again; the
ninth value of one number raises, since a number that changes at every step would be compiled at
every step. A tensor may change freely. Some settings of a step no graph can have.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._base import refusals, trees
from .._core import seams, writes


MOST_VALUES = 8  # of one number; torch by itself allows as many graphs of one function
DTYPES = {int: "int64", float: "float64", complex: "complex128"}

Values = dict[str, dict[Any, Any]]  # by the path of each number, those that have graphs


def looks_of(leaves: list[Any], shapes: bool = True, skip: int = 0) -> list[Any]:
    """What a graph knows of leaves: dtypes, shapes but for the dims to skip, and constants."""
    return [
        (x.dtype, shapes and x.shape[skip:]) if isinstance(x, Tensor) else _constant_of(x)
        for x in leaves
    ]


def _constant_of(x: Any) -> Any:
    """The type of what is no tensor; of a number its value too: 0.0 is not -0.0, and 1 not 1.0."""
    return (type(x), repr(x)) if _is_number(x) else type(x)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool)


def check_values(values: Values, *given: writes.Given) -> None:
    """Note the value of each number, or raise where one has had too many."""
    new: list[tuple[dict[Any, Any], Any]] = []
    for root, leaves, spec in given:
        for name, x in zip(trees.paths(spec, root), leaves, strict=True):
            if not isinstance(x, Tensor) and hasattr(x, "__array__"):
                raise refusals.CompileError(
                    f"{name} is a {type(x).__module__}.{type(x).__name__}, which a compiler "
                    "treats as a tensor. Pass float(x) or int(x), which is a constant, or "
                    "torch.as_tensor(x)."
                )
            if _is_number(x):
                before = values.setdefault(name, {})
                if len(before) >= MOST_VALUES and _constant_of(x) not in before:
                    raise refusals.CompileError(_sentence(name, x, [*before.values()]))
                new.append((before, x))
    for before, x in new:
        before[_constant_of(x)] = x


def _sentence(name: str, x: Any, before: list[Any]) -> str:
    kind = next(kind for kind in DTYPES if isinstance(x, kind))
    return (
        f"{name} is {x!r} after {', '.join(map(repr, before))}: its ninth value. In a compiled "
        "step a Python number is a constant, and each value needs its own graphs. Pass a number "
        f"that changes at every step as a tensor, torch.tensor({x!r}, "
        f"dtype=torch.{DTYPES[kind]}), in an argument after the batch: step(state, batch, t). It "
        "promotes as a tensor, and a policy casts it. For a size, a range or a branch, use only "
        "these values, or leave compile out."
    )


def check_compilable(rule: seams.Rule, settings: Any) -> None:
    """Check that a step of this rule can compile itself, with these settings."""
    if settings is not True and not isinstance(settings, Mapping):
        raise TypeError(
            f"compile is {settings!r}; expected True, False, or the arguments of torch.compile, "
            'such as {"mode": "reduce-overhead"}.'
        )
    taken = ("backend", "mode", "options", "dynamic")
    strange = [name for name in ({} if settings is True else settings) if name not in taken]
    if strange:
        raise ValueError(
            f"compile has {strange[0]!r}; expected only arguments of torch.compile: "
            f"{', '.join(taken)}."
        )
    if rule.engine == "autograd":
        raise ValueError(
            "engine='autograd' does not work with compile, because a graph is made with "
            "torch.func. For checkpoints, leave compile out. Or use engine='func' without "
            "checkpoints: a graph recomputes cheap operations by itself."
        )
    if rule.nonfinite == "raise":
        raise ValueError(
            "nonfinite='raise' does not work with compile, because it has to look at the numbers, "
            "which a graph cannot. Use 'skip' or 'propagate', and look at info.applied afterwards."
        )
