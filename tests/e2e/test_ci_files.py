"""The files that other programs read: the action, the workflows and the image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from ckptmove.cli.app import verify
from ckptmove.cli.config import load_config
from ckptmove.cli.configured import settings_of

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "tests/support/schemas"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="runs the steps as on Linux and macOS"),
    pytest.mark.unmeasured,
]


def published(name):
    schema = json.loads((SCHEMAS / name).read_text())
    return jsonschema.validators.validator_for(schema)(schema)


def load(path):
    # YAML 1.1 takes the key `on` for True, GitHub does not.
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def runs(node):
    """All scripts in a document."""
    if isinstance(node, dict):
        yield from [node["run"]] if isinstance(node.get("run"), str) else []
        node = list(node.values())
    for one in node if isinstance(node, list) else []:
        yield from runs(one)


def uses(node):
    if isinstance(node, dict):
        yield from [node["uses"]] if isinstance(node.get("uses"), str) else []
        node = list(node.values())
    for one in node if isinstance(node, list) else []:
        yield from uses(one)


def test_the_action_is_valid() -> None:
    published("github-actions.json").validate(ACTION)
    assert list(ACTION["inputs"]) == ["command", "paths", "to", "args", "project-code", "version"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid(path) -> None:
    workflow = load(path)
    published("github-workflows.json").validate(workflow)
    assert workflow["permissions"] == {"contents": "read"}
    for action in uses(workflow):
        assert action == "./" or re.search(r"@v\d+(\.\d+)*$", action), action


@pytest.mark.parametrize("path", [ROOT / "action.yml", *WORKFLOWS], ids=lambda path: path.stem)
def test_no_script_has_text_of_an_expression(path) -> None:
    scripts = [*runs(load(path))]
    assert scripts
    for script in scripts:
        assert "github." not in script
        assert not re.search(r"\$\{\{(?! matrix\.)", script), script  # the matrix is in the file itself


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A working directory, and a ``python`` that is this one."""
    commands = tmp_path / "bin"
    commands.mkdir()
    launcher = f"#!{sys.executable}\nfrom ckptmove.cli.main import main\nmain()\n"
    (commands / "ckptmove").write_text(launcher)
    (commands / "ckptmove").chmod(0o755)
    (tmp_path / "temp").mkdir()
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(ROOT / "sample_ckpts/adamw-cuda3.pth", work / "a b.pth")
    shutil.copy(ROOT / "sample_ckpts/map-location-dragged-all.pth", work / "-dragged.pth")
    return tmp_path


def start(bench, step, program, **inputs):
    """Run a step of the action as a runner does."""
    files = {name: bench / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in files.values():
        file.write_text("before\n")
    script = bench / "script"
    script.write_text(ACTION["runs"]["steps"][step]["run"])
    names = ACTION["runs"]["steps"][step]["env"]
    given = {name: inputs.pop(name, "") for name in names}
    assert not inputs
    environment = {
        **os.environ, **given, **{name: str(path) for name, path in files.items()},
        "PATH": f"{bench / 'bin'}:{os.environ['PATH']}", "RUNNER_TEMP": str(bench / "temp"),
        "GITHUB_ACTION_PATH": "/the action's path", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [*program, script], check=False, cwd=bench / "work", env=environment, capture_output=True, text=True
    )
    output = files["GITHUB_OUTPUT"].read_text().removeprefix("before\n")
    return done, dict(line.split("=", 1) for line in output.splitlines()), files["GITHUB_STEP_SUMMARY"].read_text()


def run(bench, **inputs):
    return start(bench, 1, [sys.executable], **inputs)


@pytest.mark.parametrize(
    ("version", "source"), [("", "/the action's path"), ("1.2; touch x", "ckptmove==1.2; touch x")]
)
def test_the_action_installs_its_source_or_a_version(bench, version, source) -> None:
    python = bench / "bin/python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done, _, _ = start(bench, 0, ["bash", "-eo", "pipefail"], VERSION=version)
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", source]
    assert (done.returncode, done.stdout.splitlines()) == (0, words)
    assert not (bench / "work/x").exists()


def test_the_action_inspects(bench) -> None:
    done, output, summary = run(bench, COMMAND="inspect", PATHS="'a b.pth' -dragged.pth", TO="cuda:0")
    assert done.returncode == 1
    assert "::error file=./-dragged.pth,title=R301" in done.stdout
    assert output["exit-code"] == "1"
    document = json.loads(Path(output["report"]).read_text())
    assert [one["path"] for one in document["checkpoints"]] == ["a b.pth", "./-dragged.pth"]
    assert summary.startswith("before\n<!-- ckptmove -->\n### ")
    assert "D103" in {finding["code"] for finding in document["checkpoints"][0]["findings"]}


def test_the_action_takes_more_options(bench) -> None:
    done, output, _ = run(
        bench, COMMAND="convert", PATHS="'a b.pth'", TO="cpu", ARGS="--output 'new file.pth' --report sarif=x.sarif"
    )
    assert (done.returncode, output["exit-code"]) == (0, "0")
    assert (bench / "work/new file.pth").exists()
    assert (bench / "work/x.sarif").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "says"), [("", "CKPTMOVE_PROJECT_CODE=1"), ("true", "no function 'case'")])
def test_the_action_runs_code_of_the_project_if_it_is_told_to(bench, allowed, says) -> None:
    (bench / "work/train.py").write_text("")
    (bench / "work/pyproject.toml").write_text("[tool.ckptmove]\ncase = 'train.py:case'\n")
    _, output, summary = run(bench, COMMAND="verify", PATHS="'a b.pth'", TO="cuda:3", PROJECT_CODE=allowed)
    assert says in f"{summary}{Path(output['report']).read_text()}"


@pytest.mark.parametrize(
    "inputs",
    [
        {"COMMAND": "inspect; touch x"},
        {"COMMAND": "inspect", "PATHS": "$(touch x) `touch x`; touch x"},
        {"COMMAND": "inspect", "PATHS": "'a b.pth'", "TO": "cpu; touch x"},
        {"COMMAND": "inspect", "PATHS": "'a b.pth'", "ARGS": "--match $(touch${IFS}x) ; touch x"},
        {"COMMAND": "diff", "PATHS": "'a b.pth' --report=json=x"},
        {"COMMAND": "inspect", "PATHS": "'a b.pth"},
        {"COMMAND": "inspect", "ARGS": "--match '"},
    ],
)
def test_an_input_runs_nothing(bench, inputs) -> None:
    done, _, _ = run(bench, **inputs)
    assert done.returncode
    assert "Traceback" not in done.stderr
    assert not (bench / "work/x").exists()


def test_the_image_has_what_it_copies() -> None:
    text = (ROOT / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in ignored
    assert "USER ckptmove" in text
    assert "torch" not in re.sub(r"#.*", "", text)


def pasted(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs/ci.md").read_text(), re.DOTALL)


def test_what_the_documentation_says_to_paste_is_valid() -> None:
    action, _upload, hooks, gitlab = map(yaml.safe_load, pasted("yaml"))
    workflow = {"on": "push", "jobs": {"check": {"runs-on": "ubuntu-latest", "steps": action}}}
    published("github-workflows.json").validate(workflow)
    assert action[1]["with"].keys() <= ACTION["inputs"].keys()
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hooks["repos"][0]["hooks"] == [{"id": hook["id"]}]
    assert set(re.findall(r"`\.(\w+)`", (ROOT / "docs/ci.md").read_text())) >= {"pt", "pth", "ckpt", "bin"}
    assert all(re.search(hook["files"], f"runs/x.{name}") for name in ("pt", "pth", "ckpt", "bin", "safetensors"))
    assert gitlab["checkpoints"]["script"][0].startswith("ckptmove verify ")


def test_the_project_of_the_documentation_is_valid(tmp_path) -> None:
    (text,) = pasted("toml")
    (tmp_path / "pyproject.toml").write_text(text)
    config = load_config(tmp_path, lambda: settings_of(verify))
    assert (config.to, config.strict) == ("cuda:0", True)
    table = re.findall(r"`(CKPTMOVE_\w+)`", (ROOT / "docs/ci.md").read_text())
    assert {name.removeprefix("CKPTMOVE_").lower() for name in table} <= {"checkpoints", *settings_of(verify)}
