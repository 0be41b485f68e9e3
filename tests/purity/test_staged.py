"""A loss in stages changes nothing, draws what one forward pass draws, and keeps its boundaries."""

from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import dropout

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import compositions
from tests.purity.calls import ENGINES, BoomError, Explodes, Tensors
from tests.strategies import every


ROWS = 6
engines = pytest.mark.parametrize("engine", ENGINES)


class Net(torch.nn.Module):
    """In training mode, with running statistics of its own that nobody may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)


def make_params() -> Tensors:
    """A small leaf, one of 1 MiB, and one with a gradient and a hook of its own."""
    w = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4) - 5)
    w.grad = torch.ones(3, 4)
    w.register_hook(lambda grad: grad * 7)
    return {"w": w, "large": torch.ones(512, 512), "b": torch.ones(4)}


def make_batch() -> Any:
    x = torch.arange(3.0 * ROWS).reshape(ROWS, 3) - 4
    return {"x": x, "k": torch.arange(ROWS), "nested": [x[:, 0] > 0]}


GIVEN = {"by": {"t": torch.tensor(2.0)}}


def stages(at: int = -1, how: Any = None) -> list[Any]:
    """Of every kind; stage ``at`` does something with what it is given."""
    hit = [lambda x: x] * 6
    if how is not None:
        hit[at] = how

    def encode(p: Any, x: Any, by: Any) -> Any:
        h = hit[0](x)["x"] @ p["w"] + (p["large"] ** 2).sum() * 2.0**-18
        return {"h": h * by["t"], "k": x["k"], "again": [h]}

    def total(p: Any, x: Any) -> Any:
        return {"h": hit[1](x)["h"].sum(0), "rows": len(x["k"])}

    def centre(p: Any, x: Any, sums: Any) -> Any:
        x = hit[2](x)
        return {**x, "h": x["h"] - sums["h"] / sums["rows"] + p["b"]}

    def products(p: Any, x: Any, sums: Any) -> Tensor:
        return (hit[3](x)["h"] * sums["h"]).sum(0)

    def mixed(p: Any, x: Any) -> Any:
        x = hit[4](x)
        return {**x, "h": x["h"].cumsum(0)}

    def loss(p: Any, x: Any, s: Tensor, by: Any) -> Tensor:
        return (hit[5](x)["h"].abs() * s * by["t"]).sum(1).mean() + x["again"][0].mean()

    return [
        pa.rowwise(encode, reads="by"),
        pa.pooled(total, "sums"),
        pa.rowwise(centre, reads="sums"),
        pa.pooled(products, "products", reads="sums"),
        pa.full(mixed),
        pa.rowwise(loss, reads=("products", "by")),
    ]


def run(name: str, loss: Any, params: Any, batch: Any, engine: Any = "func", size: Any = 4) -> Any:
    if name == "value":
        return pa.value(loss, microbatch_size=size)(params, batch, **GIVEN)
    make = pa.grad_and_value(loss, microbatch_size=size, engine=engine)
    return make(params, batch, **GIVEN)


names = pytest.mark.parametrize("name", ["grad", "value"])


@names
@engines
@pytest.mark.parametrize("size", [1, 4, [5, 1], None], ids=str)
def test_a_call_changes_nothing_and_gives_the_same_again(name: str, engine: Any, size: Any) -> None:
    params, batch, loss = make_params(), make_batch(), pa.staged(stages())
    with unchanged(params, batch, GIVEN, loss.stages):
        first = run(name, loss, params, batch, engine, size)
        second = run(name, loss, params, batch, engine, size)
    assert_trees_bitwise_equal(first, second)


class Boom:
    """Raises when it is called for the n-th time."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, x: Any) -> Any:
        self.calls -= 1
        if self.calls == 0:
            raise BoomError
        return x


@names
@engines
@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_an_error_in_a_stage_changes_nothing_and_names_it(
    name: str, engine: Any, at: int, calls: int
) -> None:
    """On the way forward, and where it is computed again."""
    params, batch = make_params(), make_batch()
    loss = pa.staged(stages(at, Boom(calls)))
    often = {4: 1, 5: 2}.get(at, 2 if name == "value" else 4) + (at == 4 and name != "value")
    if calls > often:
        with unchanged(params, batch, GIVEN):
            run(name, loss, params, batch, engine)
        return
    with unchanged(params, batch, GIVEN), pytest.raises(BoomError) as caught:
        run(name, loss, params, batch, engine)
    assert len(caught.value.__notes__) == 1
    assert f"in stage {at}, {loss.stages[at].kind}(" in caught.value.__notes__[0]


@engines
@pytest.mark.parametrize("at", range(6))
def test_an_error_in_the_backward_pass_changes_nothing(engine: Any, at: int) -> None:
    params, batch = make_params(), make_batch()

    def explodes(x: Any) -> Any:
        return {k: Explodes.apply(v) if k in "hx" else v for k, v in x.items()}

    if at == 0:  # the batch has no cotangent
        params["w"] = Explodes.apply(params["w"])
        stages_ = stages()
        stages_[0] = pa.rowwise(
            lambda p, x, by: stages()[0].func({**p, "w": Explodes.apply(p["w"])}, x, by), "by"
        )
        params = make_params()
    else:
        stages_ = stages(at, explodes)
    with unchanged(params, batch, GIVEN), pytest.raises(BoomError):
        run("grad", pa.staged(stages_), params, batch, engine)


def write(x: Any) -> Any:
    x["x" if "x" in x else "h"].relu_()
    return x


@names
@engines
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_write_to_a_boundary_raises_and_names_the_stage(name: str, engine: Any, at: int) -> None:
    """It would begin from other numbers when it is computed again."""
    params, batch = make_params(), make_batch()
    loss = pa.staged(stages(at, write))
    words = f"stage {at}, {loss.stages[at].kind}.*in place"
    with unchanged(params, GIVEN), pytest.raises(RuntimeError, match=words):
        run(name, loss, params, batch, engine)


@engines
@pytest.mark.parametrize("at", [1, 3])
def test_a_write_where_nothing_waits_is_the_same_as_in_the_full_batch(engine: Any, at: int) -> None:
    """Such as in a pooled stage that follows on a rowwise one: both are computed again."""
    params, batch = make_params(), make_batch()
    params = {k: p.detach().double() for k, p in params.items()}
    batch["x"] = batch["x"].double()
    loss = pa.staged(stages(at, write))
    want, _ = run("grad", loss, params, batch, size=None)
    got, _ = run("grad", loss, params, batch, engine, size=2)
    assert want["w"].norm() > 0
    for name in want:
        assert (got[name] - want[name]).norm() <= 1e-10 * want["w"].norm()


@engines
def test_a_write_to_an_integer_of_the_last_boundary_is_not_silent(engine: Any) -> None:
    """It is the tensor from which earlier stages are computed again.

    With engine="autograd" this gave a wrong gradient without an error.
    """

    def loss(inplace: bool) -> Any:
        def last(w: Tensor, x: Any, m: Tensor) -> Tensor:
            k = x["k"].add_(1) if inplace else x["k"] + 1
            return (x["h"] * m * k.unsqueeze(1)).sum()

        def numbered(w: Tensor, x: Any) -> Any:
            return {"h": x * w, "k": torch.arange(len(x))}

        def twice(w: Tensor, x: Any, m: Tensor) -> Tensor:
            return (x["h"] * m * x["k"].unsqueeze(1)).sum(0)

        return pa.staged(
            [
                pa.rowwise(numbered),
                pa.pooled(lambda w, x: x["h"].sum(0), "m"),
                pa.pooled(twice, "n", reads="m"),
                pa.rowwise(last, reads="n"),
            ]
        )

    _not_silent(loss, engine)


@engines
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_a_write_to_a_pooled_value_is_not_silent(engine: Any, dtype: torch.dtype) -> None:
    """Every microbatch would divide it once more."""

    def loss(inplace: bool) -> Any:
        def moved(w: Tensor, x: Tensor, n: Tensor) -> Tensor:
            return x * (n.mul_(2) if inplace else n * 2)

        return pa.staged(
            [
                pa.rowwise(lambda w, x: x * w),
                pa.pooled(lambda w, x: x.sum(0).to(dtype), "n"),
                pa.rowwise(moved, reads="n"),
                pa.pooled(lambda w, x: x.sum(0), "m"),
                pa.rowwise(lambda w, x, m: (x * m).sum(), reads="m"),
            ]
        )

    _not_silent(loss, engine)


@engines
def test_a_write_to_a_given_value_is_not_silent(engine: Any) -> None:
    """The caller's own tensor."""
    t = torch.tensor(3.0)

    def loss(inplace: bool) -> Any:
        def moved(w: Tensor, x: Tensor) -> Tensor:
            return x * w * (t.mul_(2) if inplace else t * 2)

        def given(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
            return x * w * (t.mul_(2) if inplace else t * 2)

        ends = pa.rowwise(lambda w, x, m: (x * m).sum(), reads="m")
        staged = pa.staged(
            [pa.rowwise(given, reads="t"), pa.pooled(lambda w, x: x.sum(0), "m"), ends]
        )
        return lambda: staged, {"t": t.clone()}

    w, x = torch.tensor([1.0, -2.0]), torch.arange(8.0).reshape(4, 2)
    make, values = loss(False)
    want = pa.grad(make(), microbatch_size=2, engine=engine)(w, x, **values)
    make, values = loss(True)
    try:
        got = pa.grad(make(), microbatch_size=2, engine=engine)(w, x, **values)
    except RuntimeError:
        return
    assert_trees_bitwise_equal(got, want)


def _not_silent(loss: Any, engine: Any) -> None:
    """An error, or the right result."""
    w, x = torch.tensor([1.0, -2.0]), torch.arange(8.0).reshape(4, 2)
    knobs = {"microbatch_size": 2, "reduction": "sum"}
    for ours in (pa.grad_and_value, pa.value):
        more = {"engine": engine} if ours is pa.grad_and_value else {}
        want = ours(loss(False), **knobs, **more)(w, x)
        try:
            got = ours(loss(True), **knobs, **more)(w, x)
        except RuntimeError:
            continue
        assert_trees_bitwise_equal(got, want)


def storages(tree: Any) -> set[int]:
    leaves = optree.tree_leaves(tree, namespace="pureaccum")
    return {x.untyped_storage().data_ptr() for x in leaves if isinstance(x, Tensor)}


@engines
def test_a_result_shares_no_memory_with_what_stages_saw(engine: Any) -> None:
    """Gradients and value; boundaries and pooled values stay what they were."""
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(optree.tree_map(lambda t: t, x))
        return x

    params, batch = make_params(), make_batch()
    results = []
    for at in range(6):
        results.append(run("grad", pa.staged(stages(at, look)), params, batch, engine))
    before = optree.tree_map(torch.clone, results[-1])
    held = storages([params, batch, GIVEN])
    held |= {t.untyped_storage().data_ptr() for t in optree.tree_leaves(seen) if _plain(t)}
    assert not storages(results) & held
    for t in optree.tree_leaves(seen):
        if _plain(t) and t.is_floating_point() and not t.requires_grad:
            t.zero_()
    assert_trees_bitwise_equal(results[-1], before)


def _plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


@engines
def test_modes_stay_and_modules_keep_their_statistics(engine: Any) -> None:
    """A module in training mode, called through ``functional_call``, under no_grad and not."""
    net = Net()
    params = dict(net.named_parameters())

    def encode(p: Any, x: Any) -> Any:
        return torch.func.functional_call(net.linear, _of(p, "linear"), (x["x"],))

    loss = pa.staged(
        [
            pa.rowwise(encode),
            *pa.batch_norm("bn", lambda p: (p["norm.weight"], p["norm.bias"])),
            pa.full(lambda p, x: (x @ x.T).logsumexp(1).mean()),
        ]
    )
    batch, run_ = make_batch(), pa.grad(loss, microbatch_size=4, engine=engine)
    first = run_(params, batch)
    for mode in (torch.no_grad, torch.inference_mode):
        with unchanged(net, params, batch), mode():
            again = run_(params, batch)
            assert torch.is_grad_enabled() is False
        assert_trees_bitwise_equal(again, first)
    assert not any(x.requires_grad for x in first.values())


def _of(p: Any, name: str) -> Iterator[Any]:
    return {k.removeprefix(name + "."): v for k, v in p.items() if k.startswith(name + ".")}


# Random numbers of torch's own generator ------------------------------------------------------


@engines
@every(2)
@given(st.integers(0, 2**31), compositions(ROWS), st.sampled_from(["rowwise", "full"]))
def test_a_stage_that_is_computed_again_draws_the_same(
    engine: Any, seed: int, sizes: list[int], end: str
) -> None:
    """Masks double or drop, so all is exact; those of the way forward are those of the gradient.

    What is drawn is what one forward pass draws, stage by stage, and so is the generator after it.
    """
    w = torch.tensor([[2.0, -3.0, 1.0], [1.0, 2.0, -1.0]])
    x = torch.randint(1, 5, (ROWS, 3), generator=torch.Generator().manual_seed(seed)).float()

    def encode(w: Tensor, x: Tensor) -> Tensor:
        return dropout(x * w[0], 0.5)

    def share(w: Tensor, h: Tensor, *s: Tensor) -> Tensor:
        return (dropout(h, 0.5) * w[1]).sum(0)

    def middle(w: Tensor, h: Tensor, s: Tensor) -> Tensor:
        return dropout(h, 0.5) + s

    def last(w: Tensor, h: Tensor) -> Tensor:
        return (dropout(h, 0.5) * w[0]).sum()

    loss = pa.staged(
        [
            pa.rowwise(encode),
            pa.pooled(share, "s"),
            pa.rowwise(middle, reads="s"),
            pa.full(lambda w, h: dropout(h, 0.5).cumsum(0)),
            (pa.rowwise if end == "rowwise" else pa.full)(last),
        ]
    )

    def whole(w: Tensor) -> Tensor:
        """Breadth-first, as it is promised: all microbatches up to where they have to wait."""
        hs, sums = [], []
        for part in x.split(sizes):
            hs.append(encode(w, part))
            sums.append(share(w, hs[-1]))
        s = sum(sums)
        h = torch.cat([middle(w, h, s) for h in hs])
        h = dropout(h, 0.5).cumsum(0)
        parts = h.split(sizes) if end == "rowwise" else [h]
        return sum(last(w, part) for part in parts)

    torch.manual_seed(seed)
    want, want_value = torch.func.grad_and_value(whole)(w)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    run = pa.grad_and_value(loss, microbatch_size=sizes, reduction="sum", engine=engine)
    grads, value = run(w, x)
    assert_trees_bitwise_equal((grads, value), (want, want_value))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(seed)
    alone = pa.value(loss, microbatch_size=sizes, reduction="sum")(w, x)
    assert_trees_bitwise_equal(alone, want_value)
    assert torch.equal(torch.get_rng_state(), state)


@engines
def test_an_error_where_a_stage_is_computed_again_puts_the_generator_back(engine: Any) -> None:
    """Where the way forward left it, and not in the middle of an earlier microbatch."""
    states: list[Tensor] = []
    calls = 0

    def encode(w: Tensor, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        h = dropout(x * w, 0.5)
        if calls <= 2:
            states.append(torch.get_rng_state())
        else:
            raise BoomError
        return h

    ends = pa.rowwise(lambda w, x, s: (x * s).sum(), reads="s")
    loss = pa.staged([pa.rowwise(encode), pa.pooled(lambda w, x: x.sum(0), "s"), ends])
    with pytest.raises(BoomError):
        pa.grad(loss, microbatch_size=2, engine=engine)(torch.ones(3), torch.ones(4, 3))
    assert calls == 3
    assert torch.equal(torch.get_rng_state(), states[-1])


@pytest.mark.parametrize("at", [0, 2], ids=["first leg", "last leg"])
def test_a_captured_batch_norm_is_refused_before_it_is_written_to(at: int) -> None:
    """It would couple the rows of a microbatch, and count them twice.

    torch.func refuses it; only the first microbatch of a leg goes through torch.func.
    """
    norm = torch.nn.BatchNorm1d(3, affine=False)
    funcs: list[Any] = [lambda w, x: x * w, lambda w, x: x.sum(0), lambda w, x, s: (x - s).sum()]
    plain = funcs[at]
    funcs[at] = lambda w, x, *values: plain(w, norm(x), *values)
    loss = pa.staged(
        [pa.rowwise(funcs[0]), pa.pooled(funcs[1], "sum"), pa.rowwise(funcs[2], reads="sum")]
    )
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with pytest.raises(RuntimeError, match=r"in place.*pa\.batch_norm"):
        pa.grad(loss, microbatch_size=2)(torch.ones(3), torch.randn(6, 3))
    assert_trees_bitwise_equal(dict(norm.named_buffers()), before)


def test_a_write_is_seen_under_vmap_too() -> None:
    """Its wrappers count no writes; what they wrap does."""
    loss = pa.staged(
        [
            pa.rowwise(lambda w, x: x * w),
            pa.pooled(lambda w, x: x.sum(0), "sum"),
            pa.rowwise(lambda w, x, s: x.mul_(2) + s, reads="sum"),
            pa.full(lambda w, x: x.sum()),
        ]
    )
    gradient = pa.grad(loss, microbatch_size=2)
    with pytest.raises(RuntimeError, match="in place"):
        torch.func.vmap(gradient, in_dims=(0, None))(torch.ones(4, 3), torch.ones(6, 3))
