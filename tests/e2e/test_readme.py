"""The README and docs/ show what the program prints: each marked console block is run and compared, line by line."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

import ckptmove.cli.app

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- run: (\w+) -->\n```console\n\$ ckptmove ([^\n]*)\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
#: Text that differs in each run.
TIMING = re.compile(r"in \d+\.\d+ s(, .*/s)?")
MOST_WORDS = 900


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks_of(path: Path) -> list[tuple[str, str, str]]:
    """Name, arguments and output of each console block of a page."""
    return BLOCK.findall(text_of(path))


WITH_BLOCKS = [path for path in PAGES if blocks_of(path)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone's sample folder, and the working directory of the test."""
    shutil.copytree(ROOT / "sample_ckpts", tmp_path / "sample_ckpts")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["ckptmove", *arguments])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        ckptmove.cli.app.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=relative)
@pytest.mark.usefixtures("folder", "started_children")
def test_every_block_is_what_the_program_prints(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, command, shown in blocks_of(path):
        if " run.pth " in command:
            train_example(command)
        printed = run(shlex.split(command), monkeypatch, capsys)
        if command.startswith("verify"):
            pytest.importorskip("torch")
            from ckptmove.simulation.device import unavailable_reason

            if reason := unavailable_reason():
                pytest.skip(reason)
        assert shown_lines(shown) == shown_lines(printed), name


def shown_lines(text: str) -> list[str]:
    """The lines of an output without times, and without spaces at their ends, which editors remove."""
    return [line.rstrip() for line in TIMING.sub("in TIME", text).rstrip().split("\n")]


def train_example(command: str) -> None:
    """Write ``run.pth``, the checkpoint of the example that a command names, as if it had been saved on cuda:0."""
    torch = pytest.importorskip("torch")
    from trained import case_of, parts_of

    shutil.copytree(ROOT / "examples", "examples")
    case = case_of(Path(re.findall(r"examples/(\w+)\.py", command)[0]).name, "case")
    case.step(case.batch).backward()
    case.optimizer.step()
    torch.save({key: part.state_dict() for key, part in parts_of(case).items()}, "cpu.pth")
    ckptmove.convert("cpu.pth", to="cuda:0", output="run.pth")


def test_every_marked_block_is_found() -> None:
    assert [name for name, _, _ in blocks_of(README)] == ["inspect", "convert", "verify"]
    for path in PAGES:
        assert len(blocks_of(path)) == text_of(path).count("<!-- run:"), relative(path)


def test_the_commands_of_the_demo_are_the_ones_shown() -> None:
    makefile = text_of(ROOT / "Makefile").replace("$(BIN)/", "").replace("$(SAMPLE)", sample())
    for _, command, _ in blocks_of(README):
        assert f"ckptmove {command}" in makefile
        assert f".venv/bin/ckptmove {command}" in text_of(ROOT / "docs" / "index.md")


def sample() -> str:
    match = re.search(r"^SAMPLE := (.*)$", text_of(ROOT / "Makefile"), re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", FENCED.sub("", text_of(path))):
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        assert page.exists(), link
        assert not anchor or anchor in anchors_of(page), link


def anchors_of(path: Path) -> set[str]:
    """The anchors of the headings of a page, as code hosts and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"^  - .*: (\S+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} | {"SECURITY.md"}
    for name in listed - {"index.md", "SECURITY.md"}:
        assert f"({name})" in text_of(ROOT / "docs" / "index.md"), name


def test_the_readme_is_one_page() -> None:
    assert len(text_of(README).split()) <= MOST_WORDS


def test_the_page_of_findings_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "make_rules.py"))
    assert script["page"]() == text_of(ROOT / "docs" / "rules.md"), "run 'make docs'"


def test_the_exit_codes_are_those_of_the_program() -> None:
    from ckptmove.api import failures
    from ckptmove.cli import outcome

    told = {int(code) for code in re.findall(r"^\| (\d+) \|", text_of(ROOT / "docs" / "ci.md"), re.MULTILINE)}
    source = "".join(text_of(Path(module.__file__)) for module in (failures, outcome))
    assert told == {0, 1, 2, 3, 4, 5, 70, 130}
    for code in told - {0, 1}:
        assert re.search(rf"\b{code}\b", source), f"exit code {code} is in neither module"
