"""The parts of a verdict, each by itself: the bound, the cuts, the experiments, the report."""

import io
import itertools
import math
import random
from contextlib import redirect_stdout
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum._core.batches import read_batch
from pureaccum.testing._check.check import find_leaf
from pureaccum.testing._check.kept import Kept, names_of
from pureaccum.testing._check.report import Diagnosis, Leaf, Report
from pureaccum.testing._check.rows import LossOfRows, several_means
from pureaccum.testing._check.subject import Subject, redrawn, ways
from pureaccum.testing._check.trials import (
    Bound,
    Outcome,
    Trial,
    compare_natively,
    native_trial,
    repeats,
    shrunk,
    trial_of,
    whole_batch,
)
from tests.draws import generator
from tests.testing.problems import W, X, report_of, squares


pytestmark = [pytest.mark.laws, pytest.mark.mechanism]


# The bound -------------------------------------------------------------------------------


def product(w, x):
    return (w * x).sum()


def subject_of(x, loss=product, reduction="sum", dtype=torch.float64):
    x = torch.tensor(x, dtype=dtype)
    w, seeds = torch.zeros_like(x[0]), itertools.count()
    return Subject(loss, w, read_batch(x), seeds, reduction=reduction)


def in_double(x, loss=product, reduction="sum"):
    return trial_of(subject_of(x, loss, reduction))


def test_the_bound_is_the_root_of_a_unit_and_what_float32_loses():
    """√u₆₄, and √(u₆₄/u₃₂) of 2 · 2**-30: two numbers lose 2**-30 each."""
    bound = in_double([[1 + 2.0**-30], [1 + 2.0**-30]]).bound
    assert bound == Bound(2.0**-26.5, [0.0, 2.0**-43.5])
    assert in_double([[1e300], [1.0]]).bound == Bound(2.0**-26.5, [0.0, 0.0])


def test_the_bound_is_a_share_of_all_terms_even_where_they_cancel():
    """The mean of (3, 4) and (-3, -4):

    nothing, of terms whose norms are 5 and 5, of two samples.
    """
    (value, leaf), sizes = in_double([[3, 4], [-3, -4]], reduction="mean").accumulate(((0,), (1,)))
    assert (value.item(), leaf.tolist(), sizes) == (0.0, [0.0, 0.0], [0.0, 5.0])


def test_natively_the_bound_is_of_the_narrowest_dtype_and_of_the_whole_gradient():
    subject = subject_of([[1, 2], [2, 2]], dtype=torch.float32)
    bound = native_trial(subject, torch.bfloat16).bound
    assert bound == Bound(2.0**-4, [0.0, 5 * 2.0**-6])


def test_rows_are_compared_with_the_same_rows_in_the_order_of_the_batch():
    good = in_double([[1], [2], [4], [8]])
    assert good.outcome(((0,), (3,))).errors == [0.0, 0.0]
    assert good.whole((3, 1))[1].item() == 10
    placed = in_double([[1], [2], [4], [8]], lambda w, x: (w * x).cumsum(0).sum())
    assert placed.outcome(((0, 1),)).errors == [0.0, 0.0]
    assert placed.fails(((1, 0),), 1)


def test_native_errors_are_relative_to_the_full_batchs_own():
    """By hand: the worst split of each leaf, over what the full batch at once has."""

    def leaves(*numbers):
        return [torch.tensor(x) for x in numbers]

    alone, inf = leaves(2.0, 0.0, 0.0, math.inf, math.inf, 1.0), math.inf
    tried = [leaves(4.0, 0.0, 0.0, 1.0, 1.0, 2.0), leaves(6.0, 3.0, 0.0, 1.0, inf, 1.0)]
    ratios, overflow = compare_natively(lambda way: way, lambda: alone, leaves(*[0.0] * 6), tried)
    assert str(ratios) == "[3.0, nan, 1.0, 0.0, nan, 2.0]"
    assert overflow == 4
    nothing = compare_natively(lambda way: way, lambda: alone, alone, [])
    assert str(nothing) == f"({[math.nan] * 6}, None)"


def test_two_calls_tell_state_and_others_tell_randomness():
    """As (randomness, state); and what was counted is put back."""
    counted = []

    def counting(w, x):
        counted.append(1)
        return product(w, x) * len(counted)

    for loss, told in {
        product: (False, False),
        counting: (False, True),
        lambda w, x: product(w, x) * torch.rand(()): (True, False),
    }.items():
        subject = subject_of([[1], [2]], loss)._replace(kept=Kept((), tuple(names_of(loss))))
        assert repeats(subject, whole_batch, Bound(0.0, [1.0, 0.0]), 1) == told
        assert not counted


# The cuts --------------------------------------------------------------------------------


@given(seed=st.integers(0, 99))
def test_random_cuts_are_ragged_many_and_out_of_order(seed):
    halves, all_but_one, quarters, single, *found = ways(12, 20, generator(seed))
    fixed = [[*map(len, parts)] for parts in (halves, all_but_one, quarters, single)]
    assert fixed == [[6, 6], [11, 1], [3] * 4, [1] * 12]
    assert any([*itertools.chain(*parts)] != [*range(12)] for parts in found)
    assert any(len({*map(len, parts[:-1])}) > 1 for parts in found)
    assert max(map(len, found)) > 2


@pytest.mark.slow
@pytest.mark.promise("check")
def test_the_seed_chooses_cuts_and_random_numbers():
    def loss(w, x):
        print(x[:, 0].tolist(), torch.rand(()).item(), sep="; ")  # a list would be put back
        return squares(w, x)

    def seen(seed):
        with redirect_stdout(io.StringIO()) as out:
            report_of(loss, seed=seed)
        return [*zip(*(line.split("; ") for line in out.getvalue().splitlines()), strict=True)]

    assert seen(0) == seen(0)
    for one, other in zip(seen(0), seen(1), strict=True):
        assert {*one} != {*other}


class Planted:
    """Its second leaf is off where samples 0 and 1 are apart; two samples cannot be computed."""

    fails, tried = Trial.fails, 0

    def outcome(self, parts):
        self.tried += 1
        if parts == ((2,), (3,)):
            raise ValueError
        return Outcome([0.0, 2.0 * (sum(bool({0, 1} & {*part}) for part in parts) == 2)])


def test_shrinking_is_of_a_leaf_and_ends():
    trial, parts = Planted(), ((0, 2, 4, 6), (1, 3, 5, 7))
    assert shrunk(trial, parts, 1) == ((0,), (1,))
    assert shrunk(trial, parts, 0) == parts
    assert not trial.fails(((2,), (3,)), 1)
    trial.tried = 0
    shrunk(trial, parts, 1, calls=3)
    assert trial.tried == 3


@given(rows=st.integers(2, 5), seed=st.integers(0, 99), dims=st.integers(1, 3))
def test_weights_that_are_redrawn_are_the_old_ones_or_nothing(rows, seed, dims):
    """A sample as a whole, some samples of each, and of no other leaf."""
    mask = torch.arange(1, rows * 2 ** (dims - 1) + 1).reshape(rows, *[2] * (dims - 1))
    batch = read_batch({"a": torch.arange(rows), "m": mask})
    new = redrawn(Subject(None, None, batch, None), find_leaf(batch, "m"), generator(seed))
    assert new.batch.leaves[0] is batch.leaves[0]
    kept = [row.equal(old) for row, old in zip(new.batch.leaves[1], mask, strict=True)]
    assert kept == [bool(row.any()) for row in new.batch.leaves[1]]
    assert {*kept} == {True, False}


# Experiments -----------------------------------------------------------------------------


MASKED = {"x": X, "m": torch.tensor([0.0, 1.0, 4.0, 0.0, 2.0, 2.0, 3.0, 1.0])}
ADDED = "the weights of two microbatches are 1 and 1, that of both together is 1"
WEIGHTS = (
    "samples weigh 0 (sample 0), 1 (sample 1), 4 (sample 2), 0 (sample 3), 2 (sample 4), "
    "2 (sample 5), …"
)


def total(w, batch):
    return ((batch["x"] @ w) ** 2 * batch["m"]).sum()


def mean(w, batch):
    return total(w, batch) / batch["m"].sum().clamp(min=1)


def few(batch):  # what holds for a few samples alone does not hold
    return 1 + (len(batch["x"]) > 3)


COUPLED, RANDOM = "batch coupling", "randomness"
EXPERIMENTS = {
    "a norm": (lambda w, b: F.batch_norm(b["x"] * w, 0 * W, 0 * W + 1).amax(), COUPLED, "a mean."),
    "weights": (mean, "mean of means", WEIGHTS),
    "weights that are not": (lambda w, b: pa.Weighted(mean(w, b), 1), "weight", ADDED),
    "a mean": (lambda w, b: pa.Weighted(mean(w, b), b["m"].sum()), "weight", "a mean already"),
    "places": (lambda w, b: (b["x"] @ w).cumsum(0).sum(), COUPLED, "the order of the samples, too"),
    "Python": (lambda w, b: squares(w, b["x"] + random.random()), RANDOM, "Python's generator"),
    "NumPy": (lambda w, b: squares(w, b["x"] + np.random.random()), RANDOM, "NumPy's generator"),
    "torch": (lambda w, b: squares(w, F.dropout(nn.Identity()(b["x"]))), RANDOM, "torch's dropout"),
    "a sum of few": (lambda w, b: total(w, b) * few(b), COUPLED, ""),
    "a mean of few": (lambda w, b: squares(w, b["x"]) * few(b), COUPLED, ""),
    "a term of few": (lambda w, b: total(w, b) + w.square().sum() * few(b), COUPLED, ""),
    "weights of few": (lambda w, b: mean(w, b) * few(b), COUPLED, ""),
}


@pytest.mark.slow
@pytest.mark.promise("check")
@pytest.mark.parametrize(("loss", "kind", "says"), EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_an_experiment_tells(loss, kind, says):
    (found,) = report_of(loss, batch=MASKED).diagnoses
    assert found.kind == kind
    assert says in found.says
    assert ("order" in found.says) == ("order" in says)


def test_the_shares_of_a_row_are_those_of_its_counts():
    """Of samples, and of what the mask leaves of them."""

    def loss(w, batch):
        return squares(w, batch["x"]) + total(w, batch) / batch["m"].sum()

    subject = Subject(loss, W, read_batch(MASKED), itertools.count())
    trial = trial_of(subject)
    found = several_means(LossOfRows(trial, {}))
    beside, row, shares = found
    counts = [int(m) for m in MASKED["m"]]
    of_tokens = Fraction(counts[row], sum(counts[it] for it in beside))
    fractions = [Fraction(share).limit_denominator(100) for share in shares]
    assert fractions == sorted((Fraction(1, len(beside)), of_tokens))


LOOPS = [(False, ""), (True, ""), (False, "sum as mean"), (True, "mean of means")]


@pytest.mark.slow
@pytest.mark.promise("check")
@pytest.mark.parametrize(("weighted", "kind"), LOOPS)
def test_what_a_loop_makes_of_sums_and_totals(weighted, kind):
    def loss(w, batch):
        return pa.Weighted(total(w, batch), batch["m"].sum()) if weighted else total(w, batch)

    def loop(loss_fn, w, parts):
        w = w.clone().requires_grad_()
        for part in parts:
            found = loss_fn(w, part)
            if weighted:
                by = [part] if kind else parts
                found = found.total / sum(p["m"].sum() for p in by).clamp(min=1)
            (found / (len(parts) if kind else 1)).backward()
        return w.grad

    causes = [c.kind for c in report_of(loss, batch=MASKED, loop=loop, reduction="sum").diagnoses]
    assert causes == [kind] * bool(kind)


@pytest.mark.promise("check")
def test_each_of_two_calls_sees_the_rows_in_another_order():
    """In the same order, both would write the same."""
    last = torch.zeros(3)

    def loss(w, x):
        last.copy_(x[-1])
        return squares(w, x)

    (found,) = report_of(loss).diagnoses
    assert (found.kind, "writes to last" in found.says) == ("state", True)


# The report ------------------------------------------------------------------------------


@pytest.mark.promise("check")
def test_a_report_says_what_was_done():
    def loss(w, batch):
        narrow = total(w.bfloat16(), {**batch, "x": batch["x"].bfloat16()})
        return pa.Weighted(narrow.float(), batch["m"].sum())

    report = report_of(loss, batch=MASKED, weights="m", splits=[[4, 4], [7, 1]])
    assert (report.samples, report.splits, report.loss) == (8, 8, "Weighted")
    assert (report.dtype, report.reference) == ("float32", "float64")


@pytest.mark.promise("check")
def test_a_report_is_the_table_made_by_hand():
    leaves = (
        Leaf("value", 0.5, (), 0.0),
        Leaf("params", 12345.0, ((0, 3), (5,)), math.nan),
        Leaf("b", math.inf, (tuple(range(20)), (20,)), 0.001),
    )
    report = Report(False, leaves, (Diagnosis("kind", "why.", "mend"),), 21, 3, "sum", "d", "r")
    table = str(report).partition("\n\n")[2]
    assert table.splitlines()[:4] == [
        "leaf    error / bound  d / full  smallest split that shows it",
        "value             0.5         0",
        "params        1.2e+04         –  samples 0 3 | 5",
        "b                 inf   1.0e-03  20 samples | 1 samples",
    ]
    assert str(report).startswith("does not fit: 2 of 3 leaves ")
    assert "(a sum over 21 samples, 3 splits, " in str(report)
    assert str(report).endswith("kind: why.\n    mend")
    fine = report._replace(leaves=leaves[:1])
    assert str(fine).startswith("does not fit")
    assert "0 of" not in str(fine)
