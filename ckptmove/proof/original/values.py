"""Values of two checkpoints, read by torch and by safetensors, and compared bit for bit.

Nothing here uses code that cuts, casts or writes tensors. The places of a tensor's chunks in several files are those
that ``convert`` reads, too.
"""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from ckptmove.io.part import MemorySource
from ckptmove.lazy.stored import StoredBytes
from ckptmove.model import Span
from ckptmove.proof.equality import bits, has_values, same_integers
from ckptmove.proof.restored.pieces import as_stored, join_pieces
from ckptmove.proof.restored.survey import LoadedTensors, raw_bytes
from ckptmove.proof.tensors.stored import distinct

if TYPE_CHECKING:
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import TensorRecord
    from ckptmove.proof.restored.loaded import LoadedFiles
    from ckptmove.proof.tensors.pieces import Window
    from ckptmove.proof.tensors.stored import StoredTensors


class TorchTensors:
    """The tensors of a checkpoint as ``torch.load`` and safetensors return them, on the CPU.

    A tensor in several files is put together by torch from the pieces that it loads. What torch does not load is built
    from the stored bytes, which Python's ``zipfile`` inflates.
    """

    def __init__(self, checkpoint: OpenCheckpoint, loaded: LoadedFiles, stored: StoredTensors) -> None:
        self._loaded, self._stored = loaded, stored
        self._whole = LoadedTensors(loaded, stored, checkpoint.inventory, stored)
        self._deflated = {
            (part.name, part.own_name(fact.storage_key))
            for part in checkpoint.parts
            for fact in part.inventory.facts
            if fact.kind == "compressed-storage" and part.is_file
        }
        #: Open files of safetensors, by path.
        self._tables: dict[str, Any] = {}

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """The tensor of a record, or a run of its elements; it must not be written to."""
        home = self._stored.part_of(record)
        if home is not None and (home.name, home.own_key(record)) in self._deflated and not self._loaded.has(home.name):
            return self._inflated(home, record)
        part = None if home is None else self._loaded.assembled(home.name)
        if part is None or window is not None:
            return self._whole.tensor(record, window)
        joined = join_pieces(record, part, self._loaded, self._tables)
        return self._stored.tensor(record) if joined is None else joined

    def _inflated(self, part: OpenPart, record: TensorRecord) -> torch.Tensor:
        with zipfile.ZipFile(part.path) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(f"/data/{part.own_key(record)}"))
            data = archive.read(name)
        return as_stored(StoredBytes(MemorySource(part.path, data), Span(0, len(data)), part.byteorder), record)


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    """How a tensor differs from its original, as text that follows its name; empty if it does not.

    Strides may differ. If the dtypes do, torch casts the original first.
    """
    if mine.shape != theirs.shape:
        return f": shape {list(mine.shape)} in place of {list(theirs.shape)}"
    scales = _scales(mine), _scales(theirs)
    if None not in scales and scales[0] != scales[1]:
        return ": another scale"
    mine, theirs = _plain(mine), _plain(theirs)
    is_cast = mine.dtype != theirs.dtype
    if not is_cast and mine.stride() == theirs.stride() and same_integers(raw_bytes(mine), raw_bytes(theirs)):
        return ""
    one, two = distinct(mine), distinct(theirs)
    if one.shape != two.shape:
        if mine.numel() not in {one.numel(), two.numel()}:
            return ": its elements overlap in a different way on each side"
        one, two = mine, theirs  # expanded on one side; the other one has all elements
    return "" if has_values(one, two) else ": other bits"


def digest(values: torch.Tensor) -> bytes | None:
    """SHA-256 of a tensor's elements in order; None if they overlap, so that they may be far more than their bytes."""
    hashed = hashlib.sha256(repr((tuple(values.shape), _scales(values))).encode())
    values = _plain(values)
    if distinct(values).numel() < values.numel():
        return None
    data: Any = bits(values).contiguous().numpy()  # a buffer, which its type does not tell
    hashed.update(data)
    return hashed.digest()


def _scales(values: torch.Tensor) -> tuple[object, ...] | None:
    """Scale and zero point of a quantized tensor; None if it was built from the stored bytes, without them.

    Those of a tensor for each channel are tensors of their own.
    """
    try:
        is_whole = values.is_quantized and values.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}
    except RuntimeError:
        return None
    return (values.q_scale(), values.q_zero_point()) if is_whole else ()


def _plain(values: torch.Tensor) -> torch.Tensor:
    """The elements themselves: without a lazy conjugation or negation, and of a quantized tensor the integers."""
    return (values.int_repr() if values.is_quantized else values).resolve_conj().resolve_neg()
