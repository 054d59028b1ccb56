"""The values of a conversion: what was asked for, what is to change, what was done.

Never decides anything: ``policy`` and ``plan`` do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptmove.model import OneLine
from ckptmove.text import amount

if TYPE_CHECKING:
    from ckptmove.model import ContainerName, Mention


class MoveRequest(NamedTuple):
    """What the user asked ``convert`` for.

    Attributes:
        to: tag that everything goes to, or None with only ``mapping``.
        mapping: source glob and destination tag; the first that matches counts.
        keep: globs of tensor names that stay where they are.
        cast: whether a dtype that the target lacks is cast to the next smaller one.
        rewrite_strings: whether device strings in configs follow their tensors.
    """

    to: str | None
    mapping: tuple[tuple[str, str], ...] = ()
    keep: tuple[str, ...] = ()
    cast: bool = False
    rewrite_strings: bool = False


class StorageEdit(NamedTuple):
    """A storage that gets another tag, another dtype, or both.

    Attributes:
        storage: its key; for a tensor without a storage, the tensor's name.
        names: tensors that view it.
        source: tag before.
        target: tag after.
        nbytes: its size before.
        reason: the rule of the policy that decided.
        cast: dtypes before and after, or None.
        sites: starts of the operations that push the tag.
        class_sites: starts of the operations that push the storage class; used by a cast.
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
    """A tensor that stays although others move.

    Attributes:
        name: the tensor.
        device: where it is.
        reason: the rule of the policy that decided.
    """

    name: str
    device: str
    reason: str


class FlagEdit(NamedTuple):
    """An option or a named device that has to follow.

    Attributes:
        where: path of the value.
        source: value before, as text.
        target: value after, as text.
        reason: the rule of the policy that decided.
        mention: the mention that is rewritten, or None for a group flag.
        site: start of the operation that pushes a group flag, or None for a mention.
    """

    where: str
    source: str
    target: str
    reason: str
    mention: Mention | None = None
    site: int | None = None


class MovePlan(NamedTuple):
    """Every change that a conversion makes, and nothing else.

    Attributes:
        request: what was asked for.
        edits: storages that change.
        kept: tensors that stay for a reason of their own.
        flags: group flags, ``torch.device`` objects and strings that change.
        inflates: keys of the storages that are deflated in the source, and stored plainly in the output.
    """

    request: MoveRequest
    edits: tuple[StorageEdit, ...] = ()
    kept: tuple[Kept, ...] = ()
    flags: tuple[FlagEdit, ...] = ()
    inflates: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the file is already as asked."""
        return not self.edits and not self.flags


class Unmatched(NamedTuple):
    """An option that met nothing in the checkpoint: mistyped, as a rule.

    Attributes:
        option: which one.
        glob: what was looked for.
        reason: what there is instead, as a clause.
    """

    option: Literal["keep", "map"]
    glob: str
    reason: str

    def __str__(self) -> str:
        """The option as it is typed, and what there is instead, in one line."""
        return f"--{self.option} {self.glob}{'=...' if self.option == 'map' else ''} {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(OneLine):
    """What a conversion did.

    Attributes:
        container: what the source is, and so the output.
        plan: what was decided.
        output: the file written, or None after a dry run.
        in_place: whether that is the source itself.
        bytes_copied: bytes written to the output.
        seconds: wall time.
        notes: what the user should know besides: an archive saved without CRCs, for example.
        unmatched: what was asked for and met nothing.
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
        """What came of it, in one line."""
        changes = amount(len(self.plan.edits) + len(self.plan.flags), "change")
        return f"wrote {self.output}: {changes}" if self.output is not None else f"dry run: {changes}"
