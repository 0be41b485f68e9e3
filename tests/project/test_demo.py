"""``python -m pureaccum``: the demo shows what it claims, and every command ends with a status."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pureaccum as pa
from pureaccum.__main__ import main


pytestmark = [pytest.mark.parity, pytest.mark.promise("documented")]
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def at_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def the_demo():
    """Where what it needs is installed."""
    for package in ("matplotlib", "rich", "sklearn"):
        pytest.importorskip(package)
    from pureaccum import _demo

    return _demo


def table(told):
    """The cells of each row, by the title above it and the name in front of it."""
    found, title = {}, ""
    for line in told.split("\n"):
        if re.match(r"  (full batch|usual loop|pureaccum)  ", line):
            found[title, line[:13].strip()] = line[13:].split()
        title = title if line.startswith("  ") else line
    return found


@pytest.mark.slow
def test_the_demo_shows_what_it_claims(capsys):
    """All of it but for most of the steps: the first warms up, and the second counts memory."""
    _demo = the_demo()
    assert _demo.run(Path("demo.png"), steps=3)
    assert Path("demo.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert ESCAPE not in told  # plain text, where there is no terminal
    rows, settings = table(told), [setting.title for setting in _demo.training.WAYS]
    even, ragged, normed, half = settings
    assert rows.keys() == {
        (setting.title, way.name) for setting, ways in _demo.training.WAYS.items() for way in ways
    }
    off = {name: max(cell[:2], key=share) for name, cell in rows.items() if cell[0] != "-"}
    for setting in settings:
        assert share(off[setting, "pureaccum"]) < (2e-2 if setting == half else 1e-4)
    assert share(off[even, "usual loop"]) < 1e-4  # right as well, and said to be
    assert share(off[ragged, "usual loop"]) > 0.1
    assert share(off[normed, "usual loop"]) > 0.05
    full = {name: rows[even if name == ragged else name, "full batch"] for name in settings}
    memory = {name: float(cell[-2]) for name, cell in rows.items()}
    for setting in settings:
        assert memory[setting, "pureaccum"] < float(full[setting][-2]) * (
            0.7 if setting == normed else 0.2
        )
    assert memory[even, "pureaccum"] < 1.1 * memory[even, "usual loop"]
    told = " ".join(told.split())
    skipped = re.search(r"repeated: (\d+) of the full batch and (\d+) of pureaccum", told)
    assert all(int(steps) > 0 for steps in skipped.groups())  # the scale starts too high
    assert "0 of 37,888 numbers" in told
    assert "Passed:" in told


def share(cell):
    return float(cell[:-1]) / 100 if cell.endswith("%") else float(cell)


def few(monkeypatch, _demo):
    """Fewer runs and steps than the sentences and the picture need, and none of these."""
    training = _demo.training
    few_ways = {training.EVEN: (training.FullBatch, training.Pure)}
    monkeypatch.setattr(training, "WAYS", few_ways)
    monkeypatch.setattr(training, "memory_by_size", lambda batch: {})
    for name, fake in {"draw": lambda *_: None, "_sentences": dict.fromkeys}.items():
        monkeypatch.setattr(f"pureaccum._demo.screen.{name}", fake)
    monkeypatch.setattr("pureaccum._demo.screen._time", lambda run: 0.0)


def test_on_a_terminal_a_bar_moves_and_has_no_colours_if_so_wished(monkeypatch, capsys):
    """Of runs in which a claim is not seen, and that says so."""
    _demo = the_demo()
    few(monkeypatch, _demo)
    monkeypatch.setattr(_demo.training, "on_whole_numbers", lambda batch: 7)
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    assert not _demo.run(Path("demo.png"), steps=1)
    told = capsys.readouterr().out
    assert f"{ESCAPE}[2K" in told  # a line is written over
    assert not re.search(ESCAPE + r"\[(3|9)\d", told)
    told = " ".join(told.split())
    assert "7 of 37,888 numbers" in told
    assert re.search("Failed:.* not the full batch's gradient: whole numbers", told)


@pytest.mark.slow
def test_a_gradient_that_is_not_the_full_batch_s_fails_the_demo(monkeypatch, capsys):
    """Also where it is NaN, and where only the last parameters show it."""
    _demo = the_demo()
    few(monkeypatch, _demo)
    even = _demo.training.EVEN
    for far, passes in (1e-6, True), (1e-3, False), (math.nan, False):

        def compare(runs, far=far):
            runs[even]["pureaccum"].off = 1e-7, far

        monkeypatch.setattr(_demo.training, "compare", compare)
        assert _demo.run(Path("demo.png"), steps=1) is passes
        told = capsys.readouterr().out
        assert ("Passed:" in told) is passes
        assert (f"Failed: not the full batch's gradient: {even.title}." in told) is not passes


def test_the_threads_of_torch_are_as_before(monkeypatch):
    _demo = the_demo()
    before, during = torch.get_num_threads(), []
    monkeypatch.setattr(_demo.training, "digits", lambda: during.append(torch.get_num_threads()))
    with pytest.raises(TypeError):  # None is no data
        _demo.run(Path("demo.png"))
    assert during == [1]
    assert torch.get_num_threads() == before


def test_a_claim_that_does_not_hold_is_status_1(monkeypatch, capsys):
    _demo = the_demo()
    monkeypatch.setattr(_demo, "run", lambda picture: False)
    assert main(["demo"]) == 1
    Path("pureaccum-demo.png").mkdir()
    monkeypatch.setattr(_demo, "run", lambda picture: picture.write_bytes(b""))
    assert main(["demo"]) == 2
    assert "pureaccum-demo.png could not be written" in capsys.readouterr().err


def test_the_demo_writes_through_no_link(capsys):
    """Refused before anything is trained, whether or not the link leads to a file."""
    the_demo()
    precious = Path("precious.txt")
    Path("pureaccum-demo.png").symlink_to(precious)
    for text in (None, "precious"):
        if text:
            precious.write_text(text)
        assert main(["demo"]) == 2
        told = capsys.readouterr()
        assert "pureaccum-demo.png could not be written" in told.err
        assert "symbolic link to precious.txt" in told.err
        assert told.out == ""
        assert Path("pureaccum-demo.png").is_symlink()
    assert precious.read_text() == "precious"


def test_the_demo_writes_through_no_link_that_came_while_it_trained(monkeypatch, capsys):
    _demo = the_demo()
    few(monkeypatch, _demo)
    picture = Path("demo.png")
    monkeypatch.setattr(
        _demo.training, "on_whole_numbers", lambda batch: picture.symlink_to("precious.txt") or 0
    )
    with pytest.raises(OSError, match=r"symbolic link to precious\.txt"):
        _demo.run(picture, steps=1)
    assert not Path("precious.txt").exists()


def test_the_demo_says_which_file_it_replaces(monkeypatch, capsys):
    """Before it trains: there is time to stop it."""
    _demo = the_demo()

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo.training, "digits", stop)
    assert main(["demo"]) == 130
    assert capsys.readouterr().out == ""
    Path("pureaccum-demo.png").write_bytes(b"")
    assert main(["demo"]) == 130
    assert capsys.readouterr().out == f"Replaces {Path('pureaccum-demo.png').absolute()}\n"


def test_the_picture_is_written_whole_or_not_at_all(monkeypatch):
    the_demo()
    from matplotlib.figure import Figure

    from pureaccum._demo import screen

    def half(self, file, **_):
        Path(file).write_bytes(b"half") if isinstance(file, Path) else file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(screen, "_panels", lambda *_: None)
    monkeypatch.setattr(Figure, "savefig", half)
    Path("demo.png").write_bytes(b"before")
    with pytest.raises(OSError, match="no space left"):
        screen.draw({}, {}, Path("demo.png"))
    assert Path("demo.png").read_bytes() == b"before"
    assert [path.name for path in Path().iterdir()] == ["demo.png"]


def test_packages_that_the_demo_lacks_are_named(monkeypatch, capsys):
    monkeypatch.setattr("pureaccum._demo.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "The demo needs matplotlib and rich and scikit-learn: pip install 'pureaccum[demo]'\n"
    )


@pytest.mark.slow
def test_what_the_demo_needs_is_not_imported_before_it_is_named():
    script = (
        "import sys; sys.modules.update(rich=None, matplotlib=None)\n"
        "from pureaccum.__main__ import main; sys.exit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, "The demo needs matplotlib and rich" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--version"], 0, f"pureaccum {pa.__version__}"),
        (["--help"], 0, "Exit status: 0 passed, 1 failed, 2 could not run."),
        (["demo", "--help"], 0, "pureaccum-demo.png"),
        (["check", "--help"], 0, "Exit status: 0"),
        ([], 2, "required: command"),
        (["dmeo"], 2, "invalid choice"),
    ],
)
def test_every_command_ends_with_a_status(arguments, status, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == status
    told = capsys.readouterr()
    assert says in told.out + told.err


def test_stopping_is_no_traceback(monkeypatch):
    def stop(picture):
        raise KeyboardInterrupt

    from pureaccum import _demo

    monkeypatch.setattr(_demo, "missing", list)
    monkeypatch.setattr(_demo, "run", stop)
    assert main(["demo"]) == 130
