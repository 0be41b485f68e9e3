"""Each shortcut can be switched off, and the same bits come out.

A switch puts the plain form in the place of a fast one; one that is never reached is no switch, and
fails. What is not here has bits of its own, within a bound: the
gradients of samples that come from layers, and an optimizer's formula beside torch's kernel.
"""

import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

import pureaccum as pa
from pureaccum._core.seams import of_total
from pureaccum._core.writes import unguarded
from pureaccum.testing import assert_trees_bitwise_equal
from tests.zoo import fits_networks, fits_programs, fits_sums  # noqa: F401
from tests.zoo.species import ZOO


pytestmark = [pytest.mark.exact, pytest.mark.mechanism]
SIZE = 5


# The switches ------------------------------------------------------------------------------


def added(totals, terms, alpha=1):
    for total, term in zip(totals, terms, strict=True):
        total.add_(term, alpha=alpha)


def norms_one_by_one(tensors, _, dtype):
    return tuple(torch.linalg.vector_norm(x, dtype=dtype) for x in tensors)


def weighed_anew(rule, unit):
    return lambda *given: of_total(rule, unit)(*given)


def never(*_):
    return False


class Switch(NamedTuple):
    """Where a shortcut is, the modules that know its name, and what stands in for it."""

    modules: str
    name: str
    plain: Any
    around: Callable[[], Any] = nullcontext


def carefully(summed, rule):
    return summed(rule)


KERNELS = "_base.torch_internals.kernels"
SWITCHES = {
    "sums are written to": Switch("_base.torch_internals.modes", "may_add_in_place", never),
    "autograd adds gradients itself": Switch(
        "_core.engines", "_straight_into", lambda _, otherwise: otherwise
    ),
    "first gradients become the sums": Switch(KERNELS, "owns_its_memory", never),
    "weighings are kept": Switch("_core.seams _core.windows", "of_total", weighed_anew),
    "small gradients go together": Switch(KERNELS, "foreach_add_", added),
    "leaves go together": Switch("_base.trees _base.states", "at_once", never),
    "norms go together": Switch(KERNELS, "foreach_norm", norms_one_by_one),
    "sums are multiples of a unit": Switch("_core.weights", "power_of_two", lambda _: 1.0),
    "skipping speculates": Switch("_core.whole_batch", "speculating", carefully),
    "numbers are the host's": Switch("_base.trees", "on_host", lambda *scalars: [*scalars]),
    "a norm tells what is finite": Switch("_base.trees", "seen_finite", never),
    "large leaves are added by hooks": Switch("_core.weights", "LARGE", 0),
    "temporaries have a longest size": Switch("_core.weights", "CHUNK", 1),
    "structures are known": Switch("_core.structures", "structure_of", lambda *_: None),
    "a loss is guarded": Switch("", "", None, unguarded),
}


@contextmanager
def switched(switch, patch):
    """Run in the plain form; the list has an entry for each time that it was asked for."""
    reached = []

    def plain(*args, **kwargs):
        reached.append(switch.name)
        return switch.plain(*args, **kwargs)

    for name in switch.modules.split():
        module = import_module(f"pureaccum.{name}")
        patch.setattr(module, switch.name, plain if callable(switch.plain) else switch.plain)
    if not callable(switch.plain):
        reached.append(switch.name)
    with switch.around():
        yield reached
    patch.undo()


# Programs ----------------------------------------------------------------------------------

Program = Callable[..., Any]


def stepped(loss, params, batch, has_aux=False, **options):
    optimizer = pa.chain(pa.clip_by_global_norm(0.5), pa.adamw(0.125))
    step = pa.make_step(loss, optimizer, has_aux=has_aux, microbatch_size=SIZE, **options)
    state = step.init(params)
    for _ in range(2):
        state, info = step(state, batch)
    return state, info._replace(aux=())


def streamed(loss, params, batch, has_aux=False, **options):
    step = pa.make_step(loss, pa.sgd(0.125, momentum=0.5), has_aux=has_aux, donate=True, **options)
    state = step.init(params)
    window = step.begin(state)
    for part in pa.microbatches(batch, SIZE):
        window = step.update(state, window, part)
        window = window[0] if has_aux else window
    return step.apply(state, window)


def accumulated(loss, params, batch, has_aux=False, **options):
    acc = pa.accumulator(loss, has_aux, **options)
    state = acc.init(params)
    for part in pa.microbatches(batch, SIZE):
        state = acc.update(state, params, part)
        state = state[0] if has_aux else state
    return acc.finalize(state)


def taken(size, **more):
    def program(loss, params, batch, **options):
        return pa.grad_and_value(loss, microbatch_size=size, **options, **more)(params, batch)

    return program


def autograd(program, **more):
    return lambda *args, **options: program(*args, engine="autograd", **options, **more)


PROGRAMS = {
    "grad": taken(SIZE, aux_reduction="last"),
    "grad of all": taken(None, aux_reduction="last"),
    "skip": taken(SIZE, engine="autograd", nonfinite="skip", aux_reduction="last"),
    "step": lambda *args, **options: stepped(*args, aux_reduction="last", **options),
    "scaled": lambda *args, **options: stepped(
        *args,
        aux_reduction="last",
        loss_scale=pa.dynamic_loss_scale(2.0**4),
        nonfinite="skip",
        **options,
    ),
    "stream": streamed,
    "accumulator": accumulated,
}
FIT = [species for species in ZOO if not species.kind]
ROUNDED = {  # where the plain form is another formula
    # torch.func's own gradient is made of operations that have derivatives.
    "no graph of gradients": {"group_norm", "lstm", "weight_norm"},
    # What may be left out is coalesced first: samples that come twice are added up before the sum.
    "skipping speculates": {"sparse_embedding"},
    "sums are written to": {"sparse_embedding"},
}


def ran(program, at):
    """What comes out, and any error in words: of a loss, parameters and a batch made anew."""
    loss, params, batch, options = FIT[at].make(FIT[at].dtypes[0], seed=0)
    torch.manual_seed(1)
    try:
        return PROGRAMS[program](loss, params, batch, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__


usual = cache(ran)  # with every shortcut: the same for all switches


def compared(key, some, n, patch):
    """Run programs with a shortcut and without; how often the plain form was asked for.

    Of the programs every loss has one in ``n``, each in its turn: over all losses a shortcut meets
    every program, and over all shortcuts a loss does.
    """
    asked, switch, turn = 0, SWITCHES[key], [*SWITCHES].index(key)
    for species in some:
        if species.name in ROUNDED.get(key, ()):
            continue
        at = FIT.index(species)
        for name in [name for i, name in enumerate(PROGRAMS) if (i + at + turn) % n == 0]:
            want = usual(name, at)
            with switched(switch, patch) as reached:
                got = ran(name, at)
            asked += len(reached)
            try:
                assert_trees_bitwise_equal(got, want)
            except AssertionError as error:
                raise AssertionError(f"{species.name}, {name}: {error}") from None
    return asked


KNOWN = {"mlp", "no_weight_and_nan", "a_sum", "with_aux"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
def test_without_a_shortcut_the_bits_are_the_same(name, monkeypatch):
    asked = compared(name, [x for x in FIT if x.name in KNOWN], 1, monkeypatch)
    assert asked or not SWITCHES[name].modules


def test_a_switch_reaches_whoever_knows_the_shortcut():
    """Else some of its callers would be compared with themselves."""
    for switch in SWITCHES.values():
        named = {f"pureaccum.{name}" for name in switch.modules.split()}
        ours = {name: x for name, x in sys.modules.items() if name.startswith("pureaccum.")}
        assert {name for name, x in ours.items() if switch.name in vars(x)} == named, switch


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
def test_without_a_shortcut_the_bits_of_every_loss_are_the_same(name, monkeypatch):
    compared(name, FIT, 4, monkeypatch)


def whole(params, batch):
    """A loss whose gradients are whole numbers, divided by a power of two."""
    return (batch["x"] @ params["w"] + params["b"]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 23])
def test_several_microbatches_at_once_have_the_bits_of_one_at_a_time(rows, monkeypatch):
    """In compiled code, of whole numbers: several are added up in another order."""
    params = {"w": torch.arange(-2.0, 2.0), "b": torch.tensor(3.0)}
    batch = {"x": (torch.arange(4.0 * rows).reshape(rows, 4) % 7) - 3}
    scan = import_module("pureaccum._step.scan")
    found = []

    def stepped_once(how_many):
        monkeypatch.setattr(scan, "how_many", how_many)
        options = {"microbatch_size": 2, "compile": {"backend": "eager"}}
        step = pa.make_step(whole, pa.sgd(2.0**-3, momentum=0.5), **options)
        return step(step.init(params), batch)

    how_many = scan.how_many
    want = stepped_once(lambda *args: found.append(how_many(*args)) or found[-1])
    assert max(found) > 1
    assert_trees_bitwise_equal(stepped_once(lambda *_: 1), want)
