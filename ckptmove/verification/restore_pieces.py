"""The restore check of a distributed checkpoint: each of its pieces through ``torch.load``, held against its place.

Never unpickles ``.metadata``, as ``torch.distributed.checkpoint.load`` would, and never holds more than one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckptmove.formats.opening import container_class
from ckptmove.text import amount
from ckptmove.verification.case.source_file import as_file
from ckptmove.verification.checks import Offenders
from ckptmove.verification.loaded import load
from ckptmove.verification.state import bits, dtype_of

if TYPE_CHECKING:
    from ckptmove.checkpoint.layouts.distributed_part import DistributedPart, StoredPiece
    from ckptmove.model import TensorRecord
    from ckptmove.verification.loaded import Loaded


@dataclass(slots=True)
class PiecesTally:
    """What was seen of the pieces so far.

    Attributes:
        chunks: pieces of tensors that were loaded.
        objects: pieces of what is no tensor that were loaded.
        differing: pieces that are not what lies at their place, and how.
        errors: pieces that could not be loaded, and why.
        refused: objects that weights-only mode refuses, and why.
    """

    chunks: int = 0
    objects: int = 0
    differing: Offenders = field(default_factory=Offenders)
    errors: Offenders = field(default_factory=Offenders)
    refused: Offenders = field(default_factory=Offenders)

    @property
    def said(self) -> str:
        """What was loaded, and by whom, for people."""
        if not self.chunks and not self.objects:
            return ""
        found = [amount(self.chunks, "piece")] + [amount(self.objects, "object")] * bool(self.objects)
        refused = f"; not loaded, because weights_only=True refuses it: {self.refused}" if self.refused else ""
        return (
            f"; {' and '.join(found)} of *.distcp were loaded one at a time by torch.load(weights_only=True); "
            f"torch.distributed.checkpoint.load was not run, as it unpickles .metadata{refused}"
        )


def compare_pieces(record: TensorRecord, values: torch.Tensor, part: DistributedPart, tally: PiecesTally) -> None:
    """Hold what ``torch.load`` makes of each piece of a tensor against the tensor as it was put together.

    Args:
        record: the tensor.
        values: as it was put together.
        part: the checkpoint that it is in.
        tally: told of what was found.
    """
    for piece in part.pieces_of(part.own_name(record.storage or "")):
        name = f"{record.name} ({piece.place})"
        loaded = _load(piece)
        if loaded.refusal or loaded.error:
            tally.errors.add(f"{name}: {loaded.refusal or loaded.error}")
            continue
        tally.chunks += 1
        fault = _fault(record, values, piece, loaded)
        if fault:
            tally.differing.add(f"{name}: {fault}")


def compare_objects(part: DistributedPart, tally: PiecesTally) -> None:
    """Load what is no tensor, too."""
    for name, piece in part.objects():
        loaded = _load(piece)
        if loaded.refusal:
            tally.refused.add(f"{part.full_name(name)} ({loaded.refusal})")
        elif loaded.error:
            tally.errors.add(f"{part.full_name(name)} ({piece.place}): {loaded.error}")
        else:
            tally.objects += 1


def _load(piece: StoredPiece) -> Loaded:
    with as_file(piece.source) as file:
        return load(container_class(piece.kind), file)


def _fault(record: TensorRecord, values: torch.Tensor, piece: StoredPiece, loaded: Loaded) -> str:
    """How a piece differs from its place; empty where it does not."""
    tensors = loaded.tensors.get("", [])
    if not tensors:
        return "no tensor"
    theirs, sizes = tensors[0], piece.chunk.sizes
    if theirs.dtype != dtype_of(record.dtype):
        return f"dtype {theirs.dtype} in place of {record.dtype}"
    if tuple(theirs.shape) != sizes:
        return f"shape {tuple(theirs.shape)} in place of {sizes}"
    box = values[tuple(slice(start, start + size) for start, size in zip(piece.chunk.offsets, sizes, strict=True))]
    return "" if torch.equal(bits(box), bits(theirs)) else "other bits"
