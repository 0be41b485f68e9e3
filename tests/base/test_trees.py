"""Trees of every kind, as params and as a batch, in both engines.

A tree is built around two leaves, and the loss reads the same two leaves out of it again: so the
gradient is that of the two leaves, put into a tree of the same kind.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pureaccum as pa
from pureaccum._base.trees import paths
from pureaccum.testing import assert_trees_bitwise_equal


pytestmark = [pytest.mark.parity, pytest.mark.promise("batches")]


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Plain:
    """Registered for every user of optree; its children in another order than its fields."""

    a: Any
    b: Any


optree.register_pytree_node(
    Plain,
    lambda x: ((x.b, x.a), None),
    lambda _, children: Plain(children[1], children[0]),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


@optree.dataclasses.dataclass(namespace="pureaccum")
class Spaced:
    """Registered for pureaccum alone; with a field that is no child."""

    a: Any
    b: Any
    word: str = optree.dataclasses.field(default="static", pytree_node=False)


class Kind(NamedTuple):
    """How a tree is built around two leaves, and how they are read."""

    name: str
    build: Callable[[Any, Any], Any]
    read: Callable[[Any], tuple[Any, Any]]


KINDS = [
    Kind("dict", lambda a, b: {"z": a, "a": b}, lambda t: (t["z"], t["a"])),
    Kind("list", lambda a, b: [a, [], b], lambda t: (t[0], t[2])),
    Kind("tuples", lambda a, b: ((a,), ((), (b,))), lambda t: (t[0][0], t[1][1][0])),
    Kind("namedtuple", Pair, lambda t: (t.a, t.b)),
    Kind("ordered", lambda a, b: OrderedDict(z=a, a=b), lambda t: (t["z"], t["a"])),
    Kind("default", lambda a, b: defaultdict(int, z=a, a=b), lambda t: (t["z"], t["a"])),
    Kind("deque", lambda a, b: deque([a, b], maxlen=3), lambda t: (t[0], t[1])),
    Kind("int keys", lambda a, b: {2: a, 1: {0: b}}, lambda t: (t[2], t[1][0])),
    Kind("dataclass", Plain, lambda t: (t.a, t.b)),
    Kind("in our namespace", Spaced, lambda t: (t.a, t.b)),
    Kind("none", lambda a, b: {"n": None, "x": (a, None, b)}, lambda t: (t["x"][0], t["x"][2])),
    Kind("deep", lambda a, b: Spaced(Plain([a], None), Pair(b, {})), lambda t: (t.a.a[0], t.b.a)),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
engines = pytest.mark.parametrize("engine", ["func", "autograd"])


def rows_loss(a, b, x, y):
    return ((x @ a + b - y) ** 2).sum()


def data():
    shapes = (3, 2), (2,), (7, 3), (7, 2)
    return tuple(torch.randint(-7, 8, shape).float() for shape in shapes)


@engines
@kinds
def test_params_may_be_any_tree(kind, engine):
    a, b, x, y = data()

    def loss(params, batch):
        assert type(params) is type(kind.build(a, b))
        return rows_loss(*kind.read(params), *batch)

    gradient = pa.grad(loss, microbatch_size=3, reduction="sum", engine=engine)
    expected = torch.func.grad(rows_loss, (0, 1))(a, b, x, y)
    assert_trees_bitwise_equal(gradient(kind.build(a, b), (x, y)), kind.build(*expected))


@kinds
def test_streams_take_any_tree(kind):
    """A state holds a tree like params; update, merge and finalize keep its kind."""
    a, b, x, y = data()
    params = kind.build(a, b)
    acc = pa.accumulator(lambda p, batch: rows_loss(*kind.read(p), *batch), reduction="sum")
    states = [
        acc.update(acc.init(params), params, part, donate=True)
        for part in pa.microbatches((x, y), 4)
    ]
    expected = torch.func.grad(rows_loss, (0, 1))(a, b, x, y)
    assert_trees_bitwise_equal(acc.finalize(acc.merge(*states))[0], kind.build(*expected))


@engines
@kinds
def test_a_batch_may_be_any_tree(kind, engine):
    a, b, x, y = data()

    def loss(params, batch):
        assert type(batch) is type(kind.build(x, y))
        return rows_loss(*params, *kind.read(batch))

    gradient = pa.grad(loss, microbatch_size=3, reduction="sum", engine=engine)
    expected = torch.func.grad(rows_loss, (0, 1))(a, b, x, y)
    assert_trees_bitwise_equal(gradient((a, b), kind.build(x, y)), expected)


@kinds
def test_aux_may_be_any_tree(kind):
    a, b, x, y = data()

    def loss(params, batch):
        return rows_loss(*params, *batch), kind.build(*batch)

    gradient = pa.grad(loss, has_aux=True, microbatch_size=3, reduction="sum")
    assert_trees_bitwise_equal(gradient((a, b), (x, y))[1], kind.build(x, y))


nodes = st.recursive(
    st.just(0) | st.none(),
    lambda x: st.one_of(
        st.lists(x, max_size=3),
        st.dictionaries(st.text(max_size=2), x, max_size=3),
        st.dictionaries(st.integers(), x, max_size=3),
        st.lists(x, max_size=3).map(tuple),
        st.sampled_from(KINDS).flatmap(lambda kind: st.builds(kind.build, x, x)),
    ),
    max_leaves=8,
)


@pytest.mark.slow
@pytest.mark.mechanism
@given(nodes)
def test_leaves_are_called_as_optree_calls_them(tree):
    spec = optree.tree_structure(tree, namespace="pureaccum")
    want = [accessor.codify("tree") for accessor in spec.accessors()]
    assert paths(spec, "tree") == want


@pytest.mark.parametrize("size", [None, 3])
def test_a_bare_tensor_is_a_tree(size):
    w, x = torch.ones(3), torch.randint(-7, 8, (7, 3)).float()
    gradient = pa.grad(lambda w, x: (x @ w).sum(), microbatch_size=size, reduction="sum")
    assert torch.equal(gradient(w, x), x.sum(0))


def test_a_static_field_is_kept():
    a, b, x, y = data()
    params = Spaced(a, b, word="kept")
    options = {"microbatch_size": 3, "reduction": "sum"}
    gradient = pa.grad(lambda p, batch: rows_loss(p.a, p.b, *batch), **options)
    assert gradient(params, (x, y)).word == "kept"
