"""What ranks exchange in a function is differentiated as in one process that has all samples."""

from collections import Counter
from functools import partial

import optree
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.func import grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from pureaccum._core.writes import unguarded
from pureaccum.distributed import gather, psum
from pureaccum.testing import assert_trees_bitwise_equal
from tests.draws import generator
from tests.problems import pulled
from tests.ranks import in_step, on_ranks


pytestmark = [pytest.mark.exact, pytest.mark.promise("ranks")]
Tensors = dict[str, Tensor]


class Collectives(TorchDispatchMode):
    """Counts what the process group is asked for."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func.__name__.split(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def cut_by_ranks(data, rows, world):
    """Which samples each rank has: any number of them, also none."""
    cuts = sorted(data.draw(st.integers(0, rows)) for _ in range(world - 1))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]


def near(came, want, bound):
    for x, y in zip(tree_leaves(came), tree_leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert (x - y).double().norm() <= bound * max(1.0, float(y.double().norm())), (x, y)


def whole_numbers(*shape, seed=0):
    return torch.randint(-3, 4, shape, generator=generator(seed)).double()


# Derivatives -----------------------------------------------------------------------------


def of_ranks(kind, rank, x, all_x=None):
    """What a rank returns; with all that the ranks have, as one process computes it."""
    if kind == "psum":
        total = psum(x.sum(0)) if all_x is None else sum(y.sum(0) for y in all_x)
        return (total**3).sum() * (rank + 1) + (x**2 * total).sum()
    rows = gather(x) if all_x is None else torch.cat([*all_x])
    return ((x @ rows.mT) ** 2).sum() * (rank + 1)


def in_one_process(kind, xs):
    return torch.stack([of_ranks(kind, rank, x, xs) for rank, x in enumerate(xs)]).sum()


def along(f, x):
    """The tangent in the direction of ones."""
    return jvp(f, (x,), (optree.tree_map(torch.ones_like, x),))[1]


def squared(f):
    return lambda x: sum((g**2).sum() for g in optree.tree_leaves(grad(f)(x)))


def twice(f, x):
    return pulled(lambda y: (torch.autograd.grad(f(y), y, create_graph=True)[0] ** 2).sum(), x)


# Of a function of one rank's tensor, and of one of the tensors of all ranks.
NESTS = {
    "grad": (grad, grad),
    "of grad": (lambda f: grad(squared(f)), lambda f: grad(squared(f))),
    "jvp of grad": (lambda f: lambda x: along(grad(f), x), lambda f: lambda xs: along(grad(f), xs)),
    "grad of jvp": (lambda f: grad(lambda x: along(f, x)), lambda f: lambda xs: along(grad(f), xs)),
    "jvp of jvp": (lambda f: lambda x: along(lambda y: along(f, y), x), None),
    "vmap of grad": (
        lambda f: lambda x: vmap(grad(f))(torch.stack([x, 2 * x])),
        lambda f: lambda xs: stacked([grad(f)([s * x for x in xs]) for s in (1, 2)]),
    ),
    "grad of vmap": (
        lambda f: grad(lambda x: vmap(f)(torch.stack([x, 2 * x])).sum()),
        lambda f: grad(lambda xs: f(xs) + f([2 * x for x in xs])),
    ),
    "vmap of jvp of grad": (
        lambda f: vmap(lambda t: along(grad(f), t), in_dims=-1, out_dims=-1),
        lambda f: lambda xs: stacked([along(grad(f), [x[..., i] for x in xs]) for i in (0, 1)], -1),
    ),
    "backward": (lambda f: lambda x: pulled(f, x), grad),
    "double backward": (lambda f: lambda x: twice(f, x), lambda f: grad(squared(f))),
}


def stacked(pairs, dim=0):
    return [torch.stack(both, dim) for both in zip(*pairs, strict=True)]


def each_its_own(kind, xs):
    """The second tangents of what each rank returns itself."""
    of = [partial(lambda r, xs: of_ranks(kind, r, xs[r], xs), r) for r in range(len(xs))]
    return [along(partial(along, f), xs) for f in of]


@pytest.mark.slow
@on_ranks(2, 3)
def test_derivatives_are_those_of_the_sum_of_what_all_ranks_return(rank, world):
    for kind in ("psum", "gather"):
        shapes = [(n, 2) for n in (2, 3, 1)[:world]]
        if kind == "gather":
            shapes[-1] = (0, 2)
        xs = [whole_numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
        for name, (nest, of_all) in NESTS.items():
            its = [torch.stack([x, 2 * x], -1) for x in xs] if name == "vmap of jvp of grad" else xs
            came = nest(partial(of_ranks, kind, rank))(its[rank])
            one = partial(in_one_process, kind)
            want = of_all(one)(its) if of_all else each_its_own(kind, its)
            assert_trees_bitwise_equal(came, want[rank])


@on_ranks(2)
def test_any_tree_of_any_dtype_travels(rank, world):
    tree = {
        "half": torch.full((2,), 2048.0 + 2 * rank).half(),  # their sum is rounded once
        "int": torch.tensor(rank),
        "complex": torch.tensor([1.0 + rank * 1j]),
        "empty": torch.zeros(0, 3),
        "0-d": torch.tensor(2.5 * rank).double(),
    }
    came = psum(tree)
    assert came["half"].tolist() == [4098.0 - 2] * 2
    assert came["int"] == 1
    assert came["complex"].tolist() == [2.0 + 1j]
    assert came["empty"].shape == (0, 3)
    assert came["0-d"] == 2.5
    rows = gather(
        {
            "bool": torch.full((2 * rank,), True),
            "complex": torch.full((2 * rank, 1), 1j),
            "none": torch.zeros(2 * rank, 0),
            "int": torch.full((2 * rank, 1, 2), 7, dtype=torch.uint8),
        }
    )
    assert rows["bool"].tolist() == [True, True]
    assert rows["complex"].tolist() == [[1j], [1j]]
    assert rows["none"].shape == (2, 0)
    assert rows["int"].shape == (2, 1, 2)
    assert gather(torch.zeros(0, 2)).shape == (0, 2)
    with pytest.raises(TypeError, match=r"tree\['a'\], given to psum, is a float; expected a"):
        psum({"a": 1.0})
    with pytest.raises(TypeError, match=r"torch.bool; expected a tensor of numbers"):
        psum(torch.tensor(True))
    with pytest.raises(ValueError, match="0-d"):
        gather(torch.tensor(1.0))


@pytest.mark.slow
@pytest.mark.promise("narrow")
@on_ranks(4)
def test_sums_of_narrow_numbers_are_rounded_once(rank, world):
    """2048 and 1 are 2048 in float16: in whatever order ranks add, one of these would be lost."""
    x = torch.ones(world).half()
    x[rank] = 2048
    assert psum(x).tolist() == [2052.0] * world  # 2051, as a float16


@on_ranks(2)
def test_what_comes_is_new_and_may_be_written_to(rank, world):
    x = torch.tensor([1 + 2j, 3 - 1j]).to(torch.complex128).requires_grad_()
    for give, want in (
        (lambda: psum({"x": x.conj(), "n": x.abs()})["x"], 2 * x.conj()),
        (lambda: gather(x.conj()), torch.cat([x.conj(), x.conj()])),
        (lambda: psum(x.abs()), 2 * x.abs()),
        (lambda: gather(x.abs()), torch.cat([x.abs(), x.abs()])),
    ):
        came = give()
        assert_trees_bitwise_equal(came.detach(), want.detach().resolve_conj())
        came *= 2
        came.abs().sum().backward()
        assert not x.grad.isnan().any()


# Losses ------------------------------------------------------------------------------------


def scores(queries, keys, at):
    """The contrastive loss of some queries, whose own keys begin at ``at``."""
    own = at + torch.arange(len(queries))
    return nn.functional.cross_entropy(queries @ keys.mT, own, reduction="sum")


def embed(params, x):
    return nn.functional.normalize((x @ params["a"]).tanh() @ params["b"], dim=1)


def problem(rows, seed):
    random = generator(seed)
    of = partial(torch.randn, generator=random, dtype=torch.float64)
    return {"a": of(3, 6), "b": of(6, 4)}, {"x": of(rows, 3), "y": of(rows, 3)}


@pytest.mark.slow
@on_ranks(2, 3)
@in_step()
@given(
    data=st.data(),
    kind=st.sampled_from(["own rows", "all rows", "mean"]),
    engine=st.sampled_from(["auto", "func"]),
    size=st.integers(1, 4),
    skip=st.booleans(),
)
def test_a_contrastive_loss_of_all_ranks_is_that_of_one(
    rank, world, data, kind, engine, size, skip
):
    """Uneven samples, none at all; each rank returns its own share, or all return the whole."""
    rows = data.draw(st.integers(2, 9))
    params, batch = problem(rows, rows)
    shares = cut_by_ranks(data, rows, world)
    if kind == "mean":  # a mean of no samples has no cotangent to give
        even = rows // world * world
        batch = {k: v[: max(even, world)] for k, v in problem(max(even, world), rows)[1].items()}
        rows = len(batch["x"])
        shares = [slice(i * rows // world, (i + 1) * rows // world) for i in range(world)]

    def one(params, batch):
        u, v = embed(params, batch["x"]), embed(params, batch["y"])
        return pa.Weighted(scores(u, v, 0), torch.tensor(float(rows)))

    def each(params, batch):
        cut = pa.microbatch(embed, microbatch_size=size)
        u, v = cut(params, batch["x"]), cut(params, batch["y"])
        every = gather({"u": u, "v": v})
        if kind == "all rows":
            return pa.Weighted(scores(every["u"], every["v"], 0), torch.tensor(float(rows)))
        total = scores(u, every["v"], shares[rank].start)
        return total / len(u) if kind == "mean" else pa.Weighted(total, torch.tensor(1.0 * len(u)))

    alone = pa.make_step(one, pa.sgd(0.5))
    want, told = alone(alone.init(params), batch)
    mine = {k: x[shares[rank]] for k, x in batch.items()}
    nonfinite = "skip" if skip else "propagate"
    options = {"engine": engine, "group": dist.group.WORLD, "nonfinite": nonfinite}
    step = pa.make_step(each, pa.sgd(0.5), **options)
    new, info = step(step.init(params), mine)
    near(new.params, want.params, 1e-12)
    near(info.loss, told.loss, 1e-12)
    window = step.update(new, step.begin(new), mine)
    again, _ = step.apply(new, window)
    near(again.params, alone(want, batch)[0].params, 1e-12)


@pytest.mark.slow
@on_ranks(2)
@in_step()
@given(data=st.data(), size=st.integers(1, 4), masked=st.booleans())
def test_bits_of_a_polynomial_of_all_rows(rank, world, data, size, masked):
    """All numbers are whole; where a rank's samples have no weight, others still look at them."""
    rows = data.draw(st.sampled_from([1, 2, 4, 8]))
    shares = cut_by_ranks(data, rows, world)
    x, w = whole_numbers(rows, 3, seed=rows), whole_numbers(3, 2, seed=1)
    weight = torch.ones(rows).double()
    if masked:
        weight[shares[1]] = 0.0

    def total(z, every, weight):
        return pa.Weighted(((z @ every.mT).sum(1) * weight).sum(), weight.sum())

    def one(w, batch):
        z = batch["x"] @ w
        return total(z, z, batch["weight"])

    def each(w, batch):
        z = pa.microbatch(lambda w, x: x @ w, microbatch_size=size)(w, batch["x"])
        return total(z, gather(z), batch["weight"])

    batch = {"x": x, "weight": weight}
    want = pa.make_step(one, pa.sgd(1.0))
    state = want.init(w)
    step = pa.make_step(each, pa.sgd(1.0), group=dist.group.WORLD)
    came = step(step.init(w), {k: v[shares[rank]] for k, v in batch.items()})
    wanted = want(state, batch)
    if (n := int(weight.sum())) and n & (n - 1) == 0:
        assert_trees_bitwise_equal(came[0].params, wanted[0].params)
    near(came[0].params, wanted[0].params, 1e-14)


@pytest.mark.slow
@on_ranks(2)
def test_a_derivative_through_a_step_of_which_one_rank_has_nothing(rank, world):
    """No samples, or samples of no weight;

    what is computed again reaches the other rank as well.
    """
    params, batch = problem(5, 1)
    for rows, weight in ((0, 1.0), (2, 0.0)):
        batch["weight"] = torch.ones(5).double()
        batch["weight"][5 - rows :] = weight
        share = {k: x[: 5 - rows] if rank == 0 else x[5 - rows :] for k, x in batch.items()}

        def loss_with(every):
            def loss(params, batch):
                of_all = pa.remat(lambda z: every(z.sin()))(embed(params, batch["x"]))
                seen = (embed(params, batch["y"]) @ of_all.mT).square().sum(1)
                return pa.Weighted((seen * batch["weight"]).sum(), batch["weight"].sum())

            return loss

        def moved(params, step, batch):
            state, _ = step(step.init(params), batch)
            return torch.stack([x.sin().sum() for x in state.params.values()]).sum()

        def own_rows(params, batch):
            seen = embed(params, batch["x"]).sin().sum(1)
            return pa.Weighted((seen * batch["weight"]).sum(), batch["weight"].sum())

        for one, each in ((loss_with(lambda z: z), loss_with(gather)), (own_rows, own_rows)):
            want = grad(moved)(params, pa.make_step(one, pa.sgd(0.5)), batch)
            for noise in (False, True):
                step = pa.make_step(each, pa.sgd(0.5), group=dist.group.WORLD, noise=noise)
                near(grad(moved)(params, step, share), want, 1e-12)


# Observed runs ---------------------------------------------------------------------------


def by_psum(w, x):
    return (psum((w * x).sum(0)) ** 2).sum()


def by_gather(w, x):
    rows = gather(w * x)
    return (rows @ rows.mT).sin().sum() + rows[-1].sum()


def by_gradient(w, x):
    """What is exchanged again by a derivative of the loss's own."""
    return grad(lambda x: by_gather(w, x) + by_psum(w, x))(x).cos().sum() + (w * x).sum()


def by_torch(w, x):
    total = x.sum(0)
    dist.all_reduce(total)
    return (w * x).sum() + (w**2 * total).sum()


@pytest.mark.slow
@pytest.mark.given_up("early writes")
@on_ranks(2)
def test_a_run_that_one_rank_observes_alone_reaches_no_other(rank, world):
    """Each of them begins a new kind of batch when the other one does not; one has no samples."""
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    of_rank = whole_numbers(3, 2), whole_numbers(0, 2)
    for loss in (by_psum, by_gather, by_gradient, by_torch):
        flagged = lambda w, b, loss=loss: pa.Weighted(loss(w, b["x"]), 1.0)  # noqa: E731
        step = pa.make_step(flagged, pa.sgd(0.5), group=dist.group.WORLD)
        calls = {
            "step": lambda b, step=step: step(step.init(w), b),
            "func": lambda b, f=flagged: pa.grad(f)(w, b),
            "autograd": lambda b, f=flagged: pa.grad(f, engine="autograd")(w, b),
            "value": lambda b, f=flagged: pa.value(f)(w, b),
            "remat": lambda b, f=loss: pulled(lambda w: pa.remat(f)(w, b["x"]), w),
        }
        for name, call in calls.items():
            if name == "func" and loss is by_torch:
                continue  # torch.func refuses to write to what it cannot follow
            for when in range(3):
                batch = {"x": of_rank[rank], "began": when > rank}
                with unguarded():
                    want = call(batch)
                assert_trees_bitwise_equal(call(batch), want)


@pytest.mark.slow
@on_ranks(2)
def test_a_kind_of_batch_that_is_new_to_one_rank_alone_changes_nothing(rank, world):
    """Nor does it keep the other one waiting, which has no samples."""
    w = torch.tensor([1.0, -2.0], dtype=torch.float64)
    of_rank = whole_numbers(3, 2), whole_numbers(0, 2)
    for loss in (by_psum, by_gather, by_gradient):
        flagged = lambda w, b, loss=loss: pa.Weighted(loss(w, b["x"]), 1.0)  # noqa: E731
        step = pa.make_step(flagged, pa.sgd(0.5), group=dist.group.WORLD)
        for call in (lambda w, b, step=step: step(step.init(w), b), pa.grad(flagged)):
            first, *others = [
                call(w, {"x": of_rank[rank], "began": when > rank}) for when in range(3)
            ]
            for other in others:
                assert_trees_bitwise_equal(other, first)


@pytest.mark.given_up("sharded batches")
@on_ranks(2)
def test_an_observed_run_ends_where_dtensors_begin(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    w = {"w": distribute_tensor(whole_numbers(4, 2), mesh, [Shard(0)])}
    x = distribute_tensor(whole_numbers(4, 4, seed=1), mesh, [Shard(0)])
    held = torch.zeros(2)

    def loss(p, b):
        if writes:
            held.add_(1)
        return (b["x"] @ p["w"]).square().mean()

    step, writes = pa.make_step(loss, pa.sgd(0.5), microbatch_size=2), False
    for when in range(3):
        batch = {"x": x, "began": when > rank}
        with unguarded():
            want = step(step.init(w), batch)[0].params["w"].full_tensor()
        got = step(step.init(w), batch)[0].params["w"].full_tensor()
        assert_trees_bitwise_equal(got, want)
    writes = True
    with pytest.raises(RuntimeError, match="writes to"):
        step(step.init(w), {"x": x, "anew": True})
    assert not held.any()
