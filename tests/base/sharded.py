"""What ranks do with DTensors beside what one process does with the full tensors.

Whole numbers and powers of two, so that bits can be compared; elsewhere float64 and a bound.
"""

from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import pureaccum as pa
from pureaccum._base.states import mark
from pureaccum._base.trees import tree_leaves, tree_map
from pureaccum.testing import assert_trees_bitwise_equal
from tests.exactly import but_checked


Tensors = dict[str, Tensor]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
NAMES = ("b1", "b2", "w1", "w2")

# By layout: the parameters' placements and the batch's, on a mesh of as many dimensions.
LAYOUTS = {
    "replicated": ({name: [R] for name in NAMES}, [S0]),
    "fsdp": ({name: [S0] for name in NAMES}, [S0]),
    "tensor": ({"w1": [S1], "b1": [S0], "w2": [S0], "b2": [R]}, [R]),
    "2d": ({"w1": [R, S1], "b1": [R, S0], "w2": [R, S0], "b2": [R, R]}, [S0, R]),
    "2d fsdp": ({"w1": [S0, S1], "b1": [S0, S0], "w2": [S1, S0], "b2": [S0, R]}, [S0, R]),
}


@cache
def mesh_of(dims=1):
    """All ranks in a line, or in two samples."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if dims == 1 else (2, world // 2))


def whole_numbers(*shape, dtype=torch.float32):
    return torch.randint(-3, 4, shape).to(dtype)


def problem(dtype=torch.float32, rows=16):
    """Parameters and a batch, the same on all ranks;

    no number of ranks divides five samples of w1.
    """
    of = partial(whole_numbers, dtype=dtype)
    params = {"w1": of(5, 8), "b1": of(8), "w2": of(8, 4), "b2": of(4)}
    return params, {"x": of(rows, 5), "y": of(rows, 4), "mask": of(rows).abs()}


def spread(tree, layout, *, batch=False):
    placements, of_batch = LAYOUTS[layout]
    mesh = mesh_of(len(of_batch))
    return {
        name: distribute_tensor(x, mesh, of_batch if batch else placements[name])
        for name, x in tree.items()
    }


def gathered(tree):
    """The full tensors."""
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def errors(params, batch):
    hidden = (batch["x"] @ params["w1"] + params["b1"]).relu()
    return (hidden @ params["w2"] + params["b2"] - batch["y"]) ** 2


def mean(params, batch):
    return errors(params, batch).mean()


def total(params, batch):
    return errors(params, batch).sum()


def weighted(params, batch):
    return pa.Weighted((errors(params, batch).sum(1) * batch["mask"]).sum(), batch["mask"].sum())


LOSSES = {
    "mean": (mean, "mean"),
    "sum": (total, "sum"),
    "weighted": (weighted, "mean"),
}


class Collectives(TorchDispatchMode):
    """Counts what DTensors communicate: (operation, numbers in it), without the waiting."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch goes on to local tensors, and comes back here with them
        name = str(func)
        if name.startswith("_c10d_functional.") and "wait" not in name:
            self.seen.append((name.split(".")[1], args[0].numel()))
        return func(*args, **(kwargs or {}))


@contextmanager
def communicating(*wanted):
    with Collectives() as collectives:
        yield
    seen = [(name, n) for name, n in collectives.seen if not name.startswith("_wrap")]
    assert sorted(seen) == sorted(wanted), seen


@contextmanager
def refused(error, *words):
    try:
        yield
    except error as raised:
        said = " ".join([str(raised), *getattr(raised, "__notes__", [])])
        assert all(word in said for word in words), said
        return
    raise AssertionError(f"nothing was raised; expected {words}")


def same_on_all_ranks(tree):
    leaves = tree_leaves(tree)
    assert all(type(x) is Tensor and x.dim() == 0 for x in leaves), leaves
    mine = torch.stack([x.double() for x in leaves])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    assert all(torch.equal(x.view(torch.int64), mine.view(torch.int64)) for x in every), every


def assert_near(got, want):
    """In float64, leaf by leaf: the norm of the error is 2**-26 of that of the leaf."""
    got, want = but_checked(gathered(got)), but_checked(want)
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        error = (x.double() - y.double()).norm()
        assert error <= 2.0**-26 * y.double().norm(), (error, y)


# Cases ------------------------------------------------------------------------------------


def accumulates(layout, loss, engine, donate):
    params, batch = problem()
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    func, reduction = LOSSES[loss]
    acc = pa.accumulator(func, reduction=reduction, engine=engine)
    whole = acc.update(acc.init(params), params, batch)
    # two states from different microbatches, merged
    states = [acc.init(dparams), acc.init(dparams)]
    for i, part in enumerate(pa.microbatches(dbatch, 4)):
        states[i % 2] = acc.update(states[i % 2], dparams, part, donate=donate)
    state = acc.merge(*states)
    for name, sums in state.grads.items():
        wanted = [P if p == R else p for p in LAYOUTS[layout][0][name]]
        assert list(sums.placements) == wanted, (name, sums.placements)
    same_on_all_ranks(state[1:])
    grads, value = acc.finalize(state, donate=donate)
    for name, grad in grads.items():
        assert list(grad.placements) == LAYOUTS[layout][0][name]
    assert_trees_bitwise_equal((gathered(grads), value), acc.finalize(whole))


def steps_exactly(layout, loss, donate):
    """One step in powers of two, whole and as a stream: the bits of one process."""
    params, batch = problem()
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    func, reduction = LOSSES[loss]
    options = {"reduction": reduction, "loss_scale": pa.static_loss_scale(8.0)}
    make = partial(pa.make_step, func, pa.sgd(0.25, momentum=0.5), **options)
    step, dstep = make(), make(microbatch_size=8, donate=donate)
    want, told = step(step.init(params), batch)
    first = dstep.init(dparams)
    window = dstep.begin(first)
    for part in pa.microbatches(dbatch, 8):
        window = dstep.update(first, window, part)
    streamed = dstep.apply(first, window)
    for new, info in (streamed, dstep(dstep.init(dparams), dbatch)):
        same_on_all_ranks(info)
        assert_trees_bitwise_equal(gathered(new), want)
        assert info.applied
        assert info.loss == told.loss


def trains(layout, optimizer, engine):
    """Two steps of an optimizer after clipping by the global norm, and one as a stream."""
    params, batch = problem(torch.float64)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    make = {
        "adam": lambda: pa.adam(0.125, amsgrad=True),
        "adamw": lambda: pa.adamw(pa.linear_warmup(0.25, 4)),
        "fused": lambda: pa.adamw(0.125, fused=True),
        "from_torch": lambda: pa.from_torch(torch.optim.RMSprop, lr=0.125),
        "partition": lambda: pa.partition(
            {"w": pa.adam(0.125), "b": pa.sgd(0.125)}, lambda path: path[0]
        ),
    }
    options = {
        "microbatch_size": 8,
        "loss_scale": pa.dynamic_loss_scale(),
        "engine": engine,
    }
    step = pa.make_step(
        weighted, pa.chain(pa.clip_by_global_norm(2.0), make[optimizer]()), **options
    )
    dstep = pa.make_step(
        weighted,
        pa.chain(pa.clip_by_global_norm(2.0), make[optimizer]()),
        donate=True,
        **options,
    )
    state, new = step.init(params), dstep.init(dparams)
    for _ in range(2):
        state, want = step(state, batch)
        new, info = dstep(new, dbatch)
        same_on_all_ranks(info)
        assert_near((new, info), (state, want))
    window = dstep.begin(new)
    for part in pa.microbatches(dbatch, 8):
        window = dstep.update(new, window, part)
    new, info = dstep.apply(new, window)
    state, want = step(state, batch)
    assert_near((new, info), (state, want))
    shards = [x for x in tree_leaves(new.opt_state) if isinstance(x, DTensor) and x.dim()]
    for x in shards:  # as sharded as the parameters
        like = next(p for p in new.params.values() if p.shape == x.shape)
        assert x.placements == like.placements


def looks_uphill(layout):
    """Three steps of ``sam``, the last one donated; and ``lbfgs`` says that it cannot."""
    params, batch = problem(torch.float64)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    fn = pa.grad_and_value(weighted, microbatch_size=8, engine="auto")
    opt = pa.sam(pa.chain(pa.clip_by_global_norm(2.0), pa.adamw(0.125)), rho=0.25)
    state, new = opt.init(params), opt.init(dparams)
    for n in range(3):
        params, state = opt.apply(lambda p: fn(p, batch), state, params)
        # as they lie, and once on every rank as a whole
        dparams, new = opt.apply(
            lambda p, n=n: whole_on_all_ranks(fn(p, dbatch)) if n == 1 else fn(p, dbatch),
            new,
            dparams,
            donate=n == 2,
        )
        same_on_all_ranks((new.value, new.applied))
        assert_near((dparams, new), (params, state))
    for name, x in dparams.items():
        assert list(x.placements) == LAYOUTS[layout][0][name]
    with refused(ValueError, "DTensors", "lbfgs", "adamw or sam"):
        pa.lbfgs().init(dparams)


def whole_on_all_ranks(found):
    grads, value = found
    return {n: g.redistribute(placements=[R] * g.device_mesh.ndim) for n, g in grads.items()}, value


def one_bad_row_stops_all_ranks(layout):
    params, batch = problem()
    batch["x"][13, 2] = torch.nan  # a sample of the last rank
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(0.1))
    options = {"microbatch_size": 8, "loss_scale": pa.dynamic_loss_scale()}
    step = pa.make_step(mean, optimizer, **options)
    state = step.init(dparams)
    new, info = step(state, dbatch)
    same_on_all_ranks(info)
    assert not info.applied
    assert new.loss_scale.scale == state.loss_scale.scale / 2
    assert_trees_bitwise_equal(gathered(new.params), params)
    assert_trees_bitwise_equal(gathered(new.opt_state), gathered(state.opt_state))


def masked_microbatches_add_nothing():
    """All masked on all ranks, and where the total is NaN."""
    params, batch = problem()
    batch["mask"][:] = torch.tensor([0.0] * 4 + [1.0, 2.0] * 2).repeat(2)  # by rank
    batch["x"][0] = torch.nan
    dparams = spread(params, "replicated")
    dbatch = spread(batch, "replicated", batch=True)

    def loss(p, b):
        return pa.Weighted((errors(p, b).sum(1) * b["mask"]).sum(), b["mask"].sum())

    step = pa.make_step(loss, pa.sgd(0.25), microbatch_size=8)  # the first four of each, the rest
    new, info = step(step.init(dparams), dbatch)
    kept = {name: x.view(2, 8, -1)[:, 4:].flatten(0, 1) for name, x in batch.items()}
    kept["mask"] = kept["mask"].squeeze(-1)
    want, told = pa.make_step(loss, pa.sgd(0.25))(step.init(params), kept)
    assert info.applied
    assert info.weight == told.weight
    assert_trees_bitwise_equal(gathered(new.params), want.params)


def communicates_once_a_window():
    """No gradient is communicated before the end, whatever the number of microbatches."""
    params, batch = problem()
    dparams = spread(params, "replicated")
    dbatch = spread(batch, "replicated", batch=True)
    reductions = [("all_reduce", x.numel()) for x in params.values()]
    for loss, each in ((mean, 0), (weighted, 2)):
        for size in (4, 16):
            count = 16 // size
            tiny = [("all_reduce", count)] if not each else [("all_reduce", each)] * count
            step = pa.make_step(loss, pa.adamw(0.1), microbatch_size=size)
            state = step.init(dparams)
            # The losses of all microbatches, and the gradients: all ranks have their norm, and it
            # is finite.
            with communicating(*tiny, *reductions):
                step(state, dbatch)
            acc = pa.accumulator(loss)
            sums = acc.init(dparams)
            with communicating(*[("all_reduce", each or 1)] * count):
                for part in pa.microbatches(dbatch, size):
                    sums = acc.update(sums, dparams, part)
            with communicating(*reductions):
                acc.finalize(sums)


def parameters_are_averaged(layout):
    """Each rank its own part, without communication; halves of whole numbers are exact."""
    params, _ = problem()
    params["b1"] = params["b1"].bfloat16()
    dparams, average = spread(params, layout), pa.ema(0.5)
    flags = [None, torch.tensor(True), torch.tensor(False), torch.tensor(True)]
    want = average.init(params)
    with communicating():
        state = average.init(dparams)
    for n, applied in enumerate(flags, 1):
        with communicating():
            times = tree_map(lambda x, n=n: n * x, dparams)
            state = average.update(state, times, applied)
        want = average.update(want, {name: n * x for name, x in params.items()}, applied)
        for name, x in state.params.items():
            assert list(x.placements) == LAYOUTS[layout][0][name]
        assert_trees_bitwise_equal(gathered(state), want)
    moved = {
        name: x.redistribute(placements=[R] * x.device_mesh.ndim) for name, x in dparams.items()
    }
    got = average.update(state, moved)
    assert_trees_bitwise_equal(gathered(got), average.update(want, params))
    with refused(ValueError, "params['b1'] is plain", "expected a DTensor, as in state.params"):
        average.update(state, params)


def large_leaves_go_through_hooks(engine):
    """Leaves of a MiB a rank are added as they come, also where only some are."""
    params = {"w": whole_numbers(8, 2**16), "b": whole_numbers(2**16)}  # 2 MiB, and 1 a rank
    batch = {"x": whole_numbers(8, 8)}

    def loss(p, b):
        return (b["x"] @ p["w"] + p["b"]).relu().sum()

    step = pa.make_step(loss, pa.sgd(0.25), reduction="sum", engine=engine, microbatch_size=4)
    want, _ = step(step.init(params), batch)
    mesh = mesh_of()
    dbatch = {"x": distribute_tensor(batch["x"], mesh, [S0])}
    for placement in (R, S0, S1):
        dparams = {
            "w": distribute_tensor(params["w"], mesh, [placement]),
            "b": distribute_tensor(params["b"], mesh, [R]),
        }
        new, _ = step(step.init(dparams), dbatch)
        assert_trees_bitwise_equal(gathered(new.params), want.params)


def rows_are_cut_by_each_rank():
    _, batch = problem()
    dbatch = spread(batch, "replicated", batch=True) | {"training": True}
    with communicating():
        parts = list(pa.microbatches(dbatch, 8))
    for i, part in enumerate(parts):
        assert part["training"] is True
        assert part["x"].shape == (8, 5)
        of_rank = [batch["x"][8 * rank + 4 * i :][:4] for rank in (0, 1)]
        assert torch.equal(part["x"].to_local(), of_rank[dist.get_rank()])
        assert torch.equal(part["x"].full_tensor(), torch.cat(of_rank))
    assert [len(p["x"]) for p in pa.microbatches(dbatch, 12)] == [12, 4]
    with refused(ValueError, "a microbatch has 5 rows", "multiple of 2"):
        pa.microbatches(dbatch, 5)
    odd = {"x": distribute_tensor(batch["x"][:13], mesh_of(), [S0])}
    with refused(ValueError, "the batch has 13 rows", "multiple of 2"):
        pa.microbatches(odd, 4)
    for other in (batch["y"], distribute_tensor(batch["y"], mesh_of(), [R])):
        with refused(ValueError, "in different ways", "same placement along dim 0"):
            pa.microbatches({"x": dbatch["x"], "y": other}, 8)


def uneven_rows_go_through_whole():
    """Thirteen samples on two ranks, seven and six, and one sample, as microbatches of a stream."""
    params, batch = problem()
    mesh = mesh_of()
    dparams = spread(params, "replicated")
    for loss, reduction in LOSSES.values():
        acc = pa.accumulator(loss, reduction=reduction)
        want, state = acc.init(params), acc.init(dparams)
        for rows in (13, 1):
            part = {name: x[:rows] for name, x in batch.items()}
            dpart = {name: distribute_tensor(x, mesh, [S0]) for name, x in part.items()}
            want, state = acc.update(want, params, part), acc.update(state, dparams, dpart)
        (grads, value), (expected, number) = acc.finalize(state), acc.finalize(want)
        if loss is mean:  # torch divides by thirteen
            grads, expected = (
                [x.double() for x in t.values()] for t in (gathered(grads), expected)
            )
            for x, y in zip(grads, expected, strict=True):
                assert (x - y).norm() <= 2.0**-20 * y.norm()
        else:
            assert_trees_bitwise_equal((gathered(grads), value), (expected, number))


def memory_is_that_of_a_rank():
    """A shard takes what a plain tensor of its size takes, but for scalars that ranks exchange."""
    w = torch.ones(1024 * dist.get_world_size(), 256)  # shards of 1 MiB: as they come

    def loss(p, x):
        return (p * p).sum()

    step = pa.make_step(loss, pa.adamw(fused=True), reduction="sum", engine="func", donate=True)
    rows = torch.ones(8, 2)
    sharded = distribute_tensor(w, mesh_of(), [S0]), distribute_tensor(rows, mesh_of(), [R])
    came = pa.memory_report(step, step.init(sharded[0]), sharded[1])
    want = pa.memory_report(step, step.init(sharded[0].to_local()), rows)
    assert came.predicted == ()
    assert "predicted" not in str(came)
    assert came.measured[:4] == want.measured[:4]
    assert abs(came.measured.beyond_arguments - want.measured.beyond_arguments) <= 256, (came, want)
    assert want.measured.beyond_arguments >= 2**20


def small_shards_do_not_wait_for_one_another():
    """Beyond the sums, a step holds a few of 64 gradients."""
    world = dist.get_world_size()
    params = [distribute_tensor(torch.ones(1024 * world), mesh_of(), [S0]) for _ in range(64)]

    def loss(p, x):
        return torch.stack([(w * w).sum() for w in p]).sum()

    step = pa.make_step(loss, pa.sgd(0.5, fused=True), reduction="sum", donate=True)
    rows = distribute_tensor(torch.ones(4, 2), mesh_of(), [R])
    memory = pa.memory_report(step, step.init(params), rows).measured
    assert memory.gradients == 64 * 4096
    assert memory.beyond_arguments - memory.gradients < 16 * 4096


def transforms_at_top_level():
    """grad, grad_and_value and value, with a size and without; aux over all ranks."""
    params, batch = problem()
    want, number = pa.grad_and_value(weighted)(params, batch)
    dparams, dbatch = spread(params, "replicated"), spread(batch, "replicated", batch=True)
    grads = pa.grad(weighted, microbatch_size=8)(dparams, dbatch)
    assert all(x.placements == (R,) for x in grads.values())
    assert_trees_bitwise_equal(gathered(grads), want)
    dparams = spread(params, "fsdp")
    for size in (None, 8):
        grads, value = pa.grad_and_value(weighted, microbatch_size=size)(dparams, dbatch)
        assert_trees_bitwise_equal((gathered(grads), value), (want, number))
        assert all(x.placements == (S0,) for x in grads.values())
        alone = pa.value(weighted, microbatch_size=size)(dparams, dbatch)
        assert type(value) is type(alone) is Tensor
        assert alone == number

    def loss(p, b):
        e = errors(p, b)
        return e.mean(), {"most": e.sum(), "each": e.sum(1), "rows": 3}

    def run(p, b, **options):
        return pa.grad_and_value(loss, has_aux=True, **options)(p, b)[1]

    words = {"most": "sum", "each": "last", "rows": "last"}
    value, aux = run(dparams, dbatch, microbatch_size=8, aux_reduction=words)
    expected, whole = run(params, batch, microbatch_size=16, aux_reduction=words)
    assert value == expected
    assert torch.equal(aux["most"], whole["most"])
    assert type(aux["most"]) is type(aux["each"]) is Tensor
    assert aux["each"].shape == (8,)
    words["most"] = "mean"
    _, aux = run(dparams, dbatch, microbatch_size=8, aux_reduction=words)
    assert torch.equal(aux["most"] * 2, whole["most"])
    words["each"], words["most"] = "concat", "stack"
    for size in (16, 8, 4):  # samples come out in the order of the batch, and where they lay
        _, aux = run(dparams, dbatch, microbatch_size=size, aux_reduction=words)
        assert size == 16 or aux["each"].placements == (S0,)
        assert torch.equal(aux["each"].full_tensor(), whole["each"])
        assert aux["most"].shape == (16 // size,)


def what_was_donated_refuses():
    params, batch = problem()
    dparams, dbatch = spread(params, "fsdp"), spread(batch, "fsdp", batch=True)
    step = pa.make_step(mean, pa.adamw(0.1), microbatch_size=8, donate=True)
    uses = [
        lambda x: x + 1,
        lambda x: x.sum(),
        lambda x: x.clone(),
        lambda x: x.shape,
        lambda x: x.to_local() + 1,
        lambda x: x.full_tensor(),
        lambda x: x.add_(1),
        lambda x: pa.global_norm([x]),
    ]
    old = step.init(dparams)
    new, _ = step(old, dbatch)
    window = step.begin(new)
    step.update(new, window, dbatch)
    trees = tree_leaves([old, window])
    given = [x for x in trees if isinstance(x, DTensor)]
    assert len(given) == 4 * 3 + 4
    for x in given:
        for use in uses:
            with refused(RuntimeError, "given up with donate=True"):
                use(x)
    with refused(RuntimeError, "given up with donate=True"):
        step(old, dbatch)

    large = {"w": distribute_tensor(torch.ones(8, 2**16), mesh_of(), [S1]), "a": dparams["b1"]}

    def failing(p, b):
        p["a"].register_hook(_fail)  # after the gradient of w has been added
        return (p["a"] @ p["w"]).sum()

    acc = pa.accumulator(failing, reduction="sum")
    sums = acc.init(large)
    with refused(ZeroDivisionError):
        acc.update(sums, large, {}, donate=True)
    for x in sums.grads.values():
        with refused(RuntimeError, "failed in the middle"):
            x + 1
    assert_trees_bitwise_equal(gathered(dparams), params)  # init copied


def _fail(grad):
    raise ZeroDivisionError


def modules():
    """A module without hooks takes DTensors; the hooks of a plan want engine='autograd'."""
    mesh = mesh_of()
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    _, batch = problem(torch.float64)
    fn = pa.functional(net)
    full = {name: x.clone() for name, x in fn.params.items()}

    def loss_of(fn):
        def loss(p, b):
            out, _ = fn.apply(p, (), b["x"])
            return ((out - b["y"]) ** 2).mean()

        return loss

    step = pa.make_step(loss_of(fn), pa.adamw(0.1), microbatch_size=8)
    want, told = step(step.init(full), batch)
    dbatch = spread(batch, "replicated", batch=True)
    for placement in (R, S0):
        dparams = {name: distribute_tensor(x, mesh, [placement]) for name, x in full.items()}
        new, info = step(step.init(dparams), dbatch)
        assert_near((new, info), (want, told))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = pa.functional(parallelize_module(net, mesh, plan))
    assert isinstance(parallel.params["0.weight"], DTensor)
    for engine in ("autograd", "func"):
        step = pa.make_step(loss_of(parallel), pa.adamw(0.1), microbatch_size=8, engine=engine)
        state = step.init(parallel.params)
        if engine == "func":
            with refused(RuntimeError, "setup_context", "Use engine='autograd'"):
                step(state, batch)
        else:
            new, info = step(state, batch)  # a plain batch, the same on all ranks
            assert_near((new, info), (want, told))
            same_on_all_ranks(info)
            assert new.params["0.weight"].placements == (S0,)


def optimizers_take_gradients_as_they_lie():
    """Partial, replicated or sharded otherwise than the parameters."""
    params, _ = problem()
    grads = {name: whole_numbers(*x.shape) for name, x in params.items()}
    opt = pa.chain(pa.clip_by_global_norm(1e6), pa.sgd(0.25, momentum=0.5))
    want, _ = opt.apply(grads, opt.init(params), params)
    dparams, world = spread(params, "fsdp"), dist.get_world_size()
    for placement in (P, R, S0):
        dgrads = {
            name: DTensor.from_local(g / world, mesh_of(), [P]).redistribute(placements=[placement])
            for name, g in grads.items()
        }
        new, _ = opt.apply(dgrads, opt.init(dparams), dparams)
        assert_trees_bitwise_equal(gathered(new), want)
        assert all(x.placements == (S0,) for x in new.values())


def refusals():
    params, batch = problem()
    dparams, dbatch = spread(params, "fsdp"), spread(batch, "fsdp", batch=True)
    called = []

    def loss(p, b):
        called.append(1)
        return mean(p, b)

    with refused(ValueError, "params holds DTensors", "Use per_sample_grad"):
        pa.per_sample_accumulator(loss).init(dparams)
    reducer = pa.Reducer(torch.zeros_like, lambda s, g, w: s, lambda a, b: a, torch.clone)
    with refused(ValueError, "DTensors", "Your own Reducer"):
        pa.per_sample_grad(loss, reduce=reducer)(dparams, dbatch)
    with refused(ValueError, "in different ways", "same placement along dim 0"):
        mixed = dbatch | {"y": batch["y"]}
        pa.microbatch(errors, microbatch_size=8)(dparams, mixed)

    def outer(p):
        return pa.grad(loss, microbatch_size=8)(p, dbatch)["b2"].sum()

    with refused(ValueError, "params holds DTensors", "transforms"):
        torch.func.grad(outer)(dparams)
    unreduced = DTensor.from_local(torch.ones(4), mesh_of(), [P])
    with refused(ValueError, "params['b2'] is a DTensor with a Partial placement"):
        pa.accumulator(loss).init(dparams | {"b2": unreduced})
    opt = pa.adam(0.1)
    with refused(ValueError, "state.exp_avg['b1'] is plain; expected a DTensor, as in params"):
        opt.apply(dparams, opt.init(params), dparams)
    acc = pa.accumulator(loss)
    with refused(ValueError, "state.grads['b1'] is plain; expected a DTensor, as in params"):
        acc.update(acc.init(params), dparams, dbatch)
    assert not called


def bad_microbatches_are_skipped(layout):
    """On all ranks, whichever has the bad sample; a window without any asks once."""
    params, batch = problem()
    dparams = spread(params, layout)
    options = {"nonfinite": "skip", "reduction": "sum", "microbatch_size": 8}
    step = pa.make_step(total, pa.sgd(0.25), **options)
    plain = pa.make_step(total, pa.sgd(0.25), reduction="sum")
    state = step.init(dparams)
    want, _ = plain(plain.init(params), batch)
    new, info = step(state, spread(batch, layout, batch=True))
    assert_trees_bitwise_equal(gathered(new.params), want.params)
    assert (int(info.microbatches), int(info.skipped)) == (2, 0)
    batch["x"][13, 2] = torch.nan  # a sample of the last rank, in the second microbatch
    dbatch = spread(batch, layout, batch=True)
    kept = next(pa.microbatches(dbatch, 8))
    want, _ = plain(plain.init(params), gathered(kept))
    window = step.begin(state)
    for part in pa.microbatches(dbatch, 8):
        window = step.update(state, window, part)
    for new, info in (step(state, dbatch), step.apply(state, window)):
        same_on_all_ranks(info)
        assert info.applied
        assert (int(info.microbatches), int(info.skipped)) == (2, 1)
        assert_trees_bitwise_equal(gathered(new.params), want.params)
    careful = pa.make_step(total, pa.sgd(0.25), **options | {"nonfinite": "raise"})
    with refused(FloatingPointError, "microbatch 1"):
        careful(state, dbatch)
    acc = pa.accumulator(total, reduction="sum", nonfinite="skip")
    sums = acc.init(dparams)
    for part in pa.microbatches(dbatch, 8):
        sums = acc.update(sums, dparams, part)
    assert int(sums.skipped) == 1


def skipping_asks_once_a_window():
    params, batch = problem()
    dparams, dbatch = (
        spread(params, "replicated"),
        spread(batch, "replicated", batch=True),
    )
    reductions = [("all_reduce", x.numel()) for x in params.values()]
    for size in (4, 8):
        step = pa.make_step(mean, pa.adamw(0.1), microbatch_size=size, nonfinite="skip")
        state = step.init(dparams)
        with communicating(("all_reduce", 1), ("all_reduce", 16 // size), *reductions):
            step(state, dbatch)


def rows_have_their_keys(layout):
    """The masks of one process, whole or cut; a stream counts samples as they come."""
    params, batch = problem(torch.float64)

    def loss(p, b, keys):
        return total(p, b | {"x": pa.dropout(b["x"], 0.5, keys)})

    options = {"keys": True, "reduction": "sum"}
    plain = pa.make_step(loss, pa.sgd(2.0**-6), **options)
    state = plain.init(params, seed=3)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    for size in (None, 16, 8, 4):
        step = pa.make_step(loss, pa.sgd(2.0**-6), microbatch_size=size, **options)
        new, want = step.init(dparams, seed=3), state
        for _ in range(2):
            new, want = step(new, dbatch)[0], plain(want, batch)[0]
        assert_near(new.params, want.params)
    stream = pa.make_step(loss, pa.sgd(2.0**-6), **options)
    first = stream.init(dparams, seed=3)
    window, window_plain = stream.begin(first), plain.begin(state)
    for part in pa.microbatches(dbatch, 8):
        window = stream.update(first, window, part)
        window_plain = plain.update(state, window_plain, gathered(part))
    came, want = stream.apply(first, window), plain.apply(state, window_plain)
    assert_near(came[0].params, want[0].params)
    drawn = pa.normal(DTensor.from_local(pa.split_key(pa.key(dist.get_rank()), 3), mesh_of(), [S0]))
    ones = [pa.normal(pa.split_key(pa.key(rank), 3)) for rank in range(dist.get_world_size())]
    assert torch.equal(drawn.full_tensor(), torch.cat(ones))


def noise_is_measured(layout):
    params, batch = problem(torch.float64)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    dstep = pa.make_step(weighted, pa.sgd(0.1), microbatch_size=4, noise=True)
    _, came = dstep(dstep.init(dparams), dbatch)
    step = pa.make_step(weighted, pa.sgd(0.1), noise=True)
    state = step.init(params)
    window = step.begin(state)
    for part in pa.microbatches(dbatch, 4):
        window = step.update(state, window, gathered(part))
    _, want = step.apply(state, window)
    same_on_all_ranks(came.noise.weight)
    assert_near(came.noise, want.noise)


def functions_are_microbatched(layout):
    """A contrastive loss: samples come out in the order of the batch; each rank cuts its own."""
    params, batch = problem()

    def loss(size):
        def embed(p, x):
            return (x @ p["w1"] + p["b1"]).relu() @ p["w2"]

        cut = embed if size is None else pa.microbatch(embed, microbatch_size=size)

        def of_all(p, b):
            z = cut(p, b["x"])
            return ((z @ z.mT) * 2.0**-10).sum() + (z * b["y"]).sum()

        return of_all

    want, told = torch.func.grad_and_value(loss(None))(params, batch)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    for size in (4, 8):
        grads, value = pa.grad_and_value(loss(size), reduction="sum", engine="autograd")(
            dparams, dbatch
        )
        assert_near((grads, value), (want, told))
        rows = pa.microbatch(errors, microbatch_size=size)(dparams, dbatch)
        assert_trees_bitwise_equal(gathered(rows), errors(params, batch))
        sums = pa.microbatch(total, microbatch_size=size, reduce="sum")(dparams, dbatch)
        assert_trees_bitwise_equal(gathered(sums), total(params, batch))


def samples_are_reduced(layout):
    params, batch = problem(torch.float64)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)

    def loss(p, b):
        return errors(p, b).sum()

    for reduce in ("sum", "mean", "moments", "concat"):
        run = pa.per_sample_grad(loss, reduce=reduce, chunk_size=3, metrics="norm")
        (came, norms), (want, wanted) = run(dparams, dbatch), run(params, batch)
        assert_near((came, norms), (want, wanted))
        if reduce in ("sum", "mean"):
            assert [x.placements for x in came.values()] == [x.placements for x in dparams.values()]


def losses_are_compiled(layout):
    params, batch = problem(torch.float64)
    dparams, dbatch = spread(params, layout), spread(batch, layout, batch=True)
    options = {"microbatch_size": 8, "compile": {"backend": "aot_eager"}}
    step = pa.make_step(weighted, pa.sgd(0.25, momentum=0.5), donate=True, **options)
    plain = pa.make_step(weighted, pa.sgd(0.25, momentum=0.5))
    new, want = step.init(dparams), plain.init(params)
    assert step.form(new, dbatch) == "loss"
    for _ in range(2):
        (new, info), (want, told) = step(new, dbatch), plain(want, batch)
        assert_near((new, info.loss), (want, told.loss))
    window = step.begin(new)
    for part in pa.microbatches(dbatch, 8):
        window = step.update(new, window, part)
    assert_near(step.apply(new, window)[0], plain(want, batch)[0])


def norms_and_flags():
    full = {"a": whole_numbers(6, 4), "b": whole_numbers(4, 5), "c": torch.tensor(3.0)}
    line, square = mesh_of(), mesh_of(2)
    tree = {
        "a": distribute_tensor(full["a"], square, [S0, S1]),
        "b": distribute_tensor(full["b"], line, [R]),
        "c": full["c"],
        "d": DTensor.from_local(torch.full((2,), 2.0), line, [P]),  # 8 and 8
    }
    norm, finite = pa.global_norm(tree), pa.all_finite(tree)
    same_on_all_ranks([norm, finite])
    want = pa.global_norm([*full.values(), torch.full((2,), 8.0)])
    assert norm.dtype == want.dtype
    assert abs(norm - want) <= 2**-20 * want
    assert finite
    for name, at in (("a", (5, 3)), ("b", (0, 0))):
        bad = {k: v.clone() for k, v in full.items()}
        bad[name][at] = torch.inf
        spoiled = distribute_tensor(bad[name], tree[name].device_mesh, tree[name].placements)
        flag = pa.all_finite(tree | {name: spoiled})
        same_on_all_ranks([flag])
        assert not flag


# Checkpoints ---------------------------------------------------------------------------------


def in_mid_window(layout):
    """A step, its state after one step, and a window with sums in it; plain where no ranks are."""
    params, batch = problem()
    if layout:
        params, batch = spread(params, layout), spread(batch, layout, batch=True)
    step = pa.make_step(
        mean, pa.adamw(0.125), microbatch_size=8, loss_scale=pa.dynamic_loss_scale()
    )
    state, _ = step(step.init(params), batch)
    return step, state, step.update(state, step.begin(state), batch)


def saves(folder):
    for layout in ("replicated", "fsdp"):
        _, *tree = in_mid_window(layout)
        pa.save(f"{folder}/{layout}", tree)
        with refused(FileExistsError, "exists", "under a new name"):
            pa.save(f"{folder}/{layout}", tree)
        full = gathered(tree)
        if dist.get_rank() == 0:
            torch.save(tree_leaves(full), f"{folder}/{layout}.pt")
            names = sorted(path.name for path in Path(folder).iterdir())
            assert layout in names
            assert not [name for name in names if name.startswith(".")]
            written = [path.suffix for path in Path(folder, layout).iterdir()]
            assert written == [".safetensors"] * len(written)
        with refused(OSError):  # the folder cannot be made: all ranks hear of it
            pa.save(f"{folder}/{layout}/{'x' * 300}", tree)


def loads(folder):
    """On another number of ranks, and as they lie there; the window goes on."""
    for layout in ("replicated", "fsdp"):
        step, state, _ = in_mid_window(layout)
        like = [step.init(state.params), step.begin(state)]
        before = gathered(like)
        state, window = pa.load(f"{folder}/{layout}", like)
        kept = torch.load(f"{folder}/{layout}.pt")
        assert_trees_bitwise_equal(tree_leaves(gathered([state, window])), kept)
        assert_trees_bitwise_equal(gathered(like), before)
        for x, y in zip(*map(tree_leaves, ([state, window], like)), strict=True):
            assert type(x) is type(y)
            assert not isinstance(x, DTensor) or x.placements == y.placements
        _, info = step.apply(state, window)
        assert info.applied
        same_on_all_ranks(info)
        with refused(ValueError, "another tree than like", "tree[1].rows is only in the file"):
            pa.load(f"{folder}/{layout}", like[:1])


def checkpoints(folder):
    """What two ranks save, four load."""
    return {
        2: {"saves": partial(saves, folder)},
        4: {"loads what two ranks saved": partial(loads, folder)},
    }


# What torch does that this leans on ---------------------------------------------------------


def hazards():
    """Each of these fails when torch changes it."""
    params, batch = problem()
    dparams = spread(params, "replicated")
    dbatch = spread(batch, "replicated", batch=True)
    # a gradient of what is replicated is left as a sum over ranks, and so is the loss
    value, pull = torch.func.vjp(lambda p: mean(p, dbatch), dparams)
    (grads,) = pull(torch.ones_like(value))
    assert value.placements[0].is_partial()
    assert all(g.placements == (P,) for g in grads.values())
    # zeros like a sum over ranks are no sum over ranks: sums are made of local zeros
    assert torch.zeros_like(grads["b1"]).placements == (R,)
    # to_local gives a view of what the DTensor holds, and without grad mode the very tensor
    w = dparams["w1"].clone()
    assert w.to_local() is not w.to_local()
    with torch.no_grad():
        held = w.to_local()
        assert held is w.to_local()
    # operations do not ask the tensor that a DTensor holds whether it may be used
    mark([held])
    assert (w + 1).shape == (5, 8)
    with refused(RuntimeError, "given up with donate=True"):
        w.to_local() + 1
    # from_local, to_local and redistribute are Functions without setup_context
    with refused(RuntimeError, "setup_context"):
        torch.func.grad(lambda x: DTensor.from_local(x, mesh_of(), [R]).sum())(torch.ones(3))
    # a wrapper of torch.func hides what it wraps, so that a loss cannot call a DTensor's methods
    with refused(AttributeError, "full_tensor"):
        torch.func.grad(lambda p: p["b2"].full_tensor().sum())(dparams)
    with refused((IndexError, NotImplementedError)):
        torch.func.vmap(torch.func.grad(mean), (None, 0))(dparams, dbatch)


IN_A_LINE = {
    **{
        f"accumulates, {layout}, {loss}, {engine}": partial(
            accumulates, layout, loss, engine, engine == "func"
        )
        for layout in ("replicated", "fsdp", "tensor")
        for loss, engine in (("mean", "func"), ("sum", "autograd"), ("weighted", "func"))
    },
    "steps exactly, replicated": partial(steps_exactly, "replicated", "mean", True),
    "steps exactly, fsdp": partial(steps_exactly, "fsdp", "weighted", False),
    "steps exactly, tensor": partial(steps_exactly, "tensor", "sum", True),
    **{
        f"trains, {layout}, {optimizer}": partial(trains, layout, optimizer, engine)
        for layout, optimizer, engine in (
            ("replicated", "adamw", "func"),
            ("fsdp", "adam", "autograd"),
            ("fsdp", "fused", "func"),
            ("fsdp", "from_torch", "func"),
            ("tensor", "partition", "func"),
        )
    },
    **{
        f"looks uphill, {layout}": partial(looks_uphill, layout)
        for layout in ("replicated", "fsdp", "tensor")
    },
    "one bad row stops all ranks": partial(one_bad_row_stops_all_ranks, "fsdp"),
    "masked microbatches add nothing": masked_microbatches_add_nothing,
    "communicates once a window": communicates_once_a_window,
    "large leaves go through hooks, func": partial(large_leaves_go_through_hooks, "func"),
    "large leaves go through hooks, autograd": partial(large_leaves_go_through_hooks, "autograd"),
    "bad microbatches are skipped": partial(bad_microbatches_are_skipped, "fsdp"),
    "skipping asks once a window": skipping_asks_once_a_window,
    "rows have their keys": partial(rows_have_their_keys, "replicated"),
    "noise is measured": partial(noise_is_measured, "fsdp"),
    "noise is measured, replicated": partial(noise_is_measured, "replicated"),
    "functions are microbatched": partial(functions_are_microbatched, "replicated"),
    "functions are microbatched, tensor": partial(functions_are_microbatched, "tensor"),
    "samples are reduced": partial(samples_are_reduced, "fsdp"),
    "losses are compiled": partial(losses_are_compiled, "fsdp"),
    "rows are cut by each rank": rows_are_cut_by_each_rank,
    "uneven rows go through whole": uneven_rows_go_through_whole,
    "memory is that of a rank": memory_is_that_of_a_rank,
    "small shards do not wait for one another": small_shards_do_not_wait_for_one_another,
    "transforms at top level": transforms_at_top_level,
    "parameters are averaged": partial(parameters_are_averaged, "fsdp"),
    "what was donated refuses": what_was_donated_refuses,
    "modules": modules,
    "optimizers take gradients as they lie": optimizers_take_gradients_as_they_lie,
    "refusals": refusals,
    "hazards": hazards,
}

IN_TWO_ROWS = {
    "accumulates, 2d, mean, func": partial(accumulates, "2d", "mean", "func", True),
    "accumulates, 2d fsdp, weighted, autograd": partial(
        accumulates, "2d fsdp", "weighted", "autograd", False
    ),
    "steps exactly, 2d fsdp": partial(steps_exactly, "2d fsdp", "weighted", True),
    "trains, 2d, adamw": partial(trains, "2d", "adamw", "func"),
    "looks uphill, 2d fsdp": partial(looks_uphill, "2d fsdp"),
    "one bad row stops all ranks, 2d": partial(one_bad_row_stops_all_ranks, "2d"),
    "bad microbatches are skipped, 2d": partial(bad_microbatches_are_skipped, "2d fsdp"),
    "rows have their keys, 2d": partial(rows_have_their_keys, "2d"),
    "parameters are averaged, 2d": partial(parameters_are_averaged, "2d fsdp"),
    "noise is measured, 2d": partial(noise_is_measured, "2d"),
    "functions are microbatched, 2d": partial(functions_are_microbatched, "2d fsdp"),
    "samples are reduced, 2d": partial(samples_are_reduced, "2d"),
    "norms and flags": norms_and_flags,
}

CASES = {2: IN_A_LINE, 4: IN_TWO_ROWS}
