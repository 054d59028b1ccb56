"""Try a conversion on an open checkpoint, so that only a command that works is advised."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.parts import FilePart
from ckptmove.errors import CkptMoveError
from ckptmove.formats.facts import facts_of
from ckptmove.io.locations import OpenFile, default_output
from ckptmove.io.remote.address import Address
from ckptmove.limits import Limits
from ckptmove.model import LACKING, OLDEST_TORCH
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.text import Argument
from ckptmove.torch_facts.devices import unsupported_dtypes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.results import Converted
    from ckptmove.model import Inventory
    from ckptmove.moves import MoveRequest

#: Facts about a file that ``convert`` does not write again: it is cut off, or another reader sees something else.
_UNWRITTEN: Final = frozenset({"past-end", "second-reading"})
#: Facts about a file for which it may depend on the change whether ``convert`` writes it again.
_UNSURE: Final = _UNWRITTEN | LACKING | {"damaged-piece"}
#: Size of the pickles up to which a command is tried.
_TRIED_BYTES: Final = 1 << 22


class Source:
    """A checkpoint that is open, to try remedies on it. No remedy changes its trees."""

    def __init__(
        self, location: str, checkpoint: OpenCheckpoint, limits: Limits | None = None, move: MoveRequest | None = None
    ) -> None:
        """Hold a checkpoint.

        Args:
            location: its path, URL or file object, from which it was read.
            limits: resource limits for reading it.
            move: changes that the user has asked for anyway.
        """
        self.location, self.checkpoint, self.limits, self.move = location, checkpoint, limits or Limits(), move
        self._tried: dict[tuple[str, tuple[Argument, ...]], Converted | None] = {}

    def becomes_plain(self, folder: str = "") -> bool:
        """Whether ``convert --plain`` can write a copy of a folder, or of all, that weights-only mode accepts.

        Only objects can prevent that in a file, which is judged by its tree. The whole plan is needed for a file whose
        tree leaves out strings, for files of ranks that are read as one, and for other changes.
        """
        from ckptmove.conversion.remap.plain import require_plain
        from ckptmove.moves import Remap

        parts = [part for part in self.checkpoint.parts if not folder or f"{part.name}/".startswith(f"{folder}/")]
        refused = [part for part in parts if not _is_accepted(part.inventory)]
        is_read = all(isinstance(part, FilePart) and not part.placeholder for part in refused)
        if (self.move is not None and self.move.remap != Remap()) or not is_read:
            return self.is_written(folder, Argument("plain", True))
        inventories = [part.inventory for part in parts]
        if any(facts_of(one.container).has_code for one in inventories):
            return False
        if any(fact.kind in _UNWRITTEN for one in inventories for fact in one.facts):
            return False
        try:
            for part in refused:
                require_plain(part.tree(), self.limits)
        except CkptMoveError:
            return False
        return True

    def is_written(self, folder: str, *options: Argument) -> bool:
        """Whether a dry run of ``convert`` can write a file that weights-only mode accepts; the folder as above."""
        made = self._converted(below(self.location, folder), options)
        return made is not None and not made.is_refused

    def converts(self, inventory: Inventory, path: str, *options: Argument) -> bool:
        """Whether ``convert`` can be called with a path as a user would paste it."""
        if is_hidden(self.location, inventory):
            return False
        # A trial would read a URL again, and takes as much memory as the trees that are held.
        nbytes = sum(part.pickle_bytes for part in self.checkpoint.parts if isinstance(part, FilePart))
        is_untried = isinstance(self.location, Address) or nbytes > _TRIED_BYTES
        if is_untried or options[0].name == "to":
            certain = is_certain(inventory, options)
            if is_untried or certain:
                return certain
        return self._converted(below(self.location, folder_of(inventory, path)), options) is not None

    def _converted(self, path: str, options: tuple[Argument, ...]) -> Converted | None:
        """The result of a dry run, which is made once; None if it fails."""
        if (path, options) not in self._tried:
            from ckptmove.conversion.remap.options import with_options
            from ckptmove.moves import MoveRequest

            output = next((str(one.value) for one in options if one.name == "output"), None)
            move = with_options(self.move or MoveRequest(None), [one for one in options if one.name != "output"])
            self._tried[path, options] = dry_run(path, move, self.limits, output)
        return self._tried[path, options]

    def loads(self, folder: str) -> bool:
        """Whether ``ckptmove.load`` can read it without changes."""
        only = self.checkpoint.parts[0]
        if self.checkpoint.is_whole and isinstance(only, FilePart):
            return not facts_of(only.inventory.container).has_code
        return loads(below(self.location, folder), self.limits)


def is_certain(inventory: Inventory, options: Sequence[Argument]) -> bool:
    """Whether a conversion of an ordinary checkpoint needs no trial, because only its dtypes can prevent it."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else (inventory,)
    lacking = frozenset[str]().union(*(unsupported_dtypes(str(one.value)) for one in options if one.name == "to"))
    return (
        all((kind := facts_of(one.container)).is_torch_save or kind.is_table for one in files)
        and not inventory.foreign_opcodes
        and _UNSURE.isdisjoint(fact.kind for fact in inventory.facts)
        and lacking.isdisjoint(one.dtype for one in inventory.storages)
        and lacking.isdisjoint(one.dtype for one in inventory.tensors)
    )


def _is_accepted(inventory: Inventory) -> bool:
    """Whether weights-only mode of every supported torch accepts a file, so that nothing in it must become plain."""
    is_common = all(use.weights_only_since == OLDEST_TORCH for use in inventory.globals)
    return is_common and not inventory.foreign_opcodes and not inventory.filled_classes


def is_hidden(location: str, inventory: Inventory) -> bool:
    """Whether a command cannot name the checkpoint: it is a file object, or a URL with credentials."""
    is_secret = isinstance(location, Address) and location.url != inventory.path
    return is_secret or isinstance(location, OpenFile)


def folder_of(inventory: Inventory, path: str) -> str:
    """Path of a checkpoint in the directory that has it; empty for the directory itself."""
    return path.removeprefix(inventory.path).lstrip("/")


def dry_run(path: str, move: MoveRequest, limits: Limits, output: str | None = None) -> Converted | None:
    """The result of a dry run of ``convert``; None if it fails."""
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.convert import convert

    default = default_output(path, "new")
    request = ConvertRequest(path=path, move=move, output=output, default_output=default, dry_run=True, limits=limits)
    try:
        return convert(request)
    except CkptMoveError:
        return None


def below(location: str, folder: str) -> str:
    """One of several checkpoints in a directory, by its path in it; the directory itself if that is empty."""
    if not folder:
        return location
    if isinstance(location, Address):
        return Address(posixpath.join(location.url, folder))
    return posixpath.join(location, folder)


def loads(location: str, limits: Limits, *, plain: bool = False) -> bool:
    """Whether ``ckptmove.load`` can read the values of a checkpoint; or plain values in place of its objects."""
    from ckptmove.conversion.remap.remapping import remap
    from ckptmove.moves import MovePlan, MoveRequest, Remap

    try:
        with open_checkpoint(location, limits, keep_trees=True) as checkpoint:
            remap(checkpoint, MovePlan(MoveRequest(None, remap=Remap(plain=plain))), limits, as_file=True)
    except CkptMoveError:
        return False
    return True
