"""Residual networks in the style of torchvision, of any width, and other nets with BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn


class Basic(nn.Module):
    expansion = 1

    def __init__(self, inside, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample(inside, width, stride)

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inside, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inside, 4 * width, stride)

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def downsample(inside, outside, stride):
    if stride == 1 and inside == outside:
        return None
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    def __init__(self, block, layers, width, classes=10):
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

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(width):
    return ResNet(Basic, [2, 2, 2, 2], width)


def resnet101(width):
    return ResNet(Bottleneck, [3, 4, 23, 3], width)


# Other ways to put a network together ---------------------------------------------------------


class Dense(nn.Module):
    """DenseNet: each layer normalises all that came before it, side by side."""

    def __init__(self, width=3, layers=3):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(width * i) for i in range(1, layers + 1)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(width * i, width, 3, padding=1, bias=False) for i in range(1, layers + 1)]
        )

    def forward(self, x):
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu_(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1).mean((2, 3))


class UNet(nn.Module):
    """Down, up to the size that it had, and the skip beside it."""

    def __init__(self, width=3):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width))
        self.deep = nn.Sequential(nn.Conv2d(width, width, 3, 2), nn.BatchNorm2d(width), nn.GELU())
        self.up = nn.Sequential(nn.Conv2d(2 * width, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))

    def forward(self, x):
        size = x.shape[-2:]  # a size that goes through all levels
        skip = self.down(x).relu()
        deep = F.interpolate(self.deep(skip), size=size)
        return self.up(torch.cat([skip, deep], 1)).flatten(1)


class InvertedResidual(nn.Module):
    """MobileNet: wide inside, depthwise, and linear at the end; hard swish in place."""

    def __init__(self, width=3, expand=2):
        super().__init__()
        wide = width * expand
        self.conv = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(inplace=True),
            nn.Conv2d(wide, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return (x + self.conv(x)).mean((2, 3))


class TwoInputs(nn.Module):
    """One by position and one by name, needed only at the end; a flag, and a tree or None."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))
        self.norm = nn.BatchNorm1d(3)
        self.right = nn.Linear(2, 3)

    def forward(self, x, *, side, twice=False, skip=None):
        x = self.norm(self.left(x)) * torch.sigmoid(self.right(side))
        if twice:
            x = self.norm(x)
        if skip is not None:
            x = x + skip["a"][:, 1:] * skip["b"][0][:, :3]
        return x


class Several(nn.Module):
    """The output is a tree, with parts of all levels, the input and None among them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.second, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        early = self.first(x).exp()
        middle = self.second(self.norm(early))
        deep = self.last(middle)
        return {"deep": (deep, [middle, deep]), "early": early, "input": x, "nothing": None}


class Reshaping(nn.Module):
    """The number of rows is read before the first BatchNorm and used behind the last."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(36)])

    def forward(self, x):
        rows, channels = x.shape[0], x.size(1)
        x = self.norms[0](x).sin()
        flat = x.reshape(rows, channels, -1).chunk(2, 2)
        y = torch.cat([self.norms[1](flat[0]), flat[1]], 2)
        return self.norms[2](y.transpose(1, 2).reshape(rows, 36, channels)).view(rows, -1)


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's: a BatchNorm with its activation, whose forward is torch's with more at its end."""

    def __init__(self, width, **knobs):
        super().__init__(width, **knobs)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        exponential_average_factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                exponential_average_factor = 1.0 / float(self.num_batches_tracked)
            else:
                exponential_average_factor = self.momentum
        if self.training:
            bn_training = True
        else:
            bn_training = (self.running_mean is None) and (self.running_var is None)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            bn_training,
            exponential_average_factor,
            self.eps,
        )
        x = self.drop(x)
        return self.act(x)


class Clipped(nn.BatchNorm2d):
    """A subclass that calls torch's forward."""

    def forward(self, input):
        return super().forward(input).clamp(-1, 1)


class Timm(nn.Module):
    """Subclasses of BatchNorm with forwards of their own, one of them frozen."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            BatchNormAct2d(4),
            nn.Conv2d(4, 4, 1),
            BatchNormAct2d(4, momentum=None),
            nn.Conv2d(4, 4, 1),
            BatchNormAct2d(4, track_running_stats=False),
            BatchNormAct2d(4).eval(),
            nn.Conv2d(4, 2, 1),
            Clipped(2, affine=False),
        )

    def forward(self, x):
        return self.body(x).mean((2, 3))


class StandardisedConv2d(nn.Conv2d):
    """timm's ``StdConv2d``: the weight is standardised by a batch norm, of no batch."""

    def forward(self, input):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0
        ).reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Standardised(nn.Module):
    """Standardised weights, beside a BatchNorm and under a parametrization of its weight."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            StandardisedConv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            StandardisedConv2d(4, 2, 3),
            nn.GroupNorm(1, 2),
        )
        nn.utils.parametrize.register_parametrization(self.body[1], "weight", nn.Softplus())
        nn.init.normal_(self.body[1].bias)

    def forward(self, x):
        return self.body(x).mean((2, 3))


class OwnFunction(nn.Module):
    """A batch norm that is called as a function, with running statistics and without."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        x = F.batch_norm(self.conv(x), self.mean, self.var, self.scale, training=True, momentum=0.3)
        x = F.batch_norm(x.sin(), None, None, None, self.scale.exp(), True, eps=1e-2)
        return x.mean((2, 3))


class Shared(nn.Module):
    """Two BatchNorms called twice, one weight in two layers, one layer at two places."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.3)
        self.mean = nn.BatchNorm1d(4, momentum=None)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.again = nn.Sequential(self.a, nn.BatchNorm1d(4), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.5, 0.0, 2.0]))

    def forward(self, x):
        scale = self.scale.exp() * self.mask  # of no row: computed wherever it is wanted
        x = self.norm(self.mean(self.a(x))) * scale
        x = self.norm(self.mean(self.b(x.sin()))) + scale
        return self.again(x)


class InPlace(nn.Module):
    """Writes to the input, and to what is read before it in the program and after it in levels."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.linear, self.act = nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        x.mul_(2)
        early = self.linear(x)
        y = self.b(self.a(x.sin()))
        before = y + early  # as it was
        early.mul_(3)
        self.act(y)  # the return value is not used
        early[:, 0] = y[:, 1]
        early += y
        return self.c(early) * before


class Parallel(nn.Module):
    """Branches of different depth, one of them nobody uses, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.short = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.long = nn.Sequential(*self.layers(4), *self.layers(3), *self.layers(3))
        self.unused = nn.Sequential(
            *self.layers(4), *self.layers(3), *self.layers(3), nn.BatchNorm1d(3)
        )
        self.frozen = nn.BatchNorm1d(3).eval()

    def layers(self, inside):
        return [nn.Linear(inside, 3), nn.BatchNorm1d(3), nn.Softplus()]

    def forward(self, x):
        self.unused(x)
        return self.frozen(self.short(x)) * self.long(x)
