"""Find the tensors that ``--keep`` leaves in place, by any of their names, and everything that shares their device."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import TYPE_CHECKING, TypeAlias

from ckptmove.checkpoint.state_dicts import with_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.model import Inventory, TensorRecord
    from ckptmove.moves import Kept

#: Something that tensors share, so that they only move together: key of a storage, place in the pickle, or wrapper.
_Bond: TypeAlias = "str | int | TensorRecord"


def wrapper_devices(inventory: Inventory) -> dict[str, int]:
    """Places in the pickle of the devices of wrapper subclasses, by name; only editable ones.

    A wrapper subclass has no storage: its values are in inner tensors, and its device is a ``torch.device``.
    """
    sites = {mention.where: mention.site for mention in inventory.mentions if mention.tuple_site is not None}
    return {
        record.name: site
        for record in inventory.tensors
        if record.kind == "wrapper-subclass" and (site := sites.get(_device_path(record))) is not None
    }


def dragged_along(kept: Iterable[Kept], globs: Sequence[str]) -> tuple[Kept, ...]:
    """Tensors that stay only because they share memory with a match of a glob; its inner tensors count as matches."""
    stay = [one for one in kept if one.reason == "keep"]
    is_named = _compiled(globs).match
    inside = tuple(f"{one.name}." for one in stay if is_named(one.name))
    return tuple(one for one in stay if not is_named(one.name) and not one.name.startswith(inside))


def kept_tensors(inventory: Inventory, globs: Sequence[str]) -> frozenset[str]:
    """Names of the tensors that stay, and of their parts.

    A tied tensor stays under all of its names if a glob matches one of them. A view stays with its storage, and a
    wrapper subclass with its inner tensors.
    """
    if not globs:
        return frozenset()
    glob = _compiled(globs)
    wrappers = wrapper_devices(inventory)
    together: dict[_Bond, list[int]] = {}
    bonds_of: list[list[_Bond]] = []
    found: dict[int, None] = {}
    for index, (record, outermost) in enumerate(with_wrappers(inventory.tensors)):
        # The place of its device stands for storages without a device tag.
        site = wrappers.get(record.name, record.device_site)
        bonds: list[_Bond] = (
            [part.storage for part in record.dense() if part.storage is not None] if site is None else [site]
        )
        bonds += [outermost] if outermost is not None else []
        bonds_of.append(bonds)
        for bond in bonds:
            together.setdefault(bond, []).append(index)
        if any(map(glob.match, _names(record))):
            found[index] = None
    todo = list(found)
    while todo:
        for bond in bonds_of[todo.pop()]:
            more = [index for index in together.pop(bond, ()) if index not in found]
            found.update(dict.fromkeys(more))
            todo += more
    return frozenset(name for index in found for name in _names(inventory.tensors[index]))


def kept_sites(inventory: Inventory, globs: Sequence[str]) -> frozenset[int]:
    """Starts of the operations that push a value that stays: a flag of a group, or the device of a mention.

    A value with several paths has one start, so that it stays if a glob matches any of them.
    """
    if not globs:
        return frozenset()
    glob = _compiled(globs)
    mentions = ((mention.where, mention.site) for mention in inventory.mentions)
    return frozenset(
        site for path, site in (*flag_paths(inventory), *mentions) if site is not None and glob.match(path)
    )


def flag_paths(inventory: Inventory) -> Iterator[tuple[str, int]]:
    """Path and start of every flag in the parameter groups."""
    for optimizer in inventory.optimizers:
        for group in optimizer.groups:
            for flag in group.flags:
                yield f"{group.where}.{flag.name}", flag.site


def _compiled(globs: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, globs)))


def _device_path(wrapper: TensorRecord) -> str:
    return f"{wrapper.name}.device" if wrapper.name else "device"


def _names(record: TensorRecord) -> list[str]:
    """All names by which a glob may match a tensor."""
    device = [_device_path(record)] if record.kind == "wrapper-subclass" else []
    return [record.name, *(part.name for part in record.parts), *device]
