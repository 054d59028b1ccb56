"""Merge the inventories of several files into one, and split a plan for the whole by file."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar, cast

from ckptmove.checkpoint.directories import DirectoryInventory, FileRecord
from ckptmove.checkpoint.file_names import UNIVERSAL_FILE
from ckptmove.checkpoint.state_dicts import RootKeys
from ckptmove.checkpoint.trainers import Counters, agreed, file_role, with_file_role
from ckptmove.formats.facts import facts_of
from ckptmove.torch_facts.weights_only import newest

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import (
        Inventory,
        Mention,
        OptimizerRecord,
        Role,
        StorageRef,
        TensorRecord,
    )
    from ckptmove.moves import FlagEdit, MovePlan, StorageEdit

_Unique = TypeVar("_Unique", bound="Hashable")


def moved_inventory(path: str, inventory: Inventory, base: int) -> Inventory:
    """Rewrite the inventory of a file as a part of the whole: prefix names and keys, and shift sites.

    ``path`` is that of the file in the directory, or of a folder that is one checkpoint; empty for the directory
    itself. ``base`` is the total length of the pickles of all files before it.
    """
    place = "optimizer" if UNIVERSAL_FILE.fullmatch(path) else file_role(path.rpartition("/")[2])
    mover = _Mover(path, base, place)
    # Code in an archive depends on dtypes, so its storages are not cast: they get no class sites.
    is_code = facts_of(inventory.container).has_code
    storages = map(mover.storage, inventory.storages)
    roles = (place,) if place in {"scheduler", "scaler", "rng"} else ()
    return replace(
        inventory,
        root_keys=_root_keys(path, inventory),
        tensors=tuple(map(mover.tensor, inventory.tensors)),
        storages=tuple(one._replace(class_sites=()) if is_code else one for one in storages),
        mentions=tuple(map(mover.mention, inventory.mentions)),
        optimizers=tuple(map(mover.optimizer, inventory.optimizers)),
        apart=tuple(use._replace(record=f"{path}/{use.record}" if path else use.record) for use in inventory.apart),
        facts=tuple(fact.below(path) for fact in inventory.facts),
        contents=inventory.contents.union(roles),
        rng_devices=tuple((mover.name(where), count) for where, count in inventory.rng_devices),
        last_rates=tuple((mover.name(where), rates) for where, rates in inventory.last_rates),
        broken_numbers=tuple(one._replace(where=mover.name(one.where)) for one in inventory.broken_numbers),
        sections=(
            *((path, role) for role in roles),
            *((mover.name(where), role) for where, role in inventory.sections),
        ),
        objects=tuple(map(mover.name, inventory.objects)),
    )


def file_record(path: str, inventory: Inventory) -> FileRecord:
    """Row of a file in the table of files, from its inventory as a part of the whole."""
    since = [use.weights_only_since for use in inventory.globals if use.weights_only_since is not None]
    is_refused = inventory.foreign_opcodes or len(since) < len(inventory.globals)
    return FileRecord(
        path=path,
        roles=_roles(inventory),
        container=inventory.container,
        layout=inventory.layout,
        size_bytes=inventory.size_bytes,
        tensors=len(inventory.tensors),
        devices=tuple(dict.fromkeys(tensor.device for tensor in inventory.tensors)),
        weights_only_since=None if is_refused else newest(since),
        refused=()
        if inventory.foreign_opcodes
        else tuple(use.name for use in inventory.globals if not use.weights_only),
        runs=tuple(use.name for use in (*inventory.globals, *inventory.apart) if use.verdict == "dangerous"),
    )


def merge_inventories(path: str, container: str, parts: Sequence[OpenPart], size_bytes: int) -> DirectoryInventory:
    """Merge the inventories of all parts; the layout is left to the caller."""
    each = [part.inventory for part in parts]
    counters = agreed(Counters(one.epoch, one.step) for one in each)
    programs = (one.producer for one in each if not facts_of(one.container).is_table)
    return DirectoryInventory(
        path=path,
        container=container,
        layout="other",
        size_bytes=size_bytes,
        torch_version=next((one.torch_version for one in each if one.torch_version), None),
        producer=next(filter(None, programs), None),
        root_keys=tuple(chain.from_iterable(one.root_keys for one in each)),
        tensors=tuple(chain.from_iterable(one.tensors for one in each)),
        storages=tuple(chain.from_iterable(one.storages for one in each)),
        mentions=tuple(chain.from_iterable(one.mentions for one in each)),
        # ``torch.load`` never reads a distributed checkpoint, so only its dangerous names are reported.
        globals=_once(
            use
            for one in each
            for use in one.globals
            if use.verdict == "dangerous" or not facts_of(one.container).is_distributed
        ),
        apart=tuple(chain.from_iterable(one.apart for one in each)),
        foreign_opcodes=_once(chain.from_iterable(one.foreign_opcodes for one in each)),
        filled_classes=_once(chain.from_iterable(one.filled_classes for one in each)),
        optimizers=tuple(chain.from_iterable(one.optimizers for one in each)),
        facts=tuple(chain.from_iterable(one.facts for one in each)),
        contents=frozenset().union(*(one.contents for one in each)),
        rng_devices=tuple(chain.from_iterable(one.rng_devices for one in each)),
        last_rates=tuple(chain.from_iterable(one.last_rates for one in each)),
        broken_numbers=tuple(chain.from_iterable(one.broken_numbers for one in each)),
        sections=tuple(chain.from_iterable(one.sections for one in each)),
        objects=tuple(chain.from_iterable(one.objects for one in each)),
        epoch=counters.epoch,
        step=counters.step,
        files=tuple(chain.from_iterable(part.rows for part in parts)),
    )


def split_plan(plan: MovePlan, parts: Sequence[OpenPart]) -> tuple[MovePlan, ...]:
    """Split a plan for the whole into one for each part, with the keys and sites of its file.

    Kept tensors are left out because they change nothing, and inflated storages because the container knows them.
    """
    bases = [part.base for part in parts]
    edits: list[list[StorageEdit]] = [[] for _ in parts]
    flags: list[list[FlagEdit]] = [[] for _ in parts]
    for edit in plan.edits:
        index = bisect_right(bases, edit.sites[0]) - 1
        back = _Mover(parts[index].name, -bases[index], None)
        edits[index].append(back.edit(edit))
    for flag in plan.flags:
        # A plan contains only values that can be edited, so a site exists.
        site = cast("int", flag.site if flag.mention is None else flag.mention.site)
        index = bisect_right(bases, site) - 1
        back = _Mover(parts[index].name, -bases[index], None)
        flags[index].append(back.flag_edit(flag))
    return tuple(
        plan._replace(edits=tuple(own), kept=(), flags=tuple(set_), inflates=())
        for own, set_ in zip(edits, flags, strict=True)
    )


class _Mover:
    """Prefixes names and keys with the path of a file, and shifts sites by the length of the pickles before it."""

    def __init__(self, path: str, base: int, place: Role | None) -> None:
        self._path = path
        self._base = base
        self._place = place
        self._tensors: dict[int, TensorRecord] = {}

    def name(self, name: str) -> str:
        return f"{self._path}.{name}" if name and self._path else name or self._path

    def key(self, key: str) -> str:
        return f"{self._path}/{key}" if self._path else key

    def site(self, site: int | None) -> int | None:
        return None if site is None else site + self._base

    def sites(self, sites: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(site + self._base for site in sites)

    def tensor(self, record: TensorRecord) -> TensorRecord:
        """Move a tensor once, because optimizer state refers to the same record again."""
        moved = self._tensors.get(id(record))
        if moved is None:
            moved = self._tensors[id(record)] = with_file_role(
                record._replace(
                    name=self.name(record.name),
                    storage=None if record.storage is None else self.key(record.storage),
                    parts=tuple(map(self.tensor, record.parts)),
                    device_site=self.site(record.device_site),
                ),
                self._place,
            )
        return moved

    def storage(self, storage: StorageRef) -> StorageRef:
        return storage._replace(
            key=self.key(storage.key),
            tag_sites=self.sites(storage.tag_sites),
            class_sites=self.sites(storage.class_sites),
        )

    def mention(self, mention: Mention) -> Mention:
        return mention._replace(
            where=self.name(mention.where),
            site=self.site(mention.site),
            index_site=self.site(mention.index_site),
            tuple_site=self.site(mention.tuple_site),
        )

    def optimizer(self, optimizer: OptimizerRecord) -> OptimizerRecord:
        return optimizer._replace(
            where=self.name(optimizer.where),
            groups=tuple(
                group._replace(
                    where=self.name(group.where),
                    flags=tuple(flag._replace(site=flag.site + self._base) for flag in group.flags),
                )
                for group in optimizer.groups
            ),
            state=tuple(
                entry._replace(tensors=tuple((key, self.tensor(one)) for key, one in entry.tensors))
                for entry in optimizer.state
            ),
        )

    # --- the inverse, with a negative base ------------------------------------------------------------------------

    def edit(self, edit: StorageEdit) -> StorageEdit:
        return edit._replace(
            storage=edit.storage[len(self._path) + 1 :],
            sites=self.sites(edit.sites),
            class_sites=self.sites(edit.class_sites),
        )

    def flag_edit(self, flag: FlagEdit) -> FlagEdit:
        mention = flag.mention
        if mention is not None:
            mention = mention._replace(
                site=self.site(mention.site),
                index_site=self.site(mention.index_site),
                tuple_site=self.site(mention.tuple_site),
            )
        return flag._replace(mention=mention, site=self.site(flag.site))


def _root_keys(path: str, inventory: Inventory) -> tuple[str, ...]:
    """Names of the state_dicts: the file if its root is one, else the keys of its root."""
    if not path:
        return inventory.root_keys
    roots = RootKeys(inventory)
    is_state_dict = any(not roots.split(one.name)[0] for one in inventory.tensors if one.role in {"model", "other"})
    if is_state_dict or not inventory.root_keys:
        return (path,)
    return tuple(f"{path}.{key}" for key in inventory.root_keys)


def _roles(inventory: Inventory) -> tuple[Role, ...]:
    """Roles in a file: those of its tensors, and those without tensors."""
    found: dict[Role, None] = dict.fromkeys(tensor.role for tensor in inventory.tensors)
    if inventory.optimizers:
        found["optimizer"] = None
    tensorless: tuple[Role, ...] = ("scheduler", "scaler", "rng")
    found.update(dict.fromkeys(role for role in tensorless if role in inventory.contents))
    return tuple(found) or ("other",)


def _once(values: Iterable[_Unique]) -> tuple[_Unique, ...]:
    return tuple(dict.fromkeys(values))
