"""How a figure stands in a sentence, and what of a text is a command.

Never knows what it counts, and never runs anything.
"""

from __future__ import annotations


def amount(number: int, noun: str) -> str:
    """A number with its noun: ``1 tensor``, ``2,048 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class Command(str):
    """A text that is a command line, or has one in it: it stays in one line, so that it can be copied."""

    __slots__ = ()
