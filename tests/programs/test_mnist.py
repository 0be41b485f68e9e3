"""pytorch/examples' mnist/main.py, on digits: a loader, Adadelta, StepLR, a test set, a checkpoint.

github.com/pytorch/examples
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import digits


pytestmark = [pytest.mark.parity, pytest.mark.promise("programs")]
EPOCHS = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(36, 10), nn.LogSoftmax(1)),
    )


def loaders() -> tuple[Any, Any]:
    x, y = digits()
    train, test = TensorDataset(x[:240], y[:240]), TensorDataset(x[1600:], y[1600:])
    order = torch.Generator().manual_seed(1)
    return DataLoader(train, 50, shuffle=True, generator=order), DataLoader(test, 100)


def original() -> tuple[dict[str, Tensor], float, float]:
    model, (train, test) = network(), loaders()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(EPOCHS):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            F.nll_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in test:
            out = model(x)
            loss += F.nll_loss(out, y, reduction="sum").item()
            right += int((out.argmax(1) == y).sum())
    rows = len(test.dataset)
    return {name: p.detach() for name, p in model.named_parameters()}, loss / rows, right / rows


def ported(path: str = "", stop: int = EPOCHS) -> tuple[dict[str, Tensor], float, float]:
    fn, (train, test) = pa.functional(network()), loaders()

    def loss(params: Any, batch: Any) -> Any:
        out, _ = fn.apply(params, fn.buffers, batch[0])
        right = (out.argmax(1) == batch[1]).sum()
        return F.nll_loss(out, batch[1]), {"right": pa.Weighted(right, len(out))}

    rate = pa.step_decay(1.0, len(train), 0.5)
    step = pa.make_step(loss, pa.from_torch(torch.optim.Adadelta, lr=rate), has_aux=True)
    state = step.init(fn.params)
    if path and Path(path).exists():
        state = pa.load(path, like=state)
    for epoch in range(stop):
        for i, batch in enumerate(train):
            if epoch * len(train) + i >= state.attempts:  # a loader goes through what was seen
                state, _ = step(state, batch)
    if path:
        pa.save(path, state)
    value, metrics = pa.value(loss, has_aux=True, stream=True)(state.params, test)
    return state.params, float(value), float(metrics["right"])


ORIGINAL, PORTED = [original], [ported]


def test_it_is_the_original_to_the_bit() -> None:
    want, got = original(), ported()
    assert_trees_bitwise_equal(got[0], want[0])
    assert got[2] == want[2]
    assert abs(got[1] - want[1]) <= 2.0**-20 * want[1]


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    ported(path, stop=1)
    assert_trees_bitwise_equal(ported(path), ported())
