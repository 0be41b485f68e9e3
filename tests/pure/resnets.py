"""Residual networks in the style of torchvision, of any width, and other nets with BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.pure.networks import Of


class Block(nn.Module):
    """Convolutions of some sizes, the first of size 3 with a stride, each with a BatchNorm."""

    def __init__(self, inside, outside, *convs):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(*conv, bias=False) for conv in convs])
        self.norms = nn.ModuleList([nn.BatchNorm2d(conv[1]) for conv in convs])
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inside, outside, max(conv[3] for conv in convs))

    def forward(self, x):
        out = x
        for conv, norm in zip(self.convs[:-1], self.norms[:-1], strict=True):
            out = self.relu(norm(conv(out)))
        out = self.norms[-1](self.convs[-1](out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def basic(inside, width, stride):
    convs = (inside, width, 3, stride, 1), (width, width, 3, 1, 1)
    return Block(inside, width, *convs)


def bottleneck(inside, width, stride):
    convs = (inside, width, 1, 1), (width, width, 3, stride, 1), (width, 4 * width, 1, 1)
    return Block(inside, 4 * width, *convs)


def downsample(inside, outside, stride):
    if stride == 1 and inside == outside:
        return None
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    def __init__(self, block, layers, width, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inside, blocks = width, []
        for i, count in enumerate(layers):
            for j in range(count):
                blocks.append(block(inside, width * 2**i, 2 if i and not j else 1))
                inside = blocks[-1].convs[-1].out_channels
        self.blocks, self.avgpool = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, x):
        x = self.blocks(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet10(width, classes=10):
    return ResNet(basic, [1, 1, 1, 1], width, classes)


def resnet18(width):
    return ResNet(basic, [2, 2, 2, 2], width)


def resnet101(width):
    return ResNet(bottleneck, [3, 4, 23, 3], width)


# Other ways to put a network together ---------------------------------------------------------


def dense(width=3, layers=3):
    """DenseNet: each layer normalises all that came before it, side by side."""

    def forward(self, x):
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu_(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1).mean((2, 3))

    widths = [width * i for i in range(1, layers + 1)]
    convs = [nn.Conv2d(wide, width, 3, padding=1, bias=False) for wide in widths]
    norms = nn.ModuleList([nn.BatchNorm2d(wide) for wide in widths])
    return Of(forward, norms=norms, convs=nn.ModuleList(convs))


def unet(width=3):
    """Down, up to the size that it had, and the skip beside it."""

    def forward(self, x):
        size = x.shape[-2:]  # a size that goes through all levels
        skip = self.down(x).relu()
        deep = F.interpolate(self.deep(skip), size=size)
        return self.up(torch.cat([skip, deep], 1)).flatten(1)

    return Of(
        forward,
        down=nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)),
        deep=nn.Sequential(nn.Conv2d(width, width, 3, 2), nn.BatchNorm2d(width), nn.GELU()),
        up=nn.Sequential(nn.Conv2d(2 * width, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)),
    )


def inverted_residual(width=3, expand=2):
    """MobileNet: wide inside, depthwise, and linear at the end; hard swish in place."""
    wide = width * expand
    conv = nn.Sequential(
        *(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True)),
        nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
        *(nn.BatchNorm2d(wide), nn.Hardswish(inplace=True)),
        *(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width)),
    )
    return Of(lambda self, x: (x + self.conv(x)).mean((2, 3)), conv=conv)


def two_inputs():
    """One by position and one by name, needed only at the end; a flag, and a tree or None."""

    def forward(self, x, *, side, twice=False, skip=None):
        x = self.norm(self.left(x)) * torch.sigmoid(self.right(side))
        x = self.norm(x) if twice else x
        return x if skip is None else x + skip["a"][:, 1:] * skip["b"][0][:, :3]

    left = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))
    return Of(forward, left=left, norm=nn.BatchNorm1d(3), right=nn.Linear(2, 3))


def several():
    """The output is a tree, with parts of all levels, the input and None among them."""

    def forward(self, x):
        early = self.first(x).exp()
        middle = self.second(self.norm(early))
        deep = self.last(middle)
        return {"deep": (deep, [middle, deep]), "early": early, "input": x, "nothing": None}

    first = {"first": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3)}
    return Of(forward, **first, second=nn.Linear(3, 4), last=nn.BatchNorm1d(4))


def reshaping():
    """The number of rows is read before the first BatchNorm and used behind the last."""

    def forward(self, x):
        rows, channels = x.shape[0], x.size(1)
        x = self.norms[0](x).sin()
        flat = x.reshape(rows, channels, -1).chunk(2, 2)
        y = torch.cat([self.norms[1](flat[0]), flat[1]], 2)
        return self.norms[2](y.transpose(1, 2).reshape(rows, 36, channels)).view(rows, -1)

    norms = nn.BatchNorm2d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(36)
    return Of(forward, norms=nn.ModuleList(norms))


class BatchNormAct2d(nn.BatchNorm2d):
    """timm's: a BatchNorm with its activation, whose forward is torch's with more at its end."""

    def __init__(self, width, **options):
        super().__init__(width, **options)
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


def timm():
    """Subclasses of BatchNorm with forwards of their own, one of them frozen."""
    body = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), BatchNormAct2d(4)),
        *(nn.Conv2d(4, 4, 1), BatchNormAct2d(4, momentum=None)),
        *(nn.Conv2d(4, 4, 1), BatchNormAct2d(4, track_running_stats=False)),
        *(BatchNormAct2d(4).eval(), nn.Conv2d(4, 2, 1), Clipped(2, affine=False)),
    )
    return Of(lambda self, x: self.body(x).mean((2, 3)), body=body)


class StandardisedConv2d(nn.Conv2d):
    """timm's ``StdConv2d``: the weight is standardised by a batch norm, of no batch."""

    def forward(self, input):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0
        ).reshape_as(self.weight)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


def standardised():
    """Standardised weights, beside a BatchNorm and under a parametrization of its weight."""
    first, last = StandardisedConv2d(3, 4, 3), StandardisedConv2d(4, 2, 3)
    body = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), last, nn.GroupNorm(1, 2))
    nn.utils.parametrize.register_parametrization(body[1], "weight", nn.Softplus())
    nn.init.normal_(body[1].bias)
    return Of(lambda self, x: self.body(x).mean((2, 3)), body=body)


def own_function():
    """A batch norm that is called as a function, with running statistics and without."""

    def forward(self, x):
        x = F.batch_norm(self.conv(x), self.mean, self.var, self.scale, training=True, momentum=0.3)
        x = F.batch_norm(x.sin(), None, None, None, self.scale.exp(), True, eps=1e-2)
        return x.mean((2, 3))

    scale = nn.Parameter(torch.linspace(0.5, 2, 4))
    statistics = {"mean": nn.Buffer(torch.zeros(4)), "var": nn.Buffer(torch.ones(4))}
    return Of(forward, conv=nn.Conv2d(3, 4, 3), scale=scale, **statistics)


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


def in_place():
    """Writes to the input, and to what is read before it in the program and after it in levels."""

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

    norms = {name: nn.BatchNorm1d(4) for name in "abc"}
    return Of(forward, **norms, linear=nn.Linear(4, 4), act=nn.LeakyReLU(0.1, inplace=True))


def parallel():
    """Branches of different depth, one of them nobody uses, and a frozen one."""

    def layers(inside):
        return [nn.Linear(inside, 3), nn.BatchNorm1d(3), nn.Softplus()]

    def forward(self, x):
        self.unused(x)
        return self.frozen(self.short(x)) * self.long(x)

    return Of(
        forward,
        short=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        long=nn.Sequential(*layers(4), *layers(3), *layers(3)),
        unused=nn.Sequential(*layers(4), *layers(3), *layers(3), nn.BatchNorm1d(3)),
        frozen=nn.BatchNorm1d(3).eval(),
    )
