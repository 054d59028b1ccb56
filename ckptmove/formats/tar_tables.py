"""Parse the members ``storages`` and ``tensors`` of a tar of torch 0.1: pickles, with raw bytes between them.

The elements of a storage are not read, only their number.

From torch/serialization.py ``legacy_load``, and torch/csrc/serialization.cpp ``THPStorage_readFileRaw``.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive, DamagedPickle, LimitExceeded
from ckptmove.io.part import PartSource
from ckptmove.model import Span
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.stream import read_pickle
from ckptmove.pickles.tree import Global, Sequence, Tuple
from ckptmove.torch_facts.dtypes import ITEM_BYTES, STORAGE_DTYPE

if TYPE_CHECKING:
    from ckptmove.formats.tar_index import TarMember
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value

#: Maximum number of storages, views or tensors: each has a pickle of its own.
_MOST_ENTRIES: Final = 1 << 18
_MOST_AXES: Final = 1000
_COUNT_BYTES: Final = 8
_VIEW_FIELDS: Final = 4


class TarStorage(NamedTuple):
    """A storage; its pickle is ``(key, location, class)``."""

    key: int  # its key: the address at the time of saving
    numel: int  # number of elements
    span: Span  # its bytes in the file
    place: int  # index of its pickle in the member


class TarView(NamedTuple):
    """A storage that is a part of another storage."""

    key: int
    root: int  # key of the other storage
    offset: int  # its first element in the other storage
    numel: int  # number of elements


class TarTensor(NamedTuple):
    """A tensor; its pickle is ``(key, storage, class)``."""

    key: int
    storage: int  # key of its storage, or of a view
    shape: tuple[int, ...]  # sizes, not validated
    stride: tuple[int, ...]  # strides in elements, not validated
    offset: int  # first element in the storage, not validated
    place: int  # index of its pickle in the member


class StorageTable(NamedTuple):
    """Contents of the member ``storages``."""

    #: all of its pickles, in order: the number of storages, one for each, and the list of views.
    pickles: tuple[bytes, ...]
    storages: tuple[TarStorage, ...]
    views: tuple[TarView, ...]
    rest: int  # number of bytes after the last pickle


class TensorTable(NamedTuple):
    """Contents of the member ``tensors``."""

    pickles: tuple[bytes, ...]  # all of its pickles, in order: the number of tensors, and one for each
    tensors: tuple[TarTensor, ...]
    rest: int  # number of bytes after the last tensor


class MemberReader:
    """Reads a member from its beginning, pickle by pickle."""

    def __init__(self, source: ByteSource, member: TarMember, limits: Limits) -> None:
        self.pickles: list[bytes] = []
        self._source = PartSource(source, member.span)
        self._member = member
        self._limits = limits
        self._position = 0
        #: Dangerous names in its pickles.
        self._runs: dict[str, None] = {}

    @property
    def rest(self) -> int:
        """Number of bytes that have not been read."""
        return self._source.size - self._position

    def read_pickle(self) -> bytes:
        """Read the next pickle without interpreting it."""
        data = read_pickle(self._source, self._position, self._limits)
        self.pickles.append(data)
        self._position += len(data)
        return data

    def read_value(self) -> Value:
        """Read and interpret the next pickle."""
        begin = self._position
        try:
            machine = interpret(self.read_pickle(), self._limits)
        except DamagedPickle as error:
            raise self.damage(f"{error.detail} at byte {begin + error.offset}", error.runs) from error
        self._runs |= machine.runs
        return machine.root

    def read_count(self) -> int:
        """Read the number of entries that follow."""
        count = self.read_value()
        if type(count) is not int or count < 0:
            raise self.damage("it does not start with a number")
        limit = self._limits.factor * _MOST_ENTRIES
        if count > limit:
            resource = f"entries of member '{self._member.name}'"
            raise LimitExceeded(resource, limit=limit, actual=count)
        return count

    def read_entry(self, what: str) -> tuple[int, Value, Value]:
        """Read a pickle of three values; the first is a key."""
        root = self.read_value()
        if type(root) is not Tuple or len(root.items) != 3:
            raise self.damage(f"the pickle of a {what} is invalid")
        key, second, third = root.items
        return self.as_key(key), second, third

    def as_key(self, value: Value) -> int:
        """Validate a key: torch writes an address, which is a number."""
        if type(value) is not int or value < 0:
            raise self.damage("a key in it is not a number")
        return value

    def read_raw(self, nbytes: int) -> bytes:
        if nbytes > self.rest:
            raise self.damage("it ends too early")
        begin = self._position
        self._position += nbytes
        return self._source.read(begin, self._position)

    def skip(self, nbytes: int) -> Span:
        """Skip the next bytes, and return their span in the file."""
        if nbytes > self.rest:
            raise self.damage("it ends too early")
        begin = self._member.span.start + self._position
        self._position += nbytes
        return Span(begin, begin + nbytes)

    def damage(self, detail: str, runs: tuple[str, ...] = ()) -> DamagedArchive:
        """An error about the member, with the dangerous names in its pickles so far and in the current one."""
        runs = (*self._runs, *runs)
        return DamagedArchive(self._source.path, f"member '{self._member.name}': {detail}", runs=runs)


def read_storages(source: ByteSource, member: TarMember, limits: Limits) -> StorageTable:
    """Read the member ``storages``."""
    reader = MemberReader(source, member, limits)
    storages: dict[int, TarStorage] = {}
    for _ in range(reader.read_count()):
        place = len(reader.pickles)
        key, location, kind = reader.read_entry("storage")
        dtype = STORAGE_DTYPE.get(kind.name) if type(kind) is Global else None
        if dtype is None or type(location) is not str or key in storages:
            raise reader.damage(f"storage '{key}' has no class or no device, or exists twice")
        numel = int.from_bytes(reader.read_raw(_COUNT_BYTES), "little", signed=True)
        if numel < 0:
            raise reader.damage(f"storage '{key}' has {numel} elements")
        storages[key] = TarStorage(key, numel, reader.skip(numel * ITEM_BYTES[dtype]), place)
    views = _read_views(reader, storages)
    return StorageTable(tuple(reader.pickles), tuple(storages.values()), views, reader.rest)


def _read_views(reader: MemberReader, storages: dict[int, TarStorage]) -> tuple[TarView, ...]:
    """Read the list of ``(key, root, offset, numel)`` after the storages."""
    root = reader.read_value()
    if not isinstance(root, Sequence):
        raise reader.damage("the list of views is invalid")
    views: dict[int, TarView] = {}
    for item in root.items:
        fields = item.items if type(item) is Tuple and len(item.items) == _VIEW_FIELDS else ()
        numbers = [reader.as_key(field) for field in fields]
        view = TarView(*numbers) if numbers else None
        whole = storages.get(view.root) if view is not None else None
        if view is None or whole is None or view.offset + view.numel > whole.numel:
            raise reader.damage("a view in it is not part of a storage")
        if view.key in views or view.key in storages:
            raise reader.damage(f"storage '{view.key}' exists twice")
        views[view.key] = view
    return tuple(views.values())


def read_tensors(source: ByteSource, member: TarMember, limits: Limits) -> TensorTable:
    """Read the member ``tensors``: after each pickle, the number of axes, sizes, strides and offset."""
    reader = MemberReader(source, member, limits)
    tensors: dict[int, TarTensor] = {}
    for _ in range(reader.read_count()):
        place = len(reader.pickles)
        key, storage, _ = reader.read_entry("tensor")
        axes: int = struct.unpack("<i4x", reader.read_raw(8))[0]  # a C long, and torch reads only its lower half
        if not 0 <= axes <= _MOST_AXES or key in tensors:
            raise reader.damage(f"tensor '{key}' has {axes} axes, or exists twice")
        *sizes, offset = struct.unpack(f"<{2 * axes + 1}q", reader.read_raw(8 * (2 * axes + 1)))
        tensors[key] = TarTensor(key, reader.as_key(storage), tuple(sizes[:axes]), tuple(sizes[axes:]), offset, place)
    return TensorTable(tuple(reader.pickles), tuple(tensors.values()), reader.rest)
