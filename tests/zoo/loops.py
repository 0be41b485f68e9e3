"""Loops written by hand, all over the same loss."""

import torch

import pureaccum as pa
from tests.zoo.species import affine, fails, fits, linear


def _gradients(loss_fn, params, part):
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    loss = loss_fn(leaves, part)
    return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))


def _averaged(loss_fn, params, parts):
    """Sums of the samples, divided once."""
    rows = [len(part["x"]) for part in parts]
    grads = [_gradients(loss_fn, params, part) for part in parts]
    return {k: sum(n * g[k] for n, g in zip(rows, grads, strict=True)) / sum(rows) for k in params}


def _backward(loss_fn, params, parts, zero, divide):
    """What most people write."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.SGD(leaves.values())
    for part in parts:
        if zero:
            optimizer.zero_grad()
        (loss_fn(leaves, part) / (len(parts) if divide else 1)).backward()
    return {name: p.grad for name, p in leaves.items()}


def _mean_of_means(loss_fn, params, parts):
    return _backward(loss_fn, params, parts, zero=False, divide=True)


def _zeroing(loss_fn, params, parts):
    return _backward(loss_fn, params, parts, zero=True, divide=True)


def _undivided(loss_fn, params, parts):
    return _backward(loss_fn, params, parts, zero=False, divide=False)


def _without_the_tail(loss_fn, params, parts):
    most = max(len(part["x"]) for part in parts)
    return _averaged(loss_fn, params, [part for part in parts if len(part["x"]) == most])


def _clipped_one_by_one(loss_fn, params, parts):
    """The clipping that belongs behind the loop."""
    scaled = []
    rows = [len(part["x"]) for part in parts]
    for part in parts:
        grads = _gradients(loss_fn, params, part)
        by = (1 / pa.global_norm(grads)).clamp(max=1)
        scaled.append({name: g * by.to(g.dtype) for name, g in grads.items()})
    return {k: sum(n * g[k] for n, g in zip(rows, scaled, strict=True)) / sum(rows) for k in params}


def _square(params, batch):
    return (affine(params, batch["x"]) - batch["y"]).square().mean()


def _twice_divided(loss_fn, params, parts):
    return {k: g / len(parts) for k, g in _averaged(loss_fn, params, parts).items()}


def _first_one_twice(loss_fn, params, parts):
    return _averaged(loss_fn, params, [parts[0], *parts])


def _training(loss_fn, params, parts):
    """A step after every microbatch, and the gradients of all of them."""
    params, total = dict(params), {k: torch.zeros_like(p) for k, p in params.items()}
    for part in parts:
        for k, g in _gradients(loss_fn, params, part).items():
            total[k] = total[k] + g * (len(part["x"]) / sum(len(part["x"]) for part in parts))
            params[k] = params[k] - 0.1 * g
    return total


def _noisy(loss_fn, params, parts):
    grads = _averaged(loss_fn, params, parts)
    return {k: g + 0.01 * torch.randn(g.shape) for k, g in grads.items()}


_held = {}


def _never_zeroing(loss_fn, params, parts):
    """The gradients of the last step are still there."""
    for k, g in _averaged(loss_fn, params, parts).items():
        _held[k] = _held[k] + g if k in _held else g
    return dict(_held)


LOOPS = {
    "a_loop": ("", _averaged),
    "loop_that_zeroes": ("gradients zeroed", _zeroing),
    "loop_of_means": ("mean of means", _mean_of_means),
    "loop_that_does_not_divide": ("mean as sum", _undivided),
    "loop_without_the_tail": ("tail dropped", _without_the_tail),
    "loop_that_clips": ("wrong weights", _clipped_one_by_one),
    "loop_that_divides_twice": ("factor", _twice_divided),
    "loop_that_counts_one_twice": ("wrong weights", _first_one_twice),
    "loop_that_trains": ("unknown", _training),
    "loop_that_draws": ("randomness", _noisy),
    "loop_that_never_zeroes": ("state", _never_zeroing),
}


def _recipe(name):
    def recipe(dtype):
        _held.clear()
        return _square, *linear(dtype)

    recipe.__name__ = name
    return recipe


for name, (kind, loop) in LOOPS.items():
    (fails(kind, loop=loop) if kind else fits(loop=loop))(_recipe(name))
