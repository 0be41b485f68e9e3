"""A loss in stages gives the bits of the full batch, whatever its stages and however it is cut.

The stages are drawn: any number of them, in any order that is legal, which share parameters and
read what was pooled before. Their numbers are integers and every sum of them is exact, so that one
wrong bit is a fault. What they are compared with puts the same functions one after the other, on
the whole batch, and hands that to torch.func.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, losses, reduction, seeds
from tests.laws.exactly import integers
from tests.strategies import every, few, generator, powers_of_two


KINDS = ("sum", "mean", "weighted")
WIDTH = 2
LIMIT = 2**21  # times 3 for a mask; a tie of maxima halves a gradient, and counts twice
engines = pytest.mark.parametrize("engine", ["func", "autograd"])
kinds = pytest.mark.parametrize("kind", KINDS)
lasts = pytest.mark.parametrize("last", ["rowwise", "full"])


class Op(NamedTuple):
    """A stage as it is drawn."""

    kind: str  # rowwise, pooled or full
    what: str
    reads: tuple[str, ...] = ()
    name: str = ""


class Program(NamedTuple):
    """Stages and exact data."""

    ops: list[Op]
    params: dict[str, Any]
    batch: dict[str, Any]
    rows: int

    def stages(self, kind: str, larger: Callable[..., Tensor] = torch.maximum) -> list[Any]:
        """Their functions, one after the other; the last one gives what there is to sum."""
        functions = [function(op, larger) for op in self.ops[:-1]]
        return [*functions, ending(self.ops[-1], kind)]

    def loss(self, kind: str, aux: bool = False, spoil: bool = False) -> Any:
        """As the package is given it."""
        make = {"rowwise": pa.rowwise, "full": pa.full}
        stages: list[Any] = []
        for op, func in zip(self.ops[:-1], self.stages(kind), strict=False):
            if op.kind == "pooled":
                stages.append(pa.pooled(func, op.name, op.reads, MERGES.get(op.what)))
            else:
                stages.append(make[op.kind](func, op.reads))
        op = self.ops[-1]
        return pa.staged([*stages, make[op.kind](ending(op, kind, aux, spoil), op.reads)])

    def whole(
        self, kind: str, params: Any, batch: Any, larger: Any = torch.maximum, aux: bool = False
    ) -> Any:
        """The composition, by hand."""
        x, values = batch, {}
        functions = [*self.stages(kind, larger)[:-1], ending(self.ops[-1], kind, aux)]
        for op, func in zip(self.ops, functions, strict=True):
            out = func(params, x, *[values[name] for name in op.reads])
            if op.kind == "pooled":
                values[op.name] = out
            else:
                x = out
        return x

    def full_batch(self, kind: str) -> tuple[Any, Tensor]:
        """Gradients and value as torch.func gives them; of ``Weighted``, divided once."""
        if kind != "weighted":
            return torch.func.grad_and_value(lambda p: self.whole(kind, p, self.batch))(self.params)
        grads, value = torch.func.grad_and_value(lambda p: self.whole(kind, p, self.batch).total)(
            self.params
        )
        weight = self.batch["mask"].sum()
        by = weight if weight else 1
        return optree.tree_map(lambda g: g / by, grads), (value.double() / weight).float()


# Functions, of integers and closed over them -----------------------------------------------


def function(op: Op, larger: Callable[..., Tensor]) -> Callable[..., Any]:
    """Of a stage before the last; ``larger`` may stand for a maximum."""

    def share(p: Any, x: Any, *values: Any) -> Any:
        h = with_values(p, x["h"][0], values)
        if op.what == "max":  # no two are equal: a tie would be shared otherwise in a microbatch
            h = h * 16 + x["id"].unsqueeze(1)
            at = h.amax(0) if larger is torch.maximum else h.sum(0)
        else:
            at = (h * x["keep"].unsqueeze(1)).sum(0)
        return {"at": at, "rest": (x["keep"].sum(), len(x["tokens"]), x["tokens"].sum())}

    def moved(p: Any, x: Any, *values: Any) -> Any:
        (h,), skip = x["h"], x["skip"]
        if op.what == "max":
            h = larger(h, h.flip(1))
        elif op.what == "embed":
            h = h + p["table"][x["tokens"]]
        elif op.what == "gate":
            h = h * x["keep"].unsqueeze(1)
        elif op.what == "skip":
            h = h + skip[0]
        elif op.what == "keep":
            skip = [h]  # the same tensor twice
        elif op.what == "sums":
            h = h.cumsum(0)
        elif op.what == "turned":
            h = h + h.flip(0)
        else:
            h = h @ p["w"][op.what in ("abs", "plain")] + p["bias"]
            h = h.relu() if op.what == "relu" else h.abs() if op.what == "abs" else h
        return {**x, "h": (with_values(p, h, values),), "skip": skip}

    return share if op.kind == "pooled" else moved


def with_values(p: Any, h: Tensor, values: Any) -> Tensor:
    for value in values:
        kept, rows, tokens = value["rest"]
        h = h + value["at"] * p["gain"] + kept * p["bias"] + (rows + tokens)
    return h


def ending(op: Op, kind: str, aux: bool = False, spoil: bool = False) -> Callable[..., Any]:
    """The last one: the loss; with ``spoil``, NaN wherever all weights are zero."""

    def loss(p: Any, x: Any, *values: Any) -> Any:
        h = with_values(p, x["h"][0] + p["bias"], values)
        out = h * x["y"]
        each = {"dot": out, "abs": (h + x["y"]).abs(), "squared": (h + x["y"]) ** 2}[op.what]
        each = each.sum(1)
        extra = {"rows": each, "sum": each.sum(), "tokens": x["tokens"], "values": values}
        if kind == "weighted":
            total, weight = (each * x["mask"]).sum(), x["mask"].sum()
            if spoil and not weight:
                total = total * torch.nan
            result: Any = pa.Weighted(total, weight)
        else:
            result = each.sum() if kind == "sum" else each.mean()
        return (result, extra) if aux else result

    return loss


MERGES: dict[str, Callable[..., Any]] = {
    "max": lambda s: {"at": s["at"].amax(0), "rest": tuple(x.sum(0) for x in s["rest"])},
    "merged": lambda s: optree.tree_map(lambda x: x.sum(0), s),
}
AUX = {"rows": "concat", "sum": "sum", "tokens": "concat", "values": "last"}
ROWWISE = ("relu", "abs", "plain", "max", "embed", "gate", "keep", "skip")
POOLED = ("sum", "merged", "max")


# Data --------------------------------------------------------------------------------------


def data(seed: int, rows: int, high: int) -> tuple[dict[str, Any], dict[str, Any]]:
    g = generator(seed)

    def some(*shape: int) -> Tensor:
        return integers(g, *shape, bound=high)

    params = {
        "w": (some(WIDTH, WIDTH), some(WIDTH, WIDTH)),
        "bias": some(WIDTH),
        "gain": some(WIDTH),
        "table": some(3, WIDTH),
        "unused": [some(3)],
    }
    batch = {
        "h": (integers(g, rows, WIDTH, bound=2 * high + 1),),
        "skip": [some(rows, WIDTH)],
        "tokens": torch.randint(0, 3, (rows,), generator=g),
        "keep": torch.rand(rows, generator=g) < 0.6,
        "id": torch.randperm(16, generator=g)[:rows].float(),
        "y": some(rows, WIDTH),
        "mask": torch.randint(-2, 4, (rows,), generator=g).relu(),
    }
    return params, batch


def fits(program: Program) -> bool:
    """Whether no number can pass 2**24: the same on absolute values, sums for maxima."""
    params, batch = optree.tree_map(
        lambda x: x.double().abs() if x.is_floating_point() else x,
        (program.params, program.batch),
        none_is_leaf=False,
    )
    grads, value = torch.func.grad_and_value(
        lambda p: program.whole("sum", p, batch, larger=torch.add)
    )(params)
    ties = sum(op.what == "max" for op in program.ops)
    return max(x.abs().max() for x in (value, *optree.tree_leaves(grads))) < LIMIT / 2**ties


def build(ops: list[Op], seed: int, rows: int) -> Program:
    """With numbers as large as they may be; of stages that grow too fast, the first ones."""
    while True:
        for high in (15, 7, 3, 2, 1):
            program = Program(ops, *data(seed, rows, high), rows)
            if fits(program):
                return program
        assert len(ops) > 1
        pooled = {op.name for op in ops[:-2] if op.name}
        last = ops[-1]._replace(reads=tuple(r for r in ops[-1].reads if r in pooled))
        ops = [*ops[:-2], last]


@st.composite
def programs(draw: st.DrawFn, rows: int, last: str, least: int = 0) -> Program:
    ops: list[Op] = []
    names: list[str] = []

    def reads() -> tuple[str, ...]:
        some = st.lists(st.sampled_from(names), unique=True, max_size=2) if names else st.just([])
        return tuple(draw(some))

    for i in range(draw(st.integers(least, 6))):
        kind = draw(st.sampled_from(["pooled", "rowwise", "pooled", "rowwise", "full"]))
        if kind == "pooled":
            ops.append(Op(kind, draw(st.sampled_from(POOLED)), reads(), f"value {i}"))
            names.append(f"value {i}")
        else:
            what = ROWWISE if kind == "rowwise" else ("sums", "turned", *ROWWISE[:4])
            ops.append(Op(kind, draw(st.sampled_from(what)), reads()))
    ops.append(Op(last, draw(st.sampled_from(["dot", "abs", "squared"])), reads()))
    return build(ops, draw(seeds()), rows)


def is_power(number: int) -> bool:
    return number & (number - 1) == 0


def exact_value(kind: str, last: str, sizes: list[int]) -> bool:
    """Means of a microbatch round in the loss, unless it has a power of two of rows."""
    return kind != "mean" or last == "full" or len(sizes) == 1 or all(map(is_power, sizes))


# The gradient ------------------------------------------------------------------------------


@kinds
@lasts
@engines
@given(st.data())
def test_any_stages_and_any_cut_give_the_bits_of_the_full_batch(
    kind: str, last: str, engine: Any, data: st.DataObject
) -> None:
    rows = data.draw(powers_of_two.filter(lambda n: n > 1) if kind == "mean" else few)
    program = data.draw(programs(rows, last))
    want, want_value = program.full_batch(kind)
    sizes = data.draw(compositions(rows))
    loss = program.loss(kind, spoil=True)
    for size in (sizes, data.draw(st.integers(1, rows))):
        knobs = {"microbatch_size": size, "reduction": reduction(kind)}
        run = pa.grad_and_value(loss, engine=engine, **knobs)
        grads, value = run(program.params, program.batch)
        assert_trees_bitwise_equal(grads, want)
        cut = sizes if size is sizes else [min(size, rows), rows % size or size]
        if exact_value(kind, last, cut):
            assert_trees_bitwise_equal(value, want_value)


@kinds
@lasts
@every(10)
@given(st.data())
def test_every_size_gives_the_bits_of_the_full_batch(
    kind: str, last: str, data: st.DataObject
) -> None:
    program = data.draw(programs(8, last, least=3))
    loss, knobs = program.loss(kind), {"reduction": reduction(kind)}
    want, want_value = program.full_batch(kind)
    for size in (None, *range(1, 10)):
        args = program.params, program.batch
        for engine in ("func", "autograd"):
            run = pa.grad(loss, microbatch_size=size, engine=engine, **knobs)
            assert_trees_bitwise_equal(run(*args), want)
        if size is None or exact_value(kind, last, [min(size, 8), 8 % size or size]):
            value = pa.value(loss, microbatch_size=size, **knobs)(*args)
            assert_trees_bitwise_equal(value, want_value)


@kinds
@lasts
@every(4)
@given(st.data(), st.sampled_from(["func", "autograd"]))
def test_aux_and_value_are_the_full_batch_s(
    kind: str, last: str, data: st.DataObject, engine: Any
) -> None:
    """Rows in their order, their sum, and the value that was pooled."""
    rows = data.draw(powers_of_two)
    program = data.draw(programs(rows, last, least=2))
    loss, sizes = program.loss(kind, aux=True), data.draw(compositions(rows))
    args = program.params, program.batch
    _, want = program.whole(kind, *args, aux=True)
    want_grads, want_value = program.full_batch(kind)
    knobs = {"microbatch_size": sizes, "reduction": reduction(kind)}
    knobs |= {"has_aux": True, "aux_reduction": AUX}

    grads, (value, aux) = pa.grad_and_value(loss, engine=engine, **knobs)(*args)
    alone, same_aux = pa.value(loss, **knobs)(*args)

    assert_trees_bitwise_equal(grads, want_grads)
    numbers, names = optree.tree_flatten(aux)[0], optree.tree_flatten(want)[0]
    for got in (numbers, optree.tree_flatten(same_aux)[0]):
        for x, y in zip(got, names, strict=True):
            assert float(torch.as_tensor(x - y).abs().max()) == 0.0
    if exact_value(kind, last, sizes):
        assert_trees_bitwise_equal((value, alone), (want_value, want_value))


def drawn(*ops: Op, seed: int = 3, rows: int = 8) -> Program:
    return build(list(ops), seed, rows)


NAMED = {
    "GradCache": drawn(Op("rowwise", "relu"), Op("full", "squared")),
    "one stage": drawn(Op("rowwise", "squared")),
    "one stage that sees all": drawn(Op("full", "squared")),
    "pooled from the batch itself": drawn(
        Op("pooled", "sum", (), "a"),
        Op("rowwise", "relu", ("a",)),
        Op("rowwise", "squared", ("a",)),
    ),
    "pooled reads pooled": drawn(
        Op("rowwise", "plain"),
        Op("pooled", "sum", (), "a"),
        Op("pooled", "merged", ("a",), "b"),
        Op("rowwise", "relu", ("b",)),
        Op("rowwise", "dot", ("a", "b")),
    ),
    "all is seen in the middle": drawn(
        Op("rowwise", "relu"),
        Op("pooled", "max", (), "a"),
        Op("full", "sums", ("a",)),
        Op("pooled", "sum", (), "b"),
        Op("rowwise", "keep"),
        Op("rowwise", "relu", ("b",)),
        Op("rowwise", "skip"),
        Op("full", "turned"),
        Op("rowwise", "dot", ("a",)),
    ),
    "pooled and never read": drawn(
        Op("rowwise", "plain"), Op("pooled", "max", (), "a"), Op("rowwise", "dot")
    ),
    "pooled for the last stage alone": drawn(
        Op("rowwise", "abs"), Op("pooled", "max", (), "a"), Op("rowwise", "squared", ("a",))
    ),
}


@pytest.mark.parametrize("name", NAMED)
@kinds
@engines
@pytest.mark.parametrize("size", [3, [1, 5, 2]], ids=str)
def test_the_stages_that_a_reader_would_write(name: str, kind: str, engine: Any, size: Any) -> None:
    program = NAMED[name]
    args = program.params, program.batch
    want, _ = program.full_batch(kind)
    knobs = {"microbatch_size": size, "reduction": reduction(kind), "engine": engine}
    grads = pa.grad(program.loss(kind), **knobs)(*args)
    assert_trees_bitwise_equal(grads, want)
    assert any(x.abs().max() > 0 for x in optree.tree_leaves(grads))
    assert_trees_bitwise_equal(grads["unused"], [torch.zeros(3)])


@kinds
def test_a_microbatch_alone_is_another_function(kind: str) -> None:
    """The control: the same losses, as if their rows were not coupled, give other gradients."""
    for name, program in NAMED.items():
        args = program.params, program.batch
        want, _ = program.full_batch(kind)
        plain = lambda p, b, its=program: its.whole(kind, p, b)  # noqa: E731
        knobs = {"microbatch_size": 3, "reduction": reduction(kind)}
        off = [
            (x - y).abs().max() > 1e-3 * y.abs().max()
            for x, y in zip(
                optree.tree_leaves(pa.grad(plain, **knobs)(*args)),
                optree.tree_leaves(want),
                strict=True,
            )
        ]
        in_the_middle = any(op.kind == "full" for op in program.ops[:-1])
        coupled = in_the_middle or any(op.reads for op in program.ops)
        assert any(off) == coupled, name


@kinds
@engines
@every(4)
@given(st.data())
def test_sizes_of_their_own_for_a_plain_loss(kind: str, engine: Any, data: st.DataObject) -> None:
    """``microbatch_size`` may be the rows of every microbatch wherever a batch is at hand."""
    model = data.draw((powers_of_two if kind == "mean" else few).flatmap(losses))
    sizes = data.draw(compositions(model.rows))
    want, want_value = model.full_batch(kind)
    args, knobs = (model.params, model.batch), {"reduction": reduction(kind)}
    for given_sizes in (sizes, tuple(sizes)):
        run = pa.grad_and_value(
            model.loss(kind), microbatch_size=given_sizes, engine=engine, **knobs
        )
        grads, value = run(*args)
        assert_trees_bitwise_equal(grads, want)
        alone = pa.value(model.loss(kind), microbatch_size=given_sizes, **knobs)(*args)
        if exact_value(kind, "rowwise", sizes):
            assert_trees_bitwise_equal((value, alone), (want_value.float(),) * 2)


def test_boundaries_on_the_host_are_the_same_bits() -> None:
    """For a CPU they are where they were."""
    for program in NAMED.values():
        loss = program.loss("weighted")
        here, there = (
            pa.grad(pa.staged(loss.stages, boundaries=where), microbatch_size=3)
            for where in ("device", "host")
        )
        args = program.params, program.batch
        assert_trees_bitwise_equal(there(*args), here(*args))


# Weights -----------------------------------------------------------------------------------


@lasts
@engines
@every(2)
@given(st.data(), st.sets(st.integers(0, 3)))
def test_microbatches_without_weight_add_nothing(
    last: str, engine: Any, data: st.DataObject, without: set[int]
) -> None:
    """Even where their total is NaN; but what they pooled counts for the others."""
    program = data.draw(programs(8, last, least=2))
    mask = program.batch["mask"].clone()
    for i in without:
        mask[2 * i : 2 * i + 2] = 0
    program = program._replace(batch=program.batch | {"mask": mask})
    args = program.params, program.batch
    want, want_value = program.full_batch("weighted")
    loss = program.loss("weighted", spoil=True)
    grads, value = pa.grad_and_value(loss, microbatch_size=2, engine=engine)(*args)
    assert_trees_bitwise_equal(grads, want)
    assert_trees_bitwise_equal((value, pa.value(loss, microbatch_size=2)(*args)), (want_value,) * 2)


@engines
def test_weights_of_any_size(engine: Any) -> None:
    """Tokens are counted in float64, and weights of 2**-20 and 2**30 stand side by side."""
    program = NAMED["pooled for the last stage alone"]
    batch = program.batch | {"mask": 2.0 ** torch.tensor([-3, 4, 0, 1, 2, -1, 0, 3])}
    program = program._replace(batch=batch)
    want, _ = program.full_batch("weighted")
    got = pa.grad(program.loss("weighted"), microbatch_size=1, engine=engine)(program.params, batch)
    assert_trees_bitwise_equal(got, want)


# What a boundary and a share may be -----------------------------------------------------------


@engines
def test_an_integer_may_be_merged_by_a_function(engine: Any) -> None:
    """The most rows, say, of which nothing is differentiable."""

    def most(merged: Tensor) -> Tensor:
        return merged.amax(0)

    w, x = torch.tensor([2.0, -3.0]), torch.arange(12.0).reshape(6, 2)
    loss = pa.staged(
        [
            pa.rowwise(lambda w, x: x * w),
            pa.pooled(lambda w, x: x.detach().long().amax(), "most", merge=most),
            pa.rowwise(lambda w, x, most: (x * most).sum(), reads="most"),
        ]
    )
    knobs = {"reduction": "sum", "engine": engine}
    want = torch.func.grad(lambda w: (x * w * (x * w).detach().long().amax()).sum())(w)
    assert_trees_bitwise_equal(pa.grad(loss, microbatch_size=4, **knobs)(w, x), want)


@engines
def test_narrow_shares_are_summed_wide(engine: Any) -> None:
    """And so are their cotangents: in bfloat16, 256 and one more are 256."""

    def share(w: Tensor, x: Tensor) -> Tensor:
        return (x * w.bfloat16()).sum(0)

    def last(w: Tensor, x: Tensor, sum_: Tensor) -> Tensor:
        assert sum_.dtype == torch.bfloat16
        return (x.float() * w * sum_.float()).sum()

    loss = pa.staged([pa.pooled(share, "sum"), pa.rowwise(last, reads="sum")])
    x = torch.ones(300, 1, dtype=torch.bfloat16)
    run = pa.grad_and_value(loss, microbatch_size=1, reduction="sum", engine=engine)
    grads, value = run(torch.ones(1), x)
    assert value == 300.0**2
    assert_trees_bitwise_equal(grads, torch.tensor([2 * 300.0**2]))


@engines
@given(cut=compositions(6))
@every(2)
def test_numbers_are_pooled_too(engine: Any, cut: list[int]) -> None:
    w, x = torch.tensor([2.0, -3.0]), torch.arange(12.0).reshape(6, 2)
    loss = pa.staged(
        [
            pa.pooled(lambda w, x: [len(x), 0.5 * len(x), {"k": x[:, 0].long().sum()}], "sums"),
            pa.rowwise(
                lambda w, x, sums: (x * w * sums[0] * sums[1] * sums[2]["k"]).sum(), reads="sums"
            ),
        ]
    )
    run = pa.grad(loss, microbatch_size=cut, reduction="sum", engine=engine)
    assert_trees_bitwise_equal(run(w, x), x.sum(0) * 6 * 3 * x[:, 0].sum())


@engines
@given(cut=compositions(6))
@example(cut=[2, 2, 2])
@every(2)
def test_a_boundary_of_another_shape_in_each_microbatch(engine: Any, cut: list[int]) -> None:
    """Nothing but ``full`` has to put them side by side: padding to the longest of a few."""
    lengths = torch.tensor([1, 3, 2, 4, 1, 2])
    w, x = torch.tensor([2.0, -3.0, 1.0, 5.0]), torch.arange(24.0).reshape(6, 4)

    def padded(w: Tensor, batch: Any) -> Any:
        longest = int(batch["lengths"].max())
        mask = torch.arange(longest) < batch["lengths"].unsqueeze(1)
        return (batch["x"] * w)[:, :longest] * mask

    loss = pa.staged(
        [
            pa.rowwise(padded),
            pa.pooled(lambda w, h: h.sum(), "sum"),
            pa.rowwise(lambda w, h, sum_: (h.relu() * sum_).sum(), reads="sum"),
        ]
    )
    batch = {"x": x, "lengths": lengths}

    def whole(w: Tensor) -> Tensor:
        h = padded(w, batch)
        return (h.relu() * h.sum()).sum()

    run = pa.grad(loss, microbatch_size=cut, reduction="sum", engine=engine)
    assert_trees_bitwise_equal(run(w, batch), torch.func.grad(whole)(w))


@engines
def test_a_given_value_is_the_same_for_all(engine: Any) -> None:
    w, x = torch.tensor([2.0, -3.0]), torch.arange(12.0).reshape(6, 2)
    loss = pa.staged(
        [
            pa.rowwise(lambda w, x, by: x * w * by["k"], reads="by"),
            pa.pooled(lambda w, x, by: (x * by["k"]).sum(0), "sum", reads="by"),
            pa.full(lambda w, x, sum_, by: (x * sum_ * by["k"]).sum(), reads=("sum", "by")),
        ]
    )
    k = torch.tensor([1.0, 2.0])
    want = torch.func.grad(lambda w: ((x * w * k) * (x * w * k * k).sum(0) * k).sum())(w)
    got = pa.grad(loss, microbatch_size=4, engine=engine)(w, x, by={"k": k})
    assert_trees_bitwise_equal(got, want)


@engines
def test_a_large_leaf_takes_the_other_way_into_the_sum(engine: Any) -> None:
    """Of 1 MiB, by a hook; it stands in three stages."""
    g = generator(0)
    params = {"large": integers(g, 512, 520, bound=1), "small": integers(g, 512, bound=2)}
    x = integers(g, 6, 512, bound=1)
    loss = pa.staged(
        [
            pa.rowwise(lambda p, x: {"x": x, "h": x @ p["large"][:, :512]}),
            pa.pooled(lambda p, x: (x["x"] @ p["large"]).sum(0)[:512], "sum"),
            pa.rowwise(
                lambda p, x, s: (
                    (x["h"] * p["small"]).sum() + (s * x["x"] @ p["large"]).sum() * 0.25
                ),
                reads="sum",
            ),
        ]
    )

    def whole(p: Any) -> Tensor:
        s = (x @ p["large"]).sum(0)[:512]
        return (x @ p["large"][:, :512] * p["small"]).sum() + (s * x @ p["large"]).sum() * 0.25

    want = torch.func.grad(whole)(params)
    assert max(leaf.abs().max() for leaf in want.values()) < 2**20
    got = pa.grad(loss, microbatch_size=4, reduction="sum", engine=engine)(params, x)
    assert_trees_bitwise_equal(got, want)


# Random numbers that belong to the rows ---------------------------------------------------------


def masked(cut: bool, end: str) -> Any:
    """Dropout in every stage, from the keys of its rows; a half doubles, which is exact."""

    def drop(x: Tensor, keys: Tensor, n: int) -> Tensor:
        return pa.dropout(x, 0.5, pa.fold_in(keys, n))

    def encode(p: Any, b: Any, keys: Tensor) -> Any:
        return {"h": drop(b["x"] @ p["w"], keys, 0), **{k: b[k] for k in ("y", "mask")}}

    def share(p: Any, x: Any, keys: Tensor) -> Tensor:
        return drop(x["h"], keys, 1).sum(0)

    def middle(p: Any, x: Any, keys: Tensor, s: Tensor) -> Any:
        return {**x, "h": drop(x["h"], keys, 2) + s * p["gain"]}

    def mixed(p: Any, x: Any, keys: Tensor) -> Any:
        return {**x, "h": drop(x["h"], keys, 3) + x["h"].flip(0)}

    def loss(p: Any, x: Any, keys: Tensor, s: Tensor) -> Any:
        h = drop(x["h"], keys, 4)
        return (h * x["y"]).sum(1).mean(), {"kept": h != 0, "keys": keys}

    last = {"rowwise": pa.rowwise, "full": pa.full}[end]
    if cut:
        return pa.staged(
            [
                pa.rowwise(encode, reads="keys"),
                pa.pooled(share, "s", reads="keys"),
                pa.rowwise(middle, reads=("keys", "s")),
                pa.full(mixed, reads="keys"),
                last(loss, reads=("keys", "s")),
            ]
        )

    def whole(p: Any, b: Any, keys: Tensor) -> Any:
        x = encode(p, b, keys)
        s = share(p, x, keys)
        return loss(p, mixed(p, middle(p, x, keys, s), keys), keys, s)

    return whole


def small(seed: int, rows: int) -> tuple[Any, Any]:
    g = generator(seed)
    params = {"w": integers(g, 3, WIDTH, bound=2), "gain": integers(g, WIDTH, bound=2)}
    batch = {
        "x": integers(g, rows, 3, bound=2),
        "y": integers(g, rows, WIDTH, bound=2),
        "mask": torch.randint(0, 3, (rows,), generator=g),
    }
    return params, batch


@lasts
@engines
@every(5)
@given(seeds(), st.integers(1, 9), st.integers(-(2**63), 2**63))
def test_no_cut_moves_a_mask_and_none_is_drawn_twice(
    last: str, engine: Any, seed: int, size: int, run: int
) -> None:
    """The full batch, by hand, with the same keys: masks, gradients and parameters, to the bit."""
    params, batch = small(seed, 8)

    def stepped(loss: Any, size: int | None, engine: Any = "func") -> Any:
        knobs = {"has_aux": True, "keys": True, "engine": engine, "microbatch_size": size}
        step = pa.make_step(loss, pa.sgd(2.0**-6), **knobs)
        state = step.init(params, seed=run)
        for _ in range(2):  # the second step has other keys
            state, info = step(state, batch)
            state = state._replace(params=params)
        return info, step(state, batch)[0].params

    (got, new), (want, wanted) = (
        stepped(masked(True, last), size, engine),
        stepped(masked(False, last), None),
    )
    assert_trees_bitwise_equal(got.aux, want.aux)
    assert_trees_bitwise_equal(new, wanted)
    assert_trees_bitwise_equal(got.grad_norm, want.grad_norm)
    assert len(got.aux["keys"].unique(dim=0)) == 8


# A whole step ----------------------------------------------------------------------------------


def everything(kind: str, end: str) -> Any:
    """Keys, buffers, weights and aux; numbers so small that bfloat16 has them."""

    def encode(p: Any, b: Any, keys: Tensor) -> Any:
        return {"h": pa.dropout(b["x"] @ p["w"], 0.5, keys), **{k: b[k] for k in ("y", "mask")}}

    def share(p: Any, x: Any) -> Any:
        return {"sum": x["h"].sum(0), "float": x["h"].float().sum(0)}

    def loss(p: Any, x: Any, s: Any, buffers: Any) -> Any:
        rows = ((x["h"] + p["gain"] * s["sum"]) * x["y"]).float().sum(1)
        new = {"mean": (buffers["mean"] + s["float"].detach()) / 2, "n": buffers["n"] + 1}
        if kind == "weighted":
            out: Any = pa.Weighted((rows * x["mask"]).sum(), x["mask"].sum())
        else:
            out = rows.sum() if kind == "sum" else rows.mean()
        return out, (new, {"rows": rows, "mean": rows.mean()})

    return pa.staged(
        [
            pa.rowwise(encode, reads="keys"),
            pa.pooled(share, "s"),
            {"rowwise": pa.rowwise, "full": pa.full}[end](loss, reads=("s", "buffers")),
        ]
    )


def step_of(kind: str, end: str, size: int | None, **knobs: Any) -> Any:
    return pa.make_step(
        everything(kind, end),
        pa.chain(pa.clip_by_global_norm(4.0), pa.sgd(2.0**-3, momentum=0.5)),
        has_aux=True,
        aux_reduction={"rows": "concat", "mean": "mean"},
        microbatch_size=size,
        reduction=reduction(kind),
        buffers="pooled",
        keys=True,
        **knobs,
    )


BUFFERS = {"mean": torch.tensor([4.0, -2.0]), "n": torch.tensor(3)}


def tiny(seed: int) -> tuple[Any, Any]:
    params, batch = small(seed, 8)
    return {k: x.sign() for k, x in params.items()}, {
        k: x.sign() if x.is_floating_point() else x for k, x in batch.items()
    }


@kinds
@lasts
@engines
@every(3)
@given(data=st.data(), seed=seeds(), size=st.sampled_from([1, 2, 3, 4, 7]))
def test_a_step_with_everything_is_the_step_over_the_full_batch(
    kind: str, last: str, engine: Any, data: st.DataObject, seed: int, size: int
) -> None:
    params, batch = tiny(seed)
    if data.draw(st.booleans()):
        batch["mask"][: 2 * (size % 4)] = 0
    scale = data.draw(st.sampled_from([None, 10, 2, 0]))
    knobs: dict[str, Any] = {
        "loss_scale": None if scale is None else pa.dynamic_loss_scale(2.0**scale),
        "policy": data.draw(
            st.sampled_from([None, pa.Policy(compute=torch.bfloat16), pa.Policy()])
        ),
        "engine": engine,
    }
    whole, cut = step_of(kind, last, None, **knobs), step_of(kind, last, size, **knobs)
    donating = step_of(kind, last, size, donate=True, **knobs)
    want, wanted = whole(whole.init(params, BUFFERS, seed=seed), batch)
    for step in (cut, donating):
        new, info = step(step.init(params, BUFFERS, seed=seed), batch)
        assert_trees_bitwise_equal(new.params, want.params)
        assert_trees_bitwise_equal(tuple(new[2:]), tuple(want[2:]))
        assert_trees_bitwise_equal(info.aux["rows"], wanted.aux["rows"])
        for field in ("grad_norm", "weight", "skipped", "applied", "scale"):
            assert_trees_bitwise_equal(getattr(info, field), getattr(wanted, field))
        cut_sizes = [size, 8 % size or size]
        if exact_value(kind, last, cut_sizes):
            assert_trees_bitwise_equal(info.loss, wanted.loss)
        if exact_value("mean", last, cut_sizes) and kind != "weighted":
            assert_trees_bitwise_equal(info.aux["mean"], wanted.aux["mean"])
        assert info.microbatches == -(-8 // size)
        assert_trees_bitwise_equal(new.buffers, want.buffers)
        if info.applied:
            assert new.buffers["n"] == 4  # once, and not for every microbatch
        assert new.samples == 8


@kinds
@lasts
@engines
def test_a_step_that_is_not_finite_is_not_applied(kind: str, last: str, engine: Any) -> None:
    params, batch = tiny(0)
    batch["x"][5, 0] = torch.nan
    step = step_of(kind, last, 3, engine=engine, loss_scale=pa.dynamic_loss_scale(8.0))
    state = step.init(params, BUFFERS)
    new, info = step(state, batch)
    assert not info.applied
    assert not info.loss.isfinite()
    assert_trees_bitwise_equal((new.params, new.buffers, new.opt_state), (params, *state[1:3]))
    assert new.loss_scale.scale == 4.0
    assert (new.applied, new.attempts, new.samples) == (0, 1, 8)
    clean, info = step(new, tiny(0)[1])
    assert info.applied
    assert all(x.isfinite().all() for x in clean.params.values())


@engines
@pytest.mark.parametrize("size", [1, 2, 4, None])
def test_a_sum_over_many_tokens_fits_into_half_precision(engine: Any, size: int | None) -> None:
    """Its cotangent, 2**10 * 512, does not: so each microbatch has a power of two of its own."""
    g = generator(0)
    params = {"w": integers(g, 3, 2, bound=1), "gain": torch.ones(2)}
    batch = {"x": integers(g, 8, 3, bound=1), "mask": torch.tensor([512, 0, 256, 512] * 2)}

    def loss(p: Any, x: Any, s: Tensor) -> Any:
        rows = (x["h"] * s).sum(1)
        return pa.Weighted((rows * x["mask"]).sum(), x["mask"].sum())

    stages = [
        pa.rowwise(lambda p, b: {"h": b["x"] @ p["w"], "mask": b["mask"].to(b["x"].dtype)}),
        pa.pooled(lambda p, x: x["h"].sum(0) * p["gain"] / 8, "s"),
        pa.rowwise(loss, reads="s"),
    ]

    def whole(p: Any) -> Tensor:
        h = batch["x"] @ p["w"]
        s = h.sum(0) * p["gain"] / 8
        return ((h * s).sum(1) * batch["mask"]).sum() / batch["mask"].sum()

    step = pa.make_step(
        pa.staged(stages),
        pa.sgd(1.0),
        microbatch_size=size,
        loss_scale=pa.static_loss_scale(2.0**10),
        policy=pa.Policy(compute=torch.float16),
        engine=engine,
    )
    new, info = step(step.init(params), batch)
    assert info.applied
    want = torch.func.grad(whole)(params)
    for name, grad in want.items():
        off = (params[name] - new.params[name] - grad).abs().max()
        assert off <= 8 * 2.0**-11 * grad.abs().max()  # a few roundings of float16


@engines
@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("last", [pa.rowwise, pa.full])
def test_a_policy_casts_the_batch_and_no_boundary(engine: Any, size: int | None, last: Any) -> None:
    """What a stage hands on it may have widened on purpose: 257 is no number of bfloat16."""
    seen: list[torch.dtype] = []

    def share(w: Tensor, x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.float().sum(0) + 257 * len(x)

    def encode(w: Tensor, x: Tensor) -> Any:
        seen.append(x.dtype)
        return {"h": x * w, "wide": x.float() + 256}

    def loss(w: Tensor, x: Any, sums: Tensor) -> Tensor:
        seen.extend([w.dtype, x["h"].dtype])
        assert x["wide"].dtype == sums.dtype == torch.float32
        return (x["h"].float() * x["wide"] + sums).sum()

    loss_fn = pa.staged([pa.pooled(share, "s"), pa.rowwise(encode), last(loss, reads="s")])
    knobs = {"reduction": "sum", "microbatch_size": size, "engine": engine}
    policy = pa.Policy(compute=torch.bfloat16)
    step = pa.make_step(loss_fn, pa.sgd(1.0), policy=policy, **knobs)
    x = torch.ones(4, 1)
    _, info = step(step.init(torch.ones(1)), x)
    assert set(seen) == {torch.bfloat16}
    assert info.loss == 4 * 257 + 4 * (4 + 257 * 4)
