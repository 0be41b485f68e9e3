"""The tests of the tests: each deliberate fault makes the test named beside it fail.

A fault is one replacement in one file of a copy of the package; the copy is tested in a process
of its own. A replacement whose text is no longer there fails too, so the table follows the code.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    killer: str


MUTANTS = {
    "a mean of means": Mutant(
        "_weights.py",
        'pulled = 1.0 if reduction == "sum" else (rows or 0) / power',
        "pulled = 1.0",
        "exact/test_splits.py::test_any_history_gives_the_bits_of_the_full_batch",
    ),
    "the value a mean of means": Mutant(
        "_weights.py",
        "return Microbatch(value, float(rows), float(rows), float(rows),",
        "return Microbatch(value, 1.0, 1.0, float(rows),",
        "exact/test_splits.py::test_the_state_counts_rows_masks_and_microbatches",
    ),
    "the short tail dropped": Mutant(
        "_batches.py",
        "count = range(0, rows, size)",
        "count = range(0, rows - size + 1, size)",
        "laws/test_invariance.py::test_any_microbatch_size_is_the_full_batch",
    ),
    "the power of two not put back": Mutant(
        "_weights.py",
        "return Weighing(known[pulled], power / (unit or 1.0), None)",
        "return Weighing(known[pulled], 1.0, None)",
        "exact/test_splits.py::test_any_history_gives_the_bits_of_the_full_batch",
    ),
    "scaled before the cast": Mutant(
        "_sums.py",
        "term = grad.to(total.dtype) * factor",
        "term = (grad * factor).to(total.dtype)",
        "exact/test_narrow.py::test_a_gradient_whose_sum_overflows_float16_is_right",
    ),
    "sums as narrow as the parameters": Mutant(
        "_tree.py",
        "return torch.promote_types(torch.promote_types(leaf, torch.float32), at_least)",
        "return leaf",
        "exact/test_narrow.py::test_sums_are_float32_and_right_beyond_the_parameters_range",
    ),
    "totals in float32": Mutant(
        "_weights.py",
        "torch.stack([entry.value for entry in group]).double() * times",
        "(torch.stack([entry.value for entry in group]) * times).float()",
        "bounds/test_amounts.py",
    ),
    "zero weight by multiplication": Mutant(
        "_sums.py",
        "torch.where(keep.to(total.device), term, 0.0)",
        "term * keep.to(total.device)",
        "exact/test_zero_weight.py::test_masked_microbatches_add_nothing_anywhere",
    ),
    "the total of a masked microbatch added": Mutant(
        "_weights.py",
        "value = torch.where(seen.weight != 0, seen.total, 0.0)",
        "value = seen.total",
        "exact/test_zero_weight.py::test_masked_microbatches_add_nothing_anywhere",
    ),
    "division by a weight of zero": Mutant(
        "_loss.py",
        "return torch.where(weight == 0, 1.0, weight)",
        "return weight",
        "exact/test_zero_weight.py::test_a_batch_of_weight_zero_has_gradient_zero_and_value_nan",
    ),
    "the weight kept on skip": Mutant(
        "_weights.py",
        "value=value, weight=selected(entry.weight),",
        "value=value, weight=entry.weight,",
        "exact/test_skip.py::test_a_skipped_microbatch_leaves_no_trace",
    ),
    "a skipped gradient not taken back": Mutant(
        "_engine.py",
        "torch.where(ok.to(new.device), new, old, out=new)",
        "pass",
        "exact/test_skip.py::test_a_skipped_microbatch_leaves_no_trace",
    ),
    "speculation never redone": Mutant(
        "_window.py",
        "if known(all_finite((folded.state.grads, folded.state.total))):",
        "if True:",
        "exact/test_skip.py::test_streaming_and_speculating_skip_alike",
    ),
    "speculation with other random numbers": Mutant(
        "_window.py",
        "    torch.set_rng_state(random)\n",
        "",
        "purity/test_random.py",
    ),
    "large leaves not summed": Mutant(
        "_engine.py",
        "            add_(sums[i], grad, how)\n",
        "",
        "exact/test_leaves.py::test_any_history_sums_every_kind_of_leaf",
    ),
    "second-order terms dropped": Mutant(
        "_passes.py",
        "vjp(cotangent, retain_graph=False)",
        "vjp(cotangent, retain_graph=False, create_graph=False)",
        "transforms/test_derivatives.py::test_one_transform",
    ),
    "the caller's sums changed": Mutant(
        "_accumulator.py",
        "before, sums = sums, [x.clone() for x in sums]",
        "before = sums",
        "laws/test_machine.py",
    ),
    "a donated state not marked": Mutant(
        "_donation.py",
        "    mark(given.values())\n",
        "",
        "purity/test_donation.py",
    ),
    "states that share a count": Mutant(
        "_accumulator.py",
        "else state.skipped.clone()",
        "else state.skipped",
        "purity/test_donation.py",
    ),
    "functional_call not kept open": Mutant(
        "_held.py",
        "            attributes[name] = tensors\n        yield",
        "            pass\n        yield",
        "purity/test_checkpoint.py::test_the_gradient_is_that_without_checkpoints",
    ),
    "aux means that are not weighted": Mutant(
        "_aux.py",
        "torch.where(share != 0, term * share.to(term.device), 0.0)",
        "term",
        "laws/test_aux.py::test_mean_is_weighted_as_the_loss_is",
    ),
    "an autocast cache around the microbatches": Mutant(
        "_inputs.py",
        "    for device in {leaf.device.type for leaf in leaves}:",
        "    for device in ():",
        "faults/test_contexts.py",
    ),
    "a scale that is not undone": Mutant(
        "_finish.py",
        "parts = divide(parts, as_scalar_of(parts, scale))",
        "pass",
        "exact/test_step.py",
    ),
    "a step applied whatever its gradient": Mutant(
        "_finish.py",
        "applied = sound & any_weight",
        "applied = any_weight",
        "exact/test_step.py",
    ),
    "a step of no weight applied": Mutant(
        "_finish.py",
        "applied = sound & any_weight",
        "applied = sound",
        "exact/test_step.py",
    ),
    "a loss scale that skipped microbatches do not tell": Mutant(
        "_finish.py",
        "finite = sound & (nonfinite == 0)",
        "finite = sound",
        "exact/test_step.py",
    ),
    "a loss scale that learns from nothing": Mutant(
        "_finish.py",
        "scaling = where(any_weight | ~finite, learned, scaling)",
        "scaling = learned",
        "exact/test_step.py",
    ),
    "buffers of a step not applied": Mutant(
        "_finish.py",
        "buffers = where(applied, finish(carried[0]), buffers)",
        "buffers = finish(carried[0])",
        "exact/test_step.py",
    ),
    "keys that start anew in every microbatch": Mutant(
        "_call.py",
        "fold_in(attempt, samples + index)",
        "fold_in(attempt, index)",
        "exact/test_step_keys.py",
    ),
    "keys that are the same in every step": Mutant(
        "_call.py",
        "fold_in(state.key, state.attempts)",
        "fold_in(state.key, 0)",
        "exact/test_step_keys.py",
    ),
    "an optimizer that counts steps not applied": Mutant(
        "_update.py",
        "steps = state.steps + (1 if applied is None else applied.to(state.steps.device))",
        "steps = state.steps + 1",
        "purity/test_optimizers.py",
    ),
    "momentum that is dampened from the start": Mutant(
        "_kernels.py",
        "if rest and count != 1:",
        "if rest:",
        "parity/test_optimizers.py",
    ),
    "moments pooled without what lies between means": Mutant(
        "_buffers.py",
        "a.squares + b.squares + apart * apart * (a.elements * share)",
        "a.squares + b.squares",
        "bounds/test_pooled.py",
    ),
    "one round of the cipher less": Mutant(
        "_random.py",
        "for group in range(5):",
        "for group in range(4):",
        "exact/test_random.py",
    ),
    "a loss scale without a floor": Mutant(
        "_loss_scale.py",
        "new.clamp(min_scale, max_scale)",
        "new",
        "exact/test_loss_scale.py",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pureaccum", tmp_path / "pureaccum")
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = (tmp_path / "pureaccum" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    mutated = source.replace(mutant.old, mutant.new)
    (tmp_path / "pureaccum" / mutant.file).write_text(mutated, encoding="utf-8")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            f"tests/{mutant.killer}",
        ],
        cwd=tmp_path,
        env=os.environ | {"HYPOTHESIS_PROFILE": "mutants", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert " failed" in run.stdout.splitlines()[-1], run.stdout[-2000:]
