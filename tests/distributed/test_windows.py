"""Windows merge, and a run that was interrupted in mid-window goes on with any number of ranks."""

import functools

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.exactly import but_checked
from tests.ranks import run_on_ranks


pytestmark = [pytest.mark.exact, pytest.mark.promise("ranks")]
W = torch.tensor([1.0, -2.0, 4.0])
FN = pa.functional(nn.BatchNorm1d(3, affine=False, momentum=0.25, dtype=torch.float64))


def rows(count, seed):
    return torch.randint(-7, 8, (count, 3), generator=generator(seed)).float()


def plain(w, x):
    return (w * x).sum(1).mean()


def dropped(w, x, keys):
    return plain(w, pa.dropout(x, 0.5, keys))


def normal(w, x, buffers):
    _, new = FN.apply({}, buffers, x.double())
    return (w * x).sum(), new


OPTIONS = {
    "plain": (plain, {}),
    "scaled": (plain, {"loss_scale": pa.dynamic_loss_scale(8.0)}),
    "keys": (dropped, {"keys": True}),
    "frozen": (lambda w, x, buffers: (plain(w, x), buffers), {"buffers": "freeze"}),
    "pooled": (normal, {"buffers": "pooled", "reduction": "sum"}),
    "compiled": (plain, {"compile": {"backend": "eager"}}),
    "donated": (plain, {"donate": True}),
}


def begun(kind):
    loss, options = OPTIONS[kind]
    step = pa.make_step(loss, pa.sgd(0.5), **options)
    return step, step.init(W, FN.buffers if "buffers" in options else None)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(it, marks=pytest.mark.slow if it == "compiled" else ()) for it in OPTIONS],
)
@given(data=st.data())
def test_a_window_of_two_is_the_window_of_all(kind, data):
    step, state = begun(kind)
    tree = data.draw(st.sampled_from(["((ab)(cd))", "((ab)(c(de)))"]))  # e: empty
    windows = []
    whole = step.begin(state)
    for i in range(4):
        part = rows(4, i)
        if kind == "pooled":  # five samples of mean zero, whose variance and moments are exact
            part = torch.cat([part[:2], -part[:2], torch.zeros(1, 3)])
        at = {"offset": 4 * i} if kind == "keys" else {}
        windows.append(step.update(state, step.begin(state), part, **at))
        whole = step.update(state, whole, part)
    a, b, c, d = windows
    if tree == "((ab)(cd))":
        came = step.merge(step.merge(a, b), step.merge(c, d))
    else:
        came = step.merge(step.merge(a, b), step.merge(c, step.merge(d, step.begin(state))))
    assert came.rows == (20 if kind == "pooled" else 16)
    assert_trees_bitwise_equal(but_checked(came), but_checked(whole))
    assert step.apply(state, came)[1].applied


@pytest.mark.parametrize("kind", OPTIONS)
def test_merging_changes_nothing_and_shares_no_memory(kind):
    step, state = begun(kind)
    a, b = (step.update(state, step.begin(state), rows(4, i)) for i in range(2))
    before = optree.tree_map(torch.clone, (a, b), namespace="pureaccum")
    came = step.merge(a, b)
    assert_trees_bitwise_equal((a, b), before)
    given_ = {x.data_ptr() for x in optree.tree_leaves((a, b, state), namespace="pureaccum")}
    assert not given_ & {x.data_ptr() for x in optree.tree_leaves(came, namespace="pureaccum")}


def test_squares_of_windows_add_up():
    step = pa.make_step(plain, pa.sgd(0.5), noise=True)
    state = step.init(W)
    parts = [torch.ones(2, 3), 2 * torch.ones(4, 3)]  # norms of 3 times a power of two, squared
    a, b = (step.update(state, step.begin(state), part) for part in parts)
    whole = functools.reduce(lambda w, part: step.update(state, w, part), parts, step.begin(state))
    assert_trees_bitwise_equal(step.merge(a, b).accum.squares, whole.accum.squares)


def test_windows_of_different_kinds_do_not_merge():
    step, state = begun("plain")
    window = step.begin(state)
    with pytest.raises(TypeError, match="the second window is a TrainState; this step expects"):
        step.merge(window, state)
    with pytest.raises(ValueError, match="the second window does not have the structure of the fi"):
        step.merge(window, step.begin(step.init({"w": W})))
    with pytest.raises(ValueError, match=r"the second window\.accum\.grads has shape \(2,\)"):
        step.merge(window, step.begin(step.init(W[:2])))
    noisy = pa.make_step(plain, pa.sgd(0.5), noise=True)
    with pytest.raises(ValueError, match="squares=False; expected squares=True"):
        noisy.merge(window, window)
    step = pa.make_step(normal, pa.sgd(0.5), buffers="sequential")
    window = step.begin(step.init(W, FN.buffers))
    with pytest.raises(ValueError, match="buffers='sequential' cannot be merged"):
        step.merge(window, window)


# Resumed in mid-window -------------------------------------------------------------------


BATCHES = [rows(16, seed).view(4, 4, 3) for seed in range(3)]  # of a step, each a share of 4 ranks
COARSE = {"keys": True, "loss_scale": pa.dynamic_loss_scale(8.0)}


def resumed_on(count, rank, folder, group, saved):
    """The window goes on where it was, and another step follows."""
    step = pa.make_step(dropped, pa.adamw(0.25), group=group, **COARSE)
    like = {"state": step.init(W), "window": step.begin(step.init(W))}
    files = torch.arange(saved).tensor_split(count)[rank].tolist()
    held = [pa.load(f"{folder} {r}", like) for r in files]
    state = held[0]["state"] if held else pa.load(f"{folder} 0", like)["state"]
    window = functools.reduce(step.merge, [it["window"] for it in held], step.begin(state))
    each = 4 // saved
    for share in [each * r + i for r in files for i in range(each)]:
        window = step.update(state, window, BATCHES[1][share, 2:], offset=4 * share + 2)
    state, info = step.apply(state, window)
    assert info.weight == 16
    mine = BATCHES[2].flatten(0, 1).tensor_split(count)[rank]
    return state, step(state, mine)[0]


def interrupted(folder, saved, rank, world):
    """Saved on some of four ranks, or all; resumed on 1, 2, 3 and 4 of them."""
    groups = [dist.new_group(range(count)) for count in (saved, 1, 2, 3, 4)]
    path = f"{folder}/on {saved}"
    each = 4 // saved
    want = None
    if rank < saved:
        step = pa.make_step(dropped, pa.adamw(0.25), group=groups[0], **COARSE)
        mine = slice(each * rank, each * rank + each)
        state, _ = step(step.init(W), BATCHES[0][mine].flatten(0, 1))
        window = step.begin(state)
        for share in range(each * rank, each * rank + each):
            window = step.update(state, window, BATCHES[1][share, :2], offset=4 * share)
        pa.save(f"{path} {rank}", {"state": state, "window": window})
        for share in range(each * rank, each * rank + each):
            window = step.update(state, window, BATCHES[1][share, 2:], offset=4 * share + 2)
        after, info = step.apply(state, window)
        assert info.weight == 16
        want = after, step(after, BATCHES[2][mine].flatten(0, 1))[0]
        assert (state.samples, after.samples, want[1].samples) == (16, 32, 48)
    dist.barrier()
    told = [want]
    dist.broadcast_object_list(told, 0)
    for count, group in zip((1, 2, 3, 4), groups[1:], strict=True):
        if rank < count:
            came = resumed_on(count, rank, path, group, saved)
            assert_trees_bitwise_equal(came, told[0])
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_a_window_goes_on_with_fewer_ranks_and_with_more(saved, tmp_path):
    ends = run_on_ranks(4, functools.partial(interrupted, str(tmp_path), saved))
    assert not any(end.failure for end in ends), "\n\n".join(end.failure for end in ends)
