"""The picture of the world notices whatever might change, and nothing else."""

import random
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_pure, unchanged


pytestmark = [pytest.mark.purity, pytest.mark.promise("tools")]


@pytest.mark.parametrize("name", ["pre_hook", "hook"])
def test_hooks_of_all_modules_are_noticed(name):
    register = getattr(nn.modules.module, f"register_module_forward_{name}")
    handles = []
    for say in (refused, refused_around):
        assert "hooks of all modules" in say(lambda: handles.append(register(print)))
        handles.pop().remove()


def test_a_mode_is_noticed_also_when_an_error_comes():
    def leave_a_mode():
        torch.set_grad_enabled(False)
        raise RuntimeError

    try:
        with pytest.raises(AssertionError), unchanged(), suppress(KeyError):
            leave_a_mode()
    finally:
        torch.set_grad_enabled(True)


def test_what_does_not_change_is_let_be():
    module, x = nn.Linear(2, 2), torch.full((2,), torch.nan)
    with unchanged(module, {"x": x}):
        module(x)
    with unchanged(module, draws=True):
        torch.rand(1)


# One call --------------------------------------------------------------------------------


WEIGHT = torch.ones(2)


class Keeper:
    """Not a module, but it keeps tensors."""

    def __init__(self):
        self.kept = {"w": torch.ones(2)}

    def method(self):
        self.kept["w"].add_(1)

    def __call__(self):
        self.kept["w"] = self.kept["w"] + 1


def writes_to_a_global(x):
    def inside():
        return WEIGHT.mul_(1)

    return x + inside()


def writes_to_a_default(x, total=torch.zeros(2)):  # noqa: B008
    return total.add_(x)


def failing(error, x=None):
    if x is not None:
        x.add_(1)
    raise error


@contextmanager
def modes_put_back():
    mode = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_anomaly_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(mode[0])
        torch.set_default_dtype(mode[1])
        torch.autograd.set_detect_anomaly(mode[2])
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_cache_enabled(True)
        torch.set_default_device(None)


def refused(fn, *args, **kwargs):
    with pytest.raises(AssertionError) as caught, modes_put_back():
        assert_pure(fn, *args, **kwargs)
    return str(caught.value)


def refused_around(fn, *things):
    """As a block, and not as a call."""
    with pytest.raises(AssertionError) as caught, modes_put_back(), unchanged(*things):
        fn(*things)
    return str(caught.value)


ARGUMENTS = {
    "numbers": (lambda t: t["w"].add_(1), "args[0]['w']: bits, version (0 before, 1 after)."),
    "numbers, likely": (lambda t: t["w"].add_(1), "Likely cause: an operation in place, such as"),
    "past autograd": (lambda t: t["w"].data.add_(1), "args[0]['w']: bits."),
    "the sign of zero": (lambda t: t["zero"].data.neg_(), "args[0]['zero']: bits."),
    "another number of a tensor": (lambda t: t["w"].fill_(2), "args[0]['w']: bits, version"),
    "an addition of zero": (lambda t: t["w"].add_(0), "args[0]['w']: version (0 before, 1 after)."),
    "the same numbers": (lambda t: t["w"].mul_(1), "args[0]['w']: version (0 before, 1 after)."),
    "a grad": (lambda t: t["p"].sum().backward(), "args[0]['p']: grad. Likely cause: a backward"),
    "a grad in place": (lambda t: t["q"].grad.add_(1), "args[0]['q']: grad."),
    "requires_grad": (
        lambda t: t["w"].requires_grad_(),
        "args[0]['w']: requires_grad (False before, True after).",
    ),
    "a hook": (lambda t: t["p"].register_hook(print), "args[0]['p']: hooks. Likely cause: a hook"),
    "a hook after": (lambda t: t["p"].register_post_accumulate_grad_hook(print), "['p']: hooks."),
    "memory": (lambda t: t["w"].set_(t["w"].clone()), "version (0 before, 1 after), memory."),
    "shape": (lambda t: t["w"].resize_(1), "shape (torch.Size([2]) before, torch.Size([1]) after)"),
    "another tensor": (lambda t: t.update(w=t["w"].clone()), "args[0]['w']: identity. Likely"),
    "another number": (lambda t: t.update(n=2), "args[0]['n']: identity."),
    "a leaf more": (lambda t: t.update(x=2), "args[0]['x'], which is new."),
    "a leaf less": (lambda t: t.pop("w"), "args[0]['w'], which is gone."),
    "a module's number": (lambda t: t["net"][0].weight.data.add_(1), "['net'].0.weight: bits."),
    "a module's buffer": (lambda t: t["net"](torch.ones(2, 2)), "['net'].1.running_mean: bits;"),
    "a module's mode": (
        lambda t: t["net"].eval(),
        "args[0]['net'].1: training (True before, False after).",
    ),
    "a module's hook": (
        lambda t: t["net"][0].register_forward_hook(print),
        "args[0]['net'].0: what is in _forward_hooks. Likely cause: a hook that was not removed.",
    ),
    "a module's parameter": (
        lambda t: setattr(t["net"][0], "bias", nn.Parameter(torch.ones(2))),
        "args[0]['net'].0.bias: identity. Likely cause: another object was put in its place.",
    ),
    "a module's grad": (lambda t: t["net"][0].bias.sum().backward(), "['net'].0.bias: grad."),
    "a module's dict of parameters": (
        lambda t: vars(t["net"][0]).update(_parameters=dict(t["net"][0]._parameters)),
        "args[0]['net'].0: _parameters",
    ),
    "a module's hook on a tensor": (
        lambda t: next(t["net"].parameters()).register_hook(lambda g: g),
        "args[0]['net'].0.weight: hooks.",
    ),
    "a module's grads": (lambda t: t["net"](t["w"].expand(2, 2)).sum().backward(), ".bias: grad"),
    "a module's attribute": (lambda t: setattr(t["net"], "n", 1), "args[0]['net']: n (new)."),
    "a module's tensor": (lambda t: t["net"].plain.add_(1), "args[0]['net'].plain: bits,"),
    "a module's child": (lambda t: t["net"].append(nn.ReLU()), "args[0]['net'].2, which is new"),
    "donation": pytest.param(
        lambda t: pa.sgd(0.1).apply([WEIGHT], pa.sgd(0.1).init([WEIGHT]), [t["w"]], donate=True),
        "args[0]['w']: class (Tensor before, Donated after). Likely cause: a state that was dona",
        marks=pytest.mark.given_up("donation elsewhere"),
    ),
    "sparse": (lambda t: t["sparse"].mul_(2), "args[0]['sparse']: bits, version"),
    "meta": (lambda t: t["meta"].resize_(1), "args[0]['meta']: version"),
    "in inference mode": (lambda t: t["inference"].data.add_(1), "args[0]['inference']: bits."),
    "complex": (lambda t: t["complex"].mul_(1j), "args[0]['complex']: bits,"),
    "float8": (lambda t: t["float8"].fill_(2), "args[0]['float8']: bits,"),
    "lazy": (lambda t: t["lazy"](torch.ones(2, 2)), "args[0]['lazy'].weight: class"),
}


def world():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net.plain = torch.ones(2)
    with torch.inference_mode():
        inference = torch.ones(2)
    q = torch.ones(2, requires_grad=True)
    q.grad = torch.ones(2)
    return {
        "w": torch.ones(2),
        "zero": torch.zeros(2),
        "p": torch.ones(2, requires_grad=True),
        "q": q,
        "n": 1,
        "none": None,
        "net": net,
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "inference": inference,
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "lazy": nn.LazyLinear(2),
        "expanded": torch.ones(1).expand(3),
    }


@pytest.mark.parametrize(("fn", "words"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_change_of_an_argument_is_named(fn, words):
    assert words in refused(fn, world())
    assert words.replace("args", "things") in refused_around(fn, world())


def test_an_argument_by_name_is_named():
    assert "kwargs['x'][0]: bits" in refused(lambda x: x[0].add_(1), x=[torch.ones(1)])


def held():
    """Functions that change what they hold."""
    net, w, keeper = nn.BatchNorm1d(2), torch.ones(2), Keeper()
    x, seen = torch.ones(2, 2), []

    def rebinds():
        nonlocal w
        w = w + 1

    def writes(p, x):
        seen.append(w)
        return (p * x).sum()

    def calls():
        rebinds()

    return {
        "a module": (partial(net, x), "fn.func.running_mean: bits"),
        "a module closed over": (lambda: net(x), "<lambda>'s net.running_mean: bits"),
        "a method of a module": (partial(net.forward, x), "fn.func.__self__.running_mean: bits"),
        "a tensor closed over": (lambda: w.add_(1), "<lambda>'s w: bits"),
        "a tensor rebound": (rebinds, "rebinds's w: identity"),
        "a tensor of a function below": (calls, "rebinds's w: identity"),
        "a list that grows": (lambda: seen.append(w), "<lambda>'s seen[0], which is new"),
        "a method": (keeper.method, "fn.__self__.kept['w']: bits"),
        "an object that is called": (Keeper(), "fn.kept['w']: identity"),
        "a partial's argument": (partial(torch.Tensor.add_, torch.ones(2), 1), "fn.args[0]: bits"),
        "a partial's keyword": (
            partial(lambda x: x.add_(1), x=torch.ones(2)),
            "fn.keywords['x']: bits",
        ),
        "a global, by a function inside": (
            partial(writes_to_a_global, torch.ones(2)),
            "writes_to_a_global's WEIGHT: version",
        ),
        "a default": (
            partial(writes_to_a_default, torch.ones(2)),
            "writes_to_a_default's total: bits",
        ),
        "through pureaccum": (
            partial(pa.grad(writes, microbatch_size=1, engine="autograd"), torch.ones(2), x),
            "writes's seen[0], which is new",
        ),
        "through torch.func": (
            partial(torch.func.vmap(lambda x: (w.add_(1) * x).sum()), x),
            "<lambda>'s w: bits",
        ),
    }


@pytest.mark.parametrize("name", held())
def test_a_change_of_what_a_function_holds_is_named(name):
    fn, words = held()[name]
    assert words in refused(fn)


def test_a_change_of_a_module_that_is_called_is_named():
    assert "fn.running_mean: bits" in refused(nn.BatchNorm1d(2), torch.ones(2, 2))


WORLD = {
    "torch's generator": (lambda: torch.rand(1), "torch's generator: state. Likely cause: a draw"),
    "Python's generator": (random.random, "Python's generator: state."),
    "grad mode": (lambda: torch.set_grad_enabled(False), "torch: grad mode (True before, False af"),
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "torch: default dtype (torch.float32 before, torch.float64 after).",
    ),
    "default device": (lambda: torch.set_default_device("meta"), "torch: default device (cpu bef"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "torch: autocast."),
    "autocast cache": (lambda: torch.set_autocast_cache_enabled(False), "torch: autocast cache"),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), "torch: anomaly mode"),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        "torch: deterministic algorithms (False before, True after), deterministic warn-only",
    ),
}


@pytest.mark.parametrize(("fn", "words"), WORLD.values(), ids=WORLD)
def test_a_change_of_the_world_is_named(fn, words):
    assert words in refused(fn)
    assert words in refused_around(fn)


def test_numpys_generator_is_watched_where_there_is_numpy():
    numpy = pytest.importorskip("numpy")
    assert "NumPy's generator: state." in refused(lambda: numpy.random.rand())


@pytest.mark.slow
def test_numpy_is_not_imported_for_it():
    script = (
        "import sys, warnings; sys.modules['numpy'] = None; warnings.simplefilter('ignore')\n"
        "import torch; from pureaccum.testing import assert_pure\n"
        "assert_pure(torch.neg, torch.ones(2)); assert sys.modules['numpy'] is None"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_everything_that_changed_is_named():
    x, y = torch.ones(2), torch.ones(2)
    said = refused(lambda x, y: (x.add_(1), y.add_(torch.rand(2))), x, y)
    assert all(words in said for words in ("args[0]: bits", "args[1]: bits", "torch's generator"))


def test_an_error_comes_through():
    error = KeyError("boom")
    with pytest.raises(KeyError) as caught:
        assert_pure(failing, error)
    assert caught.value is error


def test_an_error_after_a_change_is_its_cause():
    error = KeyError("boom")
    with pytest.raises(AssertionError, match="bits") as caught:
        assert_pure(failing, error, torch.ones(2))
    assert caught.value.__cause__ is error


def test_the_result_of_a_pure_call_comes_back():
    net, x, result = nn.Linear(2, 2), torch.ones(2, 2), object()
    assert assert_pure(lambda *_, **__: result, world(), net, x, 1, None, by="name") is result
    assert torch.equal(assert_pure(net, x), net(x))
    (grads, value) = assert_pure(pa.grad_and_value(lambda w, x: (w * x).mean()), x[0], x)
    assert (grads.shape, value.shape) == ((2,), ())
    step = pa.make_step(lambda p, x: (p * x).mean(), pa.adamw(0.1), microbatch_size=1)
    state, _ = assert_pure(step, assert_pure(step.init, torch.ones(2)), x)
    assert state.applied == 1


def test_draws_in_a_generator_of_its_own_are_pure():
    assert_pure(lambda: torch.rand(2, generator=torch.Generator().manual_seed(0)))
    assert_pure(lambda: pa.uniform(pa.key(0), (2,)))
    assert_pure(lambda: random.Random(0).random())


@pytest.mark.cuda
def test_tensors_and_draws_on_cuda_are_watched():
    x = torch.ones(2, device="cuda")
    assert "args[0]: bits, version" in refused(lambda x: x.add_(1), x)
    assert "CUDA's generators: state." in refused(lambda: torch.rand(2, device="cuda"))
    assert torch.equal(assert_pure(torch.neg, x), -x)
