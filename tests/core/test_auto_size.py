"""``microbatch_size="auto"``: what is tried, and what is remembered.

Nobody looks for writes here, which takes one call more; the calls that are counted are those of the
search.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch

import pureaccum as pa
from pureaccum._core.writes import unguarded
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.core.shortage import few_to_collect
from tests.draws import generator
from tests.problems import in_a_window, once
from tests.refusals import saying


WIDTH = 64

pytestmark = [
    pytest.mark.exact,
    pytest.mark.promise("sizes"),
    pytest.mark.usefixtures(few_to_collect.__name__, "nobody_watches_for_writes"),
]


@pytest.fixture
def nobody_watches_for_writes():
    with unguarded():
        yield


class Counted:
    """A loss that notes the samples of each microbatch."""

    def __init__(self):
        self.rows = []

    def __call__(self, params, batch):
        self.rows.append(len(batch))
        return (torch.tanh(batch * params) ** 2).mean()

    def tried(self):
        rows, self.rows = self.rows, []
        return rows


def make_batch(rows):
    return torch.randn(rows, WIDTH, generator=generator(rows))


PARAMS = torch.linspace(0.5, 2, WIDTH)


def made(loss):
    return pa.make_step(loss, pa.adamw(), microbatch_size="auto")


def test_without_a_shortage_a_batch_is_one_microbatch():
    loss = Counted()
    once(made(loss), PARAMS, make_batch(24))
    assert loss.tried() == [24]
    assert pa.grad(loss, microbatch_size="auto")(PARAMS, make_batch(7)) is not None
    assert loss.tried() == [7]


class Scarce:
    """A loss that runs out of memory above so many samples, and notes what it was asked for."""

    def __init__(self):
        self.holds, self.rows = 0, list[int]()

    def __call__(self, params, batch, *shared):
        rows = optree.tree_leaves(batch)[0]
        self.rows.append(len(rows))
        if len(rows) > self.holds:
            raise torch.OutOfMemoryError(f"{len(rows)} rows")
        return (rows.sum() * sum(p.sum() for p in optree.tree_leaves(params))) / len(rows)


def rows_like(*shape, dtype=torch.float32):
    return lambda rows: (
        torch.arange(1.0, rows + 1).reshape(-1, *[1] * len(shape)).expand(-1, *shape).to(dtype)
    )


class KindOf(NamedTuple):
    """Params, a batch of so many samples, and what else a loss is given."""

    params: Any = torch.ones(4)
    batch: Callable[[int], Any] = rows_like(3)
    shared: Any = torch.ones(2)


# Each is another kind than the first, by one thing alone.
KINDS = {
    "first": KindOf(),
    "shape of params": KindOf(params=torch.ones(2, 2)),
    "dtype of params": KindOf(params=torch.ones(4, dtype=torch.float64)),
    "structure of params": KindOf(params={"w": torch.ones(4)}),
    "shape of a row": KindOf(batch=rows_like(5)),
    "dtype of a row": KindOf(batch=rows_like(3, dtype=torch.float64)),
    "structure of a batch": KindOf(batch=lambda rows: [rows_like(3)(rows)]),
    "a number in a batch": KindOf(batch=lambda rows: (rows_like(3)(rows), 1.0)),
    "shape of what is shared": KindOf(shared=torch.ones(3)),
}


def test_later_batches_begin_at_the_size_that_went_well():
    """Of any length; where it no longer fits it is halved again."""
    loss = Scarce()
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size="auto", check=False)
    state = step.init(torch.ones(3))
    for holds, rows, sizes in (
        (8, 32, [32, 16, *[8] * 4]),
        (8, 32, [8] * 4),
        (8, 20, [8, 8, 4]),  # 32 did not fit, nor did 16
        (8, 12, [12, 8, 4]),  # but this was not tried
        (8, 12, [8, 4]),
        (8, 4, [4]),
        (8, 32, [8] * 4),
        (2, 8, [8, 4, *[2] * 4]),
        (2, 8, [2] * 4),
    ):
        loss.holds, loss.rows = holds, []
        step(state, rows_like(3)(rows))
        assert loss.rows == sizes


def calling(form, loss):
    """One function for all kinds."""
    if form == "step":
        step = made(loss)
        return lambda kind, rows: once(step, kind.params, kind.batch(rows))
    transform = {"grad": pa.grad, "value": pa.value}[form](loss, microbatch_size="auto")
    return lambda kind, rows: transform(kind.params, kind.batch(rows), kind.shared)


@pytest.mark.parametrize("form", ["step", "grad", "value"])
def test_what_is_known_of_one_kind_is_not_taken_for_another(form):
    """Of the first it is known that 4 samples are too many, and of no other."""
    loss = Scarce()
    call = calling(form, loss)
    left_out = ["first", *(["shape of what is shared"] if form == "step" else [])]
    others = [(name, 16, [16]) for name in KINDS if name not in left_out]
    for name, holds, sizes in [("first", 2, [16, 8, 4, *[2] * 8]), *others, ("first", 2, [2] * 8)]:
        loss.holds, loss.rows = holds, []
        call(KINDS[name], 16)
        assert loss.rows == sizes, name


def test_a_step_over_a_batch_without_rows_is_not_applied():
    state, info = once(made(Counted()), PARAMS, make_batch(0))
    assert not info.applied
    assert_trees_bitwise_equal(state.params, PARAMS)


def test_a_stream_takes_what_it_is_given():
    loss = Counted()
    step = made(loss)
    in_a_window(step, step.init(PARAMS), [make_batch(3)])
    assert loss.tried() == [3]


@pytest.mark.parametrize("donate", [False, True])
def test_a_stream_gives_aux_that_outlives_its_window(donate):
    """Each sample's, and what is no row: a tensor of the state itself."""

    loss = lambda w, x: ((w * x).square().mean(), {"rows": x.sum(1), "before": w})  # noqa: E731
    options = {"has_aux": True, "aux_reduction": {"rows": "concat", "before": "last"}}
    params, parts = torch.ones(3), [torch.randn(n, 3) for n in (4, 2)]

    def streamed(size, **given):
        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=size, **options, **given)
        state, seen = step.init(params), []
        window = step.begin(state)
        for part in parts:
            window, aux = step.update(state, window, part)
            seen.append(aux)
        return seen, step.apply(state, window)

    assert_trees_bitwise_equal(streamed("auto", donate=donate), streamed(None))


@pytest.mark.parametrize("donate", [False, True])
def test_an_attempt_gives_nothing_up(donate):
    """Neither the state nor the window of a stream; what goes well gives them up once."""
    loss = Scarce()
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size="auto", donate=donate)
    plain = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2)
    batch = rows_like(3)(8)
    loss.holds = 2
    want, _ = plain(plain.init(torch.ones(3)), batch)
    parts = pa.microbatches(torch.cat([batch, 2 * batch]), 2)
    streamed, _ = in_a_window(plain, plain.init(torch.ones(3)), parts)

    state = step.init(torch.ones(3))
    loss.holds = 0
    with unchanged(state, batch), pytest.raises(torch.OutOfMemoryError):
        step(state, batch)
    loss.holds = 2
    new, info = step(state, batch)
    assert info.microbatches == 4
    assert_trees_bitwise_equal(new.params, want.params)

    state = step.init(torch.ones(3))
    window = step.update(state, step.begin(state), batch)
    loss.holds = 0
    with unchanged(state, window), pytest.raises(torch.OutOfMemoryError):
        step.update(state, window, batch)
    loss.holds = 2
    second = step.update(state, window, 2 * batch)
    if donate:
        with saying(RuntimeError, "given up"):
            window.accum.weight + 1
    new, info = step.apply(state, second)
    assert info.microbatches == 8
    assert_trees_bitwise_equal(new.params, streamed.params)


def test_noise_begins_with_two_microbatches():
    loss = Scarce()
    loss.holds = 16
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size="auto", noise=True)
    for rows, want in ((7, [4, 3]), (8, [4, 4]), (1, [1])):
        loss.rows.clear()
        _, info = once(step, torch.ones(3), rows_like(3)(rows))
        assert loss.rows == want
        assert info.noise.noise.isfinite().all() == (rows > 1)


@pytest.mark.slow
def test_sizes_are_tried_without_the_compiler():
    called = []

    def loss(params, batch):
        if not torch.compiler.is_compiling():
            called.append(len(batch))
            if len(batch) > 4:
                raise torch.OutOfMemoryError("so many samples")
        return (params * batch).square().mean()

    options = {"microbatch_size": "auto", "compile": {"backend": "eager"}}
    step = pa.make_step(loss, pa.sgd(0.125), **options)
    plain = pa.make_step(loss, pa.sgd(0.125), microbatch_size=4)
    state, batch = step.init(torch.ones(3)), rows_like(3)(16)
    want = plain(state, batch)
    called.clear()
    assert_trees_bitwise_equal(step(state, batch), want)
    assert called == [16, 8, *[4] * 4]
    called.clear()
    for seen in ({4}, set[int]()):  # a graph is made, after a look at the loss, and is called
        assert_trees_bitwise_equal(step(state, batch)[0], want[0])
        assert {*called} == seen
        called.clear()


def test_a_size_that_is_another_word_is_refused():
    with saying(TypeError, "microbatch_size is 'all', a str", "int"):
        pa.make_step(Counted(), pa.sgd(0.1), microbatch_size="all")


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, torch.func.jacfwd], ids=lambda it: it.__name__
)
def test_auto_is_refused_under_a_transform(transform):
    loss, batch = Counted(), make_batch(3)
    value = lambda params: pa.value(loss, microbatch_size="auto")(params, batch)  # noqa: E731
    with saying(RuntimeError, "'auto' does not work under a torch.func transform", "that number"):
        transform(value)(torch.stack([PARAMS]))
    assert not loss.rows


def test_options_of_transforms_are_checked_at_once():
    with saying(ValueError, "reduction"):
        pa.grad(Counted(), microbatch_size="auto", reduction="median")
    assert pa.grad(mean, microbatch_size="auto").__name__ == "mean"


def mean(params, batch):
    return (params * batch).mean()
