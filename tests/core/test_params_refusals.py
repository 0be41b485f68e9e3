"""Params without a gradient, and states that belong to others, are refused; the leaf is named."""

from typing import ClassVar

import pytest
import torch

import pureaccum as pa
from pureaccum._base.checks import check_same_structure
from tests.refusals import PARAMS, Loss, Receiver, make_batch, receivers, refused, squares


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
W = PARAMS["w"]
NOT_DIFFERENTIABLE = {
    "int": (W.int(), (" is torch.int32", "floating-point or complex", "another argument")),
    "bool": (W > 0, (" is torch.bool", "floating-point or complex")),
    "Python float": (1.5, (" is a float", "expected a tensor", "named_parameters")),
    "Python int": (2, (" is a int", "expected a tensor")),
    "module": (torch.nn.Linear(1, 1), (" is a Linear", "expected a tensor", "named_parameters")),
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
    "one more": (PARAMS | {"z": W}, ("['z'] is missing", "2 leaves came", "3 were expected")),
    "one less": ({"w": W}, ("['b'] is not in", "2 leaves came", "1 were expected")),
    "another name": ({"b": W, "v": W}, ("['v'] is missing", "structure")),
    "another container": ([PARAMS["b"], W], ("structure",)),
    "another shape": (PARAMS | {"w": torch.ones(3)}, ("['w'] has shape (2,)", "(3,)")),
}
OWNER = "made from by init"


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
    came = f"the state is a {type(what).__name__}"
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


@pytest.mark.parametrize("size", [100, 1000, 10_000])
@pytest.mark.parametrize("extra", [False, True])
def test_the_message_for_another_structure_looks_at_each_leaf_once(size, extra):
    """It was quadratic: 10 s for 16,000 leaves."""
    want = Spec(Path(f"l{i}") for i in range(size))
    came = Spec([*want, Path("other")] if extra else want[:-1])
    what = "x['other'] is not in params" if extra else f"x['l{size - 1}'] is missing"
    Path.compared = 0
    with refused(ValueError, what, f"{len(came)} leaves came, {size} were expected"):
        check_same_structure(want, came, "params", "x", "")
    assert Path.compared <= 4 * size
