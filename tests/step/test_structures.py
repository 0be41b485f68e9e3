"""What was decided for one structure is used for no other: one thing changes at a time.

A step that has met the structure before gives, or raises, what one does that remembers nothing.
"""

from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.parametrizations import weight_norm

import pureaccum as pa
from pureaccum._core import structures
from pureaccum._step import structure
from pureaccum.testing import assert_trees_bitwise_equal
from tests.problems import Functions, Operations


pytestmark = [pytest.mark.purity, pytest.mark.promise("purity")]


class Program(NamedTuple):
    """A step that has met a structure, and what it is called with next."""

    net: nn.Module
    step: Any
    state: Any
    batch: Any
    sums: Any  # of an accumulator, and what it was made from
    around: ExitStack


def begun(met=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2))
    fn = pa.functional(net)

    def loss(params, batch, buffers):
        out, new = fn.apply(params, buffers, batch["x"])
        rows = (out - batch["y"]).square().mean(1)
        times = 2.0 if batch.get("flag") else 1.0
        return rows.mean() * times, (new, {"order": "".join(params)[:40], "rows": rows.detach()})

    step = pa.make_step(
        loss,
        pa.chain(pa.clip_by_global_norm(1.0), pa.adamw(1e-2)),
        microbatch_size=4,
        has_aux=True,
        aux_reduction={"order": "last", "rows": "concat"},
        buffers="sequential",
        loss_scale=pa.dynamic_loss_scale(init_scale=8.0),
        check=False,
    )
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 2)}
    state = step.init(fn.params, buffers=fn.buffers)
    acc = pa.accumulator(lambda params, batch: loss(params, batch, fn.buffers)[0], check=False)
    sums = acc, acc.init(fn.params)
    program = Program(net, step, state, batch, sums, ExitStack())
    for way in WAYS.values() if met else ():
        way(program)
    return program


def updated(program):
    (acc, state), params = program.sums, program.state.params
    for donate in (False, True):
        state = acc.update(state, params, program.batch, donate=donate)
    return state


WAYS = {
    "whole": lambda program: program.step(program.state, program.batch),
    "streamed": lambda program: program.step.window(program.state, [program.batch] * 2),
    "updated": updated,
}


# What changes ------------------------------------------------------------------------------------


def params(change):
    return state(lambda own: own._replace(params=change(dict(own.params))))


def state(change):
    return lambda program: program._replace(state=change(program.state))


def batch(change):
    return lambda program: program._replace(batch=change(dict(program.batch)))


def module(change):
    def changed(program):
        change(program.net)
        return program

    return changed


def around(context):
    def changed(program):
        program.around.enter_context(context())
        return program

    return changed


def a_leaf(change):
    return params(lambda tree: tree | {"0.weight": change(tree["0.weight"])})


def rows(change):
    return batch(lambda tree: tree | {"x": change(tree["x"])})


class Sub(Tensor):
    """A subclass that does nothing else."""


@contextmanager
def in_double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def swapped(net):
    net[0] = nn.Linear(3, 4)


def replaced(net):
    net[0].weight = nn.Parameter(torch.ones(4, 3))


def optimizers(change):
    """Of a chain, whose last part keeps moments and a rate."""
    return state(lambda own: own._replace(opt_state=(own.opt_state[0], change(own.opt_state[1]))))


def a_moment(change):
    def changed(adam):
        return adam._replace(exp_avg=adam.exp_avg | {"0.weight": change(adam.exp_avg["0.weight"])})

    return optimizers(changed)


def another_rate(rate):
    return optimizers(lambda adam: adam._replace(lr=torch.tensor(rate)))


CHANGES = {
    "nothing": lambda program: program,
    # the batch
    "more rows": batch(lambda tree: {key: torch.cat([x, x]) for key, x in tree.items()}),
    "a shorter last microbatch": batch(lambda tree: {key: x[:7] for key, x in tree.items()}),
    "one microbatch": batch(lambda tree: {key: x[:3] for key, x in tree.items()}),
    "no rows": batch(lambda tree: {key: x[:0] for key, x in tree.items()}),
    "rows that disagree": rows(lambda x: x[:5]),
    "rows of another dtype": rows(Tensor.double),
    "rows of another stride": rows(lambda x: x.T.contiguous().T),
    "rows that are expanded": rows(lambda x: x[:1].expand(8, 3)),
    "rows that are views of params": lambda program: program._replace(
        batch=program.batch | {"y": program.state.params["3.weight"].T.repeat(2, 1)}
    ),
    "rows that require grad": rows(lambda x: x.clone().requires_grad_()),
    "rows of a subclass": rows(lambda x: x.as_subclass(Sub)),
    "a number among the rows": rows(lambda _: torch.tensor(1.0)),
    "sparse rows": rows(Tensor.to_sparse),
    "nested rows": rows(lambda x: torch.nested.nested_tensor([*x])),
    "a flag beside the rows": batch(lambda tree: tree | {"flag": True}),
    "another flag": batch(lambda tree: tree | {"flag": False}),
    "names beside the rows": batch(lambda tree: tree | {"names": [*"abcdefgh"]}),
    "another order": batch(lambda tree: {"y": tree["y"], "x": tree["x"]}),
    "no batch": batch(lambda _: {}),
    # params
    "params in another order": params(lambda tree: dict(reversed(tree.items()))),
    "a leaf less": params(lambda tree: {k: x for k, x in tree.items() if k != "3.bias"}),
    "a leaf more": params(lambda tree: tree | {"more": torch.ones(2)}),
    "a leaf of another dtype": a_leaf(Tensor.double),
    "an integer leaf": a_leaf(Tensor.long),
    "a leaf of another shape": a_leaf(lambda x: x[:, :2]),
    "a leaf of another stride": a_leaf(lambda x: x.T.contiguous().T),
    "an expanded leaf": a_leaf(lambda x: x[:1].expand(4, 3)),
    "a leaf that requires grad": a_leaf(lambda x: x.clone().requires_grad_()),
    "a leaf of a subclass": a_leaf(lambda x: x.as_subclass(Sub)),
    "a Parameter": a_leaf(nn.Parameter),
    "a leaf that is none": a_leaf(lambda _: "weight"),
    "leaves that are one": params(lambda tree: tree | {"1.bias": tree["1.weight"]}),
    "an ordered tree": params(lambda tree: list(tree.values())),
    # the state
    "a moment of another shape": a_moment(lambda x: x[:, :2]),
    "a moment of another dtype": a_moment(Tensor.double),
    "the state of another optimizer": state(lambda own: own._replace(opt_state=((), ()))),
    "no loss scale": state(lambda own: own._replace(loss_scale=())),
    "no buffers": state(lambda own: own._replace(buffers=())),
    "a buffer of another dtype": state(
        lambda own: own._replace(
            buffers=own.buffers | {"1.running_mean": own.buffers["1.running_mean"].double()}
        )
    ),
    "no key": state(lambda own: own._replace(key=torch.zeros(3, dtype=torch.int64))),
    "no state": state(lambda own: own.params),
    "another rate": another_rate(torch.nan),
    "a rate in float32": another_rate(0.5),
    # the module
    "a module in eval mode": module(nn.Module.eval),
    "a part in eval mode": module(lambda net: net[1].eval()),
    "a hook": module(lambda net: net[0].register_forward_hook(lambda _, __, out: 2 * out)),
    "a swapped part": module(swapped),
    "a replaced weight": module(replaced),
    "a parametrized weight": module(lambda net: weight_norm(net[0])),
    "a frozen weight": module(lambda net: net[0].weight.requires_grad_(False)),
    "another attribute": module(lambda net: setattr(net[1], "momentum", 0.7)),
    # what is around
    "autocast": around(lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast without its cache": around(
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    ),
    "no_grad": around(torch.no_grad),
    "inference mode": around(torch.inference_mode),
    "saved-tensor hooks": around(save_on_cpu),
    "forward AD": around(forward_ad.dual_level),
    "a dispatch mode": around(Operations),
    "a function mode": around(Functions),
    "anomaly mode": around(torch.autograd.detect_anomaly),
    "another default dtype": around(in_double),
}


def outcome(change, way, met=True):
    """What the next two calls give, or the error that they end in."""
    program = begun(met)
    try:
        program = change(program)
        with program.around:
            return [WAYS[way](program) for _ in range(2)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def forget(patch):
    patch.setattr(structures, "structure_of", lambda *_: None)


@pytest.mark.given_up("caches")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_remembered_changes_nothing(change, way, monkeypatch):
    came = outcome(CHANGES[change], way)
    forget(monkeypatch)
    wanted = outcome(CHANGES[change], way)
    if isinstance(wanted, str):
        assert came == wanted
    else:
        assert_trees_bitwise_equal(came, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_was_called_before_gives_what_a_new_one_gives(change):
    for way in WAYS:
        came, wanted = (outcome(CHANGES[change], way, met) for met in (True, False))
        if isinstance(wanted, str):
            assert came == wanted
        else:
            assert_trees_bitwise_equal(came, wanted)


@pytest.mark.given_up("caches")
@pytest.mark.parametrize("change", ["nothing", "more rows", "params in another order", "no_grad"])
def test_a_structure_is_examined_once(change, monkeypatch):
    """Else the test above would compare one way with itself."""
    examined, examine = list[int](), structure._examined
    monkeypatch.setattr(
        structure, "_examined", lambda *given: (examined.append(1), examine(*given))[1]
    )
    outcome(CHANGES[change], "whole")
    assert len(examined) == (2 if change == "more rows" else 1)


@pytest.mark.promise("policy")
def test_a_device_that_knows_no_autocast():
    """The first call finds the structure, the others know it."""
    step = pa.make_step(
        lambda params, x: (x @ params).square().mean(), pa.sgd(0.1), microbatch_size=2, check=False
    )
    state, rows = step.init(torch.ones(3, device="meta")), torch.ones(4, 3, device="meta")
    for _ in range(3):
        state, _ = step(state, rows)
    assert state.params.is_meta


@pytest.mark.given_up("caches")
def test_a_mode_around_the_first_call_decides_nothing_for_the_next():
    """Under it nothing is written in place; without it a large gradient is added as it comes."""
    net = torch.ones(600, 600)
    step = pa.make_step(lambda w, x: (x @ w).square().mean(), pa.sgd(0.1), microbatch_size=1)
    state, rows = step.init(net), torch.ones(2, 600)
    with Operations():
        step(state, rows)
    (decided,) = step.whole.args[0].structures.known.values()
    assert decided.kinds.large == [0]


@pytest.mark.promise("donation")
def test_a_donated_state_outlives_an_error_before_anything_is_added():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            """Nothing is saved."""

        @staticmethod
        def backward(ctx, *grads):
            if fails:
                raise MemoryError
            return grads[0]

    fails, rows, params = False, torch.ones(4, 2), {"w": torch.ones(2), "v": torch.ones(2)}
    for engine in "func", "autograd":
        acc = pa.accumulator(
            lambda p, x: Fails.apply(x * p["w"] * p["v"]).square().sum(),
            reduction="sum",  # its gradients enter the sums as they come
            engine=engine,
        )
        state = acc.update(acc.init(params), params, rows)
        want = acc.finalize(state)
        fails = True
        with pytest.raises(MemoryError):
            acc.update(state, params, rows, donate=True)
        fails = False
        assert_trees_bitwise_equal(acc.finalize(state), want)


@pytest.mark.promise("donation")
def test_what_was_given_up_is_refused_where_its_structure_is_known():
    step = pa.make_step(
        lambda params, x: (params["w"] * x).square().mean(), pa.sgd(0.1), donate=True
    )
    rows, first = torch.ones(4, 2), step.init({"w": torch.ones(2)})
    second, _ = step(first, rows)
    third, _ = step(second, rows)
    for given_up in first, second:
        with pytest.raises(RuntimeError, match="given up"):
            step(given_up, rows)
    step(third, rows)
