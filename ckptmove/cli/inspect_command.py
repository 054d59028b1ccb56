"""``inspect``, between its options and its report.

Never reads a checkpoint itself: the use-cases do.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove import api
from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.cli.batch import conclude, for_each
from ckptmove.cli.next_command import verify_command
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render import inspection
from ckptmove.cli.render.answers import Expectation, InspectAnswer
from ckptmove.cli.streams import Format, suggest
from ckptmove.findings.context import Context, available_device
from ckptmove.model import Severity
from ckptmove.text import Command, command_line
from ckptmove.torch_facts.devices import NO_DEVICE, parse_target
from ckptmove.verification.evidence import fails_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.render.answers import Detail
    from ckptmove.cli.selection import Selection
    from ckptmove.cli.streams import Output
    from ckptmove.errors import CkptMoveError
    from ckptmove.limits import Limits

#: Findings with which no other command helps: bytes are lost, or the file attacks whoever loads it.
_HOPELESS: Final = frozenset({"F801", "F802", "S702"})


class InspectOptions(NamedTuple):
    """What ``inspect`` was asked for.

    Attributes:
        target: device that the findings judge for, or None.
        expect: device where everything that should move has to be, or None.
        device_count: how many devices the target machine has, or None where that was not said.
        limits: what a file may ask for.
        match: glob over tensor names, or None.
        check: whether every record is read.
        strict: whether warnings fail the run.
        selection: the findings that count.
        detail: how much people see.
    """

    target: str | None
    expect: str | None
    device_count: int | None
    limits: Limits
    match: str | None
    check: bool
    strict: bool
    selection: Selection
    detail: Detail


def run_inspect(paths: Sequence[str], options: InspectOptions, out: Output) -> int:
    """Inspect every path, report on each, and return the gravest exit code."""
    answers: list[InspectAnswer] = []

    def work(path: str) -> tuple[int, Sequence[CkptMoveError]]:
        answer = _answer(path, options, out)
        if out.format is Format.JSON:
            answers.append(answer)
        else:
            _tell(answer, options, out)
        return answer.exit_code, answer.inspection.unreadable

    batch = for_each(paths, work, out)
    if out.format is Format.JSON:
        from ckptmove.cli.render import document  # noqa: PLC0415  # for people it is not loaded

        out.document(document.inspect_document(answers, batch.code, batch.failures))
    else:
        conclude(batch, len(paths), "fine", out)
    return batch.code


def _answer(path: str, options: InspectOptions, out: Output) -> InspectAnswer:
    with ProgressBar(wanted=out.is_watched) as progress:
        found = api.inspect(
            path,
            target=options.target if options.expect is None else None,
            expect=options.expect,
            device_count=options.device_count,
            limits=options.limits,
            check=options.check,
            outline=options.detail.tree,
            keep_going=True,
            progress=progress,
        )
    expectation = None
    if options.expect is not None and found.plan is not None:
        unplaced = sum(tensor.device == NO_DEVICE for tensor in found.inventory.tensors)
        expectation = Expectation(options.expect, found.plan.edits, unplaced)
    findings = options.selection.among(found.findings)
    tensors = found.inventory.tensors
    if options.match is not None:
        tensors = tuple(tensor for tensor in tensors if fnmatchcase(tensor.name, options.match))
    is_no = fails_run(findings, strict=options.strict) or (expectation is not None and bool(expectation.misplaced))
    return InspectAnswer(
        inspection=replace(found, findings=findings),
        tensors=tensors,
        expectation=expectation,
        exit_code=NO if is_no else YES,
    )


def _tell(answer: InspectAnswer, options: InspectOptions, out: Output) -> None:
    detail = options.detail
    if out.format is Format.GITHUB:
        from ckptmove.cli.render import github  # noqa: PLC0415  # for people it is not loaded

        out.lines(github.inspection_lines(answer))
    elif out.quiet:
        out.lines([inspection.brief_line(answer), *inspection.asked_lines(out.page, answer, detail)])
    else:
        out.report(inspection.inspection_lines(out.page, answer, detail))
        command = _next_command(answer, options)
        if command:
            suggest(command)


def _next_command(answer: InspectAnswer, options: InspectOptions) -> str:
    inventory = answer.inspection.inventory
    path = inventory.path
    findings = [finding for finding in answer.inspection.findings if finding.severity is not Severity.INFO]
    if answer.inspection.unreadable or any(finding.code in _HOPELESS for finding in findings):
        return ""
    if answer.expectation is not None and answer.expectation.misplaced:
        target = available_device(parse_target(answer.expectation.device), Context(device_count=options.device_count))
        return command_line(["ckptmove", "convert", path, "--to", target])
    if isinstance(inventory, DirectoryInventory) and inventory.form is None and inventory.checkpoints:
        return command_line(["ckptmove", "inspect", posixpath.join(path, inventory.checkpoints[-1])])
    fix = next((finding.fix for finding in findings if isinstance(finding.fix, Command)), None)
    judged = options.expect or options.target
    return fix or verify_command(path, ["--to", judged] if judged else [], devices=options.device_count)
