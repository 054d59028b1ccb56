"""Write a directory of safetensors shards with their index, as ``save_pretrained`` of transformers does."""

from __future__ import annotations

from posixpath import dirname
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.checkpoint.naming import naming
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.conversion.remap.kept_files import replaced_by_shards
from ckptmove.conversion.remap.new_files import NewFiles
from ckptmove.conversion.shards import INDEX_NAME, shard_index, shard_names, split_shards
from ckptmove.formats.safetensors_new import new_safetensors
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.locations import leads_out
from ckptmove.io.new_output import require_new_folder
from ckptmove.io.rewrite import write_segments
from ckptmove.io.segments import length

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.io.contracts import Segment
    from ckptmove.io.listing import ListedFile, Listing

#: Permission bits to read a file, and to read and write it: shards are not executed.
_READ: Final = 0o444
_FILE: Final = 0o666


def write_shards(conversion: Conversion, checkpoint: OpenCheckpoint) -> int:
    """Write the directory; return the number of bytes. In a dry run, only lay it out.

    Other files of a source directory or archive, for example ``config.json``, are copied, with their folders and links.
    """
    request = conversion.request
    files = _shard_files(conversion)
    copied = _other_files(conversion, checkpoint, files)
    if not conversion.is_writing:
        return 0
    require_new_folder(request.path, request.target, force=request.force)
    mode = checkpoint.mode & _FILE
    total, written = sum(sum(map(length, segments)) for segments in files.values()) + copied.nbytes, 0
    with DirectorySink(request.target, frozenset((*files, *copied.files, *copied.links)), force=request.force) as sink:
        sink.reserve(total)
        for path, folder_mode in copied.folders.items():
            sink.folder(path, folder_mode)
        for path, target in copied.links.items():
            sink.link(path, target)
        source = NewFiles(cast("Remapped", conversion.remapped), conversion).source
        for name, segments in files.items():
            before = written

            def count(done: int, _of_the_file: int, before: int = before) -> None:
                if request.progress is not None:
                    request.progress(before + done, total)

            with sink.file(name, mode) as new:
                written += write_segments(source, segments, new, count, conversion.overflowed.append)
        listing = cast("Listing", checkpoint.listing)  # with files to copy, there is one
        for name, file in copied.files.items():
            with naming(listing.full(file.path)), sink.file(name, file.mode or mode) as new:
                for block in listing.contents(file.path):
                    new.write(block)
                listing.require_unchanged(file)
            written += file.size_bytes
            if request.progress is not None:
                request.progress(written, total)
        conversion.prove(sink.place)
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


class _OtherFiles(NamedTuple):
    """Content of the source that is copied."""

    folders: Mapping[str, int]  # permission bits of each folder, after its parent; the new directory has an empty path
    files: Mapping[str, ListedFile]  # by their paths in the new directory
    links: Mapping[str, str]  # targets of the links, by path

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files.values())


def _other_files(conversion: Conversion, checkpoint: OpenCheckpoint, new: Collection[str]) -> _OtherFiles:
    """Everything below the top of the source except checkpoints, indexes of shards, and links to them."""
    listing, mode = checkpoint.listing, checkpoint.mode & _FILE
    mode |= (mode & _READ) >> 2  # who may read a file may search its folder
    if listing is None:
        return _OtherFiles({"": mode}, {}, {})
    gone = replaced_by_shards(checkpoint, listing, new)
    files = {file.path.removeprefix(checkpoint.top): file for file in listing.files if file.path not in gone}
    for path in files:
        if leads_out(path):
            raise NotRemappable(listing.path, "archive", f"the name of member '{path:.200}' leads out of it")
    links = {link.path: link.target for link in listing.links if link.path not in gone}
    lost = [link.path for link in listing.links if link.path in gone]
    if lost:
        conversion.notes.append(f"links to replaced files are not copied: {', '.join(lost)}")
    folders = {"": mode, **dict.fromkeys(_parents(files), mode)}
    folders |= {folder.path: folder.mode for folder in listing.folders if folder.path not in gone}
    return _OtherFiles(dict(sorted(folders.items())), files, links)


def _parents(paths: Iterable[str]) -> Iterator[str]:
    """The folders of an archive, which lists only files."""
    for path in paths:
        folder = dirname(path)
        while folder:
            yield folder
            folder = dirname(folder)
