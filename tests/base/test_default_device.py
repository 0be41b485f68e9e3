"""What is made beside a tensor is made where that is, not where torch makes tensors by default.

With one device that cannot be seen, unless the default is the device that holds no numbers.
"""

from typing import Any

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests import optimizers
from tests.calls import ENGINES, NONFINITE
from tests.draws import generator


pytestmark = [pytest.mark.purity, pytest.mark.promise("documented")]
KEY = pa.key(3)
KEYS = pa.fold_in(KEY, torch.arange(4))
PARAMS = {
    "w": torch.randn(3, 2, generator=generator(0)),
    "large": torch.randn(512, 513, generator=generator(1)) * 2**-9,
    "narrow": torch.ones(2, dtype=torch.bfloat16),
}
X = torch.randn(5, 3, generator=generator(2))
BUFFERS = {"mean": torch.zeros(2), "seen": torch.tensor(0)}


def mean(params, x):
    out = x @ params["w"] + params["narrow"].float() * params["large"][0, 0]
    return (out**2).mean() + params["large"].mean()


def weighted(params, x):
    """By a number of Python, and by a tensor."""
    weight = len(x) if len(x) == 2 else (x == x).sum() / x.shape[-1]
    return pa.Weighted(mean(params, x) * len(x), weight)


def with_aux(params, x):
    return mean(params, x), {"n": 1, "f": 0.5, "x": x.sum()}


def of_row(params, x):
    return weighted(params, x).total


def buffered(params, x, buffers, keys):
    x = pa.dropout(x, 0.25, keys)
    new = {"mean": buffers["mean"] + x.sum(), "seen": buffers["seen"] + 1}
    return mean(params, x) + buffers["mean"].sum(), new


def stream(acc, parts, **options):
    state = acc.init(PARAMS)
    for part in X.split(parts):
        state = acc.update(state, PARAMS, part, **options)
    return state, acc.finalize(acc.merge(state, acc.init(PARAMS)))


def steps(streamed=False, **options):
    """Two steps from a state that was made before."""
    buffers = BUFFERS if "buffers" in options else None
    step = pa.make_step(**{"microbatch_size": 2, "optimizer": pa.adamw(0.1)} | options)
    first = step.init(PARAMS, buffers=buffers, seed=4)

    def run():
        state, infos = first, list[Any]()
        for _ in range(2):
            if streamed:
                window = step.begin(state)
                for part in X.split(2):
                    window = step.update(state, window, part)
                state, info = step.apply(state, window)
            else:
                state, info = step(state, X)
            infos.append(info)
        return step.init(PARAMS, buffers=buffers, seed=4), state, infos

    return run


def optimized(kind):
    optimizer, params, grads = (
        optimizers.make_optimizer(kind),
        optimizers.make_params(),
        optimizers.make_params(1),
    )
    state = optimizer.init(params)
    return lambda: [optimizer.apply(grads, *optimizer.apply(grads, state, params)[::-1])]


def scaled(loss_scale):
    state, flags = loss_scale.init("cpu"), torch.tensor([True, False])

    def run():
        states = [state]
        for flag in flags:
            states.append(loss_scale.update(states[-1], flag))
        return states

    return run


CALLS = {
    "fold_in": lambda: lambda: [pa.fold_in(KEY, 5), pa.fold_in(KEYS, 2)],
    "split_key": lambda: lambda: pa.split_key(KEYS, 3),
    "uniform": lambda: lambda: [pa.uniform(KEYS, (2, 3)), pa.uniform(KEY, (), torch.float64)],
    "normal": lambda: lambda: [pa.normal(KEYS, (5,)), pa.normal(KEY, (2,), torch.float16)],
    "dropout": lambda: lambda: pa.dropout(X[:4], 0.5, KEYS),
    "add_noise": lambda: lambda: pa.add_noise(PARAMS, 2.0, KEY),
    "norm": lambda: lambda: [pa.global_norm(PARAMS), pa.all_finite([*PARAMS.values(), X[:0]])],
    "running noise scale": lambda: lambda: pa.running_noise_scale().init(PARAMS),
    "average": lambda: (
        lambda: (average := pa.ema(lambda n: 1 / (2 + n))).update(
            average.update(average.init(PARAMS), PARAMS), PARAMS
        )
    ),
    "stack": lambda: lambda: pa.unstack(pa.stack([PARAMS, PARAMS])),
    "dynamic loss scale": lambda: scaled(pa.dynamic_loss_scale(8.0, growth_interval=1)),
    "static loss scale": lambda: scaled(pa.static_loss_scale(8.0)),
    "steps": lambda: steps(loss_fn=mean),
    "streamed steps": lambda: steps(loss_fn=weighted, streamed=True),
    "steps with aux": lambda: steps(loss_fn=with_aux, has_aux=True, aux_reduction="mean"),
    "steps with noise": lambda: steps(loss_fn=weighted, noise=True),
    "donated steps": lambda: steps(loss_fn=mean, donate=True, optimizer=pa.sgd(0.1)),
    "skipping steps": lambda: steps(
        loss_fn=lambda params, x: mean(params, x / (x[:, 0] != X[0, 0]).all()),
        nonfinite="skip",
        check=False,
    ),
    "scaled steps": lambda: steps(
        loss_fn=mean,
        loss_scale=pa.dynamic_loss_scale(4.0),
        policy=pa.Policy(compute=torch.bfloat16),
        optimizer=pa.chain(pa.clip_by_global_norm(0.1), pa.sgd(pa.cosine_decay(0.1, 9), 0.9)),
    ),
    "buffers and keys": lambda: steps(loss_fn=buffered, buffers="sequential", keys=True),
    "frozen buffers": lambda: steps(loss_fn=buffered, buffers="freeze", keys=True, streamed=True),
    "noise scale": lambda: (
        lambda: pa.noise_scale(stream(pa.accumulator(mean, squares=True), [2, 2, 1])[0])
    ),
    "concat of samples": lambda: lambda: pa.per_sample_grad(of_row, metrics="norm")(PARAMS, X),
    "clipped sum": lambda: lambda: pa.clipped_sum(of_row, 0.1, chunk_size=2)(PARAMS, X),
    "no samples": lambda: lambda: pa.clipped_sum(of_row, 0.1)(PARAMS, X[:0]),
}
OWN_OPTIMIZERS = [kind for kind in optimizers.KINDS if not kind.startswith("from_torch")]
for kind in OWN_OPTIMIZERS:
    CALLS[f"optimizer {kind}"] = lambda kind=kind: optimized(kind)
for engine in ENGINES:
    for nonfinite in NONFINITE:
        options = {"engine": engine, "nonfinite": nonfinite}
        for loss in (mean, weighted):
            named = f"{loss.__name__}-{engine}-{nonfinite}"
            CALLS[f"grad-{named}"] = lambda loss=loss, options=options: (
                lambda: [
                    pa.grad_and_value(loss, microbatch_size=size, **options)(PARAMS, X)
                    for size in (None, 2, [1, 4])
                ]
            )
            CALLS[f"stream-{named}"] = lambda loss=loss, options=options: (
                lambda: [
                    stream(pa.accumulator(loss, squares=True, **options), [2, 3], donate=donate)
                    for donate in (False, True)
                ]
            )
    CALLS[f"no rows-{engine}"] = lambda engine=engine: (
        lambda: pa.grad_and_value(mean, microbatch_size=2, engine=engine)(PARAMS, X[:0])
    )
for reduce in ("sum", "mean", "moments"):
    for by in (None, "normalize", "sign"):
        CALLS[f"samples-{reduce}-{by}"] = lambda reduce=reduce, by=by: (
            lambda: stream(
                pa.per_sample_accumulator(
                    weighted, reduce=reduce, transform=by, squares=True, keep_batch_dim=True
                ),
                [2, 3],
            )
        )
for word in ("sum", "mean", "stack", "last"):
    CALLS[f"aux-{word}"] = lambda word=word: (
        lambda: [
            transform(
                lambda params, x: (mean(params, x), {"x": x.sum()}),
                has_aux=True,
                microbatch_size=2,
                aux_reduction=word,
            )(PARAMS, X)
            for transform in (pa.grad, pa.value)
        ]
    )


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_is_not_asked(name):
    want, call = CALLS[name]()(), CALLS[name]()
    with torch.device("meta"):
        got = call()
    assert_trees_bitwise_equal(got, want)
