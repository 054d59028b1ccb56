"""Plan every change of a conversion, from the inventory and the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.inventory.mentions import mesh_owners
from ckptmove.checkpoint.state_dicts import with_wrappers
from ckptmove.conversion.policy import DESTINATION_RULES, DEVICE_MENTION, GROUP_FLAG, MESH_TYPE, RULES, Policy
from ckptmove.errors import UncastableDtype, UnsupportedDtype
from ckptmove.formats.facts import facts_of
from ckptmove.model import StorageRef, TensorRecord
from ckptmove.moves import FlagEdit, Kept, MovePlan, MoveRequest, StorageEdit
from ckptmove.torch_facts.devices import parse_target, same_device, split, unsupported_dtypes
from ckptmove.torch_facts.dtypes import CAST_DOWN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from ckptmove.model import Inventory, Mention


#: Why a dtype cannot be changed.
_SUBCLASS: Final = "its Tensor subclass stores the dtype a second time"
_NO_CLASS: Final = "its dtype is not that of a storage"
_NO_CAST: Final = "--cast only takes float64 and complex128"
_CODE: Final = "the code in the archive depends on its dtype"


@dataclass(slots=True, eq=False, repr=False)
class _Holder:
    """Holder of one device tag: a storage, or a tensor whose storage has no tag."""

    #: the storage before the conversion; for the device of a tensor, a placeholder with the tensor's name and without
    #: a class. The placeholder has no sites if that device is a mention.
    storage: StorageRef
    rank: int  # rank of the rule that decides: the highest-ranking one for any tensor that views the storage
    tag: str  # the target device
    names: dict[str, str]  # tensors that view the storage and dtypes of their views: untyped storages have none

    def take(self, rank: int, tag: str, name: str, dtype: str) -> None:
        """Add a tensor that views it; if two rules rank the same, the first tensor in the file decides."""
        if rank < self.rank:
            self.rank, self.tag = rank, tag
        self.names.setdefault(name, dtype)

    def lacking(self) -> list[tuple[str, str]]:
        """Tensors, by name and dtype, whose dtype the target device does not support."""
        absent = unsupported_dtypes(self.tag)
        views = self.names or {self.storage.key: self.storage.dtype}
        return [(name, dtype) for name, dtype in views.items() if dtype in absent]


#: A tensor, the holder of its tag (None if it cannot be moved), and the rank of the rule for this tensor alone.
_Placed: TypeAlias = "tuple[TensorRecord, _Holder | None, int]"


def plan_for(inventory: Inventory, device: str) -> MovePlan:
    """Plan the moves to a device, even if it lacks a dtype."""
    policy = Policy(inventory, MoveRequest(to=parse_target(device), cast=True))
    return _planned(inventory, policy, *_place(inventory, policy))


def plan_before_remap(inventory: Inventory, request: MoveRequest) -> MovePlan:
    """Plan the moves of a checkpoint, parts of which may be dropped or cast before they move.

    Casts are planned if they are requested; a dtype that the target lacks is no error here.
    """
    policy = Policy(inventory, request)
    plan = _planned(inventory, policy, *_place(inventory, policy))
    return plan if request.cast else plan._replace(edits=tuple(edit._replace(cast=None) for edit in plan.edits))


def require_dtypes(inventory: Inventory, request: MoveRequest) -> None:
    """Check that each tensor of a changed checkpoint is on a device that supports its dtype."""
    lost: dict[str, list[tuple[str, str]]] = {}
    for record in inventory.tensors:
        for part in record.dense():
            if part.dtype in unsupported_dtypes(part.device):
                lost.setdefault(part.device, []).append((record.name, part.dtype))
    for tag, tensors in lost.items():
        if request.cast:
            raise UncastableDtype(tag, tuple(tensors), _NO_CAST)
        raise UnsupportedDtype(tag, tuple(tensors))


def plan_move(inventory: Inventory, request: MoveRequest) -> MovePlan:
    """Decide on every change of a conversion; the plan is empty if the checkpoint already is as requested.

    Moves are per storage: if tensors with different decisions share one, the highest rule wins and the others follow.
    Planning the result of a plan gives an empty plan, unless the request also moves a target device elsewhere. The tags
    of the request are as :func:`ckptmove.torch_facts.devices.parse_target` returns them.
    """
    policy = Policy(inventory, request)
    holders, tensors = _place(inventory, policy)
    lost = _out_of_place(holders.values())
    if lost:
        _require_cast(lost, inventory, cast=request.cast)
    return _planned(inventory, policy, holders, tensors)


def _planned(
    inventory: Inventory, policy: Policy, holders: Mapping[str | int, _Holder], tensors: Collection[_Placed]
) -> MovePlan:
    lost = _out_of_place(holders.values())
    casts = frozenset(holder.storage.key for holder in lost if holder.storage.dtype in CAST_DOWN)
    owners = mesh_owners(inventory)
    refused = (FlagEdit(where, "True", "False", GROUP_FLAG.name, None, flag.site) for where, flag in policy.refused)
    return MovePlan(
        request=policy.request,
        edits=tuple(_edits(holders.values(), casts)),
        kept=tuple(_kept(tensors, policy)),
        flags=(*refused, *_mention_edits(inventory.mentions, owners, holders, tensors, policy)),
        inflates=tuple(fact.storage_key for fact in inventory.facts if fact.kind == "compressed-storage"),
    )


def dtypes_out_of_place(inventory: Inventory, request: MoveRequest) -> tuple[tuple[str, str], ...]:
    """Tensors, by name and dtype, that a conversion would move to a device without support for their dtype."""
    return _dtypes(_out_of_place(_place(inventory, Policy(inventory, request))[0].values()))


def _place(inventory: Inventory, policy: Policy) -> tuple[dict[str | int, _Holder], list[_Placed]]:
    """Apply the policy to every tensor, and choose one target for each storage.

    Returns all holders, by the key of the storage or the place of the device, and all tensors.
    """
    storages = {storage.key: storage for storage in inventory.storages}
    holders: dict[str | int, _Holder] = {}
    values_only: set[str | None] = set()
    tensors: list[_Placed] = []
    for record in inventory.tensors:
        answer = policy.decide(record)
        site = policy.device_site(record)
        if site is not None:
            values_only.update(part.storage for part in record.dense())
            sites = () if record.device_site is None else (record.device_site,)
            device = StorageRef(record.name, record.device, record.dtype, 0, record.nbytes, sites, ())
            _hold(holders, site, device, answer, (record.name, record.dtype))
        else:
            for part in record.parts or (record,):
                if part.storage is not None:
                    part_answer = policy.decide(part) if part.name in policy.nested_sizes else answer
                    _hold(holders, part.storage, storages[part.storage], part_answer, (record.name, part.dtype))
        key = record.storage if site is None else site
        tensors.append((record, None if key is None else holders[key], answer[0]))
    for unseen, storage in storages.items():
        if unseen not in holders:
            # No tensor views it. A storage that only provides values for a tensor on another device stays; others move
            # with their device.
            nameless = TensorRecord("", "other", storage.device, storage.dtype, (), (), storage.key, 0, storage.nbytes)
            rank, tag = (0, storage.device) if unseen in values_only else policy.decide(nameless)
            holders[unseen] = _Holder(storage, rank, tag, {})
    return holders, tensors


def _hold(
    holders: dict[str | int, _Holder],
    key: str | int,
    storage: StorageRef,
    answer: tuple[int, str],
    view: tuple[str, str],
) -> None:
    """Add a tensor, by name and dtype, to the holder of its tag."""
    holder = holders.get(key)
    if holder is None:
        holders[key] = _Holder(storage, *answer, dict([view]))
    else:
        holder.take(*answer, *view)


def _out_of_place(holders: Collection[_Holder]) -> list[_Holder]:
    """Holders with a dtype that their target device does not support."""
    poor = {tag for tag in {holder.tag for holder in holders} if unsupported_dtypes(tag)}
    return [holder for holder in holders if holder.tag in poor and holder.lacking()] if poor else []


def _require_cast(lost: list[_Holder], inventory: Inventory, *, cast: bool) -> None:
    """Raise an error unless a cast is requested and possible for all of them."""
    inside = {record.name for record, wrapper in with_wrappers(inventory.tensors) if wrapper is not None}
    refused: dict[str, list[_Holder]] = {}
    for holder in lost:
        if facts_of(inventory.container).has_code:
            refused.setdefault(_CODE, []).append(holder)
        elif not inside.isdisjoint(holder.names):
            refused.setdefault(_SUBCLASS, []).append(holder)
        elif not holder.storage.class_sites:
            refused.setdefault(_NO_CLASS, []).append(holder)
        elif holder.storage.dtype not in CAST_DOWN:
            refused.setdefault(_NO_CAST, []).append(holder)
    for reason, holders in refused.items():
        raise UncastableDtype(holders[0].tag, _dtypes(holders), reason)
    if not cast:
        raise UnsupportedDtype(lost[0].tag, _dtypes(lost))


def _dtypes(holders: Iterable[_Holder]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for holder in holders for pair in holder.lacking())


def _edits(holders: Iterable[_Holder], casts: Collection[str]) -> Iterator[StorageEdit]:
    for holder in holders:
        storage = holder.storage
        cast = (storage.dtype, CAST_DOWN[storage.dtype]) if storage.key in casts else None
        if storage.tag_sites and (holder.tag != storage.device or cast is not None):  # without sites, a mention
            yield StorageEdit(
                storage.key, tuple(holder.names), storage.device, holder.tag, storage.nbytes, RULES[holder.rank].name,
                cast, storage.tag_sites, storage.class_sites,
            )  # fmt: skip


def _kept(tensors: Collection[_Placed], policy: Policy) -> Iterator[Kept]:
    """Tensors that stay although the request moves their device."""
    leaves = {tag: policy.destination(tag) not in {None, tag} for tag in {record.device for record, _, _ in tensors}}
    for record, holder, rank in tensors:
        if leaves[record.device] and (holder is None or holder.tag == record.device):
            yield Kept(record.name, record.device, RULES[rank if holder is None else holder.rank].name)


# --- what follows the tensors ----------------------------------------------------------------------------------------


def _mention_edits(
    mentions: Collection[Mention],
    owners: Mapping[str, str],
    holders: Mapping[str | int, _Holder],
    tensors: Collection[_Placed],
    policy: Policy,
) -> Iterator[FlagEdit]:
    """Edits of named devices, which follow the tensors."""
    if not mentions:
        return
    wrappers = {record.name: holder for record, holder, _ in tensors if record.kind == "wrapper-subclass"}
    before, after = _sent_devices(holders.values())
    placed = [(record, holder) for record, holder, _ in tensors if holder is not None]
    # Without a model, all other tensors count as one: a program of torch.export may have sample inputs alone.
    model = [holder for record, holder in placed if record.role == "model"] or [holder for _, holder in placed]
    leaves_cpu = any(holder.storage.device == "cpu" and holder.tag != "cpu" for holder in model)
    for mention in mentions:
        kind, _ = split(mention.value)
        own = None if mention.site is None else holders.get(mention.site)
        if mention.where in owners and mention.site is not None and not policy.keeps_site(mention.site):
            own = wrappers[owners[mention.where]]
        if own is not None:  # the device of one tensor, which follows only that tensor
            target = mention.value if same_device(own.tag, mention.value) else own.tag
        elif not _is_editable(mention, policy) or kind == "meta" or (kind == "cpu" and not leaves_cpu):
            continue
        else:
            target = _follow(mention.value, before, policy)
            if target != "cpu":  # "cuda" without an index includes the tensors that move there
                target = _follow(target, after, policy)
        reason = DEVICE_MENTION
        if mention.kind == "device_mesh":
            target, reason = split(target)[0], MESH_TYPE
        if target != mention.value:
            yield FlagEdit(mention.where, mention.value, target, reason.name, mention)


def _is_editable(mention: Mention, policy: Policy) -> bool:
    if mention.site is None or policy.keeps_site(mention.site):
        return False
    if mention.kind == "torch.device":
        return mention.tuple_site is not None
    return mention.kind == "device_mesh" or (mention.kind == "string" and policy.request.rewrite_strings)


def _sent_devices(holders: Iterable[_Holder]) -> tuple[dict[str, bool], dict[str, bool]]:
    """Devices that named devices follow, before and after the conversion, in the order of the file.

    A device is True if a tensor on it moves with its device, and False if other rules decide on all of its tensors.
    A device with only repaired tensors (a ``step`` that goes back to the CPU) is left out of the first dict.
    """
    before: dict[str, bool] = {}
    after: dict[str, bool] = {}
    for holder in holders:
        if RULES[holder.rank].name in DESTINATION_RULES:
            before[holder.storage.device] = after[holder.tag] = True
        else:
            after.setdefault(holder.tag, False)
            if holder.tag == holder.storage.device:
                before.setdefault(holder.tag, False)
    return before, after


def _follow(value: str, sent: dict[str, bool], policy: Policy) -> str:
    """Target of a named device: the target of its tensors; without an index, of tensors on any device of its type."""
    kind, index = split(value)
    nearby = [tag for tag in sent if same_device(tag, value) or (index is None and split(tag)[0] == kind)]
    tags = [tag for tag in nearby if sent[tag]] if nearby else [value]
    target = policy.destination(tags[0]) if tags else None
    return value if target is None or same_device(target, value) else target
