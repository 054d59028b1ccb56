"""The tar that ``torch.save`` wrote before 0.1.10: storages, tensors and the saved object in a member each.

Never runs a pickle, never reads a storage, and never makes a file of a member.

From torch/serialization.py ``legacy_load``, which still reads it. The device of a storage stands in a pickle of its own
before the storage's bytes, so there are as many pickles as storages and tensors: they are handed out in a row.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.errors import DamagedArchive
from ckptmove.formats.contract import Container
from ckptmove.formats.merge_pickles import merge, replace_nodes
from ckptmove.formats.tar_index import padded, read_members, resized_header
from ckptmove.formats.tar_tables import MemberReader, read_storages, read_tensors
from ckptmove.io.cast import SHRINK
from ckptmove.io.contracts import BytesSegment, CastSegment, CopySegment
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.script import split_parts
from ckptmove.pickles.tree import Call, Global, Persistent, Tuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.formats.tar_index import TarMember
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName, StorageRef
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

MEMBERS: Final = ("sys_info", "pickle", "tensors", "storages")
_KEY_DIGITS: Final = 20
#: What stands behind the archive is zeros: so much of it is looked at.
_TAIL_BYTES: Final = 1 << 20


class _Change(NamedTuple):
    """New bytes in the place of some of the file's.

    Attributes:
        span: where those lie.
        segment: the new ones.
        nbytes: their number.
    """

    span: Span
    segment: Segment
    nbytes: int


class TorchTar(Container):
    """A checkpoint of ``torch.save`` before 0.1.10.

    Attributes:
        name: ``torch-tar``.
        source: its bytes.
        byteorder: ``little``, whatever its ``sys_info`` says: torch does not look at it.
    """

    name: ContainerName = "torch-tar"
    weights_only = False
    not_weights_only = "it is a tar of torch 0.1, and weights-only mode reads none since torch 2.6"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> TorchTar:
        """Open a file of this format."""
        del directory
        return cls(source, limits)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        """Read the headers, and the members but for the bytes of the storages.

        Raises:
            DamagedArchive: it is no sound tar, or its members are not those that torch writes.
            DamagedPickle: the object pickle is cut off.
            LimitExceeded: it asks for more than the limits allow.
        """
        self.source, self.limits = source, limits
        members = read_members(source, limits)
        self._end = padded(members[-1].span.end) if members else 0
        self._members = self._own(members)
        self._others = tuple(member for member in members if member.name not in MEMBERS)
        reader = MemberReader(source, self._members["pickle"], limits)
        reader.read_pickle()
        self._storages = read_storages(source, self._members["storages"], limits)
        self._tensors = read_tensors(source, self._members["tensors"], limits)
        self._rests = {"pickle": reader.rest, "storages": self._storages.rest, "tensors": self._tensors.rest}
        self._pickles = (*reader.pickles, *self._storages.pickles, *self._tensors.pickles)
        self._spans = {str(storage.key): storage.span for storage in self._storages.storages}

    def object_pickle(self) -> bytes:
        """The pickle of the saved object, and behind it those of the storages and those of the tensors."""
        return b"".join(pickle.data for pickle in self._pickles)

    def read(self) -> Machine:
        """The machine that has read all pickles: its tree is the saved object, storages and tensors in their places.

        Raises:
            DamagedPickle: the object pickle is none.
            DamagedArchive: it names a storage or a tensor that is not in the other members.
            LimitExceeded: one of the pickles asks for more than the limits allow.
        """
        data = self.object_pickle()
        machine = interpret(data, self.limits)
        named = [*machine.persistents]
        roots: list[Value] = []
        for begin in accumulate(len(pickle.data) for pickle in self._pickles[:-1]):
            inner = interpret(data, self.limits, begin, machine.excess)
            roots.append(inner.root)
            merge(machine, inner)
        storages, tensors = roots[: len(self._storages.pickles)], roots[len(self._storages.pickles) :]
        known = self._known(storages, tensors)
        new: dict[int, Value] = {}
        for node in named:
            pid = node.pid
            if type(pid) is Tuple:  # a class and its source: `Persistent.module` knows it by the word of later files
                node.pid = Tuple(("module", *pid.items), (-1, *pid.starts))
            else:
                new[id(node)] = self._lookup(pid, known)
        replace_nodes(machine, new)
        machine.persistents = [node for node in known.values() if type(node) is Persistent]
        return machine

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """What stands in the file besides what torch reads; where the storages lie is known.

        Args:
            storages: every storage that the pickles name.
        """
        facts = [ArchiveFact("missing-storage", one.key, one.nbytes) for one in storages if one.key not in self._spans]
        facts += [
            ArchiveFact("orphan-record", f"what follows the last pickle of '{name}'", rest)
            for name, rest in self._rests.items()
            if rest
        ]
        facts += [ArchiveFact("orphan-record", member.name, member.span.nbytes) for member in self._others]
        rest = self.source.size - self._end
        tail = self.source.read(self._end, min(self._end + _TAIL_BYTES, self.source.size))
        if len(tail) < rest or tail.strip(b"\0"):
            facts.append(ArchiveFact("orphan-record", "what follows the last member", rest))
        return tuple(facts)

    def storage_span(self, key: str) -> Span | None:
        """Where a storage's bytes lie in the source; None where it has none."""
        return self._spans.get(key)

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The file with other pickles in the places of its own, all else as it is.

        Args:
            pickle: the new pickles, as many as :meth:`object_pickle` gives.
            casts: storages by key that change dtype: before and after. Their counts of elements stay.

        Raises:
            DamagedArchive: a storage that is to be cast is not there.
        """
        new = [
            _Change(old.span, BytesSegment(data), len(data))
            for old, data in zip(self._pickles, split_parts(pickle, len(self._pickles)), strict=True)
            if data != old.data
        ]
        for key, (source, target) in casts.items():
            span = self._spans.get(key)
            if span is None:
                raise DamagedArchive(self.source.path, f"storage '{key:.40}' has no bytes that could be cast")
            segment = CastSegment(span, source, target, self.byteorder, None)
            new.append(_Change(span, segment, span.nbytes // SHRINK))
        for member in self._members.values():
            new += self._resized(member, [one for one in new if _is_in(one.span, member.span)])
        segments: list[Segment] = []
        position = 0
        for change in sorted(new, key=lambda one: (one.span.start, one.span.end)):
            segments += CopySegment(Span(position, change.span.start)), change.segment
            position = change.span.end
        return *segments, CopySegment(Span(position, self.source.size))

    def _resized(self, member: TarMember, changes: Sequence[_Change]) -> tuple[_Change, ...]:
        """The header of a member and what fills its last block, where its length changes."""
        growth = sum(change.nbytes - change.span.nbytes for change in changes)
        if growth == 0:
            return ()
        nbytes = member.span.nbytes + growth
        header = resized_header(self.source.read(member.header.start, member.header.end), nbytes)
        filling = bytes(padded(nbytes) - nbytes)
        after = Span(member.span.end, padded(member.span.end))
        return (
            _Change(member.header, BytesSegment(header), len(header)),
            _Change(after, BytesSegment(filling), len(filling)),
        )

    def _own(self, members: tuple[TarMember, ...]) -> dict[str, TarMember]:
        """The members that torch writes, by name."""
        found: dict[str, TarMember] = {}
        for member in members:
            if member.name in MEMBERS:
                if member.name in found:
                    raise DamagedArchive(self.source.path, f"member '{member.name}' stands in it twice")
                if member.kind != "file":
                    raise DamagedArchive(self.source.path, f"member '{member.name}' is no file, but: {member.kind}")
                found[member.name] = member
        for name in MEMBERS[1:]:  # nobody reads the first
            if name not in found:
                raise DamagedArchive(self.source.path, f"a tar of torch 0.1 without its member '{name}'")
        return found

    def _known(self, storages: Sequence[Value], tensors: Sequence[Value]) -> dict[int, Value]:
        """What each key stands for, as the pickles of later files would write it.

        Args:
            storages: what the pickles of the member ``storages`` stand for; the starts in them are offsets in the run.
            tensors: likewise.
        """
        ids: dict[int, Tuple] = {}
        for storage in self._storages.storages:
            _, location, kind = _entry(storages[storage.place]).items
            key_start, location_start, kind_start = _entry(storages[storage.place]).starts
            items = "storage", kind, str(storage.key), location, storage.numel
            ids[storage.key] = Tuple(items, (-1, kind_start, key_start, location_start, -1))
        for view in self._storages.views:
            part = Tuple((str(view.key), view.offset, view.numel), (-1, -1, -1))
            ids[view.key] = Tuple((*ids[view.root].items, part), (*ids[view.root].starts, -1))
        known: dict[int, Value] = {key: Persistent(pid, -1) for key, pid in ids.items()}
        rebuild = Global("torch._utils", "_rebuild_tensor")
        for tensor in self._tensors.tensors:
            pid = ids.get(tensor.storage)
            if pid is None or tensor.key in known:
                detail = f"tensor '{tensor.key}' is in no storage that it has, or has the key of another"
                raise DamagedArchive(self.source.path, detail)
            shape, stride = (Tuple(sizes, (-1,) * len(sizes)) for sizes in (tensor.shape, tensor.stride))
            args = Tuple((Persistent(pid, -1), tensor.offset, shape, stride), (-1, -1, -1, -1))
            known[tensor.key] = Call(rebuild, args, _entry(tensors[tensor.place]).starts[0])
        return known

    def _lookup(self, pid: Value, known: Mapping[int, Value]) -> Value:
        """What a persistent id stands for: the key of a tensor or of a storage, in digits."""
        text = str(pid) if type(pid) is int else pid
        if (
            type(text) is str
            and text.isascii()
            and text.isdecimal()
            and len(text) <= _KEY_DIGITS
            and int(text) in known
        ):
            return known[int(text)]
        name = repr(text)[:40] if isinstance(text, str) else "what is no key"
        raise DamagedArchive(self.source.path, f"its object pickle names {name}, which no other member has")


def _entry(value: Value) -> Tuple:
    """What the pickle of a storage or of a tensor stands for: the tables have seen it to be a tuple."""
    return cast("Tuple", value)


def _is_in(span: Span, whole: Span) -> bool:
    return whole.start <= span.start and span.end <= whole.end
