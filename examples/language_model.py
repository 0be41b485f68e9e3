"""Train a small language model on sentences of uneven length, by the mean over all their words.

The text is Python's manual, one padded sentence per sample. Microbatches hold different numbers of
words, so the mean of their means, as in the usual loop, is not the mean over the batch. Summing
totals and weights, and dividing once, gives that mean for any microbatch size.

    Run:   python examples/language_model.py
    Needs: no extra; after pip install transformers it also trains a tiny Llama
"""

import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import pureaccum as pa


WORDS, LONGEST, PAD, END = 1024, 32, 0, 1
Tensors = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.out = nn.Linear(width, width)
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # 4 heads
        # Causal: no word sees the padding, which comes last.
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(LONGEST, width)
        logits = nn.LayerNorm(width), nn.Linear(width, WORDS)
        self.layers = nn.Sequential(Block(width), Block(width), *logits)

    def forward(self, text: Tensor) -> Tensor:
        return self.layers(self.word(text) + self.place.weight[: text.shape[1]])


class Llama(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # random weights

        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=WORDS, num_attention_heads=4, use_cache=False, **sizes)
        self.model = LlamaForCausalLM(config)

    def forward(self, text: Tensor) -> Tensor:
        return self.model(input_ids=text).logits


def manual() -> tuple[list[str], Tensor]:
    """The most frequent words, and each sentence of only those, as numbers."""
    parts = (" ".join(part.split()) for text in topics.values() for part in text.split("\n\n"))
    lines = [line for part in parts for line in re.split(r"(?<=\.) ", part) if line.endswith(".")]
    split = [re.findall(r"\w+|[^\w\s]", line) for line in lines]
    counted = Counter(word for line in split for word in line)
    words = ["", "/", *(word for word, _ in counted.most_common(WORDS - 2))]
    number = {word: i for i, word in enumerate(words)}
    known = [line for line in split if len(line) < LONGEST and number.keys() >= set(line)]
    rows = [[END, *map(number.__getitem__, line), END] for line in known]
    return words, torch.tensor([row + [PAD] * (LONGEST + 1 - len(row)) for row in rows])


def weighted(net: nn.Module) -> Callable[[Tensors, Tensor], pa.Weighted]:
    def loss(params: Tensors, text: Tensor) -> pa.Weighted:
        logits, target = functional_call(net, params, (text[:, :-1],)), text[:, 1:]
        total = cross_entropy(logits.mT, target, ignore_index=PAD, reduction="sum")
        return pa.Weighted(total, (target != PAD).sum())

    return loss


def usual(net: nn.Module, text: Tensor, size: int) -> Tensors:
    """The gradient of the accumulation loop that most people write."""
    net.zero_grad()
    parts = text.split(size)
    for part in parts:
        loss = cross_entropy(net(part[:, :-1]).mT, part[:, 1:], ignore_index=PAD)
        (loss / len(parts)).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def compare(net: nn.Module, text: Tensor) -> list[float]:
    """How far pureaccum and the usual loop are from the full batch's gradient."""
    exact = usual(net, text, len(text))  # one microbatch, so the loop is right
    ours = pa.grad(weighted(net), microbatch_size=4)(pa.functional(net).params, text)
    off = []
    for way, grads in {"pureaccum": ours, "loss / k": usual(net, text, 4)}.items():
        apart = pa.global_norm({name: grads[name] - exact[name] for name in exact})
        off.append(float(apart / pa.global_norm(exact)))
        print(f"  {way:9}  off by {off[-1]:.1e} of the full batch's gradient")
    return off


def write(net: nn.Module, params: Tensors) -> list[int]:
    line = [END]
    while len(line) < LONGEST:
        logits = functional_call(net, params, (torch.tensor([line]),))[0, -1]
        line.append(int((logits / 0.6).softmax(0).multinomial(1)))
    return line[1:]


def main(model: type[nn.Module] = Transformer, steps: int = 101, width: int = 64) -> list[float]:
    """How far pureaccum and the usual loop are off, the first loss and the last."""
    torch.manual_seed(0)
    words, rows = manual()
    net = model(width)
    print(f"{model.__name__}, {sum(p.numel() for p in net.parameters()):,} parameters")
    off = compare(net, rows[torch.randint(len(rows), (32,))])
    parts = [pa.linear_warmup(5e-3, 10, start=5e-4), pa.cosine_decay(5e-3, steps - 10)]
    rate = pa.join_schedules(parts, [10])
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(rate))
    step = pa.make_step(weighted(net), optimizer, microbatch_size=8)
    state = step.init(pa.functional(net).params)
    losses = []
    for i in range(steps):
        state, info = step(state, rows[torch.randint(len(rows), (32,))])
        losses.append(float(info.loss))
        if i % 20 == 0:
            print(f"  step {i:3}: loss {losses[-1]:.2f} per word, over {int(info.weight)} words")
    print("  a sample of its text:", *(words[i] for i in write(net, state.params)))
    return [*off, losses[0], losses[-1]]


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are too small for more
    main()
    if find_spec("transformers"):
        main(Llama, steps=61)
    else:
        print("for the Llama: pip install transformers")
