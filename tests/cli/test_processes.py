"""Behaviour of whole processes."""

from __future__ import annotations

import importlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmove.api import inspection as api
from ckptmove.cli import options
from ckptmove.cli.app import app, main

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "ckptmove"]


@pytest.fixture
def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}


@pytest.mark.parametrize("words", [["--help"], ["inspect", "run.pth"], ["convert", "run.pth", "--to", "cpu"]])
def test_torch_is_not_imported(environment, words) -> None:
    code = (
        "import sys\n"
        f"sys.argv[1:] = {words!r}\n"
        "from ckptmove.cli.app import main\n"
        "try:\n    main()\nfinally:\n    sys.stderr.write(' '.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    loaded = done.stderr.split()
    assert "ckptmove.cli.app" in loaded
    assert {"torch", "numpy"}.isdisjoint(loaded)
    assert ("ckptmove.api.functions" in loaded) is (words[0] == "convert")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("ckptmove.")}
    needless = {"assembled", "comparison", "conversion", "proof", "simulation", "training"}
    assert words[0] == "convert" or rooms.isdisjoint(needless)
    assert ("ckptmove.checkpoint.pairing" in loaded) is (words[0] == "inspect")


def test_json_does_not_wait_for_rich(environment) -> None:
    code = (
        "import sys\n"
        "sys.argv[1:] = ['inspect', 'run.pth', '--json']\n"
        "from ckptmove.cli.app import main\n"
        "try:\n    main()\nfinally:\n    sys.stderr.write(' '.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["command"] == "inspect"
    assert not [name for name in done.stderr.split() if name.partition(".")[0] == "rich"]


def test_only_the_command_that_is_named_is_made(monkeypatch, capsys) -> None:
    made = []
    monkeypatch.setattr(
        api, "inspect_checkpoint", lambda *_args, **_options: made.extend(map(_name, app.registered_commands))
    )
    monkeypatch.setattr(sys, "argv", ["ckptmove", "inspect", "run.pth", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert made == ["inspect"]
    assert list(map(_name, app.registered_commands)) == ["inspect", "convert", "verify", "diff", "rules"]


def test_the_help_of_the_program_makes_no_options(monkeypatch, capsys) -> None:
    def refuse(_self):
        raise AssertionError("the options of a command were made")

    for words in (["--help"], ["-h"]):
        monkeypatch.setattr(options.TakesRecords, "__signature__", property(refuse))
        monkeypatch.setattr(sys, "argv", ["ckptmove", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        assert [name for name in map(_name, app.registered_commands) if f"\n  {name} " not in shown] == []


def _name(command) -> str:
    return command.callback.__name__


def test_a_bug_leaves_with_70(environment) -> None:
    code = (
        "import sys\n"
        "from ckptmove.api import inspection as api\n"
        "api.inspect_checkpoint = None\n"
        "sys.argv[1:] = ['inspect', 'run.pth', '--json']\n"
        "from ckptmove.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert json.loads(done.stdout)["error"]["kind"] == "bug"
    assert done.stderr.startswith("Traceback ")
    assert "\nTypeError: " in done.stderr


def test_ctrl_c_leaves_with_130(environment) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell in the background has it ignored
        "from ckptmove.api import inspection as api\n"
        "def slow(*args, **options):\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        "    time.sleep(60)\n"
        "api.inspect_checkpoint = slow\n"
        "sys.argv[1:] = ['inspect', 'run.pth', '--json']\n"
        "from ckptmove.cli.app import main\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert err.strip() == "error: interrupted"


def test_a_closed_pipe_gives_no_traceback(environment) -> None:
    command = f"{sys.executable} -m ckptmove inspect run.pth --tensors --tree | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "run.pth\n0\n"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_encoding_without_signs(environment) -> None:
    Path("run.pth").rename("läuft.pth")
    environment |= {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*PROGRAM, "inspect", "läuft.pth", "--select", "N"], env=environment, capture_output=True, check=True
    )
    assert done.stdout.startswith(b"l\\xe4uft.pth\n")


def on_a_terminal(words, environment, columns):
    """Output of a command on a terminal with a number of columns, stdout and stderr together."""
    ours, theirs = pty.openpty()
    environment |= {"COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen([*PROGRAM, *words], env=environment, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # Linux raises it when the other end is closed
            break
        if not block:
            break
        said += block
    os.close(ours)
    process.wait(timeout=30)
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("color", [True, False])
def test_a_terminal(environment, columns, color) -> None:
    environment |= {} if color else {"NO_COLOR": "1"}
    said = on_a_terminal(["inspect", "run.pth", "--tensors"], environment, columns)
    assert ("\x1b[" in said) is color
    lines = [line for line in said.splitlines() if not line.lstrip("\x1b[0123456789m ").startswith(("fix", "next"))]
    for line in lines:
        assert len(_without_color(line)) <= columns


def _without_color(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_json_on_a_terminal_is_indented(environment) -> None:
    said = on_a_terminal(["inspect", "run.pth", "--json"], environment, 80)
    assert said.startswith('{\n  "schema_version": 1,\n')


def test_the_module_is_the_program(environment) -> None:
    command = [sys.executable, "-m", "ckptmove", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ckptmove 0.1.0\n")


def test_the_module_may_be_imported(capsys) -> None:
    importlib.import_module("ckptmove.__main__")
    assert capsys.readouterr().out == ""


def test_completion_is_what_typer_gives(environment) -> None:
    environment |= {"_CKPTMOVE_COMPLETE": "complete_bash", "COMP_WORDS": "ckptmove in", "COMP_CWORD": "1"}
    done = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["inspect"]
