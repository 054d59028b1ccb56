"""The ``convert`` command, and ``convert --undo``."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from ckptmove import api
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.answers import ConvertAnswer, Summary
from ckptmove.cli.signals import settle
from ckptmove.errors import OutputIsStdout, StdoutFailed, UsageError

if TYPE_CHECKING:
    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.limits import Limits
    from ckptmove.moves import ConvertResult


def run_convert(request: ConvertRequest, renderer: Renderer, *, strict: bool, strict_from: str) -> int:
    """Convert a checkpoint, write the report, and return the exit code.

    Args:
        request: the conversion.
        renderer: writes the report.
        strict: whether an option without a match stops the conversion.
        strict_from: path of the configuration file that sets ``strict``; empty if ``--strict`` was typed.

    Raises:
        OutputIsStdout: if the output is ``-``, which means standard output to a shell user.
        CkptMoveError: as :func:`ckptmove.api.convert`.
        StdoutFailed: if the report cannot be written; the new file stays.
    """
    if request.output == "-":
        raise OutputIsStdout
    result = _convert(replace(request, dry_run=request.dry_run or strict), renderer)
    code = NO if strict and result.unmatched else YES
    if strict and not request.dry_run and code == YES:
        result = _convert(request, renderer)
    try:
        renderer.convert(ConvertAnswer(request, result, code, strict_from))
        renderer.finish(Summary("convert", code))
    except StdoutFailed as error:
        raise StdoutFailed(error.reason, output=result.output) from error
    return code


def _convert(request: ConvertRequest, renderer: Renderer) -> ConvertResult:
    with ProgressBar(wanted=renderer.shows_progress) as progress:
        return api.convert_checkpoint(replace(request, progress=progress, settle=settle, began=perf_counter()))


def require_alone(*others: object) -> None:
    """Check that no other option was typed with ``--undo``.

    Raises:
        UsageError: if one was.
    """
    if any(others):
        raise UsageError("--undo restores the file and takes no other option than --dry-run")


def run_undo(path: str, renderer: Renderer, *, dry_run: bool, limits: Limits) -> int:
    """Undo a conversion in place, write the report, and return the exit code.

    Raises:
        CkptMoveError: as :func:`ckptmove.api.undo`.
        StdoutFailed: if the report cannot be written; the file is restored.
    """
    renderer.undo(api.undo(path, dry_run=dry_run, settle=settle, limits=limits))
    renderer.finish(Summary("convert", YES))
    return YES
