"""Arguments are checked from the left: who swaps two of them is told of the first."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import check_accumulation
from tests.refusals import PARAMS, make_batch, refused, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]


class Case(NamedTuple):
    """A public function, good arguments, and what is said of a first one that is no such thing."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    words: str


BATCH, KEY, STRANGE = make_batch(), pa.key(0), object()
STATE = "state is a object; this step expects the TrainState"
BUFFERS = {"n": torch.ones(1)}


def of_a_step(name, loss=squares, buffers=None, **knobs):
    step = pa.make_step(loss, pa.sgd(0.1), buffers=buffers and "freeze", **knobs)
    state = step.init(PARAMS, buffers)
    window = step.begin(state)
    yield name, Case(step, (state, BATCH), STATE)
    yield f"update, {name}", Case(step.update, (state, window, BATCH), STATE)
    yield f"apply, {name}", Case(step.apply, (state, window), STATE)
    yield f"init, {name}", Case(step.init, (PARAMS, buffers, 0), "params is a object")
    if knobs.get("compile"):
        yield f"form, {name}", Case(step.form, (state, BATCH), STATE)


def cases():
    eager = {"backend": "eager"}
    yield from of_a_step("a step")
    yield from of_a_step("a step that cuts", microbatch_size=2)
    yield from of_a_step("a step that finds its size", microbatch_size="auto")
    yield from of_a_step("a step that donates", donate=True)
    yield from of_a_step("a step that compiles", microbatch_size=2, compile=eager)
    yield from of_a_step("a step with buffers", lambda p, b, own: (squares(p, b), own), BUFFERS)
    for name, acc in (
        ("accumulator", pa.accumulator(squares)),
        ("accumulator of samples", pa.per_sample_accumulator(squares)),
    ):
        yield name, Case(acc.update, (acc.init(PARAMS), PARAMS, BATCH), "the state is a object")
    step = pa.make_step(squares, pa.sgd(0.1))
    yield (
        "memory_report",
        Case(pa.memory_report, (step, step.init(PARAMS), BATCH), "step is a object"),
    )
    yield "grad", Case(pa.grad(squares), (PARAMS, BATCH), "args[0] is a object")
    yield "grad, cut", Case(pa.grad(squares, microbatch_size=2), (PARAMS, BATCH), "args[0] is")
    yield "samples", Case(pa.per_sample_grad(squares), (PARAMS, BATCH), "params is a object")
    fn = pa.functional(torch.nn.Linear(2, 1))
    yield "functional", Case(fn.apply, (fn.params, fn.buffers, BATCH["x"]), "params is a object")
    none = "batch holds no tensor (object)"
    yield "microbatches", Case(pa.microbatches, (BATCH, 2), none)
    yield "windows", Case(pa.windows, ([BATCH], 2), "loader is a object")
    yield ("shard_batch", Case(pa.distributed.shard_batch, (BATCH, 0, 2), none))
    yield "fold_in", Case(pa.fold_in, (KEY, 1), "key is <object")
    yield "dropout", Case(pa.dropout, (torch.ones(2), 0.5, KEY), "x is a object")
    yield "normal", Case(pa.normal, (KEY, (2,)), "key is <object")
    scale = pa.dynamic_loss_scale()
    yield (
        "loss scale",
        Case(scale.update, (scale.init(), torch.tensor(True)), "state is a object"),
    )
    yield "check", Case(check_accumulation, (squares, PARAMS, BATCH), "loss_fn is of type object")


CASES = dict(cases())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_argument_is_looked_at_first(case):
    """With one that is no such thing nothing else matters."""
    _, *rest = case.args
    for others in (rest, [STRANGE] * len(rest), case.args[:-1]):
        error = ValueError if "no tensor" in case.words else TypeError
        with refused(error, case.words, given=case.args[0]):
            case.call(STRANGE, *others)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("compile", [False, {"backend": "eager"}])
def test_a_step_asks_whether_state_and_batch_are_swapped(donate, compile):
    step = pa.make_step(squares, pa.sgd(0.1), microbatch_size=2, donate=donate, compile=compile)
    state = step.init(PARAMS)
    with refused(TypeError, "state is a dict", "TrainState", "another order?", given=state):
        step(BATCH, state)
    assert step.begin(state)  # not given up
