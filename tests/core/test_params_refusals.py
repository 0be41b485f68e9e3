"""Params without a gradient, and states that belong to others, are refused; the leaf is named."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

import pureaccum as pa
from pureaccum._base import reprs
from pureaccum._base.checks import check_same_structure
from pureaccum.testing import check_accumulation
from tests.refusals import PARAMS, Loss, Receiver, make_batch, receivers, refused, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
W = PARAMS["w"]
NOT_DIFFERENTIABLE = {
    "int": (W.int(), (" is torch.int32", "floating-point or complex", "another argument")),
    "bool": (W > 0, (" is torch.bool", "floating-point or complex")),
    "Python float": (1.5, (" is a float", "expected a tensor", "functional(module)")),
    "Python int": (2, (" is an int", "expected a tensor")),
    "module": (torch.nn.Linear(1, 1), (" is a Linear", "expected a tensor", "functional(module)")),
    "string": ("w", (" is a str", "expected a tensor")),
}


def init(loss, params, batch):
    return pa.accumulator(loss).init(params)


def uncut(loss, params, batch):
    return pa.grad(loss)(params, batch)


EVERY = [Receiver(init, "params", ""), Receiver(uncut, "args[0]", "")]


def refuses(to, params, error, *words):
    loss, batch = Loss(squares), make_batch()
    with refused(error, *words, given=(params, batch), loss=loss):
        to.run(loss, params, batch)


@pytest.mark.parametrize(("leaf", "words"), NOT_DIFFERENTIABLE.values(), ids=NOT_DIFFERENTIABLE)
@receivers("microbatches", "value")
def test_a_leaf_without_gradient_is_refused(to, leaf, words):
    refuses(to, {"b": W, "w": leaf}, TypeError, f"{to.params}['w']" + words[0], *words[1:])


@pytest.mark.parametrize(("leaf", "words"), NOT_DIFFERENTIABLE.values(), ids=NOT_DIFFERENTIABLE)
@pytest.mark.parametrize("to", EVERY, ids=["init", "uncut"])
def test_a_leaf_without_gradient_is_refused_in_init_and_uncut(to, leaf, words):
    refuses(to, [{"w": leaf}], TypeError, f"{to.params}[0]['w']" + words[0], *words[1:])
    refuses(to, leaf, TypeError, to.params + words[0], *words[1:])


@receivers("microbatches", "value")
@pytest.mark.parametrize("params", [None, {}, [None, ()]], ids=["None", "empty", "deep"])
def test_nothing_to_differentiate_is_refused(to, params):
    refuses(to, params, ValueError, "no leaves", "nothing to differentiate")


@pytest.mark.parametrize("to", EVERY, ids=["init", "uncut"])
def test_nothing_to_begin_with_is_refused(to):
    refuses(to, {"w": None}, ValueError, "no leaves", "nothing to differentiate")


OTHERS = {
    "one more": (PARAMS | {"z": W}, ("['z'] is missing", "leaves: got 2, expected 3")),
    "one less": ({"w": W}, ("['b'] is not in", "leaves: got 2, expected 1")),
    "another name": ({"b": W, "v": W}, ("['v'] is missing", "structure")),
    "another container": ([PARAMS["b"], W], ("structure",)),
    "another shape": (PARAMS | {"w": torch.ones(3)}, ("['w'] has shape (2,)", "(3,)")),
}
OWNER = "that init made from these params"


@pytest.mark.parametrize(("params", "words"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_fits_its_params(params, words, donate):
    loss = Loss(squares)
    acc = pa.accumulator(loss)
    state = acc.init(PARAMS)
    named = ("state.grads" + (words[0] if words[0][0] == "[" else ""), "params", *words, OWNER)
    with refused(ValueError, *named, given=(state, params), loss=loss):
        acc.update(state, params, make_batch(), donate=donate)


@pytest.mark.parametrize(("params", "words"), OTHERS.values(), ids=OTHERS)
def test_states_that_are_merged_fit_each_other(params, words):
    acc = pa.accumulator(squares)
    a, b = acc.init(params), acc.init(PARAMS)
    with refused(ValueError, "the second state's grads", "the first", *words, OWNER, given=(a, b)):
        acc.merge(a, b)


@pytest.mark.parametrize("what", [None, PARAMS, (PARAMS, 1.0), "pair"])
@pytest.mark.parametrize("call", ["update", "merge first", "merge second", "finalize"])
def test_what_is_no_state_of_an_accumulator_is_refused(what, call):
    """The pair that ``update`` returns with ``has_aux`` above all."""
    acc = pa.accumulator(squares)
    state = acc.init(PARAMS)
    what = (state, {"aux": W}) if what == "pair" else what
    calls = {
        "update": lambda: acc.update(what, PARAMS, make_batch()),
        "merge first": lambda: acc.merge(what, state),
        "merge second": lambda: acc.merge(state, what),
        "finalize": lambda: acc.finalize(what),
    }
    came = f"the state is {reprs.kind(what)}"
    with refused(TypeError, came, "AccumState", "(state, aux)", given=(state, PARAMS)):
        calls[call]()


class Path(str):
    """Counts how often it is compared."""

    __slots__ = ()
    compared: ClassVar[int] = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Path.compared += 1
        return str.__eq__(self, other)

    def codify(self, root):
        return Path(f"{root}[{self!r}]")


class Spec(list[Path]):
    """A structure of which leaves are asked for their paths, as far as a message asks for it."""

    type: ClassVar[None] = None

    def accessors(self):
        return self


@pytest.mark.mechanism
@pytest.mark.parametrize("size", [100, 1000, 10_000])
@pytest.mark.parametrize("extra", [False, True])
def test_the_message_for_another_structure_looks_at_each_leaf_once(size, extra):
    """It was quadratic: 10 s for 16,000 leaves."""
    want = Spec(Path(f"l{i}") for i in range(size))
    came = Spec([*want, Path("other")] if extra else want[:-1])
    what = "x['other'] is not in params" if extra else f"x['l{size - 1}'] is missing"
    Path.compared = 0
    with refused(ValueError, what, f"leaves: got {len(came)}, expected {size}"):
        check_same_structure(want, came, "params", "x", "")
    assert Path.compared <= 4 * size


# Arguments are checked from the left: who swaps two of them is told of the first ---------------


class Case(NamedTuple):
    """A public function, good arguments, and what is said of a first one that is no such thing."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    words: str


BATCH, KEY, STRANGE = make_batch(), pa.key(0), object()
STATE = "state is an object; this step expects the TrainState"
BUFFERS = {"n": torch.ones(1)}


def of_a_step(name, loss=squares, buffers=None, **options):
    step = pa.make_step(loss, pa.sgd(0.1), buffers=buffers and "freeze", **options)
    state = step.init(PARAMS, buffers)
    window = step.begin(state)
    yield name, Case(step, (state, BATCH), STATE)
    yield f"update, {name}", Case(step.update, (state, window, BATCH), STATE)
    yield f"apply, {name}", Case(step.apply, (state, window), STATE)
    yield f"init, {name}", Case(step.init, (PARAMS, buffers, 0), "params is an object")
    if options.get("compile"):
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
        yield name, Case(acc.update, (acc.init(PARAMS), PARAMS, BATCH), "the state is an object")
    step = pa.make_step(squares, pa.sgd(0.1))
    yield (
        "memory_report",
        Case(pa.memory_report, (step, step.init(PARAMS), BATCH), "step is an object"),
    )
    yield "grad", Case(pa.grad(squares), (PARAMS, BATCH), "args[0] is an object")
    yield "grad, cut", Case(pa.grad(squares, microbatch_size=2), (PARAMS, BATCH), "args[0] is")
    yield "samples", Case(pa.per_sample_grad(squares), (PARAMS, BATCH), "params is an object")
    fn = pa.functional(torch.nn.Linear(2, 1))
    yield "functional", Case(fn.apply, (fn.params, fn.buffers, BATCH["x"]), "params is an object")
    none = "batch holds no tensor (object)"
    yield "microbatches", Case(pa.microbatches, (BATCH, 2), none)
    yield "windows", Case(pa.windows, ([BATCH], 2), "loader is an object")
    yield ("shard_batch", Case(pa.distributed.shard_batch, (BATCH, 0, 2), none))
    yield "fold_in", Case(pa.fold_in, (KEY, 1), "key is <object")
    yield "dropout", Case(pa.dropout, (torch.ones(2), 0.5, KEY), "x is an object")
    yield "normal", Case(pa.normal, (KEY, (2,)), "key is <object")
    scale = pa.dynamic_loss_scale()
    yield (
        "loss scale",
        Case(scale.update, (scale.init(), torch.tensor(True)), "state is an object"),
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
    with refused(TypeError, "state is a dict", "TrainState", "in another order", given=state):
        step(BATCH, state)
    assert step.begin(state)  # not given up
