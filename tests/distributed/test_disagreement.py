"""Ranks that do not hold the same: the same error on all of them, and states as they were.

One group goes through all the cases of a table, and makes a step after each: nothing is left over.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pureaccum as pa
from pureaccum._base.claims import agreement, claim
from pureaccum.distributed import begin_sum, gather, psum
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.ranks import cases_on_ranks


pytestmark = [pytest.mark.faults, pytest.mark.promise("ranks")]
PARAMS = {"a": torch.ones(2), "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
BATCH = torch.randint(1, 9, (8, 2), generator=generator(0)).float()
LARGE = 2**16  # more numbers than travel in a first collective


def loss(params, x):
    return ((x.to(params["w"].dtype) @ params["w"] + params["a"]) ** 2).sum(1).mean()


def with_keys(params, x, keys):
    return loss(params, pa.dropout(x, 0.5, keys))


def with_buffers(params, x, buffers):
    return loss(params, x), buffers


def apart():
    """Whether this rank is the one that differs: the last."""
    return dist.get_rank() == dist.get_world_size() - 1


def agree_again():
    """A step of all ranks, which are in step again."""
    step = pa.make_step(loss, pa.sgd(0.5), group=dist.group.WORLD)
    _, info = step(step.init(PARAMS), BATCH)
    assert info.weight == 8 * dist.get_world_size()
    assert info.applied


def refused(call, said, *kept):
    """Check that a call raises these words, and leaves all bits as they were."""
    before = optree.tree_map(torch.clone, kept, namespace="pureaccum")
    with pytest.raises(ValueError, match=said):
        call()
    assert_trees_bitwise_equal(kept, before)


# What steps are made of ------------------------------------------------------------------

Options = dict[str, Any]


def adamw(**options):
    return {"optimizer": pa.adamw(0.1, **options)}


def on_these(last):
    """On the ranks of most, and on the last, whatever the world."""
    return rf" on ranks? [0-9, ]+ and {last} on rank \d"


SETTINGS = {
    "lr": (
        {"optimizer": pa.sgd(0.1)},
        {"optimizer": pa.sgd(0.2)},
        r"optimizer\.lr is 0\.1" + on_these(r"0\.2"),
    ),
    "betas": (
        adamw(),
        adamw(betas=(0.9, 0.95)),
        r"optimizer\.betas is \(0\.9, 0\.999\)" + on_these(r"\(0\.9, 0\.95\)"),
    ),
    "optimizer": (
        {"optimizer": pa.sgd(0.1)},
        adamw(),
        "optimizer is sgd on rank.* and adamw on rank",
    ),
    "schedule": (
        {"optimizer": pa.sgd(pa.linear_warmup(0.1, 10))},
        {"optimizer": pa.sgd(pa.linear_warmup(0.1, 20))},
        r"optimizer\.lr\.steps is 10" + on_these("20"),
    ),
    "clipping": (
        {"optimizer": pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1))},
        {"optimizer": pa.chain(pa.clip_by_global_norm(2.0), pa.sgd(0.1))},
        r"optimizer\.parts\[0\]\.max_norm is 1\.0" + on_these(r"2\.0"),
    ),
    "torch's settings": (
        {"optimizer": pa.from_torch(torch.optim.RMSprop, lr=0.1)},
        {"optimizer": pa.from_torch(torch.optim.RMSprop, lr=0.1, alpha=0.5)},
        r"optimizer\.settings\.alpha is absent" + on_these(r"0\.5"),
    ),
    "loss scale": (
        {},
        {"loss_scale": pa.dynamic_loss_scale()},
        "loss_scale is None" + on_these("dynamic_loss_scale"),
    ),
    "scale": (
        {"loss_scale": pa.static_loss_scale(2.0**16)},
        {"loss_scale": pa.static_loss_scale(2.0**10)},
        r"loss_scale\.scale is 65536\.0" + on_these(r"1024\.0"),
    ),
    "nonfinite": ({}, {"nonfinite": "skip"}, "nonfinite is 'propagate'" + on_these("'skip'")),
    "reduction": ({}, {"reduction": "sum"}, "reduction is 'mean'" + on_these("'sum'")),
    "noise": ({}, {"noise": True}, "noise is False" + on_these("True")),
    "policy": (
        {"policy": pa.Policy()},
        {"policy": pa.Policy(compute=torch.bfloat16)},
        r"policy\.compute is None" + on_these(r"torch\.bfloat16"),
    ),
    "keys": ({}, {"keys": True, "loss_fn": with_keys}, "keys is False" + on_these("True")),
    "buffers": (
        {},
        {"buffers": "pooled", "loss_fn": with_buffers},
        "buffers is None" + on_these("'pooled'"),
    ),
    "compiled": ({}, {"compile": {"backend": "eager"}}, "compile is False .* compile.backend is"),
}


def other_settings(name):
    most, last, said = SETTINGS[name]
    mine = {"loss_fn": loss, "optimizer": pa.sgd(0.1), "check": False}
    mine |= last if apart() else most
    alone = pa.make_step(**mine)
    step = pa.make_step(**mine, group=dist.group.WORLD)
    buffers = {"seen": torch.zeros(2)} if mine.get("buffers") else None
    state = alone.init(PARAMS, buffers)
    offset = {"offset": 0} if mine.get("keys") else {}
    window = step.update(state, step.begin(state), BATCH, **offset)
    refused(lambda: step.init(PARAMS, buffers), said)
    refused(lambda: step(state, BATCH), said, state)
    donating = pa.make_step(**mine, group=dist.group.WORLD, donate=True)
    refused(lambda: donating(state, BATCH), said, state)
    refused(lambda: step.apply(state, window), said, state, window)
    assert alone(state, BATCH)[1].applied
    agree_again()


# What states hold ------------------------------------------------------------------------


SCALED = {"loss_scale": pa.dynamic_loss_scale(2.0**16)}
ALONE = pa.make_step(loss, pa.adamw(0.1), **SCALED)


def with_params(change):
    def changed(state):
        return state._replace(params=state.params | {"w": change(state.params["w"])})

    return changed


STATES = {
    "a step ahead": (
        lambda s: ALONE(s, BATCH)[0],
        r"the same values: state\.opt_state\.steps is 0" + on_these("1") + r"; .*\d more differ",
    ),
    "another lr": (
        lambda s: s._replace(opt_state=s.opt_state._replace(lr=torch.tensor(0.3).double())),
        r"state\.opt_state\.lr is 0\.1" + on_these(r"0\.3\d*"),
    ),
    "another scale": (
        lambda s: s._replace(loss_scale=s.loss_scale._replace(scale=torch.tensor(2.0**10))),
        r"state\.loss_scale\.scale is 65536\.0" + on_these(r"1024\.0"),
    ),
    "another key": (lambda s: s._replace(key=pa.key(1)), r"the same values: state\.key is "),
    "another number of rows": (
        lambda s: s._replace(samples=s.samples + 1),
        r"the same values: state\.samples is 0" + on_these("1") + r"\. ",
    ),
    "a parameter": (
        with_params(lambda w: w.flip(0)),
        r"the same values: state\.params\['w'\] is \(2, 2\) with checksum \w{8} on rank",
    ),
    "a parameter of NaN": (
        with_params(lambda w: w * torch.nan),
        r"the same values: state\.params\['w'\] is \(2, 2\) with checksum",
    ),
    "float64": (
        lambda s: ALONE.init({name: x.double() for name, x in s.params.items()}),
        r"the same values: state\.params\['a'\] is torch.float32 .*"
        + on_these(r"torch.float64 .*"),
    ),
}


def other_state(name):
    change, said = STATES[name]
    step = pa.make_step(loss, pa.adamw(0.1), group=dist.group.WORLD, **SCALED)
    state = step.init(PARAMS)
    state = change(state) if apart() else state
    window = step.begin(state)
    window = step.update(state, window, BATCH)
    refused(lambda: step.apply(state, window), said, state, window)
    if name not in ("a parameter", "a parameter of NaN"):  # read at the first call of a step
        refused(lambda: step(state, BATCH), said, state)
    ALONE(state, BATCH)
    agree_again()


def other_shapes():
    """Once a step was made; one of them needs a collective more than the other."""
    step = pa.make_step(lambda w, x: (w * x).sum(), pa.sgd(0.5), group=dist.group.WORLD)
    step(step.init(torch.ones(4)), torch.ones(2, 1))
    state = pa.make_step(loss, pa.sgd(0.5)).init(torch.ones(LARGE if apart() else 5))
    said = r"state\.params is torch\.float32 of shape \(5,\)" + on_these(r".*\(65536,\)")
    refused(lambda: step(state, torch.ones(2, 1)), said, state)
    agree_again()


def other_buffers():
    net = nn.BatchNorm1d(2, affine=False)
    fn = pa.functional(net)

    def normal(params, x, buffers):
        out, new = fn.apply({}, buffers, x)
        return loss(params, out), new

    for policy in ("freeze", "pooled"):
        step = pa.make_step(normal, pa.sgd(0.1), buffers=policy, group=dist.group.WORLD)
        state = step.init(PARAMS, fn.buffers)
        if apart():
            state = state._replace(buffers=state.buffers | {"running_var": torch.full((2,), 3.0)})
        said = r"state\.buffers\['running_var'\] is \[1\.0, 1\.0\]" + on_these(r"\[3\.0, 3\.0\]")
        refused(lambda: step(state, BATCH), said, state)  # noqa: B023
    agree_again()


def one_bit_in_all_leaves():
    """Wherever it is flipped, it is found when all is read."""
    for i in range(6):
        step = pa.make_step(loss, pa.adamw(0.1), group=dist.group.WORLD, **SCALED)
        state = step.init(PARAMS)
        leaves, spec = optree.tree_flatten(state, namespace="pureaccum")
        large = [j for j, leaf in enumerate(leaves) if leaf.numel() > 1]
        assert len(large) == 7  # two parameters, four moments, the key
        if apart():
            leaf = leaves[large[i]] = leaves[large[i]].clone()
            leaf.view(-1).view(torch.uint8)[-1] ^= 1
        state = optree.tree_unflatten(spec, leaves)
        refused(lambda: step(state, BATCH), "the same values: state", state)  # noqa: B023
    agree_again()


def states_that_part_later():
    """Small leaves are compared at every step, the others at steps 1, 2, 4, 8, …"""
    for change, said, at in (
        (
            lambda s: s._replace(attempts=s.attempts + 1),
            r"the same values: state\.attempts is 2",
            3,
        ),
        (STATES["another scale"][0], r"the same values: state\.loss_scale\.scale is 65536", 3),
        (STATES["another lr"][0], r"the same values: state\.opt_state\.lr is 0\.1", 3),
        (STATES["a parameter"][0], r"the same values: state\.params\['w'\]", 4),
    ):
        step = pa.make_step(loss, pa.adamw(0.1), group=dist.group.WORLD, **SCALED)
        state = step.init(PARAMS)
        for number in (1, 2, 3, 4):
            if number == 3 and apart():
                state = change(state)
            if number == at:
                refused(lambda: step(state, BATCH), said, state)  # noqa: B023
                break
            state, _ = step(state, BATCH)
    agree_again()


def nobody_looks():
    """As on an accelerator at most steps: what ranks do not agree on becomes NaN."""
    for group in (None, dist.group.WORLD):
        acc = pa.accumulator(loss)
        for scale, agrees in ((8.0, True), (4.0 if apart() else 8.0, False)):
            sums = acc.update(acc.init(PARAMS), PARAMS, BATCH)
            sums = sums._replace(grads=optree.tree_leaves(sums.grads))
            given = {"state": pa.dynamic_loss_scale(scale).init()}
            mine = claim(agreement({}), "here", {}, given, torch.device("cpu"), "", whole=False)
            came, _ = begin_sum(sums, group, mine._replace(look=False))()
            assert came.weight == 8 * dist.get_world_size()
            assert bool(came.total.isfinite()) is agrees
    agree_again()


def models_in_another_order():
    """The same optimizer, shapes and counts; only what the parameters are differs."""
    one, other = (pa.make_step(loss, pa.sgd(0.1), group=dist.group.WORLD) for _ in range(2))
    states = [one.init(PARAMS), other.init(PARAMS | {"w": torch.ones(2, 2)})]
    steps = [one, other]
    order = [1, 0] if apart() else [0, 1]
    for i in order:
        said = r"the same values: state\.params\['w'\]"
        refused(lambda: steps[i](states[i], BATCH), said, states)  # noqa: B023
    agree_again()


def other_calls():
    step = pa.make_step(with_keys, pa.sgd(0.1), keys=True, group=dist.group.WORLD)
    state = step.init(PARAMS)
    acc = pa.accumulator(loss)
    sums = acc.update(acc.init(PARAMS), PARAMS, BATCH)
    window = step.update(state, step.begin(state), BATCH, offset=0)
    calls = {
        "step.init": lambda: step.init(PARAMS),
        r"step\(state, batch\), where samples get keys": lambda: step(state, BATCH),
        "the end of a step": lambda: step.apply(state, window),
        "all_reduce": lambda: pa.distributed.all_reduce(sums),
        r"all_reduce\(merge": lambda: pa.distributed.all_reduce(sums, merge=acc.merge),
    }
    for name, call in calls.items():
        for other, at in calls.items():
            if name != other:
                said = rf"the call is {name}.* on ranks? [0-9, ]+ and {other}.* on rank \d"
                refused(at if apart() else call, said, state, window, sums)
    agree_again()


# Accumulators ------------------------------------------------------------------------------


TREES = {
    "shapes": (torch.ones(6), torch.ones(2, 3), r"\(6,\)" + on_these(r".*\(2, 3\)")),
    "sizes": (torch.ones(6), torch.ones(600), r"\(6,\)" + on_these(r".*\(600,\)")),
    "large": (torch.ones(6), torch.ones(LARGE), r"\(6,\)" + on_these(r".*\(65536,\)")),
    "larger": (torch.ones(LARGE), torch.ones(2 * LARGE), r"\(65536,\)" + on_these(".*")),
    "dtypes": (torch.ones(6), torch.ones(6).double(), r"torch\.float32" + ".*" + on_these(".*")),
    "names": ({"a": torch.ones(6)}, {"b": torch.ones(6)}, "absent"),
    "leaves": ([torch.ones(6)], [torch.ones(6)] * 2, r"state\.grads\[1\] is absent"),
    "order": (
        {"a": torch.ones(2), "b": torch.ones(2)},
        OrderedDict(b=torch.ones(2), a=torch.ones(2)),
        "the order of the leaves is",
    ),
}


def other_accumulators(name):
    most, last, said = TREES[name]
    params = last if apart() else most
    acc = pa.accumulator(lambda p, x: sum(leaf.sum() for leaf in optree.tree_leaves(p)) * x.mean())
    state = acc.update(acc.init(params), params, torch.ones(2))
    refused(lambda: pa.distributed.all_reduce(state), said, state)
    refused(lambda: pa.distributed.all_reduce(state, merge=acc.merge), said, state)
    refused(lambda: pa.distributed.all_reduce(state, async_op=True), said, state)
    assert acc.finalize(state)[1] == sum(leaf.sum() for leaf in optree.tree_leaves(params))
    agree_again()


def with_and_without_squares():
    acc = pa.accumulator(loss, squares=apart())
    state = acc.update(acc.init(PARAMS), PARAMS, BATCH)
    refused(lambda: pa.distributed.all_reduce(state), r"state\.squares is absent", state)
    agree_again()


# Inside of a loss ---------------------------------------------------------------------------


EXCHANGES = {
    "shape": (
        lambda: psum(torch.ones(6)),
        lambda: psum(torch.ones(2, 3)),
        r"\(6,\)" + on_these(r".*\(2, 3\)"),
    ),
    "size": (
        lambda: psum(torch.ones(7)),
        lambda: psum(torch.ones(700)),
        r"\(7,\)" + on_these(r".*\(700,\)"),
    ),
    "dtype": (
        lambda: gather(torch.ones(3, 2)),
        lambda: gather(torch.ones(3, 2).double()),
        r"torch\.float32" + ".*" + on_these(".*"),
    ),
    "rows of another width": (
        lambda: gather(torch.ones(3, 2)),
        lambda: gather(torch.ones(3, 4)),
        r"\(0, 2\)" + on_these(r".*\(0, 4\)"),
    ),
    "leaves": (
        lambda: psum([torch.ones(5)]),
        lambda: psum([torch.ones(5)] * 2),
        r"tensors\[1\] is absent",
    ),
    "call": (
        lambda: psum(torch.ones(8, 2)),
        lambda: gather(torch.ones(8, 2)),
        "the call is psum" + on_these("gather"),
    ),
    "the end of a step": (
        lambda: psum(torch.ones(9, 2)),
        lambda: pa.make_step(loss, pa.sgd(0.5), group=dist.group.WORLD).init(PARAMS),
        r"the call is psum" + on_these(r"step\.init\(\.\.\.\)"),
    ),
    "microbatches": (
        lambda: in_microbatches(2)(torch.ones(3), torch.ones(6, 3)),
        lambda: in_microbatches(3)(torch.ones(3), torch.ones(6, 3)),
        "the call is psum in one of 3 microbatches" + on_these("psum in one of 2 microbatches"),
    ),
}


def in_microbatches(size):
    def func(w, x):
        return psum((w * x).sum())

    return pa.microbatch(func, microbatch_size=size, reduce="sum")


def other_exchanges(name):
    most, last, said = EXCHANGES[name]
    refused(last if apart() else most, said)
    refused(last if apart() else most, said)  # it is not known from then on
    agree_again()


def other_microbatches_later():
    """Once all had one microbatch, and what they exchange is known."""

    def coupled(w, x):
        return (w * x - psum((w * x).sum())).square().mean()

    def inside(w, x):
        return in_microbatches(8)(w, x) / 8

    said = r"the call is psum" + on_these("psum in one of 2 microbatches")
    for loss_fn, size, nonfinite in (
        (coupled, 8, "propagate"),
        (coupled, 8, "skip"),
        (inside, None, "skip"),
    ):
        options = {"microbatch_size": size, "nonfinite": nonfinite}
        step = pa.make_step(loss_fn, pa.sgd(0.0), group=dist.group.WORLD, **options)
        state = step.init(torch.ones(2))
        for rows in (8, 8, 3):
            step(state, torch.ones(rows, 2))
        refused(lambda: step(state, torch.ones(12 if apart() else 8, 2)), said, state)  # noqa: B023
        if size is not None:  # without samples as well
            step(state, torch.ones(0 if apart() else 8, 2))
    agree_again()


def other_shapes_that_all_know():
    """What was exchanged before is compared all the same values: gloo would end the process."""
    for give in (psum, gather):
        for n in (13, 14, 13, 14):
            give(torch.ones(2, n))
        said = r"\(.*, 13\)" + on_these(r".*\(.*, 14\)")
        refused(lambda: give(torch.ones(2, 14 if apart() else 13)), said)  # noqa: B023
    agree_again()


def another_backward_pass():
    """One rank has nothing to pull what it was given with, and goes on to what comes next."""
    for give in (psum, gather):

        def pull(leave_out):
            def func(x):
                rows = give(x)  # noqa: B023
                return x.sum() if leave_out else rows.sum()

            return torch.func.grad(func)(torch.ones(2, 3))

        assert (pull(leave_out=False) == dist.get_world_size()).all()
        said = r"the call is (psum|scatter)" + on_these(r"step\.init.*")
        if apart():
            pull(leave_out=True)
        refused(agree_again if apart() else lambda: pull(leave_out=False), said)
        agree_again()


def another_number_of_rows_is_no_disagreement():
    assert len(gather(torch.ones(1 + 2 * apart(), 3))) == dist.get_world_size() + 2


CASES = (
    {f"settings: {name}": partial(other_settings, name) for name in SETTINGS}
    | {f"state: {name}": partial(other_state, name) for name in STATES}
    | {f"all_reduce: {name}": partial(other_accumulators, name) for name in TREES}
    | {f"exchange: {name}": partial(other_exchanges, name) for name in EXCHANGES}
    | {
        one.__name__: one
        for one in (
            other_shapes,
            other_buffers,
            one_bit_in_all_leaves,
            states_that_part_later,
            nobody_looks,
            models_in_another_order,
            other_calls,
            with_and_without_squares,
            other_microbatches_later,
            other_shapes_that_all_know,
            another_backward_pass,
            another_number_of_rows_is_no_disagreement,
        )
    }
)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)])
def told(request):
    return cases_on_ranks(request.param, CASES)


MARKED = {
    "exchange: microbatches": pytest.mark.given_up("cut collectives"),
    "other_microbatches_later": pytest.mark.given_up("cut collectives"),
    "nobody_looks": pytest.mark.mechanism,
}


@pytest.mark.slow
@pytest.mark.table  # all run at once
@pytest.mark.parametrize("name", [pytest.param(it, marks=MARKED.get(it, ())) for it in CASES])
def test_ranks_that_disagree_all_raise_and_keep_their_states(told, name):
    failed = [text for text in told[name] if text]
    assert not failed, "\n\n".join(failed)
