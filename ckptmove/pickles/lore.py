"""What torch means by the calls in its pickles: which of them are tensors, and of what shape, dtype and storage.

Never rebuilds a tensor and never touches torch: it reads the arguments that torch's rebuild functions would get.

The argument orders are those of torch/_utils.py (``_rebuild_tensor_v2`` and its siblings), torch/_tensor.py
(``Tensor.__reduce_ex__``) and torch/serialization.py (``persistent_id``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final

from ckptmove.dtypes import ITEM_BYTES, STORAGE_DTYPE
from ckptmove.errors import DamagedPickle
from ckptmove.model import StorageRef, TensorRecord
from ckptmove.pickles.tree import Call, Global, Persistent, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.model import Role
    from ckptmove.pickles.tree import Value

_PERSISTENT_FIELDS: Final = 5


class _NotATensor(Exception):
    """The arguments are not those that torch writes."""


@dataclass(slots=True)
class _StorageDraft:
    key: str
    device: str
    dtype: str
    numel: int
    tag_sites: list[int]
    class_sites: list[int]

    def freeze(self) -> StorageRef:
        return StorageRef(
            key=self.key,
            device=self.device,
            dtype=self.dtype,
            numel=self.numel,
            nbytes=self.numel * ITEM_BYTES[self.dtype],
            tag_sites=tuple(self.tag_sites),
            class_sites=tuple(self.class_sites),
        )


class TensorReader:
    """Turns calls into tensor records, and collects the storages that they view.

    One reader serves one pickle, because storages are shared across it.
    """

    def __init__(self) -> None:
        self._drafts: dict[str, _StorageDraft] = {}
        self._keys: dict[int, str] = {}

    def storages(self) -> tuple[StorageRef, ...]:
        """Every storage met so far, in the order of first use."""
        return tuple(draft.freeze() for draft in self._drafts.values())

    def is_tensor(self, call: Call) -> bool:
        """Whether a call is one of torch's rebuild functions."""
        return call.name in _REBUILDS

    def tensor(self, call: Call, name: str, role: Role) -> TensorRecord:
        """The tensor that a call would rebuild.

        Args:
            call: a call for which :meth:`is_tensor` holds.
            name: its path.
            role: its role.

        Returns:
            The record.

        Raises:
            DamagedPickle: the arguments are not those that torch writes.
        """
        try:
            return self._rebuild(call.name, _arguments(call), name, role)
        except (_NotATensor, RecursionError) as error:
            raise DamagedPickle(f"tensor '{name}' is not written as torch does", offset=call.args_start) from error

    def storage(self, node: Persistent, name: str, role: Role) -> TensorRecord | None:
        """A storage that was saved by itself, as a flat record; None for a persistent id that is no storage."""
        try:
            draft = self._storage(node)
        except _NotATensor:
            return None
        return TensorRecord(
            name, role, draft.device, draft.dtype, (draft.numel,), (1,), draft.key, 0,
            draft.numel * ITEM_BYTES[draft.dtype], "storage",
        )  # fmt: skip

    # --- dispatch ----------------------------------------------------------------------------------------------------

    def _rebuild(self, function: str, args: Tuple, name: str, role: Role) -> TensorRecord:
        rebuild = _REBUILDS.get(function)
        if rebuild is None:
            raise _NotATensor
        try:
            return rebuild(self, args, name, role)
        except (IndexError, ValueError) as error:
            raise _NotATensor from error

    def _inner(self, value: Value, name: str, role: Role) -> TensorRecord:
        if type(value) is not Call:
            raise _NotATensor
        return self._rebuild(value.name, _arguments(value), name, role)

    def _from_type(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``_rebuild_from_type_v2(func, type, args, state)``: a subclass around another rebuild function."""
        function, kind, inner = args.items[:3]
        if type(function) is not Global or type(kind) is not Global or type(inner) is not Tuple:
            raise _NotATensor
        record = self._rebuild(function.full_name, inner, name, role)
        return replace(record, subclass=kind.full_name)

    # --- storages ----------------------------------------------------------------------------------------------------

    def _storage(self, value: Value) -> _StorageDraft:
        """``('storage', class, key, location, numel)``; a legacy stream adds a view as a sixth field."""
        if type(value) is not Persistent:
            raise _NotATensor
        known = self._keys.get(id(value))
        if known is not None:
            return self._drafts[known]
        pid = value.pid
        if type(pid) is not Tuple or len(pid.items) < _PERSISTENT_FIELDS or pid.items[0] != "storage":
            raise _NotATensor
        _, kind, key, device, numel = pid.items[:_PERSISTENT_FIELDS]
        if type(kind) is not Global or type(device) is not str or type(numel) is not int or numel < 0:
            raise _NotATensor
        dtype = STORAGE_DTYPE.get(kind.name)
        if dtype is None or type(key) not in {str, int}:
            raise _NotATensor
        text = str(key)
        draft = self._drafts.get(text)
        if draft is None:
            draft = self._drafts[text] = _StorageDraft(text, device, dtype, numel, [], [])
        draft.class_sites.append(pid.starts[1])
        draft.tag_sites.append(pid.starts[3])
        self._keys[id(value)] = text
        return draft

    # --- one method for each rebuild function ------------------------------------------------------------------------

    def _dense(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(storage, storage_offset, size, stride[, requires_grad, hooks[, metadata]])``."""
        draft = self._storage(args.items[0])
        return self._view(draft, draft.dtype, args, name, role)

    def _dense_v3(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """As v2 over an untyped storage, with the dtype as seventh argument."""
        return self._view(self._storage(args.items[0]), _dtype(args.items[6]), args, name, role)

    def _view(self, draft: _StorageDraft, dtype: str, args: Tuple, name: str, role: Role) -> TensorRecord:
        offset = args.items[1]
        shape = _sizes(args.items[2])
        stride = _sizes(args.items[3])
        if type(offset) is not int or offset < 0 or len(shape) != len(stride):
            raise _NotATensor
        return TensorRecord(
            name, role, draft.device, dtype, shape, stride, draft.key, offset, prod(shape) * ITEM_BYTES[dtype],
            "tensor", "", len(args.items) > 4 and args.items[4] is True,  # noqa: PLR2004  v1 has four arguments
        )  # fmt: skip

    def _parameter(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(data, requires_grad, hooks[, state])``."""
        record = self._inner(args.items[0], name, role)
        kind = "parameter" if record.kind == "tensor" else record.kind
        return replace(record, kind=kind, requires_grad=args.items[1] is True)

    def _quantized(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(storage, storage_offset, size, stride, quantizer_params, requires_grad, hooks)``."""
        draft = self._storage(args.items[0])
        record = replace(self._view(draft, draft.dtype, args, name, role), requires_grad=args.items[5] is True)
        params = args.items[4]
        parts: list[TensorRecord] = [replace(record, name=f"{name}.values")]
        for label, value in zip(("scheme", "scales", "zero_points"), _items(params), strict=False):
            if type(value) is Call and self.is_tensor(value):  # per-channel parameters are tensors themselves
                parts.append(self._inner(value, f"{name}.{label}", role))
        return replace(record, kind="quantized", parts=tuple(parts) if len(parts) > 1 else ())

    def _sparse(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(layout, (indices, values, size, is_coalesced))``, or ``(compressed, plain, values, size)``."""
        layout = _layout(args.items[0])
        data = _items(args.items[1])
        labels = _SPARSE_PARTS.get(layout)
        if labels is None:
            raise _NotATensor
        parts = tuple(self._inner(value, f"{name}.{label}", role) for label, value in zip(labels, data, strict=False))
        values = parts[-1]
        nbytes = sum(part.nbytes for part in parts)
        return TensorRecord(
            name, role, values.device, values.dtype, _sizes(data[len(labels)]), (), values.storage, 0, nbytes,
            layout, "", values.requires_grad, parts,
        )  # fmt: skip

    def _nested(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(buffer, sizes, strides, storage_offsets)``."""
        labels = ("buffer", "sizes", "strides", "storage_offsets")
        parts = tuple(
            self._inner(value, f"{name}.{label}", role) for label, value in zip(labels, args.items, strict=True)
        )
        return replace(parts[0], name=name, kind="nested", stride=(), parts=parts)

    def _meta(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(dtype, size, stride, requires_grad)``."""
        dtype, shape = _dtype(args.items[0]), _sizes(args.items[1])
        return TensorRecord(
            name, role, "meta", dtype, shape, _sizes(args.items[2]), None, 0, 0, "meta", "", args.items[3] is True
        )

    def _wrapper(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(cls, dtype, size, stride, storage_offset, layout, device, requires_grad)``."""
        dtype, shape, offset = _dtype(args.items[1]), _sizes(args.items[2]), args.items[4]
        kind, device = args.items[0], args.items[6]
        if type(kind) is not Global or type(offset) is not int:
            raise _NotATensor
        return TensorRecord(
            name, role, device_text(device) or "unknown", dtype, shape, _sizes(args.items[3]), None, offset,
            prod(shape) * ITEM_BYTES[dtype], "wrapper-subclass", kind.full_name, args.items[7] is True,
        )  # fmt: skip

    def _device_data(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(numpy array or cpu tensor, dtype, device, requires_grad)``: how xla tensors are saved."""
        data, device = args.items[0], args.items[2]
        dtype = _dtype(args.items[1])
        if type(device) is not str or type(data) is not Call:
            raise _NotATensor
        inner = self._inner(data, f"{name}.data", role) if self.is_tensor(data) else None
        shape = inner.shape if inner else _numpy_shape(data)
        return TensorRecord(
            name, role, device, dtype, shape, _contiguous(shape), inner.storage if inner else None, 0,
            prod(shape) * ITEM_BYTES[dtype], "device-data", "", args.items[3] is True, (), args.starts[2],
        )  # fmt: skip


if TYPE_CHECKING:
    _Rebuild = Callable[[TensorReader, Tuple, str, Role], TensorRecord]

_SPARSE_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}

_REBUILDS: Final[dict[str, _Rebuild]] = {
    "torch._utils._rebuild_tensor": TensorReader._dense,  # noqa: SLF001  a table of this class's own methods
    "torch._utils._rebuild_tensor_v2": TensorReader._dense,  # noqa: SLF001
    "torch._utils._rebuild_tensor_v3": TensorReader._dense_v3,  # noqa: SLF001
    "torch._utils._rebuild_parameter": TensorReader._parameter,  # noqa: SLF001
    "torch._utils._rebuild_parameter_with_state": TensorReader._parameter,  # noqa: SLF001
    "torch._utils._rebuild_qtensor": TensorReader._quantized,  # noqa: SLF001
    "torch._utils._rebuild_sparse_tensor": TensorReader._sparse,  # noqa: SLF001
    "torch._utils._rebuild_nested_tensor": TensorReader._nested,  # noqa: SLF001
    "torch._utils._rebuild_meta_tensor_no_storage": TensorReader._meta,  # noqa: SLF001
    "torch._utils._rebuild_wrapper_subclass": TensorReader._wrapper,  # noqa: SLF001
    "torch._utils._rebuild_device_tensor_from_numpy": TensorReader._device_data,  # noqa: SLF001
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": TensorReader._device_data,  # noqa: SLF001
    "torch._utils._rebuild_xla_tensor": TensorReader._device_data,  # noqa: SLF001
    "torch._tensor._rebuild_from_type_v2": TensorReader._from_type,  # noqa: SLF001
    "torch._tensor._rebuild_from_type": TensorReader._from_type,  # noqa: SLF001
    "torch.tensor._rebuild_from_type": TensorReader._from_type,  # noqa: SLF001
}


def device_text(value: Value) -> str | None:
    """The text of a ``torch.device(type[, index])`` call, or None where the value is no such call."""
    if type(value) is not Call or value.name != "torch.device":
        return None
    items = _items_or_none(value.args)
    if not items or type(items[0]) is not str:
        return None
    if len(items) > 1 and type(items[1]) is int:
        return f"{items[0]}:{items[1]}"
    return items[0] if len(items) == 1 else None


def _items_or_none(value: Value) -> list[Value] | None:
    return value.items if isinstance(value, Sequence) else None


def _items(value: Value) -> list[Value]:
    items = _items_or_none(value)
    if items is None:
        raise _NotATensor
    return items


def _arguments(call: Call) -> Tuple:
    if type(call.args) is not Tuple:
        raise _NotATensor
    return call.args


def _sizes(value: Value) -> tuple[int, ...]:
    """A size or stride: a tuple of ints, or a ``torch.Size`` of one."""
    if type(value) is Call and value.name == "torch.Size":
        value = _arguments(value).items[0]
    sizes = tuple(_items(value))
    for size in sizes:
        if type(size) is not int or size < 0:
            raise _NotATensor
    return sizes  # type: ignore[return-value]  # each was just seen to be an int


def _dtype(value: Value) -> str:
    if type(value) is not Global or value.name not in ITEM_BYTES:
        raise _NotATensor
    return value.name


def _layout(value: Value) -> str:
    """``torch.serialization._get_layout('torch.sparse_coo')``."""
    if type(value) is not Call:
        raise _NotATensor
    text = _arguments(value).items[0]
    return text.removeprefix("torch.") if type(text) is str else ""


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        stride[axis] = stride[axis + 1] * max(shape[axis + 1], 1)
    return tuple(stride)


def _numpy_shape(data: Call) -> tuple[int, ...]:
    """An ndarray's pickled state is ``(version, shape, dtype, is_fortran, bytes)``."""
    return _sizes(_items(data.state)[1])
