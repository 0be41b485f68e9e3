"""The deliberate faults in what is made of single samples: see ``_mutants.py``."""

from ._mutants import Mutant


OF_SAMPLES: dict[str, Mutant] = {
    "samples summed without their factor": Mutant(
        "A sum of clipped gradients clips nothing.",
        "_samples/reducers.py",
        "return unflatten(chunk.spec, [_added(total, x, factor) for total, x in columns])",
        "return unflatten(chunk.spec, [_added(t, x, factor * 0 + 1) for t, x in columns])",
    ),
    "samples without weight by multiplication": Mutant(
        "A sample of weight zero is multiplied away: NaN * 0 is NaN.",
        "_samples/reducers.py",
        "x = torch.where(_along(keep, x), x, 0.0)",
        "x = x * _along(keep, x)",
    ),
    "second moments of terms": Mutant(
        "The second moment of a sample that weighs more is that of its term, not over its weight.",
        "_samples/reducers.py",
        "power = torch.where(weight != 0, factor * factor / weight, 0.0)",
        "power = torch.where(weight != 0, factor * factor, 0.0)",
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
        "*(x / averages.share for x in averages[:7])",
        "*averages[:7]",
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
    "members that share memory": Mutant(
        "States that were stacked and taken apart are views of the stack.",
        "_base/ensembles.py",
        "[x.clone() for x in row]",
        "list(row)",
    ),
}
