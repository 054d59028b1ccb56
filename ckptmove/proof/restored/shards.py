"""The ``restore`` check of files of ranks: compare each shard that ``torch.load`` returns with its whole tensor.

torch unpickles in weights-only mode only, which accepts DTensors once ``torch.distributed.tensor`` is imported. The
shards of replicas are compared too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ckptmove.assembled.rank_part import span_of
from ckptmove.proof.checks import Joined, Offenders
from ckptmove.proof.restored.pages import PageRelease
from ckptmove.proof.tensors.stored import same_bits
from ckptmove.text import amount

if TYPE_CHECKING:
    import torch

    from ckptmove.assembled.rank_part import RankFilesPart
    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.model import Span, TensorRecord
    from ckptmove.proof.restored.loaded import Loaded, LoadedFiles


@dataclass(slots=True)
class ShardsTally(Joined):
    """Figures and faults of the shards compared so far."""

    shards: int = 0  # number of shards compared
    #: shards that differ from their part of the tensor, with their files.
    differing: Offenders = field(default_factory=Offenders)
    errors: dict[str, str] = field(default_factory=dict)  # files that could not be loaded, and why
    refused: dict[str, str] = field(default_factory=dict)  # files that weights-only mode refuses, and why
    #: pages of the mapped files, which are released after the comparison.
    _pages: dict[str, PageRelease] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The compared shards as text."""
        if not self.shards:
            return ""
        return (
            f"; {amount(self.shards, 'shard')} of them loaded by torch.load(weights_only=True) after import "
            "torch.distributed.tensor"
        )


def compare_shards(
    record: TensorRecord, values: torch.Tensor, part: RankFilesPart, loaded: LoadedFiles, tally: ShardsTally
) -> bool:
    """Compare each loaded shard of a tensor with the assembled tensor, or the first rank's own tensor with its file.

    Returns:
        Whether torch loads a file with a part of it.
    """
    key = cast("str", part.own_key(record))  # a tensor without a storage has no values
    if not part.is_sharded(key):
        own = _of_rank(part.lead, loaded, tally)
        if own is not None and not _equal(values, own.tensors.get(part.own_name(record.name))):
            tally.differing.add(f"{record.name} ({part.lead.name})")
        return own is not None
    before = tally.shards
    for box in part.boxes_of(key):
        file, sizes = box.file.part, box.chunk.sizes
        whole = _of_rank(file, loaded, tally)
        if whole is None:
            continue
        tally.shards += 1
        mine = values[_slices(box.chunk.offsets, sizes)]
        theirs = whole.tensors.get(f"{box.path}._local_tensor")
        shards = [one[_slices(box.offsets, sizes)] for one in theirs or ()]
        if not _equal(mine, shards):
            tally.differing.add(f"{record.name} ({file.name})")
        else:
            # All of its bytes are in the file, because torch has loaded them.
            start, _ = span = cast("Span", span_of(box))
            tally._pages[file.name].seen(shards[0].data_ptr(), start, span.nbytes)
    return tally.shards > before


def _of_rank(file: FilePart, loaded: LoadedFiles, tally: ShardsTally) -> Loaded | None:
    """The file as torch loads it; None if it does not."""
    found = loaded.of_rank(file)
    if file.name not in tally._pages:
        tally._pages[file.name] = PageRelease(enabled=found.is_mapped and file.byteorder == sys.byteorder)
    if found.refusal:
        tally.refused[file.name] = found.refusal
    elif found.error:
        tally.errors[file.name] = found.error
    return None if found.refusal or found.error else found


def _slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _equal(values: torch.Tensor, theirs: list[torch.Tensor] | None) -> bool:
    """Whether torch has loaded exactly one tensor of this name, with the same dtype, shape and bits."""
    if theirs is None or len(theirs) != 1 or (theirs[0].dtype, theirs[0].shape) != (values.dtype, values.shape):
        return False
    return same_bits(values, theirs[0])
