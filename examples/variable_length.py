"""Train on sequences of uneven length, a window of microbatches at a time.

The loader yields microbatches with different numbers of tokens. The mean over a window's tokens
is what one big batch would give, because totals and weights are summed and divided once.

    python examples/variable_length.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import pureaccum as pa


TEXT = "the exact full batch gradient as a pure function in the memory of one microbatch"
WORDS = TEXT.split()
LETTERS = "-" + "".join(sorted(set("".join(WORDS))))  # "-" pads


class Guesser(nn.Module):
    """Guess the next letter of a word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(letters))[0])


def loader(generator: torch.Generator) -> Iterator[Tensor]:
    """Three words at a time, padded to the longest of them; the last microbatch is shorter."""
    order = torch.randperm(len(WORDS), generator=generator).tolist()
    for start in range(0, len(WORDS), 3):
        words = [WORDS[i] for i in order[start : start + 3]]
        longest = max(map(len, words))
        rows = [torch.tensor([LETTERS.index(c) for c in word]) for word in words]
        yield torch.stack([pad(row, (0, longest - len(row))) for row in rows])


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    net = Guesser()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def loss(params: dict[str, Tensor], letters: Tensor) -> pa.Weighted:
        logits = torch.func.functional_call(net, params, (letters[:, :-1],))
        target = letters[:, 1:]
        total = cross_entropy(logits.transpose(1, 2), target, ignore_index=0, reduction="sum")
        return pa.Weighted(total, (target != 0).sum())

    acc = pa.accumulator(loss)
    generator = torch.Generator().manual_seed(0)
    value = torch.tensor(float("nan"))
    for step in range(steps):
        state = acc.init(params)
        for microbatch in loader(generator):
            state = acc.update(state, params, microbatch, donate=True)
        grads, value = acc.finalize(state)
        params = {name: p - grads[name] for name, p in params.items()}  # any optimizer goes here
        if step % 20 == 0 or step == steps - 1:
            seen = f"{int(state.weight)} letters in {state.microbatches} parts"
            print(f"step {step:3}: loss {value:.3f} over {seen}")
    return float(value)


if __name__ == "__main__":
    main()
