"""The examples run, and learn what they say."""

import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import pureaccum as pa
from pureaccum.testing import assert_trees_bitwise_equal
from tests.ranks import CORRUPT, run_on_ranks


pytestmark = [pytest.mark.parity, pytest.mark.promise("pages")]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_short_and_tested():
    tests, page = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.glob("*.py")):
        assert f"[{path.name}]({path.name})" in page, path.name
        assert len(path.read_text().splitlines()) < 150, path.name
        assert re.search(rf'"{path.stem}(\.py)?"', tests), f"no test here names {path.name}"


def main(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def check_language_model(model):
    """Within sqrt(u) of the full batch's gradient; the usual loop is far from it."""
    example = runpy.run_path(str(EXAMPLES / "language_model.py"))
    ours, usual, first, last = example["main"](example[model], steps=12, width=16)
    assert ours < 2**-12 < 2**-6 < usual
    assert last < first


@pytest.mark.slow
def test_the_language_model_learns():
    check_language_model("Transformer")


@pytest.mark.hf
@pytest.mark.slow  # to import transformers takes seven seconds
def test_a_language_model_of_transformers_learns():
    pytest.importorskip("transformers", reason="needs transformers")
    check_language_model("Llama")


@pytest.mark.nightly
def test_the_digits_are_learned_and_a_run_goes_on(tmp_path):
    """Stopped after 200 steps of 300, it comes to the bits that it would have come to."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    example = runpy.run_path(str(EXAMPLES / "digits.py"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    want = example["main"](str(whole))
    assert want["seen"][-1, 2] > 0.9
    assert want["seen"][-1, 1] < want["seen"][0, 1]
    example["main"](str(parts), stop=200)
    got = example["main"](str(parts), resume=True)
    assert_trees_bitwise_equal(got, want)
    if (whole / "digits.png").exists():  # with matplotlib
        assert (whole / "digits.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contrastive", "triplet", "mixture_of_experts"])
def test_the_examples_of_coupled_losses_learn(name):
    first, last = main(name)(steps=8, rows=96)
    assert last < first


@pytest.mark.slow
def test_a_balance_of_the_batch_is_no_mean_of_balances():
    """Summed it is exact, rematerialised or not; other balances are off as the guide says."""
    example = runpy.run_path(str(EXAMPLES / "mixture_of_experts.py"))
    found = example["compare"](*example["problem"]())
    rounding = torch.finfo(torch.float32).eps ** 0.5
    exact = found.pop("of the batch"), found.pop("of the batch, rematerialised")
    assert max(map(max, exact)) < rounding
    page = (EXAMPLES / "guide" / "coupled.md").read_text(encoding="utf-8").replace("\n", " ")
    microbatch, sequence = (f"{found[way][1]:.0%}" for way in found)
    assert f"per microbatch adds to the gradient, as in a loop, is {microbatch} off from" in page
    assert f"and a balance per sequence {sequence}." in page


@pytest.mark.slow
def test_tiles_of_a_head_are_the_whole_head():
    """Cut or not, the same is learned, up to sums in another order."""
    seen = main("tiled")(rows=2, length=32, words=64, width=4)
    rounding = torch.finfo(torch.float32).eps ** 0.5
    assert seen["off"] < rounding
    assert seen["losses"] < rounding


@pytest.mark.slow
def test_a_scan_goes_back_through_all_steps_and_truncation_does_not():
    """Less is lost in longer chunks, and what is lost is no rounding."""
    seen = main("recurrent")(rows=2, length=256, width=4, size=16)
    off, memory = ({name: pair[i] for name, pair in seen.items()} for i in (0, 1))
    assert off["scan"] < torch.finfo(torch.float64).eps ** 0.5
    assert 1 / 8 < off["truncated at half"] < off["truncated"]
    assert 2 * memory["scan"] < memory["truncated at half"] < memory["autograd"]


@pytest.mark.nightly
def test_linear_attention_learns_the_same_in_less():
    """One text at a time, in chunks of which the last one is short."""
    seen = main("linear_attention")(rows=2, length=250, size=16, words=32, steps=6)
    (most, losses, learned), (held, own, ours) = seen["all kept"], seen["scan"]
    assert own[-1] < own[0]
    assert abs(own[-1] / losses[-1] - 1) < torch.finfo(torch.float32).eps ** 0.5
    apart = pa.global_norm({name: ours[name] - x for name, x in learned.items()})
    assert apart / pa.global_norm(learned) < 2**-14  # Adam divides by the root of small numbers
    assert held < most / 2


def test_linear_attention_does_not_depend_on_its_chunks():
    """The gradient in chunks, some of them short, is that of one chunk, in float64."""
    example = runpy.run_path(str(EXAMPLES / "linear_attention.py"))
    torch.manual_seed(0)
    net, batch = example["Model"](32, 16, 2).double(), example["texts"](2, 50, 32)
    params = pa.functional(net).params
    whole, cut = (
        pa.grad(example["make_loss"](net, size, scan))(params, batch)
        for size, scan in ((50, False), (16, True))
    )
    apart = pa.global_norm({name: cut[name] - x for name, x in whole.items()})
    assert apart / pa.global_norm(whole) < torch.finfo(torch.float64).eps ** 0.5


@pytest.mark.slow
def test_samples_with_wrong_labels_are_found():
    """Wrong labels are a tenth: what is said of many more than that is no chance."""
    seen = main("per_sample")(rows=400, steps=40)
    assert seen["found"] > 0.5
    assert seen["against"] > 0.3
    assert 2 * seen["plain"] < seen["clipped"]


@pytest.mark.slow
def test_samples_that_do_harm_are_found():
    """The system is solved as far as it says, and wrong labels, a tenth, are among the worst."""
    seen = main("influence")(rows=400, size=50, width=16, steps=40)
    assert seen["off"] <= 1e-6
    assert seen["found"] > 0.5 > 0.2 > seen["chance"]


@pytest.mark.slow
def test_a_network_is_less_sure_where_it_has_seen_nothing():
    seen = main("laplace")(rows=256, width=8, steps=100)
    assert seen["near"] < seen["gap"]
    assert seen["near"] < seen["far"]
    assert seen["off"] < 1e-6


def test_a_rate_that_falls_on_a_plateau_is_that_of_torch():
    """And it falls: rates of both are compared bit for bit, epoch by epoch."""
    rates = main("plateau")(epochs=24)
    assert rates["ours"] == rates["torch's"]
    assert len({*rates["ours"]}) > 2


def test_a_plateau_is_told_as_torch_tells_it():
    """Metrics on both sides of the threshold, a NaN, and rates that fall more than once."""
    example = runpy.run_path(str(EXAMPLES / "plateau.py"))
    theirs = torch.optim.SGD([torch.zeros(())], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, patience=1)
    state = example["begin"](0.5)
    for metric in (1.0, 1.00005, 1.0, 0.99995, 0.9998, 0.99975, float("nan"), 0.99, 0.99, 0.5):
        state = example["update"](state, torch.tensor(metric, dtype=torch.float64), patience=1)
        scheduler.step(metric)
        counted = scheduler.num_bad_epochs, scheduler.best, theirs.param_groups[0]["lr"]
        assert (int(state.bad), float(state.best), float(state.lr)) == counted


def test_a_kernel_tells_images_apart():
    seen = main("ntk")(rows=40, new=20, channels=4)
    assert seen["right"] > 0.5  # by chance a quarter
    assert seen["off"] < torch.finfo(torch.float32).eps ** 0.5


@pytest.mark.slow
def test_tasks_that_disagree_are_learned_together():
    example = runpy.run_path(str(EXAMPLES / "several_objectives.py"))
    seen = example["main"](rows=256, size=64, width=16, steps=10)
    assert seen["last"] < seen["first"]
    assert seen["off"] < torch.finfo(torch.float64).eps ** 0.5
    assert seen["memory"] < 0.5


def test_fine_tuning_trains_what_it_says():
    seen = main("fine_tuning")(steps=10, rows=96)
    assert seen["apart"] < 2**-14  # AdamW divides by the root of small numbers
    assert max(seen["last"], seen["adapted"]) < seen["first"]


@pytest.mark.slow
def test_meta_learning_learns():
    """Differences are off by a h² + b h⁴ + …, and without the first term by 16 times less at h / 2.

    So what two of these differ by is 15 times what the better one is off, up to the next term.
    """
    example = runpy.run_path(str(EXAMPLES / "meta_learning.py"))
    losses, exact, (d1, d2, d4) = example["main"](steps=3, rows=60)
    assert losses[-1] < losses[0]
    farther, nearer = (4 * d2 - d1) / 3, (4 * d4 - d2) / 3
    assert abs(nearer - exact) < abs(nearer - farther) / 8 < abs(d4 - exact) / 8


def test_the_toy_of_accelerate_is_trained_exactly():
    """Whole numbers until the last multiplication: the same bits."""
    weights = main("accelerate_toy")()
    assert torch.equal(weights["by 2"], weights["without"])
    assert torch.equal(weights["by 3"], weights["without"])
    assert f"{weights['without'].item():.5f}" == "2.04000"
    assert f"{weights['usual, by 3'].item():.5f}" == "2.31556"  # (14/3 + 77/3 + 113/2) / 3 * 0.08


def test_amp_training_has_the_numbers_of_the_full_batch(capsys):
    said = main("amp_training")(epochs=1)
    # input, weights and outputs of two layers, forward and backward, are each rounded to fp16
    rounding = 8 * 2.0**-11
    for name in ("whole batches", "windows of 4"):
        assert abs(said[f"pureaccum, {name}"][0] - 1) < rounding
    assert abs(said["GradScaler, loss / 4"][0] - 0.75) < rounding
    # of three windows: the samples, whether it was applied, the scale it was computed with
    assert said["propagate"] == [64, 1, 2**16, 64, 0, 2**16, 48, 1, 2**15]
    assert said["skip"] == [64, 1, 2**16, 48, 1, 2**16, 48, 1, 2**15]
    assert "1 of 4 microbatches skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_batch_norm_is_exact_in_microbatches():
    off = main("batchnorm_exact")(rows=32, size=8)
    rounding = torch.finfo(torch.float64).eps ** 0.5
    for name in ("BatchNorm, full batch", "BatchNorm, exact", "GroupNorm"):
        assert max(off[name]) < rounding, name
    for name in ("BatchNorm, usual loop", "BatchNorm, plainly cut"):
        assert min(off[name]) > rounding, name


@pytest.mark.nightly
def test_resnet101_is_exact_in_microbatches():
    """Of one block a group: 13 convolutions."""
    infos = main("resnet101")(8, 3, layers=(1, 1, 1, 1), width=4, steps=1)
    whole, parts = infos["8 at once"], infos["3 at a time"]
    summed, exact = infos["3 at a time, summed"], infos["3 at a time, exact"]
    rounding = torch.finfo(torch.float64).eps ** 0.5
    assert abs(exact.loss / whole.loss - 1) < rounding
    assert abs(parts.loss / whole.loss - 1) > rounding
    assert abs(summed.loss / (8 * parts.loss) - 1) < rounding
    assert abs(exact.grad_norm / whole.grad_norm - 1) < rounding
    assert abs(summed.grad_norm / (8 * parts.grad_norm) - 1) < rounding
    assert (parts.microbatches, whole.microbatches) == (3, 1)


@pytest.mark.slow
def test_the_methods_are_off_as_the_table_says(capsys):
    off = main("which_method")(rows=8, size=4, length=4, depth=1)
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


def torchrun(ranks, name, *words):
    """What an example prints on so many ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(ranks), str(EXAMPLES / name), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    run = partial(subprocess.run, capture_output=True, text=True, timeout=240, env=env, check=False)
    ended = run(command)
    # as tests/ranks.py says: a process of gloo's may abort when all is done, and rarely before
    aborted = "terminate called without an active exception" in ended.stderr
    if not aborted and any(f"Signal {-code} (" in ended.stderr for code in CORRUPT):
        ended = run(command)
    assert ended.returncode == 0 or aborted, ended.stderr
    return ended.stdout


def check_parameters(said, *others):
    """In double precision, after some steps of AdamW: a sample lost or taken twice would show."""
    for other in others:
        apart = re.search(rf"largest difference of a parameter from {other}: (\S+)", said)
        assert apart, said
        assert float(apart[1]) < torch.finfo(torch.float64).eps * 2**20


@pytest.mark.nightly
def test_two_ranks_train_as_one_process():
    said = torchrun(2, "distributed.py")
    check_parameters(said, "the one process")
    assert "10 microbatches on 2 ranks" in said


@pytest.mark.nightly
def test_what_four_ranks_save_two_resume(tmp_path):
    """Sharded parameters, uneven samples and words: before and after as in one process."""
    others = "one process", "an uninterrupted run"
    said = torchrun(4, "sharded.py", str(tmp_path / "run"), "--stop", "3")
    check_parameters(said, *others)
    assert "in 3 microbatches" in said
    assert len(list((tmp_path / "run").iterdir())) == 4
    said = torchrun(2, "sharded.py", str(tmp_path / "run"))
    check_parameters(said, *others)
    assert "in 5 microbatches" in said


def costs_of_ranks(replicas, rank, world):
    """Of a step of each kind, in one microbatch and in five; and how far parameters are apart."""
    sys.path.insert(0, str(EXAMPLES))  # of this process, in which nothing else runs
    example = runpy.run_path(str(EXAMPLES / "sharded_costs.py"))
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("two", "one"))
    mesh = mesh if replicas > 1 else mesh["one"]
    found = {
        (name, k): example["measure"](name, mesh, k)
        for name in ("DDP", "fully_shard", "sharded.py")
        for k in (1, 5)
    }
    (_, params), costs = found["DDP", 1], {key: cost._asdict() for key, (cost, _) in found.items()}
    off = [float((p - params[n]).abs().max()) for _, its in found.values() for n, p in its.items()]
    return costs, max(off)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_a_step_of_shards_communicates_what_the_guide_says(ranks, replicas):
    """What is sharded is gathered twice a microbatch; what is replicated is reduced once a step."""
    for end in run_on_ranks(ranks, partial(costs_of_ranks, replicas), timeout=120.0):
        assert not end.failure, end.failure
        costs, off = end.returned
        assert off < 1e-6 * 3e-3 * 2  # torch's clipping adds 1e-6 to the norm; two steps of AdamW
        whole = costs["DDP", 1]["parameters"]
        for k in (1, 5):
            ours, theirs = costs["sharded.py", k], costs["fully_shard", k]
            for name in ("parameters", "sums"):
                assert ours[name] == theirs[name] == whole * replicas // ranks
            assert abs(ours["moments"] - 2 * ours["parameters"]) < 1000  # beside them, a count
            assert ours["gathered"] == theirs["gathered"] == 2 * k * whole
            assert ours["scattered"] == theirs["scattered"] == k * whole
            kept = whole * replicas // ranks if replicas > 1 else 0
            assert abs(ours["reduced"] - kept) < 1000  # weights, totals and a norm
            assert abs(theirs["reduced"] - k * kept) < 1000
            assert ours["peak"] < costs["DDP", k]["peak"]


COMING_FROM = EXAMPLES / "guide" / "coming_from.md"


def trainer_of_transformers():
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate, without which there is no Trainer")
    return runpy.run_path(str(EXAMPLES / "transformers_trainer.py"))


@pytest.mark.hf
@pytest.mark.nightly
def test_the_trainer_of_transformers_has_the_gradient_of_the_whole_batch():
    """Up to what models and losses of transformers compute in float32, whatever the dtype.

    Its own accumulation is right for a decoder. It adds up eight means, or takes their mean, or
    counts the balance loss of a router eight times, and the guide says how far that is off.
    """
    found = trainer_of_transformers()["main"]()
    wide, narrow = (torch.finfo(dtype).eps ** 0.5 for dtype in (torch.float64, torch.float32))
    ours = {name: off for (name, way), off in found.items() if way == "pureaccum"}
    theirs = {name: off for (name, way), off in found.items() if way == "the Trainer"}
    assert len(ours) == len(theirs) == 4
    assert max(ours["a head that classifies"][:2]) < wide  # its loss is in float64
    assert max(map(max, ours.values())) < narrow
    assert max(theirs["a decoder"]) < narrow
    assert abs(theirs["a head that classifies"][0] - 7) < wide
    page = COMING_FROM.read_text(encoding="utf-8")
    for name in theirs.keys() - {"a decoder"}:
        assert min(theirs[name]) > narrow
        numbers = " | ".join(f"{x:.0%}" for x in theirs[name])
        assert re.search(rf"\| {name}\b.* \| {numbers} \|", page), (name, numbers)


@pytest.mark.hf
@pytest.mark.slow
def test_the_trainer_of_transformers_finds_ours(tmp_path):
    """In at most twenty lines: it logs the losses, norms and rates of the whole batch."""
    source = (EXAMPLES / "transformers_trainer.py").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^class MicrobatchTrainer(?:\n| .*\n|\(.*\n)+", source, re.MULTILINE)
    counted = len([line for line in lines.splitlines() if line.strip()])
    assert counted <= 20
    assert f"a class of {counted} lines" in COMING_FROM.read_text(encoding="utf-8")
    example = trainer_of_transformers()
    model, usual, loss_of, size = example["CASES"]["a head that classifies"]
    ours = partial(example["MicrobatchTrainer"], loss_of=loss_of, microbatch_size=size)
    (_, log), (_, own) = (example["train"](model, example["STEPS"], it, 32) for it in (usual, ours))
    assert len(log) == len(own) == 11
    assert any(logged["grad_norm"] > 1 for logged in log[:-1])  # which is clipped
    rounding = torch.finfo(torch.float32).eps ** 0.5
    for whole, cut in zip(log[:-1], own[:-1], strict=True):
        assert cut["learning_rate"] == whole["learning_rate"]
        assert abs(cut["loss"] / whole["loss"] - 1) < rounding
        assert abs(cut["grad_norm"] / whole["grad_norm"] - 1) < rounding
    for setting in ({"gradient_accumulation_steps": 2}, {"fp16": True}):
        args = example["hf"].TrainingArguments(str(tmp_path), **setting)
        with pytest.raises(ValueError, match="expected gradient_accumulation_steps=1; no fp16"):
            ours(model=torch.nn.Linear(1, 1), args=args)


RANK_OF_LIGHTNING = """
import os, runpy, sys, torch
example, rank = runpy.run_path(sys.argv[1]), int(os.environ["RANK"])
torch.manual_seed(1)
data = example["samples"](True)[rank::2]
example["QUIET"].update(strategy="ddp", devices=2, use_distributed_sampler=False)
moved, loss = example["train"](example["Microbatched"], 16, 1, data, example["STEPS"])
if rank == 0:
    torch.save((moved, loss), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about itself
def test_a_module_of_lightning_has_the_gradient_of_the_whole_batch(tmp_path):
    """On one process and on two. Lightning's own is right in a window of even microbatches only."""
    pytest.importorskip("lightning", reason="needs lightning (the extra bench)")
    example = runpy.run_path(str(EXAMPLES / "lightning_module.py"))
    found = example["main"]()
    rounding = torch.finfo(torch.float64).eps ** 0.5
    assert max(max(found[kind, "pureaccum"]) for kind in ("even", "uneven")) < rounding
    even, short, _ = found["even", "Lightning"]
    assert even < rounding
    assert short > 1 / 8  # seven microbatches, divided by eight
    assert min(found["uneven", "Lightning"]) > rounding
    numbers = " | ".join(f"{x:.0%}" for x in found["uneven", "Lightning"])
    assert re.search(rf"\| uneven .*\| {numbers} \|", COMING_FROM.read_text(encoding="utf-8"))
    program, saved = tmp_path / "rank.py", tmp_path / "moved.pt"
    program.write_text(RANK_OF_LIGHTNING)
    torchrun(2, program, EXAMPLES / "lightning_module.py", saved)
    torch.manual_seed(1)
    moved, loss = example["train"](*example["WHOLE"], example["samples"](True), example["STEPS"])
    on_two, their_loss = torch.load(saved)
    assert example["off"](on_two, moved) < rounding
    assert abs(their_loss / loss - 1) < rounding


def test_the_three_ways_are_off_as_the_readme_says():
    """Ours is off by rounding, the usual loop by as much as the README says."""
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    found = main("three_ways")()
    assert len(found) == 3
    for case, (ours, usual) in found.items():
        assert ours < 2**-26  # sqrt(u): half of the digits of float64
        assert re.search(rf"\| {case} \| norm .* \| off by .* \| off by {usual:.0%} \|", readme)
