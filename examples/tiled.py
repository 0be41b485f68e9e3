"""Train a language model whose head never holds all logits, with MLPs split along the text.

The logits of 2,048 tokens for 8,192 words take 67 MB, and so do their softmax and its derivative.
But the loss of a token needs only its own logits. So the head sums the loss over microbatches of
tokens, inside the network, and gets the same number with the same derivatives. The MLP treats each
token separately too. It is split along the text, in the module whose parameters it uses.

    Run:   python examples/tiled.py
    Needs: no extra
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pureaccum as pa


Batch = dict[str, Tensor]


class Block(nn.Module):
    """A GRU over the tokens, then an MLP for each of them."""

    def __init__(self, width: int, size: int | None) -> None:
        super().__init__()
        self.past = nn.GRU(width, width, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 16 * width),
            nn.GELU(),
            nn.Linear(16 * width, width),
        )
        self.size = size  # tokens of a text that the MLP takes at a time; None: all

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.past(x)[0]
        if self.size is None:
            return h + self.mlp(h)
        return h + pa.microbatch(self.mlp, microbatch_size=self.size, batch_argnums=0, dim=1)(h)


def make_loss(net: nn.Module, size: int | None) -> Callable[[Batch, Batch], pa.Weighted]:
    """The loss of predicting the next word; the head takes ``size`` tokens at a time."""
    fn = pa.functional(net)

    def head(words: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden, following = batch
        logits = hidden @ words.T / words.shape[1] ** 0.5
        return cross_entropy(logits, following, reduction="sum")

    tiled = head if size is None else pa.microbatch(head, microbatch_size=size, reduce="sum")

    def loss(params: Batch, batch: Batch) -> pa.Weighted:
        hidden, _ = fn.apply(params, (), batch["word"])
        following = batch["following"].flatten()
        words = params["0.weight"]  # of the embedding
        return pa.Weighted(tiled(words, (hidden.flatten(0, 1), following)), following.numel())

    return loss


def texts(rows: int, length: int, words: int) -> Batch:
    """Texts in which word n is followed by word n + 2, or sometimes by any word."""
    word = (torch.randint(words, (rows, 1)) + 2 * torch.arange(length + 1)) % words
    word = torch.where(torch.rand(word.shape) < 0.1, torch.randint(words, word.shape), word)
    return {"word": word[:, :-1], "following": word[:, 1:]}


def main(
    rows: int = 8, length: int = 256, words: int = 8192, width: int = 32, steps: int = 3
) -> dict[str, float]:
    """How far apart parameters and losses are, and the ratio of the memory."""
    torch.manual_seed(0)
    batch = texts(rows, length, words)
    ways = {"whole": (None, None), "tiled": (length // 8, rows * length // 32)}
    seen: dict[str, tuple[list[float], Batch, float]] = {}
    print(f"{rows} texts of {length} words, from {words} words")
    for name, (of_mlp, of_head) in ways.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(words, width), Block(width, of_mlp), nn.LayerNorm(width))
        step = pa.make_step(make_loss(net, of_head), pa.sgd(20.0))
        start = pa.functional(net).params
        state = step.init(start)
        held = pa.memory_report(step, state, batch).measured.beyond_arguments
        losses, before = [], time.perf_counter()
        for _ in range(steps):
            state, info = step(state, batch)
            losses.append(float(info.loss))
        took = (time.perf_counter() - before) / steps
        print(
            f"  {name}: {held / 1e6:.0f} MB, {1000 * took:.0f} ms a step, losses "
            + ", ".join(f"{x:.6f}" for x in losses)
        )
        learned = {name: x - start[name] for name, x in state.params.items()}
        seen[name] = losses, learned, held
    (losses, learned, held), (own, ours, less) = seen["whole"], seen["tiled"]
    apart = {name: ours[name] - x for name, x in learned.items()}
    off = float(pa.global_norm(apart) / pa.global_norm(learned))
    print(f"  the parameter updates differ by {off:.0e} of their norm")
    return {"off": off, "losses": abs(own[-1] / losses[-1] - 1), "memory": less / held}


if __name__ == "__main__":
    torch.set_num_threads(1)  # times are those of one core
    main()
