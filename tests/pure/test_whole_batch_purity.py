"""A module that takes a whole batch in microbatches is not touched, and threads do not meet."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from tests.draws import generator
from tests.pure import resnets


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]
X = torch.randn(6, 4, generator=generator(0))


def gradient(fn, params, x=X):
    def loss(params):
        out, buffers = fn.apply(params, fn.buffers, x)
        return out.square().mean(), buffers

    return torch.func.grad(loss, has_aux=True)(params)


def scaled(params, by):
    return {name: by * p for name, p in params.items()}


def test_the_module_and_what_is_given_stay_as_they_are():
    module = resnets.in_place()  # it writes to its input and to what it computes
    fn = pa.functional(module, microbatch_size=4)
    before = [dict(vars(part)) for part in module.modules()]
    with unchanged((module.state_dict(), fn.params, fn.buffers, X)):
        gradient(fn, fn.params)
    for part, then in zip(module.modules(), before, strict=True):
        assert vars(part).keys() == then.keys()
        assert all(vars(part)[name] is value for name, value in then.items())


def test_new_buffers_share_no_memory_with_those_that_were_given():
    for module in (nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()):
        fn = pa.functional(module, microbatch_size=4)
        _, new = fn.apply(fn.params, fn.buffers, X)
        for name, x in new.items():
            assert x.data_ptr() != fn.buffers[name].data_ptr()


@pytest.mark.slow
@pytest.mark.promise("threads")
def test_threads_get_the_gradients_of_their_own_parameters():
    """All of them begin with a module that nobody has traced yet."""
    fn = pa.functional(resnets.Shared(), microbatch_size=4)
    several = [scaled(fn.params, 1 + i / 4) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda params: gradient(fn, params), several)]
    assert_trees_bitwise_equal(found, [gradient(fn, params) for params in several])


@pytest.mark.slow
@pytest.mark.promise("threads")
def test_threads_that_trace_at_once_leave_torch_as_it_was():
    """Each of them in a mode of its own thread."""
    before = nn.Module.__call__, nn.Module.__getattr__
    modules = [resnets.resnet10(2) for _ in range(4)]
    images = torch.randn(4, 3, 8, 8, generator=generator(1))

    def run(module):
        fn = pa.functional(module, microbatch_size=4)
        return fn.apply(fn.params, fn.buffers, images)[0]

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(run, modules)]
    assert (nn.Module.__call__, nn.Module.__getattr__) == before
    assert_trees_bitwise_equal(found, [run(module) for module in modules])


@pytest.mark.slow
@pytest.mark.promise("threads")
def test_other_threads_call_modules_while_one_is_traced():
    """The one that is traced among them, and its parts."""
    module = resnets.resnet10(2)
    images = torch.randn(4, 3, 8, 8, generator=generator(1))
    part, plain = module.blocks[0].convs[0], nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    weight, h = part.weight, torch.randn(2, 2, 4, 4, generator=generator(2))
    calls = [
        lambda: torch.equal(part(h), nn.functional.conv2d(h, weight, padding=1)),
        lambda: part.weight is weight,
        lambda: isinstance(plain(X), Tensor),
    ]
    done, wrong = threading.Event(), []

    def call():
        while not done.is_set():
            for n, right in enumerate(calls):
                try:
                    if not right():
                        wrong.append(n)
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            fn = pa.functional(module, microbatch_size=4)
            fn.apply(fn.params, fn.buffers, images)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
