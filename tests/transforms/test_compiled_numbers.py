"""Python numbers that change from step to step, around a step that compiles itself.

In the batch they may change at every step; what else the loss reads is a constant of the graph.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pureaccum as pa
from pureaccum._step.compiled import CompileError
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.transforms.test_compiled_step import counting, pair
from tests.transforms.test_step import leaves


pytestmark = [pytest.mark.step, pytest.mark.promise("compiled")]
STEPS = 11  # torch compiles the same code no more than eight times
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Case(NamedTuple):
    """A loss, the number that it is given at a step, and what it computes in."""

    loss: Callable[[Tensor, Any], Any]
    number: Callable[[int], float]
    dtype: torch.dtype = F32
    knobs: dict[str, Any] = {}  # noqa: RUF012
    rounding: torch.dtype | None = None


def rows(w: Tensor, b: Any) -> Tensor:
    return (b["x"] @ w).square()


def mean(w: Tensor, b: Any) -> Tensor:
    return rows(w, b).mean() * b["t"]


def with_aux(w: Tensor, b: Any) -> Any:
    """Only the aux without dimensions could be too wide."""
    return (rows(w, b) * b["t"]).mean(), {"last": mean(w, b), "rows": rows(w, b) * b["t"]}


def half(step: int) -> float:
    return 0.5 * step


def itself(step: int) -> int:
    return step


AUX: dict[str, Any] = {"has_aux": True, "aux_reduction": {"last": "last", "rows": "concat"}}
CASES = {
    "a float, microbatches together": Case(mean, half),
    "an int, microbatches together": Case(mean, itself),
    "a float, unrolled": Case(mean, half, knobs={"microbatch_size": None}),
    "a float, in float64": Case(mean, lambda i: i / 3, F64, {"nonfinite": "skip"}),
    "a float, in bfloat16": Case(mean, half, BF16),
    "an int that is divided": Case(
        lambda w, b: rows(w, b).mean() * (1 - b["t"] / 1000), itself, F64, {"nonfinite": "skip"}
    ),
    "a float that bounds": Case(lambda w, b: rows(w, b).clamp(max=b["t"]).sum(), half),
    "aux": Case(with_aux, half, knobs=AUX),
    "a weight": Case(lambda w, b: pa.Weighted(rows(w, b).sum(), b["t"]), lambda i: 3 + i),
    "a float too small for float16": Case(
        lambda w, b: (rows(w, b).float() * 1e12 * b["t"]).mean(),
        lambda i: i * 1e-12,
        knobs={"policy": pa.Policy(compute=torch.float16)},
        rounding=torch.float16,
    ),
}


def make_batch(step: int, dtype: torch.dtype, t: Any, count: int = 8) -> Any:
    return {"x": torch.randn(count, 3, generator=generator(step)).to(dtype), "t": t}


def alike(got: Any, want: Any, dtype: torch.dtype) -> None:
    """The same dtypes, and the same numbers up to the rounding of a few operations."""
    for x, y in zip(leaves(got), leaves(want), strict=True):
        assert x.dtype == y.dtype
        bound = 32 * torch.finfo(dtype).eps if x.is_floating_point() else 0
        assert (x - y).double().norm() <= bound * y.double().norm() if bound else torch.equal(x, y)


IN_SHORT = ("a float, microbatches together", "an int that is divided")


@pytest.mark.parametrize(
    "name", [n if n in IN_SHORT else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_number_in_the_batch_may_change_at_every_step(name: str) -> None:
    """It is compiled once, and 0 and 1 are numbers as others are."""
    case = CASES[name]
    settings, graphs = counting()
    ours, eager = pair(case.loss, pa.sgd(0.01), compile=settings, **case.knobs)
    state = ours.init(torch.ones(3, 1, dtype=case.dtype))
    for i in range(STEPS):
        batch = make_batch(i, case.dtype, case.number(i))
        alike(ours(state, batch), eager(state, batch), case.rounding or case.dtype)
    assert len(graphs) == 1


@pytest.mark.parametrize("form", [pytest.param("loop", marks=pytest.mark.slow), "stream"])
def test_a_number_may_change_in_every_form_of_a_step(form: str) -> None:
    settings, graphs = counting()

    def loss(params: Any, batch: Any) -> Tensor:
        return mean(params["w"], batch) + params["table"][0].sum()

    ours, eager = pair(loss, pa.sgd(0.01), nonfinite="skip", compile=settings)
    table = torch.zeros(600_000 if form == "loop" else 1, 4)
    count = 10 if form == "loop" else 8
    state = ours.init({"w": torch.ones(3, 1), "table": table})
    for i in range(STEPS):
        batch = make_batch(i, F32, half(i), count)
        if form == "stream":
            both = (ours, eager)
            got, want = (s.apply(state, s.update(state, s.begin(state), batch)) for s in both)
        else:
            assert ours.form(state, batch) == form
            got, want = ours(state, batch), eager(state, batch)
        alike(got, want, F32)
    assert len(graphs) == {"loop": 3, "stream": 2}[form]


@pytest.mark.parametrize("form", ["whole", pytest.param("stream", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtypes", [(F32, F64), pytest.param((BF16, F32), marks=pytest.mark.slow)])
def test_a_number_is_as_wide_as_what_it_meets(form: str, dtypes: Any) -> None:
    """Whatever this step has met before: 0.1 is not that of a narrower state."""

    def loss(w: Tensor, b: Any) -> Tensor:
        return (w * b["t"] - 1) ** 2 + 0 * b["x"].sum()

    ours, eager = pair(loss, pa.sgd(0.1))
    for dtype in (*dtypes, *dtypes):
        state, batch = ours.init(torch.tensor(3.0, dtype=dtype)), make_batch(0, dtype, 0.1)
        if form == "stream":
            both = (ours, eager)
            got, want = (s.apply(state, s.update(state, s.begin(state), batch)) for s in both)
        else:
            got, want = ours(state, batch), eager(state, batch)
        alike(got, want, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("number", [half, itself])
def test_a_number_may_change_by_inductor(number: Any) -> None:
    ours, eager = pair(mean, pa.sgd(0.01), compile=True)
    state = ours.init(torch.ones(3, 1))
    for i in range(3):
        batch = make_batch(i, F32, number(i))
        alike(ours(state, batch), eager(state, batch), F32)


# Numbers that the loss has to know ------------------------------------------------------------


def powers(w: Tensor, b: Any) -> Tensor:
    value = rows(w, b).mean()
    for _ in range(b["t"]):
        value = value * 2
    return value


KNOWN: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a range": powers,
    "a slice": lambda w, b: (b["x"][:, : b["t"]] @ w[: b["t"]]).square().mean(),
    "a branch": lambda w, b: rows(w, b).mean() * (2.0 if b["t"] > 1 else 1.0),
    "a function of numbers": lambda w, b: rows(w, b).mean() * math.exp(-b["t"]),
    "an argument that has to be a number": lambda w, b: F.leaky_relu(b["x"] @ w, b["t"]).mean(),
    "a new tensor": lambda w, b: rows(w, b).mean() * torch.full((), b["t"], dtype=F64),
}


@pytest.mark.parametrize(
    "name", [n if n == "a branch" else pytest.param(n, marks=pytest.mark.slow) for n in KNOWN]
)
def test_a_number_that_the_loss_has_to_know_is_compiled_anew(name: str) -> None:
    ours, eager = pair(KNOWN[name], pa.sgd(0.01))
    state = ours.init(torch.ones(3, 1))
    for i in (1, 2, 3, 1):
        batch = make_batch(i, F32, i)
        alike(ours(state, batch), eager(state, batch), F32)


@pytest.mark.parametrize(
    "name", ["a range", pytest.param("a function of numbers", marks=pytest.mark.slow)]
)
def test_a_number_that_the_loss_has_to_know_has_few_values(name: str) -> None:
    """Each is compiled, up to torch's limit (here two); the sentence says what to do."""
    ours, _ = pair(KNOWN[name], pa.sgd(0.01))
    state = ours.init(torch.ones(3, 1))
    with torch._dynamo.config.patch(recompile_limit=2):
        for i in (1, 2, 1):
            ours(state, make_batch(i, F32, i))
        with pytest.raises(CompileError) as caught:
            ours(state, make_batch(3, F32, 3))
    for words in ("compiled anew", "makes a size, a range or a branch", "one row per sample"):
        assert words in str(caught.value)


def test_a_bool_chooses_the_code() -> None:
    settings, graphs = counting()
    loss = lambda w, b: rows(w, b).mean() * (2 if b["t"] else 1)  # noqa: E731
    ours, eager = pair(loss, pa.sgd(0.01), compile=settings)
    state = ours.init(torch.ones(3, 1))
    for i in range(4):
        batch = make_batch(i, F32, i % 2 == 0)
        alike(ours(state, batch), eager(state, batch), F32)
    assert len(graphs) == 2


@pytest.mark.slow
def test_of_several_numbers_each_is_what_it_can_be() -> None:
    settings, graphs = counting()

    def loss(w: Tensor, b: Any) -> Tensor:
        return powers(w, b | {"t": b["n"]}) * b["t"] + b["s"] * 0

    ours, eager = pair(loss, pa.sgd(0.01), compile=settings)
    state = ours.init(torch.ones(3, 1))
    for i in range(STEPS):
        batch = make_batch(i, F32, half(i)) | {"n": i % 2, "s": i}
        alike(ours(state, batch), eager(state, batch), F32)
    assert len(graphs) == 2


@pytest.mark.slow
def test_trying_the_loss_out_draws_no_random_numbers() -> None:
    """The first call, which does that, leaves the generator where the second one does."""
    ours, _ = pair(lambda w, b: F.dropout(rows(w, b), 0.5).mean() * b["t"], pa.sgd(0.01))
    state, drawn = ours.init(torch.ones(3, 1)), []
    for _ in range(2):
        torch.manual_seed(0)
        new, _ = ours(state, make_batch(0, F32, 0.3))
        drawn.append((new.params, torch.rand(())))
    assert_trees_bitwise_equal(*drawn)


# Numbers that do not come in the batch --------------------------------------------------------


def test_a_tensor_around_the_loss_may_change_at_every_step() -> None:
    """In place or not."""
    settings, graphs = counting()
    held = {"t": torch.tensor(0.0)}
    ours, eager = pair(lambda w, b: rows(w, b).mean() * held["t"], pa.sgd(0.01), compile=settings)
    state = ours.init(torch.ones(3, 1))
    for i in range(STEPS):
        held["t"] = torch.tensor(half(i))
        batch = make_batch(i, F32, 0)
        alike(ours(state, batch), eager(state, batch), F32)
    assert len(graphs) == 1


@pytest.mark.slow
def test_an_int_around_the_loss_may_change_at_every_step() -> None:
    """It is left open when it is seen to change."""
    settings, graphs = counting()
    held = {"t": 0}
    ours, eager = pair(lambda w, b: rows(w, b).mean() * held["t"], pa.sgd(0.01), compile=settings)
    state = ours.init(torch.ones(3, 1))
    for i in range(STEPS):
        held["t"] = i
        batch = make_batch(i, F32, 0)
        alike(ours(state, batch), eager(state, batch), F32)
    assert len(graphs) <= 5  # of 0, of 1 and of any, some of them of one microbatch at a time


@pytest.mark.slow
def test_a_float_around_the_loss_has_few_values() -> None:
    held = {"t": 0.0}
    ours, eager = pair(lambda w, b: rows(w, b).mean() * held["t"], pa.sgd(0.01))
    state = ours.init(torch.ones(3, 1))
    with torch._dynamo.config.patch(recompile_limit=3):
        for i in (0, 1, 2, 0):
            held["t"] = half(i)
            batch = make_batch(i, F32, 0)
            alike(ours(state, batch), eager(state, batch), F32)
        held["t"] = half(3)
        with pytest.raises(CompileError, match="into the batch"):
            ours(state, make_batch(3, F32, 0))
