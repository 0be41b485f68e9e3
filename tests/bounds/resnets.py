"""Residual networks in the style of torchvision, of any width, and other nets with BatchNorm."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample(inside, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inside, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def downsample(inside: int, outside: int, stride: int) -> nn.Module | None:
    if stride == 1 and inside == outside:
        return None
    return nn.Sequential(
        nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
    )


class ResNet(nn.Module):
    def __init__(
        self, block: type[Basic | Bottleneck], layers: Sequence[int], width: int, classes: int = 10
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inside, groups = width, []
        for i, count in enumerate(layers):
            out = width * 2**i
            blocks = []
            for j in range(count):
                blocks.append(block(inside, out, 2 if i and not j else 1))
                inside = out * block.expansion
            groups.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = groups
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(width: int) -> ResNet:
    return ResNet(Basic, [2, 2, 2, 2], width)


def resnet101(width: int) -> ResNet:
    return ResNet(Bottleneck, [3, 4, 23, 3], width)
