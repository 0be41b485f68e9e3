"""A function of a carry and a sequence, chunk by chunk, in the memory of one chunk.

    for chunk in chunks:
        carry, out = func(params, carry, chunk)    # a microbatched function of one piece
    return carry, outs

Each chunk is a call of the primitive, which stores only its inputs and provides all derivatives. A
carry goes from one call to the next, and its cotangent comes back the same way, from the last chunk
to the first.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._base import checks, reprs, sharded_rows, trees
from .._base.torch_internals import functorch, modes
from . import batches, gathered, losses, microbatch, outputs, rule, writes
from .arguments import Arguments
from .reductions import check_reduce


CARRY = 1  # which argument it is


def scan(
    func: Callable[..., tuple[trees.Tree, trees.Tree]],
    *,
    chunk_size: int | Sequence[int],
    reduce: trees.Tree = "concat",
    dim: int = 0,
    batch_argnums: int | tuple[int, ...] = 2,
) -> Callable[..., tuple[trees.Tree, trees.Tree]]:
    """Make a function with a carry, and all its derivatives, process a sequence chunk by chunk.

    The rule::

        for chunk in chunks(xs, chunk_size):
            carry, out = func(params, carry, chunk)
        return carry, outs, leaf by leaf concatenated, summed or whatever reduce says

    You can differentiate the result as you would that loop, with respect to all arguments and
    captured tensors, under any nesting of torch.func's transforms and under ``.backward()``, at any
    order. Only the chunks, the carries between them and the outputs are stored, and a derivative
    runs ``func`` again: see ``microbatch``, which you can nest with it in either order. Every carry
    is stored, so a carry as long as the sequence, such as a cache for the keys and values of full
    attention, saves no memory.

    Args:
        func: ``func(params, carry, chunk)`` returns ``(carry, out)``. The returned carry has the
            structure, shapes, dtypes and devices of the one that it receives.
        chunk_size: Rows per chunk; the last one may be shorter. Or a list, the rows of each.
        reduce: How to reduce each output over chunks: see ``microbatch``.
        dim: The dim along which the sequence is cut and outputs are concatenated.
        batch_argnums: Which positional arguments are sequences. Every chunk receives all others,
            except the carry, whole.

    Returns:
        A function with the arguments of ``func`` that returns the last carry and the outputs.

    Example:
        >>> def decayed(decay, carry, x):  # a running sum that forgets
        ...     ys = []
        ...     for each in x:
        ...         carry = decay * carry + each
        ...         ys.append(carry)
        ...     return carry, torch.stack(ys)
        >>> run = scan(decayed, chunk_size=2)
        >>> run(torch.tensor(0.5), torch.tensor(0.0), torch.tensor([4.0, 2.0, 1.0]))
        (tensor(3.), tensor([4., 4., 3.]))

    References:
        `jax.lax.scan <https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html>`_ with
        `jax.checkpoint <https://docs.jax.dev/en/latest/_autosummary/jax.checkpoint.html>`_
    """
    if not callable(func):
        raise TypeError(f"func is {func!r}; expected a function of (params, carry, chunk).")
    at = checks.check_argnums(batch_argnums, "batch_argnums")
    if CARRY in at:
        raise ValueError(
            f"batch_argnums={batch_argnums!r} names argument {CARRY}, which is the carry. The "
            "carry goes from one chunk to the next, so it cannot be split."
        )
    check_reduce(reduce)
    size = batches.check_sizes(chunk_size, "chunk_size")
    known, told = writes.known_of(func), losses.advising(func, *at)

    @wraps(func)
    def scanned(*args: Any, **kwargs: Any) -> tuple[trees.Tree, trees.Tree]:
        cut = {i: args[i] for i in checks.positions(at, len(args), "batch_argnums")}
        rows = batches.rows_to_cut(batches.read_batch(cut, "args", dim), "args", one_by_one=True)
        sizes = batches.sizes_of_batch(rows, size, "chunk_size") or [0]
        arguments = Arguments.of(args, kwargs, cut, dim)
        _refuse_sharded_steps(arguments.over)
        made = outputs.Outputs(reduce, sizes, dim, arguments.over)
        with batches.cutting(len(sizes), sized=True):
            carry, outs = _over_chunks(told, arguments, made, known)
        return (carry if rows else args[CARRY]), made.finish(outs, arguments.tensors)

    return scanned


def _over_chunks(
    func: Callable[..., Any], arguments: Arguments, outs: outputs.Outputs, known: writes.Known
) -> tuple[trees.Tree, list[Tensor]]:
    """The last carry, and the outputs of all chunks."""
    sizes = list(outs.sizes)
    columns = [
        [x] * len(sizes) if isinstance(how, str) else x.split(sizes, how.dim)
        for x, how in zip(*arguments[:2], strict=True)
    ]
    recorded = modes.transform_active() or torch.is_grad_enabled() or functorch.forward_ad_active()
    joined: list[gathered.Gathered] = []
    carry: Any = None
    if torch.compiler.is_dynamo_compiling() and not functorch.transform_depth():
        func = partial(checkpoint, func, use_reentrant=False)  # it keeps no more
    for p in range(len(sizes)):
        args, kwargs = arguments.filled([column[p] for column in columns])
        args[CARRY] = args[CARRY] if p == 0 else carry
        given, chunk = Arguments.of(args, kwargs), _Chunk(outs, p, args[CARRY])
        carry, taken = microbatch.call_microbatched(func, given, chunk, known)
        if p == 0:
            assert outs.form is not None
            joined = [gathered.Gathered(sizes, how, recorded) for how in outs.form.outs]
        for so_far in joined:
            so_far.take(taken.pop(0))
    return carry, [so_far.end() for so_far in joined]


class _Chunk(outputs.Whole):
    """What a chunk gives: the next carry, and tensors that are summed or laid end to end."""

    def __init__(self, outs: outputs.Outputs, p: int, carry: trees.Tree) -> None:
        self.outs, self.p, self.carry = outs, p, carry
        self.before = dict(outs.states)

    def begin(self) -> None:
        self.outs.states = dict(self.before)
        if self.p == 0:
            self.outs.begin()

    def take(self, _p: int, out: Any, repeated: bool = False) -> rule.Outs:
        if not isinstance(out, tuple) or len(out) != 2:  # pyright: ignore[reportUnknownArgumentType]
            came = f"a tuple of {len(out)}" if isinstance(out, tuple) else reprs.kind(out)  # pyright: ignore
            raise TypeError(f"func returned {came}; expected a pair, (carry, out).")
        leaves, spec = trees.flatten(out[0])
        if not repeated:
            _check_carry(leaves, spec, self.carry)
            self.spec, self.static = spec, losses.tensors_apart(leaves)[1]
        tensors, _ = losses.tensors_apart(leaves)
        taken, keeps = self.outs.take(self.p, out[1], repeated)
        self.followed = self.outs.followed
        if not repeated:
            assert self.outs.form is not None
            self.count = len(tensors)
            groups = (*(0 for _ in tensors), *self.outs.form.groups)
            self.form = rule.Form((), ("whole",) * len(groups), groups)
        return [*tensors, *taken], keeps

    def finish(self, outs: Sequence[Tensor], _operands: Sequence[Tensor]) -> Any:
        carry = losses.filled(self.static, outs[: self.count])
        return trees.unflatten(self.spec, carry), [*outs[self.count :]]


def _check_carry(leaves: list[Any], spec: Any, before: trees.Tree) -> None:
    """Raise where a carry is not like the one before."""
    old, old_spec = trees.flatten(before)
    cause = "Return a carry like the one that func gets."
    checks.check_same_structure(old_spec, spec, "the carry that func gets", "carry", cause)
    names = trees.paths(spec, "carry")
    for name, x, y in zip(names, leaves, old, strict=True):
        if isinstance(x, Tensor) != isinstance(y, Tensor) or (
            not isinstance(x, Tensor) and not (x is y or x == y)
        ):
            raise TypeError(
                f"{name} came back as {_look(x)}; expected {_look(y)}, because a value that is "
                "not a tensor stays the same. For a number that changes, use a tensor: "
                "torch.tensor(0)."
            )
        if isinstance(x, Tensor) and (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
            raise ValueError(
                f"{name} came back as {_look(x)}; expected {_look(y)}, because a carry keeps its "
                "shapes and dtypes. Return the result of each chunk in out. Cast a state back "
                "that autocast or a wider operand has cast: h.to(carry.dtype)."
            )


def _look(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    return f"a {x.dtype} tensor of shape {tuple(x.shape)} on {x.device}"


def _refuse_sharded_steps(over: sharded_rows.Over) -> None:
    if over != sharded_rows.NOWHERE and over[1]:
        raise TypeError(
            "a sequence is a DTensor whose steps lie on several ranks, but the carry goes from "
            "one chunk to the next. Shard another dim, such as that of samples, or use "
            "x.full_tensor()."
        )
