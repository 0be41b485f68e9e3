"""A knob with a value that it does not have is refused where it is set, not where it is used."""

import numpy as np
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import once
from tests.refusals import PARAMS, Loss, make_batch, refused, squares
from tests.tables import each_once


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
MAKERS = {
    "grad": pa.grad,
    "grad_and_value": pa.grad_and_value,
    "value": pa.value,
    "accumulator": pa.accumulator,
}
GRADS, TRANSFORMS = ("grad", "grad_and_value"), ("grad", "grad_and_value", "value")
BOTH = ("batch_argnums", "differentiated")
SIZES = [(0, ValueError), (-1, ValueError), *((s, TypeError) for s in (True, 2.0, "2", {2}))]
SIZED = ("an int of at least 1", "rows")


def named(name, argnums):
    """As an error names it, and what is said of it: the second of several is no int."""
    what = f"{name}[1] is {argnums[1]!r}" if type(argnums) is tuple else f"{name} is {argnums!r}"
    return TypeError, what, "an int or a tuple of ints"


def options():
    """Who refuses, what is given, the error, and words of it."""
    for size, error in SIZES:
        yield TRANSFORMS, {"microbatch_size": size}, error, f"microbatch_size is {size!r}", *SIZED
    yield TRANSFORMS, {"microbatch_size": (2, 0)}, ValueError, "microbatch_size[1] is 0"
    for word in ("average", "", None, ["mean"], 1):
        what = f"reduction is {word!r}"
        yield MAKERS, {"reduction": word}, ValueError, what, "'mean' or 'sum'"
    for word in ("ignore", None, True):
        words = f"nonfinite is {word!r}", "'propagate' or 'skip' or 'raise'"
        yield (*GRADS, "accumulator"), {"nonfinite": word}, ValueError, *words
        words = f"engine is {word!r}", "'func' or 'autograd'"
        yield (*GRADS, "accumulator"), {"engine": word}, ValueError, *words
    for word in ("join", ["concat", "join"], {"a": ("join",)}):
        words = "aux_reduction is 'join'", "'concat' or 'sum'"
        yield TRANSFORMS, {"has_aux": True, "aux_reduction": word}, ValueError, *words
    for dtype in (torch.bfloat16, torch.float16, torch.int64, "float32", float):
        words = f"dtype is {dtype}", "torch.float32 or torch.float64", "bits"
        yield (*GRADS, "accumulator"), {"dtype": dtype}, ValueError, *words
    for argnums in ("0", 0.0, None, True, [0], (0, "1"), (0, False)):
        yield GRADS, {"argnums": argnums}, *named("argnums", argnums)
    for argnums in ("1", 1.0, None, True, [1], (1, "2")):
        yield MAKERS, {"batch_argnums": argnums}, *named("batch_argnums", argnums)
    for wrt, cut in ((0, 0), (1, 1), ((0, 2), (1, 2)), (-1, -1)):
        yield GRADS, {"argnums": wrt, "batch_argnums": cut}, ValueError, "argument", *BOTH
    for cut in (0, (0,), (1, 0)):
        yield ["accumulator"], {"batch_argnums": cut}, ValueError, "argument 0", "params", *BOTH


def cases(table):
    """One for each who refuses."""
    return [
        pytest.param(MAKERS[name], given, error, words, id=f"{name}-{given}")
        for names, given, error, *words in table
        for name in names
    ]


@pytest.mark.parametrize(("make", "given", "error", "words"), cases(options()))
def test_a_value_that_an_option_does_not_have_is_refused(make, given, error, words):
    with refused(error, *words):
        make(squares, **given)


def arguments():
    """What can only be seen at the call, which is early enough."""
    for wrt, cut in ((0, -2), (-1, 1), ((0, -1), (1,))):
        for size in (None, 2):
            given = {"argnums": wrt, "batch_argnums": cut, "microbatch_size": size}
            yield GRADS, given, ValueError, "argument", *BOTH
    for wrt, asked in ((2, 2), (-3, -3), ((0, 5), 5)):
        words = f"argnums names argument {asked}", "got 2 positional"
        yield GRADS, {"argnums": wrt, "microbatch_size": 2}, ValueError, *words
    for cut in (2, -3, (1, 7)):
        words = "batch_argnums names argument", "got 2 positional", "batch_argnums=()"
        yield TRANSFORMS, {"batch_argnums": cut, "microbatch_size": 2}, ValueError, *words


@pytest.mark.parametrize(("make", "given", "error", "words"), cases(arguments()))
def test_what_names_no_argument_or_one_twice_is_refused(make, given, error, words):
    loss, args = Loss(squares), (PARAMS, make_batch())
    with refused(error, *words, given=args, loss=loss):
        make(loss, **given)(*args)


@pytest.mark.parametrize("make", [pa.grad, pa.value])
def test_a_batch_passed_by_keyword_is_not_found(make):
    loss = Loss(squares)
    with refused(ValueError, "batch_argnums names argument 1", "passed by position", loss=loss):
        make(loss, microbatch_size=2)(PARAMS, batch=make_batch())


@pytest.mark.parametrize(("cut", "words"), [(-2, "params"), (4, "argument 4"), (-4, "argument -4")])
def test_an_accumulator_does_not_cut_params_counted_from_the_right(cut, words):
    loss, batch = Loss(squares), make_batch()
    acc = pa.accumulator(loss, batch_argnums=cut)
    state = acc.init(PARAMS)
    with refused(ValueError, "batch_argnums", words, given=(state, batch), loss=loss):
        acc.update(state, PARAMS, batch)


@pytest.mark.parametrize(("size", "error"), [*SIZES, (None, TypeError)])
def test_a_size_is_a_positive_int(size, error):
    """Refused by the call, before the first ``next``."""
    with refused(error, f"size is {size!r}", *SIZED):
        pa.microbatches(make_batch(), size)
    with refused(error, f"k is {size!r}", "an int of at least 1", "microbatches of a window"):
        pa.windows([1, 2, 3], size)


# Ints of any kind ------------------------------------------------------------------------


class Two:
    def __index__(self):
        return 2


def fits(w, x):
    return (w * x).square().mean()


def step_of(**knobs):
    return pa.make_step(fits, pa.sgd(0.1), **knobs)


W, X, KEY = torch.tensor(2.0), torch.arange(6.0), pa.key(0)
TWOS = {"np.int64": np.int64(2), "a 0-d array": np.array(2), "an object": Two()}
NONE = {  # and what is said of it
    "an array": (np.array([2, 4]), "an array of shape (2,)"),
    "a tensor of one": (torch.tensor([2]), "a tensor of shape (1,)"),
    "a bool": (True, "True, a bool"),
    "a bool of numpy": (np.True_, f"{np.True_!r}, a bool"),
    "a bool tensor": (torch.tensor(True), "tensor(True), a Tensor"),
    "a float": (2.0, "2.0, a float"),
}
TAKES = {
    "grad": ("microbatch_size", lambda n: pa.grad(fits, microbatch_size=n)(W, X)),
    "sizes": (
        "microbatch_size[0]",
        lambda n: pa.grad_and_value(fits, microbatch_size=[n, 4])(W, X),
    ),
    "value": ("microbatch_size", lambda n: pa.value(fits, microbatch_size=n)(W, X)),
    "step": ("microbatch_size", lambda n: once(step_of(microbatch_size=n), W, X)),
    "budget": ("memory_budget", lambda n: bool(step_of(microbatch_size="auto", memory_budget=n))),
    "microbatches": ("size", lambda n: list(pa.microbatches(X, n))),
    "windows": ("k", lambda n: list(pa.windows(range(5), n))),
    "samples": ("chunk_size", lambda n: pa.per_sample_grad(fits, chunk_size=n)(W, X)),
    "argnums": (
        "argnums",
        lambda n: pa.grad(lambda a, x, w: fits(w, x), n, microbatch_size=2)(W, X, W),
    ),
    "several argnums": (
        "argnums[1]",
        lambda n: pa.grad(lambda a, x, w: fits(w * a, x), (0, n))(W, X, W),
    ),
    "batch_argnums": (
        "batch_argnums",
        lambda n: pa.grad(lambda w, a, x: fits(w, x), batch_argnums=n)(W, W, X),
    ),
    "key": ("seed", pa.key),
    "split_key": ("n", lambda n: pa.split_key(KEY, n)),
    "growth_interval": (
        "growth_interval",
        lambda n: pa.dynamic_loss_scale(growth_interval=n).update(
            pa.dynamic_loss_scale().init(), torch.tensor(True)
        ),
    ),
    "segments": (
        "segments",
        lambda n: pa.remat_sequential([torch.mul] * 4, segments=n)([W] * 4, X),
    ),
}


@each_once("takes, two", {name: takes for name, (_, takes) in TAKES.items()}, TWOS)
def test_whatever_has_an_index_is_an_int(takes, two):
    assert_trees_bitwise_equal(takes(two), takes(2))


@each_once("root, takes, value, came", TAKES, NONE)
def test_what_has_no_index_is_no_int(root, takes, value, came):
    with refused(TypeError, f"{root} is {came}", "expected an int"):
        takes(value)
