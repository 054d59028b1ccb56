"""One part of an open checkpoint: its inventory, its tree, and the bytes of its storages."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, cast

from ckptmove.checkpoint.naming import naming
from ckptmove.errors import (
    AccessFailed,
    ArchiveOfFiles,
    CrcMismatch,
    DamagedArchive,
    DamagedPickle,
    DistributedFile,
    LimitExceeded,
    MustBeUnpacked,
    NotACheckpoint,
    SourceChanged,
    UnreadableInput,
    UnsupportedContainer,
)
from ckptmove.formats.facts import facts_of
from ckptmove.formats.opening import container_of
from ckptmove.io.part import CountedSource
from ckptmove.pickles.collector import collector_paused
from ckptmove.pickles.compact_memo import NeedsEveryOperation
from ckptmove.torch_facts.dtypes import ITEM_BYTES
from ckptmove.torch_facts.verdicts import classify

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.checkpoint.inventory.budget import Budget
    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.open_files import OpenFiles
    from ckptmove.formats.bare_pickle import BarePickle
    from ckptmove.formats.chunks import Chunk
    from ckptmove.formats.contract import Container
    from ckptmove.formats.dcp.metadata import DistributedMetadata
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.io.source import DiskPlace
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.lazy.tensor import LazyTensor
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, Inventory, Span, TensorRecord
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

#: What a tree is for: an edit; building its objects; the same, next to an inventory of the storages alone; or the
#: inventory, after which it is kept only if weights-only mode refuses it, to find out what helps.
TreeUse: TypeAlias = Literal["edit", "build", "objects", "inventory"]
#: Codes of ``struct`` for the dtypes of step counts and learning rates.
_FORMATS: Final = {"float16": "e", "float32": "f", "float64": "d", "int32": "i", "int64": "q"}
#: Kinds of tensors whose value is their element.
_PLAIN: Final = frozenset({"tensor", "parameter"})

#: Message of ``MissingShard`` for files that each rank writes.
RANKS_MISSING: Final = "files of other ranks are missing"


class OpenPart(ABC):
    """A file, an archive member or a distributed checkpoint: one part of an open checkpoint, or all of it.

    Attributes:
        name: its path from the top of the checkpoint, which begins its names and keys; empty for the whole.
        path: the same as users see it.
        inventory: its content, with the names, keys and sites of the whole checkpoint.
        rows: its files, for the table of files; none if the checkpoint is one file.
        is_distributed: whether it is a folder of torch.distributed.checkpoint, which stores less about objects that
            are not tensors.
        is_assembled: whether its tensors are assembled from several files.
        base: offset that was added to its sites.
        byteorder: ``little`` or ``big``: byte order of its storages.
        disk: place of its bytes; None if they are in several places or compressed.
        placeholder: prefix of strings in the tree that represent one of the extras; empty without extras.
        pickle_bytes: size of the pickle that its sites refer to.
        missing: paths of missing files that had shards of its tensors.
        members: its files that ranks have saved, each a checkpoint of its own, by path.
        metadata: its `.metadata`, if `torch.distributed.checkpoint.load` can load it; else None.
    """

    name: str
    path: str
    inventory: Inventory
    rows: tuple[FileRecord, ...]
    is_distributed = False
    is_assembled = False
    base: int
    byteorder: str
    disk: DiskPlace | None = None
    placeholder: str = ""
    pickle_bytes: int
    missing: tuple[str, ...] = ()
    members: Mapping[str, FilePart] = MappingProxyType({})
    metadata: DistributedMetadata | None = None
    _limits: Limits

    @property
    @abstractmethod
    def has_checksums(self) -> bool:
        """Whether its bytes can be compared with CRCs."""

    @abstractmethod
    def close(self) -> None:
        """Free its tree."""

    @property
    def differing(self) -> Sequence[str]:
        """Names of tensors that each of its files has, and that are not the same in all: those of the first count."""
        return ()

    def chunks(self, key: str) -> Sequence[Chunk]:
        """The parts of a tensor that are stored apart; none if its storage is in one file."""
        del key
        return ()

    @abstractmethod
    def span(self, key: str) -> Span | None:
        """Span of a storage in the part; None if bytes are missing or encoded."""

    @abstractmethod
    def storage(self, key: str) -> StoredBytes | None:
        """Bytes of a storage; None if some are missing or encoded."""

    @abstractmethod
    def tree(self) -> Value:
        """Root of the saved object. It may be read again on each call, because the part may not keep it."""

    def whole_tree(self) -> Value:
        """As :meth:`tree`, with the strings that its placeholders represent."""
        return self.tree()

    def forget_tensors(self) -> None:
        """Free the records of its tensors."""
        self.inventory = replace(self.inventory, tensors=(), optimizers=())

    def outline(self) -> tuple[OutlineLine, ...]:
        """Outline of its tree."""
        from ckptmove.checkpoint.inventory.outline import outline

        return outline(self.tree(), self._limits, self.pickle_bytes)

    @abstractmethod
    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """All facts about its bytes, after comparing every record with its CRC.

        Args:
            progress: called with the bytes done so far and the total.
            jobs: number of threads that read a local file.
        """

    @abstractmethod
    def budget(self) -> Budget:
        """A new budget for one walk over the tree."""

    @abstractmethod
    def extras(self) -> Mapping[str, bytes]:
        """SHA-256 of each content outside the tree and the storages, by its name in the part."""

    def lost(self) -> tuple[str, ...]:
        """Names in the part of objects, other than tensors, whose bytes are missing; a file does not list them."""
        return ()

    def represents_extra(self, shown: str) -> bool:
        """Whether a value of the tree, as shown, represents one of the extras."""
        return bool(self.placeholder) and self.placeholder in shown

    @property
    def is_file(self) -> bool:
        """Whether its path can be opened: it is not a folder and not a member of an archive."""
        return self.disk is not None and self.disk.path == self.path

    @property
    def is_remote(self) -> bool:
        """Whether it is a file of a server that is still open."""
        return False

    def elements(self, record: TensorRecord) -> LazyTensor | None:
        """Elements of a dense tensor; None if bytes are missing or encoded."""
        from ckptmove.lazy.stored import stored_tensor

        key = self.own_key(record)
        storage = None if key is None else self.storage(key)
        return None if storage is None else stored_tensor(storage, record)

    def number(self, record: TensorRecord) -> float | None:
        """Read a tensor of one element; None if it is another tensor or cannot be read."""
        letter = _FORMATS.get(record.dtype)
        if letter is None or prod(record.shape) != 1 or record.kind not in _PLAIN:
            return None
        if self.disk is None and not (self.is_assembled or self.is_remote):
            return None  # a compressed member of an archive would be inflated again
        data = bytearray(ITEM_BYTES[record.dtype])
        try:
            found = self.elements(record)
            if found is not None:
                found.read_into(0, memoryview(data))
        except (UnreadableInput, LimitExceeded):
            return None
        return None if found is None else float(struct.unpack(f"={letter}", data)[0])

    def why_not(self, record: TensorRecord) -> str:
        """Why :meth:`elements` returns None for a tensor."""
        kind = self._kinds.get(record.storage or "")
        if kind == "encoded-storage":
            return f"written as text in {self.path}, as pickle protocols 0 to 2 write bytes"
        if kind == "compressed-storage":
            return f"compressed in {self.path}: convert stores it uncompressed"
        return f"missing or cut off in {self.path}"

    def full_name(self, name: str) -> str:
        """Name in the whole checkpoint, from a name in the part."""
        return f"{self.name}.{name}" if self.name else name

    def own_name(self, name: str) -> str:
        """Name or storage key in the part, from one in the whole checkpoint."""
        return name[len(self.name) + 1 :] if self.name else name

    def own_key(self, record: TensorRecord) -> str | None:
        """Key in the part of the storage that a tensor views."""
        return None if record.storage is None else self.own_name(record.storage)

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """Kinds of the facts about storages, by key."""
        return {fact.storage_key: fact.kind for fact in self.inventory.facts}


class FileContent(NamedTuple):
    """A checkpoint file that was read."""

    container: Container
    #: machine that has read its object pickle; for a format without one, it holds the equivalent tree. None if only
    #: the inventory was needed.
    machine: Machine | None
    inventory: Inventory  # its inventory, with the names, keys and sites of the file
    pickle_bytes: int  # length of the pickle that its sites refer to
    nbytes: int  # length of its pickles, which limits the walks over its tree


def read_file(source: ByteSource, limits: Limits, *, tree: TreeUse = "edit") -> FileContent:
    """Read a checkpoint file, without the bytes of its tensors.

    Only a tree to edit has the sites of the storages, and no plain tensors; others take less time and memory.
    """
    with naming_dangers(source, limits):
        try:
            container = container_of(source, limits)
        except DamagedArchive as error:
            if source.path.endswith(".distcp"):  # between its archives, objects may have written their own bytes
                raise DistributedFile(source.path) from error
            raise
        if container.name == "torch-zip" and source.path.endswith(".distcp"):
            raise DistributedFile(source.path)  # a file of one piece looks like any other torch.save
        with collector_paused():
            # Without devices, a load edits the tree.
            if tree == "inventory" or (tree != "edit" and facts_of(container.name).has_devices):
                # Damage is reported as by the reading of every operation.
                with suppress(DamagedPickle, NeedsEveryOperation):
                    return _content(container, container.read_compact(), limits, tree)
            return _content(container, container.read(), limits, "edit")


#: Errors of a file whose bytes another reader may accept.
_REFUSED: Final = (
    CrcMismatch, DamagedArchive, DamagedPickle, LimitExceeded, MustBeUnpacked, NotACheckpoint, UnsupportedContainer,
)  # fmt: skip


@contextmanager
def naming_dangers(source: ByteSource, limits: Limits) -> Iterator[None]:
    """Add to the error of a file that is refused what more lenient readers of it may run."""
    try:
        yield
    except ArchiveOfFiles:
        raise
    except _REFUSED as error:
        if not (source.is_remote and isinstance(error, NotACheckpoint)):  # it would take requests for each text
            error.warn(dangerous_names(source, limits))
        raise


def dangerous_names(source: ByteSource, limits: Limits) -> tuple[str, ...]:
    """Dangerous names in a file that was refused, which more lenient readers may run."""
    from ckptmove.formats.salvage import Salvage

    salvage = Salvage(limits)
    try:
        salvage.read(source, source.path)
    except (SourceChanged, AccessFailed):
        return ()  # the error that is raised says more
    return (*salvage.machine.runs,)


def _content(container: Container, machine: Machine, limits: Limits, tree: TreeUse) -> FileContent:
    is_kept = (
        tree != "inventory"
        or bool(machine.foreign or machine.filled)
        or not all(classify(name).weights_only for name in machine.globals)
    )
    if tree == "objects" and facts_of(container.name).has_devices:
        from ckptmove.checkpoint.inventory.storages import storage_inventory

        inventory = storage_inventory(container, machine)
    else:
        from ckptmove.checkpoint.inventory.build import build_inventory

        inventory = build_inventory(container, machine, limits, keep_tree=is_kept)
    kept = machine if is_kept else None
    return FileContent(container, kept, inventory, machine.data_bytes, machine.end - machine.begin)


class FilePart(OpenPart):
    """A checkpoint file, or a member of an archive.

    Attributes:
        has_own_checksums: whether the file itself has CRCs.
    """

    def __init__(self, content: FileContent, limits: Limits, disk: DiskPlace | None) -> None:
        """Hold a file that was read, as a whole checkpoint."""
        container, machine, self.inventory, self.pickle_bytes, nbytes = content
        self.name, self.path, self.base, self.rows = "", container.source.path, 0, ()
        self.byteorder, self.placeholder, self.disk = container.byteorder, container.placeholder, disk
        self.has_own_checksums = container.has_checksums()
        self._limits = limits
        self._budget = container.limits, nbytes
        self._held: tuple[Container, Machine | None] | None = (container, machine)
        self._files: OpenFiles | None = None
        self._few_spans: dict[str, Span | None] = {}

    def put_into(self, files: OpenFiles, inventory: Inventory, base: int, row: FileRecord) -> None:
        """Make it a part of a checkpoint of several files."""
        self._files, self.inventory, self.base = files, inventory, base
        self.name, self.rows = row.path, (row,)

    def drop(self) -> None:
        """Close the file and free its tree: the trees of thousands of files do not fit into memory.

        Only the spans of its storages stay, and those of a remote file not even: each may cost a request. Anything else
        is read again when needed.
        """
        if not self.source.is_remote:
            self._spans  # noqa: B018  # computed while the container is open
        self.close()

    def close(self) -> None:
        if self._held is not None:
            self._held[0].source.close()
            self._held = None

    @contextmanager
    def content(self) -> Iterator[tuple[Container, Machine]]:
        """The container, ready to lay out a new file, and the machine; read again if they were dropped."""
        if self._held is not None:
            container, machine = self._held
            yield container, machine or container.read()
            return
        source = cast("OpenFiles", self._files).listing.open(self.name)  # only a file of several is dropped
        try:
            with collector_paused():
                container = container_of(source, self._limits)
                machine = container.read()
            container.locate([one._replace(key=self.own_name(one.key)) for one in self.inventory.storages])
            yield container, machine
        finally:
            source.close()

    @contextmanager
    def _container(self) -> Iterator[Container]:
        if self._held is not None:
            yield self._held[0]
        else:
            with self.content() as (container, _):
                yield container

    @property
    def has_checksums(self) -> bool:
        """Whether the file, or the archive for its member, has CRCs."""
        return self.has_own_checksums or (self._files is not None and self._files.listing.has_checksums)

    @property
    def source(self) -> ByteSource:
        """Its bytes, until the checkpoint is closed."""
        return self._held[0].source if self._held is not None else self._reopened

    @property
    def is_remote(self) -> bool:
        return self._held is not None and self._held[0].source.is_remote

    def span(self, key: str) -> Span | None:
        if self._held is None:
            return self._spans.get(key)
        if key not in self._few_spans:  # each costs a read: a summary needs two of a hundred thousand
            self._few_spans[key] = self._held[0].storage_span(key)
        return self._few_spans[key]

    def storage(self, key: str) -> StoredBytes | None:
        from ckptmove.lazy.stored import StoredBytes

        span = self.span(key)
        return None if span is None else StoredBytes(self.source, span, self.byteorder)

    def tree(self) -> Value:
        if self._held is not None and self._held[1] is not None:
            return self._held[1].root
        with naming(self.path), collector_paused():
            return container_of(self.source, self._limits).read().root

    def whole_tree(self) -> Value:
        if not self.placeholder:
            return self.tree()
        with self.content() as (container, machine):  # no other format has placeholders
            return cast("BarePickle", container).with_long_strings(machine.root)

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        with self._container() as container:
            source = container.source
            if progress is not None:
                container.source = CountedSource(source, progress)
            found = container.check(jobs if self.disk is not None else 1)
            container.source = source
        if self._files is not None:
            found = tuple(fact.below(self.name) for fact in found)
        return self.inventory.facts + found

    def flaws(self) -> tuple[ArchiveFact, ...]:
        """Facts about its bytes, after comparing them with the CRC of its archive."""
        return () if self._files is None else self._files.listing.flaws(self.name)

    def budget(self) -> Budget:
        from ckptmove.checkpoint.inventory.budget import Budget

        return Budget(*self._budget)

    def extras(self) -> Mapping[str, bytes]:
        """SHA-256 of each content outside the tree and the storages, by its name in the file."""
        return self._extras

    @cached_property
    def crcs(self) -> Mapping[str, int | None]:
        """CRCs of all storages that the file states, by key in the file."""
        keys = (self.own_name(storage.key) for storage in self.inventory.storages)
        with self._container() as container:
            return {key: container.storage_crc(key) for key in keys}

    @cached_property
    def _spans(self) -> Mapping[str, Span | None]:
        """Spans of all storages, by key in the file."""
        keys = (self.own_name(storage.key) for storage in self.inventory.storages)
        with self._container() as container:
            return {key: container.storage_span(key) for key in keys}

    @cached_property
    def _extras(self) -> Mapping[str, bytes]:
        with naming(self.path):
            container = self._held[0] if self._held is not None else container_of(self.source, self._limits)
            return dict(container.extras())

    @cached_property
    def _reopened(self) -> ByteSource:
        return cast("OpenFiles", self._files).source(self.name)  # only a file of several is dropped
