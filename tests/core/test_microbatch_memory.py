"""Under every nest of transforms a microbatched function takes the memory of one microbatch.

In bytes of tensors that are alive, at 64 microbatches and at 4 of the same size: the peak may grow
by no more than a tenth, and by what inputs, outputs and cotangents take of themselves. Those are
what the same nest takes of plain code around one layer.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pureaccum as pa
from pureaccum._core.auto_size import counting
from tests.core.nests import NESTS


pytestmark = [pytest.mark.transforms, pytest.mark.promise("closure")]
WIDTH, SIZE, LAYERS = 48, 16, 6
Params = list[Tensor]
Loss = Callable[[Params, Tensor], Tensor]


def network(params, x):
    for w in params:
        x = torch.tanh(x @ w)
    return x


def one_layer(params, x):
    return torch.tanh(x @ sum(params))


FORMS = {  # of rows: what comes out of a microbatch, how it is reduced, and what becomes of it
    "rows": (lambda z: z, "concat", lambda z: z.square().mean() + z.mean(0).square().sum()),
    "sums": (
        lambda z: (z.sum(0), z.square().sum()),
        "sum",
        lambda out: out[0].square().sum() * out[1],
    ),
    # two numbers, so that the gradient of neither is taken while it is computed
    "totals": (lambda z: (z.sum(), z.square().sum()), "sum", lambda out: out[0] * out[1]),
}


def made(form, f, cut):
    """A loss that couples samples, in plain code or of microbatches."""
    if form == "captured":
        return captured(f, cut)
    outputs, reduce, end = FORMS[form]
    of = lambda params, x: outputs(f(params, x))  # noqa: E731
    whole = pa.microbatch(of, microbatch_size=SIZE, reduce=reduce) if cut else of
    return lambda params, x: end(whole(params, x))


def captured(f, cut):
    """Samples, of parameters from the closure."""

    def loss(params, x):
        of = lambda x: f(params, x)  # noqa: E731
        whole = pa.microbatch(of, microbatch_size=SIZE, batch_argnums=0) if cut else of
        return FORMS["rows"][2](whole(x))

    return loss


def peak(nest, loss, pieces):
    torch.manual_seed(0)
    params = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(pieces * SIZE, WIDTH)
    with counting() as live:
        NESTS[nest](loss, params, x)
    return live.peak


def grows(nest, form, cut):
    """Beyond the law."""
    plain = made(form, one_layer, cut=False)
    of_themselves = peak(nest, plain, 64) - peak(nest, plain, 4)
    here = made(form, network, cut)
    return peak(nest, here, 64) > 1.1 * peak(nest, here, 4) + of_themselves


def cases():
    """Each nest of each form: not all for every change, nor all of what a function captures.

    That is followed in reverse mode, if it is a leaf; in a meta-gradient it is computed.
    """
    computed = ("jvp", "vmap", "meta", "backward of backward")
    for form in ("rows", "sums", "captured"):
        for i, nest in enumerate(NESTS):
            marks = [pytest.mark.slow] if i % 2 or form != "rows" else []
            if form == "captured" and any(word in nest for word in computed):
                marks.append(pytest.mark.given_up("captured"))
            yield pytest.param(form, nest, marks=marks, id=f"{form}-{nest}")


@pytest.mark.parametrize(("form", "nest"), [*cases()])
def test_a_nest_of_transforms_takes_the_memory_of_one_microbatch(nest, form):
    assert not grows(nest, form, cut=True)


def test_a_function_of_two_numbers_takes_the_memory_of_one_microbatch():
    assert not grows("backward", "totals", cut=True)
    assert grows("backward", "totals", cut=False)  # the control


@pytest.mark.parametrize("nest", [name for name in NESTS if name not in ("value", "jvp")])
def test_the_whole_batch_takes_more(nest):
    """The control: the same nest of the function that is not cut fails the law."""
    assert grows(nest, "rows", cut=False)


def test_rows_that_are_views_keep_nothing_of_what_they_are_views_of():
    """Samples of a few bytes, each of which lies in the memory of a whole activation."""
    first = pa.microbatch(lambda x: (x * 2)[:, :1], microbatch_size=8, batch_argnums=0)
    one, x = 8 * 4096 * 4, torch.ones(32 * 8, 4096)
    with counting() as live, torch.no_grad():
        first(x)
    assert live.peak <= 2 * one


@pytest.mark.slow
def test_gradients_of_a_microbatch_are_gone_while_the_next_one_is_computed():
    """Small ones, too, which are added together."""
    w, alive = torch.ones(13, 17, requires_grad=True), list[int]()

    def of(w, x):
        tensors = (y for y in gc.get_objects() if type(y) is Tensor and not y.is_nested)
        alive.append(sum(y.shape == w.shape for y in tensors))
        return x @ w

    pa.microbatch(of, microbatch_size=2)(w, torch.ones(10, 13)).sum().backward()
    second, *others = alive[-4:]  # the first one's gradients are the sums
    assert others == [second] * 3
