"""The second half of the restore check: nothing was lost or changed on the way from the original.

Never compares devices or the flags that follow them: those are what a conversion is there to change.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from ckptmove.counterparts import find_counterparts, seen_from_top
from ckptmove.dtypes import CAST_DOWN
from ckptmove.inventory.difference import tree_changes
from ckptmove.layouts.detect import is_index
from ckptmove.layouts.stored import side_by_side
from ckptmove.objects import ObjectsBeside
from ckptmove.verification.checks import Offenders
from ckptmove.verification.restore import NOT_COMPARED, raw_bytes, same_bytes
from ckptmove.verification.state import bits, dtype_of
from ckptmove.wording import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.counterparts import Counterparts, Stored
    from ckptmove.layouts.stored import StoredCheckpoint
    from ckptmove.layouts.stored_part import StoredPart
    from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, TensorRecord
    from ckptmove.sampling import Sample
    from ckptmove.verification.state import StoredTensors


class OriginalTensors:
    """The original's tensors under the names and with the dtypes of the checkpoint that came from it.

    Attributes:
        is_cast: whether any of them has another dtype there.
    """

    def __init__(self, found: Counterparts, original: Inventory, stored: StoredTensors) -> None:
        """Look up the original's tensors.

        Args:
            found: tensors of the checkpoint, whose records will be asked for, with those of the original.
            original: the original.
            stored: its tensors.
        """
        self._optimizers = original.optimizers
        self.is_cast = bool(casts(found))
        self._records = {_key(mine): theirs for mine, theirs in _dense_pairs(found)}
        self._stored = stored

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The original of a record, cast as it was.

        Raises:
            LookupError: the original has no such tensor.
        """
        theirs = self._records.get(_key(record))
        if theirs is None:
            raise LookupError(f"the original has no {record.name}")
        return self._stored.tensor(theirs).to(dtype_of(record.dtype))

    def groups(self, optimizer: OptimizerRecord) -> tuple[ParamGroup, ...]:
        """The groups of an optimizer in the original; none where it has no such one, or other groups.

        Args:
            optimizer: one of the checkpoint's.
        """
        alike = [one for one in self._optimizers if one.where == optimizer.where] or self._optimizers
        groups = alike[0].groups if len(alike) == 1 else ()
        return groups if len(groups) == len(optimizer.groups) else ()


class Comparison(NamedTuple):
    """How a checkpoint compares with its original.

    Attributes:
        lost: where it is not what the original is.
        notes: what was compared in another way than it lies, or not at all, for people.
    """

    lost: Offenders
    notes: tuple[str, ...] = ()


def counterparts(checkpoint: StoredCheckpoint, original: StoredCheckpoint) -> Counterparts:
    """Which of their tensors and files belong together; an archive's top folder aside, where it is its own."""
    return find_counterparts(*side_by_side(checkpoint, original))


def differences(
    checkpoint: StoredCheckpoint,
    stored: StoredTensors,
    original: StoredCheckpoint,
    original_stored: StoredTensors,
    found: Counterparts,
    sample: Sample | None = None,
) -> Comparison:
    """Where a checkpoint is not its original, devices and the flags that follow them aside.

    Compares every tensor by name, dtype, shape, stride and bits, everything else that the pickles hold, and
    the bytes of a directory's other files. Of tensors outside a sample no bits are compared.
    """
    lost = Offenders()
    for theirs in found.added:
        lost.add(f"{theirs.record.name} is missing")
    for mine, theirs in found.pairs:
        for text in _pair_differences(mine, stored, theirs, original_stored, sample):
            lost.add(text)
    for mine in found.removed:
        lost.add(f"{mine.record.name} is not in the original")
    for unknown in found.ambiguous:
        lost.add(f"{unknown.name}: {unknown.reason}")
    rest = _Rest(*side_by_side(checkpoint, original), found)
    if not lost:  # a tensor more or less is a difference of the trees, too
        for text in rest.differences():
            lost.add(text)
    return Comparison(lost, tuple(rest.notes))


class _Rest:
    """What files hold besides tensors, and the files that hold none."""

    def __init__(self, one: StoredCheckpoint, other: StoredCheckpoint, found: Counterparts) -> None:
        self._one, self._other, self._found = one, other, found
        self.notes: list[str] = []

    def differences(self) -> Iterator[str]:
        """Where they differ; fills the notes."""
        pairs = [*self._found.parts, *self._moved()]
        if self._one.listing is not None and self._other.listing is not None:
            yield from self._alone({id(part) for pair in pairs for part in pair})
        elif self._one.others or self._other.others:
            self.notes.append("other files were not compared, as one side is one file")
        for mine, theirs in pairs:
            for text in self._part(mine, theirs):
                yield f"{mine.name}: {text}" if mine.name else text
        yield from self._others()

    def _moved(self) -> Iterator[tuple[StoredPart, StoredPart]]:
        """Files that lie elsewhere in the original, of which each has its counterpart."""
        moved = list(self._found.moved.values())
        times = Counter(id(part) for pair in (*moved, *self._found.parts) for part in pair)
        for mine, theirs in moved:
            if times[id(mine)] == times[id(theirs)] == 1:
                yield mine, theirs
        if any(times[id(part)] > 1 for pair in moved for part in pair):
            self.notes.append("of files that are cut otherwise there only the tensors were compared")

    def _alone(self, paired: set[int]) -> Iterator[str]:
        """Files that only one side has; one whose tensors lie in other files there is none."""
        moved = {id(part) for pair in self._found.moved.values() for part in pair} | paired
        here, there = (
            {
                *(seen_from_top(side, part.name) for part in side.parts if id(part) not in moved),
                *(place for place in _others(side) if not (self._found.moved and is_index(place.rpartition("/")[2]))),
            }
            for side in (self._one, self._other)
        )
        yield from (f"{name} is missing" for name in sorted(there - here))
        yield from (f"{name} is not in the original" for name in sorted(here - there))

    def _part(self, mine: StoredPart, theirs: StoredPart) -> Iterator[str]:
        sites = [
            frozenset() if part.is_distributed else device_sites(part.inventory, part.base) for part in (mine, theirs)
        ]
        beside = ObjectsBeside(mine, theirs, self._found.twins)
        if beside.keeps_less:
            yield from map(str, beside.kept_changes((sites[0], sites[1])))
        else:
            trees = mine.tree(), sites[0], theirs.tree(), sites[1]
            yield from map(str, tree_changes(*trees, is_apart=beside.is_apart))
        yield from map(str, beside.twin_changes(flags_count=False))
        self.notes += beside.notes
        if beside.is_mixed:
            return
        ours, others = mine.extras(), theirs.extras()
        for name in sorted({*ours, *others}):
            if ours.get(name) != others.get(name):
                yield f"{name} is another one"

    def _others(self) -> Iterator[str]:
        ours, theirs = _others(self._one), _others(self._other)
        for place, path in ours.items():
            if place in theirs and self._one.described(path) != self._other.described(theirs[place]):
                if self._found.moved and is_index(place.rpartition("/")[2]):
                    continue  # it says which file holds what
                yield f"{path}: other bytes"


def _others(side: StoredCheckpoint) -> dict[str, str]:
    """The files of a side that are no checkpoints, by their paths from the top of it."""
    return {seen_from_top(side, path): path for path in side.others if path not in side.links}


def casts(found: Counterparts) -> str:
    """What a comparison with the original has made up for, for people: nothing, or how many tensors were cast."""
    pairs = Counter((theirs.dtype, mine.dtype) for mine, theirs in _dense_pairs(found) if theirs.dtype != mine.dtype)
    return ", ".join(f"{amount(count, 'tensor')} cast from {one} to {other}" for (one, other), count in pairs.items())


def _dense_pairs(found: Counterparts) -> Iterator[tuple[TensorRecord, TensorRecord]]:
    """The dense tensors of both that have bytes."""
    for mine, theirs in found.pairs:
        if not NOT_COMPARED & {mine.record.kind, theirs.record.kind}:
            yield from zip(mine.record.dense(), theirs.record.dense(), strict=False)


def _key(record: TensorRecord) -> tuple[str, str | None, int]:
    return record.name, record.storage, record.storage_offset


def device_sites(inventory: Inventory, base: int = 0) -> frozenset[int]:
    """The places in an object pickle that a conversion may change: tags, named devices, flags, cast classes.

    Args:
        inventory: what the pickle holds.
        base: what was added to the sites in it, where it is a part of a directory's.
    """
    sites: set[int | None] = set()
    for storage in inventory.storages:
        sites.update(storage.tag_sites, storage.class_sites)
    for record in inventory.tensors:
        sites.update(part.device_site for part in (record, *record.parts))
    for mention in inventory.mentions:
        sites |= {mention.site, mention.index_site, mention.tuple_site}
    for optimizer in inventory.optimizers:
        sites.update(flag.site for group in optimizer.groups for flag in group.flags)
    return frozenset(site - base for site in sites if site is not None)


def _pair_differences(
    one: Stored, stored: StoredTensors, two: Stored, original_stored: StoredTensors, sample: Sample | None
) -> Iterator[str]:
    """How two tensors differ; those without bytes of their own are compared as a part of the tree."""
    ours, theirs = one.record, two.record
    if NOT_COMPARED & {ours.kind, theirs.kind}:
        if ours.kind != theirs.kind:
            yield f"{ours.name}: {ours.kind} in place of {theirs.kind}"
        return
    mine, others = ours.dense(), theirs.dense()
    if len(mine) != len(others):
        yield f"{ours.name}: another kind of tensor"
        return
    # A distributed checkpoint keeps no strides: its tensors are contiguous, whatever they were.
    has_strides = not (one.part.is_distributed or two.part.is_distributed)
    for record, other in zip(mine, others, strict=True):
        text = _form_difference(record, other, has_strides=has_strides)
        if not text and (sample is None or ours.name in sample.names):
            text = _bits_difference(record, stored, other, original_stored)
        if text:
            yield f"{record.name}: {text}"


def _form_difference(ours: TensorRecord, theirs: TensorRecord, *, has_strides: bool) -> str:
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} in place of {theirs.shape}"
    if ours.dtype == CAST_DOWN.get(theirs.dtype):
        return ""  # a cast tensor is written anew, without gaps
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} in place of {theirs.dtype}"
    if has_strides and ours.stride != theirs.stride:
        return f"stride {ours.stride} in place of {theirs.stride}"
    return ""


def _bits_difference(
    ours: TensorRecord, stored: StoredTensors, theirs: TensorRecord, original_stored: StoredTensors
) -> str:
    if stored.place(ours) is None or original_stored.place(theirs) is None:
        return "its bytes are not stored plainly"
    values, reference = stored.tensor(ours), original_stored.tensor(theirs)
    if ours.dtype == theirs.dtype and ours.stride == theirs.stride:
        return "" if same_bytes(raw_bytes(values), raw_bytes(reference)) else "other bits"
    same = torch.equal(bits(values), bits(reference.to(values.dtype)))
    cast = f" than {theirs.dtype} cast to {ours.dtype}" if ours.dtype != theirs.dtype else ""
    return "" if same else f"other bits{cast}"
