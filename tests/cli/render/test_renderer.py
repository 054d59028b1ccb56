"""A report format is one class and one line: all use it through ``--format``, and a kind through ``--report``."""

from __future__ import annotations

import pytest

from ckptmove.cli import completion, verify_command
from ckptmove.cli.render.formats import DOCUMENTS, RENDERERS
from ckptmove.cli.render.renderer import Document, Renderer
from ckptmove.cli.streams import Output
from ckptmove.proof.evidence import CheckResult, Verdict

ANSWERS = {"inspect", "convert", "undo", "verify", "diff", "rules", "failure"}


class Markdown(Renderer):
    def __init__(self, out):
        self._out = out

    def inspect(self, answer):
        self._out.lines([f"# inspect {answer.request.path}: {len(answer.result.inventory.tensors)}"])

    def convert(self, answer):
        self._out.lines([f"# convert {answer.request.path} to {answer.request.move.to}: {answer.result.output}"])

    def undo(self, result):
        self._out.lines([f"# undo {result.path}"])

    def verify(self, answer):
        self._out.lines([f"# verify {answer.request.path} on {answer.request.to}: {answer.result.passed}"])

    def diff(self, result):
        self._out.lines([f"# diff {result.first} {result.second}: {result.same}"])

    def rules(self, entries):
        self._out.lines([f"# rules {' '.join(entry.code for entry in entries)}"])

    def failure(self, failure):
        self._out.lines([f"> {failure.kind} {failure.exit_code} {failure.path}"])

    def finish(self, summary):
        self._out.lines([f"{summary.command}: {summary.exit_code}, {summary.good}/{summary.checkpoints}"])
        return summary.exit_code


@pytest.fixture
def markdown(say, monkeypatch):
    """Type a command with ``--format markdown`` and get the lines of its report."""
    say("rules", "--help")  # builds the commands, once for all tests, before there is another format
    monkeypatch.setitem(RENDERERS, "markdown", Markdown)

    def markdown(*words):
        said = say(*words, "--format", "markdown")
        assert said.err == ""
        return said.code, *said.out.splitlines()

    return markdown


def test_every_command_writes_its_answer_in_a_new_format(markdown, monkeypatch) -> None:
    passed = Verdict(
        path="run.pth", target="cpu", mode="cpu", passed=True, proven=True, findings=(),
        checks=(CheckResult(name="step", status="passed", detail=""),),
    )  # fmt: skip
    monkeypatch.setattr(verify_command, "verify_checkpoint", lambda _request, **_callbacks: passed)
    assert markdown("inspect", "run.pth", "dragged.pth", "--select", "N") == (
        0, "# inspect run.pth: 16", "# inspect dragged.pth: 18", "inspect: 0, 2/2",
    )  # fmt: skip
    assert markdown("convert", "run.pth", "--to", "cpu", "-o", "cpu.pth") == (
        0, "# convert run.pth to cpu: cpu.pth", "convert: 0, 0/1",
    )  # fmt: skip
    assert markdown("diff", "run.pth", "cpu.pth") == (1, "# diff run.pth cpu.pth: False", "diff: 1, 0/1")
    assert markdown("convert", "cpu.pth", "--to", "mps", "--in-place")[0] == 0
    assert markdown("convert", "cpu.pth", "--undo") == (0, "# undo cpu.pth", "convert: 0, 0/1")
    assert markdown("verify", "run.pth", "--to", "cpu") == (0, "# verify run.pth on cpu: True", "verify: 0, 1/1")
    assert markdown("rules", "N") == (0, "# rules N501 N502 N503", "rules: 0, 0/1")


def test_errors_are_written_in_a_new_format(markdown) -> None:
    assert markdown("inspect", "none.pth") == (3, "> missing-file 3 none.pth", "inspect: 3, 0/1")
    assert markdown("convert", "none.pth", "--to", "cpu") == (3, "> missing-file 3 none.pth", "convert: 3, 0/1")
    assert markdown("diff", "run.pth") == (2, "> usage 2 None", "diff: 2, 0/1")
    assert markdown("inspect", "run.pth", "--bogus") == (2, "> usage 2 None", "inspect: 2, 0/1")


class Count(Document):
    title, head = "a count", b"tensors: "

    def __init__(self):
        self._tensors = 0

    def inspect(self, answer):
        self._tensors += len(answer.result.inventory.tensors)

    def document(self, summary):
        return f"tensors: {self._tensors} {[one.kind for one in summary.failures]}"


def test_a_command_writes_a_new_kind_of_report(say, bench, monkeypatch) -> None:
    say("rules", "--help")  # as above
    monkeypatch.setitem(DOCUMENTS, "count", Count)
    assert say("inspect", "run.pth", "none.pth", "--report", "count=here.txt").code == 3
    assert (bench / "here.txt").read_text() == "tensors: 16 ['missing-file']"
    assert "count=" in completion.report_kinds()


def test_a_format_that_leaves_an_answer_out_writes_nothing(say, monkeypatch) -> None:
    say("rules", "--help")  # as above
    monkeypatch.setitem(RENDERERS, "none", lambda _out: Renderer())
    assert say("rules", "--format", "none") == say("rules", "D101", "--format", "none")
    assert (say("inspect", "a.pth", "b.pth", "--format", "none").code, say("rules", "--format", "none").out) == (3, "")


@pytest.mark.parametrize("name", list(RENDERERS))
def test_every_format_writes_every_answer(name) -> None:
    made = type(RENDERERS[name](Output()))
    written = {name for cls in made.__mro__ if cls is not Renderer for name in vars(cls)}
    commands = getattr(made, "commands", None)
    assert written >= (ANSWERS if commands is None else {*commands, "failure", "finish"})


def test_the_formats_are_the_choices(ask, say, monkeypatch) -> None:
    error = ask("rules", "--format", "xml")["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert all(repr(name) in error["message"] for name in RENDERERS)
    assert f"<{'|'.join(RENDERERS)}>" in say("rules", "--help").out
    monkeypatch.setenv("_CKPTMOVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "ckptmove rules --format ")
    monkeypatch.setenv("COMP_CWORD", "3")
    assert say().out.split() == list(RENDERERS)
