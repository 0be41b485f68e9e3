"""Networks whose rows are coupled, a chain to rematerialise, and three to clip the samples of.

Rule: as their users write them; nothing here knows of microbatches, and nothing of samples.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def convolutions(width: int, depth: int, classes: int) -> nn.Module:
    """Convolution, BatchNorm and ReLU, ``depth`` times."""
    layers: list[nn.Module] = []
    for n in range(depth):
        layers += [convolution(width if n else 3, width), nn.BatchNorm2d(width), nn.ReLU(True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)


def resnet(width: int, classes: int) -> nn.Module:
    """ResNet-18 for small images: torchvision's but for the stem, which keeps their size."""
    layers: list[nn.Module] = [convolution(3, width), nn.BatchNorm2d(width), nn.ReLU(True)]
    channels = width
    for n in range(4):
        layers += [Basic(channels, width * 2**n, stride=2 if n else 1)]
        channels = width * 2**n
        layers += [Basic(channels, channels)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


class Basic(nn.Module):
    """torchvision's ``BasicBlock``."""

    def __init__(self, before: int, channels: int, stride: int = 1):
        super().__init__()
        self.conv1, self.bn1 = convolution(before, channels, stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = convolution(channels, channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(True)
        self.downsample = None
        if stride != 1 or before != channels:
            one = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(one, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def convolution(before: int, channels: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)


class Towers(nn.Module):
    """A tower for queries and one for passages; a row of each makes a pair."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int):
        super().__init__()
        widths = [inputs, *[width] * (depth - 1), outputs]
        self.queries, self.passages = tower(widths), tower(widths)

    def forward(self, queries: Tensor, passages: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(queries), self.passages(passages)


def tower(widths: list[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """The MLP of a transformer, beside an identity."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def dense(inputs: int, width: int, classes: int) -> nn.Module:
    widths = [(inputs, width), (width, width), (width, classes)]
    first, second, last = (nn.Linear(*w) for w in widths)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


def grouped(width: int, classes: int) -> nn.Module:
    """Two convolutions, the second under GroupNorm; images of 32 by 32 become 8 by 8."""
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width)),
        *(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * width * 64, classes)),
    )


class Tokens(nn.Module):
    """An embedding and a residual MLP, averaged over tokens."""

    def __init__(self, vocabulary: int, width: int, classes: int):
        super().__init__()
        self.embedding, self.block = nn.Embedding(vocabulary, width), Residual(width)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(self.embedding(tokens)).mean(1))
