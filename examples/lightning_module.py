"""Use Lightning with the whole batch's gradient, computed in microbatches.

Lightning divides the loss of each microbatch by `accumulate_grad_batches`. So a microbatch of few
words counts as much as one of many, differently in each term of the loss, and the shorter window at
the end of an epoch is divided by the same number. Here the module uses manual optimization and sets
`p.grad` itself. Optimizer, schedule, clipping and logs stay Lightning's. Each term is divided by
its number of words in the whole batch, on all ranks, and then everything is a sum.

    Run:   python examples/lightning_module.py
    Needs: pip install lightning
"""

import logging
from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import pureaccum as pa


WORDS, LENGTH = 64, 16
SIZE, K = 4, 8  # samples per microbatch, microbatches per step
Tensors = dict[str, Tensor]


def parts(logits: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
    """Sums: the loss over the words of the answers, and the z-loss over all words."""
    nll = cross_entropy(logits[:, :-1].mT, batch["text"][:, 1:], reduction="none")
    return (nll * batch["answer"]).sum(), (logits.logsumexp(-1).square() * batch["mask"]).sum()


def numbers(batch: Tensors) -> tuple[Tensor, Tensor]:
    """How many words each of the two sums has."""
    return batch["answer"].sum(), batch["mask"].sum()


class Usual(lightning.LightningModule):
    def __init__(self, optimizer: Any, clip: float) -> None:
        super().__init__()
        layers = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WORDS)
        self.net = nn.Sequential(*layers).double()
        self.optimizer, self.clip = optimizer, clip

    def training_step(self, batch: Tensors, _: int) -> Tensor:
        (nll, z), (answers, words) = parts(self.net(batch["text"]), batch), numbers(batch)
        loss = nll / answers + 0.1 * z / words
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Microbatched(Usual):
    """Makes one step per batch, and splits it as memory demands."""

    automatic_optimization = False

    def on_fit_start(self) -> None:  # now the module is on its device
        self.fn = pa.functional(self.net)
        grad = partial(pa.grad_and_value, reduction="sum", engine="auto")
        self.gradient = grad(self.loss, microbatch_size=SIZE)

    def over_ranks(self, x: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(x, reduce_op="sum")  # in one process, x itself

    def loss(self, params: Tensors, batch: Tensors, answers: Tensor, words: Tensor) -> Tensor:
        nll, z = parts(self.fn.apply(params, self.fn.buffers, batch["text"])[0], batch)
        return nll / answers + 0.1 * z / words

    def training_step(self, batch: Tensors, _: int) -> None:
        grads, loss = self.gradient(self.fn.params, batch, *map(self.over_ranks, numbers(batch)))
        for name, p in self.net.named_parameters():
            p.grad = self.over_ranks(grads[name])
        self.clip_gradients(self.optimizers(), self.clip, "norm")
        self.optimizers().step()
        self.lr_schedulers().step()
        self.log("loss", self.over_ranks(loss))


WHOLE = Usual, SIZE * K, 1
WAYS = {"Lightning": (Usual, SIZE, K), "pureaccum": (Microbatched, SIZE * K, 1)}
GRADIENT = {"optimizer": partial(torch.optim.SGD, lr=1.0), "clip": 0.0}, 1
STEPS = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "clip": 1.0}, 10
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": -1}


def samples(uneven: bool) -> list[Tensors]:
    """58 texts: 4 to 16 words that end in an answer, or 16 words that are all answer."""
    text, at = torch.randint(WORDS, (58, LENGTH)), torch.arange(LENGTH)
    ends = torch.randint(4, LENGTH + 1, (58, 1)) if uneven else torch.full((58, 1), LENGTH)
    mask, answer = at < ends, (at < ends) & (at >= (ends * torch.rand(58, 1) - 1) * uneven)
    batch = {"text": text, "answer": answer[:, 1:], "mask": mask}
    return [{name: x[i] for name, x in batch.items()} for i in range(58)]


def train(module: Any, rows: int, k: int, data: Any, settings: Any) -> tuple[Tensors, float]:
    """How far each parameter moves, and the last logged loss."""
    torch.manual_seed(0)
    choices, steps = settings
    it = module(**choices)
    start = {name: p.detach().clone() for name, p in it.named_parameters()}
    clip = choices["clip"] if it.automatic_optimization else None
    trainer = lightning.Trainer(
        max_steps=steps, accumulate_grad_batches=k, gradient_clip_val=clip, **QUIET
    )
    trainer.fit(it, DataLoader(data, batch_size=rows))
    moved = {name: p.detach() - start[name] for name, p in it.named_parameters()}
    return moved, float(trainer.callback_metrics["loss"])


def off(moved: Tensors, exact: Tensors) -> float:
    apart = {name: moved[name] - exact[name] for name in exact}
    return float(pa.global_norm(apart) / pa.global_norm(exact))


def main() -> dict[tuple[str, str], list[float]]:
    """The errors of a whole window's gradient, of a short one's, and after ten steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[tuple[str, str], list[float]] = {}
    print(f"{'error':28}{'window':>12}{'short one':>12}{'ten steps':>12}")
    for kind in ("even", "uneven"):
        torch.manual_seed(1)
        data = samples(kind == "uneven")
        runs = (data, GRADIENT), (data[SIZE * K :], GRADIENT), (data, STEPS)
        whole = [train(*WHOLE, *run)[0] for run in runs]
        for way, how in WAYS.items():
            moved = [train(*how, *run)[0] for run in runs]
            found[kind, way] = [off(*pair) for pair in zip(moved, whole, strict=True)]
            said = (f"{x:.1%}" if x > 2**-26 else f"{x:.0e}" for x in found[kind, way])
            print(f"{f'{kind} texts, {way}':28}" + "".join(f"{x:>12}" for x in said))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
