"""A file that is not as it was written is refused, whatever became of it: never wrong numbers."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import pureaccum as pa
from tests.faults.refusals import saying


TREE = {
    "epoch": 3,
    "image": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "name": "run",
    "w": torch.arange(300, dtype=torch.float64),
    "z": torch.tensor([True, False]),
}


def saved(tree: Any) -> bytes:
    with TemporaryDirectory() as folder:
        pa.save(f"{folder}/run", tree)
        return Path(f"{folder}/run").read_bytes()


WHOLE = saved(TREE)
HEADER = 8 + int.from_bytes(WHOLE[:8], "little")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrupted") / "run"


def assert_refused(path: Path, content: bytes, *words: str, like: Any = TREE) -> None:
    path.write_bytes(content)
    with saying(ValueError, f"{str(path)!r} is not a whole pureaccum checkpoint: ", *words):
        pa.load(path, like=like)


def test_the_whole_file_is_not(path: Path) -> None:
    path.write_bytes(WHOLE)
    assert torch.equal(pa.load(path, TREE)["w"], TREE["w"])
    assert HEADER % 8 == 0
    assert len(WHOLE) == HEADER + 300 * 8 + 24 * 4 + 2 + 8


def test_cut_short_anywhere(path: Path) -> None:
    ends = [*range(HEADER + 17), *range(HEADER + 17, len(WHOLE), 64), *range(-11, 0)]
    for end in ends:
        assert_refused(path, WHOLE[:end])
    large = saved({"w": torch.zeros(2**14)})
    for end in range(0, len(large), 1024):
        assert_refused(path, large[:end], like={"w": torch.zeros(2**14)})
    assert_refused(path, WHOLE + b"\0", "written")


def test_any_byte_flipped(path: Path) -> None:
    """Each byte once, by a pattern that runs through all bits."""
    for at in range(len(WHOLE)):
        flip = 1 << at % 8 if at % 3 else 0xFF
        assert_refused(path, WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :])


@given(st.dictionaries(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), min_size=1, max_size=9))
def test_some_bytes_changed(path: Path, changes: dict[int, int]) -> None:
    content = bytearray(WHOLE)
    for at, flip in changes.items():
        content[at] ^= flip
    assert_refused(path, bytes(content))


offsets = st.integers(0, len(WHOLE))


@given(st.lists(offsets, min_size=4, max_size=4).map(sorted))
def test_pieces_swapped(path: Path, at: list[int]) -> None:
    a, b, c, d = at
    content = WHOLE[:a] + WHOLE[c:d] + WHOLE[b:c] + WHOLE[a:b] + WHOLE[d:]
    assume(content != WHOLE)
    assert_refused(path, content)


@given(st.binary(max_size=200), st.booleans())
def test_something_else(path: Path, content: bytes, begins: bool) -> None:
    start = struct.pack("<Q", max(len(content) - 8, 0))
    assert_refused(path, start * begins + content)


def test_files_of_other_programs(path: Path) -> None:
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


def by_hand(
    change: Callable[[dict[str, Any], list[Any]], object], tensors: int | None = None
) -> bytes:
    """The file with a header that was changed, and else as if it had been written so."""
    header = json.loads(WHOLE[8:HEADER])
    leaves = json.loads(header["__metadata__"]["leaves"])
    change(header, leaves)
    if header["__metadata__"].get("leaves"):
        header["__metadata__"]["leaves"] = json.dumps(leaves)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    body = WHOLE[HEADER:-8]
    return start + body + struct.pack("=II", zlib.crc32(start), zlib.crc32(body))


def leaf(leaves: list[Any], name: str) -> Any:
    return next(x for x in leaves if x["path"] == f"tree['{name}']")


@pytest.mark.parametrize("version", ["0", "2", "10", 1, None, [], "1 "])
def test_other_versions(path: Path, version: Any) -> None:
    content = by_hand(lambda header, _: header["__metadata__"].update(version=version))
    assert_refused(path, content, f"its version is {version!r}", "'1'", "newer")


def test_what_is_made_by_hand_can_be_right(path: Path) -> None:
    path.write_bytes(by_hand(lambda *_: None))
    assert pa.load(path, TREE)["epoch"] == 3
    path.write_bytes(by_hand(lambda _, leaves: leaf(leaves, "epoch").update(value=4)))
    assert pa.load(path, TREE)["epoch"] == 4


HUGE = [2**62, -1, 2**70, 1e308, "3", None, [], {}]
FIELDS = ["shape", "strides", "dtype", "path", "value"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [*HUGE, *([x] for x in HUGE), [2**40] * 9, [0, 2**70], [1] * 99])
def test_leaves_that_make_no_sense(path: Path, field: str, value: Any) -> None:
    assert_refused(path, by_hand(lambda _, leaves: leaf(leaves, "w").update({field: value})))


@pytest.mark.parametrize(
    "strides", [[0, 0, 0, 0], [24, 12, 4, 2], [1, 1, 1, 1], [24, 12, 4], [24.0, 1, 8, 2]]
)
def test_strides_with_holes_or_overlap(path: Path, strides: Any) -> None:
    assert_refused(path, by_hand(lambda _, leaves: leaf(leaves, "image").update(strides=strides)))


@pytest.mark.parametrize(
    "change",
    [
        lambda header, _: header["tree['w']"].update(data_offsets=[0, 2**63]),
        lambda header, _: header["tree['w']"].update(data_offsets=[8, 2408]),
        lambda header, _: header["tree['w']"].update(shape=[2**60]),
        lambda header, _: header["tree['w']"].update(dtype="F32"),
        lambda header, _: header.pop("tree['w']"),
        lambda header, _: header.pop("crc32"),
        lambda header, _: header.update(more=header["tree['z']"]),
        lambda header, _: header["__metadata__"].update(more="1"),
        lambda header, _: header["__metadata__"].pop("leaves"),
        lambda header, leaves: leaves.append(leaf(leaves, "epoch")),
        lambda header, leaves: leaves.append(leaf(leaves, "z")),
        lambda header, leaves: leaves.clear(),
        lambda header, leaves: leaves.append(3),
        lambda header, leaves: leaf(leaves, "epoch").update(value=None),
        lambda header, leaves: leaf(leaves, "epoch").update(value=[3]),
        lambda header, leaves: leaf(leaves, "epoch").update(dtype="float32"),
        lambda header, leaves: leaf(leaves, "w").update(dtype="load"),
    ],
)
def test_headers_that_contradict_themselves(path: Path, change: Any) -> None:
    assert_refused(path, by_hand(change), "contradicts itself")


def test_no_memory_is_taken_for_what_is_not_there(path: Path) -> None:
    def change(header: Any, leaves: Any) -> None:
        leaf(leaves, "w").update(shape=[2**50])
        header["tree['w']"].update(shape=[2**50], data_offsets=[0, 2**53])
        for name in ("tree['image']", "tree['z']", "crc32"):
            offsets = [x - 300 * 8 + 2**53 for x in header[name]["data_offsets"]]
            header[name]["data_offsets"] = offsets

    assert_refused(path, by_hand(change), "were written. Cut short")
