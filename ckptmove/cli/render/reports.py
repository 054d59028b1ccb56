"""Open the reports of a command: on stdout in the format of ``--format``, and in files."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.formats import DEFAULT, RENDERERS
from ckptmove.cli.streams import Output
from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.cli.options import OutputOptions
    from ckptmove.cli.render.renderer import Renderer

#: The format of ``--json``.
_JSON: Final = "json"
_LINES: Final = "jsonl"


@contextmanager
def reporting(
    options: OutputOptions, command: str, reports: Sequence[str] | None = None, paths: Sequence[str] = ()
) -> Iterator[Renderer]:
    """Open the reports of a command. An error that ends the command is also written to the files.

    No report may replace one of the paths, which the command reads or writes.
    """
    form = options.format
    if options.json and form not in {None, _JSON}:
        raise UsageError(f"--json means --format {_JSON}, and cannot be combined with --format {form}")
    if form == _LINES:
        from ckptmove.cli.render.json_lines import JsonLinesRenderer

        if command not in JsonLinesRenderer.commands:
            commands = " and ".join(JsonLinesRenderer.commands)
            raise UsageError(f"--format {_LINES} is a format of {commands}; {command} has --format {_JSON}")
    out = Output(quiet=options.quiet, verbose=options.verbose)
    main = RENDERERS[_JSON if options.json else form or DEFAULT](out)
    if not reports:
        yield main
        return
    from ckptmove.cli.render.report_files import with_files

    with with_files(main, command, reports, paths) as renderer:
        yield renderer


def open_error_report(words: Sequence[str], default: str = "") -> Renderer:
    """Start a report for an error of a command line that may not have been parsed, in the format that it names.

    If it names none, the default counts, or the human format if that is unknown.
    """
    pairs = {*words, *(f"{first}={second}" for first, second in pairwise(words))}
    named = _JSON if "--json" in words else next((one for one in RENDERERS if f"--format={one}" in pairs), default)
    return RENDERERS.get(named, RENDERERS[DEFAULT])(Output())
