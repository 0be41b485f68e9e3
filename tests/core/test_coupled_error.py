"""What ``CoupledLossError`` says: the numbers by hand, the cause, and a way that is right."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from pureaccum import CoupledLossError
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import leaf, nobody_was_asked


pytestmark = [
    pytest.mark.laws,
    pytest.mark.promise("refused"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
ROWS, SIZE, CUT = 32, 8, 3  # a microbatch of eight is asked as three and five
BOUND = 2.0**-26  # the root of float64's unit, relative to a leaf
CLASSES = torch.tensor([1.0, 5.0, 0.2]).double()


torch.manual_seed(0)
HEAD = nn.Linear(36, 3)
NET = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), HEAD).double()
FN = pa.functional(NET)
WHOLE = pa.functional(NET, microbatch_size=SIZE)
LINEAR = {"w": torch.randn(4, 3).double(), "b": torch.randn(3).double()}
LABELS = torch.randint(0, 3, (ROWS,))
BATCH = {
    "image": torch.randn(ROWS, 2, 5, 5).double(),
    "x": torch.randn(ROWS, 4).double(),
    "other": torch.randn(ROWS, 4).double(),
    "y": LABELS,
    "padded": LABELS.masked_fill(torch.arange(ROWS) % 3 == 1, -100),
    "mask": (torch.arange(ROWS) % 7 < torch.tensor([5, 2]).repeat(ROWS // 2)).double(),
}


def out(params, batch, key="x"):
    return batch[key] @ params["w"] + params["b"]


def each(params, batch):
    return (out(params, batch) ** 2).sum(1)


def normalised(fn):
    return lambda p, b: F.cross_entropy(fn.apply(p, fn.buffers, b["image"])[0], b["y"])


def entropy(targets, **options):
    return lambda p, b: F.cross_entropy(out(p, b), b[targets], **options)


def masked(p, b):
    return (each(p, b) * b["mask"]).sum()


def masked_mean(p, b):
    return masked(p, b) / b["mask"].sum()


def scores_of(a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return F.cross_entropy(5 * a @ b.T, torch.arange(len(a)))


def standardised(x):
    return ((x - x.mean(0)) / x.std(0)).pow(3).mul(torch.arange(3)).mean()


def encoded(p, b, key="x"):
    return pa.microbatch(lambda p, b: out(p, b, key), microbatch_size=SIZE)(p, b)


def of_all_rows(loss):
    return pa.grad(loss, engine="auto")


def of_microbatches(loss, **options):
    return pa.grad(loss, microbatch_size=SIZE, **options)


def ratio(total, weight):
    return of_microbatches(lambda p, b: pa.Weighted(total(p, b), weight(b)))


def summed(loss):
    return of_microbatches(lambda p, b: loss(p, b).sum(), reduction="sum")


class Case(NamedTuple):
    """A loss that many write first, and what is right for it, as the error says."""

    loss: Callable[..., Tensor]
    kind: str
    where: str
    way: str
    right: Callable[..., Any]
    params: Any = LINEAR
    reduction: Any = "mean"


CASES = {
    "batch norm": Case(
        normalised(FN),
        "batch statistics",
        "BatchNorm2d",
        f"pa.functional(module, microbatch_size={SIZE})",
        of_all_rows(normalised(WHOLE)),
        dict(FN.params),
    ),
    "class weights": Case(
        entropy("y", weight=CLASSES),
        "mean of means",
        "cross_entropy",
        "pa.Weighted(F.cross_entropy(out, y, weight=w, reduction='sum'), w[y[y != -100]].sum())",
        ratio(entropy("y", weight=CLASSES, reduction="sum"), lambda b: CLASSES[b["y"]].sum()),
    ),
    "class weights, of targets that are ignored too": Case(
        entropy("padded", weight=CLASSES),
        "mean of means",
        "cross_entropy",
        "pa.Weighted(F.cross_entropy(out, y, weight=w, reduction='sum'), w[y[y != -100]].sum())",
        ratio(
            entropy("padded", weight=CLASSES, reduction="sum"),
            lambda b: CLASSES[b["padded"][b["padded"] != -100]].sum(),
        ),
    ),
    "ignored targets": Case(
        entropy("padded"),
        "mean of means",
        "cross_entropy",
        "pa.Weighted(F.cross_entropy(out, y, reduction='sum'), (y != -100).sum())",
        ratio(entropy("padded", reduction="sum"), lambda b: (b["padded"] != -100).sum()),
    ),
    "masked mean": Case(
        masked_mean,
        "mean of means",
        "",
        "pa.Weighted(per_token.sum(), mask.sum())",
        ratio(masked, lambda b: b["mask"].sum()),
    ),
    "contrastive": Case(
        lambda p, b: scores_of(out(p, b), out(p, b, "other")),
        "batch coupling",
        "matmul",
        f"pa.microbatch(encode, microbatch_size={SIZE})",
        of_all_rows(lambda p, b: scores_of(encoded(p, b), encoded(p, b, "other"))),
    ),
    "standardised batch": Case(
        lambda p, b: standardised(out(p, b)),
        "batch coupling",
        "mean",
        f"pa.microbatch(encode, microbatch_size={SIZE})",
        of_all_rows(lambda p, b: standardised(encoded(p, b))),
    ),
    "a sum": Case(
        lambda p, b: each(p, b).sum(), "sum as mean", "", 'reduction="sum"', summed(each)
    ),
    "a mean": Case(
        lambda p, b: each(p, b).mean(),
        "mean as sum",
        "",
        'reduction="mean"',
        of_microbatches(lambda p, b: each(p, b).mean()),
        reduction="sum",
    ),
    "a penalty": Case(
        lambda p, b: each(p, b).sum() + p["w"].square().sum(),
        "constant term",
        "",
        "(per_row + penalty / rows_of_batch).sum()",
        summed(lambda p, b: each(p, b) + p["w"].square().sum() / ROWS),
        reduction="sum",
    ),
    "ignored targets, and another mean": Case(
        lambda p, b: entropy("padded")(p, b) + each(p, b).mean(),
        "several means",
        "cross_entropy",
        "(y != -100).sum()) + pa.Weighted(b.sum(), len(b))",
        of_microbatches(
            lambda p, b: (
                pa.Weighted(entropy("padded", reduction="sum")(p, b), (b["padded"] != -100).sum())
                + pa.Weighted(each(p, b).sum(), len(b["padded"]))
            )
        ),
    ),
    "two means": Case(
        lambda p, b: each(p, b).mean() + masked_mean(p, b),
        "several means",
        "",
        "pa.Weighted(a.sum(), len(a)) + pa.Weighted(b.sum(), mask.sum())",
        of_microbatches(
            lambda p, b: (
                pa.Weighted(each(p, b).sum(), len(b["mask"]))
                + pa.Weighted((each(p, b) * b["mask"]).sum(), b["mask"].sum())
            )
        ),
        reduction="sum",
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
P2_TO_P5 = [*CASES][:7]


def rows(start, end):
    return {name: x[start:end] for name, x in BATCH.items()}


def stepping(case):
    step = pa.make_step(
        case.loss, pa.sgd(0.1), microbatch_size=SIZE, reduction=case.reduction, donate=True
    )
    return lambda params, batch: step(step.init(params), batch)


def buffered(buffers):
    def made(_):
        def loss(p, b, *, buffers):
            out, new = FN.apply(p, buffers, b["image"])
            return F.cross_entropy(out, b["y"]), new

        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=SIZE, buffers=buffers)
        return lambda params, batch: step(step.init(params, FN.buffers), batch)

    return made


WAYS = {
    "grad": lambda case: of_microbatches(case.loss, reduction=case.reduction),
    "value": lambda case: pa.value(case.loss, microbatch_size=SIZE, reduction=case.reduction),
    "step": stepping,
}
THREADED = {name: buffered(name) for name in ("freeze", "sequential", "pooled")}


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(CASES[c], WAYS[w], id=f"{c}-{w}") for c in CASES for w in WAYS]
    + [pytest.param(CASES["batch norm"], made, id=name) for name, made in THREADED.items()],
)
def test_the_first_call_says_what_came_and_what_is_right(case, way):
    params = dict(case.params)
    with pytest.raises(CoupledLossError) as caught:
        way(case)(params, BATCH)
    error, text = caught.value, str(caught.value)
    ends = (0, SIZE), (0, CUT), (CUT, SIZE)
    whole, *parts = (float(case.loss(params, rows(*span))) for span in ends)
    assert error.whole == pytest.approx(whole, rel=1e-12)
    assert error.parts == pytest.approx(tuple(parts), rel=1e-12)
    by = [1.0] * 3 if case.reduction == "sum" else [float(b - a) for a, b in ends]
    total, *others = (x * n for x, n in zip((whole, *parts), by, strict=True))
    miss = abs(total - sum(others)) / max(map(abs, (total, *others)))
    assert error.percent == pytest.approx(100 * miss, abs=1e-7)
    assert (error.kind, case.where in error.where) == (case.kind, True), error
    assert bool(error.where) == bool(case.where), error
    assert case.way in error.way
    figures = [f"{x:.6g}" for x in (error.whole, *error.parts)]
    for said in (*figures, error.kind, error.where, error.way):
        assert said in text
    assert "check=False" in text
    assert isinstance(error, ValueError)


@cases
def test_the_way_gives_the_gradient_of_the_full_batch(case):
    got = case.right(dict(case.params), BATCH)
    want = torch.func.grad(case.loss)(dict(case.params), BATCH)
    for name in want:
        assert (got[name] - want[name]).norm() <= BOUND * (want[name].norm() + 1e-3)


@cases
def test_unasked_it_is_what_a_loop_by_hand_gives(case):
    leaves = {name: leaf(x) for name, x in case.params.items()}
    of_loop = 0.0
    for start in range(0, ROWS, SIZE):
        share = case.loss(leaves, rows(start, start + SIZE))
        share = share if case.reduction == "sum" else share / (ROWS // SIZE)
        share.backward()
        of_loop += float(share.detach())
    options = {"microbatch_size": SIZE, "reduction": case.reduction, "check": False}
    want = {name: x.grad for name, x in leaves.items()}
    grads, value = pa.grad_and_value(case.loss, engine="auto", **options)(case.params, BATCH)
    assert_trees_bitwise_equal(grads, want)
    assert float(value) == float(pa.value(case.loss, **options)(case.params, BATCH))
    assert float(value) == pytest.approx(of_loop, rel=1e-12)


@pytest.mark.parametrize("name", P2_TO_P5)
def test_what_is_refused_is_far_off(name):
    """Or there would be nothing to refuse."""
    case = CASES[name]
    got = of_microbatches(case.loss, check=False)(dict(case.params), BATCH)
    want = torch.func.grad(case.loss)(dict(case.params), BATCH)
    miss = pa.global_norm({k: got[k] - want[k] for k in want}) / pa.global_norm(want)
    assert miss > 0.02


def test_a_part_in_which_nothing_counts_is_a_mean_of_means():
    """Its mean is 0 / 0, so nothing is said of a percentage."""
    batch = BATCH | {"mask": (torch.arange(ROWS) < 2).double()}
    with pytest.raises(pa.CoupledLossError) as caught:
        of_microbatches(masked_mean)(LINEAR, batch)
    assert caught.value.kind == "mean of means"
    assert "nan %" not in str(caught.value)
    assert " samples). So microbatches" in str(caught.value)
