"""Trees on disk, bit for bit: ``save(path, tree)`` and ``load(path, like=tree)``.

Nothing is pickled. Tensors are written from their own memory and read into their final memory, so
there is never a second tree in memory, on a GPU or not, only one leaf at a time.
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from io import BufferedReader
from itertools import chain
from typing import Any

import optree
import torch
from torch import Tensor

from .._base import claims, dtensors, reprs, trees
from .._base.torch_internals import modes
from . import file_format, shards
from .files import Path, read_piece, tile, whole_file, write_file


ROOT = "tree"  # what a file calls the tree
TOO_LONG = 10**4300  # for Python to read it


def save(path: Path, tree: trees.Tree) -> None:
    """Write a tree to a file atomically and bit for bit.

    The rule: ``load(path, like)`` returns the same bits again.

    If the process dies, the path holds the old file or the new one, never a part of it. Memory that
    tensors share is written once for each of them. The call waits for the device and for the disk.

    Args:
        path: The path of the file; an existing file is replaced. If the tree holds DTensors, all
            ranks save together, to a new folder with one file per rank. The folder gets its name
            once it is complete. Plain tensors are written once and must be the same on all ranks.
            Any number of ranks can load the folder.
        tree: A pytree of tensors and of Python bools, ints, floats and strings: a ``TrainState``,
            an ``AccumState``, ``{"state": state, "window": window, "epoch": 3}``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/run", {"w": torch.tensor([1.0, 2.0]), "epoch": 3})
        ...     load(f"{folder}/run", like={"w": torch.zeros(2), "epoch": 0})
        {'w': tensor([1., 2.]), 'epoch': 3}

    References:
        `safetensors <https://github.com/huggingface/safetensors>`_, whose format the file has.
    """
    _check_outside("save")
    values, _, leaves = _read(tree, "tree")
    scalars = {name: x for name, x in leaves.items() if not isinstance(x, file_format.Piece)}
    if not dtensors.any_sharded(values):
        with whole_file(path) as file:
            pairs = zip(leaves.items(), values, strict=True)
            tensors = {
                name: (leaf, x) for (name, leaf), x in pairs if isinstance(leaf, file_format.Piece)
            }
            write_file(file, tensors, scalars)
        return
    ours: dict[str, tuple[file_format.Piece, Tensor]] = {}
    words = {
        name: _said(leaf)
        if dtensors.is_sharded(x)
        else f"{_said(leaf)}: {claims.value_in_words(x)}"
        for x, (name, leaf) in zip(values, leaves.items(), strict=True)
    }
    for i, (x, (name, leaf)) in enumerate(
        zip(dtensors.resolved(values), leaves.items(), strict=True)
    ):
        if isinstance(leaf, file_format.Piece) and shards.is_ours_to_write(x, i):
            at, shape = dtensors.block_of(x)
            ours[name] = leaf._replace(at=at, shape=shape), dtensors.local(x)
    shards.save_by_ranks(os.fsdecode(path), ours, scalars, words)


def load(path: Path, like: trees.Tree = None) -> trees.Tree:
    """Read a tree that ``save`` wrote, bit for bit, into new memory.

    The rule: the structure and the devices of ``like``, with the numbers of the file. Tensors share
    no memory, and plain ones have the strides of the saved ones.

    Args:
        path: The path of the file, or of the folder that several ranks saved.
        like: A tree like the saved one, such as ``step.init(params)``. It gives structure, devices
            and the placements of DTensors, whose ranks load together. Its numbers are not used, and
            it is not changed. Lists of things alike may have any length, as a history has. None
            gives a dict with all leaves by their names, on the CPU.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, is not a checkpoint, or holds another tree; the message
            names every leaf that does not fit. With DTensors all ranks raise if one does.

    Example:
        >>> import tempfile
        >>> from pureaccum import adamw
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(f"{folder}/run", (params, adamw().init(params)))
        ...     params, state = load(f"{folder}/run", like=(params, adamw().init(params)))
        >>> params["w"], state.steps
        (tensor([1., 2.]), tensor(0))
    """
    _check_outside("load")
    name, spec = os.fsdecode(path), None
    if like is None:
        leaves = _held(name)
        values = [*map(_placeholder, leaves.values())]
    else:
        values, spec, leaves = _read(like, "like")
        if any(map(_is_list, optree.tree_leaves(like, _is_list, namespace=trees.NAMESPACE))):
            values, spec, leaves = _read(_resized(like, ROOT, _held(name)), "like")
    together = (
        shards.all_or_none(values, name) if dtensors.any_sharded(values) else nullcontext([0])
    )
    with together as loaded, ExitStack() as stack:
        files = [_opened(file, stack, leaves) for file in shards.files_of(name)]
        loaded.append(files[0][1].checks[-1])
        shards.check_parts(name, [(file.name, contents) for file, contents in files])
        every = [contents for _, contents in files]
        _check_alike(name, every, leaves)
        _check_complete(name, every, leaves)
        found = _loaded(files, dict(zip(leaves, values, strict=True)))
        if spec is None:
            short = [*map(_short, leaves)]
            names = short if len({*short}) == len(short) else leaves
            return dict(zip(names, found, strict=True))
        return trees.unflatten(spec, found)


# What a file holds ---------------------------------------------------------------------------


def _held(name: str) -> dict[str, Any]:
    """All leaves of a checkpoint: pieces and scalars by their names."""
    held: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in shards.files_of(name):
            contents = _opened(file, stack, None)[1]
            held |= contents.pieces | contents.scalars
    return held


def _placeholder(leaf: Any) -> Any:
    """A leaf of that shape and dtype, which takes no memory."""
    is_piece = isinstance(leaf, file_format.Piece)
    return torch.zeros((), dtype=leaf.dtype).expand(leaf.whole) if is_piece else leaf


def _resized(like: Any, name: str, held: Mapping[str, Any]) -> Any:
    """The tree, with as many items in each list of things alike as the file has."""
    if type(like) is list:
        rest = (path.removeprefix(f"{name}[") for path in held if path.startswith(f"{name}["))
        count = len({at.partition("]")[0] for at in rest})
        items = [held.get(f"{name}[{i}]") for i in range(count)]
        if not like and None not in items:
            return [*map(_placeholder, items)]
        kinds = {trees.flatten(x)[1] for x in like}
        if len(kinds) == 1 and kinds.pop().num_leaves:
            like = (like + like[-1:] * count)[:count]
    children, spec = optree.tree_flatten(like, lambda x: x is not like, namespace=trees.NAMESPACE)  # pyright: ignore
    if spec.num_nodes == 1:  # a leaf, or None
        return like
    pairs = zip(children, trees.paths(spec, name), strict=True)
    return trees.unflatten(spec, [_resized(x, at, held) for x, at in pairs])


def _is_list(x: Any) -> bool:
    return type(x) is list


def _short(name: str) -> str:
    """Return what follows the tree in the path of a leaf; the bare key in a flat dict."""
    rest = name.removeprefix(ROOT).removeprefix(".")
    key = _KEY.fullmatch(rest)
    return key[1] if key else rest or ROOT


_KEY = re.compile(r"\['([^']*)'\]")


# Leaves ------------------------------------------------------------------------------------


def _read(
    tree: trees.Tree, root: str
) -> tuple[list[Any], optree.PyTreeSpec, dict[str, file_format.Piece | bool | int | float | str]]:
    """The leaves of a tree, its structure, and what a file says of each leaf, by its path."""
    values, spec = trees.flatten(tree)
    names = trees.paths(spec, ROOT)
    leaves = {name: _leaf(x, name, root) for x, name in zip(values, names, strict=True)}
    if len(leaves) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))
        raise ValueError(f"two leaves are called {twice}. Use keys that look different.")
    return values, spec, leaves


def _leaf(x: Any, name: str, root: str) -> Any:
    """What a file says of a leaf: a piece, or the scalar itself; others cannot be saved."""
    if type(x) in file_format.SCALARS:
        if type(x) is int and abs(x) >= TOO_LONG:
            raise ValueError(
                f"{_named(name, root)} is an int of more than 4,300 digits; expected a shorter "
                "one, because Python does not read longer ones by default. Save it as a str."
            )
        return x
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{_named(name, root)} is {reprs.kind(x)}; expected a tensor, or a Python bool, "
            "int, float or str. Functions, modules and arrays of other libraries cannot be saved."
        )
    dtype = x.dtype  # a donated tensor raises here, and says that it is one
    plain = type(x) is Tensor or type(x) is torch.nn.Parameter
    if not plain and not dtensors.is_sharded(x):
        raise TypeError(
            f"{_named(name, root)} is {reprs.kind(x)}, a tensor that may hold its numbers "
            "anywhere; expected a plain tensor or a DTensor."
        )
    here = x if plain else dtensors.local(x)
    dense = here.layout == torch.strided and not here.is_quantized
    if not dense or here.is_meta or (here.numel() and not here.data_ptr()):
        raise TypeError(
            f"{_named(name, root)} is a {dtype} tensor in the layout {here.layout} on "
            f"{here.device}; expected a dense one with memory. Sparse, quantized and meta tensors "
            "cannot be saved."
        )
    shape, strides = tuple(x.shape), x.stride()
    if strides != file_format.row_by_row(shape):
        # The order in memory decides bits of what is computed later: channels_last is kept.
        like = x if plain else torch.empty_strided(shape, strides, device="meta")
        strides = torch.empty_like(like, device="meta").stride()
    return file_format.whole_piece(dtype, shape, strides)


def _named(name: str, root: str) -> str:
    return root + name.removeprefix(ROOT)


def _check_alike(
    path: str, files: Sequence[file_format.Contents], wanted: Mapping[str, Any]
) -> None:
    """Raise where the files are not all of a tree like the wanted one, and name what is off."""
    came: set[str] = set()
    other: dict[str, Any] = {}
    for name, leaf in chain.from_iterable(x.items() for c in files for x in (c.scalars, c.pieces)):
        came.add(name)
        if not _is_alike(leaf, wanted[name]):
            other[name] = leaf
    more = dict.fromkeys(name for contents in files for name in contents.others)
    off = [f"{name} is not in the file" for name in wanted if name not in came]
    off += [f"{name} is only in the file" for name in more]
    off += [
        f"{name} is {_said(other[name])} in the file and {_said(wanted[name])} in like"
        for name in wanted
        if name in other
    ]
    if off:
        count = len(off) - len(more)
        count += max(len(more), *(contents.count_of_others for contents in files))
        shown = off[: file_format.SHOWN] + (
            [f"and {count - file_format.SHOWN} more"] if count > file_format.SHOWN else []
        )
        raise ValueError(
            f"{path!r} holds another tree than like: {count} leaves are off. Likely cause: "
            "another model, optimizer, loss scale or window. Make like as the saved tree was made."
            + "".join(f"\n  {line}" for line in shown)
        )


def _check_complete(
    path: str, files: Sequence[file_format.Contents], wanted: Mapping[str, Any]
) -> None:
    """Raise where parts of a leaf are missing in the files, or twice."""
    for name, leaf in wanted.items():
        if isinstance(leaf, file_format.Piece):
            pieces = [contents.pieces[name] for contents in files if name in contents.pieces]
            if not tile(pieces, leaf.whole):
                why = (
                    f"parts of {name} are missing or repeated. Likely cause: files of several "
                    "saves, or a damaged file"
                )
                raise ValueError(shards.not_whole(path, why))


def _is_alike(came: Any, leaf: Any) -> bool:
    if isinstance(leaf, file_format.Piece) and isinstance(came, file_format.Piece):
        return came.whole == leaf.whole and came.dtype == leaf.dtype
    return type(came) is type(leaf)


def _said(leaf: Any) -> str:
    if isinstance(leaf, file_format.Piece):
        return f"{str(leaf.dtype).removeprefix('torch.')} of shape {leaf.whole}"
    return f"a Python {type(leaf).__name__}"


# Files -------------------------------------------------------------------------------------


def _opened(
    name: str, stack: ExitStack, wanted: Mapping[str, Any] | None
) -> tuple[BufferedReader, file_format.Contents]:
    """An open file and what it holds; a folder cannot be read, and a pipe might never end."""
    if not stat.S_ISREG(os.stat(name).st_mode):
        raise ValueError(shards.not_whole(name, "it is not a file"))
    file = stack.enter_context(open(name, "rb"))  # noqa: SIM115
    try:
        return file, file_format.read_header(file, wanted)
    except ValueError as error:
        raise ValueError(shards.not_whole(name, str(error))) from error


def _loaded(
    files: Sequence[tuple[BufferedReader, file_format.Contents]], like: Mapping[str, Any]
) -> list[Any]:
    """The leaves, with the numbers of the files."""
    found: dict[str, Any] = {}
    blocks: dict[str, tuple[Tensor, tuple[int, ...]]] = {}  # of DTensors, and where they begin
    spread = dtensors.any_sharded(list(like.values()))
    for file, contents in files:
        found |= contents.scalars
        begin = contents.begin
        for (name, piece), wanted in zip(contents.pieces.items(), contents.checks, strict=False):
            if (x := found.get(name)) is None:
                x = found[name] = _empty(like[name], piece, spread)
                if spread:
                    blocks[name] = dtensors.local(x), dtensors.block_of(x)[0]
            check = read_piece(file, begin, piece, *(blocks[name] if spread else (x, None)))
            if check is not None and check != wanted:
                why = f"the checksum of {name} differs. Likely cause: a damaged file"
                raise ValueError(shards.not_whole(file.name, why))
            begin += piece.nbytes
    return [_in_place_of(found[name], x) if spread else found[name] for name, x in like.items()]


def _empty(like: Any, piece: file_format.Piece, spread: bool) -> Any:
    """Memory for a leaf; nobody sees it before every number is there."""
    at = dtensors.layout_of(like) if spread else None
    if at is None:
        strides = piece.strides
        return torch.empty_strided(piece.whole, strides, dtype=piece.dtype, device=like.device)
    part = torch.empty_like(dtensors.local(like), requires_grad=False)
    return dtensors.close(part, dtensors.whole_layout(at))


def _in_place_of(x: Any, old: Any) -> Any:
    """A leaf in the layout of another one: the first rank of a sum over ranks gets all of it."""
    if (
        type(x) is Tensor
        or (at := dtensors.layout_of(old)) is None
        or at == dtensors.whole_layout(at)
    ):
        return x
    part = dtensors.landed(x, at)
    return dtensors.close(torch.zeros_like(dtensors.local(x)) if part is None else part, at)


def _check_outside(what: str) -> None:
    if modes.transform_active():
        raise RuntimeError(
            f"{what} works on files. Call it outside of torch.func transforms and compiled code."
        )
