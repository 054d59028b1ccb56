"""Change keys, parts, objects and dtypes of an open checkpoint, without the bytes of its tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, cast

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.entries import entries
from ckptmove.checkpoint.inventory.build import tree_inventory
from ckptmove.conversion.remap.combine import combine
from ckptmove.conversion.remap.errors import InsideObject, NoMatch, NotRemappable, SavedWhole
from ckptmove.conversion.remap.gather import gather, globs, lost_order, put_in_order, require_gatherable
from ckptmove.conversion.remap.kept_files import keep_files
from ckptmove.conversion.remap.plain import make_plain
from ckptmove.conversion.remap.rename import rename
from ckptmove.conversion.remap.select import select
from ckptmove.conversion.remap.storages import is_floating, resize
from ckptmove.errors import UsageError
from ckptmove.moves import Dropped
from ckptmove.pickles.tree import Opaque
from ckptmove.text import Argument, Phrase

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.conversion.remap.kept_files import KeptFiles
    from ckptmove.conversion.remap.storages import StoragePlan
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, Role, StorageRef, TensorRecord
    from ckptmove.moves import MovePlan, Remap, Replaced, StorageEdit
    from ckptmove.pickles.tree import Dict, Value


@dataclass(frozen=True)
class Remapped:
    """A checkpoint with its changes, before it is written."""

    root: Value  # the new tree; of several files, a dict of the path of each file and its tree
    inventory: Inventory  # content of the new tree
    plan: MovePlan  # all changes
    is_file: bool  # whether the tree is that of one file
    is_reordered: bool  # whether tensors were put into the order of an optimizer, because theirs was lost
    storages: StoragePlan  # changes of the storages
    sources: Mapping[str, str]  # keys of the root that name files, each with a glob; empty for one file
    homes: Mapping[str, tuple[OpenPart, StorageRef]]  # each storage of the original and its part, by key
    kept: KeptFiles | None = None  # files of a directory or an archive that keeps its format; else None


class _Homes(dict[str, "tuple[OpenPart, StorageRef]"]):
    """Each storage of the original and its part, by key.

    A storage that the tree has besides is not described by plain values: its class or its device is made by code, for
    example. It raises NotRemappable.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        super().__init__({one.key: (part, one) for part in checkpoint.parts for one in part.inventory.storages})
        self._where = checkpoint.path, checkpoint.parts[0].inventory.container

    def __missing__(self, key: str) -> NoReturn:
        raise NotRemappable(*self._where, f"storage '{key:.40}' is not described by plain values")


def remap(checkpoint: OpenCheckpoint, plan: MovePlan, limits: Limits, *, as_file: bool) -> Remapped:
    """Change a checkpoint, with its trees, as the request of a plan says."""
    options, inventory, listing = plan.request.remap, checkpoint.inventory, checkpoint.listing
    _require_possible(checkpoint, options, as_file=as_file)
    pickle_bytes = sum(part.inventory.size_bytes for part in checkpoint.parts)
    sources: Mapping[str, str] = {}
    root = combine(checkpoint, plan, limits)
    ranks = lost_order(root, inventory) if as_file else {}
    root, dropped, replaced = _parts(root, inventory, options, limits)
    _require_read(root, checkpoint)

    def found() -> Inventory:
        made = tree_inventory(root, inventory.path, inventory.container, limits, pickle_bytes)
        return made if checkpoint.is_whole or options.as_root else _with_roles(made, inventory)

    renamed = rename(root, inventory, options)
    if as_file and not checkpoint.is_whole and not options.as_root:
        sources = globs(cast("str", path) for path, _, _ in cast("Dict", root).pairs())
        root = gather(cast("Dict", root), inventory.path)
    put_in_order(root, ranks)
    # Other formats are opened with other devices, storages or offsets than those of their tree.
    is_as_opened = checkpoint.is_whole and inventory.container == "torch-zip" and plan.is_empty
    is_changed = not is_as_opened or dropped or replaced or renamed or options.as_root
    before = found() if is_changed else inventory
    _require_dtypes(before, options)
    moved = {edit.storage: edit.cast for edit in plan.edits if edit.cast is not None}
    storages = resize(root, before.tensors, before.storages, options, moved)
    new = found() if storages.changes or before is inventory else before
    kept, is_dropped = {storage.key for storage in new.storages}, _dropping(dropped)
    result = Remapped(
        root=root,
        inventory=new,
        plan=plan._replace(
            edits=tuple(_edits(plan, kept, storages, inventory)),
            kept=tuple(one for one in plan.kept if not is_dropped(one.name)),
            flags=tuple(flag for flag in plan.flags if not is_dropped(flag.where)),
            renamed=renamed,
            dropped=(*dropped, *_unreached(inventory, options)),
            replaced=replaced,
            trimmed=storages.trimmed,
            inflates=tuple(fact.storage_key for fact in inventory.facts if fact.kind == "compressed-storage"),
        ),
        is_file=checkpoint.is_whole or as_file,
        is_reordered=bool(ranks),
        storages=storages,
        sources=sources if len(sources) > 1 else {},
        homes=_Homes(checkpoint),
    )
    if as_file or listing is None:
        return result
    files = keep_files(checkpoint, listing, result.plan, root, new.storages)
    lost = (link.path for link in listing.links if link.path in files.removed)
    links = (Dropped(path, 0, 0, "drop" if options.drop else "only") for path in lost)
    return replace(result, kept=files, plan=result.plan._replace(dropped=(*result.plan.dropped, *links)))


def _require_possible(checkpoint: OpenCheckpoint, options: Remap, *, as_file: bool) -> None:
    """Raise UsageError or NotGathered for options that no file can fulfil."""
    if options.as_root and not (as_file or checkpoint.is_whole):
        raise UsageError(
            Phrase(
                Argument("as_root"),
                " writes one file: name it with a suffix, for example ",
                Argument("output", "model.pth"),
            )
        )
    if as_file and isinstance(checkpoint.inventory, DirectoryInventory):
        require_gatherable(checkpoint.inventory)


def _with_roles(made: Inventory, inventory: Inventory) -> Inventory:
    """The inventory of several trees with the roles that each tensor has in its own file; tied ones are in order."""
    roles: dict[object, deque[Role]] = {}
    for record in inventory.tensors:
        roles.setdefault(_view(record), deque()).append(record.role)
    tensors = []
    for record in made.tensors:
        own = roles.get(_view(record), ())
        tensors.append(record._replace(role=own.popleft()) if own else record)
    return replace(made, tensors=tuple(tensors))


def _view(record: TensorRecord) -> tuple[object, ...]:
    return record.storage, record.storage_offset, record.shape


def _require_read(root: Value, checkpoint: OpenCheckpoint) -> None:
    """Raise SavedWhole for an object whose bytes are not read, because it wrote them itself."""
    listed = entries(root, checkpoint.inventory) if any(part.is_distributed for part in checkpoint.parts) else ()
    unread = [entry.path for entry in listed if type(entry.value) is Opaque]
    if unread:
        raise SavedWhole(checkpoint.path, unread[0], len(unread) - 1)


def _edits(plan: MovePlan, kept: Collection[str], storages: StoragePlan, inventory: Inventory) -> Iterator[StorageEdit]:
    """One edit for each storage that is kept and moves or is cast; a cast by ``--dtype`` replaces that of a move."""
    casts = {edit.storage: edit for edit in storages.casts}
    for edit in plan.edits:
        if edit.storage in kept:
            own = casts.pop(edit.storage, None)
            yield edit if own is None else edit._replace(cast=own.cast)
    names: dict[str, dict[str, None]] = {}
    for record in inventory.tensors if casts else ():
        for part in record.dense():
            if part.storage in casts:
                names.setdefault(part.storage, {})[record.name] = None
    for edit in casts.values():
        yield edit._replace(names=tuple(names.get(edit.storage, edit.names)))


def _dropping(dropped: Iterable[Dropped]) -> Callable[[str], bool]:
    """Whether a path is dropped, or inside of a part that is."""
    paths = {one.name for one in dropped}
    inside = tuple(f"{path}." for path in paths)
    return lambda path: path in paths or path.startswith(inside)


def _require_dtypes(inventory: Inventory, options: Remap) -> None:
    """Raise NoMatch if a dtype is requested for a role without floating tensors."""
    known = {one.role for one in inventory.tensors if any(is_floating(part.dtype) for part in one.dense())}
    for role, dtype in options.dtype:
        if (role or "model") not in known:
            raise NoMatch("--dtype", f"{role or 'model'}={dtype}", tuple(sorted(known)))


def _unreached(inventory: Inventory, options: Remap) -> Iterator[Dropped]:
    """Records and other bytes that belong to no storage, which ``--compact`` leaves out."""
    for fact in inventory.facts if options.compact else ():
        if fact.kind in {"orphan-record", "stray-bytes", "kept-for-undo"}:
            yield Dropped(fact.record, 0, fact.nbytes, "compact")


def _parts(
    root: Value, inventory: Inventory, options: Remap, limits: Limits
) -> tuple[Value, tuple[Dropped, ...], tuple[Replaced, ...]]:
    """The tree with the selected parts, as plain values if requested; what was dropped, and what was replaced.

    Parts are dropped first, so that ``--drop`` leaves out objects without a plain value. A part inside an object can
    only be dropped when the object has become a dict.
    """
    if not options.plain:
        return *select(root, inventory, options), ()
    try:
        root, dropped = select(root, inventory, options)
    except (InsideObject, NoMatch):
        root, replaced = make_plain(root, limits)
        return *select(root, inventory, options), replaced
    root, replaced = make_plain(root, limits)
    return root, dropped, replaced
