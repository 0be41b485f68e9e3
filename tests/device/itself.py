"""The device sees what it is there for: that the tests on it could fail."""

import threading

import pytest
import torch

from tests.device.software import nothing_waits, races, recorded


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 0),
    "to the host": lambda x: x.cpu(),
    "a list": lambda x: x.tolist(),
    "from the host": lambda x: torch.tensor(1.0, device="cuda"),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask written by": lambda x: x.index_put_((x > 0,), x.new_ones(())),
    "indices of the host": lambda x: x[torch.tensor([0])],
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "a stream": lambda x: torch.cuda.current_stream().synchronize(),
}
MIXED = {
    "add": lambda x: x + torch.ones(3),
    "in place": lambda x: x.add_(torch.ones(3)),
    "cat": lambda x: torch.cat([x, torch.ones(1)]),
    "stack": lambda x: torch.stack([x[0], torch.ones(())]),
    "foreach": lambda x: torch._foreach_add([x], [torch.ones(3)]),
    "matmul": lambda x: x @ torch.ones(3),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_a_device_raises(name):
    x = torch.ones(3, device="cuda")
    WAITS[name](x)
    with pytest.raises(RuntimeError, match="synchronizing"), nothing_waits():
        WAITS[name](x)


@pytest.mark.parametrize("name", MIXED)
def test_devices_are_not_mixed(name):
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.ones(3, device="cuda"))


def test_a_number_of_the_host_is_an_argument_of_a_kernel():
    with nothing_waits() as seen:
        out = torch.ones(3, device="cuda") * torch.ones(())
    assert out.is_cuda
    assert not seen.copies


def test_a_copy_that_does_not_wait_is_seen():
    number = torch.ones((), pin_memory=True)
    with nothing_waits() as seen:
        number.to("cuda", non_blocking=True)
    assert seen.copies == ["h2d of 1 pinned"]


def test_what_is_launched_is_counted():
    xs = [torch.ones(2, 3, device="cuda") for _ in range(4)]
    with nothing_waits() as seen:
        torch._foreach_add_(xs, xs)  # one kernel
        xs[0].T[1:].unsqueeze(0)  # none
        torch.nn.functional.linear(xs[0], xs[1], xs[2][:, 0])
    assert [*seen.launches] == ["aten::_foreach_add_.List", "aten::addmm.out"]
    assert seen.launches.total() == 2


def test_a_foreach_operation_of_tensors_that_differ_is_many_launches():
    xs = [torch.ones(3, device="cuda") for _ in range(4)]
    halves, numbers = [x.half() for x in xs], [x.sum() for x in xs]
    for several in (halves, numbers, torch.ones((), dtype=torch.float64, device="cuda")):
        with recorded() as seen:
            torch._foreach_mul(xs, several)
        assert seen.launches.total() == 4
    with recorded() as seen:
        torch._foreach_copy_(xs, halves)  # which casts
        torch._foreach_mul_(xs, numbers[0])
    assert seen.launches.total() == 2


def test_new_memory_is_full_of_something():
    assert (torch.empty(8, dtype=torch.uint8, device="cuda") == 0xA5).all()


def test_memory_is_counted_and_may_be_limited():
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.ones(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    y = x + 1
    del x, y
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 2 * 4096
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((before + 4096) / total)
    try:
        x = torch.ones(1000, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            x + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_backward_runs_on_a_thread_of_the_device():
    seen = []
    w = torch.ones(3, device="cuda", requires_grad=True)
    w.register_hook(lambda grad: seen.append(threading.get_ident()))
    (w * w).sum().backward()
    assert len(seen) == 1
    assert seen != [threading.get_ident()]


def test_the_device_draws_numbers_of_its_own():
    torch.cuda.manual_seed(1)
    first = torch.rand(3, device="cuda"), torch.nn.functional.dropout(torch.ones(9, device="cuda"))
    host = torch.get_rng_state()
    torch.cuda.manual_seed(1)
    again = torch.rand(3, device="cuda"), torch.nn.functional.dropout(torch.ones(9, device="cuda"))
    assert all(map(torch.equal, first, again))
    assert torch.equal(torch.get_rng_state(), host)


# Streams ------------------------------------------------------------------------------------------


def test_what_is_copied_to_the_host_comes_once_it_was_waited_for():
    place = torch.zeros(3, pin_memory=True)
    place.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert not torch.equal(place, torch.ones(3))
    torch.cuda.current_stream().synchronize()
    assert torch.equal(place, torch.ones(3))


def on_side(work, *, first=True, then=True):
    """Work on another stream, before and after which one may wait for the other."""
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    if first:
        side.wait_stream(here)
    with torch.cuda.stream(side):
        out = work()
    if then:
        here.wait_stream(side)
    return out, side


def test_streams_that_wait_for_each_other_do_not_race():
    x = torch.ones(3, device="cuda")
    with recorded() as seen:
        y, side = on_side(lambda: x + 1)
    y.record_stream(torch.cuda.current_stream())
    x.add_(y)
    assert not races()
    assert seen.of("launch") == [f"launch aten::add.out @{side.stream_id}"]


def test_reading_what_another_stream_writes_is_a_race():
    x = torch.ones(3, device="cuda")
    on_side(lambda: x + 1, first=False)
    assert "uses what stream 0 wrote" in races()[0]


def test_writing_over_what_another_stream_reads_is_a_race():
    x = torch.ones(3, device="cuda")
    on_side(lambda: x + 1, then=False)
    x.zero_()
    assert "writes over what stream" in races()[0]
    torch.cuda.synchronize()  # before its memory is freed


def test_freeing_what_another_stream_uses_is_a_race():
    def use(x, record):
        _, side = on_side(lambda: x + 1, then=False)
        if record:
            x.record_stream(side)

    use(torch.ones(3, device="cuda"), True)
    assert not races()
    use(torch.ones(3, device="cuda"), False)
    assert "record_stream is missing" in races()[0]
