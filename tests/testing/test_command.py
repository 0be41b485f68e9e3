"""``python -m pureaccum check``: one line for what is wrong, and no verdict by accident."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pureaccum as pa
from pureaccum.__main__ import main


pytestmark = [pytest.mark.faults, pytest.mark.promise("tools")]
FILE = """\
import torch


def loss(params, batch):
    return ((batch["x"] @ params["w"]) ** 2).mean()


def total(params, batch):
    return ((batch["x"] @ params["w"]) ** 2).sum()


def masked(params, batch):
    error = (batch["x"] @ params["w"]) ** 2
    return (error * batch["mask"]).sum() / batch["mask"].sum()


def tensors():
    return {"w": torch.tensor([1.0, -2.0])}, {"x": torch.arange(8.0).reshape(4, 2)}


def make():
    return loss, *tensors()


def make_total():
    return total, *tensors(), {"reduction": "sum"}


def make_masked():
    params, batch = tensors()
    return masked, params, batch | {"mask": torch.tensor([1.0, 0, 1, 1])}


ready = make()
"""


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(FILE)


def write(code, file="mine.py"):
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(textwrap.dedent(code))


def check(target, *options):
    return main(["check", target, *options])


def refused(capsys, target, *options):
    """The one line that a target which cannot be checked gets."""
    before = sys.path[:], sys.argv[:], sorted(sys.modules)
    assert check(target, *options) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    line, end = err.split("\n")
    assert not end
    path, argv, modules = before
    assert (sys.path, sys.argv) == (path, argv)
    assert not {name.partition(".")[0] for name in set(sys.modules) - set(modules)} & OURS
    return line


OURS = {"train", "mine", "helper", "package"}


# What was typed --------------------------------------------------------------------------

TARGETS = {
    "no name": ("train.py", "expected path/to/file.py:name or package.module:name"),
    "empty name": ("train.py:", "expected path/to/file.py:name"),
    "no file": (":make", "expected path/to/file.py:name"),
    "no name, on Windows": (r"C:\train.py", "expected path/to/file.py:name"),
    "not there, on Windows": (r"C:\train.py:make", r"there is no file C:\train.py"),
    "missing": ("trian.py:make", "there is no file trian.py (did you mean train.py?)"),
    "missing folder": ("away/train.py:make", "there is no file away/train.py"),
    "folder": ("./:make", "./ is a directory; expected a .py file"),
    "no Python": ("notes.txt:make", "notes.txt is not a .py file"),
    "unknown name": ("train.py:mkae", "there is no such name (did you mean make"),
    "unknown module": ("nowhere.at.all:make", "ModuleNotFoundError: No module named 'nowhere'"),
}


@pytest.mark.parametrize(("target", "says"), TARGETS.values(), ids=TARGETS)
def test_a_badly_typed_target_is_named(target, says, capsys):
    write("make = 1", "notes.txt")
    assert refused(capsys, target).startswith(f"{target}: {says}")


# What the file does ----------------------------------------------------------------------

FILES = {
    "import": ("import torch\nimport not_there", "2: ModuleNotFoundError: No module named 'not_th"),
    "relative": (
        "from . import x",
        "1: ImportError: attempted relative import with no known parent",
    ),
    "syntax": ("x = 1\ndef make(:", "2: SyntaxError: invalid syntax"),
    "indentation": ("x = 1\n  y = 1", "2: IndentationError: unexpected indent"),
    "encoding": ("x = '\ud8ff'", "1: SyntaxError: "),
    "exception": ("x = 1\n1 / 0", "2: ZeroDivisionError: division by zero"),
    "exit": ("import sys\nsys.exit(3)", "2: SystemExit: 3 (code for scripts only goes"),
    "silent exit": ("raise SystemExit", "1: SystemExit (code for scripts"),
    "no Exception": ("class Stop(BaseException): ...\nraise Stop('now')", "2: Stop: now"),
    "factory": ("def make():\n  x = 1\n  return x / 0", "3: ZeroDivisionError: division by zero"),
    "inner": ("def f(): return 1 / 0\ndef make():\n  return f()", "1: ZeroDivisionError: div"),
    "many lines": ("def make():\n  raise ValueError('\\n  one\\ntwo')", "2: ValueError: one"),
    "notes": (
        "def make():\n  try: 1 / 0\n  except Exception as e: e.add_note('but\\nif'); raise",
        "2: ZeroDivisionError: division by zero (but)",
    ),
    "no message": ("def make():\n  assert 0", "2: AssertionError"),
    "eval": ("def make():\n  eval('1+')", "2: SyntaxError: invalid syntax"),
    "factory exits": ("def make():\n  exit()", "2: SystemExit"),
    "loss": (
        "from train import *\ndef make(): return lambda p, b: 1 / 0, *tensors()",
        "2: ZeroDiv",
    ),
    "deep in torch": (
        "from train import *\ndef make():\n  return loss, {'w': torch.ones(3)}, tensors()[1]",
        None,
    ),
}


@pytest.mark.parametrize(("code", "says"), FILES.values(), ids=FILES)
def test_the_line_of_a_file_that_fails_is_shown(code, says, capsys):
    Path("mine.py").write_bytes(code.encode(errors="surrogatepass"))
    line = refused(capsys, "mine.py:make")
    # Where nothing of the file itself was running, a file beside it was.
    assert line.startswith(f"mine.py:{says}" if says else "train.py:5: RuntimeError: ")


def test_a_file_elsewhere_is_shown_in_full(tmp_path, capsys):
    write("1 / 0", "package/mine.py")
    Path("away").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir("away")
        line = refused(capsys, "../package/mine.py:make")
    assert (
        line == f"{(tmp_path / 'package/mine.py').resolve()}:1: ZeroDivisionError: division by zero"
    )


def test_the_line_of_a_module_that_fails_is_shown(capsys):
    write("def make():\n    return 1 / 0", "package/mine.py")
    line = refused(capsys, "package.mine:make")
    assert line == f"{Path('package/mine.py')}:2: ZeroDivisionError: division by zero"


def test_our_own_lines_are_not_shown(monkeypatch, capsys):
    """Not even where they lie beside the target."""
    monkeypatch.chdir(Path(pa.__file__).parents[1])
    assert refused(capsys, "pureaccum.testing:no_such").startswith("pureaccum.testing:no_such: ")


def test_interrupts_come_through():
    write("raise KeyboardInterrupt")
    path = sys.path[:]
    with pytest.raises(KeyboardInterrupt):
        check("mine.py:make")
    assert sys.path == path


# What it gives ---------------------------------------------------------------------------

GIVEN = {
    "nothing": (
        "pass",
        "it gives None (is a return missing?); expected a tuple (loss_fn, params, b",
    ),
    "no tuple": (
        "return [loss, *tensors()]",
        "it gives a list; expected a tuple (loss_fn, params, ",
    ),
    "pair": (
        "return tensors()",
        "it gives a tuple (dict, dict); expected a tuple (loss_fn, params",
    ),
    "order": (
        "return *tensors(), loss",
        "it gives a tuple (dict, dict, function); expected a tuple",
    ),
    "settings": ("return *make(), 'sum'", "it gives a tuple (function, dict, dict, str); expected"),
    "unknown": (
        "return *make(), {'reducton': 'sum', 3: 1}",
        "unknown settings: 'reducton' (did you mean reduction?), 3; expected some of has_aux, red",
    ),
    "reserved": (
        "return *make(), {'raise_on_mismatch': 1}",
        "unknown settings: 'raise_on_mismatch'",
    ),
}


@pytest.mark.parametrize(("body", "says"), GIVEN.values(), ids=GIVEN)
def test_a_factory_that_gives_something_else_is_refused(body, says, capsys):
    write(f"from train import *\ndef mine():\n    {body}")
    assert refused(capsys, "mine.py:mine").startswith(f"mine.py:mine: {says}")


def test_a_target_that_is_neither_factory_nor_tuple_is_refused(capsys):
    write("mine = {}")
    line = refused(capsys, "mine.py:mine")
    assert line.startswith("mine.py:mine: it is a dict; expected a factory, or a tuple (loss_fn, ")


def test_a_target_that_is_the_loss_itself_is_refused(capsys):
    """The factory that is shown is one."""
    assert check("train.py:loss") == 2
    out, err = capsys.readouterr()
    assert not out
    says, empty, *factory, end = err.split("\n")
    assert says.startswith(
        "train.py:loss: it takes arguments (params, batch), so it is most likely "
    )
    assert (empty, len(factory), end) == ("", 3, "")
    shown = textwrap.dedent("\n".join(factory))
    Path("mine.py").write_text(FILE + shown.replace("..., ...", "tensors()"))
    assert check("mine.py:check_loss") == 0


def test_arguments_that_need_not_be_given():
    write("from train import *\ndef mine(*args, rows=4, **kwargs): return make()")
    assert check("mine.py:mine") == 0


def test_an_empty_batch_is_refused(capsys):
    write("from train import *\ndef mine(): return loss, tensors()[0], {'x': torch.ones(0, 2)}")
    assert "sample" in refused(capsys, "mine.py:mine")


def test_settings_out_of_range_are_refused(capsys):
    assert "splits" in refused(capsys, "train.py:make", "--splits", "-1")


# What is printed -------------------------------------------------------------------------


def test_a_traceback_is_shown_if_asked_for(capsys):
    write("def mine():\n    return 1 / 0")
    assert check("mine.py:mine", "--traceback") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\nmine.py:2: ZeroDivisionError: division by zero\n")


def as_json(capsys, target, *options):
    """The exit status, and the object that is all there is on stdout."""
    capsys.readouterr()
    status = check(target, "--json", *options)
    return status, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_the_report_is_json_if_asked_for(capsys):
    status, fits = as_json(capsys, "train.py:make")
    assert (status, fits["fits"], fits["samples"]) == (0, True, 4)
    assert {leaf["path"] for leaf in fits["leaves"]} == {"value", "params['w']"}
    status, not_so = as_json(capsys, "train.py:make_masked")
    assert (status, not_so["fits"]) == (1, False)
    assert not_so["diagnoses"][0].keys() == {"kind", "says", "mend"}
    assert as_json(capsys, "train.py") == (2, {"error": f"train.py: {TARGETS['no name'][1]}"})


def test_the_json_of_a_report_holds_no_inf(capsys):
    write("""\
        from train import *
        def whole(params, batch):
            assert len(batch["x"]) == 4
            return loss(params, batch)
        mine = whole, *tensors()
    """)
    status, report = as_json(capsys, "mine.py:mine")
    assert status == 1
    assert "inf" in {leaf["error"] for leaf in report["leaves"]}


def test_the_line_says_what_to_do(capsys):
    """A loss for which float64 is no dtype to compare in."""
    write("""\
        from train import *
        def single(params, batch):
            assert params["w"].dtype == torch.float32, "no doubles"
            return loss(params, batch)
        mine = single, *tensors()
    """)
    line = refused(capsys, "mine.py:mine")
    assert line.startswith("mine.py:3: AssertionError: no doubles (pureaccum: ")
    assert "the loss runs in its" in line
    assert "reference='native'" in line
    assert check("mine.py:mine", "--reference", "native") == 0


def test_what_the_file_prints_stays_out_of_the_json(capsys):
    write("""\
        from train import *
        print("imported")
        def mine():
            print("made")
            return lambda *args: print("called") or loss(*args), *tensors()
    """)
    assert check("mine.py:mine", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"]
    assert set(err.splitlines()) == {"imported", "made", "called"}
    assert check("mine.py:mine") == 0
    assert capsys.readouterr().out.startswith("imported\nmade\ncalled\n")


def test_warnings_are_left_alone(capsys):
    write("import warnings\nfrom train import *\nwarnings.warn('a word')\nmine = make()")
    with pytest.warns(UserWarning, match="a word"):
        assert check("mine.py:mine") == 0
    assert not capsys.readouterr().err


# What can be checked ---------------------------------------------------------------------


@pytest.mark.parametrize("target", ["make", "make_total", "ready"])
def test_of_a_loss_that_fits_the_command_says_so(target, capsys):
    assert check(f"train.py:{target}") == 0
    assert capsys.readouterr().out.startswith("fits")


@pytest.mark.slow
def test_options_override_the_file(capsys):
    assert check("train.py:make_total", "--reduction", "mean") == 1
    assert check("train.py:make", "--reduction", "sum") == 1
    assert capsys.readouterr().out.startswith("does not fit")
    write("from train import *\ndef aux(*args): return loss(*args), ()\nmine = aux, *tensors()")
    assert check("mine.py:mine", "--has-aux") == 0
    write("from train import *\nmine = *make(), {'has_aux': True}")
    assert check("mine.py:mine", "--no-has-aux") == 0
    splits = {as_json(capsys, "train.py:make", "--splits", n)[1]["splits"] for n in ("2", "5")}
    assert len(splits) == 2


@pytest.mark.slow
def test_weights_are_given_by_name():
    """A mask that masks nothing hides what the loss makes of one."""
    write("""\
        from train import *
        def mine():
            params, batch = tensors()
            return masked, params, batch | {"mask": torch.ones(4)}
    """)
    assert check("mine.py:mine") == 0
    assert check("mine.py:mine", "--weights", "mask") == 1


def test_a_module_is_given_by_its_name(capsys):
    write("from .helper import make", "package/mine.py")
    write(FILE, "package/helper.py")
    assert check("package.mine:make") == 0
    assert capsys.readouterr().out.startswith("fits")
    assert "package.module:name" in refused(capsys, "package/mine.py:make")
    assert not OURS & set(sys.modules)


HOSTILE = """\
import argparse
import pickle
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from helper import scale
from train import *


@dataclass
class Settings:
    scale: "float" = scale


argparse.ArgumentParser().parse_args()  # sees no argument of ours
assert Path(sys.argv[0]) == Path(__file__) == Path(sys.path[0]) / Path(__file__).name
settings = pickle.loads(pickle.dumps(Settings()))


def mine():
    from later import late  # found while it runs, too

    assert settings == Settings()
    return lambda p, b: late * settings.scale * loss(p, b), *tensors()


if __name__ == "__main__":
    raise AssertionError
"""


@pytest.mark.slow
@pytest.mark.parametrize("file", ["mine.py", "random.py", "01.mine-too.py"])
def test_a_file_finds_what_lies_beside_it(file):
    random = sys.modules["random"]
    for scale in (1, 2):  # other files of the same names
        folder = f"folder{scale}"
        write(FILE, f"{folder}/train.py")
        write(f"scale = {scale}", f"{folder}/helper.py")
        write(
            f"from helper import scale\nlate = scale\nassert scale == {scale}", f"{folder}/later.py"
        )
        write(HOSTILE, f"{folder}/{file}")
        before = dict(sys.modules)
        assert check(f"{folder}/{file}:mine") == 0
        late = {name.partition(".")[0] for name in sys.modules.keys() - before}
        assert not late & {"train", "helper", "later", "mine", "01_mine-too", "random_"}
    assert sys.modules["random"] is random


def test_a_package_that_was_there_keeps_its_new_parts(monkeypatch):
    """torch, say: its parts know each other."""
    write(FILE, "package/helper.py")
    write("from package.helper import make", "package/mine.py")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setitem(sys.modules, "package", importlib.import_module("package"))
    assert check("package.mine:make") == 0
    assert "package.helper" in sys.modules
    monkeypatch.delitem(sys.modules, "package.helper")


# As a process ----------------------------------------------------------------------------


def process(*argv):
    done = subprocess.run(
        [sys.executable, "-m", "pureaccum", "check", *argv],
        env=os.environ | {"PYTHONPATH": str(Path(pa.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.nightly  # three processes that import torch
def test_the_exit_status_tells_a_misfit_from_an_error():
    status, out, err = process("train.py:make")
    assert (status, out[:4], err) == (0, "fits", "")
    status, out, err = process("train.py:make_masked", "--json")
    assert (status, json.loads(out)["fits"], err) == (1, False, "")
    write("print('hello')\n1 / 0")
    status, out, err = process("mine.py:mine", "--json")
    says = "mine.py:2: ZeroDivisionError: division by zero"
    assert (status, json.loads(out), err) == (2, {"error": says}, f"hello\n{says}\n")
