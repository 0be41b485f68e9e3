"""What cannot be saved, or loaded like this, is named before anything is written or read."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import pureaccum as pa
from tests.checkpoint.hostile import in_a_fork
from tests.optimizers import Unread
from tests.refusals import refused, saying
from tests.states import batch_of, first_state, full_step


pytestmark = [
    pytest.mark.faults,
    pytest.mark.promise("disk"),
    pytest.mark.promise("errors"),
    pytest.mark.table,
]
np = pytest.importorskip("numpy")
OLD = {"w": torch.arange(3.0)}


@pytest.fixture
def path(tmp_path):
    pa.save(tmp_path / "run", OLD)
    return str(tmp_path / "run")


def assert_untouched(path):
    assert torch.equal(pa.load(path, OLD)["w"], OLD["w"])
    assert os.listdir(os.path.dirname(path)) == ["run"]


UNSAVABLE = {
    "function": lambda: batch_of,
    "Linear": lambda: nn.Linear(1, 1),
    "ndarray": lambda: np.zeros(2),
    "float64": lambda: np.float64(1.0),
    "complex": lambda: 1j,
    "bytes": lambda: b"x",
    "dtype": lambda: torch.float32,
    "object": object,
    "Unread": lambda: torch.zeros(()).as_subclass(Unread),
    "torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
}


@pytest.mark.parametrize("what", UNSAVABLE)
def test_a_leaf_that_cannot_be_saved_is_named(what, path):
    tree = {"a": torch.ones(2), "bad": [UNSAVABLE[what]()]}
    with refused(TypeError, "tree['bad'][0] is a", what, "expected"):
        pa.save(path, tree)
    assert_untouched(path)
    with refused(TypeError, "like['bad'][0] is a", what, "expected"):
        pa.load(path, like=tree)


def test_a_folder_of_ranks_is_not_replaced(path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])
        with refused(FileExistsError, "exists", "Save under a new name"):
            pa.save(path, {"w": x})
        assert torch.equal(pa.load(path, {"w": x})["w"].full_tensor(), OLD["w"])
    finally:
        dist.destroy_process_group()
    assert_untouched(path)


def test_a_donated_state_says_so_itself(path):
    step = full_step(donate=True)
    old = first_state(step)
    new, _ = step(old, batch_of(8))
    with saying(RuntimeError, "given up with donate=True"):
        pa.save(path, {"new": new, "old": old})
    assert_untouched(path)
    with saying(RuntimeError, "given up with donate=True"):
        pa.load(path, like=old)


def test_two_leaves_of_one_name_are_refused(path):
    class Key(str):
        def __repr__(self):
            return "'a'"

    with refused(ValueError, "two leaves are called tree['a']", "keys"):
        pa.save(path, {Key("b"): torch.ones(1), "a": torch.ones(1)})
    assert_untouched(path)


def test_to_save_or_load_under_a_transform_is_refused(path):
    def saves(x):
        pa.save(path, x)
        return x.sum()

    def loads(x):
        return pa.load(path, {"w": x})["w"].sum()

    for func, word in ((saves, "save"), (loads, "load")):
        for transform in (torch.func.grad, torch.func.vmap):
            with saying(RuntimeError, f"{word} works on files", "outside"):
                transform(func)(torch.ones(3))
    assert_untouched(path)


# The path -----------------------------------------------------------------------------------


def test_paths_that_are_no_files_are_refused(tmp_path):
    with saying(FileNotFoundError, "nowhere"):
        pa.load(tmp_path / "nowhere", OLD)
    with saying(FileNotFoundError, "nowhere"):
        pa.save(tmp_path / "nowhere" / "run", OLD)
    with refused(ValueError, str(tmp_path), "not a whole", "neither a file"):
        pa.load(tmp_path, OLD)
    with refused(ValueError, str(tmp_path), "is not a file"):
        pa.save(tmp_path, OLD)
    os.mkfifo(tmp_path / "pipe")
    with refused(ValueError, "pipe", "not a file"):
        pa.load(tmp_path / "pipe", OLD)
    with refused(ValueError, "pipe", "not a file"):
        pa.save(tmp_path / "pipe", OLD)
    assert os.listdir(tmp_path) == ["pipe"]


def outcome(do):
    """Whether it went well, or the class and number of its error."""
    try:
        do()
    except OSError as error:
        return type(error), error.errno
    return None


def as_nobody(do):
    """The same without root's rights, to whom every file is open; in a fork."""

    def run():
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return repr(outcome(do))

    return in_a_fork(run)


PATHS = {
    "of 255 bytes": lambda folder: folder / ("n" * 255),
    "of 256 bytes": lambda folder: folder / ("n" * 256),
    "of bytes": lambda folder: os.fsencode(folder / "b"),
    "of bytes that are no text": lambda folder: os.fsencode(folder) + b"/\xff",
    "with a slash at its end": lambda folder: f"{folder}/q/",
    "a file with a slash at its end": lambda folder: f"{folder}/file/",
    "in a file": lambda folder: folder / "file" / "x",
    "a link": lambda folder: folder / "link",
    "a link to nothing": lambda folder: folder / "to nothing",
    "a link to itself": lambda folder: folder / "loop",
    "with a zero byte's neighbour": lambda folder: folder / "a\nb",
    "empty": lambda folder: "",
}


def some_files(folder):
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    (folder / "to nothing").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_taken_as_open_takes_them(name, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        some_files(folder)
    path = PATHS[name](ours)
    want = outcome(lambda: open(PATHS[name](theirs), "wb").close())
    assert outcome(lambda: pa.save(path, OLD)) == want
    assert sorted(os.listdir(os.fsencode(ours))) == sorted(os.listdir(os.fsencode(theirs)))
    if want is None:
        assert torch.equal(pa.load(path, OLD)["w"], OLD["w"])
        assert (ours / "link").is_symlink()
    want = outcome(lambda: open(PATHS[name](theirs), "rb").close())
    if want is not None:
        assert outcome(lambda: pa.load(PATHS[name](ours), OLD)) == want


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs another user's rights: not on Windows")
@pytest.mark.parametrize("mode", [0o444, 0o666, 0o200])
def test_rights_are_those_of_open(mode):
    with TemporaryDirectory() as outer:
        folder = Path(outer)
        folder.chmod(0o777)
        (folder / "run").touch()
        (folder / "run").chmod(mode)
        if os.getuid() == 0:
            os.chown(folder / "run", 65534, 65534)
        want = as_nobody(lambda: open(folder / "run", "ab").close())
        assert as_nobody(lambda: pa.save(folder / "run", OLD)) == want
        assert os.listdir(folder) == ["run"]
        assert (folder / "run").stat().st_size == 0 or want == "None"
        folder.chmod(0o555)  # where no file can be made beside it
        assert as_nobody(lambda: pa.save(folder / "run", OLD)) == repr((PermissionError, 13))
        assert os.listdir(folder) == ["run"]
        folder.chmod(0o777)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names on Windows")
def test_a_file_that_only_has_the_name_of_a_leftover_stays(path):
    """It stays, it is not waited for, and what it leads to stays too."""
    folder = Path(path).parent
    precious = folder / "precious"
    precious.mkdir()
    (precious / "work").touch()
    names = [f".pureaccum-{i:08x}.tmp" for i in range(4)]
    os.mkfifo(folder / names[0])
    (folder / names[1]).symlink_to(path)
    (folder / names[2]).symlink_to(precious)
    (folder / names[3]).symlink_to("nothing")
    pa.save(path, OLD)
    assert sorted(os.listdir(folder)) == [*names, "precious", "run"]
    assert os.listdir(precious) == ["work"]
    inside = folder / names[3]
    inside.unlink()
    inside.mkdir()
    (inside / "link").symlink_to(precious)
    pa.save(path, OLD)  # a leftover, of which the link is removed and not what it leads to
    assert sorted(os.listdir(folder)) == [*names[:3], "precious", "run"]
    assert os.listdir(precious) == ["work"]


def test_an_int_that_python_does_not_read_is_refused(path):
    pa.save(path, {"seed": 10**4300 - 1})
    assert pa.load(path, {"seed": 0})["seed"] == 10**4300 - 1
    pa.save(path, OLD)
    with refused(ValueError, "tree['seed'] is an int of more than 4,300 digits", "as a str"):
        pa.save(path, {"seed": -(10**4300)})
    assert_untouched(path)


def test_a_full_disk_leaves_the_old_file(path):
    """A file may not grow beyond 64 KiB here: a real error in the middle of a real write."""
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with saying(OSError, "too large"):
            pa.save(path, {"w": torch.zeros(2**20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_untouched(path)


# Another tree -------------------------------------------------------------------------------


def test_every_leaf_that_is_off_is_named(path):
    tree = {"epoch": 3, "kept": torch.ones(2), "lost": torch.ones(1), "x": torch.ones(2, 3)}
    pa.save(path, tree | {"dtype": torch.ones(2), "lr": 1})
    like = {"kept": torch.ones(2), "new": torch.ones(1), "x": torch.ones(3, 2), "lr": 1.0}
    like |= {"dtype": torch.ones(2, dtype=torch.float64), "epoch": torch.tensor(3)}
    with saying(ValueError, "another tree than like: 6 leaves", "optimizer") as caught:
        pa.load(path, like)
    assert str(caught.value).splitlines()[1:] == [
        "  tree['new'] is not in the file",
        "  tree['lost'] is only in the file",
        "  tree['dtype'] is float32 of shape (2,) in the file and float64 of shape (2,) in like",
        "  tree['epoch'] is a Python int in the file and int64 of shape () in like",
        "  tree['lr'] is a Python int in the file and a Python float in like",
        "  tree['x'] is float32 of shape (2, 3) in the file and float32 of shape (3, 2) in like",
    ]


def test_no_more_leaves_are_named_than_one_reads(path):
    pa.save(path, [torch.ones(1)] * 50)
    with saying(ValueError, "50 leaves") as caught:
        pa.load(path, [torch.ones(2)] * 50)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 30 more"


@pytest.mark.slow
def test_other_trees_of_many_leaves_are_refused(path):
    """The work grows with their number: with its square it would take a quarter of an hour."""
    tree = {f"l{i}": 0.5 for i in range(100_000)}
    pa.save(path, tree)
    like = {f"m{i}": 0.5 for i in range(100_000)}
    with saying(ValueError, "200000 leaves are off", "tree['m0'] is not in", "and 199980 more"):
        pa.load(path, like)
    like = tree | {"l5": 1, "new": 0.5}
    del like["l7"]
    with saying(ValueError, "3 leaves are off", "tree['new'] is not", "tree['l7'] is only in"):
        pa.load(path, like)


def test_a_run_with_another_loss_scale_is_refused(path):
    state = first_state(full_step())
    pa.save(path, state)
    with refused(ValueError, "tree.loss_scale.scale is only in the file", "3 leaves"):
        pa.load(path, like=state._replace(loss_scale=()))
