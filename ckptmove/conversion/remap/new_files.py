"""Lay out the new files of a remapped checkpoint as segments."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.parts import RANKS_MISSING, FilePart
from ckptmove.checkpoint.state_dicts import RootKeys
from ckptmove.conversion.remap.errors import MixedByteOrders, NothingLeft, NotInFormat
from ckptmove.conversion.remap.kept_files import has_unreached
from ckptmove.conversion.remap.storages import changed_bytes
from ckptmove.conversion.to_safetensors import dense_records, flat_state
from ckptmove.errors import CrcMismatch, DamagedArchive, MissingShard
from ckptmove.formats.facts import facts_of
from ckptmove.formats.new_torch_zip import NewStorage, new_torch_file
from ckptmove.formats.safetensors_new import new_safetensors
from ckptmove.io.contracts import FromSource, StreamSegment
from ckptmove.io.cut import cut
from ckptmove.io.locations import stem
from ckptmove.io.outputs import do_nothing
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import length
from ckptmove.io.spool import Spool
from ckptmove.lazy.stored import bytes_of_storage
from ckptmove.lazy.tensor import blocks
from ckptmove.pickles.storage_id import rename_storages, storage_keys
from ckptmove.pickles.tree import nodes
from ckptmove.pickles.write import write_pickle

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ckptmove.assembled.part import AssembledPart
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.conversion.to_safetensors import FlatState
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.model import Inventory
    from ckptmove.pickles.tree import Value


def lay_out_file(
    conversion: Conversion, remapped: Remapped, checkpoint: OpenCheckpoint
) -> tuple[ByteSource, tuple[Segment, ...]]:
    """The one new file of a conversion, and the source of the segments that name none."""
    files, request, part = NewFiles(remapped, conversion), conversion.request, checkpoint.parts[0]
    is_same = conversion.format == "same"
    own = files.same_format(part, remapped.root) if is_same and isinstance(part, FilePart) else None
    if own is not None and isinstance(part, FilePart):
        return part.source, own
    if conversion.format == "safetensors" or (is_same and facts_of(part.inventory.container).is_table):
        return files.source, files.safetensors_file(remapped.root)
    return files.source, files.torch_file(remapped.root, stem(request.target))


class NewFiles:
    """Lays out files with the storages of a remapped checkpoint.

    Attributes:
        source: source of the segments that name none: it has no bytes.
    """

    def __init__(self, remapped: Remapped, conversion: Conversion) -> None:
        self._remapped, self._conversion = remapped, conversion
        self.source = MemorySource(conversion.request.path, b"")

    def same_format(self, part: FilePart, root: Value) -> tuple[Segment, ...] | None:
        """The file of a part with a new tree, laid out as before; None if it needs another layout.

        Only an archive of ``torch.save`` with all of its storages in their lengths keeps its layout.
        """
        if not self.keeps_storages(part, root):
            return None
        self._check([part])
        with part.content() as (container, _):
            return self._conversion.checked(container.lay_out(self.pickle(part, root), {}))

    def keeps_storages(self, part: FilePart, root: Value) -> bool:
        """Whether a part is an archive of ``torch.save``, and the tree has exactly its storages, unchanged."""
        own = {storage.key for storage in part.inventory.storages}
        is_same = own == set(storage_keys(root)) and own.isdisjoint(self._remapped.storages.changes)
        return is_same and part.inventory.container == "torch-zip" and not has_unreached(part, self._remapped.plan)

    def pickle(self, part: FilePart, root: Value) -> bytes:
        """The pickle of a tree whose storages are all in one part, under the keys of its file."""
        rename_storages(nodes(root), partial(_own_key, part))
        return write_pickle(root)

    def torch_file(self, root: Value, folder: str) -> tuple[Segment, ...]:
        """A new archive of ``torch.save`` with a tree; the keys of its storages are changed."""
        keys = {key: str(number) for number, key in enumerate(storage_keys(root))}
        orders = {part.byteorder: part.path for part, _ in map(self._remapped.homes.__getitem__, keys)}
        if len(orders) > 1:
            raise MixedByteOrders(orders["big"])
        self._check(self._parts(keys))
        storages = [self._new_storage(key, number) for key, number in keys.items()]
        rename_storages(nodes(root), keys.__getitem__)
        segments = new_torch_file(folder, write_pickle(root), storages, next(iter(orders), "little"))
        return self._conversion.checked(segments)

    def safetensors_file(self, root: Value) -> tuple[Segment, ...]:
        """A new safetensors file."""
        metadata = self.metadata(root)
        state = self.flat_state(root)
        return self._conversion.checked(new_safetensors(state.tensors, {**state.tied, **metadata}))

    def metadata(self, root: Value) -> dict[str, str]:
        """Metadata of a new safetensors file: that of the files its storages come from, or the format of torch.

        If several files have an entry, the first one counts.
        """
        return merged_metadata(self._parts(storage_keys(root)))

    def flat_state(self, root: Value) -> FlatState:
        """The tensors of a state_dict; errors as of :meth:`safetensors_file`."""
        self._check(self._parts(storage_keys(root)))
        overflowed = self._conversion.overflowed.append
        try:
            records = dense_records(root)
        except NotInFormat as error:
            names = self._remapped.sources
            entries = tuple((names.get(key, key), found) for key, found in error.entries)
            root = _model_of(self._remapped.inventory, error.root)
            raise NotInFormat("safetensors", entries, names.get(root, root)) from None
        if not records:
            raise NothingLeft
        spool = self._conversion.resources.enter_context(closing(Spool()))
        state = flat_state(records, self._bytes_of, self.source, spool, overflowed)
        self._conversion.plan = self._conversion.plan._replace(dropped=(*self._conversion.plan.dropped, *state.dropped))
        return state

    def _parts(self, keys: Iterable[str]) -> Collection[OpenPart]:
        """The parts of storages, each once, in the order of the keys."""
        return dict.fromkeys(self._remapped.homes[key][0] for key in keys)

    def _check(self, parts: Iterable[OpenPart]) -> None:
        """Compare files without CRCs with the CRCs of their archive, and collect those that have neither."""
        request = self._conversion.request
        for part in parts if request.check and not request.dry_run else ():
            if isinstance(part, FilePart) and part.has_own_checksums:
                continue
            if not part.has_checksums:
                self._conversion.unchecked.append(part.path if part.is_distributed else part.name)
            elif isinstance(part, FilePart) and part.flaws():
                raise CrcMismatch(part.path, part.name)

    def _bytes_of(self, key: str) -> tuple[Segment, str]:
        return self.storage(key)[0], self._remapped.homes[key][0].byteorder

    def _new_storage(self, key: str, number: str) -> NewStorage:
        segment, crc = self.storage(key)
        return NewStorage(number, (segment,), crc)

    def storage(self, key: str) -> tuple[Segment, int | None]:
        """How the bytes of a storage are written, cut and cast as planned, and their CRC-32 if it is known."""
        part, old = self._remapped.homes[key]
        segment, crc = self._whole(part, _own_key(part, key))
        if length(segment) < old.nbytes:
            raise DamagedArchive(part.path, f"bytes of storage '{_own_key(part, key):.40}' are missing")
        change = self._remapped.storages.changes.get(key)
        if change is not None:
            return changed_bytes(self.source, segment, change, part.byteorder), None
        return cut(self.source, segment, 0, old.nbytes), crc if length(segment) == old.nbytes else None

    def _whole(self, part: OpenPart, key: str) -> tuple[Segment, int | None]:
        """All bytes of a storage by its key in the part, and their CRC-32 if it is known."""
        if isinstance(part, FilePart):
            with part.content() as (container, _):
                segment, crc = container.storage_segment(key), container.storage_crc(key)
            if segment is not None:
                (segment,) = self._conversion.checked((segment,))
                return FromSource(part.source, segment), crc
        else:
            if part.missing and part.span(key) is None:
                raise MissingShard(part.path, part.missing[0], len(part.missing) - 1, RANKS_MISSING)
            stored = part.storage(key)
            if stored is not None:
                assembled = cast("AssembledPart", part)
                check = partial(assembled.require_sound, key) if self._conversion.request.check else do_nothing
                return StreamSegment(stored.span.nbytes, partial(_checked_blocks, stored, check)), None
        raise DamagedArchive(part.path, f"bytes of storage '{key:.40}' are missing")


def merged_metadata(parts: Collection[OpenPart]) -> dict[str, str]:
    """Metadata of a safetensors file with the tensors of some files; as :meth:`NewFiles.metadata`."""
    if any(part.is_distributed or not facts_of(part.inventory.container).is_table for part in parts):
        return {"format": "pt"}
    found: dict[str, str] = {}
    for part in parts:
        with cast("FilePart", part).content() as (container, _):
            found = {**container.notes, **found}
    return found


def _model_of(inventory: Inventory, other: str) -> str:
    """Path of the state_dict with most bytes of the model, empty for the root; ``other`` without a model."""
    roots, nbytes = RootKeys(inventory), Counter[str]()
    for tensor in inventory.tensors:
        if tensor.role == "model":
            nbytes[roots.split(tensor.name)[0]] += tensor.nbytes
    return max(nbytes, key=nbytes.__getitem__, default=other)


def _checked_blocks(stored: StoredBytes, check: Callable[[], None]) -> Iterator[memoryview]:
    """Bytes of a tensor that is assembled from pieces. They are not read in order, so they are checked before."""
    check()
    yield from blocks(bytes_of_storage(stored))


def _own_key(part: OpenPart, key: str) -> str:
    """Key of a storage in its part, from its key in the checkpoint."""
    return key[len(part.name) + 1 :] if part.name else key
