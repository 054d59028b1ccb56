"""Convert a state_dict to the tensors of a safetensors file.

Tied weights are written once, as ``safetensors.torch.save_model`` does: see ``_remove_duplicate_names`` and
``_find_shared_tensors`` in safetensors/torch.py. ``save_model`` keeps the first name in the alphabet. Here it is the
first name in the state_dict: ``from_pretrained`` of transformers needs the embedding, which comes before the head that
is tied to it, and ``load_model`` accepts either name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, unique
from ckptmove.conversion.remap.errors import NotInFormat
from ckptmove.formats.safetensors_new import NewTensor, obstacle
from ckptmove.io.contracts import CopySegment, FromSource, StreamSegment
from ckptmove.io.cut import cut
from ckptmove.io.segments import blocks_of, length, without_checks
from ckptmove.io.spool import Spool, is_streamed
from ckptmove.lazy.geometry import extent_numel, is_contiguous
from ckptmove.lazy.stored import StoredBytes, Strided
from ckptmove.lazy.tensor import blocks
from ckptmove.moves import Dropped
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Dict, List, Node, Persistent, Set, Tuple
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Value

    #: Returns the segment of all bytes of a storage, and their byte order: ``little`` or ``big``.
    BytesOf: TypeAlias = Callable[[str], tuple[Segment, str]]
    Overflowed: TypeAlias = Callable[[int], None]

_WRITTEN: dict[type[Node], str] = {
    Dict: "a dict", List: "a list", Tuple: "a tuple", Set: "a set", Persistent: "a storage without a tensor",
}  # fmt: skip
_DENSE = frozenset({"tensor", "parameter"})


class FlatState(NamedTuple):
    """A state_dict as safetensors files hold it."""

    tensors: tuple[NewTensor, ...]  # the tensors to write, in the order of the state_dict
    tied: Mapping[str, str]  # each tensor that is not written, and the one with which it shares its memory

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """The tied tensors that are not written."""
        return tuple(Dropped(name, 1, 0, "tied") for name in self.tied)


def dense_records(root: Value) -> tuple[TensorRecord, ...]:
    """Return the tensors of a flat state_dict, in its order; attributes of the dict (``_metadata``) are ignored."""
    pairs = as_dict(root)
    if pairs is None:
        raise NotInFormat("safetensors", (("", _described(root)),))
    reader = TensorReader()
    records: list[TensorRecord] = []
    refused: list[tuple[str, str]] = []
    state_dict = ""
    for key, value, _ in unique(pairs):
        name = key_text(key)
        is_tensor = type(value) is Call and reader.is_tensor(value)
        record = reader.tensor(value, name, "model") if type(value) is Call and is_tensor else None
        found = _obstacle(key, value, record)
        if record is None or found:
            refused.append((name, found))
        else:
            records.append(record)
        if not state_dict and type(key) is str and _is_state_dict(value, reader):
            state_dict = key
    if refused:
        raise NotInFormat("safetensors", tuple(refused), "" if records else state_dict)
    return tuple(records)


def flat_state(
    records: Sequence[TensorRecord],
    bytes_of: BytesOf,
    source: ByteSource,
    spool: Spool,
    overflowed: Overflowed | None = None,
) -> FlatState:
    """Plan the tensors of a safetensors file, or of several shards.

    Args:
        records: dense tensors; see :func:`dense_records`.
        bytes_of: returns the bytes of a storage by its key, with the dtype and the offsets of the records.
        source: source of these bytes, except for those of a ``FromSource``.
        spool: keeps the bytes of a storage that several tensors share and that can only be read in order. To be closed
            after the tensors were written.
        overflowed: called with the number of values that a cast made infinite, for casts of tensors that are not
            contiguous and for bytes in the spool.
    """
    stored = {record.storage: bytes_of(record.storage) for record in records if record.storage is not None}
    sizes = {key: length(segment) for key, (segment, _) in stored.items()}
    tied = tied_names(records, sizes)
    written = Counter(record.storage for record in records if record.name not in tied and record.nbytes)
    for key, (segment, byteorder) in stored.items():
        if written[key] > 1 and is_streamed(segment):
            stored[key] = spool.hold(source, segment, overflowed), byteorder
    tensors: list[NewTensor] = []
    for record in records:
        if record.name not in tied and record.storage is not None:
            segment, byteorder = stored[record.storage]
            # The first tensor of a storage checks all of its bytes.
            stored[record.storage] = without_checks((segment,))[0], byteorder
            segments = (_segment(record, source, segment, byteorder, overflowed),) if record.nbytes else ()
            tensors.append(NewTensor(record.name, record.dtype, record.shape, segments))
    return FlatState(tuple(tensors), tied)


# --- entries of the state_dict ---------------------------------------------------------------------------------------


def _obstacle(key: Value, value: Value, record: TensorRecord | None) -> str:
    """Return why an entry cannot be written, as a noun phrase; empty if it can."""
    if type(key) is not str:
        return "an entry whose key is not a string"
    if record is None:
        return _described(value)
    if record.kind not in _DENSE:
        return f"a {record.kind} tensor"
    return obstacle(key, record.dtype, record.shape)


def _described(value: Value) -> str:
    if type(value) is Call:
        return "a dict" if as_dict(value) is not None else f"an object of {value.name[:100] or 'an unknown class'}"
    if isinstance(value, Node):
        return _WRITTEN.get(type(value), "an object")
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _is_state_dict(value: Value, reader: TensorReader) -> bool:
    pairs = as_dict(value)
    values = pairs.flat[1::2] if pairs is not None else ()
    return bool(values) and all(type(one) is Call and reader.is_tensor(one) for one in values)


# --- tied weights ----------------------------------------------------------------------------------------------------


def tied_names(records: Sequence[TensorRecord], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return each name to leave out, and the name that is kept instead."""
    by_storage: dict[str, list[TensorRecord]] = defaultdict(list)
    for record in records:
        if record.storage is not None and record.nbytes:
            by_storage[record.storage].append(record)
    tied: dict[str, str] = {}
    refused: list[tuple[str, str]] = []
    order = {record.name: place for place, record in enumerate(records)}
    for key, sharing in by_storage.items():
        for group in _overlapping(sharing):
            kept = _kept(sorted(group, key=lambda record: order[record.name]), sizes[key])
            names = sorted(record.name for record in group)
            if kept is None:
                refused += ((name, f"a tensor that overlaps '{names[0]:.100}'") for name in names[1:])
            else:
                tied.update((name, kept) for name in names if name != kept)
    if refused:
        raise NotInFormat("safetensors", tuple(refused))
    return tied


def _overlapping(sharing: list[TensorRecord]) -> list[list[TensorRecord]]:
    """Group the tensors of a storage. As in safetensors, only neighbors by address are compared."""
    if len(sharing) == 1:
        return []
    areas = sorted((*_area(record), record.name, record) for record in sharing)
    groups: list[list[TensorRecord]] = []
    last_end = 0
    for start, end, _, record in areas:
        if start >= last_end:
            groups.append([])
        groups[-1].append(record)
        last_end = end
    return [group for group in groups if len(group) > 1]


def _area(record: TensorRecord) -> tuple[int, int]:
    item = ITEM_BYTES[record.dtype]
    start = record.storage_offset * item
    return start, start + extent_numel(record.shape, record.stride) * item


def _kept(group: list[TensorRecord], storage_nbytes: int) -> str | None:
    """Return the first tensor that holds the elements of all in a group, or None."""
    if len({(record.dtype, record.storage_offset, record.shape, record.stride) for record in group}) == 1:
        return group[0].name
    if not all(is_contiguous(record.shape, record.stride) or len(record.shape) == 1 for record in group):
        return None  # the library fails to flatten it
    complete = [record.name for record in group if not record.storage_offset and record.nbytes == storage_nbytes]
    return complete[0] if complete else None


# --- bytes -----------------------------------------------------------------------------------------------------------


def _segment(
    record: TensorRecord, source: ByteSource, storage: Segment, byteorder: str, overflowed: Overflowed | None
) -> Segment:
    start, end = _area(record)
    part = cut(source, storage, start, end - start)
    if is_contiguous(record.shape, record.stride) and (byteorder == "little" or ITEM_BYTES[record.dtype] == 1):
        return part
    elements = StreamSegment(record.nbytes, lambda: _elements(record, source, part, byteorder, overflowed))
    # The source stays known, so that a change of its file is detected.
    return FromSource(part.source, elements) if isinstance(part, FromSource) else elements


def _elements(
    record: TensorRecord, source: ByteSource, part: Segment, byteorder: str, overflowed: Overflowed | None
) -> Iterator[memoryview]:
    """Yield the elements of a tensor in order, little-endian."""
    while isinstance(part, FromSource):
        source, part = part
    with closing(Spool()) as spool:
        if isinstance(part, CopySegment):
            for _ in blocks_of(source, (part,)) if part.checks else ():
                pass
        else:
            source, part = spool.hold(source, part, overflowed)
        storage = StoredBytes(source, cast("CopySegment", part).span, byteorder)
        yield from blocks(Strided(storage, record.dtype, record.shape, record.stride), "little")
