"""Plain code over microbatched functions gives the bits of the full batch, however it is cut.

A program is drawn: functions of samples, sums of samples that later functions read, and code that
sees all samples at once, in any order. Its numbers are integers and every sum of them is exact, so
that one wrong bit is a fault. The same program with nothing cut is what it is compared with.
"""

from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, seeds
from tests.core.coupled import pieces, whole
from tests.draws import examples, few, generator, powers_of_two
from tests.exactly import integers
from tests.problems import leaf, once


pytestmark = [pytest.mark.exact, pytest.mark.promise("bits")]
WIDTH = 2
LIMIT = 2**21  # times 3 for a mask; a tie of maxima halves a gradient, and counts twice
KINDS = ("sum", "mean", "weighted")
kinds = pytest.mark.parametrize("kind", KINDS)
ROWWISE = ("relu", "abs", "plain", "max", "embed", "gate", "keep", "skip")
SUMS = ("sum", "max")
FULL = ("cumsum", "turned")
ENDS = ("dot", "abs", "squared")


class Program(NamedTuple):
    """Operations, each with the sums before it that it reads, and exact data."""

    ops: list[tuple[str, tuple[int, ...]]]
    params: dict[str, Any]
    batch: dict[str, Any]

    def loss(self, kind, params, batch, cut=whole, more=None):
        """Of plain code; with ``more``, that stands for a maximum."""
        x, values = batch, list[Any]()
        for what, reads in self.ops[:-1]:
            given = [values[i] for i in reads]
            if what in SUMS:
                reductions = {"at": "sum" if what == "sum" else "concat", "rest": "sum"}
                found = cut(partial(share, what), reduce=reductions)(params, x, *given)
                if what == "max":
                    found["at"] = (more or Tensor.amax)(found["at"], 0)
                values.append(found)
            elif what in FULL:
                h = with_values(params, x["h"][0], given)
                h = h.cumsum(0) if what == "cumsum" else h + h.flip(0)
                x = {**x, "h": (h,)}
            else:
                larger = torch.maximum if more is None else torch.add
                x = cut(partial(moved, what, larger))(params, x, *given)
        what, reads = self.ops[-1]
        last = cut(partial(ending, what, kind), reduce="mean" if kind == "mean" else "sum")
        return last(params, x, *[values[i] for i in reads])


def with_values(p, h, values):
    for value in values:
        kept, rows, tokens = value["rest"]
        h = h + value["at"] * p["gain"] + kept * p["bias"] + (rows + tokens)
    return h


def share(what, p, x, *values):
    h = with_values(p, x["h"][0], values)
    distinct = h * 16 + x["id"].unsqueeze(1)  # a tie would be shared otherwise
    at = distinct if what == "max" else (h * x["keep"].unsqueeze(1)).sum(0)
    return {"at": at, "rest": (x["keep"].sum(), len(x["tokens"]), x["tokens"].sum())}


def moved(what, larger, p, x, *values):
    (h,), skip = x["h"], x["skip"]
    if what == "max":
        h = larger(h, h.flip(1))
    elif what == "embed":
        h = h + p["table"][x["tokens"]]
    elif what == "gate":
        h = h * x["keep"].unsqueeze(1)
    elif what == "skip":
        h = h + skip[0]
    elif what == "keep":
        skip = [h]  # the same tensor twice
    else:
        h = h @ p["w"][what in ("abs", "plain")] + p["bias"]
        h = h.relu() if what == "relu" else h.abs() if what == "abs" else h
    return {**x, "h": (with_values(p, h, values),), "skip": skip}


def ending(what, kind, p, x, *values):
    """The loss; NaN wherever all weights are zero."""
    h = with_values(p, x["h"][0] + p["bias"], values)
    each = {"dot": h * x["y"], "abs": (h + x["y"]).abs(), "squared": (h + x["y"]) ** 2}[what]
    each = each.sum(1)
    if kind != "weighted":
        return each.sum() if kind == "sum" else each.mean()
    total, weight = (each * x["mask"]).sum(), x["mask"].sum()
    return pa.Weighted(total if weight else total * torch.nan, weight)


# Data --------------------------------------------------------------------------------------


def data(seed, rows, high):
    g = generator(seed)

    some = lambda *shape: integers(g, *shape, bound=high)  # noqa: E731
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


def fits(program):
    """Whether no number can pass 2**24: the same on absolute values, sums for maxima."""
    params, batch = optree.tree_map(
        lambda x: x.double().abs() if x.is_floating_point() else x, (program.params, program.batch)
    )
    loss = partial(program.loss, "sum", batch=batch, more=Tensor.sum)
    grads, value = torch.func.grad_and_value(loss)(params)
    ties = sum(what == "max" for what, _ in program.ops)
    return max(x.abs().max() for x in (value, *optree.tree_leaves(grads))) < LIMIT / 2**ties


def build(ops, seed, rows):
    """With numbers as large as they may be; of operations that grow too fast, the first ones."""
    while True:
        for high in (15, 7, 3, 2, 1):
            program = Program(ops, *data(seed, rows, high))
            if fits(program):
                return program
        assert len(ops) > 1
        sums = sum(what in SUMS for what, _ in ops[:-2])
        ops = [*ops[:-2], (ops[-1][0], tuple(i for i in ops[-1][1] if i < sums))]


@st.composite
def programs(draw, rows, least=0):
    ops = []

    def reads():
        sums = sum(what in SUMS for what, _ in ops)
        some = st.lists(st.integers(0, sums - 1), unique=True, max_size=2) if sums else st.just([])
        return tuple(draw(some))

    for _ in range(draw(st.integers(least, 6))):
        of = draw(st.sampled_from([SUMS, ROWWISE, SUMS, ROWWISE, FULL]))
        ops.append((draw(st.sampled_from(of)), reads()))
    ops.append((draw(st.sampled_from(ENDS)), reads()))
    return build(ops, draw(seeds()), rows)


# Gradients ---------------------------------------------------------------------------------


def full_batch(program, kind):
    """Gradients and value as torch.func gives them; of ``Weighted``, divided once."""
    loss = partial(program.loss, kind, batch=program.batch)
    if kind != "weighted":
        return torch.func.grad_and_value(loss)(program.params)
    grads, value = torch.func.grad_and_value(lambda p: loss(p).total)(program.params)
    weight = program.batch["mask"].sum()
    by = weight if weight else 1
    return optree.tree_map(lambda g: g / by, grads), (value.double() / weight).float()


def backward(loss):
    def run(params, batch):
        params = optree.tree_map(leaf, params)
        value = loss(params, batch)
        value.backward()
        zeros = torch.zeros_like
        return optree.tree_map(lambda x: zeros(x) if x.grad is None else x.grad, params), value

    return run


WAYS = {
    "func": pa.grad_and_value,
    "autograd": partial(pa.grad_and_value, engine="autograd"),
    "torch.func": torch.func.grad_and_value,
    "backward": backward,
}
ways = pytest.mark.parametrize("way", WAYS)


def is_exact(kind, sizes):
    """Means of a microbatch round in the loss, unless it has a power of two of samples."""
    return kind != "mean" or all(size & (size - 1) == 0 for size in sizes)


@kinds
@ways
@examples(1 / 2)
@given(st.data())
def test_any_program_and_any_cut_give_the_bits_of_the_full_batch(kind, way, data):
    """Even where a microbatch without any weight is NaN; what it adds to sums counts.

    The sum of all weights is a power of two, since a mean is divided before it is differentiated.
    """
    rows = data.draw(powers_of_two if kind == "mean" else few)
    program = data.draw(programs(rows))
    without = data.draw(st.sets(st.integers(0, rows - 1), max_size=rows - 1))
    mask = program.batch["mask"].clone()
    mask[[*without]] = 0
    weight = int(mask.sum()) + 1
    mask[min({*range(rows)} - without)] += (1 << weight.bit_length()) - weight + 1
    program = program._replace(batch={**program.batch, "mask": mask})
    sizes = data.draw(compositions(rows))
    sizes = sizes if is_exact(kind, sizes) else [1] * rows
    want = full_batch(program, kind)
    got = WAYS[way](partial(program.loss, kind, cut=pieces(sizes)))(program.params, program.batch)
    assert_trees_bitwise_equal(got, want)


@kinds
@examples(1 / 6)
@given(st.data())
def test_every_size_gives_the_bits_of_the_full_batch(kind, data):
    program = data.draw(programs(8, least=3))
    program.batch["mask"][:] = torch.tensor([0, 3, 0, 0, 1, 2, 0, 2])
    want, want_value = full_batch(program, kind)
    for size in (1, 2, 4, 8, 9) if kind == "mean" else range(1, 10):
        loss = partial(program.loss, kind, cut=pieces(size))
        assert_trees_bitwise_equal(pa.grad(loss)(program.params, program.batch), want)
        assert_trees_bitwise_equal(pa.value(loss)(program.params, program.batch), want_value)


def test_a_microbatch_alone_is_another_function():
    """The control: the same program, as if its samples were not coupled, gives other gradients."""
    program = build([("sum", ()), ("relu", (0,)), ("squared", ())], 3, 8)
    want, _ = full_batch(program, "sum")
    options = {"microbatch_size": 3, "reduction": "sum"}
    with pytest.raises(pa.CoupledLossError):
        pa.grad(partial(program.loss, "sum"), **options)(program.params, program.batch)
    plain = pa.grad(partial(program.loss, "sum"), **options, check=False)
    with pytest.raises(AssertionError):
        assert_trees_bitwise_equal(plain(program.params, program.batch), want)
    assert_trees_bitwise_equal(want["unused"], [torch.zeros(3)])


# A whole step ----------------------------------------------------------------------------------


def everything(kind, cut=whole):
    """Keys, buffers, weights and aux; numbers so small that bfloat16 has them."""

    encode = lambda p, b, keys: pa.dropout(b["x"] @ p["w"], 0.5, keys)  # noqa: E731
    share = lambda p, h: h.float().sum(0)  # noqa: E731

    def last(p, h, b, keys, s):
        h = pa.dropout(h + (p["gain"] * s).to(h), 0.5, pa.fold_in(keys, 1))
        rows = (h * b["y"]).float().sum(1)
        total = pa.Weighted((rows * b["mask"]).sum(), b["mask"].sum())
        total = total if kind == "weighted" else rows.sum() if kind == "sum" else rows.mean()
        return total, rows, keys, h != 0

    def loss(p, b, keys, buffers):
        h = cut(encode, batch_argnums=(1, 2))(p, b, keys)
        s = cut(share, reduce="sum")(p, h)
        reductions = ("mean" if kind == "mean" else "sum", "concat", "concat", "concat")
        total, *rows = cut(last, batch_argnums=(1, 2, 3), reduce=reductions)(p, h, b, keys, s)
        if isinstance(total, pa.Weighted):
            total = total.total / total.weight
        new = {"mean": (buffers["mean"] + s.detach()) / 2, "n": buffers["n"] + 1}
        return total, (new, rows)

    return loss


@pytest.mark.slow
@kinds
@examples(1 / 2)
@given(data=st.data(), seed=seeds(), size=st.sampled_from([1, 2, 4, 7]))
def test_a_step_with_everything_is_the_step_over_the_full_batch(kind, data, seed, size):
    """No cut moves a mask, or a bit of parameters, buffers and all that a step tells."""
    g = generator(seed)
    params = {"w": integers(g, 3, WIDTH, bound=1), "gain": integers(g, WIDTH, bound=1)}
    mask = torch.tensor([0, 1, 0, 2, 1, 0, 4, 0])
    batch = {"x": integers(g, 8, 3, bound=1), "y": integers(g, 8, WIDTH, bound=1), "mask": mask}
    size = min(size, 4) if kind == "mean" else size
    scale = data.draw(st.sampled_from([None, 10, 0]))
    policies = [None, pa.Policy(compute=torch.bfloat16), pa.Policy()]
    options = {
        "loss_scale": None if scale is None else pa.dynamic_loss_scale(2.0**scale),
        "policy": data.draw(st.sampled_from(policies)),
        "engine": data.draw(st.sampled_from(["func", "autograd"])),
        "has_aux": True,
        "buffers": "pooled",
        "keys": True,
    }
    buffers = {"mean": torch.tensor([4.0, -2.0]), "n": torch.tensor(3)}
    results = []
    for cut in (whole, pieces(size)):
        optimizer = pa.chain(pa.clip_by_global_norm(4.0), pa.sgd(2.0**-3, momentum=0.5))
        step = pa.make_step(everything(kind, cut), optimizer, **options)
        results.append(once(step, params, batch, buffers=buffers, seed=seed))
    assert_trees_bitwise_equal(*results)
    new, info = results[1]
    assert info.applied
    assert new.buffers["n"] == 4  # once, and not for every microbatch


@pytest.mark.promise("applied")
def test_a_step_that_is_not_finite_is_not_applied():
    params, x = torch.ones(2), torch.ones(6, 2)
    x[5, 0] = torch.nan

    loss = lambda w, x: pieces(4)(lambda w, x: x * w)(w, x).sum(0).square().mean()  # noqa: E731
    step = pa.make_step(loss, pa.sgd(0.5), loss_scale=pa.dynamic_loss_scale(8.0))
    state = step.init(params)
    new, info = step(state, x)
    assert not info.applied
    assert_trees_bitwise_equal(new.params, params)
    assert new.loss_scale.scale == 4.0
    assert step(new, torch.ones(6, 2))[1].applied


@pytest.mark.promise("policy")
@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_a_policy_casts_what_is_given_and_nothing_in_between(engine):
    """What a function of samples widens on purpose stays so: 257 is no number of bfloat16."""

    def encode(w, x):
        assert w.dtype == x.dtype == torch.bfloat16
        return {"h": x * w, "wide": x.float() + 256}

    def loss(w, x):
        rows = pieces(3)(encode)(w, x)
        return pieces(2)(
            lambda x: (x["h"].float() * x["wide"]).sum(), batch_argnums=0, reduce="sum"
        )(rows)

    step = pa.make_step(loss, pa.sgd(1.0), policy=pa.Policy(compute=torch.bfloat16), engine=engine)
    _, info = once(step, torch.ones(1), torch.ones(4, 1))
    assert info.loss == 4 * 257


@pytest.mark.promise("narrow")
@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sum_over_many_tokens_fits_into_half_precision(engine, size):
    """Under a loss scale, with weights of some hundred tokens in each sample."""
    g = generator(0)
    params = {"w": integers(g, 3, 2, bound=1), "gain": torch.ones(2)}
    batch = {"x": integers(g, 8, 3, bound=1), "mask": torch.tensor([512, 0, 256, 512] * 2)}

    def loss(p, b, cut):
        s = cut(lambda p, b: b["x"] @ p["w"])(p, b).sum(0) * p["gain"] / 8

        def last(p, b, s):
            rows = ((b["x"] @ p["w"]) * s).sum(1).float()
            return pa.Weighted((rows * b["mask"]).sum(), b["mask"].sum())

        return cut(last, reduce="sum")(p, b, s)

    scale, policy = pa.static_loss_scale(2.0**10), pa.Policy(compute=torch.float16)
    options = {"loss_scale": scale, "policy": policy, "engine": engine}
    step = pa.make_step(partial(loss, cut=pieces(size)), pa.sgd(1.0), **options)
    new, info = once(step, params, batch)
    assert info.applied
    want = torch.func.grad(lambda p: (t := loss(p, batch, whole)).total / t.weight)(params)
    for name, grad in want.items():
        off = (params[name] - new.params[name] - grad).abs().max()
        assert off <= 8 * 2.0**-11 * grad.abs().max()  # a few roundings of float16
