"""``python -m pureaccum check train.py:make``: whether a loss can be microbatched, as a command.

The file is imported as ``python train.py`` would run it, except that it is not ``__main__``. An
error in it is printed as one line, which names the file and the line.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Generator, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .check import check_accumulation
from .report import Diagnosis, Leaf, Report


FITS, DOES_NOT, COULD_NOT = 0, 1, 2  # exit statuses

_SETTINGS = [
    name
    for name, parameter in inspect.signature(check_accumulation).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "raise_on_mismatch"
]


class Unusable(Exception):
    """What was typed, or what the file holds, cannot be checked; the message says what can be."""


class Source(NamedTuple):
    """Where a target is."""

    module: str  # its name while it is checked
    name: str  # in the module
    file: Path | None  # None: the module is imported by its name
    folder: Path  # to be the first of sys.path


def check(target: str, *, as_json: bool, whole_traceback: bool, **settings: object) -> int:
    """Check a target, print what was found, and return the exit status.

    Args:
        target: ``path/to/file.py:name`` or ``package.module:name``.
        as_json: Print one JSON object to stdout, and everything else to stderr.
        whole_traceback: Print the traceback of an error before the line that sums it up.
        settings: Keywords of ``check_accumulation``; they override those of the target.
    """
    out, source = sys.stdout, None
    try:
        with contextlib.redirect_stdout(sys.stderr if as_json else out):
            source = locate(target)
            with _visiting(source):
                report = _check_target(source, settings)
        print(json.dumps(_as_json(report), allow_nan=False) if as_json else report, file=out)
        return FITS if report.fits else DOES_NOT
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: its usual status, 1, would be a verdict
        if whole_traceback:
            traceback.print_exception(error)
        says = f"{_where(error, source) or target}: {_what(error)}"
        print(says, file=sys.stderr)
        if as_json:
            print(json.dumps({"error": says}), file=out)
        return COULD_NOT


def locate(target: str) -> Source:
    """Read a target, or say what is wrong with it."""
    path, _, name = target.rpartition(":")  # the last one: C:\train.py:make has two
    if not path or not name.isidentifier():
        raise Unusable("expected path/to/file.py:name or package.module:name")
    file = Path(path)
    dotted = all(part.isidentifier() for part in path.split("."))
    if dotted and file.suffix != ".py" and not file.is_file():
        return Source(path, name, None, Path.cwd())
    if file.is_dir():
        raise Unusable(f"{path} is a directory; expected a .py file")
    if not file.exists():
        near = (sibling.name for sibling in file.parent.glob("*.py"))
        raise Unusable(f"there is no file {path}{_meant(file.name, near)}")
    if file.suffix != ".py":
        raise Unusable(f"{path} is not a .py file")
    file, module = file.resolve(), file.stem.replace(".", "_")  # pickle reads dots as packages
    while module in sys.modules:  # a file named random.py must not take the place of Python's
        module += "_"
    return Source(module, name, file, file.parent)


def _check_target(source: Source, settings: dict[str, object]) -> Report:
    """Find what the target names, make what it makes, and check it."""
    module = _load(source)
    if not hasattr(module, source.name):
        raise Unusable(f"there is no such name{_meant(source.name, vars(module))}")
    found = getattr(module, source.name)
    loss_fn, params, batch, own = _read(found if isinstance(found, tuple) else _made(source, found))
    keywords: dict[Any, Any] = {**own, **settings}
    if unknown := [key for key in keywords if key not in _SETTINGS]:
        names = ", ".join(f"{key!r}{_meant(str(key), _SETTINGS)}" for key in unknown)
        raise Unusable(f"unknown settings: {names}; expected some of {', '.join(_SETTINGS)}")
    return check_accumulation(loss_fn, params, batch, **keywords, raise_on_mismatch=False)


# The user's file -------------------------------------------------------------------------


@contextlib.contextmanager
def _visiting(source: Source) -> Generator[None]:
    """Let imports and arguments be those of the target, and leave no trace of it afterwards."""
    path, argv, before = sys.path[:], sys.argv[:], set(sys.modules)
    sys.path.insert(0, str(source.folder))
    sys.argv[:] = [str(source.file or source.module)]  # its own, without our arguments
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = path, argv
        packages = {name.partition(".")[0] for name in before}
        for name in set(sys.modules) - before:
            near = _is_beside(getattr(sys.modules[name], "__dict__", {}), source.folder)
            # A submodule of torch that was imported late stays: others of torch hold it.
            if name == source.module or (near and name.partition(".")[0] not in packages):
                del sys.modules[name]


def _load(source: Source) -> ModuleType:
    if source.file is None:
        return importlib.import_module(source.module)
    spec = importlib.util.spec_from_file_location(source.module, source.file)
    assert spec is not None
    assert spec.loader is not None  # there is one for a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.module] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _made(source: Source, factory: Any) -> Any:
    """What a factory returns, or an error that shows how to write one."""
    if not callable(factory):
        raise Unusable(f"it is a {type(factory).__name__}; expected a factory, or {_EXPECTED}")
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some functions in C have no signature
        parameters = ()
    need = [p.name for p in parameters if p.default is p.empty and p.kind not in _ANY_NUMBER]
    if need:
        raise Unusable(
            f"it takes arguments ({', '.join(need)}), so it is most likely the loss itself; write "
            "a factory and check that:\n\n"
            f"    def check_{source.name}():\n"
            "        params, batch = ..., ...  # as in training; a few samples are enough\n"
            f"        return {source.name}, params, batch"
        )
    return factory()


_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EXPECTED = "a tuple (loss_fn, params, batch), with a dict of settings as a fourth if needed"


def _read(made: Any) -> tuple[Any, Any, Any, dict[Any, Any]]:
    """The loss, the parameters, the batch and the settings that a factory returned."""
    if not isinstance(made, tuple) or len(made) not in (3, 4):  # pyright: ignore[reportUnknownArgumentType]
        came = "None (is a return missing?)" if made is None else _type_of(made)
        raise Unusable(f"it gives {came}; expected {_EXPECTED}")
    loss_fn, params, batch, *rest = made
    if not callable(loss_fn) or not all(isinstance(own, dict) for own in rest):
        raise Unusable(f"it gives {_type_of(made)}; expected {_EXPECTED}")
    return loss_fn, params, batch, dict(*rest)


def _type_of(x: Any) -> str:
    """The type of something and, of a tuple, of its elements."""
    if not isinstance(x, tuple):
        return f"a {type(x).__name__}"
    return f"a tuple ({', '.join(type(element).__name__ for element in x)})"  # pyright: ignore[reportUnknownArgumentType]


# One line --------------------------------------------------------------------------------


def _where(error: BaseException, source: Source | None) -> str | None:
    """The innermost line that was running in the target's file, or in one beside it."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{_shown(error.filename)}:{error.lineno}"
    if source is None:
        return None
    for frame, line in [*traceback.walk_tb(error.__traceback__)][::-1]:
        module = frame.f_globals
        if module.get("__name__") == source.module or _is_beside(module, source.folder):
            return f"{_shown(frame.f_code.co_filename)}:{line}"
    return None


def _what(error: BaseException) -> str:
    """The type of an error, and the first line of its message and of each of its notes."""
    if isinstance(error, Unusable):
        return str(error)
    says = error.msg if isinstance(error, SyntaxError) else str(error)
    hints = [_first_line(note) for note in getattr(error, "__notes__", ())]
    if isinstance(error, SystemExit):
        hints.append('code for scripts only goes under if __name__ == "__main__"')
    elif isinstance(error, ImportError) and "relative import" in says:
        hints.append("give the target as package.module:name")
    line = ": ".join(filter(None, (type(error).__name__, _first_line(says))))
    return " ".join([line, *(f"({hint})" for hint in hints)])


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _is_beside(namespace: dict[str, Any], folder: Path) -> bool:
    """Whether a module lies in a folder itself, and not in an environment deeper in there."""
    name = str(namespace.get("__name__"))
    file = namespace.get("__file__") or next(iter(namespace.get("__path__", ())), None)
    package, ours = name.partition(".")[0], __name__.partition(".")[0]
    if not isinstance(file, str) or package == ours:  # our own lines tell a user nothing
        return False
    top = folder / package
    return Path(file) == top.with_suffix(".py") or Path(file).is_relative_to(top)


def _shown(file: str) -> str:
    """The shortest path of a file from here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _as_json(x: Any) -> Any:
    """A report as JSON knows it: records as objects, inf and NaN as words."""
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if isinstance(x, (Report, Leaf, Diagnosis)):
        return {key: _as_json(value) for key, value in x._asdict().items()}
    if isinstance(x, tuple):
        return [_as_json(element) for element in x]  # pyright: ignore[reportUnknownVariableType]
    return x
