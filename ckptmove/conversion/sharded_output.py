"""Write a directory of safetensors shards with their index, as ``save_pretrained`` of transformers does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.layouts.detect import is_index
from ckptmove.conversion.remap.new_files import NewFiles
from ckptmove.conversion.shards import INDEX_NAME, shard_index, shard_names, split_shards
from ckptmove.formats.safetensors_new import new_safetensors
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.new_output import require_new_folder
from ckptmove.io.rewrite import write_segments
from ckptmove.io.segments import length

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.io.contracts import Segment
    from ckptmove.io.listing import Listing

_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644


def write_shards(conversion: Conversion, checkpoint: OpenCheckpoint) -> int:
    """Write the directory; return the number of bytes. In a dry run, only lay it out.

    Other files of a source directory, for example ``config.json``, are copied.

    Raises:
        NotInFormat: if safetensors cannot hold a value of the tree.
        CkptMoveError: as of :func:`ckptmove.api.convert`.
    """
    request = conversion.request
    files = _shard_files(conversion)
    if not conversion.is_writing:
        return 0
    require_new_folder(request.path, request.target, force=request.force)
    copied = _other_files(checkpoint)
    total, written = sum(sum(map(length, segments)) for segments in files.values()), 0
    with DirectorySink(request.target, frozenset((*files, *copied)), force=request.force) as sink:
        sink.reserve(total)
        sink.folder("", _FOLDER_MODE)
        source = NewFiles(cast("Remapped", conversion.remapped), conversion).source
        for name, segments in files.items():
            before = written

            def count(done: int, _of_the_file: int, before: int = before) -> None:
                if request.progress is not None:
                    request.progress(before + done, total)

            with sink.file(name, _FILE_MODE) as new:
                written += write_segments(source, segments, new, name, count, conversion.overflowed.append)
        for name in copied:
            with sink.file(name, _FILE_MODE) as new:
                for block in cast("Listing", checkpoint.listing).contents(name):
                    new.write(block)
        sink.commit(request.settle)
    return written


def _shard_files(conversion: Conversion) -> Mapping[str, tuple[Segment, ...]]:
    """Segments of each new file, by its name."""
    remapped = cast("Remapped", conversion.remapped)
    new = NewFiles(remapped, conversion)
    metadata = new.metadata(remapped.root)
    state = new.flat_state(remapped.root)
    shards = split_shards(state.tensors, cast("int", conversion.request.shard_bytes))
    files = {
        name: conversion.checked(new_safetensors(shard, metadata))
        for name, shard in zip(shard_names(len(shards)), shards, strict=True)
    }
    if len(shards) > 1:
        files[INDEX_NAME] = (BytesSegment(shard_index(shards, state.tied)),)
    return files


def _other_files(checkpoint: OpenCheckpoint) -> tuple[str, ...]:
    """Files at the top of a source directory that are neither checkpoints nor indexes."""
    others = (path for path in checkpoint.others if "/" not in path and path not in checkpoint.links)
    return tuple(path for path in others if not is_index(path))
