"""A zoo of losses: what each is, and what a check of its accumulation has to find.

Those that fit are sums over samples, whatever else they do. The others are not (``coupled``,
``weights``), or are no functions (``impure``), or are handed to a loop that does something else
(``loops``); each names the kind of its diagnosis. No two share both a cause and a mechanism.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch.func import functional_call


ROWS = 12
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
WIDE = (torch.float32, torch.float64)  # for what a CPU has no bfloat16 kernel of

Case = tuple[Any, Any, Any]  # a loss, its parameters and its batch
Recipe = Callable[[torch.dtype], Case]


class Species(NamedTuple):
    """One loss.

    Args:
        name: For people.
        recipe: Makes a loss, its parameters and its batch, in a dtype.
        kind: What the diagnosis has to be; empty for a loss that fits.
        says: What the diagnosis has to name: a module, a function, a variable.
        dtypes: In which the loss runs.
        options: For ``check_accumulation``.
    """

    name: str
    recipe: Recipe
    kind: str
    says: str
    dtypes: tuple[torch.dtype, ...]
    options: dict[str, Any]

    def make(self, dtype, seed):
        torch.manual_seed(seed)
        return *self.recipe(dtype), self.options


ZOO = []


def fits(dtypes=DTYPES, of=None, **options):
    return fails("", dtypes=dtypes, of=of, **options)


def fails(kind, says="", dtypes=DTYPES[:2], of=None, **options):
    """A loss whose accumulation is wrong: the kind of the diagnosis, and what it has to name.

    What is decorated is a recipe; or, with ``of(dtype) -> (params, batch)``, the loss itself.
    """

    def enter(func):
        recipe = func if of is None else lambda dtype: (func, *of(dtype))
        species = Species(
            name=func.__name__, recipe=recipe, kind=kind, says=says, dtypes=dtypes, options=options
        )
        ZOO.append(species)
        return func

    return enter


# What many of them are made of -----------------------------------------------------------


def parameters(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def cast(tree, dtype):
    return optree.tree_map(lambda x: x.to(dtype), tree)


def normal(dtype, *shape):
    return torch.randn(ROWS, *shape).to(dtype)


def ragged_mask(length):
    """From no token in a row to all of them."""
    return torch.arange(length) < torch.arange(ROWS)[:, None] % (length + 1)


def squared(module, dtype, *shape):
    """The mean squared distance of a module's outputs from one."""
    module.to(dtype)

    def loss(params, batch):
        return ((functional_call(module, params, (batch["x"],)) - 1) ** 2).mean()

    return loss, parameters(module), {"x": normal(dtype, *shape)}


def linear(dtype, into=6, out=3):
    """Weights, and a batch for them."""
    params = {"w": (torch.randn(into, out) / 2).to(dtype), "b": torch.randn(out).to(dtype)}
    batch = {"x": normal(dtype, into), "y": normal(dtype, out)}
    return params, batch | {"label": torch.randint(0, out, (ROWS,))}


def affine(params, x):
    return x @ params["w"] + params["b"]


def masked(dtype):
    """Weights, and a batch with tokens of which a mask leaves some."""
    params, batch = linear(dtype)
    return params, batch | {"mask": ragged_mask(3)}
