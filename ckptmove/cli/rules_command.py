"""The ``rules`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.outcome import YES
from ckptmove.cli.render.answers import Summary
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.findings.codes import search

if TYPE_CHECKING:
    from ckptmove.cli.render.renderer import Renderer


def run_rules(word: str | None, renderer: Renderer) -> int:
    """Write the catalogue of findings, or the entries that a text matches.

    Args:
        word: a code, the first letters of codes, a name, or words to search for; None for all.
    """
    renderer.rules([CATALOGUE[code] for code in (search(word) if word is not None else CATALOGUE)])
    return renderer.finish(Summary("rules", YES))
