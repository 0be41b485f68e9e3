"""Copies of the package with one fault in them, to test your own tests with.

    plant("a mean of means", directory)
    PYTHONPATH=directory pytest tests/mine.py

Tests that still pass would not notice the fault. (Run them where Python finds no other pureaccum
before that one, such as in the current directory: ``python -c "import pureaccum;
print(pureaccum.__file__)"`` says which it finds.)
"""

import shutil
from difflib import get_close_matches
from pathlib import Path

from ._mutants import OF_CORE
from ._mutants import Mutant as Mutant
from ._mutants_of_disk import OF_DISK
from ._mutants_of_microbatches import OF_MICROBATCHES
from ._mutants_of_ranks import OF_RANKS
from ._mutants_of_samples import OF_SAMPLES


MUTANTS: dict[str, Mutant] = OF_CORE | OF_DISK | OF_RANKS | OF_SAMPLES | OF_MICROBATCHES


def plant(name: str, directory: str | Path) -> Path:
    """Write a copy of the installed package that has a fault.

    The rule: ``directory/pureaccum`` is the package, with ``old`` of a ``Mutant`` made ``new``.

    Args:
        name: One of ``MUTANTS``.
        directory: Where to write; it is made if there is none. Nothing else is written to.

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
