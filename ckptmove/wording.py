"""How a figure stands in a sentence.

Never knows what it counts.
"""

from __future__ import annotations


def amount(number: int, noun: str) -> str:
    """A number with its noun: ``1 tensor``, ``2,048 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
