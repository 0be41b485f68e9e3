"""What callers hand in, checked before any work begins.

An error names the leaf or the argument, what came, what was expected, and the likely cause. What
passes is returned, as what it stands for: an index as an int, any real number as a float.
"""

import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

from . import containers, dtensors, reprs, trees
from .torch_internals import modes


S = TypeVar("S")
LARGEST_INT = 2**63 - 1  # that torch counts to: of samples, sizes and steps


# Settings ------------------------------------------------------------------------------------


def check_int(
    value: Any, name: str, expected: str, least: int | None = None, most: int | None = None
) -> int:
    """The int that something is, or an error that says what was expected."""
    if type(value) is int:
        number = value
    else:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
        if number is None or shape or isinstance(value, bool) or dtype == torch.bool:
            came = reprs.of_value(value)
            if shape:
                kind = "a tensor" if isinstance(value, Tensor) else "an array"
                came = f"{kind} of shape {tuple(shape)}"
            raise TypeError(f"{name} is {came}; expected {expected}.")
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{name} is {shown(number)}; expected {expected}.")
    return number


def check_stream(stream: Any, name: str, of: str, advice: str) -> None:
    """Raise for a batch, whose parts would pass for items, and for what cannot be iterated."""
    is_batch = isinstance(stream, (Tensor, Mapping, str, tuple))
    if is_batch or not (isinstance(stream, Iterable) or hasattr(stream, "__getitem__")):
        raise TypeError(
            f"{name} is {reprs.kind(stream)}; expected a list or another iterable of {of}. {advice}"
        )


def check_number(
    value: Any,
    name: str,
    expected: str = "a finite number of at least 0",
    fits: Callable[[float], bool] = lambda number: 0 <= number < math.inf,
) -> float:
    """The float that a real number is, or an error that says what was expected."""
    number = as_float(value)
    if not isinstance(number, float):
        raise TypeError(f"{name} is {reprs.of_value(value)}; expected {expected}.")
    if not fits(number):
        raise ValueError(f"{name} is {number!r}; expected {expected}.")
    return number


def as_float(value: Any) -> Any:
    """Any real number as a float, or inf where none is so large; a bool and the rest as it is."""
    if type(value) is float or isinstance(value, bool) or not isinstance(value, Real):
        return value
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def shown(number: int) -> str:
    """An int in a message; Python writes out no more than 4,300 digits, and nobody reads 40."""
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"an int of {bits} bits"


def check_choice(value: Any, choices: Sequence[Any], name: str) -> None:
    """Check that a word is one of a few."""
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}; expected {expected}.")


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that sums have at least: float32 where nothing was said."""
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(
            f"dtype is {dtype}; expected torch.float32 or torch.float64. A sum in fewer bits "
            "stops growing: 4096 times 0.01 in bfloat16 is 4."
        )
    return dtype or torch.float32


# Arguments by their positions ----------------------------------------------------------------


def check_argnums(argnums: Any, name: str) -> tuple[int, ...]:
    """The positions that an int or a tuple of ints stands for, as a tuple."""
    expected = "an int or a tuple of ints"
    if not isinstance(argnums, tuple):
        return (check_int(argnums, name, expected, -LARGEST_INT, LARGEST_INT),)
    several = enumerate(cast("tuple[Any, ...]", argnums))
    return tuple(
        check_int(each, f"{name}[{i}]", expected, -LARGEST_INT, LARGEST_INT) for i, each in several
    )


def positions(
    argnums: tuple[int, ...], count: int, name: str, *, missing: bool = False
) -> tuple[int, ...]:
    """The positions of some of ``count`` arguments, counted from the left.

    A position that no argument has is an error; with ``missing`` it is left out.
    """
    if missing:
        argnums = tuple(argnum for argnum in argnums if -count <= argnum < count)
    for argnum in argnums:
        if not -count <= argnum < count:
            advice = " Pass batches by position, or use batch_argnums=() if there is none."
            raise ValueError(
                f"{name} names argument {argnum}, but the call passed {count} positional "
                f"arguments.{advice if name == 'batch_argnums' else ''}"
            )
    found = tuple(argnum % count for argnum in argnums)
    if len(set(found)) < len(found):
        raise ValueError(
            f"{name} is {argnums!r}, which names an argument twice; expected each argument once."
        )
    return found


def check_disjoint(argnums: tuple[int, ...], batch_argnums: tuple[int, ...]) -> None:
    """Check that no argument is both differentiated and cut."""
    for both in sorted(set(argnums) & set(batch_argnums)):
        raise ValueError(
            f"argument {both} is named by argnums and by batch_argnums. A differentiated argument "
            "is the same for every microbatch, but a batch argument is split. For gradients with "
            "respect to the inputs, use microbatch_size=None or "
            "torch.func.vmap(torch.func.grad(...))."
        )


# Trees ---------------------------------------------------------------------------------------


def read_params(params: trees.Tree, root: str = "params") -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Flatten what is differentiated, or say which leaf has no gradient."""
    leaves, spec = trees.flatten(params)
    if not leaves:
        raise ValueError(
            f"{root} has no leaves, so there is nothing to differentiate. Likely cause: every "
            "parameter of the module is frozen (requires_grad=False)."
        )
    plain = not torch.compiler.is_dynamo_compiling() and dtensors.PLAIN.issuperset(
        map(type, leaves)
    )
    if plain and _FLOATS.issuperset([x.dtype for x in leaves]):
        return leaves, spec
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            if containers.open_tree(params, root)[1] != spec:  # whose classes are known from now on
                return read_params(params, root)
            raise TypeError(
                f"{trees.paths(spec, root)[i]} is {reprs.kind(leaf)}; expected a tensor. "
                "Pass settings and modules in another argument of the function. Pass the "
                "parameters of a module as functional(module).params."
            )
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(
                f"{trees.paths(spec, root)[i]} is {leaf.dtype}; expected a floating-point or "
                "complex tensor, because an integer has no gradient. Likely cause: a buffer or an "
                "index among the parameters. Pass it in another argument of the function."
            )
    i = dtensors.first_partial(leaves)
    if i is not None:
        raise ValueError(
            f"{trees.paths(spec, root)[i]} is a DTensor with a Partial placement, so each rank "
            "holds only a term of the sum. Redistribute it: "
            "param.redistribute(placements=[Replicate()])."
        )
    return leaves, spec


_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def read_tensors(tree: trees.Tree, root: str, cause: str) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """Flatten what a user's function returned, or say which leaf is no tensor."""
    leaves, spec = trees.flatten(tree)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{trees.paths(spec, root)[i]} is {reprs.kind(leaf)}; expected a tensor. {cause}"
            )
    return leaves, spec


def check_state(
    state: Any,
    expected: type[S],
    owner: str,
    root: str = "state",
    cause: str = "Likely cause: the state comes from another configuration, or the arguments are "
    "in another order.",
) -> S:
    """The state itself, or an error that says what its owner expects."""
    if not isinstance(state, expected):
        raise TypeError(
            f"{root} is {reprs.kind(state)}; {owner} expects the {expected.__name__} that "
            f"its init or its last call returned. {cause}"
        )
    return state


def check_same_structure(
    expected: optree.PyTreeSpec,
    came: optree.PyTreeSpec,
    expected_root: str,
    came_root: str,
    cause: str,
) -> None:
    """Raise ValueError naming the first leaf that one tree has and the other has not."""
    # Compilers cannot compare structures (torch 2.11), or mind the order of a dict's keys (2.13).
    if torch.compiler.is_dynamo_compiling() or expected == came:
        return
    want, have = trees.paths(expected, came_root), trees.paths(came, came_root)
    has, wanted = set(have), set(want)
    missing = next((path for path in want if path not in has), None)
    extra = next((path for path in have if path not in wanted), None)
    if missing:
        what = f"{missing} is missing"
    elif extra:
        what = f"{extra} is not in {expected_root}"
    else:
        what = f"the containers differ, got {came}, expected {expected}"
    raise ValueError(
        f"{came_root} does not have the structure of {expected_root}: {what} (leaves: got "
        f"{len(have)}, expected {len(want)}). {cause}"
    )


def check_fits(
    leaves: Sequence[Tensor],
    spec: optree.PyTreeSpec,
    like: Sequence[Tensor],
    like_spec: optree.PyTreeSpec,
    names: tuple[str, str],
    cause: str = "Pass a state that init made from these params.",
) -> None:
    """Check that two trees have one structure, and each leaf one shape, whatever their dtypes."""
    check_same_structure(like_spec, spec, names[1], names[0], cause)
    plain = not torch.compiler.is_dynamo_compiling() and dtensors.PLAIN.issuperset(
        map(type, leaves)
    )
    if (
        plain
        and [x.shape for x in leaves] == [x.shape for x in like]
        and not dtensors.any_sharded(like)
    ):
        return
    for i, (leaf, other) in enumerate(zip(leaves, like, strict=True)):
        if leaf.shape != other.shape:
            raise ValueError(
                f"{trees.paths(spec, names[0])[i]} has shape {tuple(leaf.shape)}; expected "
                f"{tuple(other.shape)}, as in {names[1]}. {cause}"
            )
        if type(leaf) is not type(other) and dtensors.is_sharded(leaf) is not dtensors.is_sharded(
            other
        ):
            kind, expected = (
                ("a DTensor", "plain") if dtensors.is_sharded(leaf) else ("plain", "a DTensor")
            )
            raise ValueError(
                f"{trees.paths(spec, names[0])[i]} is {kind}; expected {expected}, as in "
                f"{names[1]}. {cause}"
            )


# Contexts ------------------------------------------------------------------------------------


def refuse_autocast_cache(leaves: list[Tensor]) -> None:
    """Refuse an autocast region around microbatches: its cache keeps weights of each of them."""
    if torch.compiler.is_dynamo_compiling() or not torch.is_autocast_cache_enabled():
        return
    for device in {leaf.device.type for leaf in leaves}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            raise RuntimeError(
                f"autocast for {device!r} is enabled around this call with its cache on. The "
                "cache would keep a low-precision copy of every weight for every microbatch. "
                "Enable autocast inside the loss function, or pass cache_enabled=False to "
                "autocast."
            )


class Here(threading.local):
    """What this thread is inside of.

    Attributes:
        backward: A backward pass of ours that is recorded: see exchange.py.
        look: What looks at losses before their history is dropped: see history.py.
        first: Of a product of curvature that is to be compared, its arguments: see passes.py.
        compares: Whether such products are compared.
        observed: What undoes a run that is observed: see observation.py.
        note_buffers: Is called with the buffers of a module before and after: see writes.py.
        checks: When losses are checked; that of the class is the process's: see asking.py.
        asked: How many calls have checked their loss: see StepInfo.
        seeks: What looks for the tensors that a function captures: see recomputation.py.
    """

    backward: Any = None
    look: Any = None
    first: Any = None
    compares: bool = True
    observed: Any = None
    note_buffers: Any = None
    checks: str = "first"
    asked: int = 0
    seeks: Any = None


here = Here()


class NoGraphError(RuntimeError):
    """What keeps no graph was called where plain autograd records a loss of ours."""


def refuse_without_graph(what: str) -> None:
    """Raise where what is about to be computed would be taken for a constant.

    Nothing tells so of a loss that is not ours: there a gradient is one more tensor, as it is under
    ``no_grad``.
    """
    backward = here.backward
    while backward is not None and not backward.plain:
        backward = backward.outer
    if backward is None or not torch.is_grad_enabled():
        return
    raise NoGraphError(
        f"{what} keeps no graph, but plain autograd differentiates the loss that calls it, and "
        "would treat the result as a constant. Use torch.func transforms, engine='func' or "
        "engine='auto'. If you want a constant, call it under torch.no_grad()."
    )


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Leave inference mode, in which autograd records nothing, and says nothing."""
    if modes.transform_active() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return torch.inference_mode(False)
