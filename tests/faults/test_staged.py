"""What a list of stages may not be, and what a stage may not return: refused in words that help."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pureaccum as pa
from tests.faults.refusals import Loss, make_batch, refused, saying


PARAMS = {"b": torch.tensor(1.0), "w": torch.tensor([1.0, -2.0])}
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


def encode(params: Any, batch: Any) -> Any:
    return {"h": batch["x"] * params["w"] + params["b"]}


def total(params: Any, x: Any, *values: Any) -> Any:
    return {"sum": x["h"].sum(0), "rows": len(x["h"])}


def moved(params: Any, x: Any, *values: Any) -> Any:
    return {"h": x["h"] * 2}


def squares(params: Any, x: Any, *values: Any) -> Tensor:
    return (x["h"] ** 2).mean()


def contrast(params: Any, x: Any) -> Tensor:
    return (x["h"] @ x["h"].T).logsumexp(1).mean()


GOOD = [pa.rowwise(encode), pa.pooled(total, "sums"), pa.rowwise(squares, reads="sums")]
CALLS = {
    "grad": lambda f, b=None, **given: pa.grad(f, microbatch_size=2)(
        PARAMS, make_batch() if b is None else b, **given
    ),
    "autograd": lambda f, b=None, **given: pa.grad_and_value(
        f, microbatch_size=2, engine="autograd"
    )(PARAMS, make_batch() if b is None else b, **given),
    "value": lambda f, b=None, **given: pa.value(f, microbatch_size=2)(
        PARAMS, make_batch() if b is None else b, **given
    ),
    "full batch": lambda f, b=None, **given: f(PARAMS, make_batch() if b is None else b, **given),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


# The list -------------------------------------------------------------------------------------


def test_no_stages() -> None:
    with refused(ValueError, "no stages", "gives the loss"):
        pa.staged([])


@pytest.mark.parametrize(
    "what",
    [squares, None, "rowwise", (squares, "sums")],
    ids=["a function", "None", "a word", "a pair"],
)
def test_what_is_no_stage(what: Any) -> None:
    helps = ["which says how the function sees the batch"] if callable(what) else []
    with refused(TypeError, "stage 1 is a", type(what).__name__, "rowwise(f)", *helps):
        pa.staged([pa.rowwise(encode), what])


def test_a_pooled_stage_gives_no_loss() -> None:
    with refused(ValueError, "stage 1, pooled(sums)", "last stage", "rowwise or a full"):
        pa.staged(GOOD[:2])


def test_two_values_of_one_name() -> None:
    with refused(ValueError, "stage 2, pooled(sums) pools 'sums'", "stage 1", "names of their own"):
        pa.staged([*GOOD[:2], pa.pooled(total, "sums"), GOOD[2]])


def test_a_value_that_is_pooled_later() -> None:
    stages = [pa.rowwise(encode), pa.rowwise(moved, reads="sums"), *GOOD[1:]]
    with refused(
        ValueError, "stage 1, rowwise(moved) reads 'sums'", "stage 2, pooled(sums)", "Move"
    ):
        pa.staged(stages)


def test_a_value_of_its_own() -> None:
    own = pa.pooled(total, "sums", reads="sums")
    with refused(ValueError, "stage 1, pooled(sums) reads 'sums'", "not before it"):
        pa.staged([GOOD[0], own, GOOD[2]])


@pytest.mark.parametrize("make", [pa.rowwise, pa.full, pa.pooled])
@pytest.mark.parametrize("what", [None, "f", torch.zeros(2)], ids=["None", "str", "tensor"])
def test_a_stage_is_made_of_a_function(make: Any, what: Any) -> None:
    with refused(TypeError, f"{make.__name__}() got", "expected a function"):
        make(what)


@pytest.mark.parametrize("make", [pa.rowwise, pa.full, lambda f, reads: pa.pooled(f, "a", reads)])
@pytest.mark.parametrize("reads", [[1], [None], [("a",)]], ids=repr)
def test_reads_are_names(make: Any, reads: Any) -> None:
    with refused(TypeError, f"reads is {reads!r}", "names"):
        make(squares, reads=reads)


@pytest.mark.parametrize("name", [None, "", 3, "<lambda>"], ids=repr)
def test_a_pooled_lambda_needs_a_name(name: Any) -> None:
    with refused(ValueError, "name is", "by which later stages read"):
        pa.pooled(lambda params, x: x.sum(), name)


@pytest.mark.parametrize("merge", ["sum", 1], ids=repr)
def test_merge_is_a_function(merge: Any) -> None:
    with refused(TypeError, f"merge is {merge!r}", "function of stacked shares"):
        pa.pooled(total, "sums", merge=merge)


@pytest.mark.parametrize("where", ["cpu", None, True, "disk"], ids=repr)
def test_where_boundaries_may_lie(where: Any) -> None:
    with refused(ValueError, "boundaries is", "'device' or 'host'"):
        pa.staged(GOOD, boundaries=where)


# The call ---------------------------------------------------------------------------------------


@calls
def test_a_name_that_nobody_gives(call: Any) -> None:
    """Before any stage runs."""
    first = Loss(encode)
    loss = pa.staged([pa.rowwise(first), pa.rowwise(squares, reads="temperature")])
    words = ("stage 1, rowwise(squares) reads 'temperature'", "keyword argument", "make_step")
    with refused(ValueError, *words, given=PARAMS, loss=first):
        call(loss)
    call(loss, temperature=1.0)


@calls
def test_all_rows_of_no_rows(call: Any) -> None:
    """Cut or not."""
    loss = pa.staged([pa.rowwise(encode), pa.full(contrast)])
    with refused(ValueError, "stage 1, full(contrast)", "without rows"):
        call(loss, make_batch(0))


@pytest.mark.parametrize("make", [pa.grad, pa.grad_and_value])
@pytest.mark.parametrize(
    ("args", "knobs"),
    [
        ((PARAMS, make_batch()), {"argnums": 1, "batch_argnums": 0}),
        ((PARAMS, make_batch(), PARAMS), {}),
        ((PARAMS, make_batch(), PARAMS), {"argnums": (0, 2)}),
        ((PARAMS, make_batch(), make_batch()), {"batch_argnums": (1, 2)}),
        ((make_batch(), PARAMS), {"argnums": 1, "batch_argnums": 0}),
        ((PARAMS, make_batch()), {"batch_argnums": ()}),
    ],
)
@pytest.mark.parametrize("size", [2, None])
def test_other_arguments(make: Any, args: Any, knobs: Any, size: Any) -> None:
    first = Loss(encode)
    loss = pa.staged([pa.rowwise(first), *GOOD[1:]])
    with refused(ValueError, "argument 0", "argument 1", "loss(params, batch)", loss=first):
        make(loss, microbatch_size=size, **knobs)(*args)


def test_the_same_arguments_in_other_words() -> None:
    want = pa.grad(pa.staged(GOOD), microbatch_size=2)(PARAMS, make_batch())
    for knobs in ({"argnums": -2}, {"batch_argnums": -1}, {"batch_argnums": (1,)}):
        got = pa.grad(pa.staged(GOOD), microbatch_size=2, **knobs)(PARAMS, make_batch())
        assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("make", [pa.grad, pa.grad_and_value, pa.value])
@pytest.mark.parametrize("sizes", [(2, 1), [4, 1], (), [5]], ids=str)
@pytest.mark.parametrize("staged", [True, False])
def test_sizes_that_are_not_the_batch_s(make: Any, sizes: Any, staged: bool) -> None:
    first = Loss(encode)
    plain = Loss(lambda params, batch: squares(params, encode(params, batch)))
    loss = pa.staged([pa.rowwise(first), *GOOD[1:]]) if staged else plain
    words = (f"microbatch_size={list(sizes)}", f"{sum(sizes)} rows", "the batch has 4")
    with refused(ValueError, *words, loss=first if staged else plain):
        make(loss, microbatch_size=sizes)(PARAMS, make_batch())


@pytest.mark.parametrize("make", [pa.grad, pa.grad_and_value, pa.value])
@pytest.mark.parametrize(
    ("sizes", "error", "word"),
    [
        ((2, 0), ValueError, "microbatch_size[1] is 0"),
        ([-1, 3], ValueError, "microbatch_size[0] is -1"),
        ([2.0, 2], TypeError, "microbatch_size[0] is 2.0"),
        ([True, 3], TypeError, "microbatch_size[0] is True"),
    ],
)
def test_sizes_are_positive_ints(make: Any, sizes: Any, error: Any, word: str) -> None:
    with refused(error, word, "row"):
        make(pa.staged(GOOD), microbatch_size=sizes)


@pytest.mark.parametrize("size", [2, [2, 2]], ids=str)
@engines
def test_no_microbatch_is_left_out(size: Any, engine: Any) -> None:
    with refused(ValueError, "nonfinite='skip'", "staged", "propagate"):
        pa.grad(pa.staged(GOOD), microbatch_size=size, nonfinite="skip", engine=engine)(
            PARAMS, make_batch()
        )


# What a stage returns --------------------------------------------------------------------------


NO_BOUNDARY = {
    "an array": ("ndarray", lambda x: {"h": x["h"], "n": np.zeros(len(x["h"]))}),
    "a string": ("str", lambda x: {"h": x["h"], "n": "name"}),
    "a float": ("float", lambda x: {"h": x["h"], "n": 1.0}),
    "an int": ("int", lambda x: {"h": x["h"], "n": len(x["h"])}),
}


@calls
@pytest.mark.parametrize("what", NO_BOUNDARY)
@pytest.mark.parametrize("make", [pa.rowwise, pa.full])
def test_a_boundary_is_tensors(call: Any, what: str, make: Any) -> None:
    came, returned = NO_BOUNDARY[what]

    def handed(params: Any, x: Any) -> Any:
        return returned(x)

    loss = pa.staged([pa.rowwise(encode), make(handed), *GOOD[1:]])
    words = ("boundary['n']", f"a {came}", "one row per sample", "pooled")
    with refused(TypeError, *words, given=PARAMS), noted("stage 1"):
        call(loss)


@calls
@pytest.mark.parametrize("make", [pa.rowwise, pa.full])
@pytest.mark.parametrize(
    "returned",
    [lambda h: h.sum(), lambda h: h[:1], lambda h: torch.cat([h, h])],
    ids=["0-d", "fewer", "more"],
)
def test_a_boundary_has_a_row_for_each(call: Any, make: Any, returned: Any) -> None:
    loss = pa.staged(
        [pa.rowwise(encode), make(lambda p, x: {**x, "other": [returned(x["h"])]}), *GOOD[1:]]
    )
    with refused(ValueError, "boundary['other'][0]", "rows", "pooled value"), noted("stage 1"):
        call(loss, make_batch(6))


@calls
@pytest.mark.parametrize("make", [pa.rowwise, pa.full])
@pytest.mark.parametrize("what", [None, (), {"h": None}], ids=repr)
def test_a_stage_without_a_return_statement(call: Any, make: Any, what: Any) -> None:
    loss = pa.staged([pa.rowwise(encode), make(lambda p, x: what), *GOOD[1:]])
    with refused(TypeError, repr(what), "no tensor", "return"), noted("stage 1"):
        call(loss)


@calls
@pytest.mark.parametrize("what", ["text", {"a": ["text"]}, object()], ids=["str", "tree", "object"])
def test_a_share_is_tensors_or_numbers(call: Any, what: Any) -> None:
    loss = pa.staged([GOOD[0], pa.pooled(lambda p, x: {"s": what}, "sums"), GOOD[2]])
    with refused(TypeError, "sums['s']", "summed over the microbatches"), noted("stage 1"):
        call(loss)


@calls
def test_a_share_without_a_return_statement(call: Any) -> None:
    """Or readers would be given None."""
    loss = pa.staged([GOOD[0], pa.pooled(lambda p, x: None, "sums"), GOOD[2]])
    with refused(TypeError, "None", "return"), noted("stage 1"):
        call(loss)


@pytest.mark.parametrize("call", [CALLS["grad"], CALLS["autograd"], CALLS["value"]])
def test_a_structure_that_differs_where_all_rows_are_seen(call: Any) -> None:
    def some(params: Any, batch: Any) -> Any:
        h = encode(params, batch)["h"]
        return {"h": h, "more": h} if batch["x"][0, 0] == 0 else {"h": h}

    loss = pa.staged([pa.rowwise(some), pa.full(contrast)])
    with refused(ValueError, "stage 1, full(contrast)", "sees all rows", "one structure"):
        call(loss)


@pytest.mark.parametrize("call", [CALLS["grad"], CALLS["autograd"], CALLS["value"]])
def test_a_shape_that_differs_where_all_rows_are_seen(call: Any) -> None:
    def some(params: Any, batch: Any) -> Any:
        h = encode(params, batch)["h"]
        return {"h": h[:, : 1 + int(batch["x"][0, 0] == 0)]}

    loss = pa.staged([pa.rowwise(some), pa.full(contrast)])
    words = ("boundary['h']", "(2, 1)", "(2, 2)", "the same but for the rows")
    with refused(ValueError, "stage 1, full(contrast)", *words):
        call(loss)


@pytest.mark.parametrize("call", [CALLS["grad"], CALLS["autograd"], CALLS["value"]])
def test_what_the_last_stage_returns_is_a_loss(call: Any) -> None:
    """And said in the words of any other loss."""
    for returned, words in (
        (lambda x: None, ("None", "return statement")),
        (lambda x: x["h"], ("shape (2, 2)", "0-d")),
        (lambda x: (x["h"].sum(), x["h"]), ("has_aux=True",)),
    ):
        loss = pa.staged([*GOOD[:2], pa.rowwise(lambda p, x, r=returned: r(x))])
        with saying(TypeError if "0-d" not in words else ValueError, *words):
            call(loss)


class noted:
    """That an error bears the note of a stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        assert error is not None
        notes = getattr(error, "__notes__", [])
        assert len(notes) == 1
        assert f"pureaccum: in {self.stage}," in notes[0]


@calls
@pytest.mark.parametrize("at", range(3))
def test_an_error_inside_a_stage_names_it(call: Any, at: int) -> None:
    def bad(params: Any, x: Any, *values: Any) -> Any:
        return x["no such entry"]

    stages = list(GOOD)
    stages[at] = stages[at]._replace(func=bad)
    with pytest.raises(KeyError) as caught:
        call(pa.staged(stages))
    name = "pooled(sums)" if at == 1 else "rowwise(bad)"
    assert caught.value.__notes__ == [f"pureaccum: in stage {at}, {name}"]


# What is not finite ----------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("full", [False, True])
def test_a_loss_that_is_not_finite_is_named(engine: Any, full: bool) -> None:
    end = pa.full(contrast) if full else GOOD[2]
    loss = pa.staged([*GOOD[:2], end])
    batch = make_batch(6)
    batch["x"][3, 0] = torch.nan
    words = ["the loss of microbatch 0" if full else "the loss of microbatch 1"]
    with refused(FloatingPointError, *words, given=(PARAMS, batch)):
        pa.grad(loss, microbatch_size=2, nonfinite="raise", engine=engine)(PARAMS, batch)


@engines
def test_a_gradient_that_is_not_finite_is_named(engine: Any) -> None:
    """The leaf; in which microbatch it became so cannot be told, since all are in all."""
    loss = pa.staged(
        [
            pa.rowwise(lambda p, b: {"h": b["x"] * p["w"] + (p["b"] - 1).sqrt()}),
            pa.pooled(total, "sums"),
            GOOD[2],
        ]
    )
    with saying(FloatingPointError, "the gradient of params['b']") as caught:
        pa.grad(loss, microbatch_size=2, nonfinite="raise", engine=engine)(PARAMS, make_batch())
    assert "params['w']" not in str(caught.value)


def test_looking_is_not_possible_under_a_transform() -> None:
    run = pa.grad(pa.staged(GOOD), microbatch_size=2, nonfinite="raise")
    with refused(RuntimeError, "nonfinite='raise'", "propagate"):
        torch.func.vmap(lambda b: run(PARAMS | {"b": b}, make_batch()))(torch.ones(2))


# Streams and steps -----------------------------------------------------------------------------


def test_an_accumulator_is_given_no_stages() -> None:
    with refused(TypeError, "staged", "come one after the other", "microbatch_size"):
        pa.accumulator(pa.staged(GOOD))


def test_a_step_does_not_stream_it() -> None:
    step = pa.make_step(pa.staged(GOOD), pa.sgd(0.1), microbatch_size=2)
    state = step.init(PARAMS)
    with refused(TypeError, "staged", "step(state, batch)"):
        step.begin(state)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"compile": True}, ("compile", "rowwise(torch.compile(f))")),
        ({"compile": {"mode": "default"}}, ("compile", "rowwise(torch.compile(f))")),
        ({"buffers": "sequential"}, ("buffers='sequential'", "'pooled'", "'freeze'")),
        ({"nonfinite": "skip"}, ("nonfinite='skip'", "propagate")),
    ],
    ids=repr,
)
def test_knobs_of_a_step(knobs: Any, words: Any) -> None:
    with refused(ValueError, "staged", *words):
        pa.make_step(pa.staged(GOOD), pa.sgd(0.1), microbatch_size=2, **knobs)


@pytest.mark.parametrize("size", [2, None])
def test_a_step_says_which_values_it_gives(size: Any) -> None:
    loss = pa.staged([*GOOD[:2], pa.rowwise(squares, reads=("sums", "keys"))])
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size)
    with refused(ValueError, "reads 'keys'", "make_step gives 'keys' and 'buffers'"):
        step(step.init(PARAMS), make_batch())


@pytest.mark.parametrize("size", [2, None])
def test_a_loss_without_its_buffers_is_told_so(size: Any) -> None:
    step = pa.make_step(pa.staged(GOOD), pa.sgd(0.1), microbatch_size=size, buffers="pooled")
    with saying(TypeError, "the loss returned", "(loss, "):
        step(step.init(PARAMS, {"n": torch.zeros(2)}), make_batch())


@pytest.mark.parametrize("size", [2, None])
def test_buffers_of_another_structure(size: Any) -> None:
    """What the last stage returns takes the place of the buffers."""

    def last(params: Any, x: Any, buffers: Any) -> Any:
        return squares(params, x), {"mean": buffers["n"]}

    loss = pa.staged([*GOOD[:2], pa.rowwise(last, reads="buffers")])
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, buffers="pooled")
    with saying(ValueError, "buffers"):
        step(step.init(PARAMS, {"n": torch.zeros(2)}), make_batch())


def test_a_keyword_argument_that_no_stage_reads() -> None:
    """A misspelt name would go unnoticed."""
    loss = pa.staged([pa.rowwise(lambda w, x, weight: (w * x).mean() * weight, reads="weight")])
    for size in (None, 2):
        with saying(ValueError, "'wieght' came as a keyword argument", "no stage reads", "weight"):
            pa.grad(loss, microbatch_size=size)(torch.ones(()), torch.ones(4), wieght=1, weight=2)


def test_a_keyword_argument_by_the_name_of_a_pooled_value() -> None:
    loss = pa.staged(
        [
            pa.pooled(lambda w, x: x.sum(), "sum"),
            pa.rowwise(lambda w, x, sum: (w * x).mean() * sum, reads="sum"),
        ]
    )
    for size in (None, 2):
        with saying(ValueError, "'sum' came as a keyword argument", "name of a pooled value"):
            pa.grad(loss, microbatch_size=size)(torch.ones(()), torch.ones(4), sum=1)


def test_skipping_is_refused_whatever_the_size() -> None:
    loss = pa.staged([pa.rowwise(lambda w, x: (w * x).mean())])
    for size in (None, 2, 8):
        with saying(ValueError, "nonfinite='skip'", "'propagate'"):
            pa.grad(loss, microbatch_size=size, nonfinite="skip")
