"""Every reduction over microbatches has its derivatives, at every order and by every transform.

What ``pa.microbatch`` returns is compared with the same reduction of a list of outputs, written in
plain torch: ``torch.stack(outs).sum(0)``, ``.amax(0)``, ``outs[-1]``. Both sides are float64, and
the bound leaves six digits for two graphs of one function.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves
from torch.func import grad, jacfwd, jacrev, vmap

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, seeds
from tests.core.derivatives import DERIVATIVES, FACTORS, OPERATORS, backward, check, number
from tests.draws import examples, generator
from tests.problems import ROOT, near_together, normal


pytestmark = [
    pytest.mark.transforms,
    pytest.mark.promise("closure"),
    pytest.mark.promise("reductions"),
]
ROWS = 5
X, W = normal(ROWS, 3), normal(3, seed=1)

# What each reduction means, of the outputs of all microbatches and the samples of each.
PLAIN = {
    "concat": lambda outs, _: torch.cat(outs),
    "stack": lambda outs, _: torch.stack(outs),
    "sum": lambda outs, _: torch.stack(outs).sum(0),
    "mean": lambda outs, n: torch.einsum(
        "p...,p->...", torch.stack(outs), (n / n.sum()).to(outs[0])
    ),
    "max": lambda outs, _: torch.stack(outs).amax(0),
    "min": lambda outs, _: torch.stack(outs).amin(0),
    "last": lambda outs, _: outs[-1],
    "Weighted": lambda outs, n: torch.stack(outs).sum(0) / n.sum(),
}
SHAPES = {  # of the samples and three columns of a microbatch
    "()": lambda h: h.sum(),
    "(1,)": lambda h: h.sum().view(1),
    "(3,)": lambda h: h.sum(0),
    "rows": lambda h: h.sum(1),
    "rows of 3": lambda h: h,
}
BEST = pa.Reducer(
    lambda like: like.new_full((), -torch.inf),
    lambda state, values, _: torch.maximum(state, values.amax()),
    torch.maximum,
    lambda state: state,
)


def columns(w, x, kind):
    """Three smooth columns for each sample."""
    h = x.to(w.dtype) @ w
    h = torch.stack([h.sin() + 2 * h.conj(), h * h, h * w[0].cos()], 1)
    return torch.exp(1j * h) if kind == "complex" else h


def microbatched(func, reduction, sizes):
    if reduction == "Weighted":
        weighted = lambda w, x: pa.Weighted(func(w, x), len(x))  # noqa: E731
        return pa.microbatch(weighted, microbatch_size=sizes)
    return pa.microbatch(func, microbatch_size=sizes, reduce=reduction)


def plainly(func, reduction, sizes):
    def run(w, x):
        outs = [func(w, part) for part in x.split(list(sizes))]
        return PLAIN[reduction](outs, torch.tensor(sizes, dtype=torch.float64))

    return run


def beside(func, reduction, sizes, other):
    """The reduction beside another output: a count it is divided by, or what is not followed."""

    def pair(w, x):
        total = func(w, x)
        out = pa.Weighted(total, len(x)) if reduction == "Weighted" else total
        of_rows = (x @ x.new_ones(3)) * w.real[1]
        return out, {"count": (x[:, 0] > 0).sum(), "max": of_rows.amax(), "Reducer": of_rows}[other]

    first = "sum" if reduction == "Weighted" else reduction
    reductions = first, {"count": "sum", "max": "max", "Reducer": BEST}[other]

    def run(w, x):
        total, second = pa.microbatch(pair, microbatch_size=sizes, reduce=reductions)(w, x)
        return total / (second + 1) if other == "count" else total * second.detach().cos()

    return run


def beside_plainly(func, reduction, sizes, other):
    def run(w, x):
        total = plainly(func, reduction, sizes)(w, x)
        largest = ((x @ x.new_ones(3)) * w.real[1]).amax().detach()
        return total / ((x[:, 0] > 0).sum() + 1) if other == "count" else total * largest.cos()

    return run


def inside(func, reduction, reduced):
    """A function that calls a reduction of its own samples, one microbatch a sample."""

    def run(w, x):
        return func(w, x) * number(reduced(func, reduction, [1] * len(x))(w, x)).sin()

    return run


FORMS = ("alone", "nested", "count", "max", "Reducer")


def compare(name, reduction, shape, kind, form, by, cut, seed):
    g = generator(seed)
    x = torch.randn(ROWS, 3, generator=g, dtype=torch.float64) / 2
    dtype = torch.complex128 if kind == "complex input" else torch.float64
    w = torch.randn(3, generator=g, dtype=dtype) / 2
    func = lambda w, x: SHAPES[shape](columns(w, x, kind))  # noqa: E731

    def of(reduced, pair):
        if form in ("alone", "nested"):
            run = reduced(
                inside(func, reduction, reduced) if form == "nested" else func, reduction, cut
            )
        else:
            run = pair(func, reduction, cut, form)
        return (lambda p: run(p, x)) if by == "shared" else (lambda p: run(w, p))

    p = w if by == "shared" else x
    check(name, of(microbatched, beside), of(plainly, beside_plainly), p)


@pytest.mark.parametrize("name", DERIVATIVES)
@examples(2 / 5, fewest=50)  # 40 ms each
@given(st.data(), st.sampled_from([*PLAIN]), compositions(ROWS), seeds())
def test_a_reduction_has_the_derivatives_of_plain_code(name, data, reduction, cut, seed):
    by = data.draw(st.sampled_from(["shared", "rows"]))
    shapes = [s for s in SHAPES if s.startswith("rows") == (reduction == "concat")]
    shape = data.draw(st.sampled_from(shapes if reduction != "Weighted" else ["()"]))
    kinds = ["real", "complex"] if reduction not in ("max", "min", "Weighted") else ["real"]
    if len(kinds) == 2 and name in OPERATORS and by == "shared":
        kinds.append("complex input")
    kind = data.draw(st.sampled_from(kinds))
    compare(name, reduction, shape, kind, data.draw(st.sampled_from(FORMS)), by, cut, seed)


# Programs that came out wrong, or did not run -------------------------------------------------


PROGRAMS = {  # reduction, shape, kind, form
    "one number of the last microbatch": ("last", "()", "real", "alone"),
    "a complex number, summed": ("sum", "()", "complex", "alone"),
    "a complex number of complex numbers": ("mean", "()", "complex input", "alone"),
    "a sum over tokens, and their number": ("sum", "()", "real", "count"),
    "a total in a microbatched function": ("sum", "()", "real", "nested"),
    "a maximum that is logged": ("sum", "()", "real", "max"),
    "a reducer that is logged": ("sum", "(3,)", "real", "Reducer"),
}


@pytest.mark.parametrize("name", ["grad", "jvp", "double backward", "vmap of hvp", "hessian"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_derivatives_of_plain_code(program, name):
    reduction, shape, kind, form = PROGRAMS[program]
    if kind != "complex input" or name in OPERATORS:
        compare(name, reduction, shape, kind, form, "shared", [2, 2, 1], 0)


@pytest.mark.parametrize("name", ["hessian", "jvp of grad", "jacrev twice", "jacfwd twice"])
def test_a_total_of_rows_that_a_microbatched_function_moves(name):
    """What is differentiated reaches the total through its samples alone."""
    x, w, b = normal(4, 3), normal(3, 3, seed=1), normal(3, seed=2)

    def of(total, cut):
        def part(b, rows):
            moved = rows + b
            return (moved * torch.tanh(total(w, moved))).sum(0)

        return lambda b: cut(part)(b, x)

    plain = lambda w, rows: (rows @ w).sin().sum()  # noqa: E731
    micro = of(
        pa.microbatch(plain, microbatch_size=1, reduce="sum"),
        lambda part: pa.microbatch(part, microbatch_size=3, reduce="sum"),
    )
    cut = of(plain, lambda part: lambda b, x: part(b, x[:3]) + part(b, x[3:]))
    check(name, micro, cut, b)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_the_last_of_ragged_rows_has_its_derivatives(name):
    """It has another shape than those before, so no cotangent of theirs has its shape."""
    func = lambda w, x: (x @ w).sin()  # noqa: E731
    micro = pa.microbatch(func, microbatch_size=2, reduce="last")
    check(name, lambda w: micro(w, X), lambda w: func(w, X[4:]), W)
    check(name, lambda x: micro(W, x), lambda x: func(W, x[4:]), X)


@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "stack", "last"])
@pytest.mark.parametrize("shape", [(0,), (), (0, 3), (3,)])
def test_a_total_that_reaches_no_operand_has_no_gradient(reduction, shape):
    """As in torch: the number of entries that are not zero, and the norm of nothing."""
    p = torch.ones(shape, dtype=torch.float64)
    x = torch.arange(1.0, 6.0, dtype=torch.float64)
    for order in (0, 2):

        def func(p, x, order=order):
            return torch.linalg.norm((p * x.sum()).flatten(), order)

        def gradients(f, p=p):
            leaf = p.clone().requires_grad_()
            by_autograd = torch.autograd.grad(f(leaf, x).sum(), leaf, allow_unused=True)
            return by_autograd, grad(lambda p: f(p, x).sum())(p)

        got = gradients(pa.microbatch(func, microbatch_size=2, reduce=reduction))
        want = gradients(plainly(func, reduction, [2, 2, 1]))
        assert (got[0][0] is None) == (want[0][0] is None) == (order == 0)
        for ours, torchs in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert (ours - torchs).abs().sum() <= ROOT * torchs.abs().sum()


@pytest.mark.parametrize("reduction", ["concat", "sum", "max", "last"])
@pytest.mark.parametrize("by", [grad, jacfwd, jacrev], ids=lambda by: by.__name__)
def test_a_map_of_what_reaches_no_operand_has_a_gradient_of_zero(reduction, by):
    """Such a zero is mapped as what it is the gradient of, where all else is mapped by nothing."""
    x, w = torch.ones(5, 2, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    func = lambda w, x: x.cos() if reduction == "concat" else x.cos().sum(0)  # noqa: E731
    micro = pa.microbatch(func, microbatch_size=2, reduce=reduction)
    slopes = lambda w: jacrev(lambda w: number(micro(w, x)))(w)  # noqa: E731
    mapped = by(lambda w: vmap(lambda k: slopes(w * k))(FACTORS).sum())(w)
    assert_trees_bitwise_equal(mapped, torch.zeros_like(w))


@pytest.mark.slow  # to compile
@pytest.mark.parametrize("reduction", ["max", "last", "Reducer"])
def test_inside_of_a_user_s_compiler_a_reduction_has_its_gradient(reduction):
    """That of a reducer too: there the loop is differentiated as it stands."""
    func = lambda w, x: (x @ w).sin().sum()  # noqa: E731
    reduce = BEST if reduction == "Reducer" else reduction
    micro = pa.microbatch(func, microbatch_size=[2, 3], reduce=reduce)
    torch.compiler.reset()
    compiled = torch.compile(lambda w: micro(w, X).sin(), backend="eager", fullgraph=True)
    whole = plainly(func, "max" if reduction == "Reducer" else reduction, [2, 3])
    near_together(backward(compiled, W), backward(lambda w: whole(w, X).sin(), W))
