"""Random numbers as a function of a key and a position, and of nothing else.

A key is a plain int64 tensor of shape (2,), two 32-bit words. A tensor of shape (..., 2) is a batch
of keys. The number at position i of a draw is word ``i % 2`` of block ``i // 2`` of Threefry-2x32
with 20 rounds; a number of 53 bits uses all of block ``i``. No generator is advanced: the bits are
the same on every device, compiled or not, under vmap over the keys or in a loop, and a longer draw
begins with the shorter one. So use a key for one draw, and make more keys for more.

A block is made from a key and a 64-bit counter. The two highest bits of the counter state its
purpose: to fold a number in (00), to split the key (01) or to draw (10). So one key can do all
three.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base import checks, dtensors, reprs, sharded_rows
from .._base.torch_internals import modes


ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
FOLD, SPLIT, DRAW = 0, 1 << 62, -(1 << 63)  # the two highest bits of a counter
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
WORD = 2**32 - 1
PIECE = 2**16  # blocks that a thread makes at a time: its cache holds the arrays they need
MOST_DRAWN = 2**57  # numbers of one key


def key(seed: int, device: torch.device | str | int | None = None) -> Tensor:
    """Make a key, an int64 tensor of shape (2,), from a seed.

    The rule: the key is the seed modulo 2**64, in two 32-bit words, the high word first.

    Args:
        seed: A 64-bit int, signed or not: -1 and 2**64 - 1 are the same seed.
        device: The device of the key, and of everything drawn from it.

    Example:
        >>> key(2**32 + 7)
        tensor([1, 7])

    References:
        `jax.random <https://docs.jax.dev/en/latest/jax.random.html>`_, whose keys these resemble.
        Salmon, Moraes, Dror and Shaw, `Parallel random numbers: as easy as 1, 2, 3
        <https://doi.org/10.1145/2063384.2063405>`_, 2011, for the numbers made from a key.
    """
    seed = checks.check_int(seed, "seed", "an int from -2**63 to 2**64 - 1", -(2**63), 2**64 - 1)
    words = (seed >> 32) % 2**32, seed % 2**32
    # Filled where it lies: for a copy the host would wait.
    return torch.stack([torch.full((), w, dtype=torch.int64, device=device) for w in words])


def fold_in(key: Tensor, n: int | Tensor) -> Tensor:
    """Make a new key from a key and a number, such as a step, a layer or a sample.

    The rule: block ``n`` of Threefry-2x32 under the key, of the counters for folding.

    Args:
        key: A key, or keys of shape (..., 2).
        n: An int in [0, 2**62). Or a tensor of integers, taken modulo 2**62 and broadcast against
            the leading dims of ``key``, for one new key each.

    Example:
        >>> rows = fold_in(key(0), torch.arange(3))
        >>> torch.equal(rows[2], fold_in(key(0), 2))
        True
    """
    if dtensors.is_sharded(key) and not isinstance(n, Tensor):
        return sharded_rows.locally(lambda key: fold_in(key, n), key, 1)
    _check_key(key)
    if not isinstance(n, Tensor):
        n = checks.check_int(
            n, "n", "an int from 0 to 2**62 - 1, or a tensor of such", 0, 2**62 - 1
        )
        n = torch.full((), n, dtype=torch.int64, device=key.device)
    elif n.is_floating_point() or n.is_complex() or n.dtype == torch.bool:
        raise TypeError(f"n is a tensor of {n.dtype}; expected integers.")
    return _threefry(key, (n.long() & (2**62 - 1)) + FOLD).long() & WORD


def split_key(key: Tensor, n: int = 2) -> Tensor:
    """Make ``n`` new keys from a key.

    The rule: blocks 0 to ``n - 1`` of Threefry-2x32 under the key, of the counters for splitting.

    Args:
        key: A key, or keys of shape (..., 2), which give keys of shape (..., n, 2).
        n: The number of new keys. The first keys do not depend on it.

    Example:
        >>> for_weights, for_masks = split_key(key(0))
        >>> normal(for_weights, (2,)), uniform(for_masks)
        (tensor([-0.7631,  0.0017]), tensor(0.2748))
    """
    if dtensors.is_sharded(key):
        return sharded_rows.locally(lambda key: split_key(key, n), key, 1)
    _check_key(key)
    n = checks.check_int(n, "n", "an int from 1 to 2**62 - 1", 1, 2**62 - 1)
    counters = torch.arange(n, device=key.device) + SPLIT
    return _threefry(key.unsqueeze(-2), counters).long() & WORD


def uniform(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the uniform distribution over [0, 1).

    The rule: ``k * 2**-bits`` for an integer k of that many random bits: 53 in float64, 24 in
    float32, 11 in float16 and 8 in bfloat16. The numbers are exact, equally likely, and never 1.

    Args:
        key: A key, or keys of shape (..., 2), each for its own draw.
        shape: The shape of one key's draw; the result has shape (..., *shape).
        dtype: float64, float32, float16 or bfloat16.

    Example:
        >>> uniform(key(0), (3,))
        tensor([0.0249, 0.7834, 0.5808])
    """
    bits = _bits(dtype)

    def number(words: Tensor) -> Tensor:
        k = _53_bits(words) if bits == 53 else (words >> (32 - bits)) & (2**bits - 1)
        return k.to(dtype) * 2.0**-bits

    return _draw(key, shape, dtype, number, 1 if bits == 53 else 2)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw from the normal distribution with mean 0 and variance 1.

    The rule, in float64 for 53 random bits k, then rounded to ``dtype``::

        sqrt(2) * erfinv(2 * u - 1)        u = (k + 0.5) * 2**-53, so never infinite

    Devices and compilers differ in the last places of erfinv. So does float64, and so does a
    narrower dtype if those places decide a rounding.

    Args:
        key: A key, or keys of shape (..., 2), each for its own draw.
        shape: The shape of one key's draw; the result has shape (..., *shape).
        dtype: float64, float32, float16 or bfloat16.

    Example:
        >>> normal(key(0), (3,))
        tensor([-1.9614,  0.2039,  1.3661])
    """
    _bits(dtype)

    def number(words: Tensor) -> Tensor:
        odd = _53_bits(words) * 2 - (2**53 - 1)  # float64 holds it, and not k + 0.5
        return ((odd.double() * 2.0**-53).erfinv() * math.sqrt(2)).to(dtype)

    return _draw(key, shape, dtype, number, 1)


def dropout(x: Tensor, p: float, key: Tensor) -> Tensor:
    """Zero each element with probability ``p``, and divide the others by ``1 - p``.

    The rule, with 32 random bits for each element as a number u in [0, 1)::

        where(u >= p, x / (1 - p), 0)  # selected: a dropped inf or NaN is zero

    Args:
        x: A floating-point or complex tensor; the result is differentiable in it.
        p: A Python number in [0, 1]. At 0 the result is ``x`` itself.
        key: One key for all of ``x``. Or keys of shape (..., 2) for its leading dims (...): a
            sample's mask then depends on its key alone, however the batch is cut.

    Example:
        >>> rows, x = fold_in(key(0), torch.arange(4)), torch.ones(4, 3)
        >>> torch.equal(dropout(x, 0.5, rows)[2:], dropout(x[2:], 0.5, rows[2:]))
        True

    References:
        Srivastava et al., `Dropout <https://jmlr.org/papers/v15/srivastava14a.html>`_, 2014;
        `torch.nn.Dropout <https://docs.pytorch.org/docs/stable/generated/torch.nn.Dropout.html>`_
    """
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"x is {reprs.kind(x)}; expected a tensor.")
    p = checks.check_number(p, "p", "a number in [0, 1]", lambda p: 0 <= p <= 1)
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"x is a tensor of {x.dtype}; expected floating-point or complex numbers.")
    _check_key(key)
    lead = key.shape[:-1]
    if lead != x.shape[: len(lead)] or key.device != x.device:
        raise ValueError(
            f"key has shape {tuple(key.shape)} on {key.device}, but x has {tuple(x.shape)} on "
            f"{x.device}; expected, on the device of x, one key for all of x, or one key per "
            "sample: shape (rows, 2), as from fold_in(key, torch.arange(rows))."
        )
    if p == 0:
        return x
    last = math.ceil(p * 2**32) - 2**31 - 1  # of the dropped words, as signed ones
    shape = x.shape[len(lead) :]
    keep = _draw(key, shape, torch.bool, lambda words: (words ^ -(2**31)) > last, 2)
    return torch.where(keep, x * (1 / (1 - p) if p < 1 else 0.0), 0.0)


def _threefry(key: Tensor, counters: Tensor) -> Tensor:
    """The blocks at int64 counters: int32 words of shape (..., 2).

    int32 wraps by itself, and is three times as fast as int64 under a mask.
    """
    k0, k1 = key.int().unbind(-1)
    schedule = k0, k1, k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = (counters >> 32).int() + k0, counters.int() + k1
    cls: Any = Tensor
    add, xor = (cls.add_, cls.bitwise_xor_) if modes.may_write() else (cls.add, cls.bitwise_xor)
    for group in range(5):
        for r in ROTATIONS[group % 2]:
            x0 = add(x0, x1)
            high = (x1 >> (32 - r)) & (2**r - 1)  # the shift repeats the sign
            x1 = xor(add(high, x1, alpha=2**r), x0)
        x0 = add(x0, schedule[(group + 1) % 3])
        x1 = add(x1, schedule[(group + 2) % 3] + (group + 1))
    return torch.stack((x0, x1), -1)


def _draw(
    key: Tensor, shape: Sequence[int], dtype: torch.dtype, number: Callable[..., Tensor], each: int
) -> Tensor:
    """Draw for each key; ``number`` makes numbers of the words of blocks, (..., 2) -> (..., each).

    A CPU does so in pieces that fit its cache: 16 million numbers take a third of the time.
    """
    if dtensors.is_sharded(key):
        return sharded_rows.locally(lambda key: _draw(key, shape, dtype, number, each), key, 1)
    _check_key(key)
    if not isinstance(shape, Sequence) or any(n < 0 for n in shape):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"shape is {shape!r}; expected a tuple of ints, none of them negative.")
    count, whole, device = math.prod(shape), (*key.shape[:-1], *shape), key.device
    if count > MOST_DRAWN:
        raise ValueError(f"shape has {checks.shown(count)} numbers; expected at most 2**57.")
    blocks = -(-count // each)
    if device.type != "cpu" or not modes.may_write():
        counters = torch.arange(blocks, device=device) | DRAW
        numbers = number(_threefry(key.unsqueeze(-2), counters))
        return numbers.flatten(-2)[..., :count].reshape(whole)
    keys, step = key.reshape(-1, 1, 2), PIECE * torch.get_num_threads()
    numbers = torch.empty(len(keys), blocks, each, dtype=dtype, device=device)
    for start in range(0, blocks, step):
        counters = torch.arange(start, min(start + step, blocks), device=device) | DRAW
        rows = max(1, step // blocks)
        pieces = numbers[:, start : start + step].split(rows)
        for some, piece in zip(keys.split(rows), pieces, strict=True):
            piece.copy_(number(_threefry(some, counters)))
    return numbers.flatten(1)[:, :count].reshape(whole)


def _53_bits(words: Tensor) -> Tensor:
    a, b = words.split(1, -1)
    return ((a.long() << 21) | ((b >> 11) & (2**21 - 1))) & (2**53 - 1)


def _bits(dtype: torch.dtype) -> int:
    if dtype not in BITS:
        raise TypeError(f"dtype is {dtype}; expected one of {', '.join(map(str, BITS))}.")
    return BITS[dtype]


def _check_key(key: Any) -> None:
    came = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape[-1:] != (2,):
        raise TypeError(f"key is {came}; expected int64 of shape (..., 2): pureaccum.key(seed).")
