"""The README shows what the program prints: each console block is run and compared, line by line."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import ckptmove.cli.app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- run: (\w+) -->\n```console\n\$ ckptmove ([^\n]*)\n(.*?)```", README, re.DOTALL)
#: What differs from run to run.
TIMING = re.compile(r"in \d+\.\d+ s(, .*/s)?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone's sample folder."""
    root = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "sample_ckpts", root / "sample_ckpts")
    return root


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["ckptmove", *arguments])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        ckptmove.cli.app.main()
    return capsys.readouterr().out


def test_every_block_is_what_the_program_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert [name for name, _, _ in BLOCKS] == ["inspect", "convert", "verify"]
    for name, command, shown in BLOCKS:
        printed = run(shlex.split(command), monkeypatch, capsys)
        if name == "verify":
            pytest.importorskip("torch")
            from ckptmove.verification.simulated.device import unavailable_reason

            if reason := unavailable_reason():
                pytest.skip(reason)
        assert TIMING.sub("in TIME", shown).rstrip() == TIMING.sub("in TIME", printed).rstrip(), name


def test_the_commands_of_the_demo_are_the_ones_shown() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "").replace("$(SAMPLE)", sample())
    for _, command, _ in BLOCKS:
        assert f"ckptmove {command}" in makefile


def sample() -> str:
    match = re.search(r"^SAMPLE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_exit_codes_are_those_of_the_program() -> None:
    from ckptmove.cli import outcome

    told = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    source = Path(outcome.__file__).read_text()
    assert told == {0, 1, 2, 3, 4, 5, 70, 130}
    for code in told - {0, 1}:
        assert re.search(rf"\b{code}\b", source), f"exit code {code} is nowhere in {outcome.__file__}"
