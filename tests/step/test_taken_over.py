"""A run of torch's goes on here, and a run of ours there, with the same bits."""

import copy
import io
import re
from functools import cache
from typing import NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal, unchanged
from pureaccum.testing.strategies import seeds
from tests.draws import generator


pytestmark = [pytest.mark.parity, pytest.mark.promise("optimizers")]


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    net[0].bias.requires_grad_(False)  # frozen, and held by torch's optimizer all the same
    return net


NET = network()
FN, CLIP = pa.functional(NET), pa.clip_by_global_norm(1e9)
CASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, pa.sgd(0.1)),
    "momentum": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.75}, pa.sgd(0.1, momentum=0.75)),
    "adam": (torch.optim.Adam, {"lr": 0.25}, pa.adam(0.1)),
    "adamw": (torch.optim.AdamW, {"lr": 0.25}, pa.adamw(0.1)),
    "amsgrad": (torch.optim.AdamW, {"lr": 0.25, "amsgrad": True}, pa.adamw(0.1, amsgrad=True)),
    "fused": (torch.optim.AdamW, {"lr": 0.25, "fused": True}, pa.adamw(0.1, fused=True)),
    "class": (torch.optim.RMSprop, {"lr": 0.25}, pa.from_torch(torch.optim.RMSprop, lr=0.1)),
    "NAdam": (torch.optim.NAdam, {"lr": 0.25}, pa.from_torch(torch.optim.NAdam, lr=0.1)),
    "chain": (torch.optim.AdamW, {"lr": 0.25}, pa.chain(CLIP, pa.adamw(0.1))),
}


def batches(seed, count):
    drawn = generator(seed)
    return [(torch.randn(8, 3, generator=drawn), torch.randn(8, 2, generator=drawn))] * count


def loss(params, batch):
    out, _ = FN.apply(params, FN.buffers, batch[0])
    return (out - batch[1]).square().mean()


def theirs_on(model, optimizer, given_):
    for x, y in given_:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def ours_on(step, state, given_):
    for batch in given_:
        state, _ = step(state, batch)
    return state


def trained(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", CASES)
@given(seeds(), st.integers(0, 3), st.booleans())
def test_a_run_goes_on_and_back(name, seed, before, named):
    cls, settings, optimizer = CASES[name]
    model = copy.deepcopy(NET)
    parameters = model.named_parameters() if named else model.parameters()
    theirs = cls(parameters, **settings)
    names = None if named else [name for name, _ in model.named_parameters()]
    theirs_on(model, theirs, batches(seed, before))
    step = pa.make_step(loss, optimizer)
    saved = copy.deepcopy(theirs.state_dict())
    with unchanged(saved):
        state = pa.import_state(
            step.init(trained(model)), optimizer=saved, names=names, steps=before
        )
    assert state.applied == state.attempts == before
    assert pa.tree_get(state, "lr") == settings["lr"]

    again = copy.deepcopy(model)
    new = cls(again.named_parameters() if named else again.parameters(), lr=0.125, **{
        key: x for key, x in settings.items() if key != "lr"
    })  # fmt: skip
    new.load_state_dict(
        pa.export_state(state, optimizer=new.state_dict(), names=names)["optimizer"]
    )
    assert new.param_groups[0]["lr"] == settings["lr"]
    back = pa.import_state(
        step.init(trained(model)), optimizer=new.state_dict(), names=names, steps=before
    )
    assert_trees_bitwise_equal(back, state)

    rest = batches(seed + 1, 2)
    theirs_on(model, theirs, rest)
    assert_trees_bitwise_equal(ours_on(step, state, rest).params, trained(model))
    theirs_on(again, new, rest)
    assert_trees_bitwise_equal(trained(again), trained(model))


@given(seeds(), st.integers(0, 2))
def test_groups_are_the_labels_of_a_partition(seed, before):
    """In any order of torch's; one without momentum has the leaves that are left."""
    model = copy.deepcopy(NET)
    matrices = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
    vectors = [(n, p) for n, p in model.named_parameters() if p.dim() < 2]
    theirs = torch.optim.SGD(
        [{"params": vectors, "lr": 0.5}, {"params": matrices, "lr": 0.25, "momentum": 0.75}]
    )
    theirs_on(model, theirs, batches(seed, before))
    optimizer = pa.partition(
        {"matrices": pa.sgd(0.1, momentum=0.75), "vectors": pa.sgd(0.2)},
        lambda path: "matrices" if FN.params[path].dim() == 2 else "vectors",
    )
    step = pa.make_step(loss, optimizer)
    state = pa.import_state(step.init(trained(model)), optimizer=theirs.state_dict(), steps=before)
    assert pa.tree_get(state, "['matrices'].lr") == 0.25
    assert pa.tree_get(state, "['vectors'].lr") == 0.5
    rest = batches(seed + 1, 2)
    theirs_on(model, theirs, rest)
    assert_trees_bitwise_equal(ours_on(step, state, rest).params, trained(model))


@given(st.integers(0, 5))
def test_a_scaler_goes_on(before):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.0)

    def update(finite):
        scaler.scale((p * (1.0 if finite else torch.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    update(False)
    for _ in range(before):
        update(True)
    step = pa.make_step(
        lambda w, x: (w * x).sum(), pa.sgd(0.0), loss_scale=pa.dynamic_loss_scale(growth_interval=3)
    )
    state = pa.import_state(step.init(torch.ones(2)), scaler=scaler.state_dict())
    back = torch.amp.GradScaler("cpu", growth_interval=3)
    exported = pa.export_state(state, scaler={**scaler.state_dict(), "scale": 1.0})
    assert exported["scaler"] == scaler.state_dict()
    back.load_state_dict(exported["scaler"])
    for _ in range(4):
        update(True)
        state, _ = step(state, torch.ones(2))
        assert state.loss_scale.scale == scaler.get_scale()
    assert state.loss_scale.growth_tracker == scaler.state_dict()["_growth_tracker"]


def test_a_schedule_counts_on():
    model = copy.deepcopy(NET)
    theirs = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, 2, 0.5)
    for batch in batches(0, 3):
        theirs_on(model, theirs, [batch])
        scheduler.step()
    step = pa.make_step(loss, pa.adamw(pa.step_decay(0.5, 2, 0.5)))
    state = pa.import_state(step.init(trained(model)), optimizer=theirs.state_dict())
    for batch in batches(1, 3):
        theirs_on(model, theirs, [batch])
        scheduler.step()
    state = ours_on(step, state, batches(1, 3))
    assert state.applied == 6
    assert_trees_bitwise_equal(state.params, trained(model))


# Faults ------------------------------------------------------------------------------------


def a_run(cls=torch.optim.AdamW, named=True, **settings):
    model = copy.deepcopy(NET)
    optimizer = cls(model.named_parameters() if named else model.parameters(), lr=0.5, **settings)
    theirs_on(model, optimizer, batches(0, 1))
    return optimizer.state_dict()


def renamed(names):
    state_dict = a_run()
    state_dict["param_groups"][0]["param_names"] = names
    return state_dict


def with_state(change, cls=torch.optim.AdamW):
    """Another state of '2.bias'."""
    state_dict = a_run(cls)
    change(state_dict["state"][3])
    return state_dict


def of_two_rates():
    state_dict = a_run()
    group = state_dict["param_groups"][0]
    names, numbers = group["param_names"], group["params"]
    state_dict["param_groups"] = [
        {**group, "params": numbers[:2], "param_names": names[:2]},
        {**group, "params": numbers[2:], "param_names": names[2:], "lr": 0.25},
    ]
    return state_dict


NAMES = [name for name, _ in NET.named_parameters()]


def said(state_dict, words, error=ValueError, optimizer=None, **options):
    return state_dict, optimizer or pa.adamw(0.5), options, error, words


RMSPROP = pa.from_torch(torch.optim.RMSprop, lr=0.5)
NAMELESS, TWICE = a_run(named=False), [*NAMES[:3], NAMES[0]]
REFUSED = {
    "no names": said(NAMELESS, "has no names for its parameters"),
    "too few names": said(NAMELESS, "names has 2 names, .* 4", names=NAMES[:2]),
    "a name twice": said(NAMELESS, "3 of them", names=TWICE),
    "of a wrapper": said(
        renamed([f"module.{name}" for name in NAMES]),
        "'0.weight', but the optimizer has no such name.*'module.'",
    ),
    "momentum of none": said(
        a_run(torch.optim.SGD, momentum=0.5),
        "of '0.weight' has momentum=0.5, but state.opt_state was made with momentum=0.0",
        optimizer=pa.sgd(0.5),
    ),
    "none of amsgrad": said(
        a_run(),
        "of '0.weight' has amsgrad=False, but state.opt_state was made with amsgrad=True",
        optimizer=pa.adamw(0.5, amsgrad=True),
    ),
    "amsgrad of none": said(a_run(amsgrad=True), "has amsgrad=True, .* amsgrad=False"),
    "a moment that is missing": said(
        with_state(lambda kept: kept.pop("exp_avg_sq")), "keeps None as 'exp_avg_sq' for '2.bias'"
    ),
    "other shapes": said(
        renamed([NAMES[2], NAMES[1], NAMES[0], NAMES[3]]),
        r"\(2, 4\) as 'exp_avg' for '0.weight'; expected a tensor of \(4, 3\)",
    ),
    "uneven steps": said(
        with_state(lambda kept: kept["step"].add_(2)),
        "has 1 steps of '2.weight' and 3 of '2.bias'",
    ),
    "two rates": said(of_two_rates(), "rate of 0.5 for '0.weight' and of 0.25"),
    "another class": said(
        a_run(torch.optim.Adagrad),
        "of '0.weight' has no alpha, but state.opt_state was made with alpha=0.99",
        optimizer=RMSPROP,
    ),
    "something else": said(
        with_state(lambda kept: kept.pop("square_avg"), torch.optim.RMSprop),
        r"keeps \['step'\] for '2.bias'; expected \['square_avg', 'step'\]",
        optimizer=RMSPROP,
    ),
    "the optimizer itself": said(
        torch.optim.SGD([torch.ones(1)], lr=0.5), r"expected its state_dict\(\)", TypeError
    ),
    "no state_dict": said({"state": {}}, "'param_groups'", TypeError),
    "steps": said(a_run(), "steps is -1", steps=-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    state_dict, optimizer, options, error, words = REFUSED[name]
    state = pa.make_step(loss, optimizer).init(FN.params)
    with unchanged(state), pytest.raises(error, match=words):
        pa.import_state(state, optimizer=state_dict, **options)


# Settings, which no state holds ---------------------------------------------------------------

CLASSES = [  # but SparseAdam, whose gradients are sparse, and LBFGS, which takes a closure
    cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and name not in ("Optimizer", "SparseAdam", "LBFGS")
]
OURS = {
    torch.optim.SGD: pa.sgd(0.1),
    torch.optim.Adam: pa.adam(0.1),
    torch.optim.AdamW: pa.adamw(0.1),
}
EACH = [(cls, pa.from_torch(cls, lr=0.1)) for cls in CLASSES] + [*OURS.items()]
MATRIX = {"weight": torch.ones(2, 3)}  # Muon takes no vectors


def state_of(optimizer):
    return pa.make_step(lambda p, x: (p["weight"] * x).mean(), optimizer).init(MATRIX)


@cache
def a_step_of(cls):
    weight = nn.Parameter(MATRIX["weight"].clone())
    optimizer = cls([("weight", weight)], lr=0.5)
    weight.square().sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value[:-1], another(value[-1]))
    return "another" if value is None else value + 0.125


@pytest.mark.parametrize(("cls", "optimizer"), EACH, ids=lambda x: getattr(x, "__name__", ""))
def test_each_setting_of_torch_has_to_be_ours(cls, optimizer):
    """But those that say how to compute, and the rate, which schedules change."""
    state, state_dict = state_of(optimizer), a_step_of(cls)
    steps = {"steps": 1}
    pa.import_state(state, optimizer=state_dict, **steps)
    (group,) = state_dict["param_groups"]
    free = {"params", "param_names", "lr", "foreach", "fused", "capturable", "differentiable"}
    for key in {*group} - free:
        other = group | {key: another(group[key])}
        came = re.escape(f"has {key}={other[key]!r}")
        if key == "d":  # others change theirs as they go
            assert pa.import_state(state, optimizer=state_dict | {"param_groups": [other]})
            continue
        with (
            unchanged(state),
            pytest.raises(ValueError, match=f"'weight' {came}.*made with {key}="),
        ):
            pa.import_state(state, optimizer=state_dict | {"param_groups": [other]}, **steps)
        if group[key] is None:
            continue
        of_old_torch = {k: x for k, x in group.items() if k != key}
        with pytest.raises(ValueError, match=f"has no {key}.*made with {key}="):
            pa.import_state(state, optimizer=state_dict | {"param_groups": [of_old_torch]}, **steps)
    for key in free - {"params", "param_names", "lr"}:
        pa.import_state(state, optimizer=state_dict | {"param_groups": [group | {key: True}]})
    marked = group | {"name": "decay", "lr_scale": 0.5, "initial_lr": 3.0, "lr": 7.0}
    pa.import_state(state, optimizer=state_dict | {"param_groups": [marked]}, **steps)


@pytest.mark.parametrize(("cls", "optimizer"), EACH, ids=lambda x: getattr(x, "__name__", ""))
def test_the_state_of_another_optimizer_is_refused(cls, optimizer):
    state = state_of(optimizer)
    for other in CLASSES:
        if other is not cls:
            with unchanged(state), pytest.raises(ValueError, match="'weight'"):
                pa.import_state(state, optimizer=a_step_of(other), steps=1)


@pytest.mark.parametrize("betas", [(0.25, 0.5), [0.25, 0.5], [torch.tensor(0.25), 0.5]])
@pytest.mark.parametrize("decay", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_settings_are_compared_as_numbers(betas, decay):
    """Whatever they are written as: ints, tensors, lists such as a file of JSON has."""
    ours = pa.adamw(0.1, betas=(0.25, 0.5), weight_decay=0)
    state = state_of(pa.chain(pa.clip_by_global_norm(1.0), ours))
    state_dict = a_step_of(torch.optim.AdamW)
    (group,) = state_dict["param_groups"]
    group = group | {"betas": betas, "weight_decay": decay}
    pa.import_state(state, optimizer=state_dict | {"param_groups": [group]})
    group |= {"weight_decay": decay + 0.5}
    with pytest.raises(
        ValueError, match=r"has weight_decay=.*, but state\.opt_state\[1\] was made"
    ):
        pa.import_state(state, optimizer=state_dict | {"param_groups": [group]})


COPIES = {
    "a copy": copy.deepcopy,
    "clones": lambda state: optree.tree_map(torch.clone, state),
    "a step later": lambda state: pa.make_step(
        lambda p, x: (p["weight"] * x).mean(), pa.adamw(0.1)
    )(state, torch.ones(2, 3))[0],
    "from a file": lambda state: torch.load(saved(state), weights_only=True),
}


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", COPIES)
def test_only_what_init_returned_knows_its_settings(name):
    """A copy is refused: it may be a state of any settings."""
    state = state_of(pa.adamw(0.1))
    with pytest.raises(ValueError, match=r"the result of step\.init"):
        pa.import_state(COPIES[name](state), optimizer=a_step_of(torch.optim.AdamW))
    state = pa.tree_set(state, lr=0.25)
    assert pa.import_state(state, optimizer=a_step_of(torch.optim.AdamW)).applied == 1


class Bare(NamedTuple):
    """An optimizer of one's own, with a state that torch knows nothing of."""

    def init(self, params):
        return optree.tree_map(torch.zeros_like, params)

    def apply(self, grads, state, params):
        return params, state


OTHERS = {
    "alone": (Bare(), r"state\.opt_state\['weight'\] is a Tensor"),
    "in a chain": (pa.chain(pa.clip_by_global_norm(1.0), Bare()), r"opt_state\[1\]"),
    "of a label": (pa.partition({"all": Bare()}, lambda path: "all"), r"opt_state\['all'\]"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_that_torch_does_not_have_is_refused(name):
    optimizer, words = OTHERS[name]
    state = state_of(optimizer)
    for call in (pa.import_state, pa.export_state):
        with pytest.raises(ValueError, match=f"{words}.*sgd, adam, adamw or from_torch"):
            call(state, optimizer=a_step_of(torch.optim.AdamW))


def test_a_state_needs_something_to_be_exported_into():
    state = state_of(pa.sgd(0.1))
    with pytest.raises(ValueError, match="optimizer and scaler are both None"):
        pa.export_state(state)
    assert pa.import_state(state) is state


@pytest.mark.parametrize("key", ["growth_factor", "backoff_factor", "growth_interval"])
def test_the_settings_of_a_scaler_have_to_be_ours(key):
    settings = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    scaler = torch.amp.GradScaler("cpu", **settings).state_dict()

    def import_into(loss_scale):
        step = pa.make_step(loss, pa.sgd(0.5), loss_scale=loss_scale)
        return pa.import_state(step.init(FN.params), scaler=scaler)

    import_into(pa.dynamic_loss_scale(min_scale=0.5, hysteresis=2, **settings))
    other = settings | {key: another(settings[key]) if key != "growth_interval" else 8}
    words = f"GradScaler has {key}={settings[key]}, but state.loss_scale was made with {key}="
    with pytest.raises(ValueError, match=re.escape(words)):
        import_into(pa.dynamic_loss_scale(**other))
    with pytest.raises(ValueError, match="made with no backoff_factor"):
        import_into(pa.static_loss_scale(8.0))


def test_steps_of_what_is_frozen_here_are_refused():
    model = copy.deepcopy(NET).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    theirs_on(model, optimizer, batches(0, 1))
    state = pa.make_step(loss, pa.adamw(0.5)).init(FN.params)
    with pytest.raises(ValueError, match=r"torch has steps of '0\.bias', but state\.params"):
        pa.import_state(state, optimizer=optimizer.state_dict())


def test_a_scaler_wants_a_loss_scale():
    scaled = pa.make_step(loss, pa.sgd(0.5), loss_scale=pa.dynamic_loss_scale())
    with pytest.raises(ValueError, match="this state has none"):
        pa.import_state(pa.make_step(loss, pa.sgd(0.5)).init(FN.params), scaler={"scale": 1.0})
    for scaler in ({}, {"scale": 1.0}, 3):
        with pytest.raises(TypeError, match="_growth_tracker"):
            pa.import_state(scaled.init(FN.params), scaler=scaler)
    with pytest.raises(TypeError, match="import_state"):
        pa.import_state(FN.params, scaler={})


def test_several_labels_that_keep_nothing_by_name_are_refused():
    parts = {"a": pa.sgd(0.5), "b": pa.sgd(0.25)}
    optimizer = pa.partition(parts, lambda path: "a" if path.endswith("weight") else "b")
    state = pa.make_step(loss, optimizer).init(FN.params)
    with pytest.raises(
        ValueError, match=r"state.opt_state has the labels 'a', 'b', whose states keep no names"
    ):
        pa.import_state(state, optimizer=a_run(torch.optim.SGD))
