"""Find and read folders of torch.distributed.checkpoint in a directory.

No name in ``.metadata`` is followed to a file outside the listing of the directory.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptmove.assembled.dcp_pieces import DAMAGE, check_piece, checks_in, read_object
from ckptmove.checkpoint.directories import FileRecord
from ckptmove.checkpoint.inventory.apart import judged
from ckptmove.checkpoint.inventory.build import machine_inventory
from ckptmove.checkpoint.naming import naming
from ckptmove.errors import MissingShard, NotACheckpoint, UnsupportedContainer
from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
from ckptmove.formats.opening import recognise
from ckptmove.io.at_once import at_once
from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckptmove.formats.dcp.pieces import Piece
    from ckptmove.io.contracts import ByteSource, CheckedRange, Progress
    from ckptmove.io.listing import Listing
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, TensorRecord

    #: A file and some of its pieces.
    _Batch: TypeAlias = tuple[str, list[Piece]]

_SHARD: Final = ".distcp"
_METADATA: Final = re.compile(r"(__\d+)?\.metadata")
#: A safetensors file begins with the length of its header, in 8 bytes, and a brace.
_HEAD_BYTES: Final = 9
#: Bytes of the pieces that one thread compares with their CRCs.
_BATCH_BYTES: Final = 1 << 25


class DistributedFolder(NamedTuple):
    """A ``.metadata`` and the files next to it; ranks that saved independently have one each."""

    metadata: str  # path of `.metadata` or `__R.metadata` in the directory
    files: Mapping[str, int]  # sizes in bytes of the files next to it, by name
    spare: tuple[str, ...]  # names of `*.distcp` that no other `.metadata` owns
    ranks: tuple[str, ...] = ()  # paths of the `__R.metadata` of all ranks in the folder, if there is no `.metadata`
    is_joined: bool = False  # whether those of all ranks are read as one checkpoint

    @property
    def folder(self) -> str:
        """The path of the folder in the directory."""
        return self.metadata.rpartition("/")[0]

    @property
    def path(self) -> str:
        """Name of its part of the directory: the folder, or ``__R.metadata`` if the folder has several."""
        return self.metadata if self.ranks and not self.is_joined else self.folder

    def joined(self) -> DistributedFolder:
        """The folder with the shares of all ranks as one checkpoint."""
        return self._replace(is_joined=True, spare=tuple(name for name in self.files if name.endswith(_SHARD)))

    def full(self, file: str) -> str:
        """The path of a file next to it, from the top of the directory."""
        return f"{self.folder}/{file}" if self.folder else file


def find_distributed(listing: Listing) -> tuple[DistributedFolder, ...]:
    """The distributed checkpoints in a directory."""
    by_folder: dict[str, dict[str, int]] = {}
    for file in listing.files:
        if not file.is_hidden:
            by_folder.setdefault(file.folder, {})[file.name] = file.size_bytes
    for link in listing.links:
        folder, _, name = link.path.rpartition("/")
        if folder in by_folder and is_distributed(name):
            with closing(listing.open(link.path)) as source:
                by_folder[folder][name] = source.size
    found = []
    for folder, files in sorted(by_folder.items()):
        shards = tuple(name for name in files if name.endswith(_SHARD))
        prefix = f"{folder}/" if folder else ""
        tables = [name for name in files if _METADATA.fullmatch(name)]
        if not shards:
            tables = [name for name in tables if _is_table(listing, prefix + name)]
        elif not tables:
            what = f"{len(shards):,} *{_SHARD}, but the file that the save writes last is missing"
            raise MissingShard(listing.full(f"{prefix}.metadata"), ".metadata", what=what)
        if ".metadata" in tables:
            found.append(DistributedFolder(f"{prefix}.metadata", files, shards))
        else:
            ranks = tuple(
                prefix + name for name in sorted(tables, key=lambda name: int(name[2:].removesuffix(".metadata")))
            )
            found += [DistributedFolder(table, files, (), ranks) for table in ranks]
    return tuple(found)


def is_distributed(name: str) -> bool:
    """Whether a file next to a ``.metadata`` belongs to it, or is left over from an interrupted save."""
    return name.endswith(_SHARD) or _METADATA.fullmatch(name.removesuffix(".tmp")) is not None


class ReadFolder(NamedTuple):
    """A distributed checkpoint that was read; its files are closed."""

    folder: DistributedFolder  # its place; joined if `__R.metadata` of one rank describes only a share of the tensors
    container: DistributedCheckpoint  # its `.metadata`, and its objects if they were read
    inventory: Inventory  # its content
    damage: tuple[ArchiveFact, ...]  # facts about objects that could not be read


def read_distributed(listing: Listing, folder: DistributedFolder, limits: Limits, *, objects: bool) -> ReadFolder:
    """Read a distributed checkpoint, without the bytes of its tensors.

    ``objects`` says whether to read pieces that are not tensors: options of an optimizer, counters, schedules.
    """
    with ExitStack() as stack:
        source = stack.enter_context(closing(listing.open(folder.metadata)))
        stack.enter_context(naming(source.path))
        container = DistributedCheckpoint(source, folder.files, limits)
        if container.metadata.is_share and len(folder.ranks) > 1:
            folder = folder.joined()
            source, *others = (stack.enter_context(closing(listing.open(table))) for table in folder.ranks)
            container = DistributedCheckpoint(source, folder.files, limits, others=others)
        _require_streams(listing, folder, container)
        container.require_apart()
        damage = tuple(_read_objects(listing, folder, container, limits)) if objects else ()
        machine = container.read_whole() if objects else container.read()
        inventory = machine_inventory(machine, "dcp", limits)
        nbytes = container.metadata_bytes + sum(container.sizes.values())
    # Files without a reference are left over from an earlier save by more ranks.
    unnamed = (name for name in sorted(folder.spare) if name not in container.sizes and folder.files[name])
    inventory = replace(
        inventory,
        path=listing.full(folder.folder).rstrip("/"),
        layout="dcp",
        size_bytes=nbytes,
        globals=judged(machine),
        facts=(
            *container.facts(),
            *inventory.facts,
            *(ArchiveFact("unnamed-file", name, folder.files[name]) for name in unnamed),
        ),
        # ``.metadata`` stores integer keys as text, and a load restores the keys of the training run.
        optimizers=tuple(one._replace(mistyped=()) for one in inventory.optimizers),
    )
    return ReadFolder(folder, container, inventory, damage)


class PiecesOfFile(NamedTuple):
    """Pieces of a distributed checkpoint that one file contains."""

    container: DistributedCheckpoint  # its `.metadata`
    pieces: Sequence[Piece]  # pieces in the file, by offset

    def checks(self, source: ByteSource, limits: Limits, turn: Callable[[], None]) -> tuple[CheckedRange, ...]:
        """Check the form of each piece, and return the CRCs in the file. ``turn`` raises to stop."""
        found: list[CheckedRange] = []
        for piece in self.pieces:
            turn()
            found += checks_in(source, piece, self.container, limits)
        return tuple(found)


def pieces_of_files(part: DistributedFolder, container: DistributedCheckpoint) -> Mapping[str, PiecesOfFile]:
    """The pieces in each file of a distributed checkpoint, by the path of the file in the directory."""
    found = ((part.full(file), tuple(own)) for file, own in container.whole_pieces())
    return {path: PiecesOfFile(container, own) for path, own in found if own}


def file_records(
    part: DistributedFolder, container: DistributedCheckpoint, inventory: Inventory
) -> tuple[FileRecord, ...]:
    """A row of the table of files for each file, with the tensors that have pieces in it."""
    by_storage = {one.storage: one for one in inventory.tensors}
    prefix = f"{part.path}/" if part.path else ""
    names = dict.fromkeys((*container.sizes, *part.spare), ()) | container.metadata.pieces.names_by_file()
    return tuple(
        _file_record(part, file, [by_storage[prefix + name] for name in names[file] if prefix + name in by_storage])
        for file in sorted(names)
    )


def _file_record(part: DistributedFolder, file: str, tensors: Sequence[TensorRecord]) -> FileRecord:
    return FileRecord(
        path=part.full(file),
        roles=tuple(dict.fromkeys(tensor.role for tensor in tensors)) or ("other",),
        container="dcp",
        layout="dcp",
        size_bytes=part.files[file],
        tensors=len(tensors),
        devices=tuple(dict.fromkeys(tensor.device for tensor in tensors)),
        is_piece=True,
    )


def _is_table(listing: Listing, path: str) -> bool:
    with closing(listing.open(path)) as source:
        try:
            return recognise(source) == "dcp"
        except NotACheckpoint:
            return False


def _require_streams(listing: Listing, part: DistributedFolder, container: DistributedCheckpoint) -> None:
    """Raise UnsupportedContainer for pieces of ``FileSystemWriter(serialization_format=SAFETENSORS)``.

    Their ``.metadata`` looks the same, but the offsets in it are meaningless. One save writes all files in one form: of
    a remote checkpoint, one file is enough, because each costs a request.
    """
    for file, pieces in container.whole_pieces():
        starts = (piece.span.start for piece in pieces if piece.offsets is not None)
        first = next((start for start in starts if start + _HEAD_BYTES <= container.sizes[file]), None)
        if first is None:
            continue
        with closing(listing.open(part.full(file))) as source:
            heads = [source.read(start, start + _HEAD_BYTES) for start in {0, first}]
        if any(head.endswith(b"{") for head in heads):
            raise UnsupportedContainer(source.path, "safetensors", "a safetensors file in a distributed checkpoint")
        if listing.is_remote:
            return


def _read_objects(
    listing: Listing, part: DistributedFolder, container: DistributedCheckpoint, limits: Limits
) -> Iterator[ArchiveFact]:
    """Read objects that are not tensors into the container; yield facts about damaged ones."""
    # If an object has two places, torch uses the last.
    last = {piece.name: piece for piece in container.metadata.pieces.of_objects()}
    whole = filter(container.is_whole, last.values())
    for file, own in groupby(sorted(whole, key=lambda piece: (piece.file, piece.span.start)), lambda piece: piece.file):
        with closing(listing.open(part.full(file))) as source:
            for piece in own:
                yield from _read_object(source, piece, container, limits)


def _read_object(
    source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits
) -> tuple[ArchiveFact, ...]:
    try:
        container.objects[piece.name] = read_object(source, piece, container, limits)
    except DAMAGE:
        container.damaged.add(piece.name)
        return check_piece(source, piece, container, limits)
    return ()


def check_pieces(
    listing: Listing,
    part: DistributedFolder,
    container: DistributedCheckpoint,
    limits: Limits,
    progress: Progress | None,
    jobs: int = 1,
) -> Iterator[ArchiveFact]:
    """Read every piece, and compare it with its CRCs and with ``.metadata``."""
    done, total = 0, sum(container.sizes.values())

    def check(batch: _Batch) -> tuple[list[ArchiveFact], int]:
        """Facts about the pieces of a batch, and the bytes of the pieces; called in several threads."""
        file, own = batch
        with closing(listing.open(part.full(file))) as source:
            found = [check_piece(source, piece, container, limits) for piece in own]
        return [*chain.from_iterable(found)], sum(piece.span.nbytes for piece in own)

    is_local = listing.form is None and not listing.is_remote
    for found, nbytes in at_once(check, _batches(container), jobs if is_local else 1):
        yield from found
        if progress is not None:
            done += nbytes
            progress(min(done, total), total)


def _batches(container: DistributedCheckpoint) -> Iterator[_Batch]:
    """The files, each with some of its pieces at a time."""
    for file, own in container.whole_pieces():
        batch: list[Piece] = []
        nbytes = 0
        for piece in own:
            batch.append(piece)
            nbytes += piece.span.nbytes
            if nbytes > _BATCH_BYTES:
                yield file, batch
                batch, nbytes = [], 0
        yield file, batch
