"""``python -m pureaccum``: the demo shows what it claims, and every command ends with a status."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pureaccum as pa
from pureaccum.__main__ import main


pytestmark = pytest.mark.parity
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


@pytest.mark.slow
def test_the_demo_shows_what_it_claims(capsys):
    """All of it but for the steps, of which two are enough for all kinds of distance."""
    _demo = the_demo()
    assert _demo.run(Path("demo.png"), steps=2)
    assert Path("demo.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr().out
    assert ESCAPE not in told  # plain text, where there is no terminal
    lines = [line for line in told.split("\n") if line.count(" of 24") + line.count(" of 11")]
    found = {line[:21].strip(): float(line.split()[-1].replace(",", "")) for line in lines}
    assert found.keys() == {run.name for run in _demo.RUNS if run.cut != "whole"}
    for run in _demo.RUNS:
        if run.cut != "whole":
            assert (found[run.name] < 1) is not run.usual, run.name
    [half] = [line.split() for line in told.split("\n") if line.startswith("full batch, fp16   ")][
        -1:
    ]
    assert int(half[5]) > 0  # steps skipped: the scale begins too high
    assert "in 0 of 9,472 numbers" in " ".join(told.split())


def test_on_a_terminal_the_lines_move_and_have_no_colours_if_so_wished(monkeypatch, capsys):
    """Of a run in which a claim is not seen, and that says so."""
    _demo = the_demo()
    monkeypatch.setattr(_demo, "RUNS", _demo.RUNS[:2])
    monkeypatch.setattr(_demo, "on_whole_numbers", lambda batch, parts: 7)
    monkeypatch.setattr("pureaccum._demo.screen.draw", lambda *_: None)
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    assert not _demo.run(Path("demo.png"), steps=1)
    told = capsys.readouterr().out
    assert f"{ESCAPE}[2K" in told  # a line is written over
    assert not re.search(ESCAPE + r"\[(3|9)\d", told)
    assert "in 7 of 9,472 numbers" in " ".join(told.split())


def test_a_claim_that_is_not_seen_is_no_success(monkeypatch, capsys):
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
    picture = Path("demo.png")
    monkeypatch.setattr(_demo, "RUNS", _demo.RUNS[:1])
    monkeypatch.setattr(
        _demo, "on_whole_numbers", lambda batch, parts: picture.symlink_to("precious.txt") or 0
    )
    with pytest.raises(OSError, match=r"symbolic link to precious\.txt"):
        _demo.run(picture, steps=1)
    assert not Path("precious.txt").exists()


def test_the_demo_says_which_file_it_replaces(monkeypatch, capsys):
    """Before it trains: there is time to stop it."""
    _demo = the_demo()

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo, "digits", stop)
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

    monkeypatch.setattr(screen, "_losses", lambda *_: None)
    monkeypatch.setattr(screen, "_distances", lambda *_: None)
    monkeypatch.setattr(screen, "_memory", lambda *_: None)
    monkeypatch.setattr(Figure, "savefig", half)
    Path("demo.png").write_bytes(b"before")
    with pytest.raises(OSError, match="no space left"):
        screen.draw([], {}, Path("demo.png"))
    assert Path("demo.png").read_bytes() == b"before"
    assert [path.name for path in Path().iterdir()] == ["demo.png"]


def test_packages_that_the_demo_lacks_are_named(monkeypatch, capsys):
    monkeypatch.setattr("pureaccum._demo.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "The demo needs matplotlib and rich and scikit-learn: pip install 'pureaccum[demo]'\n"
    )


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
        (["--help"], 0, "Exit status: 0"),
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
