"""The microbatches of a batch at hand, or of a stream of batches, such as a loader."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor

from .._base.trees import Tree
from .batches import cut_batch, read_batch, rows_to_cut


def parts_of_streams(
    batch: dict[int, Any], size: int | list[int] | None, nothing: str, *, stream: bool
) -> Iterator[dict[int, Tree]]:
    """The microbatches of a batch, by the positions of its arguments; or of a stream of batches.

    Where that gives no batch, ``nothing`` says what there is none of, if it is an error.
    """
    if stream:
        for i, its in batch.items():
            if isinstance(its, (Tensor, Mapping, str)) or not isinstance(its, Iterable):
                raise TypeError(
                    f"args[{i}] is a {type(its).__name__}; expected, with stream=True, an iterable "
                    "of batches, such as a list or a loader. A batch at hand is no stream."
                )
        batches = (dict(zip(batch, x, strict=True)) for x in _side_by_side(batch))
    else:
        batches = iter([batch])
    some = False
    for whole in batches:
        some = True
        if size is None:
            yield whole
        else:
            flat = read_batch(whole, "args")
            rows_to_cut(flat, "args")
            yield from cut_batch(flat, size)
    if not some and nothing:
        raise ValueError(
            f"the stream gave no batch, and there is no {nothing} of nothing. An iterator that is "
            "used up? Each call goes through it once, so give what can be gone through again: a "
            "list, a DataLoader."
        )


def _side_by_side(streams: dict[int, Any]) -> Iterable[tuple[Any, ...]]:
    """The batches of streams that end together, or an error that says which ended first."""
    over = object()
    for n, batches in enumerate(zip_longest(*streams.values(), fillvalue=over)):
        ended = [i for i, x in zip(streams, batches, strict=True) if x is over]
        if ended:
            goes_on = next(i for i in streams if i not in ended)
            raise ValueError(
                f"args[{ended[0]}] has no batch {n}, counted from 0, and args[{goes_on}] has one; "
                "expected as many batches of each stream. A loader that drops its last batch?"
            )
        yield batches
