"""``verify``, between its options and its report.

Never runs a check itself: the use-cases do.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove import api
from ckptmove.cli.batch import conclude, for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render import document, github, verification
from ckptmove.cli.render.junit import junit_document
from ckptmove.cli.streams import Format, say
from ckptmove.errors import OutputIsNoReport, ReportFailed, UsageError, WriteFailed, reason_of
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.io.locations import same_file
from ckptmove.io.sink import FileSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.selection import Selection
    from ckptmove.cli.streams import Output
    from ckptmove.limits import Limits
    from ckptmove.verification.evidence import VerifyResult

#: What every report of ours starts with, and no checkpoint.
_XML: Final = b"<?xml"


class VerifyOptions(NamedTuple):
    """What ``verify`` was asked for; as the arguments of :func:`ckptmove.api.verify`.

    Attributes:
        to: the target, or None.
        against: the original, or None.
        optimizer: its class, or None.
        require_device: whether a simulated target is a failure.
        seed: of the gradient.
        keep: globs of tensor names that may lie where they are.
        devices: how many devices the target machine has, or None.
        case: the user's function, or None.
        timeout: seconds that torch may take, or None.
        sample: how many parameters of each optimizer, and how many other tensors, are looked at, or None.
        limits: what each file may ask for.
        strict: whether warnings, and a resume that is not proven, are a failure.
        junit: file that takes the verdicts as JUnit XML, or None.
        selection: the findings that are reported.
    """

    to: str | None
    against: str | None
    optimizer: str | None
    require_device: bool
    seed: int
    keep: tuple[str, ...]
    devices: int | None
    case: str | None
    timeout: float | None
    sample: int | None
    limits: Limits
    strict: bool
    junit: str | None
    selection: Selection


def run_verify(paths: Sequence[str], options: VerifyOptions, out: Output) -> int:
    """Verify every path, report on each, and return the gravest exit code.

    Raises:
        UsageError: several checkpoints, and one original; and as :func:`ckptmove.api.verify`.
        OutputIsNoReport: the JUnit file is a checkpoint, or another file that is no XML.
        ReportFailed: the JUnit file could not be written; told before the work where that is known.
    """
    if options.against is not None and len(paths) > 1:
        raise UsageError(f"--against names the original of one checkpoint, and there are {len(paths)}")
    if options.junit is not None:
        _require_report(options.junit, [*paths, *([options.against] if options.against else [])])
    results: list[VerifyResult] = []

    def work(path: str) -> tuple[int, tuple[()]]:
        result = _verify(path, options, out)
        results.append(result)
        if out.format is not Format.JSON:
            _tell(result, options, out)
        return (NO if result.fails(strict=options.strict) else YES), ()

    batch = for_each(paths, work, out)
    if options.junit is not None:
        _write(options.junit, junit_document(results, batch.failures, strict=options.strict))
    if out.format is Format.JSON:
        out.document(document.verify_document(results, batch.code, batch.failures))
    else:
        # Where that fails a checkpoint, it is none of those that passed.
        unproven = 0 if options.strict else sum(result.passed and not result.proven for result in results)
        conclude(batch, len(paths), "passed", out, unproven=unproven)
    return batch.code


def _require_report(path: str, checkpoints: Sequence[str]) -> None:
    """Refuse what a report must not replace, and what cannot be written, before hours are spent on the checks."""
    if path == "-":
        raise UsageError("a JUnit report is not written to standard output; a file that is called - is named ./-")
    if any(same_file(checkpoint, path) for checkpoint in checkpoints):
        raise OutputIsNoReport("the JUnit report would replace a checkpoint that is to be verified", path=path)
    if not _is_replaceable(path):
        raise OutputIsNoReport("the JUnit report would replace a file that is no XML", path=path)
    with _sink(path):
        pass  # nothing is left of it


def _is_replaceable(path: str) -> bool:
    """Whether nothing is lost with a file: it holds a report of an earlier run, or nothing; or it is left to fail."""
    if not os.path.isfile(path):  # noqa: PTH113  # the path stays text
        return True
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # the path stays text
            return file.read(len(_XML)) in {b"", _XML}
    except OSError as error:
        raise ReportFailed(path, reason_of(error)) from error


def _write(path: str, document: bytes) -> None:
    """Replace a report: each run of a job writes its own."""
    with _sink(path) as sink:
        sink.write(document)
        sink.commit()


@contextmanager
def _sink(path: str) -> Iterator[FileSink]:
    try:
        with FileSink(path, force=True) as sink:
            yield sink
    except WriteFailed as error:
        raise ReportFailed(path, error.reason) from error


def _verify(path: str, options: VerifyOptions, out: Output) -> VerifyResult:
    with ProgressBar(wanted=out.is_watched) as progress:
        result = api.verify(
            path,
            to=options.to,
            against=options.against,
            optimizer=options.optimizer,
            require_device=options.require_device,
            seed=options.seed,
            keep=options.keep,
            devices=options.devices,
            case=options.case,
            timeout=options.timeout,
            sample=options.sample,
            limits=options.limits,
            ignore=sorted(CATALOGUE.keys() - options.selection.codes),
            progress=progress,
            stage=progress.stage,
        )
    return replace(result, findings=options.selection.among(result.findings))


def _has_state(result: VerifyResult) -> bool:
    return any(dict(check.evidence).get("with_state") for check in result.checks)


def _tell(result: VerifyResult, options: VerifyOptions, out: Output) -> None:
    if out.format is Format.GITHUB:
        out.lines(github.verification_lines(result, strict=options.strict))
    elif out.quiet:
        out.lines([verification.brief_line(result, strict=options.strict)])
    else:
        out.report(verification.verification_lines(out.page, result, verbose=out.verbose, strict=options.strict))
        is_whole = result.sample is None or result.sample.is_all
        if result.passed and not result.proven and options.case is None and is_whole and _has_state(result):
            say("hint: --case FILE.py:FUNC proves it with your own model and optimizer")
