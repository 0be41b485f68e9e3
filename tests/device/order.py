"""Samples that are kept on the host go to and from the device over one stream, in order.

That two streams race fails every test on the device: see ``in_order``, in ``software``.
"""

import pytest
import torch

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.device.software import recorded
from tests.device.world import exact_pairs, moved, whole_numbers


GRADIENTS = pytest.mark.parametrize("gradient", [pa.grad, torch.func.grad], ids=["pa", "torch"])


def called(gradient, keep):
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    return gradient(lambda p, b: exact_pairs(p, b, microbatch_size=3, keep=keep))(params, batch)


@GRADIENTS
def test_rows_kept_on_the_host_have_the_bits_of_those_on_the_device(gradient):
    assert_trees_bitwise_equal(called(gradient, "host"), called(gradient, "device"))


@GRADIENTS
def test_a_sequence_kept_on_the_host_has_the_bits_of_one_on_the_device(gradient):
    """Its carries lie there too, and the outputs; the last carry is on the device."""
    w, x = torch.tensor(2.0, device="cuda"), torch.arange(1.0, 12, device="cuda")

    def of(keep):
        run = pa.scan(lambda w, h, x: (h + (w * x).sum(), h * x), chunk_size=3, keep=keep)
        h, ys = run(w, torch.ones((), device="cuda"), x)
        assert h.is_cuda
        assert ys.is_cuda == (keep == "device")
        loss = lambda w, x: run(w, w * 0 + 1, x)[1].cuda().sum() + run(w, w, x)[0]  # noqa: E731
        return gradient(loss)(w, x)

    assert torch.equal(of("host"), of("device"))


def test_rows_that_come_back_to_the_host_may_be_read_there():
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    options = {"microbatch_size": 3, "keep": "host"}
    got = pa.microbatch(lambda p, b: b["x"] @ p["w"], **options)(params, batch)
    assert not got.is_cuda
    assert torch.equal(got + 0, (batch["x"] @ params["w"]).cpu())


@GRADIENTS
def test_pieces_go_over_one_other_stream_in_all_calls(gradient):
    sides = []
    for _ in range(3):
        with recorded() as seen:
            called(gradient, "host")
        sides += [line.partition("@")[2] for line in seen.copies if "@" in line]
    assert len(sides) > 3 * 4  # of a batch of four pieces
    assert len(set(sides)) == 1


def test_a_loss_on_a_stream_of_the_caller():
    """The hooks that add gradients up run on the stream of the forward pass."""
    params, batch = (moved(tree, "cuda") for tree in whole_numbers())
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()

    def step():
        return pa.grad_and_value(lambda p, b: exact_pairs(p, b, 3), microbatch_size=3, check=False)(
            params, batch
        )

    want = step()
    side.wait_stream(here)
    with torch.cuda.stream(side), recorded() as seen:
        got = step()
    here.wait_stream(side)
    assert {line.partition("@")[2] for line in seen.of("launch")} == {str(side.stream_id)}
    assert_trees_bitwise_equal(got, want)
