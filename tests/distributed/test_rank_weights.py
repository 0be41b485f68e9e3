"""A sum of ``Weighted`` over ranks: each term's weight is that of the samples of all of them."""

import itertools

import pytest
import torch
import torch.distributed as dist

import pureaccum as pa
from tests.exactly import same
from tests.ranks import on_ranks


pytestmark = [pytest.mark.exact, pytest.mark.promise("terms")]
X = torch.tensor([[1.0, 2], [-1, 3], [2, 2], [0, -2], [3, 1], [-2, 0], [1, 1]])
MASKS = torch.tensor([[1.0, 0], [0, 2], [1, 1], [1, 0], [0, 0], [1, 0], [0, 1]])  # 4, and 4
BATCH = {"x": X, "masks": MASKS}
W = torch.tensor([1.0, -1])


def means(w, batch):
    h = batch["x"] @ w
    return zip([(m * f).sum() for m, f in zip(batch["masks"].T, (h, h * h), strict=True)],
               batch["masks"].sum(0), strict=True)  # fmt: skip


def loss(w, batch):
    first, second = (pa.Weighted(*pair) for pair in means(w, batch))
    return first - 0.5 * second


def needs_rows(w, batch):
    """No number of no samples."""
    assert len(batch["x"])
    return loss(w, batch)


def full(w, rows=slice(None)):
    pairs = zip((1, -0.5), means(w, {key: x[rows] for key, x in BATCH.items()}), strict=True)
    return sum(factor * total / weight for factor, (total, weight) in pairs if weight)


SHARES = {"one has none": (0, 7, 7), "uneven": (0, 2, 7), "the first has none": (0, 0, 7)}
FORMS = {
    "cut": {"microbatch_size": 2},
    "whole": {},
    "compiled": {"microbatch_size": 2, "compile": {"backend": "eager"}},
    "scaled": {"microbatch_size": 3, "loss_scale": pa.static_loss_scale(4.0)},
}


def own(share, rank):
    start, end = SHARES[share][rank : rank + 2]
    return {key: x[start:end] for key, x in BATCH.items()}


def check(rank, names, shares):
    want, value = torch.func.grad_and_value(full)(W)
    for name, share in itertools.product(names, shares):
        step = pa.make_step(loss, pa.sgd(1.0), group=dist.group.WORLD, **FORMS[name])
        state = step.init(W)
        for _ in range(2):  # the first call finds out
            new, info = step(state, own(share, rank))
            assert same(W - new.params, want), (name, share)
            assert info.loss == value, (name, share)
            assert info.applied, (name, share)


@on_ranks(2)
def test_it_is_the_full_batch_however_samples_are_shared_out(rank, world):
    check(rank, ("cut", "whole", "scaled"), SHARES)


@pytest.mark.nightly
@on_ranks(2)
def test_so_it_is_where_ranks_compile_their_steps(rank, world):
    check(rank, ("compiled",), ("one has none", "uneven"))


@pytest.mark.given_up("stream weights")
@on_ranks(2)
def test_a_stream_is_given_the_weights_of_all_ranks(rank, world):
    step = pa.make_step(loss, pa.sgd(1.0), group=dist.group.WORLD)
    parts = pa.microbatches(own("uneven", rank), 2)
    new, info = step.window(step.init(W), parts, weights=[4, 4])
    assert same(W - new.params, torch.func.grad(full)(W))
    new, info = step.window(step.init(W), parts, weights=MASKS[:2].sum(0))
    assert not info.applied


@pytest.mark.given_up("stream weights")
@on_ranks(2)
def test_what_one_rank_leaves_out_is_in_no_weight_of_any(rank, world):
    """A total, and a gradient, that are not finite on one rank."""

    def broken(w, batch):
        extra = 0.0
        if (batch["x"].sum(1) == 3).any():
            extra = (0 * w[0]).sqrt()  # whose gradient is NaN
        if (batch["x"].sum(1) == -2).any():
            extra = torch.inf
        first, second = (pa.Weighted(*pair) for pair in means(w, batch))
        return pa.Weighted(first.total + extra, first.weight) - 0.5 * second

    step = pa.make_step(
        broken, pa.sgd(1.0), group=dist.group.WORLD, nonfinite="skip", microbatch_size=1
    )
    new, info = step(step.init(W), own("uneven", rank))
    kept = [1, 2, 4, 6]  # which count 1, and 4
    assert info.skipped == 3
    assert info.applied
    assert same(W - new.params, torch.func.grad(full)(W, kept))


@on_ranks(2)
def test_what_one_rank_leaves_out_by_its_total_is_in_no_weight_of_any(rank, world):
    """A total that is not finite on one rank, and has a gradient that is."""

    def broken(w, batch):
        first, second = (pa.Weighted(*pair) for pair in means(w, batch))
        extra = torch.inf if (batch["x"] == -2).any() else 0.0
        return pa.Weighted(first.total + extra, first.weight) - 0.5 * second

    options = {"group": dist.group.WORLD, "nonfinite": "skip", "microbatch_size": 1}
    step = pa.make_step(broken, pa.sgd(1.0), **options)
    new, info = step(step.init(W), own("uneven", rank))
    kept = [i for i, x in enumerate(X) if not (x == -2).any()]
    assert info.skipped == len(X) - len(kept) == 2
    assert info.applied
    want = torch.func.grad(full)(W, kept)
    assert (W - new.params - want).norm() <= 2.0**-20 * want.norm()


@on_ranks(2)
def test_a_rank_of_no_samples_takes_part_in_what_it_knows_of(rank, world):
    """Where the loss cannot be called with none, all ranks say so at the first step of a run."""
    step = pa.make_step(needs_rows, pa.sgd(1.0), group=dist.group.WORLD, microbatch_size=2)
    state = step.init(W)
    with pytest.raises(ValueError, match="the call"):
        step(state, own("one has none", rank))
    step(state, own("uneven", rank))
    new, _ = step(state, own("one has none", rank))
    assert same(W - new.params, torch.func.grad(full)(W))
