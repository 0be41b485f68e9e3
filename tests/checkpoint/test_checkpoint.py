"""What ``save`` wrote, ``load`` gives back: every leaf, to the bit, in memory of its own."""

import json
import math
import os
import re
import stat
import threading
from tempfile import TemporaryDirectory

import optree
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import pureaccum as pa
from pureaccum._base.claims import STEP
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import generator
from tests.states import STATES, batch_of, first_state, full_step


pytestmark = [pytest.mark.exact, pytest.mark.promise("disk")]


# Without those of which torch itself cannot copy or print tensors, or warns.
ODD = re.compile("q|bits|int[1-7]$|complex32")
DTYPES = sorted(
    (x for x in vars(torch).values() if type(x) is torch.dtype and not ODD.search(str(x))), key=str
)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
TWOS = torch.full((2,), 2.0)


def bits(x):
    """What equality does not tell apart: zeros, True and 1, the NaNs in tensors."""
    if isinstance(x, Tensor):
        x = x.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
        return x.dtype, x.shape, x.flatten().view(torch.uint8).tolist()
    return type(x), repr(x)


def flat(tree):
    return optree.tree_flatten(tree, namespace="pureaccum")


def assert_same(got, want):
    """The same classes all the way down, the same bits, the order in memory that a clone has."""
    (xs, spec), (ys, wanted) = flat(got), flat(want)
    assert spec == wanted
    assert [bits(x) for x in xs] == [bits(y) for y in ys]
    for x, y in zip(xs, ys, strict=True):
        if isinstance(y, Tensor):
            assert x.stride() == y.detach().clone().stride()
            assert type(x) is Tensor
            assert x.is_leaf
            assert not x.requires_grad


def places(tree):
    tensors = [x for x in flat(tree)[0] if isinstance(x, Tensor) and x.numel()]
    return [x.untyped_storage().data_ptr() for x in tensors]


def again(path, tree, like):
    with unchanged(tree, like):
        pa.save(path, tree)
        loaded = pa.load(path, like=like)
    assert_same(loaded, tree)
    mine = places(loaded)
    assert len(set(mine)) == len(mine)
    assert not set(mine) & set(places(like))
    return loaded


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_every_state_is_loaded_as_it_was_saved(make, tmp_path):
    state = make()
    again(tmp_path / "run", state, optree.tree_map(torch.zeros_like, state, namespace="pureaccum"))
    # and every other reader of the format reads the same
    xs, spec = flat({"state": state, "epoch": 3})
    pa.save(tmp_path / "run", {"state": state, "epoch": 3})
    theirs = load_file(tmp_path / "run")
    names = [accessor.codify("tree") for accessor in spec.accessors()]
    assert theirs.pop("crc32").shape == (4 * (len(theirs) + 1),)
    assert {n: bits(x) for n, x in theirs.items()} == {
        n: bits(x) for n, x in zip(names, xs, strict=True) if isinstance(x, Tensor)
    }


# Any tree -----------------------------------------------------------------------------------


@st.composite
def tensors(draw):
    """Any bits, of any dtype, in any order, with holes, or the same memory many times."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (size,), generator=generator(draw(seeds())), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    x = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if x.dim() and x.shape[0] > 1:
        kind = draw(st.sampled_from(["whole", "some", "again"]))
        x = {"whole": x, "some": x[::2], "again": x[:1].expand(x.shape)}[kind]
    return x.conj() if dtype.is_complex and draw(st.booleans()) else x


scalars = (
    st.integers()
    | st.floats(allow_nan=True)
    | st.booleans()
    | st.text()
    | st.sampled_from([2**200, -0.0, 1e-320, "\ud800", '"\\'])
)
keys = st.text(max_size=3) | st.sampled_from(["__metadata__", "crc32", "tree", "'", '"', "\n", "."])
any_tree = st.recursive(
    tensors() | scalars | st.none(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3) | st.tuples(x, x),
    max_leaves=6,
)


def blank(x):
    """Something of the same kind, with other numbers and another order in memory."""
    return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else type(x)()


@given(any_tree)
@example({})
@example(torch.tensor([math.nan, -math.nan, -0.0]))
@example(())
def test_any_tree_is_loaded_as_it_was_saved(tree):
    with TemporaryDirectory() as folder:
        xs, spec = flat(tree)
        again(f"{folder}/run", tree, optree.tree_unflatten(spec, [blank(x) for x in xs]))


@pytest.mark.parametrize("x", [0.1, -0.0, math.inf, -math.inf, 5e-324, True, 1, -(10**4000), "é\0"])
def test_scalars_are_exact(x, tmp_path):
    again(tmp_path / "run", [x], [type(x)()])


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint1, torch.bits16])
def test_dtypes_that_torch_can_only_hold_are_loaded_as_saved(dtype, tmp_path):
    x = torch.arange(8, dtype=torch.uint8)
    pa.save(tmp_path / "run", x.view(dtype))
    loaded = pa.load(tmp_path / "run", torch.zeros_like(x).view(dtype))
    assert torch.equal(loaded.view(torch.uint8), x)


# Quantized ones cannot be saved, and those of a few bits can only be held.
SAVED = sorted({x for x in vars(torch).values() if type(x) is torch.dtype} - QUANTIZED, key=str)
# Safetensors has these; of all others a reader gets reals in pairs, or bytes.
READ_AS_THEY_ARE = re.compile(
    r"torch\.(bool|u?int(8|16|32|64)|b?float(16|32|64)|float8_e(4m3fn|5m2))$"
)


@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    seed=seeds(),
    order=st.permutations(range(3)),
    layout=st.sampled_from(["whole", "some", "again"]),
)
@example(shape=[2, 3], seed=0, order=[0, 1, 2], layout="whole")
@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
def test_the_library_s_own_reader_reads_every_dtype(shape, seed, order, layout):
    """A file with a leaf of each: as itself where safetensors has it, else by its bytes."""
    tree, expected = {}, {}

    def laid_out(x):
        x = x.permute([i for i in order if i < len(shape)] + [*range(len(shape), x.dim())])
        if not shape or layout == "whole":
            return x
        return x[::2] if layout == "some" else x[:1].expand(x.shape)

    for dtype in SAVED:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator(seed))
        raw = (raw % 2 if dtype == torch.bool else raw).to(torch.uint8)
        x = raw.flatten().view(dtype).reshape(shape)
        x, raw = laid_out(x), laid_out(raw)
        name = str(dtype)
        tree[name], expected[f"tree[{name!r}]"] = x, (x, raw)
    with TemporaryDirectory() as folder:
        pa.save(f"{folder}/run", tree)
        theirs = load_file(f"{folder}/run")
        ours = pa.load(f"{folder}/run", tree)
    for name, x in tree.items():
        assert ours[name].stride() == torch.empty_like(x, device="meta").stride()
        assert ours[name].dtype == x.dtype
    assert theirs.keys() == expected.keys() | {"crc32"}
    for name, (x, raw) in expected.items():
        came, kind, last = theirs[name], x.dtype, ()
        if x.dtype in (torch.complex32, torch.complex64, torch.complex128):
            kind, last = x.dtype.to_real(), (2,)
        elif not READ_AS_THEY_ARE.match(str(x.dtype)):
            kind, last = torch.uint8, (x.dtype.itemsize,)
        assert (came.dtype, came.shape) == (kind, (*x.shape, *last))
        assert came.flatten().view(torch.uint8).tolist() == raw.flatten().tolist()


W, Z = torch.arange(6.0), torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3)
SHARING = {"a": W, "b": W, "rows": W.view(2, 3), "tail": W[2:], "window": W.unfold(0, 3, 1)}
LINEAR = dict(nn.Linear(2, 3).named_parameters())
# Conjugates and negatives are only bits of a tensor, until somebody asks.
CONJUGATES = dict(enumerate([Z.conj(), Z[0, 0].conj().imag, Z.mT.conj(), Z.conj()[:, ::2]]))
TREES = {
    "shared memory": (SHARING, None),
    "shared memory, in like too": (SHARING, SHARING),
    "conjugates": (CONJUGATES, None),
    "parameters": (LINEAR, LINEAR),
}


@pytest.mark.parametrize(("tree", "like"), TREES.values(), ids=TREES)
def test_tensors_of_all_kinds_are_loaded_plain_and_apart(tree, like, tmp_path):
    assert CONJUGATES[1].is_neg()
    again(tmp_path / "run", tree, like or {k: torch.zeros_like(x) for k, x in tree.items()})


def test_the_order_in_memory_is_kept_as_like_does_not_have_it(tmp_path):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    thin = torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last)
    like = [torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 4, 5)]
    for loaded in again(tmp_path / "run", [x, thin], like):
        assert loaded.is_contiguous(memory_format=torch.channels_last)


def test_a_dict_is_found_by_its_keys_whatever_their_order(tmp_path):
    pa.save(tmp_path / "run", {"a": torch.zeros(2), "b": torch.ones(2)})
    loaded = pa.load(tmp_path / "run", like={"b": torch.zeros(2), "a": torch.zeros(2)})
    assert list(loaded) == ["b", "a"]
    assert torch.equal(loaded["b"], torch.ones(2))


def test_where_tensors_are_made_by_default_does_not_matter(tmp_path):
    ones = torch.ones(2)
    with torch.device("meta"):
        pa.save(tmp_path / "run", ones[::2].expand(2))
        loaded = pa.load(tmp_path / "run", ones * 0)
    assert torch.equal(loaded, ones)


def test_every_number_is_aligned(tmp_path):
    """Readers that map a file into memory need that."""
    tree = [torch.zeros(3, dtype=x) for x in (torch.bool, torch.float64, torch.half, torch.cfloat)]
    pa.save(tmp_path / "run", tree)
    content = (tmp_path / "run").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for i, x in enumerate(tree):
        assert (start + header[f"tree[{i}]"]["data_offsets"][0]) % x.itemsize == 0


# The file -----------------------------------------------------------------------------------


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions_are_those_of_open(tmp_path):
    pa.save(tmp_path / "run", TWOS)
    (tmp_path / "plain").write_text("")
    assert mode(tmp_path / "run") == mode(tmp_path / "plain")
    (tmp_path / "run").chmod(0o640)
    pa.save(tmp_path / "run", TWOS)
    assert mode(tmp_path / "run") == 0o640


def test_a_link_is_followed(tmp_path):
    (tmp_path / "run").touch()
    (tmp_path / "latest").symlink_to("run")
    pa.save(tmp_path / "latest", TWOS)
    assert (tmp_path / "latest").is_symlink()
    assert torch.equal(pa.load(tmp_path / "run", TWOS), TWOS)


@pytest.mark.skipif(not hasattr(os, "O_DIRECTORY"), reason="no folder can be opened here")
@pytest.mark.parametrize("numbers", [0, 2, STEP])
@pytest.mark.parametrize("there", ["nothing", "another", "a link"])
def test_what_has_the_name_is_on_the_disk_and_then_the_name_is(
    there, numbers, tmp_path, monkeypatch
):
    """Every byte is asked to the disk before the file is renamed; after that, its folder is."""
    folder = tmp_path / "runs"
    folder.mkdir()
    path = tmp_path / "latest" if there == "a link" else folder / "run"
    if there != "nothing":
        pa.save(folder / "run", TWOS)
    if there == "a link":
        path.symlink_to("runs/run")
    events = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor):
        fsync(descriptor)
        now = os.fstat(descriptor)
        events.append(("fsync", now.st_ino, now.st_size if stat.S_ISREG(now.st_mode) else "folder"))

    def watched_replace(source, target):
        events.append(("replace", os.stat(source).st_ino, os.path.relpath(target, tmp_path)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    pa.save(path, torch.zeros(numbers))
    file, where = os.stat(folder / "run"), os.stat(folder).st_ino
    assert events == [
        ("fsync", file.st_ino, file.st_size),
        ("replace", file.st_ino, os.path.join("runs", "run")),
        ("fsync", where, "folder"),
    ]


def test_a_name_alone_is_a_file_in_the_folder_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pa.save("run", TWOS)
    assert torch.equal(pa.load("run", TWOS), TWOS)
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_dead_writers_left_goes_and_what_living_ones_write_stays(kind, tmp_path):
    """A file that one process was writing, or a folder of several ranks."""
    fcntl = pytest.importorskip("fcntl", reason="no such locks on Windows")
    names = ("pureaccum-00000000", "pureaccum-ffffffff", "pureaccum-notes", "other-00000000")
    dead, living, *others = (tmp_path / f".{name}.tmp" for name in names)
    for path in (dead, living, *others):
        if kind == "folder":
            path.mkdir()
        (path if kind == "file" else path / "shard-00001-of-00002").write_bytes(b"half")
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    pa.save(tmp_path / "run", TWOS)
    os.close(descriptor)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"run", living.name, *(path.name for path in others)}


def test_writers_to_one_path_do_not_mix(tmp_path):
    """Each reader sees the file of one writer, whole."""
    like = torch.zeros(40_000)
    pa.save(tmp_path / "run", like)
    ended = threading.Event()

    def write(number):
        while not ended.is_set():
            pa.save(tmp_path / "run", torch.full_like(like, number))

    writers = [threading.Thread(target=write, args=(float(i),)) for i in range(1, 3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(10 * settings.default.max_examples):
            assert len(pa.load(tmp_path / "run", like).unique()) == 1
    finally:
        ended.set()
        for writer in writers:
            writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_large_tensors_go_in_pieces(tmp_path):
    numbers = STEP // 4
    tree = [torch.randn(n) for n in (numbers - 1, numbers, numbers + 1, 20 * numbers)]
    pa.save(tmp_path / "run", tree)
    loaded = pa.load(tmp_path / "run", tree)
    assert all(torch.equal(x, y) for x, y in zip(loaded, tree, strict=True))


@pytest.mark.cuda
def test_a_state_on_cuda_goes_to_the_device_of_like(tmp_path):
    step = full_step()
    here, _ = step(first_state(step), batch_of(10))
    there = optree.tree_map(lambda x: x.cuda(), here, namespace="pureaccum")
    turned = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    pa.save(tmp_path / "run", [there, turned])
    for like in ([there, turned], [here, turned.cpu()]):
        state, x = pa.load(tmp_path / "run", like=like)
        assert all(
            got.device == wanted.device
            for got, wanted in zip(
                optree.tree_leaves([state, x], namespace="pureaccum"),
                optree.tree_leaves(like, namespace="pureaccum"),
                strict=True,
            )
        )
        assert_trees_bitwise_equal(state, like[0])
        assert torch.equal(x.cpu(), turned.cpu())
        assert x.stride() == turned.stride()


def test_a_file_tells_what_it_holds_by_names(tmp_path):
    flat = {"0.weight": torch.arange(6.0).reshape(2, 3).bfloat16(), "0.bias": torch.ones(2)}
    pa.save(tmp_path / "flat", flat)
    assert_trees_bitwise_equal(pa.load(tmp_path / "flat"), flat)
    step = pa.make_step(lambda w, x: (w * x).mean(), pa.sgd(0.1))
    state = step.init(torch.tensor(2.0))
    pa.save(tmp_path / "nested", {"state": state, "epochs": [3, 4], "name": "a run"})
    got = pa.load(tmp_path / "nested")
    assert got["name"] == "a run"
    assert [got["['epochs'][0]"], got["['epochs'][1]"]] == [3, 4]
    assert_trees_bitwise_equal(got["['state'].params"], state.params)
    pa.save(tmp_path / "leaf", torch.ones(2))
    assert_trees_bitwise_equal(pa.load(tmp_path / "leaf"), {"tree": torch.ones(2)})


LISTS = {
    "a history": ([3.0, 2.0, 1.0], [[], [0.0], [0.0] * 5, [0.0] * 3]),
    "of nothing": ([], [[], [0.0]]),
    "tensors": ([torch.ones(2), torch.zeros(2)], [[], [torch.ones(2)]]),
    "trees": ([{"a": 1}, {"a": 2}], [[{"a": 0}], [{"a": 0}] * 4]),
    "in one another": ([[1, 2], [3]], [[[0]], [[0, 0]] * 3]),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_other_lengths_are_loaded(name, tmp_path):
    saved, likes = LISTS[name]
    pa.save(tmp_path / "run", {"list": saved, "w": torch.ones(1)})
    for like in likes:
        got = pa.load(tmp_path / "run", like={"list": like, "w": torch.zeros(1)})
        assert len(got["list"]) == len(saved)
        assert_trees_bitwise_equal(got["list"], saved)


def test_an_empty_list_cannot_say_what_trees_it_is_of(tmp_path):
    pa.save(tmp_path / "run", {"list": [{"a": 1}]})
    with pytest.raises(ValueError, match=r"tree\['list'\]\[0\]\['a'\] is only in the file"):
        pa.load(tmp_path / "run", like={"list": []})
