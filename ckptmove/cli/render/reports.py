"""The kinds of ``--report``; imported only for a command that writes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.cli.render.html_report import HtmlDocument
from ckptmove.cli.render.json_report import JsonDocument
from ckptmove.cli.render.junit import JUnitDocument
from ckptmove.cli.render.markdown import MarkdownDocument
from ckptmove.cli.render.sarif import SarifDocument
from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.cli.render.renderer import Document

#: All kinds, by the names that ``--report`` takes.
REPORTS: Final[dict[str, Callable[[], Document]]] = {
    "json": JsonDocument,
    "junit": JUnitDocument,
    "markdown": MarkdownDocument,
    "sarif": SarifDocument,
    "html": HtmlDocument,
}


def open_document(word: str) -> tuple[str, Document]:
    """Start the document of a ``--report``.

    Args:
        word: the value of the option, ``KIND=FILE``.

    Returns:
        The file, and the empty document.

    Raises:
        UsageError: if the word has no known kind.
    """
    kind, equals, path = word.partition("=")
    if not equals or kind not in REPORTS:
        raise UsageError(f"--report takes KIND=FILE, not '{word:.200}'; the kinds are {', '.join(REPORTS)}")
    return path, REPORTS[kind]()
