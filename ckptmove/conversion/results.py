"""Define the results of a conversion and of an undo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ckptmove.errors import Refused
from ckptmove.model import OneLine
from ckptmove.text import amount, some

if TYPE_CHECKING:
    from ckptmove.moves import MovePlan, Unmatched

#: Readings in one message.
_SHOWN: Final = 4


class TwoReadings(Refused):
    """Another reader sees something else in the file: a copy would spread it. ``what`` is what it sees."""

    kind = "two-readings"

    def __init__(self, path: str, what: tuple[str, ...]) -> None:
        super().__init__(f"another reader sees something else in it (F805): {some(what, _SHOWN)}", path=path)
        self.what = what


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Converted(OneLine):
    """The result of a conversion."""

    container: str  # format of the source and of the output
    plan: MovePlan  # the changes
    output: str | None  # path of the new file; None after a dry run
    bytes_copied: int  # bytes written to the output
    seconds: float  # wall time
    verified: int | None = None  # number of tensors that were compared with the source; None if none were
    notes: tuple[str, ...] = field(default=())  # further information, for example that the archive has no CRCs
    in_place: bool = False  # whether the source itself was changed
    unmatched: tuple[Unmatched, ...] = ()  # options that match nothing
    warnings: tuple[str, ...] = ()  # problems of the source that the output has too, or hides
    is_refused: bool = False  # whether `torch.load(weights_only=True)` refuses a name or an opcode in the pickle

    def __str__(self) -> str:
        changes = amount(len(self.plan.edits) + len(self.plan.flags), "change")
        return f"wrote {self.output}: {changes}" if self.output is not None else f"dry run: {changes}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UndoResult(OneLine):
    """The result of an undo."""

    path: str  # the file
    size: int  # its original length in bytes, before the first conversion in place
    removed: int  # number of bytes cut off
    is_done: bool  # whether the file was written; False for a dry run
    seconds: float  # wall time
    notes: tuple[str, ...] = field(default=())  # further information for the user

    def __str__(self) -> str:
        return f"{self.path}: {'restored' if self.is_done else 'dry run'}, {self.size:,} bytes"
