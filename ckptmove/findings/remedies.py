"""What helps with a checkpoint that ``torch.load(weights_only=True)`` refuses. Each remedy is tried on that checkpoint.

None of them runs code of the file, or allows a name that is not known to be harmless.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.errors import CkptMoveError
from ckptmove.findings.trials import Source, folder_of, is_hidden
from ckptmove.formats.facts import facts_of
from ckptmove.io.remote.address import Address
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.text import Argument, Command, in_python, python_command, quoted
from ckptmove.torch_facts.registered import modules_of
from ckptmove.torch_facts.weights_only import SHARDED_TENSOR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted
    from ckptmove.model import Inventory


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
