"""For every k, the k-th block of memory that a program asks for is refused, by torch's allocator.

    an error    is the allocator's; where states were given up, a retry may say that they are
    inputs      are what they were, bit for bit; or donated, and some of them refuse in our words
    a retry     gives the bits of a program of which nothing was refused

A program is a chain of pure calls. One of them fails, and is called again with what it was given;
where that refuses, the program begins again.
"""

from functools import cache

import optree
import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa
from pureaccum._base.states import Refusing, Spoiled
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.core.allocator import SHARES, refusing


pytestmark = pytest.mark.faults
ROWS, SIZE = 5, 3


# Losses ------------------------------------------------------------------------------------

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
FN = pa.functional(NET)
NORMED = pa.functional(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
X = torch.randn(ROWS, 4)
LARGE = {"w": torch.randn(4, 3), "large": torch.randn(520, 520)}  # above 1 MiB: by a hook
MIXED = {"w": torch.randn(4, 3), "v": torch.randn(3, dtype=torch.float64), "u": torch.randn(3)}


def plain(params, x):
    return FN.apply(params, FN.buffers, x)[0].square().mean()


def threaded(params, x, buffers, keys=None):
    x = x if keys is None else pa.dropout(x, 0.25, keys)
    out, new = NORMED.apply(params, buffers, x)
    loss = pa.Weighted(out.square().sum(), (x > 0).sum() + 1)
    return loss, (new, {"rows": out.sum(1), "seen": pa.Weighted(out.sum(), len(x))})


def of_large(params, x):
    return (x @ params["w"]).square().mean() + (params["large"] @ params["large"][:, 0]).sum()


def mixed(params, x):
    return ((x @ params["w"]).double() @ params["v"] + x[:, 0] * params["u"].sum()).square().mean()


def partly_nan(params, x):
    """The first microbatch is not finite."""
    return plain(params, x) / (x[:, 0] != X[0, 0]).all()


PARAMS = {of_large: LARGE, mixed: MIXED, threaded: NORMED.params}


# Programs ----------------------------------------------------------------------------------


def a_step(loss=plain, optimizer=None, *, of="whole", **options):
    """One step of a run that has begun, so that there are moments."""
    sized = {"microbatch_size": SIZE} if of == "whole" else {}
    options.setdefault("check", loss is not threaded)  # whose BatchNorm couples samples

    def made(its):
        return pa.make_step(its, optimizer or pa.adamw(0.125), **sized, **options)

    @cache
    def begun():
        step, buffers = made(loss), NORMED.buffers if loss is threaded else None
        return step(step.init(PARAMS.get(loss, FN.params), buffers=buffers), X)[0]

    def program(do, cold):
        step = made((lambda *args, **named: loss(*args, **named)) if cold else loss)
        state = optree.tree_map(torch.clone, begun(), namespace="pureaccum")
        if of == "whole":
            return do(step, state, X)
        window = do(step.begin, state)
        for part in pa.microbatches(X, SIZE):
            window = do(step.update, state, window, part)
            window = window[0] if options.get("has_aux") else window
        if of == "merged":
            other = step.update(state, step.begin(state), X[:SIZE])
            window = do(step.merge, window, other)
        return do(step.apply, state, window)

    return program


def an_accumulator(donate, loss=plain, **options):
    more, params = {"donate": donate}, PARAMS.get(loss, FN.params)

    def program(do, cold):
        acc = pa.accumulator((lambda p, x: loss(p, x)) if cold else loss, **options)
        state = do(acc.init, params)
        for part in pa.microbatches(X, SIZE):
            state = do(lambda state, part: acc.update(state, params, part, **more), state, part)
        state = do(acc.merge, state, acc.update(acc.init(params), params, X))
        return do(lambda state: acc.finalize(state, **more), state)

    return program


def of_samples(donate, reduce):
    def program(do, cold):
        acc = pa.per_sample_accumulator(plain_of_one, reduce=reduce, chunk_size=2)
        more = lambda state, part: acc.update(state, FN.params, part, donate=donate)  # noqa: E731
        state = do(acc.init, FN.params)
        for part in pa.microbatches(X, SIZE):
            state = do(more, state, part)
        return do(acc.finalize, state)

    return program


def plain_of_one(params, x):
    return plain(params, x[None])


def a_gradient(transform):
    def program(do, cold):
        loss = (lambda p, x: plain(p, x)) if cold else plain
        return do(transform(loss), FN.params, X)

    return program


def by_backward(loss):
    """Plain autograd through a microbatched function, forwards and back."""
    total = pa.microbatch(loss, microbatch_size=SIZE, reduce="mean")

    def call(params, x):
        own = {name: p.detach().requires_grad_() for name, p in params.items()}
        return torch.autograd.grad(total(own, x).square(), [*own.values()])

    return call


def averages(donate):
    """The first update, and another one; a parameter of another dtype is cast in between."""

    def program(do, cold):
        average, params = pa.ema(0.5), {**FN.params, "half": torch.ones(9, dtype=torch.float16)}
        state = do(average.init, params)
        for more in (1, 2):
            latest = {name: p + more for name, p in params.items()}
            state = do(lambda s, p: average.update(s, p, donate=donate), state, latest)
        return state

    return program


def minimized(optimizer, donate):
    def program(do, cold):
        params = optree.tree_map(torch.clone, MIXED)
        func = lambda p: pa.grad_and_value(mixed, microbatch_size=SIZE)(p, X)  # noqa: E731
        call = lambda p, s: optimizer.apply(func, s, p, donate=donate)  # noqa: E731
        return do(call, params, do(optimizer.init, params))

    return program


def clipped(do, cold):
    grads = optree.tree_map(torch.clone, MIXED)
    return do(lambda g: pa.clip_by_global_norm(0.5).update(g, (), donate=True), grads)


SCALED = {"loss_scale": pa.dynamic_loss_scale(8.0, growth_interval=1)}
FULL = {
    "has_aux": True,
    "aux_reduction": {"rows": "concat", "seen": "mean"},
    "buffers": "sequential",
    "policy": pa.Policy(autocast=torch.bfloat16),
    **SCALED,
}
KEYED = FULL | {"keys": True}  # for a thousand blocks more: one as a whole, and one streamed
CLIPPED = pa.chain(pa.clip_by_global_norm(0.5), pa.adamw(0.125, amsgrad=True))
APART = pa.partition(
    {"w": pa.sgd(0.1, momentum=0.9), "b": pa.adam(0.1), "rest": pa.adamw(pa.linear_warmup(0.1, 3))},
    lambda path: {"0.weight": "w", "0.bias": "b"}.get(path, "rest"),
)
RMSPROP = pa.from_torch(torch.optim.RMSprop, lr=0.125, momentum=0.5)
DONATED = {"donate": True}
PROGRAMS = {
    "eager": a_step(plain, CLIPPED, **SCALED),
    "streamed": a_step(plain, CLIPPED, of="stream", **SCALED),
    "donated": a_step(plain, CLIPPED, **SCALED, **DONATED),
}
FURTHER = {
    "streamed and donated": a_step(plain, CLIPPED, of="stream", **SCALED, **DONATED),
    "accumulated and donated": an_accumulator(True, mixed, squares=True),
    "sgd": a_step(plain, pa.sgd(0.1, momentum=0.9, nesterov=True), **DONATED),
    "fused": a_step(plain, pa.adamw(0.1, fused=True), **DONATED),
    "a schedule": a_step(plain, pa.adamw(pa.linear_warmup(0.1, 3)), **DONATED),
    "a class of torch": a_step(plain, RMSPROP),
    "a class of torch, donated": a_step(plain, RMSPROP, **DONATED),
    "a partition": a_step(plain, APART, **DONATED),
    "everything": a_step(threaded, CLIPPED, **FULL),
    "everything, donated": a_step(threaded, CLIPPED, **KEYED, **DONATED),
    "everything, streamed": a_step(threaded, CLIPPED, of="stream", **KEYED),
    "everything, streamed and donated": a_step(threaded, CLIPPED, of="stream", **FULL, **DONATED),
    "pooled": a_step(threaded, **FULL | {"buffers": "pooled"}, **DONATED),
    "merged": a_step(plain, of="merged"),
    "noise": a_step(plain, noise=True, **DONATED),
    "noise, streamed": a_step(plain, of="stream", noise=True, **DONATED),
    "large": a_step(of_large, **DONATED),
    "large, streamed": a_step(of_large, of="stream", **DONATED),
    "large, by torch.func": a_step(of_large, engine="func", of="stream", **DONATED),
    "of two dtypes": a_step(mixed, CLIPPED, **DONATED),
    "of two dtypes, streamed": a_step(mixed, CLIPPED, of="stream", **DONATED),
    "skipped": a_step(partly_nan, nonfinite="skip", **SCALED, **DONATED),
    "skipped, streamed": a_step(partly_nan, of="stream", nonfinite="skip", **SCALED, **DONATED),
    "skipped, kept": a_step(partly_nan, of="stream", nonfinite="skip"),
    "looked at": a_step(plain, of="stream", nonfinite="raise", **DONATED),
    "accumulated": an_accumulator(False, nonfinite="skip", engine="autograd"),
    "accumulated by torch.func": an_accumulator(True, mixed, nonfinite="skip"),
    "accumulated by autograd": an_accumulator(True, of_large, engine="autograd"),
    "samples": of_samples(False, "sum"),
    "samples, donated": of_samples(True, "sum"),
    "grad": a_gradient(lambda f: pa.grad(f, microbatch_size=SIZE)),
    "grad by autograd": a_gradient(
        lambda f: pa.grad_and_value(f, microbatch_size=SIZE, engine="autograd", nonfinite="skip")
    ),
    "value": a_gradient(lambda f: pa.value(f, microbatch_size=SIZE)),
    "hvp": a_gradient(lambda f: lambda p, x: pa.curvature.hvp(f, microbatch_size=SIZE)(p, x, p)),
    "backward": a_gradient(by_backward),
    "averages": averages(False),
    "averages, donated": averages(True),
    "lbfgs": minimized(pa.lbfgs(max_iter=2), False),
    "lbfgs, donated": minimized(pa.lbfgs(max_iter=2), True),
    "sam, donated": minimized(pa.sam(pa.adamw(0.1)), True),
    "a clipped gradient, donated": clipped,
}


# A failure ---------------------------------------------------------------------------------


def leaves(tree):
    found = optree.tree_leaves(tree, namespace="pureaccum")
    return [x for x in found if isinstance(x, Tensor)]


class StartedAgainError(Exception):
    """What a call was given is given up."""


def is_intact(given, before):
    """Whether no tensor refuses; those that do not are what they were."""
    pairs = [*zip(leaves(given), before, strict=True)]
    refusing = {type(x) for x, _ in pairs if isinstance(x, Refusing)}
    assert refusing <= {Spoiled}, "the words are those of a call that went well"
    for x, y in pairs:
        if not isinstance(x, Refusing) and not torch.equal(x, y):  # which is no NaN
            assert_trees_bitwise_equal(x, y)
    return not refusing


def attempt(program, which, cold):
    """What a program comes to where that block is refused, and how many it asks for."""
    count = 0

    def do(call, *given):
        nonlocal count
        before = [x.clone() for x in leaves(given)]
        failed = None
        with refusing(max(which - count, 0)) as counted:
            try:
                out = call(*given)
            except Exception as error:
                failed = error
        if failed is None:
            count += counted.blocks
            return out
        assert "can't allocate memory" in str(failed)
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        count = which
        if is_intact(given, before):
            return call(*given)
        with pytest.raises(RuntimeError, match="given up with donate=True"):
            call(*given)
        raise StartedAgainError

    try:
        return program(do, cold), count
    except StartedAgainError:
        return attempt(program, 0, cold)


COLD = ["eager", "donated", "streamed and donated", "accumulated", "samples", "grad", "backward"]
FURTHER_CASES = [(name, False) for name in FURTHER] + [(name, True) for name in COLD]
CASES = [pytest.param(name, False, id=f"first {name}") for name in PROGRAMS] + [
    pytest.param(*case, id=f"further{i % SHARES} {case[0]}{', cold' * case[1]}")
    for i, case in enumerate(FURTHER_CASES)
]


@pytest.mark.parametrize(("name", "cold"), CASES)
def test_any_block_may_be_refused(name, cold):
    """Where ``cold``, of a loss that is not known yet, and so is watched."""
    program = (PROGRAMS | FURTHER)[name]
    attempt(program, 0, cold)
    want, count = attempt(program, 0, cold)
    assert count > 5
    with unchanged(NET, FN.params, LARGE, MIXED, X, draws=True):
        for which in range(1, count + 1):
            got, _ = attempt(program, which, cold)
            if not all(map(torch.equal, leaves(got), leaves(want))):
                assert_trees_bitwise_equal(got, want)
