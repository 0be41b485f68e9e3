"""Networks with BatchNorm: gradients and running statistics of the full batch, however it is cut.

The oracle is the module itself, called on the whole batch, and ``.backward()``. Both sides are in
float64; what is promised is 1e-10 of the gradient's norm.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, target
from hypothesis import strategies as st
from torch import Tensor, nn

import pureaccum as pa
from pureaccum._core.auto_size import counting
from pureaccum.testing.strategies import compositions, seeds
from tests.draws import examples, generator
from tests.problems import near
from tests.pure import resnets
from tests.pure.networks import backward


pytestmark = [pytest.mark.bounds, pytest.mark.promise("coupled")]
PROMISED = 1e-10
Size = int | Sequence[int]
Loss = Callable[[Any, Any], Tensor]  # of what the module returns, and the batch


def norm(tensors):
    return float(torch.stack([x.detach().double().norm() for x in tensors.values()]).norm())


def apart(a, b):
    """Relative to the second."""
    assert list(a) == list(b)
    assert all(a[name].dtype == b[name].dtype for name in b)
    return norm({name: a[name] - b[name] for name in b}) / norm(b)


WAYS = {
    "backward": lambda loss: partial(backward, loss),
    "torch.func": lambda loss: torch.func.grad_and_value(loss, has_aux=True),
    "pa.grad": lambda loss: pa.grad_and_value(loss, has_aux=True, aux_reduction="last"),
}
ways = pytest.mark.parametrize("way", WAYS)


def fit(out, batch):
    """Some loss of float outputs, its target made of the samples."""
    x = batch if isinstance(batch, Tensor) else batch["x"]
    return ((out - x.flatten(1).mean(1, keepdim=True).cos()) ** 3).sum(1).mean()


def plain(module, batch):
    """The module called with the batch, which it may write to."""
    return module(optree.tree_map(torch.clone, batch))


def whole(module, batch, loss_of, call=plain):
    """The full batch, by torch alone; the module stays as it was."""
    module = deepcopy(module)
    loss = loss_of(call(module, batch), batch)
    loss.backward()
    grads = {
        k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in module.named_parameters()
    }
    return grads, loss.detach(), dict(module.named_buffers())


def cut(module, batch, size, loss_of, way="backward", call=plain):
    fn = pa.functional(module, microbatch_size=size)

    def loss(params, batch):
        new = []

        def own(*args, **kwargs):
            out, buffers = fn.apply(params, fn.buffers, *args, **kwargs)
            new.append(buffers)
            return out

        return loss_of(call(own, batch), batch), new[0]

    grads, (value, buffers) = WAYS[way](loss)(fn.params, batch)
    return grads, value, buffers


def check(module, batch, sizes, loss_of=fit, way="backward", call=plain):
    """The worst error of gradients, loss and running statistics."""
    before = deepcopy(module.state_dict())
    want, want_value, want_buffers = whole(module, batch, loss_of, call)
    worst = 0.0
    for size in sizes:
        grads, value, buffers = cut(module, batch, size, loss_of, way, call)
        worst = max(worst, apart(grads, want), abs(float(value / want_value - 1)))
        if want_buffers:
            worst = max(worst, apart(buffers, want_buffers))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} was written to"
    assert worst <= PROMISED
    return worst


# Residual networks ---------------------------------------------------------------------------


def images(rows, size=8):
    return torch.randn(rows, 3, size, size, dtype=torch.float64), torch.arange(rows) % 10


def classify(out, batch):
    return F.cross_entropy(out, batch[1])


def first(module, batch):
    return module(batch[0])


@pytest.mark.slow
@ways
@pytest.mark.parametrize(
    ("make", "width", "sizes"),
    [
        (resnets.resnet18, 8, [3, 1, 5, 11, 16, (3, 7, 1, 5), 32]),
        pytest.param(resnets.resnet101, 4, [3, (3, 7, 1, 5)], marks=pytest.mark.nightly),
    ],
    ids=["resnet18", "resnet101"],
)
def test_a_residual_network_is_that_of_the_full_batch(make, width, sizes, way):
    if way != "backward":
        sizes = sizes[:1]
    check(make(width).double(), images(16), sizes, classify, way, first)


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnets.resnet18, resnets.resnet101])
def test_a_residual_network_accumulated_plainly_is_another(make):
    """The control: each microbatch would be normalised by itself."""
    module, batch = make(4).double(), images(16)
    fn = pa.functional(module)
    want, _, want_buffers = whole(module, batch, classify, first)

    def loss(params, batch):
        out, buffers = fn.apply(params, fn.buffers, batch[0])
        return classify(out, batch), buffers

    options = {"microbatch_size": 4, "has_aux": True, "aux_reduction": "last"}
    with pytest.raises(pa.CoupledLossError, match="batch statistics"):
        pa.grad_and_value(loss, **options)(fn.params, batch)
    grads, (_, buffers) = pa.grad_and_value(loss, **options, check=False)(fn.params, batch)
    assert apart(grads, want) > 1e-2
    assert apart(buffers, want_buffers) > 1e-2


def test_a_contrastive_loss_of_a_network_with_batch_norm_is_the_full_batch_s():
    """Samples meet in the loss too, which is plain code."""

    def pairs(out, batch):
        z = F.normalize(out, dim=1)
        return F.cross_entropy(z @ z.flip(0).T / 0.5, torch.arange(len(z)))

    check(resnets.resnet18(4).double(), images(16), [3, 8], pairs, "torch.func", first)


# Drawn networks -------------------------------------------------------------------------------


@st.composite
def batch_norms(draw, width, kind):
    return kind(
        width,
        eps=draw(st.sampled_from([1e-5, 1e-2])),
        momentum=draw(st.sampled_from([0.1, 0.7, None])),
        affine=draw(st.booleans()),
        track_running_stats=draw(st.booleans()),
    )


KINDS = {  # BatchNorm, what mixes channels, and the shape of a sample
    "rows": (nn.BatchNorm1d, nn.Linear, (3,)),
    "sequences": (nn.BatchNorm1d, lambda a, b: nn.Conv1d(a, b, 3, padding=1), (3, 5)),
    "images": (nn.BatchNorm2d, lambda a, b: nn.Conv2d(a, b, 3, padding=1), (3, 4, 4)),
    "volumes": (nn.BatchNorm3d, lambda a, b: nn.Conv3d(a, b, 1), (3, 2, 3, 2)),
}


@st.composite
def sequentials(draw, name):
    """BatchNorm first, last, twice in a row, or nowhere."""
    kind, mixing, shape = KINDS[name]
    layers = []
    inside = 3
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 2))):
            layers.append(draw(batch_norms(inside, kind)))
        out = draw(st.integers(2, 5))
        layers.append(mixing(inside, out))
        inside = out
        layers.append(
            draw(st.sampled_from([nn.Tanh(), nn.LeakyReLU(0.2, inplace=True), nn.GELU()]))
        )
    for _ in range(draw(st.integers(0, 2))):
        layers.append(draw(batch_norms(inside, kind)))
    return nn.Sequential(*layers, *([nn.Flatten(2), Mean()] if len(shape) > 1 else []))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(2)


@ways
@pytest.mark.parametrize("name", KINDS)
@examples(1 / 2)
@given(data=st.data(), seed=seeds(), rows=st.integers(6, 14))
def test_any_sequence_of_layers_is_the_full_batch(name, way, data, seed, rows):
    """Of six samples at least: of two, a BatchNorm makes 1 and -1, and no gradient is left."""
    torch.manual_seed(seed)
    module = data.draw(sequentials(name)).double()
    for p in module.parameters():
        nn.init.normal_(p)
    x = torch.randn(rows, *KINDS[name][2], dtype=torch.float64) * 3 + 1
    size = data.draw(st.integers(1, rows + 1) | compositions(rows).map(tuple))
    layers = sum(isinstance(m, KINDS[name][0]) for m in module)
    event(f"{layers} batch norms")
    target(check(module, x, [size], way=way))


# Other networks -------------------------------------------------------------------------------


X4 = torch.randn(11, 3, 6, 6, dtype=torch.float64, generator=generator(0))
X = torch.randn(11, 4, dtype=torch.float64, generator=generator(1))
NETWORKS = {
    "dense": (resnets.dense, X4),
    "unet": (resnets.unet, X4),
    "mobilenet": (resnets.inverted_residual, X4),
    "shared": (resnets.Shared, X),
    "in-place": (resnets.in_place, X),
    "parallel": (resnets.parallel, X),
    "timm": (resnets.timm, X4),
    "standardised": (resnets.standardised, X4),
    "own function": (resnets.own_function, X4),
}


@pytest.mark.slow
@ways
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_shapes_are_the_full_batch_s(name, way):
    make, batch = NETWORKS[name]
    check(make().double(), batch, [1, 2, 4, 7, 11, (3, 7, 1)], way=way)


@pytest.mark.slow
@ways
def test_arguments_may_have_names_and_be_no_tensors(way):
    batch = {"x": X, "side": torch.randn(11, 2, dtype=torch.float64)}

    def by_name(module, batch):
        return module(**batch)

    module = resnets.two_inputs().double()
    check(module, batch, [3, 4], way=way, call=by_name)
    for more in ({"twice": True}, {"twice": False}, {"skip": None}, {"skip": {"a": X, "b": [X]}}):
        check(module, batch | more, [3, 4], way=way, call=by_name)


def test_one_function_takes_flags_of_all_kinds_in_turn():
    module = resnets.two_inputs().double()
    fn, side = pa.functional(module, microbatch_size=4), X[:, :2]
    for more in ({}, {"twice": True}, {"skip": {"a": X, "b": [X]}}, {"twice": False}):
        out, _ = fn.apply(fn.params, fn.buffers, X, side=side, **more)
        want = deepcopy(module)(X, side=side, **more)
        near(out, want, PROMISED)


def test_a_module_may_have_outputs_from_all_levels():
    """The output has the module's own containers, and what it was given comes back as it is."""
    module = resnets.several().double()
    fn = pa.functional(module, microbatch_size=4)
    out, _ = fn.apply(fn.params, fn.buffers, X)
    want = deepcopy(module)(X)
    assert list(out) == list(want)
    assert [*map(type, out.values())] == [*map(type, want.values())]
    assert out["nothing"] is None
    assert out["input"] is X
    for mine, its in zip(pa_leaves(out), pa_leaves(want), strict=True):
        near(mine, its, PROMISED)

    def of_all(out, batch):
        return sum((x.sin().sum(1).mean() for x in pa_leaves(out)), torch.zeros(()))

    check(module, X, [4, 11], of_all)


def pa_leaves(out):
    return [out["deep"][0], *out["deep"][1], out["early"], out["input"]]


def test_sizes_may_depend_on_the_number_of_rows():
    """Each microbatch has its own, the shorter last one too."""
    check(resnets.reshaping().double(), X4, [4, 3, (3, 7, 1)])


class Scratch(nn.Module):
    """Makes tensors of sizes alone, above a BatchNorm, and writes to them below it."""

    def __init__(self, make):
        super().__init__()
        self.make, self.norm, self.last = make, nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        held = self.make(x)
        y = self.norm(x)
        held.add_(y)
        return self.last(held)


SCRATCH = {
    "zeros": lambda x: torch.zeros(x.shape, dtype=x.dtype),
    "zeros and one": lambda x: torch.zeros(x.shape, dtype=x.dtype) + 1,
    "full": lambda x: torch.full((x.size(0), x.size(1)), 2.0, dtype=torch.float64),
    "arange": lambda x: torch.arange(x.shape[1], dtype=x.dtype).expand(x.shape).contiguous(),
}


@pytest.mark.parametrize("make", SCRATCH.values(), ids=SCRATCH)
def test_what_is_made_of_sizes_may_be_written_to(make):
    check(Scratch(make).double(), X, [1, 4, 11])


def test_a_loss_may_weigh_rows_by_tokens():
    """A weight for each sample, and no mean of the samples."""
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 1)).double()
    weight = torch.arange(11.0, dtype=torch.float64)  # the first sample weighs nothing
    check(module, X, [1, 4], lambda out, _: (out[:, 0] ** 2 * weight).sum() / weight.sum())


def test_a_frozen_batch_norm_stays_frozen():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double().eval()
    check(module, X, [3, 11])
    check(nn.Sequential(module, nn.BatchNorm1d(3)).double(), X, [3, 11])


def test_in_eval_mode_a_batch_norm_without_running_statistics_looks_at_the_batch():
    norm = nn.BatchNorm1d(3, track_running_stats=False).eval()
    check(nn.Sequential(nn.Linear(4, 3), norm, nn.Tanh()).double(), X, [3, 11])


def test_running_statistics_may_be_tracked_no_more():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    module[1].track_running_stats = False
    check(module, X, [3, 11])


def test_parameters_may_be_frozen_or_left_out():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    module[0].requires_grad_(False)
    module[1].weight.requires_grad_(False)
    fn = pa.functional(module, microbatch_size=4)
    some = {name: p for name, p in fn.params.items() if not name.startswith("2")}
    assert list(some) == ["1.bias"]
    out, _ = fn.apply(some, fn.buffers, X)
    near(out, deepcopy(module)(X), PROMISED)
    grads = torch.func.grad(lambda p: fit(fn.apply(p, fn.buffers, X)[0], X))(fn.params)
    want = whole(module, X, lambda out, batch: fit(out, batch))[0]
    assert apart(grads, {name: want[name] for name in grads}) <= PROMISED


def test_modes_and_attributes_are_those_of_each_call():
    """One ``functional``, whose module is changed between its calls."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LeakyReLU()).double()
    fn = pa.functional(module, microbatch_size=4)

    def train():
        module.train()

    def evaluate():
        module.eval()

    def keep_more():
        module[1].momentum = 0.5

    def bend():
        module[2].negative_slope = 0.5

    for change in (train, evaluate, train, keep_more, bend, evaluate):
        change()
        out, buffers = fn.apply(fn.params, fn.buffers, X)
        own = deepcopy(module)
        near(out, own(X), PROMISED)
        assert apart(buffers, dict(own.named_buffers())) <= PROMISED


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_three_steps_are_those_of_torch_on_the_full_batch(engine):
    """Weights and running statistics, through make_step."""
    module, (x, y) = resnets.resnet18(4).double(), images(12)
    fn = pa.functional(deepcopy(module), microbatch_size=5)
    own = torch.optim.SGD(module.parameters(), lr=0.1)

    def loss(params, batch, buffers):
        out, new_buffers = fn.apply(params, buffers, batch[0])
        return classify(out, batch), new_buffers

    step = pa.make_step(loss, pa.sgd(0.1), buffers="sequential", engine=engine)
    state = step.init(fn.params, buffers=fn.buffers)
    for _ in range(3):
        state, info = step(state, (x, y))
        own.zero_grad()
        want = F.cross_entropy(module(x), y)
        want.backward()
        own.step()
        near(info.loss, want.detach(), PROMISED)
    assert apart(state.params, dict(module.named_parameters())) <= PROMISED
    assert apart(state.buffers, dict(module.named_buffers())) <= PROMISED


# Transforms -----------------------------------------------------------------------------------


SMALL = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()


def gradients(size):
    fn = pa.functional(SMALL, microbatch_size=size)
    return torch.func.grad(lambda p: fit(fn.apply(p, fn.buffers, X)[0], X))


def test_second_derivatives_are_right_in_all_orders():
    """Moments, and what is handed on, have tangents and second derivatives too."""
    params = pa.functional(SMALL).params
    along = {name: p.cos() for name, p in params.items()}
    want = torch.func.jvp(gradients(None), (params,), (along,))[1]
    assert apart(torch.func.jvp(gradients(4), (params,), (along,))[1], want) <= PROMISED
    back = torch.func.vjp(gradients(4), params)[1]
    assert apart(back(along)[0], want) <= PROMISED

    fn = pa.functional(SMALL, microbatch_size=4)

    def slope(params):
        def loss(p):
            return fit(fn.apply(p, fn.buffers, X)[0], X)

        return torch.func.jvp(loss, (params,), (along,))[1]

    assert apart(torch.func.grad(slope)(params), want) <= PROMISED


@pytest.mark.promise("ensembles")
def test_an_ensemble_under_vmap_is_its_members():
    """Members on one batch, and each on its own, with running statistics each of its own."""
    members = [resnets.Shared().double() for _ in range(3)]
    batches = torch.stack([X, X.sin(), X + 1])
    fns = [pa.functional(member, microbatch_size=4) for member in members]
    params = pa.stack([fn.params for fn in fns])
    buffers = pa.stack([fn.buffers for fn in fns])

    def loss(params, buffers, x):
        out, new = fns[0].apply(params, buffers, x)
        return fit(out, x), new

    for at, xs in ((0, batches), (None, X)):
        found = torch.func.vmap(torch.func.grad(loss, has_aux=True), (0, 0, at))(
            params, buffers, xs
        )
        for i, member in enumerate(members):
            grads, _, new = whole(member, X if at is None else batches[i], fit)
            mine = [{name: x[i] for name, x in tree.items()} for tree in found]
            grads = {name: grads[name] for name in mine[0]}
            assert apart(mine[0], grads) <= PROMISED
            assert apart(mine[1], {name: new[name] for name in mine[1]}) <= PROMISED


def test_a_call_under_no_grad_is_that_of_the_module():
    fn = pa.functional(SMALL, microbatch_size=3)
    with torch.no_grad():
        out, _ = fn.apply(fn.params, fn.buffers, X)
    near(out, deepcopy(SMALL)(X).detach(), PROMISED)


def test_gradients_of_the_inputs_are_the_full_batch_s():
    x = X.clone().requires_grad_()
    fn = pa.functional(SMALL, microbatch_size=3)
    fit(fn.apply(fn.params, fn.buffers, x)[0], X).backward()
    y = X.clone().requires_grad_()
    fit(deepcopy(SMALL)(y), X).backward()
    assert apart({"x": x.grad}, {"x": y.grad}) <= PROMISED


@pytest.mark.slow
@pytest.mark.promise("compiled")
def test_inside_a_compiled_function_it_is_one_graph():
    """Where the compiler decides what to keep."""
    fn = pa.functional(SMALL, microbatch_size=3)
    func = torch.compile(
        lambda params, x: fn.apply(params, fn.buffers, x), fullgraph=True, backend="eager"
    )
    out, buffers = func(fn.params, X)
    own = deepcopy(SMALL)
    near(out, own(X), PROMISED)
    assert apart(buffers, dict(own.named_buffers())) <= PROMISED


# Memory ---------------------------------------------------------------------------------------


WIDTH, DEPTH, SIZE = 32, 6, 64


def peak(rows, size):
    """Of a forward and a backward pass, in bytes of tensors."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.GELU()]
    body = [deepcopy(layer) for _ in range(DEPTH) for layer in layers]
    fn = pa.functional(nn.Sequential(*body, nn.Linear(WIDTH, 1)), microbatch_size=size)
    params = {name: p.clone().requires_grad_() for name, p in fn.params.items()}
    x = torch.randn(rows, WIDTH)
    fn.apply(params, fn.buffers, x[: 2 * SIZE])  # to know how it is cut
    with counting() as live:
        fn.apply(params, fn.buffers, x)[0].square().mean().backward()
    return live.peak


def per_row(size):
    """What each sample adds to the peak, in samples of one activation."""
    return (peak(32 * SIZE, size) - peak(16 * SIZE, size)) / (16 * SIZE * WIDTH * 4)


@pytest.mark.slow
def test_what_is_kept_is_the_input_of_each_batch_norm():
    """And at one of them its gradient. Three numbers a microbatch, and the output, are the rest."""
    assert per_row(SIZE) <= DEPTH + 1 + 0.75
    assert per_row(None) >= 3 * DEPTH


# Random numbers and dtypes --------------------------------------------------------------------


@pytest.mark.promise("second run")
def test_dropout_draws_the_same_again():
    """The gradient is that of the masks of the forward pass: a sum over samples, by differences."""
    module = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2), nn.Tanh()
    ).double()
    fn = pa.functional(module, microbatch_size=4)
    func = torch.func.grad_and_value(lambda p: fit(fn.apply(p, fn.buffers, X)[0], X))

    def at(step):
        torch.manual_seed(7)
        return func({k: p + step * direction[k] for k, p in fn.params.items()})[1]

    direction = {k: torch.randn_like(p) for k, p in fn.params.items()}
    torch.manual_seed(7)
    grads, _ = func(fn.params)
    slope = sum((grads[k] * direction[k]).sum() for k in grads)
    # central differences: the third derivative times step**2, and rounding over step
    torch.testing.assert_close(slope, (at(1e-4) - at(-1e-4)) / 2e-4, rtol=1e-5, atol=1e-7)


@pytest.mark.promise("narrow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_give_narrow_gradients(dtype):
    """A fault would be of the size of the gradient; half of the digits are left to rounding."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).to(dtype)
    batch = X.to(dtype)
    want, _, want_buffers = whole(module, batch, fit)
    grads, _, buffers = cut(module, batch, 4, fit)
    unit = torch.finfo(dtype).eps / 2
    assert apart(grads, want) <= unit**0.5
    assert apart(buffers, want_buffers) <= unit**0.5


def test_sync_batch_norm_is_batch_norm():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    other = nn.SyncBatchNorm.convert_sync_batchnorm(deepcopy(module))
    one, two = (cut(each, X, 4, fit) for each in (module, other))
    for mine, its in zip((one[0], one[2]), (two[0], two[2]), strict=True):
        assert all(torch.equal(mine[name], its[name]) for name in its)
