"""What tests share: runs of what is public, how results are compared, and who looks on."""

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import optree
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pureaccum._core import writes


# Half of the digits of float64 and of float32, sqrt(u): for two ways to compute one function.
ROOT = 2.0**-26
HALF = 2.0**-12


def normal(*shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=dtype)


def fits(w, x):
    """A loss that is the mean of its samples."""
    return ((x @ w) ** 2).mean()


def end(z):
    """One number that couples all samples."""
    return (z @ z.T).sin().sum()


class Around(nn.Module):
    """A function of what it is called on and of its parts: a network in one line."""

    def __init__(self, run, *parts):
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)

    def forward(self, x):
        return self.run(x, *self.parts)


def function(forward, backward, old=False, **more):
    """The Function of a formula and of its gradients, ``backward(cotangent, *inputs)``.

    An old one is as they were before ``setup_context``, which torch.func refuses.
    """

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def old_forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    more["forward"] = staticmethod(old_forward if old else forward)
    more["backward"] = staticmethod(lambda ctx, g: backward(g, *ctx.saved_tensors))
    if not old:
        more["setup_context"] = staticmethod(keep)
    return type("Formula", (torch.autograd.Function,), more)


# Runs ------------------------------------------------------------------------------------------


def leaf(x):
    return x.detach().clone().requires_grad_()


def pulled(f, *xs, **options):
    """The gradients of a number by plain autograd, with respect to all that is given."""
    leaves = [leaf(x) for x in xs]
    found = torch.autograd.grad(f(*leaves), leaves, **options)
    return found if len(found) > 1 else found[0]


def once(step, params, *batch, **options):
    """The first step of a run."""
    return step(step.init(params, **options), *batch)


def in_parts(acc, params, parts, donate=False, *shared):
    """The state of an accumulator over a stream."""
    state = acc.init(params)
    for part in parts:
        state = acc.update(state, params, part, *shared, donate=donate)
    return state


def in_a_window(step, state, parts, *shared):
    """A step over a stream."""
    window = step.begin(state)
    for part in parts:
        window = step.update(state, window, part, *shared)
    return step.apply(state, window)


def drawing(run, seed=0):
    """A result, and where it leaves torch's generator."""
    torch.manual_seed(seed)
    return run(), torch.get_rng_state()


def together(*works):
    """What functions give that begin at once, each in a thread of its own.

    Threads take turns a thousand times as often as they usually do.
    """
    ready, usual = Barrier(len(works)), sys.getswitchinterval()

    def begun(work):
        ready.wait()
        return work()

    sys.setswitchinterval(5e-6)
    try:
        with ThreadPoolExecutor(len(works)) as pool:
            return list(pool.map(begun, works))
    finally:
        sys.setswitchinterval(usual)


def forget_losses():
    """Let every loss be a new one, to those functions of ours that are made from here on."""
    writes._of_losses.clear()


@pytest.fixture
def nobody_was_asked():
    """Calls of two tests with one loss would add up."""
    forget_losses()


# Results ---------------------------------------------------------------------------------------


def near(got, want, bound=ROOT, floor=0.0, name=""):
    """That two trees are one, leaf by leaf, up to so much of a leaf's norm and of ``floor``."""
    xs, spec = optree.tree_flatten(got, namespace="pureaccum")
    ys, other = optree.tree_flatten(want, namespace="pureaccum")
    assert spec == other
    for x, y in zip(xs, ys, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert (x - y).norm() <= bound * (floor + y.norm()), name


def near_together(got, want, bound=ROOT):
    """Against the norm of all leaves: a gradient that is zero is one only up to the bound."""
    xs, spec = optree.tree_flatten(got)
    ys, other = optree.tree_flatten(want)
    assert spec == other
    assert [x.shape for x in xs] == [y.shape for y in ys]
    size = torch.stack([y.norm() for y in ys]).norm()
    assert size > 0
    assert torch.stack([(x - y).norm() for x, y in zip(xs, ys, strict=True)]).norm() <= bound * size


# Onlookers -------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Hands every operation on, and notes it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Hands every function of torch on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
