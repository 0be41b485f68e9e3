"""A run in one floating-point dtype, in which nothing is random.

Whatever number an operation takes is cast first: captured tensors, and what a cast, a policy or
autocast made narrow, so that rounding and overflow can be told from what a function computes. A
draw gives numbers that depend on no other row: dropout drops nothing, noise is its mean.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import random_state, trees
from .torch_internals import modes, operations


_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_MEANS: dict[str, Callable[[Mapping[str, Any]], Any]] = {  # of draws, by their arguments
    "bernoulli": lambda _: 1.0,
    "rand": lambda _: 0.5,
    "rand_like": lambda _: 0.5,
    "randn": lambda _: 0.0,
    "randn_like": lambda _: 0.0,
    "uniform": lambda its: (its.get("from", 0.0) + its.get("to", 1.0)) / 2,
    "normal": lambda its: its.get("mean", 0.0),
    "log_normal": lambda _: 1.0,
    "exponential": lambda its: 1.0 / its.get("lambd", 1.0),
    "cauchy": lambda its: its.get("median", 0.0),
    "geometric": lambda _: 1.0,
    "randint": lambda its: its.get("low", 0),
    "randint_like": lambda its: its.get("low", 0),
    "random": lambda its: its.get("from", 0),
    "poisson": lambda its: its["self"],
    "_standard_gamma": lambda its: its["self"],
    "_sample_dirichlet": lambda its: its["self"] / its["self"].sum(-1, keepdim=True),
    "binomial": lambda its: its["count"] * its["prob"],
}
_SWITCHES = {"dropout_p": 0.0, "dropout": 0.0, "training": False}  # that turn draws off


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for i, (name, default) in enumerate(operations.signature_of(operation)[1].items()):
        if name in _SWITCHES:
            return bool(args[i] if len(args) > i else kwargs.get(name, default))
    return True


def becomes(dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """What each other floating-point or complex dtype becomes in a run in this one."""
    found = dict.fromkeys(_REAL, dtype) | dict.fromkeys(_COMPLEX.values(), _COMPLEX[dtype])
    return {old: new for old, new in found.items() if old != new}


def cast_tree(tree: Any, dtype: torch.dtype | None) -> Any:
    """Copies of a tree's tensors, those of floating-point numbers in ``dtype``."""
    others = becomes(dtype) if dtype else {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(others.get(x.dtype, x.dtype), copy=True)

    return trees.tree_map(copy, tree)


def deterministic(dtype: torch.dtype | None) -> Any:
    """A mode in which code runs in a dtype, if one is given, and without chance.

    A draw that it does not know raises.
    """
    others = becomes(dtype) if dtype else {}

    def cast(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.to(others[x.dtype]) if x.dtype in others else x
        if type(x) in (list, tuple):
            return type(x)(map(cast, x))
        return others.get(x, x) if isinstance(x, torch.dtype) else x

    def answer(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if others:
            args, kwargs = cast(args), {name: cast(x) for name, x in kwargs.items()}
        out = (_drawless(operation) if draws(operation, args, kwargs) else operation)(
            *args, **kwargs
        )
        return cast(out) if others else out

    return modes.answering(answer)


def _drawless(operation: Any) -> Callable[..., Any]:
    """What a random operation gives where nothing is random."""
    name, named = operations.signature_of(operation)

    def called(*args: Any, **kwargs: Any) -> Any:
        its = dict(zip(named, args, strict=False)) | kwargs
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "multinomial":  # the same for a row wherever it stands
            return args[0].topk(its["num_samples"]).indices
        if switches := _SWITCHES.keys() & its.keys():
            given = [_SWITCHES.get(n, x) for n, x in zip(named, args, strict=False)]
            return operation(*given, **kwargs | {n: _SWITCHES[n] for n in switches & kwargs.keys()})
        if name not in _MEANS and name != "randperm":
            raise NotImplementedError(f"{name} draws random numbers")
        kwargs |= {"generator": None} if "generator" in kwargs else {}
        x = args[0] if args and isinstance(args[0], Tensor) else None
        with random_state.put_back(torch.device("cpu") if x is None else x.device):
            out = operation(*args, **kwargs)
        if name == "randperm":
            return torch.arange(len(out), dtype=out.dtype, device=out.device)
        mean = _MEANS[name](its)
        return out.copy_(mean) if isinstance(mean, Tensor) else out.fill_(mean)

    return called
