"""What is measured: models, each with its batch and its arithmetic named by a few numbers.

Rule: plain modules, as their users write them; nothing here knows of microbatches. Other packages
are optional, imported when a contender is built and not before; who is missing is named.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


Batch = tuple[Tensor, Tensor]


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


CLASSES = 10  # of images


WORDS = 8192  # of a head


BEFORE, AFTER = 256, 128  # the widths of what towers are given, and of what they give


VOCABULARY, LENGTH = 1000, 32  # of the texts that are classified


SAMPLES = 32  # that go through a sequence side by side


class Model(NamedTuple):
    """``depth`` layers of ``width``, fed ``microbatches`` times ``rows`` rows."""

    width: int
    rows: int
    microbatches: int
    depth: int = 8
    activation: str = "relu"
    bias: bool = True
    kind: str = "mlp"
    precision: str = "fp32"  # or that of autocast

    @property
    def flops(self) -> int:
        """Of one window of square layers: forward, and the two products of backward."""
        return 6 * self.microbatches * self.rows * self.depth * self.width**2

    @property
    def name(self) -> str:
        match self.kind:
            case "mlp":
                name = f"{self.depth} x {self.width} wide"
            case "conv":
                name = f"convnet {self.width} wide"
            case "digits":
                name = f"digits, {self.width} channels"
            case "norms":
                name = f"{self.depth} x conv-BN-ReLU {self.width} wide"
            case "resnet":
                name = f"ResNet-18 {self.width} wide"
            case "views":
                name = f"two views, {self.depth} x conv-BN-ReLU {self.width} wide"
            case "towers":
                name = f"two towers, {self.depth} x {self.width} wide"
            case "chain":
                name = f"{self.depth} residual MLPs {self.width} wide"
            case "dense":
                name = f"MLP {self.width} wide"
            case "head":
                name = f"head {self.width} wide, {WORDS} words"
            case "lstm":
                name = f"LSTM {self.width} wide"
            case "fading":
                name = f"{self.depth} x linear attention {self.width} wide"
            case "grouped":
                name = f"conv-GroupNorm {self.width} wide"
            case "ntk":
                name = "the tutorial's convnet"
            case "tokens":
                name = f"embedding-LayerNorm-MLP {self.width} wide"
            case size:
                name = f"GPT {size}"
        return name if self.precision == "fp32" else f"{name} in {self.precision}"

    @property
    def window(self) -> str:
        return f"{self.microbatches} x {self.rows} samples"

    def __str__(self) -> str:
        return f"{self.name}, {self.window}"


class Size(NamedTuple):
    depth: int
    heads: int
    width: int
    context: int
    vocabulary: int


# "mini" is nanoGPT's for characters, "small" is GPT-2's and meant for CUDA.
SIZES = {
    "tiny": Size(2, 4, 128, 64, 256),
    "mini": Size(6, 6, 384, 256, 128),
    "small": Size(12, 12, 768, 1024, 50304),
}


def gpt(size: str, rows: int, microbatches: int, precision: str = "fp32") -> Model:
    depth, width = SIZES[size].depth, SIZES[size].width
    return Model(width, rows, microbatches, depth, "gelu", False, size, precision)


class Problem(NamedTuple):
    """A model that stands in memory, with the batch of one window."""

    model: Model
    net: nn.Module
    params: dict[str, Tensor]
    criterion: Callable[[Tensor, Tensor], Tensor]
    batch: Batch

    @property
    def rows(self) -> int:
        return self.model.rows

    def loss(self, params: dict[str, Tensor], batch: Batch) -> Tensor:
        """The pure function, in float32."""
        x, y = batch
        return self.criterion(torch.func.functional_call(self.net, params, (x,)), y)

    def under_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function in the precision that is asked for."""
        if self.model.precision == "fp32":
            return function
        return torch.autocast(self.device, HALVES[self.model.precision])(function)

    @property
    def device(self) -> str:
        return self.batch[0].device.type


def build(model: Model, device: str = "cpu") -> Problem:
    """The network, its parameters as a plain dict, what makes a loss of it, and its batch."""
    make = MAKE.get(model.kind, language_model)
    net, criterion, batch = make(model)
    net = net.to(device)
    # Aliases: every contender reads the same weights, and nobody's parameters are counted twice.
    # Detached, since torch.func keeps a graph for each microbatch where they require grad.
    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    return Problem(model, net, params, criterion, tuple(t.to(device) for t in batch))


Made = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Batch]


def stack(model: Model) -> Made:
    activation = {"relu": nn.ReLU, "gelu": nn.GELU}[model.activation]
    layers: list[nn.Module] = []
    for _ in range(model.depth):
        layers += [nn.Linear(model.width, model.width, bias=model.bias), activation()]
    x, y = (torch.randn(model.rows * model.microbatches, model.width) for _ in range(2))
    return nn.Sequential(*layers), F.mse_loss, (x, y)


def convnet(model: Model) -> Made:
    """Images of 32 by 32; channels double where height and width are halved."""
    channels = [3, *(model.width * 2**n for n in range(model.depth))]
    layers: list[nn.Module] = []
    for n in range(model.depth):
        step = 1 if n == 0 else 2
        layers += [nn.Conv2d(channels[n], channels[n + 1], 3, stride=step, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], CLASSES)]
    return nn.Sequential(*layers), F.cross_entropy, images(model, 32)


def images(model: Model, side: int) -> Batch:
    rows = model.rows * model.microbatches
    return torch.randn(rows, 3, side, side), torch.randint(CLASSES, (rows,))


def digits(model: Model) -> Made:
    """Of 8 by 8: two convolutions, and two layers of dense ones."""
    width, rows = model.width, model.rows * model.microbatches
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3)]
    layers += [nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * width, 4 * width), nn.ReLU()]
    layers += [nn.Linear(4 * width, CLASSES)]
    batch = torch.randn(rows, 1, 8, 8), torch.randint(CLASSES, (rows,))
    return nn.Sequential(*layers), F.cross_entropy, batch


def norms(model: Model) -> Made:
    net = convolutions(model.width, model.depth, CLASSES)
    return net, F.cross_entropy, images(model, 16)


def views(model: Model) -> Made:
    """With InfoNCE: of each image two views, which find each other."""
    net = convolutions(model.width, model.depth, AFTER)
    return net, info_nce, (images(model, 16)[0], images(model, 16)[0])


def residual_network(model: Model) -> Made:
    return resnet(model.width, CLASSES), F.cross_entropy, images(model, 32)


def towers(model: Model) -> Made:
    """With InfoNCE: each query finds its passage among all passages of the batch."""
    net = Towers(BEFORE, model.width, model.depth, AFTER)
    queries, passages = (torch.randn(model.rows * model.microbatches, BEFORE) for _ in range(2))
    return net, info_nce, (queries, passages)


def info_nce(queries: Tensor, passages: Tensor) -> Tensor:
    scores = F.normalize(queries) @ F.normalize(passages).T / 0.05
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def chain(model: Model) -> Made:
    x, y = (torch.randn(model.rows * model.microbatches, model.width) for _ in range(2))
    return nn.Sequential(*(Residual(model.width) for _ in range(model.depth))), F.mse_loss, (x, y)


def head(model: Model) -> Made:
    """Of the hidden states of tokens."""
    tokens = model.rows * model.microbatches
    net = nn.Linear(model.width, WORDS, bias=False)
    return net, F.cross_entropy, (torch.randn(tokens, model.width), torch.randint(WORDS, (tokens,)))


def of_tutorial(model: Model) -> Made:
    """The network of torch's tutorial on neural tangent kernels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3), nn.Flatten(-3), nn.Linear(21632, CLASSES)]
    return nn.Sequential(*layers), F.cross_entropy, images(model, 32)


def classifier(model: Model) -> Made:
    """Of vectors, images or texts."""
    rows = model.rows * model.microbatches
    y = torch.randint(CLASSES, (rows,))
    match model.kind:
        case "dense":
            net, x = dense(64, model.width, CLASSES), torch.randn(rows, 64)
        case "grouped":
            net, (x, y) = grouped(model.width, CLASSES), images(model, 32)
        case _:
            net = Tokens(VOCABULARY, model.width, CLASSES)
            x = torch.randint(VOCABULARY, (rows, LENGTH))
    return net, F.cross_entropy, (x, y)


def recurrent(model: Model) -> Made:
    """Rows are steps in time, microbatches are chunks of them."""
    x, y = (torch.randn(model.rows * model.microbatches, SAMPLES, model.width) for _ in range(2))
    lstm = model.kind == "lstm"
    net = nn.LSTM(model.width, model.width) if lstm else Fading(model.width, model.depth)
    return net, F.mse_loss, (x, y)


MAKE: dict[str, Callable[[Model], Made]] = {
    "mlp": stack,
    "conv": convnet,
    "digits": digits,
    "norms": norms,
    "resnet": residual_network,
    "views": views,
    "towers": towers,
    "chain": chain,
    "head": head,
    "ntk": of_tutorial,
    **dict.fromkeys(("lstm", "fading"), recurrent),
    **dict.fromkeys(("dense", "grouped", "tokens"), classifier),
}


def language_model(model: Model) -> Made:
    size = SIZES[model.kind]
    shape = (model.rows * model.microbatches, size.context)
    x, y = (torch.randint(size.vocabulary, shape) for _ in range(2))
    return GPT(size), per_token, (x, y)


def per_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and beside an identity."""

    def __init__(self, size: Size):
        super().__init__()
        # Without biases, as in nanoGPT: those of keys have no gradient but rounding.
        linear = partial(nn.Linear, bias=False)
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width, bias=False) for _ in range(2))
        self.attend = linear(size.width, 3 * size.width)
        self.project = linear(size.width, size.width)
        self.mlp = nn.Sequential(
            linear(size.width, 4 * size.width), nn.GELU(), linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        split = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(out.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """GPT-2 as nanoGPT writes it; the matrix of its tokens is also that of its logits."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return F.linear(self.norm(x), self.tokens.weight)


Grads = Callable[[Batch], dict[str, Tensor]]
Read = Callable[[], dict[str, Tensor]]
Training = Callable[[Batch], Read]


def taken(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The gradients; ``zero_grad(set_to_none=True)`` is done here, so that nothing stays behind."""
    grads = {name: parameter.grad for name, parameter in named}
    for _, parameter in named:
        parameter.grad = None
    return grads


def read(got: dict[str, Tensor] | Read) -> dict[str, Tensor]:
    """A gradient is given as it is, the parameters of a training run to whoever asks for them."""
    return got() if callable(got) else got


def parts(batch: Batch, rows: int) -> Iterable[Batch]:
    """The microbatches, by torch alone."""
    return zip(*(t.split(rows) for t in batch), strict=True)


class Absent(Exception):
    def __str__(self) -> str:
        return f"absent: {self.args[0]}"


def optional(module: str) -> ModuleType:
    """The module, of a package that need not be installed."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and broken
            raise
        raise Absent(f"{package} is not installed") from None


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


class Fading(nn.Module):
    """Blocks of linear attention and an MLP, along a sequence that is given in chunks.

    A state is a matrix for each head, to which the outer products of keys and values are added. It
    fades from one step to the next.
    """

    def __init__(self, width: int, depth: int, heads: int = 4):
        super().__init__()
        self.heads, self.fade = heads, 0.99
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.attend = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.mlps = nn.ModuleList(Residual(width) for _ in range(depth))

    def begin(self, x: Tensor) -> list[Tensor]:
        size = x.shape[-1] // self.heads
        return [x.new_zeros(x.shape[1], self.heads, size, size) for _ in self.norms]

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        at = torch.arange(len(x), device=x.device)[:, None]
        near = (self.fade ** (at - at.T).clamp(min=0)).tril()
        past, left = self.fade ** (at + 1), self.fade ** (len(x) - 1 - at)
        after = []
        blocks = zip(self.norms, self.attend, self.mlps, states, strict=True)
        for norm, attend, mlp, state in blocks:
            split = attend(norm(x)).unflatten(-1, (3, self.heads, -1))
            query, key, value = split.permute(2, 1, 3, 0, 4)
            mixed = (query @ key.mT * near) @ value + (query * past) @ state
            after.append(self.fade ** len(x) * state + (key * left).mT @ value)
            x = mlp(x + mixed.permute(2, 0, 1, 3).flatten(-2))
        return x, after


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
