"""Convert a checkpoint: open it, plan the changes, check the output, and write it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.naming import naming
from ckptmove.conversion.conversion import Conversion
from ckptmove.conversion.remap.folder import RemappedFolder
from ckptmove.conversion.target_format import names_format
from ckptmove.errors import ArchiveOfFiles, CkptMoveError, DamagedArchive, InPlaceImpossible
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.io.cores import cores
from ckptmove.io.locations import is_folder
from ckptmove.io.new_output import require_new_file
from ckptmove.io.remote.address import Address
from ckptmove.io.rewrite import write_segments
from ckptmove.io.sink import FileSink
from ckptmove.io.source import READS_AT_ONCE
from ckptmove.moves import Remap
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.edits import apply_plan
from ckptmove.text import command_line, some

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.conversion.conversion import ConvertRequest
    from ckptmove.conversion.results import Converted
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.moves import MovePlan
    from ckptmove.opening.members import Members


def convert(request: ConvertRequest) -> Converted:
    """Plan and execute a conversion; errors as of :func:`ckptmove.convert`."""
    path, in_place = request.path, request.in_place
    if in_place and isinstance(path, Address):
        raise InPlaceImpossible(path, "it is a URL, and only local files can be converted in place")
    if in_place and is_folder(path):
        raise InPlaceImpossible(path, "it is a directory, and only files can be converted in place")
    # A format is only known once the checkpoint is open; a few trees too many cost little.
    is_new = names_format(request.output) or request.shard_bytes is not None
    needs_trees = request.move.remap != Remap() or is_new
    try:
        with (
            naming(path),
            open_checkpoint(
                path,
                request.limits,
                files=not in_place,
                objects=needs_trees,
                ranks=is_new,  # in a copy of the directory, each rank keeps its file
                keep_trees=needs_trees,
                exclude=request.exclude,
            ) as checkpoint,
        ):
            notes: list[str] = []
            jobs = (request.jobs or cores()) if _is_shared(checkpoint) else 1
            if is_new:
                checkpoint, notes = _gathered(request, checkpoint)  # noqa: PLW2901  # the same files
            conversion = Conversion(request, checkpoint)
            conversion.notes += notes
            if request.exclude:
                inner = some(request.exclude, 3)
                conversion.notes.append(f"left out with links to them, as checkpoints of their own: {inner}")
            with conversion.resources:
                written = _carry_out(conversion, checkpoint, jobs)
            if checkpoint.traffic_note:
                conversion.notes.append(checkpoint.traffic_note)
            return conversion.result(written)
    except ArchiveOfFiles as error:
        raise InPlaceImpossible(path, "it is an archive of files, which cannot be converted in place") from error
    except ReadOnlyFormat as error:
        error.instead = error.instead or _instead(error, request)
        raise


def _instead(error: ReadOnlyFormat, request: ConvertRequest) -> str:
    """The command that writes a file alone, in the format of today; empty if its dry run fails."""
    path, move = error.path or request.path, request.move
    if path != request.path and not is_folder(request.path):
        return "unpack the archive, then convert its member alone"
    if path != request.path and move.keep:  # --keep names tensors of the whole directory
        return ""
    attempt = replace(request, path=path, output="X.pth", exclude=(), in_place=False, dry_run=True, progress=None)
    try:
        convert(attempt)
    except CkptMoveError:
        return ""
    options = ["--to", move.to] if move.to else []
    options += [word for source, target in move.mapping for word in ("--map", f"{source}={target}")]
    options += [word for glob in move.keep for word in ("--keep", glob)]
    flags = {"--cast": move.cast, "--rewrite-strings": move.rewrite_strings}
    options += [flag for flag, is_set in flags.items() if is_set]
    command = command_line(["ckptmove", "convert", path, *options, "--output", "X.pth"])
    return f"write it alone, in the format of today: {command}"


def _gathered(request: ConvertRequest, checkpoint: OpenCheckpoint) -> tuple[OpenCheckpoint, list[str]]:
    """The checkpoint without partitions of ZeRO, if its files become one and have any; and notes on that."""
    if request.format_for(checkpoint.inventory) == "same":
        return checkpoint, []
    from ckptmove.assembled.zero import gather_partitions
    from ckptmove.assembled.zero_files import is_expert_file, is_zero_file

    found = gather_partitions(checkpoint, request.limits)
    if found is None:
        return checkpoint, []
    names = {part.name: part.name.rpartition("/")[2] for part in checkpoint.parts}
    left_out = [path for path, name in names.items() if not is_zero_file(name) and not is_expert_file(name)]
    notes = [f"left out, because only files of DeepSpeed are gathered: {some(left_out, 3)}"] if left_out else []
    ranks = [key for key in found.inventory.root_keys if key.startswith("mp_rank_")]
    if ranks:
        notes.append(f"parameters stay cut over the ranks of model parallelism, one entry for each: {some(ranks, 3)}")
    return found, notes


def _carry_out(conversion: Conversion, checkpoint: OpenCheckpoint, jobs: int) -> int:
    """Write the output, if there is anything to write, with a number of threads; return the number of bytes."""
    request, listing = conversion.request, checkpoint.listing
    if request.in_place:
        from ckptmove.conversion.in_place import change_file

        return change_file(conversion, checkpoint.file)
    if conversion.format == "shards":
        from ckptmove.conversion.sharded_output import write_shards

        return write_shards(conversion, checkpoint)
    if not conversion.is_writing:
        if request.dry_run:
            _try_out(conversion, checkpoint)
        return 0
    if conversion.format == "same" and listing is not None and listing.form is None:
        from ckptmove.conversion.directory import write_directory

        return write_directory(conversion, checkpoint, listing)
    require_new_file(request.path, request.target, request.default_output, force=request.force)
    source, segments = _lay_out(conversion, checkpoint)
    with FileSink(request.target, force=request.force, mode=checkpoint.mode) as sink:
        overflowed = conversion.overflowed.append
        written = write_segments(source, segments, sink, request.progress, overflowed, jobs)
        sink.commit(partial(_settle, conversion, sink.place))
    return written


def _settle(conversion: Conversion, written: str) -> None:
    """Prove what was written; then no signal stops the conversion."""
    conversion.prove(written)
    conversion.request.settle()


def _is_shared(checkpoint: OpenCheckpoint) -> bool:
    """Whether threads can read the checkpoint: it is a local directory. Members of an archive are read in order."""
    listing = checkpoint.listing
    return READS_AT_ONCE and listing is not None and listing.form is None and not listing.is_remote


def _lay_out(conversion: Conversion, checkpoint: OpenCheckpoint) -> tuple[ByteSource, tuple[Segment, ...]]:
    """The new file as segments, and the source of those that name none."""
    if conversion.remapped is not None and (checkpoint.listing is None or conversion.format != "same"):
        from ckptmove.conversion.remap.new_files import lay_out_file

        return lay_out_file(conversion, conversion.remapped, checkpoint)
    if checkpoint.listing is None:
        if conversion.request.check and not checkpoint.file.has_own_checksums:
            conversion.unchecked.append("")
        with checkpoint.file.content() as (container, machine):
            return container.source, conversion.lay_out(container, machine, conversion.plan)
    from ckptmove.conversion.archive import lay_out_archive

    archive = cast("Members", checkpoint.listing)
    return archive.source, lay_out_archive(conversion, checkpoint, archive)


def _try_out(conversion: Conversion, checkpoint: OpenCheckpoint) -> None:
    """Raise in a dry run the errors of the conversion that are known without reading tensors."""
    if conversion.remapped is not None:
        if checkpoint.listing is None or conversion.format != "same":
            _lay_out(conversion, checkpoint)
        else:
            folder = RemappedFolder(conversion, conversion.remapped, checkpoint)
            if checkpoint.listing.form is not None:
                _require_safe(checkpoint, folder.removed)
    elif checkpoint.listing is None:
        _try_moves(checkpoint.file, conversion.plan)
    elif checkpoint.listing.form is not None:
        _require_safe(checkpoint)


def _require_safe(checkpoint: OpenCheckpoint, removed: Collection[str] = ()) -> None:
    from ckptmove.conversion.archive import require_safe

    require_safe(cast("Members", checkpoint.listing), removed)


def _try_moves(part: FilePart, plan: MovePlan) -> None:
    with part.content() as (container, machine):
        # Casts are left out: for a cast storage, a zip archive would read its bytes to compute the new CRC.
        container.lay_out(apply_plan(machine, plan), {})
    absent = {fact.storage_key for fact in part.inventory.facts if fact.kind == "missing-storage"}
    for edit in plan.edits:
        if edit.cast is not None and edit.storage in absent:
            raise DamagedArchive(part.path, f"storage '{edit.storage:.40}' has no bytes to cast")
