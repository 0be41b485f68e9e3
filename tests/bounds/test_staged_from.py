"""Networks with BatchNorm: gradients and running statistics of the full batch, however it is cut.

The oracle is the module itself, called on the whole batch, and ``.backward()``. Both sides are in
float64; what is promised is 1e-10 of the gradient's norm.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, target
from hypothesis import strategies as st
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing.strategies import seeds
from tests.bounds import resnets
from tests.strategies import every, generator


PROMISED = 1e-10
engines = pytest.mark.parametrize("engine", ["func", "autograd"])
Size = int | Sequence[int]


def norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([x.detach().double().norm() for x in tensors.values()]).norm())


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Relative to the second."""
    assert list(a) == list(b)
    assert all(a[name].dtype == b[name].dtype for name in b)
    return norm({name: a[name] - b[name] for name in b}) / norm(b)


def fit(out: Tensor, batch: Any) -> Tensor:
    """Some loss of float outputs, its target made of the rows."""
    x = batch if isinstance(batch, Tensor) else batch["x"]
    return ((out - x.flatten(1).mean(1, keepdim=True).cos()) ** 3).sum(1).mean()


def whole(
    module: nn.Module, loss_fn: Any, call: Callable[[nn.Module], Any], batch: Any
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """The full batch, by torch alone; the module stays as it was."""
    module = deepcopy(module)
    out = call(module)
    loss = out if loss_fn is None else loss_fn(out, batch)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward()
    grads = {
        k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in module.named_parameters()
    }
    return grads, loss.detach(), dict(module.named_buffers())


def staged(
    module: nn.Module,
    loss_fn: Any,
    batch: Any,
    size: Size | None,
    engine: str = "func",
    inputs: Any = None,
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    fn = pa.functional(module)
    loss = pa.staged_from(module, loss_fn, inputs=inputs)
    func = pa.grad_and_value(
        loss, microbatch_size=size, has_aux=bool(fn.buffers), aux_reduction="last", engine=engine
    )
    grads, value = func(fn.params, batch, buffers=fn.buffers)
    return grads, *(value if fn.buffers else (value, {}))


def check(
    module: nn.Module,
    batch: Any,
    sizes: Sequence[Size | None],
    loss_fn: Any = fit,
    engine: str = "func",
    inputs: Any = None,
    call: Any = None,
) -> float:
    """The worst error of gradients, loss and running statistics."""

    def own(module: nn.Module) -> Any:
        return module(deepcopy(batch if inputs is None else inputs(batch)))

    before = deepcopy(module.state_dict())
    want, want_value, want_buffers = whole(module, loss_fn, call or own, batch)
    worst = 0.0
    for size in sizes:
        grads, value, buffers = staged(module, loss_fn, batch, size, engine, inputs)
        worst = max(worst, apart(grads, want), abs(float(value / want_value - 1)))
        if want_buffers:
            worst = max(worst, apart(buffers, want_buffers))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} was written to"
    assert worst <= PROMISED
    return worst


# Residual networks ---------------------------------------------------------------------------


def images(rows: int, size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, size, size, dtype=torch.float64), torch.arange(rows) % 10


def classify(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(out, batch[1])


def first(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[0]


@engines
@pytest.mark.parametrize(
    ("make", "width", "sizes"),
    [
        (resnets.resnet18, 8, [1, 3, 5, 11, 16, (3, 7, 1, 5), None]),
        (resnets.resnet101, 4, [3, (3, 7, 1, 5)]),
    ],
    ids=["resnet18", "resnet101"],
)
def test_a_residual_network_is_that_of_the_full_batch(make, width, sizes, engine):
    if engine == "autograd":
        sizes = sizes[1:2]
    check(make(width).double(), images(16), sizes, classify, engine, first)


@pytest.mark.parametrize("make", [resnets.resnet18, resnets.resnet101])
def test_the_same_network_accumulated_plainly_is_another(make):
    """The control: without stages each microbatch is normalised by itself."""
    module, batch = make(4).double(), images(16)
    fn = pa.functional(module)
    want, _, want_buffers = whole(module, classify, lambda module: module(batch[0]), batch)

    def loss(params: Any, batch: Any) -> Any:
        out, buffers = fn.apply(params, fn.buffers, batch[0])
        return classify(out, batch), buffers

    grads, (_, buffers) = pa.grad_and_value(
        loss, microbatch_size=4, has_aux=True, aux_reduction="last"
    )(fn.params, batch)
    assert apart(grads, want) > 1e-2
    assert apart(buffers, want_buffers) > 1e-2


# Drawn networks -------------------------------------------------------------------------------


@st.composite
def batch_norms(draw: Any, width: int, images: bool) -> nn.Module:
    kind = nn.BatchNorm2d if images else nn.BatchNorm1d
    return kind(
        width,
        eps=draw(st.sampled_from([1e-5, 1e-2])),
        momentum=draw(st.sampled_from([0.1, 0.7, None])),
        affine=draw(st.booleans()),
        track_running_stats=draw(st.booleans()),
    )


@st.composite
def sequentials(draw: Any, images: bool) -> nn.Sequential:
    """BatchNorm first, last, twice in a row, or nowhere."""
    layers: list[nn.Module] = []
    inside = 3
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(0, 2))):
            layers.append(draw(batch_norms(inside, images)))
        out = draw(st.integers(2, 5))
        layers.append(nn.Conv2d(inside, out, 3, padding=1) if images else nn.Linear(inside, out))
        inside = out
        layers.append(
            draw(st.sampled_from([nn.Tanh(), nn.LeakyReLU(0.2, inplace=True), nn.GELU()]))
        )
    for _ in range(draw(st.integers(0, 2))):
        layers.append(draw(batch_norms(inside, images)))
    return nn.Sequential(*layers, *([nn.AdaptiveAvgPool2d(1), nn.Flatten()] if images else []))


@engines
@pytest.mark.parametrize("kind", ["rows", "images"])
@every(1)
@given(data=st.data(), seed=seeds(), rows=st.integers(6, 14))
def test_any_sequence_of_layers_is_the_full_batch(kind, engine, data, seed, rows):
    torch.manual_seed(seed)
    module = data.draw(sequentials(kind == "images")).double()
    for p in module.parameters():
        nn.init.normal_(p)
    x = torch.randn(rows, *([3, 4, 4] if kind == "images" else [3]), dtype=torch.float64) * 3 + 1
    size = data.draw(st.integers(1, rows + 1) | st.lists(st.integers(1, 5), min_size=2).map(tuple))
    if isinstance(size, tuple):  # as many rows as they say
        x = x[:1].expand(sum(size), *x.shape[1:]) * torch.randn(sum(size), *[1] * (x.dim() - 1))
    layers = sum(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)) for m in module)
    event(f"{layers} batch norms")
    target(check(module, x, [size], engine=engine))


# Other networks -------------------------------------------------------------------------------


X4 = torch.randn(11, 3, 6, 6, dtype=torch.float64, generator=generator(0))
X = torch.randn(11, 4, dtype=torch.float64, generator=generator(1))
NETWORKS = {
    "dense": (resnets.Dense, X4),
    "unet": (resnets.UNet, X4),
    "mobilenet": (resnets.InvertedResidual, X4),
    "shared": (resnets.Shared, X),
    "in-place": (resnets.InPlace, X),
    "parallel": (resnets.Parallel, X),
}


@engines
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_shapes(name, engine):
    make, batch = NETWORKS[name]
    check(make().double(), batch, [1, 2, 4, 7, 11, (3, 7, 1)], engine=engine)


@engines
def test_two_inputs_one_by_name(engine):
    batch = {"x": X, "side": torch.randn(11, 2, dtype=torch.float64)}
    module = resnets.TwoInputs().double()
    check(module, batch, [3, 4], engine=engine, call=lambda module: module(**batch))
    renamed = {"x": X, "b": batch["side"], "more": None, "flag": 3}
    check(
        module,
        renamed,
        [4],
        inputs=lambda batch: {"x": batch["x"], "side": batch["b"]},
        call=lambda module: module(X, side=renamed["b"]),
    )


def test_what_loss_fn_is_given_is_the_batch_as_it_came():
    """None, numbers and containers too, whatever lies between."""
    seen = []

    def loss(out: Tensor, batch: Any) -> Tensor:
        seen.append((batch["none"], batch["pair"][0], type(batch["pair"]), len(batch["x"])))
        return fit(out, batch)

    batch = {"x": X, "none": None, "pair": (0.5, X)}
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    check(module, batch, [8], loss, inputs=lambda batch: batch["x"])
    assert seen == [(None, 0.5, tuple, rows) for rows in (11, 8, 3)]


@engines
def test_a_module_that_returns_its_loss_and_aux(engine):
    module, batch = resnets.OwnLoss().double(), (X, torch.arange(11) % 3)
    fn, loss = pa.functional(module), pa.staged_from(module)
    want, want_value, want_buffers = whole(module, None, lambda module: module(*batch), batch)
    grads, (value, (buffers, aux)) = pa.grad_and_value(
        loss,
        microbatch_size=3,
        has_aux=True,
        aux_reduction=("last", "sum"),
        engine=engine,
    )(fn.params, batch, buffers=fn.buffers)
    assert max(apart(grads, want), apart(buffers, want_buffers)) <= PROMISED
    torch.testing.assert_close(value, want_value)
    assert aux["rows"] == module(*batch)[1]["rows"]


def test_weighted_by_tokens():
    """A weight for each row, and no mean of the rows."""
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 1)).double()
    batch = {"x": X, "weight": torch.arange(11.0, dtype=torch.float64)}

    def terms(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return (out[:, 0] ** 2 * batch["weight"]).sum(), batch["weight"].sum()

    want, want_value, want_buffers = whole(
        module,
        lambda out, batch: torch.div(*terms(out, batch)),
        lambda module: module(X),
        batch,
    )
    for size in (1, 4):  # the first row weighs nothing
        grads, value, buffers = staged(
            module,
            lambda out, batch: pa.Weighted(*terms(out, batch)),
            batch,
            size,
            inputs=lambda batch: batch["x"],
        )
        assert max(apart(grads, want), apart(buffers, want_buffers)) <= PROMISED
        torch.testing.assert_close(value, want_value)


def test_a_frozen_batch_norm_stays_frozen_and_a_network_without_another_is_one_stage():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double().eval()
    assert len(pa.staged_from(module, fit).stages) == 1
    check(module, X, [3, 11])


def test_in_eval_mode_a_batch_norm_without_running_statistics_looks_at_the_batch():
    norm = nn.BatchNorm1d(3, track_running_stats=False).eval()
    check(nn.Sequential(nn.Linear(4, 3), norm, nn.Tanh()).double(), X, [3, 11])


def test_running_statistics_that_are_not_tracked_any_more():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    module[1].track_running_stats = False
    check(module, X, [3, 11])


@engines
def test_three_steps_are_those_of_torch_on_the_full_batch(engine):
    """Weights and running statistics, through make_step."""
    module, (x, y) = resnets.resnet18(4).double(), images(12)
    fn, own = pa.functional(deepcopy(module)), torch.optim.SGD(module.parameters(), lr=0.1)
    step = pa.make_step(
        pa.staged_from(module, classify, inputs=first),
        pa.sgd(0.1),
        microbatch_size=5,
        buffers="pooled",
        engine=engine,
    )
    state = step.init(fn.params, buffers=fn.buffers)
    for _ in range(3):
        state, info = step(state, (x, y))
        own.zero_grad()
        want = F.cross_entropy(module(x), y)
        want.backward()
        own.step()
        torch.testing.assert_close(info.loss, want.detach(), rtol=PROMISED, atol=0)
    assert apart(state.params, dict(module.named_parameters())) <= PROMISED
    assert apart(state.buffers, dict(module.named_buffers())) <= PROMISED


def test_hessian_vector_products_go_through():
    """A transform around the stages: moments and boundaries have tangents too."""
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)).double()
    fn, loss = pa.functional(module), pa.staged_from(module, fit)
    along = {name: p.cos() for name, p in fn.params.items()}

    def gradient(size: int | None) -> Any:
        func = pa.grad(loss, microbatch_size=size, has_aux=True, aux_reduction="last")
        return lambda params: func(params, X, buffers=fn.buffers)[0]

    def whole(params: Any) -> Any:
        return torch.func.grad(lambda p: fit(fn.apply(p, fn.buffers, X)[0], X))(params)

    want = torch.func.jvp(whole, (fn.params,), (along,))[1]
    assert apart(torch.func.jvp(gradient(4), (fn.params,), (along,))[1], want) <= PROMISED


def test_the_modes_are_those_of_the_time_of_staged_from():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(1.0)).double()
    fn = pa.functional(module)
    module[2].eval()
    loss = pa.staged_from(module, fit)
    want = loss(fn.params, X, buffers=fn.buffers)
    module.train()
    module[1].eval()
    assert torch.equal(loss(fn.params, X, buffers=fn.buffers)[0], want[0])


def test_dropout_draws_the_same_again():
    """The gradient is that of the masks of the forward pass: a sum over rows, by differences."""
    module = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2), nn.Tanh()
    ).double()
    fn, loss = pa.functional(module), pa.staged_from(module, fit)
    func = pa.grad_and_value(loss, microbatch_size=4, has_aux=True, aux_reduction="last")

    def at(step: float) -> Tensor:
        torch.manual_seed(7)
        params = {k: p + step * direction[k] for k, p in fn.params.items()}
        return func(params, X, buffers=fn.buffers)[1][0]

    direction = {k: torch.randn_like(p) for k, p in fn.params.items()}
    torch.manual_seed(7)
    grads, _ = func(fn.params, X, buffers=fn.buffers)
    slope = sum((grads[k] * direction[k]).sum() for k in grads)
    # central differences: the third derivative times step**2, and rounding over step
    torch.testing.assert_close(slope, (at(1e-4) - at(-1e-4)) / 2e-4, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes_give_narrow_gradients(dtype):
    """A fault would be of the size of the gradient; half of the digits are left to rounding."""
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).to(dtype)
    batch = X.to(dtype)
    want, _, want_buffers = whole(module, fit, lambda module: module(batch), batch)
    grads, _, buffers = staged(module, fit, batch, 4)
    unit = torch.finfo(dtype).eps / 2
    assert apart(grads, want) <= unit**0.5
    assert apart(buffers, want_buffers) <= unit**0.5


def test_sync_batch_norm_is_batch_norm():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    other = nn.SyncBatchNorm.convert_sync_batchnorm(deepcopy(module))
    one, two = (staged(each, fit, X, 4) for each in (module, other))
    for mine, its in zip((one[0], one[2]), (two[0], two[2]), strict=True):
        assert all(torch.equal(mine[name], its[name]) for name in its)


def test_stages_use_their_own_parameters_only():
    """Otherwise each would pay for zeros for all of them."""
    loss = pa.staged_from(resnets.resnet18(2), classify, inputs=first)
    uses = [stage.uses for stage in loss.stages]
    assert None not in uses
    assert sum(map(len, uses)) == len(pa.functional(resnets.resnet18(2)).params)
    barriers = [stage.name for stage in loss.stages if stage.kind == "pooled"]
    assert len(barriers) == 20
    # the three that go beside a block's first BatchNorm wait together with it
    assert sum(stage.kind == "rowwise" for stage in loss.stages) == 20 - 3 + 1
