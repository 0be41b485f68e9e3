"""Losses as papers have them: detection, speech, survival, contrast, distillation, physics."""

import functools
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, stack_module_state, vmap

import pureaccum as pa
from tests.laws.zoo import (
    ROWS,
    WIDE,
    affine,
    bad,
    good,
    linear,
    normal,
    parameters,
    ragged_mask,
    squared,
)


Case = tuple[Any, Any, Any]


# That fit --------------------------------------------------------------------------------


@good(WIDE)
def ctc(dtype: torch.dtype) -> Case:
    """Its mean divides each row by its own length first, so that it is a mean over rows."""
    params, _ = linear(dtype, 6, 5)

    def loss(params: Any, batch: Any) -> Tensor:
        scores = affine(params, batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch["y"], batch["frames"], batch["letters"])

    batch = {"x": normal(dtype, 9, 6), "y": torch.randint(1, 5, (ROWS, 3))}
    frames, letters = torch.arange(ROWS) % 3 + 7, torch.arange(ROWS) % 3 + 1
    return loss, params, batch | {"frames": frames, "letters": letters}


@good()
def noise_levels_in_the_batch(dtype: torch.dtype) -> Case:
    kept = torch.linspace(0.99, 0.01, 50)

    def loss(params: Any, batch: Any) -> Tensor:
        a = kept[batch["t"]][:, None].to(batch["x"].dtype)
        noisy = a.sqrt() * batch["x"] + (1 - a).sqrt() * batch["noise"]
        weight = (a / (1 - a)).clamp(max=5)
        return (weight * (affine(params, noisy) - batch["noise"]) ** 2).mean()

    params, batch = linear(dtype, 6, 6)
    noise = {"noise": normal(dtype, 6), "t": torch.randint(0, 50, (ROWS,))}
    return loss, params, batch | noise


@good(has_aux=True)
def preferences(dtype: torch.dtype) -> Case:
    """Two answers each, and a frozen reference."""
    policy = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).to(dtype)
    reference = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).to(dtype).requires_grad_(False)

    def likelihood(scores: Tensor, words: Tensor, mask: Tensor) -> Tensor:
        each = scores[:, :-1].log_softmax(-1).gather(-1, words[:, 1:, None])[..., 0]
        return (each * mask[:, 1:]).sum(-1)

    def loss(params: Any, batch: Any) -> tuple[Tensor, Any]:
        gains = []
        for words in (batch["chosen"], batch["rejected"]):
            ours = likelihood(functional_call(policy, params, (words,)), words, batch["mask"])
            gains.append(ours - likelihood(reference(words), words, batch["mask"]))
        margin = 0.1 * (gains[0] - gains[1])
        return -F.logsigmoid(margin).mean(), {"accuracy": (margin > 0).float().mean()}

    words = {name: torch.randint(0, 9, (ROWS, 6)) for name in ("chosen", "rejected")}
    return loss, parameters(policy), words | {"mask": ragged_mask(6).to(dtype)}


@good(WIDE)
def residuals_of_an_equation(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        def u(x: Tensor) -> Tensor:
            return functional_call(net, params, (x,))[0]

        first, second = vmap(jacrev(u))(batch["x"]), vmap(hessian(u))(batch["x"])
        inside, edge = first[:, 1] - second[:, 0, 0], vmap(u)(batch["edge"])
        return inside.square().mean() + edge.square().mean()

    return loss, parameters(net), {"x": normal(dtype, 2), "edge": normal(dtype, 2)}


@good()
def an_ensemble(dtype: torch.dtype) -> Case:
    nets = [nn.Linear(6, 1).to(dtype) for _ in range(3)]

    def loss(params: Any, batch: Any) -> Tensor:
        def one(own: Any) -> Tensor:
            return (functional_call(nets[0], own, (batch["x"],)) - batch["y"]).square().mean()

        return vmap(one)(params).mean()

    params = {name: p.detach() for name, p in stack_module_state(nets)[0].items()}
    return loss, params, {"x": normal(dtype, 6), "y": normal(dtype, 1)}


# That do not -----------------------------------------------------------------------------


@bad("mean of means", dtypes=WIDE)
def ctc_over_all_letters(dtype: torch.dtype) -> Case:
    _, params, batch = ctc(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        scores = affine(params, batch["x"]).log_softmax(-1).transpose(0, 1)
        lengths = batch["frames"], batch["letters"]
        return F.ctc_loss(scores, batch["y"], *lengths, reduction="sum") / lengths[1].sum()

    return loss, params, batch


@bad("batch coupling")
def survival(dtype: torch.dtype) -> Case:
    """Each against all who live longer."""

    def loss(params: Any, batch: Any) -> Tensor:
        order = batch["time"].argsort(descending=True)
        risk, died = affine(params, batch["x"])[order, 0], batch["died"][order]
        return ((torch.logcumsumexp(risk, 0) - risk) * died).sum() / died.sum()

    params, batch = linear(dtype)
    return loss, params, batch | {"time": torch.rand(ROWS), "died": (torch.arange(ROWS) % 2)}


@bad("state", says="queue")
def queue_that_wraps_around(dtype: torch.dtype) -> Case:
    """After two batches the pointer is where it was."""
    net = nn.Linear(6, 3).to(dtype)
    net.register_buffer("queue", torch.randn(2 * ROWS, 3, dtype=dtype))
    net.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def loss(params: Any, batch: Any) -> Tensor:
        keys = functional_call(net, params, (batch["x"],))
        own = (keys * keys.detach()).sum(1, keepdim=True)
        scores = torch.cat([own, keys @ net.queue.clone().T], 1)
        at = (torch.arange(len(keys)) + int(net.pointer)) % len(net.queue)
        net.queue[at] = keys.detach().to(net.queue.dtype)
        net.pointer[0] = (int(net.pointer) + len(keys)) % len(net.queue)
        return (scores.logsumexp(1) - own[:, 0]).mean()

    return loss, parameters(net), {"x": normal(dtype, 6)}


# What a loss keeps -----------------------------------------------------------------------


@good(WIDE)
def a_table_for_every_number_of_rows(dtype: torch.dtype) -> Case:
    """What is cached while it computes in another dtype is not of its own."""

    @functools.lru_cache
    def table(rows: int) -> Tensor:
        return torch.eye(rows, dtype=dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        return (table(len(out)) @ out).square().mean()

    return loss, *linear(dtype)


@bad("state")
def negatives_in_a_deque(dtype: torch.dtype) -> Case:
    seen = deque([torch.randn(3).to(dtype)], maxlen=20)

    def loss(params: Any, batch: Any) -> Tensor:
        out = affine(params, batch["x"])
        scores = out @ torch.stack(list(seen)).T
        seen.extend(out.detach())
        return scores.logsumexp(1).mean()

    return loss, *linear(dtype)


@good()
def zeroes_the_gradients_of_a_critic(dtype: torch.dtype) -> Case:
    critic = nn.Linear(3, 1).to(dtype)
    for p in critic.parameters():
        p.grad = torch.ones_like(p)

    def loss(params: Any, batch: Any) -> Tensor:
        critic.zero_grad()
        return critic(affine(params, batch["x"])).mean()

    return loss, *linear(dtype)


# Coupled, whatever else they keep --------------------------------------------------------


def _against_the_others(net: nn.Module, dtype: torch.dtype, *shape: int) -> Case:
    net.to(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        out = functional_call(net, params, (batch["x"],))
        out = out[0][:, -1] if isinstance(out, tuple) else out
        return (out @ out.T).logsumexp(1).mean()

    return loss, parameters(net), {"x": normal(dtype, *shape)}


@bad("batch coupling")
def in_batch_negatives_of_an_lstm(dtype: torch.dtype) -> Case:
    """It holds its weights twice, and another list of them after a functional call."""
    return _against_the_others(nn.LSTM(6, 4, batch_first=True), dtype, 3, 6)


class Positions(nn.Module):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6.0).to(x.dtype)
        return x + self.table


@bad("batch coupling")
def in_batch_negatives_and_a_table(dtype: torch.dtype) -> Case:
    """The table is made in the first call, and of no row."""
    return _against_the_others(nn.Sequential(Positions(), nn.Linear(6, 4)), dtype, 6)


class Captured(nn.Module):
    """Hooks that it installs in its first call, as output-capturing libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.ready = nn.Linear(6, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.inner.register_forward_hook(lambda module, args, out: None)
            self.ready = True
        assert len(self.inner._forward_hooks) == 1
        return self.inner(x)


@bad("batch coupling")
def in_batch_negatives_and_a_hook(dtype: torch.dtype) -> Case:
    return _against_the_others(Captured(), dtype, 6)


@good(WIDE)
def a_hook_installed_once(dtype: torch.dtype) -> Case:
    return squared(Captured(), dtype, 6)


# Means over what not every row has -------------------------------------------------------


def _focal(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """All rows add, and the positive ones are counted."""
    out, y = affine(params, batch["x"])[:, 0], batch["y"]
    each = F.binary_cross_entropy_with_logits(out, y, reduction="none")
    return (0.25 * (1 - (-each).exp()) ** 2 * each).sum(), y.sum()


@bad("several means", says="row")
def over_the_positives(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        total, positives = _focal(params, batch)
        return total / positives.clamp(min=1)

    params, batch = linear(dtype)
    return loss, params, batch | {"y": (torch.arange(ROWS) % 3 == 0).to(dtype)}


@bad("several means", says="counts as")
def preferences_and_their_likelihood(dtype: torch.dtype) -> Case:
    """A mean over rows, and one over the tokens of the better answers."""
    plain, params, batch = preferences(dtype)
    batch["mask"][:, :2] = 1

    def loss(params: Any, batch: Any) -> Tensor:
        words, mask = batch["chosen"], batch["mask"][:, 1:]
        scores = F.linear(params["0.weight"][words[:, :-1]], params["1.weight"], params["1.bias"])
        each = -scores.log_softmax(-1).gather(-1, words[:, 1:, None])[..., 0]
        return plain(params, batch)[0] + 0.1 * (each * mask).sum() / mask.sum()

    return loss, params, batch


@good()
def totals_without_a_weight(dtype: torch.dtype) -> Case:
    """Rows that are not positive weigh nothing, and their totals are added all the same."""
    _, params, batch = over_the_positives(dtype)
    return lambda params, batch: pa.Weighted(*_focal(params, batch)), params, batch


@bad("mean of means")
def two_rows_of_different_lengths(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        each = affine(params, batch["x"]).square().sum(1)
        return (each * batch["length"]).sum() / batch["length"].sum()

    params, batch = linear(dtype)
    return loss, params, {"x": batch["x"][:2], "length": torch.tensor([1, 3])}
