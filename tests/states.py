"""One state of every kind that the package makes, with numbers in it."""

import torch
from torch import nn

import pureaccum as pa
from tests import optimizers
from tests.draws import generator


def batch_of(rows, seed=0):
    random = generator(seed)
    return {
        "x": torch.randn(rows, 3, generator=random),
        "y": torch.randn(rows, 2, generator=random),
    }


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)  # the same in every process
    FN = pa.functional(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


def dropped(params, batch, buffers, keys):
    """BatchNorm, and dropout by the sample."""
    out, new = FN.apply(params, buffers, batch["x"])
    out = pa.dropout(out, 0.25, keys)
    return ((out - batch["y"]) ** 2).mean(), new


def full_step(**options):
    """A step with everything that a state may hold."""
    return pa.make_step(
        dropped,
        pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(pa.linear_warmup(0.1, 3), amsgrad=True)),
        microbatch_size=4,
        # grows at every other step until it overflows: its trackers are never all zero
        loss_scale=pa.dynamic_loss_scale(2.0**126, growth_interval=2, hysteresis=2),
        nonfinite="skip",
        buffers="pooled",
        keys=True,
        check=False,  # each microbatch is normalised by itself
        **options,
    )


def first_state(step):
    return step.init(FN.params, FN.buffers, seed=7)


def a_row(w, x):
    return ((x["x"] @ w - x["y"]) ** 2).mean()


def _trained():
    step = full_step()
    return step(first_state(step), batch_of(10))[0]


def _window():
    step = full_step()
    state = first_state(step)
    return step.update(state, step.begin(state), batch_of(3))


def _half_full(**options):
    acc, w = pa.accumulator(a_row, **options), torch.ones(3, 2)
    return acc.update(acc.init(w), w, batch_of(3))


def _of_samples(reduce):
    acc, w = pa.per_sample_accumulator(a_row, chunk_size=2, reduce=reduce), torch.ones(3, 2)
    return acc.update(acc.init(w), w, batch_of(3))


def _optimized(kind):
    optimizer, params = optimizers.make_optimizer(kind), optimizers.make_params()
    grads = optimizers.make_params(1)
    return optimizer.apply(grads, optimizer.init(params), params)


def _noisy():
    step = pa.make_step(a_row, pa.sgd(0.1), microbatch_size=2, noise=True)
    running = pa.running_noise_scale()
    state = step.init(torch.ones(3, 2))
    _, info = step(state, batch_of(6))
    averages = running.update(running.init(state.params), info.noise)
    return {"info": info, "averages": averages, "scale": running.read(averages)}


def _averaged():
    average, tree = pa.ema(0.9), {"params": FN.params, "buffers": FN.buffers}
    return average.update(average.init(tree), tree)


STATES = {
    "first": lambda: first_state(full_step()),
    "trained": _trained,
    "window": _window,
    "accumulated": _half_full,
    "squares": lambda: _half_full(squares=True),
    "sum of samples": lambda: _of_samples("sum"),
    "moments of samples": lambda: _of_samples("moments"),
    "moments": lambda: pa.per_sample_grad(a_row, reduce="moments")(torch.ones(3, 2), batch_of(3)),
    "noise": _noisy,
    "ema": _averaged,
    "loss scale": lambda: pa.dynamic_loss_scale().init(),
    "key": lambda: pa.split_key(pa.key(3), 2),
    "stacked": lambda: pa.stack([_trained(), first_state(full_step())]),
} | {name: lambda name=name: _optimized(name) for name in optimizers.KINDS}
