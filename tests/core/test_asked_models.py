"""Networks and losses that people train: those that fit are never refused, their neighbours are."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import pureaccum as pa
from pureaccum import CoupledLossError
from tests.problems import Around, forget_losses, nobody_was_asked


pytestmark = [
    pytest.mark.parity,
    pytest.mark.promise("refused"),
    pytest.mark.usefixtures(nobody_was_asked.__name__),
]
ROWS, SIZE = 12, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LABELS = torch.arange(ROWS) % 3


class Problem(NamedTuple):
    """A loss of the parameters of a module, and a batch."""

    loss: Callable[[Any, Any], Any]
    module: nn.Module
    batch: Any
    engines: tuple[str, ...] = ("auto", "func", "autograd")


def draw(*shape):
    return torch.randn(ROWS, *shape)


def classified(net, *shape):
    def loss(params, batch):
        return F.cross_entropy(functional_call(net, params, (batch["x"],)).float(), batch["y"])

    return Problem(loss, net, {"x": draw(*shape), "y": LABELS})


def recurrent():
    lstm = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.1)
    return Around(lambda x, lstm, head: head(lstm(x)[0][:, -1]), lstm, nn.Linear(6, 3))


def attention(dropout=0.0):
    def run(x, qkv, head):
        q, k, v = (y.unflatten(-1, (2, 2)).mT for y in qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return head(out.mT.flatten(-2).mean(1))

    return Around(run, nn.Linear(4, 12), nn.Linear(4, 3))


def experts(capacity=0, balanced=False):
    """The best two of four for each sample;

    with a capacity, those samples that do not come too late.
    """

    def run(x, gate, *experts):
        gate = gate(x).softmax(-1)
        best, chosen = gate.topk(2, dim=-1)
        took = F.one_hot(chosen, 4).to(x.dtype)
        if capacity:
            took = took * (took.sum(1).cumsum(0) <= capacity).to(x.dtype)[:, None]
        out = torch.einsum("rk,rke,reo->ro", best, took, torch.stack([f(x) for f in experts], 1))
        return out + 4 * (gate.mean(0) * took.sum(1).mean(0)).sum() if balanced else out

    net = Around(run, nn.Linear(5, 4), *(nn.Linear(5, 3) for _ in range(4)))

    def loss(params, batch):
        return (functional_call(net, params, (batch["x"],)) ** 2).mean()

    return Problem(loss, net, {"x": draw(5)})


class Quantised(nn.Module):
    """The nearest code, straight through."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(5, 2), nn.Linear(2, 5)
        self.codes = nn.Parameter(torch.randn(6, 2))

    def forward(self, x):
        z = self.encode(x)
        code = self.codes[(z[:, None] - self.codes).square().sum(-1).argmin(1)]
        return self.decode(z + (code - z).detach()), z, code


def quantised(perplexity):
    net = Quantised()

    def loss(params, batch):
        x = batch["x"]
        out, z, code = functional_call(net, params, (x,))
        total = F.mse_loss(out, x) + F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach())
        if perplexity:
            share = (-(z[:, None] - params["codes"]).square().sum(-1)).softmax(1).mean(0)
            total = total + (share * share.log()).sum()
        return total

    return Problem(loss, net, {"x": draw(5)})


def policies(advantages, grouped=False, on_policy=True):
    """A clipped ratio; of GRPO, over tokens, with a penalty for being far from a reference."""
    net = nn.Linear(5, 3)
    shape = (ROWS, 4) if grouped else (ROWS,)
    x, taken = torch.randn(*shape, 5), torch.randint(0, 3, shape)
    with torch.no_grad():
        old = net(x).log_softmax(-1).gather(-1, taken[..., None])[..., 0]
        old = old if on_policy else old + 0.3 * torch.randn(shape)
    reward = torch.randn(ROWS)
    if advantages == "with the batch":
        reward = (reward - reward.mean()) / reward.std()

    def loss(params, batch):
        own = functional_call(net, params, (batch["x"],)).log_softmax(-1)
        own, gain = own.gather(-1, batch["taken"][..., None])[..., 0], batch["reward"]
        if advantages == "in the loss":
            gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        gain = gain[:, None] if grouped else gain
        ratio = (own - batch["old"]).exp()
        total = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        if grouped:
            apart = batch["old"] - own
            total = total + 0.04 * (apart.exp() - apart - 1).mean()
        return total

    return Problem(loss, net, {"x": x, "taken": taken, "old": old, "reward": reward})


def critics(inner, statistics=False):
    """Wasserstein's, with a penalty on the norm of the gradient by each sample."""
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(params, batch):
        real, fake, mix = batch["x"], batch["fake"], batch["mix"]
        between = mix * real + (1 - mix) * fake
        total = lambda x: functional_call(net, params, (x,)).sum()  # noqa: E731
        if inner == "torch.func":
            grads = torch.func.grad(total)(between)
        else:
            between = between.detach().requires_grad_()
            with torch.enable_grad():
                (grads,) = torch.autograd.grad(total(between), between, create_graph=True)
        norms = grads.norm(dim=1)
        norms = norms.mean() if statistics else norms
        return (total(fake) - total(real)) / len(real) + 10 * ((norms - 1) ** 2).mean()

    batch = {"x": draw(5), "fake": draw(5), "mix": torch.rand(ROWS, 1)}
    engines = ("auto", "func") if inner == "torch.func" else ("auto", "autograd")
    return Problem(loss, net, batch, engines)


def convolutional(*norms):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        *norms,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def convnet(*norms):
    return classified(convolutional(*norms), 2, 6, 6)


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(20, 3))


FITS = {
    "convnet": convnet,
    "group norm": lambda: convnet(nn.GroupNorm(2, 4)),
    "frozen batch norm": lambda: convnet(nn.BatchNorm2d(4).eval()),
    "LSTM": lambda: classified(recurrent(), 5, 4),
    "attention": lambda: classified(attention(), 5, 4),
    "attention with dropout": lambda: classified(attention(0.2), 5, 4),
    "encoder": lambda: classified(encoder(), 5, 4),
    "experts": experts,
    "vector quantisation": lambda: quantised(perplexity=False),
    "PPO": lambda: policies("with the batch", on_policy=False),
    "PPO on-policy": lambda: policies("with the batch"),
    "GRPO": lambda: policies("with the batch", grouped=True, on_policy=False),
    "GRPO on-policy": lambda: policies("with the batch", grouped=True),
    "critic by torch.func": lambda: critics("torch.func"),
    "critic by autograd": lambda: critics("autograd"),
}
COUPLED = {
    "batch norm": lambda: convnet(nn.BatchNorm2d(4, track_running_stats=False)),
    "experts of a capacity": lambda: experts(capacity=1),
    "experts that are balanced": lambda: experts(balanced=True),
    "codes that are balanced": lambda: quantised(perplexity=True),
    "PPO, standardised in the loss": lambda: policies("in the loss", on_policy=False),
    "GRPO, standardised in the loss": lambda: policies("in the loss", True, on_policy=False),
    "critic whose norms are averaged": lambda: critics("torch.func", statistics=True),
}


def cast(tree, dtype):
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in tree.items()}


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    it = (FITS | COUPLED)[name]()
    it.module.to(dtype)
    params = {k: p.detach().clone() for k, p in it.module.named_parameters()}
    return it._replace(batch=cast(it.batch, dtype)), params


def some(names, *others):
    """Every name in every dtype or so; all but the first of these is slow."""
    return [
        pytest.param(name, other, id=f"{name}-{str(other).removeprefix('torch.')}", marks=marks)
        for i, name in enumerate(names)
        for j, other in enumerate(others)
        for marks in [() if (i + j) % len(others) == 0 else pytest.mark.slow]
    ]


def ask(it, params, calls=8):
    for engine in it.engines:
        grad = pa.grad(it.loss, microbatch_size=SIZE, engine=engine)
        for _ in range(calls):
            grad(params, it.batch)
    pa.value(it.loss, microbatch_size=SIZE)(params, it.batch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), some(FITS, *DTYPES))
def test_what_fits_is_not_refused(name, dtype):
    ask(*made(name, dtype))


@pytest.mark.parametrize(("name", "dtype"), some(COUPLED, *DTYPES))
def test_its_neighbours_are_refused_at_once(name, dtype):
    it, params = made(name, dtype)
    for engine in it.engines:
        with pytest.raises(CoupledLossError):
            pa.grad(it.loss, microbatch_size=SIZE, engine=engine)(params, it.batch)
    with pytest.raises(CoupledLossError):
        pa.value(it.loss, microbatch_size=SIZE)(params, it.batch)


def test_pairs_that_stand_side_by_side_are_refused():
    """Two views of each sample, against all others."""

    def loss(w, x):
        z = F.normalize(x @ w, dim=1)
        scores = (10 * z @ z.T).fill_diagonal_(-torch.inf)
        return F.cross_entropy(scores, torch.arange(len(x)) ^ 1)

    value = pa.value(loss, microbatch_size=8)
    with pytest.raises(CoupledLossError):
        value(torch.randn(6, 3), torch.randn(32, 6))


# Policies of precision -------------------------------------------------------------------


PRECISIONS = {
    "bf16": {"policy": pa.Policy(compute=torch.bfloat16)},
    "fp16": {
        "policy": pa.Policy(compute=torch.float16),
        "loss_scale": pa.dynamic_loss_scale(256.0),
    },
    "autocast": {"policy": pa.Policy(autocast=torch.bfloat16)},
    "scaled": {"loss_scale": pa.dynamic_loss_scale()},
}


def steps(name, precision):
    it, params = made(name)
    step = pa.make_step(it.loss, pa.adamw(1e-3), microbatch_size=SIZE, **PRECISIONS[precision])
    state = step.init(params)
    for _ in range(5):
        state, _ = step(state, it.batch)
        state, _ = step.window(state, pa.microbatches(it.batch, SIZE))


# A policy leaves the statistics of a module that a loss captures wide, and torch's batch norm takes
# no two dtypes; a step takes what requires grad in its loss for captured.
STEPPED = [name for name in FITS if name not in ("frozen batch norm", "critic by autograd")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), some(STEPPED, *PRECISIONS))
def test_what_fits_fits_in_any_precision(name, precision):
    if (name, precision) == ("LSTM", "autocast"):
        it, params = made(name)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                it.loss(params, it.batch)
        except RuntimeError as error:  # a CPU without AVX-512
            pytest.skip(f"torch has no such LSTM on this CPU: {error}")
    steps(name, precision)


@pytest.mark.parametrize(("name", "precision"), some(COUPLED, *PRECISIONS))
def test_its_neighbours_do_not(name, precision):
    with pytest.raises(CoupledLossError):
        steps(name, precision)


# Forty random networks of layers that keep samples apart ------------------------------------


NETWORKS, MANY, LENGTH = 40, 33, 4
THREE = (torch.float32, torch.bfloat16, torch.float64)


def residual(inner):
    def run(x, inner):
        out = inner(x)
        return x + (out[0] if isinstance(out, tuple) else out)

    return Around(run, inner)


def attending(width):
    attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
    return Around(lambda x, attend: attend(x, x, x, need_weights=False)[0], attention)


def along(layer):
    """A layer over the positions of a sample."""
    return Around(lambda x, layer: layer(x.mT).mT, layer)


LAYERS = [
    lambda n: nn.Linear(n, n),
    lambda n: residual(nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))),
    nn.LayerNorm,
    lambda n: residual(nn.GRU(n, n, batch_first=True)),
    lambda n: residual(nn.LSTM(n, n, batch_first=True)),
    lambda n: residual(attending(n)),
    lambda n: along(nn.Conv1d(n, n, 3, padding=1)),
    lambda n: along(nn.GroupNorm(2, n)),
    lambda n: along(nn.InstanceNorm1d(n, affine=True)),
    lambda n: along(nn.BatchNorm1d(n).eval()),
    lambda n: nn.TransformerEncoderLayer(n, 2, n, batch_first=True),
    lambda _: nn.Dropout(0.2),
    lambda _: nn.SiLU(),
    lambda _: nn.RReLU(),
    lambda _: nn.Softmax(-1),
]
LOSSES = {
    "mean": lambda out, y: F.cross_entropy(out.float().mean(1), y),
    "squares": lambda out, y: (out.mean(1) ** 2).mean(),
    "weighted": lambda out, y: pa.Weighted((out.square().mean((1, 2)) * y).sum(), y.sum()),
    "small beside large": lambda out, y: 1e3 + 1e-3 * out.mean(),
    "about zero": lambda out, y: (out - out.detach()).mean(),
}


def network(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    width = random.choice((4, 8, 12))
    layers = [random.choice(LAYERS)(width) for _ in range(random.randint(1, 5))]
    return nn.Sequential(nn.Linear(3, width), *layers, nn.Linear(width, 3))


def sizes(seed, dtype):
    """Of a network that is quick, a few; of the others each size, in one of the dtypes."""
    at = THREE.index(dtype)
    return (
        [1, 2, 3, 4, 7, 32] if seed < 6 and seed % 3 == at else [*range(1 + (at + seed) % 3, 33, 3)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "dtype"),
    [
        pytest.param(
            seed,
            dtype,
            id=f"{seed}-{str(dtype).removeprefix('torch.')}",
            marks=() if seed < 6 and THREE[seed % 3] == dtype else pytest.mark.slow,
        )
        for seed in range(NETWORKS)
        for dtype in THREE
    ],
)
def test_a_network_whose_rows_are_apart_is_not_refused(seed, dtype):
    """At any size."""
    net = network(seed).to(dtype)
    params = {name: p.detach() for name, p in net.named_parameters()}
    kind = [*LOSSES][seed % len(LOSSES)]
    batch = {"x": torch.randn(MANY, LENGTH, 3).to(dtype), "y": torch.arange(MANY) % 3}

    def loss(params, batch):
        return LOSSES[kind](functional_call(net, params, (batch["x"],)), batch["y"])

    for size in sizes(seed, dtype):
        forget_losses()
        value = pa.value(loss, microbatch_size=size)
        for _ in range(3):
            value(params, batch)
        pa.grad(loss, microbatch_size=size, engine="auto")(params, batch)


@pytest.mark.slow
def test_a_batch_norm_among_them_is_refused():
    """The control."""
    for seed in range(10):
        net = nn.Sequential(network(seed), nn.BatchNorm1d(LENGTH, track_running_stats=False))
        params = {name: p.detach() for name, p in net.named_parameters()}

        def loss(params, x, net=net):
            return (functional_call(net, params, (x,)) ** 4).mean()

        with pytest.raises(CoupledLossError):
            pa.value(loss, microbatch_size=4)(params, torch.randn(MANY, LENGTH, 3))
