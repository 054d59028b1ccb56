"""The numbers in a message, so that a test can compare them without its words."""

from __future__ import annotations

import re


def figures(message: str) -> list[str]:
    """Return the numbers in a text in order, with their thousands separators and decimals."""
    return re.findall(r"\d+(?:[.,]\d+)*", message)
