"""Which numbers the host may read, while transforms are at work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

import pureaccum as pa
from pureaccum._base import known


pytestmark = pytest.mark.base
THREE = torch.tensor(3.0)


def forward(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))


NESTS: dict[str, tuple[Callable[[Callable[..., Any]], Any], bool]] = {
    "none": (lambda f: f(THREE), True),
    "grad": (lambda f: grad(f)(THREE), True),
    "grad of grad": (lambda f: grad(grad(f))(THREE), True),
    "jvp": (lambda f: forward(f)(THREE), True),
    "vmap": (lambda f: vmap(f)(THREE.expand(1)), False),
    "vmap of grad": (lambda f: vmap(grad(f))(THREE.expand(1)), False),
    "grad of vmap": (lambda f: grad(lambda x: vmap(f)(x.expand(1)).sum())(THREE), False),
    "what a vmap does not map": (lambda f: vmap(lambda _: f(THREE))(torch.ones(1)), True),
}


@pytest.mark.parametrize("nest", NESTS)
def test_a_number_is_read_where_no_vmap_holds_many_in_its_place(nest: str) -> None:
    transformed, read = NESTS[nest]
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(known(x))
        return x * x * x

    transformed(look)
    assert seen == [3.0 if read else None]


def test_a_compiler_is_asked_for_no_number() -> None:
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(known(x))
        return x + 1

    torch.compile(look, backend="eager", fullgraph=True)(THREE)
    assert seen == [None]


OPTIMIZERS = [pa.sgd, lambda lr: pa.sgd(lr, momentum=0.5), lambda lr: pa.adamw(lr)]


def later(optimizer: Any, *batches: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A number that follows from some steps, of their learning rate."""

    def of(lr: torch.Tensor) -> torch.Tensor:
        step = pa.make_step(lambda w, x: (w[0] * x + w[1]).square().mean(), optimizer(lr))
        state = step.init(torch.tensor([2.0, -1.0]))
        for batch in batches:
            state, _ = step(state, batch)
        return (state.params * torch.tensor([1.0, 3.0])).sum()

    return of


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_differentiated_is_the_one_that_is_mapped(optimizer: Any) -> None:
    """The one reads whether it is applied, the other selects."""
    rate, batch = torch.tensor(0.25), torch.tensor([1.0, 2.0])
    run = later(optimizer, batch, batch + 1)
    for transform in (lambda f: f, grad, lambda f: grad(grad(f))):
        alone, mapped = transform(run)(rate), vmap(transform(run))(rate.expand(2))
        torch.testing.assert_close(mapped, alone.expand(2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_applied_has_the_derivative_of_none(optimizer: Any) -> None:
    rate, batch, bad = torch.tensor(0.25), torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])
    assert grad(later(optimizer, batch, bad))(rate) == grad(later(optimizer, batch))(rate)
