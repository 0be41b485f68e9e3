"""Batches as they come: whatever holds the samples, its gradient is that of a dict of tensors.

On exact data: any cut of any container gives the bits of the whole batch.
"""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import pureaccum as pa
from pureaccum.testing.strategies import compositions, seeds
from tests.draws import generator, slices
from tests.problems import in_parts, once


pytestmark = [pytest.mark.exact, pytest.mark.promise("batches")]
ROWS = 6


class Encoding(UserDict[str, Any]):
    """As tokenizers give it: a mapping whose items are attributes as well."""

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Frozen(Mapping[str, Any]):
    """A mapping that nobody can write to."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@dataclass(frozen=True)
class Record:
    """A dataclass that looks at itself as a whole when it is made."""

    x: Tensor
    more: Any
    texts: list[str] = field(default_factory=list)

    def __post_init__(self):
        if isinstance(self.x, Tensor):
            assert len(self.x) == ROWS

    def __getitem__(self, name):
        return getattr(self, name)


@dataclass
class Output(dict[str, Any]):
    """A dict that is a dataclass too, as the outputs of models are."""

    x: Any = None
    more: Any = None
    texts: Any = None

    def __post_init__(self):
        self.update(x=self.x, more=self.more, texts=self.texts)


CONTAINERS = {
    "dict": dict,
    "UserDict": Encoding,
    "Mapping": Frozen,
    "mappingproxy": MappingProxyType,
    "dataclass": lambda items: Record(**items),
    "dict and dataclass": lambda items: Output(**items),
}


def batch_of(seed):
    x = torch.randint(-15, 16, (ROWS, 2), generator=generator(seed)).float()
    more = Encoding(y=x.sum(1), scale=2, unit="m", kind=object())
    return {"x": x, "more": more, "texts": ["a" * i for i in range(ROWS)]}


def loss(w, batch):
    x, more, texts = batch["x"], batch["more"], batch["texts"]
    assert type(more) is Encoding
    assert len(texts) == len(x) == len(more.y)
    lengths = torch.tensor([float(len(text)) for text in texts])
    each = (x @ w) * more["scale"] + more.y * lengths * len(more.unit)
    return pa.Weighted(each.sum(), len(each))


@pytest.mark.parametrize("name", CONTAINERS)
@given(seeds(), compositions(ROWS))
def test_any_container_gives_the_bits_of_the_whole_batch(name, seed, sizes):
    items, w = batch_of(seed), torch.tensor([1.0, -2.0])
    batch, kinds = CONTAINERS[name](items), set[type]()

    def seen(w, batch):
        kinds.add(type(batch))
        return loss(w, batch)

    want, value = pa.grad_and_value(loss)(w, items)
    for engine in ("func", "autograd"):
        got = pa.grad_and_value(seen, microbatch_size=sizes, engine=engine)(w, batch)
        assert torch.equal(got[0], want)
        assert torch.equal(got[1], value)
    step = pa.make_step(seen, pa.sgd(1.0), microbatch_size=sizes)
    state = step.init(w)
    parts = list(pa.microbatches(batch, sizes))
    for new, info in (step(state, batch), step.window(state, parts)):
        assert torch.equal(new.params, w - want)
        assert info.loss.float() == value
    assert torch.equal(pa.value(seen, microbatch_size=sizes)(w, batch), value)
    assert kinds == {type(batch)}


def test_paths_are_as_one_writes_them():
    whole = CONTAINERS["dataclass"](batch_of(0) | {"more": Encoding(y=torch.ones(2))})
    with pytest.raises(ValueError, match=r"args\[1\]\.more\['y'\] has 2 samples"):
        pa.grad(loss, microbatch_size=2)(torch.ones(2), whole)


@given(compositions(ROWS))
def test_records_are_cut_and_other_lists_are_not(sizes):
    """A list of dicts, one for each sample; one of another length goes to all."""
    batch = {
        "x": torch.arange(float(ROWS)),
        "records": [{"name": str(i), "at": (i, [i])} for i in range(ROWS)],
        "pair": (tuple("abcdef"), ["left", "right"], {"ids": [[i] for i in range(ROWS)]}),
    }
    for part in pa.microbatches(batch, sizes):
        rows = [int(x) for x in part["x"]]
        assert [record["at"] for record in part["records"]] == [(i, [i]) for i in rows]
        assert part["pair"][0] == tuple("abcdef"[i] for i in rows)
        assert part["pair"][1] == ["left", "right"]
        assert part["pair"][2]["ids"] == [[i] for i in rows]


@pytest.mark.parametrize("kind", ["mapping", "dataclass"])
def test_params_and_aux_may_be_any_container(kind):
    """Of a class that nobody has seen before, too."""

    @dataclass
    class Fields:
        x: Any
        more: Any

        def __getitem__(self, name):
            return getattr(self, name)

    cls = Fields if kind == "dataclass" else type("New", (Encoding,), {})
    items = {"x": torch.ones(ROWS), "more": torch.tensor(2.0)}
    params = cls(**items) if kind == "dataclass" else cls(items)
    other = type("Aux", (Encoding,), {})

    def linear(params, x):
        out = x * params["more"]
        return out.mean(), other(rows=out, more=other(count=pa.Weighted(len(x), 1)))

    step = pa.make_step(linear, pa.sgd(1.0), has_aux=True, microbatch_size=2)
    state, info = once(step, params, torch.arange(8.0))
    assert type(state.params) is cls
    assert state.params["more"] == 2.0 - 3.5
    assert type(info.aux) is type(info.aux["more"]) is other
    assert torch.equal(info.aux["rows"], 2 * torch.arange(8.0))
    assert info.aux["more"]["count"] == 2.0


# Jagged nested tensors -----------------------------------------------------------------------


def of_values(w, batch):
    values = batch["x"].values()
    return pa.Weighted((values @ w * len(batch["y"])).sum() / len(batch["y"]), len(values))


@given(seeds(), compositions(ROWS), st.lists(st.integers(1, 5), min_size=ROWS, max_size=ROWS))
def test_jagged_tensors_are_cut_between_their_rows(seed, sizes, lengths):
    drawn = generator(seed)
    rows = [torch.randint(-15, 16, (n, 2), generator=drawn).float() for n in lengths]
    batch = {"x": torch.nested.nested_tensor(rows, layout=torch.jagged), "y": torch.ones(ROWS)}
    w, flat = torch.tensor([1.0, -2.0]), torch.cat(rows)
    want = flat.sum(0) / len(flat)
    assert torch.equal(pa.grad(of_values, microbatch_size=sizes)(w, batch), want)
    step = pa.make_step(of_values, pa.sgd(1.0), microbatch_size=sizes)
    assert torch.equal(once(step, w, batch)[0].params, w - want)
    for part, its in zip(pa.microbatches(batch, sizes), slices(sizes), strict=True):
        for x, y in zip(part["x"].unbind(), rows[its], strict=True):
            assert torch.equal(x, y)


# A stream needs no samples ------------------------------------------------------------------------


def over_tokens(w, batch):
    total = sum((image @ w).sum() for image in batch["images"]) + batch["scale"] * w.sum()
    return pa.Weighted(total, batch["ends"][-1])


@pytest.mark.parametrize(
    "how",
    ["step", "donated", "accumulator", "value", pytest.param("compiled", marks=pytest.mark.slow)],
)
@given(seeds(), compositions(ROWS))
def test_microbatches_of_a_stream_need_no_rows(how, seed, sizes):
    """Lists of images of several sizes, packed sequences and 0-d tensors: nothing is cut."""
    drawn, w = generator(seed), torch.tensor([1.0, -2.0])
    images = [torch.randint(-15, 16, (i + 1, 2), generator=drawn).float() for i in range(ROWS)]
    parts = []
    for its in slices(sizes):
        ends = torch.tensor([len(x) for x in images[its]]).cumsum(0)
        parts.append({"images": images[its], "ends": ends, "scale": torch.tensor(2.0)})
    flat = torch.cat(images)
    want = (flat.sum(0) + 2 * len(sizes)) / len(flat)
    if how == "value":
        value = pa.value(over_tokens, stream=True)(w, parts)
        total = (flat @ w).sum() + 2 * len(sizes) * w.sum()
        assert value == (total.double() / len(flat)).float()
    elif how == "accumulator":
        acc = pa.accumulator(over_tokens)
        assert torch.equal(acc.finalize(in_parts(acc, w, parts, donate=True))[0], want)
    else:
        compiled = {"backend": "eager"} if how == "compiled" else False
        step = pa.make_step(over_tokens, pa.sgd(1.0), donate=how == "donated", compile=compiled)
        state, info = step.window(step.init(w), iter(parts))
        assert torch.equal(state.params, w - want)
        assert info.microbatches == len(sizes)


def test_what_is_known_of_a_container_is_known_to_this_package_alone():
    class Own(UserDict[str, Any]):
        pass

    batch = Own(x=torch.ones(4, 2), y=torch.ones(4))
    next(pa.microbatches(batch, 2))
    assert optree.tree_leaves(batch) == [batch]
