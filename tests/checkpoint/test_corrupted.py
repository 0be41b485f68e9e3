"""A file that is not as it was written is refused, whatever became of it: never wrong numbers."""

import json
import os
import re
import struct
import zlib
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import pureaccum as pa
from pureaccum.checkpoint.file_format import MANY
from tests.checkpoint.programs import told_by
from tests.refusals import saying


pytestmark = [pytest.mark.faults, pytest.mark.promise("disk")]
TREE = {
    "epoch": 3,
    "image": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "name": "run",
    "w": torch.arange(300, dtype=torch.float64),
    "z": torch.tensor([True, False]),
}


def saved(tree):
    with TemporaryDirectory() as folder:
        pa.save(f"{folder}/run", tree)
        return Path(f"{folder}/run").read_bytes()


WHOLE = saved(TREE)
HEADER = 8 + int.from_bytes(WHOLE[:8], "little")


def sealed(text, checked=WHOLE[HEADER:-4]):
    """A file of such a header, with checksums that fit."""
    start = struct.pack("<Q", len(text)) + text
    return start + checked + struct.pack("=I", zlib.crc32(start))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("corrupted") / "run"


def assert_refused(path, content, *words, like=TREE):
    path.write_bytes(content)
    with saying(ValueError, f"{str(path)!r} is not a whole pureaccum checkpoint: ", *words):
        pa.load(path, like=like)


def test_a_whole_file_is_loaded(path):
    path.write_bytes(WHOLE)
    assert torch.equal(pa.load(path, TREE)["w"], TREE["w"])
    assert HEADER % 8 == 0
    assert len(WHOLE) == HEADER + 300 * 8 + 24 * 4 + 2 + 4 * 4
    for epoch in (3, 4):  # made by hand a file can be right
        new = {"tree['epoch']": str(epoch)}
        path.write_bytes(by_hand(lambda _, metadata: metadata.update(new)))  # noqa: B023
        assert pa.load(path, TREE)["epoch"] == epoch


def test_a_file_that_is_cut_short_anywhere_is_refused(path):
    ends = [*range(HEADER + 17), *range(HEADER + 17, len(WHOLE), 64), *range(-11, 0)]
    for end in ends:
        assert_refused(path, WHOLE[:end])
    large = saved({"w": torch.zeros(2**14)})
    for end in range(0, len(large), 1024):
        assert_refused(path, large[:end], like={"w": torch.zeros(2**14)})
    assert_refused(path, WHOLE + b"\0", "bytes; expected")


def test_a_file_with_any_byte_flipped_is_refused(path):
    """Each byte once, by a pattern that runs through all bits."""
    for at in range(len(WHOLE)):
        flip = 1 << at % 8 if at % 3 else 0xFF
        assert_refused(path, WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :])


@given(st.dictionaries(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), min_size=1, max_size=9))
def test_a_file_with_some_bytes_changed_is_refused(path, changes):
    content = bytearray(WHOLE)
    for at, flip in changes.items():
        content[at] ^= flip
    assert_refused(path, bytes(content))


offsets = st.integers(0, len(WHOLE))


@given(st.lists(offsets, min_size=4, max_size=4).map(sorted))
def test_a_file_with_pieces_swapped_is_refused(path, at):
    a, b, c, d = at
    content = WHOLE[:a] + WHOLE[c:d] + WHOLE[b:c] + WHOLE[a:b] + WHOLE[d:]
    assume(content != WHOLE)
    assert_refused(path, content)


@given(st.binary(max_size=200), st.booleans())
def test_a_file_of_something_else_is_refused(path, content, begins):
    start = struct.pack("<Q", max(len(content) - 8, 0))
    assert_refused(path, start * begins + content)


def test_files_of_other_programs_are_refused(path):
    assert_refused(path, b"", "0 bytes")
    for text in (b"{}", b"[]", b"null", b'{"__metadata__": []}', b"[" * 100_000, b"\xff" * 99):
        assert_refused(path, struct.pack("<Q", len(text)) + text + bytes(8), "another program")
    torch.save(TREE, path)
    assert_refused(path, path.read_bytes())
    tensors = {"w": torch.ones(3)}
    for metadata in (None, {"format": "pt"}, {"version": "1"}, {"format": "pureaccum"}):
        save_file(tensors, path, metadata=metadata)
        assert_refused(path, path.read_bytes(), "another program", like=tensors)


# Made by hand, with checksums that fit ------------------------------------------------------


def by_hand(change):
    """The file with a header that was changed, and else as if it had been written so."""
    header = json.loads(WHOLE[8:HEADER])
    change(header, header["__metadata__"])
    text = json.dumps(header).encode()
    return sealed(text + b" " * (-len(text) % 8))


@pytest.mark.parametrize("version", ["0", "1", "10", "2 ", "", 2, None, [], {}, "2" * 99])
def test_files_of_other_versions_are_refused(path, version):
    content = by_hand(lambda _, metadata: metadata.update(version=version))
    of_ours = isinstance(version, str) and len(version) < 20
    words = [f"its version is {version!r}", "'2'", "newer"] if of_ours else ["another program"]
    assert_refused(path, content, *words)


HUGE = [2**62, -1, 2**70, 1e308, "3", None, [], {}]
ODD = [*HUGE, *([x] for x in HUGE), [2**40] * 9, [0, 2**70], [1] * 99, [["a", 5 * 10**8]]]


@pytest.mark.parametrize("field", ["shape", "dtype", "data_offsets", "more"])
def test_tensors_that_make_no_sense_are_refused(path, field):
    for value in ODD:
        new = {field: value}
        assert_refused(path, by_hand(lambda header, _, new=new: header["tree['w']"].update(new)))


@pytest.mark.parametrize("field", ["strides", "dtype", "whole", "at", "more"])
@pytest.mark.parametrize("leaf", ["tree['w']", "tree['image']"])
def test_notes_that_make_no_sense_are_refused(path, field, leaf):
    for value in ODD:
        new = {leaf: json.dumps({"strides": [24, 1, 8, 2], field: value})}
        assert_refused(path, by_hand(lambda _, metadata, new=new: metadata.update(new)))


@pytest.mark.parametrize(
    "strides", [[0, 0, 0, 0], [24, 12, 4, 2], [1, 1, 1, 1], [24, 12, 4], [24.0, 1, 8, 2]]
)
def test_strides_with_holes_or_overlap_are_refused(path, strides):
    note = json.dumps({"strides": strides})
    assert_refused(path, by_hand(lambda _, metadata: metadata.update({"tree['image']": note})))


@pytest.mark.parametrize("text", ["[3]", "null", "{}", "3 4", "3" * 5000, "[" * 9999])
def test_scalars_that_make_no_sense_are_refused(path, text):
    content = by_hand(lambda _, metadata: metadata.update({"tree['epoch']": text}))
    assert_refused(path, content, "contradicts itself")


@pytest.mark.parametrize(
    "change",
    [
        lambda header, _: header["tree['w']"].update(data_offsets=[0, 2**63]),
        lambda header, _: header["tree['w']"].update(data_offsets=[8, 2408]),
        lambda header, _: header["tree['w']"].update(shape=[2**60]),
        lambda header, _: header["tree['w']"].update(dtype="F32"),
        lambda header, _: header["tree['w']"].update(dtype="load"),
        lambda header, _: header.pop("tree['w']"),
        lambda header, _: header.pop("crc32"),
        lambda header, _: header["crc32"].update(shape=[12]),
        lambda header, _: header.update(more=header["tree['z']"]),
        lambda header, _: header.update({"tree['epoch']": header["tree['z']"]}),
        lambda _, metadata: metadata.update(more=1),
        lambda _, metadata: metadata.update({"tree['z']": "3"}),
        lambda _, metadata: metadata.update({"tree['image']": "{}", "tree['epoch']": "{}"}),
        lambda _, metadata: metadata.update(save="0" * 31, shard="1 of 1"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(path, change):
    path.write_bytes(by_hand(change))
    with saying(ValueError, repr(str(path))):
        pa.load(path, TREE)


@pytest.mark.slow
@pytest.mark.parametrize("text", ['"1"', '"{"'])
def test_not_every_leaf_that_nobody_wants_is_looked_at(path, text):
    """Notes of no tensor name no leaf: nobody writes such a header, though nothing else is off."""
    wanted = {"w": torch.zeros(0)}
    entry = '"tree[\'w\']": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    checks = '"crc32": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}'
    begin = '{"__metadata__": {"format": "pureaccum", "version": "2"'
    for many in (MANY, MANY + 1, MANY + 2, 2 * MANY):
        header = begin + f', "a": {text}' * many + "}, " + entry + ", " + checks + "}"
        content = sealed(header.encode(), bytes(4))
        if text == '"{"':
            assert_refused(path, content, "contradicts itself", like=wanted)
            continue
        path.write_bytes(content)
        with saying(ValueError, "holds another tree than like") as caught:
            pa.load(path, wanted)
        assert int(re.search(r"(\d+) leaves are off", str(caught.value))[1]) <= MANY + 4


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each file is loaded in a fork")
def test_a_hostile_file_costs_nothing(tmp_path):
    """It is refused by a ValueError, and takes at most 16 MB beyond its size."""
    found = told_by("hostile", tmp_path)
    assert len(found) == 30
    assert {it["end"] for it in found.values()} == {"ValueError"}
    assert max(it["beyond"] for it in found.values()) <= 16 * 10**6


# What stands in headers, and what does not.
TOKENS = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"-1", b"9" * 20, b"\\", b"null", b" "),
    *(b"\xff", b"\0", b'"U8"', b'"crc32"', b"\"tree['w']\"", b'"whole"', b'\\"at\\"', b'["a", 9]'),
    *(b'"tree[\'w\']": "{\\"strides\\": [1]}"', b'"save": ', b'{\\"dtype\\": \\"int4\\"}'),
]


def test_headers_changed_at_random_are_refused_or_right(path):
    """With checksums that fit: refused, or a tree of that structure, with those shapes."""
    random = Random(0)
    for _ in range(80 * min(250, settings.default.max_examples)):
        text = bytearray(WHOLE[8:HEADER])
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(text))
            text[at : at + random.choice([0, 0, 1, 2, 5, 20])] = random.choice(TOKENS)
        text += b" " * (-len(text) % 8)
        path.write_bytes(sealed(bytes(text)))
        try:
            loaded = pa.load(path, TREE)
        except ValueError:
            continue
        for name, x in TREE.items():
            assert type(loaded[name]) is type(x)
            assert not isinstance(x, torch.Tensor) or torch.equal(loaded[name], x)
