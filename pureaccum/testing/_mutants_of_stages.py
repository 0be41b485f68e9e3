"""The deliberate faults in stages and in rematerialisation: see ``_mutants.py``."""

from ._mutants import Mutant


OF_STAGES: dict[str, Mutant] = {
    "a pooled value's cotangent of one microbatch": Mutant(
        "What microbatches give back to a value that all of them read is not summed.",
        "_staged.py",
        "added_to(values.get(place, zero), grad, weighing)",
        "added_to(zero, grad, weighing)",
    ),
    "a boundary's cotangent not handed through": Mutant(
        "A pooled stage keeps the gradient of what stands after it from what stands before.",
        "_staged.py",
        "inner = [_plus(a, b) for a, b in zip(inner, after, strict=True)]",
        "pass",
    ),
    "the cotangent of an unweighted microbatch kept": Mutant(
        "A microbatch of weight zero gives NaN * 0 back to the stages before.",
        "_staged.py",
        "return x if keep is None else torch.where(keep.to(x.device), x, 0.0)",
        "return x",
    ),
    "a stage computed again draws anew": Mutant(
        "On the way back a stage sees other random numbers.",
        "_breadth.py",
        "with replaying(kept.drawn[n][p] if last is None else []):",
        "with replaying([]):",
    ),
    "an in-place write to a boundary unseen": Mutant(
        "A stage that is computed again begins from what it has written itself.",
        "_breadth.py",
        "if _versions(tensors) != versions:",
        "if False:",
    ),
    "captured writes not refused": Mutant(
        "A stage that holds a batch norm of its own is run, and updates it twice.",
        "_breadth.py",
        'if p > 0 or through.engine == "autograd" or transform_active():',
        "if True:",
    ),
    "merged without the distance of the means": Mutant(
        "Squares of distances from different points are added as they stand.",
        "_batch_norm.py",
        "squares = squares + 2 * apart * sums + each * apart**2",
        "squares = squares + 0 * apart",
    ),
    "moments taken for constants": Mutant(
        "A batch norm has no gradient through its mean and its variance.",
        "_batch_norm.py",
        "mean_, var_ = mean.detach(), var.detach()",
        "mean_, var_ = mean, var",
    ),
    "rematerialised with other random numbers": Mutant(
        "A function that is run again draws other numbers.",
        "_remat.py",
        "stack.enter_context(replaying(drawn))",
        "stack.enter_context(replaying([]))",
    ),
    "a captured gradient silently zero": Mutant(
        "What a rematerialised function captures gets no gradient, and nothing is said.",
        "_attach.py",
        "if any(ctx.needs_input_grad[2 + n :]):",
        "if False:",
    ),
}
