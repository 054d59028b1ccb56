"""Read and lay out a plain pickle of ``pickle.dump``: its tensors are ``torch.save`` streams inside the pickle.

The bytes of tensors and arrays are not read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive, DamagedPickle, LimitExceeded, UneditablePickle
from ckptmove.formats.contract import Container
from ckptmove.formats.nested_streams import (
    find_streams,
    insert_streams,
    name_long_keys,
    opened_calls,
    shared_streams,
    split_key,
)
from ckptmove.formats.pickle_outline import read_outlines
from ckptmove.formats.replaced_values import replace_values
from ckptmove.io.contracts import CopySegment
from ckptmove.io.segments import length, shifted
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import STOP, operations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.formats.pickle_outline import PickleOutline
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

_BLOCK: Final = 1 << 20
_AS_TEXT: Final = "tensors as text, the form of bytes in pickle protocols 0 to 2,"


class BarePickle(Container):
    """A file of ``pickle.dump``, whose byte order is that of the streams in it; little-endian without any."""

    name = "pickle"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> BarePickle:
        return cls(source, limits)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        """Read the pickle, and the pickles of the streams in it."""
        self.source, self.limits = source, limits
        outlines = read_outlines(source, limits)
        self._outline = next(outlines)
        self.placeholder = self._outline.marks.decode()
        try:
            self._machine = interpret(self._outline.data, limits)
        except DamagedPickle as error:
            offset = self._outline.file_offset(error.offset)
            raise DamagedPickle(error.detail, offset=offset, runs=error.runs) from error
        self._streams = find_streams(self._machine.root, self._outline, source, limits)
        insert_streams(self._machine, self._streams, limits)
        self.opened = opened_calls(self._machine)
        self._long_keys = name_long_keys(self._machine.root, self._outline)
        self._note_rest(outlines)
        self._pickle = self._machine.data
        self.byteorder = next((stream.container.byteorder for stream in self._streams), "little")

    def _note_rest(self, outlines: Iterator[PickleOutline]) -> None:
        """Collect the names in later pickles of the file, which further calls of ``pickle.load`` run.

        Any bytes may follow the first pickle: only names before the first damage are collected.
        """
        try:
            for outline in outlines:
                machine = interpret(outline.data, self.limits)
                insert_streams(machine, find_streams(machine.root, outline, self.source, self.limits), self.limits)
                self.opened &= opened_calls(machine)
                self._machine.note_names(machine)
        except (DamagedPickle, DamagedArchive) as error:
            self._machine.note_runs(error.runs)

    def read(self) -> Machine:
        """The machine that has read :meth:`object_pickle`; the streams' storages replace the calls that load them."""
        return self._machine

    def object_pickle(self) -> bytes:
        """The pickle without its long strings, followed by the object pickles of the streams in it."""
        return self._pickle

    def with_long_strings(self, root: Value) -> Value:
        """The tree of :meth:`read` with the strings that its placeholders replace, for a file of another format."""
        strings = self._outline.strings
        streams = {stream.string for stream in self._streams}
        nbytes = sum(string.span.nbytes for place, string in enumerate(strings) if place not in streams)
        if nbytes > self.limits.string_bytes:
            limit = self.limits.string_bytes
            raise LimitExceeded("the size of the long strings in bytes", limit=limit, actual=nbytes)
        values: dict[int, Value] = {}  # one object for each string, so that a shared one stays shared

        def whole(value: Value) -> Value:
            place = self._outline.find(value)
            if place is None and id(value) in self._long_keys:
                place = self._long_keys[id(value)][1]
            if place is None:
                return value
            if place not in values:
                pushed = self.source.read(strings[place].start, strings[place].span.end)
                values[place] = interpret(pushed + bytes([STOP]), self.limits).root
            return values[place]

        return replace_values(root, whole) if strings else root

    def extras(self) -> Iterator[tuple[str, bytes]]:
        """The long strings that are not streams, in file order: the tree holds only their placeholders."""
        streams = {stream.string for stream in self._streams}
        for place, string in enumerate(self._outline.strings):
            if place not in streams:
                digest = hashlib.sha256()
                for block in self.source.blocks(string.span, _BLOCK):
                    digest.update(block)
                yield f"long string {place}", digest.digest()

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Find the bytes of the storages in the streams.

        The key of a storage is ``0:KEY``, with the place of its stream and its key there.
        """
        own: list[list[StorageRef]] = [[] for _ in self._streams]
        facts: list[ArchiveFact] = []
        for storage in storages:
            at, key = split_key(storage.key, len(self._streams))
            if at is None:
                facts.append(ArchiveFact("missing-storage", storage.key, storage.nbytes))
            else:
                own[at].append(storage._replace(key=key))
        for place, (stream, named) in enumerate(zip(self._streams, own, strict=True)):
            # Deflated bytes are a problem only for mmap=True, which cannot map a stream inside a pickle.
            found = [fact for fact in stream.container.locate(named) if fact.kind != "compressed-storage"]
            facts += [fact._replace(record=f"{place}:{fact.storage_key}") for fact in found]
            if stream.string is None:
                facts += [ArchiveFact("encoded-storage", f"{place}:{storage.key}", storage.nbytes) for storage in named]
        if self._outline.end < self.source.size:
            rest = self.source.size - self._outline.end
            facts.append(ArchiveFact("orphan-record", "bytes after the pickle", rest))
        return tuple(facts)

    def strays(self) -> tuple[tuple[str, Span], ...]:
        span = Span(self._outline.end, self.source.size)
        return (("bytes after the pickle", span),) if span.nbytes else ()

    def storage_span(self, key: str) -> Span | None:
        """Span of a storage's bytes in the source; None if they are missing, or written as text."""
        place, inner = split_key(key, len(self._streams))
        if place is None or self._streams[place].string is None:
            return None
        stream = self._streams[place]
        span = stream.container.storage_span(inner)
        return Span(stream.start + span.start, stream.start + span.end) if span is not None else None

    def check(self, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """Compare the CRCs of the streams that are zip archives; the others have none."""
        return tuple(
            fact._replace(record=f"{place}:{fact.storage_key}")
            for place, stream in enumerate(self._streams)
            for fact in stream.container.check(jobs)
        )

    def has_checksums(self) -> bool:
        """Whether every stream holds CRCs; pickling a tensor writes a stream without CRCs."""
        return bool(self._streams) and all(stream.container.has_checksums() for stream in self._streams)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The file with new pickles; everything else unchanged."""
        if pickle == self._pickle and not casts:
            return (CopySegment(Span(0, self.source.size)),)
        outer, *inner = _split_pickles(pickle)
        cast: dict[int | None, dict[str, tuple[str, str]]] = {}
        for name, dtypes in casts.items():
            at, key = split_key(name, len(self._streams))
            cast.setdefault(at, {})[key] = dtypes
        shared = shared_streams(self._streams, self._machine)
        new: dict[int, tuple[list[Segment], int]] = {}
        for place, (stream, one) in enumerate(zip(self._streams, inner, strict=True)):
            own = cast.get(place, {})
            if one == stream.container.object_pickle() and not own:
                continue
            if stream.string is None or place in shared:
                detail = _AS_TEXT if stream.string is None else "bytes that are a tensor and another value,"
                raise UneditablePickle(detail, offset=self._outline.file_offset(stream.call.args_start))
            segments = [shifted(segment, stream.start) for segment in stream.container.lay_out(one, own)]
            new[stream.string] = segments, sum(map(length, segments))
        rest = CopySegment(Span(self._outline.end, self.source.size))
        return *self._outline.expand(outer, new.get), rest


def _split_pickles(data: bytes) -> list[bytes]:
    pickles: list[bytes] = []
    begin = 0
    while begin < len(data):
        ends = [end for _, end, _ in operations(data, begin)]
        pickles.append(data[begin : ends[-1]])
        begin = ends[-1]
    return pickles
