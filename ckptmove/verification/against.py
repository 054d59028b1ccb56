"""The second half of the restore check: nothing was lost or changed on the way from the original.

Never compares devices or the flags that follow them: those are what a conversion is there to change.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from filecmp import cmp
from typing import TYPE_CHECKING

import torch

from ckptmove.containers.opening import open_container
from ckptmove.dtypes import CAST_DOWN
from ckptmove.inventory.difference import tree_changes
from ckptmove.verification.checks import Offenders
from ckptmove.verification.restore import dense_records, places, raw_bytes, same_bytes
from ckptmove.verification.state import bits, dtype_of
from ckptmove.wording import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.layouts.whole import StoredFile, WholeCheckpoint
    from ckptmove.model import Inventory, TensorRecord
    from ckptmove.sampling import Sample
    from ckptmove.verification.state import StoredTensors


class OriginalTensors:
    """The original's tensors under the names and with the dtypes of the checkpoint that came from it.

    Attributes:
        is_cast: whether any of them has another dtype there.
    """

    def __init__(self, inventory: Inventory, original: Inventory, stored: StoredTensors) -> None:
        """Look up the original's tensors.

        Args:
            inventory: of the checkpoint, whose records will be asked for.
            original: of the original.
            stored: the original's tensors.
        """
        self.is_cast = bool(casts(inventory, original))
        self._places = places(inventory)
        self._records = _by_name(original)
        self._stored = stored

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The original of a record, cast as it was.

        Raises:
            LookupError: the original has no such tensor.
        """
        place = self._places[record.name, record.storage, record.storage_offset]
        return self._stored.tensor(self._records[record.name][place]).to(dtype_of(record.dtype))


def differences(
    checkpoint: WholeCheckpoint,
    stored: StoredTensors,
    original: WholeCheckpoint,
    original_stored: StoredTensors,
    sample: Sample | None = None,
) -> Offenders:
    """Where a checkpoint is not its original, devices and the flags that follow them aside.

    Compares every tensor by name, dtype, shape, stride and bits, everything else that the pickles hold, and
    the bytes of a directory's other files. Of tensors outside a sample no bits are compared.
    """
    found = Offenders()
    ours, theirs = _by_name(checkpoint.inventory), _by_name(original.inventory)
    seen = {record.name for record in dense_records(checkpoint.inventory, sample)}
    for name in (*theirs, *(name for name in ours if name not in theirs)):
        mine, others = ours.get(name, []), theirs.get(name, [])
        if len(mine) != len(others):
            found.add(f"{name} is missing" if len(mine) < len(others) else f"{name} is not in the original")
            continue
        for record, other in zip(mine, others, strict=True):
            text = _form_difference(record, other)
            if not text and name in seen:
                text = _bits_difference(record, stored, other, original_stored)
            if text:
                found.add(f"{name}: {text}")
    if not found:  # a tensor more or less is a difference of the trees, too
        for text in _file_differences(checkpoint, original):
            found.add(text)
    return found


def _file_differences(checkpoint: WholeCheckpoint, original: WholeCheckpoint) -> Iterator[str]:
    """Where files with all that they hold besides tensors differ."""
    ours, theirs = ({file.name: file for file in one.files} for one in (checkpoint, original))
    here, there = ours.keys() | checkpoint.others.keys(), theirs.keys() | original.others.keys()
    yield from (f"{name} is missing" for name in sorted(there - here))
    yield from (f"{name} is not in the original" for name in sorted(here - there))
    for name, file in ours.items():
        if name in theirs:
            other = theirs[name]
            sites, other_sites = (device_sites(one.inventory, one.base) for one in (file, other))
            for change in tree_changes(file.root, sites, other.root, other_sites):
                yield f"{name}: {change}" if name else str(change)
            for part in _other_parts(file, other):
                yield f"{name}: {part} is another one" if name else f"{part} is another one"
    for name, path in checkpoint.others.items():
        if name in original.others and not cmp(path, original.others[name], shallow=False):
            yield f"{name}: other bytes"


def _other_parts(file: StoredFile, original: StoredFile) -> Iterator[str]:
    """What is neither in the tree nor in a storage, and differs: code, long strings, records that somebody added."""
    ours, theirs = (_extras(one) for one in (file, original))
    return (name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))


def _extras(file: StoredFile) -> dict[str, bytes]:
    container = open_container(file.path, file.container.limits)
    with closing(container.source):
        return dict(container.extras())


def casts(inventory: Inventory, original: Inventory) -> str:
    """What a comparison with the original has made up for, for people: nothing, or how many tensors were cast."""
    before = {record.name: record.dtype for record in dense_records(original)}
    pairs = Counter(
        (before[record.name], record.dtype)
        for record in dense_records(inventory)
        if before.get(record.name, record.dtype) != record.dtype
    )
    return ", ".join(f"{amount(count, 'tensor')} cast from {one} to {other}" for (one, other), count in pairs.items())


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


def _by_name(inventory: Inventory) -> dict[str, list[TensorRecord]]:
    """Every dense tensor by its name; several where two paths read alike."""
    found: dict[str, list[TensorRecord]] = {}
    for record in dense_records(inventory):
        found.setdefault(record.name, []).append(record)
    return found


def _form_difference(ours: TensorRecord, theirs: TensorRecord) -> str:
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} in place of {theirs.shape}"
    if ours.dtype == CAST_DOWN.get(theirs.dtype):
        return ""  # a cast tensor is written anew, without gaps
    if ours.dtype != theirs.dtype:
        return f"dtype {ours.dtype} in place of {theirs.dtype}"
    return f"stride {ours.stride} in place of {theirs.stride}" if ours.stride != theirs.stride else ""


def _bits_difference(
    ours: TensorRecord, stored: StoredTensors, theirs: TensorRecord, original_stored: StoredTensors
) -> str:
    if stored.place(ours) is None or original_stored.place(theirs) is None:
        return "its bytes are not stored plainly"
    values, reference = stored.tensor(ours), original_stored.tensor(theirs)
    if ours.dtype == theirs.dtype:
        return "" if same_bytes(raw_bytes(values), raw_bytes(reference)) else "other bits"
    same = torch.equal(bits(values), bits(reference.to(values.dtype)))
    return "" if same else f"other bits than {theirs.dtype} cast to {ours.dtype}"
