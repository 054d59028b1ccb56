"""A bare pickle, as ``pickle.dump`` writes it: its tensors are streams of ``torch.save`` inside of the pickle.

Never runs it, and never reads the bytes of a tensor or an array.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive, DamagedPickle, UneditablePickle
from ckptmove.formats.contract import Container
from ckptmove.formats.nested_streams import find_streams, graft, name_long_keys, opened_calls, shared_streams
from ckptmove.formats.pickle_outline import read_outlines
from ckptmove.io.contracts import CopySegment
from ckptmove.io.segments import length, shifted
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import operations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.formats.pickle_outline import PickleOutline
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName, StorageRef
    from ckptmove.pickles.state import Machine

_BLOCK: Final = 1 << 20
_AS_TEXT: Final = "tensors written as text, as pickle protocols 0 to 2 write bytes,"


class BarePickle(Container):
    """A file of ``pickle.dump``.

    Attributes:
        name: ``pickle``.
        source: its bytes.
        byteorder: of the elements of its storages: that of the streams in it, ``little`` without any.
    """

    name: ContainerName = "pickle"
    loader = "pickle.load"
    weights_only = None

    @classmethod
    def load_call(cls, file: str) -> str:
        """Python that loads a file on the CPU."""
        return f"pickle.load(open({file}, 'rb')"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> BarePickle:
        """Open a file of this format."""
        del directory
        return cls(source, limits)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        """Read the pickle, and those of the streams in it.

        Raises:
            DamagedPickle: one of them is none.
            DamagedArchive: a stream is none of torch's.
            LimitExceeded: they ask for more than the limits allow.
        """
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
        graft(self._machine, self._streams, limits)
        self.opened = opened_calls(self._machine)
        name_long_keys(self._machine.root, self._outline)
        self._note_rest(outlines)
        self._pickle = self._machine.data
        self.byteorder = next((stream.container.byteorder for stream in self._streams), "little")

    def _note_rest(self, outlines: Iterator[PickleOutline]) -> None:
        """Remember the names in the pickles that follow: who calls ``pickle.load`` again runs them.

        What follows may be anything: the names before the first damage count.
        """
        try:
            for outline in outlines:
                machine = interpret(outline.data, self.limits)
                graft(machine, find_streams(machine.root, outline, self.source, self.limits), self.limits)
                self.opened &= opened_calls(machine)
                self._machine.note_names(machine)
        except (DamagedPickle, DamagedArchive) as error:
            for name in error.runs:
                self._machine.globals.setdefault(name, 0)

    def read(self) -> Machine:
        """The machine that has read :meth:`object_pickle`, the storages of the streams in the places of their calls."""
        return self._machine

    def object_pickle(self) -> bytes:
        """The pickle without its long strings, and behind it the object pickles of the streams in it."""
        return self._pickle

    def extras(self) -> Iterator[tuple[str, bytes]]:
        """The long strings that are no streams, in the order of the file: only marks of them stand in the tree."""
        streams = {stream.string for stream in self._streams}
        for place, string in enumerate(self._outline.strings):
            if place not in streams:
                digest = hashlib.sha256()
                for block in self.source.blocks(string.span, _BLOCK):
                    digest.update(block)
                yield f"long string {place}", digest.digest()

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Find the bytes of the storages in the streams.

        Args:
            storages: every storage by the place of its stream and the key that it has there, ``0:KEY``.

        Raises:
            DamagedArchive: as the streams.
        """
        own: list[list[StorageRef]] = [[] for _ in self._streams]
        facts: list[ArchiveFact] = []
        for storage in storages:
            at, key = self._split(storage.key)
            if at is None:
                facts.append(ArchiveFact("missing-storage", storage.key, storage.nbytes))
            else:
                own[at].append(storage._replace(key=key))
        for place, (stream, named) in enumerate(zip(self._streams, own, strict=True)):
            # Deflated bytes deceive who maps a file, and nobody maps a stream inside of a pickle.
            found = [fact for fact in stream.container.locate(named) if fact.kind != "compressed-storage"]
            facts += [replace(fact, record=f"{place}:{fact.storage_key}") for fact in found]
            if stream.string is None:
                facts += [ArchiveFact("encoded-storage", f"{place}:{storage.key}", storage.nbytes) for storage in named]
        if self._outline.end < self.source.size:
            rest = self.source.size - self._outline.end
            facts.append(ArchiveFact("orphan-record", "what follows the pickle", rest))
        return tuple(facts)

    def storage_span(self, key: str) -> Span | None:
        """Where a storage's bytes lie in the source; None where they are not there, or written as text."""
        place, inner = self._split(key)
        if place is None or self._streams[place].string is None:
            return None
        stream = self._streams[place]
        span = stream.container.storage_span(inner)
        return Span(stream.start + span.start, stream.start + span.end) if span is not None else None

    def check(self) -> tuple[ArchiveFact, ...]:
        """Compare the CRCs of the streams that have any: those that are zip archives."""
        return tuple(
            replace(fact, record=f"{place}:{fact.storage_key}")
            for place, stream in enumerate(self._streams)
            for fact in stream.container.check()
        )

    def has_checksums(self) -> bool:
        """Whether every stream holds CRCs; those that pickling a tensor makes hold none."""
        return bool(self._streams) and all(stream.container.has_checksums() for stream in self._streams)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The file with other pickles in the places of its own, all else as it is.

        Args:
            pickle: the new pickles, as many as :meth:`object_pickle` gives.
            casts: storages by key that change dtype: before and after.

        Raises:
            DamagedArchive: as the streams.
            UneditablePickle: a stream would have to change that is written as text, or read back as bytes.
        """
        if pickle == self._pickle and not casts:
            return (CopySegment(Span(0, self.source.size)),)
        outer, *inner = _split_pickles(pickle)
        cast: dict[int | None, dict[str, tuple[str, str]]] = {}
        for name, dtypes in casts.items():
            at, key = self._split(name)
            cast.setdefault(at, {})[key] = dtypes
        shared = shared_streams(self._streams, self._machine)
        new: dict[int, tuple[list[Segment], int]] = {}
        for place, (stream, one) in enumerate(zip(self._streams, inner, strict=True)):
            own = cast.get(place, {})
            if one == stream.container.object_pickle() and not own:
                continue
            if stream.string is None or place in shared:
                detail = _AS_TEXT if stream.string is None else "the bytes of a tensor with another use"
                raise UneditablePickle(detail, offset=self._outline.file_offset(stream.call.args_start))
            segments = [shifted(segment, stream.start) for segment in stream.container.lay_out(one, own)]
            new[stream.string] = segments, sum(map(length, segments))
        rest = CopySegment(Span(self._outline.end, self.source.size))
        return *self._outline.expand(outer, new.get), rest

    def _split(self, key: str) -> tuple[int | None, str]:
        """The place of a stream, None where there is no such stream, and the key of a storage in it."""
        place, _, inner = key.partition(":")
        known = place.isdecimal() and place.isascii() and int(place) < len(self._streams)
        return int(place) if known else None, inner


def _split_pickles(data: bytes) -> list[bytes]:
    """Pickles that lie one after another."""
    pickles: list[bytes] = []
    begin = 0
    while begin < len(data):
        ends = [end for _, end, _ in operations(data, begin)]
        pickles.append(data[begin : ends[-1]])
        begin = ends[-1]
    return pickles
