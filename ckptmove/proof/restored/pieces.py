"""The ``restore`` check of a distributed checkpoint: compare each piece that ``torch.load`` returns with its tensor.

``.metadata`` is never unpickled, as ``torch.distributed.checkpoint.load`` would do. One piece is in memory at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptmove.formats.opening import container_class
from ckptmove.proof.checks import Joined, Offenders
from ckptmove.proof.restored.byte_source_file import as_file
from ckptmove.proof.restored.loaded import load, load_tensor
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.stored import same_bits
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from ckptmove.assembled.pieced_part import PiecedPart, StoredPiece
    from ckptmove.model import TensorRecord
    from ckptmove.proof.restored.loaded import Loaded


@dataclass(slots=True)
class PiecesTally(Joined):
    """Figures and faults of the pieces compared so far."""

    chunks: int = 0  # loaded pieces of tensors
    shards: int = 0  # loaded pieces of tensors that are in files of safetensors
    objects: int = 0  # loaded pieces of other objects
    differing: Offenders = field(default_factory=Offenders)  # pieces that differ from their part of the tensor, and how
    errors: Offenders = field(default_factory=Offenders)  # pieces that could not be loaded, and why
    refused: Offenders = field(default_factory=Offenders)  # objects that weights-only mode refuses, and why
    #: Open files of safetensors, by path.
    _tables: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The loaded pieces, and how they were loaded, as text."""
        shards = f"; they are assembled from {amount(self.shards, 'piece')} in shards" if self.shards else ""
        if not self.chunks and not self.objects:
            return shards
        found = [amount(self.chunks, "piece")] + [amount(self.objects, "object")] * bool(self.objects)
        refused = f"; not loaded, because weights_only=True refuses it: {self.refused}" if self.refused else ""
        return (
            f"{shards}; {' and '.join(found)} of *.distcp were loaded one at a time by torch.load(weights_only=True); "
            f"torch.distributed.checkpoint.load was not run, because it unpickles .metadata{refused}"
        )


def compare_pieces(record: TensorRecord, values: torch.Tensor, part: PiecedPart, tally: PiecesTally) -> None:
    """Compare each loaded piece of a tensor with the assembled tensor."""
    for piece in part.pieces_of(part.own_name(record.storage or "")):
        name = f"{record.name} ({piece.place})"
        if piece.name and not piece.source.is_remote:
            loaded = load_tensor(piece.source.path, piece.name, tally._tables)
        else:
            loaded = _load(piece)
        if loaded.refusal or loaded.error:
            tally.errors.add(f"{name}: {loaded.refusal or loaded.error}")
            continue
        if piece.name:
            tally.shards += 1
        else:
            tally.chunks += 1
        fault = _fault(record, values, piece, loaded)
        if fault:
            tally.differing.add(f"{name}: {fault}")


def load_objects(part: PiecedPart, names: Collection[str] | None, tally: PiecesTally) -> Iterator[tuple[str, Loaded]]:
    """Load the objects that are not tensors; yield the name of each, and what it holds.

    Args:
        part: the checkpoint that contains them.
        names: names of the objects to load; None for all.
        tally: receives the results, if all are loaded: one process loads all.
    """
    counted = tally if names is None else PiecesTally()
    for name, piece in part.objects():
        if names is not None and name not in names:
            continue
        loaded = _load(piece)
        if loaded.refusal:
            counted.refused.add(f"{part.full_name(name)} ({loaded.refusal})")
        elif loaded.error:
            counted.errors.add(f"{part.full_name(name)} ({piece.place}): {loaded.error}")
        else:
            counted.objects += 1
            yield name, loaded


def _load(piece: StoredPiece) -> Loaded:
    with as_file(piece.source) as file:
        return load(container_class(piece.kind), file)


def _fault(record: TensorRecord, values: torch.Tensor, piece: StoredPiece, loaded: Loaded) -> str:
    """How a piece differs from its part of the tensor; empty if it does not."""
    tensors = loaded.tensors.get(piece.name, [])
    if not tensors:
        return "no tensor"
    theirs, sizes = tensors[0], piece.chunk.sizes
    if theirs.dtype != dtype_of(record.dtype):
        return f"dtype {theirs.dtype} in place of {record.dtype}"
    if tuple(theirs.shape) != sizes:
        return f"shape {tuple(theirs.shape)} in place of {sizes}"
    box = values[tuple(slice(start, start + size) for start, size in zip(piece.chunk.offsets, sizes, strict=True))]
    return "" if same_bits(box, theirs) else "other bits"
