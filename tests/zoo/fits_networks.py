"""Networks whose samples do not see each other: all of them may be microbatched."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations, rnn

import pureaccum as pa
from tests.zoo.species import (
    ROWS,
    WIDE,
    affine,
    cast,
    fits,
    linear,
    normal,
    parameters,
    ragged_mask,
    squared,
)


# Parameters ------------------------------------------------------------------------------


@fits()
def mlp(dtype):
    return squared(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), dtype, 6)


@fits()
def parameters_that_require_grad(dtype):
    net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3))
    loss, _, batch = squared(net, dtype, 6)
    return loss, dict(net.named_parameters()), batch


@fits()
def nested_tuples(dtype):
    def loss(params, batch):
        (w, b), (v, (scale,)) = params
        return ((torch.tanh(batch @ w + b) @ v * scale) ** 2).mean()

    params = ((torch.randn(6, 4), torch.randn(4)), (torch.randn(4, 2), (torch.tensor(2.0),)))
    return loss, cast(params, dtype), normal(dtype, 6)


@fits()
def an_unused_parameter(dtype):
    params, batch = linear(dtype)

    def loss(params, batch):
        return F.cross_entropy(batch["x"] @ params["w"], batch["label"])

    return loss, params | {"empty": torch.zeros(0, 3, dtype=dtype)}, batch


@fits()
def tied_weights(dtype):
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    return squared(net, dtype, 6)


# Layers ----------------------------------------------------------------------------------


@fits()
def convnet(dtype):
    head = nn.Flatten(), nn.Linear(36, 3)
    return squared(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *head), dtype, 2, 5, 5)


@fits()
def channels_last(dtype):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2))
    loss, params, batch = squared(net.to(memory_format=torch.channels_last), dtype, 2, 5, 5)
    return loss, params, {"x": batch["x"].to(memory_format=torch.channels_last)}


@fits()
def layer_norm(dtype):
    return squared(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), dtype, 6)


@fits()
def group_norm(dtype):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 2))
    return squared(net, dtype, 2, 5, 5)


@fits()
def instance_norm(dtype):
    """What the first bias adds is taken away again: its gradient is nothing but rounding."""
    net = nn.Sequential(nn.Conv2d(2, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 2))
    return squared(net, dtype, 2, 4, 4)


@fits()
def batch_norm_in_eval_mode(dtype):
    norm = nn.BatchNorm1d(8)
    norm(torch.randn(32, 8) * 3 + 1)  # running statistics of something
    return squared(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)).eval(), dtype, 6)


@fits()
def dropout_in_eval_mode(dtype):
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 3))
    return squared(net.eval(), dtype, 6)


@fits()
def dropout_of_nothing(dtype):
    return squared(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3)), dtype, 6)


@fits()
def weight_norm(dtype):
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))
    return squared(net, dtype, 6)


@fits()
def spectral_norm_in_eval_mode(dtype):
    return squared(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3))).eval(), dtype, 6)


# Tokens ----------------------------------------------------------------------------------


@fits()
def encoder_layer(dtype):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return squared(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)), dtype, 3, 8)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, padding=None):
        return self.head(self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])


@fits()
def padded_attention(dtype):
    net, mask = Attention().to(dtype), ragged_mask(4)
    mask[:, 0] = True  # a sample of padding alone has no attention

    def loss(params, batch):
        out = functional_call(net, params, (batch["x"], ~batch["mask"]))
        return pa.Weighted(((out - 1) ** 2)[batch["mask"]].mean(-1).sum(), batch["mask"].sum())

    return loss, parameters(net), {"x": normal(dtype, 4, 8), "mask": mask}


@fits()
def causal_attention(dtype):
    def loss(params, batch):
        q, k, v = (batch @ params).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    return loss, torch.randn(6, 24).to(dtype), normal(dtype, 5, 6)


def _embedded(dtype, sparse):
    def loss(params, batch):
        h = F.embedding(batch["tokens"], params["table"], padding_idx=0, sparse=sparse)
        return F.cross_entropy(h.sum(1), batch["label"])

    batch = {"tokens": torch.randint(0, 7, (ROWS, 3)), "label": torch.randint(0, 3, (ROWS,))}
    return loss, {"table": torch.randn(7, 3).to(dtype)}, batch


@fits()
def embedding(dtype):
    return _embedded(dtype, sparse=False)


@fits()
def sparse_embedding(dtype):
    return _embedded(dtype, sparse=True)


class Last(nn.Module):
    """Of a recurrent network, the last output."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[0][:, -1]


@fits()
def lstm(dtype):
    return squared(Last(nn.LSTM(3, 4, batch_first=True)), dtype, 5, 3)


@fits(WIDE)
def packed_sequences(dtype):
    net = nn.LSTM(3, 4, batch_first=True).to(dtype)

    def loss(params, batch):
        lengths = batch["length"]
        packed = rnn.pack_padded_sequence(batch["x"], lengths, True, enforce_sorted=False)
        return (functional_call(net, params, (packed,))[1][0] ** 2).mean()

    return loss, parameters(net), {"x": normal(dtype, 5, 3), "length": torch.arange(ROWS) % 5 + 1}


@fits()
def experts_without_a_capacity(dtype):
    """Every sample goes to the expert that its router likes best, wherever it stands."""

    def loss(params, batch):
        gate, best = torch.softmax(batch @ params["router"], -1).max(-1)
        out = torch.zeros_like(batch)
        for i, expert in enumerate(params["experts"]):
            (rows,) = torch.nonzero(best == i, as_tuple=True)
            out = out.index_add(0, rows, gate[rows, None] * torch.tanh(batch[rows] @ expert))
        return ((out - 1) ** 2).mean()

    params = {"router": torch.randn(4, 3), "experts": [torch.randn(4, 4) for _ in range(3)]}
    return loss, cast(params, dtype), normal(dtype, 4)


# Several networks ------------------------------------------------------------------------


@fits()
def frozen_teacher(dtype):
    teacher = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)

    def loss(params, batch):
        with torch.no_grad():
            wanted = torch.softmax(teacher(batch["x"]), -1)
        got = torch.log_softmax(affine(params, batch["x"]), -1)
        return F.kl_div(got, wanted, reduction="batchmean")

    return loss, *linear(dtype)


@fits()
def judged_by_a_network_that_trains(dtype):
    """A discriminator whose own parameters still require grad."""
    judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return lambda p, b: F.softplus(-judge(affine(p, b["x"]))).mean(), *linear(dtype)


@fits()
def zeroes_the_gradients_of_a_critic(dtype):
    critic = nn.Linear(3, 1).to(dtype)
    for p in critic.parameters():
        p.grad = torch.ones_like(p)

    def loss(params, batch):
        critic.zero_grad()
        return critic(affine(params, batch["x"])).mean()

    return loss, *linear(dtype)


@fits(has_aux=True)
def preferences(dtype):
    """Two answers each, and a frozen reference."""
    policy = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).to(dtype)
    reference = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).to(dtype).requires_grad_(False)

    def likelihood(scores, words, mask):
        each = scores[:, :-1].log_softmax(-1).gather(-1, words[:, 1:, None])[..., 0]
        return (each * mask[:, 1:]).sum(-1)

    def loss(params, batch):
        gains = []
        for words in (batch["chosen"], batch["rejected"]):
            ours = likelihood(functional_call(policy, params, (words,)), words, batch["mask"])
            gains.append(ours - likelihood(reference(words), words, batch["mask"]))
        margin = 0.1 * (gains[0] - gains[1])
        return -F.logsigmoid(margin).mean(), {"accuracy": (margin > 0).float().mean()}

    words = {name: torch.randint(0, 9, (ROWS, 6)) for name in ("chosen", "rejected")}
    return loss, parameters(policy), words | {"mask": ragged_mask(6).to(dtype)}


@fits()
def an_ensemble(dtype):
    nets = [nn.Linear(6, 1).to(dtype) for _ in range(3)]

    def loss(params, batch):
        def one(own):
            return (functional_call(nets[0], own, (batch["x"],)) - batch["y"]).square().mean()

        return vmap(one)(params).mean()

    params = {name: p.detach() for name, p in stack_module_state(nets)[0].items()}
    return loss, params, {"x": normal(dtype, 6), "y": normal(dtype, 1)}
