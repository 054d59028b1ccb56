"""The formats of reports: on stdout, by the names of ``--format``; in files, by the kinds of ``--report``.

The module of a format is imported for a report in this format, and not for its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.cli.render.renderer import Document, Renderer
    from ckptmove.cli.streams import Output


def _human(out: Output) -> Renderer:
    from ckptmove.cli.render.human import HumanRenderer

    return HumanRenderer(out)


def _json(out: Output) -> Renderer:
    from ckptmove.cli.render.json_report import JsonRenderer

    return JsonRenderer(out)


def _json_lines(out: Output) -> Renderer:
    from ckptmove.cli.render.json_lines import JsonLinesRenderer

    return JsonLinesRenderer(out)


def _github(out: Output) -> Renderer:
    from ckptmove.cli.render.github import GitHubRenderer

    return GitHubRenderer(out)


def _json_document() -> Document:
    from ckptmove.cli.render.json_report import JsonDocument

    return JsonDocument()


def _junit() -> Document:
    from ckptmove.cli.render.junit import JUnitDocument

    return JUnitDocument()


def _markdown() -> Document:
    from ckptmove.cli.render.markdown import MarkdownDocument

    return MarkdownDocument()


def _sarif() -> Document:
    from ckptmove.cli.render.sarif import SarifDocument

    return SarifDocument()


def _html() -> Document:
    from ckptmove.cli.render.html.document import HtmlDocument

    return HtmlDocument()


#: Formats of ``--format``.
RENDERERS: Final[dict[str, Callable[[Output], Renderer]]] = {
    "human": _human,
    "json": _json,
    "jsonl": _json_lines,
    "github": _github,
}
#: Kinds of ``--report``.
DOCUMENTS: Final[dict[str, Callable[[], Document]]] = {
    "json": _json_document,
    "junit": _junit,
    "markdown": _markdown,
    "sarif": _sarif,
    "html": _html,
}
DEFAULT: Final = "human"
