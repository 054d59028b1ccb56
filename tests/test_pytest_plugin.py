"""The pytest plugin, in runs of pytest."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import ckptmove
from ckptmove import testing
from ckptmove.cli import app, verify_command
from ckptmove.errors import MissingFile
from ckptmove.proof.evidence import CheckResult, Verdict

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_ckpts"


# Each pytest run removes the modules that it imported, so patched modules are imported before.


@pytest.fixture(autouse=True)
def runs(pytester, monkeypatch):
    """A folder with two checkpoints, and a pytest that loads the plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = pytester.mkdir("runs")
    ckptmove.convert(SAMPLES / "adamw-cuda3.pth", output=folder / "a.pth", to="cpu")
    shutil.copy(SAMPLES / "map-location-dragged-all.pth", folder / "b.pth")
    return folder


@pytest.fixture
def verdicts(monkeypatch):
    """The requests of ``verify``, which is not made: b.pth fails."""
    seen = []

    def verify(request, **_callbacks):
        seen.append(request)
        if not Path(request.path).exists():
            raise MissingFile(request.path)
        passed = not request.path.endswith("b.pth")
        check = CheckResult("placement", "passed" if passed else "failed", "12 tensors misplaced")
        return Verdict(
            path=request.path, target="cpu", mode="cpu", passed=passed, proven=passed, checks=(check,), findings=()
        )

    monkeypatch.setattr(verify_command, "verify_checkpoint", verify)
    return seen


@pytest.fixture
def run(pytester):
    def run(*words):
        return pytester.runpytest_inprocess("-p", "ckptmove.pytest_plugin", *words)

    return run


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["pytest11"].values()
    assert importlib.import_module(name).pytest_addoption


def test_a_checkpoint_is_a_test(run, verdicts) -> None:
    done = run("--ckptmove", "runs/*.pth", "--ckptmove", "none.pth", "--ckptmove-to", "cuda:0", "-v")
    done.assert_outcomes(passed=1, failed=2)
    assert [(request.path, request.to) for request in verdicts] == [
        (path, "cuda:0") for path in ("runs/a.pth", "runs/b.pth", "none.pth")
    ]
    text = done.stdout.str()
    assert "collected 3 items" in text
    assert re.search("\nruns/b.pth on cpu\n.*placement +12 tensors misplaced\nfailed, cpu\n", text)
    assert "FAILED ckptmove::runs/b.pth - placement: 12 tensors misplaced" in text
    assert "FAILED ckptmove::none.pth - error: none.pth: no such file" in text
    assert text.count("\nerror: none.pth: no such file") == 1
    assert "Traceback" not in text


def test_its_options_are_those_of_the_project(run, verdicts, pytester) -> None:
    pytester.makepyprojecttoml("[tool.ckptmove]\nseed = 7\nto = 'mps'\ncase = 'a.b:case'")
    run("--ckptmove", "runs/a.pth").assert_outcomes(passed=1)
    assert [(request.seed, request.to, request.case) for request in verdicts] == [(7, "mps", "a.b:case")]
    assert "CKPTMOVE_PROJECT_CODE" not in os.environ


def test_without_a_glob_its_checkpoints_are_those_of_the_project(run, verdicts, pytester) -> None:
    done = run("--ckptmove")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "[tool.ckptmove] checkpoints" in done.stderr.str()
    pytester.makepyprojecttoml("[tool.ckptmove]\ncheckpoints = ['runs/[ab].pth']")
    run("--ckptmove").assert_outcomes(passed=1, failed=1)
    run("--ckptmove", "--ckptmove", "runs/c.pth").assert_outcomes(passed=1, failed=2)


def test_other_tests_and_selections(run, verdicts, pytester) -> None:
    pytester.makepyfile("def test_other(): pass")
    run().assert_outcomes(passed=1)
    run("--ckptmove", "runs/a.pth").assert_outcomes(passed=2)
    run("--ckptmove", "runs/*.pth", "-k", "a.pth").assert_outcomes(passed=1, deselected=2)
    assert len(verdicts) == 2


def test_an_interruption_ends_pytest(run, monkeypatch) -> None:
    def interrupt(*_request, **_callbacks):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_command, "verify_checkpoint", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run("--ckptmove", "runs/a.pth")


def test_a_bug_has_its_traceback(run, monkeypatch) -> None:
    monkeypatch.setattr(app, "app", lambda _words: 1 / 0)
    done = run("--ckptmove", "runs/a.pth")
    done.assert_outcomes(failed=1)
    assert "ZeroDivisionError" in done.stdout.str()


def test_the_fixture_has_the_target(run, pytester, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(testing, "assert_resumes", lambda path, to=None: seen.append((path, to)))
    pytester.makepyfile("def test_resumes(assert_resumes): assert_resumes('runs/a.pth')")
    run().assert_outcomes(passed=1)
    run("--ckptmove-to", "mps").assert_outcomes(passed=1)
    assert seen == [("runs/a.pth", None), ("runs/a.pth", "mps")]


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_run_of_its_own(pytester) -> None:
    """Also measures the lines of the module, which this pytest may have imported before the measurement."""
    pytester.makepyfile(
        "import sys\ndef test_nothing_is_imported(): assert not {'torch', 'ckptmove.api'} & {*sys.modules}"
    )
    plugin = ("-p", "ckptmove.pytest_plugin")
    pytester.runpytest_subprocess(*plugin).assert_outcomes(passed=1)
    done = pytester.runpytest_subprocess(*plugin, "--ckptmove", "runs/*.pth", "-k", "pth", "--ckptmove-to", "cpu")
    done.assert_outcomes(passed=1, failed=1, deselected=1)
    done.stdout.fnmatch_lines(["runs/b.pth on cpu", "*placement*"])
