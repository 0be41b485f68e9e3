"""Random numbers are a function of the key and the position: their bits, under everything."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pureaccum._pure import keys as random_keys
from pureaccum._pure.keys import dropout, fold_in, key, normal, split_key, uniform
from pureaccum.testing import assert_trees_bitwise_equal
from pureaccum.testing.strategies import compositions
from tests.draws import examples, slices


pytestmark = [pytest.mark.exact, pytest.mark.promise("keys")]
WORD = 2**32 - 1
DTYPES = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
words = st.integers(0, WORD)
pairs = st.tuples(words, words)
seeds = st.integers(-(2**63), 2**64 - 1)
small = st.lists(st.integers(0, 4), max_size=3).map(tuple)

DRAWS = {
    **{f"uniform {dtype}": lambda k, d=dtype: uniform(k, (3, 5), d) for dtype in DTYPES},
    **{f"normal {dtype}": lambda k, d=dtype: normal(k, (7,), d) for dtype in DTYPES},
    "scalar": uniform,
    "nothing": lambda k: uniform(k, (3, 0)),
    "dropout": lambda k: dropout(torch.ones(9), 0.4, k),
    "fold_in": lambda k: fold_in(k, 2**61 + 5),
    "split_key": lambda k: split_key(k, 3),
}


def threefry(key, counter):
    """Threefry-2x32-20 in Python's integers, one step a line, as the paper has it."""
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + key[0]) & WORD, (counter[1] + key[1]) & WORD
    for i in range(20):
        r = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x = (x + y) & WORD
        y = ((y << r) | (y >> (32 - r))) & WORD
        y ^= x
        if i % 4 == 3:
            s = i // 4 + 1
            x = (x + schedule[s % 3]) & WORD
            y = (y + schedule[(s + 1) % 3] + s) & WORD
    return x, y


def block(words, counter):
    signed = counter[0] - 2**32 * (counter[0] >> 31)
    counters = torch.tensor(signed * 2**32 + counter[1])
    a, b = (random_keys._threefry(torch.tensor(words), counters).long() & WORD).tolist()
    return a, b


def reference(words, count):
    """The first words that a key draws."""
    blocks = [threefry(words, (2**31 + (i >> 32), i & WORD)) for i in range((count + 1) // 2)]
    return [word for pair in blocks for word in pair][:count]


# The cipher and its layout ---------------------------------------------------------------


@pytest.mark.mechanism
@pytest.mark.parametrize(
    ("words", "counter", "expected"),
    [  # Random123's kat_vectors
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((WORD, WORD), (WORD, WORD), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_cipher_gives_the_known_answers(words, counter, expected):
    assert threefry(words, counter) == expected
    assert block(words, counter) == expected


@pytest.mark.parametrize(
    ("words", "counter", "expected"),
    [  # two of Random123's kat_vectors: those whose counters fold_in may have
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_folded_keys_are_the_known_answers(words, counter, expected):
    assert threefry(words, counter) == expected
    made = fold_in(torch.tensor(words), counter[0] << 32 | counter[1])
    assert tuple(made.tolist()) == expected


@pytest.mark.mechanism
@given(words=pairs, counter=pairs)
def test_blocks_are_those_of_another_program(words, counter):
    assert block(words, counter) == threefry(words, counter)


@given(seed=seeds)
def test_a_key_is_the_two_words_of_its_seed(seed):
    made = key(seed)
    assert (made.dtype, made.tolist()) == (torch.int64, [seed >> 32 & WORD, seed & WORD])
    assert torch.equal(key(-1), key(2**64 - 1))


@given(words=pairs, n=st.integers(0, 2**62 - 1), ways=st.integers(1, 5))
def test_new_keys_are_blocks_of_their_own_domain(words, n, ways):
    k = torch.tensor(words)
    assert tuple(fold_in(k, n).tolist()) == threefry(words, (n >> 32, n & WORD))
    assert_trees_bitwise_equal(fold_in(k, torch.tensor(n)), fold_in(k, n))
    assert_trees_bitwise_equal(fold_in(k, torch.tensor(n) - 2**62), fold_in(k, n))  # modulo 2**62
    made = [threefry(words, (2**30, i)) for i in range(ways)]
    assert [tuple(new) for new in split_key(k, ways).tolist()] == made


@given(words=pairs, count=st.integers(0, 9), p=st.floats(0, 1, exclude_min=True))
def test_numbers_are_the_words_in_order(words, count, p):
    k = torch.tensor(words)
    for dtype, bits in DTYPES.items():
        drawn = uniform(k, (count,), dtype)
        assert drawn.dtype == dtype
        if bits < 53:
            expected = [(word >> (32 - bits)) / 2**bits for word in reference(words, count)]
        else:
            w = reference(words, 2 * count)
            pairs = zip(w[::2], w[1::2], strict=True)
            expected = [((a << 21) + (b >> 11)) / 2**53 for a, b in pairs]
        assert drawn.tolist() == expected
    kept = [word / 2**32 >= p for word in reference(words, count)]
    assert dropout(torch.ones(count), p, k).bool().tolist() == kept


def test_the_largest_and_the_smallest_numbers_are_finite_and_below_one(monkeypatch):
    """As if a block were all zeros or all ones: below 1, and finite."""
    for word in (0, -1):
        monkeypatch.setattr(
            random_keys, "_threefry", lambda k, c, w=word: torch.full((*c.shape, 2), w).int()
        )
        for dtype, bits in DTYPES.items():
            expected = 1 - 2.0**-bits if word else 0.0
            assert uniform(key(0), (2,), dtype).tolist() == [expected] * 2
            assert normal(key(0), (), dtype).isfinite()
        least = NormalDist().inv_cdf(2.0**-54)
        assert normal(key(0), (), torch.float64) == pytest.approx(-least if word else least)
        assert dropout(torch.ones(()), 1 - 2.0**-32, key(0)) == (2.0**32 if word else 0)
        assert dropout(torch.ones(()), 2.0**-60, key(0)) == (1 if word else 0)


@given(words=pairs)
def test_normal_is_symmetric_in_its_bits(words):
    """The inverse distribution function of ``(k + 0.5) / 2**53``, by torch.special.ndtri."""
    a, b = reference(words, 2)
    odd = 2 * ((a << 21) + (b >> 11)) + 1 - 2**53
    drawn = normal(torch.tensor(words), (), torch.float64)
    tail = torch.special.ndtri(torch.tensor((2**53 - abs(odd)) / 2**54, dtype=torch.float64))
    assert drawn.item() == pytest.approx(math.copysign(tail.item(), odd), rel=1e-12, abs=1e-15)
    assert_trees_bitwise_equal(normal(torch.tensor(words)), drawn.float())


# Nothing but the key and the position ----------------------------------------------------


@given(seed=seeds, n=st.integers(0, 70), m=st.integers(0, 70), dtype=st.sampled_from([*DTYPES]))
def test_a_longer_draw_begins_with_the_shorter(seed, n, m, dtype):
    k, n, m = key(seed), max(n, m), min(n, m)
    for draw in uniform, normal:
        assert_trees_bitwise_equal(draw(k, (n,), dtype)[:m], draw(k, (m,), dtype))
    assert_trees_bitwise_equal(split_key(k, n + 1)[: m + 1], split_key(k, m + 1))


@given(seed=seeds, shape=small, dtype=st.sampled_from([*DTYPES]))
def test_a_shape_only_arranges_the_numbers(seed, shape, dtype):
    for draw in uniform, normal:
        flat = draw(key(seed), (math.prod(shape),), dtype)
        assert_trees_bitwise_equal(draw(key(seed), shape, dtype), flat.reshape(shape))


@pytest.mark.parametrize(("rows", "count"), [(1, 2**20 + 1), (3, 2**19 + 1), (2**10 + 1, 2**10)])
def test_numbers_of_a_large_draw_are_those_of_small_ones(rows, count):
    """However they are made in pieces: at both ends, in the middle, and at powers of two."""
    keys = fold_in(key(7), torch.arange(rows))
    drawn, wide = uniform(keys, (count,)), uniform(keys, (count,), torch.float64)
    for row in {0, rows // 2, rows - 1}:
        words = keys[row].tolist()
        for power in range(count.bit_length()):
            for i in {2**power - 1, min(2**power, count - 1), count - 2**power}:
                pair = threefry(words, (2**31, i // 2))
                assert drawn[row, i] == (pair[i % 2] >> 8) / 2**24
                a, b = threefry(words, (2**31, i))
                assert wide[row, i] == ((a << 21) + (b >> 11)) / 2**53


@pytest.mark.mechanism
@examples(1 / 2)
@given(seed=seeds, rows=st.integers(0, 5), count=st.integers(0, 40), piece=st.integers(1, 9))
def test_numbers_do_not_show_the_pieces_that_they_were_drawn_in(seed, rows, count, piece):
    keys = fold_in(key(seed), torch.arange(rows))
    whole = [draw(keys, (count,), dtype) for draw in (uniform, normal) for dtype in DTYPES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_keys, "PIECE", piece)
        cut = [draw(keys, (count,), dtype) for draw in (uniform, normal) for dtype in DTYPES]
    assert_trees_bitwise_equal(cut, whole)


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_is_the_loop_is_the_batch(name):
    draw, keys = DRAWS[name], split_key(key(3), 6).reshape(2, 3, 2)
    loop = torch.stack([torch.stack([draw(k) for k in row]) for row in keys])
    assert_trees_bitwise_equal(torch.func.vmap(torch.func.vmap(draw))(keys), loop)
    assert_trees_bitwise_equal(
        torch.func.vmap(torch.func.vmap(draw), in_dims=1, out_dims=1)(keys), loop
    )
    if name != "dropout":  # of which samples of x are asked below
        assert_trees_bitwise_equal(draw(keys), loop)


def test_fold_in_broadcasts_and_maps():
    keys, n = fold_in(key(1), torch.arange(4)), torch.arange(12).reshape(3, 4)
    loop = torch.stack(
        [torch.stack([fold_in(keys[j], 4 * i + j) for j in range(4)]) for i in range(3)]
    )
    assert_trees_bitwise_equal(fold_in(keys, n), loop)
    assert_trees_bitwise_equal(fold_in(keys, n.to(torch.uint8)), loop)
    assert_trees_bitwise_equal(torch.func.vmap(fold_in, (None, 0))(keys, n), loop)
    assert_trees_bitwise_equal(torch.func.vmap(torch.func.vmap(fold_in), (None, 0))(keys, n), loop)
    assert_trees_bitwise_equal(fold_in(keys, 3), torch.stack([fold_in(k, 3) for k in keys]))


def everything(k, x):
    rows = fold_in(k, torch.arange(len(x)))
    return [key(-7), dropout(x, 0.3, k), dropout(x, 0.3, rows), *(d(k) for d in DRAWS.values())]


def mapped(k, x):
    def draw(k, x):
        return dropout(x, 0.3, fold_in(k, torch.arange(len(x)))), normal(split_key(k)[1], (3,))

    return torch.func.vmap(draw)(split_key(k), torch.stack((x, -x)))


COMPILED = {
    "all draws": (everything, torch.arange(12.0).reshape(4, 3), "aot_eager"),
    "under vmap": (mapped, torch.arange(12.0).reshape(4, 3), "aot_eager"),
    "by inductor": (lambda k, x: dropout(x, 0.3, k), torch.arange(1.0, 1001.0), "inductor"),
}


@pytest.mark.promise("compiled")
@pytest.mark.nightly
@pytest.mark.parametrize(("draw", "x", "backend"), COMPILED.values(), ids=COMPILED)
def test_draws_compile_into_one_graph(draw, x, backend):
    torch.compiler.reset()
    compiled, k = torch.compile(draw, fullgraph=True, backend=backend), key(2**40 + 9)
    assert_trees_bitwise_equal(compiled(k, x), draw(k, x))


@pytest.mark.promise("compiled")
@pytest.mark.slow
def test_one_graph_for_sizes_and_steps_that_change():
    torch.compiler.reset()

    def draw(k, step, rows):
        return uniform(fold_in(k, step), (rows, 3))

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager", dynamic=True)
    for step, rows in ((3, 2), (4, 5), (2**40, 7)):
        assert_trees_bitwise_equal(compiled(key(0), step, rows), draw(key(0), step, rows))


@pytest.mark.cuda
@pytest.mark.parametrize("name", DRAWS)
def test_cuda_has_the_bits_of_the_cpu(name):
    keys = fold_in(key(5), torch.arange(3))
    rows = fold_in(key(5, "cuda"), torch.arange(3, device="cuda"))
    assert_trees_bitwise_equal(rows.cpu(), keys)
    draw = DRAWS[name]
    if name == "dropout":
        x = torch.randn(3, 9)
        assert_trees_bitwise_equal(dropout(x.cuda(), 0.4, rows).cpu(), dropout(x, 0.4, keys))
    elif name == "normal torch.float64":  # erfinv is the device's own
        torch.testing.assert_close(draw(rows).cpu(), draw(keys), rtol=2.0**-48, atol=2.0**-48)
    else:
        assert_trees_bitwise_equal(draw(rows).cpu(), draw(keys))


@pytest.mark.promise("launches")
@pytest.mark.cuda
def test_the_host_never_waits_for_a_draw():
    x = torch.ones(4, 3, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        k = key(3, "cuda")
        rows = fold_in(fold_in(k, 2), torch.arange(4, device="cuda"))
        dropout(x, 0.5, rows).sum().backward()
        for draw in (uniform, normal):
            draw(split_key(k), (3,))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.promise("purity")
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_touches_no_generator_and_no_key(name):
    k = key(11)
    before, version, state = k.clone(), k._version, torch.get_rng_state()
    first = DRAWS[name](k)
    torch.manual_seed(123)
    assert_trees_bitwise_equal(DRAWS[name](k), first)  # and no generator has a say
    torch.set_rng_state(state)
    assert_trees_bitwise_equal(DRAWS[name](k), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert k._version == version
    assert_trees_bitwise_equal(k, before)


# Dropout ---------------------------------------------------------------------------------


@given(data=st.data(), seed=seeds, rows=st.integers(1, 8), width=st.integers(0, 5))
def test_dropout_of_rows_does_not_depend_on_the_cut(data, seed, rows, width):
    x = torch.arange(1.0, 1.0 + rows * width).reshape(rows, width)
    keys = fold_in(key(seed), torch.arange(rows))
    p = data.draw(st.sampled_from([0.1, 0.5, 0.9]))
    whole = dropout(x, p, keys)
    cut = slices(data.draw(compositions(rows)))
    assert_trees_bitwise_equal(torch.cat([dropout(x[part], p, keys[part]) for part in cut]), whole)
    assert_trees_bitwise_equal(
        torch.stack([dropout(*row) for row in zip(x, [p] * rows, keys, strict=True)]), whole
    )
    assert_trees_bitwise_equal(torch.func.vmap(dropout, (0, None, 0))(x, p, keys), whole)


@given(words=pairs, p=st.floats(0, 1), dtype=st.sampled_from([*DTYPES, torch.complex64]))
def test_dropout_selects_and_scales(words, p, dtype):
    x, k = torch.arange(1, 9).to(dtype), torch.tensor(words)
    out = dropout(x, p, k)
    kept = torch.tensor([word / 2**32 >= p for word in reference(words, 8)])
    scale = 1 / (1 - p) if p < 1 else 0.0
    assert_trees_bitwise_equal(out, torch.where(kept, x * scale, 0.0))
    assert p < 1 or not out.any()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_dropped_is_zero_whatever_it_was(bad):
    ones = dropout(torch.ones(64), 0.5, key(0))
    out = dropout(torch.full((64,), bad), 0.5, key(0))
    assert 0 < int((out == 0).sum()) < 64
    assert torch.equal(out == 0, ones == 0)


def test_dropout_drops_none_or_all_if_told_to():
    x = torch.tensor([1.0, -0.0, math.nan, math.inf], requires_grad=True)
    assert dropout(x, 0, key(0)) is x
    out = dropout(x, 1.0, key(0))
    assert out.tolist() == [0.0] * 4
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0] * 4


def test_derivatives_of_dropout_are_the_mask():
    x, k = torch.full((32,), 3.0), key(8)
    mask = dropout(torch.ones(32), 0.25, k)
    assert set(mask.tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert_trees_bitwise_equal(torch.func.grad(lambda x: dropout(x, 0.25, k).sum())(x), mask)
    assert_trees_bitwise_equal(
        torch.func.jvp(lambda x: dropout(x, 0.25, k), (x,), (torch.ones(32),))[1], mask
    )
    second = torch.func.hessian(lambda x: (dropout(x, 0.25, k) ** 2).sum() / 2)(x)
    torch.testing.assert_close(second.diag(), mask**2)


# Errors ----------------------------------------------------------------------------------


K, X = key(0), torch.ones(4, 3)


@pytest.mark.promise("errors")
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: key(True), TypeError, "seed is True, a bool; expected an int"),
        (lambda: key(1.0), TypeError, "seed is 1.0, a float"),
        (lambda: key(2**64), ValueError, "seed is 18446744073709551616; expected an int from"),
        (lambda: key(-(2**63) - 1), ValueError, "seed is -9223372036854775809"),
        (lambda: uniform(0), TypeError, r"key is 0; expected int64 .*: pureaccum.key\(seed\)"),
        (lambda: normal(K.float()), TypeError, r"key is torch.float32 of shape \(2,\)"),
        (lambda: fold_in(K[0], 1), TypeError, r"key is torch.int64 of shape \(\); expected"),
        (lambda: split_key(torch.arange(3)), TypeError, r"key is torch.int64 of shape \(3,\)"),
        (lambda: fold_in(K, -1), ValueError, "n is -1; expected an int from 0 to"),
        (lambda: fold_in(K, 2**62), ValueError, "n is 4611686018427387904"),
        (lambda: fold_in(K, 1.5), TypeError, "n is 1.5, a float"),
        (lambda: fold_in(K, torch.ones(2)), TypeError, "n is a tensor of torch.float32"),
        (lambda: fold_in(K, torch.tensor(True)), TypeError, "n is a tensor of torch.bool"),
        (lambda: split_key(K, 0), ValueError, "n is 0; expected an int from 1"),
        (lambda: uniform(K, 3), TypeError, "shape is 3; expected a tuple of ints"),
        (lambda: normal(K, (2, -1)), TypeError, r"shape is \(2, -1\)"),
        (lambda: uniform(K, (), torch.int64), TypeError, "dtype is torch.int64; expected one of"),
        (lambda: normal(K, (), torch.complex64), TypeError, "dtype is torch.complex64"),
        (lambda: dropout(X, 1.1, K), ValueError, "p is 1.1; expected a number in"),
        (lambda: dropout(X, math.nan, K), ValueError, "p is nan"),
        (lambda: dropout(X, True, K), TypeError, "p is True"),
        (lambda: dropout(X, torch.tensor(0.5), K), TypeError, r"p is tensor\(0.5"),
        (lambda: dropout(X.long(), 0.5, K), TypeError, "x is a tensor of torch.int64"),
        (lambda: dropout(X, 0.5, 3), TypeError, "key is 3"),
        (
            lambda: dropout(X, 0.5, split_key(K, 3)),
            ValueError,
            r"key has shape \(3, 2\) on cpu, but x has \(4, 3\) on cpu; .* one key per sample",
        ),
        (lambda: dropout(X.to("meta"), 0.5, K), ValueError, "on cpu, but x has .* on meta"),
        (lambda: dropout(X[0, 0], 0.5, K[None]), ValueError, r"key has shape \(1, 2\)"),
    ],
)
def test_arguments_of_a_draw_that_make_no_sense_are_refused(call, error, says):
    with pytest.raises(error, match=says):
        call()
