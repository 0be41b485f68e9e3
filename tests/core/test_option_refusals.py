"""A knob with a value that it does not have is refused where it is set, not where it is used."""

import numpy as np
import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.refusals import PARAMS, Loss, make_batch, refused, squares
from tests.tables import each_once


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
MAKERS = {
    "grad": pa.grad,
    "grad_and_value": pa.grad_and_value,
    "value": pa.value,
    "accumulator": pa.accumulator,
}
BOTH = ("batch_argnums", "differentiated")
SIZES = [(0, ValueError), (-1, ValueError), *((s, TypeError) for s in (True, 2.0, "2", {2}))]


def makers(*names):
    return pytest.mark.parametrize("make", [MAKERS[n] for n in names or MAKERS], ids=names or None)


@makers("grad", "grad_and_value", "value")
def test_sizes_of_their_own_are_positive_and_make_up_the_batch(make):
    def loss(w, x):
        return (w * x).mean()

    with refused(ValueError, "microbatch_size[1] is 0"):
        make(loss, microbatch_size=(2, 0))
    call = make(loss, microbatch_size=[2, 3])
    with refused(ValueError, "microbatch_size=[2, 3] are 5 rows; the batch has 6"):
        call(torch.ones(()), torch.ones(6))


# Ints of any kind ------------------------------------------------------------------------


def mean_of_both(w, x):
    return (w * x).square().mean()


def a_step_of(**knobs):
    return pa.make_step(mean_of_both, pa.sgd(0.1), **knobs)


def a_step(**knobs):
    step = a_step_of(**knobs)
    return step(step.init(W), X)


class Two:
    def __index__(self):
        return 2


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
    "grad": ("microbatch_size", lambda n: pa.grad(mean_of_both, microbatch_size=n)(W, X)),
    "sizes": (
        "microbatch_size[0]",
        lambda n: pa.grad_and_value(mean_of_both, microbatch_size=[n, 4])(W, X),
    ),
    "value": ("microbatch_size", lambda n: pa.value(mean_of_both, microbatch_size=n)(W, X)),
    "step": ("microbatch_size", lambda n: a_step(microbatch_size=n)),
    "budget": ("memory_budget", lambda n: bool(a_step_of(microbatch_size="auto", memory_budget=n))),
    "microbatches": ("size", lambda n: list(pa.microbatches(X, n))),
    "windows": ("k", lambda n: list(pa.windows(range(5), n))),
    "samples": ("chunk_size", lambda n: pa.per_sample_grad(mean_of_both, chunk_size=n)(W, X)),
    "argnums": (
        "argnums",
        lambda n: pa.grad(lambda a, x, w: mean_of_both(w, x), n, microbatch_size=2)(W, X, W),
    ),
    "several argnums": (
        "argnums[1]",
        lambda n: pa.grad(lambda a, x, w: mean_of_both(w * a, x), (0, n))(W, X, W),
    ),
    "batch_argnums": (
        "batch_argnums",
        lambda n: pa.grad(lambda w, a, x: mean_of_both(w, x), batch_argnums=n)(W, W, X),
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


@makers("grad", "grad_and_value", "value")
@pytest.mark.parametrize(("size", "error"), SIZES)
def test_a_microbatch_size_is_a_positive_int(make, size, error):
    with refused(error, f"microbatch_size is {size!r}", "an int of at least 1", "rows"):
        make(squares, microbatch_size=size)


@pytest.mark.parametrize(("size", "error"), [*SIZES, (None, TypeError)])
def test_the_size_of_microbatches_is_a_positive_int(size, error):
    """Refused by the call, before the first ``next``."""
    with refused(error, f"size is {size!r}", "an int of at least 1", "rows"):
        pa.microbatches(make_batch(), size)


@pytest.mark.parametrize(("k", "error"), [*SIZES, (None, TypeError)])
def test_the_number_of_microbatches_in_a_window_is_a_positive_int(k, error):
    with refused(error, f"k is {k!r}", "an int of at least 1", "microbatches of a window"):
        pa.windows([1, 2, 3], k)


@makers()
@pytest.mark.parametrize("word", ["average", "", None, ["mean"], 1])
def test_an_unknown_reduction_is_refused(make, word):
    with refused(ValueError, f"reduction is {word!r}", "'mean' or 'sum'"):
        make(squares, reduction=word)


@makers("grad", "grad_and_value", "accumulator")
@pytest.mark.parametrize("word", ["ignore", None, True])
def test_unknown_words_of_the_engine_are_refused(make, word):
    with refused(ValueError, f"nonfinite is {word!r}", "'propagate' or 'skip' or 'raise'"):
        make(squares, nonfinite=word)
    with refused(ValueError, f"engine is {word!r}", "'func' or 'autograd'"):
        make(squares, engine=word)


@makers("grad", "grad_and_value", "value")
@pytest.mark.parametrize("reduction", ["join", ["concat", "join"], {"a": ("join",)}])
def test_an_unknown_aux_reduction_is_refused(make, reduction):
    with refused(ValueError, "aux_reduction is 'join'", "'concat' or 'sum'"):
        make(squares, has_aux=True, aux_reduction=reduction)


@makers("grad", "grad_and_value", "accumulator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, "float32", float])
def test_a_sum_is_never_narrower_than_float32(make, dtype):
    with refused(ValueError, f"dtype is {dtype}", "torch.float32 or torch.float64", "bits"):
        make(squares, dtype=dtype)


def said_of(name, argnums):
    return f"{name}[1] is {argnums[1]!r}" if type(argnums) is tuple else f"{name} is {argnums!r}"


@makers("grad", "grad_and_value")
@pytest.mark.parametrize("argnums", ["0", 0.0, None, True, [0], (0, "1"), (0, False)])
def test_argnums_that_are_no_ints_are_refused(make, argnums):
    with refused(TypeError, said_of("argnums", argnums), "an int or a tuple of ints"):
        make(squares, argnums)


@makers()
@pytest.mark.parametrize("argnums", ["1", 1.0, None, True, [1], (1, "2")])
def test_batch_argnums_that_are_no_ints_are_refused(make, argnums):
    with refused(TypeError, said_of("batch_argnums", argnums), "an int or a tuple of ints"):
        make(squares, batch_argnums=argnums)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize(("wrt", "cut"), [(0, 0), (1, 1), ((0, 2), (1, 2)), (-1, -1)])
def test_nothing_is_both_differentiated_and_cut(make, wrt, cut):
    with refused(ValueError, "argument", *BOTH):
        make(squares, wrt, batch_argnums=cut)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(("wrt", "cut"), [(0, -2), (-1, 1), ((0, -1), (1,))])
def test_nothing_counted_from_the_right_is_both_differentiated_and_cut(make, size, wrt, cut):
    """That can only be seen at the call, which is early enough."""
    loss, args = Loss(squares), (PARAMS, make_batch())
    with refused(ValueError, "argument", *BOTH, given=args, loss=loss):
        make(loss, wrt, batch_argnums=cut, microbatch_size=size)(*args)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize("wrt", [2, -3, (0, 5)])
def test_argnums_out_of_range_are_refused(make, wrt):
    loss, args = Loss(squares), (PARAMS, make_batch())
    asked = max(wrt, key=abs) if isinstance(wrt, tuple) else wrt
    with refused(ValueError, f"argnums names argument {asked}", "got 2 positional", loss=loss):
        make(loss, wrt, microbatch_size=2)(*args)


@makers("grad", "grad_and_value", "value")
@pytest.mark.parametrize("cut", [2, -3, (1, 7)])
def test_batch_argnums_out_of_range_are_refused(make, cut):
    loss, args = Loss(squares), (PARAMS, make_batch())
    words = ("batch_argnums names argument", "got 2 positional", "batch_argnums=()")
    with refused(ValueError, *words, given=args, loss=loss):
        make(loss, batch_argnums=cut, microbatch_size=2)(*args)


@makers("grad", "value")
def test_a_batch_passed_by_keyword_is_not_found(make):
    loss = Loss(squares)
    with refused(ValueError, "batch_argnums names argument 1", "passed by position", loss=loss):
        make(loss, microbatch_size=2)(PARAMS, batch=make_batch())


@pytest.mark.parametrize("cut", [0, (0,), (1, 0)])
def test_an_accumulator_does_not_cut_params(cut):
    with refused(ValueError, "argument 0", "params", *BOTH):
        pa.accumulator(squares, batch_argnums=cut)


@pytest.mark.parametrize(("cut", "words"), [(-2, "params"), (4, "argument 4"), (-4, "argument -4")])
def test_an_accumulator_does_not_cut_params_counted_from_the_right(cut, words):
    loss, batch = Loss(squares), make_batch()
    acc = pa.accumulator(loss, batch_argnums=cut)
    state = acc.init(PARAMS)
    with refused(ValueError, "batch_argnums", words, given=(state, batch), loss=loss):
        acc.update(state, PARAMS, batch)
