"""Measure what each method saves: accumulation, rematerialisation, mixed precision, clipping.

All train the same small recurrent language model on the same batch. The table shows the memory that
each holds beyond parameters and batch, the time of a step, and the error of its gradient. (bfloat16
saves time only on hardware that multiplies in it.) Below it, two loops have a line in the wrong
place: they clip or zero the gradients in every iteration, and the checker names the second fault.

    Run:   python examples/which_method.py
    Needs: no extra
"""

import time
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import pureaccum as pa
from pureaccum.testing import check_accumulation


LETTERS = 16
CLIP = 0.05
RATE = 2.0**20  # so large that the update shows all digits of the gradient


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def make_blocks(width: int, depth: int) -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(LETTERS, width), Recurrent(width, width, batch_first=True))
    inside = []
    for _ in range(depth):
        wide, back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        inside.append(Residual(nn.LayerNorm(width), wide, nn.GELU(), back))
    return [first, *inside, nn.Linear(width, LETTERS)]


def make_loss(blocks: list[nn.Module], remat: bool = False) -> Callable[[Any, Tensor], Tensor]:
    """The loss of predicting the next letter; the parameters are one dict per block."""

    def call(block: nn.Module) -> Callable[[Any, Tensor], Tensor]:
        def apply(params: Any, x: Tensor) -> Tensor:
            return functional_call(block, params, (x,))

        return pa.remat(apply) if remat else apply

    calls = [call(block) for block in blocks]

    def loss(params: Any, letters: Tensor) -> Tensor:
        x = letters[:, :-1]
        for f, own in zip(calls, params, strict=True):
            x = f(own, x)
        return cross_entropy(x.transpose(1, 2), letters[:, 1:])

    return loss


def loop(clips: bool, zeroes: bool) -> Callable[..., Any]:
    """Accumulation by hand, with a line in the loop that belongs after or before it."""

    def run(loss: Callable[[Any, Tensor], Tensor], params: Any, microbatches: list[Tensor]) -> Any:
        leaves = optree.tree_map(lambda p: p.detach().clone().requires_grad_(), params)
        optimizer = torch.optim.SGD(optree.tree_leaves(leaves), lr=1.0)
        for part in microbatches:
            if zeroes:
                optimizer.zero_grad()
            (loss(leaves, part) / len(microbatches)).backward()
            if clips:
                clip_grad_norm_(optree.tree_leaves(leaves), CLIP)
        return optree.tree_map(lambda p: p.grad, leaves)

    return run


def off(came: Any, exact: Any) -> float:
    apart = optree.tree_map(torch.sub, came, exact)
    return float(pa.global_norm(apart) / pa.global_norm(exact))


def main(rows: int = 128, size: int = 32, length: int = 16, depth: int = 6) -> dict[str, float]:
    blocks = make_blocks(64, depth)
    params = [pa.functional(block).params for block in blocks]
    loss, lean = make_loss(blocks), make_loss(blocks, remat=True)
    letters = (torch.randint(LETTERS, (rows, 1)) + torch.arange(length) ** 2) % LETTERS
    batch = torch.where(torch.rand(rows, length) < 0.8, letters, torch.zeros_like(letters))

    sgd, clipped = pa.sgd(RATE), pa.chain(pa.clip_by_global_norm(CLIP), pa.sgd(RATE))
    half = pa.Policy(compute=torch.bfloat16)  # not autocast: some CPUs have no LSTM for it
    exact = torch.func.grad(loss)(params, batch)
    exact_clipped = optree.tree_map(lambda g: g * CLIP / pa.global_norm(exact), exact)
    parts, few = list(pa.microbatches(batch, size)), {"microbatch_size": size}
    ways = {
        "whole batch": (pa.make_step(loss, sgd), batch),
        "one microbatch, nothing summed": (pa.make_step(loss, sgd), parts[0]),
        "accumulation": (pa.make_step(loss, sgd, **few), batch),
        "accumulation, clipping": (pa.make_step(loss, clipped, **few), batch),
        "remat": (pa.make_step(lean, sgd), batch),
        "accumulation, remat": (pa.make_step(lean, sgd, **few), batch),
        "bfloat16": (pa.make_step(loss, sgd, policy=half), batch),
        "accumulation, remat, bfloat16": (pa.make_step(lean, sgd, policy=half, **few), batch),
    }
    told = {}
    title = f"{rows} samples in microbatches of {size}"
    print(f"{title:37}{'memory':>10}{'time':>10}   error of the gradient")
    for name, (step, given) in ways.items():
        state, took = step.init(params), []
        held = pa.memory_report(step, state, given).measured.beyond_arguments
        for _ in range(2):
            before = time.perf_counter()
            after, _ = step(state, given)
            took.append(time.perf_counter() - before)
        grads = optree.tree_map(lambda p, q: (p - q) / RATE, params, after.params)
        told[name] = off(grads, exact_clipped if "clip" in name else exact)
        print(f"  {name:35}{held / 1e6:>7.1f} MB{1000 * min(took):>7.0f} ms   {told[name]:.1e}")
    clips, zeroes = loop(clips=True, zeroes=False), loop(clips=False, zeroes=True)
    for name, run in (("clips", clips), ("zeroes", zeroes)):
        told[name] = off(run(loss, params, parts), exact_clipped if clips is run else exact)
        print(f"  {f'a loop that {name} in every iteration':52}   {told[name]:.1e}")

    small = make_blocks(4, 1)
    own = [pa.functional(block).params for block in small]
    for name, run in (("this loss", None), ("the loop that zeroes", zeroes)):
        report = check_accumulation(
            make_loss(small), own, batch[:12, :4], loop=run, raise_on_mismatch=False
        )
        print(f"check of {name}: {str(report).splitlines()[0]}")
        for found in report.diagnoses:
            told[found.kind] = 1.0
            print(f"  {found.kind}: {found.says}\n    {found.mend}")
    return told


if __name__ == "__main__":
    main()
