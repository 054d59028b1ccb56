"""What helps with a checkpoint that ``torch.load(weights_only=True)`` refuses. Each remedy is tried on that checkpoint.

None of them runs code of the file, or allows a name that is not known to be harmless.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.parts import FilePart
from ckptmove.errors import CkptMoveError
from ckptmove.formats.facts import facts_of
from ckptmove.formats.local_shards import SHARDED_TENSOR
from ckptmove.io.locations import OpenFile, default_output
from ckptmove.io.remote.address import Address
from ckptmove.limits import Limits
from ckptmove.model import LACKING, OLDEST_TORCH
from ckptmove.moves import MovePlan, MoveRequest, Remap
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.text import Argument, Command, in_python, python_command, quoted
from ckptmove.torch_facts.devices import unsupported_dtypes
from ckptmove.torch_facts.registered import modules_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted
    from ckptmove.model import Inventory

#: Facts about a file that ``convert`` does not write again: it is cut off, or another reader sees something else.
_UNWRITTEN: Final = frozenset({"past-end", "second-reading"})
#: Facts about a file for which it may depend on the change whether ``convert`` writes it again.
_UNSURE: Final = _UNWRITTEN | LACKING | {"damaged-piece"}
#: Size of the pickles up to which a command is tried.
_TRIED_BYTES: Final = 1 << 22


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open, to try remedies on it."""

    location: str  # its path, URL or file object
    checkpoint: OpenCheckpoint  # what was read from there. No remedy changes its trees.
    limits: Limits = field(default_factory=Limits)  # resource limits for reading it
    move: MoveRequest = field(default_factory=lambda: MoveRequest(None))  # changes that the user has asked for anyway
    tried: dict[tuple[str, tuple[Argument, ...]], Converted | None] = field(default_factory=dict)  # of dry runs

    def becomes_plain(self, folder: str = "") -> bool:
        """Whether ``convert --plain`` can write a copy of a folder, or of all, that weights-only mode accepts.

        Only objects can prevent that in a file, which is judged by its tree. The whole plan is needed for a file whose
        tree leaves out strings, for files of ranks that are read as one, and for other changes.
        """
        from ckptmove.conversion.remap.plain import require_plain

        parts = [part for part in self.checkpoint.parts if not folder or f"{part.name}/".startswith(f"{folder}/")]
        refused = [part for part in parts if not _is_accepted(part.inventory)]
        is_read = all(isinstance(part, FilePart) and not part.placeholder for part in refused)
        if self.move.remap != Remap() or not is_read:
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
        if (path, options) not in self.tried:
            from ckptmove.conversion.remap.options import with_options

            output = next((str(one.value) for one in options if one.name == "output"), None)
            move = with_options(self.move, [one for one in options if one.name != "output"])
            self.tried[path, options] = dry_run(path, move, self.limits, output)
        return self.tried[path, options]

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

    try:
        with open_checkpoint(location, limits, keep_trees=True) as checkpoint:
            remap(checkpoint, MovePlan(MoveRequest(None, remap=Remap(plain=plain))), limits, as_file=True)
    except CkptMoveError:
        return False
    return True


class Remedy(NamedTuple):
    """What helps with a checkpoint that weights-only mode refuses."""

    #: objects become ``plain`` values in a copy; the shards in several files are ``gathered`` in one; the ``import``
    #: of some modules makes weights-only mode accept it; or ``load`` reads it, which does not unpickle.
    kind: Literal["plain", "gathered", "import", "load"]
    command: Command  # a command line


def choose(inventory: Inventory, source: Source, path: str = "", files: Sequence[FileRecord] = ()) -> Remedy | None:
    """Return the first remedy that works; None if none does, or if the file has dangerous names.

    Args:
        inventory: the checkpoint that weights-only mode refuses.
        path: the one of several checkpoints in a directory that holds what is refused, as a user sees its path; empty
            for all of it.
        files: the refused files of a directory or an archive.
    """
    if is_hidden(source.location, inventory) or _is_dangerous(inventory):
        return None
    path = path or inventory.path
    folder = folder_of(inventory, path)
    for kind, options in _ways(inventory, path):
        if source.becomes_plain(folder) if kind == "plain" else source.is_written(folder, *options):
            return Remedy(
                kind, Command(" ".join(["ckptmove convert", quoted(path), *(one.in_shell for one in options)]))
            )
    refused = {name for file in files for name in file.refused} or {
        use.name for use in inventory.globals if not use.weights_only
    }
    if inventory.filled_classes:
        return None
    if refused:
        return None if inventory.foreign_opcodes else _import(inventory, refused, files)
    load = python_command(f"import ckptmove; ckptmove.load({in_python(path)})")
    return Remedy("load", load) if source.loads(folder) else None


def _is_dangerous(inventory: Inventory) -> bool:
    return any(use.verdict == "dangerous" for use in inventory.globals)


def _ways(inventory: Inventory, path: str) -> Iterator[tuple[Literal["plain", "gathered"], tuple[Argument, ...]]]:
    """Options of ``convert``; ShardedTensors are whole only in one file."""
    plain = Argument("plain", True)
    is_sharded = any(use.name == SHARDED_TENSOR for use in inventory.globals)
    if is_sharded and isinstance(inventory, DirectoryInventory):
        output = Argument("output", f"{path.rstrip('/')}.pth")
        yield "gathered", (output,)
        yield "gathered", (plain, output)
    yield "plain", (plain,)


def _import(inventory: Inventory, refused: Collection[str], files: Sequence[FileRecord]) -> Remedy | None:
    """The import after which ``torch.load`` accepts a file; None for a member of an archive, which has no path."""
    modules = modules_of(refused)
    is_member = isinstance(inventory, DirectoryInventory) and inventory.form is not None
    container = files[0].container if files else inventory.container
    if not modules or is_member or not facts_of(container).is_torch_save:
        return None
    path = posixpath.join(inventory.path, files[0].path) if files else inventory.path
    load = f"torch.load({in_python(path)}, map_location={in_python('cpu')}, weights_only=True)"
    code = f"import {', '.join(sorted({'torch', *modules}))}; {load}"
    return Remedy("import", python_command(code))


def note_on(made: Converted, request: ConvertRequest) -> Iterator[str]:
    """Note on a conversion whose new file weights-only mode refuses, with what helps besides its own changes.

    A URL is not opened again: its note names nothing that helps.
    """
    if not facts_of(made.container).is_torch_save:
        return
    note = "torch.load(weights_only=True) still refuses it (S701)"
    if isinstance(request.path, Address):
        yield note
        return
    try:
        with open_checkpoint(request.path, request.limits, tree="inventory") as checkpoint:
            inventory = checkpoint.inventory
            found = choose(inventory, Source(request.path, checkpoint, request.limits, request.move))
    except CkptMoveError:
        return  # the source was replaced
    if _is_dangerous(inventory):
        return
    if found is None:
        yield note
    elif found.kind == "plain" and not made.in_place:
        yield f"{note}: {Argument('plain', True)} replaces its objects by plain values"
    else:
        yield Command(f"{note}: {found.command}")
