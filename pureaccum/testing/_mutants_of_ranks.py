"""The deliberate faults in what ranks do together: see ``_mutants.py``."""

from ._mutants import Mutant


OF_RANKS: dict[str, Mutant] = {
    "counts and scales of ranks not compared": Mutant(
        "Ranks do not compare the small leaves of their states, which change at every step.",
        "_base/agreement.py",
        "if x.numel() <= FEW], device)",
        "if False], device)",
    ),
    "settings of ranks not compared": Mutant(
        "What closures hold, such as the learning rate of an optimizer, is not read.",
        "_base/settings.py",
        "_read(cell.cell_contents,",
        "_read((),",
    ),
    "windows merged without their rows": Mutant(
        "The window of two has the rows of the first.",
        "_step/run.py",
        "a.rows + b.rows",
        "a.rows.clone()",
    ),
}
