"""functorch's maml_omniglot: a step on each task, and the gradient through it, over many tasks.

github.com/pytorch/pytorch, functorch/examples/maml_omniglot
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import digits, near


pytestmark = [pytest.mark.parity, pytest.mark.promise("programs")]
TASKS, WAYS, SHOTS, STEPS, INNER = 12, 3, 4, 3, 0.5
NET = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, WAYS)).double()


def start():
    drawn = torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in NET.named_parameters()}
    return {n: torch.randn(s, generator=drawn, dtype=torch.float64) / 8 for n, s in shapes.items()}


def tasks_of(step):
    """In each task three kinds of digits, labelled anew, to adapt to and to be tested on."""
    (x, y), drawn = digits(), torch.Generator().manual_seed(step)
    rows = []
    for _ in range(TASKS):
        kinds = torch.randperm(10, generator=drawn)[:WAYS]
        of = [(y == kind).nonzero()[:, 0] for kind in kinds]
        picked = [i[torch.randperm(len(i), generator=drawn)[: 2 * SHOTS]] for i in of]
        rows.append(x[torch.stack(picked)].double())
    both = torch.stack(rows)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS).expand(TASKS, -1)
    a, b = (half.flatten(1, 2) for half in (both[:, :, :SHOTS], both[:, :, SHOTS:]))
    return {"x": a, "y": labels, "test_x": b, "test_y": labels}


def fit(params, x, y):
    return F.cross_entropy(torch.func.functional_call(NET, params, (x,)), y)


def original():
    params = {name: p.requires_grad_() for name, p in start().items()}
    optimizer = torch.optim.Adam(params.values(), lr=1e-2)

    def of_task(x, y, test_x, test_y):
        grads = torch.func.grad(fit)(params, x, y)
        adapted = {name: params[name] - INNER * grads[name] for name in params}
        return fit(adapted, test_x, test_y)

    for step in range(STEPS):
        optimizer.zero_grad()
        losses = torch.func.vmap(of_task)(*tasks_of(step).values())
        losses.mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def ported(path="", stop=STEPS):
    def of_task(params, task):
        grads = torch.func.grad(fit)(params, task["x"], task["y"])
        adapted = {name: params[name] - INNER * grads[name] for name in params}
        return fit(adapted, task["test_x"], task["test_y"])

    def loss(params, tasks):
        return torch.func.vmap(of_task, in_dims=(None, 0))(params, tasks).mean()

    step = pa.make_step(loss, pa.adam(1e-2), microbatch_size=5)
    state = step.init(start())
    if path and Path(path).exists():
        state = pa.load(path, like=state)
    for i in range(int(state.attempts), stop):
        state, _ = step(state, tasks_of(i))
    if path:
        pa.save(path, state)
    return state.params


ORIGINAL, PORTED = [original], [ported]


@pytest.mark.slow
def test_it_is_the_original_in_microbatches_of_tasks():
    assert near(ported(), original()) <= 2.0**-26.5


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path):
    path = str(tmp_path / "run")
    ported(path, stop=1)
    assert_trees_bitwise_equal(ported(path), ported())
