"""The result of a remapping as an open checkpoint, without writing it: what a converted checkpoint must equal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from ckptmove.assembled.zero import gather_partitions
from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.checkpoint.merge import merge_inventories, moved_inventory
from ckptmove.checkpoint.parts import FilePart, OpenPart
from ckptmove.checkpoint.tree_part import NewTreePart
from ckptmove.conversion.remap.errors import NotInFormat
from ckptmove.conversion.remap.gather import gathered_names
from ckptmove.conversion.remap.kept_files import replaced_by_shards
from ckptmove.conversion.remap.new_files import merged_metadata
from ckptmove.conversion.remap.remapping import remap
from ckptmove.conversion.shards import INDEX_NAME, shard_names
from ckptmove.conversion.to_safetensors import dense_records, tied_names
from ckptmove.formats.facts import facts_of
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of
from ckptmove.lazy.cast import Cast
from ckptmove.lazy.stored import StoredBytes, Strided
from ckptmove.lazy.tensor import Elements
from ckptmove.model import Span
from ckptmove.moves import MovePlan, MoveRequest, Remap
from ckptmove.pickles.build import new_dict, ordered_dict
from ckptmove.pickles.tree import Call, Dict, Tuple
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.remap.kept_files import KeptFiles
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.io.listing import Listing
    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value

#: Place of ``requires_grad`` in the arguments of ``_rebuild_tensor_v2`` and ``_rebuild_tensor_v3`` (torch/_utils.py).
_REQUIRES_GRAD: Final = 4


def expected(original: OpenCheckpoint, converted: OpenCheckpoint, options: Remap, limits: Limits) -> OpenCheckpoint:
    """The checkpoint that a conversion of the original must have written.

    Args:
        original: the original, with its trees, which are changed.
        converted: the checkpoint to compare with it; only its form counts.
        options: the options of the conversion, other than devices.

    Returns:
        The original itself if nothing but devices can have changed.
    """
    one_file = converted.listing is None
    is_rank = any(map(is_partitioned, converted.inventory.optimizers))
    whole = gather_partitions(original, limits) if one_file and not is_rank else None
    original = whole or original
    is_table = all(facts_of(part.inventory.container).is_table for part in converted.parts)
    was_table = all(facts_of(part.inventory.container).is_table for part in original.parts)
    is_gathered = one_file and _may_be_gathered(original, converted)
    is_resharded = not one_file and is_table and _is_resharded(original, converted, options)
    as_file = one_file or is_resharded or bool(options.as_root)
    is_deflated = any(fact.kind == "compressed-storage" for fact in original.inventory.facts)
    is_new = whole is not None or is_gathered or is_resharded or is_deflated or is_table != was_table
    if options == Remap() and not is_new:
        return original
    plan = MovePlan(MoveRequest(to=None, remap=options))
    try:
        result = remap(original, plan, limits, as_file=as_file)
        is_new_table = result.is_file and is_table and not (was_table and original.is_whole)
        found = _opened(original, result, limits, is_table=is_table, is_new_table=is_new_table)
    except NotInFormat:
        if options == Remap():
            return original
        raise
    if one_file or not as_file or original.listing is None:
        return found
    return _with_other_files(original, original.listing, found, converted)


def _is_resharded(original: OpenCheckpoint, converted: OpenCheckpoint, options: Remap) -> bool:
    """Whether a directory of safetensors files was written with a size of shards.

    If the original has files of the same names, the index or the metadata shows it: each new shard has the metadata of
    all old ones.
    """
    names = [part.name for part in converted.parts]
    sources = {part.name: part for part in original.parts}
    has_names = names == shard_names(len(names))
    if not sources.keys() >= set(names):
        return has_names or options != Remap()
    if not has_names:
        return False
    if (INDEX_NAME in original.others) != (INDEX_NAME in converted.others):
        return True
    found = [merged_metadata([part]) for part in converted.parts]
    if found == [merged_metadata([sources[name]]) for name in names]:
        return False
    whole = merged_metadata([part for part in original.parts if part.inventory.storages])
    return all(one == whole for one in found)


def _with_other_files(
    original: OpenCheckpoint, listing: Listing, found: OpenCheckpoint, converted: OpenCheckpoint
) -> OpenCheckpoint:
    """The expected shards with the other files of the original, and an index that fits the converted shards."""
    names = [part.name for part in converted.parts]
    indexes: dict[str, bytes] = {}
    if len(names) > 1 and names == shard_names(len(names)):
        tensors = ((part.own_name(one.name), part.name) for part in converted.parts for one in part.inventory.tensors)
        indexes = {original.top + INDEX_NAME: json.dumps({"weight_map": dict(tensors)}).encode()}
    gone = replaced_by_shards(original, listing, (*names, INDEX_NAME) if indexes else names)
    others = tuple(path for path in original.others if path not in gone)
    return replace(
        found,
        listing=listing,
        links=original.links,
        others=(*others, *indexes),
        rewritten=indexes,
        top=original.top,
    )


def _may_be_gathered(original: OpenCheckpoint, converted: OpenCheckpoint) -> bool:
    """Whether a file may be what ``convert`` writes for a directory or an archive: some names agree."""
    inventory = original.inventory
    if (
        original.is_whole
        or not isinstance(inventory, DirectoryInventory)
        or inventory.sharding
        or inventory.checkpoints
    ):
        return False
    names = gathered_names(original.parts)
    return any(tensor.name in names for tensor in converted.inventory.tensors)


def _opened(
    original: OpenCheckpoint, result: Remapped, limits: Limits, *, is_table: bool, is_new_table: bool
) -> OpenCheckpoint:
    if result.is_file:
        part = ExpectedPart("", original.path, _table(result) if is_new_table else result.root, result, limits)
        # Neither a table nor a distributed checkpoint stores strides and classes of dicts.
        part.is_distributed = is_new_table or all(one.is_distributed for one in original.parts)
        if is_table and original.is_whole:
            part.put_at(0, original.parts[0].extras())
        return replace(original, inventory=part.inventory, parts=(part,), listing=None, links={}, others=(), top="")
    parts: list[OpenPart] = []
    base = 0
    kept = cast("KeptFiles", result.kept)
    for old in original.parts:
        if old.name in kept.roots:
            part = ExpectedPart(old.name, old.path, kept.roots[old.name], result, limits)
            part.put_at(base, old.extras())
            base += part.pickle_bytes
            parts.append(part)
    inventory = merge_inventories(original.path, original.inventory.container, parts, original.inventory.size_bytes)
    whole = replace(inventory, layout=original.inventory.layout)
    others = tuple(path for path in original.others if path not in kept.removed)
    return replace(original, inventory=whole, parts=tuple(parts), others=others, rewritten=kept.indexes)


def _table(result: Remapped) -> Value:
    """A state_dict as safetensors stores it: without attributes, and each tied tensor once."""
    root, sizes = result.root, {storage.key: storage.nbytes for storage in result.inventory.storages}
    tied = tied_names(dense_records(root), sizes)
    pairs = cast("Dict", as_dict(root)).pairs()
    return ordered_dict(new_dict((key, _without_grad(value)) for key, value, _ in pairs if key not in tied))


def _without_grad(value: Value) -> Value:
    """A tensor as a plain one: safetensors stores neither a Parameter nor ``requires_grad``."""
    while type(value) is Call and value.name.startswith("torch._utils._rebuild_parameter"):
        value = cast("Tuple", value.args).items[0]
    args = value.args if type(value) is Call else None
    if type(value) is Call and type(args) is Tuple and len(args.items) > _REQUIRES_GRAD:
        items = [*args.items]
        items[_REQUIRES_GRAD] = False
        value.args = Tuple(tuple(items), args.starts)
    return value


class ExpectedPart(NewTreePart):
    """A file that a conversion must have written; its bytes are read from the original."""

    has_checksums = False

    def __init__(self, name: str, path: str, root: Value, result: Remapped, limits: Limits) -> None:
        super().__init__(name, path, root, limits)
        self._result = result
        self.byteorder = next((result.homes[one.key][0].byteorder for one in self.inventory.storages), "little")
        self._kept: tuple[str, StoredBytes | None] = ("", None)

    def put_at(self, base: int, extras: Mapping[str, bytes]) -> None:
        """Make it a part of several files; ``extras`` is the other content of its file."""
        self.base, self._extras = base, extras
        self.inventory = moved_inventory(self.name, self.inventory, base)

    def storage(self, key: str) -> StoredBytes | None:
        if self._kept[0] != key:
            self._kept = key, self._changed(key)
        return self._kept[1]

    def _changed(self, key: str) -> StoredBytes | None:
        part, _ = self._result.homes[key]
        own = key[len(part.name) + 1 :] if part.name else key
        stored = part.storage(own) or _inflated(part, own)
        change = self._result.storages.changes.get(key)
        if stored is None:
            return None
        if change is None:
            return stored
        start = stored.span.start + change.span.start
        cut = StoredBytes(stored.source, Span(start, start + change.span.nbytes), stored.byteorder)
        return cut if change.cast is None else _cast(cut, change.cast)


def _inflated(part: OpenPart, key: str) -> StoredBytes | None:
    """Bytes of a deflated storage, in memory; None if they are missing."""
    if not isinstance(part, FilePart):
        return None
    with part.content() as (container, _):
        segment = container.storage_segment(key)
        if segment is None:
            return None
        data = b"".join(bytes(block) for block in blocks_of(container.source, (segment,)))
    return StoredBytes(MemorySource(part.path, data), Span(0, len(data)), part.byteorder)


def _cast(stored: StoredBytes, dtypes: tuple[str, str]) -> StoredBytes:
    source, target = dtypes
    count = stored.span.nbytes // ITEM_BYTES[source]
    tensor = Cast(Strided(stored, source, (count,), (1,)), target)
    return StoredBytes(Elements(tensor, stored.byteorder), Span(0, tensor.nbytes), stored.byteorder)
