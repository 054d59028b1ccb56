"""The pre-commit hook, installed by pre-commit from a git repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[2]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


class Dangerous:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def git(folder, *words):
    own = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def sources():
    """The files that an installation needs, as the image copies them."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return [*" ".join(lines).split(), ".pre-commit-hooks.yaml"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository of checkpoints, with the hook."""
    home = tmp_path_factory.mktemp("pre-commit")
    hook, project = home / "hook", home / "project"
    for name in sources():
        (hook / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, hook / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, hook / name)
    project.mkdir()
    for folder in (hook, project):
        git(folder, "init", "--quiet")
    git(hook, "add", "--all")
    git(hook, "commit", "--quiet", "--message=all")
    (project / ".pre-commit-config.yaml").write_text(
        f"repos:\n- repo: {hook.as_uri()}\n  rev: {git(hook, 'rev-parse', 'HEAD')}\n"
        "  hooks:\n  - id: ckptmove-inspect\n"
    )
    return project


@pytest.mark.slow
def test_the_hook_rejects_what_should_not_be_committed(project) -> None:
    sample = (ROOT / "sample_ckpts/adamw-cuda3.pth").read_bytes()
    (project / "good.pth").write_bytes(sample)
    shutil.copy(ROOT / "sample_ckpts/map-location-dragged-all.pth", project / "dragged.ckpt")  # no matter of a commit
    (project / "notes.txt").write_text("no checkpoint")
    git(project, "add", "--all")
    assert run(project) == (0, "")
    (project / "cut.pt").write_bytes(sample[:3000])
    (project / "pointer.safetensors").write_bytes(POINTER)
    torch.save({"model": {"w": torch.ones(1)}, "x": Dangerous()}, project / "dangerous.bin")
    shutil.copy(project / "dangerous.bin", project / "--match=hidden.bin")
    git(project, "add", "--all")
    code, text = run(project)
    assert code == 1
    assert [
        name for name in ("cut.pt", "pointer.safetensors", "dangerous.bin", "--match=hidden.bin") if name not in text
    ] == []
    assert "S702" in text
    assert "git-lfs pointer" in text
    assert "good.pth: no findings" in text
    assert not (project / "pwned").exists()


def run(project):
    """Run all hooks. Returns the exit code, and what the hook printed."""
    environment = {**os.environ, "PRE_COMMIT_HOME": str(project.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files"],
        check=False, cwd=project, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return done.returncode, done.stdout.partition("- exit code:")[2]
