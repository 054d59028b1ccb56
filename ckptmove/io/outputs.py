"""Define the default commit callback and the warning about leftovers."""

from __future__ import annotations


def do_nothing() -> None:
    """Default commit callback: do nothing."""


class LeftoversRemoved(UserWarning):
    """Leftovers of an interrupted conversion in the folder of the output were removed."""
