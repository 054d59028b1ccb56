"""The ``rules`` command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.outcome import YES
from ckptmove.cli.render.renderer import Summary
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.findings.codes import search

if TYPE_CHECKING:
    from ckptmove.cli.render.renderer import Renderer


def run_rules(word: str | None, renderer: Renderer) -> int:
    """Write the entries of the catalogue of findings that a text matches; all of them for None."""
    renderer.rules([CATALOGUE[code] for code in (search(word) if word is not None else CATALOGUE)])
    return renderer.finish(Summary("rules", YES))
