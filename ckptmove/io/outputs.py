"""What there is to tell of a new output besides that it is written, or not.

Never touches a file: ``streams`` does.
"""

from __future__ import annotations


def unheard() -> None:
    """What is called before the last step of a change where nobody has to know."""


class LeftoversRemoved(UserWarning):
    """A conversion that was broken off had left something in the folder of the output; it is cleared up."""
