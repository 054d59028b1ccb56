"""Read the tar that ``torch.save`` wrote before 0.1.10: members for storages, tensors and the saved object.

The bytes of storages are not read, and no member is extracted.

From torch/serialization.py ``legacy_load``, which still reads it. Each storage has a pickle with its device, before its
bytes: the file holds as many pickles as storages and tensors.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, cast

from ckptmove.errors import DamagedArchive
from ckptmove.formats.contract import Container, ReadOnlyFormat
from ckptmove.formats.replaced_values import replace_nodes
from ckptmove.formats.tar_index import padded, read_members
from ckptmove.formats.tar_tables import MemberReader, read_storages, read_tensors
from ckptmove.io.contracts import CopySegment
from ckptmove.io.part import PartSource
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.build import new_tuple
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import Call, Global, Persistent, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.formats.tar_index import TarMember
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import StorageRef
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

MEMBERS: Final = ("sys_info", "pickle", "tensors", "storages")
_KEY_DIGITS: Final = 20
#: Only zeros may follow the archive: up to this number of bytes is checked.
_TAIL_BYTES: Final = 1 << 20
_TAIL: Final = "bytes after the last member"


class TorchTar(Container):
    """A checkpoint of ``torch.save`` before 0.1.10; little-endian: torch ignores the byte order in ``sys_info``."""

    name = "torch-tar"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> TorchTar:
        return cls(source, limits)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        """Read the headers and the members, without the bytes of the storages."""
        self.source, self.limits = source, limits
        members = read_members(source, limits)
        self._end = padded(members[-1].span.end) if members else 0
        self._members = self._torch_members(members)
        self._others = tuple(member for member in members if member.name not in MEMBERS)
        reader = MemberReader(source, self._members["pickle"], limits)
        reader.read_pickle()
        self._storages = read_storages(source, self._members["storages"], limits)
        self._tensors = read_tensors(source, self._members["tensors"], limits)
        self._rests = {"pickle": reader.rest, "storages": self._storages.rest, "tensors": self._tensors.rest}
        self._pickles = (*reader.pickles, *self._storages.pickles, *self._tensors.pickles)
        self._spans = {str(storage.key): storage.span for storage in self._storages.storages}

    def object_pickle(self) -> bytes:
        """The pickle of the saved object, followed by those of the storages and those of the tensors."""
        return b"".join(self._pickles)

    def read(self) -> Machine:
        """Interpret all pickles: the tree is the saved object, with its storages and tensors in their places."""
        data = self.object_pickle()
        machine = interpret(data, self.limits)
        named = [*machine.persistents]
        roots: list[Value] = []
        for begin in accumulate(map(len, self._pickles[:-1])):
            inner = interpret(data, self.limits, begin, machine.excess)
            roots.append(inner.root)
            machine.merge(inner)
        storages, tensors = roots[: len(self._storages.pickles)], roots[len(self._storages.pickles) :]
        known = self._nodes_by_key(storages, tensors)
        new: dict[int, Value] = {}
        for node in named:
            pid = node.pid
            if type(pid) is Tuple:  # a class and its source: `Persistent.module` expects the tag of later files
                node.pid = Tuple(("module", *pid.items), (-1, *pid.starts))
            else:
                new[id(node)] = self._lookup(pid, known)
        replace_nodes(machine, new)
        machine.persistents = [node for node in known.values() if type(node) is Persistent]
        return machine

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Missing storages, and bytes of the file that torch does not read."""
        facts = [ArchiveFact("missing-storage", one.key, one.nbytes) for one in storages if one.key not in self._spans]
        facts += [ArchiveFact("orphan-record", name, source.size) for name, source in self._ends()]
        facts += [ArchiveFact("orphan-record", member.name, member.span.nbytes) for member in self._others]
        rest = self.source.size - self._end
        tail = self.source.read(self._end, min(self._end + _TAIL_BYTES, self.source.size))
        if len(tail) < rest or tail.strip(b"\0"):
            facts.append(ArchiveFact("orphan-record", _TAIL, rest))
        return tuple(facts)

    def strays(self) -> tuple[tuple[str, Span], ...]:
        return ((_TAIL, Span(self._end, self.source.size)),) if self._end < self.source.size else ()

    def apart(self) -> Iterator[tuple[str, ByteSource]]:
        yield from self._ends()
        yield from ((one.name, PartSource(self.source, one.span)) for one in self._others if one.kind == "file")

    def _ends(self) -> Iterator[tuple[str, ByteSource]]:
        """The bytes after the last pickle of each member."""
        for name, rest in self._rests.items():
            if rest:
                end = self._members[name].span.end
                yield f"bytes after the last pickle of '{name}'", PartSource(self.source, Span(end - rest, end))

    def storage_span(self, key: str) -> Span | None:
        return self._spans.get(key)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The same file."""
        if casts or pickle != self.object_pickle():
            raise ReadOnlyFormat(self.source.path, self.name)
        return (CopySegment(Span(0, self.source.size)),)

    def _torch_members(self, members: tuple[TarMember, ...]) -> dict[str, TarMember]:
        found: dict[str, TarMember] = {}
        for member in members:
            if member.name in MEMBERS:
                if member.name in found:
                    raise DamagedArchive(self.source.path, f"it has two members '{member.name}'")
                if member.kind != "file":
                    raise DamagedArchive(self.source.path, f"member '{member.name}' is not a file, but: {member.kind}")
                found[member.name] = member
        for name in MEMBERS[1:]:  # torch does not read the first
            if name not in found:
                raise DamagedArchive(self.source.path, f"a tar of torch 0.1 without its member '{name}'")
        return found

    def _nodes_by_key(self, storages: Sequence[Value], tensors: Sequence[Value]) -> dict[int, Value]:
        """Storages and tensors by key, as the pickles of later files would write them."""
        ids: dict[int, Tuple] = {}
        for storage in self._storages.storages:
            _, location, kind = _entry(storages[storage.place]).items
            key_start, location_start, kind_start = _entry(storages[storage.place]).starts
            items = "storage", kind, str(storage.key), location, storage.numel
            ids[storage.key] = Tuple(items, (-1, kind_start, key_start, location_start, -1))
        for view in self._storages.views:
            part = new_tuple(str(view.key), view.offset, view.numel)
            ids[view.key] = Tuple((*ids[view.root].items, part), (*ids[view.root].starts, -1))
        known: dict[int, Value] = {key: Persistent(pid, -1) for key, pid in ids.items()}
        rebuild = Global("torch._utils", "_rebuild_tensor")
        for tensor in self._tensors.tensors:
            pid = ids.get(tensor.storage)
            if pid is None or tensor.key in known:
                detail = f"tensor '{tensor.key}' has an unknown storage, or the key of another one"
                raise DamagedArchive(self.source.path, detail)
            shape, stride = new_tuple(*tensor.shape), new_tuple(*tensor.stride)
            args = new_tuple(Persistent(pid, -1), tensor.offset, shape, stride)
            known[tensor.key] = Call(rebuild, args, _entry(tensors[tensor.place]).starts[0])
        return known

    def _lookup(self, pid: Value, known: Mapping[int, Value]) -> Value:
        """The node for a persistent id: the key of a tensor or of a storage, in digits."""
        text = str(pid) if type(pid) is int else pid
        if (
            type(text) is str
            and text.isascii()
            and text.isdecimal()
            and len(text) <= _KEY_DIGITS
            and int(text) in known
        ):
            return known[int(text)]
        name = repr(text)[:40] if isinstance(text, str) else "an object instead of a key"
        raise DamagedArchive(self.source.path, f"its object pickle names {name}, which is not in the other members")


def _entry(value: Value) -> Tuple:
    """The tuple in the pickle of a storage or of a tensor; ``read_entry`` has checked the type."""
    return cast("Tuple", value)
