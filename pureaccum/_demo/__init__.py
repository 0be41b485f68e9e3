"""What microbatches cost and save, on real data: the full batch, the usual loop and pureaccum.

``training`` trains and measures; ``screen`` prints the table and draws the picture.
"""

from importlib.util import find_spec
from pathlib import Path

from . import training


def missing() -> list[str]:
    """The packages that have to be installed first."""
    packages = {"matplotlib": "matplotlib", "rich": "rich", "sklearn": "scikit-learn"}
    return [package for module, package in packages.items() if find_spec(module) is None]


def run(picture: Path, steps: int = training.STEPS) -> bool:
    """Train, print the table and draw the picture; return whether the claim held.

    Raises:
        OSError: The picture cannot be written. A symbolic link is not followed, because its target
            is not a picture of ours.
    """
    from . import screen  # not earlier: it imports the packages that `missing` names

    if _is_there(picture):
        print(f"Replaces {picture.absolute()}", flush=True)
    with training.one_thread():
        batch, test = training.digits()
        runs = screen.train(batch, steps)
        held = screen.conclude(runs, test, training.on_whole_numbers(batch))
        _is_there(picture)  # again: a link may have been made during the training
        screen.draw(runs, training.memory_by_size(batch), picture)
    print(f"\nLoss curves, and memory against microbatch size: {picture}")
    return held


def _is_there(picture: Path) -> bool:
    """Whether there is a file to replace; raises if it must not be replaced."""
    if picture.is_symlink():
        raise OSError(
            f"it is a symbolic link to {picture.readlink()}. Remove the link, or run the demo in "
            "another folder"
        )
    if picture.exists() and not picture.is_file():
        raise OSError("it exists and is not a file. Run the demo in another folder")
    return picture.exists()
