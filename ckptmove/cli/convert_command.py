"""The ``convert`` command, and ``convert --undo``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from ckptmove import api
from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.paths import as_operand
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.answers import ConvertAnswer, Summary
from ckptmove.cli.signals import settle
from ckptmove.errors import OutputIsStdout, StdoutFailed, UsageError
from ckptmove.io.locations import exists, inside, make_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.limits import Limits
    from ckptmove.moves import ConvertResult


def outputs(paths: Sequence[str], output: str | None, folder: str | None) -> list[tuple[str, str | None]]:
    """Each checkpoint with its typed output, or None for the default.

    Raises:
        UsageError: if ``--output`` is set for several checkpoints, or together with ``--output-dir``.
    """
    if folder is not None and output is not None:
        raise UsageError("--output names the new file and --output-dir its folder: leave one of them out")
    if output is not None and len(paths) > 1:
        raise UsageError(f"--output names one new file, not {len(paths)}: use --output-dir DIR")
    if folder is None:
        return [(path, None if output is None else as_operand(output)) for path in paths]
    return [(path, inside(as_operand(folder), path)) for path in paths]


def run_convert(
    requests: Sequence[ConvertRequest],
    renderer: Renderer,
    *,
    strict: bool,
    strict_from: str,
    skip_existing: bool,
    folder: str | None,
) -> int:
    """Convert each checkpoint, write the reports, and return the highest exit code.

    Args:
        requests: one for each checkpoint.
        renderer: writes the reports.
        strict: whether an option without a match stops the conversion.
        strict_from: path of the configuration file that sets ``strict``; empty if ``--strict`` was typed.
        skip_existing: whether a checkpoint whose output exists is left out.
        folder: folder of the new files, which is created; None if each is next to its source.

    Raises:
        WriteFailed: if the folder cannot be created.
        OutputIsStdout: if the output is ``-``, which means standard output to a shell user.
        UsageError: if one output is named for several checkpoints; and as :func:`ckptmove.api.convert`.
        StdoutFailed: if a report cannot be written; the new file stays.
    """
    if any(request.output == "-" for request in requests):
        raise OutputIsStdout
    targets = [api.with_default_output(request) for request in requests]
    made = {one.target for one in targets if not one.in_place}
    chosen = [one for one in targets if len(targets) == 1 or one.path not in made]
    doubled = [target for target, count in Counter(one.target for one in chosen).items() if count > 1]
    if doubled:
        raise UsageError(f"several checkpoints would be written as {doubled[0]}")
    if folder is not None and not chosen[0].dry_run:
        make_folder(as_operand(folder))

    def work(request: ConvertRequest) -> tuple[int, tuple[()]]:
        if skip_existing and not request.in_place and exists(request.target):
            renderer.skipped(request.path, request.target)
            return YES, ()
        result = _convert(replace(request, dry_run=request.dry_run or strict), renderer)
        code = NO if strict and result.unmatched else YES
        if strict and not request.dry_run and code == YES:
            result = _convert(request, renderer)
        try:
            renderer.convert(ConvertAnswer(request, result, code, strict_from))
        except StdoutFailed as error:
            raise StdoutFailed(error.reason, output=result.output) from error
        return code, ()

    if len(chosen) == 1:  # its error ends the command, with a hint that needs the command line
        summary = Summary("convert", work(chosen[0])[0])
    else:
        summary = for_each("convert", chosen, work, renderer)
    renderer.finish(summary)
    return summary.exit_code


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
