"""Faults that the field has shipped, each as a training loop that the check finds and names."""

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pureaccum.testing import AccumulationMismatch, check_training_loop, unchanged


pytestmark = [pytest.mark.laws, pytest.mark.promise("check")]
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
NORMED = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
DROPPED = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
BATCH = {
    "x": torch.randn(12, 4),
    "y": torch.randint(0, 3, (12,)).masked_fill(torch.arange(12) % 3 == 1, -100),
}
FULL = {"x": BATCH["x"], "y": torch.randint(0, 3, (12,))}


def total(model, part):
    return F.cross_entropy(model(part["x"]), part["y"], reduction="sum")


def mean(model, part):
    return F.cross_entropy(model(part["x"]), part["y"])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.125)


# Loops ------------------------------------------------------------------------------------------


def nothing(model, optimizer):
    pass


def clip(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.0625)


def zero(model, optimizer):
    optimizer.zero_grad()


def loop_of(loss, *, first=nothing, each=nothing, last=nothing, end=zero, of=lambda parts: parts):
    """A loop: what it does around each ``loss(model, part, parts)``, and at its end."""

    def loop(model, optimizer, parts):
        for part in of(parts):
            first(model, optimizer)
            loss(model, part, parts).backward()
            each(model, optimizer)
        last(model, optimizer)
        optimizer.step()
        end(model, optimizer)

    return loop


def of_tokens(model, part, parts):
    return total(model, part) / sum(int((part["y"] != -100).sum()) for part in parts)


def of_rows(model, part, parts):
    return mean(model, part) * len(part["x"]) / sum(len(part["x"]) for part in parts)


right, by_rows = loop_of(of_tokens), loop_of(of_rows)
clipped = loop_of(of_tokens, last=clip)


def scaled(model, optimizer, parts):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for part in parts:
        scaler.scale(of_tokens(model, part, parts)).backward()
    scaler.unscale_(optimizer)
    clip(model, optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


RIGHT = {
    "tokens": (right, BATCH, {}),
    "AdamW": (right, BATCH, {"optimizer": adamw}),
    "clipped once": (clipped, BATCH, {"max_norm": 0.0625}),
    "clipped once, AdamW": (clipped, BATCH, {"optimizer": adamw, "max_norm": 0.0625}),
    "GradScaler": (scaled, BATCH, {"max_norm": 0.0625}),
    "GradScaler, AdamW": (scaled, BATCH, {"optimizer": adamw}),
    "rows": (by_rows, FULL, {}),
    "batch norm in eval mode": (by_rows, FULL, {"model": copy.deepcopy(NORMED).eval()}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_that_is_right_fits(name):
    loop, batch, options = RIGHT[name]
    model = options.get("model", MODEL)
    options = {key: x for key, x in options.items() if key != "model"}
    with unchanged((dict(model.state_dict()), batch)):
        report = check_training_loop(loop, model, batch, **options)
    assert report.fits
    assert report.leaves[0].path == "model.0.weight"
    assert all(p.grad is None for p in model.parameters())


def test_tied_weights_are_one_parameter():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert check_training_loop(by_rows, tied, FULL).fits


def test_a_gradient_that_is_zero_on_paper_is_not_judged():
    """A bias before a batch norm: its gradient is rounding, of which Adam makes a step."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    shifted = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))  # the mean over outputs is constant

    def constant(model, part, parts):
        return model(part["x"]).sum() / sum(len(part["x"]) for part in parts)

    assert check_training_loop(by_rows, model, FULL, optimizer=adamw).fits
    assert check_training_loop(loop_of(constant), shifted, FULL, optimizer=adamw).fits


# Faults of the field ----------------------------------------------------------------------------


def stepped_each(model, optimizer, parts):
    for part in parts:
        mean(model, part).backward()
        optimizer.step()
        optimizer.zero_grad()


def clip_copies(model, optimizer):
    torch.nn.utils.clip_grad_norm_([p.detach() for p in model.parameters()], 0.0625)


def squares(model, optimizer, parts):
    """Adam's second moment, of the squares of microbatches."""
    parameters = [*model.parameters()]
    each = [torch.autograd.grad(of_rows(model, part, parts), parameters) for part in parts]
    for p, grads in zip(parameters, zip(*each, strict=True), strict=True):
        p.grad = sum(grads)
        if not isinstance(optimizer, torch.optim.SGD):
            p.grad /= sum(g**2 for g in grads).sqrt() + 1e-3
    optimizer.step()


def projected(model, optimizer, parts):
    """A gradient of low rank, of which each microbatch has its own subspace."""
    weight, low = model[0].weight, []
    for part in parts:
        of_rows(model, part, parts).backward()
        basis = torch.linalg.svd(weight.grad).U[:, :2]
        low.append(basis @ (basis.T @ weight.grad))
        weight.grad = None
    weight.grad = sum(low)
    optimizer.step()
    optimizer.zero_grad()


class Fault(NamedTuple):
    """A loop, who had it, and what the check calls it."""

    loop: Callable[..., None]
    source: str
    kind: str
    batch: Any = FULL
    model: nn.Module = MODEL
    options: dict[str, Any] = {}  # noqa: RUF012


FAULTS = {
    "a mean over tokens of each microbatch, divided by their number": Fault(
        loop_of(lambda model, part, parts: mean(model, part) / len(parts)),
        "[transformers #24725](https://github.com/huggingface/transformers/issues/24725)",
        "mean of means",
        BATCH,
    ),
    "a mean over tokens, weighed by samples": Fault(
        by_rows, "[mlx-lm #1413](https://github.com/ml-explore/mlx-lm/pull/1413)", "weight", BATCH
    ),
    "the last, shorter window divided by the usual `k`": Fault(
        loop_of(lambda m, part, parts: mean(m, part) / (max(len(parts), 4) if parts[1:] else 1)),
        "[ms-swift #10084](https://github.com/modelscope/ms-swift/pull/10084)",
        "wrong weights",
    ),
    "means added, and not divided": Fault(
        loop_of(lambda model, part, parts: mean(model, part)),
        "[NeMo-RL #84](https://github.com/NVIDIA-NeMo/RL/issues/84)",
        "mean as sum",
    ),
    "the rest of an epoch left out": Fault(
        loop_of(of_rows, of=lambda parts: parts[:-1] or parts),
        "[pet #36](https://github.com/timoschick/pet/issues/36)",
        "tail dropped",
    ),
    "gradients zeroed in every iteration": Fault(
        loop_of(of_rows, first=zero), "the usual place of `zero_grad`", "gradients zeroed"
    ),
    "gradients that are never zeroed": Fault(
        loop_of(of_rows, end=nothing), "a missing `zero_grad`", "state"
    ),
    "every microbatch clipped": Fault(
        loop_of(of_rows, each=clip),
        "[accelerate #641](https://github.com/huggingface/accelerate/issues/641)",
        "wrong weights",
    ),
    "a step in every microbatch": Fault(
        stepped_each, "[GaLore #78](https://github.com/jiaweizzhao/GaLore/issues/78)", "steps"
    ),
    "a clip of tensors that have no `.grad`": Fault(
        loop_of(of_rows, last=clip_copies),
        "[transformers #46113](https://github.com/huggingface/transformers/issues/46113)",
        "clips nothing",
        options={"max_norm": 0.0625},
    ),
    "squares of microbatches in Adam's second moment": Fault(
        squares,
        "[AdamA](https://arxiv.org/abs/2305.19982)",
        "optimizer statistics",
        options={"optimizer": adamw},
    ),
    "each microbatch projected by itself": Fault(
        projected,
        "[GaLore](https://arxiv.org/abs/2403.03507), layer by layer",
        "changed one by one",
    ),
    "batch norm in training mode": Fault(
        by_rows,
        "[pytorch #46516](https://github.com/pytorch/pytorch/issues/46516)",
        "batch statistics",
        model=NORMED,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_known_fault_is_found_and_named(name):
    fault = FAULTS[name]
    with pytest.raises(AccumulationMismatch, match="does not fit") as caught:
        check_training_loop(fault.loop, fault.model, fault.batch, **fault.options)
    assert not caught.value.report.fits
    assert caught.value.report.diagnoses[0].kind == fault.kind


def table():
    rows = [f"| {name} | {it.source} | {it.kind} |" for name, it in FAULTS.items()]
    return "\n".join(["| fault | who had it | what the check says |", "|---|---|---|", *rows])


def test_the_table_of_the_guide_is_this_one():
    page = Path(__file__).parents[2] / "examples/guide/checking.md"
    assert table() in page.read_text(encoding="utf-8")


def test_dropout_is_named():
    report = check_training_loop(by_rows, DROPPED, FULL, raise_on_mismatch=False)
    assert [it.kind for it in report.diagnoses] == ["randomness"]


# What is given ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        ((3, MODEL, FULL), {}, TypeError, "loop is of type int"),
        ((right, [*MODEL.parameters()], FULL), {}, TypeError, "model is of type list"),
        (
            (right, MODEL, FULL),
            {"optimizer": torch.optim.SGD(MODEL.parameters(), lr=1.0)},
            TypeError,
            "optimizer is of type SGD; expected a function that makes a new one",
        ),
        ((right, MODEL, FULL), {"max_norm": 0}, ValueError, "max_norm is 0"),
        ((right, nn.Tanh(), FULL), {}, ValueError, "no parameter that requires a gradient"),
        ((right, MODEL, {"x": torch.ones(1, 4)}), {}, ValueError, "batch has 1 sample;"),
        ((lambda m, o, p: None, MODEL, FULL), {}, ValueError, "never called"),
        ((lambda m, o, p: right(MODEL, o, p), MODEL, FULL), {}, ValueError, "no parameter moves"),
        ((right, MODEL, FULL), {"splits": [[5, 5]]}, ValueError, "sizes of at least two"),
    ],
)
def test_what_is_no_loop_is_refused(args, options, error, words):
    try:
        with pytest.raises(error, match=words):
            check_training_loop(*args, **options)
    finally:
        MODEL.zero_grad()


# In pytest --------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_failing_test_prints_the_report_and_not_the_checker(tmp_path):
    """By the fixture and by the functions: some lines of pytest's own, and ours."""
    tmp_path.joinpath("conftest.py").write_text(
        "from pureaccum.testing.fixtures import accumulates\n"
    )
    tmp_path.joinpath("test_mine.py").write_text(
        dedent(
            """
            import torch
            from pureaccum.testing import assert_accumulates, check_accumulation

            W, X = torch.ones(2), torch.arange(12.0).reshape(6, 2)

            def coupled(w, x):
                return (x @ w).mean() ** 2

            def test_fixture(accumulates):
                accumulates(coupled, W, X)

            def test_fits(accumulates):
                assert accumulates(lambda w, x: (x @ w).mean(), W, X).fits

            def test_check():
                check_accumulation(coupled, W, X)

            def test_assert():
                assert_accumulates(coupled, W, X)

            def test_loop(accumulates):
                def train(model, optimizer, parts):
                    for x in parts:
                        model(x).mean().backward()
                    optimizer.step()

                accumulates(train, torch.nn.Linear(2, 1), X)
            """
        )
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    out = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path).stdout
    assert "4 failed, 1 passed" in out
    failures = re.split(r"\n_+ (test_\w+) _+\n", out.partition("short test summary")[0])[1:]
    for name, text in zip(failures[::2], failures[1::2], strict=True):
        assert "does not fit" in text, name
        assert "batch coupling" in text or "mean as sum" in text, name
        assert "def check_accumulation" not in text, name
        assert len(text.splitlines()) <= 45, f"{name}:\n{text}"
