"""Trees on disk, bit for bit: ``save(path, tree)`` and ``load(path, like=tree)``.

Nothing is pickled. Tensors are written from where they lie and read to where they stay: no second
tree is held, on a GPU or not, but one leaf at a time.
"""

import ctypes
import os
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

import optree
import torch
from torch import Tensor

from ._safetensors import SCALARS, Leaf, checks_of, header_of, in_file, read_header
from ._sharded import any_sharded
from ._sharded_checkpoint import is_saved_by_ranks, load_sharded, save_sharded
from ._torch import transform_active
from ._tree import Tree, flatten, paths, unflatten
from ._tree import leaves as leaves_of
from ._whole_file import hand_over, whole_file


ROOT = "tree"  # what a file calls the tree
PIECE = 2**20  # bytes: a piece is still in the cache of the core when it is written
SHOWN = 20  # lines of an error


def save(path: str | os.PathLike[str], tree: Tree) -> None:
    """Write a tree to a file, which then is there whole, or as it was before.

    The rule: ``load(path, like)`` gives the same bits again.

    A process that dies at any moment leaves the old file or the new one. What tensors share is
    written once for each of them. It waits for the device, and for the disk.

    Args:
        path: Of the file; one that is there is replaced.
            Where the tree holds DTensors, all ranks save together: to a new folder, which gets
            its name when it is whole, by ``torch.distributed.checkpoint``. Any number of ranks
            can load it.
        tree: A pytree of tensors, and of Python bools, ints, floats and strings beside them: a
            ``TrainState``, an ``AccumState``, ``{"state": state, "window": window, "epoch": 3}``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/run", {"w": torch.tensor([1.0, 2.0]), "epoch": 3})
        ...     load(f"{folder}/run", like={"w": torch.zeros(2), "epoch": 0})
        {'w': tensor([1., 2.]), 'epoch': 3}

    References:
        `safetensors <https://github.com/huggingface/safetensors>`_, whose format the file has;
        `torch.distributed.checkpoint
        <https://docs.pytorch.org/docs/stable/distributed.checkpoint.html>`_
    """
    _check_outside("save")
    if any_sharded(leaves_of(tree)):
        save_sharded(path, tree)
        return
    values, _, leaves = _read(tree, "tree")
    header = header_of(leaves)
    value = {leaf["path"]: x for leaf, x in zip(leaves, values, strict=True)}
    with whole_file(path) as file:
        file.write(header)
        check = handed = 0
        for leaf in in_file(leaves):
            for piece in _pieces(_on_host(value[leaf["path"]], leaf["strides"])):
                check = zlib.crc32(piece, check)
                file.write(piece)
                handed = hand_over(file, handed)
        file.write(checks_of(header, check))


def load(path: str | os.PathLike[str], like: Tree) -> Tree:
    """Read a tree that ``save`` wrote: the same bits, in memory of its own.

    The rule: the structure and the devices of ``like``, with the numbers of the file.

    Args:
        path: Of the file.
        like: A tree such as was saved, ``step.init(params)`` for instance. It gives structure,
            devices, and the placements of DTensors; its numbers are not used, and it stays as it
            is.

    Returns:
        A tree like ``like``. Its tensors share no memory, and have the strides of the saved ones.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or not a checkpoint, or not one of a tree like this: then
            every leaf that is off is named.

    Example:
        >>> import tempfile
        >>> from pureaccum import adamw
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/run", (params, adamw().init(params)))
        ...     params, state = load(f"{folder}/run", like=(params, adamw().init(params)))
        >>> params["w"], state.steps
        (tensor([1., 2.]), tensor(0))

    References:
        `safetensors <https://github.com/huggingface/safetensors>`_, whose format the file has;
        ``save``, which writes it.
    """
    _check_outside("load")
    if is_saved_by_ranks(path):
        return load_sharded(path, like)
    if any_sharded(leaves_of(like)):
        raise ValueError(
            f"like holds DTensors, and {os.fspath(path)!r} is not what several ranks saved. "
            "Load it with plain tensors, and spread those: distribute_tensor(x, mesh, placements)."
        )
    values, spec, wanted = _read(like, "like")
    with _opened(path) as file:
        try:
            leaves, check = read_header(file)
        except ValueError as error:
            raise ValueError(_not_whole(path, str(error))) from error
        _check_alike(path, leaves, wanted)
        place = {leaf["path"]: i for i, leaf in enumerate(wanted)}
        for leaf in leaves:
            if "value" in leaf:
                values[place[leaf["path"]]] = leaf["value"]
        came = 0
        for leaf in in_file(leaves):
            like_this = values[place[leaf["path"]]]
            x = torch.empty_strided(
                like_this.shape, leaf["strides"], dtype=like_this.dtype, device="cpu"
            )
            for piece in _pieces(x):
                file.readinto(piece)
                came = zlib.crc32(piece, came)
            values[place[leaf["path"]]] = x.to(like_this.device)
    if came != check:
        raise ValueError(_not_whole(path, "the checksum of its tensors is another. Damaged"))
    return unflatten(spec, values)


# Leaves ------------------------------------------------------------------------------------


def _read(tree: Tree, root: str) -> tuple[list[Any], optree.PyTreeSpec, list[Leaf]]:
    """The leaves of a tree, and what a file says of them; those that cannot be saved are named."""
    values, spec = flatten(tree)
    names = paths(spec, ROOT)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves are called {twice}: give keys that look different.")
    return values, spec, [_leaf(x, name, root) for x, name in zip(values, names, strict=True)]


def _leaf(x: Any, name: str, root: str) -> Leaf:
    where = root + name.removeprefix(ROOT)
    if type(x) in SCALARS:
        return {"path": name, "value": x}
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{where} is a {type(x).__name__}; expected a tensor, or a Python bool, int, float or "
            "str. Functions, modules and arrays of other libraries are no part of a state."
        )
    plain = x.layout == torch.strided and not x.is_quantized  # a donated one says that it is
    if type(x) not in (Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{where} is a {type(x).__name__}, a tensor that may hold its numbers anywhere; "
            "expected plain ones, or DTensors."
        )
    if not plain or x.is_meta or (x.numel() and not x.data_ptr()):
        raise TypeError(
            f"{where} is a {x.dtype} tensor in the layout {x.layout} on {x.device}; expected a "
            "dense one with memory: sparse, quantized and meta tensors cannot be saved."
        )
    # The order in memory decides bits of what is computed later: channels_last is kept.
    strides = torch.empty_like(x, device="meta").stride()
    dtype = str(x.dtype).removeprefix("torch.")
    return {"path": name, "dtype": dtype, "shape": [*x.shape], "strides": [*strides]}


def _check_alike(path: str | os.PathLike[str], leaves: list[Leaf], wanted: list[Leaf]) -> None:
    """Name every leaf that a file has and ``like`` has not, and the other way round."""
    came, want = ({leaf["path"]: _said(leaf) for leaf in side} for side in (leaves, wanted))
    off = [f"{name} is not in the file" for name in want if name not in came]
    off += [f"{name} is only in the file" for name in came if name not in want]
    both = [name for name in want if name in came]
    off += [
        f"{name} is {came[name]} in the file and {want[name]} in like"
        for name in both
        if came[name] != want[name]
    ]
    if off:
        shown = off[:SHOWN] + ([f"and {len(off) - SHOWN} more"] if len(off) > SHOWN else [])
        raise ValueError(
            f"{os.fspath(path)!r} holds another tree than like: {len(off)} leaves are off. Of "
            "another model, optimizer, loss scale or window? Make like as the saved tree was made."
            + "".join(f"\n  {line}" for line in shown)
        )


def _said(leaf: Leaf) -> str:
    if "value" in leaf:
        return f"a Python {type(leaf['value']).__name__}"
    return f"{leaf['dtype']} of shape {tuple(leaf['shape'])}"


# Bytes ------------------------------------------------------------------------------------


def _opened(path: str | os.PathLike[str]) -> BufferedReader:
    """The file; a folder cannot be read, and a pipe might never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(_not_whole(path, "it is not a file"))
    return open(path, "rb")


def _on_host(x: Tensor, strides: list[int]) -> Tensor:
    """The numbers of a tensor in memory that this process can read, in that order."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.stride() != tuple(strides):
        x = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return x.cpu()


def _pieces(x: Tensor) -> Iterator[memoryview]:
    """The memory of a dense tensor, piece by piece."""
    if x.numel():
        memory = memoryview((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr()))
        for i in range(0, x.nbytes, PIECE):
            yield memory[i : i + PIECE]


def _check_outside(what: str) -> None:
    if transform_active():
        raise RuntimeError(
            f"{what} works on files: call it outside of torch.func's transforms and compiled code."
        )


def _not_whole(path: str | os.PathLike[str], why: str) -> str:
    return f"{os.fspath(path)!r} is not a whole pureaccum checkpoint: {why}."
