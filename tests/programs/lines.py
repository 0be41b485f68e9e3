"""How many lines each program has, and its original: ``python -m tests.programs.lines``."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any


NAMES = {
    "nanogpt": "nanoGPT, `train.py`",
    "hugging_face": "transformers with `num_items_in_batch`",
    "gradcache": "GradCache",
    "opacus": "Opacus, `cifar10.py`",
    "mnist": "pytorch/examples, `mnist/main.py`",
    "torchtitan": "torchtitan, tokens of all ranks",
    "maml": "functorch, `maml_omniglot`",
}


def count(functions: list[Any]) -> int:
    """The lines that are not blank."""
    return sum(bool(x.strip()) for it in functions for x in inspect.getsource(it).splitlines())


def table() -> str:
    """In markdown."""
    rows = ["| program | the original | here, with a checkpoint |", "|---|---|---|"]
    for name, title in NAMES.items():
        module = import_module(f"tests.programs.test_{name}")
        theirs, ours = count(module.ORIGINAL), count(module.PORTED)
        rows.append(f"| [{title}](../../tests/programs/test_{name}.py) | {theirs} | {ours} |")
    return "\n".join(rows)


def pages() -> set[str]:
    """The programs that there are."""
    return {x.stem.removeprefix("test_") for x in Path(__file__).parent.glob("test_*.py")}


if __name__ == "__main__":
    print(table())
