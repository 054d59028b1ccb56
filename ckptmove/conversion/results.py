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
    """The result of a conversion.

    Attributes:
        container: format of the source and of the output.
        plan: the changes.
        output: path of the new file; None after a dry run.
        in_place: whether the source itself was changed.
        bytes_copied: bytes written to the output.
        seconds: wall time.
        notes: further information for the user, for example that the archive has no CRCs.
        unmatched: options that match nothing.
        warnings: problems of the source that the output has too, or hides.
        is_refused: whether ``torch.load(weights_only=True)`` refuses a name or an opcode in the pickle.
    """

    container: str
    plan: MovePlan
    output: str | None
    bytes_copied: int
    seconds: float
    notes: tuple[str, ...] = field(default=())
    in_place: bool = False
    unmatched: tuple[Unmatched, ...] = ()
    warnings: tuple[str, ...] = ()
    is_refused: bool = False

    def __str__(self) -> str:
        """Return the output and the number of changes in one line."""
        changes = amount(len(self.plan.edits) + len(self.plan.flags), "change")
        return f"wrote {self.output}: {changes}" if self.output is not None else f"dry run: {changes}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class UndoResult(OneLine):
    """The result of an undo.

    Attributes:
        path: the file.
        size: its original length in bytes, before the first conversion in place.
        removed: number of bytes cut off.
        is_done: whether the file was written; False for a dry run.
        seconds: wall time.
        notes: further information for the user.
    """

    path: str
    size: int
    removed: int
    is_done: bool
    seconds: float
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """Return the path, the outcome and the size in one line."""
        return f"{self.path}: {'restored' if self.is_done else 'dry run'}, {self.size:,} bytes"
