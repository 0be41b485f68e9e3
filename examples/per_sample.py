"""Use the gradients of single samples, of which only a few exist at a time.

A tenth of the labels is wrong, and the gradients of single samples show it. Their norms tell which
labels those are. Clipped and with noise, they add up to the sum that DP-SGD uses. A few random
projections of each tell which training samples support a new sample and which oppose it. Their
scatter tells how large a batch should be. `vmap(grad)` would keep one gradient per sample. Here
each chunk is reduced before the next.

    Run:   python examples/per_sample.py
    Needs: no extra
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

import pureaccum as pa


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(20, 128), nn.GELU(), nn.Linear(128, 10))
AXES = 64  # projections of each gradient
Tensors = dict[str, Tensor]


def loss(params: Tensors, batch: Tensors) -> Tensor:
    return cross_entropy(functional_call(NET, params, (batch["x"],)), batch["y"])


def flat(grads: Tensors) -> Tensor:
    return torch.cat([grad.flatten() for grad in grads.values()])


def main(rows: int = 2000, steps: int = 100, chunk: int = 50) -> dict[str, float]:
    centres = torch.randn(10, 20)

    def drawn(rows: int) -> Tensors:
        y = torch.arange(rows) % 10
        return {"x": centres[y] + torch.randn(rows, 20), "y": y}

    right, new = drawn(rows), drawn(200)
    wrong = torch.rand(rows) < 0.1
    other = (right["y"] + torch.randint(1, 10, (rows,))) % 10
    batch = right | {"y": torch.where(wrong, other, right["y"])}
    params = pa.functional(NET).params
    held = 4 * sum(p.numel() for p in params.values()) / 1e6  # megabytes of a gradient
    print(f"{rows} samples, of which {wrong.float().mean():.0%} have a wrong label")

    # How much do the gradients of microbatches scatter? Training computes them anyway.
    step = pa.make_step(loss, pa.adamw(3e-3), microbatch_size=chunk, noise=True)
    state, running = step.init(params), pa.running_noise_scale(decay=0.9)
    averages = running.init(params)
    for i in range(steps):
        some = torch.randint(rows, (8 * chunk,))
        state, info = step(state, {name: column[some] for name, column in batch.items()})
        averages = running.update(averages, info.noise)
        if i in (9, steps - 1):
            scale, *_, low, high = running.read(averages)
            gain = f"a batch gains little beyond {scale:.0f} samples ({low:.0f} to {high:.0f})"
            print(f"step {i:2}: loss {info.loss:.2f}, {gain}")

    # The loss takes a batch, so each sample is passed as a batch of one.
    how = {"keep_batch_dim": True, "chunk_size": chunk}
    summed = pa.per_sample_grad(loss, reduce="sum", metrics="norm", **how)
    total, norms = summed(state.params, batch)
    largest = norms.topk(int(wrong.sum())).indices
    found = float(wrong[largest].float().mean())
    print(f"\nof the {len(largest)} largest gradients, {found:.0%} have a wrong label")
    print(f"(median norm {norms[wrong].median():.1f}, right labels {norms[~wrong].median():.1f})")

    # The core of DP-SGD: no sample adds more than 1, and noise hides whether it was there.
    clipped, _ = pa.clipped_sum(loss, max_norm=1.0, **how)(state.params, batch)
    noisy = pa.add_noise(clipped, std=1.1, key=pa.fold_in(pa.key(0), steps))
    aim = flat(pa.grad(loss, microbatch_size=chunk)(state.params, right))
    cosines = [float(cosine_similarity(flat(it), aim, 0)) for it in (total, clipped, noisy)]
    print("\nsum of gradients     largest sample    cosine with the right labels' gradient")
    kinds = ("plain", norms.max()), ("clipped", 1.0), ("clipped, with noise", 1.0)
    for (kind, most), cosine in zip(kinds, cosines, strict=True):
        print(f"{kind:20}{most:15.1f}{cosine:21.2f}")

    # Which samples teach the new one? Projections keep the angles between gradients.
    axes = {
        name: pa.normal(pa.fold_in(pa.key(1), i), (AXES, p.numel()))
        for i, (name, p) in enumerate(params.items())
    }
    sketch = pa.per_sample_grad(
        loss,
        transform=lambda grad: sum(axes[name] @ g.flatten() for name, g in grad.items()),
        **how,
    )
    kernel = normalize(sketch(state.params, new)) @ normalize(sketch(state.params, batch)).T
    alike = float((batch["y"][kernel.argmax(1)] == new["y"]).float().mean())
    against = float(wrong[kernel.argmin(1)].float().mean())
    print(f"\nof {len(kernel)} new samples, by {AXES} projections of each gradient:")
    print(f"for {alike:.0%}, the most similar training sample has the same label")
    print(f"for {against:.0%}, the most opposed training sample has a wrong label")
    print(f"\nper-sample gradients: {chunk * held:.1f} MB; vmap(grad): {rows * held:.1f} MB")
    return {"found": found, "plain": cosines[0], "clipped": cosines[1], "against": against}


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
