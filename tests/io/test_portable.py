"""System calls that may be missing, and paths with drives and backslashes."""

from __future__ import annotations

import errno
import io
import ntpath
import os
import signal
import subprocess
import sys
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import pytest

import ckptmove
from ckptmove import errors
from ckptmove.cli import streams
from ckptmove.cli.config import _relative
from ckptmove.errors import OutputIsSource, StdoutFailed, WriteFailed, reason_of
from ckptmove.io import locations, new_output, portable, sink
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.leftovers import temporary_names
from ckptmove.io.portable import is_reserved
from ckptmove.io.sink import FileSink
from ckptmove.text import command_line, quoted
from ckptmove.torch_facts.devices import parse_mapping
from ckptmove.training.case.name import parse_case

RESERVED = [
    "CON", "nul", "aux.pth", "COM1", "lpt9.cuda0.pth", "CONIN$", "out:cpu.pth", "run.", "run ", "a?b", 'a"b', "a\x1fb",
    "NUL .txt", "com\xb9",
]  # fmt: skip
PLAIN = ["run.pth", ".ckptmove-0-0.part", "console.pth", "com10", "auxiliary", "null.pth", "model.cuda0.pth", "..x"]


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_windows_reserves(name):
    assert is_reserved(PureWindowsPath(r"C:\runs") / name)
    assert not is_reserved(PurePosixPath("/runs") / name)


@pytest.mark.parametrize("name", PLAIN)
def test_names_like_those_that_anybody_may_have(name):
    assert not is_reserved(PureWindowsPath(r"C:\runs") / name)
    assert not is_reserved(PureWindowsPath(r"\\server\share") / name)


def test_a_stream_of_another_file_is_no_output():
    assert is_reserved(PureWindowsPath(r"C:\runs\out:cpu.pth"))
    assert not is_reserved(PureWindowsPath(r"C:\runs\out.pth"))


@pytest.mark.skipif(not hasattr(ntpath, "isreserved"), reason="Python 3.13 has it first")
@pytest.mark.parametrize("name", [*RESERVED, *PLAIN])
def test_python_says_the_same(name):
    assert ntpath.isreserved(name) == is_reserved(PureWindowsPath(name))


@pytest.fixture
def windows_names(monkeypatch):
    """A system that reserves the names that Windows does."""
    monkeypatch.setattr(sink, "is_reserved", lambda path: is_reserved(PureWindowsPath(path)))


def test_a_file_of_a_reserved_name_is_not_begun(tmp_path, windows_names):
    with pytest.raises(WriteFailed, match=r"Windows .* 'aux\.pth'"), FileSink("aux.pth", force=True):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("output", "inside"), [("nul", "a.pth"), ("out", "con.pth")])
def test_nor_is_a_directory_or_what_is_in_it(tmp_path, monkeypatch, windows_names, output, inside):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(WriteFailed) as caught,
        DirectorySink(output, frozenset({inside}), force=False) as made,
        made.file(inside, 0o600),
    ):
        pass
    assert Path(caught.value.path).as_posix() == ("nul" if output == "nul" else "out/con.pth")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def on_windows(monkeypatch):
    """Make modules use the paths of Windows."""

    def have(*modules):
        for module in modules:
            monkeypatch.setattr(module, "os", SimpleNamespace(path=ntpath, curdir=os.curdir))

    return have


def test_paths_of_two_drives_share_no_folder(on_windows):
    on_windows(portable)
    assert portable.shared_folder(r"C:\run", r"D:\out") == ""
    assert portable.shared_folder(r"C:\run\a", r"C:\run") == r"C:\run"


def test_an_output_on_another_drive_is_apart(on_windows):
    on_windows(portable, new_output)
    new_output.require_new_folder(r"C:\run", r"D:\out", force=True)
    with pytest.raises(OutputIsSource):
        new_output.require_new_folder(r"C:\run", r"C:\run\out", force=True)


def test_the_output_beside_a_source(monkeypatch, on_windows):
    on_windows(locations)
    monkeypatch.setattr(locations, "SEPARATORS", "\\/")
    assert locations.default_output(r"C:\runs.old\x.pth", "cuda0") == r"C:\runs.old\x.cuda0.pth"
    monkeypatch.setattr(locations, "is_folder", lambda path: True)
    for path in ("C:\\runs\\x\\", "C:\\runs\\x/", r"C:\runs\x"):
        assert locations.default_output(path, "cuda0") == r"C:\runs\x.cuda0"


def test_a_journal_is_beside_its_file(on_windows):
    on_windows(locations)
    assert locations.home_of(r"C:\runs\x.pth") == (r"C:\runs", "x.pth")


def test_a_case_ends_at_its_last_colon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(r"C:\x.py").write_text("def make(): pass\n", encoding="utf-8")
    name = parse_case(r"C:\x.py:make")
    assert (name.home, name.function, name.is_file) == (r"C:\x.py", "make", True)
    assert _relative("case", r"C:\x.py:make", ".") == r"C:\x.py:make"


def test_a_path_with_a_drive_is_one_path():
    with pytest.raises(errors.MissingFile) as caught:
        ckptmove.inspect(r"C:\gone\x.pth")
    assert caught.value.path == r"C:\gone\x.pth"
    with pytest.raises(errors.UsageError):
        parse_mapping(r"C:\runs\x.pth")


def test_commands_are_quoted_as_cmd_and_powershell_take_them():
    assert quoted(r"C:\runs\x.pth", "\\") == r"C:\runs\x.pth"
    assert quoted(r"C:\my runs\x.pth", "\\") == r'"C:\my runs\x.pth"'
    assert quoted("cuda:*=cuda:0", "\\") == '"cuda:*=cuda:0"'
    assert quoted("", "\\") == '""'
    assert command_line(["ckptmove", r"C:\x.pth"]) == r"ckptmove 'C:\x.pth'"


class WindowsError(OSError):
    """An error as Windows has it: with a text and a number of its own."""

    winerror = 112


def test_an_error_has_the_words_of_errno():
    assert reason_of(WindowsError(errno.ENOSPC, "disk-full")) == os.strerror(errno.ENOSPC)
    assert reason_of(OSError(errno.EPERM, "foreign")) == "foreign"
    assert reason_of(ValueError("NUL")) == "NUL"


def test_where_names_are_missing(monkeypatch):
    for name in ("O_DIRECTORY", "geteuid", "uname"):
        monkeypatch.delattr(os, name)
    monkeypatch.setenv("COMPUTERNAME", "laptop")
    portable.sync_folder("there is no such folder")
    assert (portable.own_user(), portable.host_name()) == (0, "laptop")
    assert temporary_names(Path("out")).part.suffix == ".part"


class Closed(io.StringIO):
    """A pipe of Windows whose reader has gone."""

    def write(self, text):
        raise OSError(errno.EINVAL, "Invalid argument")

    def fileno(self):
        return os.dup(1)


@pytest.mark.parametrize("is_windows", [False, True])
def test_a_reader_who_has_gone_is_no_failure(monkeypatch, is_windows):
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(streams, "_silence", lambda stream: None)
    if is_windows:
        monkeypatch.setattr(streams, "_READER_GONE", frozenset({errno.EPIPE, errno.EINVAL}))
        streams.write_answer("text")
    else:
        with pytest.raises(StdoutFailed):
            streams.write_answer("text")


def test_an_old_console_gets_no_colours(monkeypatch):
    import rich.console

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for is_legacy in (False, True):
        monkeypatch.setattr(rich.console, "detect_legacy_windows", lambda is_legacy=is_legacy: is_legacy)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert streams.page_of(Terminal()).color is not is_legacy


def test_signals_are_those_that_there_are(tmp_path):
    program = "import signal; signal.SIGBREAK = signal.SIGUSR1; del signal.SIGHUP; del signal.SIGPIPE\n"
    program += "from ckptmove.cli import signals, streams; print(len(signals._SIGNALS), len(streams._READER_GONE))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == "3 2\n"
    assert signal.SIGTERM
