"""The examples run, and learn what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_variable_length() -> None:
    main = runpy.run_path(str(EXAMPLES / "variable_length.py"))["main"]
    first, last = main(steps=1), main(steps=20)
    assert last < first


@pytest.mark.parametrize("name", ["contrastive", "triplet", "mixture_of_experts"])
def test_coupled_losses(name: str) -> None:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    first, last = main(steps=8, rows=96)
    assert last < first


def test_meta_gradients() -> None:
    main = runpy.run_path(str(EXAMPLES / "meta_gradients.py"))["main"]
    first, last = main(steps=3, rows=60)
    assert last < first


def test_accelerate_toy() -> None:
    """Whole numbers until the last multiplication: the same bits."""
    weights = runpy.run_path(str(EXAMPLES / "accelerate_toy.py"))["main"]()
    assert torch.equal(weights["by 2"], weights["without"])
    assert torch.equal(weights["by 3"], weights["without"])
    assert f"{weights['without'].item():.5f}" == "2.04000"
    assert f"{weights['usual, by 3'].item():.5f}" == "2.31556"  # (14/3 + 77/3 + 113/2) / 3 * 0.08


def test_amp_training(capsys: pytest.CaptureFixture[str]) -> None:
    said = runpy.run_path(str(EXAMPLES / "amp_training.py"))["main"](epochs=1)
    # input, weights and outputs of two layers, forward and backward, are each rounded to fp16
    rounding = 8 * 2.0**-11
    for name in ("whole batches", "windows of 4"):
        assert abs(said[f"pureaccum, {name}"][0] - 1) < rounding
    assert abs(said["GradScaler, loss / 4"][0] - 0.75) < rounding
    # of three windows: the rows, whether it was applied, the scale it was computed with
    assert said["propagate"] == [64, 1, 2**16, 64, 0, 2**16, 48, 1, 2**15]
    assert said["skip"] == [64, 1, 2**16, 48, 1, 2**16, 48, 1, 2**15]
    assert "1 of 4 microbatches skipped" in capsys.readouterr().out


def test_batchnorm_exact() -> None:
    off = runpy.run_path(str(EXAMPLES / "batchnorm_exact.py"))["main"](rows=32, size=8)
    rounding = torch.finfo(torch.float64).eps ** 0.5
    for name in ("BatchNorm, full batch", "BatchNorm, staged_from", "GroupNorm"):
        assert max(off[name]) < rounding, name
    for name in ("BatchNorm, usual loop", "BatchNorm, plainly cut"):
        assert min(off[name]) > rounding, name


def test_resnet101() -> None:
    """Of one block a group: 13 convolutions."""
    main = runpy.run_path(str(EXAMPLES / "resnet101.py"))["main"]
    infos = main(8, 3, layers=(1, 1, 1, 1), width=4, steps=1)
    whole, parts = infos["8 at once"], infos["3 at a time"]
    summed, staged = infos["3 at a time, summed"], infos["3 at a time, staged"]
    rounding = torch.finfo(torch.float64).eps ** 0.5
    assert abs(staged.loss / whole.loss - 1) < rounding
    assert abs(parts.loss / whole.loss - 1) > rounding
    assert abs(summed.loss / (8 * parts.loss) - 1) < rounding
    assert abs(staged.grad_norm / whole.grad_norm - 1) < rounding
    assert abs(summed.grad_norm / (8 * parts.grad_norm) - 1) < rounding
    assert (parts.microbatches, whole.microbatches) == (3, 1)


def test_which_method(capsys: pytest.CaptureFixture[str]) -> None:
    off = runpy.run_path(str(EXAMPLES / "which_method.py"))["main"](
        rows=8, size=4, length=4, depth=1
    )
    wide, narrow = (torch.finfo(dtype).eps ** 0.5 for dtype in (torch.float32, torch.bfloat16))
    for name in ("whole batch", "accumulation", "accumulation, clipping", "accumulation, remat"):
        assert off[name] < wide, name
    for name in ("bfloat16", "accumulation, remat, bfloat16"):
        assert wide < off[name] < narrow, name
    for name in ("one microbatch, nothing summed", "clips", "zeroes"):
        assert off[name] > narrow, name
    said = capsys.readouterr().out
    assert "of this loss: fits" in said
    assert "of the loop that zeroes: does not fit" in said
    assert "\n  gradients zeroed: " in said


def test_distributed() -> None:
    """By torchrun, in double precision: rows in the wrong place, or twice, would show."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(EXAMPLES / "distributed.py")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert run.returncode == 0, run.stderr
    apart = re.search(r"from the one process: (\S+)", run.stdout)
    assert apart, run.stdout
    assert float(apart[1]) < torch.finfo(torch.float64).eps * 2**20  # 31 steps of AdamW
    assert "10 microbatches on 2 ranks" in run.stdout
