"""The claim, on real data: microbatches train as the full batch does, through BatchNorm too.

``race`` trains in eight ways and measures how far a gradient is from the full batch's;
``screen`` shows the runs side by side, a table at the end, and a picture. Read ``race`` first.
"""

from importlib.util import find_spec
from pathlib import Path

from .race import RUNS, digits, on_whole_numbers, ragged, train


def missing() -> list[str]:
    """The packages that have to be installed first."""
    packages = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}
    return [package for module, package in packages.items() if find_spec(module) is None]


def run(picture: Path, steps: int = 100) -> bool:
    """Train until so many steps are applied in each run, show, and draw; whether the claim held.

    Raises:
        OSError: The picture cannot be written. A link is not followed: what it leads to is no
            picture of ours.
    """
    from . import screen  # not earlier: it imports what `missing` names

    if _is_there(picture):
        print(f"Replaces {picture.absolute()}", flush=True)
    batch, test = digits()
    runs = {run: train(run, batch) for run in RUNS}
    found = screen.summaries(screen.train_all(runs, steps), batch, test)
    unequal = on_whole_numbers(batch, ragged(batch)(0))
    screen.conclude(found, unequal)
    _is_there(picture)  # again: something else may have come while it trained
    screen.draw(found, batch, picture)
    print(f"\nLoss curves, and memory against microbatch size: {picture}")
    return unequal == 0 and all(
        (it.distance.bound < 1) != it.run.usual for it in found if it.distance
    )


def _is_there(picture: Path) -> bool:
    """Whether there is a file to replace; an error where what is there must not be replaced."""
    if picture.is_symlink():
        raise OSError(
            f"it is a symbolic link to {picture.readlink()}. Remove the link, or run the demo in "
            "another folder"
        )
    if picture.exists() and not picture.is_file():
        raise OSError("what is there is not a file. Run the demo in another folder")
    return picture.exists()
