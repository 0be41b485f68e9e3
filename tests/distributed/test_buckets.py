"""What travels between ranks: any tensors, in few collectives, and numbers to the bit."""

import gc
import math
import struct

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import pureaccum as pa
from pureaccum import distributed
from pureaccum._base.claims import agreement, claim
from pureaccum._core import buckets
from pureaccum.testing import assert_trees_bitwise_equal
from tests.core.linear_loss import every_kind_of_leaf
from tests.draws import generator
from tests.ranks import in_step, on_ranks


pytestmark = [pytest.mark.exact, pytest.mark.promise("ranks")]
CPU = torch.device("cpu")
bits = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("d", struct.pack("Q", n))[0])


def claimed():
    """What all ranks claim alike."""
    return claim(agreement({}), "here", {}, {}, CPU, "", whole=False)


@pytest.mark.slow
@pytest.mark.mechanism
@on_ranks(3)
@in_step()
@given(numbers=st.lists(bits, min_size=1, max_size=buckets.RANK_NUMBERS), origin=st.integers(0, 2))
@example(numbers=[-0.0, 0.0, math.inf, -math.inf, 5e-324, 2.0**53 + 2], origin=1)
def test_numbers_travel_to_the_bit(rank, world, numbers, origin):
    """Through a sum with the zeros of other ranks."""
    given_ = torch.tensor(numbers, dtype=torch.float64)
    mine = given_ if rank == origin else -given_
    came, _ = buckets.sum_over_ranks_([], mine, None, claimed())()
    for r in range(world):
        want = given_ if r == origin else -given_
        same = came[r].view(torch.int64) == want.view(torch.int64)
        assert (same | (came[r].isnan() & want.isnan())).all()  # of NaN a sum may keep other bits


def some_tensors(seed, rank):
    """Every kind of leaf, and every dtype that a sum may have."""
    random = generator(seed + rank)

    def filled(x):
        values = torch.randint(-9, 10, x.shape, generator=random)
        return torch.empty_like(x).copy_(values.to(x.dtype))

    leaves = list(every_kind_of_leaf().values())
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    odd = [torch.zeros(3, dtype=d) for d in (torch.complex64, torch.float16, torch.int64)]
    return [filled(x) for x in (*leaves, image, *odd)]


@pytest.mark.slow
@pytest.mark.mechanism
@on_ranks(2)
@in_step()
@given(
    seed=st.integers(0, 99),
    cap=st.sampled_from([0, 64, 2**20, 2**25]),
    ahead=st.sampled_from([1, 2, 100]),
    order=st.permutations(range(12)),
    keep=st.integers(0, 12),
)
@example(seed=0, cap=2**25, ahead=2, order=[*range(12)], keep=0)
def test_any_tensors_are_summed(rank, world, seed, cap, ahead, order, keep):
    tensors = some_tensors(seed, rank)
    kept = [tensors[i] for i in order[:keep]]
    looks = [(x.stride(), x.dtype) for x in kept]
    of_all = [some_tensors(seed, r) for r in range(world)]

    def times(rank, i):
        """Of some a number, of some a tensor; they differ between ranks."""
        if not tensors[i].is_floating_point():
            return 1.0
        return (1.0, 2.0 ** (rank - 1), torch.tensor(0.5 + rank, dtype=torch.float64))[i % 3]

    want = [
        sum(others[i] * times(r, i) for r, others in enumerate(of_all)).to(tensors[i].dtype)
        for i in order[:keep]
    ]
    buckets.CAP = cap
    numbers = torch.tensor([rank + 0.5, -rank], dtype=torch.float64)
    mine = [times(rank, i) for i in order[:keep]]
    add = buckets.sum_over_ranks_(kept, numbers, None, claimed(), times=mine, ahead=ahead)
    assert add()[0].tolist() == [[r + 0.5, -r] for r in range(world)]
    assert_trees_bitwise_equal(kept, want)
    assert [(x.stride(), x.dtype) for x in kept] == looks
    for i, x in enumerate(kept):  # each is its own, though several lie in one memory
        x.fill_(i)
    assert all(bool((x == i).all()) for i, x in enumerate(kept))


@pytest.mark.slow
@on_ranks(2)
@in_step()
@given(seed=st.integers(0, 99), order=st.permutations(range(12)), keep=st.integers(1, 12))
def test_states_of_any_tensors_are_summed(rank, world, seed, order, keep):
    """Those of this rank are as they were, and sums lie in memory as they do."""
    tensors, of_all = some_tensors(seed, rank), [some_tensors(seed, r) for r in range(world)]
    kept, before = [tensors[i] for i in order[:keep]], some_tensors(seed, rank)
    state = pa.accumulator(lambda w, x: (w * x).mean()).init(torch.ones(1))
    merged = distributed.all_reduce(state._replace(grads=kept)).grads
    want = [sum(others[i] for others in of_all).to(tensors[i].dtype) for i in order[:keep]]
    assert_trees_bitwise_equal(merged, want)
    assert_trees_bitwise_equal(kept, [before[i] for i in order[:keep]])
    assert [(x.stride(), x.dtype) for x in merged] == [(x.stride(), x.dtype) for x in kept]
    for i, x in enumerate(merged):  # each is its own, though several may lie in one memory
        x.fill_(i)
    assert all(bool((x == i).all()) for i, x in enumerate(merged))


@pytest.mark.slow
@pytest.mark.promise("documented")
@pytest.mark.promise("ranks")
@on_ranks(2)
def test_a_sum_is_one_collective_of_no_more_bytes_than_needed(rank, world):
    sent = []
    plain = dist.all_reduce

    def noted(x, *args, **kwargs):
        sent.append(x)
        return plain(x, *args, **kwargs)

    dist.all_reduce = noted
    acc = pa.accumulator(lambda p, x: sum((p[k] * x.sum()).sum() for k in p), reduction="sum")
    params = {str(i): torch.ones(100) for i in range(50)}
    state = acc.update(acc.init(params), params, torch.ones(3))
    distributed.all_reduce(state)
    whole = world * 10 * 4 * 4 + 5000 * 4
    assert [x.nbytes for x in sent] == [world * 10 * 4 * 4, whole]  # they have not met before
    sent.clear()
    distributed.all_reduce(state)
    assert [x.nbytes for x in sent] == [whole]
    sent.clear()
    params = {str(i): torch.ones(7 * 2**20) for i in range(3)}  # each 28 MiB: a bucket of its own
    state = acc.update(acc.init(params), params, torch.ones(3), donate=True)
    where = [x.data_ptr() for x in state.grads.values()]
    merged = distributed.all_reduce(state, donate=True)
    assert len(sent) == 1 + 3
    assert [x.data_ptr() for x in merged.grads.values()] == where  # in place …
    assert {x.data_ptr() for x in sent} >= set(where)  # … and without a copy


@pytest.mark.mechanism
@on_ranks(2)
def test_what_has_travelled_is_not_held_twice(rank, world):
    """By the time that a bucket is sent, all but the one before it are the sums."""
    params = {str(i): torch.ones(2**16) for i in range(8)}
    buckets.CAP = params["0"].nbytes + 1  # two in a bucket
    acc = pa.accumulator(lambda p, x: sum((p[k] * x.sum()).sum() for k in p), reduction="sum")
    state = acc.update(acc.init(params), params, torch.ones(3))
    state = state._replace(grads=[*state.grads.values()])
    given_up = [StorageWeakRef(x.untyped_storage()) for x in state.grads]
    freed = []
    plain = dist.all_reduce

    def noted(*args, **kwargs):
        freed.append(sum(it.expired() for it in given_up))
        return plain(*args, **kwargs)

    dist.all_reduce = noted
    mine = claim(agreement({}), "here", {"state": state}, {}, CPU, "", whole=False)
    distributed.begin_sum(state, None, mine)()
    assert freed == [0, 0, 0, 2, 4]


@pytest.mark.slow
@pytest.mark.promise("one buffer")
@on_ranks(2)
def test_a_step_of_ranks_holds_its_sums_once(rank, world):
    """Beside them and parameters two buckets at most, of 25 MiB, of tensors of 8 MiB."""
    held, plain, each = [], dist.all_reduce, 8 * 2**20

    def noted(*args, **kwargs):
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() > 2**16]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        held.append(sum(x.nbytes() for x in storages.values()))
        return plain(*args, **kwargs)

    dist.all_reduce = noted
    params = {str(i): torch.ones(each // 4) for i in range(20)}
    step = pa.make_step(
        lambda p, x: sum((x * w[0]).mean() + w.mean() for w in p.values()),
        pa.sgd(0.5),
        group=dist.group.WORLD,
    )
    state = step.init(params)
    del params, held[:]
    step(state, torch.ones(2))
    assert max(held) <= 2 * 20 * each + 2 * (25 * 2**20 + each) + each


@pytest.mark.slow
@on_ranks(4)
@in_step()
@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=4))
def test_what_was_summed_before_changes_no_bit(rank, world, seed, sizes):
    """A run that begins anew adds up the ranks in the order of one that goes on."""
    acc = pa.accumulator(lambda w, x: (w * x).sum() ** 2)
    x = torch.randn(1, 3000, generator=generator(seed + rank)).double()
    found = {}
    for size in [*sizes, sizes[0], sizes[0], *sizes]:
        w = torch.randn(size, generator=generator(seed)).double()
        merged = distributed.all_reduce(acc.update(acc.init(w), w, x[:, :size]))
        found.setdefault(size, []).append(merged.grads)
    for grads in found.values():
        assert all(torch.equal(other, grads[0]) for other in grads)


@pytest.mark.slow
@on_ranks(4)
@in_step()
@given(seed=st.integers(0, 99))
def test_all_ranks_have_the_same_bits_of_rounded_sums(rank, world, seed):
    """Where the order of a sum matters, it is one order."""
    acc = pa.accumulator(lambda w, x: ((w * x).sum(1) ** 2).mean())
    w = torch.randn(1000, generator=generator(seed))
    x = torch.randn(8, 1000, generator=generator(seed + 1 + rank))
    state = acc.init(w)
    for part in x.split(3):
        state = acc.update(state, w, part)
    merged = distributed.all_reduce(state)
    for leaf in (merged.grads, *merged[1:6]):
        of_all = [torch.empty_like(leaf) for _ in range(world)]
        dist.all_gather(of_all, leaf)
        assert all(torch.equal(other, leaf) for other in of_all)
