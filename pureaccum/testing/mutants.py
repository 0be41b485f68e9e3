"""Copies of the package with one fault in them; the table of faults is one file, however long.

    plant("a mean of means", directory)
    PYTHONPATH=directory pytest tests/mine.py

Tests that still pass would not notice the fault. (Run them where Python finds no other pureaccum
before the copy, such as one in the current directory: ``python -c "import pureaccum;
print(pureaccum.__file__)"`` says which it finds.)
"""

import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault in the package: one replacement in one of its files.

    Attributes:
        says: What the fault is.
        file: The path of the file in the package.
        old: Text that occurs there exactly once.
        new: The text that replaces it.

    Example:
        >>> MUTANTS["the short tail dropped"].says
        'Rows after the last full microbatch are left out.'

    References:
        ``plant``, which writes it; ``MUTANTS``, the table of them by name.
    """

    says: str
    file: str
    old: str
    new: str


# Faults --------------------------------------------------------------------------------------


MUTANTS: dict[str, Mutant] = {
    # In gradients, sums and steps.
    "a mean of means": Mutant(
        "The mean of a microbatch is not weighed by its rows.",
        "_core/weights.py",
        "cotangent = scaled(torch.full_like(total, rows / power), scale)",
        "cotangent = scaled(torch.full_like(total, 1.0), scale)",
    ),
    "the value a mean of means": Mutant(
        "The value counts every microbatch as much as any other, whatever its rows.",
        "_core/weights.py",
        "times = weight = share = float(rows)",
        "times, weight, share = 1.0, 1.0, float(rows)",
    ),
    "the short tail dropped": Mutant(
        "Rows after the last full microbatch are left out.",
        "_core/batches.py",
        "for start in range(0, rows, size)]",
        "for start in range(0, rows - size + 1, size)]",
    ),
    "the power of two not put back": Mutant(
        "The power of two by which a cotangent was divided is not multiplied back.",
        "_core/weights.py",
        "weighing = Weighing(cotangent, power / (unit or 1.0), None)",
        "weighing = Weighing(cotangent, 1.0, None)",
    ),
    "scaled before the cast": Mutant(
        "A gradient is scaled in its own narrow dtype, where it may overflow.",
        "_core/weights.py",
        "term = grad if grad.dtype == dtype else grad.to(dtype)",
        "term = grad",
    ),
    "sums as narrow as the parameters": Mutant(
        "Gradients are summed in the parameters' dtype, however narrow.",
        "_base/trees.py",
        "return torch.promote_types(torch.promote_types(leaf, torch.float32), at_least)",
        "return leaf",
    ),
    "totals in float32": Mutant(
        "Totals and weights are float32, which counts to 2**24.",
        "_core/accumulator.py",
        "weight=zero(torch.float64),",
        "weight=zero(torch.float32),",
    ),
    "zero weight by multiplication": Mutant(
        "What has no weight is multiplied by zero: NaN * 0 is NaN.",
        "_core/weights.py",
        "torch.where(keep.to(term.device), term, 0.0)",
        "term * keep.to(term.device)",
    ),
    "the total of a masked microbatch added": Mutant(
        "The loss of a microbatch of weight zero is added, NaN or not.",
        "_core/weights.py",
        "value = torch.where(counts(seen.total, seen.weight), seen.total, 0.0)",
        "value = seen.total",
    ),
    "a ratio whose denominator is elsewhere dropped": Mutant(
        "A microbatch without a weight adds nothing, whatever its total.",
        "_core/loss.py",
        "return (weight != 0) | ((total != 0) & ((total - total) == 0))",
        "return weight != 0",
    ),
    "sums of complex numbers divided as such": Mutant(
        "A complex sum is divided by torch's complex division.",
        "_core/weights.py",
        "parts = [real_parts(x) if x.is_complex() else x for x in sums]",
        "if any(x.is_complex() for x in sums):\n"
        "        for number in by:\n"
        "            sums = [x / scalars_of(number)(x.real).to(x.dtype) for x in sums]\n"
        "        return sums\n"
        "    parts = list(sums)",
    ),
    "frozen parameters trained": Mutant(
        "Parameters that require no gradient are among those that an optimizer moves.",
        "_pure/functional.py",
        "params if tensor.requires_grad else frozen",
        "params",
    ),
    "one member's frozen parameters for all": Mutant(
        "An ensemble is given the frozen parameters of one member without a word.",
        "_pure/functional.py",
        "any_mapped(params.values())",
        "False",
    ),
    "a shell used again while a checkpoint holds it": Mutant(
        "A recomputation sees the tensors of a later call.",
        "_pure/shell.py",
        "if [*map(sys.getrefcount, shell.modules)] == shell.references:",
        "if True:",
    ),
    "a module that leads back called in a shell": Mutant(
        "A bound method of a module computes with the module's own parameters.",
        "_pure/shell.py",
        'places.leads_back.add("name") if found else places.safe_modes.add(training)',
        "places.safe_modes.add(training)",
    ),
    "what cannot be run again": Mutant(
        "A recomputation of a module that leads back to itself uses the module's own parameters.",
        "_pure/shell.py",
        "if not any(isinstance(x, Tensor) and x.requires_grad for x in given):",
        "if True:",
    ),
    "writes not watched": Mutant(
        "A write of a loss is not noticed before it happens.",
        "_core/writes.py",
        "if memory is not None and memory not in ours:",
        "if False:",
    ),
    "late writes not seen": Mutant(
        "A write in a later microbatch changes what the loss was given.",
        "_core/writes.py",
        "if now != self.before:",
        "if False:",
    ),
    "a new mode not watched": Mutant(
        "A module that writes in training mode alone is watched in eval mode alone.",
        "_core/writes.py",
        "for each in given], *looks, *modes",
        "for each in given], *looks",
    ),
    "aux that is a donated parameter": Mutant(
        "Aux of a stream shares memory with a state that is given up.",
        "_step/windows.py",
        "entry = entry._replace(aux=apart(entry.aux, given_up))",
        "pass",
    ),
    "division by a weight of zero": Mutant(
        "A batch of weight zero is divided by it.",
        "_core/loss.py",
        "by = select(weight == 0, torch.inf, weight)",
        "by = weight",
    ),
    "the weight kept on skip": Mutant(
        "A skipped microbatch leaves its weight behind.",
        "_core/weights.py",
        "weight=selected(entry.weight),",
        "weight=entry.weight,",
    ),
    "a skipped gradient not taken back": Mutant(
        "A skipped microbatch leaves its gradient behind.",
        "_core/microbatch_gradient.py",
        "torch.where(ok.to(new.device), new, old, out=new)",
        "pass",
    ),
    "speculation never redone": Mutant(
        "A window that hoped for finite gradients is not redone when there were none.",
        "_core/whole_batch.py",
        "    if good:\n        return sums\n",
        "    return sums\n",
    ),
    "speculation with other random numbers": Mutant(
        "A window that is redone draws other random numbers.",
        "_core/whole_batch.py",
        "    torch.set_rng_state(random)\n",
        "",
    ),
    "large leaves not summed": Mutant(
        "Gradients of large leaves are never added.",
        "_core/microbatch_gradient.py",
        "        add_gradient_(sums[i], grad, how)\n",
        "",
    ),
    "second-order terms dropped": Mutant(
        "An outer derivative misses what goes through the gradient.",
        "_core/engines.py",
        "vjp(cotangent, retain_graph=False)",
        "vjp(cotangent, retain_graph=False, create_graph=False)",
    ),
    "the caller's sums changed": Mutant(
        "An update that was not given the state writes to it.",
        "_core/accumulator.py",
        "before, sums = sums, [x.clone() for x in sums]",
        "before = sums",
    ),
    "a donated state not marked": Mutant(
        "A donated state can still be used, and its numbers are wrong.",
        "_base/states.py",
        "    mark(given.values())\n",
        "",
    ),
    "states that share a count": Mutant(
        "Two states share a tensor: donating one spoils the other.",
        "_core/accumulator.py",
        "skipped=state.skipped + more.skipped,",
        "skipped=state.skipped,",
    ),
    "functional_call not kept open": Mutant(
        "Checkpoints are recomputed with other parameters than the caller's.",
        "_core/called_modules.py",
        "                attributes[name] = tensors\n            yield",
        "                pass\n            yield",
    ),
    "aux means that are not weighted": Mutant(
        "The mean of aux does not weigh microbatches as the loss does.",
        "_core/reductions.py",
        "torch.where(each != 0, terms * each, 0.0)",
        "terms",
    ),
    "an autocast cache around the microbatches": Mutant(
        "Autocast around the microbatches is let through, and leaks copies.",
        "_base/checks.py",
        "    for device in {leaf.device.type for leaf in leaves}:",
        "    for device in ():",
    ),
    "a scale that is not undone": Mutant(
        "Gradients reach the optimizer multiplied by the loss scale.",
        "_step/windows.py",
        "scales = [] if scale is None else [scale]",
        "scales = []",
    ),
    "a step applied whatever its gradient": Mutant(
        "A step with an inf or NaN in its gradient is applied.",
        "_step/windows.py",
        "_applied(sound & any_weight,",
        "_applied(any_weight,",
    ),
    "a step applied whatever its learning rate": Mutant(
        "A step whose learning rate is NaN is applied.",
        "_step/windows.py",
        "_applied(sound & any_weight, ready.sound, device)",
        "_applied(sound & any_weight, True, device)",
    ),
    "a learning rate judged by itself": Mutant(
        "A learning rate is not finite in the parameters' dtype, and is used.",
        "_optim/schedules.py",
        "rate.abs() <= most if (number := known(rate)) is None else abs(number) <= most",
        "torch.isfinite(rate)",
    ),
    "one sound learning rate for all": Mutant(
        "All parts of a partition are stepped where one of their learning rates can be used.",
        "_optim/update.py",
        "return a and b",
        "return a or b",
    ),
    "a loss scale that learns from a learning rate": Mutant(
        "A learning rate of NaN counts as an overflow of the gradients.",
        "_step/windows.py",
        "finite = scalar(sound & (nonfinite == 0), torch.bool, device)",
        "finite = applied & (nonfinite == 0)",
    ),
    "a step of no weight applied": Mutant(
        "A step of weight zero is applied: moments decay, schedules move.",
        "_step/windows.py",
        "_applied(sound & any_weight,",
        "_applied(sound,",
    ),
    "a loss scale that skipped microbatches do not tell": Mutant(
        "Overflows in skipped microbatches do not lower the loss scale.",
        "_step/windows.py",
        "finite = scalar(sound & (nonfinite == 0), torch.bool, device)",
        "finite = scalar(sound, torch.bool, device)",
    ),
    "a loss scale that learns from nothing": Mutant(
        "A step of weight zero counts as one without overflow.",
        "_step/windows.py",
        "scaling = where(any_weight | ~finite, learned, scaling)",
        "scaling = learned",
    ),
    "buffers of a step not applied": Mutant(
        "A step that is not applied replaces the buffers.",
        "_step/windows.py",
        "buffers = where(applied, finish_buffers(carried[0]), buffers)",
        "buffers = finish_buffers(carried[0])",
    ),
    "keys that start anew in every microbatch": Mutant(
        "Samples of different microbatches get the same keys.",
        "_step/microbatch_loss.py",
        "fold_in(attempt, first + before + index)",
        "fold_in(attempt, index)",
    ),
    "keys that are the same in every step": Mutant(
        "Every step draws the same random numbers.",
        "_step/microbatch_loss.py",
        "fold_in(state.key, state.attempts)",
        "fold_in(state.key, 0)",
    ),
    "one member that speaks for all": Mutant(
        "What is read under a vmap is what its first member has.",
        "_base/trees.py",
        "if numbers and numbers.count(numbers[0]) == len(numbers) else None",
        "if numbers else None",
    ),
    "an optimizer that counts steps not applied": Mutant(
        "The optimizer counts a step that is not applied.",
        "_optim/update.py",
        "count = step if applied is True else state.steps + more",
        "count = step",
    ),
    "momentum that is dampened from the start": Mutant(
        "The first momentum is dampened, which torch's is not.",
        "_optim/optimizers.py",
        "if rest and known(step) != 1:",
        "if rest:",
    ),
    "moments pooled without what lies between means": Mutant(
        "Pooled variances leave out how far apart the means are.",
        "_step/buffers.py",
        "a.squares + b.squares + apart * apart * (a.elements * share)",
        "a.squares + b.squares",
    ),
    "one round of the cipher less": Mutant(
        "Random numbers come from four groups of rounds, not five.",
        "_pure/keys.py",
        "for group in range(5):",
        "for group in range(4):",
    ),
    "a loss scale without a floor": Mutant(
        "The loss scale has neither floor nor ceiling.",
        "_step/loss_scale.py",
        "new.clamp(min_scale, max_scale)",
        "new",
    ),
    "a check that forgives too much": Mutant(
        "The bound of a check is the fourth root of the unit, not the square root.",
        "testing/_check/trials.py",
        "Bound(UNIT[torch.float64] ** 0.5, floor)",
        "Bound(UNIT[torch.float64] ** 0.25, floor)",
    ),
    "a check of rows in order alone": Mutant(
        "A check cuts the batch at random, but never shuffles it.",
        "testing/_check/subject.py",
        "order = torch.randperm(rows, generator=random).tolist()",
        "order = list(range(rows))",
    ),
    "some rows compared with all": Mutant(
        "What some rows accumulate to is compared with the whole batch.",
        "testing/_check/trials.py",
        "want = self.whole(tuple(sorted(itertools.chain(*split))))",
        "want = self.whole(self.subject.everything())",
    ),
    "an experiment that says yes too soon": Mutant(
        "A term that two pairs of microbatches have in common is taken for a constant.",
        "testing/_check/rows.py",
        "return len(others) > 1 and all(",
        "return len(others) > 1 and any(",
    ),
    "two calls on the same rows": Mutant(
        "A check watches two calls on the same rows in the same order, which write the same.",
        "testing/_check/watch.py",
        "subject.everything()[::-1]",
        "subject.everything()",
    ),
    "variables left as the loss assigned them": Mutant(
        "What a loss counts in a variable of its own is not put back.",
        "testing/_check/kept.py",
        "cells[name].cell_contents = content",
        "pass",
    ),
    "the tail forgotten in a scan": Mutant(
        "A compiled step leaves the shorter last microbatch out.",
        "_step/scan.py",
        "    if batch.tail is not None:\n",
        "    if False:\n",
    ),
    "0-d leaves written in place": Mutant(
        "A graph writes to tensors without dimensions, which torch 2.13 loses on a CPU.",
        "_step/graphs.py",
        "alike = x.dim() > 0 and x.shape",
        "alike = x.shape",
    ),
    "the unit not undone in a loop": Mutant(
        "Sums of a window in units of a power of two are taken as they stand.",
        "_step/graphs.py",
        "return applied_window(plan, state, window, unit, aux)",
        "return applied_window(plan, state, window, 1.0, aux)",
    ),
    "the users' guards left out": Mutant(
        "A graph does not notice that what a loss captures has changed.",
        "_base/torch_internals.py",
        '["_global_" in guard.name or not _LIBRARY.search(guard.name) for guard in guards]',
        "[False for guard in guards]",
    ),
    # In what is saved and loaded.
    "numbers as they lie in memory": Mutant(
        "A tensor that is not contiguous is written as it lies in memory.",
        "_base/agreement.py",
        "return (x if x.is_contiguous() else bits(x).contiguous()).cpu()",
        "return torch.as_strided(x, (x.numel(),), (1,)).cpu()",
    ),
    "a checksum that nobody compares": Mutant(
        "Numbers that were changed on the disk are loaded.",
        "checkpoint/save_load.py",
        "if check is not None and check != contents.checks[number]:",
        "if check is None and check == contents.checks[number]:",
    ),
    "parts with holes between them": Mutant(
        "What no rank has written is loaded as it happens to lie in memory.",
        "checkpoint/files.py",
        "return cells and sorted(held) == sorted(itertools.product(*sides))",
        "return cells or bool(held)",
    ),
    "shards of two saves": Mutant(
        "A shard of another save is accepted.",
        "checkpoint/shards.py",
        "if part.save != usual:",
        "if part.save == part:",
    ),
    "one rank goes on without the others": Mutant(
        "A rank that could read its part does not hear that another could not.",
        "checkpoint/shards.py",
        "if worst:",
        "if worst < 0:",
    ),
    "a header of any length": Mutant(
        "A header is read whatever length the file claims for it.",
        "checkpoint/file_format.py",
        "if length > LONGEST or 8 + length + 4 > size:",
        "if 8 + length + 4 > size:",
    ),
    "leftovers of one name alone": Mutant(
        "What a killed save of ranks leaves is not removed.",
        "checkpoint/files.py",
        "is_folder = stat.S_ISDIR(os.lstat(leftover).st_mode)",
        "is_folder = False",
    ),
    # In the primitive.
    "a captured gradient silently zero": Mutant(
        "An output that has a gradient for something captured is taken for a constant.",
        "_core/rule.py",
        "if any(ctx.needs_input_grad[2 + ctx.n :]):",
        "if False:",
    ),
    "a Function with something captured unseen": Mutant(
        "What a custom Function made of a captured tensor is taken for a microbatch's own.",
        "_core/rule.py",
        "if any(ctx.needs_input_grad[2 + ctx.n :]):",
        "if False:",
    ),
    "rematerialised with other random numbers": Mutant(
        "A function that is run again draws other numbers.",
        "_core/recomputation.py",
        "stack.enter_context(replaying(self.drawn[p]))",
        "pass",
    ),
    "run again with the modules' own parameters": Mutant(
        "A recomputation sees what a module holds by then.",
        "_core/recomputation.py",
        "holding({k: v for k, v in self.held.items() if _differs(*v)})",
        "holding({})",
    ),
    "run again in another mode": Mutant(
        "A recomputation sees the mode that a module is in by then.",
        "_core/recomputation.py",
        "stack.enter_context(in_modes(self.modules))",
        "pass",
    ),
    "a write before the derivative unseen": Mutant(
        "A recomputation begins from what a captured tensor has become.",
        "_core/recomputation.py",
        "if (x := at()) is not None and version(x) != then:",
        "if False:",
    ),
    "a sum of gradients as narrow as a piece": Mutant(
        "Gradients of pieces are added in the dtype of the parameter.",
        "_core/gathered.py",
        "x.to(sum_dtype(x), copy=not self.recorded)",
        "x.clone()",
    ),
    "NaN * 0 of a piece without weight": Mutant(
        "A piece that does not count gives its gradient times zero.",
        "_core/rule.py",
        "return torch.where(keep.to(x.device), x, 0.0)",
        "return x * keep.to(x.device, x.dtype)",
    ),
    "the last that is all": Mutant(
        "What the last microbatch gives has the gradient of all microbatches.",
        "_core/outputs.py",
        "x = torch.zeros_like(x)",
        "pass",
    ),
    "a largest of one microbatch": Mutant(
        "Of microbatches that tie for the largest, one has all of the gradient.",
        "_core/outputs.py",
        "return x.amax(0) if",
        "return x.max(0).values if",
    ),
    "a reducer's tangent of zero": Mutant(
        "What a user's reducer returns is a constant to forward AD.",
        "_core/outputs.py",
        "torch.full_like(x, torch.nan).as_subclass(_Unreadable)",
        "torch.zeros_like(x)",
    ),
    "a cast kept": Mutant(
        "The gradients of a cast are summed, and rounded to its dtype.",
        "_core/recomputation.py",
        "return first if then == versions([first, x]) else x",
        "return x",
    ),
    "a write to a cast undone": Mutant(
        "What a cast was made from takes its place, whatever was written to it since.",
        "_core/recomputation.py",
        "return first if then == versions([first, x]) else x",
        "return first",
    ),
    "merged without the distance of the means": Mutant(
        "Squares of distances from different points are added as they stand.",
        "_pure/batch_norm.py",
        "squares = squares + 2 * apart * sums + each * apart**2",
        "squares = squares + 0 * apart",
    ),
    "moments taken for constants": Mutant(
        "A batch norm has no gradient through its mean and its variance.",
        "_pure/batch_norm.py",
        "inverse = torch.rsqrt(moments.var + eps)",
        "inverse = torch.rsqrt(var + eps)",
    ),
    # In what ranks do together.
    "counts and scales of ranks not compared": Mutant(
        "Ranks do not compare the small leaves of their states, which change at every step.",
        "_base/agreement.py",
        "if x.numel() <= FEW], device)",
        "if False], device)",
    ),
    "settings of ranks not compared": Mutant(
        "What closures hold, such as the learning rate of an optimizer, is not read.",
        "_base/agreement.py",
        "_read(cell.cell_contents,",
        "_read((),",
    ),
    "windows merged without their rows": Mutant(
        "Two windows that are merged have the rows of the first alone.",
        "_step/windows.py",
        "a.rows + b.rows",
        "a.rows.clone()",
    ),
    # In what is made of single samples.
    "samples summed without their factor": Mutant(
        "A sum of clipped gradients clips nothing.",
        "_samples/reducers.py",
        "[_plus_rows(total, x, factor) for total, x, factor in columns]",
        "[_plus_rows(t, x, f * 0 + 1) for t, x, f in columns]",
    ),
    "samples without weight by multiplication": Mutant(
        "A sample of weight zero is multiplied away: NaN * 0 is NaN.",
        "_samples/reducers.py",
        "x = torch.where(_broadcast(chunk.keep.to(x.device), x), x, 0.0)",
        "x = x * _broadcast(chunk.keep.to(x.device), x)",
    ),
    "second moments of terms": Mutant(
        "The second moment of a weighted sample is that of its term, not divided by its weight.",
        "_samples/reducers.py",
        "power = quotient(factor * factor, weight)",
        "power = factor * factor",
    ),
    "noise over all microbatches": Mutant(
        "The variance between K microbatches is divided by K: biased.",
        "_samples/noise_scale.py",
        "(squares - between) / (pieces - 1)",
        "(squares - between) / pieces",
    ),
    "averages that begin at zero": Mutant(
        "Moving averages are not corrected for having begun at zero.",
        "_samples/noise_scale.py",
        "lambda x: x / averages.share",
        "lambda x: x",
    ),
    "a skipped microbatch's noise kept": Mutant(
        "What nonfinite='skip' leaves out still counts among the squared norms.",
        "_core/weights.py",
        "squares = torch.where(finite, squares, 0.0)",
        "pass",
    ),
    "a divisor that meta-gradients do not see": Mutant(
        "The weight of Weighted is cut off from the transforms around the gradient.",
        "_core/loss.py",
        "weight = weight.to(total.device, torch.float64)",
        "weight = weight.detach().to(total.device, torch.float64)",
    ),
    "cotangents of ranks that are not weighed": Mutant(
        "What goes back through a sum over ranks counts as much on each, whatever its rows.",
        "_core/exchange.py",
        "given = [c * times for c in given]",
        "pass",
    ),
    "cotangents of other ranks left out": Mutant(
        "Rows that were gathered get back what this rank alone made of them.",
        "_core/exchange.py",
        "dist.reduce_scatter(own[0], [*flat], group=group)",
        "own[0] = flat[dist.get_rank(group)]",
    ),
    "exchanges not compared": Mutant(
        "What ranks exchange inside of a loss is taken to be alike.",
        "_core/exchange.py",
        "if trusted and not parts and kind in known.kinds:",
        "if counted:",
    ),
    "members that share memory": Mutant(
        "States that were stacked and taken apart are views of the stack.",
        "_base/states.py",
        "[x.clone() for x in row]",
        "list(row)",
    ),
    # In curvature.
    "a product that counts by the vector": Mutant(
        "Whether a microbatch counts is decided by its product, and not by its loss.",
        "curvature/products.py",
        "its = total.detach() + torch.nan_to_num(number - number.detach())",
        "its = number",
    ),
    "the other factor of Gauss-Newton differentiated": Mutant(
        "What stands in a product as a constant is differentiated along with the rest.",
        "curvature/derivatives.py",
        "return [x if again or x is None else x.detach() for x in tensors]",
        "return [*tensors]",
    ),
    "a constant of a product under a transform": Mutant(
        "A transform around a product takes its other factor for a constant.",
        "curvature/products.py",
        "again = flatten(params)[0] if transform_active() else []",
        "again = []",
    ),
    "a product that nobody compares": Mutant(
        "Products that miss what a custom Function does are taken as they are.",
        "curvature/passes.py",
        "if knows(known, *given):",
        "if check:",
    ),
    "what is detached moves": Mutant(
        "Differences follow what a loss detaches, and products do not.",
        "_core/differences.py",
        "(2, nullcontext()), (2, _Constants())",
        "(2, nullcontext())",
    ),
    "curvature of nothing zero": Mutant(
        "A batch of no weight has a curvature of zero.",
        "curvature/passes.py",
        "nothing = value.isnan()",
        "nothing = value.isinf()",
    ),
    "a constant in a loss": Mutant(
        "What keeps no graph is a constant in a loss that plain autograd differentiates.",
        "_base/checks.py",
        "if backward is None or not torch.is_grad_enabled():",
        "if True:",
    ),
    "threads push at once": Mutant(
        "Two threads are inside of torch's forward AD at once, of which there is one.",
        "curvature/derivatives.py",
        "with nullcontext() if torch.compiler.is_compiling() else _ALONE:",
        "with nullcontext():",
    ),
    "an error that does not shrink": Mutant(
        "The error of an estimate is the spread of its samples, however many they are.",
        "curvature/estimates.py",
        "by = float(samples * (samples - 1)) or torch.nan",
        "by = float(samples - 1) or torch.nan",
    ),
    "conjugate gradients beyond the solution": Mutant(
        "A system that is solved takes further steps.",
        "curvature/cg.py",
        "goes = (state.norm > state.target) & (state.curvature > 0)",
        "goes = state.curvature > 0",
    ),
    # In layers, kernels, and optimizers that look again.
    "outer products left out by multiplication": Mutant(
        "Of a layer, a sample that is not finite is multiplied by zero: NaN * 0 is NaN.",
        "_samples/outer_products.py",
        "return Outer(left, torch.where(keep, x.right, 0.0), x.shape)",
        "return Outer(left, x.right * keep, x.shape)",
    ),
    "norms of positions alone": Mutant(
        "The norm of a layer's gradient leaves out the products of two positions of a text.",
        "_samples/outer_products.py",
        "return ((left @ left.mT) * (right @ right.mT)).sum((-2, -1)).clamp(min=0.0).sqrt()",
        "return (left**2).sum(-1).mul((right**2).sum(-1)).sum(-1).sqrt()",
    ),
    "a leaf used in an unseen way": Mutant(
        "A use of a leaf that no function shows is passed over.",
        "_samples/layers.py",
        "if any(x is not None for x in found[1 + len(copies) :]):",
        "if False:",
    ),
    "a kernel without a mirror": Mutant(
        "Below the diagonal of blocks, the matrix of a batch with itself stays empty.",
        "_samples/gramian.py",
        "if alike and j > i:",
        "if False:",
    ),
    "steps remembered where the function curves downwards": Mutant(
        "L-BFGS remembers a move along which the function curves downwards.",
        "_optim/lbfgs.py",
        "if not 0 < scale < math.inf:  # it curves downwards, or numbers overflowed",
        "if scale == math.inf:",
    ),
    "sam that does not look": Mutant(
        "SAM steps by the gradient of params.",
        "_optim/sam.py",
        "grads, _ = asked(func, _uphill(flat[0], grads, rho), flat)",
        "grads, _ = asked(func, _uphill(flat[0], grads, 0.0), flat)",
    ),
}


# Planting ------------------------------------------------------------------------------------


def plant(name: str, directory: str | Path) -> Path:
    """Write a copy of the installed package that has a fault.

    The rule: ``directory/pureaccum`` is the package, with ``old`` of a ``Mutant`` made ``new``.

    Args:
        name: One of ``MUTANTS``.
        directory: Where to write; it is made if there is none.

    Returns:
        The path of the copy.

    Raises:
        ValueError: There is no such mutant.
        FileExistsError: ``directory`` has a ``pureaccum`` already.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as directory:
        ...     copy = plant("the short tail dropped", directory)
        ...     "range(0, rows - size + 1, size)" in (copy / "_core" / "batches.py").read_text()
        True

    References:
        DeMillo, Lipton and Sayward, `Hints on test data selection
        <https://doi.org/10.1109/C-M.1978.218136>`_, 1978.
    """
    if name not in MUTANTS:
        near = get_close_matches(name, MUTANTS, n=3, cutoff=0.3)
        meant = " or ".join(map(repr, near)) or f"one of {len(MUTANTS)} in MUTANTS"
        raise ValueError(f"there is no mutant {name!r}; expected {meant}.")
    mutant = MUTANTS[name]
    package = Path(__file__).parents[1]
    source = (package / mutant.file).read_text(encoding="utf-8")
    if (count := source.count(mutant.old)) != 1:
        raise ValueError(
            f"{mutant.file} has the text of {name!r} {count} times, expected once: {mutant.old!r}. "
            "The file was changed and the table was not."
        )
    copy = Path(directory) / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / mutant.file).write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    return copy
