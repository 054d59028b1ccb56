"""The man page: up to date, rendered without a warning, and part of the wheel."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptmove.cli.app import app

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ckptmove.1"


def test_the_man_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_man.py"))
    assert script["page"]() == PAGE.read_text(encoding="utf-8"), "run 'make docs'"


@pytest.mark.skipif(shutil.which("man") is None, reason="there is no man")
def test_man_renders_it_without_a_warning() -> None:
    environment = {**os.environ, "MANWIDTH": "80", "MANPAGER": "cat", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["man", "--warnings", "-l", str(PAGE)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    for command in app.registered_commands:
        assert f"CKPTMOVE {command.callback.__name__.upper()}" in done.stdout
    assert "--to DEV" in done.stdout


def test_text_of_roff_is_exact() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "make_man.py"))["text"]
    assert text(".a-b") == "\\&.a\\-b"
    assert text("'a\\n'") == "\\(aqa\\en\\(aq"


def test_the_wheel_has_it() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"docs/ckptmove.1" = "share/man/man1/ckptmove.1"' in settings


def test_type_checkers_read_the_annotations() -> None:
    assert (ROOT / "ckptmove" / "py.typed").is_file()
