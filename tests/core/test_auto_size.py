"""``microbatch_size="auto"``: what is tried, what is remembered, what a budget means.

Nobody looks for writes here, which takes one call more; the calls that are counted are those of the
search.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given

import pureaccum as pa
from pureaccum._base.torch_internals.modes import dispatched
from pureaccum._core.auto_size import by_memory, counting
from pureaccum._core.writes import unguarded
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.core.shortage import few_to_collect
from tests.draws import examples, few, generator
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
    """A loss that notes the samples of each microbatch, and keeps so many activations."""

    def __init__(self, terms=1):
        self.terms = terms
        self.rows = []

    def __call__(self, params, batch):
        self.rows.append(len(batch))
        means = [(torch.tanh(batch * params) ** 2).mean() for _ in range(self.terms)]
        return torch.stack(means).sum()

    def tried(self):
        rows, self.rows = self.rows, []
        return rows


def make_batch(rows):
    return torch.randn(rows, WIDTH, generator=generator(rows))


PARAMS = torch.linspace(0.5, 2, WIDTH)


def peak(size, batch, loss=None, params=PARAMS):
    step = pa.make_step(loss or Counted(), pa.adamw(), microbatch_size=size)
    state = step.init(params)
    with counting() as live:
        step(state, batch)
    return live.peak


def made(loss, budget=None):
    return pa.make_step(loss, pa.adamw(), microbatch_size="auto", memory_budget=budget)


@pytest.mark.given_up("memory budget")
@examples(1 / 3)
@given(few, few)
def test_the_largest_half_that_the_budget_allows_is_taken(rows, fits):
    """And one byte less than it needs is too little."""
    batch = make_batch(8 * rows)
    sizes = [8 * rows]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    size = sizes[fits % len(sizes)]
    needs = {it: peak(it, batch) for it in sizes}
    for budget in (needs[size], needs[size] - 1):
        loss = Counted()
        step = made(loss, budget)
        state = step.init(PARAMS)
        expected = next((it for it in sizes if needs[it] <= budget), None)
        if expected is None:
            with saying(torch.OutOfMemoryError, f"memory_budget is {budget}", "alive"):
                step(state, batch)
            continue
        with unchanged(state, batch):
            found = step(state, batch)
        explicit = pa.make_step(loss, pa.adamw(), microbatch_size=expected)
        assert_trees_bitwise_equal(found, explicit(state, batch))


def test_without_a_shortage_a_batch_is_one_microbatch():
    loss = Counted()
    once(made(loss), PARAMS, make_batch(24))
    assert loss.tried() == [24]
    assert pa.grad(loss, microbatch_size="auto")(PARAMS, make_batch(7)) is not None
    assert loss.tried() == [7]


@pytest.mark.given_up("memory budget")
def test_later_batches_begin_at_what_is_known():
    loss = Counted()
    step = made(loss, peak(8, make_batch(32)))
    state = step.init(PARAMS)
    for batch, sizes in (
        (make_batch(32), [32, 16, *[8] * 4 * 2]),  # what fits was counted, and is run again
        (make_batch(32), [8] * 4),
        (make_batch(20), [8, 8, 4]),  # 32 did not fit, nor did 16
        (make_batch(12), [12, 8, 4]),  # but this was not tried
        (make_batch(12), [8, 4]),
    ):
        step(state, batch)
        assert loss.tried() == sizes
    step(state, torch.zeros(12, 2 * WIDTH)[:, ::2].double())  # another kind of sample
    assert loss.tried()[0] == 12


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
        (8, 20, [8, 8, 4]),
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


@pytest.mark.given_up("memory budget")
def test_a_budget_is_kept_for_each_shape_of_params():
    """What is known to fit is not counted again: of wider params nothing is known yet."""
    batch, wide = torch.ones(16, 1), torch.linspace(0.5, 2, 8 * WIDTH)
    loss = Counted()
    step = made(loss, peak(4, batch, params=wide))
    narrow = step.init(PARAMS)
    for state, sizes in (
        (narrow, [16] * 2),
        (step.init(wide), [16, 8, *[4] * 4 * 2]),
        (narrow, [16]),
        (step.init(wide), [4] * 4),
    ):
        found = step(state, batch)
        assert loss.tried() == sizes
        explicit = pa.make_step(loss, pa.adamw(), microbatch_size=sizes[-1])
        assert_trees_bitwise_equal(found, explicit(state, batch))
        loss.tried()


@pytest.mark.given_up("memory budget")
def test_a_size_that_fits_no_longer_is_forgotten():
    """Samples of the same shape, of which more is kept than before."""
    loss = Counted()
    step = made(loss, peak(1, make_batch(8), Counted(30)))
    state = step.init(PARAMS)
    for times in (2, 1):
        step(state, make_batch(4))
        assert loss.tried() == [4] * times
    loss.terms = 30
    step(state, make_batch(4))  # known to fit, and so not counted
    assert loss.tried() == [4]
    step(state, make_batch(8))
    assert loss.tried() == [8, 4, 2, *[1] * 8 * 2]
    step(state, make_batch(8))
    assert loss.tried() == [1] * 8


@pytest.mark.given_up("memory budget")
def test_a_proven_size_is_not_counted():
    seen = []

    def loss(params, batch):
        seen.append(dispatched())
        return (batch * params).mean()

    step = made(loss, 10**9)
    state = step.init(PARAMS)
    for rows in (8, 8, 4, 9, 9):
        step(state, make_batch(rows))
    assert seen == [True, False, False, False, True, False, False]  # what was counted is dropped
    step = made(loss, peak(8, make_batch(64), loss))
    for rows, counted in (
        *((32, True), (32, False), (64, True), (64, False)),
        *((32, False), (64, False)),  # a shorter batch makes nothing forgotten
    ):
        seen.clear()
        step(state, make_batch(rows))  # with 8 samples a microbatch, in longer and longer batches
        assert any(seen) == counted
        assert not any(seen[-rows // 8 :])


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


@pytest.mark.given_up("memory budget")
def test_a_larger_size_is_tried_again_after_a_while():
    loss = Scarce()
    step = pa.make_step(loss, pa.sgd(0.1), microbatch_size="auto", retry_after=2)
    state, batch = step.init(torch.ones(3)), rows_like(3)(16)
    for holds, sizes in (
        (4, [16, 8, *[4] * 4]),
        (4, [4] * 4),
        (4, [4] * 4),
        (4, [8, *[4] * 4]),  # not 16: twice what went well
        (16, [4] * 4),
        (16, [4] * 4),
        (16, [8] * 2),
        (16, [16]),  # 8 was the smallest that had failed
        (16, [16]),
    ):
        loss.holds, loss.rows = holds, []
        step(state, batch)
        assert loss.rows == sizes


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


def budget(*case):
    return pytest.param(*case, marks=pytest.mark.given_up("memory budget"))


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        budget(ValueError, {"retry_after": 0}, ("retry_after is 0", "at least 1, the steps")),
        budget(
            ValueError,
            {"retry_after": 3, "microbatch_size": 2},
            ("retry_after=3", "=2", "'auto'"),
        ),
        budget(ValueError, {"memory_budget": 0}, ("memory_budget is 0", "at least 1, the bytes")),
        budget(TypeError, {"memory_budget": 2.0}, ("memory_budget is 2.0, a float", "bytes")),
        budget(TypeError, {"memory_budget": True}, ("memory_budget is True, a bool", "bytes")),
        budget(ValueError, {"memory_budget": 9, "microbatch_size": 2}, ("=9", "=2", "'auto'")),
        (TypeError, {"microbatch_size": "all"}, ("microbatch_size is 'all', a str", "int")),
    ],
)
def test_options_that_do_not_fit_auto_are_refused(error, options, words):
    with saying(error, *words):
        pa.make_step(Counted(), pa.sgd(0.1), **{"microbatch_size": "auto"} | options)


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


@pytest.mark.given_up("memory budget")
def test_a_size_is_proven_up_to_the_longest_batch_that_it_took():
    """A batch also takes memory for its length: what a short one took is not proven for a long."""

    def run(size, batch):
        held = torch.empty(size * 10 + len(batch), dtype=torch.uint8)
        return size if held.numel() else 0

    found = by_memory(run, lambda batch: (batch, ()), budget=170).run
    assert found(torch.empty(100)) == 6
    assert found(torch.empty(8)) == 8
    assert found(torch.empty(100)) == 4  # of 8, 180 bytes would be alive
