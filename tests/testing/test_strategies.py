"""The public strategies: what each guarantees, and the example that a planted fault shrinks to."""

import importlib
import itertools
import random
import subprocess
import sys
from fractions import Fraction

import optree
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as torch_pytree

import pureaccum as pa
from pureaccum._core.accumulator import Accumulator
from pureaccum.testing.strategies import (
    KINDS,
    Fault,
    History,
    batches,
    compositions,
    dtypes,
    exact_trees,
    faults,
    histories,
    losses,
    merge_along,
    merge_trees,
    pieces,
    reduction,
    seeds,
    shapes,
    trees,
    weights,
)
from tests.draws import examples, few


pytestmark = [pytest.mark.laws, pytest.mark.promise("tools")]


def smallest(strategy, shows):
    """What hypothesis would show of a fault; the same in every run and profile."""
    options = settings(max_examples=2000, database=None, phases=[Phase.generate, Phase.shrink])
    return find(strategy, lambda x: bool(shows(x)), settings=options, random=random.Random(0))


def up_to(strategy, n):
    return st.integers(1, n).flatmap(strategy)


# Cuts ------------------------------------------------------------------------------------


@given(st.integers(0, 12), st.booleans(), st.data())
def test_sizes_add_up(n, empty, data):
    sizes = data.draw(compositions(n, empty))
    assert sum(sizes) == n
    assert all(size >= (not empty) for size in sizes)


def test_every_cut_is_drawn():
    """Two choices between any two samples; with empty ones the cuts have no end."""
    for n in range(1, 5):
        for cuts in itertools.product([False, True], repeat=n - 1):
            edges = [0, *(i for i, cut in enumerate(cuts, 1) if cut), n]
            sizes = [b - a for a, b in itertools.pairwise(edges)]
            assert smallest(compositions(n), lambda drawn, want=sizes: drawn == want) == sizes
    for sizes in ([0, 2], [1, 0, 1], [2, 0, 0]):
        assert smallest(compositions(2, empty=True), lambda drawn, s=sizes: drawn == s) == sizes
    assert smallest(compositions(0), lambda sizes: True) == []
    assert smallest(compositions(0, empty=True), lambda sizes: len(sizes) == 2) == [0, 0]


def test_a_mean_of_means_is_shown_by_one_row_and_two():
    def wrong(sizes):
        x = torch.arange(sum(sizes)).double()
        means = torch.stack([part.mean() for part in x.split(sizes)])
        return bool(means.mean() != x.mean())

    assert smallest(up_to(compositions, 12), wrong) == [1, 2]


def test_a_tail_dropped_is_shown_by_two_rows_and_one():
    def wrong(sizes):
        return sum(size for size in sizes if size == sizes[0]) != sum(sizes)

    assert smallest(up_to(compositions, 12).filter(lambda s: s[0] == max(s)), wrong) == [2, 1]


def test_a_microbatch_without_rows_is_alone_where_it_matters():
    drawn = smallest(few.flatmap(lambda n: compositions(n, empty=True)), lambda s: 0 in s)
    assert drawn == [0, 1]


@given(st.data(), st.integers(0, 6))
def test_pieces_are_views_of_all_rows_in_order(data, n):
    x, sizes = torch.arange(2 * n).reshape(n, 2), data.draw(compositions(n, empty=True))
    parts = pieces({"x": x, "rest": (None, 2.0)}, sizes)
    assert [len(part["x"]) for part in parts] == sizes
    assert all(part["rest"] == (None, 2.0) for part in parts)
    assert torch.equal(torch.cat([x[:0], *(part["x"] for part in parts)]), x)
    assert all(p["x"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)


# Merges ----------------------------------------------------------------------------------


@given(st.integers(1, 8), st.data())
def test_a_merge_tree_has_every_state_once(n, data):
    tree = data.draw(merge_trees(n))
    merged = merge_along(tree, [[i] for i in range(n)], list.__add__)
    assert sorted(merged) == list(range(n))
    assert merged == optree.tree_leaves(tree)


def test_every_merge_tree_is_drawn():
    """Of three states: six orders, and two groupings of each."""
    for a, b, c in itertools.permutations(range(3)):
        for tree in (((a, b), c), (a, (b, c))):
            assert smallest(merge_trees(3), lambda drawn, want=tree: drawn == want) == tree
    assert smallest(merge_trees(1), lambda tree: True) == 0


@pytest.mark.parametrize(
    ("merge", "shown"),
    [
        (lambda a, b: b, (0, 1)),  # forgets a state
        (lambda a, b: a - b, (0, 1)),  # is no sum
        (lambda a, b: a + b if a < b else b, (1, 0)),  # depends on the order
        (
            lambda a, b: a + b if b in (1, 2, 4, 8, 16) else a,
            (0, (1, 2)),
        ),  # depends on the grouping
    ],
)
def test_a_merge_that_is_wrong_is_shown(merge, shown):
    def wrong(tree):
        states = [2**i for i in range(1 + max(optree.tree_leaves(tree)))]
        return merge_along(tree, states, merge) != sum(states)

    assert smallest(up_to(merge_trees, 5), wrong) == shown


# Histories -------------------------------------------------------------------------------


@given(st.integers(0, 8), st.data())
def test_a_history_has_every_microbatch_once(n, data):
    history = data.draw(histories(n))
    assert sum(history.sizes) == n
    assert sorted(itertools.chain(*history.groups)) == list(range(len(history.sizes)))
    assert sorted(optree.tree_leaves(history.merges)) == list(range(len(history.groups)))


@pytest.mark.parametrize("donate", [False, True])
@given(data=st.data(), n=st.integers(1, 8))
def test_a_history_is_run_as_it_says(donate, data, n):
    """Beside a log of what is called."""
    history, log = data.draw(histories(n)), []

    def update(state, params, part, donate):
        log.append(donate)
        return [*state, part.tolist()]

    acc = Accumulator(lambda params: [], update, lambda a, b: [a, b], tuple)
    got = history.run(acc, None, torch.arange(n), donate)

    rows = [part.tolist() for part in torch.arange(n).split(history.sizes)]
    states = [[rows[i] for i in group] for group in history.groups]
    assert got == merge_along(history.merges, states, lambda a, b: [a, b])
    assert log == [donate] * len(rows)


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("keep one state of two", History([1], [[], [0]], (1, 0))),
        ("forget what a state had", History([0, 1], [[1, 0]], 0)),
        ("a mean of means", History([1, 2], [[0, 1]], 0)),
        ("microbatches must come in order", History([1, 1], [[1, 0]], 0)),
    ],
)
def test_a_faulty_accumulator_is_shown(fault, shown):
    w = torch.tensor(1.0)
    acc = pa.accumulator(lambda w, x: (w * x).mean())
    right = acc
    if fault == "keep one state of two":
        acc = acc._replace(merge=lambda a, b: b)
    elif fault == "forget what a state had":
        acc = acc._replace(update=lambda state, *args, **_: right.update(acc.init(w), *args))
    elif fault == "a mean of means":
        # 60 times each, which is an integer
        acc = pa.accumulator(
            lambda w, x: pa.Weighted((w * x).sum() * (60 / max(len(x), 1)), 60 if len(x) else 0),
            check=False,
        )
    elif fault == "microbatches must come in order":
        acc = acc._replace(
            update=lambda state, w, x, **_: (
                state if len(x) and x[0] < state.total else right.update(state, w, x)
            )
        )

    def wrong(history):
        x = torch.arange(1.0, 1.0 + sum(history.sizes)) ** 2
        got, _ = acc.finalize(history.run(acc, w, x))
        return bool(got != x.sum() / len(x))

    assert smallest(up_to(histories, 6), wrong) == shown


# Data ------------------------------------------------------------------------------------


NARROWER = {
    torch.float64: torch.float32,
    torch.float32: torch.float16,
    torch.float16: torch.bfloat16,
}


@given(st.data(), dtypes(), st.integers(1, 5), st.integers(1, 9))
def test_sums_of_exact_trees_are_exact(data, dtype, copies, terms):
    """In the dtype itself, in any order and grouping, whichever of them are taken."""
    drawn = data.draw(exact_trees(copies, terms, dtype))
    chosen = [data.draw(st.sampled_from(drawn)) for _ in range(terms)]
    assert len(drawn) == copies
    assert len({optree.tree_structure(tree) for tree in drawn}) == 1

    add = lambda a, b: optree.tree_map(torch.add, a, b)  # noqa: E731
    got = optree.tree_leaves(merge_along(data.draw(merge_trees(terms)), chosen, add))

    for sums, *addends in zip(got, *map(optree.tree_leaves, chosen), strict=True):
        assert sums.dtype == dtype
        columns = zip(*(x.flatten().tolist() for x in addends), strict=True)
        exact = [sum(map(Fraction, column)) for column in columns]
        assert list(map(Fraction, sums.flatten().tolist())) == exact


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROWER, ids=str)
def test_exact_trees_are_large_enough_to_show_a_narrow_sum(dtype):
    seen = []

    @settings(max_examples=50, database=None, derandomize=True)
    @given(exact_trees(4, dtype=dtype))
    def draw(drawn):
        columns = zip(*map(optree.tree_leaves, drawn), strict=True)
        leaves = [torch.stack(xs) for xs in columns if xs[0].numel()]
        if leaves:
            seen.append(any((x.to(NARROWER[dtype]).sum(0) != x.sum(0)).any() for x in leaves))

    draw()
    assert sum(seen) > len(seen) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "narrow", "shown"),
    [
        (torch.float32, torch.float16, 2049.0),
        (torch.float32, torch.bfloat16, 257.0),
        (torch.float16, torch.bfloat16, 257.0),
    ],
)
def test_a_narrow_sum_is_shown_by_the_first_integer_it_lacks(dtype, narrow, shown):
    def wrong(drawn):
        return any(
            (sum(x.to(narrow) for x in xs) != sum(xs)).any()
            for xs in zip(*map(optree.tree_leaves, drawn), strict=True)
        )

    first, second = smallest(exact_trees(2, dtype=dtype), wrong)
    assert (first.item(), second.item()) == (0.0, shown)


@pytest.mark.slow
def test_the_most_terms_are_exact_and_more_are_refused():
    drawn = smallest(
        exact_trees(1, 2**8, torch.bfloat16),
        lambda drawn: torch.is_tensor(drawn[0]) and drawn[0].abs().sum() > 0,
    )
    assert drawn == [torch.tensor(1.0, dtype=torch.bfloat16)]
    with pytest.raises(ValueError, match=r"terms is 257; expected 1 to 256, .* torch.bfloat16"):
        exact_trees(1, 257, torch.bfloat16)
    with pytest.raises(ValueError, match="terms is 0"):
        exact_trees(1, 0)


@pytest.mark.slow
def test_sums_of_ordinary_trees_do_round():
    """Or the exact ones would prove nothing."""

    def wrong(tree):
        x = torch.cat([leaf.flatten() for leaf in optree.tree_leaves(tree)])
        return x.numel() > 2 and (x[0] + x[1]) + x[2] != x[0] + (x[1] + x[2])

    tree = smallest(trees(), wrong)
    assert sum(leaf.numel() for leaf in optree.tree_leaves(tree)) == 3


@given(trees())
def test_a_tree_has_leaves(tree):
    leaves = optree.tree_leaves(tree)
    assert leaves
    assert all(leaf.dtype == torch.float32 and leaf.isfinite().all() for leaf in leaves)


def test_leaves_paired_with_those_of_another_library_are_shown_by_two_keys():
    """optree sorts the keys of a dict, and torch's own pytree does not."""
    numbered = trees(st.just(0))

    def wrong(tree):
        leaves, spec = optree.tree_flatten(tree)
        tree = optree.tree_unflatten(spec, range(len(leaves)))
        return optree.tree_leaves(tree) != torch_pytree.tree_leaves(tree)

    assert list(smallest(numbered, wrong)) == ["z", "a"]


@given(shapes(3, 4), dtypes(complex=True), seeds())
def test_shapes_dtypes_and_seeds_are_what_torch_takes(shape, dtype, seed):
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    assert x.dim() <= 3
    assert all(n <= 4 for n in x.shape)


def test_the_simplest_draws_are_the_simplest_there_are():
    assert smallest(shapes(), lambda shape: True) == ()
    assert smallest(shapes(), lambda shape: 0 not in shape and len(shape) == 2) == (1, 1)
    assert smallest(dtypes(complex=True), lambda dtype: True) == torch.float32
    assert smallest(dtypes(), lambda dtype: dtype.itemsize == 2) == torch.bfloat16
    assert smallest(seeds(), lambda seed: seed > 2**20) == 2**20 + 1
    assert smallest(trees(), lambda tree: True).item() == 0


# Batches and weights ---------------------------------------------------------------------


@given(st.integers(0, 9) | st.just(100), st.data())
def test_a_batch_has_one_row_per_sample(rows, data):
    batch = data.draw(batches(rows))
    assert {name: x.dtype for name, x in batch.items()} == {
        "x": torch.float32,
        "tokens": torch.int64,
        "mask": torch.int64,
    }
    assert {len(x) for x in batch.values()} == {rows}
    assert ((batch["x"] == batch["x"].round()) & (batch["x"].abs() <= 15)).all()
    assert ((batch["tokens"] >= 0) & (batch["tokens"] < 5)).all()
    assert ((batch["mask"] >= 0) & (batch["mask"] <= 3)).all()


@pytest.mark.slow
def test_a_mask_that_is_left_out_is_shown_by_one_row():
    def wrong(batch):
        return bool((batch["x"].T @ batch["mask"].float() != batch["x"].sum(0)).any())

    shown = smallest(up_to(batches, 5), wrong)
    assert [x.tolist() for x in shown.values()] == [[[1.0]], [[0]], [0]]


@given(st.integers(0, 9), st.data())
def test_weights_are_whole_and_not_negative(n, data):
    drawn = data.draw(weights(n, most=7))
    assert len(drawn) == n
    assert all(isinstance(weight, int) and 0 <= weight <= 7 for weight in drawn)


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (lambda ws: sum(ws) == 0, [0]),  # divides by a weight of zero
        (lambda ws: len(ws) != sum(ws), [0]),  # counts microbatches
        (lambda ws: 0 < sum(ws) != len(ws), [1, 0]),  # … and has thought of the above
        (lambda ws: any(w > 1 for w in ws), [2]),  # takes weights for flags
        (lambda ws: not any(ws) and len(ws) == 8, [0] * 8),
    ],
)
def test_faults_in_weighing_are_shown(wrong, shown):
    assert smallest(up_to(weights, 8), wrong) == shown


def test_a_count_beyond_float32_is_shown_by_the_first():
    def wrong(ws):
        return torch.tensor(ws, dtype=torch.float32).sum().double() != sum(ws)

    assert smallest(weights(1, most=2**30), wrong) == [2**24 + 1]


# Faults ----------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 4))
def test_a_fault_spoils_one_microbatch_and_changes_none(data, parts):
    fault = data.draw(faults(parts))
    clean = [
        {**data.draw(batches(2)), "z": torch.zeros(2, 1, dtype=torch.complex64), "k": None}
        for _ in range(parts)
    ]
    before = optree.tree_map(torch.clone, clean)
    spoilt = fault.spoil(clean)
    same = lambda a, b: optree.tree_map(torch.equal, a, b)  # noqa: E731
    assert all(optree.tree_leaves(same(clean, before)))
    for i, (part, old) in enumerate(zip(spoilt, clean, strict=True)):
        changed = {name for name, equal in same(part, old).items() if equal is False}
        assert changed == ({"x", "z"} if i == fault.microbatch else set())
    x = spoilt[fault.microbatch]["x"]
    assert x.dtype == torch.float32
    assert x.isnan().all() == (fault.kind == "nan")
    assert x.isinf().all() == (fault.kind == "inf")
    assert (x * x).isfinite().any() == (x[0] + x[1]).isfinite().any() == False  # noqa: E712


@pytest.mark.parametrize(
    ("unseen", "shown"),
    [
        (lambda x: True, Fault(0, "nan")),  # nobody looks
        (lambda x: not x.isnan().any(), Fault(0, "inf")),  # looks for NaN alone
        (lambda x: x.isfinite().all(), Fault(0, "overflow")),  # looks at the data, not at the loss
    ],
)
def test_faults_that_are_not_seen_are_shown(unseen, shown):
    parts = list(torch.ones(3, 2))
    assert smallest(faults(3), lambda fault: all(map(unseen, fault.spoil(parts)))) == shown


def test_a_last_microbatch_that_nobody_looks_at_is_shown():
    parts = list(torch.ones(3, 2))
    shown = smallest(faults(3), lambda fault: torch.stack(fault.spoil(parts)[:-1]).isfinite().all())
    assert shown == Fault(2, "nan")


# Losses ----------------------------------------------------------------------------------


@examples(1 / 2)
@given(few, st.data())
def test_a_model_is_exact_and_has_what_it_promises(rows, data):
    """In float32 and in float64: the same numbers. For bits see tests/core/test_splits.py."""
    model = data.draw(losses(rows, sparse=True))
    assert {len(x) for x in model.batch.values()} == {model.samples} == {rows}
    assert model.batch["mask"].dtype == torch.int64

    def wide(x):
        return x.double() if x.is_floating_point() else x

    params, batch = optree.tree_map(wide, (model.params, model.batch))
    for kind in ("sum", "weighted"):
        (narrow, value), (want, exact) = (
            m.full_batch(kind) for m in (model, model._replace(params=params, batch=batch))
        )
        assert all(g.layout == torch.strided for g in optree.tree_leaves(narrow))
        if kind == "sum":
            assert value == exact
            for got, g in zip(*map(optree.tree_leaves, (narrow, want)), strict=True):
                assert torch.equal(got.double(), g)
        else:
            weight = batch["mask"].sum()
            assert value == exact if weight else value.isnan()
    assert [reduction(kind) for kind in KINDS] == ["sum", "mean", "mean"]


def test_the_simplest_loss_that_shows_a_mean_of_means():
    """A linear layer of one number, and numbers from -1 to 3."""

    def wrong(model):
        parts = pieces(model.batch, [1, 2])
        got = sum(model.loss("mean")(model.params, part) for part in parts) / 2
        return got * 3 != model.full_batch("sum")[1]

    shown = smallest(losses(3, sparse=True), wrong)
    assert shown.name == "linear 1-1, dot"
    assert all(x.abs().max() <= 3 for x in (*shown.params[0].values(), shown.batch["y"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["linear", "MLP with relu 1", "convnet", "embedding", "bag", "sparse"]
)
def test_every_kind_of_model_is_drawn(word):
    assert word in smallest(losses(1, sparse=True), lambda model: word in model.name).name


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: losses(0), "samples is 0; expected at least one"),
        (lambda: merge_trees(0), "n is 0; expected at least one state"),
        (lambda: compositions(-1), "n is -1; expected a number of samples"),
        (lambda: faults(0), "parts is 0; expected at least one microbatch"),
    ],
)
def test_nothing_to_draw_from_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Without hypothesis ----------------------------------------------------------------------


def test_without_hypothesis_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "pureaccum.testing.strategies")
    with pytest.raises(ImportError, match=r"pip install 'pureaccum\[testing\]'"):
        importlib.import_module("pureaccum.testing.strategies")


@pytest.mark.slow
def test_hypothesis_is_imported_for_strategies_alone():
    code = "import sys, pureaccum, pureaccum.testing; sys.exit('hypothesis' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
