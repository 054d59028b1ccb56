"""The files of a directory as the one file that ``convert`` makes of them, without writing it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmove.assembled.zero import gather_partitions
from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.file_names import SHARD_FILE
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.tree_part import NewTreePart
from ckptmove.conversion.remap.gather import gathered_names
from ckptmove.conversion.remap.remapping import remap
from ckptmove.formats.facts import facts_of
from ckptmove.moves import MovePlan, MoveRequest
from ckptmove.torch_facts.devices import NO_DEVICE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.limits import Limits


def as_one_file(side: OpenCheckpoint, file: OpenCheckpoint, limits: Limits) -> OpenCheckpoint:
    """What ``convert`` makes of a directory or an archive, to compare it with a file; itself if that is another model.

    The trees of the directory are changed. Tensors of formats without devices still have none.
    """
    is_rank = any(map(is_partitioned, file.inventory.optimizers))
    whole = None if is_rank else gather_partitions(side, limits)
    if whole is None and not _may_be_gathered(side, file):
        return side
    gathered = whole or side
    result = remap(gathered, MovePlan(MoveRequest(to=None)), limits, as_file=True)
    part = _OneFile(side.path, result, limits)
    # Neither shards nor a distributed checkpoint store the class of a dict; the latter stores no strides either.
    part.is_distributed = all(one.is_distributed or SHARD_FILE.fullmatch(one.name) for one in gathered.parts)
    known = {one.name: facts_of(one.inventory.container).has_devices for one in side.parts}
    tensors = tuple(
        one if _has_device(one.storage or "", known) else one._replace(device=NO_DEVICE)
        for one in part.inventory.tensors
    )
    part.inventory = replace(part.inventory, tensors=tensors)
    return replace(side, inventory=part.inventory, parts=(part,), listing=None, links={}, top="")


def _may_be_gathered(side: OpenCheckpoint, file: OpenCheckpoint) -> bool:
    """Whether a file may be what ``convert`` writes for a directory or an archive: some names agree.

    A file of safetensors has no tree: its tensors are matched by their names.
    """
    inventory = side.inventory
    if (
        facts_of(file.inventory.container).is_table
        or side.is_whole
        or not isinstance(inventory, DirectoryInventory)
        or inventory.sharding
        or inventory.checkpoints
    ):
        return False
    names = gathered_names(side.parts)
    return any(tensor.name in names for tensor in file.inventory.tensors)


def _has_device(key: str, known: Mapping[str, bool]) -> bool:
    """Whether the file of a storage, whose path begins its key, stores devices."""
    while key and key not in known:
        key = key.rpartition("/")[0]
    return known.get(key, True)


class _OneFile(NewTreePart):
    """The file; its bytes are read from the directory."""

    has_checksums = False

    def __init__(self, path: str, result: Remapped, limits: Limits) -> None:
        super().__init__("", path, result.root, limits)
        self._homes = result.homes
        self.byteorder = next((self._homes[one.key][0].byteorder for one in self.inventory.storages), "little")

    def storage(self, key: str) -> StoredBytes | None:
        part, _ = self._homes[key]
        return part.storage(key[len(part.name) + 1 :] if part.name else key)
