"""What ``pa.microbatch`` cannot cut, add up or differentiate is refused in words that help."""

import itertools

import pytest
import torch

import pureaccum as pa
from tests.refusals import Loss, refused, saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors")]
W = torch.tensor([1.0, -2.0])
X = torch.arange(8.0).reshape(4, 2)


def rows(w, x):
    return x * w


def micro(func=rows, size=2, **knobs):
    return pa.microbatch(func, microbatch_size=size, **knobs)


# Knobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [None, "rows", W], ids=["None", "str", "tensor"])
def test_what_is_no_function_is_refused(what):
    with refused(TypeError, "func is", "expected a function"):
        micro(what)


@pytest.mark.parametrize(
    ("size", "error", "words"),
    [
        (0, ValueError, ["microbatch_size is 0"]),
        (2.0, TypeError, ["microbatch_size is 2.0"]),
        ((2, 0), ValueError, ["microbatch_size[1] is 0"]),
        ([True, 3], TypeError, ["microbatch_size[0] is True"]),
        ("large", TypeError, ["microbatch_size is 'large'"]),
    ],
)
def test_sizes_are_positive_ints(size, error, words):
    with refused(error, *words):
        micro(size=size)


@pytest.mark.parametrize("sizes", [(2, 1), [4, 1], ()], ids=str)
@pytest.mark.parametrize("of", [pa.microbatch, pa.grad, pa.grad_and_value, pa.value])
def test_sizes_that_are_not_the_batch_s_are_refused(of, sizes):
    func = Loss(lambda w, x: rows(w, x).sum())
    knobs = {"reduce": "sum"} if of is pa.microbatch else {}
    words = (f"microbatch_size={list(sizes)}", f"{sum(sizes)} rows", "the batch has 4")
    with refused(ValueError, *words, given=(W, X), loss=func):
        of(func, microbatch_size=sizes, **knobs)(W, X)


@pytest.mark.parametrize("word", ["average", 1, ["sum", "all"]], ids=repr)
def test_unknown_words_are_refused(word):
    with refused(ValueError, "reduce is", "'concat' or 'sum'", "Reducer"):
        micro(reduce=word)


def test_a_name_that_is_no_argument_is_refused():
    func = Loss(rows)
    run = micro(func, batch_argnums=(), batch_argnames="x")
    with refused(ValueError, "batch_argnames names 'x'", "batch_argnums", given=(W, X), loss=func):
        run(W, X)


def test_a_position_that_is_not_there_is_refused():
    func = Loss(rows)
    with refused(ValueError, "batch_argnums", given=W, loss=func):
        micro(func)(W)


# Batches -----------------------------------------------------------------------------------


NO_BATCH = {
    "a shared tensor among rows": ({"x": X, "t": torch.tensor(1.0)}, ["args[1]['t']", "0-d"]),
    "rows that disagree": ({"x": X, "y": X[:3]}, ["args[1]['y']", "3", "4"]),
    "no rows at all": ({"n": 3}, ["no tensor", "batch_argnums"]),
}


@pytest.mark.parametrize("what", NO_BATCH)
def test_what_is_no_batch_is_refused(what):
    """Before any work."""
    batch, words = NO_BATCH[what]
    func = Loss(lambda w, b: b["x"])
    with saying((ValueError, TypeError), *words):
        micro(func)(W, batch)
    assert func.calls == 0


def test_a_dim_that_is_not_there_is_refused():
    func = Loss(rows)
    with refused(ValueError, "args[1]", "(4, 2)", "dim 2", given=(W, X), loss=func):
        micro(func, dim=2)(W, X)


# Outputs -----------------------------------------------------------------------------------


NO_ROWS = {
    "0-d": (lambda w, x: rows(w, x).sum(), "()"),
    "too few": (lambda w, x: rows(w, x)[:1], "(1, 2)"),
    "in a tree": (lambda w, x: {"a": x, "b": [x.sum(0)]}, "(2,)"),
}


@pytest.mark.parametrize("what", NO_ROWS)
def test_outputs_that_are_not_rows_are_refused(what):
    func, shape = NO_ROWS[what]
    words = (f"has shape {shape}", "one row per sample", "'sum'", "'mean'", "'stack'", "Weighted")
    with refused(ValueError, *words, given=(W, X)):
        micro(func, 3)(W, X)


def test_a_sum_that_still_has_rows_is_refused():
    """Of as many rows as the first microbatch; a ragged one tells."""
    with refused(ValueError, "(1, 2)", "(3, 2)", "'concat'", given=(W, X)):
        micro(size=3, reduce="sum")(W, X)


def test_words_that_are_no_prefix_are_refused():
    with refused(ValueError, "reduce=", "prefix of what func returned", given=(W, X)):
        micro(reduce={"a": "sum"})(W, X)


def test_another_structure_in_another_microbatch_is_refused():
    func = lambda w, x: {"a": x} if x[0, 0] == 0 else {"a": x, "b": x}  # noqa: E731
    with refused(ValueError, "another structure for microbatch 1", given=(W, X)):
        micro(func)(W, X)


def test_a_constant_that_varies_is_refused():
    func = lambda w, x: (x, "first" if x[0, 0] == 0 else "other")  # noqa: E731
    with refused(TypeError, "'other' after 'first'", given=(W, X)):
        micro(func)(W, X)


# Derivatives ---------------------------------------------------------------------------------


GRADIENTS = {
    "grad": lambda f: torch.func.grad(lambda w: f(w).sum())(W),
    "jvp": lambda f: torch.func.jvp(f, (W,), (W,))[1].sum(),
    "jvp, read": lambda f: repr(torch.func.jvp(f, (W,), (W,))),
    "gradient of a tangent": lambda f: torch.func.grad(
        lambda w: torch.func.jvp(f, (w,), (W,))[1].view(2)[0]
    )(W),
    "backward": lambda f: f(W.clone().requires_grad_()).sum().backward(),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda w: f(w).sum()))(
        torch.stack([W, W])
    ),
}
BEST = pa.Reducer(
    lambda like: like.new_zeros(like.shape),
    lambda state, values, weights: torch.maximum(state, values.amax(0)),
    torch.maximum,
    lambda state: state,
)


@torch.jit.script
def scripted(w, x):
    return x * w


@pytest.mark.parametrize(
    ("by", "way"),
    [
        *itertools.product(GRADIENTS, ("given", "captured")),
        # torch runs no scripted function under forward AD or vmap
        *itertools.product(("grad", "backward"), ("captured in a script",)),
    ],
)
def test_a_gradient_of_what_has_none_is_refused(by, way):
    """Whether what it would be taken for is given or captured, and where it is used or read."""

    def f(w):
        if way == "given":
            return micro(lambda w, x: rows(w, x).amax(0), reduce=BEST)(w, X)
        of = scripted if way == "captured in a script" else rows
        return micro(lambda x: of(w, x).amax(0), batch_argnums=0, reduce=BEST)(X)

    with saying(RuntimeError, "a gradient was asked of a Reducer", "'concat'", "detach()"):
        GRADIENTS[by](f)
    assert (torch.func.grad(lambda w: (f(w).detach() * w).sum())(W) == f(W)).all()


def test_a_function_that_is_not_pure_is_refused():
    """It leaves a captured tensor out where it is run again."""
    ran = []

    def loss(w):
        ran.clear()
        z = micro(lambda x: x if ran else x * w, batch_argnums=0)(X)
        ran.append(True)
        return z.square().sum()

    for by in ("grad", "backward"):
        with saying(RuntimeError, "did not use again a captured tensor", "not pure", "argument"):
            GRADIENTS[by](loss)


def test_auto_of_a_microbatched_function_is_refused_under_a_transform():
    """To look for a size takes calls of its own, which a transform would see."""
    run = micro(size="auto")
    with refused(RuntimeError, "'auto'"):
        torch.func.grad(lambda w: run(w, X).sum())(W)


@pytest.mark.parametrize("reduce", ["concat", "stack", "sum", "mean", "max"])
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_microbatches_of_another_look_are_refused(reduce, what):
    """One that would be broadcast or cast to what came before is refused, as torch.cat would."""

    def func(x):
        out = x if reduce == "concat" else x.sum(0)
        if float(x[0, 0]) == 0:
            return out
        return out[..., :1] if what == "shape" else out.double()

    x = torch.arange(8.0).reshape(4, 2)
    came = ("(1,)", "(2,)") if reduce != "concat" else ("(2, 1)", "(2, 2)")
    came = came if what == "shape" else ("torch.float64", "torch.float32")
    with refused(ValueError, "out", *came, "microbatch before", given=x):
        pa.microbatch(func, microbatch_size=2, batch_argnums=0, reduce=reduce)(x)


def test_rows_along_a_dim_that_an_output_does_not_have_are_refused():
    func = lambda x: x[0, 0]  # noqa: E731
    with refused(ValueError, "out has shape (2,)", "along dim -3"):
        pa.microbatch(func, microbatch_size=2, batch_argnums=0, dim=-3)(torch.ones(4, 1, 2))
