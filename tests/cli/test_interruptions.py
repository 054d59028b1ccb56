"""Ctrl-C, SIGTERM and SIGHUP, sent to a running process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from http_server import serving

from ckptmove.cli import main as door
from ckptmove.cli import signals

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "ckptmove"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: "ended by SIGHUP"}
each = pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)

#: The second of three checkpoints never ends.
SLOW = """
import sys, time
from ckptmove.api import inspection as api

real = api.inspect_checkpoint

def slow(request, progress):
    if request.path == "dragged.pth":
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)
    return real(request, progress)

api.inspect_checkpoint = slow
"""
#: The child of verify never ends, and prints its id.
CHILD = """
import sys
from ckptmove.training import run

program = "import os, sys, time; sys.stderr = None; open('child', 'w').write(str(os.getpid())); time.sleep(60)"
run.worker_command = lambda: [sys.executable, "-c", program]
run.can_fork = lambda: False
"""
#: The same for a child that is a fork.
FORK = """
import os, sys, time, types
from ckptmove.training import run

forked = run.forked

def begun():
    open("child", "w").write(str(os.getpid()))
    time.sleep(60)

def without_torch(_load):
    sys.modules["torch"] = types.ModuleType("torch")
    return forked(lambda: begun)

run.forked = without_torch
"""
#: The output is written byte by byte without an end.
COPY = """
import sys, threading, time
from ckptmove.io import rewrite

first = threading.Lock()

def write_segments(source, segments, sink, progress, *_rest):
    sink.write(b"begun")
    if first.acquire(blocking=False):
        print("ready", file=sys.stderr, flush=True)
    for done in range(6000):
        time.sleep(0.01)
        progress(done, 6000)

rewrite.write_segments = write_segments
"""
#: A shell that runs the tests in the background has its children ignore some signals.
SIGNALS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
MAIN = """
sys.argv[1:] = {words!r}
from ckptmove.cli.app import main
main()
"""


def interrupted(patch, words, number, *, until=None):
    """Output and exit code of a patched program after a signal, sent when it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = SIGNALS + patch + MAIN.format(words=words)
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        if until is None:
            assert process.stderr.readline() == "ready\n"
        else:
            until()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.unmeasured
@each
def test_the_answer_so_far_is_one_document(validator, number) -> None:
    code, out, err = interrupted(SLOW, ["inspect", "run.pth", "dragged.pth", "run.pth", "--json"], number)
    assert code == CODES[number]
    document = json.loads(out)
    validator.validate(document)
    assert document["exit_code"] == code
    assert [checkpoint["path"] for checkpoint in document["checkpoints"]] == ["run.pth"]
    assert [(error["kind"], error["message"]) for error in document["errors"]] == [("interrupted", WORDS[number])]
    assert err == f"error: {WORDS[number]}\n"


@pytest.mark.unmeasured
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_the_lines_so_far_are_whole(number) -> None:
    words = ["inspect", "run.pth", "dragged.pth", "--format", "jsonl", "--jobs", "2", "-q"]
    patch = """
import sys, threading, time
from ckptmove.api import inspection as api
from ckptmove.cli.render import json_lines

real, line, written = api.inspect_checkpoint, json_lines.JsonLinesRenderer.inspect, threading.Event()

def slow(request, progress):
    if request.path == "dragged.pth":
        written.wait()
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)
    return real(request, progress)

def told(self, answer):
    line(self, answer)
    written.set()

api.inspect_checkpoint, json_lines.JsonLinesRenderer.inspect = slow, told
"""
    code, out, err = interrupted(patch, words, number)
    assert code == CODES[number]
    checkpoint, ended = map(json.loads, out.splitlines())
    assert "container" in checkpoint
    assert (ended["kind"], ended["checkpoint"]) == ("interrupted", None)
    assert err == f"error: {WORDS[number]}\n"


@pytest.mark.unmeasured
@each
def test_a_line_that_is_being_written_is_finished(number) -> None:
    patch = """
import os, signal, sys
from ckptmove.cli import streams

whole = streams.write_answer
came, wakeup = os.pipe()
os.set_blocking(wakeup, False)
signal.set_wakeup_fd(wakeup)

def written(text):
    if "plain" in text:
        sys.stdout.write(text[:100])
        sys.stdout.flush()
        print("ready", file=sys.stderr, flush=True)
        os.read(came, 1)
        text = text[100:]
    whole(text)

streams.write_answer = written
"""
    words = ["inspect", "run.pth", "dragged.pth", "--format", "jsonl", "-q"]
    code, out, err = interrupted(patch, words, number)
    assert code == CODES[number]
    checkpoint, ended = map(json.loads, out.splitlines())
    assert "container" in checkpoint
    assert (ended["kind"], ended["checkpoint"]) == ("interrupted", None)
    assert err == f"error: {WORDS[number]}\n"


def hold_a_line_that_never_ends():
    with signals.signals_held():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(signals.Terminated):
            signal.raise_signal(signal.SIGTERM)


def test_a_second_signal_does_not_wait_for_the_line() -> None:
    with signals.signals_raised(), pytest.raises(signals.Terminated):
        hold_a_line_that_never_ends()


def test_the_handlers_are_those_of_before_when_the_line_has_ended() -> None:
    with signals.signals_raised():
        before = signal.getsignal(signal.SIGTERM)
        with signals.signals_held():
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.unmeasured
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_people_keep_what_they_have_read(number) -> None:
    words = ["inspect", "run.pth", "dragged.pth", "--quiet", "--select", "N"]
    code, out, err = interrupted(SLOW, words, number)
    assert (code, out[:9], out.count("\n"), err) == (CODES[number], "run.pth: ", 1, f"error: {WORDS[number]}\n")


@pytest.mark.unmeasured
@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_the_conversion_of_a_directory_leaves_nothing(bench, number) -> None:
    (bench / "run").mkdir()
    for name in ("run.pth", "dragged.pth"):
        shutil.copy(bench / name, bench / "run")
    before = sorted(bench.rglob("*"))
    code, out, err = interrupted(COPY, ["convert", "run", "--to", "cpu"], number)
    assert (code, out, err) == (CODES[number], "", f"error: {WORDS[number]}\n")
    assert sorted(bench.rglob("*")) == before


@pytest.mark.unmeasured
@each
def test_a_conversion_leaves_nothing(bench, number) -> None:
    code, out, err = interrupted(COPY, ["convert", "run.pth", "--to", "cpu"], number)
    assert (code, out, err) == (CODES[number], "", f"error: {WORDS[number]}\n")
    assert sorted(path.name for path in bench.iterdir()) == ["dragged.pth", "run.pth"]


#: The signal comes between the last step of a change and the answer.
LATE = """
import sys, time
from ckptmove.cli import convert_command
from ckptmove.io import directory_sink, patch, sink

def dragged(real):
    def work(*arguments, **options):
        result = real(*arguments, **options)
        print("ready", file=sys.stderr, flush=True)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return result
    return work

sink.FileSink._take_name = dragged(sink.FileSink._take_name)
directory_sink.DirectorySink._take_name = dragged(directory_sink.DirectorySink._take_name)
patch._remove = dragged(patch._remove)
"""
CHANGES = {
    "a new file": (["convert", "run.pth", "--to", "cpu"], "run.cpu.pth"),
    "in place": (["convert", "run.pth", "--to", "cpu", "--in-place"], "run.pth"),
    "a directory": (["convert", "folder", "--to", "cpu"], "folder.cpu"),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(("number", "case"), [*zip(CODES, CHANGES, strict=True)])
def test_what_is_done_is_told_although_a_signal_has_come(bench, number, case) -> None:
    words, output = CHANGES[case]
    (bench / "folder").mkdir()
    shutil.copy(bench / "run.pth", bench / "folder")
    before = (bench / "run.pth").read_bytes()
    code, out, err = interrupted(LATE, [*words, "--json"], number)
    assert (code, err.replace("ready\n", "")) == (0, "")
    assert json.loads(out)["output"] == output
    assert ((bench / "run.pth").read_bytes() == before) == (output != "run.pth")
    assert (bench / output).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_undo_is_told_too(bench, number) -> None:
    before = (bench / "run.pth").read_bytes()
    subprocess.run([*COMMAND, "convert", "run.pth", "--to", "cpu", "--in-place", "-q"], check=True)
    code, out, _ = interrupted(LATE, ["convert", "run.pth", "--undo"], number)
    assert (code, (bench / "run.pth").read_bytes()) == (0, before)
    assert out.startswith("run.pth: ")


@each
def test_who_insists_is_heard(bench, number) -> None:
    late = LATE.replace("time.sleep(0.01)", "time.sleep(0.01); print('again', file=sys.stderr, flush=True)")
    code = SIGNALS + late.replace("+ 1", "+ 60") + MAIN.format(words=["convert", "run.pth", "--to", "cpu"])
    with subprocess.Popen([*COMMAND[:1], "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stderr.readline()
        for _ in range(2):  # once the first has been taken, and after that the second
            process.send_signal(number)
            for _ in range(3):
                process.stderr.readline()
        assert process.wait(timeout=60) == -number


#: The signal comes when the command is over, or before it has begun.
EDGE = """
import sys, time
from ckptmove.cli import guard

real = guard.{name}

def dragged():
    guard.{name} = real
    {before}
    print("ready", file=sys.stderr, flush=True)
    time.sleep(30)
    {after}

guard.{name} = dragged
"""


@each
def test_an_answer_stands_and_one_that_is_not_there_is_an_interruption(bench, number) -> None:
    over = EDGE.format(name="settle", before="pass", after="real()")
    code, out, err = interrupted(over, ["inspect", "run.pth", "-q", "--select", "N"], number)
    assert (code, out[:9], out.count("\n"), err) == (0, "run.pth: ", 1, "")
    begun = EDGE.format(name="open_closed_streams", before="real()", after="pass")
    code, out, err = interrupted(begun, ["inspect", "run.pth"], number)
    assert (code, out, err) == (CODES[number], "", f"error: {WORDS[number]}\n")


@pytest.mark.unmeasured
@pytest.mark.parametrize(("number", "child"), [*zip(CODES, [CHILD, FORK, CHILD], strict=True)])
def test_verify_ends_its_child(bench, number, child) -> None:
    pytest.importorskip("torch")

    def child_is_there() -> None:
        while not (bench / "child").exists() or not (bench / "child").read_text():
            time.sleep(0.05)

    code, out, err = interrupted(child, ["verify", "run.pth"], number, until=child_is_there)
    assert (code, out, err) == (CODES[number], "", f"error: {WORDS[number]}\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int((bench / "child").read_text()), 0)


def test_a_second_sigterm_does_not_break_off_the_cleaning_up() -> None:
    from ckptmove.cli.signals import Terminated, signals_raised

    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(Terminated), signals_raised():
        work()
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_others_ignore_stays_ignored(monkeypatch) -> None:
    from ckptmove.cli.signals import signals_raised

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with signals_raised():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_that_comes_while_the_program_is_imported(monkeypatch, capsys):
    class Slow(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "ckptmove.cli.app", Slow("app"))
    with pytest.raises(SystemExit) as left:
        door.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "error: interrupted\n")
    monkeypatch.setitem(
        sys.modules, "ckptmove.cli.app", types.SimpleNamespace(main=lambda ends: sys.stdout.write(f"runs {ends}\n"))
    )
    door.main()
    assert capsys.readouterr().out == "runs True\n"


@pytest.mark.parametrize("ends", [True, False])
def test_only_a_process_that_ends_is_left_deaf(ends):
    from ckptmove.cli.signals import settle, signals_raised

    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with signals_raised(ends=ends):
            settle()
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ends else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.unmeasured
@pytest.mark.parametrize("number", [signal.SIGINT])
def test_a_request_that_is_not_answered(tmp_path, number) -> None:
    """asyncio would write a line for the request when Python exits."""
    asked, ended = threading.Event(), threading.Event()

    def stall(handler):
        handler.send_response(206)
        handler.send_header("Content-Range", "bytes 0-99999/1000000")
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        handler.wfile.write(b"begun")
        asked.set()
        ended.wait(60)
        handler.close_connection = True
        return True

    with serving(tmp_path) as server:
        server.faults.append(stall)
        patch = "import os\nos.environ['NO_PROXY'] = '127.0.0.1'\n"
        words = ["inspect", f"{server.url}/a.pth"]
        code, out, err = interrupted(patch + "import sys\n", words, number, until=lambda: asked.wait(30))
        ended.set()
    assert (code, out, err) == (CODES[number], "", f"error: {WORDS[number]}\n")
