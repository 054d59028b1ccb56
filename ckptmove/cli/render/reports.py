"""The kinds of ``--report``. A kind imports its module when a command writes one: each needs other rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.cli.render.renderer import Document


def _json() -> Document:
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
    from ckptmove.cli.render.html_report import HtmlDocument

    return HtmlDocument()


#: All kinds, by the names that ``--report`` takes.
REPORTS: Final[dict[str, Callable[[], Document]]] = {
    "json": _json,
    "junit": _junit,
    "markdown": _markdown,
    "sarif": _sarif,
    "html": _html,
}


def open_document(word: str) -> tuple[str, Document]:
    """Start the document of a ``--report``.

    Args:
        word: the value of the option, ``KIND=FILE``.

    Returns:
        The file, and the empty document.

    Raises:
        UsageError: if the word has no known kind or no file.
    """
    kind, equals, path = word.partition("=")
    if not equals or kind not in REPORTS:
        raise UsageError(f"--report takes KIND=FILE, not '{word:.200}'; the kinds are {', '.join(REPORTS)}")
    if not path:
        raise UsageError(f"--report {word} names no file")
    return path, REPORTS[kind]()
