"""A whole training program: train, evaluate, checkpoint, resume, plot, and say how it goes.

A convnet learns scikit-learn's digits in some seconds. A step takes 128 images in microbatches of
48 (the last one has 32); dropout has a key for each image, so that masks do not depend on that cut.
What is evaluated is the average of the parameters over the steps. Stopped at any time, the run goes
on from its checkpoint to the bits that it would have come to.

    pip install scikit-learn            # the data; and matplotlib, for the picture
    python examples/digits.py           # trains, and writes digits.ckpt and digits.png
    python examples/digits.py --resume  # goes on from digits.ckpt
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pureaccum as pa


STEPS, BATCH, SIZE, EVERY = 300, 128, 48, 50
torch.manual_seed(0)
NET = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.Flatten()),
    nn.Linear(512, 10),
)
FN, AVERAGE = pa.functional(NET), pa.ema(0.98)


def data() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """1,500 digits to learn, and 297 to be tested on."""
    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]
    except ModuleNotFoundError as error:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    batch = {"x": x, "y": torch.tensor(labels)}
    train, test = ({k: v[at] for k, v in batch.items()} for at in (slice(1500), slice(1500, None)))
    return train, test


def loss(params: Any, batch: Any, keys: Any = None) -> Any:
    """The mean over samples, and metrics: each has a weight of its own."""
    x = batch["x"] if keys is None else pa.dropout(batch["x"], 0.2, keys)
    out, _ = FN.apply(params, FN.buffers, x)
    right = out.argmax(1) == batch["y"]
    eights = batch["y"] == 8
    metrics = {
        "accuracy": pa.Weighted(right.sum(), len(right)),
        "of eights": pa.Weighted((right & eights).sum(), eights.sum()),
    }
    return F.cross_entropy(out, batch["y"]), metrics


def make() -> tuple[Any, Any]:
    """The step, and what a run is: the training state, and the average."""
    schedule = pa.join_schedules(
        [pa.linear_warmup(3e-3, 20), pa.cosine_decay(3e-3, STEPS - 20)], [20]
    )
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(schedule))
    step = pa.make_step(loss, optimizer, has_aux=True, microbatch_size=SIZE, keys=True)
    state = step.init(FN.params, seed=0)
    seen = torch.full((STEPS // EVERY, 3), torch.nan)  # loss, and of the test set loss and accuracy
    return step, {"state": state, "average": AVERAGE.init(state.params), "seen": seen}


def batch_of(train: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Drawn from the number of the step: a run that goes on sees what it would have seen."""
    at = torch.randint(len(train["y"]), (BATCH,), generator=torch.Generator().manual_seed(step))
    return {name: x[at] for name, x in train.items()}


def main(folder: str = ".", *, resume: bool = False, stop: int = STEPS) -> dict[str, Any]:
    """Train up to a step; returns what the run is then."""
    (train, test), (step, run) = data(), make()
    checkpoint, began = Path(folder) / "digits.ckpt", time.perf_counter()
    if resume:
        run = pa.load(checkpoint, like=run)
    evaluate = pa.value(loss, has_aux=True, microbatch_size=256)
    for i in range(int(run["state"].attempts), stop):
        state, info = step(run["state"], batch_of(train, i))
        average = AVERAGE.update(run["average"], state.params, info.applied)
        run |= {"state": state, "average": average}
        if (i + 1) % EVERY:
            continue
        held, metrics = evaluate(average.params, test)
        run["seen"][i // EVERY] = torch.stack([info.loss, held, metrics["accuracy"]])
        pa.save(checkpoint, run)
        print(
            f"step {i + 1:3}/{STEPS} {time.perf_counter() - began:5.1f} s   loss {info.loss:.3f} "
            f"({info.aux['accuracy']:.1%} right)   test {held:.3f} ({metrics['accuracy']:.1%}, "
            f"of eights {metrics['of eights']:.1%})"
        )
    plot(run["seen"], Path(folder) / "digits.png")
    return run


def plot(seen: Tensor, path: Path) -> None:
    """The losses of training and test, and the accuracy, if matplotlib is there."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("for the picture: pip install matplotlib")
        return
    mpl.use("agg")
    import matplotlib.pyplot as plt

    steps = EVERY * torch.arange(1, len(seen) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for name, column in (("training", seen[:, 0]), ("test, of the average", seen[:, 1])):
        left.plot(steps, column, "o-", label=name)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    right.plot(steps, 100 * seen[:, 2], "o-")
    right.set(xlabel="step", ylabel="right on the test set, %")
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resume", action="store_true", help="go on from digits.ckpt")
    main(resume=parser.parse_args().resume)
