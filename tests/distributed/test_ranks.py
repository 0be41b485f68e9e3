"""Ranks are one more way to cut a batch: merged, they are the full batch, to the bit.

Exact data; samples are shared out to ranks and to their microbatches at will, none at all included.
"""

import functools
import itertools

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum import distributed
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import KINDS, compositions, losses, pieces, reduction
from tests.draws import few, generator, powers_of_two
from tests.exactly import but_checked
from tests.problems import near
from tests.ranks import in_step, on_ranks


pytestmark = [pytest.mark.exact, pytest.mark.promise("ranks")]
kinds = st.sampled_from(KINDS)


def shared_out(data, batch, rows, world):
    """The microbatches of every rank."""
    cuts = [data.draw(st.integers(0, rows)) for _ in range(world - 1)]
    bounds = [0, *sorted(cuts), rows]
    shares = []
    for start, end in itertools.pairwise(bounds):
        share = optree.tree_map(lambda x: x[start:end], batch)  # noqa: B023
        sizes = data.draw(compositions(end - start, empty=True)) if end > start else []
        shares.append(pieces(share, sizes) if sizes else [])
    return shares


def whole(share, batch):
    """The microbatches of a rank as one batch."""
    if not share:
        return optree.tree_map(lambda x: x[:0], batch)
    return optree.tree_map(lambda *x: torch.cat(x), *share)


def in_every_rank(tree):
    """All ranks hold the same bits."""
    for leaf in optree.tree_leaves(but_checked(tree), namespace="pureaccum"):
        of_all = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
        dist.all_gather(of_all, leaf.contiguous())
        for other in of_all:
            assert_trees_bitwise_equal(other, of_all[0])


@pytest.mark.slow
@on_ranks(2, 4)
@in_step()
@given(data=st.data(), kind=kinds, donate=st.booleans(), later=st.booleans(), squares=st.booleans())
def test_the_states_of_ranks_are_one_state(rank, world, data, kind, donate, later, squares):
    model = data.draw((powers_of_two if kind == "mean" else few).flatmap(losses))
    squares = squares and kind != "sum"
    acc = pa.accumulator(model.loss(kind), reduction=reduction(kind), squares=squares)
    states = []
    for share in shared_out(data, model.batch, model.samples, world):
        state = acc.init(model.params)
        for part in share:
            state = acc.update(state, model.params, part)
        states.append(state)
    before = optree.tree_map(torch.clone, states[rank], namespace="pureaccum")
    merged = distributed.all_reduce(states[rank], donate=donate, async_op=later)
    merged = merged.wait() if later else merged
    if not donate:
        assert_trees_bitwise_equal(states[rank], before)
        states[rank] = before
    else:
        for leaf in optree.tree_leaves(states[rank], namespace="pureaccum"):
            with pytest.raises(RuntimeError, match="given up"):
                leaf + 1
        states[rank] = before
    want = functools.reduce(acc.merge, states)
    assert_trees_bitwise_equal(merged[:6], want[:6])
    grads, _ = acc.finalize(merged)
    full = optree.tree_map(Tensor.to_dense, model.full_batch(kind)[0])
    assert_trees_bitwise_equal(grads, full)
    in_every_rank(merged)
    if squares:  # norms are rounded, and added up in another order
        assert torch.allclose(merged.squares, want.squares, rtol=world * 2.0**-50, atol=0)


@on_ranks(2, 4)
@in_step()
@given(
    data=st.data(),
    kind=kinds,
    scale=st.none() | st.integers(-10, 60).map(lambda e: 2.0**e),
    engine=st.sampled_from(["func", "autograd"]),
    donate=st.booleans(),
    optimizer=st.sampled_from(["sgd", "adamw", "clipped"]),
)
def test_a_step_of_all_ranks_is_that_of_one(
    rank, world, data, kind, scale, engine, donate, optimizer
):
    """Whole in microbatches of any size, of its own on each rank, and streamed in any cut."""
    model = data.draw((powers_of_two if kind == "mean" else few).flatmap(losses))
    optimizer = {
        "sgd": pa.sgd(0.25),
        "adamw": pa.adamw(0.5),
        "clipped": pa.chain(pa.clip_by_global_norm(2.0), pa.sgd(0.25, momentum=0.5)),
    }[optimizer]
    options = {
        "reduction": reduction(kind),
        "loss_scale": scale and pa.dynamic_loss_scale(scale, min_scale=2.0**-20),
        "engine": engine,
    }
    alone = pa.make_step(model.loss(kind), optimizer, **options)
    want, seen = alone.apply(
        alone.init(model.params),
        alone.update(
            alone.init(model.params),
            alone.begin(alone.init(model.params)),
            model.batch,
        ),
    )
    shares = shared_out(data, model.batch, model.samples, world)
    options |= {"group": dist.group.WORLD, "donate": donate}

    def check(new, info, microbatches):
        assert_trees_bitwise_equal(new, want)
        alike = {"loss": (), "microbatches": ()}
        infos = [but_checked(x)._replace(**alike) for x in (info, seen)]
        assert_trees_bitwise_equal(*infos)
        assert info.microbatches == microbatches
        in_every_rank((new, info))

    step = pa.make_step(model.loss(kind), optimizer, **options)
    state = step.init(model.params)
    window = step.begin(state)
    for part in shares[rank]:
        window = step.update(state, window, part)
    check(*step.apply(state, window), sum(len(share) for share in shares))

    sizes = [data.draw(st.none() | st.integers(1, model.samples + 1)) for _ in shares]
    batches = [whole(share, model.batch) for share in shares]
    step = pa.make_step(model.loss(kind), optimizer, microbatch_size=sizes[rank], **options)
    rows = [len(batch["y"]) for batch in batches]
    count = sum(-(-n // (size or n or 1)) for n, size in zip(rows, sizes, strict=True))
    check(*step(step.init(model.params), batches[rank]), count)


@pytest.mark.slow
@on_ranks(2, 4)
@in_step()
@given(
    data=st.data(),
    bad=st.sampled_from([torch.inf, torch.nan]),
    policy=st.sampled_from(["skip", "propagate"]),
)
def test_what_one_rank_sees_all_ranks_act_on(rank, world, data, bad, policy):
    """A step that is skipped, applied, or taught a new loss scale is so on every rank."""
    w = torch.tensor([1.0, 2.0])
    rows = data.draw(st.integers(2, 8))
    x = torch.randint(-3, 4, (rows, 2), generator=generator(rows)).float()
    x[data.draw(st.integers(0, rows - 1))] = bad
    options = {"nonfinite": policy, "loss_scale": pa.dynamic_loss_scale(8.0), "reduction": "sum"}
    alone = pa.make_step(lambda w, x: (w * x).sum(), pa.sgd(0.5), **options)
    shares = shared_out(data, x, rows, world)
    state = alone.init(w)
    window = alone.begin(state)
    for share in shares:
        for part in share:
            window = alone.update(state, window, part)
    want = alone.apply(state, window)

    step = pa.make_step(lambda w, x: (w * x).sum(), pa.sgd(0.5), group=dist.group.WORLD, **options)
    window = step.begin(state)
    for part in shares[rank]:
        window = step.update(state, window, part)
    came = step.apply(state, window)
    assert_trees_bitwise_equal(came[0], want[0])
    assert_trees_bitwise_equal(but_checked(came[1])[2:8], but_checked(want[1])[2:8])
    in_every_rank(came)


@pytest.mark.slow
@on_ranks(4)
@in_step()
@given(data=st.data(), size=st.none() | st.integers(1, 9), backwards=st.booleans())
def test_masks_do_not_depend_on_the_ranks(rank, world, data, size, backwards):
    rows = data.draw(st.sampled_from([1, 2, 4, 8]))
    x = torch.randint(1, 9, (rows, 4), generator=generator(rows)).float()

    def loss(w, x, keys):
        return (w * pa.dropout(x, 0.5, keys)).sum(1).mean()

    alone = pa.make_step(loss, pa.sgd(0.25), keys=True, microbatch_size=1)
    state = alone.init(torch.ones(4), seed=data.draw(st.integers(0, 99)))
    state = state._replace(samples=torch.tensor(data.draw(st.integers(0, 9))))
    want, _ = alone(state, x)

    shares = shared_out(data, x, rows, world)
    step = pa.make_step(loss, pa.sgd(0.25), keys=True, microbatch_size=size, group=dist.group.WORLD)
    assert_trees_bitwise_equal(step(state, whole(shares[rank], x))[0], want)

    at = sum(len(part) for share in shares[:rank] for part in share)
    parts = []
    for part in shares[rank]:
        parts.append((at, part))
        at += len(part)
    window = step.begin(state)
    for at, part in parts[:: -1 if backwards else 1]:
        window = step.update(state, window, part, offset=at)
    assert_trees_bitwise_equal(step.apply(state, window)[0], want)


@pytest.mark.slow
@on_ranks(2)
@in_step()
@given(data=st.data(), size=st.sampled_from([1, 2, 4]))
def test_batch_norm_pools_over_ranks(rank, world, data, size):
    """Counts that are powers of two: means and variances are exact."""
    net = torch.nn.BatchNorm1d(3, affine=False, momentum=0.25, dtype=torch.float64)
    net.register_buffer("calls", torch.zeros(2))
    fn = pa.functional(net)

    def loss(w, x, buffers):
        out, new = fn.apply({}, buffers, x)
        return (w * out.relu()).mean(), new | {"calls": new["calls"] + 1}

    rows = 4 * size
    x = torch.randint(-8, 9, (world, rows, 3), generator=generator(rows)).double()
    empty = data.draw(st.booleans())  # the last half of the ranks have none
    given_rows = x[: world // 2] if empty else x
    options = {"buffers": "pooled", "microbatch_size": rows, "check": False}
    alone = pa.make_step(loss, pa.sgd(0.5), **options)
    w = torch.ones(3, dtype=torch.float64)
    want, _ = alone(alone.init(w, fn.buffers), given_rows.flatten(0, 1))

    step = pa.make_step(loss, pa.sgd(0.5), group=dist.group.WORLD, **options)
    mine = given_rows[rank] if rank < len(given_rows) else x[0, :0]
    new, _ = step(step.init(w, fn.buffers), mine)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert_trees_bitwise_equal(new.buffers[name], want.buffers[name])
    assert new.buffers["calls"].tolist() == [1, 1]  # as rank 0 has it
    in_every_rank(new)


@pytest.mark.slow
@on_ranks(2)
@in_step()
@given(data=st.data(), reduce=st.sampled_from(["sum", "mean", "moments", "largest"]))
def test_samples_of_all_ranks_are_reduced_as_those_of_one(rank, world, data, reduce):
    largest = pa.Reducer(
        torch.zeros_like,
        lambda state, grads, weight: torch.maximum(state, grads.abs().amax(0)),
        torch.maximum,
        torch.clone,
    )
    rows = data.draw(st.integers(1, 6))
    x = torch.randint(-7, 8, (rows, 3), generator=generator(rows)).float()
    acc = pa.per_sample_accumulator(
        lambda w, x: (w * x).sum() ** 2, reduce=largest if reduce == "largest" else reduce
    )
    w = torch.tensor([1.0, -2.0, 3.0])
    states = []
    for share in shared_out(data, x, rows, world):
        state = acc.init(w)
        for part in share:
            if len(part):
                state = acc.update(state, w, part)
        states.append(state)
    merge = acc.merge if reduce == "largest" or data.draw(st.booleans()) else None
    came = distributed.all_reduce(states[rank], merge=merge)
    want = functools.reduce(acc.merge, states)
    if reduce == "moments":  # around other means, which are rounded
        near(came.grads.centred, want.grads.centred, 2.0**-18, floor=1.0)
        came, want = (x._replace(grads=x.grads._replace(centred=())) for x in (came, want))
    assert_trees_bitwise_equal(came, want)


@pytest.mark.slow
@on_ranks(2)
@in_step()
@given(data=st.data())
def test_the_noise_of_all_ranks_is_that_of_one(rank, world, data):
    rows = data.draw(st.integers(2, 8))
    x = torch.randint(-7, 8, (rows, 3), generator=generator(rows)).float()
    shares = shared_out(data, x, rows, world)

    def loss(w, x):
        return (w * x).sum(1).mean() if len(x) else (w * x).sum()

    def noise(group, parts):
        step = pa.make_step(loss, pa.sgd(0.5), noise=True, group=group)
        state = step.init(torch.ones(3))
        window = step.begin(state)
        for part in parts:
            window = step.update(state, window, part)
        noise = step.apply(state, window)[1].noise
        assert_trees_bitwise_equal(step.apply(state, window)[1].noise, noise)  # nothing was used up
        return noise

    def near(came, want):
        # sums of the same few numbers, in another order
        for a, b in zip(came, want, strict=True):
            assert torch.allclose(a, b, rtol=2.0**-40, atol=2.0**-40, equal_nan=True)
        in_every_rank(came)

    near(noise(dist.group.WORLD, shares[rank]), noise(None, [x for share in shares for x in share]))
    batches = [torch.cat(share) if share else x[:0] for share in shares]  # of no samples, perhaps
    step = pa.make_step(loss, pa.sgd(0.5), noise=True, group=dist.group.WORLD, microbatch_size=2)
    came = step(step.init(torch.ones(3)), batches[rank])[1].noise
    near(came, noise(None, [part for batch in batches if len(batch) for part in batch.split(2)]))


@pytest.mark.nightly
@on_ranks(2)
@in_step(1 / 9, fewest=3)  # each compiles on every rank: ten seconds
@given(data=st.data(), size=st.sampled_from([3, None, 1, 2, 5]), donate=st.booleans())
@example(data=None, size=3, donate=True)
def test_a_compiled_step_of_all_ranks_is_that_of_one(rank, world, data, size, donate):
    """Each sample has the key that it has on one rank; in the example both ranks have some."""
    rows = data.draw(st.sampled_from([2, 4, 8])) if data else 8
    x = torch.randint(1, 9, (rows, 4), generator=generator(rows)).float()

    def loss(w, x, keys):
        return (w * pa.dropout(x, 0.5, keys)).sum(1).mean(), x[:, 0]

    options = {"keys": True, "has_aux": True, "loss_scale": pa.dynamic_loss_scale(8.0)}
    alone = pa.make_step(loss, pa.sgd(0.25), microbatch_size=1, **options)
    want, seen = alone(alone.init(torch.ones(4)), x)

    options |= {"group": dist.group.WORLD, "compile": {"backend": "eager"}, "donate": donate}
    step = pa.make_step(loss, pa.sgd(0.25), microbatch_size=size, **options)
    shares = shared_out(data, x, rows, world) if data else [[part] for part in x.split(4)]
    mine = whole(shares[rank], x)
    state = step.init(torch.ones(4))
    assert step.form(state, mine) == "loop"
    new, info = step(state, mine)
    assert_trees_bitwise_equal(new, want)
    assert_trees_bitwise_equal((info.weight, info.applied), (seen.weight, seen.applied))
    assert_trees_bitwise_equal(info.aux, mine[:, 0] if len(mine) else ())

    at = sum(len(part) for share in shares[:rank] for part in share)
    state = step.init(torch.ones(4))
    window = step.begin(state)
    for part in shares[rank]:
        window, _ = step.update(state, window, part, offset=at)
        at += len(part)
    assert_trees_bitwise_equal(step.apply(state, window)[0], want)


@pytest.mark.slow
@pytest.mark.promise("sizes")
@pytest.mark.promise("ranks")
@on_ranks(2)
def test_each_rank_finds_a_size_that_fits_it(rank, world):
    """More samples than fit are out of memory, on one rank or on both; and none of its steps."""

    def loss(w, x, keys):
        if len(x) > limits[rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return (w * pa.dropout(x, 0.5, keys)).sum(1).mean()

    x, w = torch.randint(1, 9, (16, 4), generator=generator(0)).float(), torch.ones(4)
    limits = (1, 1)
    alone = pa.make_step(loss, pa.sgd(0.25), keys=True, microbatch_size=1)
    want, _ = alone(alone.init(w), x)
    for limits in ((2, 8), (8, 2), (1, 3)):
        options = {"microbatch_size": "auto", "keys": True, "group": dist.group.WORLD}
        step = pa.make_step(loss, pa.sgd(0.25), **options)
        state = step.init(w)
        for _ in range(2):  # a size is found, and remembered
            new, info = step(state, x[8 * rank : 8 * rank + 8])
            assert_trees_bitwise_equal(new, want)
            assert info.microbatches == sum({1: 8, 2: 4, 3: 4, 8: 1}[most] for most in limits)
