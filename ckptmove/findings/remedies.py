"""What helps with a checkpoint that ``torch.load(weights_only=True)`` refuses. Each remedy is tried on that checkpoint.

None of them runs code of the file, or allows a name that is not known to be harmless.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.checkpoint.parts import FilePart
from ckptmove.errors import CkptMoveError
from ckptmove.formats.local_shards import SHARDED_TENSOR
from ckptmove.formats.opening import container_class
from ckptmove.io.file_object import OpenFile
from ckptmove.io.locations import default_output
from ckptmove.io.remote.address import Address
from ckptmove.limits import Limits
from ckptmove.model import OLDEST_TORCH
from ckptmove.moves import MovePlan, MoveRequest, Remap
from ckptmove.text import Argument, Command, command_line, in_python, python_command
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


class Source(NamedTuple):
    """A checkpoint that is open, to try remedies on it.

    Attributes:
        location: its path, URL or file object.
        checkpoint: what was read from there. No remedy changes its trees.
        limits: resource limits for reading it.
        move: changes that the user has asked for anyway.
    """

    location: str
    checkpoint: OpenCheckpoint
    limits: Limits = Limits()
    move: MoveRequest = MoveRequest(None)

    def becomes_plain(self, folder: str = "") -> bool:
        """Whether ``convert --plain`` can write a copy that weights-only mode accepts.

        Only objects can prevent that in a file, which is judged by its tree. The whole plan is needed for a file whose
        tree leaves out strings, for files of ranks that are read as one, and for other changes.

        Args:
            folder: path in the checkpoint of one of several; empty for all of it.
        """
        from ckptmove.conversion.remap.plain import require_plain

        parts = [part for part in self.checkpoint.parts if not folder or f"{part.name}/".startswith(f"{folder}/")]
        refused = [part for part in parts if not _is_accepted(part.inventory)]
        is_read = all(isinstance(part, FilePart) and not part.placeholder for part in refused)
        if self.move.remap != Remap() or not is_read:
            return self.converts(folder, plain=True)
        inventories = [part.inventory for part in parts]
        if any(container_class(one.container).has_code for one in inventories):
            return False
        if any(fact.kind in _UNWRITTEN for one in inventories for fact in one.facts):
            return False
        try:
            for part in refused:
                require_plain(part.tree(), self.limits)
        except CkptMoveError:
            return False
        return True

    def converts(self, folder: str, *, plain: bool, output: str | None = None) -> bool:
        """Whether a dry run of ``convert`` can write a file that weights-only mode accepts; arguments as above."""
        from ckptmove.conversion.conversion import ConvertRequest
        from ckptmove.conversion.convert import convert

        move = self.move._replace(remap=self.move.remap._replace(plain=plain))
        path = below(self.location, folder)
        try:
            made = convert(
                ConvertRequest(
                    path=path,
                    move=move,
                    output=output,
                    default_output=default_output(path, "new"),
                    dry_run=True,
                    limits=self.limits,
                )
            )
        except CkptMoveError:
            return False
        return not made.is_refused

    def loads(self, folder: str) -> bool:
        """Whether ``ckptmove.load`` can read it without changes."""
        only = self.checkpoint.parts[0]
        if self.checkpoint.is_whole and isinstance(only, FilePart):
            return not container_class(only.inventory.container).has_code
        return loads(below(self.location, folder), self.limits)


def _is_accepted(inventory: Inventory) -> bool:
    """Whether weights-only mode of every supported torch accepts a file, so that nothing in it must become plain."""
    is_common = all(use.weights_only_since == OLDEST_TORCH for use in inventory.globals)
    return is_common and not inventory.foreign_opcodes and not inventory.filled_classes


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
    """What helps with a checkpoint that weights-only mode refuses.

    Attributes:
        kind: objects become ``plain`` values in a copy; the shards in several files are ``gathered`` in one; the
            ``import`` of some modules makes weights-only mode accept it; or ``load`` reads it, which does not unpickle.
        command: a command line.
    """

    kind: Literal["plain", "gathered", "import", "load"]
    command: Command


def choose(inventory: Inventory, source: Source, path: str = "", files: Sequence[FileRecord] = ()) -> Remedy | None:
    """Return the first remedy that works; None if none does, or if the file has dangerous names.

    Args:
        inventory: the checkpoint that weights-only mode refuses.
        source: where it was read from.
        path: the one of several checkpoints in a directory that holds what is refused, as a user sees its path; empty
            for all of it.
        files: the refused files of a directory or an archive.
    """
    is_hidden = isinstance(source.location, Address) and source.location.url != inventory.path
    if is_hidden or isinstance(source.location, OpenFile) or _is_dangerous(inventory):
        return None
    path = path or inventory.path
    folder = path.removeprefix(inventory.path).lstrip("/")
    for plain, output in _ways(inventory, path):
        if source.becomes_plain(folder) if output is None else source.converts(folder, plain=plain, output=output):
            options = [*["--plain"][:plain], *(("-o", output) if output is not None else ())]
            kind: Literal["plain", "gathered"] = "plain" if output is None else "gathered"
            return Remedy(kind, Command(command_line(["ckptmove", "convert", path, *options])))
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


def _ways(inventory: Inventory, path: str) -> Iterator[tuple[bool, str | None]]:
    """Whether objects become plain values, and the output; ShardedTensors are whole only in one file."""
    is_sharded = any(use.name == SHARDED_TENSOR for use in inventory.globals)
    if is_sharded and isinstance(inventory, DirectoryInventory):
        yield False, f"{path.rstrip('/')}.pth"
        yield True, f"{path.rstrip('/')}.pth"
    yield True, None


def _import(inventory: Inventory, refused: Collection[str], files: Sequence[FileRecord]) -> Remedy | None:
    """The import after which ``torch.load`` accepts a file; None for a member of an archive, which has no path."""
    modules = modules_of(refused)
    is_member = isinstance(inventory, DirectoryInventory) and inventory.form is not None
    container = files[0].container if files else inventory.container
    if not modules or is_member or not container_class(container).is_torch_save:
        return None
    path = posixpath.join(inventory.path, files[0].path) if files else inventory.path
    load = f"torch.load({in_python(path)}, map_location={in_python('cpu')}, weights_only=True)"
    code = f"import {', '.join(sorted({'torch', *modules}))}; {load}"
    return Remedy("import", python_command(code))


def note_on(made: Converted, request: ConvertRequest) -> Iterator[str]:
    """Note on a conversion whose new file weights-only mode refuses, with what helps besides its own changes."""
    if not container_class(made.container).is_torch_save:
        return
    try:
        with open_checkpoint(request.path, request.limits, tree="inventory") as checkpoint:
            inventory = checkpoint.inventory
            found = choose(inventory, Source(request.path, checkpoint, request.limits, request.move))
    except CkptMoveError:
        return  # the source was replaced
    if _is_dangerous(inventory):
        return
    note = "torch.load(weights_only=True) still refuses it (S701)"
    if found is None:
        yield note
    elif found.kind == "plain" and not made.in_place:
        yield f"{note}: {Argument('plain', True)} replaces its objects by plain values"
    else:
        yield Command(f"{note}: {found.command}")
