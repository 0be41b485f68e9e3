"""What is predicted of a step's memory is what is counted, and that is what torch allocates."""

import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pureaccum as pa
from pureaccum.testing import unchanged
from tests.draws import generator
from tests.refusals import saying
from tests.step.problems import EAGER


pytestmark = [pytest.mark.bounds, pytest.mark.promise("one buffer")]


def allocated(call, file):
    """The most that torch's CPU allocator gave out, kernels' own memory included."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        out = call()
    del out
    profiled.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    now = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def draw(*shape):
    return torch.randn(shape, generator=generator(0))


NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8)
        ),
        (64, 64),
    ),
    "convnet": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
        ),
        (32, 3, 8, 8),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True),
        (32, 16, 32),
    ),
}


def made(name, engine="func", **options):
    make, shape = NETWORKS[name]
    net = make()

    def loss(params, batch):
        return (torch.func.functional_call(net, params, (batch,)) ** 2).mean()

    options |= {"microbatch_size": 8, "engine": engine, "check": False}
    step = pa.make_step(loss, pa.adamw(1e-3), **options)
    return step, step.init({k: p.detach() for k, p in net.named_parameters()}), draw(*shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"), [("mlp", "func"), ("convnet", "func"), ("transformer", "autograd")]
)
def test_of_real_networks_what_is_predicted_is_counted_and_measured(name, engine, tmp_path):
    """To the bytes of a few 0-d tensors, that kernels make and that only some of the three see.

    A convolution's kernel also allocates its own; of that the report is a lower bound.
    """
    step, state, batch = made(name, engine)
    step(state, batch)  # what is made once
    with unchanged(state, batch):
        report = pa.memory_report(step, state, batch)
    predicted, measured = report
    assert isinstance(measured, pa.Memory)
    assert abs(predicted.beyond_arguments - measured.beyond_arguments) <= 64
    truth = allocated(lambda: step(state, batch), tmp_path / "trace.json")
    if name == "convnet":
        assert measured.beyond_arguments <= truth
    else:
        assert abs(measured.beyond_arguments - truth) <= 64


def test_each_number_of_a_report_is_what_it_is_named():
    """A product of a sample and a matrix, of which nothing is kept but what the square needs."""
    step = pa.make_step(lambda w, x: ((x @ w) ** 2).mean(), pa.adamw(), microbatch_size=16)
    state = step.init(torch.ones(128, 64).bfloat16())
    report = pa.memory_report(step, state, torch.ones(64, 128).bfloat16())
    for memory in report:
        assert isinstance(memory, pa.Memory)
        assert memory[:4] == (2 * 128 * 64, 0, 2 * 2 * 128 * 64 + 16, 4 * 128 * 64)
        assert 0 <= memory.activations - 2 * 16 * 64 <= 64
        assert memory.beyond_arguments == sum(memory[3:])
    lines = str(report).splitlines()
    assert lines[0].split() == ["bytes", "predicted", "measured"]
    assert lines[1].split() == ["parameters", "16,384", "16,384"]
    assert [line.split()[0] for line in lines[7:]] == ["together", "beyond"]


def test_activations_go_with_the_microbatch_and_gradients_do_not():
    step, state, batch = made("mlp")
    whole = pa.memory_report(step, state, batch)
    half = pa.memory_report(step, state, batch[:4])
    assert whole.predicted.gradients == half.predicted.gradients
    assert abs(whole.predicted.activations - 2 * half.predicted.activations) <= 128


NORMED = pa.functional(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout()))


def everything(params, batch, buffers, keys):
    out, new = NORMED.apply(params, buffers, pa.dropout(batch["x"], 0.5, keys))
    assert out.isfinite().all()  # reads a number
    return pa.Weighted((out**2).sum(), batch["mask"].sum()), (new, {"rows": out.sum(1)})


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
def test_what_is_predicted_of_steps_of_all_kinds_is_counted(donate):
    step = pa.make_step(
        everything,
        pa.chain(pa.clip_by_global_norm(1.0), pa.sgd(0.1, momentum=0.9)),
        has_aux=True,
        microbatch_size=4,
        check=False,
        loss_scale=pa.dynamic_loss_scale(),
        policy=pa.Policy(autocast=torch.bfloat16),
        nonfinite="skip",
        buffers="pooled",
        keys=True,
        noise=True,
        donate=donate,
    )
    state = step.init(NORMED.params, buffers=NORMED.buffers)
    batch = {"x": draw(12, 4), "mask": torch.ones(12)}
    with unchanged(state, batch):
        report = pa.memory_report(step, state, batch)
    assert report.predicted[:4] == report.measured[:4]
    assert report.predicted.buffers == 8 + 2 * 8 * 4
    assert abs(report.predicted.activations - report.measured.activations) <= 64
    step(state, batch)  # still whole


def test_a_loss_that_cuts_its_batch_is_predicted():
    embed = pa.microbatch(lambda params, batch: torch.tanh(batch @ params), microbatch_size=8)

    def loss(params, batch):
        out = embed(params, batch)
        return (out @ out.T).logsumexp(1).mean()

    step = pa.make_step(loss, pa.adamw())
    predicted, measured = pa.memory_report(step, step.init(draw(32, 16)), draw(32, 32))
    assert abs(predicted.activations - measured.activations) <= 64
    assert predicted.activations >= 32 * 16 * 4  # the samples


def test_views_of_what_a_loss_captures_take_no_memory():
    """A linear layer transposes its weight at every call, and that is as large as all else here."""
    frozen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    step = pa.make_step(
        lambda w, x: (frozen(x) @ w).square().mean(), pa.sgd(0.1), microbatch_size=4
    )
    predicted, measured = pa.memory_report(step, step.init(draw(64, 2)), draw(16, 64))
    # One byte more says whether the learning rate is sound: without numbers the host cannot tell.
    assert predicted == measured._replace(activations=measured.activations + 1)
    assert predicted.beyond_arguments < 64 * 64 * 4


def test_a_model_that_does_not_fit_is_predicted():
    """16 TiB of parameters: only on the meta device, and only predicted."""
    step = pa.make_step(lambda w, x: (torch.tanh(x @ w) ** 2).mean(), pa.adamw(), microbatch_size=8)
    state = step.init(torch.empty(2**21, 2**21, device="meta"))
    report = pa.memory_report(step, state, torch.empty(64, 2**21, device="meta"))
    assert report.measured == ()
    assert report.predicted.gradients == 2**44
    assert abs(report.predicted.activations - 8 * 2**21 * 4) <= 64
    assert "measured" not in str(report)


def test_a_step_that_compiles_is_refused():
    step = pa.make_step(lambda w, x: (x * w).mean(), pa.sgd(0.1), compile=EAGER)
    state = step.init(torch.ones(2))
    with saying(ValueError, "compiles itself", "without compile"):
        pa.memory_report(step, state, torch.ones(3, 2))
    with saying(TypeError, "state is a Tensor", "TrainState"):
        pa.memory_report(step, torch.ones(3), torch.ones(3, 2))
