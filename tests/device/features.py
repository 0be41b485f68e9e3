"""Every feature, on the device: nothing waits for it, nothing leaves it, no argument is changed.

One table of cases. What is documented to wait is a table of its own, and does wait.
"""

import re
import tempfile
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pureaccum as pa
from pureaccum.testing import unchanged
from tests.device.software import nothing_waits
from tests.device.world import call, make_batch, make_params, mean, normed, weighted


class Case(NamedTuple):
    """A call of a feature.

    Attributes:
        call: What is called.
        args: ``args()`` gives what it is called with, on the device.
        given_up: How many of the arguments, from the first on, it may write to.
        draws: Whether the loss draws from torch's generator.
    """

    call: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    given_up: int = 0
    draws: bool = False


ENGINES, DONATE, SIZE = ("func", "autograd"), (False, True), 5
HALF = {"policy": pa.Policy(compute=torch.float16), "loss_scale": pa.dynamic_loss_scale(8.0)}
CASES = {}
WAITS = {}


# Steps ------------------------------------------------------------------------------------------


def of_step(loss, optimizer, **options):
    step = pa.make_step(loss, optimizer(), **{"microbatch_size": SIZE, **options})
    given_up = int(options.get("donate", False))
    return Case(step, lambda: (step.init(make_params()), make_batch()), given_up)


def of_stream(donate, **options):
    step = pa.make_step(mean, pa.adamw(1e-3), donate=donate, **options)

    def stream(state, batch):
        window = step.begin(state)
        for part in pa.microbatches(batch, SIZE):
            window = step.update(state, window, part)
        return step.apply(state, window)

    return Case(stream, lambda: (step.init(make_params()), make_batch()), given_up=int(donate))


def of_rate(rate):
    """An optimizer with a learning rate that is made when it is asked for."""
    return lambda: pa.adamw(rate())


WARM = pa.join_schedules([pa.linear_warmup(1e-2, 2), pa.cosine_decay(1e-2, 9)], [2])
OPTIMIZERS = {
    "sgd": lambda: pa.sgd(0.1),
    "momentum": lambda: pa.sgd(0.1, 0.9),
    "nesterov": lambda: pa.sgd(0.1, 0.9, nesterov=True),
    "dampened": lambda: pa.sgd(0.1, 0.9, 0.5),
    "fused momentum": lambda: pa.sgd(0.1, 0.9, fused=True),
    "adam": lambda: pa.adam(1e-3, amsgrad=True),
    "adamw": lambda: pa.adamw(1e-3),
    "fused adamw": lambda: pa.adamw(1e-3, fused=True),
    "clipped": lambda: pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-3, fused=True)),
    "partition": lambda: pa.partition(
        {"weight": pa.adamw(1e-3), "rest": pa.sgd(0.1)},
        lambda path: "weight" if "weight" in path else "rest",
    ),
    "schedule": of_rate(lambda: WARM),
    "schedule of a user": of_rate(lambda: lambda count: 0.1 / (1 + count)),
    "schedule of a number on the host": of_rate(lambda: pa.cosine_decay(torch.tensor(1e-3), 9)),
    "rate on the device": of_rate(lambda: torch.full((), 1e-3, device="cuda")),
    "rate on the host": of_rate(lambda: torch.tensor(1e-3)),
}
for name, donate in product(OPTIMIZERS, DONATE):
    CASES[f"{name}, {donate=}"] = partial(
        of_step, weighted, OPTIMIZERS[name], donate=donate, **HALF
    )
for name, donate in product(("adamw", "clipped"), DONATE):
    CASES[f"{name}, autograd, {donate=}"] = partial(
        of_step, weighted, OPTIMIZERS[name], donate=donate, engine="autograd", **HALF
    )
for nonfinite, engine, donate in product(("propagate", "skip"), ENGINES, DONATE):
    options = {"nonfinite": nonfinite, "engine": engine, "donate": donate}
    CASES[f"step, {nonfinite}, {engine}, {donate=}"] = partial(
        of_step, mean, OPTIMIZERS["adamw"], **options
    )
    CASES[f"stream, {nonfinite}, {engine}, {donate=}"] = partial(of_stream, **options)


def of_apply(optimizer):
    """An optimizer by itself, whose gradients are not its own."""
    made, params = optimizer(), make_params()
    grads = optree.tree_map(torch.ones_like, params)
    return Case(made.apply, lambda: (grads, made.init(params), params))


for name, optimizer in OPTIMIZERS.items():
    CASES[f"{name}, apply"] = partial(of_apply, optimizer)


def keyed(params, batch, keys):
    return mean(params, {**batch, "x": pa.dropout(batch["x"], 0.3, keys)})


def counted(params, batch):
    """Its weight is a number of the host."""
    return pa.Weighted(mean(params, batch) * len(batch["x"]), len(batch["x"]))


def several(params, batch):
    """Two means, over samples and over a count on the device."""
    positive = (batch["x"][:, 0] > 0).sum()
    return counted(params, batch) + 0.5 * pa.Weighted(total(params, batch), positive)


def total(params, batch):
    return call(params, batch["x"]).square().sum()


FORMS = {
    "weight on the host": (counted, {}),
    "sum of Weighted": (several, {}),
    "sum": (total, {"reduction": "sum"}),
    "noise": (mean, {"noise": True}),
    "keys": (keyed, {"keys": True}),
    "static scale": (mean, {"loss_scale": pa.static_loss_scale(8.0)}),
    "hysteresis": (mean, {"loss_scale": pa.dynamic_loss_scale(8.0, hysteresis=2)}),
    "autocast": (mean, {**HALF, "policy": pa.Policy(autocast=torch.float16)}),
    "bfloat16": (mean, {"policy": pa.Policy(compute=torch.bfloat16)}),
    "whole batch": (mean, {"microbatch_size": None}),
    "auto": (mean, {"microbatch_size": "auto"}),
}
for name, engine in product(FORMS, ENGINES):
    loss, options = FORMS[name]
    CASES[f"{name}, {engine}"] = partial(
        of_step, loss, OPTIMIZERS["adamw"], engine=engine, **options
    )

AUX = {
    "concat": lambda batch: batch["x"],
    "mean": lambda batch: batch["x"].mean(0),
    "sum": lambda batch: batch["x"].sum(0),
    "max": lambda batch: batch["x"].amax(0),
    "last": lambda batch: batch["x"].sum(0),
}
for reduction, aux in AUX.items():
    CASES[f"aux, {reduction}"] = partial(
        of_step,
        lambda params, batch, aux=aux: (mean(params, batch), {"aux": aux(batch)}),
        OPTIMIZERS["sgd"],
        has_aux=True,
        aux_reduction=reduction,
    )


def of_buffers(how, engine):
    fn = normed()

    def loss(params, batch, buffers):
        out, new = fn.apply(params, buffers, batch["x"])
        return (out - batch["y"]).square().mean(), new

    options = {"buffers": how, "microbatch_size": 6, "engine": engine, "check": False}
    step = pa.make_step(loss, pa.sgd(0.1), **options)

    def given():
        batch = make_batch()
        del batch["mask"]
        return step.init(fn.params, buffers=fn.buffers), batch

    return Case(step, given, draws=True)


for how, engine in product(("freeze", "sequential", "pooled"), ENGINES):
    CASES[f"buffers, {how}, {engine}"] = partial(of_buffers, how, engine)


# Transforms, and what is done with the sums -------------------------------------------------------


def given():
    return make_params(), make_batch()


def one(params, row):
    return (call(params, row["x"]) - row["y"]).square().mean()


def accumulated(params, batch):
    acc = pa.accumulator(weighted, nonfinite="skip", squares=True)
    state = acc.init(params)
    for part in pa.microbatches(batch, SIZE):
        state = acc.update(state, params, part, donate=True)
    both = acc.merge(state, acc.update(acc.init(params), params, batch))
    return acc.finalize(both), pa.noise_scale(state), pa.unstack(pa.stack([state, state]))


def of_samples(params, batch):
    acc = pa.per_sample_accumulator(one, chunk_size=SIZE, transform="normalize", squares=True)
    sums = acc.update(acc.init(params), params, batch)
    return acc.finalize(sums), pa.noise_scale(sums, like=params)


def private(params, batch):
    clipped, aside = pa.clipped_sum(one, 1.0, chunk_size=SIZE)(params, batch)
    return pa.add_noise(clipped, 1.0, pa.key(0, "cuda")), aside


def averaged(params, batch):
    step = pa.make_step(mean, pa.sgd(0.1), microbatch_size=SIZE, noise=True)
    _, info = step(step.init(params), batch)
    running = pa.running_noise_scale()
    return running.read(running.update(running.init(params), info.noise))


def scheduled(params, batch):
    count = torch.ones((), dtype=torch.int64, device="cuda")
    rates = (
        pa.step_decay(0.1, 3),
        pa.step_decay(0.1, [2, 5]),
        pa.exponential_decay(0.1, 0.5, 3, end=0.01),
        pa.one_cycle(0.1, 9, three_phase=True),
    )
    return [rate(count) for rate in rates]


def smoothed(params, batch):
    averages = []
    for decay in (0.9, lambda n: (1 + n) / (10 + n)):
        average, tree = pa.ema(decay), {**params, "half": batch["x"].half(), "n": batch["x"].long()}
        first = average.update(average.init(tree), tree)
        averages += [first, average.update(first, tree, batch["x"].mean() > 0)]
    return averages


def mapped(params, batch):
    step = pa.make_step(mean, pa.adamw(1e-3), microbatch_size=SIZE)
    states = pa.stack([step.init(params), step.init(params)])
    return torch.func.vmap(lambda state: step(state, batch))(states)


def learned_rate(params, batch):
    def after(rate):
        step = pa.make_step(mean, pa.adamw(rate), microbatch_size=11)
        state, _ = step(step.init(params), batch)
        return mean(state.params, batch)

    return torch.func.grad(after)(torch.full((), 1e-3, device="cuda"))


def hessian_product(params, batch):
    gradient = pa.grad(mean, microbatch_size=SIZE)
    return torch.func.jvp(lambda p: gradient(p, batch), (params,), (make_params(),))[1]


def coupled(params, batch):
    """All pairs of samples, plain code over microbatches."""
    z = pa.microbatch(call, microbatch_size=SIZE)(params, batch["x"])
    centre = pa.microbatch(
        lambda z: pa.Weighted(z.sum(), len(z)), microbatch_size=SIZE, batch_argnums=0, reduce="sum"
    )(z)
    return (z[:, None] - z - centre).square().mean()


def reduced(params, batch, reduction):
    options = {"microbatch_size": SIZE, "reduce": reduction}
    return pa.microbatch(lambda p, b: call(p, b["x"]).mean(0), **options)(params, batch).sum()


def joined(params, batch):
    step = pa.make_step(weighted, pa.sgd(0.1))
    state = step.init(params)
    first, second = (
        step.update(state, step.begin(state), part) for part in pa.microbatches(batch, 11)
    )
    return step.apply(state, step.merge(first, second))


def backward(params, batch):
    own = {name: x.clone().requires_grad_() for name, x in params.items()}
    coupled(own, batch).backward()
    return [x.grad for x in own.values()]


@cache
def loss_of_normed():
    """Made once: a loss is observed when it is new."""
    fn = normed(microbatch_size=SIZE)

    def loss(params, batch):
        out, new = fn.apply(params, fn.buffers, batch["x"])
        return (out - batch["y"]).square().mean(), new

    return fn, loss


def normed_whole(params, batch):
    fn, loss = loss_of_normed()
    return pa.grad(loss, has_aux=True)(fn.params, batch)


def dropped(params, x):
    return nn.functional.dropout(call(params, x), 0.3)


def rematerialised(params, batch):
    return pa.remat(dropped)(params, batch["x"]).square().mean()


def checkpointed(params, batch):
    return checkpoint(dropped, params, batch["x"], use_reentrant=False).square().mean()


def reported(params, batch):
    step = pa.make_step(mean, pa.adamw(1e-3), microbatch_size=SIZE)
    return pa.memory_report(step, step.init(params), batch) and ()


def scanned(params, batch):
    def chunk(params, before, x):
        out = call(params, x + before.tanh())
        return before + x.mean(0), out.square().sum()

    run = pa.scan(chunk, chunk_size=SIZE, reduce="sum")
    return run(params, torch.zeros_like(batch["x"][0]), batch["x"])[1]


FUNCTIONS = {
    "grad and value": pa.grad_and_value(mean, microbatch_size=SIZE),
    "sizes": pa.grad(weighted, microbatch_size=[5, 17]),
    "value": pa.value(weighted, microbatch_size=SIZE),
    "float64": pa.grad(mean, microbatch_size=SIZE, dtype=torch.float64),
    "gradients of rows": torch.func.grad(coupled, argnums=1),
    "scan": torch.func.grad(scanned),
    "accumulator": accumulated,
    "samples": of_samples,
    "private": private,
    "running noise": averaged,
    "schedules": scheduled,
    "averages of parameters": smoothed,
    "vmap of a step": mapped,
    "grad of a step": learned_rate,
    "hessian product": hessian_product,
    "microbatch, pa.grad": pa.grad(coupled),
    "microbatch, torch.func.grad": torch.func.grad(coupled),
    "microbatch, backward": backward,
    "windows": joined,
    "memory report": reported,
}
for name, function in FUNCTIONS.items():
    CASES[name] = partial(Case, function, given)
for reduction in ("stack", "mean", "sum", "max", "min", "last"):
    CASES[f"microbatch, {reduction}"] = partial(
        Case, torch.func.grad(partial(reduced, reduction=reduction)), given
    )
SAMPLES = (
    {"reduce": "concat"},
    {"reduce": "sum"},
    {"reduce": "moments"},
    {"reduce": "mean", "transform": "normalize"},
    {"metrics": "norm"},
)
for options, engine in product(SAMPLES, ("vmap", "autograd")):
    CASES[f"per sample, {options}, {engine}"] = partial(
        Case, pa.per_sample_grad(one, chunk_size=SIZE, engine=engine, **options), given
    )
for engine in ENGINES:
    CASES[f"remat, {engine}"] = partial(
        Case, pa.grad(rematerialised, microbatch_size=SIZE, engine=engine), given, draws=True
    )
CASES["batch norm, whole"] = partial(Case, normed_whole, given, draws=True)
CASES["checkpoint of torch, autograd"] = partial(
    Case, pa.grad(checkpointed, microbatch_size=SIZE, engine="autograd"), given, draws=True
)


# What is documented to wait -----------------------------------------------------------------------


def saved(params, batch):
    with tempfile.TemporaryDirectory() as folder:
        pa.save(f"{folder}/params", params)
        return pa.load(f"{folder}/params", like=params)


def compared(params, batch):
    assert pa.testing.check_accumulation(weighted, params, batch)


WAITS["nonfinite raise"] = partial(of_step, mean, OPTIMIZERS["sgd"], nonfinite="raise")
for name in ("AdamW", "RMSprop"):
    WAITS[f"from_torch, {name}"] = partial(
        of_step, mean, partial(pa.from_torch, getattr(torch.optim, name), lr=1e-3)
    )
WAITS["save and load"] = partial(Case, saved, given)
WAITS["check_accumulation"] = partial(Case, compared, given)
WAITS["a sum of Weighted that skips"] = partial(
    of_step, several, OPTIMIZERS["sgd"], nonfinite="skip"
)


# What would wait and should not: a defect, which goes from here with it.
# The tests ----------------------------------------------------------------------------------------


RATE = re.compile(r"\.lr(\['\w+'\])?$")  # a partition has one of each part


def away(tree):
    """What lies on the host, but for learning rates, which kernels take from there."""
    accessors, found, _ = optree.tree_flatten_with_accessor(tree, namespace="pureaccum")
    return [
        accessor.codify("it")
        for accessor, x in zip(accessors, found, strict=True)
        if isinstance(x, Tensor) and not x.is_cuda and not RATE.search(accessor.codify(""))
    ]


def checked(case):
    """What a call gives, and what it did on the device, once nothing is looked at anew."""
    case.call(*case.args())
    args = case.args()
    with unchanged(*args[case.given_up :], draws=case.draws), nothing_waits() as seen:
        out = case.call(*args)
    return out, seen


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_and_nothing_leaves_the_device(name):
    case = CASES[name]()
    out, seen = checked(case)
    assert not away(out)
    assert len(seen.copies) <= 1  # the learning rate


@pytest.mark.parametrize("name", WAITS)
def test_what_is_documented_to_wait_does(name):
    case = WAITS[name]()
    out = case.call(*case.args())
    assert name.startswith("from_torch") or not away(out)  # from_torch keeps torch's own counts
    with pytest.raises(RuntimeError, match="synchronizing"), nothing_waits():
        case.call(*case.args())
