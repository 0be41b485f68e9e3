"""Train a mixture of experts with a balance loss over the whole batch.

For each expert, the balance loss multiplies the share of words sent to it by its mean probability.
That is a product of two means over the batch, not a mean of products over microbatches. So both
factors are summed over microbatches, next to the error, and the loss is a function of the sums.
Nothing is remembered from one microbatch to the next, so rematerialisation counts no word twice.

Other ways compute another loss. A loop takes the balance of each microbatch. A balance per sequence
is a mean over sequences, a separate term. The program prints how far off their gradients are.

    Run:   python examples/mixture_of_experts.py
    Needs: no extra
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import pureaccum as pa


EXPERTS, WIDTH, LENGTH = 4, 16, 8
SIZE, COEFFICIENT = 4, 0.1  # sequences per microbatch
Batch = dict[str, Tensor]


def of_words(params: Batch, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """For each word: its error, its expert, and the probability of each expert."""
    probability = (batch["x"] @ params["router"]).softmax(-1)
    highest, to = probability.max(-1)
    out = torch.einsum("snd,snde->sne", batch["x"], params["experts"][to])  # an expert is a matrix
    error = (out * highest[..., None] - batch["y"]).square().mean(-1)
    return error, one_hot(to, EXPERTS).to(error.dtype), probability


def balance(to: Tensor, probability: Tensor) -> Tensor:
    """From means over words; 1 if all experts get the same share."""
    return EXPERTS * (to * probability).sum(-1)


def over_the_batch(params: Batch, batch: Batch, words: Any = of_words) -> tuple[Tensor, Tensor]:
    """Exact, in microbatches: sums, then plain code over the sums."""

    def sums(params: Batch, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        error, to, probability = words(params, batch)
        return error.sum(), to.sum((0, 1)), probability.sum((0, 1))

    summed = pa.microbatch(sums, microbatch_size=SIZE, reduce="sum")(params, batch)
    error, to, probability = (x / len(batch["x"]) / LENGTH for x in summed)
    even = balance(to, probability)
    return error + COEFFICIENT * even, even


def at_once(params: Batch, batch: Batch) -> Tensor:
    """The same for a batch that fits; for a microbatch, what a loop differentiates."""
    error, to, probability = of_words(params, batch)
    return error.mean() + COEFFICIENT * balance(to.mean((0, 1)), probability.mean((0, 1)))


def over_sequences(params: Batch, batch: Batch) -> Any:
    """A mean over words, plus a mean over sequences."""
    error, to, probability = of_words(params, batch)
    each = balance(to.mean(1), probability.mean(1))
    return pa.Weighted(error.sum(), error.numel()) + COEFFICIENT * pa.Weighted(
        each.sum(), len(each)
    )


WAYS: dict[str, Callable[[Batch, Batch], Batch]] = {
    "of the batch": lambda *given: pa.grad(over_the_batch, has_aux=True)(*given)[0],
    "of the batch, rematerialised": lambda *given: pa.grad(
        lambda params, batch: over_the_batch(params, batch, pa.remat(of_words))[0]
    )(*given),
    "of each microbatch, the loop": pa.grad(at_once, microbatch_size=SIZE, check=False),
    "of each sequence, Weighted": pa.grad(over_sequences, microbatch_size=SIZE),
}


def compare(params: Batch, batch: Batch) -> dict[str, list[float]]:
    """How far off the gradient is, and how far off the part that the balance adds."""
    exact, found = torch.func.grad(at_once)(params, batch), {}
    of_error = torch.func.grad(lambda params: of_words(params, batch)[0].mean())(params)
    of_balance = {name: x - of_error[name] for name, x in exact.items()}
    for way, gradient in WAYS.items():
        off = {name: x - exact[name] for name, x in gradient(params, batch).items()}
        sizes = pa.global_norm(exact), pa.global_norm(of_balance)
        found[way] = [float(pa.global_norm(off) / size) for size in sizes]
        said = (f"{x:.0%}" if x > 2**-12 else "rounding" for x in found[way])
        print(f"  balance {way:30}" + "".join(f"{x:>12}" for x in said))
    return found


def problem(sequences: int = 64) -> tuple[Batch, Batch]:
    """Words of a sequence are alike, so they go to the same experts."""
    torch.manual_seed(0)
    params = {
        "router": torch.randn(WIDTH, EXPERTS) / 4,
        "experts": torch.randn(EXPERTS, WIDTH, WIDTH) / 4,
    }
    x = torch.randn(sequences, 1, WIDTH) + torch.randn(sequences, LENGTH, WIDTH) / 2 + 0.5
    return params, {"x": x, "y": x.abs()}


def main(steps: int = 60, rows: int = 64) -> tuple[float, float]:
    params, batch = problem(rows)
    print(f"{'error of the gradient':40}{'in all':>12}{'balance':>12}")
    compare(params, batch)
    step = pa.make_step(over_the_batch, pa.adamw(1e-2), has_aux=True, aux_reduction="last")
    state = step.init(params)
    losses = []
    for i in range(steps):
        state, info = step(state, batch)
        losses.append(float(info.loss))
        if i % 20 == 0:
            print(f"step {i}: loss {losses[-1]:.3f}, balance {float(info.aux):.3f}")
    print(f"end: loss {losses[-1]:.3f}, balance {float(info.aux):.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
