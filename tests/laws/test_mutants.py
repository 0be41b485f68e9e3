"""The tests of the tests: each deliberate fault makes the test named beside it fail.

The faults are those of ``pureaccum.testing.mutants``; each copy of the package with one in it is
tested in a process of its own. A fault whose text is no longer there fails too, so the table
follows the code.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pureaccum
from pureaccum.testing.mutants import MUTANTS, plant
from tests.laws.planted import run_tests


pytestmark = [pytest.mark.testing, pytest.mark.promise("mutants")]
ROOT = Path(__file__).parents[2]


KILLERS = {
    "a mean of means": (
        "exact/test_splits.py::test_any_history_gives_the_bits_of_the_full_batch[mean-func]"
    ),
    "the value a mean of means": (
        "exact/test_splits.py::test_the_state_counts_rows_masks_and_microbatches[mean]"
    ),
    "the short tail dropped": (
        "exact/test_splits.py"
        "::test_every_microbatch_size_gives_the_bits_of_the_full_batch[mean-func]"
    ),
    "the power of two not put back": (
        "exact/test_splits.py::test_any_history_gives_the_bits_of_the_full_batch[mean-func]"
    ),
    "scaled before the cast": (
        "exact/test_narrow.py::test_a_gradient_whose_sum_overflows_float16_is_right[weighted-func]"
    ),
    "sums as narrow as the parameters": (
        "exact/test_narrow.py::test_sums_are_float32_and_right_beyond_the_parameters_range"
    ),
    "totals in float32": "bounds/test_amounts.py::test_token_counts_add_up_exactly",
    "zero weight by multiplication": (
        "exact/test_zero_weight.py::test_masked_microbatches_add_nothing_anywhere"
    ),
    "the total of a masked microbatch added": (
        "exact/test_zero_weight.py::test_masked_microbatches_add_nothing_anywhere"
    ),
    "a ratio whose denominator is elsewhere dropped": (
        "laws/test_weighted.py::test_a_ratio_whose_denominator_is_elsewhere[cut]"
    ),
    "sums of complex numbers divided as such": (
        "laws/test_weighted.py::test_complex_sums_are_divided_as_pairs"
    ),
    "frozen parameters trained": "purity/test_frozen.py::test_a_run_is_the_run_of_torch",
    "one member's frozen parameters for all": (
        "purity/test_frozen.py::test_members_that_are_frozen_apart_are_not_taken_for_one_another"
    ),
    "a shell used again while a checkpoint holds it": (
        "purity/test_shells.py::test_a_recomputation_sees_the_tensors_of_its_own_call"
    ),
    "a module that leads back called in a shell": (
        "purity/test_shells.py::test_a_module_that_leads_back_to_itself_sees_what_it_is_given"
    ),
    "what cannot be run again": (
        "purity/test_shells.py::"
        "test_a_recomputation_of_a_module_that_leads_back_is_refused_or_right[closure]"
    ),
    "writes not watched": "purity/test_writes.py::test_a_write_is_refused_before_it_happens",
    "late writes not seen": "purity/test_writes.py::test_a_write_in_a_later_microbatch_raises[cut]",
    "a new mode not watched": "purity/test_writes.py::test_a_new_mode_is_looked_at_again",
    "numbers as they lie in memory": (
        "exact/test_checkpoint.py::test_the_library_s_own_reader_reads_every_dtype"
    ),
    "a checksum that nobody compares": (
        "faults/test_corrupted.py::test_a_file_with_any_byte_flipped_is_refused"
    ),
    "parts with holes between them": (
        "faults/test_shards.py::test_parts_that_are_not_the_whole_are_refused"
    ),
    "shards of two saves": "faults/test_shards.py::test_a_shard_of_another_run_is_named",
    "one rank goes on without the others": (
        "faults/test_shards.py::test_an_error_on_one_rank_is_one_on_all"
    ),
    "a header of any length": "faults/test_corrupted.py::test_a_hostile_file_costs_nothing",
    "leftovers of one name alone": (
        "exact/test_checkpoint.py::test_a_folder_that_dead_ranks_left_goes_too"
    ),
    "aux that is a donated parameter": (
        "purity/test_donated_aux.py::test_what_came_beside_a_donated_state_stays"
    ),
    "division by a weight of zero": (
        "exact/test_zero_weight.py::test_a_batch_of_weight_zero_has_gradient_zero_and_value_nan"
    ),
    "the weight kept on skip": (
        "exact/test_skip.py::test_a_skipped_microbatch_leaves_no_trace[mean-func]"
    ),
    "a skipped gradient not taken back": (
        "exact/test_skip.py::test_a_skipped_microbatch_leaves_no_trace"
    ),
    "speculation never redone": "exact/test_skip.py::test_streaming_and_speculating_skip_alike",
    "speculation with other random numbers": (
        "purity/test_random.py::test_a_window_that_is_done_again_draws_the_same_numbers_once"
    ),
    "large leaves not summed": "exact/test_leaves.py::test_any_history_sums_every_kind_of_leaf",
    "second-order terms dropped": (
        "transforms/test_derivatives.py"
        "::test_each_transform_of_pa_grad_is_that_of_torch_func_grad[grad]"
    ),
    "the caller's sums changed": "laws/test_machine.py::TestAccumulation",
    "a donated state not marked": (
        "purity/test_donation.py::test_whatever_the_history_only_donated_states_are_gone"
    ),
    "states that share a count": (
        "purity/test_donation.py::test_whatever_the_history_only_donated_states_are_gone"
    ),
    "functional_call not kept open": (
        "purity/test_checkpoint.py::test_the_gradient_is_that_without_checkpoints"
    ),
    "aux means that are not weighted": "laws/test_aux.py::test_mean_is_weighted_as_the_loss_is",
    "an autocast cache around the microbatches": (
        "faults/test_contexts.py::test_autocast_around_a_call_holds_on_to_weights"
    ),
    "a scale that is not undone": "exact/test_step.py::test_any_cut_is_the_full_batch_update",
    "a step applied whatever its gradient": (
        "exact/test_step.py::test_a_step_not_applied_changes_no_bit"
    ),
    "a step applied whatever its learning rate": (
        "faults/test_rates.py::test_a_bad_rate_is_a_step_not_applied[sgd-schedule-kept]"
    ),
    "a learning rate judged by itself": (
        "faults/test_rates.py::test_a_bad_rate_is_a_step_not_applied[adamw-in the state-kept]"
    ),
    "one sound learning rate for all": (
        "faults/test_rates.py::test_a_bad_rate_is_a_step_not_applied[partition-schedule-kept]"
    ),
    "a loss scale that learns from a learning rate": (
        "faults/test_rates.py::test_a_bad_rate_is_a_step_not_applied[sgd-number-kept]"
    ),
    "a step of no weight applied": (
        "exact/test_step.py::test_any_cut_is_the_full_batch_update[weighted]"
    ),
    "a loss scale that skipped microbatches do not tell": (
        "exact/test_step.py::test_skip_leaves_a_microbatch_out_with_its_weight"
    ),
    "a loss scale that learns from nothing": (
        "exact/test_step.py::test_any_cut_is_the_full_batch_update[weighted]"
    ),
    "buffers of a step not applied": "exact/test_step.py::test_a_step_not_applied_changes_no_bit",
    "keys that start anew in every microbatch": "exact/test_step_keys.py::test_no_cut_moves_a_mask",
    "keys that are the same in every step": (
        "exact/test_step_keys.py::test_an_attempt_alone_makes_other_keys"
    ),
    "one member that speaks for all": (
        "transforms/test_ensembles.py::test_one_member_overflows_and_no_other_notices"
    ),
    "an optimizer that counts steps not applied": (
        "purity/test_optimizers.py::test_a_step_not_applied_leaves_every_bit"
    ),
    "momentum that is dampened from the start": (
        "parity/test_optimizers.py::test_every_combination_of_flags_has_the_bits_of_the_class"
    ),
    "moments pooled without what lies between means": (
        "bounds/test_pooled.py::test_any_cut_gives_the_statistics_of_the_full_batch"
    ),
    "one round of the cipher less": "exact/test_random.py::test_the_cipher_gives_the_known_answers",
    "a loss scale without a floor": (
        "exact/test_loss_scale.py"
        "::test_after_overflows_in_a_row_the_scale_is_that_of_torch_or_its_floor"
    ),
    "a check that forgives too much": (
        "laws/test_check_parts.py::test_the_bound_is_the_root_of_a_unit_and_what_float32_loses"
    ),
    "a check of rows in order alone": (
        "laws/test_check_parts.py::test_random_cuts_are_ragged_many_and_out_of_order"
    ),
    "some rows compared with all": (
        "laws/test_check_parts.py"
        "::test_rows_are_compared_with_the_same_rows_in_the_order_of_the_batch"
    ),
    "an experiment that says yes too soon": (
        "laws/test_check_parts.py::test_an_experiment_tells[a norm]"
    ),
    "two calls on the same rows": (
        "laws/test_check_parts.py::test_each_of_two_calls_sees_the_rows_in_another_order"
    ),
    "variables left as the loss assigned them": (
        "purity/test_put_back.py::test_what_a_loss_keeps_is_put_back[a cell]"
    ),
    "the tail forgotten in a scan": (
        "exact/test_compiled_step.py::test_every_form_is_the_full_batch_update[sum-scan]"
    ),
    "0-d leaves written in place": (
        "exact/test_compiled_step.py::test_a_stream_is_the_full_batch_update[True]"
    ),
    "the unit not undone in a loop": (
        "exact/test_compiled_step.py::test_every_form_is_the_full_batch_update[mean-loop]"
    ),
    "the users' guards left out": (
        "transforms/test_compiled_step.py::test_what_a_loss_captures_may_change"
    ),
    "a captured gradient silently zero": (
        "transforms/test_remat.py"
        "::test_captured_tensors_have_their_gradients_or_are_refused[in grad, beside an input]"
    ),
    "a Function with something captured unseen": (
        "transforms/test_captured.py::test_a_captured_tensor_that_is_handed_on"
    ),
    "rematerialised with other random numbers": (
        "parity/test_remat.py::test_a_rematerialised_module_has_its_bits[func-dropout]"
    ),
    "run again with the modules' own parameters": (
        "transforms/test_remat.py"
        "::test_captured_tensors_have_their_gradients_or_are_refused[a module called with others]"
    ),
    "run again in another mode": "purity/test_remat.py::test_modes_are_those_of_the_first_run",
    "a write before the derivative unseen": (
        "purity/test_microbatch.py"
        "::test_what_is_written_to_before_the_backward_pass_is_refused[captured]"
    ),
    "a sum of gradients as narrow as a piece": (
        "exact/test_narrow.py::test_gradients_of_a_microbatched_function_are_summed_wide"
    ),
    "NaN * 0 of a piece without weight": (
        "exact/test_words.py::test_several_weighted_means_are_each_the_full_batch_s"
    ),
    "the last that is all": (
        "transforms/test_reductions.py::test_a_program_has_the_derivatives_of_plain_code"
        "[one number of the last microbatch-grad]"
    ),
    "a largest of one microbatch": (
        "exact/test_words.py::test_microbatches_that_tie_share_the_gradient_of_the_largest[max]"
    ),
    "a reducer's tangent of zero": (
        "faults/test_microbatch.py::test_a_gradient_of_what_has_none_is_refused[jvp-given]"
    ),
    "a cast kept": "exact/test_narrow.py::test_a_cast_gives_way_to_its_master",
    "a write to a cast undone": (
        "exact/test_narrow.py::test_a_cast_that_was_written_to_is_a_tensor_of_its_own"
    ),
    "merged without the distance of the means": (
        "parity/test_batch_norm.py::test_in_float64_batch_norm_in_microbatches_is_the_full_batch_s"
    ),
    "moments taken for constants": (
        "parity/test_batch_norm.py::test_in_float64_batch_norm_in_microbatches_is_the_full_batch_s"
    ),
    "samples summed without their factor": (
        "bounds/test_per_sample.py::test_reduced_gradients_are_those_of_a_loop_over_the_samples"
    ),
    "samples without weight by multiplication": (
        "exact/test_per_sample.py"
        "::test_a_sample_without_weight_adds_nothing_though_its_gradient_is_nan"
    ),
    "second moments of terms": (
        "exact/test_per_sample.py::test_second_moments_have_the_bits_of_a_loop"
    ),
    "noise over all microbatches": (
        "bounds/test_noise_scale.py::test_any_history_has_the_moments_of_its_microbatches"
    ),
    "averages that begin at zero": (
        "bounds/test_noise_scale.py::test_averages_are_corrected_for_their_beginning"
    ),
    "a skipped microbatch's noise kept": (
        "bounds/test_noise_scale.py::test_what_is_left_out_adds_nothing"
    ),
    "a divisor that meta-gradients do not see": (
        "transforms/test_meta_gradients.py::test_derivatives_go_through_updates_by_hand"
    ),
    "members that share memory": (
        "transforms/test_ensembles.py::test_a_member_that_is_given_up_leaves_the_others"
    ),
    "counts and scales of ranks not compared": (
        "laws/test_agreement.py::test_small_leaves_are_seen_at_every_call"
    ),
    "settings of ranks not compared": (
        "laws/test_agreement.py::test_what_an_optimizer_was_made_with_is_compared"
    ),
    "cotangents of ranks that are not weighed": (
        "exact/test_exchange.py::test_bits_of_a_polynomial_of_all_rows"
    ),
    "cotangents of other ranks left out": (
        "exact/test_exchange.py::test_derivatives_are_those_of_the_sum_of_what_all_ranks_return"
    ),
    "exchanges not compared": (
        "faults/test_disagreement.py::test_ranks_that_disagree_all_raise_and_keep_their_states"
        "[2-exchange: microbatches]"
    ),
    "windows merged without their rows": (
        "exact/test_windows.py::test_a_window_of_two_is_the_window_of_all[plain]"
    ),
    "a product that counts by the vector": (
        "exact/test_curvature.py::test_a_numerator_without_weight_adds_its_total[v0]"
    ),
    "the other factor of Gauss-Newton differentiated": (
        "exact/test_curvature.py::test_any_cut_gives_the_same_bits[gauss-newton]"
    ),
    "a constant of a product under a transform": (
        "bounds/test_curvature.py::test_transforms_around_a_product[gauss-newton-mlp]"
    ),
    "a product that nobody compares": (
        "faults/test_wrong_products.py::test_the_programs_of_the_finding"
    ),
    "what is detached moves": (
        "faults/test_wrong_products.py::test_what_is_detached_is_a_constant"
    ),
    "curvature of nothing zero": (
        "exact/test_curvature.py::test_a_microbatch_without_weight_adds_nothing[fisher]"
    ),
    "threads push at once": "bounds/test_curvature.py::test_threads",
    "an error that does not shrink": (
        "bounds/test_curvature.py::test_estimates_are_as_near_as_they_say[hessian]"
    ),
    "conjugate gradients beyond the solution": (
        "faults/test_curvature.py::test_a_step_that_is_not_taken_leaves_the_state"
    ),
    "outer products left out by multiplication": (
        "exact/test_clipping.py::test_a_sample_that_is_not_finite_adds_exactly_nothing_and_is_seen"
    ),
    "norms of positions alone": (
        "bounds/test_ghost_norms.py::test_norms_are_exact_where_what_positions_add_cancels"
    ),
    "a leaf used in an unseen way": (
        "exact/test_layers.py::test_a_use_that_cannot_be_followed_is_found_and_never_a_wrong_number"
    ),
    "a kernel without a mirror": (
        "exact/test_gramian.py::test_any_blocks_have_the_bits_of_the_jacobians[of_numbers]"
    ),
    "a constant in a loss": (
        "transforms/test_losses_that_differentiate.py::test_by_plain_autograd_too_or_refused"
        "[accumulator-grad]"
    ),
    "steps remembered where the function curves downwards": (
        "parity/test_lbfgs.py::test_every_call_has_the_bits_of_the_class[Rosenbrock-None]"
    ),
    "sam that does not look": (
        "exact/test_looking_again.py::test_sam_is_a_step_by_the_gradient_uphill[sgd]"
    ),
}


# Under the profile dev every twelfth: what this tests is the other tests.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if i % 12 != 3 else ())
        for i, name in enumerate(KILLERS)
    ],
)
def test_the_fault_is_found(name: str, tmp_path: Path) -> None:
    plant(name, tmp_path)
    unused = shutil.ignore_patterns("__pycache__", "benchmarks")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=unused)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code, output = run_tests(tmp_path, KILLERS[name])
    assert code == 1, output[-2000:]
    assert " failed" in output.splitlines()[-1], output[-2000:]


def test_every_mutant_has_a_killer() -> None:
    assert KILLERS.keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_one_fault_and_says_which(name: str) -> None:
    mutant = MUTANTS[name]
    source = (Path(pureaccum.__file__).parent / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert mutant.new not in (mutant.old, source)
    assert mutant.says.endswith(".")
    compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_planting_copies_the_package_and_changes_one_file(tmp_path: Path) -> None:
    copy = plant("the short tail dropped", tmp_path / "new")
    assert copy == tmp_path / "new" / "pureaccum"
    package = Path(pureaccum.__file__).parent
    files = {path.relative_to(package) for path in package.rglob("*.py")}
    assert files == {path.relative_to(copy) for path in copy.rglob("*.py")}
    assert (copy / "py.typed").exists()
    changed = [str(f) for f in files if (copy / f).read_bytes() != (package / f).read_bytes()]
    assert changed == [MUTANTS["the short tail dropped"].file]


def test_python_finds_the_copy_first(tmp_path: Path) -> None:
    copy = plant("a scale that is not undone", tmp_path)
    script = "import pureaccum, pureaccum.testing; print(pureaccum.testing.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).parents[1] == copy


def test_planting_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "pureaccum").mkdir()
    (tmp_path / "pureaccum" / "mine.py").write_text("mine")
    with pytest.raises(FileExistsError):
        plant("the short tail dropped", tmp_path)
    assert [path.name for path in (tmp_path / "pureaccum").iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a mean of mean", "'a mean of mean'; expected 'a mean of means'"),
        ("zero weight", "'zero weight by multiplication'"),
        ("?", f"one of {len(MUTANTS)}"),
    ],
)
def test_a_name_that_is_none_is_met_with_those_near_it(
    name: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="there is no mutant") as caught:
        plant(name, tmp_path)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())
