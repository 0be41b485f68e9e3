"""Under every nest of transforms ``pa.scan`` takes the memory of one chunk, and of its carries.

In bytes of tensors that are alive, at 64 chunks and at 4 of the same size: the peak may grow by no
more than a tenth, and by what inputs, outputs, carries and cotangents take of themselves, which is
what the same nest takes of plain code with one layer. The plain loop with six layers fails.
"""

from weakref import ref

import pytest
import torch

import pureaccum as pa
from pureaccum._core.auto_size import counting
from tests.core.nests import NESTS
from tests.tables import every_night


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
WIDTH, SIZE, LAYERS = 48, 16, 6


def chunk(params, h, x):
    """Some layers over the steps of a chunk, which see a carry of one row."""
    z = x + h
    for w in params:
        z = torch.tanh(z @ w)
    return z.mean(0), z


def one_layer(params, h, x):
    z = torch.tanh((x + h) @ sum(params))
    return z.mean(0), z


def looped(f):
    """The same loop without ``pa.scan``."""

    def loop(params, h, x):
        outs = []
        for part in x.split(SIZE):
            h, z = f(params, h, part)
            outs.append(z)
        return h, torch.cat(outs)

    return loop


RUNS = {
    "scan": pa.scan(chunk, chunk_size=SIZE),
    "captured": lambda params, h, x: pa.scan(lambda _, h, x: chunk(params, h, x), chunk_size=SIZE)(
        (), h, x
    ),
    "scan of a scan": pa.scan(pa.scan(chunk, chunk_size=SIZE), chunk_size=8 * SIZE),
}


def loss_of(run):
    def loss(params, x):
        h, z = run(params, x[0] * 0, x)
        return z.square().mean() + z.mean(0).square().sum() + h.sum()

    return loss


def peak(nest, run, chunks):
    torch.manual_seed(0)
    params = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(chunks * SIZE, WIDTH)
    with counting() as live:
        NESTS[nest](loss_of(run), params, x)
    return live.peak


def grows(nest, run, few=4):
    """Beyond the law."""
    thin = one_layer, looped(one_layer)
    of_themselves = max(peak(nest, run, 64) - peak(nest, run, few) for run in thin)
    return peak(nest, run, 64) > 1.1 * peak(nest, run, few) + of_themselves


# A sequence is no batch to these.
USED = [it for it in NESTS if "pa." not in it and "step" not in it]


@pytest.mark.slow
@pytest.mark.parametrize("nest", USED)
def test_a_nest_of_transforms_takes_the_memory_of_one_chunk(nest):
    assert not grows(nest, RUNS["scan"])


# What it captures, as forward AD follows it, or made before the call.
GIVEN_UP = "jvp", "jvp of grad", "grad of jvp", "meta-gradient"
STILL = [it for it in USED if it not in GIVEN_UP]


@pytest.mark.slow
@pytest.mark.parametrize(
    "nest",
    [
        *every_night(STILL, but=("backward",)),
        *(
            pytest.param(
                it,
                marks=[
                    pytest.mark.given_up("captured"),
                    *([] if it == "jvp of grad" else [pytest.mark.nightly]),
                ],
            )
            for it in GIVEN_UP
        ),
    ],
)
def test_so_it_does_where_parameters_are_captured(nest):
    assert not grows(nest, RUNS["captured"])


@pytest.mark.slow
def test_a_scan_of_scans_takes_the_memory_of_one_inner_chunk_and_the_carries():
    assert not grows("backward", RUNS["scan of a scan"], few=8)


OTHERS = [it for it in USED if it not in ("value", "jvp")]


@pytest.mark.slow
@pytest.mark.parametrize("nest", every_night(OTHERS, but=("grad", "backward", "jvp of grad")))
def test_the_loop_takes_more(nest):
    """The control: it fails the law."""
    assert grows(nest, looped(chunk))


def test_a_carry_of_the_length_of_the_sequence_is_kept_at_each_chunk():
    """The keys of full attention: it saves nothing, as the docstring says."""

    def attention(_, carry, x):
        keys, at = carry["keys"], int(carry["at"])
        keys = torch.cat([keys[:at], x, keys[at + len(x) :]])
        seen = keys[: at + len(x)]
        return {"keys": keys, "at": carry["at"] + len(x)}, (x @ seen.T).softmax(-1) @ seen

    x = torch.randn(32 * SIZE, WIDTH, requires_grad=True)
    carry = {"keys": torch.zeros(32 * SIZE, WIDTH), "at": torch.tensor(0)}
    with counting() as live:
        pa.scan(attention, chunk_size=SIZE)((), carry, x)
    assert live.peak > 31 * x.nbytes


def test_nothing_of_a_chunk_is_alive_while_the_next_one_is_computed():
    """Forwards, and back."""
    made, alive = [], []

    def noted(w, h, x):
        alive.append(sum(y() is not None for y in made))
        z = torch.tanh(x @ w)
        made.append(ref(z))
        return h + z.mean(), z.sum()

    w = torch.ones(17, 13, requires_grad=True)
    run = pa.scan(noted, chunk_size=SIZE, reduce="sum")
    h, total = run(w, torch.zeros(()), torch.ones(4 * SIZE, 17))
    (h + total).backward()
    assert len(alive) > 8  # four chunks, each of them again, and the first one observed
    assert not any(alive)
