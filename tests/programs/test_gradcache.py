"""GradCache: a contrastive loss over two towers, in the memory of one microbatch.

github.com/luyug/GradCache
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import digits, near


pytestmark = [pytest.mark.parity, pytest.mark.promise("programs")]
ROWS, SIZE, STEPS = 30, 8, 3
Params = dict[str, Tensor]


def towers(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.ModuleDict(
        {name: nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)) for name in "ab"}
    ).to(dtype)


def batch_of(step, dtype=torch.float64):
    """The upper and the lower half of a digit belong together."""
    x, _ = digits()
    x = x[step * ROWS : (step + 1) * ROWS].to(dtype)
    return {"a": x[:, :32], "b": x[:, 32:]}


def contrastive(a, b):
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return F.cross_entropy(a @ b.T * 10, torch.arange(len(a)))


def full():
    model = towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        contrastive(*(model[name](batch[name]) for name in "ab")).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def original():
    model = towers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        parts = {name: batch[name].split(SIZE) for name in "ab"}
        with torch.no_grad():  # first all embeddings, of which nothing is kept
            kept = {name: [model[name](part) for part in parts[name]] for name in "ab"}
        cached = {name: torch.cat(kept[name]).requires_grad_() for name in "ab"}
        contrastive(cached["a"], cached["b"]).backward()  # then their gradients
        for name in "ab":  # then each part again, with the gradient of its embeddings
            grads = cached[name].grad.split(SIZE)
            for part, grad in zip(parts[name], grads, strict=True):
                (model[name](part) * grad).sum().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def ported(path="", stop=STEPS):
    model = towers()
    fns = {name: pa.functional(model[name]) for name in "ab"}

    def loss(params, batch):
        embed = {
            n: pa.microbatch(lambda p, x, n=n: fns[n].apply(p, (), x)[0], microbatch_size=SIZE)
            for n in "ab"
        }
        return contrastive(*(embed[n](params[n], batch[n]) for n in "ab"))

    step = pa.make_step(loss, pa.adamw(1e-2))
    state = step.init({n: fn.params for n, fn in fns.items()})
    if path and Path(path).exists():
        state = pa.load(path, like=state)
    for i in range(int(state.attempts), stop):
        state, _ = step(state, batch_of(i))
    if path:
        pa.save(path, state)
    return {f"{n}.{name}": p for n in "ab" for name, p in state.params[n].items()}


ORIGINAL, PORTED = [original], [ported]


@pytest.mark.slow
def test_all_three_are_one_program():
    want = full()
    assert near(ported(), want) <= 2.0**-26.5
    assert near(original(), want) <= 2.0**-26.5


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path):
    path = str(tmp_path / "run")
    ported(path, stop=1)
    assert_trees_bitwise_equal(ported(path), ported())
