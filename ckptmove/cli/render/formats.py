"""The formats of reports: on stdout, by the names of ``--format``; in files, by the kinds of ``--report``.

Their modules import what they need when they write an answer, because ``--help`` imports them all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.github import GitHubRenderer
from ckptmove.cli.render.html.document import HtmlDocument
from ckptmove.cli.render.human import HumanRenderer
from ckptmove.cli.render.json_lines import JsonLinesRenderer
from ckptmove.cli.render.json_report import JsonDocument, JsonRenderer
from ckptmove.cli.render.junit import JUnitDocument
from ckptmove.cli.render.markdown import MarkdownDocument
from ckptmove.cli.render.sarif import SarifDocument
from ckptmove.cli.streams import Output
from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.cli.render.renderer import Document, Renderer

#: Formats of ``--format``.
RENDERERS: Final[dict[str, Callable[[Output], Renderer]]] = {
    "human": HumanRenderer,
    "json": JsonRenderer,
    "jsonl": JsonLinesRenderer,
    "github": GitHubRenderer,
}
#: Kinds of ``--report``.
DOCUMENTS: Final[dict[str, Callable[[], Document]]] = {
    "json": JsonDocument,
    "junit": JUnitDocument,
    "markdown": MarkdownDocument,
    "sarif": SarifDocument,
    "html": HtmlDocument,
}
DEFAULT: Final = "human"
#: The format of ``--json``.
_JSON: Final = "json"
_LINES: Final = "jsonl"


def open_report(form: str | None, command: str, *, as_json: bool, quiet: bool, verbose: bool) -> Renderer:
    """Start the report of a command."""
    if as_json and form not in {None, _JSON}:
        raise UsageError(f"--json means --format {_JSON}, and cannot be combined with --format {form}")
    if form == _LINES and command not in JsonLinesRenderer.commands:
        commands = " and ".join(JsonLinesRenderer.commands)
        raise UsageError(f"--format {_LINES} is a format of {commands}; {command} has --format {_JSON}")
    return RENDERERS[_JSON if as_json else form or DEFAULT](Output(quiet=quiet, verbose=verbose))


def open_error_report(words: Sequence[str], default: str = "") -> Renderer:
    """Start a report for an error of a command line that may not have been parsed, in the format that it names.

    If it names none, the default counts, or the human format if that is unknown.
    """
    pairs = {*words, *(f"{first}={second}" for first, second in pairwise(words))}
    named = _JSON if "--json" in words else next((one for one in RENDERERS if f"--format={one}" in pairs), default)
    return RENDERERS.get(named, RENDERERS[DEFAULT])(Output())


def open_default_report() -> Renderer:
    """Start a report in the default format."""
    return RENDERERS[DEFAULT](Output())
