"""Python numbers that change from step to step, around a step that compiles itself.

Each is a constant of a graph, wherever the loss reads it: a graph a value, and few values. What is
computed of numbers alone is computed by Python, so the bound knows nothing of how much cancels.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pureaccum as pa
from pureaccum._base.refusals import CompileError
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import examples, generator
from tests.problems import in_a_window
from tests.step.problems import counting, leaves, pair
from tests.tables import every_night


pytestmark = [pytest.mark.transforms, pytest.mark.promise("compiled")]
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def rows(w, x):
    return (x @ w).square()


def make_batch(step, dtype=F32, count=8):
    return {"x": torch.randn(count, 3, generator=generator(step)).to(dtype)}


def alike(got, want, dtype=F32):
    """The same dtypes, and the same numbers up to the rounding of a few operations on tensors."""
    for x, y in zip(leaves(got), leaves(want), strict=True):
        assert x.dtype == y.dtype
        bound = 32 * torch.finfo(dtype).eps if x.is_floating_point() else 0
        assert (x - y).double().norm() <= bound * y.double().norm() if bound else torch.equal(x, y)


# What a loss may do with a number ---------------------------------------------------------------


class Case(NamedTuple):
    """A loss of samples and of a number, the numbers, and what it computes in."""

    loss: Callable[[Tensor, Any], Any]
    numbers: tuple[Any, ...]
    dtype: torch.dtype = F32
    options: dict[str, Any] = {}  # noqa: RUF012
    rounding: torch.dtype | None = None


def with_aux(r, t):
    return (r * t).mean(), {"last": r.mean() * t, "rows": r * t}


def powers(r, t):
    value = r.mean()
    for _ in range(t):
        value = value * 2
    return value


AUX = {"has_aux": True, "aux_reduction": {"last": "last", "rows": "concat"}}
HALF = {"policy": pa.Policy(compute=torch.float16)}
CASES = {
    "1 - decay": Case(lambda r, t: r.mean() * (1 - t), (0.5, 0.99999)),
    "Weighted, 1 - decay": Case(lambda r, t: pa.Weighted(r.sum() * (1 - t), len(r)), (0.5, 0.9999)),
    "linear decay": Case(lambda r, t: r.mean() * (1 - t / 100_000), (3, 99_999)),
    "bias correction": Case(lambda r, t: (r / (1 - 0.999**t)).mean(), (1, 2)),
    "since": Case(lambda r, t: r.mean() * (t - 1e8), (1e8 + 3, 1e8 + 5)),
    "an int that is divided": Case(lambda r, t: r.mean() * (1 + t / 10), (4, 3), F64),
    "a masked int": Case(
        lambda r, t: pa.Weighted((r * (t != 1)).sum() * (1 + t / 10), len(r)), (1, 3), F64
    ),
    "the class of a number": Case(
        lambda r, t: r.mean() * (1 + (0 if isinstance(t, Tensor) else int(t))), (0.0, 1.0, 2.0)
    ),
    "the sign of zero": Case(lambda r, t: r.mean() * math.copysign(2.0, t), (0.0, -0.0)),
    "an int, a float and a bool": Case(
        lambda r, t: r.mean() * (2 if isinstance(t, float) else 3 if t is True else 4),
        (1, 1.0, True),
    ),
    "NaN and inf": Case(
        lambda r, t: r.mean() * (3 if math.isnan(t) else 5), (math.nan, math.inf, -math.inf)
    ),
    "a complex number": Case(lambda r, t: (r.mean() * t).real, (1 + 2j, 0.5j)),
    "in float64": Case(lambda r, t: r.mean() * t, (1 / 3, 2 / 3), F64, {"nonfinite": "skip"}),
    "in bfloat16": Case(lambda r, t: r.mean() * t, (0.5, 1.5), BF16),
    "unrolled": Case(lambda r, t: r.mean() * t, (0.5, 2), options={"microbatch_size": None}),
    "a bound": Case(lambda r, t: r.clamp(max=t).sum(), (0.5, 1)),
    "a weight": Case(lambda r, t: pa.Weighted(r.sum(), t), (3, 4)),
    "aux": Case(with_aux, (0.5, 0.25), options=AUX),
    "too small for float16": Case(
        lambda r, t: (r.float() * 1e12 * t).mean(),
        (1e-12, 3e-12),
        options=HALF,
        rounding=torch.float16,
    ),
    "a range": Case(powers, (1, 2, 3)),
    "a slice": Case(lambda r, t: r[:t].mean(), (1, 2)),
    "a branch": Case(lambda r, t: r.mean() * (2.0 if t > 1 else 1.0), (1, 2)),
    "a function of numbers": Case(lambda r, t: r.mean() * math.exp(-t), (1, 2.0)),
    "an argument": Case(lambda r, t: F.leaky_relu(r - 1, t).mean(), (0.1, 0.2)),
    "a new tensor": Case(lambda r, t: r.mean() * torch.full((), t, dtype=F64), (1, 2.5)),
}
IN_SHORT = ("1 - decay",)
ALIKE = ("linear decay", "since", "Weighted, 1 - decay", "in bfloat16", "a masked int", "a slice")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [
        n
        if n in IN_SHORT
        else pytest.param(n, marks=pytest.mark.nightly if n in ALIKE else pytest.mark.slow)
        for n in CASES
    ],
)
def test_a_number_in_the_batch_is_the_constant_that_it_is_without_the_compiler(name):
    """A graph a value, in any order; a value that came before has its graph."""
    case = CASES[name]
    settings, graphs = counting()
    ours, eager = pair(
        lambda w, b: case.loss(rows(w, b["x"]), b["t"]),
        pa.sgd(0.01),
        compile=settings,
        check=False,
        **case.options,
    )
    state = ours.init(torch.ones(3, 1, dtype=case.dtype))
    for i, t in enumerate([*case.numbers, *reversed(case.numbers)]):
        batch = make_batch(i, case.dtype) | {"t": t}
        alike(ours(state, batch), eager(state, batch), case.rounding or case.dtype)
    assert len(graphs) == len(case.numbers)


# Where a loss may read a number -------------------------------------------------------------------


class Scaled(nn.Module):
    factor: Any = 0

    def forward(self, r):
        return r.mean() * (1 - self.factor / 10)


GLOBAL = {"t": 0}


class Place:
    """A place for a number, and what a call is given where it is there."""

    def __init__(self, name):
        self.name, self.held, self.module = name, {"t": 0}, Scaled()

    def factor(self, b, shared):
        if self.name == "shared":
            return shared[0]["t"]
        return b["t"] if self.name in ("batch", "stream", "loop") else self.of_others()

    def of_others(self):
        return GLOBAL["t"] if self.name == "a global" else self.held["t"]

    def loss(self, params, b, *shared):
        r = rows(params["w"], b["x"]) + params["table"][0].sum()
        if self.name == "a module":
            return self.module(r)
        return r.mean() * (1 - self.factor(b, shared) / 10)

    def put(self, t, batch):
        self.held["t"] = self.module.factor = GLOBAL["t"] = t
        if self.name == "shared":
            return batch, {"t": t}
        return (batch | {"t": t},) if self.name in ("batch", "stream", "loop") else (batch,)


# The form of a step, and how many graphs it makes for a number.
PLACES = {
    "batch": ("scan", 1),
    "shared": ("unrolled", 1),
    "stream": ("stream", 1),
    "loop": ("loop", 2),
    "a closure": ("unrolled", 1),
    "a global": ("scan", 1),
    "a module": ("unrolled", 1),
}


# Each place comes once, with open sizes or without, and a closure comes with both: where nothing
# is open, a number of a batch that is scanned is what all of the cases above are.
OPEN = ("batch", "stream", "a closure", "a global")


def marks(place):
    if PLACES[place][0] == "unrolled":
        return pytest.mark.given_up("recipes")
    return () if place == "batch" else pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [pytest.param("a closure", None, marks=marks("a closure"))]
    + [pytest.param(n, True if n in OPEN else None, marks=marks(n)) for n in PLACES],
)
def test_a_number_is_a_constant_wherever_the_loss_reads_it(name, dynamic):
    """In every form of a step; with open sizes too. Ints are no more left open than floats are."""
    settings, graphs = counting()
    (form, each), place = PLACES[name], Place(name)
    options = {} if form in ("scan", "loop") else {"microbatch_size": None}
    compile = settings | ({} if dynamic is None else {"dynamic": dynamic})
    ours, eager = pair(place.loss, pa.sgd(0.01), compile=compile, **options)
    table = torch.zeros(600_000 if form == "loop" else 1, 4)
    state = ours.init({"w": torch.ones(3, 1), "table": table})
    numbers = (9.99999, 3, 4)
    for i, t in enumerate([*numbers, *reversed(numbers)]):
        given = place.put(t, make_batch(i, count=10))
        if form == "stream":
            got, want = (in_a_window(s, state, given) for s in (ours, eager))
        else:
            assert ours.form(state, given[0]) == form
            got, want = ours(state, *given), eager(state, *given)
        alike(got, want)
    assert len(graphs) == each * len(numbers) + (form in ("stream", "loop"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("a closure", None), ("a closure", True), ("shared", None), ("a module", None)],
)
def test_a_number_is_a_constant_of_a_batch_that_is_not_cut(name, dynamic):
    """Wherever the loss reads it: a graph a value."""
    settings, graphs = counting()
    place = Place(name)
    compile = settings | ({} if dynamic is None else {"dynamic": dynamic})
    ours, eager = pair(place.loss, pa.sgd(0.01), microbatch_size=None, compile=compile)
    state = ours.init({"w": torch.ones(3, 1), "table": torch.zeros(1, 4)})
    numbers = (9.99999, 3, 4)
    for i, t in enumerate([*numbers, *reversed(numbers)]):
        given = place.put(t, make_batch(i, count=10))
        alike(ours(state, *given), eager(state, *given))
    assert len(graphs) == len(numbers)


NUMBERS = st.one_of(
    st.integers(-3, 10**9),
    st.floats(-1e9, 1e9, allow_subnormal=False),
    st.sampled_from([0.0, 0.9999, 1 - 2.0**-40, 1e8 + 1, 2**53 + 1]),
)
STEPS = {
    "plus": lambda t, c: t + c,
    "minus": lambda t, c: c - t,
    "times": lambda t, c: t * c,
    "over": lambda t, c: c / t if t else c,
    "floor": lambda t, c: t // c if c else t,
    "modulo": lambda t, c: t % c if c else t,
    "power": lambda t, c: min(abs(t), 1e9) ** (abs(c) % 2),
    "round": lambda t, c: round(t, 3),
    "sine": lambda t, c: math.sin(t) * c if math.isfinite(t) else c,
    "greater": lambda t, c: t if t > c else c,
}


@pytest.mark.nightly
@examples(1 / 10, 10)
@given(
    st.lists(NUMBERS, min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from([*STEPS]), NUMBERS), max_size=5),
    st.sampled_from([F32, F64]),
    st.sampled_from(["batch", "shared", "a closure"]),
)
def test_any_program_of_numbers_comes_to_what_python_says(numbers, steps, dtype, name):
    """Where the result is no finite number of the dtype, it is inf or NaN in both."""
    held = {}

    def loss(w, b, *shared):
        t = b["t"] if name == "batch" else shared[0] if name == "shared" else held["t"]
        for step, c in steps:
            t = STEPS[step](t, c)
        return rows(w, b["x"]).mean() * t

    ours, eager = pair(loss, pa.sgd(0.0), microbatch_size=None)
    state = ours.init(torch.ones(3, 1, dtype=dtype))
    for t in numbers:
        held["t"] = t
        given = (
            make_batch(0, dtype) | ({"t": t} if name == "batch" else {}),
            *[t] * (name == "shared"),
        )
        (_, got), (_, want) = ours(state, *given), eager(state, *given)
        assert_trees_bitwise_equal(got.loss.isfinite(), want.loss.isfinite())
        if want.loss.isfinite() and want.grad_norm.isfinite():
            alike(got, want, dtype)


# How many values there may be ---------------------------------------------------------------------


def of_batch(w, b):
    return rows(w, b["x"]).mean() * (1 - b["t"])


def of_shared(w, b, t):
    return rows(w, b["x"]).mean() * (1 - t)


def with_t(b, t):
    return (b | {"t": t},)


def sixteenth(i):
    return i / 16


# The loss, what it is given, how an error names it, and the numbers.
NINTH = {
    "the batch": (of_batch, with_t, "batch['t'] is ", sixteenth),
    "shared": (of_shared, lambda b, t: (b, t), "shared[0] is ", int),
    "a microbatch": (of_batch, with_t, "microbatch['t'] is ", sixteenth),
}


@pytest.mark.nightly  # nine graphs each
@pytest.mark.parametrize("name", NINTH)
def test_the_ninth_value_of_a_number_is_refused_by_name(name):
    """With what to write in its place, before anything is done; the eight others go on."""
    loss, given, leaf, number = NINTH[name]
    settings, graphs = counting()
    ours, eager = pair(loss, pa.sgd(0.01), microbatch_size=None, donate=True, compile=settings)

    def run(step, state, t):
        arguments = given(make_batch(0), t)
        if name == "a microbatch":
            return step.update(state, step.begin(state), *arguments)
        return step(state, *arguments)[0]

    def start():
        return ours.init(torch.ones(3, 1))

    for i in range(8):
        run(ours, start(), number(i))
    made, state = len(graphs), start()
    for i in (8, 9):
        with unchanged(state), pytest.raises(CompileError) as caught:
            run(ours, state, number(i))
        dtype = "torch.float64" if isinstance(number(i), float) else "torch.int64"
        tensor = f"torch.tensor({number(i)!r}, dtype={dtype})"
        for words in (f"{leaf}{number(i)!r} after {number(0)!r}, ", "its ninth value", tensor):
            assert words in str(caught.value)
    alike(run(ours, state, number(3)), run(eager, start(), number(3)))
    assert len(graphs) == made == 8


@pytest.mark.parametrize("number", [np.float64(0.1), np.int64(3), np.array(3), np.ones(2)])
def test_what_is_of_numpy_is_refused_by_name(number):
    """A compiler computes with it as with a tensor, so that an int64 over ten is a float32."""
    ours, eager = pair(lambda w, b, t: rows(w, b["x"]).mean() * (t / 10).sum(), pa.sgd(0.01))
    state, batch = ours.init(torch.ones(3, 1)), make_batch(0)
    assert eager(state, batch, number)[1].applied
    with pytest.raises(CompileError, match=r"shared\[0\] is a numpy\..*Pass float\(x\)"):
        ours(state, batch, number)


@pytest.mark.nightly
def test_two_numbers_have_eight_values_each():
    """And a number that is refused leaves no mark of the one beside it."""
    ours, _ = pair(
        lambda w, b, s: rows(w, b["x"]).mean() * (b["t"] - s), pa.sgd(0.01), microbatch_size=None
    )
    state = ours.init(torch.ones(3, 1))
    for i in range(8):
        ours(state, make_batch(0) | {"t": i % 2}, i)
    for i in range(10):
        with pytest.raises(CompileError, match=r"shared\[0\] is 8"):
            ours(state, make_batch(0) | {"t": i + 2}, 8)
    for i in range(2, 8):
        ours(state, make_batch(0) | {"t": i}, 0)
    with pytest.raises(CompileError, match=r"batch\['t'\] is 8"):
        ours(state, make_batch(0) | {"t": 8}, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", every_night([F32, F64], but=[F32]))
@pytest.mark.parametrize(
    "number",
    [pytest.param(lambda i: i / 16, id="float"), pytest.param(lambda i: i, id="int")],
)
def test_a_tensor_may_change_at_every_step(number, dtype):
    """That which the refusal writes, as eager takes it."""
    settings, graphs = counting()
    ours, eager = pair(lambda w, b, t: (rows(w, b["x"]) * t).mean(), pa.sgd(0.01), compile=settings)
    state = ours.init(torch.ones(3, 1, dtype=dtype))
    for i in range(11):
        wide = F64 if isinstance(number(i), float) else torch.int64
        given = make_batch(i, dtype), torch.tensor(number(i), dtype=wide)
        alike(ours(state, *given), eager(state, *given), dtype)
        alike(ours(state, *given), eager(state, given[0], number(i)), dtype)
    assert len(graphs) == 1


@pytest.mark.slow
def test_a_tensor_around_the_loss_may_change_at_every_step():
    """In place or not."""
    settings, graphs = counting()
    held = {"t": torch.tensor(0.0)}
    ours, eager = pair(
        lambda w, b: rows(w, b["x"]).mean() * held["t"], pa.sgd(0.01), compile=settings
    )
    state = ours.init(torch.ones(3, 1))
    for i in range(11):
        held["t"] = torch.tensor(0.5 * i) if i % 2 else held["t"].add_(0.25)
        batch = make_batch(i)
        alike(ours(state, batch), eager(state, batch))
    assert len(graphs) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "number", [lambda i: i / 2, pytest.param(lambda i: i, marks=pytest.mark.slow)]
)
def test_a_number_around_the_loss_has_few_values(number):
    """Up to torch's limit, here two."""
    held = {"t": number(0)}
    ours, eager = pair(lambda w, b: rows(w, b["x"]).mean() * held["t"], pa.sgd(0.01))
    state, batch = ours.init(torch.ones(3, 1)), make_batch(0)
    with torch._dynamo.config.patch(recompile_limit=2):
        for i in (0, 1, 0):
            held["t"] = number(i)
            alike(ours(state, batch), eager(state, batch))
        held["t"] = number(2)
        with unchanged(state), pytest.raises(CompileError) as caught:
            ours(state, batch)
    said = str(caught.value)
    assert "recompiled too often" in said
    assert "a constant of a graph" in said
    assert "torch.tensor(t, dtype=" in said


@pytest.mark.nightly
def test_a_bool_chooses_the_code():
    settings, graphs = counting()
    loss = lambda w, b: rows(w, b["x"]).mean() * (2 if b["t"] else 1)  # noqa: E731
    ours, eager = pair(loss, pa.sgd(0.01), compile=settings)
    state = ours.init(torch.ones(3, 1))
    for i in range(4):
        batch = make_batch(i) | {"t": i % 2 == 0}
        alike(ours(state, batch), eager(state, batch))
    assert len(graphs) == 2


# The compiler itself ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("numbers", every_night([[0.9999, 0.5], [1, 3]], but=[[0.9999, 0.5]]))
def test_a_number_is_a_constant_by_inductor(numbers):
    ours, eager = pair(of_batch, pa.sgd(0.01), compile=True)
    state = ours.init(torch.ones(3, 1))
    for i, t in enumerate([*numbers, *numbers]):
        batch = make_batch(i) | {"t": t}
        alike(ours(state, batch), eager(state, batch))


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["whole", "stream"])
def test_a_number_is_as_wide_as_what_it_meets(form):
    """Whatever this step has met before: 0.1 is not that of a narrower state."""

    def loss(w, b):
        return (w * b["t"] - 1) ** 2 + 0 * b["x"].sum()

    ours, eager = pair(loss, pa.sgd(0.1))
    for dtype in (F32, F64, BF16, F32, F64):
        state = ours.init(torch.tensor(3.0, dtype=dtype))
        batch = make_batch(0, dtype) | {"t": 0.1}
        if form == "stream":
            got, want = (
                s.apply(state, s.update(state, s.begin(state), batch)) for s in (ours, eager)
            )
        else:
            got, want = ours(state, batch), eager(state, batch)
        alike(got, want, dtype)
