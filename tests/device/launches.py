"""What a step launches: ceilings, as whole numbers, beside the loop that people write by hand.

    python -m tests.device      prints the table below as it is today, and the loop's

A launch is an operation that is no view. A fused one is one, and so is a foreach one whose tensors
are alike; else it is one for each of them, as on a GPU. A step of k microbatches launches
``microbatch * k + beside``, on every machine. (The loop's first microbatch writes ``.grad`` and
adds nothing to it, so that what it launches beside may be below zero.)
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, gelu, mse_loss

import pureaccum as pa
from tests.device.software import nothing_waits, recorded


class Launches(NamedTuple):
    """How many launches a step makes for each microbatch, and beside them."""

    microbatch: int
    beside: int


COLUMNS = ("mlp", "fp32"), ("mlp", "fp16"), ("gpt", "fp32"), ("gpt", "fp16")
# A change that makes one of these less writes it here: they only go down.
CEILINGS = {
    "foreach": ((54, 166), (93, 205), (201, 376), (307, 415)),
    "foreach, donated": ((54, 149), (93, 188), (201, 324), (307, 363)),
    "fused": ((54, 61), (93, 100), (201, 96), (307, 135)),
    "fused, donated": ((54, 43), (93, 82), (201, 43), (307, 82)),
    "autograd, foreach": ((54, 164), (93, 203), (201, 374), (307, 413)),
    "autograd, foreach, donated": ((54, 147), (93, 186), (201, 322), (307, 361)),
    "autograd, fused": ((54, 59), (93, 98), (201, 94), (307, 133)),
    "autograd, fused, donated": ((54, 41), (93, 80), (201, 41), (307, 80)),
    "fused, donated, Weighted": ((96, 56), (136, 94), (243, 56), (350, 94)),
    "fused, donated, stream": ((70, 68), (110, 106), (217, 103), (324, 141)),
}


# Networks --------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads, self.into, self.out = (
            heads,
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mask: Tensor
        mask = torch.full((length, length), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.into(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * q.shape[-1] ** -0.5 + self.mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.attention, self.norm = Attention(width, heads, length), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.other_norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(gelu(self.up(self.other_norm(x))))


class GPT(nn.Module):
    def __init__(self, words=64, width=32, length=16):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, length) for _ in range(4)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.at: Tensor
        self.register_buffer("at", torch.arange(length), persistent=False)

    def forward(self, x):
        return self.out(self.norm(self.blocks(self.words(x) + self.places(self.at))))


class Task(NamedTuple):
    """A network on the device, batches for it, and its loss."""

    net: nn.Module
    batch: Callable[[int], dict[str, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def mlp():
    layers = (layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU()))
    return Task(
        nn.Sequential(*layers, nn.Linear(16, 4)).to("cuda"),
        lambda rows: {
            "x": torch.randn(rows, 16, device="cuda"),
            "y": torch.randn(rows, 4, device="cuda"),
        },
        lambda out, y: mse_loss(out.float(), y),
    )


def gpt():
    def words(rows):
        return torch.randint(0, 64, (rows, 16), device="cuda")

    return Task(
        GPT().to("cuda"),
        lambda rows: {"x": words(rows), "y": words(rows)},
        lambda out, y: cross_entropy(out.float().flatten(0, 1), y.flatten()),
    )


NETWORKS = {"mlp": mlp, "gpt": gpt}  # of 18 and of 53 leaves
ROWS = 2  # of a microbatch


# Steps: each gives a function that makes one, of so many microbatches --------------------------


def by_hand(task, half, count, fused):
    """As in torch's examples: AdamW, clipping, a GradScaler."""
    params, batch = [*task.net.parameters()], task.batch(ROWS * count)
    variant = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(params, lr=1e-3, **variant)
    scaler = torch.amp.GradScaler("cuda", enabled=half, init_scale=8.0)

    def step():
        for part in pa.microbatches(batch, ROWS):
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = task.loss(task.net(part["x"]), part["y"])
            scaler.scale(loss / count).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def of_ours(task, half, count, fused, donate, engine="func", weighted=False, stream=False):
    def loss(params, part):
        found = task.loss(functional_call(task.net, params, (part["x"],)), part["y"])
        if not weighted:
            return found
        weight = torch.full((), float(part["x"].numel()), device="cuda")
        return pa.Weighted(found * weight, weight)

    scaled = {}
    if half:
        policy, scale = pa.Policy(autocast=torch.float16), pa.dynamic_loss_scale(8.0)
        scaled = {"policy": policy, "loss_scale": scale}
    optimizer = pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-3, fused=fused))
    options = {"microbatch_size": ROWS, "engine": engine, "donate": donate, **scaled}
    step = pa.make_step(loss, optimizer, check=False, **options)  # asked, it launches more
    batch = task.batch(ROWS * count)
    state = step.init(dict(task.net.named_parameters()))

    def run():
        nonlocal state
        if not stream:
            state, _ = step(state, batch)
            return
        window = step.begin(state)
        for part in pa.microbatches(batch, ROWS):
            window = step.update(state, window, part)
        state, _ = step.apply(state, window)

    return run


LOOPS = {
    "by hand, foreach": partial(by_hand, fused=False),
    "by hand, fused": partial(by_hand, fused=True),
}
FORMS = {
    "foreach": partial(of_ours, fused=False, donate=False),
    "foreach, donated": partial(of_ours, fused=False, donate=True),
    "fused": partial(of_ours, fused=True, donate=False),
    "fused, donated": partial(of_ours, fused=True, donate=True),
    "autograd, foreach": partial(of_ours, fused=False, donate=False, engine="autograd"),
    "autograd, foreach, donated": partial(of_ours, fused=False, donate=True, engine="autograd"),
    "autograd, fused": partial(of_ours, fused=True, donate=False, engine="autograd"),
    "autograd, fused, donated": partial(of_ours, fused=True, donate=True, engine="autograd"),
    "fused, donated, Weighted": partial(of_ours, fused=True, donate=True, weighted=True),
    "fused, donated, stream": partial(of_ours, fused=True, donate=True, stream=True),
}


@cache
def launched(network, precision, form):
    """What a form launches, of two numbers of microbatches; ours does not wait meanwhile."""
    totals = []
    for count in (2, 4):
        torch.manual_seed(0)
        run = {**LOOPS, **FORMS}[form](NETWORKS[network](), precision == "fp16", count)
        run()  # what is done once is done
        with nothing_waits() if form in FORMS else recorded() as seen:
            run()
        assert not seen.copies or form in LOOPS
        totals.append(seen.launches.total())
    microbatch = (totals[1] - totals[0]) // 2
    return Launches(microbatch, totals[0] - 2 * microbatch)


# The tests, and the table ------------------------------------------------------------------------


columns = pytest.mark.parametrize(
    ("network", "precision"),
    [
        pytest.param(*column, marks=[] if column in (COLUMNS[0], COLUMNS[-1]) else pytest.mark.slow)
        for column in COLUMNS
    ],
)


@columns
@pytest.mark.parametrize("form", FORMS)
def test_launches_stay_below_their_ceilings(form, network, precision):
    found = launched(network, precision, form)
    ceiling = Launches(*CEILINGS[form][COLUMNS.index((network, precision))])
    assert found.microbatch <= ceiling.microbatch
    assert found.beside <= ceiling.beside


@columns
@pytest.mark.parametrize("form", ["fused, donated", "autograd, fused, donated"])
def test_a_microbatch_launches_no_more_than_by_hand(form, network, precision):
    by_hand = launched(network, precision, "by hand, fused")
    assert launched(network, precision, form).microbatch <= by_hand.microbatch


@pytest.mark.parametrize("donate", [False, True])
def test_an_average_launches_two_selections_a_leaf_and_four_kernels(donate):
    """Nobody knows whether it is the first update, nor whether it is applied."""
    average, found = pa.ema(0.9), []
    flag = torch.ones((), dtype=torch.bool, device="cuda")
    for count in (4, 8):
        params = [torch.ones(3, device="cuda") for _ in range(count)]
        state = average.update(average.init(params), params)
        with nothing_waits() as seen:
            average.update(state, params, flag, donate=donate)
        found.append(seen.launches.total())
    assert found[0] <= 2 * 4 + 4
    assert found[1] <= 2 * 8 + 4


def table():
    """What is launched today, as it is written above; and for 8 microbatches, beside the loop."""
    found = {form: [launched(*c, form) for c in COLUMNS] for form in (*LOOPS, *FORMS)}
    of_8 = {form: [8 * x.microbatch + x.beside for x in row] for form, row in found.items()}
    lines = [" | ".join(f"{network}, {precision}" for network, precision in COLUMNS)]
    for form, row in found.items():
        lines.append(f'    "{form}": ({", ".join(str(tuple(x)) for x in row)}),')
    lines.append("For 8 microbatches, and of the launches of the loop with the fused optimizer:")
    for form, row in of_8.items():
        ratios = zip(row, of_8["by hand, fused"], strict=True)
        cells = [f"{ours} ({ours / loop:.2f})" for ours, loop in ratios]
        lines.append(f"{form:28s}" + "".join(f"{cell:>14s}" for cell in cells))
    return "\n".join(lines)
