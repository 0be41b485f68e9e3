"""A sum of ``Weighted`` is a sum of means over the whole batch, each over its own weight."""

from functools import reduce

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.draws import examples, generator
from tests.exactly import copied
from tests.problems import HALF, ROOT, near, normal, once, pulled
from tests.refusals import refused, saying


pytestmark = [pytest.mark.exact, pytest.mark.promise("terms")]
WEIGHTS = pytest.mark.given_up("stream weights")  # of cases and of tests
ROWS = 12
COEFFICIENTS = (1, 0.5, -1, 3)


def problem(seed, rows, terms, empty=()):
    """Integers, and masks whose sums over the batch are powers of two, or zero."""
    g = generator(seed)
    masks = torch.randint(0, 2, (rows, terms), generator=g).float()
    masks[-1] += 16 - masks.sum(0)
    masks[:, [i for i in empty if i < terms]] = 0
    x = torch.randint(-7, 8, (rows, 3), generator=g).float()
    return torch.randint(-3, 4, (3,), generator=g).float(), {"x": x, "masks": masks}


def totals(w, batch):
    h = batch["x"] @ w
    return [(mask * f).sum() for mask, f in zip(batch["masks"].T, [h, h * h, -h, h], strict=False)]


def loss(w, batch):
    pairs = zip(COEFFICIENTS, totals(w, batch), batch["masks"].sum(0), strict=False)
    return sum(c * pa.Weighted(total, weight) for c, total, weight in pairs)


def full(w, batch):
    """The same of the whole batch, in plain torch; NaN where nothing has any weight."""
    weights = batch["masks"].sum(0)
    pairs = zip(COEFFICIENTS, totals(w, batch), weights, strict=False)
    means = [c * total / weight for c, total, weight in pairs if weight]
    return sum(means) if means else 0 * w.sum() + torch.nan


def taken(size, donate=False, **options):
    """The gradients of a step, which the next parameters are."""

    def run(f, w, batch):
        step = pa.make_step(f, pa.sgd(1.0), microbatch_size=size, donate=donate, **options)
        before = w.clone()
        state, info = once(step, w, batch)
        assert info.applied == info.loss.isfinite()
        return before - state.params, info.loss

    return run


def in_stream(size, donate=False):
    def run(f, w, batch):
        acc = pa.accumulator(f)
        state, weights = acc.init(w), [*batch["masks"].sum(0)]
        for part in pa.microbatches(batch, size):
            state = acc.update(state, w, part, donate=donate, weights=weights)
        return acc.finalize(state, donate=donate)

    return run


def merged(size):
    def run(f, w, batch):
        acc, weights = pa.accumulator(f), batch["masks"].sum(0)
        parts = pa.microbatches(batch, size)
        states = [acc.update(acc.init(w), w, part, weights=weights) for part in parts]
        return acc.finalize(reduce(lambda a, b: acc.merge(b, a), states, acc.init(w)))

    return run


def in_window(size, **options):
    def run(f, w, batch):
        step = pa.make_step(f, pa.sgd(1.0), **options)
        parts, before = pa.microbatches(batch, size), w.clone()
        state, info = step.window(step.init(w), parts, weights=batch["masks"].sum(0).tolist())
        assert info.applied == info.loss.isfinite()
        return before - state.params, info.loss

    return run


def followed(size):
    """The value, by torch.func's and by plain autograd."""

    def run(f, w, batch):
        value = pa.value(f, microbatch_size=size)
        grads, came = torch.func.grad_and_value(value)(w, batch)
        if came.isfinite():
            assert torch.equal(pulled(lambda w: value(w, batch), w), grads)
        return grads, came

    return run


SCALE = pa.static_loss_scale(2.0**6)
FORMS = {
    "grad": lambda n: pa.grad_and_value(loss, microbatch_size=n) and gradient(n),
    "autograd": lambda n: gradient(n, engine="autograd"),
    "skip": lambda n: gradient(n, nonfinite="skip"),
    "value": followed,
    "step": taken,
    "scaled step": lambda n: taken(n, loss_scale=SCALE),
    "donated step": lambda n: taken(n, donate=True),
    "step that skips": lambda n: taken(n, nonfinite="skip"),
    "stream": in_stream,
    "donated stream": lambda n: in_stream(n, donate=True),
    "merged": merged,
    "window": in_window,
}


def gradient(size, **options):
    return lambda f, w, batch: pa.grad_and_value(f, microbatch_size=size, **options)(w, batch)


STREAMS = "skip", "step that skips", "stream", "donated stream", "merged", "window"


@pytest.mark.parametrize(
    "form",
    [pytest.param(it, marks=WEIGHTS if it in STREAMS else ()) for it in FORMS],
)
@examples(1 / 2)
@given(
    seeds(),
    st.integers(1, ROWS),
    st.integers(1, ROWS),
    st.integers(2, 4),
    st.sets(st.integers(0, 3)),
)
def test_it_has_the_bits_of_the_full_batch(form, seed, rows, size, terms, empty):
    w, batch = problem(seed, rows, terms, empty)
    grads, value = FORMS[form](size)(loss, w, batch)
    want, number = torch.func.grad_and_value(full)(w, batch)
    if number.isnan():  # of no weight at all
        assert value.isnan()
        assert form == "value" or not grads.any()
        return
    assert torch.equal(grads, want)
    assert value.double() == number.double()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "size", "empty"),
    [
        (taken, 5, ()),
        pytest.param(in_window, 12, (1,), marks=WEIGHTS),
        (taken, 1, (0, 1, 2)),
        pytest.param(in_window, 5, (), marks=[pytest.mark.nightly, WEIGHTS]),
        pytest.param(taken, 12, (1,), marks=pytest.mark.nightly),
        pytest.param(in_window, 1, (0, 1, 2), marks=[pytest.mark.nightly, WEIGHTS]),
    ],
)
def test_compiled_steps_have_these_bits_too(form, size, empty):
    w, batch = problem(size, 12, 3, empty)
    grads, value = form(size, compile={"backend": "eager"})(loss, w, batch)
    want, number = torch.func.grad_and_value(full)(w, batch)
    assert value.isnan() if number.isnan() else value.double() == number.double()
    assert torch.equal(grads, torch.zeros(3) if number.isnan() else want)


@pytest.mark.parametrize("size", [None, 1, 5, 12])
def test_whole_batches_and_any_cut_are_within_rounding(size):
    """Weights that are no powers of two, a loss that is no polynomial."""
    w, g = normal(3), generator(1)
    batch = {"x": normal(12, 3, seed=2), "masks": torch.rand(12, 3, generator=g).double()}

    def means(w, batch, join):
        h = (batch["x"] @ w).sin()
        m = batch["masks"]
        pairs = [(h * m[:, 0], m[:, 0]), (h.exp() * m[:, 1], m[:, 1]), (h * h * m[:, 2], m[:, 2])]
        return join([(total.sum(), weight.sum()) for total, weight in pairs])

    def join(pairs):
        a, b, c = (pa.Weighted(*pair) for pair in pairs)
        return a + b / 3 - c * 0.1

    def plain(pairs):
        a, b, c = (total / weight for total, weight in pairs)
        return a + b / 3 - c * 0.1

    run = gradient(size)(lambda w, b: means(w, b, join), w, batch)
    want = torch.func.grad_and_value(lambda w: means(w, batch, plain))(w)
    for x, y in zip(run, want, strict=True):
        assert (x - y).norm() <= ROOT * y.norm()


# What is left out -----------------------------------------------------------------------------


def of_means(w, batch):
    """Each total is NaN, and so is its gradient, where a microbatch has no weight of its term."""
    pairs = zip(totals(w, batch), batch["masks"].sum(0), strict=False)
    return sum(pa.Weighted(total / weight * weight, weight) for total, weight in pairs)


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("empty", [(), (1,)])
def test_a_term_of_no_weight_adds_nothing_even_where_it_is_nan(size, empty):
    """In a microbatch, and in the whole batch; where the host can look, NaN gradients too."""
    w, batch = problem(3, 12, 3, empty)
    weights = batch["masks"].sum(0)
    want = torch.func.grad(
        lambda w: sum(t / n for t, n in zip(totals(w, batch), weights, strict=False) if n)
    )(w)
    for run in (gradient(size), taken(size), gradient(size, nonfinite="raise")):
        assert torch.equal(run(of_means, w, batch)[0], want)


@WEIGHTS
@pytest.mark.parametrize("by", ["total", "gradient", "both"])
def test_skip_takes_the_weights_along(by):
    """A total that is not finite is known in the first sweep, a gradient in the second."""
    w, batch = problem(5, 12, 2)
    bad = torch.zeros(12)
    bad[4] = 1.0 if by != "gradient" else 0.0
    tiny = torch.zeros(12)
    tiny[9] = 1.0 if by != "total" else 0.0  # sqrt has no gradient at 0
    batch |= {"bad": bad, "tiny": tiny}

    def broken(w, batch):
        extra = torch.inf if batch["bad"].any() else (0 * w[0]).sqrt() if batch["tiny"].any() else 0
        pairs = zip(totals(w, batch), batch["masks"].sum(0), strict=False)
        first, second = (pa.Weighted(*pair) for pair in pairs)
        return pa.Weighted(first.total + extra, first.weight) + second

    out = (bad + tiny).view(6, 2).any(1).repeat_interleave(2)
    batch["masks"][-1] += 16 - batch["masks"][~out].sum(0)  # what is left counts 16 again
    kept = {key: x[~out] for key, x in batch.items()}
    pairs = lambda w: zip(totals(w, kept), kept["masks"].sum(0), strict=False)  # noqa: E731
    want = torch.func.grad_and_value(lambda w: sum(t / n for t, n in pairs(w)))(w)
    grads, value = pa.grad_and_value(broken, microbatch_size=2, nonfinite="skip")(w, batch)
    step = pa.make_step(broken, pa.sgd(1.0), microbatch_size=2, nonfinite="skip")
    state, info = once(step, w, batch)
    assert info.applied
    assert info.skipped == (2 if by == "both" else 1)
    assert_trees_bitwise_equal((grads, value), want)
    assert torch.equal(state.params, w - grads)


@WEIGHTS
def test_what_is_left_out_stays_out_though_nothing_else_has_its_weight():
    """Without its term the microbatch would be finite, and its other term no part of any weight."""
    w, x = torch.tensor(2.0), torch.arange(1.0, 5)

    def broken(w, x):
        only = (x == 3).sum()
        bad = (0 * w).sqrt() if only else 0 * w  # whose gradient is NaN
        return pa.Weighted((w * x).sum(), len(x)) + pa.Weighted(bad, only)

    gradient = pa.grad_and_value(broken, microbatch_size=1, nonfinite="skip")
    assert [*map(float, gradient(w, x))] == pytest.approx([7 / 3, 14 / 3])


# Two sweeps -----------------------------------------------------------------------------------


COMPILED = pytest.param(taken(3, compile={"backend": "eager"}), marks=pytest.mark.nightly)


@pytest.mark.parametrize("run", [gradient(3), taken(3), COMPILED])
def test_random_weights_are_drawn_alike_in_both_sweeps(run):
    """A word is kept or not; the two means are over one and the other."""
    w, batch = problem(0, 12, 2)

    def masked(w, batch):
        h = batch["x"] @ w
        keep = (torch.rand(len(h)) < 0.5).float()
        return pa.Weighted((h * keep).sum(), keep.sum()) + pa.Weighted(
            (h * h * (1 - keep)).sum(), (1 - keep).sum()
        )

    torch.manual_seed(7)
    before = torch.get_rng_state()
    grads, value = run(masked, w, batch)
    after = torch.get_rng_state()
    assert value.isfinite()
    torch.set_rng_state(before)
    keep = torch.cat([(torch.rand(3) < 0.5).float() for _ in range(4)])

    def plain(w):
        h = batch["x"] @ w
        other = 1 - keep
        return (h * keep).sum() / keep.sum() + (h * h * other).sum() / other.sum()

    want = torch.func.grad(plain)(w)
    near(grads, want, HALF)
    assert torch.equal(after, torch.get_rng_state())  # each was drawn once


@pytest.mark.parametrize("run", [gradient(3), taken(3), pytest.param(in_window(3), marks=WEIGHTS)])
def test_weights_that_differ_between_the_sweeps_give_nothing(run):
    """Of two means that share the words out, as much is lost to one as the other gets."""
    w, batch = problem(0, 12, 2)
    calls = []

    def impure(w, batch):
        calls.append(len(batch["x"]))
        first = torch.arange(len(batch["x"])) < len(calls) % 3
        h = batch["x"] @ w
        a, b = (pa.Weighted((h * m).sum(), m.sum()) for m in (first, ~first))
        return a + b

    grads, value = run(impure, w, batch)
    assert value.isnan()
    assert grads.isnan().all() or not grads.any()


def noting():
    """The loss, how often a run calls it once it is known, and the calls."""
    calls = []

    def counted(w, batch):
        calls.append(len(batch["x"]))
        return loss(w, batch)

    def of(run):
        run()
        run()
        calls.clear()
        run()
        return len(calls)

    return counted, of, calls


def test_the_loss_is_called_twice_a_microbatch():
    w, batch = problem(0, 12, 2)
    counted, of, calls = noting()
    cut = {"microbatch_size": 3, "check": False}
    assert of(lambda: pa.grad(counted, **cut)(w, batch)) == 8
    step = pa.make_step(counted, pa.sgd(0.1), **cut)
    assert of(lambda: once(step, w, batch)) == 8
    assert of(lambda: pa.grad(counted)(w, batch)) == 1
    assert of(lambda: pa.value(counted, **cut)(w, batch)) == 4

    def one_weight(w, batch):
        calls.append(1)
        n = batch["masks"][:, 0].sum()
        return pa.Weighted(totals(w, batch)[0], n) + 0.5 * pa.Weighted(totals(w, batch)[1], n)

    assert of(lambda: pa.grad(one_weight, **cut)(w, batch)) == 4


@WEIGHTS
def test_the_loss_is_called_once_a_microbatch_where_weights_are_known():
    w, batch = problem(0, 12, 2)
    counted, of, _ = noting()
    step = pa.make_step(counted, pa.sgd(0.1), microbatch_size=3, check=False)
    weights = batch["masks"].sum(0)
    parts = [*pa.microbatches(batch, 3)]
    assert of(lambda: step.window(step.init(w), parts, weights=weights)) == 4


def test_means_over_one_tensor_are_one_mean():
    n = torch.tensor(4.0)
    one = pa.Weighted(torch.tensor(1.0), n) + 2 * pa.Weighted(torch.tensor(3.0), n)
    assert isinstance(one, pa.Weighted)
    assert one.total == 7
    assert one.weight is n
    none = torch.tensor(0.0)  # one that is a number counts, and one that is not does not
    both = pa.Weighted(torch.tensor(1.0), none) + pa.Weighted(torch.tensor(torch.nan), none)
    assert both.total == 1
    assert not isinstance(pa.Weighted(n, 4) + pa.Weighted(n, 4), pa.Weighted)  # by chance alike


ALGEBRA = {
    "sum": lambda a, b, c: sum([a, b, c]),
    "minus": lambda a, b, c: a - (-b - c),
    "nested": lambda a, b, c: a + (b + c),
    "scaled": lambda a, b, c: (2 * (a + b) + c * 2) / 2,
    "negative": lambda a, b, c: -(-a - b) + c,
    "of tensors": lambda a, b, c: torch.tensor(0.5) * (a + b + c) * torch.tensor(2),
}


@pytest.mark.parametrize("join", ALGEBRA.values(), ids=ALGEBRA)
def test_sums_are_sums_however_they_are_written(join):
    w, batch = problem(2, 9, 3)
    pairs = lambda w, b: zip(totals(w, b), b["masks"].sum(0), strict=False)  # noqa: E731
    want = torch.func.grad(lambda w: sum(t / n for t, n in pairs(w, batch)))(w)
    joined = lambda w, b: join(*(pa.Weighted(*pair) for pair in pairs(w, b)))  # noqa: E731
    assert torch.equal(pa.grad(joined, microbatch_size=2)(w, batch), want)


# Under transforms -----------------------------------------------------------------------------


def smooth(w, m, batch, join):
    """Weights that are positive in each sample: no part of a derivative is selected away."""
    h = (batch["x"] @ w).sin()
    return join([((h * m).sum(), m.sum()), ((h * h).exp().sum(), len(h))])


NESTS = {
    "jvp": lambda f: lambda w, m: torch.func.jvp(f, (w, m), (m[:3], m * 2))[1],
    "grad": lambda f: lambda w, m: torch.func.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1))(w, m),
    "jacrev": lambda f: lambda w, m: torch.func.jacrev(f, (0, 1))(w, m),
    "jacfwd": lambda f: lambda w, m: torch.func.jacfwd(f, (0, 1))(w, m),
    "vmap": lambda f: lambda w, m: torch.func.vmap(f, (0, None))(torch.stack([w, 2 * w]), m),
    "vmapped weights": lambda f: (
        lambda w, m: torch.func.vmap(f, (None, 0))(w, torch.stack([m, 1 + m]))
    ),
    "vmap of grad": lambda f: (
        lambda w, m: torch.func.vmap(torch.func.grad(lambda *a: (f(*a) ** 2).sum(), 1), (0, None))(
            torch.stack([w, 2 * w]), m
        )
    ),
    "jvp of grad": lambda f: (
        lambda w, m: torch.func.jvp(
            torch.func.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1)), (w, m), (w, m)
        )[1]
    ),
    "backward": lambda f: lambda w, m: pulled(lambda *a: (f(*a) ** 2).sum(), w, m),
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("size", [None, 2])
def test_transforms_see_what_the_weights_depend_on(nest, size):
    w, m, batch = normal(3), 0.5 + normal(5, seed=1).abs(), {"x": normal(5, 3, seed=2)}
    cut = lambda w, b: smooth(w, b["m"], b, lambda p: pa.Weighted(*p[0]) - 0.5 * pa.Weighted(*p[1]))  # noqa: E731
    ours = lambda w, m: pa.grad(cut, microbatch_size=size)(w, batch | {"m": m})  # noqa: E731
    plain = lambda p: p[0][0] / p[0][1] - 0.5 * p[1][0] / p[1][1]  # noqa: E731
    theirs = lambda w, m: torch.func.grad(lambda w: smooth(w, m, batch, plain))(w)  # noqa: E731
    pairs = zip(*(optree.tree_leaves(NESTS[nest](f)(w, m)) for f in (ours, theirs)), strict=True)
    for x, y in pairs:
        assert (x - y).norm() <= ROOT * y.norm()


@pytest.mark.nightly
@pytest.mark.parametrize("size", [None, 2])
def test_a_compiler_of_the_user_takes_it_in_one_graph(size):
    w, batch = problem(1, 7, 3)
    want = torch.func.grad(full)(w, batch)
    f = torch.compile(pa.grad(loss, microbatch_size=size), fullgraph=True, backend="eager")
    assert torch.equal(f(w, batch), want)
    value = torch.compile(pa.value(loss, microbatch_size=size), fullgraph=True, backend="eager")
    assert value(w, batch) == full(w, batch)


# Beside it ------------------------------------------------------------------------------------


def test_aux_may_give_the_terms_apart_and_a_value_goes_over_a_stream():
    w, batch = problem(4, 11, 3)

    def apart(w, batch):
        terms = [
            pa.Weighted(*pair)
            for pair in zip(totals(w, batch), batch["masks"].sum(0), strict=False)
        ]
        return sum(terms), {"terms": terms, "rows": batch["x"][:, 0]}

    own = [t / n for t, n in zip(totals(w, batch), batch["masks"].sum(0), strict=True)]
    value, aux = pa.value(apart, has_aux=True, microbatch_size=3)(w, batch)
    assert value == sum(own)
    assert aux["terms"] == own
    step = pa.make_step(apart, pa.sgd(0.1), has_aux=True, microbatch_size=3)
    _, info = once(step, w, batch)
    assert info.loss == sum(own)
    assert info.aux["terms"] == own
    assert info.weight == 1
    assert torch.equal(info.aux["rows"], batch["x"][:, 0])
    stream = pa.value(apart, has_aux=True, stream=True)(w, pa.microbatches(batch, 4))
    assert stream[0] == sum(own)
    assert stream[1]["terms"] == own


@pytest.mark.promise("narrow")
def test_half_precision_keeps_the_range_of_a_mean():
    """Weights of 2**17 words: their reciprocal is no number of float16, nor is a sum over them."""
    w = torch.ones(4, dtype=torch.float16)
    batch = {"x": torch.full((8, 4), 2.0**-3, dtype=torch.float16)}
    words = 2**14

    def narrow(w, batch):
        h = batch["x"] @ w
        return pa.Weighted((h.mean() * (words * len(h))), words * len(h)) + pa.Weighted(
            h.sum(), len(h)
        )

    grads = pa.grad(narrow, microbatch_size=2)(w, batch)
    assert torch.equal(grads, torch.full((4,), 2.0**-2, dtype=torch.float16))


def test_a_loss_may_become_a_sum_and_cease_to_be_one():
    w, batch = problem(6, 9, 2)
    several = [True]

    def changing(w, batch):
        first, second = (
            pa.Weighted(*pair) for pair in zip(totals(w, batch), batch["masks"].sum(0), strict=True)
        )
        return first + second if several[0] else first

    gradient = pa.grad(changing, microbatch_size=2)
    for several[0], terms in ((True, 2), (False, 1), (True, 2)):
        pairs = [*zip(totals(w, batch), batch["masks"].sum(0), strict=True)][:terms]
        want = torch.func.grad(
            lambda w, n=terms: sum(
                t / m for t, m in [*zip(totals(w, batch), batch["masks"].sum(0), strict=True)][:n]
            )
        )(w)
        assert torch.equal(gradient(w, batch), want), pairs


# Refusals -------------------------------------------------------------------------------------

TERM = pa.Weighted(torch.tensor(1.0), 2)
UNADDED = {
    "tensor": lambda x: x.total + x,
    "number": lambda x: x + 1,
    "number before": lambda x: 1 - x,
    "tensor and sum": lambda x: (x + x) + x.total,
    "None": lambda x: x - None,
}


@pytest.mark.parametrize("add", UNADDED.values(), ids=UNADDED)
def test_what_is_no_mean_is_not_added_to_one(add):
    with refused(TypeError, "were added or subtracted", "Weighted(other, weight)", "penalty"):
        add(TERM)


def uneven(w, batch):
    """A microbatch whose first sample is 0 leaves a term out."""
    a, b = (
        pa.Weighted(*pair) for pair in zip(totals(w, batch), batch["masks"].sum(0), strict=True)
    )
    return a + b if batch["x"][0].any() else a


UNCUT = [*zip([2, 2], strict=False)]
REFUSED = {
    "a stream without weights": (
        lambda w, b: in_parts_of(loss, w, b),
        TypeError,
        ("a sum of 2 Weighted", "update(..., weights=[...])", "step(state, batch)"),
    ),
    "a step's stream without weights": (
        lambda w, b: pa.make_step(loss, pa.sgd(1.0)).window(
            pa.make_step(loss, pa.sgd(1.0)).init(w), pa.microbatches(b, 2)
        ),
        TypeError,
        ("a sum of 2 Weighted", "weights=[...]"),
    ),
    "samples": (
        lambda w, b: pa.per_sample_grad(loss, keep_batch_dim=True)(w, b),
        TypeError,
        ("a sum of 2 Weighted", "return each term separately"),
    ),
    "other weights": (
        lambda w, b: in_parts_of(loss, w, b, weights=[1, 2, 3]),
        ValueError,
        ("a sum of 2 Weighted", "expected 3", "Weighted(total, 0)"),
    ),
    "weights of one term": (
        lambda w, b: in_parts_of(lambda w, b: loss(w, b).terms[0], w, b, weights=[1, 2]),
        ValueError,
        ("a sum of 1 Weighted", "expected 2"),
    ),
    "weights that are none": (
        lambda w, b: in_parts_of(loss, w, b, weights=3),
        TypeError,
        ("weights is an int", "expected a list of numbers"),
    ),
    "a term left out": (
        lambda w, b: pa.grad(uneven, microbatch_size=3, check=False)(
            w, b | {"x": b["x"] * (torch.arange(len(b["x"])) > 2)[:, None]}
        ),
        ValueError,
        ("the same number of terms",),
    ),
    "in aux": (
        lambda w, b: pa.grad(
            lambda w, b: (loss(w, b), {"both": loss(w, b)}), has_aux=True, microbatch_size=2
        )(w, b),
        TypeError,
        ("aux", "holds a sum of 2 Weighted", "each term separately"),
    ),
    "in aux of a whole batch": (
        lambda w, b: pa.grad(lambda w, b: (loss(w, b), [loss(w, b)]), has_aux=True)(w, b),
        TypeError,
        ("aux", "holds a sum of 2 Weighted", "each term separately"),
    ),
    "out of a microbatched function": (
        lambda w, b: pa.microbatch(loss, microbatch_size=2, reduce="sum")(w, b),
        TypeError,
        ("the result of a microbatched function", "sum(means)"),
    ),
    "noise": (
        lambda w, b: once(pa.make_step(loss, pa.sgd(1.0), noise=True, microbatch_size=2), w, b),
        ValueError,
        ("squares=True", "noise", "is that of one mean"),
    ),
    "skip under a transform": (
        lambda w, b: torch.func.vmap(pa.grad(loss, microbatch_size=2, nonfinite="skip"), (0, None))(
            torch.stack([w, w]), b
        ),
        RuntimeError,
        ("nonfinite='skip'", "sum of Weighted", "whose weights to leave out"),
    ),
    "skip, compiled": (
        lambda w, b: once(
            pa.make_step(
                loss, pa.sgd(1.0), nonfinite="skip", microbatch_size=2, compile={"backend": "eager"}
            ),
            w,
            b,
        ),
        RuntimeError,
        ("nonfinite='skip'", "sum of Weighted"),
    ),
    "a shape": (
        lambda w, b: pa.grad(lambda w, b: TERM + pa.Weighted(b["x"] @ w, 2), microbatch_size=2)(
            w, b
        ),
        ValueError,
        ("the total of term 1 of the loss has shape (2,)",),
    ),
}


def in_parts_of(f, w, batch, **options):
    acc = pa.accumulator(f)
    return acc.update(acc.init(w), w, batch, **options)


OF_STREAMS = {
    *("a stream without weights", "a step's stream without weights"),
    *("other weights", "weights of one term", "weights that are none"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(it, marks=WEIGHTS if it in OF_STREAMS else ()) for it in REFUSED]
)
def test_what_has_no_meaning_is_refused_by_name(case):
    run, error, words = REFUSED[case]
    w, batch = problem(0, 12, 2)
    before = copied((w, batch))
    with saying(error, *words):
        run(w, batch)
    assert_trees_bitwise_equal((w, batch), before)


@WEIGHTS
@pytest.mark.parametrize("off", [1.0, -0.5])
def test_weights_that_were_counted_wrong_are_seen_at_the_end(off):
    """So is a microbatch that never came."""
    w, batch = problem(0, 12, 2)
    weights = batch["masks"].sum(0)
    step = pa.make_step(loss, pa.sgd(1.0))
    wrong = weights + torch.tensor([0.0, off])
    for parts, told in (
        ([*pa.microbatches(batch, 3)], wrong),
        ([*pa.microbatches(batch, 3)][:-1], weights),
    ):
        state, info = step.window(step.init(w), parts, weights=told)
        assert not info.applied
        assert info.loss.isnan()
        assert torch.equal(state.params, w)


COUNTS = {
    "of the whole batch": lambda whole, parts: whole.sum(0),
    "in float64": lambda whole, parts: whole.double().sum(0),
    "of each microbatch": lambda whole, parts: sum(part.sum(0) for part in parts),
    "as numbers": lambda whole, parts: [sum(float(p.sum(0)[i]) for p in parts) for i in range(2)],
}


@WEIGHTS
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@given(seed=seeds())
def test_a_count_that_differs_by_rounding_is_right(count, seed):
    """Of weights that are no integers, such as those of classes, in float32."""
    g = generator(seed)
    masks = torch.rand(40, 2, generator=g) + 0.1
    batch = {"x": torch.randn(40, 3, generator=g).double(), "masks": masks}
    w, parts = torch.randn(3, generator=g).double(), [*pa.microbatches(batch, 7)]
    step = pa.make_step(loss, pa.sgd(1.0))
    weights = count(masks, [part["masks"] for part in parts])
    state, info = step.window(step.init(w), parts, weights=weights)
    assert info.applied
    each = [
        pulled(lambda w, c=c, i=i: c * totals(w, batch)[i] / masks[:, i].double().sum(), w)
        for i, c in enumerate(COEFFICIENTS[:2])
    ]
    bound = 1e-6 * sum(x.abs() for x in each)  # what weights may be off by
    assert (((w - state.params) - sum(each)).abs() <= bound).all()


def test_a_negative_weight_has_no_mean():
    w, batch = problem(0, 12, 2)
    negative = lambda w, b: pa.Weighted(w.sum(), -1) + pa.Weighted(totals(w, b)[0], 2)  # noqa: E731
    grads, value = pa.grad_and_value(negative, microbatch_size=3, check=False)(w, batch)
    assert value.isnan()
    assert grads.isnan().all()


@pytest.mark.promise("refused")
def test_each_term_is_asked_whether_it_may_be_cut():
    """A mean that is no sum is found in whichever term it is, and behind a larger one."""
    w, batch = problem(0, 12, 2)

    def coupled(w, batch):
        h = batch["x"] @ w
        a, n = totals(w, batch)[0], batch["masks"][:, 0].sum()
        large = pa.Weighted(1e6 * a, n)
        return large + pa.Weighted(h.square().mean(), len(h))

    with saying(pa.CoupledLossError, "does not add up"):
        pa.grad(coupled, microbatch_size=3)(w, batch)
    assert pa.grad(loss, microbatch_size=3)(w, batch).isfinite().all()


def test_balance_beside_words_is_what_a_loop_gets_wrong():
    """The usual loop divides both terms by the number of microbatches: some percent off."""
    w, g = normal(4, 5), generator(3)
    lengths = torch.tensor([1, 2, 7, 8, 1, 8])
    batch = {
        "x": normal(6, 8, 4, seed=1),
        "y": torch.randint(0, 5, (6, 8), generator=g),
        "n": lengths,
    }

    def terms(w, batch):
        logits = batch["x"] @ w
        mask = torch.arange(8) < batch["n"][:, None]
        each = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
        return (each.view_as(mask) * mask).sum(), mask.sum(), logits.square().sum(), len(mask)

    def both(w, batch):
        a, n, b, k = terms(w, batch)
        return pa.Weighted(a, n) + 0.1 * pa.Weighted(b, k)

    def plain(w, batch):
        a, n, b, k = terms(w, batch)
        return a / n + 0.1 * b / k

    want = torch.func.grad(plain)(w, batch)
    loop = sum(torch.func.grad(plain)(w, part) for part in pa.microbatches(batch, 2)) / 3
    ours = pa.grad(both, microbatch_size=2)(w, batch)
    assert (ours - want).norm() <= ROOT * want.norm()
    assert (loop - want).norm() > 0.01 * want.norm()


def test_a_sum_of_one_is_that_one():
    x = torch.arange(4.0)
    one = pa.Weighted(x.sum(), 4)
    assert type(sum([one])) is pa.Weighted
    assert sum([one]).total is one.total
    loss = lambda w, x: sum([pa.Weighted((w * x).sum(), len(x))])  # noqa: E731
    assert pa.grad(loss, microbatch_size=3)(torch.tensor(1.0), x) == 1.5
