"""Parts of the text reports that no sample covers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptmove.api import document
from ckptmove.api.failures import Failure
from ckptmove.api.inspection import Expectation, Inspection, InspectRequest
from ckptmove.checkpoint.inventory.outline import OutlineLine
from ckptmove.cli.render import conversion, github, inspection, report, verification
from ckptmove.cli.render.renderer import ConvertAnswer, Detail, InspectAnswer, Summary
from ckptmove.cli.render.text import Page
from ckptmove.cli.streams import Output
from ckptmove.conversion.conversion import ConvertRequest
from ckptmove.conversion.results import Converted, UndoResult
from ckptmove.model import (
    Finding,
    GlobalUse,
    Inventory,
    OptimizerRecord,
    ParamGroup,
    Severity,
    StateEntry,
    TensorRecord,
)
from ckptmove.moves import MovePlan, MoveRequest, StorageEdit, Unmatched
from ckptmove.proof import checks
from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.evidence import CheckResult, Verdict
from ckptmove.text import Command


def finding(**facts) -> Finding:
    facts = {"code": "R302", "name": "resume-incomplete", "severity": Severity.INFO, "message": "no scheduler", **facts}
    return Finding(**facts)


PLAIN = Detail()


def answer(*findings, expectation=None, outline=(), detail=PLAIN, **facts) -> InspectAnswer:
    inventory = Inventory(path="a.pth", container="torch-zip", layout="plain", size_bytes=1, **facts)
    found = Inspection(inventory, findings, outline, expectation=expectation)
    return InspectAnswer(InspectRequest("a.pth"), found, inventory.tensors, 0, detail)


def converted(result: Converted) -> ConvertAnswer:
    return ConvertAnswer(ConvertRequest(path="a.pth", move=MoveRequest(to="mps")), result)


NO_TENSOR = "no tensors"


@pytest.mark.parametrize("count", [8, 9, 10, 12])
def test_github_shows_the_first_annotations_of_a_level_and_the_last(count, capsys) -> None:
    renderer = github.GitHubRenderer(Output())
    for index in range(count):
        renderer.failure(Failure("usage", str(index), "", None, 2))
    renderer.undo(UndoResult(path="a.pth", size=1, removed=0, is_done=True, seconds=0.0))
    assert renderer.finish(Summary("convert", 2)) == 2
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith("::error")]
    assert len(said) <= 10
    assert len([line for line in lines if line.startswith("::notice")]) == 1
    assert said[-1].endswith(f"::{count - 1}")
    assert any("3 more" in line for line in said) is (count == 12)
    assert {line.rpartition("::")[2] for line in lines} >= {*map(str, range(count))}


def test_a_file_without_tensors() -> None:
    lines = list(inspection.inspection_lines(Page(), answer(torch_version="2.1.0", producer="lightning 2")))
    assert lines == ["a.pth", "torch-zip, plain, 1 B, torch 2.1.0, lightning 2", "", NO_TENSOR, "", "no findings"]
    lines = list(inspection.inspection_lines(Page(), answer(detail=Detail(tensors=True))))
    assert lines == ["a.pth", "torch-zip, plain, 1 B", "", NO_TENSOR, "", "no findings"]


def test_a_finding_without_place_and_cure() -> None:
    lines = list(inspection.finding_lines(Page(), [finding()], verbose=False))
    assert lines == [f"info R302 resume-incomplete: {finding().message}"]
    assert inspection.brief_line(answer(finding(), finding())) == "a.pth: 2 notes (R302)"


def test_colors_are_those_of_the_gravest() -> None:
    page = Page(color=True)
    mild, grave = finding(severity=Severity.WARNING), finding(severity=Severity.ERROR)
    assert inspection.findings_summary(page, [mild, grave]) == "\x1b[1;31m1 error, 1 warning\x1b[0m"
    assert inspection.findings_summary(page, []) == "\x1b[1;32mno findings\x1b[0m"
    (line,) = inspection.finding_lines(page, [mild], verbose=False)
    assert line == "\x1b[1;33mwarning R302 resume-incomplete\x1b[0m: no scheduler"


def test_findings_wrap_on_a_terminal() -> None:
    lines = list(inspection.finding_lines(Page(columns=40), [finding(where=("x" * 60,), fix="y " * 40)], verbose=True))
    assert lines[:2] == ["info R302 resume-incomplete: no", "  scheduler"]
    assert len(lines[2]) == 40
    assert len(lines[3]) > 80, "a command is for copying"


def test_odd_tensors_and_names() -> None:
    root = TensorRecord("", "other", "cpu", "float32", (2,), (1,), "0", 0, 8)
    sparse = TensorRecord("a\x1b", "model", "cuda:0", "float32", (2,), (), None, 0, 8, "sparse_coo")
    use = GlobalUse("os\n.system", None, "dangerous")
    lines = list(
        inspection.inspection_lines(
            Page(),
            answer(
                tensors=(root, sparse),
                globals=(use,),
                outline=(OutlineLine(0, "", "dict (1)"),),
                detail=Detail(tensors=True, globals=True, tree=True),
            ),
        )
    )
    assert "(root)  other  cpu     float32             [2]      8 B" in lines
    assert "a\\x1b   model  cuda:0  float32 sparse_coo  [2]      8 B" in lines
    assert "os\\x0a.system  no            dangerous" in lines
    # There are lines only for verdicts that occur.
    assert any(line.startswith("dangerous  ") for line in lines)
    assert not [line for line in lines if line.startswith(("safe ", "unknown "))]
    assert "dict (1)" in lines


def optimizer(where="optim", step: object = None, **facts) -> OptimizerRecord:
    groups = tuple(ParamGroup(f"{where}.param_groups.{i}", ("0", "1"), (), (), ()) for i in range(2))
    scalars = (("step", step),) if step is not None else ()
    return OptimizerRecord(where, groups, (StateEntry("0", (), scalars), StateEntry("1", (), ())), **facts)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (optimizer(candidates=("AdamW",), step=1000), "optim: AdamW, 2 groups, 4 parameters, step 1,000"),
        (optimizer(candidates=("AdamW", "Adam")), "optim: AdamW or Adam, 2 groups, 4 parameters"),
        (optimizer("", step="x\x1b"), "optimizer: of no class in torch.optim, 2 groups, 4 parameters"),
        (optimizer(candidates=("SGD",), is_flat=True), "optim: SGD, no groups (flat), 4 parameters"),
        (optimizer("a\x1b", step=True), "a\\x1b: of no class in torch.optim, 2 groups, 4 parameters"),
    ],
)
def test_an_optimizer_is_told_in_one_line(record, line) -> None:
    lines = list(inspection.inspection_lines(Page(), answer(optimizers=(record,))))
    assert lines[2:] == ["", NO_TENSOR, "", line, "", "no findings"]


def test_several_places_have_a_total() -> None:
    def tensor(name: str, device: str) -> TensorRecord:
        return TensorRecord(name, "model", device, "float32", (4,), (1,), name, 0, 16)

    tensors = (tensor("a", "cpu"), tensor("b", "mps"))
    lines = list(inspection.inspection_lines(Page(), answer(tensors=tensors)))
    assert lines[-3] == "        total        2   32 B"
    assert not any("total" in line for line in inspection.inspection_lines(Page(), answer(tensors=tensors[:1])))


def test_a_run_that_fails_has_an_annotation_that_is_an_error() -> None:
    strict = answer(finding(severity=Severity.WARNING))._replace(exit_code=1)
    *_, last = github.annotations_of(report.inspected(strict))
    assert last == "::error file=a.pth,title=inspect::a.pth: 1 warning (R302)"
    grave = answer(finding(severity=Severity.ERROR))._replace(exit_code=1)
    assert len(list(github.annotations_of(report.inspected(grave)))) == 1


def edit(*names: str, cast=None) -> StorageEdit:
    return StorageEdit("7", names, "cpu", "mps", 8, "target", cast, (), ())


def test_a_storage_that_no_tensor_views() -> None:
    request = MoveRequest(to="mps")
    plan = MovePlan(request=request, edits=(edit(),))
    assert list(conversion.plan_lines(Page(), plan, verbose=False))[1] == "cpu   mps        0    8 B  target  none"
    unmet = answer(expectation=Expectation("mps", (edit(),), 0))
    assert any(line.startswith("  at  7 ") for line in inspection.inspection_lines(Page(), unmet))
    (line,) = github.annotations_of(report.inspected(unmet))
    assert line.startswith("::error file=a.pth,title=expect::")
    assert line.endswith(" mps: 7")


def test_what_was_written_is_told_with_its_rate_and_notes() -> None:
    plan = MovePlan(request=MoveRequest(to="mps"), edits=(edit("a"),))
    facts = {"output": "b.pth", "bytes_copied": 3 * 2**20, "seconds": 2.0, "notes": ("no CRCs",)}
    result = Converted(container="torch-zip", plan=plan, **facts)
    assert conversion.brief_line("a.pth", result) == "wrote b.pth: 3.0 MiB in 2.00 s, 1.5 MiB/s"
    assert list(conversion.conversion_lines(Page(), "a.pth", result, verbose=False))[-1] == "note: no CRCs"
    line = Command(f"{'type this: ' * 9}ckptmove convert b.pth --undo")
    noted = replace(result, notes=("some words " * 9, line))
    *_, first, second, command = conversion.conversion_lines(Page(columns=60), "a.pth", noted, verbose=False)
    assert (first[:12], second[:4]) == ("note: some w", "  so"), "words are wrapped"
    assert command.endswith(": ckptmove convert b.pth --undo"), "a command is for copying"
    brief = replace(result, seconds=0.99)
    assert conversion.brief_line("a.pth", brief) == "wrote b.pth: 3.0 MiB in 0.99 s", "the start is most of it"
    instant = Converted(container="torch-zip", plan=plan, output="b.pth", bytes_copied=3, seconds=0.0)
    assert conversion.brief_line("a.pth", instant) == "wrote b.pth: 3 B in 0.00 s"
    notice = "::notice file=b.pth,title=convert::wrote b.pth: 3 B in 0.00 s"
    assert list(github.annotations_of(report.converted(converted(instant)))) == [notice]
    missed = replace(instant, unmatched=(Unmatched("keep", "x", "matches no whole name"),))
    assert list(github.annotations_of(report.converted(converted(missed)))) == [
        "::warning file=a.pth,title=convert --keep::--keep x matches no whole name",
        notice,
    ]
    warned = converted(replace(instant, warnings=("rank1.pt is missing",)))
    assert list(github.annotations_of(report.converted(warned))) == [
        "::warning file=a.pth,title=convert::rank1.pt is missing",
        notice,
    ]
    assert list(conversion.warning_lines(warned)) == ["warning: rank1.pt is missing"]


def test_a_copy_is_told_apart_from_one_that_stores_what_was_deflated() -> None:
    plan = MovePlan(request=MoveRequest(to="mps"))
    copied = Converted(container="torch-zip", plan=plan, output="b.pth", bytes_copied=3, seconds=0.0)
    assert conversion.brief_line("a.pth", copied).startswith("wrote b.pth: 3 B in 0.00 s, copied")
    stored = replace(copied, plan=plan._replace(inflates=("0",)))
    assert conversion.brief_line("a.pth", stored) == "wrote b.pth: 3 B in 0.00 s"


def test_findings_stand_below_the_checks() -> None:
    check = CheckResult(name="numbers", status="failed", detail="NaN: 100%")
    bad = finding(code="N501", name="not-finite", severity=Severity.ERROR, message="NaN", where=("a",))
    result = Verdict(path="a", target="mps", mode="real", passed=False, proven=False, checks=(check,), findings=(bad,))
    assert list(verification.verification_lines(Page(), result, verbose=False))[2:] == [
        "",
        "error N501 not-finite: NaN",
        "  at  a",
        "1 error (N501)",
        "failed, real mps",
    ]
    assert list(github.annotations_of(report.verified(result))) == [
        "::error file=a,title=verify numbers::NaN: 100%25",
        "::error file=a,title=N501 not-finite::NaN (at a)",
        "::error file=a,title=verify::failed, real mps",
    ]
    case = CheckResult(name="case", status="failed", detail="no", evidence=(("file", "train.py"), ("line", 22)))
    assert "::error file=train.py,line=22,title=verify case::no" in github.annotations_of(
        report.verified(replace(result, checks=(case,)))
    )
    assert list(github.annotations_of(report.verified(replace(result, passed=True, proven=True))))[-1].startswith(
        "::notice "
    )
    assert list(github.annotations_of(report.verified(replace(result, passed=True))))[-1].startswith("::warning ")


def verified(*checks, findings=(), passed=True, proven=True) -> Verdict:
    return Verdict(path="a", target="mps", mode="real", passed=passed, proven=proven, checks=checks, findings=findings)


def test_notes_are_counted_below_the_checks_and_shown_when_asked() -> None:
    fixed = finding(code="O201", name="step-on-accelerator", severity=Severity.WARNING, message="slow", fix="mend it")
    note = finding(code="R303")
    result = verified(findings=(note, fixed))
    assert list(verification.verification_lines(Page(), result, verbose=False)) == [
        "a on mps",
        "",
        "warning O201 step-on-accelerator: slow",
        "  fix mend it",
        "1 warning, 1 note (R303, O201)",
        "passed, real mps",
    ]
    assert "info R303 resume-incomplete: no scheduler" in list(
        verification.verification_lines(Page(), result, verbose=True)
    )
    assert list(verification.verification_lines(Page(), verified(findings=(note,)), verbose=False))[1:] == [
        "1 note (R303)",
        "passed, real mps",
    ]


def test_faults_stand_below_each_other_and_a_command_in_one_line() -> None:
    command = "ckptmove convert 'a; b.pth' --to cuda:0 --output somewhere/else/with/a/long/name.pth"
    check = checks.failed("placement", ["2 tensors misplaced", f"{'x ' * 30}y"], command)
    _, *lines, _ = verification.verification_lines(Page(columns=60), verified(check, passed=False), verbose=False)
    assert lines == [
        "✗ placement  2 tensors misplaced",
        f"             {'x ' * 23}x",
        f"             {'x ' * 6}y",
        f"             fix: {command}",
    ]
    whole = checks.passed("placement", "4 parameters; 4 found")
    assert list(verification.verification_lines(Page(), verified(whole), verbose=False))[1] == (
        "✓ placement  4 parameters; 4 found"
    )


@pytest.mark.parametrize("make", [checks.passed, checks.failed, checks.skipped])
def test_a_line_of_the_user_is_not_cut(make) -> None:
    fault, fix = "at a; fix: b.py:3: x = 1; y = 2", "before a; fix: b.py:3: z = 1; x = 1; y = 2"
    check = make("case", fault, fix, fix="z = 1; x = 1; y = 2")
    assert check.detail == f"{fault}; fix: {fix}"
    assert loads(CheckResult, dumps(check)) == check
    _, first, second, _ = verification.verification_lines(Page(), verified(check), verbose=False)
    assert first.endswith(f" case  {fault}")
    assert second.endswith(f"   fix: {fix}")
    answer = document.result_to_json(verified(check))
    assert {*answer["checks"][0]} == {"name", "status", "detail", "evidence"}


def test_a_verdict_says_that_torch_was_not_asked() -> None:
    restore = CheckResult(name="restore", status="skipped", detail="weights-only mode refuses a name")
    result = replace(verified(proven=True), checks=(restore,))
    assert verification.outcome(result) == "passed, real mps, not compared with what torch.load returns"


def test_what_passed_without_proof_is_marked() -> None:
    page = Page(color=True)
    for passed, proven, color in ((True, True, 32), (True, False, 33), (False, False, 31)):
        *_, last = verification.verification_lines(page, verified(passed=passed, proven=proven), verbose=False)
        assert last.startswith(f"\x1b[1;{color}m")
    *_, first, second = verification.verification_lines(Page(columns=60), verified(proven=False), verbose=False)
    assert f"{first} {second.strip()}" == verification.outcome(verified(proven=False))
    line = verification.brief_line(verified(proven=False))
    assert line == f"a: {verification.outcome(verified(proven=False))}"


def test_a_failure_without_hint_or_path(capsys) -> None:
    failure = Failure(kind="usage", message="50% of\nthat", hint="", path=None, exit_code=2)
    github.GitHubRenderer(Output()).failure(failure)
    assert capsys.readouterr().out == "::error title=usage::50%25 of\\x0athat\n"


def test_a_plan_without_reasons_has_no_legend() -> None:
    plan = MovePlan(request=MoveRequest(to="mps"))
    (line,) = conversion.plan_lines(Page(), plan, verbose=False)
    assert line.startswith("nothing to change")
