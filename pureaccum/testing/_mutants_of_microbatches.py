"""The deliberate faults in the primitive and in BatchNorm over it: see ``_mutants.py``."""

from ._mutants import Mutant


OF_MICROBATCHES: dict[str, Mutant] = {
    "a captured gradient silently zero": Mutant(
        "An output that something captured is followed through is taken for a constant.",
        "_core/rule.py",
        "if any(ctx.needs_input_grad[2 + ctx.n :]):",
        "if False:",
    ),
    "a Function with something captured unseen": Mutant(
        "What a custom Function made of a captured tensor is taken for a microbatch's own.",
        "_core/recomputation.py",
        "if self.mode.unseen or any(map(self.mode.is_unseen, outs)):",
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
    "a gradient taken early in float16": Mutant(
        "A total computed in float16 is pulled with 1, and scaled afterwards.",
        "_core/recomputation.py",
        "self.half or any(x.dtype == torch.float16 for x in made)",
        "self.half",
    ),
    "a cast kept": Mutant(
        "The gradients of a cast are summed, and rounded to its dtype.",
        "_base/casts.py",
        "return first if then == [version(first), version(x)] else x",
        "return x",
    ),
    "a write to a cast undone": Mutant(
        "What a cast was made from takes its place, whatever was written to it since.",
        "_base/casts.py",
        "return first if then == [version(first), version(x)] else x",
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
}
