"""Which numbers the host may read, while transforms are at work."""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import pureaccum as pa
from pureaccum._base.trees import known
from tests.problems import HALF, near


pytestmark = [pytest.mark.transforms, pytest.mark.promise("ensembles")]
THREE = torch.tensor(3.0)


def forward(f):
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))


ALIKE, OTHERS = THREE.expand(2), torch.tensor([3.0, 4.0])
NESTS = {
    "none": (lambda f: f(THREE), True),
    "grad": (lambda f: grad(f)(THREE), True),
    "grad of grad": (lambda f: grad(grad(f))(THREE), True),
    "jvp": (lambda f: forward(f)(THREE), True),
    "vmap": (lambda f: vmap(f)(ALIKE), True),
    "vmap of others": (lambda f: vmap(f)(OTHERS), False),
    "vmap of vmap": (lambda f: vmap(vmap(f))(THREE.expand(2, 2)), True),
    "vmap of vmap of others": (lambda f: vmap(vmap(f))(torch.stack([ALIKE, OTHERS])), False),
    "vmap of grad": (lambda f: vmap(grad(f))(ALIKE), True),
    "vmap of grad of others": (lambda f: vmap(grad(f))(OTHERS), False),
    "grad of vmap": (lambda f: grad(lambda x: vmap(f)(x.expand(2)).sum())(THREE), True),
    "grad of vmap of others": (lambda f: grad(lambda x: vmap(f)(x).sum())(OTHERS), False),
    "what a vmap does not map": (lambda f: vmap(lambda _: f(THREE))(torch.ones(1)), True),
    "NaN in all": (lambda f: vmap(f)(torch.full((2,), torch.nan)), False),
    "a tracer": (lambda f: make_fx(f)(THREE), False),
    "a vmap that is traced": (lambda f: make_fx(vmap(f))(ALIKE), False),
}


@pytest.mark.given_up("caches")
@pytest.mark.parametrize("nest", NESTS)
def test_a_number_is_read_where_it_is_one_for_all(nest):
    transformed, read = NESTS[nest]
    seen = []

    def look(x):
        seen.append(known(x))
        return x * x * x

    transformed(look)
    assert seen == [3.0 if read else None]


@pytest.mark.slow
@pytest.mark.promise("applied")
def test_what_is_traced_holds_no_number_of_the_tensors_it_was_traced_with():
    """Not whether a step was applied, and not how often there was one."""
    step = pa.make_step(loss, pa.sgd(0.25, momentum=0.5, dampening=0.5), microbatch_size=1)
    state, batch = step.init(torch.tensor([2.0, -1.0])), torch.tensor([1.0, 2.0])
    later_state, _ = step(state, batch)
    states = pa.stack([state, state])

    def derivative(state, batch):
        return grad(lambda w: loss(step(state._replace(params=w), batch)[0].params, batch))(
            state.params
        )

    def params(state, batch):
        return step(state, batch)[0].params

    bad = torch.tensor([1.0, torch.inf])
    for program, before, after, given in (
        (params, state, later_state, batch + 1),
        (params, state, later_state, bad),
        (derivative, state, later_state, batch + 1),
        (vmap(params, (0, None)), states, pa.stack([state, later_state]), batch + 1),
        (vmap(params, (0, None)), states, pa.stack([state, later_state]), bad),
    ):
        traced = make_fx(program)(before, batch)
        torch.testing.assert_close(traced(after, given), program(after, given))


@pytest.mark.given_up("caches")
def test_a_compiler_is_asked_for_no_number():
    seen = []

    def look(x):
        seen.append(known(x))
        return x + 1

    torch.compile(look, backend="eager", fullgraph=True)(THREE)
    assert seen == [None]


def loss(w, x):
    return (w[0] * x + w[1]).square().mean()


OPTIMIZERS = [pa.sgd, lambda lr: pa.sgd(lr, momentum=0.5), lambda lr: pa.adamw(lr)]


def later(optimizer, *batches):
    """A number that follows from some steps, of their learning rate."""

    def of(lr):
        step = pa.make_step(loss, optimizer(lr))
        state = step.init(torch.tensor([2.0, -1.0]))
        for batch in batches:
            state, _ = step(state, batch)
        return (state.params * torch.tensor([1.0, 3.0])).sum()

    return of


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_members_that_read_are_those_that_select(optimizer):
    """One whose last step is not applied makes the others select."""
    rate, batch, bad = torch.tensor(0.25), torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])
    for transform in (lambda f: f, grad, lambda f: grad(grad(f))):

        def run(rate, last):
            return transform(later(optimizer, batch, last))(rate)  # noqa: B023

        alone = run(rate, batch + 1)
        for last in batch + 1, bad:
            mapped = vmap(run)(rate.expand(2), torch.stack([batch + 1, last]))
            near(mapped[0], alone, HALF)


@pytest.mark.promise("applied")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_applied_has_the_derivative_of_none(optimizer):
    rate, batch, bad = torch.tensor(0.25), torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.inf])
    assert grad(later(optimizer, batch, bad))(rate) == grad(later(optimizer, batch))(rate)
