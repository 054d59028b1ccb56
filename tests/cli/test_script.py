"""The command `verify --script`: arguments after `--`, exit codes, configuration, other processes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import typer

torch = pytest.importorskip("torch")

from simulation import on_a_simulated_device

from ckptmove.api import functions as api
from ckptmove.cli.app import app
from ckptmove.proof.processes.strays import MARK, end_strays

TRAIN = """
import sys
import torch
from torch import nn

print("what a script prints is not an answer")
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(3, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
stored = torch.load(sys.argv[1], map_location=device)
model.load_state_dict(stored["model"])
optimizer.load_state_dict(stored["optimizer"])
data = torch.utils.data.TensorDataset(torch.randn(16, 3))
for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=int(sys.argv[2]), pin_memory=True):
    model(x.to(device)).sum().backward()
    optimizer.step()
raise AssertionError("it goes on")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(out):
    (result,) = json.loads(out)["results"]
    return result, result["checks"][-1]


@pytest.mark.unmeasured
@pytest.mark.parametrize("workers", ["0", "2"])
@on_a_simulated_device
def test_a_script_is_the_last_check_of_the_verdict(folder, ckptmove, workers):
    words = ["run.pth", "--to", "cuda:0", "--keep", "*", "--json", "--strict", "--script", "train.py"]
    code, out, _ = ckptmove("verify", *words, "--", "run.pth", workers)
    result, check = checked(out)
    assert (check["name"], check["status"], code) == ("script", "passed", 0), check["detail"]
    assert check["evidence"]["arguments"] == ["run.pth", workers]
    assert result["proven"] is True


def test_the_configuration_has_a_script_too(folder, ckptmove, monkeypatch):
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "1")
    (folder / "pyproject.toml").write_text('[tool.ckptmove]\nscript = "train.py"\nscript-args = ["run.pth", "0"]\n')
    code, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--json")
    _, check = checked(out)
    assert (check["name"], check["status"], code) == ("script", "passed", 0)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("table", "words", "arguments"),
    [
        ('script = "train.py"', ["--", "run.pth", "0"], ["run.pth", "0"]),
        ('script = "train.py"\nscript-args = ["-x"]', ["--", "run.pth", "0"], ["run.pth", "0"]),
        ('script = "train.py"\nscript-args = ["run.pth", "0"]', [], ["run.pth", "0"]),
        ('script = "other.py"\nscript-args = ["-x"]', ["--script", "train.py", "--", "run.pth", "0"], ["run.pth", "0"]),
    ],
)
def test_words_after_the_dashes_are_for_the_script_of_the_configuration(
    folder, ckptmove, monkeypatch, table, words, arguments
):
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "1")
    (folder / "pyproject.toml").write_text(f"[tool.ckptmove]\n{table}\n")
    _, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--json", *words)
    _, check = checked(out)
    assert (check["status"], check["evidence"]["arguments"]) == ("passed", arguments), check["detail"]


def parsed(words):
    """Checkpoints and arguments of the script on a command line of `verify`."""
    command = typer.main.get_command(app).commands["verify"]
    params = command.make_context("verify", words, resilient_parsing=True).params
    return [*(params["paths"] or ())], [*(params["script_args"] or ())]


def test_words_after_the_dashes_are_for_a_script_that_may_not_run_too(folder):
    (folder / "pyproject.toml").write_text('[tool.ckptmove]\nscript = "train.py"\n')
    assert parsed(["run.pth", "--", "-x"]) == (["run.pth"], ["-x"])


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('script = "train.py"', ["--case", "a.py:f", "--", "run.pth"]),
        ('case = "train.py:case"', ["--", "run.pth"]),
        ("script = 3", ["--", "run.pth"]),
        ("", ["--", "run.pth"]),
    ],
)
def test_words_after_the_dashes_are_checkpoints_without_a_script(folder, table, words):
    (folder / "pyproject.toml").write_text(f"[tool.ckptmove]\n{table}\n")
    assert parsed(words) == (["run.pth"], [])


@pytest.mark.parametrize(
    ("line", "expected"),
    [("os._exit(3)", "exit code 3"), ("os._exit(0)", "without an answer"), ("os.abort()", "SIGABRT")],
)
def test_a_script_that_ends_its_process_is_named(folder, ckptmove, line, expected):
    (folder / "end.py").write_text(f"import os\n{line}\n")
    _, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--script", "end.py", "--json")
    _, check = checked(out)
    assert (check["name"], check["status"]) == ("script", "failed")
    assert "your script" in check["detail"]
    assert expected in check["detail"]


def test_a_script_that_proves_nothing_is_not_outvoted_by_the_step(folder, ckptmove):
    (folder / "data.py").write_text("open('data.csv')")
    code, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--script", "data.py", "--json", "--strict")
    result, check = checked(out)
    assert (check["status"], result["passed"], result["proven"], code) == ("skipped", True, False, 1)
    assert "data.csv" in ckptmove("verify", "run.pth", "--to", "cpu", "--script", "data.py")[1].splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "source"), [("none.py", None), ("bad.py", b"def"), ("bad.py", b"\0"), ("folder", None)]
)
def test_an_unusable_script_is_a_usage_error(folder, ckptmove, name, source):
    (folder / "folder").mkdir()
    if source is not None:
        (folder / name).write_bytes(source)
    code, _, err = ckptmove("verify", "run.pth", "--script", name)
    assert code == 2
    assert f"{name}: --script: " in err


def test_a_case_and_a_script_exclude_each_other(folder, ckptmove):
    (folder / "case.py").write_text("def case(device): pass")
    code, _, err = ckptmove("verify", "run.pth", "--script", "train.py", "--case", "case.py:case")
    assert code == 2
    assert "--case and --script" in err


@pytest.mark.parametrize(
    ("words", "paths", "arguments"),
    [
        (["a", "--script", "t.py", "--", "-x", "--", "y"], ["a"], ["-x", "--", "y"]),
        (["a", "--script=t.py", "--", "--to"], ["a"], ["--to"]),
        (["a", "--script=t.py"], ["a"], []),
        (["--", "--script"], ["--script"], []),
        (["--", "-x.pth"], ["-x.pth"], []),
    ],
)
def test_words_after_the_dashes_are_the_scripts(folder, words, paths, arguments):
    assert parsed(words) == (paths, arguments)


def test_words_of_the_script_are_no_options(folder, ckptmove):
    (folder / "show.py").write_text("import sys\nsys.exit(' '.join(sys.argv[1:]))\n")
    words = ["--strip-prefix", "--json", "--to", "cuda"]
    code, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--script", "show.py", "--json", "--", *words)
    result, check = checked(out)
    assert (check["evidence"]["arguments"], result["passed"], code) == (words, False, 1)
    code, out, err = ckptmove("verify", "run.pth", "--to", "gpu", "--script", "show.py", "--", "-x", "--json")
    assert (code, out) == (2, "")
    assert "ckptmove verify run.pth --to cuda:0 --script show.py -- -x --json\n" in err


def test_from_python(folder):
    result = api.verify("run.pth", to="cpu", script=Path("train.py"), script_args=["run.pth", "0"])
    assert result.checks[-1].name == "script"
    assert result.proven


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_run_without_an_end_is_ended_names_its_line_and_leaves_no_temporary_folder(folder, ckptmove):
    (folder / "endless.py").write_text(
        "import tempfile, time\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "open('name', 'w').write(folder.name)\n"
        "while True:\n"
        "    time.sleep(0.1)\n"
    )
    code, out, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--script", "endless.py", "--json", "--timeout", "12")
    check = json.loads(out)["results"][0]["checks"][-1]
    assert (check["status"], check["evidence"]["line"] in {4, 5}, code) == ("failed", True, 1)
    assert not Path((folder / "name").read_text()).exists()


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.usefixtures("started_children")
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_no_process_is_left_behind(folder, ckptmove):
    (folder / "daemon.py").write_text(
        "import subprocess, sys\n"
        "started = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('pid', 'w').write(str(started.pid))\n"
    )
    code, _, _ = ckptmove("verify", "run.pth", "--to", "cpu", "--script", "daemon.py")
    assert code == 1
    assert not is_running(int((folder / "pid").read_text()))


def is_running(pid):
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_only_processes_with_the_mark_are_ended(tmp_path):
    mine, other = (
        os.posix_spawn(
            sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], {**os.environ, MARK: mark}
        )
        for mark in ("this", "that")
    )
    try:
        end_strays("this")
        assert os.waitstatus_to_exitcode(os.waitpid(mine, 0)[1]) == -9
        assert os.waitpid(other, os.WNOHANG) == (0, 0)
    finally:
        end_strays("that")
        os.waitpid(other, 0)


@pytest.mark.parametrize(
    ("table", "script", "is_named"),
    [
        ("", ["--script", "train.py"], True),
        ("", ["--script=a.py"], True),
        ("", [], False),
        ("[tool.ckptmove]\nscript = 'train.py'", [], True),
    ],
)
def test_an_option_of_the_script_before_the_dashes_is_explained(folder, ckptmove, table, script, is_named):
    (folder / "pyproject.toml").write_text(table)
    code, _, err = ckptmove("verify", "run.pth", *script, "--resume", "run.pth")
    assert code == 2
    assert ("-- --resume" in err) == is_named
