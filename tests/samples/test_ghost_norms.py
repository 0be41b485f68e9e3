"""Clipped sums whose gradients come from layers: those of a loop over the samples, in float64.

A loop takes the gradient of each sample by torch.autograd, clips it as it is written, and adds it.
Nothing but rounding may differ: for each leaf the error is at most the square root of the unit,
times the norms of what is added. Ghost norms are off by no more than what they are made of: of the
products over t the error is one of ``Σ |left[t]| |right[t]|``, to the first power of the unit.
"""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from optree import tree_leaves, tree_map
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pureaccum as pa
from pureaccum._base.torch_internals.modes import seeing
from pureaccum._core.auto_size import counting
from pureaccum._core.writes import known_of
from pureaccum.testing.strategies import pieces, seeds
from tests.draws import examples, generator
from tests.exactly import integers
from tests.rounding import UNIT, gamma
from tests.samples.problems import looped


# of attention, which takes vmap's slow path
pytestmark = [
    pytest.mark.bounds,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.promise("samples"),
]
ROOT = 2.0**-26.5
WIDTH, WORDS = 4, 9


# Losses of one sample: x is (t, WIDTH), tokens are (t,), y is a number ---------------------------


def mlp(p, row):
    h = torch.relu(F.linear(row["x"].flatten()[:WIDTH], p["m"], p["b"]))
    return (F.linear(torch.tanh(h), p["n"], p["c"]).sum() - row["y"]) ** 2


def products(p, row):
    h = torch.tanh(row["x"] @ p["m"] + p["b"])
    h = torch.tanh((p["n"] @ h.mT).mT.mean(0))
    return (torch.addmm(p["c"], h[None], p["o"]).sum() + (p["m2"] @ h).sum() - row["y"]) ** 2


def transposed(p, row):
    h = torch.tanh(row["x"] @ p["m"].T) @ p["n"].transpose(0, 1)
    return ((torch.mm(h, p["o"].t()) @ p["m2"].mT).sum() - row["y"]) ** 2


def texts(p, row):
    h = F.embedding(row["tokens"], p["table"], padding_idx=1)
    h = h + F.embedding(torch.arange(len(h)) % 3, p["places"])  # the same for all samples
    h = h + p["table2"][row["tokens"] - WORDS]
    h = F.layer_norm(h, (WIDTH,), p["b"], p["c"])
    return (F.linear(torch.tanh(h), p["m"]).mean() - row["y"]) ** 2


def tied(p, row):
    h = torch.tanh(F.embedding(row["tokens"], p["table"]) @ p["m"]).mean(0)
    return F.cross_entropy(F.linear(h, p["table"]) * row["y"], row["tokens"][0])


def classified(p, row):
    """Some positions are ignored, but never all of those whose mean is taken."""
    h, y, first = row["x"] @ p["m"], row["tokens"] % WIDTH, torch.arange(len(row["x"])) == 0
    total = F.cross_entropy(h, torch.where(first, 0, y), ignore_index=3)
    total = total + F.cross_entropy(h.T[None], y[None], None, None, 2, reduction="sum")
    total = total + F.cross_entropy((h @ p["n"])[0], y[0], ignore_index=1, reduction="sum")
    by = torch.arange(1.0, 1.0 + WIDTH, dtype=h.dtype)
    total = total + F.cross_entropy(h, y, by) + F.cross_entropy(h, y, label_smoothing=0.1)
    total = total + (F.cross_entropy(h, y, reduction="none") * row["y"]).sum()
    return total + F.cross_entropy(h, h.softmax(-1)) + F.cross_entropy(p["m"], y.repeat(4)[:4])


def recurrent(p, row):
    h = p["b"]
    for x in row["x"]:
        h = torch.tanh(F.linear(h + x, p["m"], p["c"]) + F.linear(x, p["n"]))
    return (h.sum() - row["y"]) ** 2


def crossed(p, row):
    """A matrix that is multiplied from both sides, and read as it is."""
    h = torch.tanh(row["x"] @ p["m"])
    return (F.linear(h, p["m"]).sum() * p["m"][1, 2] + p["s"] - row["y"]) ** 2


def views(p, row):
    flat = p["flat"]
    h = torch.tanh(row["x"] @ flat[:16].view(WIDTH, WIDTH) + flat[16:20])
    return (h.sum() * p["s"] - row["y"]) ** 2


def convolutions(p, row):
    h = F.conv1d(torch.cat([row["x"]] * 2).mT, p["k"], p["b"], padding=1)
    h = F.group_norm(torch.relu(h)[None], 2, p["b"], p["c"])
    h = F.conv2d(h.view(1, 2, 2, -1), p["kk"], padding=(1, 2), stride=(1, 2), groups=2)
    return (F.softplus(h).sum() - row["y"]) ** 2


def written_in_place(p, row):
    h = F.linear(row["x"], p["m"], p["b"]).relu_()
    h = F.conv1d(torch.cat([h, h]).mT, p["k"], p["b"], padding=1).tanh_()
    h = (h.mT @ p["n"]).mul_(0.5)
    h += p["c"]
    return (F.embedding(row["tokens"], p["table"]).mul_(h.sum()).sum() - row["y"]) ** 2


def attention(p, row):
    """Of two heads, some of whose keys a sample hides."""
    q, k, v = ((row["x"] @ p[name]).unflatten(-1, (2, -1)) for name in ("m", "n", "o"))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    hidden = (row["tokens"] == 2) & (torch.arange(len(row["tokens"])) > 0)
    h = F.scaled_dot_product_attention(q, k, v, ~hidden[None])
    h = h + F.scaled_dot_product_attention(h, h, v + p["s"], is_causal=True, scale=0.5)
    h = h + F.scaled_dot_product_attention(h, h, h, attn_mask=q @ k.mT * p["s"])
    h = h + F.scaled_dot_product_attention(h, p["slots"], p["slots"])
    return (torch.tanh(h).mean() - row["y"]) ** 2


LAYER = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True).double()
NAMED = {f"layer.{name}": x.detach() for name, x in LAYER.named_parameters()}


def module(p, row):
    """Of its attention torch shows no products."""
    mine = {name.removeprefix("layer."): p[name] for name in NAMED}
    h = torch.func.functional_call(LAYER, mine, (row["x"][None],))
    return (h.sin().sum() - row["y"]) ** 2


ALL = {
    f.__name__: f
    for f in (
        *(mlp, products, transposed, texts, tied, classified, recurrent),
        *(crossed, views, convolutions, written_in_place, attention, module),
    )
}


def params_of(seed):
    """One tree for all losses: what one does not use has gradient zero."""
    random = generator(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64) * 0.7

    params = {name: normal(WIDTH, WIDTH) for name in ("m", "n", "o")}
    params |= {
        "m2": normal(WIDTH, 2 * WIDTH)[:, ::2],
        "places": normal(3, WIDTH),
        "slots": normal(2, 3, 2),
    }
    params |= {name: normal(WIDTH) for name in ("b", "c")}
    params |= {name: normal(WORDS, WIDTH) for name in ("table", "table2")}
    params |= {"k": normal(WIDTH, WIDTH, 3), "kk": normal(4, 1, 2, 3)}
    return params | NAMED | {"flat": normal(20), "s": normal(), "unused": normal(30, 40)}


def batch_of(seed, rows, times):
    random = generator(seed)
    return {
        "x": torch.randn(rows, times, WIDTH, generator=random, dtype=torch.float64),
        "tokens": torch.randint(WORDS, (rows, times), generator=random),
        "y": torch.randn(rows, generator=random, dtype=torch.float64) * 3,
        "mask": torch.randint(3, (rows,), generator=random).double(),
    }


Clipped = namedtuple("Clipped", "sums, norms, near")


def clipped_by_hand(loss, params, rows, max_norm):
    """The same of gradients that are written out; and how far off rounding may be."""
    grads, apart = looped(loss, params, rows), isinstance(max_norm, dict)
    of = {name: g.reshape(len(g), -1).norm(dim=1) for name, g in grads.items()}
    whole = torch.stack([*of.values()]).norm(dim=0)

    def clipped(name, g):
        norm, most = (of[name], max_norm[name]) if apart else (whole, max_norm)
        return torch.tensordot((most / (norm + 1e-6)).clamp(max=1.0), g, 1)

    sums = {name: clipped(name, g) for name, g in grads.items()}
    return Clipped(sums, of if apart else whole, ROOT * whole.sum())


def check(got, want):
    sums, norms = got
    for name, x in want.sums.items():
        assert (sums[name] - x).norm() <= want.near, name
    pairs = (
        (norms[k] - want.norms[k] for k in norms)
        if isinstance(norms, dict)
        else [norms - want.norms]
    )
    whole = want.norms
    if isinstance(whole, dict):
        whole = torch.stack([*whole.values()]).norm(dim=0)
    assert all((off.abs() <= ROOT * whole).all() for off in pairs)


def short(loss):
    """Whether the gradients of a loss came from its layers."""
    return not known_of(loss).unseen


@pytest.mark.parametrize("name", ALL)
@examples(1 / 3)
@given(
    seed=seeds(),
    rows=st.integers(1, 6),
    times=st.sampled_from([1, 2, 3, 17]),
    size=st.none() | st.integers(1, 4),
    by=st.sampled_from(["number", "tree"]),
    batched=st.booleans(),
    weighted=st.booleans(),
)
def test_clipped_sums_of_layers_are_those_of_a_loop(
    name, seed, rows, times, size, by, batched, weighted
):
    params, batch = params_of(seed), batch_of(seed, rows, times)
    max_norm = 2.0 if by == "number" else {k: 0.2 + i / 7 for i, k in enumerate(params)}

    def loss(params, row):
        row = tree_map(lambda x: x[0], row) if batched else row
        out = ALL[name](params, row)
        return pa.Weighted(out * row["mask"], row["mask"]) if weighted else out

    def total(params, row):
        return ALL[name](params, row) * (row["mask"] if weighted else 1.0)

    clipped = pa.clipped_sum(loss, max_norm, chunk_size=size, keep_batch_dim=batched)
    got = clipped(params, batch)
    each = [tree_map(lambda x: x[0], row) for row in pieces(batch, [1] * rows)]
    check(got, clipped_by_hand(total, params, each, max_norm))
    assert short(loss) == (name != "module")


# What is never made, and what rounding may do ----------------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 64])
@pytest.mark.parametrize("reduce", ["clipped", "sum"])
def test_no_gradient_of_a_sample_is_alive(times, reduce):
    """But the sums, two leaves of them on the way, and activations: of 64 samples not one gradient.

    Sixty-four positions of width 256 are as large as a gradient, and are written out.
    """
    rows, wide = 64, 256
    params = {"a": torch.randn(wide, wide) / 16, "b": torch.randn(wide)}
    params["c"] = torch.randn(wide, wide) / 16

    def loss(p, x):
        return (torch.tanh(F.linear(x, p["a"], p["b"])) @ p["c"]).square().mean()

    x = torch.randn(rows, times, wide)
    clipped = pa.clipped_sum(loss, 1.0)
    summed = pa.per_sample_grad(loss, reduce="sum", chunk_size=rows)
    for call in (clipped, summed):
        call(params, x)  # the first is watched
    with counting() as live:
        (clipped if reduce == "clipped" else summed)(params, x)
    leaf, activations = wide * wide * 4, 4 * rows * times * wide * 4
    gradients = rows * 2 * leaf if times == 64 else 0
    assert live.peak <= 4 * leaf + 2 * activations + gradients
    assert times < 64 or live.peak > rows * leaf


@pytest.mark.parametrize("dtype", UNIT, ids=["float32", "float64"])
@given(seeds())
def test_norms_are_exact_where_what_positions_add_cancels(dtype, seed):
    """Products of all pairs of t in float32 would be off by the square root of its unit."""
    times, wide = 8, 64
    random = generator(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=dtype)

    weight, x, v, c = normal(wide, wide), normal(wide), normal(wide), normal(times)
    c[-1] = -c[:-1].sum() * (1 - 1e-4)

    def loss(w, c):
        return (F.linear(x.expand(times, wide) * c[:, None].sign(), w) @ v * c.abs()).sum()

    _, norms = pa.clipped_sum(loss, 1.0)(weight, c[None])
    # the gradient is v ⊗ Σ c[t] x
    left, right = v.double(), (c.double()[:, None] * x.double()).sum(0)
    size = left.norm() * x.double().norm() * c.double().abs().sum()
    # a product for each cotangent, 2 * wide + times of sums and squares, in float64 or wider
    assert (norms - left.norm() * right.norm()).abs() <= float(gamma(8, UNIT[dtype])) * size


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**90])
def test_norms_are_those_of_products_whose_factors_no_square_holds(scale):
    x, w = torch.ones(3, 4) * scale, torch.ones(2, 4)
    sums, norms = pa.clipped_sum(lambda w, x: F.linear(x, w).sum() / scale, 1e9)(w, x)
    assert torch.equal(norms, torch.full((3,), 8.0).sqrt())
    assert sums.tolist() == [[3.0] * 4] * 2


@given(seeds())
def test_what_is_looked_up_often_has_the_norm_of_its_sum(seed):
    """In a text of two words of opposite cotangents; padding has none."""
    random = generator(seed)
    table = torch.zeros(3, 2, dtype=torch.float64)
    tokens = torch.randint(3, (5, 40), generator=random)
    by = torch.randint(-3, 4, (5, 40), generator=random).double()

    def loss(table, tokens, by):
        return (F.embedding(tokens, table, padding_idx=-1).sum(-1) * by).sum()

    sums, norms = pa.clipped_sum(loss, 1e9, batch_argnums=(1, 2))(table, tokens, by)
    each = torch.zeros(5, 3, dtype=torch.float64).scatter_add_(1, tokens, by)[:, :2]
    assert torch.equal(sums[:2], each.sum(0)[:, None].expand(2, 2))
    want = (2 * each.square().sum(1)).sqrt()
    assert ((norms - want).abs() <= float(gamma(4, UNIT[torch.float64])) * want).all()


@pytest.mark.promise("second run")
@pytest.mark.promise("samples")
def test_the_numbers_drawn_by_a_loss_are_the_same_in_norms_and_in_sums():
    """Of one sample, whose sum is its gradient; and in a loss that is computed twice."""
    net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Tanh(), nn.Linear(50, 4))
    params = {name: x.detach().double() for name, x in net.named_parameters()}
    x = torch.randn(1, 6).double()

    def loss(p, x):
        return torch.func.functional_call(net, p, (x,)).square().sum()

    def odd(p, x):
        return loss(p, x) * torch.func.grad(lambda p: loss(p, x))(p)["0.bias"].square().sum()

    def attending(p, x):
        h = F.dropout(x * p["0.weight"][:4], 0.5)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5).square().sum()

    for each in (loss, odd, attending):
        clipped = pa.clipped_sum(each, 1e9, randomness="different")
        torch.manual_seed(3)
        sums, norms = clipped(params, x)
        torch.manual_seed(3)
        again = pa.clipped_sum(each, 1e9, randomness="different")(params, x)
        norm = torch.cat([g.flatten() for g in sums.values()]).norm()
        assert (norm - norms[0]).abs() <= ROOT * norm
        assert (again[1] - norms).abs() <= ROOT * norm
    assert short(loss)
    assert not short(odd)
    assert not short(attending)


def test_leaves_of_different_dtypes_have_sums_of_their_own():
    params = {"w": torch.randn(4, 4).double(), "v": torch.randn(4, 4), "unused": torch.randn(3)}
    x = torch.randn(5, 4)

    def loss(p, x):
        return F.linear(F.linear(x, p["v"]).double(), p["w"]).square().sum()

    for max_norm in (2.0, {"w": 1.0, "v": 1.0, "unused": 1.0}):
        sums, norms = pa.clipped_sum(loss, max_norm)(params, x)
        want = pa.clipped_sum(loss, max_norm, engine="autograd")(params, x)
        flat = [*zip(sums.values(), want[0].values(), strict=True)]
        flat += zip(tree_leaves(norms), tree_leaves(want[1]), strict=True)
        for a, b in flat:
            assert a.dtype == b.dtype
            assert ((a - b).norm() <= 2.0**-20 * b.norm()).all()
    assert short(loss)


class Other(Tensor):
    """A tensor that has its own way with operations."""


def test_a_leaf_of_another_class_goes_another_way():
    params, x = {"w": torch.randn(4, 4).as_subclass(Other)}, torch.randn(5, 4)

    def loss(p, x):
        return F.linear(x, p["w"]).as_subclass(Tensor).square().sum()

    sums, norms = pa.clipped_sum(loss, 2.0)(params, x)
    plain = {"w": params["w"].as_subclass(Tensor)}
    want = pa.clipped_sum(loss, 2.0, engine="autograd")(plain, x)
    assert ((sums["w"] - want[0]["w"]).norm() <= 2.0**-20 * want[0]["w"].norm()).all()
    assert ((norms - want[1]).abs() <= 2.0**-20 * want[1]).all()
    assert not short(loss)


def padded(p, x):
    return F.embedding(x, p["narrow"], padding_idx=0).double().sin().sum()


def strided(p, x):
    return (p["w"].as_strided((3, 2), (1, 2)) * x[0]).sin().sum()


@pytest.mark.parametrize("loss", [padded, strided], ids=lambda f: f.__name__)
def test_what_vmap_does_wrong_with_copies_goes_another_way(loss):
    """A padding of one sample, and a view of what lies in memory."""
    params = {"narrow": torch.randn(5, 3).half(), "w": torch.randn(5).double()}
    x = torch.arange(12).view(4, 3) % 5
    got = pa.clipped_sum(lambda p, x: loss(p, x), 0.5)(params, x)
    want = pa.clipped_sum(lambda p, x: loss(p, x), 0.5, engine="autograd")(params, x)
    for name, a in got[0].items():
        assert ((a - want[0][name]).abs() <= 2.0**-20).all()
    assert ((got[1] - want[1]).abs() <= 2.0**-20 * want[1]).all()


def test_complex_leaves_go_along_by_copies():
    params = {"w": torch.randn(4, 40).double(), "z": torch.randn(4).cdouble()}
    params |= {"unused": torch.randn(3).cdouble(), "half": torch.randn(4).half()}
    x = torch.randn(5, 40).double()

    def loss(p, x):
        h = F.linear(x, p["w"])
        return (h * p["z"]).sum().abs() ** 2 + (h * p["half"].double()).sum()

    got = pa.clipped_sum(loss, 3.0, chunk_size=2)(params, x)
    want = pa.clipped_sum(loss, 3.0, chunk_size=2, engine="autograd")(params, x)
    for a, b in zip(got[0].values(), want[0].values(), strict=True):
        near = 2.0**-20 if a.dtype == torch.float32 else ROOT
        assert ((a - b).abs() <= near * 15).all()
    assert ((got[1] - want[1]).abs() <= 2.0**-20 * want[1]).all()
    assert short(loss)


@pytest.mark.mechanism
def test_cross_entropy_is_taken_of_all_samples_at_once():
    """Under vmap torch would gather from logarithms, by operations of its decomposition."""
    x, y = torch.randn(4, 3, WIDTH), torch.randint(WIDTH, (4, 3))

    def loss(w, batch):
        return F.cross_entropy(batch[0] @ w, batch[1])

    names = []
    with seeing(before=lambda operation, *_: names.append(str(operation))):  # one of ours
        pa.clipped_sum(loss, 1.0)(torch.eye(WIDTH), (x, y))
    assert names.count("aten.nll_loss_forward.default") == 1
    assert "aten.gather.default" not in names


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is F.linear else out


def test_what_a_mode_makes_of_a_layer_counts():
    w, x = integers(generator(0), 3, 4, bound=3).double(), integers(generator(1), 5, 4, bound=3)

    def loss(w, x):
        return F.linear(x, w).square().sum()

    with Doubled():
        got = pa.per_sample_grad(loss, reduce="sum")(w, x.double())
        want = torch.func.grad(loss)(w, x.double())
    assert torch.equal(got, want)


@pytest.mark.promise("errors")
def test_targets_that_do_not_fit_are_refused_in_the_words_of_torch():
    def loss(w, batch):
        return F.cross_entropy(batch[0] @ w, batch[1])

    x = torch.randn(4, 3, WIDTH)
    for shape in ((4,), (4, 2)):
        y = torch.zeros(shape, dtype=torch.int64)
        for engine in ("vmap", "autograd"):
            with pytest.raises(ValueError, match="batch_size"):
                pa.clipped_sum(loss, 1.0, engine=engine)(torch.eye(WIDTH), (x, y))
