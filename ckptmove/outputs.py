"""What there is to tell of a new output besides that it is written, or not.

Never touches a file: ``streams`` does.
"""

from __future__ import annotations

from ckptmove.errors import Refused, WriteFailed


def unheard() -> None:
    """What is called before the last step of a change where nobody has to know."""


class LeftoversRemoved(UserWarning):
    """A conversion that was broken off had left something in the folder of the output; it is cleared up."""


class NotDurable(WriteFailed):
    """The output has its name and is whole, but the system failed to make the name durable."""

    kind = "not-durable"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.message = f"is written and whole, but may be lost if the machine fails now: {reason}"


class OutputIsNoReport(Refused):
    """A report was to replace a file that is none: a checkpoint, for all that is known."""

    kind = "output-is-no-report"


class ReportFailed(WriteFailed):
    """A report about checkpoints could not be written to its file."""
