"""The ``convert`` command, and ``convert --undo``."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ckptmove.api import functions as api
from ckptmove.api.arguments import OutputsCollide
from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.paths import as_operand
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.renderer import ConvertAnswer, Summary
from ckptmove.cli.signals import settle
from ckptmove.errors import CkptMoveError, NotAPath, OutputIsStdout, StdoutFailed, UsageError
from ckptmove.io.locations import exists, inside, make_folder, remove_empty_folder, without_suffix
from ckptmove.io.remote.address import Address, as_location
from ckptmove.torch_facts.devices import is_device_string

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.limits import Limits


#: Options that ``--undo`` can be combined with, as parameters of the command.
_WITH_UNDO: Final = frozenset(
    {"paths", "undo", "dry_run", "force", "limit_factor", "json", "format", "quiet", "verbose", "version", "help"}
)


def require_paths(words: Sequence[str], options: Mapping[str, object]) -> None:
    """Check that no value of ``--to`` or ``--output`` was typed as a path. Options that were not typed are empty."""
    missing = [word for word in words if not (isinstance(as_location(word), Address) or exists(word))]
    devices = [word for word in missing if is_device_string(word)]
    if len(words) > 1 and len(devices) == 1 and not options["to"]:
        raise NotAPath(devices[0], "--to")
    has_output = options["output"] or options["output_dir"] or options["in_place"]
    if len(words) == 2 and missing == [words[1]] and not has_output and not has_magic(words[1]):
        raise NotAPath(words[1], "--output")


def outputs(
    paths: Sequence[str], output: str | None, folder: str | None, *, is_sharded: bool
) -> list[tuple[str, str | None]]:
    """Each checkpoint with its typed output, or None for the default."""
    if folder is not None and output is not None:
        raise UsageError("--output names the new file and --output-dir its folder: leave one of them out")
    if output is not None and len(paths) > 1:
        missing = next((path for path in paths if not (isinstance(path, Address) or exists(path))), None)
        if missing is not None:
            raise UsageError(f"'{missing:.200}' does not exist: write a value such as --shard-size 5GB without a space")
        raise UsageError(f"--output names one new file, not {len(paths)}: use --output-dir DIR")
    if folder is None:
        return [(path, None if output is None else as_operand(output)) for path in paths]
    names = map(without_suffix, paths) if is_sharded else paths
    return [(path, inside(as_operand(folder), name)) for path, name in zip(paths, names, strict=True)]


def run_convert(
    requests: Sequence[ConvertRequest],
    renderer: Renderer,
    *,
    failures: Mapping[str, CkptMoveError],
    strict_from: str,
    skip_existing: bool,
    folder: str | None,
) -> int:
    """Convert each checkpoint, write the reports, and return the highest exit code.

    Args:
        failures: errors of the paths that a search found and that cannot be read, by path.
        strict_from: path of the configuration file that sets ``strict``; empty if ``--strict`` was typed.
        folder: folder of the new files, which is created; None if each is next to its source.
    """
    if any(request.output == "-" for request in requests):
        raise OutputIsStdout
    targets = [api.with_default_output(request) for request in requests]
    made = {one.target for one in targets if one.target != one.path}
    chosen = [one for one in targets if len(targets) == 1 or one.path not in made]
    sources: dict[str, str] = {}
    for one in chosen:
        first = sources.setdefault(one.target, one.path)
        if first != one.path:
            raise OutputsCollide(first, one.path, one.target)
    skipped: list[str] = []
    unwritten: list[str] = []

    def work(request: ConvertRequest) -> tuple[int, tuple[()]]:
        if request.path in failures:
            raise failures[request.path]
        if skip_existing and not request.in_place and exists(request.target):
            renderer.skipped(request.path, request.target)
            skipped.append(request.path)
            return YES, ()
        with ProgressBar(wanted=renderer.shows_progress) as progress:
            result = api.convert_checkpoint(replace(request, progress=progress, settle=settle, began=perf_counter()))
        code = NO if request.strict and result.unmatched else YES
        written.append(result.output)
        if result.output is None and code == YES and not request.dry_run:
            unwritten.append(request.path)
        renderer.convert(ConvertAnswer(request, result, code, strict_from))
        return code, ()

    written: list[str | None] = []
    try:
        with _new_folder(None if folder is None or chosen[0].dry_run else as_operand(folder)):
            if len(chosen) == 1:  # its error ends the command, with a hint that needs the command line
                summary = Summary("convert", work(chosen[0])[0])
            else:
                summary = for_each("convert", chosen, work, renderer, len(chosen))._replace(
                    skipped=len(skipped), unwritten=len(unwritten), is_planned=chosen[0].dry_run
                )
        return renderer.finish(summary)
    except StdoutFailed as error:
        raise StdoutFailed(error.reason, output=written[-1] if written else None) from error


@contextmanager
def _new_folder(path: str | None) -> Iterator[None]:
    """Create a folder, and remove it again if nothing was written into it."""
    is_new = path is not None and not exists(path)
    if path is not None:
        make_folder(path)
    try:
        yield
    finally:
        if path is not None and is_new:
            remove_empty_folder(path)


def require_alone(options: Mapping[str, object]) -> None:
    """Check that no other option was typed with ``--undo``. Options that were not typed are empty."""
    if any(value for name, value in options.items() if name not in _WITH_UNDO):
        raise UsageError("--undo restores the file and takes no other option than --dry-run and --force")


def run_undo(path: str, renderer: Renderer, *, dry_run: bool, force: bool, limits: Limits) -> int:
    """Undo a conversion in place, write the report, and return the exit code."""
    renderer.undo(api.undo(path, dry_run=dry_run, force=force, settle=settle, limits=limits))
    return renderer.finish(Summary("convert", YES))
