"""Read the pieces of a distributed checkpoint: chunks of tensors and objects, each its own ``torch.save``.

A damaged piece is a fact about that piece, and the rest of the checkpoint stays readable.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.build import build_inventory
from ckptmove.checkpoint.naming import naming
from ckptmove.errors import CrcMismatch, DamagedArchive, DamagedPickle, NotACheckpoint
from ckptmove.formats.dcp.checkpoint import ReadObject
from ckptmove.formats.opening import container_of
from ckptmove.formats.zip_archive.index import END_BYTES, END_SIGNATURE
from ckptmove.io.contracts import CopySegment
from ckptmove.io.part import PartSource
from ckptmove.io.segments import shifted
from ckptmove.model import LACKING, ArchiveFact
from ckptmove.pickles.build import new_tuple
from ckptmove.pickles.storage_id import FIELDS, KEY, storage_id, with_key, with_location
from ckptmove.torch_facts.devices import NO_DEVICE

if TYPE_CHECKING:
    from ckptmove.formats.contract import Container
    from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
    from ckptmove.formats.dcp.pieces import Piece
    from ckptmove.io.contracts import ByteSource, CheckedRange
    from ckptmove.limits import Limits
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.state import Machine

_ZIP: Final = b"PK\x03\x04"
#: Errors that mean that a piece is damaged.
DAMAGE: Final = (CrcMismatch, DamagedArchive, DamagedPickle)
#: Operations and bytes of pickles that all pieces together may need, in addition to their own size.
_OPERATIONS: Final = 1 << 20
_PICKLE_BYTES: Final = 1 << 22


def _limits_of(piece: Piece, limits: Limits, container: DistributedCheckpoint) -> Limits:
    """Resource limits for one piece: all objects are in memory at once, and a few kilobytes inflate to many operations.

    A piece that is not compressed, as torch writes it, never needs more.
    """
    count = len(container.metadata.pieces)
    operations, nbytes = _OPERATIONS // count + piece.span.nbytes, _PICKLE_BYTES // count + piece.span.nbytes
    return limits._replace(
        operations=min(limits.operations, limits.factor * operations),
        pickle_bytes=min(limits.pickle_bytes, limits.factor * nbytes),
    )


def check_piece(
    source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits
) -> tuple[ArchiveFact, ...]:
    """Facts about damage in a piece that ends within its file, by its CRCs and by ``.metadata``."""
    record = f"{piece.file}/{piece.name}"
    try:
        if piece.offsets is None:
            stored = open_object(source, piece, container, limits)
            facts = () if stored is None else stored.check()
            if stored is not None and not facts:
                stored.read()
        else:
            stream = open_chunk(source, piece, container, limits)
            facts = stream.check()
            if not facts:
                chunk_in(stream, source, piece, container, limits)
    except DAMAGE:
        return (ArchiveFact("damaged-piece", record, piece.span.nbytes),)
    return tuple(fact._replace(record=record) for fact in facts)


def checks_in(
    source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits
) -> tuple[CheckedRange, ...]:
    """Check the form of a piece, and return the CRCs to check when its bytes are copied.

    Arguments as of :func:`check_piece`.
    """
    if piece.offsets is None:
        stream = open_object(source, piece, container, limits)
        if stream is not None:
            stream.read()
    else:
        stream = open_chunk(source, piece, container, limits)
        chunk_in(stream, source, piece, container, limits)
    if stream is None or not stream.has_checksums():
        return ()
    folder = f"{piece.name}/"
    segments = [shifted(one, piece.span.start, folder) for one in stream.lay_out(stream.object_pickle(), {})]
    copied = [one for one in segments if isinstance(one, CopySegment)]
    if len(copied) == len(segments):
        return tuple(chain.from_iterable(one.checks for one in copied))
    for fact in stream.check():  # the CRC of a deflated record is that of its inflated bytes
        raise CrcMismatch(source.path, folder + fact.record)
    return ()


def open_object(source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits) -> Container | None:
    """The ``torch.save`` of an object, which ends within the file; None if the object wrote its own bytes."""
    try:
        return container_of(PartSource(source, piece.span), _limits_of(piece, limits, container))
    except NotACheckpoint as error:
        tail = source.read(max(piece.span.start, piece.span.end - END_BYTES), piece.span.end)
        head = source.read(piece.span.start, min(piece.span.start + len(_ZIP), piece.span.end))
        if tail.startswith(END_SIGNATURE) and head != _ZIP:  # other zips are no damage, for example numpy's
            raise damaged_piece(source, piece, f"is {error.found}") from error
    return None


def read_object(source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits) -> ReadObject:
    """Read an object; its pickle is left out if the object wrote its own bytes, or those of a tensor are not readable.

    Arguments and errors as of :func:`open_object`.
    """
    with naming(source.path):
        stream = open_object(source, piece, container, limits)
        if stream is None or stream.placeholder:
            return ReadObject(None if stream is None else stream.name, None, {})
        machine = stream.read()
        own = _limits_of(piece, limits, container)
        keys = _take_storages(stream, machine, piece.name, own) if machine.persistents else {}
    return ReadObject(stream.name, None if keys is None else machine, keys or {})


def _take_storages(stream: Container, machine: Machine, name: str, limits: Limits) -> dict[str, str] | None:
    """Give the storages of an object keys of the checkpoint, and no device; None if bytes are missing or encoded."""
    inventory = build_inventory(stream, machine, limits)
    spans = [stream.storage_span(one.key) for one in inventory.storages]
    is_whole = not any(fact.kind in LACKING for fact in inventory.facts) and None not in spans
    if stream.name != "torch-zip" or stream.byteorder != sys.byteorder or not is_whole:
        return None
    known = {one.key for one in inventory.storages}
    keys: dict[str, str] = {}
    for node in machine.persistents:
        pid = storage_id(node)
        own = pid.items[KEY] if pid is not None and len(pid.items) == FIELDS else None
        if pid is None or type(own) is not str or own not in known:
            return None
        key = f"{name}/data/{own}"
        keys[key] = own
        node.pid = new_tuple(*with_location(with_key(pid, key), NO_DEVICE).items)
    return keys


def open_chunk(source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits) -> Container:
    """The ``torch.save`` of a chunk.

    Arguments and errors as of :func:`open_object`.
    """
    try:
        return container_of(PartSource(source, piece.span), _limits_of(piece, limits, container))
    except NotACheckpoint as error:
        raise damaged_piece(source, piece, f"is {error.found}") from error


def chunk_in(
    stream: Container, source: ByteSource, piece: Piece, container: DistributedCheckpoint, limits: Limits
) -> tuple[TensorRecord, ...]:
    """The tensors in a piece: exactly one, unless ``.metadata`` lists no tensor with this chunk."""
    expected = container.chunk_at(piece)
    inventory = build_inventory(stream, stream.read(), _limits_of(piece, limits, container))
    tensors = inventory.tensors
    found = [_spelled(one.dtype, one.shape) for one in tensors]
    if expected is not None and found != [_spelled(*expected)]:
        raise damaged_piece(source, piece, f"contains {found[0] if found else 'no tensor'}, not {_spelled(*expected)}")
    if any(fact.kind in LACKING for fact in inventory.facts):
        raise damaged_piece(source, piece, "has too few bytes for its tensor")
    return tensors


def _spelled(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def damaged_piece(source: ByteSource, piece: Piece, what: str) -> DamagedArchive:
    """The error for a damaged piece; ``what`` describes the damage and begins with a verb."""
    return DamagedArchive(source.path, f"the piece of '{piece.name:.200}' at byte {piece.span.start} {what}")
