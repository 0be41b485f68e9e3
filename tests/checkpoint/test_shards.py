"""What so many ranks save, as many others load, however it lies on either: the same bits."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.ranks import End, run_on_ranks


pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without it"),
    pytest.mark.promise("disk"),
]
SEEDS = range(4)
WORLDS = (1, 2, 3, 4)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS = {
    1: [[S0], [R]],
    2: [[S0], [S1], [R]],
    3: [[S0], [S1], [R]],
    4: [[S0, S1], [S0, S0], [R, S1], [S1, R], [R, R]],
}


def tree_of(seed, fill=None):
    """Leaves of many kinds, with random bits; or with one number in all of them."""
    random = generator(seed)

    def some(*shape, dtype=torch.float32):
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=random).to(torch.uint8)
        x = raw.flatten().view(dtype).reshape(shape)
        return x if fill is None else torch.full_like(x, fill)

    return {
        "rows": some(5, 3),
        "columns": some(6, 4, dtype=torch.float64).t(),
        "image": some(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": some(7, 2, dtype=torch.bfloat16),
        "pairs": some(3, 2, dtype=torch.complex64),
        "ints": some(1, 2, 2, dtype=torch.int64),
        "empty": some(0, 3),
        "scalar": some(),
        "line": some(9),
        "epoch": 3 if fill is None else 0,
        "name": "run" if fill is None else "",
    }


def part_of(x, mesh, placements):
    """As DTensors are cut: torch.chunk along one dim of the mesh after the other."""
    for placement, i, size in zip(placements, mesh.get_coordinate(), mesh.shape, strict=True):
        if placement.is_shard():
            parts = [*x.chunk(size, placement.dim)]
            parts += [x.narrow(placement.dim, 0, 0)] * (size - len(parts))
            x = parts[i]
    return x


def spread(tree, seed):
    """Some leaves as DTensors, in any layout, and some as they are."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2) if world == 4 else (world,))
    found = dict(tree)
    for i, (name, x) in enumerate(tree.items()):
        kinds = [p for p in LAYOUTS[world] if isinstance(x, Tensor)]
        kinds = [p for p in kinds if all(s.is_replicate() or s.dim < x.dim() for s in p)]
        placements = [*kinds, None][(seed * 7 + i * (seed + 1)) % (len(kinds) + 1)]
        if name == "rows":
            placements = kinds[0]  # one at least
        if placements is not None:
            local = part_of(x, mesh, placements).clone()
            at = {"shape": x.shape, "stride": x.stride()}
            found[name] = DTensor.from_local(local, mesh, placements, run_check=False, **at)
    return found


def saves(folder, rank, world):
    for seed in SEEDS:
        tree = spread(tree_of(seed), seed)
        with unchanged({name: x for name, x in tree.items() if type(x) is Tensor}):
            pa.save(f"{folder}/{world}-{seed}", tree)
        if rank == 0 and seed == 0:  # a slash at the end, and bytes
            pa.load(f"{folder}/{world}-{seed}/".encode(), tree_of(0, 0))


def loads(folder, rank, world):
    for seed in SEEDS:
        for saved in ("plain", *WORLDS):
            like = spread(tree_of(seed, 1), seed + 3)
            loaded = pa.load(f"{folder}/{saved}-{seed}", like)
            want = spread(tree_of(seed), seed + 3)
            for name, x in want.items():
                came = loaded[name]
                assert type(came) is type(x), name
                if isinstance(x, DTensor):
                    assert came.placements == x.placements
                    came, x = came.to_local(), x.to_local()
                assert_trees_bitwise_equal(came, x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for world in WORLDS:
        assert run_on_ranks(world, partial(saves, str(folder))) == [End()] * world
    for seed in SEEDS:
        pa.save(folder / f"plain-{seed}", tree_of(seed))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_any_ranks_load_what_any_ranks_saved(folder, world):
    assert run_on_ranks(world, partial(loads, str(folder))) == [End()] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_process_loads_them_whole(folder, world, seed):
    want = tree_of(seed)
    loaded = pa.load(folder / f"{world}-{seed}", tree_of(seed, 0))
    assert_trees_bitwise_equal(loaded, want)
    for name, x in want.items():
        assert not isinstance(x, Tensor) or loaded[name].stride() == x.stride(), name


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_number_is_written_twice(folder, world):
    """And nothing else is left in the folder, or beside it."""
    shards = sorted((folder / f"{world}-0").iterdir())
    assert [x.name for x in shards] == [
        f"shard-{i:05}-of-{world:05}.safetensors" for i in range(1, world + 1)
    ]
    assert not [x for x in folder.iterdir() if x.name.startswith(".")]
    counts = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:  # the library reads each of them
            for name in file.keys():  # noqa: SIM118
                counts[name] = counts.get(name, 0) + file.get_tensor(name).numel()
    del counts["crc32"]
    numbers = {f"tree[{n!r}]": x.numel() for n, x in tree_of(0).items() if isinstance(x, Tensor)}
    numbers["tree['pairs']"] *= 2  # reals
    assert counts == numbers


def saves_what_all_hold(folder, rank, world):
    mesh = init_device_mesh("cpu", (world,))
    leaves = [DTensor.from_local(torch.ones(1), mesh, [R]) for _ in range(4)] + [torch.ones(1)] * 4
    pa.save(f"{folder}/run", leaves)


@pytest.mark.slow
def test_ranks_write_about_as_much(tmp_path):
    """What all of them hold goes round, so that none writes it all."""
    assert run_on_ranks(2, partial(saves_what_all_hold, str(tmp_path))) == [End()] * 2
    for shard in sorted((tmp_path / "run").iterdir()):
        with safe_open(shard, "pt") as file:
            assert len({*file.keys()} - {"crc32"}) == 4


@pytest.mark.mechanism
def test_ranks_hold_about_as_much():
    """What all of them hold goes round, so that none writes it all."""
    assert run_on_ranks(2, writes_half) == [End(4), End(4)]


def writes_half(rank, world):
    from pureaccum.checkpoint.shards import is_ours_to_write

    mesh = init_device_mesh("cpu", (world,))
    leaves = [DTensor.from_local(torch.ones(1), mesh, [R]) for _ in range(4)] + [torch.ones(1)] * 4
    return sum(is_ours_to_write(x, i) for i, x in enumerate(leaves))
