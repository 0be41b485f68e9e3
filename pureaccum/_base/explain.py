"""What stopped the compiler, in one sentence about the user's own code; its own words below."""

import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch

from .donation import Spoiled, mark
from .generators import put_back
from .torch_internals import compiler_stack, is_compiler_error
from .trees import leaves as leaves_of


# Words of the compiler, and what they mean for whoever wrote the line.
NUMBER = "a number that is known only when the step runs"
NOTHING_ELSE = "a graph computes on tensors and does nothing else"
MEANINGS = {  # the first that fits
    "branching": f"it decides by {NUMBER}; torch.where takes both sides",
    "assertion": f"it decides by {NUMBER}; look at what the step returns instead",
    "logging.logger": f"{NOTHING_ELSE}; return what is to be logged as aux (has_aux=True)",
    "operator `print`": f"{NOTHING_ELSE}; return what is to be printed as aux (has_aux=True)",
    "item()": f"it takes {NUMBER} out of a tensor; keep it a tensor",
    "tolist": f"it takes {NUMBER} out of a tensor; keep it a tensor",
    "on data-dependent": f"it asks for {NUMBER}; keep it a tensor",
    "dynamic shape operator": f"the size of its result is {NUMBER}; a mask keeps the size "
    "(torch.where, or Weighted)",
    "higher order operator": "it changes something outside of the loop that the graph is, such as "
    "a list; return it as aux (has_aux=True)",
    "builtin operator": NOTHING_ELSE,
}
RAISED = re.compile(r"""raised exception \w+\((["'])(.*?)\1\)""")
OURS = Path(__file__).parents[1]
STANDARD = sysconfig.get_path("stdlib")
LIBRARIES = (
    *(str(Path(library.__file__ or "").parent) for library in (torch, optree)),
    str(OURS),
)


class CompileError(RuntimeError):
    """A step that runs, and does not compile."""


def attempt(
    program: Callable[..., Any],
    args: tuple[Any, ...],
    eagerly: Callable[[], object],
    spoils: bool = False,
) -> Any:
    """Call a graph; what goes wrong without the compiler too is said without it.

    Args:
        program: The graph, which the first call makes.
        args: Its arguments, of which the first is written to if it ``spoils`` that.
        eagerly: Does the same without the compiler.
        spoils: Whether the first is of no use any more where the graph fails while it runs.
    """
    try:
        with torch.no_grad():
            return program(*args)
    except BaseException as error:
        sentence = explained(error)
        if sentence is None:
            if spoils:
                mark(leaves_of(args[0]), Spoiled)
            raise
        device = leaves_of(args[0])[0].device
        with put_back(device):
            eagerly()
        raise CompileError(sentence) from error


def explained(error: BaseException) -> str | None:
    """A message for an error of the compiler; None for any other error."""
    if not is_compiler_error(error):
        return None
    text = str(error)
    if is_limit(error):
        return (
            "this step was compiled anew again and again: something besides the number of rows "
            "changes from call to call (torch's own warning names it), or a Python number is made "
            "of that. Put a number that the loss reads into the batch, where it may change at "
            "every step; if it is there, the loss makes a size, a range or a branch of it: hand "
            "over a tensor with one row per sample. Pad what comes in many lengths, and keep the "
            f"order of a dict's keys. The compiler's own words:\n\n{text}"
        )
    stack = compiler_stack(error)
    ours = stack and OURS in Path(stack[-1].filename).parents and RAISED.search(text)
    if ours:
        return f"{ours[2]} The compiler's own words:\n\n{text}"
    theirs = [frame for frame in stack if not _of_a_library(frame.filename)]
    if not theirs:
        return (
            "torch's compiler failed on this step, which runs without compile=True. Its own "
            f"words:\n\n{text}"
        )
    at, head = theirs[-1], text[:600].lower()
    found = (why for word, why in MEANINGS.items() if word in head)
    why = next(found, text.strip().splitlines()[0].rstrip("."))
    return (
        f'cannot compile `{at.line}` (File "{at.filename}", line {at.lineno}, in {at.name}): '
        f"{why}. Without compile=True the step runs as it is. The compiler's own words:\n\n{text}"
    )


def is_limit(error: BaseException | None) -> bool:
    """Whether the compiler would not make one more graph of the same code."""
    return is_compiler_error(error) and "recompile" in type(error).__name__.lower()


def _of_a_library(file: str) -> bool:
    standard = file.startswith(STANDARD) and "site-packages" not in file
    return standard or file.startswith(LIBRARIES)
