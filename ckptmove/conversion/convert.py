"""Convert a checkpoint: open it, plan the moves, check the output, and write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.conversion.conversion import Conversion
from ckptmove.errors import ArchiveOfFiles, DamagedArchive, InPlaceImpossible
from ckptmove.io.locations import is_folder
from ckptmove.io.new_output import require_new_file
from ckptmove.io.rewrite import write_segments
from ckptmove.io.sink import FileSink
from ckptmove.pickles.edits import apply_plan

if TYPE_CHECKING:
    from ckptmove.checkpoint.layouts.archive import ArchiveListing
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.moves import ConvertResult, MovePlan


def convert(request: ConvertRequest) -> ConvertResult:
    """Plan and execute a conversion; errors as of :func:`ckptmove.api.convert`."""
    path, in_place = request.path, request.in_place
    if in_place and is_folder(path):
        raise InPlaceImpossible(path, "it is a directory, of which a new one is made")
    try:
        with naming(path), open_checkpoint(path, request.limits, files=not in_place, objects=False) as checkpoint:
            conversion = Conversion(request, checkpoint)
            return conversion.result(_carry_out(conversion, checkpoint))
    except ArchiveOfFiles as error:
        raise InPlaceImpossible(path, "it is an archive of files, of which a new one is made") from error


def _carry_out(conversion: Conversion, checkpoint: OpenCheckpoint) -> int:
    """Write the output, if there is anything to write; return the number of bytes."""
    request, listing = conversion.request, checkpoint.listing
    if request.in_place:
        from ckptmove.conversion.in_place import change_file  # noqa: PLC0415  # not for a new file

        return change_file(conversion, checkpoint.file)
    if not conversion.is_writing:
        if request.dry_run and listing is None:
            _try_out(checkpoint.file, conversion.plan)
        return 0
    if listing is not None and listing.form is None:
        from ckptmove.conversion.directory import write_directory  # noqa: PLC0415  # not for a file

        return write_directory(conversion, checkpoint, listing)
    require_new_file(request.path, request.target, request.default_output, force=request.force)
    if listing is None:
        with checkpoint.file.content() as (container, machine):
            source, segments = container.source, conversion.lay_out(container, machine, conversion.plan)
        if request.check and not checkpoint.file.has_own_checksums:
            conversion.unchecked.append("")
    else:
        from ckptmove.conversion.archive import lay_out_archive  # noqa: PLC0415  # not for a file

        archive = cast("ArchiveListing", listing)
        source, segments = archive.members.source, lay_out_archive(conversion, checkpoint, archive)
    with FileSink(request.target, force=request.force) as sink:
        written = write_segments(source, segments, sink, request.path, request.progress, conversion.overflowed.append)
        sink.commit(request.settle)
    return written


def _try_out(part: FilePart, plan: MovePlan) -> None:
    """Raise in a dry run the errors of the conversion that are known without reading tensors.

    Raises:
        DamagedArchive, UneditablePickle: as of :meth:`Conversion.lay_out`.
        CrcMismatch: if the bytes of a deflated record, other than a storage, differ from their CRC.
    """
    with part.content() as (container, machine):
        # Casts are left out: for a cast storage, a zip archive would read its bytes to compute the new CRC.
        container.lay_out(apply_plan(machine, plan), {})
    absent = {fact.storage_key for fact in part.inventory.facts if fact.kind == "missing-storage"}
    for edit in plan.edits:
        if edit.cast is not None and edit.storage in absent:
            raise DamagedArchive(part.path, f"storage '{edit.storage:.40}' has no bytes to be cast")
