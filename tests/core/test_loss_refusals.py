"""A loss that returns no loss is refused at its first call, by what it returned."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa
from pureaccum._base.trees import tree_map
from pureaccum.testing import unchanged
from tests.refusals import PARAMS, Loss, advice_on, make_batch, receivers_but, refused, squares
from tests.runs import RUNS, runs
from tests.tables import each_once


pytestmark = [pytest.mark.faults, pytest.mark.promise("errors"), pytest.mark.table]


def rows(params, batch):
    return batch["x"] @ params["w"]


SCALAR = "expected a 0-d"
BAD = {
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
        lambda p, b: pa.Weighted(None, 2),
        TypeError,
        ("the total of Weighted is None",),
    ),
}
WEIGHTS = {
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
WEIGHT, PAIR = ("real 0-d tensor or a number", "mask"), ("has_aux=True", "(loss, aux)", "Weighted")
LOSSES = (  # and what else the loss is said to return
    {f"loss {name}": (*row, {}) for name, row in BAD.items()}
    | {
        f"weight {name}": (
            lambda p, b, weight=weight: pa.Weighted(squares(p, b), weight),
            TypeError,
            ("the weight of Weighted is " + came, *WEIGHT),
            {},
        )
        for name, (weight, came) in WEIGHTS.items()
    }
    | {
        f"pair {name}": (
            returns,
            TypeError,
            (f"the loss returned {came}", *PAIR),
            {"has_aux": True},
        )
        for name, (returns, came) in NO_PAIRS.items()
    }
)


@each_once("to, returns, error, words, options", receivers_but("microbatches"), LOSSES)
def test_a_loss_is_a_real_scalar_with_a_real_weight_or_a_pair(to, returns, error, words, options):
    loss, batch = Loss(returns), make_batch(2)
    with refused(error, *words, given=(PARAMS, batch), loss=loss, calls=1):
        to.run(loss, PARAMS, batch, **options)


@each_once("transform, returns, error, words", TRANSFORMS, BAD)
def test_a_loss_that_is_not_cut_is_a_real_scalar(transform, returns, error, words):
    loss = Loss(returns)
    with refused(error, *words, given=PARAMS, loss=loss, calls=1):
        transform(loss)(PARAMS, make_batch(2))


NET = torch.nn.Linear(2, 1)
X = torch.ones(4, 2)


def refused_of_net(loss, engine, *words):
    """By a gradient and by a step, of the whole batch and of microbatches."""
    params = pa.functional(NET).params
    for size in (None, 2):
        with refused(ValueError, *words, given=(NET, params)):
            pa.grad(loss, microbatch_size=size, engine=engine)(params, X)
        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, engine=engine)
        state = step.init(params)
        with refused(ValueError, *words, given=(NET, state)):
            step(state, X)


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_a_loss_that_calls_the_module_itself_would_train_nothing(engine):
    """The first mistake of a newcomer: a gradient of zero, step after step."""
    words = "depends on none of the parameters", "calls a Linear with its own", "functional(net)"
    refused_of_net(lambda p, x: NET(x).square().mean(), engine, *words)


def without_graph(p, x):
    with torch.no_grad():
        return of_given(p, x)


of_given = lambda p, x: torch.func.functional_call(NET, p, (x,)).square().mean()  # noqa: E731
HELD = {name: x.detach().clone() for name, x in NET.named_parameters()}
INDEPENDENT = {
    "no_grad": without_graph,
    "detach": lambda p, x: of_given(p, x).detach(),
    "item": lambda p, x: torch.tensor(of_given(p, x).item()),
    "others": lambda p, x: of_given(HELD, x),
    "accuracy": lambda p, x: (of_given(p, x) > 0).float(),
}


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_a_loss_that_depends_on_no_parameter_would_train_nothing(name, engine):
    """torch.func.grad gives zeros, torch.autograd.grad raises."""
    words = "depends on none of the parameters", "fn.params", "detach()"
    refused_of_net(INDEPENDENT[name], engine, *words)


def by_learned_weights(p, x, detach=False):
    weight = torch.func.functional_call(NET, p, (x,)).sigmoid()
    divisor = weight.sum().detach() if detach else weight.sum()
    return pa.Weighted((weight * x[:, :1]).sum(), divisor)


LEARNED = {
    "one": by_learned_weights,
    "a term": lambda p, x: pa.Weighted(len(x) * of_given(p, x), len(x)) + by_learned_weights(p, x),
}


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_weight_that_depends_on_parameters_is_refused(name, engine):
    """Its derivative would be left out: the value is a quotient, and the gradient would not be."""
    params = pa.functional(NET).params
    words = "the weight of Weighted depends on the parameters", "weight.detach()", "pa.microbatch"
    refused_of_net(LEARNED[name], engine, *words)
    pa.grad(partial(by_learned_weights, detach=True), microbatch_size=2, engine=engine)(params, X)
    pa.value(LEARNED[name], microbatch_size=2)(params, X)


DEPENDING = {
    "a constant": lambda p, x: torch.ones(()),
    "a teacher": lambda p, x: (NET(x) - x @ p["weight"].T).square().mean(),
    "functional_call": lambda p, x: torch.func.functional_call(NET, p, (x,)).square().mean(),
    "a constant beside a call": lambda p, x: 0 * torch.func.functional_call(NET, p, (x,)).sum() + 1,
    "a frozen module": lambda p, x: (FROZEN(x) * p["bias"]).square().mean(),
    "nothing that counts": lambda p, x: of_given(p, x) if x.sum() < 0 else torch.zeros(()),
    "a Weighted of nothing": lambda p, x: (of_given(p, x), pa.Weighted(torch.zeros(()), 0))[1],
    "tensors of another shape": lambda p, x: x.square().mean(),
}
FROZEN = torch.nn.Linear(2, 1).requires_grad_(False)


@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("name", DEPENDING)
def test_losses_that_depend_on_their_parameters_may_call_modules(name, engine):
    params = pa.functional(NET).params
    for size in (None, 2):
        pa.grad(DEPENDING[name], microbatch_size=size, engine=engine)(params, X)
        pa.value(lambda p, x: NET(x).square().mean(), microbatch_size=size)(params, X)


# What an error of the loss itself is told --------------------------------------------------

ROWS, PART = 16, 4
W, WIDE, LABELS = torch.ones(3), torch.ones(ROWS, 3), torch.arange(ROWS) % 2
FAIL = {  # where y has 16 samples and x has 4
    "arithmetic": lambda w, x, y: (x @ w - y).square().mean(),
    "cross entropy": lambda w, x, y: nn.functional.cross_entropy(x * w, y),
    "a mask": lambda w, x, y: (x @ w)[y > 0].mean(),
    "stack": lambda w, x, y: torch.stack([x @ w, y.float()]).mean(),
    "a sum of products": lambda w, x, y: torch.einsum("bi,i,b->", x, w, y.float()),
    "a product": lambda w, x, y: ((x * w).T @ y.float()).sum(),
    "vmap": lambda w, x, y: torch.func.vmap(lambda x, y: (x @ w) * y)(x, y).mean(),
    "a pytree": lambda w, x, y: (x["x"] @ w - y["y"][0]).mean(),
}


def first_part(loss, params, batch, *shared):
    """As a stream gives it."""
    return RUNS["accumulator"](
        loss, params, tree_map(lambda x: x[:PART], batch), *shared, size=None
    )


CALLS = {
    name: partial(run, size=PART)
    for name, run in runs(
        *("grad", "value", "microbatch", "step", "vmap"),
        keys=lambda f, *args, **k: RUNS["step"](lambda *its, keys: f(*its), *args, keys=True, **k),
        policy=partial(RUNS["step"], policy=pa.Policy(compute=torch.float64)),
    ).items()
} | {
    "by autograd": partial(RUNS["grad_and_value"], size=[PART] * 4, engine="auto"),
    "accumulator": first_part,
    "in one another": lambda f, w, x, y: pa.grad(
        lambda w, x: pa.microbatch(f, microbatch_size=PART, reduce="mean")(w, x, y)
    )(w, x),
}


@each_once("call, loss", CALLS, FAIL)
def test_a_loss_that_fails_on_rows_is_told_which_argument_may_be_a_batch(call, loss):
    x, y = ({"x": WIDE}, {"y": [LABELS]}) if loss is FAIL["a pytree"] else (WIDE, LABELS)
    with unchanged((W, x, y)), pytest.raises(Exception, match=r"16") as caught:
        call(loss, W, x, y)
    (note,) = [note for note in advice_on(caught.value) if "batch_argnums" in note]
    assert "argument 2 has 16 samples" in note
    assert "pass batch_argnums=(1, 2)" in note
    assert torch.isfinite(loss(W, x, y))


def test_the_argument_may_have_a_name_and_the_batch_be_counted_from_behind():
    loss = FAIL["arithmetic"]
    named = lambda w, x, *, y: loss(w, x, y)  # noqa: E731
    behind = lambda w, y, x: loss(w, x, y)  # noqa: E731
    options = {"microbatch_size": PART}
    for call, words in (
        (lambda: pa.grad(named, **options)(W, WIDE, y=LABELS), "argument 'y' has 16 samples"),
        (
            lambda: pa.grad(behind, batch_argnums=-1, **options)(W, LABELS, WIDE),
            "argument 1 has 16",
        ),
        (
            lambda: pa.microbatch(
                lambda w, *, x, y: loss(w, x, y), batch_argnums=(), batch_argnames="x", **options
            )(W, x=WIDE, y=LABELS),
            "argument 'y' has 16 samples",
        ),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert [words in note for note in advice_on(caught.value)] == [True]
    by_name = {"batch_argnums": (), "batch_argnames": ("x", "y"), "reduce": "mean"} | options
    pa.microbatch(named, **by_name | {"batch_argnums": 1, "batch_argnames": "y"})(W, WIDE, y=LABELS)
    pa.grad(loss, batch_argnums=(1, 2), **options)(W, WIDE, LABELS)


SILENT = {  # errors for other reasons
    "a key": lambda w, x, y: {}["16"],
    "shapes of its own": lambda w, x, y: x @ torch.ones(5),
    "rows of its own": lambda w, x, y: x + torch.ones(7, 1),
    "a number": lambda w, x, y: int("16 samples"),
}


@each_once("call, loss", CALLS, SILENT)
def test_other_errors_of_a_loss_are_told_nothing(call, loss):
    with pytest.raises(Exception, match=r".") as caught:
        call(loss, W, WIDE, LABELS)
    assert not advice_on(caught.value)


LINEAR = pa.functional(torch.nn.Linear(3, 1, bias=False))
AS_TENSOR = {
    "a method": lambda out, x: out.mean(),
    "a difference": lambda out, x: (out - x).mean(),
    "a difference from": lambda out, x: (x - out).mean(),
    "a power": lambda out, x: (out**2).mean(),
    "a function": lambda out, x: torch.mean(out),
    "twice": lambda out, x: (out * 2).mean(),
    "a loss": lambda out, x: nn.functional.mse_loss(out, x),
    "its shape": lambda out, x: x.new_zeros(out.shape),
}


@each_once("call, use", CALLS, AS_TENSOR)
def test_what_apply_returns_is_a_pair(call, use):
    with pytest.raises((TypeError, AttributeError), match="tuple") as caught:
        call(lambda p, x, y: use(LINEAR.apply({"weight": p[None]}, (), x), x), W, WIDE, LABELS)
    (note,) = [note for note in advice_on(caught.value) if "pair" in note]
    assert "out, new_buffers" in note


# An aux that cannot be reduced as asked is refused, by its path and with what else there is ----


Aux = Callable[[Tensor], Any]
ELSE = ("'sum'", "'mean'", "'stack'", "'last'")
NOT_REDUCED = {
    "0-d": ("concat", lambda x: x.sum(), ValueError, ("shape ()", "2 samples", *ELSE)),
    "other rows": ("concat", lambda x: x[:1], ValueError, ("shape (1, 2)", "2 samples", *ELSE)),
    "columns": ("concat", lambda x: x.new_ones(3), ValueError, ("shape (3,)", "2 samples", *ELSE)),
    "a word": ("concat", lambda x: "rows", ValueError, ("is a str", *ELSE)),
    "a number": ("concat", lambda x: 1.5, ValueError, ("is a float", *ELSE)),
    "a stacked word": ("stack", lambda x: "rows", ValueError, ("is a str", "a tensor", "'last'")),
    "a summed word": ("sum", lambda x: "rows", TypeError, ("is a str", "no sum", "'last'")),
    "the mean of a word": ("mean", lambda x: "rows", TypeError, ("is a str", "no mean", "'last'")),
    "the sum of an object": ("sum", lambda x: object(), TypeError, ("is an object", "no sum")),
}
# Good in the first microbatch, of two samples; not in the last, of one.
NOT_ALIKE = {
    "sum of rows": ("sum", lambda x: x, "(1, 2), but (2, 2)"),
    "mean of rows": ("mean", lambda x: x[:, 0], "(1,), but (2,)"),
    "stack of rows": ("stack", lambda x: x, "(1, 2), but (2, 2)"),
    "rows of other lengths": (
        "concat",
        lambda x: x.new_ones(len(x), len(x)),
        "(1, 1), but (2, 2)",
    ),
    "rows of more axes": (
        "concat",
        lambda x: x if len(x) == 2 else x[..., None],
        "(1, 2, 1), but (2, 2)",
    ),
}


def transforms(*names):
    return pytest.mark.parametrize("transform", [pa.grad, pa.grad_and_value, pa.value])


def with_aux(aux):
    return Loss(lambda p, b: (squares(p, b), {"ok": b["x"].sum(1), "a": [aux(b["x"])]}))


def run(transform, loss, how, rows):
    reductions = how if isinstance(how, dict) else {"ok": "concat", "a": how}
    return transform(loss, has_aux=True, microbatch_size=2, aux_reduction=reductions)(
        PARAMS, make_batch(rows)
    )


@transforms()
@pytest.mark.parametrize(("how", "aux", "error", "words"), NOT_REDUCED.values(), ids=NOT_REDUCED)
def test_a_leaf_that_is_not_of_its_kind_is_refused(transform, how, aux, error, words):
    loss = with_aux(aux)
    with refused(error, "aux['a'][0]", *words, given=PARAMS, loss=loss, calls=1):
        run(transform, loss, how, 5)


@transforms()
@pytest.mark.parametrize(("how", "aux", "shapes"), NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_a_leaf_whose_shape_changes_is_refused(transform, how, aux, shapes):
    """Broadcasting two samples against one would be silently wrong."""
    words = (
        f"aux['a'][0] has shape {shapes}",
        repr(how),
        "Use 'concat' for a leaf with one row per sample",
    )
    with refused(ValueError, *words, given=PARAMS):
        run(transform, with_aux(aux), how, 3)


@transforms()
@pytest.mark.parametrize("how", [{"ok": "sum"}, {"ok": "sum", "b": "sum"}, {"ok": ["sum"]}])
def test_a_tree_of_words_that_is_no_prefix_is_refused(transform, how):
    loss = with_aux(lambda x: x.sum())
    words = (f"aux_reduction={how!r} is not a prefix", "aux")
    with refused(ValueError, *words, given=PARAMS, loss=loss, calls=1):
        run(transform, loss, how, 5)


def test_a_tree_of_words_without_an_aux_is_refused():
    """A loss with buffers returns a pair all the same."""
    loss = lambda params, batch, buffers: (squares(params, batch), buffers)  # noqa: E731
    how = {"loss": "mean"}
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, buffers="freeze", aux_reduction=how)
    state = step.init(PARAMS, {"n": torch.ones(1)})
    with refused(
        ValueError, f"aux_reduction={how!r}", "aux without leaves", "has_aux=True", given=state
    ):
        step(state, make_batch())


@transforms()
@pytest.mark.parametrize(
    "changed", [lambda a: {"a": a, "b": a}, lambda a: [a], lambda a: None], ids=["leaf", "list", ""]
)
def test_an_aux_that_changes_its_structure_is_refused(transform, changed):
    loss = Loss(lambda p, b: (squares(p, b), changed(b["x"]) if loss.calls > 1 else {"a": b["x"]}))
    with refused(ValueError, "another structure", "aux", given=PARAMS, loss=loss, calls=2):
        transform(loss, has_aux=True, microbatch_size=2)(PARAMS, make_batch(5))


@transforms()
def test_an_aux_of_no_rows_is_refused(transform):
    """The loss is never called: nobody knows what its aux would look like."""
    loss = with_aux(lambda x: x)
    words = ("no samples", "no aux", "has_aux=True")
    with refused(ValueError, *words, given=PARAMS, loss=loss):
        run(transform, loss, "concat", 0)
