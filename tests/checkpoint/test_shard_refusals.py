"""A checkpoint of several ranks that is not as they wrote it is refused, and says which shard."""

import itertools
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pureaccum as pa
from pureaccum.checkpoint.file_format import Part, Piece
from pureaccum.checkpoint.files import write_file
from pureaccum.testing import assert_trees_bitwise_equal
from tests.ranks import End, run_on_ranks
from tests.refusals import saying


pytestmark = [
    pytest.mark.slow,  # ranks write what is read
    pytest.mark.table,
    pytest.mark.faults,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without it"),
    pytest.mark.promise("disk"),
]
TREE = {
    "w": torch.arange(24.0).reshape(8, 3) + 1,
    "v": torch.arange(6, dtype=torch.float64) + 1,
    "half": torch.arange(8, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "epoch": 3,
}
LIKE = {name: torch.zeros_like(x) if name != "epoch" else 0 for name, x in TREE.items()}


def spread(tree, factor=1):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = {"w": [Shard(0)], "v": [Shard(0)], "scalar": [Replicate()]}
    tree = {name: x if name == "epoch" else x * factor for name, x in tree.items()}
    return {n: distribute_tensor(x, mesh, kinds[n]) if n in kinds else x for n, x in tree.items()}


def saves(folder, rank, world):
    pa.save(f"{folder}/run", spread(TREE))
    pa.save(f"{folder}/other", spread(TREE, 100))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    assert on_ranks(4, saves, folder) == [None] * 4
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(saved / "run", tmp_path / "run")
    assert_trees_bitwise_equal(pa.load(tmp_path / "run", LIKE), TREE)
    return tmp_path / "run"


def name(i, of=4):
    return f"shard-{i:05}-of-{of:05}.safetensors"


NAMES = [name(i) for i in range(1, 5)]


def assert_refused(run, *words):
    with saying(ValueError, str(run), "is not a whole pureaccum checkpoint", *words):
        pa.load(run, LIKE)


def test_of_many_missing_shards_the_first_is_named(run):
    for shard in NAMES[1:]:
        (run / shard).unlink()
    assert_refused(run, f"{NAMES[1]} is missing")
    (run / NAMES[0]).unlink()
    assert_refused(run, "neither a file nor a folder")


@pytest.mark.parametrize("shard", NAMES)
def test_a_shard_that_is_cut_is_named(run, shard):
    whole = (run / shard).read_bytes()
    for end in {len(whole) * i // 64 for i in range(64)}:
        (run / shard).write_bytes(whole[:end])
        assert_refused(run, shard)
    (run / shard).write_bytes(whole + b"\0")
    assert_refused(run, shard)


@pytest.mark.parametrize("shard", NAMES)
def test_a_shard_with_any_byte_flipped_is_named(run, shard):
    """Of the header, of numbers and of checksums."""
    whole = (run / shard).read_bytes()
    with open(run / shard, "r+b", buffering=0) as file:
        for at in range(len(whole)):
            for flip in (1 << at % 8, 1 << (at + 3) % 8, 0xFF):
                os.pwrite(file.fileno(), bytes([whole[at] ^ flip]), at)
                assert_refused(run, shard)
            os.pwrite(file.fileno(), whole[at : at + 1], at)


ODD = {"is missing": lambda saved, run: run.unlink(), "of another save": shutil.copy}


@pytest.mark.parametrize("shard", NAMES)
@pytest.mark.parametrize("words", ODD)
def test_a_shard_that_is_not_that_of_the_run_is_named(run, saved, shard, words):
    ODD[words](saved / "other" / shard, run / shard)
    assert_refused(run, shard, words)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(NAMES, 2)])
def test_shards_in_each_other_s_places_are_named(run, one, other):
    both = (run / one).read_bytes(), (run / other).read_bytes()
    (run / one).write_bytes(both[1])
    assert_refused(run, one, "it was written as shard")
    (run / other).write_bytes(both[0])
    assert_refused(run, "it was written as shard")


def test_a_folder_of_two_numbers_of_ranks_is_refused(run):
    more = {
        name(5, 4): f"{name(5, 4)} is one too many",
        name(1, 2): f"{name(2, 2)} is missing",
        name(6, 7): f"{name(6, 7)} is one too many",
    }
    for copy, words in more.items():
        shutil.copy(run / NAMES[0], run / copy)
        assert_refused(run, words)
        (run / copy).unlink()
    (run / NAMES[0]).rename(run / name(1, 1))
    assert_refused(run, f"{NAMES[1]} is one too many")
    (run / name(1, 1)).rename(run / NAMES[0])
    for i, shard in enumerate(NAMES, 1):
        (run / shard).rename(run / name(i, 5))
    assert_refused(run)


def test_a_shard_is_no_checkpoint(run, tmp_path):
    assert_refused(run / NAMES[1], "shard 2 of 4", "Load their folder")
    pa.save(tmp_path / "plain", LIKE)
    shutil.copy(tmp_path / "plain", run / NAMES[2])
    assert_refused(run, NAMES[2], "of another save")


def test_what_is_no_shard_does_not_matter(run):
    (run / ".DS_Store").touch()
    (run / "notes.txt").touch()
    (run / "shard-1-of-4.safetensors").touch()
    assert_trees_bitwise_equal(pa.load(run, LIKE), TREE)


def test_another_tree_than_like_is_refused(run):
    like = {name: x for name, x in LIKE.items() if name != "w"} | {"v": torch.zeros(7), "x": 1}
    with saying(
        ValueError,
        "holds another tree than like: 3 leaves",
        "tree['x'] is not in the file",
        "tree['w'] is only in the file",
        "tree['v'] is float64 of shape (6,) in the file and float32 of shape (7,) in like",
    ):
        pa.load(run, like)


# Made by hand ---------------------------------------------------------------------------------


def piece(x, at, whole=(8, 3)):
    starts = (at,) + (0,) * (len(whole) - 1)
    return {"tree['w']": (Piece(x.dtype, tuple(x.shape), whole, starts, (3, 1)), x)}


# As for all tests on ranks: more than two are for the profiles that run everything.
worlds = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])


def on_ranks(world, func, folder):
    """What a function returns on each of so many ranks."""
    ends = run_on_ranks(world, partial(func, str(folder)))
    assert not [end.failure for end in ends if end.failure], ends
    return [end.returned for end in ends]


ROWS = TREE["w"]
BY_HAND = {
    "a hole": [piece(ROWS[:3], 0), piece(ROWS[4:], 4)],
    "a part twice": [piece(ROWS[:4], 0), piece(ROWS[:4], 0)],
    "an overlap": [piece(ROWS[:5], 0), piece(ROWS[4:], 4)],
    "the first part missing": [piece(ROWS[1:4], 1), piece(ROWS[4:], 4)],
    "the last part missing": [piece(ROWS[:4], 0), piece(ROWS[4:7], 4)],
    "parts of two shapes": [piece(ROWS[:4], 0), piece(ROWS[4:], 4, (9, 3))],
    "all of it twice": [piece(ROWS, 0), piece(ROWS, 0)],
    "nothing of it twice": [piece(ROWS[:0], 0), piece(ROWS[:0], 0)],
    "parts of two dtypes": [piece(ROWS[:4], 0), piece(ROWS[4:].int(), 4)],
}


def by_hand(folder, *pieces):
    """Shards of tensors, or of scalars beside none."""
    folder.mkdir()
    for i, it in enumerate(pieces, 1):
        tensors, scalars = ({}, it) if 3 in it.values() else (it, {})
        with open(folder / name(i, len(pieces)), "wb") as file:
            write_file(file, tensors, scalars, Part("0" * 32, i, len(pieces)))


@pytest.mark.parametrize("first", [True, False])
def test_a_number_and_a_tensor_of_one_name_are_refused(tmp_path, first):
    both = piece(ROWS, 0), {"tree['w']": 3}
    by_hand(tmp_path / "run", *(both if first else both[::-1]))
    for like in (torch.zeros(8, 3), 3):
        with saying(ValueError, "tree['w'] is"):
            pa.load(tmp_path / "run", {"w": like})


@pytest.mark.parametrize("how", BY_HAND)
def test_parts_that_are_not_the_whole_are_refused(tmp_path, how):
    by_hand(tmp_path / "run", *BY_HAND[how])
    with saying(ValueError, str(tmp_path / "run"), "tree['w']"):
        pa.load(tmp_path / "run", {"w": torch.zeros(8, 3)})


def test_parts_that_are_the_whole_are_loaded(tmp_path):
    by_hand(tmp_path / "run", piece(ROWS[:3], 0), piece(ROWS[3:], 3), piece(ROWS[:0], 8))
    assert torch.equal(pa.load(tmp_path / "run", {"w": torch.zeros(8, 3)})["w"], ROWS)


# On ranks -------------------------------------------------------------------------------------


def another_number(content):
    """With a number changed that not every rank reads."""
    header = 8 + int.from_bytes(content[:8], "little")
    at = header + json.loads(content[8:header])["tree['w']"]["data_offsets"][0]
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = [
    (NAMES[0], another_number),
    (NAMES[3], another_number),
    (NAMES[1], lambda content: content[: len(content) // 2]),
    (NAMES[2], lambda content: None),
]


def loads_damaged(folder, rank, world):
    """An error on every rank, which names the shard; then they go on together."""
    run, told = Path(folder) / "run", []
    like = {name: x if name == "epoch" else x * 0 for name, x in spread(LIKE).items()}
    for shard, damage in DAMAGES:
        whole = (run / shard).read_bytes()
        dist.barrier()
        if rank == 0:
            changed = damage(whole)
            (run / shard).unlink() if changed is None else (run / shard).write_bytes(changed)
        dist.barrier()
        try:
            pa.load(run, like)
            told.append("loaded")
        except ValueError as error:
            told.append(str(error))
        dist.barrier()
        if rank == 0:
            (run / shard).write_bytes(whole)
        dist.barrier()
    loaded = pa.load(run, like)
    assert_trees_bitwise_equal(loaded["w"].full_tensor(), TREE["w"])
    return told


@worlds
def test_an_error_on_one_rank_is_one_on_all(run, world):
    for told in on_ranks(world, loads_damaged, run.parent):
        for said, (shard, _) in zip(told, DAMAGES, strict=True):
            number = int(shard.split("-")[1])
            assert shard in said or f"shard {number} of it" in said, said


def holds_another_tree(folder, rank, world):
    """What is no DTensor has to be the same, for it is written once."""
    told = []
    for more in ({"rank": rank}, {"half": torch.ones(8) * rank}, {"only": 1} if rank else {}):
        with pytest.raises(ValueError, match="the ranks do not hold the same tree: ") as caught:
            pa.save(f"{folder}/run", spread(TREE) | more)
        told.append(str(caught.value))
    return told


@worlds
def test_ranks_that_hold_another_tree_all_raise(tmp_path, world):
    told, *others = on_ranks(world, holds_another_tree, tmp_path)
    number, tensor, leaf = told
    assert "tree['rank'] is a Python int: 0 on rank 0 and a Python int: 1 on rank" in number
    assert "tree['half'] is float32 of shape (8,): (8,) with checksum" in tensor
    assert "tree['only'] is absent on rank 0 and a Python int: 1 on rank" in leaf
    assert all(other == told for other in others)
    assert list(tmp_path.iterdir()) == []


def loads_another(folder, rank, world):
    pa.save(f"{folder}/run", spread(TREE))
    pa.save(f"{folder}/other", spread(TREE, 100))
    like = spread(LIKE)
    with pytest.raises(
        ValueError, match=r"is not the same checkpoint on all ranks\. Likely cause: another path"
    ):
        pa.load(f"{folder}/{'other' if rank else 'run'}", like)
    assert_trees_bitwise_equal(pa.load(f"{folder}/run", like)["w"].full_tensor(), TREE["w"])


def test_ranks_that_load_another_tree_all_raise(tmp_path):
    assert on_ranks(2, loads_another, tmp_path) == [None] * 2


def dies_in_a_save(folder, rank, world):
    tree = spread(TREE)
    pa.save(f"{folder}/before", tree)
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        pa.save(f"{folder}/run", tree)
    assert (
        "the checkpoint was not saved. Likely cause: another rank died" in caught.value.__notes__[0]
    )
    with pytest.raises(RuntimeError) as caught:
        pa.load(f"{folder}/before", tree)
    assert "was not loaded. Likely cause: another rank died" in caught.value.__notes__[0]


@worlds
def test_after_a_rank_died_in_a_save_the_others_raise(tmp_path, world):
    """The others hear of it; nothing of the save is there, and what was before is whole."""
    *others, last = run_on_ranks(world, partial(dies_in_a_save, str(tmp_path)))
    assert last.failure == "died with exit code -9"
    assert others == [End()] * (world - 1), others
    assert_trees_bitwise_equal(pa.load(tmp_path / "before", LIKE), TREE)
    assert [x.name for x in tmp_path.iterdir()] == ["before"]


def full_on_one(folder, rank, world):
    """The disk of the last rank is full: nobody has saved, and nothing is left."""
    import resource

    large = {"w": torch.zeros(2**20), "epoch": 3}
    mesh = init_device_mesh("cpu", (world,))
    tree = {"w": distribute_tensor(large["w"], mesh, [Shard(0)])}
    if rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    try:
        pa.save(f"{folder}/run", tree)
    except OSError as error:
        return f"{error} {' '.join(getattr(error, '__notes__', []))}"
    return "saved"


@worlds
def test_a_full_disk_of_one_rank_is_an_error_on_all(tmp_path, world):
    pytest.importorskip("resource", reason="Windows has no such limits")
    *others, last = on_ranks(world, full_on_one, tmp_path)
    assert "too large" in last
    for told in others:
        assert "too large" in told
        assert f"on rank {world - 1}" in told
    assert list(tmp_path.iterdir()) == []


def test_notes_are_json(saved):
    """For readers of other programs: which part of which leaf a tensor is."""
    content = (saved / "run" / NAMES[1]).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    note = json.loads(header["__metadata__"]["tree['w']"])
    assert note == {"whole": [8, 3], "at": [2, 0]}
    assert header["__metadata__"]["shard"] == "2 of 4"
