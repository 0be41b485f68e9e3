"""Every public record prints itself in at most 600 characters, and says what it is made of.

It shows no address, no functools.partial, and no numbers of a tensor but those that stand alone.
"""

import inspect
import re

import pytest
import torch

import pureaccum as pa


pytestmark = [pytest.mark.laws, pytest.mark.promise("pages")]
HIDDEN = re.compile(r"0x[0-9a-f]|functools|partial\(|tensor\(|<locals>")
NET = torch.nn.Sequential(torch.nn.Linear(300, 100), torch.nn.ReLU(), torch.nn.Linear(100, 83))
FN = pa.functional(NET)
BATCH = torch.ones(4, 300)


def loss(params, batch):
    return FN.apply(params, (), batch)[0].square().mean()


def squares(params, batch):
    return (params["w"] * batch).square().mean()


OPTIMIZER = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(pa.cosine_decay(1e-3, 100)))
STEP = pa.make_step(loss, OPTIMIZER, microbatch_size=2, loss_scale=pa.dynamic_loss_scale())
STATE = STEP.init(FN.params)
ACC = pa.accumulator(loss)
W = {"w": torch.ones(300)}
SOLVER = pa.curvature.cg(lambda v: v, rtol=1e-3)
PROGRAM = {
    "Functional(Sequential, 4 parameters, 38,483 numbers)": FN,
    "Functional(Linear, 2 parameters, 6 numbers, microbatch_size=4)": pa.functional(
        torch.nn.Linear(2, 2), microbatch_size=4
    ),
    "adamw(lr=0.001)": pa.adamw(1e-3),
    "adamw(lr=0.002, weight_decay=0.1)": pa.adamw(2e-3, weight_decay=0.1),
    "sgd(lr=float64[] on meta)": pa.sgd(torch.tensor(0.1, dtype=torch.float64, device="meta")),
    "from_torch(Muon, lr=0.02)": pa.from_torch(torch.optim.Muon, lr=0.02),
    "chain(clip_by_global_norm(1.0), adamw(lr=cosine_decay(0.001, 100)))": OPTIMIZER,
    "partition({'a': sgd(lr=0.1), 'b': adam(lr=0.001)}, str)": pa.partition(
        {"a": pa.sgd(0.1), "b": pa.adam()}, str
    ),
    "sam(sgd(lr=0.001))": pa.sam(pa.sgd()),
    "lbfgs(lr=1.0, max_iter=5)": pa.lbfgs(max_iter=5),
    "ema(0.9)": pa.ema(0.9),
    "dynamic_loss_scale(init_scale=8.0)": pa.dynamic_loss_scale(8.0),
    "running_noise_scale(decay=0.99)": pa.running_noise_scale(),
    "accumulator(loss)": ACC,
    "per_sample_accumulator(loss, chunk_size=2)": pa.per_sample_accumulator(loss, chunk_size=2),
    "make_step(loss, chain(clip_by_global_norm(1.0), adamw(lr=cosine_decay(0.001, 100))), "
    "microbatch_size=2, loss_scale=dynamic_loss_scale(init_scale=65536.0))": STEP,
    "AccumState(grads=4 tensors of 38,483 numbers, total=0.0, weight=0.0, microbatches=0, "
    "skipped=0, nonfinite=0, weighted=0, squares=())": ACC.init(FN.params),
    "Weighted(total=2.5, weight=3)": pa.Weighted(torch.tensor(2.5), 3),
    "Operator(product=<lambda>, like=1 tensor of 300 numbers)": pa.curvature.Operator(
        lambda v: v, W
    ),
    "Cut(order=int64[2], sizes=[2])": pa.cut([1, 2], max_tokens=3),
    "cg(<lambda>, rtol=0.001)": SOLVER,
}
# Results are not written out here: what they show is tested above.
RESULTS = [
    STATE,
    STEP(STATE, BATCH)[1],
    STEP.begin(STATE),
    pa.ema(0.9).init(FN.params),
    SOLVER.init(W),
    pa.curvature.trace(lambda v: v, W, key=pa.key(0), samples=3),
    pa.per_sample_grad(squares, reduce="moments")(W, BATCH),
    pa.noise_scale(pa.per_sample_grad(squares, reduce="moments")(W, BATCH)),
    pa.memory_report(STEP, STATE, BATCH),
    pa.memory_report(STEP, STATE, BATCH).measured,
    pa.Weighted(torch.tensor(2.5), 3) + pa.Weighted(torch.tensor(2.5), torch.tensor(2)),
    pa.Policy(compute=torch.bfloat16),
    pa.Reducer(init=len, update=len, merge=len, finalize=len),
    pa.testing.check_accumulation(squares, W, BATCH),
]


GONE = dict.fromkeys(
    ("sam(sgd(lr=0.001))", "lbfgs(lr=1.0, max_iter=5)"), pytest.mark.given_up("lbfgs and sam")
)


@pytest.mark.parametrize("text", [pytest.param(it, marks=GONE.get(it, ())) for it in PROGRAM])
def test_a_record_prints_the_call_that_made_it_or_what_it_holds(text):
    assert repr(PROGRAM[text]) == text


@pytest.mark.parametrize("record", [*PROGRAM.values(), *RESULTS], ids=lambda it: type(it).__name__)
def test_a_record_is_short_and_hides_numbers(record):
    text = repr(record)
    assert len(text) <= 600
    assert not HIDDEN.search(text), text


def test_a_long_record_is_cut():
    text = repr(pa.chain(*[pa.clip_by_global_norm(1.0)] * 40, pa.sgd()))
    assert len(text) == 600
    assert text.endswith(" …")


def test_every_public_record_has_such_a_text():
    """Strategies are left out: hypothesis has to print what it found whole."""
    records = [
        it
        for module in (pa, pa.curvature, pa.distributed, pa.testing)
        for it in vars(module).values()
        if inspect.isclass(it) and issubclass(it, tuple) and it.__module__.startswith("pureaccum")
    ]
    assert len(records) > 15
    plain = {it.__name__ for it in records if it.__repr__.__module__ == "collections"}
    assert plain == {"Memory", "MemoryReport", "Policy", "Leaf", "Diagnosis"}  # without tensors


def test_a_state_that_was_given_up_prints():
    step = pa.make_step(squares, pa.sgd(0.1), donate=True)
    state = step.init(W)
    step(state, BATCH)
    assert repr(state).startswith("TrainState(params=1 tensor given up, buffers=(), ")


def test_printing_does_not_wait_for_a_device():
    text = repr(pa.Weighted(torch.empty((), device="meta"), torch.empty((), device="meta")))
    assert text == "Weighted(total=float32[] on meta, weight=float32[] on meta)"
