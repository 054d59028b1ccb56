"""The ``restore`` check of tensors in several files: compare each chunk that torch loads with the whole tensor.

``torch.load`` loads the pieces of a distributed checkpoint and the files of ranks, and safetensors loads shards.
``.metadata`` is never unpickled, as ``torch.distributed.checkpoint.load`` would do. The chunks of replicas are compared
too. One piece is in memory at a time, and the files of ranks are mapped.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from ckptmove.checkpoint.elements import extent_span
from ckptmove.formats.facts import facts_of
from ckptmove.io.part import PartSource, read_into
from ckptmove.proof.checks import UNITED, Offenders, Tally
from ckptmove.proof.equality import other_form, same_bits
from ckptmove.proof.restored.byte_source_file import as_file
from ckptmove.proof.restored.loaded import load, load_tensor
from ckptmove.proof.restored.pages import PageRelease
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.stored import memory_of
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.assembled.part import AssembledPart
    from ckptmove.assembled.table import OpenChunk, Placed
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.model import Span, TensorRecord
    from ckptmove.proof.restored.loaded import Loaded, LoadedFiles


@dataclass(slots=True)
class PiecesTally(Tally):
    """Figures and faults of the chunks compared so far."""

    chunks: int = 0  # loaded pieces of distributed checkpoints
    shards: int = 0  # loaded chunks in files of safetensors
    ranked: int = 0  # loaded chunks in files of ranks
    objects: int = 0  # loaded pieces of other objects
    differing: Offenders = field(default_factory=Offenders)  # chunks that differ from their part of the tensor, and how
    errors: Offenders = field(default_factory=Offenders)  # pieces that could not be loaded, and why
    refused: Offenders = field(default_factory=Offenders)  # objects that weights-only mode refuses, and why
    #: files of ranks that could not be loaded, and why.
    failed_files: dict[str, str] = field(default_factory=dict, metadata=UNITED)
    #: those that weights-only mode refuses, and why.
    refused_files: dict[str, str] = field(default_factory=dict, metadata=UNITED)
    #: Open files of safetensors, by path.
    _tables: dict[str, Any] = field(default_factory=dict)
    #: Pages of the mapped files of ranks, which are released after the comparison.
    _pages: dict[str, PageRelease] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The loaded chunks, and how they were loaded, as text."""
        found = f"; they are assembled from {amount(self.shards, 'piece')} in shards" if self.shards else ""
        if self.chunks or self.objects:
            what = [amount(self.chunks, "piece")] + [amount(self.objects, "object")] * bool(self.objects)
            refused = f"; not loaded, because weights_only=True refuses it: {self.refused}" if self.refused else ""
            found += (
                f"; {' and '.join(what)} of *.distcp were loaded one at a time by torch.load(weights_only=True); "
                f"torch.distributed.checkpoint.load was not run, because it unpickles .metadata{refused}"
            )
        if self.ranked:
            found += (
                f"; {amount(self.ranked, 'shard')} of them loaded by torch.load(weights_only=True) after import "
                "torch.distributed.tensor"
            )
        return found


def compare_pieces(
    record: TensorRecord, values: torch.Tensor, part: AssembledPart, loaded: LoadedFiles, tally: PiecesTally
) -> bool:
    """Compare each loaded chunk of a tensor with it; return whether torch was to load a file with any part of it."""
    key = cast("str", part.own_key(record))  # a tensor without a storage has no values
    chunks = part.pieces(key)
    is_loaded = not chunks  # a tensor without elements has nothing to load
    for placed in chunks:
        file = loaded.of_rank(part.members[placed.file]) if part.members else None
        if file is not None and not _is_loaded(file, placed.file, tally):
            continue
        is_loaded = True
        found = file or _load(part, key, placed, tally._tables)
        name = f"{record.name} ({placed.where})"
        if found.refusal or found.error:
            tally.errors.add(f"{name}: {found.refusal or found.error}")
            continue
        is_whole = part.entry(key).is_storage  # it has the name that it has in the checkpoint
        if not is_whole:
            tally.ranked += file is not None
            tally.shards += file is None and bool(placed.name)
            tally.chunks += file is None and not placed.name
        theirs = _of_chunk(record, part, placed, found, is_whole=is_whole)
        sizes = record.shape if is_whole else placed.chunk.sizes
        own = values if is_whole else values[_slices(placed.chunk.offsets, sizes)]
        fault = _fault(own, theirs, record.dtype, sizes)
        if fault:
            tally.differing.add(f"{name}: {fault}")
        elif file is not None and not is_whole:
            # All of its bytes are in the file, because torch has loaded them.
            storage, local, _ = cast("OpenChunk", part.opened(key, placed))
            span = cast("Span", extent_span(storage.span, cast("TensorRecord", local)))
            _pages(file, placed.file, part, tally).seen(theirs[0].data_ptr(), span.start, span.nbytes)
    return is_loaded


def join_pieces(
    record: TensorRecord, part: AssembledPart, loaded: LoadedFiles, tables: dict[str, Any]
) -> torch.Tensor | None:
    """A tensor put together by torch from its chunks; None if one is missing, or two have one name.

    A chunk that torch does not load, because weights-only mode refuses its file, is built from the stored bytes.

    Args:
        tables: open files of safetensors, by path; more are added.
    """
    key = cast("str", part.own_key(record))
    if part.span(key) is None:  # its chunks do not cover it
        return None
    entry = part.entry(key)
    whole = torch.empty(entry.shape, dtype=dtype_of(record.dtype))
    for placed in part.pieces(key):
        opened = cast("OpenChunk", part.opened(key, placed))
        found = loaded.of_rank(part.members[placed.file]) if part.members else _load(part, key, placed, tables)
        chunk = _of_chunk(record, part, placed, found, is_whole=entry.is_storage)
        if entry.is_storage:
            return chunk[0] if len(chunk) == 1 else None
        if len(chunk) != 1 or chunk[0].dtype != whole.dtype:
            chunk = [as_stored(opened.storage, cast("TensorRecord", opened.local))]
        whole[_slices(placed.chunk.offsets, placed.chunk.sizes)] = chunk[0]
    return whole.as_strided(record.shape, record.stride, record.storage_offset)


def as_stored(storage: StoredBytes, record: TensorRecord) -> torch.Tensor:
    """A view of a storage, built from its bytes."""
    span = cast("Span", extent_span(storage.span, record))
    values = torch.empty(span.nbytes, dtype=torch.uint8)
    raw: Any = values.untyped_storage()
    read_into(storage.source, span.start, memory_of(raw))
    if storage.byteorder != sys.byteorder:
        raw.byteswap(dtype_of(record.dtype))
    return torch.empty(0, dtype=dtype_of(record.dtype)).set_(raw, 0, record.shape, record.stride)


def _of_chunk(
    record: TensorRecord, part: AssembledPart, placed: Placed, found: Loaded, *, is_whole: bool
) -> list[torch.Tensor]:
    """The chunk in what torch loaded; several tensors if their paths are written the same."""
    _, inside = part.object_of(record) or ("", part.own_name(record.name))
    theirs = found.tensors.get(inside if is_whole else placed.name, [])
    cut = _slices(placed.offsets, placed.chunk.sizes) if placed.offsets else ()
    # A partition of ZeRO has one axis, whatever the shape of the tensor.
    return [(one if one.dim() == len(cut) else one.reshape(-1))[cut] for one in theirs] if cut else theirs


def load_objects(
    part: AssembledPart, names: Collection[str] | None, tally: PiecesTally
) -> Iterator[tuple[str, Loaded]]:
    """Load some objects that are not tensors, or all; yield the name of each, and what it holds.

    The tally receives the results if all are loaded: one process loads all.
    """
    counted = tally if names is None else PiecesTally()
    for name, placed, container in part.objects():
        if names is not None and name not in names:
            continue
        loaded = _load_piece(part, placed, container)
        if loaded.refusal:
            counted.refused.add(f"{part.full_name(name)} ({loaded.refusal})")
        elif loaded.error:
            counted.errors.add(f"{part.full_name(name)} ({placed.where}): {loaded.error}")
        else:
            counted.objects += 1
            yield name, loaded


def _is_loaded(file: Loaded, name: str, tally: PiecesTally) -> bool:
    """Whether torch has loaded a file of a rank."""
    if file.refusal:
        tally.refused_files[name] = file.refusal
    elif file.error:
        tally.failed_files[name] = file.error
    return not (file.refusal or file.error)


def _load(part: AssembledPart, key: str, placed: Placed, tables: dict[str, Any]) -> Loaded:
    """A chunk as torch or safetensors loads it."""
    source = part.source(placed.file)
    if placed.name and not source.is_remote:
        return load_tensor(source.path, placed.name, tables)
    return _load_piece(part, placed, cast("OpenChunk", part.opened(key, placed)).container)


def _load_piece(part: AssembledPart, placed: Placed, container: str) -> Loaded:
    source = part.source(placed.file)
    with as_file(source if placed.name else PartSource(source, cast("Span", placed.span))) as file:
        return load(facts_of(container), file)


def _pages(file: Loaded, name: str, part: AssembledPart, tally: PiecesTally) -> PageRelease:
    if name not in tally._pages:
        tally._pages[name] = PageRelease(enabled=file.is_mapped and part.byteorder == sys.byteorder)
    return tally._pages[name]


def _slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _fault(values: torch.Tensor, theirs: list[torch.Tensor], dtype: str, sizes: tuple[int, ...]) -> str:
    """How the loaded chunk differs from its part of the tensor; empty if it does not."""
    if len(theirs) != 1:
        return f"{len(theirs)} tensors of its name" if theirs else "no tensor"
    return other_form(theirs[0], dtype_of(dtype), sizes) or ("" if same_bits(values, theirs[0]) else "other bits")
