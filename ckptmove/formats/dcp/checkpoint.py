"""A checkpoint of torch.distributed.checkpoint: ``.metadata``, and files in which each chunk is a ``torch.save``.

This class does not open those files: its facts come from ``.metadata`` and from their sizes.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.errors import DamagedArchive, MissingShard
from ckptmove.formats.dcp.metadata import REPEATED, StoredObject, StoredTensor, parse_metadata, union
from ckptmove.formats.rebuild_calls import rebuild_call
from ckptmove.model import ArchiveFact
from ckptmove.pickles.plain_objects import interpret_objects
from ckptmove.pickles.state import Machine
from ckptmove.pickles.stream import read_pickle
from ckptmove.pickles.tree import Dict, List, Opaque

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.formats.chunks import Chunk
    from ckptmove.formats.dcp.metadata import Path
    from ckptmove.formats.dcp.pieces import Piece
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value


#: Text of the opaque node for an object whose content is unknown.
UNREAD: Final = "an object, saved whole"


class ReadObject(NamedTuple):
    """Contents of the piece of an object that is not a tensor."""

    kind: str | None  # format of the piece; None if the object wrote its own bytes
    #: the machine that has read its pickle; None if the pickle and the storages do not hold all of its content.
    machine: Machine | None
    storages: Mapping[str, str]  # keys of its storages in the piece, by their keys in the checkpoint


class DistributedCheckpoint:
    """A checkpoint of ``torch.distributed.checkpoint.save``; its source is ``.metadata``."""

    def __init__(
        self, source: ByteSource, sizes: Mapping[str, int], limits: Limits, *, others: Sequence[ByteSource] = ()
    ) -> None:
        """Read ``.metadata``, given the sizes of the files in its folder by the names that it may give them.

        If each rank saved its share without collectives, ``others`` are the ``__R.metadata`` of the other ranks.
        """
        self.source, self.limits = source, limits
        #: Objects that are not tensors, by name, and the names of damaged ones; filled by the caller that opens files.
        self.objects: dict[str, ReadObject] = {}
        self.damaged: set[str] = set()
        machines = [interpret_objects(read_pickle(one, 0, limits), limits, REPEATED) for one in (source, *others)]
        self.metadata_bytes = sum(one.size for one in (source, *others))
        self.globals = dict(chain.from_iterable(machine.globals.items() for machine in machines))
        self.runs = dict(chain.from_iterable(machine.runs.items() for machine in machines))
        tables = [parse_metadata(machine, one.path) for machine, one in zip(machines, (source, *others), strict=True)]
        self.metadata = union(tables, source.path) if others else tables[0]
        named = self.metadata.pieces.files
        lost = [file for file in named if file not in sizes]
        if lost:
            raise MissingShard(source.path, lost[0], len(lost) - 1)
        self.sizes = {file: sizes[file] for file in named}
        self._tensors = {tensor.name: tensor for tensor in self.metadata.tensors}
        #: Chunks by offsets, by the ``id`` of their tuple: tensors of one shape share it.
        self._grids: dict[int, dict[tuple[int, ...], Chunk]] = {}

    def require_apart(self) -> None:
        """Raise DamagedArchive if two pieces share bytes: torch writes one after the other.

        Call it only for files of ``torch.save``: in files of safetensors the places are not byte ranges.
        """
        found = self.metadata.pieces.overlap()
        if found is not None:
            names = " and ".join(f"'{piece.name:.80}'" for piece in found)
            raise DamagedArchive(self.source.path, f"the pieces of {names} share bytes of '{found[0].file:.80}'")

    def read(self) -> Machine:
        """The tree of the saved object, nested by its keys, without a place in any pickle.

        Objects that are not tensors are opaque, and lists appear as dicts.
        """
        return self._nested({}, {})

    def read_whole(self) -> Machine:
        """As :meth:`read`, with the contents of objects, and with lists."""
        objects = {name: one.machine for name, one in self.objects.items() if one.machine is not None}
        members: dict[Path, set[str | int]] = {}
        for keys, _ in self._places():
            for length in range(len(keys)):
                members.setdefault(keys[:length], set()).add(keys[length])
        lists = {path: len(keys) for path, keys in members.items() if path and keys == set(range(len(keys)))}
        machine = self._nested({name: one.root for name, one in objects.items()}, lists)
        machine.end += sum(one.end - one.begin for one in objects.values())
        machine.globals = dict(self.globals)
        for one in objects.values():
            machine.globals |= one.globals
            machine.runs |= one.runs
            machine.persistents += one.persistents
        return machine

    def _nested(self, objects: Mapping[str, Value], lists: Mapping[Path, int]) -> Machine:
        machine = Machine(b"", self.limits)
        machine.end = self.metadata_bytes
        machine.globals, machine.runs = self.globals, {**self.runs}
        nodes: dict[Path, Dict | List] = {(): Dict([], [])}
        for keys, entry in self._places():
            for length in range(1, len(keys)):
                if keys[:length] not in nodes:
                    nodes[keys[:length]] = _empty(lists.get(keys[:length]))
                    _assign(nodes[keys[: length - 1]], keys[length - 1], nodes[keys[:length]])
            _assign(nodes[keys[:-1]], keys[-1], objects[entry.name] if entry.name in objects else _value(entry))
        machine.root = nodes[()]
        return machine

    def _places(self) -> Iterator[tuple[Path, StoredTensor | StoredObject]]:
        """Each entry with the keys of its place in the tree."""
        taken = {entry.path for entry in self.metadata.entries}
        for entry in self.metadata.entries:
            is_below = any(entry.path[:length] in taken for length in range(1, len(entry.path)))
            # A tensor has no entries below it.
            yield ((entry.name,) if is_below else entry.path), entry

    def facts(self) -> tuple[ArchiveFact, ...]:
        """Problems with the places of the pieces, by the sizes of the files, and with the chunks of the tensors."""
        return (*self._file_problems(), *self._entry_problems())

    def is_whole(self, piece: Piece) -> bool:
        """Whether a piece ends within its file."""
        return piece.span.end <= self.sizes[piece.file]

    def whole_pieces(self) -> Iterator[tuple[str, Iterator[Piece]]]:
        """Iterate over the files and, by start, the pieces that end within each; these are valid until the next."""
        return ((file, filter(self.is_whole, own)) for file, own in self.metadata.pieces.by_file())

    def pieces_of(self, name: str) -> Mapping[tuple[int, ...] | None, Piece]:
        """The pieces of a tensor or an object that end within their file, by offsets."""
        found = self.metadata.pieces.of(name)
        return {offsets: piece for offsets, piece in found.items() if self.is_whole(piece)}

    def object_piece(self, name: str) -> Piece | None:
        """The piece of an object; None if it is absent or ends past its file."""
        return self.pieces_of(name).get(None)

    def chunk_at(self, piece: Piece) -> tuple[str, tuple[int, ...]] | None:
        """The dtype and the shape of a piece's chunk; None if the piece is not a chunk."""
        found = self._chunk(piece.name, piece.offsets)
        return None if found is None else (found[0].dtype, found[1].sizes)

    def _chunk(self, name: str, offsets: tuple[int, ...] | None) -> tuple[StoredTensor, Chunk] | None:
        """A chunk by its offsets, with its tensor."""
        tensor = None if offsets is None else self._tensors.get(name)
        if tensor is None or offsets is None:
            return None
        grid = self._grids.get(id(tensor.chunks))
        if grid is None:
            # An empty chunk may have the offsets of another one, which comes later and replaces it.
            chunks = sorted(tensor.chunks, key=lambda chunk: chunk.volume > 0)
            grid = self._grids[id(tensor.chunks)] = {chunk.offsets: chunk for chunk in chunks}
        chunk = grid.get(offsets)
        return None if chunk is None else (tensor, chunk)

    def _file_problems(self) -> Iterator[ArchiveFact]:
        for name, offsets, file, start, end in self.metadata.pieces.rows():
            expected = self._chunk(name, offsets)
            lost = min(end - self.sizes[file], end - start)
            short = 0 if expected is None else expected[0].nbytes(expected[1]) - (end - start)
            if lost > 0:
                yield ArchiveFact("past-end", f"{file}/{name}", lost)
            elif short > 0:
                yield ArchiveFact("short-storage", f"{file}/{name}", short)

    def _entry_problems(self) -> Iterator[ArchiveFact]:
        for entry in self.metadata.entries:
            there = self.metadata.pieces.offsets_of(entry.name)
            if isinstance(entry, StoredObject):
                if None not in there:
                    yield ArchiveFact("missing-storage", entry.name, 0)
                continue
            unsaved = [chunk for chunk in entry.chunks if chunk.offsets not in there and chunk.volume]
            if unsaved:
                yield ArchiveFact("missing-storage", entry.name, sum(map(entry.nbytes, unsaved)))
            uncovered = entry.uncovered
            if uncovered > 0:
                yield ArchiveFact("short-storage", entry.name, uncovered)


def _empty(length: int | None) -> Dict | List:
    return Dict([], []) if length is None else List([None] * length, [-1] * length)


def _assign(into: Dict | List, key: str | int, value: Value) -> None:
    if isinstance(into, List):
        into.items[cast("int", key)] = value  # all keys of a list are numbers
    else:
        into.flat += key, value
        into.starts += -1, -1


def _value(entry: StoredTensor | StoredObject) -> Value:
    if isinstance(entry, StoredObject):
        return Opaque(UNREAD)
    return rebuild_call(entry.name, entry.dtype, entry.shape, requires_grad=entry.requires_grad)
