"""Random steps for optimizers, torch's classes beside them, and one optimizer of every kind."""

import itertools
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal


def normal(shape, random, dtype=torch.float32):
    """Numbers of very different sizes, and zeros among them."""
    x = torch.randn(tuple(shape), generator=random, dtype=dtype)
    sizes = torch.randint(-6, 7, x.shape, generator=random)
    some = torch.randint(0, 8, x.shape, generator=random) > 0
    return x * (2.0**sizes).to(x.real.dtype) * some


def leaves(tree):
    return optree.tree_leaves(tree, namespace="pureaccum")


def clones(tree):
    return optree.tree_map(torch.clone, tree, namespace="pureaccum")


class Unread(Tensor):
    """Stands for a scalar on an accelerator: nobody may read it on the host."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        reads = (Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.tolist)
        assert func not in reads, f"{func} waits for the device"
        return super().__torch_function__(func, types, args, kwargs or {})


def unread(scalar):
    return scalar.clone().as_subclass(Unread)


class Copy(NamedTuple):
    """A tensor that was moved or cast."""

    away: bool  # to another device
    waits: bool  # for the device that it comes from or goes to


class Copies(TorchDispatchMode):
    """Collects what is moved or cast, below transforms and autograd."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, given = func(*args, **(kwargs or {})), kwargs or {}
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], Tensor):
            away = out.device != args[0].device
            self.seen.append(Copy(away, away and not given.get("non_blocking", False)))
        elif func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self.seen.append(Copy(True, not (args[2] if len(args) > 2 else False)))
        return out


class Torchs:
    """A class of ``torch.optim``, on copies of parameters, stepped with given gradients."""

    def __init__(self, cls, params, **settings):
        self.params = [x.detach().clone().requires_grad_() for x in leaves(params)]
        self.optimizer = cls(self.params, **settings)

    def step(self, grads, lr=None):
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        for x, grad in zip(self.params, leaves(grads), strict=True):
            x.grad = grad.to(x.dtype).clone()
        self.optimizer.step()

    def kept(self, name):
        return [self.optimizer.state[x][name] for x in self.params]

    def assert_same_params(self, params):
        assert_trees_bitwise_equal(leaves(params), [x.detach() for x in self.params])


# Every combination of flags ---------------------------------------------------------------


SWITCHES = [
    ("sgd", {"momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": top})
    for m, d, n, w, top in itertools.product((False, True), repeat=5)
    if not n or (m and not d)
] + [
    (name, {"weight_decay": w, "amsgrad": most, "maximize": top})
    for name in ("adam", "adamw")
    for w, most, top in itertools.product((False, True), repeat=3)
]
COMBINATIONS = pytest.mark.parametrize(
    ("name", "switches"),
    SWITCHES,
    ids=lambda x: x if isinstance(x, str) else ",".join(flag for flag, on in x.items() if on),
)


# One of every kind ------------------------------------------------------------------------


class Counted(NamedTuple):
    """The state of ``Count``."""

    count: Tensor
    last: Any


class Count:
    """A user's gradient map with a state: the n-th gradient is multiplied by n."""

    def init(self, params):
        return Counted(torch.zeros((), dtype=torch.int64), clones(params))

    def update(self, grads, state):
        count = state.count + 1
        return optree.tree_map(lambda g: g * count.to(g.dtype), grads), Counted(count, grads)


class Polyak:
    """A user's optimizer, which knows of no flag and no donation."""

    def init(self, params):
        return {"average": clones(params), "count": torch.zeros((), dtype=torch.int64)}

    def apply(self, grads, state, params):
        params = optree.tree_map(lambda x, g: x - 0.1 * g, params, grads)
        count = state["count"] + 1
        average = optree.tree_map(lambda a, x: a + (x - a) / count, state["average"], params)
        return params, {"average": average, "count": count}


def by_name(path):
    return "bias" if path.endswith("b") else "rest"


KINDS = {
    "sgd": lambda: pa.sgd(0.1),
    "momentum": lambda: pa.sgd(0.1, 0.9, 0.5, 0.1),
    "fused momentum": lambda: pa.sgd(0.1, 0.9, 0.5, 0.1, fused=True),
    "nesterov, tensor": lambda: pa.sgd(torch.tensor(0.1), 0.9, nesterov=True),
    "adam": lambda: pa.adam(0.1, maximize=True),
    "adamw, amsgrad, schedule": lambda: pa.adamw(pa.cosine_decay(0.1, 9), amsgrad=True),
    "fused adamw": lambda: pa.adamw(0.1, amsgrad=True, fused=True),
    "from_torch": lambda: pa.from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.9),
    "from_torch, no state": lambda: pa.from_torch(torch.optim.SGD, lr=0.1),
    "from_torch, schedule": lambda: pa.from_torch(torch.optim.NAdam, lr=pa.linear_warmup(0.1, 3)),
    "chain": lambda: pa.chain(pa.clip_by_global_norm(1.0), Count(), pa.adamw(0.1)),
    "partition": lambda: pa.partition(
        {"bias": pa.sgd(0.1, 0.9), "rest": pa.chain(pa.clip_by_global_norm(1.0), pa.adam(0.1))},
        by_name,
    ),
    "user": Polyak,
    "user in a chain": lambda: pa.chain(Count(), Polyak()),
}


def make_optimizer(kind):
    """As ``make_step`` takes it: a user's own is made to know the flag and donation."""
    made = KINDS[kind]()
    return made if hasattr(made, "_fields") else pa.chain(made)


def make_params(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {"w": normal((3, 2), random), "b": normal((), random), "in": [normal((4,), random)]}
