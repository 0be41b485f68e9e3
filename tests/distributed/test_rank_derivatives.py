"""A step over ranks, under any transforms, is that of one process; all ranks exchange the same.

Any samples on any rank, samples that are not finite, samples without weight. What ranks exchange is
one list of operations, shapes and dtypes: it depends on the program and on no data. (A rank that
went its own way would end the process of another, or wait for it.)
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import pureaccum as pa
from pureaccum._base.trees import tree_leaves
from tests.draws import generator
from tests.ranks import exchanging_alike, in_step, on_ranks


pytestmark = [pytest.mark.transforms, pytest.mark.promise("ranks")]
BOUND = 2.0**-26  # the root of float64's unit, relative to a leaf
Tensors = dict[str, Tensor]


class Program(NamedTuple):
    """A step, its samples, and what is done with it."""

    nest: str
    rows: tuple[int, ...]  # of each rank
    size: int | None = None
    kind: str = "mean"
    bad: str = ""  # what is wrong with the samples of a rank
    bad_rank: int = 0
    steps: int = 1
    stream: bool = False
    shared: bool = False
    aux: bool = False
    keys: bool = False
    noise: bool = False
    scale: bool = False
    skip: bool = False
    clip: bool = False
    buffers: str | None = None
    train: bool = False  # whether batch norm is in training mode
    at_once: bool = False  # whether one process takes all samples at once
    engine: str = "auto"


class Inputs(NamedTuple):
    """What a nest differentiates by, or maps."""

    params: Tensors
    batch: Tensors
    shared: Tensor
    captured: Tensor | None
    buffers: Any


# Batch norm comes first: its moments do not depend on the cut.
NORM = nn.BatchNorm1d(3, affine=False, momentum=0.25, dtype=torch.float64)


def inputs_of(program):
    rows = sum(program.rows)
    random = generator(rows)
    x, y = (torch.randn(rows, n, generator=random).double() for n in (3, 1))
    weight = torch.randint(1, 4, (rows,), generator=random).double()
    mine = slices(program)[program.bad_rank]
    if program.bad == "weight":
        weight[mine] = 0.0
    elif program.bad:
        x[mine][:1] = float(program.bad)
    params = {
        "w": torch.randn(3, 2, generator=random).double(),
        "b": torch.randn(2, generator=random).double(),
    }
    buffers = None
    if program.buffers:
        factor = torch.tensor([1.0, 2.0, 0.5]).double()
        own = {"factor": factor, "follows": torch.zeros(2).double(), "flag": torch.tensor(True)}
        buffers = dict(pa.functional(NORM).buffers) | own
    batch = {"x": x, "y": y[:, 0], "weight": weight}
    return Inputs(params, batch, torch.tensor(1.25).double(), None, buffers)


def slices(program):
    """Which samples each rank has."""
    ends = [*accumulate(program.rows)]
    return [slice(end - n, end) for end, n in zip(ends, program.rows, strict=True)]


def cut(program, rows):
    size = program.size or max(rows, 1)
    return [min(size, rows - i) for i in range(0, rows, size)]


def step_of(program, captured, **options):
    fn = pa.functional(NORM.train(program.train))

    def loss(params, batch, *shared, **named):
        x, new = batch["x"], {}
        if "keys" in named:
            x = pa.dropout(x, 0.5, named["keys"])
        if buffers := named.get("buffers", {}):
            x, new = fn.apply({}, {name: buffers[name] for name in fn.buffers}, x)
            x = x * buffers["factor"]
            new = buffers | new | {"follows": params["w"].sum(0)}
        out = torch.tanh(x @ params["w"] + params["b"])
        for factor in (*shared, *([] if captured is None else [captured])):
            out = out * factor
        errors = (out.sum(1) - batch["y"]) ** 2
        value = errors.sum() if program.kind == "sum" else errors.mean()
        if program.kind == "weighted":
            value = pa.Weighted((errors * batch["weight"]).sum(), batch["weight"].sum())
        rest = [new] if buffers else []
        rest += [errors] if program.aux else []
        return (value, rest[0] if len(rest) == 1 else tuple(rest)) if rest else value

    optimizer = pa.sgd(0.1, momentum=0.5)
    return pa.make_step(
        loss,
        pa.chain(pa.clip_by_global_norm(1.0), optimizer) if program.clip else optimizer,
        reduction="sum" if program.kind == "sum" else "mean",
        nonfinite="skip" if program.skip else "propagate",
        loss_scale=pa.dynamic_loss_scale(4.0, growth_interval=1) if program.scale else None,
        has_aux=program.aux,
        keys=program.keys,
        noise=program.noise,
        buffers=program.buffers,
        engine=program.engine,
        **options,
    )


Outs = tuple[list[Tensor], list[Tensor]]  # what has a derivative, and the rest
Run = Callable[[Inputs], Outs]


def run_of(program, group):
    """The program as a function: on this rank, or in one process that has the samples of all."""

    def run(given):
        batch, sizes = given.batch, [n for rows in program.rows for n in cut(program, rows)]
        size = None if program.at_once else sizes
        if group is not None:
            mine = slices(program)[dist.get_rank()]
            batch = {name: x[mine] for name, x in batch.items()}
            size, sizes = program.size, cut(program, program.rows[dist.get_rank()])
        step = step_of(program, given.captured, microbatch_size=size, group=group)
        state = step.init(given.params, given.buffers)
        state = state._replace(params=given.params, buffers=given.buffers or ())
        shared = (given.shared,) if program.shared else ()
        info = None
        for _ in range(program.steps):
            if program.stream:
                ends = accumulate(sizes)
                rows = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
                parts = [{name: x[some] for name, x in batch.items()} for some in rows]
                state, info = step.window(state, parts, *shared)
            else:
                state, info = step(state, batch, *shared)
        floats = [*state.params.values(), info.loss]
        rest = [info.applied, info.weight, info.skipped]
        if program.noise:
            rest += info.noise
        if program.buffers:
            floats += [state.buffers[name] for name in ("factor", "running_mean", "running_var")]
            rest.append(state.buffers["flag"])
            if all(program.rows):  # it becomes that of rank 0
                floats.append(state.buffers["follows"])
        return floats, [*rest, state.attempts, state.samples, info.scale]

    return run


def total(floats):
    return torch.stack([(x**2).sum() for x in floats]).sum()


def times(params, s):
    return {name: x * s for name, x in params.items()}


def under_forward_ad(run, given):
    with forward_ad.dual_level():
        params = {k: forward_ad.make_dual(x, torch.ones_like(x)) for k, x in given.params.items()}
        pairs = [forward_ad.unpack_dual(x) for x in run(given._replace(params=params))[0]]
        return [(x, torch.zeros_like(x) if t is None else t) for x, t in pairs]


MEMBERS = torch.tensor([1.0, 1.5, 0.5]).double()
NESTS = {
    "nothing": lambda run, it: run(it),
    "vmap": lambda run, it: vmap(lambda s: run(it._replace(params=times(it.params, s))))(MEMBERS),
    "vmap batch": lambda run, it: vmap(
        lambda s: run(it._replace(batch=it.batch | {"x": it.batch["x"] * s}))
    )(MEMBERS),
    "vmap shared": lambda run, it: vmap(lambda s: run(it._replace(shared=s)))(MEMBERS),
    "vmap captured": lambda run, it: vmap(lambda s: run(it._replace(captured=s)))(MEMBERS),
    "vmap vmap": lambda run, it: vmap(
        lambda s: vmap(lambda t: run(it._replace(params=times(it.params, s), captured=t)))(MEMBERS)
    )(MEMBERS),
    "grad": lambda run, it: grad(lambda p: total(run(it._replace(params=p))[0]))(it.params),
    "grad shared": lambda run, it: grad(lambda s: total(run(it._replace(shared=s))[0]))(it.shared),
    "grad buffers": lambda run, it: grad(
        lambda x: total(run(it._replace(buffers=it.buffers | {"factor": x}))[0])
    )(it.buffers["factor"]),
    "jvp": lambda run, it: jvp(
        lambda p: run(it._replace(params=p))[0], (it.params,), (it.params,)
    ),
    "jvp shared": lambda run, it: jvp(
        lambda s: run(it._replace(shared=s))[0], (it.shared,), (it.shared,)
    ),
    "jvp captured": lambda run, it: jvp(
        lambda s: run(it._replace(captured=s))[0], (it.shared,), (it.shared,)
    ),
    "forward AD": under_forward_ad,
    "vmap of grad": lambda run, it: vmap(
        lambda s: grad(lambda p: total(run(it._replace(params=times(p, s)))[0]))(it.params)
    )(MEMBERS),
    "grad of vmap": lambda run, it: grad(
        lambda p: total(vmap(lambda s: run(it._replace(params=times(p, s)))[0])(MEMBERS))
    )(it.params),
    "jvp of grad": lambda run, it: jvp(
        grad(lambda p: total(run(it._replace(params=p))[0])), (it.params,), (it.params,)
    ),
    "grad of grad": lambda run, it: grad(
        lambda p: total(
            [*grad(lambda q: total(run(it._replace(params=q))[0]))(p).values()]
        )
    )(it.params),
}  # fmt: skip


DERIVATIVES = {name for name in NESTS if {"grad", "jvp", "forward"} & {*name.split()}}


def check(program):
    """What comes on every rank is what comes in one process, and all ranks exchange alike."""
    given = inputs_of(program)
    want = NESTS[program.nest](run_of(program, None), given)
    with exchanging_alike() as seen:
        came = NESTS[program.nest](run_of(program, dist.group.WORLD), given)
    assert seen
    for i, (x, y) in enumerate(zip(tree_leaves(came), tree_leaves(want), strict=True)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), (i, x, y)
        assert torch.equal(x.isfinite(), y.isfinite()), (i, x, y)
        x, y = (z.double().nan_to_num(0.0, 0.0, 0.0) for z in (x, y))
        assert (x - y).norm() <= BOUND * max(1.0, float(y.norm())), (i, x, y)


@st.composite
def programs(draw, world):
    """Programs that have a meaning in one process."""
    nest = draw(st.sampled_from([*NESTS]))
    derives = nest in DERIVATIVES
    rows = draw(st.tuples(*[st.sampled_from([3, 0, 1, 2, 4])] * world).filter(any))
    kind = draw(st.sampled_from(["mean", "weighted", "sum"]))
    buffers = "pooled" if "buffers" in nest else draw(st.sampled_from([None, "pooled", "freeze"]))
    # After a cut, running statistics come out of a Function, and torch does not differentiate them.
    size = None if derives and buffers else draw(st.sampled_from([None, 1, 2]))
    bad = draw(st.sampled_from(["", "", "", "nan", "inf", "weight"]))
    if derives and buffers and bad != "weight":
        bad = ""
    train = "batch" not in nest and 1 not in rows and size is None and draw(st.booleans())
    stream = not derives and draw(st.booleans())
    at_once = bool(derives and buffers and not train)
    return Program(
        nest=nest,
        rows=rows,
        size=size,
        kind=kind,
        bad=bad,
        bad_rank=draw(st.integers(0, world - 1)),
        steps=draw(st.sampled_from([1, 1, 2])),
        stream=stream,
        shared="shared" in nest or draw(st.booleans()),
        aux=not (derives and bad) and draw(st.booleans()),
        keys=not stream and draw(st.booleans()),
        noise=kind != "sum" and not at_once and draw(st.booleans()),
        scale=draw(st.booleans()),
        skip=draw(st.booleans()),
        clip=draw(st.booleans()),
        buffers=buffers,
        train=train,
        at_once=at_once,
        engine=draw(st.sampled_from(["auto", "func"])),
    )


def named(world):
    """What was wrong once, with all that goes with it, on so many ranks."""
    full, first, last = (2,) * world, (0,) + (2,) * (world - 1), (2,) * (world - 1) + (0,)
    return {
        "both are fine": Program("vmap", full),
        "one is not finite": Program("vmap", full, bad="nan", bad_rank=1),
        "another is not finite": Program("vmap", full, bad="nan"),
        "it is fine again": Program("vmap", full),
        "no rows": Program("vmap", last),
        "no rows, cut": Program("vmap", first, size=1),
        "no rows, Weighted": Program("vmap", last, kind="weighted"),
        "no rows, frozen buffers": Program("vmap", last, buffers="freeze"),
        "no rows, pooled buffers": Program("vmap", first, buffers="pooled", train=True),
        "no rows, noise": Program("vmap", last, noise=True, scale=True),
        "no rows, and a factor that the loss captures": Program("vmap captured", last),
        "no microbatches of what is mapped": Program("vmap batch", first, stream=True),
        "no rows in one vmap of two": Program("vmap vmap", last, skip=True, bad="inf"),
        "a tangent by what the loss captures": Program("jvp captured", last),
        "plain forward AD": Program("forward AD", last, steps=2),
        "frozen statistics": Program("grad", full, buffers="freeze", at_once=True, steps=2),
        "statistics of eval": Program("grad", full, buffers="pooled", at_once=True, steps=2),
        "their tangents": Program("jvp", full, buffers="pooled", at_once=True, steps=2),
        "their members": Program("vmap of grad", last, buffers="pooled", at_once=True),
        "by buffers that stay": Program("grad buffers", full, buffers="freeze", at_once=True),
        "by buffers of rank 0": Program("grad buffers", full, buffers="pooled", at_once=True),
        "by what is shared": Program("grad shared", first, shared=True),
        "twice by parameters": Program("grad of grad", last, steps=2, keys=True),
        "a skipped share": Program("grad", full, bad="inf", skip=True),
        "rows of no weight": Program("grad", full, kind="weighted", bad="weight", bad_rank=1),
        "no cotangent of a gradient": Program("grad", full, kind="sum", bad="inf", clip=True),
    }


@pytest.mark.slow
@on_ranks(2, 3)
def test_programs_that_were_wrong_once_are_those_of_one_process(rank, world):
    for name, program in named(world).items():
        try:
            check(program)
        except BaseException as error:
            error.add_note(f"{name}: {program}")
            raise


@pytest.mark.slow
@on_ranks(2, 3)
@in_step()
@given(data=st.data())
def test_any_program_of_steps_is_that_of_one_process(rank, world, data):
    check(data.draw(programs(world)))
