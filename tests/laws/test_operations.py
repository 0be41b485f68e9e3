"""Over all of torch's operations: who looks at a run supplies none of its numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import pureaccum as pa
from pureaccum._core.writes import WriteError, unguarded
from pureaccum.testing import assert_trees_bitwise_equal
from tests.laws.operations import (
    ROWS,
    OfOperation,
    gradient_of_torch,
    losses_of_part,
    parts,
    seeded,
)


pytestmark = [
    pytest.mark.core,
    pytest.mark.promise("purity"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, of its operations
]

WRONG_WHERE_OBSERVED = "linalg.pinv", "polar"  # with complex numbers: pytorch#198118

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "func": lambda f, p: pa.grad_and_value(f, microbatch_size=2)(p, ROWS),
    "autograd": lambda f, p: pa.grad_and_value(f, microbatch_size=2, engine="autograd")(p, ROWS),
    "whole": lambda f, p: pa.grad_and_value(f)(p, ROWS),
    "value": lambda f, p: pa.value(f, microbatch_size=2)(p, ROWS),
    "step": lambda f, p: (step := pa.make_step(f, pa.sgd(1.0), microbatch_size=2))(
        step.init(p), ROWS
    ),
    "primitive": lambda f, p: torch.func.grad(
        lambda p: pa.microbatch(f, microbatch_size=2, reduce="sum")(p, ROWS)
    )(p),
}


@parts
def test_the_first_call_gives_the_bits_of_the_second_and_of_one_that_nobody_guards(
    part: int,
) -> None:
    for of in losses_of_part(part, *WRONG_WHERE_OBSERVED):
        for name, call in CALLS.items():
            expected = found(call, of, lambda p, rows, of=of: of.loss(p, rows), guarded=False)
            loss = lambda p, rows, of=of: of.loss(p, rows)  # noqa: E731
            for when in ("first", "second"):
                came = found(call, of, loss)
                assert (came is None) == (expected is None), (of.name, name, when)
                try:
                    assert_trees_bitwise_equal(came, expected)
                except AssertionError as error:
                    raise AssertionError(f"{of.name}, {name}, the {when} call") from error


def found(
    call: Callable[[Any, Any], Any], of: OfOperation, loss: Any, *, guarded: bool = True
) -> Any:
    """What a call gives; None for a loss that writes, or that torch.func refuses."""
    seeded()
    try:
        if guarded:
            return call(loss, of.params)
        params = [x.clone() for x in of.params]
        with unguarded():
            out = call(loss, params)
        return None if any(map(_differ, params, of.params)) else out
    except (RuntimeError, WriteError):
        return None


def _differ(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x._version > 0 or not torch.equal(x.isnan(), y.isnan())


class Looking(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@parts
def test_a_function_mode_changes_no_bit(part: int) -> None:
    """``microbatch`` finds what is captured by such a mode, in the run that it uses."""
    for of in losses_of_part(part, *WRONG_WHERE_OBSERVED):
        expected = gradient_of_torch(of)
        with Looking():
            came = gradient_of_torch(of)
        assert_trees_bitwise_equal(came, expected)
