"""The messages of a child process of ``verify``: one JSON document on each line of its standard output."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from ckptmove.model import Finding  # noqa: TC001  # the codec reads the annotations
from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.evidence import CheckResult, Mode, RanksOfRun  # noqa: TC001  # the codec reads the annotations


class Late(NamedTuple):
    """What a rank was doing when its time was over."""

    check: str  # name of the check
    where: str  # line of the user's code that it has reached, as text that follows the fault; or empty
    waits: bool  # whether it waits for other ranks


class Message(NamedTuple):
    """An answer, or a fact about the process. One field is set; of the last message of a rank, several."""

    torch: Literal["importing", "imported"] | None = None  # progress of the import
    imports: str | None = None  # the user's optimizer class while it is being imported; empty after that
    mode: Mode | None = None  # device mode of the step
    check: CheckResult | None = None
    finding: Finding | None = None  # a finding about the stored values
    unusable: str | None = None  # why the user's function returns no usable case
    refusal: str | None = None  # why the request cannot be fulfilled
    address: str | None = None  # where the process of rank 0 listens
    run: RanksOfRun | None = None  # facts about the ranks, as far as they are known
    late: Late | None = None  # what a rank does shortly before the timeout
    failure: dict[str, Any] | None = None  # the error that ended the command on a rank
    joined: object = None  # a plain tally, for the first of several processes

    @property
    def has_failed(self) -> bool:
        """Whether it is the last message of a rank for which the others may wait forever."""
        is_fault = self.check is not None and self.check.status == "failed"
        return is_fault or bool(self.unusable or self.refusal or self.failure)

    def line(self) -> str:
        """The message as a line of text."""
        return f"{dumps(self)}\n"


def read_message(line: str) -> Message | None:
    """The message in a line; None if the line is something else, as the user's code may write."""
    try:
        message = loads(Message, line)
    except ValueError:
        return None
    return None if message == Message() else message
