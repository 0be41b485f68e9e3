"""The full-batch gradient does not know how the batch was cut, ordered, named or scaled."""

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions, pieces, seeds
from tests.draws import examples, generator
from tests.exactly import (
    folded,
    full_batch,
    integers,
    losses,
    make_batch,
    make_params,
    row_losses,
    sizes,
)


pytestmark = [pytest.mark.laws, pytest.mark.promise("bits")]


def accumulated(loss, params, parts, **options):
    acc = pa.accumulator(loss.call, reduction=loss.reduction, **options)
    return acc.finalize(folded(acc, acc.init(params), params, parts))


@given(seeds(), losses, st.integers(2, 12), st.data())
def test_rows_may_be_permuted(seed, loss, rows, data):
    params, batch = make_params(seed), make_batch(seed, rows)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    shuffled = {key: column[order] for key, column in batch.items()}
    size = data.draw(st.integers(1, rows - 1))
    grads = pa.grad(loss.call, microbatch_size=size, reduction=loss.reduction)
    assert_trees_bitwise_equal(grads(params, shuffled), grads(params, batch))


@given(seeds(), losses, st.integers(1, 6).flatmap(lambda rows: compositions(rows, empty=True)))
def test_a_batch_twice_is_twice_the_sum_and_the_same_mean(seed, loss, sizes):
    params = make_params(seed)
    parts = pieces(make_batch(seed, sum(sizes)), sizes)
    once, twice = (accumulated(loss, params, p) for p in (parts, parts + parts))
    factor = 2 if loss.name == "sum" else 1
    assert_trees_bitwise_equal(twice, optree.tree_map(lambda x: factor * x, once))


@given(seeds(), losses, sizes, st.integers(-20, 20))
def test_a_power_of_two_goes_through_exactly(seed, loss, sizes, exponent):
    def scaled(params, batch):
        out = loss.call(params, batch)
        if isinstance(out, pa.Weighted):
            return out._replace(total=out.total * 2.0**exponent)
        return out * 2.0**exponent

    params, batch = make_params(seed), make_batch(seed, sum(sizes))
    once = accumulated(loss, params, pieces(batch, sizes))
    many = accumulated(loss._replace(call=scaled), params, pieces(batch, sizes))
    assert_trees_bitwise_equal(many, optree.tree_map(lambda x: x * 2.0**exponent, once))


@given(seeds(), st.integers(2, 12), st.data())
def test_the_gradient_is_linear_in_the_loss(seed, rows, data):
    """The gradient of ``a * f + b * g`` is that combination of the gradients of f and of g."""
    params, batch = make_params(seed), make_batch(seed, rows)
    size = data.draw(st.integers(1, rows - 1))
    a, b = data.draw(st.integers(-3, 3)), data.draw(st.integers(-3, 3))

    f = lambda p, part: row_losses(p, part).sum()  # noqa: E731

    def g(p, part):
        return (part["mask"] * (p["emb"][part["i"]].abs().sum(-1) + p["b"].max())).sum()

    def gradient(loss):
        return pa.grad(loss, microbatch_size=size, reduction="sum")(params, batch)

    both = gradient(lambda p, part: a * f(p, part) + b * g(p, part))
    assert_trees_bitwise_equal(
        both, optree.tree_map(lambda x, y: a * x + b * y, gradient(f), gradient(g))
    )


@given(seeds(), losses, sizes, st.permutations(["w", "emb", "b"]), st.permutations(["y", "i"]))
def test_the_order_of_dict_keys_does_not_matter(seed, loss, sizes, names, columns):
    """optree sorts the keys of a dict and torch keeps their order: leaves must not be mixed up.

    All leaves are nested one deeper under keys whose order differs from that of their names.
    """
    params, batch = make_params(seed), make_batch(seed, sum(sizes))

    def nested(p, b):
        return loss.call(
            {name: tree[name] for tree in p.values() for name in tree},
            {**b["columns"], "mask": b["mask"]},
        )

    order = {"w": "c", "emb": "a", "b": "b"}
    deep = {order[name]: {name: params[name]} for name in names}
    parts = [
        {"columns": {name: part[name] for name in columns}, "mask": part["mask"]}
        for part in pieces(batch, sizes)
    ]
    grads, _ = accumulated(loss._replace(call=nested), deep, parts)
    expected = full_batch(loss, params, batch)
    assert_trees_bitwise_equal(grads, {order[name]: {name: expected[name]} for name in names})


@pytest.mark.promise("ensembles")
@examples(1 / 3)
@given(seeds(), losses, st.integers(2, 12), st.data())
def test_vmap_of_the_engine_is_a_loop_of_the_engine(seed, loss, rows, data):
    g = generator(seed)
    several = {"w": integers(g, 3, 4, 2, bound=7), "emb": integers(g, 3, 5, 4)}
    several["b"] = integers(g, 3, 2)
    batch = make_batch(seed, rows)
    # The mean of one microbatch divides by its samples before it adds up, which rounds.
    size = data.draw(st.integers(1, rows - (loss.name == "mean")))
    gradient = pa.grad_and_value(loss.call, microbatch_size=size, reduction=loss.reduction)
    at_once = torch.func.vmap(gradient, (0, None))(several, batch)
    one_by_one = [gradient({k: p[i] for k, p in several.items()}, batch) for i in range(3)]
    assert_trees_bitwise_equal(
        at_once[0], optree.tree_map(lambda *x: torch.stack(x), *one_by_one)[0]
    )
