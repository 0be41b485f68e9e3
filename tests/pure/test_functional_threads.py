"""What one thread computes with a functional does not depend on what other threads do with it."""

import multiprocessing
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from itertools import cycle, islice
from tempfile import TemporaryDirectory
from threading import Barrier, Event
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.calls import BoomError
from tests.draws import generator
from tests.problems import together
from tests.pure.collating import Embedding
from tests.pure.networks import Checkpointed, Of, Recurrent, Tied, squares
from tests.pure.test_functional import Counting
from tests.pure.test_functional_purity import twice


pytestmark = [pytest.mark.purity, pytest.mark.promise("threads")]
T = TypeVar("T")
Job = Callable[[], Any]

THREADS = 4
ROUNDS = 4
CALLS = ("plain", "func", "autograd")


@pytest.fixture(autouse=True)
def _restless():
    """Threads take turns 500 times as often as they usually do, and before each module's call."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    hook = register_module_forward_pre_hook(_pause)
    yield
    hook.remove()
    sys.setswitchinterval(usual)


def _pause(*_):
    if not torch.compiler.is_compiling():
        time.sleep(1e-4)


# Modules ------------------------------------------------------------------------------------


def attention(self, x):
    tokens = self.head(x)[None]
    return self.attend(tokens, tokens, tokens)[0][0]


class Bound(nn.Module):
    """Holds a method of its own, which leads back to it: it is called itself, by one at a time."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.act = self.scaled

    def scaled(self, x):
        return x * self.weight

    def forward(self, x):
        return self.act(x)


def hooked():
    """Hooks that read what the module holds."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[0].register_forward_pre_hook(lambda module, given: (given[0] * module.weight.sum(),))
    net[0].register_forward_hook(lambda module, given, out: out + module.bias)
    net.register_forward_hook(lambda module, given, out: out @ module[2].weight)
    return net


def lazy():
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2))
    net(rows(0))
    return net


def quantized():
    """A layer of packed weights, which are no parameters, between two that are not quantized."""
    with warnings.catch_warnings():  # all of it is deprecated, without another way in torch
        warnings.simplefilter("ignore")
        middle = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2))


def encoder():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Linear(3, 4),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    )


class Case(NamedTuple):
    """A module, and the ways to call it that torch has; ``train`` is its mode."""

    make: Callable[[], nn.Module]
    train: bool = True
    calls: Sequence[str] = CALLS


def _mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _spectral():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh())


CASES = {
    "plain": Case(_mlp),
    "tied": Case(Tied),
    "called twice": Case(twice),
    "weight norm": Case(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)))),
    "spectral norm, eval": Case(_spectral, train=False),
    "batch norm": Case(
        lambda: nn.Sequential(
            nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), nn.BatchNorm1d(3, momentum=None)
        )
    ),
    "batch norm, eval": Case(lambda: nn.Sequential(nn.BatchNorm1d(3), _mlp()), train=False),
    "reassigned": Case(lambda: nn.Sequential(Counting(), nn.Tanh(), Counting())),
    "lstm": Case(lambda: Recurrent(nn.LSTM, 4)),
    "gru": Case(lambda: Recurrent(nn.GRU, 4)),
    "attention": Case(
        lambda: Of(
            attention, attend=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(3, 4)
        )
    ),
    "encoder": Case(encoder),
    "encoder, eval": Case(encoder, train=False),
    "hooks": Case(hooked),
    "lazy once": Case(lazy),
    "checkpointed": Case(lambda: Checkpointed(_three()), calls=("plain", "autograd")),
    "bound, and checkpointed": Case(
        lambda: nn.Sequential(Bound(), Checkpointed(_three())), calls=("plain", "autograd")
    ),
    "scripted": Case(
        lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)),
        calls=("plain", "autograd"),
    ),
    "compiled": Case(
        lambda: nn.Sequential(torch.compile(_three(), backend="eager"), nn.Linear(3, 2)),
        calls=("plain", "autograd"),
    ),
    "quantized": Case(quantized, train=False, calls=("plain",)),
}


def _three():
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def rows(seed, count=6):
    return torch.randn(count, 3, generator=generator(seed))


def others(fn, seed):
    """Parameters and buffers that are not the module's own."""
    random = generator(seed)

    def other(x):
        return x + torch.rand(x.shape, generator=random) if x.is_floating_point() else x + seed

    return tuple({name: other(x) for name, x in tree.items()} for tree in (fn.params, fn.buffers))


def job_of(fn, call, seed):
    """Two calls with tensors of its own, one after the other."""
    given = [(*others(fn, seed + i), rows(seed + i)) for i in range(2)]

    def loss(params, x, buffers):
        out, new_buffers = fn.apply(params, buffers, x)
        return out.square().mean(), new_buffers

    def job():
        if call == "plain":
            return [fn.apply(*each) for each in given]
        options = {"has_aux": True, "aux_reduction": "last", "engine": call, "check": False}
        grad = pa.grad_and_value(loss, microbatch_size=3, **options)
        return [grad(params, x, buffers) for params, buffers, x in given]

    return job


def jobs_of(fn, calls, seed=0):
    return [job_of(fn, call, seed + 10 * i) for i, call in enumerate(islice(cycle(calls), THREADS))]


def assert_each_alone(jobs, *held, wanted=None):
    """Together, again and again, jobs give the bits that each gave alone; nothing else changes."""
    wanted = [job() for job in jobs] if wanted is None else wanted
    with unchanged(*held):
        came = together(*[lambda job=job: [job() for _ in range(ROUNDS)] for job in jobs])
    for some, want in zip(came, wanted, strict=True):
        for each in some:
            assert_trees_bitwise_equal(each, want)


def by_itself(module):
    """What the module gives when it is called; it is left as it was."""
    held = [x.clone() for x in module.buffers()]
    with torch.no_grad():
        out = module(rows(1))
        for buffer, before in zip(module.buffers(), held, strict=True):
            buffer.copy_(before)
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_threads_that_call_one_functional_get_what_each_gets_alone(name):
    case = CASES[name]
    module = case.make().train(case.train)
    own = by_itself(module)
    assert_each_alone(jobs_of(pa.functional(module), case.calls), module)
    assert torch.equal(by_itself(module), own)


def sharing_a_layer():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    nets = [module, module, module[0], nn.Sequential(module[0], module[0])]
    calls = enumerate(zip(nets, cycle(["func", "plain", "autograd"])))
    return nets, [job_of(pa.functional(net), call, 10 * i) for i, (net, call) in calls]


def beside_the_module():
    """It goes on with its own parameters, as a teacher of which students are copies does."""
    module = _mlp()

    def plainly():
        out = module(rows(3))
        return out.detach(), torch.autograd.grad(out.sum(), list(module.parameters()))

    return module, [*jobs_of(pa.functional(module), CALLS), plainly]


def beside_a_failure():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def explode(_, given, out):
        if len(given[0]) == 1:
            raise BoomError

    module.register_forward_hook(explode)
    fn = pa.functional(module.eval())

    def fail():
        with pytest.raises(BoomError):
            fn.apply(*others(fn, 99), rows(0, count=1))

    return module, [*jobs_of(fn, CALLS), fail]


def in_two_steps(*engines):
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    fn = pa.functional(module)
    return module, [training(fn, engine, 10 * i) for i, engine in enumerate(engines)]


TOGETHER = {
    "functionals that share a layer": sharing_a_layer,
    "the module itself": beside_the_module,
    "a call that fails": beside_a_failure,
    "two steps, func": lambda: in_two_steps("func", "func"),
    "two steps, func and autograd": lambda: in_two_steps("func", "autograd"),
    "two steps, autograd": lambda: in_two_steps("autograd", "autograd"),
}


@pytest.mark.parametrize("make", TOGETHER.values(), ids=TOGETHER)
def test_what_shares_a_module_does_what_each_does_alone(make):
    held, jobs = make()
    assert_each_alone(jobs, held)


def asking(self, x, teacher=None):
    """Asks a teacher, which is itself with other parameters, between two uses of its layer."""
    out = torch.tanh(self.layer(x))
    return self.layer(out if teacher is None else out - self.ask(teacher, (), x)[0])


def test_a_functional_may_be_called_inside_its_own_call():
    module = Of(asking, layer=nn.Linear(3, 3))
    fn = pa.functional(module)
    module.ask = fn.apply

    def ask(index):
        (params, _), (teacher, _) = others(fn, index), others(fn, index + 50)
        return lambda: fn.apply(params, (), rows(index), teacher)[0]

    def by_hand(index):
        (params, _), (teacher, _) = others(fn, index), others(fn, index + 50)
        first, second = ((p["layer.weight"], p["layer.bias"]) for p in (params, teacher))
        linear, x = nn.functional.linear, rows(index)
        asked = linear(torch.tanh(linear(x, *second)), *second)
        return linear(torch.tanh(linear(x, *first)) - asked, *first)

    wanted = [by_hand(i) for i in range(THREADS)]
    assert_each_alone([ask(i) for i in range(THREADS)], module, wanted=wanted)


def counting(self, x):
    self.calls += 1
    return self.layer(x)


def test_a_count_in_a_plain_attribute_goes_up():
    """Threads may lose some of it, as with any module."""
    module = Of(counting, layer=nn.Linear(3, 2), calls=0)
    jobs = jobs_of(pa.functional(module), ["plain", "autograd"])
    wanted = [job() for job in jobs]
    once = module.calls
    assert once > 0
    assert_each_alone(jobs, wanted=wanted)
    assert module.calls > once


# A thread that compiles -----------------------------------------------------------------------


@contextmanager
def compiling():
    """Another thread is in the middle of torch.compile, with a function of its own."""
    inside, done = Event(), Event()

    def backend(graph, inputs):
        inside.set()
        done.wait(60)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend=backend)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(compiled, torch.ones(3))
        inside.wait(60)
        try:
            yield
        finally:
            done.set()
        other.result()


CUT = {"microbatch_size": 2, "check": False}


def donated_step(fn):
    """By sgd, since adamw of torch itself asks whether something compiles."""
    step = pa.make_step(squares(fn), pa.sgd(0.1, 0.9), donate=True, buffers="freeze", **CUT)
    state = step.init(fn.params)
    new, _ = step(state, rows(1))
    try:
        torch.stack([x.sum() for x in state.params.values()])
    except RuntimeError:
        return new, True
    return new, False


def saved(fn):
    with TemporaryDirectory() as folder:
        pa.save(f"{folder}/run", fn.params)
        return pa.load(f"{folder}/run", fn.params)


MEANWHILE = {
    "apply": lambda fn: fn.apply(*others(fn, 1), rows(1)),
    "func": lambda fn: job_of(fn, "func", 1)(),
    "autograd": lambda fn: job_of(fn, "autograd", 1)(),
    "auto": lambda fn: pa.grad(squares(fn), microbatch_size="auto")(fn.params, rows(1)),
    "raise": lambda fn: pa.grad(squares(fn), nonfinite="raise", **CUT)(fn.params, rows(1)),
    "donated step": donated_step,
    "save": saved,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEANWHILE)
def test_what_another_thread_compiles_is_not_taken_for_what_runs_here(name):
    """``torch.compiler.is_compiling()`` is true of all threads while one of them compiles."""
    fn = pa.functional(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()))
    want = MEANWHILE[name](fn)
    with compiling():
        came = MEANWHILE[name](fn)
    assert_trees_bitwise_equal(came, want)


# What is changed between calls ---------------------------------------------------------------


def scaled():
    """All that a forward pass may depend on beside what is given."""
    return Of(
        lambda self, x: self.last(self.norm(self.first(x)) * self.scale * self.table[0]),
        first=nn.Linear(3, 3),
        norm=nn.BatchNorm1d(3),
        last=nn.Linear(3, 2),
        scale=1.0,
        table=[torch.ones(3)],
    )


def _doubled(_, __, out):
    return 2 * out


def _frozen(net):
    with torch.no_grad():
        net.last.weight.fill_(2.0)


CHANGES = {
    "eval": lambda net: net.eval(),
    "train": lambda net: net.train(),
    "one layer in eval": lambda net: net.norm.eval(),
    "an attribute": lambda net: setattr(net, "scale", 3.0),
    "an attribute of a layer": lambda net: setattr(net.norm, "eps", 0.5),
    "what is in an attribute": lambda net: net.table.__setitem__(0, torch.full((3,), 5.0)),
    "a hook": lambda net: net.norm.register_forward_hook(_doubled),
    "no hook": lambda net: net.norm._forward_hooks.clear(),
    "a parameter that is not given": _frozen,
}


def test_what_is_changed_in_the_module_between_calls_is_followed_by_all_threads():
    """Each thread has called the functional before every change."""
    module, apart = scaled(), scaled()
    apart.load_state_dict(module.state_dict())
    fn = pa.functional(module)
    given = [others(fn, 10 * i) for i in range(THREADS)]
    for params, _ in given:
        del params["last.weight"], params["last.bias"]
    all_here = Barrier(THREADS)

    def call(index):
        all_here.wait()  # so that each thread has one
        return fn.apply(*given[index], rows(index))

    def want(index):
        return pa.functional(deepcopy(apart)).apply(*given[index], rows(index))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(call, range(THREADS)))
        for change in CHANGES.values():
            for net in (module, apart):
                change(net)
            came = list(pool.map(call, range(THREADS)))
            assert_trees_bitwise_equal(came, [*map(want, range(THREADS))])


# Steps ----------------------------------------------------------------------------------------


def training(fn, engine, seed):
    step = pa.make_step(squares(fn), pa.adamw(1e-2), engine=engine, buffers="freeze", **CUT)

    def train():
        state = step.init(others(fn, seed)[0])
        for i in range(3):
            state, _ = step(state, rows(seed + i))
        return state

    return train


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("width", [8, 256])
def test_a_snapshot_is_evaluated_while_another_thread_trains(engine, width):
    module = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
    fn = pa.functional(module)
    train = training(fn, engine, 1)
    want = train()
    done = Event()

    def evaluate():
        outs = []
        while not (done.is_set() and outs):
            outs.append(fn.apply(want.params, fn.buffers, rows(5))[0])
        return outs

    alone = fn.apply(want.params, fn.buffers, rows(5))[0]
    with unchanged(module, want), ThreadPoolExecutor(1) as pool:
        evaluated = pool.submit(evaluate)
        try:
            trained = [train() for _ in range(ROUNDS)]
        finally:
            done.set()
        assert all(torch.equal(out, alone) for out in evaluated.result())
    for state in trained:
        assert_trees_bitwise_equal(state, want)


# Processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*JAX is multithreaded:RuntimeWarning")
def test_workers_of_a_loader_may_call_a_functional(context):
    """The forked ones begin while a thread of their parent is in the middle of a call."""
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {context}")
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), Recurrent(nn.GRU, 4)).eval()
    fn, batch, done = pa.functional(module), rows(0), Event()
    alone = Embedding(module, fn)
    wanted = [alone(list(part))[1] for part in batch.split(3)]
    workers = {
        "fork": (alone, 2),
        "spawn": (Embedding(deepcopy(module)), 1),  # each of them imports torch anew
    }
    collate, count = workers[context]

    def go_on():
        while not done.is_set():
            alone(list(batch))

    with unchanged(module, draws=True), ThreadPoolExecutor(1) as pool:
        meanwhile = pool.submit(go_on)
        try:
            loader = DataLoader(
                list(batch.clone()),  # pyright: ignore[reportArgumentType]
                batch_size=3,
                num_workers=count,
                collate_fn=collate,
                multiprocessing_context=context,
                timeout=60,  # instead of waiting for ever
            )
            came = [embedded for _, embedded in loader]
        finally:
            done.set()
        meanwhile.result()
    assert_trees_bitwise_equal(came, wanted)


COLLECTED = """
import gc, os, threading, time
from pureaccum._base.random_state import generators, restore

def work():
    for _ in range(2000):
        restore(generators([]))
        [[] for _ in range(3)]

gc.set_threshold(1, 1000, 1000)
gc.callbacks.append(lambda *_: time.sleep(0))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(0)
"""


@pytest.mark.mechanism
@pytest.mark.slow
def test_threads_note_generators_while_garbage_is_collected():
    """torch makes a tensor of a state while it has a lock, for which a thread waits with the GIL.

    In a process of its own: one that stands still cannot be left.
    """
    subprocess.run([sys.executable, "-c", COLLECTED], check=True, timeout=300)


RUN_AGAIN = """
import gc, os, threading, time
import torch
import pureaccum as pa

def work():
    x = torch.ones(2, requires_grad=True)
    again = pa.remat(lambda x: torch.dropout(x, 0.5, True))
    for _ in range(400):
        again(x).sum().backward()
        [[] for _ in range(3)]

gc.set_threshold(1, 1000, 1000)
gc.callbacks.append(lambda *_: time.sleep(0))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(0)
"""


@pytest.mark.nightly
def test_threads_draw_again_while_garbage_is_collected():
    """A thread that waits for a generator, whose owner waits for the GIL, would wait for ever.

    In a process of its own: one that stands still cannot be left.
    """
    subprocess.run([sys.executable, "-c", RUN_AGAIN], check=True, timeout=300)
