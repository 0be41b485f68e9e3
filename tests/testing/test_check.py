"""What a check says is true, and it leaves no trace."""

import ast
import io
import itertools
import operator
import random
import warnings
from contextlib import redirect_stdout

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import pureaccum as pa
from pureaccum._base.deterministic import cast_tree
from pureaccum.testing import AccumulationMismatch, assert_accumulates, check_accumulation
from pureaccum.testing._check.subject import computing_in, ways
from pureaccum.testing._check.trials import Bound, Outcome, Result, Trial, errors, shrunk
from pureaccum.testing.strategies import KINDS, losses, reduction
from tests.draws import examples
from tests.testing.problems import W, X, report_of, squares


pytestmark = [pytest.mark.laws, pytest.mark.promise("check")]
NET, MASK = nn.Linear(3, 1), {"x": X, "mask": torch.ones(8)}
models = st.integers(2, 12).flatmap(losses)


def grows(w, x):
    return squares(w, x) * len(x)


# The verdict ------------------------------------------------------------------------------


@examples(1 / 4)
@given(model=models, kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_a_loss_that_fits_fits_whatever_the_seed(model, kind, seed):
    """Where the arithmetic is exact the error is zero, but for the one division of a mean."""
    assume(kind != "weighted" or model.batch["mask"].any())
    report = report_of(
        model.loss(kind), model.params, model.batch, reduction=reduction(kind), seed=seed
    )
    assert report.fits, report
    assert max(leaf.error for leaf in report.leaves) <= 1e-6
    if kind != "mean":
        assert not any(leaf.error for leaf in report.leaves)


@pytest.mark.slow
@examples(1 / 4)
@given(model=models, seed=st.integers(0, 99), exponent=st.integers(-20, -6))
def test_the_smallest_real_difference_is_seen(model, seed, exponent):
    """A microbatch of one sample that counts 2**-20 too much: a hundred times the bound."""

    def loss(params, batch):
        total = model.loss("sum")(params, batch) + 1.0  # never zero
        return total * (1 + 2.0**exponent * (len(batch["y"]) == 1))

    report = report_of(loss, model.params, model.batch, reduction="sum", seed=seed)
    assert not report.fits
    value = report.leaves[0]
    assert value.error > 1
    assert min(map(len, value.split)) == 1


def test_a_difference_of_a_hundred_times_the_bound_is_seen():
    assert not report_of(lambda w, x: squares(w, x) * (1 + 2.0**-20 * (len(x) == 1))).fits


def test_a_gradient_that_is_zero_on_paper_is_no_false_alarm():
    """A bias below a softmax: what is left is rounding, and has no digit right."""
    random = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, generator=random), "b": torch.randn((), generator=random)}

    def loss(params, x):
        return torch.softmax(x @ params["w"] + params["b"], 1).square().mean()

    report = report_of(loss, params)
    assert report.fits
    full = torch.func.grad(loss)(optree.tree_map(torch.Tensor.double, params), X.double())
    assert full["b"].abs() < 1e-14  # the control: it is rounding, or zero


@pytest.mark.mechanism
def test_an_error_is_in_units_of_the_bound():
    """By hand: |error| / (share · sizes + floor)."""
    got = Result([torch.tensor(1.0), torch.tensor([3.0, 4.0])], [10.0, 0.0])
    want = [torch.tensor(2.0), torch.tensor([0.0, 0.0])]
    assert errors(got, want, Bound(0.01, [0.1, 2.0])) == [5.0, 2.5]
    exact = Result(want, [0.0, 0.0])
    assert errors(exact, want, Bound(0.01, [0.0, 0.0])) == [0.0, 0.0]
    assert errors(got, want, Bound(0.0, [0.0, 0.0])) == [float("inf")] * 2
    nan = Result([torch.tensor(float("nan"))], [1.0])
    assert errors(nan, [torch.tensor(float("nan"))], Bound(1.0, [1.0])) == [0.0]
    assert errors(nan, [torch.tensor(0.0)], Bound(1.0, [1.0])) == [float("inf")]


# Splits -----------------------------------------------------------------------------------


@pytest.mark.mechanism
@given(rows=st.integers(2, 40), count=st.integers(1, 10), seed=st.integers(0, 99))
def test_every_way_is_a_partition(rows, count, seed):
    found = ways(rows, count, torch.Generator().manual_seed(seed))
    assert len(set(found)) == len(found)
    for parts in found:
        assert sorted(itertools.chain(*parts)) == list(range(rows))
        assert all(parts)
        assert len(parts) > 1
    if rows <= 16:
        assert tuple((row,) for row in range(rows)) in found
    assert any(max(map(len, parts)) == rows - 1 for parts in found)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 3, 8, 40])
def test_a_loop_is_given_every_sample_once_in_each_split(rows):
    """Some of them alone, and in some splits out of order. (What a loop keeps is put back.)"""

    def loop(loss_fn, w, parts):
        print([part[:, 0].int().tolist() for part in parts])
        return sum(torch.func.grad(loss_fn)(w, part) * len(part) for part in parts) / rows

    x = torch.arange(3.0 * rows).reshape(3, rows).T.contiguous()
    with redirect_stdout(io.StringIO()) as out:
        assert report_of(squares, W, x, loop=loop).fits
    given_parts = [ast.literal_eval(line) for line in out.getvalue().splitlines()]
    orders = [[*itertools.chain(*parts)] for parts in given_parts]
    assert all(sorted(order) == [*range(rows)] for order in orders)
    assert any(len(parts) > 1 for parts in given_parts)
    assert any(len(part) == 1 for parts in given_parts for part in parts)
    assert any(order != [*range(rows)] for order in orders)


@pytest.mark.mechanism
@given(
    parts=st.permutations(range(12)).map(lambda order: (order[:3], order[3:5], order[5:])),
    guilty=st.sets(st.integers(0, 11), min_size=1, max_size=4),
)
def test_the_split_that_is_shown_is_the_smallest(parts, guilty):
    """A fault that needs certain samples, not all in one microbatch: no sample can be left out."""

    def outcome(parts):
        rows = set(itertools.chain(*parts))
        together = any(guilty <= set(part) for part in parts)
        return Outcome([2.0 if guilty <= rows and not together else 0.0])

    class Planted(Trial):
        def outcome(self, parts):
            return outcome(parts)

    trial = Planted(None, None, None, None, {})
    parts = tuple(map(tuple, parts))
    if outcome(parts).errors[0] > 1:
        found = shrunk(trial, parts, 0, calls=10_000)
        assert set(itertools.chain(*found)) == guilty
        assert len(found) == 2


@pytest.mark.slow
def test_each_leaf_has_a_split_that_shows_its_own_fault():
    """Of one leaf samples 0 and 1 see each other, of the other samples 2 and 3."""

    def loss(params, row):
        one, other = (all(i in row for i in pair) for pair in ((0, 1), (2, 3)))
        return params["a"] * (row.sum() + one) + params["b"] * (row.sum() + other)

    params, row = {"a": torch.zeros(()), "b": torch.zeros(())}, torch.arange(8)
    _, a, b = report_of(loss, params, row, reduction="sum").leaves
    assert [{*itertools.chain(*leaf.split)} for leaf in (a, b)] == [{0, 1}, {2, 3}]


def test_splits_may_be_given():
    report = report_of(grows, splits=[[4, 4], [7, 1]])
    assert report.splits == 2
    assert not report.fits
    assert report_of(squares, splits=[[4, 4]]).fits


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report():
    assert report_of(grows, seed=3) == report_of(grows, seed=3)


@pytest.mark.slow
def test_weights_are_drawn_where_the_batch_has_them():
    """With a mask of ones a mean over the mask is the mean over the samples;

    with zeros it is not.
    """

    def weighted(w, batch):
        return pa.Weighted((((batch["x"] @ w) ** 2) * batch["mask"]).sum(), batch["mask"].sum())

    def loss(w, batch):
        return operator.truediv(*weighted(w, batch))

    assert report_of(loss, batch=MASK, splits=2).fits
    for name in ("mask", "['mask']", "batch['mask']"):
        report = report_of(loss, batch=MASK, weights=name, splits=2)
        assert report.diagnoses[0].kind == "mean of means"
    assert report_of(weighted, batch=MASK, weights="mask", splits=2).fits
    for only in (0, 5, 7):  # where a single sample weighs anything, it goes on doing so
        sparse = {"x": X, "mask": torch.arange(8) == only}
        assert report_of(weighted, batch=sparse, weights="mask", seed=only, splits=2).fits


# What is given ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mismatch_is_an_assertion_that_carries_the_report():
    with pytest.raises(AssertionError, match="sum as mean") as caught:
        assert_accumulates(grows, W, X)
    assert isinstance(caught.value, AccumulationMismatch)
    assert caught.value.report == report_of(grows)
    assert str(caught.value) == str(caught.value.report)
    assert_accumulates(grows, W, X, reduction="sum")


def test_of_sparse_batches_the_one_that_torch_takes_rows_of_is_checked():
    def loss(w, x):
        return squares(w, x.to_dense())

    assert_accumulates(loss, W, X.to_sparse())


def raises(*_):
    return {}["mine"]


def weightless(w, x):
    return pa.Weighted(squares(w, x) * 0, 0)


def to_csr(x):
    with warnings.catch_warnings(action="ignore"):  # a prototype
        return x.to_sparse_csr()


NO_GRADIENT, SPLITS = "Return the gradient", [[[4, 5]], [[8, 0]], [[]], [[8]], [], [4, 4]]
REFUSED = [  # in place of the arguments of a loss that fits
    (TypeError, "loss_fn is of type int", {"loss_fn": 3}),
    (TypeError, "params", {"params": torch.ones(3, dtype=torch.int64)}),
    (ValueError, "batch has 1 sample;", {"batch": X[:1]}),
    (ValueError, "batch has 0 samples;", {"batch": X[:0]}),
    (ValueError, "no tensor", {"batch": {"n": 3}}),
    (TypeError, r"batch is a tensor of layout .*x\.to_dense\(\)", {"batch": to_csr(X)}),
    (ValueError, "reduction", {"reduction": "median"}),
    (ValueError, "reference", {"reference": "median"}),
    *((ValueError, "splits", {"splits": splits}) for splits in [*SPLITS, "8", 2.5, 0, True]),
    (ValueError, r"'masks', .* not a tensor.*batch\['mask'\]", {"batch": MASK, "weights": "masks"}),
    (KeyError, "mine", {"loss_fn": raises}),
    (ValueError, "nothing to compare", {"loss_fn": lambda w, x: (x @ w).log().mean()}),
    (ValueError, "nan in float64, and its gradient is finite", {"loss_fn": weightless}),
    (ValueError, "does not depend on params", {"loss_fn": lambda w, x: squares(w, x).detach()}),
    (ValueError, r"functional_call\(module, params", {"loss_fn": lambda w, x: NET(x).sum()}),
    (TypeError, "has_aux", {"loss_fn": lambda w, x: (squares(w, x), {"rows": len(x)})}),
    (TypeError, "loop is of type int", {"loop": 7}),
    (KeyError, "mine", {"loop": raises}),
    (ValueError, NO_GRADIENT, {"loop": lambda *_: (W, torch.zeros(()))}),
    (ValueError, NO_GRADIENT, {"loop": lambda *_: None}),
    (ValueError, NO_GRADIENT, {"loop": lambda *_: W[:2]}),
]


@pytest.mark.parametrize(("error", "words", "changed"), REFUSED)
def test_what_cannot_be_checked_is_refused(error, words, changed):
    with pytest.raises(error, match=words):
        check_accumulation(**{"loss_fn": squares, "params": W, "batch": X} | changed)


@pytest.mark.slow
def test_a_loop_on_a_module_of_its_own_is_compared_natively():
    net = nn.Linear(3, 1, bias=False)

    def loop(loss_fn, params, parts):
        net.zero_grad()
        with torch.no_grad():
            net.weight.copy_(params[None])
        for part in parts:
            (net(part).square().mean() * (len(part) / sum(map(len, parts)))).backward()
        return net.weight.grad[0]

    with pytest.raises(ValueError, match="reference='native'"):
        check_accumulation(squares, W, X, loop=loop)
    before = net.weight.detach().clone()
    assert report_of(squares, loop=loop, reference="native").fits
    assert net.weight.equal(before)
    assert net.weight.grad is None


def test_a_loss_may_return_aux():
    def loss(w, x):
        return squares(w, x), {"rows": len(x)}

    assert report_of(loss, has_aux=True).fits


def test_natively_the_bound_is_that_of_the_dtype():
    report = report_of(squares, W.bfloat16(), X.bfloat16(), reference="native")
    assert report.fits
    assert (report.reference, report.dtype) == ("bfloat16", "bfloat16")
    assert not any(leaf.native == leaf.native for leaf in report.leaves)  # all of them NaN
    assert report_of(lambda w, x: squares(w.bfloat16(), x.bfloat16()), reference="native").fits
    assert not report_of(grows, W.bfloat16(), X.bfloat16(), reference="native").fits


def test_natively_a_sum_that_is_exact_is_as_good_as_the_full_batch():
    """Neither has an error of its own: the ratio of nothing to nothing is 1."""
    x = torch.arange(24.0).reshape(8, 3) % 7
    report = report_of(lambda w, x: ((x @ w) ** 2).sum(), W * 2, x, reduction="sum")
    assert [leaf.native for leaf in report.leaves] == [1.0, 1.0]


# It leaves no trace -----------------------------------------------------------------------


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(3), 0
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, x):
        self.calls += 1
        self.ema = self.ema * 0.9 + x.detach().mean(0) * 0.1
        return self.norm(x)


@pytest.mark.promise("purity")
@pytest.mark.promise("check")
def test_nothing_is_left_of_a_check():
    net, own, calls = Counting(), torch.Generator().manual_seed(5), [0]

    def loss(w, x):
        calls[0] += 1
        noise = torch.rand(x.shape, generator=own) + torch.rand(()) + random.random()
        return ((functional_call(net, {}, (x + noise,)) @ w) ** 2).mean()

    held = {name: (x, x.clone()) for name, x in net.state_dict(keep_vars=True).items()}

    def world():
        default = random.getstate(), torch.get_default_dtype()
        return own.get_state().tolist(), torch.get_rng_state().tolist(), default

    before, report = world(), report_of(loss)
    assert world() == before
    assert not report.fits
    assert (calls, net.calls) == ([0], 0)
    for name, x in net.state_dict(keep_vars=True).items():
        assert x is held[name][0], name
        assert x.equal(held[name][1]), name


def test_a_buffer_that_is_assigned_in_every_call_is_state():
    net = Counting().eval()
    report = report_of(lambda w, x: squares(w, functional_call(net, {}, (x,))))
    assert any(d.kind == "state" and "writes to net.ema" in d.says for d in report.diagnoses)


@pytest.mark.slow
def test_a_check_works_whatever_mode_it_is_called_in():
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            assert report_of(squares).fits
            assert report_of(squares, W.clone(), X.clone()).fits


# In another dtype -------------------------------------------------------------------------


@pytest.mark.mechanism
def test_everything_that_a_loss_holds_takes_part_in_the_dtype():
    """Captured tensors, casts, dtypes named, those of new tensors, and what is composed of them."""
    captured, net = torch.ones(3), nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)).eval()
    for dtype in (torch.float64, torch.float32):
        with computing_in(dtype):
            for x in (
                captured * 1,
                captured[0],
                torch.ones(2),
                torch.ones(2, dtype=torch.float16) + 0,
                torch.arange(3) / 3,
                captured.half().float().double().bfloat16(),
                captured.to(torch.bfloat16),
                torch.cat([captured, torch.ones(1, dtype=torch.float64)]),
                net(torch.ones(2, 3))[0],
                nn.functional.batch_norm(torch.ones(2, 3), captured, captured),
                torch.view_as_complex(torch.ones(2, 2)).real,
            ):
                assert x.dtype == dtype
            assert captured.dtype == dtype
    assert captured.dtype == torch.float32
    assert torch.ones(()).dtype == torch.float32
    assert cast_tree({"x": captured, "n": 3}, torch.float64)["x"].dtype == torch.float64


def test_whatever_a_loss_holds_is_computed_in_float64():
    """Captured tensors, casts, dtypes named, those of new tensors, and what is composed of them."""
    captured, net = torch.ones(3), nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)).eval()

    def loss(w, x):
        seen = (
            captured * 1,
            captured[0],
            torch.ones(2),
            torch.ones(2, dtype=torch.float16) + 0,
            torch.arange(3) / 3,
            captured.half().float().double().bfloat16(),
            captured.to(torch.bfloat16),
            torch.cat([captured, torch.ones(1, dtype=torch.float64)]),
            net(torch.ones(2, 3))[0],
            nn.functional.batch_norm(torch.ones(2, 3), captured, captured),
            torch.view_as_complex(torch.ones(2, 2)).real,
        )
        assert w.dtype == torch.float32 or {x.dtype for x in seen} == {torch.float64}
        return squares(w * captured, x)

    report = report_of(loss)
    assert (report.fits, report.reference) == (True, "float64")
    assert captured.dtype == torch.ones(()).dtype == torch.float32


def test_the_default_dtype_is_as_before_where_a_loss_raises():
    def loss(w, x):
        return squares(w, x) if w.dtype == torch.float32 else raises()

    with pytest.raises(KeyError, match="mine"):
        check_accumulation(loss, W, X)
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(()).dtype == torch.float32


@pytest.mark.mechanism
def test_what_is_written_to_a_captured_tensor_is_forgotten():
    counter = torch.zeros(())
    with computing_in(torch.float64):
        counter.add_(1)
        assert float(counter) == 1
    assert float(counter) == 0


@pytest.mark.mechanism
def test_the_default_dtype_comes_back_after_an_error():
    with pytest.raises(RuntimeError, match="mine"), computing_in(torch.float64):
        raise RuntimeError("mine")
    assert torch.get_default_dtype() == torch.float32


# The report -------------------------------------------------------------------------------


def test_a_report_is_a_readable_table():
    report = report_of(lambda w, x: squares(w["w"], x) * len(x), {"w": W})
    head, blank, columns, value, weight, *rest = str(report).splitlines()
    assert head == (
        f"does not fit: 2 of 2 leaves are off (a mean over 8 samples, {report.splits} splits, "
        "in float64)"
    )
    assert not blank
    assert columns.split()[0] == "leaf"
    assert value.startswith("value ")
    assert weight.startswith("params['w'] ")
    assert "samples " in value
    assert any(line.startswith("sum as mean: ") for line in rest)
    assert rest[-1].startswith('    pa.grad(loss, microbatch_size=..., reduction="sum")')
    assert max(map(len, rest)) <= 110
    assert str(report_of(squares)).startswith("fits: every leaf is the full batch's (a mean over")


# Cuts inside of a loss --------------------------------------------------------------------


def sums(w, x):
    """Undivided, so that a cut around this cut is right."""
    return pa.Weighted(
        *pa.microbatch(
            lambda w, x: ((x * w).square().sum(), x.numel()), microbatch_size=3, reduce="sum"
        )(w, x)
    )


def contrast(w, x):
    """Of all rows: for the full batch alone."""
    z = pa.microbatch(lambda w, x: x * w, microbatch_size=3)(w, x)
    return (z.unsqueeze(0) - z.unsqueeze(1)).square().mean().tanh()


@pytest.mark.slow
@pytest.mark.parametrize("splits", [3, [[3, 5], [1, 1, 6]]])
def test_a_cut_around_a_cut_fits_where_sums_are_undivided(splits):
    assert report_of(sums, splits=splits).fits
    report = report_of(contrast, splits=splits)
    assert not report.fits
    assert report.diagnoses[0].kind == "batch coupling"
