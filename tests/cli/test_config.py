from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmove.cli.config import Config, load_config
from ckptmove.errors import UsageError


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def project(text: str | bytes):
        (tmp_path / "pyproject.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return project


def test_the_table_is_read(project) -> None:
    folder = project('[tool.ckptmove]\ncheckpoints = ["runs/*/last.pth", "/abs/x.pth"]\nto = "mps"\nignore = ["D101"]')
    assert load_config(folder) == Config(
        path=str(folder / "pyproject.toml"),
        checkpoints=("runs/*/last.pth", "/abs/x.pth"),
        to="mps",
        ignore=("D101",),
    )


def test_globs_start_at_the_file_and_are_seen_from_the_folder(project) -> None:
    folder = project('[tool.ckptmove]\ncheckpoints = ["runs/*.pth"]') / "src" / "deep"
    folder.mkdir(parents=True)
    assert load_config(folder).checkpoints == ("../../runs/*.pth",)


def test_the_nearest_file_counts_even_without_a_table(project) -> None:
    folder = project('[tool.ckptmove]\nto = "mps"') / "inner"
    folder.mkdir()
    assert load_config(folder).to == "mps"
    (folder / "pyproject.toml").write_text("[project]\n")
    assert load_config(folder) == Config(path=str(folder / "pyproject.toml"))


def test_no_file_at_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.cli.config._NAME", "no-such-name.toml")
    assert load_config(tmp_path) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tool.ckptmove]\ncheckpoint = []",
            "'checkpoint' in [tool.ckptmove]; the keys are checkpoints, to, case, script, script-args, ignore",
        ),
        ("[tool.ckptmove]\ncheckpoints = 'a'", "'checkpoints' in [tool.ckptmove] is not a list of strings"),
        ("[tool.ckptmove]\nignore = [1]", "'ignore' in [tool.ckptmove] is not a list of strings"),
        ("[tool.ckptmove]\nto = 1", "'to' in [tool.ckptmove] is not a string"),
        ("[tool.ckptmove]\ncase = 1", "'case' in [tool.ckptmove] is not a string"),
        (
            "[tool.ckptmove]\ncase = 'a.py:b'\nscript = 'c.py'",
            "'case' and 'script' in [tool.ckptmove] exclude each other",
        ),
        ("[tool.ckptmove]\nstrict = 1", "'strict' in [tool.ckptmove] is not a boolean"),
        ("[tool]\nckptmove = 1", "'tool.ckptmove' is not a table"),
        ("[tool", "not valid TOML: "),
        (b"\xff", "not valid TOML: "),
        ("a = " + "[" * 5000, "not valid TOML: "),
    ],
)
def test_what_makes_no_sense_is_said(project, text, message) -> None:
    folder = project(text)
    with pytest.raises(UsageError) as caught:
        load_config(folder)
    assert message in caught.value.message
    assert caught.value.path == str(folder / "pyproject.toml")


def test_tool_may_be_anything(project) -> None:
    assert load_config(project("tool = 1")).checkpoints == ()


def test_a_file_that_cannot_be_read(project, monkeypatch) -> None:
    folder = project("")

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        load_config(folder)


def test_a_folder_that_is_gone_has_no_project(tmp_path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_config(Path()) == Config()


def test_a_file_in_a_folder_that_may_not_be_searched_is_not_this_user_s(project, monkeypatch) -> None:
    folder = project('[tool.ckptmove]\nto = "mps"') / "inner"
    folder.mkdir()
    real = os.stat

    def refuse(path, **options):
        if Path(path) == folder / "pyproject.toml":
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert load_config(folder).to == "mps"


@pytest.mark.parametrize(
    ("case", "seen"), [("jobs/train.py:case", "../../jobs/train.py:case"), ("jobs.train:case", "jobs.train:case")]
)
def test_a_case_starts_at_the_file_too_and_a_module_is_found_by_name(project, case, seen) -> None:
    folder = project(f'[tool.ckptmove]\ncase = "{case}"') / "src" / "deep"
    folder.mkdir(parents=True)
    assert load_config(folder).case == seen
