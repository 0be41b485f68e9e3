"""nanoGPT's train.py: windows, clipping, warm-up and cosine, two groups, evaluation, a checkpoint.

github.com/karpathy/nanoGPT
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import characters, near


pytestmark = [pytest.mark.parity, pytest.mark.promise("programs")]
TEXT, WORDS = characters()
BLOCK, ROWS, K, STEPS, WARM, PEAK, LEAST = 16, 4, 3, 6, 2, 1e-2, 1e-3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(BLOCK, 16)
        self.mix = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], dtype=self.head.weight.dtype
        )
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.norm(self.mix(h, src_mask=mask)))


def batch_of(step: int, i: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + i)
    at = torch.randint(len(TEXT) - BLOCK - 1, (ROWS,), generator=drawn)
    rows = torch.stack([TEXT[a : a + BLOCK + 1] for a in at])
    return rows[:, :-1], rows[:, 1:]


def rate(step: int) -> float:
    if step < WARM:
        return PEAK * step / WARM
    return LEAST + (PEAK - LEAST) * 0.5 * (1 + math.cos(math.pi * (step - WARM) / (STEPS - WARM)))


Result = tuple[dict[str, Tensor], float]


def original(dtype: torch.dtype | None = None, model: Any = None) -> Result:
    model = model or Model()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=1024.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for i in range(K):
            x, y = batch_of(step, i)
            with torch.autocast("cpu", dtype or torch.float32, enabled=dtype is not None):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / K
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        held = [batch_of(-1, i) for i in range(4)]
        losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in held]
    return {name: p.detach() for name, p in named.items()}, float(sum(losses)) / 4


def ported(
    dtype: torch.dtype | None = None, model: Any = None, path: str = "", stop: int = STEPS
) -> Result:
    fn = pa.functional(model or Model())
    schedule = pa.join_schedules(
        [pa.linear_warmup(PEAK, WARM), pa.cosine_decay(PEAK, STEPS - WARM, LEAST)], [WARM]
    )
    decay, none = (pa.adamw(schedule, (0.9, 0.95), weight_decay=w) for w in (0.1, 0.0))
    groups = pa.partition(
        {"decay": decay, "none": none},
        lambda path: "decay" if fn.params[path].dim() >= 2 else "none",
    )

    def loss(params: Any, batch: Any) -> Tensor:
        out, _ = fn.apply(params, fn.buffers, batch[0])
        return F.cross_entropy(out.flatten(0, 1), batch[1].flatten())

    step = pa.make_step(
        loss,
        pa.chain(pa.clip_by_global_norm(1.0), groups),
        policy=None if dtype is None else pa.Policy(autocast=dtype),
        loss_scale=pa.dynamic_loss_scale(1024.0) if dtype == torch.float16 else None,
    )
    state = step.init(fn.params)
    if path and Path(path).exists():
        state = pa.load(path, like=state)
    for i in range(int(state.attempts), stop):
        state, _ = step.window(state, (batch_of(i, j) for j in range(K)))
    if path:
        pa.save(path, state)
    evaluate = pa.value(loss, stream=True)
    return state.params, float(evaluate(state.params, [batch_of(-1, i) for i in range(4)]))


ORIGINAL, PORTED = [original, rate], [ported]


def test_it_is_the_original_in_float64() -> None:
    """Up to rounding: the square root of the unit, of each parameter's norm."""
    want, got = original(model=Model().double()), ported(model=Model().double())
    assert near(got[0], want[0]) <= 2.0**-26.5
    assert abs(got[1] - want[1]) <= 2.0**-26.5 * want[1]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_it_is_the_original_in_its_own_precision(dtype: Any) -> None:
    """No farther than the original itself is from float64, twice."""
    (want, value), (got, ours) = original(dtype), ported(dtype)
    exact, _ = original(model=Model().double())
    assert near(got, want) <= 2 * near(want, exact) + 2.0**-20
    assert abs(ours - value) <= (2.0**-18 if dtype is None else 2.0**-6) * value


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_it_goes_on_where_it_stopped(dtype: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    ported(dtype, path=path, stop=4)
    assert_trees_bitwise_equal(ported(dtype, path=path), ported(dtype))
