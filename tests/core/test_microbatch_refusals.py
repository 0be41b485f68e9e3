"""What ``pa.microbatch`` cannot cut, add up or differentiate is refused in words that help."""

import itertools
from functools import partial

import pytest
import torch

import pureaccum as pa
from tests.refusals import Loss, refused, saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]
W, X = torch.tensor([1.0, -2.0]), torch.arange(8.0).reshape(4, 2)


def rows(w, x):
    return x * w


def micro(func=rows, size=2, **options):
    return pa.microbatch(func, microbatch_size=size, **options)


OPTIONS = {  # what it is made of, the error, and words of it
    **{
        f"func {name}": ({"func": what}, TypeError, "func is", "expected a function")
        for name, what in {"None": None, "str": "rows", "tensor": W}.items()
    },
    "size 0": ({"size": 0}, ValueError, "microbatch_size is 0"),
    "size 2.0": ({"size": 2.0}, TypeError, "microbatch_size is 2.0"),
    "size (2, 0)": ({"size": (2, 0)}, ValueError, "microbatch_size[1] is 0"),
    "size [True, 3]": ({"size": [True, 3]}, TypeError, "microbatch_size[0] is True"),
    "size large": ({"size": "large"}, TypeError, "microbatch_size is 'large'"),
    **{
        f"reduce {reduction!r}": (
            {"reduce": reduction},
            ValueError,
            "reduce is",
            "'concat' or 'sum'",
            "Reducer",
        )
        for reduction in ("average", 1, ["sum", "all"])
    },
}


@pytest.mark.parametrize(
    ("options", "error", "words"), [(*row[:2], row[2:]) for row in OPTIONS.values()], ids=OPTIONS
)
def test_an_option_that_makes_no_sense_is_refused(options, error, words):
    with refused(error, *words):
        micro(**options)


SIZED = {of.__name__: of for of in (pa.grad, pa.grad_and_value, pa.value)} | {
    "microbatch": partial(pa.microbatch, reduce="sum")
}
ARGUMENTS = {  # of a function that returns its samples, and is never called
    "a name that is no argument": (
        lambda f: micro(f, batch_argnums=(), batch_argnames="x")(W, X),
        *("batch_argnames names 'x'", "batch_argnums"),
    ),
    "a position that is not there": (lambda f: micro(f)(W), "batch_argnums"),
    "a dim that is not there": (lambda f: micro(f, dim=2)(W, X), "args[1]", "(4, 2)", "dim 2"),
    "a shared tensor among rows": (
        lambda f: micro(f)(W, {"x": X, "t": torch.tensor(1.0)}),
        *("args[1]['t']", "0-d"),
    ),
    "rows that disagree": (lambda f: micro(f)(W, {"x": X, "y": X[:3]}), "args[1]['y']", "3", "4"),
    "no rows at all": (lambda f: micro(f)(W, {"n": 3}), "no tensor", "batch_argnums"),
    **{
        f"sizes {sizes} of {name}": (
            lambda f, of=of, sizes=sizes: of(f, microbatch_size=sizes)(W, X),
            *(f"microbatch_size={list(sizes)}", f"{sum(sizes)} samples", "the batch has 4"),
        )
        for name, of in SIZED.items()
        for sizes in ((2, 1), [4, 1], ())
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_cannot_be_cut_is_refused_before_any_work(name):
    run, *words = ARGUMENTS[name]
    func = Loss(lambda w, x: rows(w, x).sum())
    with refused((ValueError, TypeError), *words, given=(W, X), loss=func):
        run(func)


PER_SAMPLE = ("one row per sample", "'sum'", "'mean'", "'stack'", "Weighted")
FIRST = lambda x: bool(x[0, 0] == 0)  # noqa: E731
OUTPUTS = {  # what is called on samples, and words of the error
    "0-d": (micro(lambda w, x: rows(w, x).sum(), 3), "has shape ()", *PER_SAMPLE),
    "too few": (micro(lambda w, x: rows(w, x)[:1], 3), "has shape (1, 2)", *PER_SAMPLE),
    "in a tree": (
        micro(lambda w, x: {"a": x, "b": [x.sum(0)]}, 3),
        *("has shape (2,)", *PER_SAMPLE),
    ),
    # of as many samples as the first microbatch; a ragged one tells
    "a sum that still has rows": (micro(size=3, reduce="sum"), "(1, 2)", "(3, 2)", "'concat'"),
    "reductions that are no prefix": (
        micro(reduce={"a": "sum"}),
        *("reduce=", "prefix of what func returned"),
    ),
    "another structure": (
        micro(lambda w, x: {"a": x} if FIRST(x) else {"a": x, "b": x}),
        "another structure for microbatch 1",
    ),
    "a constant that varies": (
        micro(lambda w, x: (x, "first" if FIRST(x) else "other")),
        "'other', but was 'first'",
    ),
    "rows along a dim that it does not have": (
        lambda w, x: micro(lambda x: x[0, 0], batch_argnums=0, dim=-3)(torch.ones(4, 1, 2)),
        *("out has shape (2,)", "along dim -3"),
    ),
}


def of_another_look(reduce, what):
    """One that would be broadcast or cast to what came before is refused, as torch.cat would."""

    def func(w, x):
        out = x if reduce == "concat" else x.sum(0)
        if FIRST(x):
            return out
        return out[..., :1] if what == "shape" else out.double()

    came = ("(1,)", "(2,)") if reduce != "concat" else ("(2, 1)", "(2, 2)")
    came = came if what == "shape" else ("torch.float64", "torch.float32")
    return micro(func, reduce=reduce), "out", *came, "earlier microbatch"


OUTPUTS |= {
    f"another {what} to {reduce}": of_another_look(reduce, what)
    for reduce in ("concat", "stack", "sum", "mean", "max")
    for what in ("shape", "dtype")
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_reduced_is_refused(name):
    run, *words = OUTPUTS[name]
    with refused(TypeError if "constant" in name else ValueError, *words, given=(W, X)):
        run(W, X)


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
FORWARD = pytest.mark.given_up("captured")  # forward AD does not follow what is captured
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
        *itertools.product(GRADIENTS, ("given",)),
        *(
            pytest.param(by, "captured", marks=FORWARD if "jvp" in by or "tangent" in by else ())
            for by in GRADIENTS
        ),
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

    with saying(
        RuntimeError, "a Reducer over microbatches has no gradient", "'concat'", "detach()"
    ):
        GRADIENTS[by](f)
    assert (torch.func.grad(lambda w: (f(w).detach() * w).sum())(W) == f(W)).all()


@pytest.mark.promise("second run")
def test_a_function_that_is_not_pure_is_refused():
    """It leaves a captured tensor out where it is run again."""
    ran = []

    def loss(w):
        ran.clear()
        z = micro(lambda x: x if ran else x * w, batch_argnums=0)(X)
        ran.append(True)
        return z.square().sum()

    for by in ("grad", "backward"):
        with saying(RuntimeError, "did not use a captured tensor", "not pure", "argument"):
            GRADIENTS[by](loss)


def test_auto_of_a_microbatched_function_is_refused_under_a_transform():
    """To look for a size takes calls of its own, which a transform would see."""
    run = micro(size="auto")
    with refused(RuntimeError, "'auto'"):
        torch.func.grad(lambda w: run(w, X).sum())(W)
