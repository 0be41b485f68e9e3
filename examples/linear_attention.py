"""Train a language model on texts of 4,096 words, in the memory of 128 words.

Linear attention reads a text chunk by chunk. Each chunk passes a matrix per head to the next: the
sum of all keys times their values, which fades. `pa.scan` keeps these matrices, and runs each chunk
again in the backward pass. The logits of a chunk are summed into the loss inside the chunk, so they
never exist for more words. `microbatch_size` splits the batch of texts. Plain autograd through the
same loop keeps everything.

    Run:   python examples/linear_attention.py
    Needs: no extra
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import pureaccum as pa


Batch = dict[str, Tensor]
HEADS = 4


class Attention(nn.Module):
    """Linear attention and an MLP. The state is a matrix per head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.split = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.mlp = nn.Sequential(*layers, nn.Linear(4 * width, width))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        split = self.split(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        fade, at = 0.99, torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        near = (fade ** (at - at.T).clamp(min=0)).tril()
        mixed = (query @ key.mT * near) @ value + (query * fade ** (at + 1)) @ state
        state = fade ** len(at) * state + (key * fade ** (len(at) - 1 - at)).mT @ value
        x = x + mixed.transpose(1, 2).flatten(2) / x.shape[-1] ** 0.5
        return x + self.mlp(x), state


class Model(nn.Module):
    """From words and a state per layer, the logits of the next words and the next states."""

    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))

    def forward(self, word: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, after = self.words(word), []
        for layer, state in zip(self.layers, states, strict=True):
            x, state = layer(x, state)
            after.append(state)
        return linear(self.norm(x), self.words.weight) / x.shape[-1] ** 0.5, after


def make_loss(net: Model, size: int, scan: bool) -> Callable[[Batch, Batch], pa.Weighted]:
    """The loss of predicting the next word, ``size`` words at a time."""
    fn = pa.functional(net)
    width = net.words.embedding_dim // HEADS

    def chunk(params: Batch, states: list[Tensor], chunk: Batch) -> tuple[list[Tensor], Tensor]:
        (logits, states), _ = fn.apply(params, (), chunk["word"], states)
        return states, cross_entropy(logits.mT, chunk["following"], reduction="sum")

    def kept(params: Batch, states: list[Tensor], batch: Batch) -> tuple[list[Tensor], Tensor]:
        totals = []
        for word, following in zip(*(batch[x].split(size, 1) for x in batch), strict=True):
            states, total = chunk(params, states, {"word": word, "following": following})
            totals.append(total)
        return states, torch.stack(totals).sum()

    run = pa.scan(chunk, chunk_size=size, dim=1, reduce="sum") if scan else kept

    def loss(params: Batch, batch: Batch) -> pa.Weighted:
        begin = [params["words.weight"].new_zeros(len(batch["word"]), HEADS, width, width)]
        begin *= len(net.layers)
        _, total = run(params, begin, batch)
        return pa.Weighted(total, batch["word"].numel())

    return loss


def texts(rows: int, length: int, words: int) -> Batch:
    """Texts in which word n is followed by word n + 2, or sometimes by any word."""
    word = (torch.randint(words, (rows, 1)) + 2 * torch.arange(length + 1)) % words
    word = torch.where(torch.rand(word.shape) < 0.1, torch.randint(words, word.shape), word)
    return {"word": word[:, :-1], "following": word[:, 1:]}


def main(
    rows: int = 2, length: int = 4096, size: int = 128, words: int = 1024, steps: int = 4
) -> dict[str, tuple[int, list[float], Batch]]:
    """The memory of a step, the losses, and the trained parameters."""
    seen = {}
    print(f"{rows} texts of {length} words, one text and {size} words at a time")
    for name, scan in (("all kept", False), ("scan", True)):
        torch.manual_seed(0)
        net, batch = Model(words, 32, 1), texts(rows, length, words)
        step = pa.make_step(make_loss(net, size, scan), pa.adam(1e-2), microbatch_size=1)
        state, losses = step.init(pa.functional(net).params), []
        held = pa.memory_report(step, state, batch).measured.beyond_arguments
        before = time.process_time()
        for _ in range(steps):
            state, info = step(state, batch)
            losses.append(float(info.loss))
        took, said = (time.process_time() - before) / steps, ", ".join(f"{x:.4f}" for x in losses)
        print(f"  {name:8}: {held / 1e6:5.1f} MB, {took:.1f} s per step, losses {said}")
        seen[name] = held, losses, state.params
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)  # times are those of one core
    main()
