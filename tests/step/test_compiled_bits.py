"""A step that compiles itself is the full-batch update, to the bit, in each of its forms.

Whole numbers, so that no order of adding them changes a bit. Few steps are made and each is called
with many batches: a graph costs seconds, and a call of it nothing.
"""

from functools import cache

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.exactly import (
    LOSSES,
    but_checked,
    copied,
    full_batch,
    integers,
    make_batch,
    make_params,
    row_losses,
)
from tests.problems import in_a_window
from tests.step.problems import pair
from tests.tables import every_night


pytestmark = [pytest.mark.exact, pytest.mark.promise("compiled")]
LR = 0.25
# A form follows from how large the gradients are and from how many microbatches there are; the
# table is padded with samples that nobody looks up. With 12 samples at most, everything stays
# exact.
TABLES = {"scan": 5, "unrolled": 70_000, "loop": 600_000}
ROWS = {"scan": (7, 11), "unrolled": (7,), "loop": (11, 12)}
LOSS = {loss.name: loss for loss in LOSSES}


def padded(params, rows):
    emb = torch.zeros(rows, 4)
    emb[:5] = params["emb"]
    return params | {"emb": emb}


@cache
def steps(kind, settings="eager", **options):
    """A step that compiles itself and the same one that does not; one pair for all examples."""
    loss = LOSS[kind]
    settings = settings if settings is True else {"backend": settings}
    return pair(loss.call, pa.sgd(LR), reduction=loss.reduction, compile=settings, **options)


def updated(params, grads):
    return optree.tree_map(lambda p, g: p - LR * g, params, grads)


def check(kind, form, params, batch, settings="eager"):
    ours, eager = steps(kind, settings)
    state = ours.init(params)
    assert ours.form(state, batch) == form
    (new, info), want = ours(state, batch), eager(state, batch)
    assert_trees_bitwise_equal((new, info), want)
    if LOSS[kind].weight(batch):
        assert_trees_bitwise_equal(
            new.params, updated(params, full_batch(LOSS[kind], params, batch))
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("mean", "scan"),
        pytest.param("sum", "scan", marks=pytest.mark.nightly),
        pytest.param("weighted", "scan", marks=pytest.mark.nightly),
        pytest.param("sum", "unrolled", marks=pytest.mark.given_up("recipes")),
        pytest.param("weighted", "unrolled", marks=pytest.mark.given_up("recipes")),
        ("mean", "loop"),
    ],
)
def test_every_form_is_the_full_batch_update(kind, form):
    """Ragged tails too; where nothing is large all microbatches of a plain loss go together."""

    @examples(1 / 5)
    @given(seeds(), st.sampled_from(ROWS[form]), st.booleans())
    @example(0, ROWS[form][-1], False)
    def run(seed, rows, masked):
        batch = make_batch(seed, rows)
        if masked:  # of a weighted loss, whole microbatches
            batch["mask"][2:6] = 0
        check(kind, form, padded(make_params(seed), TABLES[form]), batch)

    run()


@pytest.mark.nightly
def test_by_inductor_a_step_is_the_full_batch_update():
    """The default compiler; twice, since the second call takes what the first has made."""
    for seed in (0, 1):
        check("weighted", "scan", make_params(seed), make_batch(seed, 11), settings=True)


@pytest.mark.slow
@examples(1 / 2)
@given(
    st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    st.sets(st.integers(0, 10), max_size=3),
    st.booleans(),
    seeds(),
)
@example(torch.nan, {0}, True, 0)
@example(torch.nan, set(range(11)), False, 0)
@example(torch.inf, {10}, False, 0)  # in the tail
def test_skipped_microbatches_and_those_without_weight_are_the_eager_step_s(
    number, bad, masked, seed
):
    """Of a loss that is NaN where all is masked; counts, weights and bits are the eager step's."""
    ours, eager = steps("weighted", nonfinite="skip")
    params, batch = make_params(seed), make_batch(seed, 11)
    batch["y"][list(bad)] = number
    if masked:
        batch["mask"][:2] = 0  # NaN * 0 is NaN: the total of microbatch 0, which weighs nothing
    state = ours.init(params)
    (new, info), want = ours(state, batch), eager(state, batch)
    assert_trees_bitwise_equal(*map(but_checked, ((new, info), want)))
    count = len({row // 2 for row in bad if row > 1 or not masked} - without_weight(batch))
    assert info.skipped == count
    assert info.microbatches == 6
    if not info.applied:
        assert_trees_bitwise_equal(new[:3], state[:3])


def without_weight(batch):
    return {i for i, mask in enumerate(batch["mask"].split(2)) if mask.sum() == 0}


# Aux, and what is left out of it ------------------------------------------------------------

HOW = {"all": "concat", "sum": "sum", "mean": "mean", "last": "last", "each": "stack"}
HOW |= {"rows": "sum", "word": "last"}  # a number, and what is none


def with_aux(params, batch, keys=None):
    """Aux of any kind, finite where the loss is not."""
    seen = batch["mask"] if keys is None else pa.dropout(batch["mask"].float(), 0.5, keys)
    total = (seen * row_losses(params, batch)).sum()
    if "large" in params:
        total = total + 0 * params["large"].sum()
    whole = {"sum": seen.sum(), "mean": batch["i"].sum(), "last": seen[-1], "each": seen[0]}
    whole |= {"all": batch["i"], "rows": len(seen), "word": "done"}
    return pa.Weighted(total, batch["mask"].sum()), whole


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "nonfinite", "keys"),
    [
        ("scan", "skip", True),
        pytest.param("scan", "propagate", False, marks=pytest.mark.nightly),
        pytest.param("loop", "skip", False, marks=pytest.mark.nightly),
    ],
)
def test_aux_of_every_kind_is_that_of_the_eager_step(form, nonfinite, keys):
    """Whole and ragged batches, of which some microbatches are bad, the last among them."""
    options = {"has_aux": True, "aux_reduction": HOW, "keys": keys}
    ours, eager = pair(with_aux, pa.sgd(LR), nonfinite=nonfinite, **options)

    @examples(1 / 3)
    @given(seeds(), st.sampled_from([11, 10]), st.sets(st.integers(0, 10), max_size=3))
    @example(0, 11, {10})  # the tail
    @example(0, 11, {3})
    @example(0, 10, {9})  # the last of some whole ones
    def run(seed, rows, bad):
        params = make_params(seed)
        if form == "loop":
            params["large"] = torch.zeros(2**21 + 1)
        batch = make_batch(seed, rows)
        batch["y"][[row for row in bad if row < rows]] = torch.nan
        state = ours.init(params, seed=seed)
        assert ours.form(state, batch) == form
        (new, info), (want, said) = ours(state, batch), eager(state, batch)
        assert info.aux.pop("word") == said.aux.pop("word") == "done"
        assert int(info.aux.pop("rows")) == int(said.aux.pop("rows"))
        assert_trees_bitwise_equal((new, info), (want, said))

    run()


# Several at a time ------------------------------------------------------------------------

WIDE = 40_000  # what two microbatches keep may be kept together, and that of four may not


def wide_loss(params, batch, keys=None):
    x = batch["x"] if keys is None else pa.dropout(batch["x"], 0.5, keys)  # 0 or doubled: exact
    return ((x * params["w"]) ** 2).sum(-1).mean()  # at most 16 * WIDE a sample


GRAPHS = []


def reading(graph, inputs):
    GRAPHS.append(graph.print_readable(print_output=False))
    return graph.forward


KEYED = {"keys": True, "loss_scale": pa.static_loss_scale(4.0)}


@pytest.mark.slow
@pytest.mark.mechanism
@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, [(15, None), (12, None), (17, 16), (17, 15), (17, 0)]),
        (KEYED, [(15, None), (19, None), (19, 3)]),
    ],
    ids=["plain", "keys"],
)
def test_groups_and_what_is_left_of_them_are_those_of_the_eager_step(options, runs):
    """Seven are three groups of two, in a scan, and one that is left; then there is a tail.

    Of a batch that is poisoned in one place the count is known.
    """
    ours, eager = pair(wide_loss, pa.sgd(2.0**-10), compile={"backend": reading}, **options)
    g = generator(0)
    state = ours.init({"w": integers(g, WIDE, bound=2)}, seed=5)
    GRAPHS.clear()
    for rows, bad in runs:
        batch = {"x": torch.randint(0, 2, (rows, 1), generator=g).float() * 2 - 1}
        if bad is not None:
            batch["x"][bad] = torch.nan
        assert ours.form(state, batch) == "scan"
        (new, info), want = ours(state, batch), eager(state, batch)
        assert_trees_bitwise_equal((new, info), want)
        assert info.weight == rows
        assert bool(info.applied) is (bad is None)
        if bad is not None:
            assert_trees_bitwise_equal(new.params, state.params)
    assert "scan" in GRAPHS[0]
    assert "vmap" in GRAPHS[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="plain"), pytest.param(KEYED, id="keys", marks=pytest.mark.nightly)],
)
def test_wide_microbatches_are_those_of_the_eager_step(options):
    """Any number of them, also with a sample that is NaN, whichever go through together."""
    ours, eager = pair(wide_loss, pa.sgd(2.0**-10), **options)
    g = generator(0)
    state = ours.init({"w": integers(g, WIDE, bound=2)}, seed=5)
    for rows, bad in [(15, None), (12, None), (17, 16), (17, 3)]:
        batch = {"x": torch.randint(0, 2, (rows, 1), generator=g).float() * 2 - 1}
        if bad is not None:
            batch["x"][bad] = torch.nan
        (new, info), want = ours(state, batch), eager(state, batch)
        assert_trees_bitwise_equal((new, info), want)
        assert info.weight == rows


@pytest.mark.slow
def test_an_overflow_in_a_group_lowers_the_loss_scale():
    """Of a loss that is inf where its gradient is finite."""

    def loss(w, x):
        return (w * x[:, 0]).sum() + x[:, 1].sum()

    scaling = pa.dynamic_loss_scale(8.0)
    ours, eager = pair(loss, pa.sgd(LR), reduction="sum", loss_scale=scaling)
    state, x = ours.init(torch.tensor(1.0)), torch.ones(8, 2)
    x[3, 1] = torch.inf
    for batch in (x, torch.ones(8, 2)):
        (new, info), want = ours(state, batch), eager(state, batch)
        assert_trees_bitwise_equal((new, info), want)
    assert ours(state, x)[0].loss_scale.scale == 4


# A stream ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("donate", every_night([False, True], but=[False]))
def test_a_stream_is_the_full_batch_update(donate):
    """In microbatches of any size; a window that was not donated can be gone on with."""
    ours, eager = steps("weighted", "aot_eager" if donate else "eager", donate=donate)

    @examples(1 / 5)
    @given(seeds(), st.lists(st.sampled_from([0, 2, 3]), min_size=1, max_size=3))
    @example(0, [2, 3, 0])
    def run(seed, sizes):
        params, batch = make_params(seed), make_batch(seed, sum(sizes))
        state = ours.init(params)
        window = ours.begin(state)
        for part in cut(batch, sizes):
            before, copy = window, copied(window)
            window = ours.update(state, window, part)
            if not donate:
                assert_trees_bitwise_equal(before, copy)
        want = in_a_window(eager, eager.init(params), cut(batch, sizes))
        assert_trees_bitwise_equal(ours.apply(state, window), want)

    run()


def cut(batch, sizes):
    parts = {name: x.split(sizes) for name, x in batch.items()}
    return [{name: parts[name][i] for name in batch} for i in range(len(sizes))]
