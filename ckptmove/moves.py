"""Define the values of a conversion: request, plan and result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptmove.model import OneLine
from ckptmove.text import amount

if TYPE_CHECKING:
    from ckptmove.model import ContainerName, Mention


class MoveRequest(NamedTuple):
    """The options of a ``convert`` command.

    Attributes:
        to: tag of the target for everything; None if only ``mapping`` is given.
        mapping: pairs of source glob and destination tag; the first match applies.
        keep: globs of tensor names that are not moved.
        cast: whether a dtype that the target does not support is cast to the next smaller one.
        rewrite_strings: whether device strings in configs are changed with their tensors.
    """

    to: str | None
    mapping: tuple[tuple[str, str], ...] = ()
    keep: tuple[str, ...] = ()
    cast: bool = False
    rewrite_strings: bool = False


class StorageEdit(NamedTuple):
    """A change of a storage's tag, dtype or both.

    Attributes:
        storage: its key; for a tensor without a storage, the tensor's name.
        names: tensors that view it.
        source: old tag.
        target: new tag.
        nbytes: old size.
        reason: the rule of the policy that decided.
        cast: old and new dtype, or None.
        sites: offsets of the operations that push the tag.
        class_sites: offsets of the operations that push the storage class; used by a cast.
    """

    storage: str
    names: tuple[str, ...]
    source: str
    target: str
    nbytes: int
    reason: str
    cast: tuple[str, str] | None
    sites: tuple[int, ...]
    class_sites: tuple[int, ...]


class Kept(NamedTuple):
    """A tensor that is not moved although others are.

    Attributes:
        name: the tensor.
        device: its device.
        reason: the rule of the policy that decided.
    """

    name: str
    device: str
    reason: str


class FlagEdit(NamedTuple):
    """A change of an option or a named device that follows the move of the tensors.

    Attributes:
        where: path of the value.
        source: old value, as text.
        target: new value, as text.
        reason: the rule of the policy that decided.
        mention: the mention that is rewritten; None for a group flag.
        site: offset of the operation that pushes a group flag; None for a mention.
    """

    where: str
    source: str
    target: str
    reason: str
    mention: Mention | None = None
    site: int | None = None


class MovePlan(NamedTuple):
    """All changes of a conversion.

    Attributes:
        request: the options of the command.
        edits: storages that change.
        kept: tensors that a rule of the policy keeps on their device.
        flags: group flags, ``torch.device`` objects and strings that change.
        inflates: keys of storages that are deflated in the source and stored uncompressed in the output.
    """

    request: MoveRequest
    edits: tuple[StorageEdit, ...] = ()
    kept: tuple[Kept, ...] = ()
    flags: tuple[FlagEdit, ...] = ()
    inflates: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the file already matches the request."""
        return not self.edits and not self.flags


class Unmatched(NamedTuple):
    """An option that matches nothing in the checkpoint, usually a typo.

    Attributes:
        option: name of the option.
        glob: its pattern.
        reason: clause that names existing values instead.
    """

    option: Literal["keep", "map"]
    glob: str
    reason: str

    def __str__(self) -> str:
        """Return the option as the user types it, and the existing values."""
        return f"--{self.option} {self.glob}{'=...' if self.option == 'map' else ''} {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(OneLine):
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
        is_refused: whether ``torch.load(weights_only=True)`` refuses a name or an opcode in the pickle.
    """

    container: ContainerName
    plan: MovePlan
    output: str | None
    bytes_copied: int
    seconds: float
    notes: tuple[str, ...] = field(default=())
    in_place: bool = False
    unmatched: tuple[Unmatched, ...] = ()
    is_refused: bool = False

    def __str__(self) -> str:
        """Return the output and the number of changes in one line."""
        changes = amount(len(self.plan.edits) + len(self.plan.flags), "change")
        return f"wrote {self.output}: {changes}" if self.output is not None else f"dry run: {changes}"
