"""What lies beside a checkpoint: code of a project, and modules in the current folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
#: Modules that the program imports. Python itself imports a few others for ``-m``, before it runs any of the program.
MODULES = ("__future__", "typing", "typer", "torch", "numpy", "safetensors", "pickle", "random", "json", "dataclasses")


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that any code of the project makes, beside a checkpoint for the CPU."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.copy(SAMPLES / "adamw-cuda3.pth", "run.pth")
    marker = tmp_path / "marker"
    trap = f"open({str(marker)!r}, 'a').close()\n"
    Path("train.py").write_text(f"{trap}def case(device): ...\n")
    Path("mine.py").write_text(trap)
    return marker


def checks_of(out: str) -> tuple[dict[str, object], dict[str, dict[str, str]]]:
    (result,) = json.loads(out)["results"]
    return result, {check["name"]: check for check in result["checks"]}


@pytest.mark.parametrize(
    ("table", "skipped", "option"),
    [
        ("case = 'train.py:case'", ["case"], "--case train.py:case"),
        ("script = 'train.py'", ["script"], "--script train.py"),
        ("optimizer = 'mine:Adam'", ["step", "parity", "fresh"], "--optimizer mine:Adam"),
        (
            "optimizer = 'mine:Adam'\ncase = 'train.py:case'",
            ["step", "parity", "fresh", "case"],
            "--case train.py:case",
        ),
    ],
)
def test_code_of_a_table_is_not_run_unasked(ckptmove, marker, table, skipped, option) -> None:
    Path("pyproject.toml").write_text(f"[tool.ckptmove]\n{table}\n")
    code, out, _ = ckptmove("verify", "run.pth", "--to", "cuda:3", "--json")
    result, checks = checks_of(out)
    assert (code, result["passed"], result["proven"]) == (0, True, False)
    assert [name for name, check in checks.items() if check["status"] == "skipped"] == skipped
    assert f"{option}, or set CKPTMOVE_PROJECT_CODE=1" in checks[skipped[-1]]["detail"]
    assert not marker.exists()


def test_code_that_was_left_out_is_a_failure_with_strict_and_no_hint(ckptmove, marker) -> None:
    Path("pyproject.toml").write_text("[tool.ckptmove]\ncase = 'train.py:case'\n")
    code, out, err = ckptmove("verify", "run.pth", "--to", "cuda:3", "--strict")
    assert code == 1
    assert "CKPTMOVE_PROJECT_CODE=1" in out
    assert "hint: --case" not in err
    assert not marker.exists()


@pytest.mark.parametrize("words", [["--case", "train.py:case"], []])
def test_code_that_is_asked_for_runs(ckptmove, marker, monkeypatch, words) -> None:
    Path("pyproject.toml").write_text("[tool.ckptmove]\ncase = 'train.py:case'\n")
    if not words:
        monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "1")
    ckptmove("verify", "run.pth", "--to", "cuda:3", *words)
    assert marker.exists()


@pytest.mark.unmeasured
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_module_of_the_current_folder_is_imported(marker, command) -> None:
    for name in MODULES:
        Path(f"{name}.py").write_text(Path("mine.py").read_text())
    words = [sys.executable, "-m", "ckptmove", command, "run.pth", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, json.loads(ended.stdout)["ok"]) == (0, True), ended.stderr
    assert not marker.exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")
def test_a_safe_path_stays_as_it_is(marker, monkeypatch) -> None:
    shutil.copy("mine.py", "typer.py")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # the first entry, which the user has typed
    subprocess.run([sys.executable, "-P", "-m", "ckptmove", "--version"], capture_output=True, timeout=60, check=False)
    assert marker.exists()
