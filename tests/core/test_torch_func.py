"""Where nothing is cut, pa.grad is torch.func.grad: the same bits and the same structures."""

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import seeds
from tests.core.models import MODELS, problem
from tests.draws import examples, generator
from tests.dropped import is_dropped
from tests.exactly import integers, same
from tests.problems import pulled


pytestmark = [pytest.mark.laws, pytest.mark.promise("torch.func")]


@pytest.mark.parametrize("name", MODELS)
@examples(1 / 2)
@example(dtype=torch.float32, seed=1, rows=7, beyond=0)  # sevenths are rounded
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=seeds(),
    rows=st.integers(1, 7),
    beyond=st.sampled_from([None, 0, 1, 100]),
)
def test_a_batch_that_is_not_cut_is_torch_func_bit_for_bit(name, dtype, seed, rows, beyond):
    """Ordinary floats, for the gradient and the value, with and without aux."""
    given_ = problem(name, seed, rows, dtype)
    size = None if beyond is None else rows + beyond

    def with_aux(params, batch):
        each = given_.rows(params, batch)
        return each.mean(), {"rows": each}

    def is_torch(loss, has_aux):
        ours = pa.grad_and_value(loss, has_aux=has_aux, microbatch_size=size)
        torchs = torch.func.grad_and_value(loss, has_aux=has_aux)
        return same(ours(given_.params, given_.batch), torchs(given_.params, given_.batch))

    assert is_torch(given_.mean, False)
    assert is_torch(with_aux, True)


NO_ROWS = {
    "0-d": torch.tensor(3.0),
    "of several lengths": (torch.arange(3.0), torch.arange(2.0)),
    "numbers": {"a": 2.0, "b": [1, 2, 3]},
    "sparse": torch.arange(3.0).to_sparse(),
}


@pytest.mark.parametrize("batch", NO_ROWS.values(), ids=NO_ROWS)
def test_a_batch_that_is_not_cut_need_not_have_rows(batch):
    def loss(w, batch):
        leaves = optree.tree_leaves(batch)
        total = sum(torch.as_tensor(x).to_dense().sum() for x in leaves)
        return (w * total).square(), {"w": w, "no tensor": "a word"}

    w = torch.tensor(2.0)
    grads, (value, aux) = pa.grad_and_value(loss, has_aux=True)(w, batch)
    expected = torch.func.grad_and_value(lambda w: loss(w, batch)[0])(w)
    assert same((grads, value), expected)
    assert aux == {"w": w, "no tensor": "a word"}


def test_a_batch_that_can_be_read_once_is_refused():
    """A loss is called twice at first, and would find nothing the second time."""
    with pytest.raises(TypeError, match="iterator"):
        pa.grad(lambda w, batch: w * sum(batch))(torch.tensor(2.0), iter([1.0, 2.0]))


OTHER_FORMULA = {
    "silu": torch.nn.functional.silu,
    "mish": torch.nn.functional.mish,
    "group norm": lambda x: torch.nn.functional.group_norm(x, 2),
}


@pytest.mark.parametrize("op", OTHER_FORMULA.values(), ids=OTHER_FORMULA)
@examples(1 / 2)
@given(engine=st.sampled_from(["func", "autograd"]), seed=seeds())
def test_where_torch_has_another_formula_it_is_backward_bit_for_bit(op, engine, seed):
    """torch.func records the backward pass, for which torch has another formula of these.

    So does it under a transform, where this is torch.func itself.
    """
    w, x = torch.randn(2, 8, 8, generator=generator(seed)).unbind()

    loss = lambda w, x: (op(x @ w) ** 2).mean()  # noqa: E731
    want = pulled(lambda w: loss(w, x), w)
    assert torch.equal(pa.grad(loss, microbatch_size=8, engine=engine)(w, x), want)
    assert torch.equal(pa.grad(loss)(w, x), want)
    mapped = torch.func.vmap(torch.func.grad(loss))(w[None], x[None])
    assert torch.equal(torch.func.vmap(pa.grad(loss))(w[None], x[None]), mapped)


def two_params(a, x, b, shared):
    out = x @ a["w"] + b
    return ((out * shared) ** 2).sum(-1).mean()


ARGNUMS = (0, 2, -1, (0,), (2, 0), (-2, -4), (0, 2, 3))


@pytest.mark.parametrize("argnums", ARGNUMS, ids=str)
@examples(1 / 2)
@given(st.sampled_from([None, 3, 8]), seeds())
def test_argnums_are_those_of_torch_func(argnums, size, seed):
    """An int gives a tree and a tuple a tuple, in its own order;

    eight exact samples give the bits.
    """
    g = generator(seed)
    args = ({"w": integers(g, 3, 2)}, integers(g, 8, 3), integers(g, 2), integers(g, 2, bound=3))
    ours = pa.grad(two_params, argnums, microbatch_size=size)(*args)
    assert_trees_bitwise_equal(ours, torch.func.grad(two_params, argnums)(*args))


@pytest.mark.parametrize("batch_argnums", [1, -2, (1, 2), (-2, -1), (2, 1)], ids=str)
@examples(1 / 2)
@given(seeds(), st.integers(1, 8))
def test_batch_argnums_say_what_is_cut(batch_argnums, seed, size):
    """Which arguments are cut; the others, and keywords, are handed on whole."""
    several = isinstance(batch_argnums, tuple)
    cut = []

    def loss(w, x, y, *, power):
        if not is_dropped():
            cut.append(len(x))
        return ((x @ w - (y if several else y.sum())) ** power).mean()

    g = generator(seed)
    args = integers(g, 3), integers(g, 8, 3), integers(g, 8)
    ours = pa.grad(loss, batch_argnums=batch_argnums, microbatch_size=size)(*args, power=2)
    assert max(cut) == size
    assert sum(cut) == 8
    assert_trees_bitwise_equal(ours, torch.func.grad(loss)(*args, power=2))


@pytest.mark.parametrize("name", ["rule", "look", "call", "size", "making"])
@pytest.mark.parametrize("size", [None, 2, "auto"])
def test_arguments_of_a_loss_may_have_any_name(size, name):
    """Those that functions of ours have, too."""

    loss = lambda w, x, **named: (w * x * named[name]).sum()  # noqa: E731
    x, named = torch.arange(4.0), {name: torch.tensor(3.0)}
    options = {"microbatch_size": size, "reduction": "sum"}
    for w in (torch.tensor(2.0), torch.tensor(2.0, requires_grad=True)):
        assert pa.grad(loss, **options)(w, x, **named) == 18
        assert pa.value(loss, **options)(w, x, **named) == 36


@pytest.mark.parametrize("size", [None, 2, 8])
@pytest.mark.parametrize("transform", ["grad", "grad_and_value"])
@pytest.mark.parametrize("argnums", [0, (0,)], ids=str)
def test_aux_is_returned_as_torch_func_returns_it(transform, argnums, size):
    """``(grads, aux)`` and ``(grads, (value, aux))``."""

    def loss(w, x):
        rows = (x @ w) ** 2
        return rows.mean(), {"rows": rows, "more": (x[:, 0], [x[:, :2]])}

    g = generator(0)
    args = integers(g, 3), integers(g, 8, 3)
    ours = getattr(pa, transform)(loss, argnums, has_aux=True, microbatch_size=size)(*args)
    assert_trees_bitwise_equal(
        ours, getattr(torch.func, transform)(loss, argnums, has_aux=True)(*args)
    )


@pytest.mark.parametrize("size", [None, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_results_come_in_the_dtypes_of_params_and_loss(dtype, size):
    params = {"a": torch.ones(3, dtype=dtype), "b": torch.ones((), dtype=torch.float64)}
    x = torch.ones(8, 3, dtype=dtype)

    loss = lambda p, x: ((x @ p["a"] * p["b"]) ** 2).mean()  # noqa: E731
    ours = pa.grad_and_value(loss, microbatch_size=size)(params, x)
    assert_trees_bitwise_equal(ours, torch.func.grad_and_value(loss)(params, x))


@pytest.mark.parametrize("size", [None, 2, 3])
def test_value_is_the_value_of_grad_and_value(size):
    loss = lambda w, x: (((x @ w) ** 2).mean(), x)  # noqa: E731
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(3, generator=g), torch.randn(7, 3, generator=g)
    value = pa.value(loss, has_aux=True, microbatch_size=size)(w, x)
    assert_trees_bitwise_equal(
        value, pa.grad_and_value(loss, has_aux=True, microbatch_size=size)(w, x)[1]
    )
    assert optree.tree_structure(value) == optree.tree_structure(loss(w, x))
