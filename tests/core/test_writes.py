"""A loss that writes to what it is given or captures is refused, if it can be before it happens."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import pureaccum as pa
from pureaccum._core.writes import unguarded
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.dropped import is_dropped
from tests.refusals import saying
from tests.runs import RUNS


pytestmark = [pytest.mark.purity, pytest.mark.promise("writes")]
OURS = "in place, but it must not change tensors that it gets or captures"
SAID = "in place, but it must not change|would mutate a captured Tensor"
TORCHS = "would mutate a captured Tensor"  # torch.func, before anybody else can look


class World(NamedTuple):
    """What a loss is given, and what it captures."""

    params: dict[str, Tensor]
    batch: dict[str, Any]
    captured: Tensor
    net: nn.Module


def world():
    random = torch.Generator().manual_seed(0)
    return World(
        {"w": torch.randn(3, generator=random), "table": torch.randn(5, 3, generator=random)},
        {"x": torch.randn(6, 3, generator=random), "i": torch.arange(6) % 5, "late": False},
        torch.randn(3, generator=random),
        nn.BatchNorm1d(3),
    )


def clamped(x):
    with torch.no_grad():
        x.clamp_(min=0)


def into(x):
    with torch.no_grad():
        torch.add(x, 1, out=x)


# By name: what it writes to, as an error says, and how.
WRITES = {
    "clamp_": ("['w']", lambda o, p, b: clamped(p["w"])),
    "data": ("['w']", lambda o, p, b: p["w"].data.clamp_(min=0)),
    "a view": ("['table']", lambda o, p, b: clamped(p["table"][1:].T)),
    "foreach": ("['table']", lambda o, p, b: torch._foreach_add_([p["table"].data], 1)),
    "out": ("['w']", lambda o, p, b: into(p["w"])),
    "max_norm": ("['table']", lambda o, p, b: F.embedding(b["i"], p["table"], max_norm=0.1)),
    "batch": ("['x']", lambda o, p, b: b["x"].data.mul_(2)),
    "captured": ("a tensor of shape (3,)", lambda o, p, b: o.captured.add_(1)),
    "captured data": ("a tensor of shape (3,)", lambda o, p, b: o.captured.data.add_(1)),
    "batch norm": (
        "a tensor of shape (3,)",
        lambda o, p, b: F.batch_norm(b["x"].view(-1, 3), o.captured, o.captured, training=True),
    ),
    "statistics": (
        " of BatchNorm1d",
        lambda o, p, b: functional_call(o.net, {"weight": p["w"]}, (b["x"].reshape(-1, 3),)),
    ),
}


def loss_of(of, write):
    def loss(p, b):
        write(of, p, b)
        return (b["x"] * p["w"] + F.embedding(b["i"], p["table"])).square().mean()

    return loss


FORMS = {
    name: lambda f, o, e, run=run: run(f, o.params, o.batch, engine=e)
    for name, run in {
        "uncut": partial(RUNS["grad"], size=None),
        "cut": RUNS["grad"],
        "skip": RUNS["skip"],
        "value": RUNS["value"],
        "value uncut": partial(RUNS["value"], size=None),
        "update": partial(RUNS["accumulator"], size=None),
        "donated": partial(RUNS["donated accumulator"], size=None),
        "step": partial(RUNS["step"], size=4),
        "stream": RUNS["stream"],
        "samples": partial(RUNS["samples"], size=None),
    }.items()
}
UNDER = {
    "vmap": lambda f, o: RUNS["vmap"](f, o.params, o.batch),
    "grad": lambda f, o: torch.func.grad(
        lambda p: pa.grad(f, microbatch_size=2)(p, o.batch)["w"].sum()
    )(o.params),
}
forms = pytest.mark.parametrize("form", FORMS)
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


EARLY = pytest.mark.given_up("early writes")


@EARLY
@pytest.mark.parametrize(
    ("form", "engine", "write"),
    [
        (form, engine, write)
        for form, engine, write in itertools.product(FORMS, ["func", "autograd"], WRITES)
        if form in ("uncut", "cut") or write in ("data", "captured")
    ],
)
def test_a_write_is_refused_before_it_happens(form, engine, write):
    name, how = WRITES[write]
    of = world()
    loss = loss_of(of, how)
    with unchanged(of), pytest.raises((RuntimeError, ValueError)) as caught:
        FORMS[form](loss, of, engine)
    said = str(caught.value)
    # torch.func may refuse it before, and much more of what it maps over samples
    if form != "samples" and (engine == "autograd" or TORCHS not in said):
        assert OURS in said
        assert name in said


@EARLY
@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("write", ["clamp_", "data", "max_norm", "batch", "captured data"])
def test_a_write_under_a_transform_is_refused_before_it_happens(under, write):
    of = world()
    with unchanged(of), pytest.raises(RuntimeError):  # ours, or what torch.func says before
        UNDER[under](loss_of(of, WRITES[write][1]), of)


@EARLY
@engines
def test_a_write_to_inference_tensors_is_refused(engine):
    """They count no versions."""
    with torch.inference_mode():
        of = world()

    def loss(p, b):
        of.captured.add_(1)
        return p["w"].square().sum()

    with torch.inference_mode(), unchanged(of), pytest.raises(RuntimeError, match=SAID):
        pa.grad(loss, microbatch_size=2, engine=engine)(of.params, of.batch)


GIVEN = {  # what moves a version of a tensor that is given
    **{name: WRITES[name][1] for name in ("clamp_", "a view", "out", "max_norm")},
    "batch in place": lambda o, p, b: clamped(b["x"]),
}


@engines
@forms
def test_a_write_to_what_is_given_raises(form, engine):
    """Before it happens or after."""
    for write in GIVEN.values():
        of = world()
        with pytest.raises((RuntimeError, ValueError)):
            FORMS[form](loss_of(of, write), of, engine)


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("write", GIVEN)
def test_a_write_to_what_is_given_raises_under_a_transform(under, write):
    of = world()
    with pytest.raises(RuntimeError):  # ours, or what torch.func says before
        UNDER[under](loss_of(of, GIVEN[write]), of)


@pytest.mark.slow
def test_a_write_to_what_is_given_raises_in_a_compiled_step():
    of = world()
    batch = {k: v for k, v in of.batch.items() if k != "late"}
    options = {"microbatch_size": 2, "compile": {"backend": "eager"}}
    step = pa.make_step(loss_of(of, GIVEN["clamp_"]), pa.sgd(0.1), **options)
    with pytest.raises(RuntimeError):
        step(step.init(of.params), batch)


@forms
def test_a_write_in_a_later_microbatch_raises(form):
    """It has happened, and is seen by the versions of what was given and captured."""
    for write in ("clamp_", "captured", "batch in place"):
        of, calls = world(), []

        def late(o, p, b, write=write, calls=calls):
            read = o.captured.sum()
            if not is_dropped():
                calls.append(read)
            if len(calls) <= 1:
                return
            if write == "batch in place":
                clamped(b["x"])
            else:
                WRITES[write][1](o, p, b)

        loss = loss_of(of, late)
        if form in ("uncut", "value uncut", "update", "donated"):
            FORMS[form](loss, of, "autograd")  # its one call
        name = "['x']" if write == "batch in place" else WRITES[write][0]
        with saying(RuntimeError, "has written to", name, "must not change"):
            FORMS[form](loss, of, "autograd")


def test_a_window_that_was_written_beside_is_spoiled():
    of, calls = world(), []

    def late(o, p, b):
        if not is_dropped():
            calls.append(1)
        if len(calls) > 1:
            clamped(p["w"])

    acc = pa.accumulator(loss_of(of, late))
    state = acc.update(acc.init(of.params), of.params, of.batch)
    with saying(RuntimeError, "has written to"):
        acc.update(state, of.params, of.batch, donate=True)
    with saying(RuntimeError, "failed in the middle"):
        acc.finalize(state)


# When it is looked at again -------------------------------------------------------------


@EARLY
def test_a_new_mode_is_looked_at_again():
    of = world()
    of.net.eval()
    loss = loss_of(of, WRITES["statistics"][1])
    gradient = pa.grad(loss, microbatch_size=2, engine="autograd")
    gradient(of.params, of.batch)
    of.net.train()
    with unchanged(of), saying(RuntimeError, OURS, " of BatchNorm1d"):
        gradient(of.params, of.batch)


@EARLY
def test_a_new_mode_of_a_functional_is_looked_at_again():
    class Clamping(nn.Linear):
        def forward(self, x):
            if self.training:
                self.weight.data.clamp_(min=0)
            return super().forward(x)

    net = Clamping(3, 1).eval()
    fn, x = pa.functional(net), torch.randn(6, 3)
    gradient = pa.grad(lambda p, b: fn.apply(p, (), b)[0].square().mean(), microbatch_size=2)
    gradient(fn.params, x)
    net.train()
    with unchanged(net, fn.params), saying(RuntimeError, OURS, "['weight']"):
        gradient(fn.params, x)


@EARLY
@pytest.mark.parametrize("kind", ["flag", "dtype", "structure"])
def test_a_new_kind_of_batch_is_looked_at_again(kind):
    of = world()
    other = {
        "flag": {**of.batch, "late": True},
        "dtype": {**of.batch, "x": of.batch["x"].double()},
        "structure": {**of.batch, "more": of.batch["i"]},
    }[kind]

    def write(o, p, b):
        if b["late"] or b["x"].dtype == torch.float64 or "more" in b:
            p["w"].data.clamp_(min=0)

    gradient = pa.grad(loss_of(of, write), microbatch_size=2)
    gradient(of.params, of.batch)
    with unchanged(of, other), saying(RuntimeError, OURS, "['w']"):
        gradient(of.params, other)


# What is no write to anything that was there before ------------------------------------------

NORM = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5, inplace=True), nn.ReLU(inplace=True))
FN = pa.functional(NORM)

HARMLESS = {
    "a clone": lambda o, p, b: b["x"].clone().clamp_(min=0).sum(),
    "zeros": lambda o, p, b: torch.zeros(5, 3).index_add_(0, b["i"], b["x"]).sum(),
    "new numbers": lambda o, p, b: torch.tensor([1.0, 2.0]).add_(1).sum(),
    "a list": lambda o, p, b: torch.as_tensor([1.0]).mul_(3).sum(),
    "numpy": lambda o, p, b: torch.from_numpy(np.ones(3, dtype=np.float32)).add_(1).sum(),
    "out": lambda o, p, b: torch.add(b["x"], 1, out=torch.empty(0)).sum(),
    "random": lambda o, p, b: torch.empty(3).uniform_().sum(),
    "batch norm": lambda o, p, b: FN.apply(FN.params, FN.buffers, b["x"])[0].sum(),
    "a copy": lambda o, p, b: torch.empty_like(b["x"]).copy_(b["x"]).sum(),
    "an intermediate": lambda o, p, b: (p["w"] * 2).relu_().sum(),
}


@engines
@pytest.mark.parametrize("name", HARMLESS)
def test_a_write_to_what_the_loss_itself_has_made_is_let_through(name, engine):
    of = world()
    loss = lambda p, b: HARMLESS[name](of, p, b) + (p["w"] * b["x"]).sum()  # noqa: E731
    results = []
    for guard in (unguarded, torch.enable_grad):
        torch.manual_seed(0)
        with guard():
            gradient = pa.grad_and_value(loss, microbatch_size=2, engine=engine, check=False)
            results.append([gradient(of.params, of.batch) for _ in range(2)])
    assert_trees_bitwise_equal(results[0], results[1])


@EARLY
@pytest.mark.parametrize("form", ["step", "stream"])
def test_a_write_in_a_compiled_step_is_refused_before_it_happens(form):
    """In eager code, before a graph is made; in a graph nobody could see it."""
    of = world()
    batch = {k: v for k, v in of.batch.items() if k != "late"}
    for name in ("clamp_", "data", "max_norm", "captured"):
        loss = loss_of(of, WRITES[name][1])
        step = pa.make_step(loss, pa.sgd(0.1), microbatch_size=2, compile={"backend": "eager"})
        state = step.init(of.params)
        with unchanged(of, state), saying(RuntimeError, OURS, WRITES[name][0]):
            if form == "step":
                step(state, batch)
            else:
                step.update(state, step.begin(state), batch)
