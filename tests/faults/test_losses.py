"""A loss that returns no loss is refused at its first call, by what it returned."""

from typing import Any

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from tests.faults.refusals import (
    PARAMS,
    Loss,
    Receiver,
    make_batch,
    receivers_but,
    refused,
    squares,
)
from tests.tables import each_once


pytestmark = [pytest.mark.core, pytest.mark.promise("errors")]


def rows(params: Any, batch: Any) -> Any:
    return batch["x"] @ params["w"]


SCALAR = "expected a 0-d"
BAD: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "rows": (rows, ValueError, ("the loss has shape (2,)", SCALAR, ".mean()", "Weighted")),
    "one row": (lambda p, b: p["w"][:1], ValueError, ("the loss has shape (1,)", SCALAR)),
    "None": (lambda p, b: None, TypeError, ("the loss is None", SCALAR, "no return statement")),
    "number": (lambda p, b: 1.5, TypeError, ("the loss is a float", SCALAR)),
    "list": (lambda p, b: [p["b"]], TypeError, ("the loss is a list", SCALAR)),
    "pair": (
        lambda p, b: (squares(p, b), rows(p, b)),
        TypeError,
        ("the loss is a tuple of 2", SCALAR, "has_aux=True"),
    ),
    "int": (lambda p, b: torch.tensor(3), TypeError, ("torch.int64", "real floating-point")),
    "bool": (lambda p, b: torch.tensor(True), TypeError, ("torch.bool", "real floating-point")),
    "complex": (lambda p, b: p["b"] * 1j, TypeError, ("torch.complex64", "real part")),
    "total of rows": (
        lambda p, b: pa.Weighted(rows(p, b), 2),
        ValueError,
        ("the total of Weighted has shape (2,)", SCALAR),
    ),
    "total of None": (
        lambda p, b: pa.Weighted(None, 2),  # type: ignore[arg-type]
        TypeError,
        ("the total of Weighted is None",),
    ),
}
WEIGHTS: dict[str, tuple[Any, str]] = {
    "mask": (torch.ones(2, dtype=torch.bool), "a torch.bool tensor of shape (2,)"),
    "one-element": (torch.ones(1), "a torch.float32 tensor of shape (1,)"),
    "complex tensor": (torch.tensor(1j), "a torch.complex64 tensor of shape ()"),
    "complex": (1j, "a complex"),
    "None": (None, "None"),
    "string": ("2", "a str"),
    "list": ([2], "a list"),
}
NO_PAIRS = {
    "a loss": (squares, "a tensor of shape ()"),
    "None": (lambda p, b: None, "None"),
    "a list": (lambda p, b: [squares(p, b), 1], "a list"),
    "one": (lambda p, b: (squares(p, b),), "a tuple of 1"),
    "three": (lambda p, b: (squares(p, b), 1, 2), "a tuple of 3"),
    "Weighted": (lambda p, b: pa.Weighted(squares(p, b), 2), "a Weighted"),
}
TRANSFORMS = {"grad": pa.grad, "grad_and_value": pa.grad_and_value, "value": pa.value}
ALL = receivers_but("microbatches")


@each_once("to, returns, error, words", ALL, BAD)
def test_a_loss_is_a_real_scalar(to: Receiver, returns: Any, error: Any, words: Any) -> None:
    loss, batch = Loss(returns), make_batch(2)
    with refused(error, *words, given=(PARAMS, batch), loss=loss, calls=1):
        to.run(loss, PARAMS, batch)


@each_once("to, weight, came", ALL, WEIGHTS)
def test_a_weight_is_a_real_number(to: Receiver, weight: Any, came: str) -> None:
    loss = Loss(lambda p, b: pa.Weighted(squares(p, b), weight))
    words = ("the weight of Weighted is " + came, "real 0-d tensor or a number", "mask")
    with refused(TypeError, *words, given=PARAMS, loss=loss, calls=1):
        to.run(loss, PARAMS, make_batch(2))


@each_once("to, returns, came", ALL, NO_PAIRS)
def test_a_loss_with_aux_is_a_pair(to: Receiver, returns: Any, came: str) -> None:
    """``Weighted`` is a pair of another kind."""
    loss = Loss(returns)
    words = (f"the loss returned {came}", "has_aux=True", "(loss, aux)", "Weighted")
    with refused(TypeError, *words, given=PARAMS, loss=loss, calls=1):
        to.run(loss, PARAMS, make_batch(2), has_aux=True)


@each_once("transform, returns, error, words", TRANSFORMS, BAD)
def test_a_loss_that_is_not_cut_is_a_real_scalar(
    transform: Any, returns: Any, error: Any, words: Any
) -> None:
    loss = Loss(returns)
    with refused(error, *words, given=PARAMS, loss=loss, calls=1):
        transform(loss)(PARAMS, make_batch(2))


NET = torch.nn.Linear(2, 1)
X = torch.ones(4, 2)


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("size", [None, 2])
def test_a_loss_that_calls_the_module_itself_would_train_nothing(engine: Any, size: Any) -> None:
    """The first mistake of a newcomer: a gradient of zero, step after step."""
    params = pa.functional(NET).params

    def loss(p: Any, x: Tensor) -> Tensor:
        return NET(x).square().mean()

    words = "depends on none of the parameters", "calls a Linear with its own", "functional(net)"
    with refused(ValueError, *words, given=(NET, params)):
        pa.grad(loss, microbatch_size=size, engine=engine)(params, X)
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, engine=engine)
    state = step.init(params)
    with refused(ValueError, *words, given=(NET, state)):
        step(state, X)


DEPENDING: dict[str, Any] = {
    "a constant": lambda p, x: torch.ones(()),
    "a teacher": lambda p, x: (NET(x) - x @ p["weight"].T).square().mean(),
    "functional_call": lambda p, x: torch.func.functional_call(NET, p, (x,)).square().mean(),
    "a constant beside a call": lambda p, x: 0 * torch.func.functional_call(NET, p, (x,)).sum() + 1,
    "a frozen module": lambda p, x: FROZEN(x).square().mean(),
}
FROZEN = torch.nn.Linear(2, 1).requires_grad_(False)


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("name", DEPENDING)
def test_losses_that_depend_on_their_parameters_may_call_modules(name: str, engine: Any) -> None:
    params = pa.functional(NET).params
    for size in (None, 2):
        pa.grad(DEPENDING[name], microbatch_size=size, engine=engine)(params, X)
        pa.value(lambda p, x: NET(x).square().mean(), microbatch_size=size)(params, X)
