"""Find the codes for the arguments of ``--select``, ``--ignore`` and ``rules``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from ckptmove.errors import UsageError
from ckptmove.findings.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Letters of a word that are compared with the names, which are all shorter.
_LONGEST: Final = 64


def codes_of(words: Iterable[str]) -> frozenset[str]:
    """Return the codes for some words; each word may be a comma-separated list."""
    parts = [part for word in words for part in word.replace(",", " ").split()]
    return frozenset(code for part in parts for code in codes_like(part))


def search(text: str) -> tuple[str, ...]:
    """Return the codes for a word as :func:`codes_like` does, or else those that are about a text.

    These have every word of the text in their name or their description; those with all words in the name come first.
    """
    try:
        return codes_like(text)
    except UsageError:
        words = text.lower().split()
        named = [code for code, entry in CATALOGUE.items() if _has(words, entry.name)]
        described = [
            code for code, one in CATALOGUE.items() if _has(words, f"{one.name} {one.when} {one.why} {one.mend}")
        ]
        if not words or not described:
            raise
        return tuple(dict.fromkeys([*named, *described]))


def _has(words: Iterable[str], text: str) -> bool:
    return all(word in text.lower() for word in words)


def codes_like(word: str) -> tuple[str, ...]:
    """Return the codes for a word: a code, the beginning of codes (``D``), or a name."""
    begin, name = word.upper(), word.lower()
    codes = tuple(code for code, entry in CATALOGUE.items() if code.startswith(begin) or entry.name == name)
    if not codes:
        close = difflib.get_close_matches(name[:_LONGEST], [entry.name for entry in CATALOGUE.values()], n=1)
        hint = f"did you mean {close[0]}?" if close else "'ckptmove rules' lists them"
        raise UsageError(f"no finding is about '{word}'; {hint}")
    return codes
