"""Saving and loading trees whose tensors are spread over ranks.

    path/shard-…-of-….safetensors    what one rank held: names, parts, and where they lie

Every rank writes what it holds, once, without pickle, into a directory that gets its name when all
of them are done. Any number of ranks reads it again: each reads what it needs and nobody waits for
another. Sums that are ``Partial`` are saved as what they are a sum of; the first rank gets it back.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._inputs import read_tensors
from ._sharded import close, landed, layout_of, local, resolved, whole_layout
from ._tree import Tree, paths, unflatten


def save_sharded(path: str | os.PathLike[str], tree: Tree) -> None:
    """Save a tree with DTensors in it; all ranks call this together.

    Args:
        path: A directory that does not exist yet.
        tree: A pytree of tensors. Those that are no DTensors are taken to be the same on all ranks.
    """
    storage: Any = _storage()
    if not dist.is_initialized():
        raise RuntimeError("there is no process group, so nothing is spread over ranks: use save.")
    named = _named(resolved(read_tensors(tree, "tree", _CAUSE)[0]), tree)
    final = Path(path)
    unfinished = final.with_name(f".{final.name}.unfinished")
    _on_first_rank(lambda: _make(final, unfinished))
    try:
        writer = storage.HuggingFaceStorageWriter(str(unfinished), save_distributed=True)
        storage.save(named, storage_writer=writer)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _on_first_rank(lambda: unfinished.rename(final))


def load_sharded(path: str | os.PathLike[str], like: Tree) -> Tree:
    """Load what ``save_sharded`` saved, on any number of ranks.

    Args:
        path: The directory.
        like: A tree of the structure, shapes, dtypes and placements that are wanted, such as
            ``step.init(params)``. It is not changed.

    Returns:
        A tree like it, with the numbers that were saved.
    """
    storage: Any = _storage()
    if not Path(path).is_dir():
        raise FileNotFoundError(f"{path} is no directory; expected one that save_sharded made.")
    leaves, spec = read_tensors(like, "like", _CAUSE)
    found = [_empty(x) for x in leaves]
    named = _named(found, like)
    reader, planner = storage.HuggingFaceStorageReader(str(path)), storage.DefaultLoadPlanner()
    metadata = reader.read_metadata()
    _check(path, named, metadata.state_dict_metadata)
    # What storage.load does, without asking other ranks: each knows what it needs.
    planner.set_up_planner(named, metadata, False)
    reader.set_up_storage_reader(metadata, False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return unflatten(spec, [_in_place_of(x, old) for x, old in zip(found, leaves, strict=True)])


def is_saved_by_ranks(path: str | os.PathLike[str]) -> bool:
    """Whether that is a folder such as ``save_sharded`` makes."""
    return any(Path(path).glob("shard-*.safetensors"))


_CAUSE = "What is saved is tensors: a state, parameters, what is no tensor goes elsewhere."


def _storage() -> Any:
    """Torch's module of checkpoints, imported only here: it takes a while."""
    try:
        import safetensors  # noqa: F401  # pyright: ignore
    except ImportError as error:
        raise ImportError(
            "states spread over ranks are saved and loaded by torch.distributed.checkpoint with "
            "safetensors, which is not installed: pip install 'pureaccum[sharded]'"
        ) from error
    import torch.distributed.checkpoint as storage

    return storage


def _named(leaves: list[Tensor], tree: Tree) -> dict[str, Tensor]:
    _, spec = read_tensors(tree, "tree", _CAUSE)
    return dict(zip(paths(spec, "tree"), leaves, strict=True))


def _on_first_rank(do: Callable[[], object]) -> None:
    """Let one rank do it, and all of them know how it went."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            do()
        except OSError as error:
            told = [error]
    dist.broadcast_object_list(told)
    if told[0] is not None:
        raise told[0]


def _make(final: Path, unfinished: Path) -> None:
    if final.exists():
        raise FileExistsError(
            f"{final} exists, and a directory cannot be replaced in one move. Save under a new "
            "name, and remove the old one afterwards."
        )
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was interrupted
    unfinished.mkdir(parents=True)


def _check(path: Any, named: dict[str, Tensor], saved: dict[str, Any]) -> None:
    missing = [name for name in named if name not in saved]
    extra = [name for name in saved if name not in named]
    if missing or extra:
        what = f"has no {missing[0]}" if missing else f"has {extra[0]}, which like has not"
        raise ValueError(
            f"{path} {what} ({len(saved)} leaves were saved, {len(named)} are wanted). The state "
            "of another configuration?"
        )
    for name, x in named.items():
        shape, dtype = tuple(saved[name].size), saved[name].properties.dtype
        if (shape, dtype) != (tuple(x.shape), x.dtype):
            raise ValueError(
                f"{name} was saved with shape {shape} as {dtype}; like has {tuple(x.shape)} as "
                f"{x.dtype} there. The state of another configuration?"
            )


def _empty(x: Tensor) -> Tensor:
    return close(torch.empty_like(local(x), requires_grad=False), whole_layout(layout_of(x)))


def _in_place_of(x: Tensor, old: Tensor) -> Tensor:
    at = layout_of(old)
    if at is None or at == whole_layout(at):
        return x
    part = landed(x, at)
    return close(torch.zeros_like(local(x)) if part is None else part, at)
