"""Train a digit classifier: evaluate, checkpoint, resume, plot and print progress.

A small convnet learns scikit-learn's digits in less than half a minute. Each step takes 128 images
in microbatches of 48 (the last one has 32). Dropout has a key for each image, so its masks do not
depend on the microbatch size. The test set is evaluated with the average of the parameters over the
steps. A run that was stopped resumes from its last checkpoint, and ends with the same bits as one
that was not.

    Run:   python examples/digits.py           # writes digits.ckpt and digits.png
           python examples/digits.py --resume  # continues from digits.ckpt
    Needs: pip install 'pureaccum[demo]'
"""

import argparse
import time
from importlib.util import find_spec
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
    """1,500 digits for training, and 297 for the test."""
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    batch = {"x": x, "y": torch.tensor(labels)}
    train, test = ({k: v[at] for k, v in batch.items()} for at in (slice(1500), slice(1500, None)))
    return train, test


def loss(params: Any, batch: Any, keys: Any = None) -> Any:
    """The mean over samples, and metrics, each with its own weight."""
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
    """The step, and the run: training state, average and history."""
    schedule = pa.join_schedules(
        [pa.linear_warmup(3e-3, 20), pa.cosine_decay(3e-3, STEPS - 20)], [20]
    )
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(schedule))
    step = pa.make_step(loss, optimizer, has_aux=True, microbatch_size=SIZE, keys=True)
    state = step.init(FN.params, seed=0)
    seen = torch.full((STEPS // EVERY, 3), torch.nan)  # training loss, test loss, accuracy
    return step, {"state": state, "average": AVERAGE.init(state.params), "seen": seen}


def batch_of(train: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Drawn from the step number, so a resumed run sees the same batches."""
    at = torch.randint(len(train["y"]), (BATCH,), generator=torch.Generator().manual_seed(step))
    return {name: x[at] for name, x in train.items()}


def main(folder: str = ".", *, resume: bool = False, stop: int = STEPS) -> dict[str, Any]:
    """Train up to step ``stop``, and return the run."""
    (train, test), (step, run) = data(), make()
    checkpoint, began = Path(folder) / "digits.ckpt", time.perf_counter()
    if resume:
        run = pa.load(checkpoint, like=run)
        print(f"resumed from {checkpoint} after {int(run['state'].attempts)} of {STEPS} steps")
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
    """The losses of training and test, and the accuracy, if matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    steps = EVERY * torch.arange(1, len(seen) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for name, column in (("training", seen[:, 0]), ("test, averaged parameters", seen[:, 1])):
        left.plot(steps, column, "o-", label=name)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    right.plot(steps, 100 * seen[:, 2], "o-")
    right.set(xlabel="step", ylabel="test accuracy, %")
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resume", action="store_true", help="continue from digits.ckpt")
    arguments = parser.parse_args()
    packages = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
    if missing := [package for name, package in packages.items() if find_spec(name) is None]:
        raise SystemExit(f"needs {' and '.join(missing)}: pip install 'pureaccum[demo]'")
    main(resume=arguments.resume)
