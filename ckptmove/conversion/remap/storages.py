"""Cut storages to the elements that tensors reach (``--compact``), and cast them (``--dtype``), in a tree.

The persistent ids and the arguments of torch's rebuild functions change in place: storage class and number of elements,
storage offset and function.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from ckptmove.checkpoint.scales import scaled_weights
from ckptmove.conversion.remap.errors import NotCastable, ScaledWeightCast, ShardNotCastable, SharedStorage
from ckptmove.errors import UsageError
from ckptmove.formats.local_shards import CLASSES
from ckptmove.io.contracts import CastSegment, FromSource
from ckptmove.io.cut import cut
from ckptmove.model import Role, Span
from ckptmove.moves import StorageEdit, Trimmed
from ckptmove.pickles.build import new_dict, ordered_dict
from ckptmove.pickles.rebuild_arguments import LARGEST, NotATensor, count, dtype_name, geometry
from ckptmove.pickles.storage_id import FIELDS, KEY
from ckptmove.pickles.tree import Call, Global, Node, Persistent, Tuple, nodes
from ckptmove.text import Argument, Phrase
from ckptmove.torch_facts.dtypes import CASTABLE_FLOATS, DTYPE_STORAGE, ITEM_BYTES, PACKED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.model import StorageRef, TensorRecord
    from ckptmove.moves import Remap
    from ckptmove.pickles.tree import Value

_ROLES: Final = frozenset(get_args(Role)) - {"rng"}
_V3: Final = "_rebuild_tensor_v3"
#: Functions whose first arguments are storage, offset, size and stride.
_DENSE: Final = frozenset(
    f"torch._utils.{name}" for name in ("_rebuild_tensor", "_rebuild_tensor_v2", _V3, "_rebuild_qtensor")
)
#: Functions whose first arguments are another rebuild function, a class, and the arguments of that function.
_FROM_TYPE: Final = frozenset({
    "torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type", "torch.tensor._rebuild_from_type",
})  # fmt: skip
_MOST_NESTED: Final = 16
#: Number of arguments of ``_rebuild_tensor_v2`` without metadata, and index of the dtype in those of v3.
_V2_ARGUMENTS: Final = 6
_DTYPE: Final = 6
#: Kinds of tensors that name their dtype apart from a storage.
_NAMES_DTYPE: Final = frozenset({"wrapper-subclass", "device-data", "meta"})


class StorageChange(NamedTuple):
    """How the bytes of a storage change."""

    span: Span  # bytes to keep, from the first byte of the storage in the source
    cast: tuple[str, str] | None  # dtype before and after, or None


class StoragePlan(NamedTuple):
    """The changes of all storages of a tree."""

    changes: Mapping[str, StorageChange]  # each storage that changes, by key
    trimmed: tuple[Trimmed, ...]  # storages that are cut, with sizes in their old dtype
    casts: tuple[StorageEdit, ...]  # storages that are cast


class _Extent(NamedTuple):
    """The place of a tensor in its storage: dtype, offset, and elements from the first to the last."""

    dtype: str
    offset: int
    span: int


@dataclass(slots=True)
class _View:
    """The arguments of a dense tensor."""

    args: Tuple  # storage, offset, size, stride and more
    function: Global  # the rebuild function
    #: calls, or arguments of ``_rebuild_from_type_v2``, that name the function for these arguments.
    holders: list[Call | Tuple] = field(default_factory=list)

    @property
    def is_v3(self) -> bool:
        """Whether the arguments name the dtype."""
        return self.function.name == _V3

    def extent(self, storage: StorageRef) -> _Extent | None:
        """Return the dtype and the place of the tensor, or None if code in the pickle computes an argument."""
        try:
            dtype = dtype_name(self.args.items[_DTYPE]) if self.is_v3 else storage.dtype
            offset = count(self.args.items[1])
            return _Extent(dtype, offset, geometry(self.args.items[2], self.args.items[3])[3])
        except (NotATensor, IndexError):
            return None


def resize(
    root: Value,
    tensors: Sequence[TensorRecord],
    storages: Sequence[StorageRef],
    remap: Remap,
    moved: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> StoragePlan:
    """Change the storages of a tree in place.

    ``compact`` cuts each storage to the range from the first to the last element that a tensor reaches. A storage that
    is also saved without a tensor stays whole. ``dtype`` casts floating tensors. Scalars of an optimizer are not cast,
    because torch keeps step counts in float32. ``moved`` has the casts of storages that move to a device without their
    dtype; ``dtype`` has precedence.
    """
    if not (remap.compact or remap.dtype or moved):
        return StoragePlan({}, (), ())
    views, ids = _find_uses(root)
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for record in tensors:
        for part in record.dense():
            names[part.storage or ""][record.name] = None
    casts = _casts(tensors, remap.dtype)
    _require_unscaled(tensors, casts)
    changes: dict[str, StorageChange] = {}
    trimmed: list[Trimmed] = []
    edits: list[StorageEdit] = []
    for storage in storages:
        found, extents = tuple(names[storage.key]), _extents(storage, views.get(storage.key, ()))
        cast = casts.get(storage.key) or moved.get(storage.key)
        if cast is not None:
            _require_castable(cast[0], extents, found[0])
        if cast is not None and storage.key in casts:
            edits.append(
                StorageEdit(storage.key, found, storage.device, storage.device, storage.nbytes, "dtype", cast, (), ())
            )
        whole = Span(0, storage.nbytes)
        span = _reached(storage, extents) if remap.compact else whole
        if span != whole:
            trimmed.append(Trimmed(storage.key, found, storage.nbytes, span.nbytes))
        if cast is not None or span != whole:
            changes[storage.key] = change = StorageChange(span, cast)
            _apply(storage, extents, ids[storage.key].values(), change)
    return StoragePlan(changes, tuple(trimmed), tuple(edits))


def changed_bytes(source: ByteSource, segment: Segment, change: StorageChange, byteorder: str) -> Segment:
    """Return the segment of a storage after a change.

    Args:
        segment: all bytes of the storage before the change.
        byteorder: byte order of the storage, ``little`` or ``big``; it stays the same.
    """
    part = cut(source, segment, change.span.start, change.span.nbytes)
    if change.cast is None:
        return part
    if isinstance(part, FromSource):
        return FromSource(part.source, CastSegment(part.segment, *change.cast, byteorder))
    return CastSegment(part, *change.cast, byteorder)


def _require_unscaled(tensors: Sequence[TensorRecord], casts: Mapping[str, object]) -> None:
    """Raise ScaledWeightCast if ``dtype`` casts a quantized weight or its scale: the product would be another."""
    for weight, scale in scaled_weights(tensors) if casts else ():
        if any(part.storage in casts for record in (weight, scale) for part in record.dense()):
            raise ScaledWeightCast(weight.name, scale.name)


# --- uses of storages ------------------------------------------------------------------------------------------------


def _find_uses(root: Value) -> tuple[dict[str, list[_View]], dict[str, dict[int, Tuple]]]:
    """Return by the key of a storage its dense tensors, none if it is also used in another way, and its ids."""
    found = list(nodes(root))
    dense = _dense_views(found)
    views: dict[str, list[_View]] = defaultdict(list)
    ids: dict[str, dict[int, Tuple]] = defaultdict(dict)
    fixed: set[str] = set()
    for members, view in [((root,), None), *((node.members(), dense.get(id(node))) for node in found)]:
        for index, member in enumerate(members):
            if type(member) is not Persistent or type(member.pid) is not Tuple:
                continue
            key = _storage_key(member.pid)
            if key is None:
                continue
            ids[key][id(member.pid)] = member.pid
            if view is not None and index == 0 and not any(member.pid.items[FIELDS:]):
                views[key].append(view)
            else:
                fixed.add(key)
    return {key: own for key, own in views.items() if key not in fixed}, ids


def _dense_views(found: Iterable[Node]) -> dict[int, _View]:
    """Return the arguments of all dense tensors by the ``id`` of their tuple."""
    views: dict[int, _View] = {}
    for node in found:
        if type(node) is not Call:
            continue
        holder: Call | Tuple = node
        func, args = node.func, node.args
        for _ in range(_MOST_NESTED):
            if type(args) is not Tuple or type(func) is not Global:
                break
            if func.full_name in _DENSE and args.items:
                views.setdefault(id(args), _View(args, func)).holders.append(holder)
            if func.full_name not in _FROM_TYPE or len(args.items) <= 2:  # function, class, arguments
                break
            holder = args
            func, args = args.items[0], args.items[2]
    return views


def _storage_key(pid: Tuple) -> str | None:
    if len(pid.items) < FIELDS or pid.items[0] != "storage":
        return None
    key = pid.items[KEY]
    if type(key) is int and 0 <= key <= LARGEST:
        return str(key)
    return key if type(key) is str else None


# --- what changes ----------------------------------------------------------------------------------------------------


def _extents(storage: StorageRef, views: Sequence[_View]) -> list[tuple[_View, _Extent]]:
    """Return the tensors of a storage with their places; empty if a place is unknown."""
    known = [(view, extent) for view in views if (extent := view.extent(storage)) is not None]
    return known if len(known) == len(views) else []


def _reached(storage: StorageRef, extents: Sequence[tuple[_View, _Extent]]) -> Span:
    """Return the bytes of a storage from the first to the last element of its tensors; all if that is not known."""
    whole = Span(0, storage.nbytes)
    if not extents or storage.dtype in PACKED:
        return whole
    places = [(extent.offset, extent.span, ITEM_BYTES[extent.dtype]) for _, extent in extents]
    start = min((offset * item for offset, span, item in places if span), default=0)
    end = max(((offset + span) * item for offset, span, item in places if span), default=0)
    return whole if end > storage.nbytes else Span(start - start % max(item for _, _, item in places), end)


def _casts(tensors: Sequence[TensorRecord], request: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the dtypes before and after of each storage to cast."""
    targets = _targets(request)
    wanted: dict[str, tuple[TensorRecord, str, str]] = {}
    others: dict[str, TensorRecord] = {}
    for record in tensors:
        target = _target(record, targets)
        for part in record.dense():
            if part.storage is None or record.kind == "storage":
                continue
            if target is None or part.dtype == target or not is_floating(part.dtype):
                others.setdefault(part.storage, record)
                continue
            if part.dtype not in CASTABLE_FLOATS:
                raise NotCastable(record.name, f"there is no cast from {part.dtype}")
            _record, *dtypes = wanted.setdefault(part.storage, (record, part.dtype, target))
            if dtypes != [part.dtype, target]:
                others.setdefault(part.storage, record)
    for key in wanted.keys() & others.keys():
        raise SharedStorage(wanted[key][0].name, others[key].name, others[key].role)
    return {key: (source, target) for key, (_, source, target) in wanted.items()}


def is_floating(dtype: str) -> bool:
    """Whether the elements of a dtype are real floating point numbers."""
    return dtype.startswith(("float", "bfloat"))


def _targets(request: Sequence[tuple[str, str]]) -> dict[str, str]:
    targets: dict[str, str] = {}
    for role, dtype in request:
        if role and role not in _ROLES:
            raise UsageError(
                Phrase(Argument("dtype"), f": '{role[:40]}' is not one of the roles {', '.join(sorted(_ROLES))}")
            )
        if dtype not in CASTABLE_FLOATS:
            raise UsageError(
                Phrase(Argument("dtype"), f": '{dtype[:40]}' is not one of {', '.join(sorted(CASTABLE_FLOATS))}")
            )
        targets[role or "model"] = dtype
    return targets


def _target(record: TensorRecord, targets: Mapping[str, str]) -> str | None:
    """Return the dtype to cast a tensor to; None if it is not selected."""
    target = targets.get(record.role)
    if target is None or record.kind == "quantized":
        return None
    if record.role == "optimizer" and (not record.shape or record.name.endswith(".step")):
        return None
    if is_floating(record.dtype) and record.dtype != target:
        if record.subclass in CLASSES:
            raise ShardNotCastable(record.name)
        if record.kind in _NAMES_DTYPE:
            raise NotCastable(record.name, f"it is a {record.kind} tensor")
    return target


def _require_castable(dtype: str, extents: Sequence[tuple[_View, _Extent]], name: str) -> None:
    if not extents:
        raise NotCastable(name, "its storage is also saved without a tensor, or code computes a tensor of it")
    if any(extent.dtype != dtype for _, extent in extents):
        raise NotCastable(name, "tensors of other dtypes share its storage")


# --- edits -----------------------------------------------------------------------------------------------------------


def _apply(
    storage: StorageRef, extents: Iterable[tuple[_View, _Extent]], pids: Iterable[Tuple], change: StorageChange
) -> None:
    """Change persistent ids, storage offsets, and rebuild functions."""
    source, target = change.cast or ("", "")
    for view, extent in extents:
        offset = extent.offset - change.span.start // ITEM_BYTES[extent.dtype] if extent.span else 0
        view.args.items = (view.args.items[0], offset, *view.args.items[2:])
        if target:
            _set_dtype(view, target)
    nbytes = change.span.nbytes
    unit = ITEM_BYTES[storage.dtype]
    kind = None
    if target:
        name = DTYPE_STORAGE.get(target)
        kind = Global("torch.storage", "UntypedStorage") if name is None else Global("torch", name)
        nbytes = nbytes // ITEM_BYTES[source] * ITEM_BYTES[target]
        unit = ITEM_BYTES[target] if target in DTYPE_STORAGE else 1
    for pid in pids:
        word, old, key, device, _, *rest = pid.items
        pid.items = (word, kind or old, key, device, nbytes // unit, *rest)


def _set_dtype(view: _View, dtype: str) -> None:
    """Change the function and the arguments of a tensor for another dtype: those without a storage class need v3."""
    items, starts = view.args.items, view.args.starts
    if dtype in DTYPE_STORAGE:
        if not view.is_v3:
            return
        function = Global("torch._utils", "_rebuild_tensor_v2")
        view.args.items = items[:_DTYPE] + items[_DTYPE + 1 :]
        view.args.starts = starts[:_DTYPE] + starts[_DTYPE + 1 :]
    else:
        function = Global("torch._utils", _V3)
        if len(items) < _V2_ARGUMENTS:  # written before requires_grad and hooks
            items = (*items[:4], False, ordered_dict(new_dict()))
        metadata = items[_DTYPE + view.is_v3 :]
        view.args.items = (*items[:_DTYPE], Global("torch", dtype), *metadata)
        view.args.starts = (-1,) * len(view.args.items)
    for holder in view.holders:
        if isinstance(holder, Tuple):
            holder.items = (function, *holder.items[1:])
        else:
            holder.func = function
