"""Markdown reports, rendered by a library and read as HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from markdown_it import MarkdownIt

from ckptmove.cli.render.markdown import MarkdownDocument, code, prose
from ckptmove.cli.render.renderer import Summary, VerifyAnswer
from ckptmove.comparison.differences import Differences, Uncompared
from ckptmove.model import Finding, Severity
from ckptmove.proof.evidence import CheckResult, Verdict
from ckptmove.proof.request import VerifyRequest

HOSTILE = "a|b`c*_d_<img src=x onerror=alert(1)>[x](http://x.de)@octo\\|#1 ~~s~~ $x$ &lt; <!-- www.x.de"
#: Elements of a report; any other one is made by text that was not escaped.
ELEMENTS = {"h3", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "br", "details", "summary"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.texts, self.comments, self.is_cell = [], [], [], [], False
        self.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "td":
            self.cells.append("")
            self.is_cell = True

    def handle_endtag(self, tag):
        self.is_cell &= tag != "td"

    def handle_data(self, data):
        self.texts.append(data)
        if self.is_cell:
            self.cells[-1] += data

    def handle_comment(self, data):
        self.comments.append(data)


@pytest.fixture
def page(say, bench):
    """Type a command, and get its report as HTML."""

    def page(*words):
        said = say(*words, "--report", "markdown=report.md")
        text = (bench / "report.md").read_text()
        page = Page(text)
        assert set(page.tags) <= ELEMENTS
        assert page.comments[0] == " ckptmove "
        assert {*page.comments[1:]} <= {" "}  # splits text that looks like a link
        assert f"exit code {said.code}" in "".join(page.texts) if said.code else "passed" in "".join(page.texts)
        return page

    return page


@pytest.mark.parametrize("kind", [code, prose])
def test_text_stays_text(kind) -> None:
    (cell,) = Page(f"| head |\n| --- |\n| {kind(HOSTILE)} |\n").cells
    assert cell.replace("\u200b", "").strip() == HOSTILE
    texts = Page(kind(f"{HOSTILE} me@example.org https://example.org www.example.org")).texts
    assert not re.search(r"www\.|://|@\w", "\n".join(texts))  # GitHub makes links of these


def test_prose_mentions_nobody() -> None:
    assert "@octo" not in "".join(Page(prose(HOSTILE)).texts)


def test_a_hostile_name_stays_text(page, bench) -> None:
    torch.save({"w": torch.ones(1)}, bench / "a.pth")
    torch.save({"w": torch.ones(1), HOSTILE: torch.ones(1)}, bench / "b.pth")
    found = page("diff", "a.pth", "b.pth")
    assert HOSTILE in found.cells


def test_inspect_has_a_row_for_each_checkpoint_and_each_finding(page) -> None:
    found = page("inspect", "dragged.pth", "run.pth", "none.pth")
    assert {"dragged.pth", "run.pth", "O201 step-on-accelerator", "R301 rng-on-accelerator"} <= {*found.cells}
    assert "none.pth: no such file" in found.cells
    assert "83 parameters · float32 · epoch 2 · step 3 · lr 5e-4 · AdamW" in found.cells
    assert "ckptmove convert dragged.pth --to cuda:0" in found.cells


def test_errors_are_above_warnings(page) -> None:
    icons = [cell for cell in page("inspect", "dragged.pth").cells if cell in {"❌", "⚠️"}]
    assert icons == ["❌", "❌", "⚠️"]  # of the checkpoint, and of its findings


def test_inspect_without_findings(page, bench) -> None:
    torch.save({"epoch": 1}, bench / "empty.pth")
    found = page("inspect", "empty.pth", "--select", "D101")
    assert "no findings" in found.cells
    assert "no tensors" in found.cells


@pytest.mark.parametrize(("device", "misplaced"), [("cuda:1", True), ("cuda:3", False)])
def test_an_expectation(page, device, misplaced) -> None:
    found = "".join(page("inspect", "run.pth", "--expect", device, "--select", "D101").texts)
    assert ("Not on cuda:1: model.0.weight, " in found) is misplaced
    assert ("+9 more" in found) is misplaced


def test_convert_and_its_doubts(page) -> None:
    found = page("convert", "run.pth", "--to", "cpu", "--keep", "nothing", "-o", "new.pth")
    assert "run.pth" in found.cells
    assert "--keep nothing matches no whole name" in "".join(found.texts)
    assert (
        "skipped, new.pth exists" in page("convert", "run.pth", "--to", "cpu", "-o", "new.pth", "--skip-existing").cells
    )


def test_what_convert_notes(page, bench) -> None:
    torch.save({"device": "cuda:3", "w": torch.ones(1)}, bench / "named.pth")
    assert "💡" in "".join(page("convert", "named.pth", "--to", "mps").texts)


def test_verify_has_its_checks(page, monkeypatch) -> None:
    checks = (
        CheckResult("file", "passed", "fine"),
        CheckResult("placement", "failed", "a; b; fix: c", failures=("a", "b"), fix="c"),
        CheckResult("fresh", "skipped", "no state"),
    )
    finding = Finding(code="N501", name="not-finite", severity=Severity.ERROR, message="NaN", where=(), fix="")
    verdicts = [
        Verdict(
            path="run.pth", target="cpu", mode="cpu", passed=False, proven=False, checks=checks, findings=(finding,)
        ),
        Verdict(path="b.pth", target="cpu", mode="cpu", passed=True, proven=False, checks=(), findings=()),
        Verdict(path="c.pth", target="cpu", mode="cpu", passed=True, proven=True, checks=(), findings=()),
    ]
    monkeypatch.setattr("ckptmove.cli.verify_command.verify_checkpoint", lambda _request, **_callbacks: verdicts.pop(0))
    found = page("verify", "run.pth", "b.pth", "c.pth")
    assert [found.cells[index] for index in (0, 3, 6)] == ["❌", "⚠️", "✅"]
    assert "abfix: c" in found.cells
    assert found.tags.count("details") == 3
    assert "N501 not-finite" in found.cells


def test_what_failed_is_above_the_rest(page) -> None:
    found = page("inspect", "run.pth", "dragged.pth", "--select", "R301")
    assert [cell for cell in found.cells if cell.endswith(".pth")] == ["dragged.pth", "run.pth"]


def test_a_document_has_the_size_of_a_comment() -> None:
    def verdict(path, status, detail):
        checks = (CheckResult("file", status, detail),)
        result = Verdict(
            path=path, target="cpu", mode="cpu", passed=status != "failed", proven=True, checks=checks, findings=()
        )
        return VerifyAnswer(VerifyRequest(path), result)

    document = MarkdownDocument()
    for index in range(40):
        document.verify(verdict(f"{index}.pth", "passed", "*" * 1000))
    document.verify(verdict("last.pth", "failed", "no such record"))
    text = document.document(Summary("verify", 1))
    assert len(text) <= 65_536
    assert text.index("last.pth") < text.index("0.pth")
    assert "no such record" in text
    assert re.search(r"\d+ sections left out", text.splitlines()[-1])


def test_diff_counts_what_it_does_not_show(page, bench) -> None:
    for name, value in (("a.pth", 0.0), ("b.pth", 1.0)):
        torch.save({f"w{index}": torch.full((1,), value) for index in range(60)}, bench / name)
    found = page("diff", "a.pth", "b.pth")
    assert found.tags.count("tr") == 52
    assert "and 10 more" in found.cells
    assert "✅" in "".join(page("diff", "run.pth", "run.pth").texts)


def test_diff_shows_what_could_not_be_compared(page, monkeypatch) -> None:
    result = Differences(
        first="a", second="b", tensors=1, added=(), removed=("x",), changed=(),
        uncompared=(Uncompared("w", "too large"),), notes=("a note",),
    )  # fmt: skip
    monkeypatch.setattr("ckptmove.cli.diff_command.api.diff", lambda *_paths, **_options: result)
    found = page("diff", "run.pth", "dragged.pth")
    assert {"not compared", "w", "too large", "removed", "x"} <= {*found.cells}
    assert "💡 a note" in "".join(found.texts)
