"""The assertions about trees: what is the same passes, and what is not is named."""

import math
from fractions import Fraction
from pathlib import Path

import optree
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pureaccum.testing import (
    assert_accumulates,
    assert_pure,
    assert_trees_bitwise_equal,
    assert_trees_within_bound,
    check_accumulation,
)
from pureaccum.testing.strategies import exact_trees
from tests.refusals import PACKAGE


pytestmark = [pytest.mark.faults, pytest.mark.promise("tools")]
NAN, INF = math.nan, math.inf
A = torch.tensor([[1.25, -2.5], [3.75, 7.5]])


def said(got, want):
    with pytest.raises(AssertionError) as caught:
        assert_trees_bitwise_equal(got, want)
    return str(caught.value)


def said_of_bound(got, want, bound):
    with pytest.raises(AssertionError) as caught:
        assert_trees_within_bound(got, want, bound)
    return str(caught.value)


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# Bits ------------------------------------------------------------------------------------


SAME = {
    "NaN": (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0])),
    "signed zeros": (torch.tensor([-0.0]), torch.tensor([0.0])),
    "inf": (torch.tensor([INF, -INF]), torch.tensor([INF, -INF])),
    "sparse": (A.to_sparse(), A),
    "both sparse": (A.to_sparse(), A.to_sparse()),
    "a view": (A.T.contiguous().T, A),
    "conjugates": (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j])),
    "grads wanted": (A.clone().requires_grad_(), A),
    "float8": (A.to(torch.float8_e4m3fn), A.to(torch.float8_e4m3fn)),
    "no numbers": (torch.zeros(0, 3), torch.zeros(0, 3)),
    "meta": (torch.zeros(3, device="meta"), torch.ones(3, device="meta")),
    "no tensors": ((1, "a", None, NAN), (1, "a", None, NAN)),
    "no leaves": ({}, {}),
    "the order of keys": ({"a": A, "b": 1}, {"b": 1, "a": A}),
}


@pytest.mark.parametrize(("got", "want"), SAME.values(), ids=SAME)
def test_trees_that_are_the_same_pass(got, want):
    assert_trees_bitwise_equal(got, want)
    assert_trees_bitwise_equal({"in": [got, (want,)]}, {"in": [want, (got,)]})


def test_an_inference_tensor_is_as_good_as_another():
    with torch.inference_mode():
        x = A + 0
    assert_trees_bitwise_equal(x, A)


DIFFERENT = {
    "a leaf missing": ({"a": 1}, {"a": 1, "b": 2}, "got['b'] is missing"),
    "a leaf more": ([1, 2], [1], "got[1] is not in want"),
    "a container": ([A], (A,), "the containers differ"),
    "None": ([None], [A], "got[0] is missing"),
    "a word": ({"a": "x"}, {"a": "y"}, "got['a']: 'x' came, 'y' was expected."),
    "a type": ([1], [True], "got[0]: 1 came, True was expected."),
    "no tensor": ([2.0], [A], "got[0]: 2.0 came, a tensor of shape (2, 2) was expected."),
    "a device": (A.to("meta"), A, "got: it came on meta, and was expected on cpu."),
    "a shape": (A[0], A, "got: shape (2,) came, (2, 2) was expected."),
    "a shape, flat": (A.flatten(), A, "Likely cause: the numbers are the same, in another shape."),
    "a shape, transposed": (A[:1].mT, A[:1], "Likely cause: it is transposed."),
    "a shape, not summed": (A, A.sum(0), "Likely cause: a sum over dimension 0 is missing."),
    "a dtype": (A.double(), A, "got: torch.float64 came, torch.float32 was expected."),
    "a dtype alone": (A.double(), A, "the numbers are the same: only a cast is missing"),
    "a dtype, wider": (A.double() / 3, A / 3, "a cast is missing: after it"),
    "a dtype, rounded": (A.half() / 3, (A.half() / 3).float() + 2**-20, "torch.float16 came"),
    "a dtype, narrower": ((A / 3).half(), A / 3, "a cast too many, which rounded"),
    "one number": (A.clone().fill_diagonal_(9), A, "2 of 4 numbers differ, the first at [0, 0]"),
    "a scalar": (A[0, 0], A[1, 1], "1 of 1 numbers differ, the first: 1.25 came, 7.5 was"),
    "a bool": (A > 3, A > 1, "1 of 4 numbers differ, the first at [0, 0]: False came, True"),
    "sparse": (A.to_sparse(), A + 1, "got: 4 of 4 numbers differ, the first at [0, 0]: 1.25 came"),
    "complex": (torch.tensor(1 + 2j), torch.tensor(1 + 3j), "(1+2j) came, (1+3j) was expected"),
    "one unit": (double(1 + 2**-52), double(1), "2 came, 1.0 was expected, 1 unit in"),
    "units across zero": (double(5e-324), double(-5e-324), "2 units in the last place apart"),
    "units beyond an int64": (double(1e308), double(-1e308), "18429743317745373504 units"),
    "units of float8": (
        torch.ones(1).to(torch.float8_e5m2),
        torch.full((1,), 2.0).to(torch.float8_e5m2),
        "4 units in the last place apart",
    ),
    "a NaN": (torch.tensor([NAN, 1.0]), torch.tensor([0.0, 1.0]), "nan came, 0.0 was expected. "),
    "NaNs counted": (torch.tensor([NAN, 1.0]), A[0], "1 of them came as NaN"),
    "no NaN": (torch.tensor([0.0]), torch.tensor([NAN]), "0.0 came, nan was expected."),
    "three times": (3 * A, A, "Likely cause: it is 3 times what was expected, everywhere."),
    "a third": (A, 3 * A, "Likely cause: it is what was expected divided by 3, everywhere."),
    "a scale": (2.0**16 * A, A, "Likely cause: it is 65536 times what was expected"),
    "the inverse of one": (A / 1024, A, "Likely cause: it is what was expected divided by 1024"),
    "a factor, complex": (A * 3j, A * 1j, "Likely cause: it is 3 times what was expected"),
    "a factor, ints": (A.int() * 5, A.int(), "Likely cause: it is 5 times what was expected"),
    "the sign": (-A, A, "Likely cause: it is the negative of what was expected, everywhere."),
    "transposed": (A.T, A, "Likely cause: it is transposed."),
    "another order": (A.flip(0), A, "Likely cause: the numbers are the same, in another order."),
    "rounded": ((A / 3).bfloat16().float(), A / 3, "it was rounded to torch.bfloat16 on the way"),
    "zeros": (A * 0, A, "every number that came is zero: it may never have been written to."),
    "rounding": (
        A / 3 + 2**-22,
        A / 3,
        "units in the last place apart: rounding, as of another order of summation",
    ),
    "two leaves": ({"a": A, "b": [A, A]}, {"a": A, "b": [A + 1, A + 1]}, "got['b'][0]: 4 of 4"),
    "two leaves, counted": ([A, A], [A + 1, A + 1], "(1 more of the leaves differs.)"),
}


@pytest.mark.table
@pytest.mark.parametrize(("got", "want", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_leaves_that_differ_are_named(got, want, words):
    assert words in said(got, want)


def test_a_likely_cause_is_only_told_where_it_fits_every_number():
    off = 3 * A
    off[1, 1] += 1
    assert "Likely cause" not in said(off, A)


@given(exact_trees(2), st.data())
def test_one_number_of_one_leaf_is_found(tree, data):
    leaves, spec = optree.tree_flatten(tree, namespace="pureaccum")
    assert_trees_bitwise_equal(tree, spec.unflatten([x.clone() for x in leaves]))
    full = [i for i, x in enumerate(leaves) if x.numel()]
    assume(full)
    leaf = data.draw(st.sampled_from(full))
    index = tuple(data.draw(st.integers(0, side - 1)) for side in leaves[leaf].shape)
    other = [x.clone() for x in leaves]
    other[leaf][index] += 1 + other[leaf][index].abs()
    named = spec.accessors()[leaf].codify("got")
    count = f"1 of {leaves[leaf].numel()} numbers differ, the first"
    where = f" at {list(index)}" if index else ""
    came, expected = (x[leaf][index].item() for x in (other, leaves))
    message = said(spec.unflatten(other), tree)
    assert message.startswith(f"{named}: {count}{where}: {came!r} came, {expected!r} was expected")
    assert said_of_bound(spec.unflatten(other), tree, 0).startswith(f"{named}{where[4:]}: {came!r}")


# Bounds ----------------------------------------------------------------------------------


WITHIN = {
    "equal": (A, A, 0),
    "an error as large as the bound": (A + 0.5, A, 0.5),
    "other dtypes": (A.half(), A.double(), 0),
    "sparse": (A.to_sparse(), A + 1, 1),
    "a tree of bounds": ({"a": A, "b": A}, {"a": A + 1, "b": A}, {"a": torch.ones(2), "b": 0}),
    "a scalar for all": ([A, A], [A, A + 1], torch.tensor(1.0)),
    "infinities": (torch.tensor([INF, -INF]), torch.tensor([INF, -INF]), 0),
    "NaN": (torch.tensor(NAN), torch.tensor(NAN), 0),
    "an infinite bound": (torch.tensor([1.0, INF]), torch.tensor([INF, 1.0]), INF),
    "numbers": ([1, 2.5, 1j], [2, 2.0, 1j], 1),
    "complex": (torch.tensor(3 + 4j), torch.tensor(0j), 5),
    "an int that float64 has not": (torch.tensor(2**60 + 1), torch.tensor(2**60), 1),
    "words": ("a", "a", 0),
    "no leaves": ({}, {}, 0),
    "a fraction": (double(1 / 3), double(0), Fraction(1, 3)),  # 1 / 3 is below it
    "the largest numbers": (double(1.7e308), double(-1.7e308), INF),
}


@pytest.mark.table
@pytest.mark.parametrize(("got", "want", "bound"), WITHIN.values(), ids=WITHIN)
def test_trees_that_are_near_enough_pass(got, want, bound):
    assert_trees_within_bound(got, want, bound)
    assert_trees_within_bound(want, got, bound)


OUTSIDE = {
    "the worst of all": (
        {"a": A, "b": double(4, 5)},
        {"a": A + 1, "b": double(4, 2)},
        {"a": 0.5, "b": 1},
        "got['b'][1]: 5.0 came, 2.0 was expected within 1; the error, 3.0, is 3 times the bound. "
        "5 of 6 numbers lie outside.",
    ),
    "its own bound": (A, A + 1, torch.tensor([2.0, 0.25]), "got[0, 1]: -2.5 came, -1.5 was expec"),
    "a bound of zero": (double(1.5), double(1), 0, "the error, 0.5, is inf times the bound."),
    "a NaN": (double(NAN, 9), double(1, 1), INF, "got[0]: nan came, 1.0 was expected within inf"),
    "a NaN expected": (double(1), double(NAN), INF, "1.0 came, nan was expected"),
    "an inf": (double(INF), double(1), 9, "inf came, 1.0 was expected within 9"),
    "the other inf": (double(INF), double(-INF), 9, "inf came, -inf was expected"),
    "what float64 rounds away": (double(1), double(-(2.0**-60)), 1, "is just above 1 times the"),
    "what float64 rounds down": (
        double(1, 1 + 2**-52),
        double(0, -(2.0**-53)),
        1 + 2**-52,
        "got[1]",
    ),
    "an int that float64 has not": (torch.tensor(2**60 + 1), torch.tensor(2**60), 0, "got: "),
    "complex": (torch.tensor(3 + 4j), torch.tensor(0j), 5 - 2**-50, "just above 1 times"),
    "complex, by its NaN": (torch.tensor(complex(INF, NAN)), torch.tensor(1j), INF, "got: "),
    "a fraction": (double(0.1), double(0), Fraction(1, 10), "just above 1 times the bound"),
    "overflow": (double(1.7e308), double(-1.7e308), 1.7e308, "the error, inf"),
    "words": ("a", "b", INF, "got: 'a' came, 'b' was expected."),
    "a shape": (A[0], A, INF, "got: shape (2,) came, (2, 2) was expected."),
    "a structure": ([A], (A,), INF, "the containers differ"),
}


@pytest.mark.table
@pytest.mark.parametrize(("got", "want", "bound", "words"), OUTSIDE.values(), ids=OUTSIDE)
def test_the_worst_number_is_named(got, want, bound, words):
    assert words in said_of_bound(got, want, bound)


WRONG = {
    "negative": (-1, "the bound is -1; no bound may be negative or NaN."),
    "NaN": (NAN, "the bound is nan"),
    "one negative": ({"a": torch.tensor([1.0, -2.0])}, "bound['a'] is -2.0"),
    "one NaN": ({"a": torch.tensor([[NAN], [1.0]])}, "bound['a'] is nan"),
    "a word": ({"a": "large"}, "bound['a'] is a str; expected numbers."),
    "complex": ({"a": 1j}, "bound['a'] is a complex; expected numbers."),
    "another tree": ([1.0], "bound does not have the structure of want"),
    "too large": ({"a": torch.ones(3)}, "a bound of shape (3,) does not broadcast to got['a']"),
}


@pytest.mark.table
@pytest.mark.parametrize(("bound", "words"), WRONG.values(), ids=WRONG)
def test_a_bound_that_is_none_is_refused(bound, words):
    with pytest.raises(ValueError, match="bound") as caught:
        assert_trees_within_bound({"a": A}, {"a": A}, bound)
    assert words in str(caught.value)


numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(numbers, numbers, numbers.map(abs))
def test_a_bound_is_decided_as_fractions_decide_it(got, want, bound):
    error = abs(Fraction(got) - Fraction(want))
    for limit in (bound, min(float(error), 1e308) if error < 10**308 else bound):
        try:
            assert_trees_within_bound(double(got), double(want), limit)
            passes = True
        except AssertionError:
            passes = False
        assert passes == (error <= Fraction(limit))


@given(st.lists(st.tuples(numbers, numbers), min_size=1))
def test_equal_trees_pass_with_every_bound(pairs):
    got, bound = (double(*column).view(-1, 1) for column in zip(*pairs, strict=True))
    assert_trees_within_bound([got], [got.clone()], [bound.abs()])
    assert_trees_bitwise_equal([got], [got.clone()])


# What pytest shows of them ----------------------------------------------------------------


def off_by_a_sum(w, x):
    return (w * x).sum()


FAILING = {
    "bits": lambda: assert_trees_bitwise_equal(torch.ones(2), torch.zeros(2)),
    "bound": lambda: assert_trees_within_bound(torch.ones(2), torch.zeros(2), 0.5),
    "check": lambda: check_accumulation(off_by_a_sum, torch.ones(()), torch.ones(4)),
    "accumulates": lambda: assert_accumulates(off_by_a_sum, torch.ones(()), torch.ones(4)),
    "pure": lambda: assert_pure(lambda x: x.add_(1), torch.ones(2)),
}


@pytest.mark.parametrize("fails", FAILING.values(), ids=FAILING)
def test_a_failing_test_shows_the_verdict_and_none_of_our_lines(fails):
    with pytest.raises(AssertionError) as caught:
        fails()
    shown = [str(entry.path) for entry in caught.traceback.filter(caught)]
    assert __file__ in shown
    assert not [path for path in shown if PACKAGE in Path(path).parents]
    assert str(caught.value).splitlines()[0] in str(caught.getrepr())
