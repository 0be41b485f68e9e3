"""Networks whose rows do not see each other: all of them may be microbatched."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, rnn

import pureaccum as pa
from tests.laws.zoo import ROWS, WIDE, cast, good, linear, normal, parameters, ragged_mask, squared


Case = tuple[Any, Any, Any]


@good()
def mlp(dtype: torch.dtype) -> Case:
    return squared(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), dtype, 6)


@good()
def parameters_that_require_grad(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3))
    loss, _, batch = squared(net, dtype, 6)
    return loss, dict(net.named_parameters()), batch


@good()
def nested_tuples(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        (w, b), (v, (scale,)) = params
        return ((torch.tanh(batch @ w + b) @ v * scale) ** 2).mean()

    params = ((torch.randn(6, 4), torch.randn(4)), (torch.randn(4, 2), (torch.tensor(2.0),)))
    return loss, cast(params, dtype), normal(dtype, 6)


@good()
def convnet(dtype: torch.dtype) -> Case:
    head = nn.Flatten(), nn.Linear(36, 3)
    return squared(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), *head), dtype, 2, 5, 5)


@good()
def depthwise_and_max_pool(dtype: torch.dtype) -> Case:
    depthwise = nn.Conv2d(2, 4, 3, groups=2, padding=1)
    tail = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return squared(nn.Sequential(depthwise, *tail), dtype, 2, 4, 4)


@good()
def channels_last(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2))
    loss, params, batch = squared(net.to(memory_format=torch.channels_last), dtype, 2, 5, 5)
    return loss, params, {"x": batch["x"].to(memory_format=torch.channels_last)}


@good()
def layer_norm(dtype: torch.dtype) -> Case:
    return squared(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), dtype, 6)


@good()
def group_norm(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 2))
    return squared(net, dtype, 2, 5, 5)


@good()
def rms_norm(dtype: torch.dtype) -> Case:
    return squared(nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)), dtype, 6)


@good()
def instance_norm(dtype: torch.dtype) -> Case:
    """What the first bias adds is taken away again: its gradient is nothing but rounding."""
    net = nn.Sequential(nn.Conv2d(2, 4, 2), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 2, 2))
    return squared(net, dtype, 2, 4, 4)


@good()
def batch_norm_in_eval_mode(dtype: torch.dtype) -> Case:
    norm = nn.BatchNorm1d(8)
    norm(torch.randn(32, 8) * 3 + 1)  # running statistics of something
    return squared(nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)).eval(), dtype, 6)


@good()
def dropout_in_eval_mode(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 3))
    return squared(net.eval(), dtype, 6)


@good()
def dropout_of_nothing(dtype: torch.dtype) -> Case:
    return squared(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3)), dtype, 6)


@good()
def encoder_layer(dtype: torch.dtype) -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return squared(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)), dtype, 3, 8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0])


@good()
def multihead_attention(dtype: torch.dtype) -> Case:
    return squared(Attention(), dtype, 4, 8)


@good()
def padded_attention(dtype: torch.dtype) -> Case:
    net, mask = Attention().to(dtype), ragged_mask(4)
    mask[:, 0] = True  # a row of padding alone has no attention

    def loss(params: Any, batch: Any) -> pa.Weighted:
        out = functional_call(net, params, (batch["x"], ~batch["mask"]))
        return pa.Weighted(((out - 1) ** 2)[batch["mask"]].mean(-1).sum(), batch["mask"].sum())

    return loss, parameters(net), {"x": normal(dtype, 4, 8), "mask": mask}


@good()
def bias_of_the_keys(dtype: torch.dtype) -> Case:
    """A softmax does not see it: its gradient is nothing but rounding."""

    def loss(params: Any, batch: Any) -> Tensor:
        query, key = batch @ params["q"], batch @ params["k"] + params["k_bias"]
        scores = torch.softmax(query @ key.mT, -1)
        return ((scores @ batch - 1) ** 2).mean()

    shapes = {"q": (6, 4), "k": (6, 4), "k_bias": (4,)}
    return loss, cast({k: torch.randn(s) for k, s in shapes.items()}, dtype), normal(dtype, 5, 6)


@good()
def causal_attention(dtype: torch.dtype) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        q, k, v = (batch @ params).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    return loss, torch.randn(6, 24).to(dtype), normal(dtype, 5, 6)


@good()
def an_unused_parameter(dtype: torch.dtype) -> Case:
    params, batch = linear(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(batch["x"] @ params["w"], batch["label"])

    return loss, params | {"empty": torch.zeros(0, 3, dtype=dtype)}, batch


def _embedded(dtype: torch.dtype, sparse: bool) -> Case:
    def loss(params: Any, batch: Any) -> Tensor:
        h = F.embedding(batch["tokens"], params["table"], padding_idx=0, sparse=sparse)
        return F.cross_entropy(h.sum(1), batch["label"])

    batch = {"tokens": torch.randint(0, 7, (ROWS, 3)), "label": torch.randint(0, 3, (ROWS,))}
    return loss, {"table": torch.randn(7, 3).to(dtype)}, batch


@good()
def embedding(dtype: torch.dtype) -> Case:
    return _embedded(dtype, sparse=False)


@good()
def sparse_embedding(dtype: torch.dtype) -> Case:
    return _embedded(dtype, sparse=True)


@good()
def embedding_bag(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.EmbeddingBag(7, 4, mode="mean"), nn.Linear(4, 3))
    loss, params, _ = squared(net, dtype, 6)
    return loss, params, {"x": torch.randint(0, 7, (ROWS, 3))}


@good()
def tied_weights(dtype: torch.dtype) -> Case:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    net[2].weight = net[0].weight
    return squared(net, dtype, 6)


class Last(nn.Module):
    """Of a recurrent network, the last output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0][:, -1]


@good()
def lstm(dtype: torch.dtype) -> Case:
    return squared(Last(nn.LSTM(3, 4, batch_first=True)), dtype, 5, 3)


@good()
def gru(dtype: torch.dtype) -> Case:
    return squared(Last(nn.GRU(3, 4, batch_first=True, bidirectional=True)), dtype, 5, 3)


@good(WIDE)
def packed_sequences(dtype: torch.dtype) -> Case:
    net = nn.LSTM(3, 4, batch_first=True).to(dtype)

    def loss(params: Any, batch: Any) -> Tensor:
        lengths = batch["length"]
        packed = rnn.pack_padded_sequence(batch["x"], lengths, True, enforce_sorted=False)
        return (functional_call(net, params, (packed,))[1][0] ** 2).mean()

    return loss, parameters(net), {"x": normal(dtype, 5, 3), "length": torch.arange(ROWS) % 5 + 1}


@good()
def weight_norm(dtype: torch.dtype) -> Case:
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 3))
    return squared(net, dtype, 6)


@good()
def spectral_norm_in_eval_mode(dtype: torch.dtype) -> Case:
    return squared(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 3))).eval(), dtype, 6)


@good()
def experts_without_a_capacity(dtype: torch.dtype) -> Case:
    """Every row goes to the expert that its router likes best, wherever in the batch it stands."""

    def loss(params: Any, batch: Any) -> Tensor:
        gate, best = torch.softmax(batch @ params["router"], -1).max(-1)
        out = torch.zeros_like(batch)
        for i, expert in enumerate(params["experts"]):
            (rows,) = torch.nonzero(best == i, as_tuple=True)
            out = out.index_add(0, rows, gate[rows, None] * torch.tanh(batch[rows] @ expert))
        return ((out - 1) ** 2).mean()

    params = {"router": torch.randn(4, 3), "experts": [torch.randn(4, 4) for _ in range(3)]}
    return loss, cast(params, dtype), normal(dtype, 4)
