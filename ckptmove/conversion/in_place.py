"""Convert a checkpoint file in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptmove.errors import InPlaceImpossible
from ckptmove.io.locations import link_target, other_names
from ckptmove.io.patch import apply_patch
from ckptmove.pickles.edits import apply_plan
from ckptmove.text import Argument, Command, amount, command_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.io.changes import Patch
    from ckptmove.io.source import DiskPlace
    from ckptmove.moves import MovePlan


def change_file(conversion: Conversion, part: FilePart) -> int:
    """Change a file as planned, without reading tensors; return the number of bytes written."""
    request, plan = conversion.request, conversion.plan
    if plan.inflates:
        raise InPlaceImpossible(part.path, "its storages are compressed, and the output stores them uncompressed")
    if plan.is_empty:
        return 0
    remapped = conversion.remapped
    patch = _patch(part, plan) if remapped is None else _remapped_patch(part, conversion, remapped)
    size = part.inventory.size_bytes
    place = cast("DiskPlace", part.disk)  # the file is on disk
    conversion.notes += notes_on_names(part.path)
    if not conversion.is_writing:
        return 0
    part.close()

    def settle() -> None:
        conversion.prove(part.path)
        request.settle()

    apply_patch(part.path, patch, place.stamp, settle)
    conversion.notes.append(_way_back(part.path, patch, size, is_remapped=remapped is not None))
    return patch.nbytes


def notes_on_names(path: str) -> Iterator[str]:
    """Notes on links to the file, because the change affects them too."""
    target = link_target(path)
    if target:
        yield f"it is a symbolic link: the change is made to its target, {target}"
    others = other_names(path)
    if others > 0:
        yield f"the change also affects {amount(others, 'other hard link')} to the file"


def _way_back(path: str, patch: Patch, size: int, *, is_remapped: bool) -> str:
    """Note on how to undo the change. What changes more than devices is only undone if it is forced."""
    if not patch.writes:
        return "the original is restored, byte for byte"
    if not patch.can_undo:
        return "this format supports no undo: to undo the change, convert the file back"
    scope = " all conversions in place" if patch.writes[0][0] < size else ""
    words = ["ckptmove", "convert", path, "--undo", *["--force"] * is_remapped]
    return Command(f"to undo{scope}: {command_line(words)}")


def _patch(part: FilePart, plan: MovePlan) -> Patch:
    if any(edit.cast for edit in plan.edits):
        raise InPlaceImpossible(part.path, f"{Argument('cast')} changes the size of tensors")
    with part.content() as (container, machine):
        return container.patch(apply_plan(machine, plan))


def _remapped_patch(part: FilePart, conversion: Conversion, remapped: Remapped) -> Patch:
    from ckptmove.conversion.remap.new_files import NewFiles

    files = NewFiles(remapped, conversion)
    if not files.keeps_storages(part, remapped.root):
        raise InPlaceImpossible(part.path, "bytes of tensors would move or change")
    with part.content() as (container, _):
        return container.patch(files.pickle(part, remapped.root))
