"""Samples under a budget of tokens: all, none too full, few microbatches, on all ranks alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from tests.draws import generator


pytestmark = [pytest.mark.laws, pytest.mark.promise("batches")]
MOST = 12
LENGTHS = st.lists(st.integers(0, MOST), max_size=30)


def microbatches(cut, lengths):
    """The lengths of each microbatch."""
    return [[lengths[int(i)] for i in part] for part in cut.order.split(cut.sizes)]


def tokens(its, padded):
    return len(its) * max(its, default=0) if padded else sum(its)


@given(LENGTHS, st.booleans())
def test_every_row_is_in_one_microbatch_and_none_is_too_full(lengths, padded):
    cut = pa.cut(lengths, max_tokens=MOST, padded=padded)
    assert sorted(cut.order.tolist()) == [*range(len(lengths))]
    assert sum(cut.sizes) == len(lengths)
    assert all(size > 0 for size in cut.sizes)
    parts = microbatches(cut, lengths)
    assert all(tokens(its, padded) <= MOST for its in parts)
    rows = [part.tolist() for part in cut.order.split(cut.sizes)]
    assert all(part == sorted(part) for part in rows)
    assert rows == sorted(rows)


@given(LENGTHS)
def test_there_are_few_microbatches(lengths):
    """No two of any fit are at most half full, so there are fewer than twice what must be."""
    cut = pa.cut(lengths, max_tokens=MOST)
    assert len(cut.sizes) <= max(1, 2 * sum(lengths) / MOST + 1) if lengths else not cut.sizes


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=30))
def test_padded_rows_go_in_as_few_microbatches_as_there_can_be(lengths):
    """With samples sorted by length, some best cut takes neighbours:

    found here by trying them all.
    """
    longest = sorted(lengths, reverse=True)
    best = [0]
    for end in range(1, len(longest) + 1):
        starts = [s for s in range(end) if (end - s) * longest[s] <= MOST]
        best.append(min(best[s] + 1 for s in starts))
    assert len(pa.cut(lengths, max_tokens=MOST, padded=True).sizes) == best[-1]


@given(LENGTHS, st.integers(1, 4), st.booleans())
def test_ranks_have_as_many_microbatches(lengths, ranks, padded):
    cuts = pa.cut(lengths, max_tokens=MOST, ranks=ranks, padded=padded)
    assert len(cuts) == ranks
    assert len({len(cut.sizes) for cut in cuts}) == 1
    assert sorted(torch.cat([cut.order for cut in cuts]).tolist()) == [*range(len(lengths))]
    for cut in cuts:
        assert sum(cut.sizes) == len(cut.order)
        assert all(tokens(its, padded) <= MOST for its in microbatches(cut, lengths))
    alone = len(pa.cut(lengths, max_tokens=MOST, padded=padded).sizes)
    assert len(cuts[0].sizes) == -(-alone // ranks)
    if len(lengths) >= ranks * len(cuts[0].sizes) and min(lengths, default=1):
        assert all(0 not in cut.sizes for cut in cuts)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))
def test_equal_rows_are_shared_out_evenly(ranks, each, length):
    lengths = [length] * (ranks * each)
    cuts = pa.cut(lengths, max_tokens=4 * length, ranks=ranks)
    assert {len(cut.order) for cut in cuts} == {each}


def test_work_is_even_where_it_can_be():
    assert pa.cut([6, 5, 4, 3, 2, 1], max_tokens=12).sizes == [3, 3]
    parts = microbatches(pa.cut([6, 5, 4, 3, 2, 1], max_tokens=12), [6, 5, 4, 3, 2, 1])
    assert sorted(map(sum, parts)) == [10, 11]


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=12), st.booleans())
def test_the_gradient_is_that_of_the_whole_batch(lengths, padded):
    x = torch.randint(-7, 8, (len(lengths), MOST), generator=generator(len(lengths))).float()
    mask = torch.arange(MOST) < torch.tensor(lengths)[:, None]
    batch = {"x": x, "mask": mask}

    def loss(w, batch):
        return pa.Weighted((w * batch["x"] * batch["mask"]).sum(), batch["mask"].sum())

    order, sizes = pa.cut(mask.sum(1), max_tokens=MOST, padded=padded)
    rows = {name: each[order] for name, each in batch.items()}
    step = pa.make_step(loss, pa.sgd(1.0))
    state = step.init(torch.tensor(0.0))
    want, _ = step(state, batch)
    for new, info in (
        step.window(state, pa.microbatches(rows, sizes)),
        pa.make_step(loss, pa.sgd(1.0), microbatch_size=sizes)(state, rows),
    ):
        assert torch.equal(new.params, want.params)
        assert info.microbatches == len(sizes)


def test_more_ranks_than_rows_leave_some_without():
    cuts = pa.cut([3, 2], max_tokens=5, ranks=4)
    assert sorted(cut.sizes for cut in cuts) == [[0], [0], [1], [1]]
    empty = next(cut for cut in cuts if cut.sizes == [0])
    assert [len(part) for part in pa.microbatches(torch.ones(2)[empty.order], empty.sizes)] == [0]
    none = pa.cut([], max_tokens=5)
    assert (len(none.order), none.sizes) == (0, [])


@pytest.mark.parametrize(
    ("lengths", "options", "error", "words"),
    [
        ([3, 9, 2], {}, ValueError, r"lengths\[1\] is 9; expected at most max_tokens=5.*too long"),
        ([3, -1], {}, ValueError, r"lengths\[1\] is -1"),
        ([3, 1.5], {}, TypeError, r"lengths\[1\] is 1.5"),
        ([3, True], {}, TypeError, r"lengths\[1\] is True"),
        (3, {}, TypeError, "lengths is an int"),
        (torch.ones(2), {}, TypeError, "torch.float32; expected one integer per sample"),
        (torch.ones(2, 2, dtype=torch.bool), {}, TypeError, r"mask.sum\(1\)"),
        ([3], {"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ([3], {"max_tokens": 2.5}, TypeError, "max_tokens is 2.5"),
        ([3], {"ranks": 0}, ValueError, "ranks is 0"),
        ([3], {"ranks": "two"}, TypeError, "ranks is 'two'"),
    ],
)
def test_what_cannot_be_cut_is_refused(lengths, options, error, words):
    with pytest.raises(error, match=words):
        pa.cut(lengths, **({"max_tokens": 5} | options))
