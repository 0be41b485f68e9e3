"""Train a ResNet-101 with the batch size that you want, in microbatches of a size that fits.

Choose the batch size that you want and the size that memory allows. The second need not divide the
first. Write the loss for the whole batch, as a mean or a sum, and divide nothing by hand. Running
statistics are updated once per step. In a plain split, BatchNorm normalises each microbatch by
itself, as in every accumulation loop. If the network itself splits the batch, BatchNorm normalises
with the whole batch, and the gradient is that of the whole batch.

    Run:   python examples/resnet101.py
    Needs: no extra
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pureaccum as pa


CLASSES = 100
Batch = dict[str, Tensor]


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, added to their input."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *conv_norm(inside, width, 1, 1),
            nn.ReLU(),
            *conv_norm(width, width, 3, stride),
            nn.ReLU(),
            *conv_norm(width, out, 1, 1),
        )
        same = inside == out and stride == 1
        self.short = nn.Identity() if same else nn.Sequential(*conv_norm(inside, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def conv_norm(inside: int, out: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inside, out, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(out)]


def resnet(layers: Sequence[int], width: int = 64) -> nn.Module:
    """A ResNet like torchvision's, with the same initial weights."""
    blocks, inside = [], width
    for i, count in enumerate(layers):
        for j in range(count):
            stride = 2 if i > 0 and j == 0 else 1
            blocks.append(Bottleneck(inside, width * 2**i, stride))
            inside = 4 * width * 2**i
    stem = [*conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES)]
    net = nn.Sequential(*stem, *blocks, *head)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net


def make_batch(rows: int, pixels: int, dtype: torch.dtype = torch.float32) -> Batch:
    image = torch.randn(rows, 3, pixels, pixels, dtype=dtype)
    return {"image": image, "label": torch.randint(CLASSES, (rows,))}


def make_step(net: nn.Module, size: int | None, reduction: str = "mean", exact: bool = False):
    """The step, for a loss that is a mean or a sum, and its first state."""
    fn = pa.functional(net, microbatch_size=size if exact else None)

    def loss(params: Batch, batch: Batch, buffers: Batch) -> tuple[Tensor, Batch]:
        out, new_buffers = fn.apply(params, buffers, batch["image"])
        return cross_entropy(out, batch["label"], reduction=reduction), new_buffers

    # unless exact, each microbatch is normalised by itself, which raises without check=False
    options = {"reduction": reduction, "buffers": "pooled", "check": False}
    step = pa.make_step(loss, pa.adam(5e-4), microbatch_size=None if exact else size, **options)
    return step, step.init(fn.params, buffers=fn.buffers)


def main(
    desired_batch_size: int = 100,
    tolerable_batch_size: int = 30,
    layers: Sequence[int] = (3, 4, 23, 3),
    width: int = 16,
    steps: int = 2,
) -> dict[str, pa.StepInfo]:
    desired, tolerable = desired_batch_size, tolerable_batch_size
    torch.manual_seed(0)

    print("predicted memory of a step on images of 224 pixels:")
    for size in (desired, tolerable):
        with torch.device("meta"):  # shapes only: nothing is computed or allocated
            step, state = make_step(resnet(layers), None)
            # several microbatches of this size hold no more
            memory = pa.memory_report(step, state, make_batch(size, 224)).predicted
        print(
            f"  {size:3} at a time: {sum(memory) / 1e9:5.2f} GB, of which activations "
            f"{memory.activations / 1e9:5.2f}, parameters {memory.parameters / 1e9:.2f}, "
            f"optimizer {memory.optimizer / 1e9:.2f}, gradients {memory.gradients / 1e9:.2f}"
        )

    print(f"one step of width {width} on images of 32 pixels, in float64:")
    net, batch = resnet(layers, width).double(), make_batch(desired, 32, torch.float64)
    ways = {
        f"{desired} at once": make_step(net, None),
        f"{tolerable} at a time": make_step(net, tolerable),
        f"{tolerable} at a time, summed": make_step(net, tolerable, "sum"),
        f"{tolerable} at a time, exact": make_step(net, tolerable, exact=True),
    }
    infos = {}
    for name, (step, state) in ways.items():
        before = time.perf_counter()
        state, info = step(state, batch)
        infos[name] = info
        print(
            f"  {name:22}: loss {info.loss:8.4f}, norm of the gradient {info.grad_norm:9.2f}, "
            f"{info.microbatches} microbatch{'es' * int(info.microbatches > 1)}, "
            f"{time.perf_counter() - before:.1f} s"
        )

    for _ in range(steps):  # the exact way
        state, info = step(state, batch)
        print(f"Adam step {state.applied} over {int(info.weight)} images: loss {info.loss:.4f}")
    return infos


if __name__ == "__main__":
    main()
