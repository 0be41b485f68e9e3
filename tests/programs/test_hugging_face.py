"""A causal language model of transformers over windows of microbatches, by ``num_items_in_batch``.

github.com/huggingface/accelerate, examples/by_feature, for autoregressive models
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.programs.data import characters, near


os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.parity, pytest.mark.hf, pytest.mark.promise("programs")]
TEXT, WORDS = characters()
ROWS, BLOCK, K, MICROBATCHES = 3, 12, 2, 7  # windows of 2, 2, 2 and 1


def model_of() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=BLOCK, n_embd=16, n_layer=1, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


def loader() -> list[Any]:
    """Samples of very different lengths, as a tokenizer gives them."""
    found: list[Any] = []
    for i in range(MICROBATCHES):
        ids = TEXT[i * ROWS * BLOCK :][: ROWS * BLOCK].view(ROWS, BLOCK)
        lengths = torch.tensor([2 + (5 * i + 3 * j) % (BLOCK - 2) for j in range(ROWS)])
        mask = torch.arange(BLOCK) < lengths[:, None]
        labels = ids.masked_fill(~mask, -100)
        rows = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        found.append(transformers.BatchEncoding(rows))
    return found


def original() -> dict[str, Tensor]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = iter(loader())
    while window := [batch for _, batch in zip(range(K), batches)]:  # noqa: B905
        items = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
        for batch in window:
            loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def ported(path: str = "", stop: int = MICROBATCHES) -> dict[str, Tensor]:
    fn = pa.functional(model_of())

    def loss(params: Any, batch: Any) -> pa.Weighted:
        out, _ = fn.apply(params, fn.buffers, **batch, num_items_in_batch=1)
        return pa.Weighted(out.loss, (batch["labels"][:, 1:] != -100).sum())

    step = pa.make_step(loss, pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-2)))
    state = step.init(fn.params)
    if path and Path(path).exists():
        state = pa.load(path, like=state)
    windows = list(pa.windows(loader()[:stop], K))
    for window in windows[int(state.attempts) :]:
        state, _ = step.window(state, window)
    if path:
        pa.save(path, state)
    return state.params


ORIGINAL, PORTED = [original], [ported]


@pytest.mark.slow
def test_it_is_the_original() -> None:
    """Up to the square root of float32's unit: the loss of transformers takes logits in float32."""
    assert near(ported(), original()) <= 2.0**-12


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    ported(path, stop=2 * K)
    assert_trees_bitwise_equal(ported(path), ported())
