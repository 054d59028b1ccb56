"""The kinds of documents that ``--report`` writes to files.

The module of a kind is imported for a document of this kind, and not for its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.cli.render.renderer import Document


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


#: Kinds of ``--report``.
DOCUMENTS: Final[dict[str, Callable[[], Document]]] = {
    "json": _json_document,
    "junit": _junit,
    "markdown": _markdown,
    "sarif": _sarif,
    "html": _html,
}
