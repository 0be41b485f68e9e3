"""A knob with a value that it does not have is refused where it is set, not where it is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pureaccum as pa
from tests.faults.refusals import PARAMS, Loss, make_batch, refused, squares


MAKERS: dict[str, Callable[..., Any]] = {
    "grad": pa.grad,
    "grad_and_value": pa.grad_and_value,
    "value": pa.value,
    "accumulator": pa.accumulator,
}
BOTH = ("batch_argnums", "differentiated")
SIZES = [(0, ValueError), (-1, ValueError), *((s, TypeError) for s in (True, 2.0, "2", {2}))]


def makers(*names: str) -> Any:
    return pytest.mark.parametrize("make", [MAKERS[n] for n in names or MAKERS], ids=names or None)


@makers("grad", "grad_and_value", "value")
def test_sizes_of_their_own_are_positive_and_make_up_the_batch(make: Any) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w * x).mean()

    with refused(ValueError, "microbatch_size[1] is 0"):
        make(loss, microbatch_size=(2, 0))
    call = make(loss, microbatch_size=[2, 3])
    with refused(ValueError, "microbatch_size=[2, 3] are 5 rows; the batch has 6"):
        call(torch.ones(()), torch.ones(6))


@makers("grad", "grad_and_value", "value")
@pytest.mark.parametrize(("size", "error"), SIZES)
def test_a_microbatch_size_is_a_positive_int(make: Any, size: Any, error: Any) -> None:
    with refused(error, f"microbatch_size is {size!r}", "expected", "row"):
        make(squares, microbatch_size=size)


@pytest.mark.parametrize(("size", "error"), [*SIZES, (None, TypeError)])
def test_so_is_the_size_of_microbatches(size: Any, error: Any) -> None:
    """Refused by the call, before the first ``next``."""
    with refused(error, f"size is {size!r}", "expected", "row"):
        pa.microbatches(make_batch(), size)


@pytest.mark.parametrize(("k", "error"), [*SIZES, (None, TypeError)])
def test_so_is_the_number_of_microbatches_in_a_window(k: Any, error: Any) -> None:
    """A window of none would end the run, and look like a loader without any batch."""
    with refused(error, f"k is {k!r}", "expected"):
        pa.windows([make_batch()], k)


@makers()
@pytest.mark.parametrize("word", ["average", "", None, ["mean"], 1])
def test_an_unknown_reduction(make: Any, word: Any) -> None:
    with refused(ValueError, f"reduction is {word!r}", "'mean' or 'sum'"):
        make(squares, reduction=word)


@makers("grad", "grad_and_value", "accumulator")
@pytest.mark.parametrize("word", ["ignore", None, True])
def test_unknown_words_of_the_engine(make: Any, word: Any) -> None:
    with refused(ValueError, f"nonfinite is {word!r}", "'propagate' or 'skip' or 'raise'"):
        make(squares, nonfinite=word)
    with refused(ValueError, f"engine is {word!r}", "'func' or 'autograd'"):
        make(squares, engine=word)


@makers("grad", "grad_and_value", "value")
@pytest.mark.parametrize("reduction", ["join", ["concat", "join"], {"a": ("join",)}])
def test_an_unknown_aux_reduction(make: Any, reduction: Any) -> None:
    with refused(ValueError, "aux_reduction is 'join'", "'concat' or 'sum'"):
        make(squares, has_aux=True, aux_reduction=reduction)


@makers("grad", "grad_and_value", "accumulator")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, "float32", float])
def test_a_sum_is_never_narrower_than_float32(make: Any, dtype: Any) -> None:
    with refused(ValueError, f"dtype is {dtype}", "torch.float32 or torch.float64", "bits"):
        make(squares, dtype=dtype)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize("argnums", ["0", 0.0, None, True, [0], (0, "1"), (0, False)])
def test_argnums_that_are_no_ints(make: Any, argnums: Any) -> None:
    with refused(TypeError, f"argnums is {argnums!r}", "an int or a tuple of ints"):
        make(squares, argnums)


@makers()
@pytest.mark.parametrize("argnums", ["1", 1.0, None, True, [1], (1, "2")])
def test_batch_argnums_that_are_no_ints(make: Any, argnums: Any) -> None:
    with refused(TypeError, f"batch_argnums is {argnums!r}", "an int or a tuple of ints"):
        make(squares, batch_argnums=argnums)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize(("wrt", "cut"), [(0, 0), (1, 1), ((0, 2), (1, 2)), (-1, -1)])
def test_nothing_is_both_differentiated_and_cut(make: Any, wrt: Any, cut: Any) -> None:
    with refused(ValueError, "argument", *BOTH):
        make(squares, wrt, batch_argnums=cut)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize(("wrt", "cut"), [(0, -2), (-1, 1), ((0, -1), (1,))])
def test_nor_when_it_is_counted_from_the_right(make: Any, size: Any, wrt: Any, cut: Any) -> None:
    """That can only be seen at the call, which is early enough."""
    loss, args = Loss(squares), (PARAMS, make_batch())
    with refused(ValueError, "argument", *BOTH, given=args, loss=loss):
        make(loss, wrt, batch_argnums=cut, microbatch_size=size)(*args)


@makers("grad", "grad_and_value")
@pytest.mark.parametrize("wrt", [2, -3, (0, 5)])
def test_argnums_out_of_range(make: Any, wrt: Any) -> None:
    loss, args = Loss(squares), (PARAMS, make_batch())
    asked = max(wrt, key=abs) if isinstance(wrt, tuple) else wrt
    with refused(ValueError, f"argnums names argument {asked}", "got 2 positional", loss=loss):
        make(loss, wrt, microbatch_size=2)(*args)


@makers("grad", "grad_and_value", "value")
@pytest.mark.parametrize("cut", [2, -3, (1, 7)])
def test_batch_argnums_out_of_range(make: Any, cut: Any) -> None:
    loss, args = Loss(squares), (PARAMS, make_batch())
    words = ("batch_argnums names argument", "got 2 positional", "batch_argnums=()")
    with refused(ValueError, *words, given=args, loss=loss):
        make(loss, batch_argnums=cut, microbatch_size=2)(*args)


@makers("grad", "value")
def test_a_batch_passed_by_keyword_is_not_found(make: Any) -> None:
    loss = Loss(squares)
    with refused(ValueError, "batch_argnums names argument 1", "passed by position", loss=loss):
        make(loss, microbatch_size=2)(PARAMS, batch=make_batch())


@pytest.mark.parametrize("cut", [0, (0,), (1, 0)])
def test_an_accumulator_does_not_cut_params(cut: Any) -> None:
    with refused(ValueError, "argument 0", "params", *BOTH):
        pa.accumulator(squares, batch_argnums=cut)


@pytest.mark.parametrize(("cut", "words"), [(-2, "params"), (4, "argument 4"), (-4, "argument -4")])
def test_nor_when_counted_from_the_right(cut: Any, words: str) -> None:
    loss, batch = Loss(squares), make_batch()
    acc = pa.accumulator(loss, batch_argnums=cut)
    state = acc.init(PARAMS)
    with refused(ValueError, "batch_argnums", words, given=(state, batch), loss=loss):
        acc.update(state, PARAMS, batch)
