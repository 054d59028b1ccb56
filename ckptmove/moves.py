"""Define the values of a conversion: request and plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypedDict

from ckptmove.errors import UsageError
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.model import Mention


class RemapOptions(TypedDict, total=False):
    """The arguments of ``convert`` and ``verify`` that change keys, parts or dtypes.

    Attributes:
        strip_prefix: prefixes to remove from the keys of state_dicts; True for those of known wrappers.
        add_prefix: prefix to add to the keys of state_dicts.
        rename: new names of keys, by globs of the old ones: ``{"backbone.*": "encoder.*"}``.
        only: parts to keep: globs of paths, or roles.
        drop: parts to leave out: globs of paths, or roles.
        as_root: path of the value to write as the whole file.
        compact: whether each storage is written only as far as its tensors reach.
        plain: whether objects become plain values, so that ``torch.load(weights_only=True)`` loads the file.
        dtype: new dtype of the model's floating tensors, or a dict from roles to dtypes.
    """

    strip_prefix: bool | str | Sequence[str]
    add_prefix: str
    rename: Mapping[str, str] | None
    only: str | Sequence[str] | None
    drop: str | Sequence[str]
    as_root: str
    compact: bool
    plain: bool
    dtype: str | Mapping[str, str] | None


class Option(NamedTuple):
    """The help of an option on the command line."""

    help: str  # its effect
    metavar: str = ""  # placeholder of its value; empty for a flag


class Remap(NamedTuple):
    """The values of :class:`RemapOptions`, with the options of the command line."""

    #: an empty tuple for the prefixes of known wrappers; None to remove nothing
    strip_prefix: Annotated[
        tuple[str, ...] | None,
        Option("Remove a prefix from keys of state_dicts (default: those of known wrappers). Repeatable.", "[PREFIX.]"),
    ] = None
    add_prefix: Annotated[str, Option("Add a prefix to keys of state_dicts.", "PREFIX.")] = ""
    #: pairs of a glob of keys and its replacement, in which each `*` stands for the text that it matched
    rename: Annotated[
        tuple[tuple[str, str], ...], Option("Rename keys: 'backbone.*=encoder.*'. Repeatable.", "OLD=NEW")
    ] = ()
    only: Annotated[
        tuple[str, ...], Option("Keep only these parts: model, 'model.encoder.*'. Repeatable.", "GLOB|ROLE")
    ] = ()
    drop: Annotated[tuple[str, ...], Option("Leave out these parts: optimizer. Repeatable.", "GLOB|ROLE")] = ()
    as_root: Annotated[str, Option("Write the value at this key as the whole file: ema.", "KEY")] = ""
    compact: Annotated[bool, Option("Write each storage only as far as its tensors reach.")] = False
    plain: Annotated[bool, Option("Replace objects by plain values, so that weights_only=True loads the file.")] = False
    #: pairs of a role and a dtype for its floating tensors; an empty role for the model
    dtype: Annotated[
        tuple[tuple[str, str], ...],
        Option("Cast floating tensors of the model, or of a role: bf16, optimizer=fp32. Repeatable.", "[ROLE=]DTYPE"),
    ] = ()


def checked_globs(option: str, globs: str | Sequence[str]) -> tuple[str, ...]:
    """The globs of an option. An empty one is refused: an unset variable of a shell gives it."""
    found = (globs,) if isinstance(globs, str) else tuple(globs)
    if "" in found:
        raise UsageError(Phrase(Argument.typed(option), " takes a glob of names, not an empty text"))
    return found


class MoveRequest(NamedTuple):
    """The options of a ``convert`` command."""

    to: str | None  # tag of the target for everything; None if only `mapping` is given
    mapping: tuple[tuple[str, str], ...] = ()  # pairs of source glob and destination tag; the first match applies
    keep: tuple[str, ...] = ()  # globs of tensor names that are not moved
    cast: bool = False  # whether a dtype that the target does not support is cast to the next smaller one
    rewrite_strings: bool = False  # whether device strings in configs are changed with their tensors
    remap: Remap = Remap()  # changes of keys, parts and dtypes


class StorageEdit(NamedTuple):
    """A change of a storage's tag, dtype or both."""

    storage: str  # its key; for a tensor without a storage, the tensor's name
    names: tuple[str, ...]  # tensors that view it
    source: str  # old tag
    target: str  # new tag
    nbytes: int  # old size
    reason: str  # the rule of the policy that decided
    cast: tuple[str, str] | None  # old and new dtype, or None
    sites: tuple[int, ...]  # offsets of the operations that push the tag
    class_sites: tuple[int, ...]  # offsets of the operations that push the storage class; used by a cast


class Kept(NamedTuple):
    """A tensor that is not moved although others are."""

    name: str  # the tensor
    device: str  # its device
    reason: str  # the rule of the policy that decided


class FlagEdit(NamedTuple):
    """A change of an option or a named device that follows the move of the tensors."""

    where: str  # path of the value
    source: str  # old value, as text
    target: str  # new value, as text
    reason: str  # the rule of the policy that decided
    mention: Mention | None = None  # the mention that is rewritten; None for a group flag
    site: int | None = None  # offset of the operation that pushes a group flag; None for a mention


class Renamed(NamedTuple):
    """A key that changes."""

    where: str  # path of the dict, or of the list of names, before the change
    source: str  # old key
    target: str  # new key


class Dropped(NamedTuple):
    """A part that is left out."""

    name: str  # its path
    tensors: int  # number of tensors in it
    nbytes: int  # their size in bytes
    reason: str  # `drop`, `only`, `as-root`, `tied`, or `compact` for bytes that no tensor reaches


class Replaced(NamedTuple):
    """An object that is replaced by a plain value."""

    where: str  # its path
    source: str  # full name of its class or function
    target: str  # the plain type, for example `dict`


class Trimmed(NamedTuple):
    """A storage that is written only as far as its tensors reach."""

    storage: str  # its key
    names: tuple[str, ...]  # tensors that view it
    source_nbytes: int  # size in bytes before
    nbytes: int  # size in bytes after


class MovePlan(NamedTuple):
    """All changes of a conversion."""

    request: MoveRequest  # the options of the command
    edits: tuple[StorageEdit, ...] = ()  # storages that change
    kept: tuple[Kept, ...] = ()  # tensors that a rule of the policy keeps on their device
    flags: tuple[FlagEdit, ...] = ()  # group flags, `torch.device` objects and strings that change
    #: keys of storages that are deflated in the source and stored uncompressed in the output
    inflates: tuple[str, ...] = ()
    renamed: tuple[Renamed, ...] = ()  # keys that change
    dropped: tuple[Dropped, ...] = ()  # parts that are left out
    replaced: tuple[Replaced, ...] = ()  # objects that are replaced by plain values
    trimmed: tuple[Trimmed, ...] = ()  # storages that become smaller
    format: str | None = None  # format of the output, if it is not that of the source; else None

    @property
    def is_empty(self) -> bool:
        """Whether the file already matches the request."""
        return not (self.edits or self.flags or self.is_remapped)

    @property
    def is_remapped(self) -> bool:
        """Whether anything but devices changes."""
        return bool(self.renamed or self.dropped or self.replaced or self.trimmed or self.format)


class Unmatched(NamedTuple):
    """An option that matches nothing in the checkpoint, usually a typo."""

    option: Literal["keep", "map"]  # name of the option
    glob: str  # its pattern
    reason: str  # clause that names existing values instead

    def __str__(self) -> str:
        """Return the option as the user types it, and the existing values."""
        return f"--{self.option} {self.glob}{'=...' if self.option == 'map' else ''} {self.reason}"
