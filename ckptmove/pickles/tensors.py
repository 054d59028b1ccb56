"""Find the tensors in a tree: read shape, dtype and storage from the arguments of torch's rebuild functions.

The argument orders are those of torch/_utils.py (``_rebuild_tensor_v2`` and similar functions), torch/_tensor.py
(``Tensor.__reduce_ex__``) and torch/serialization.py (``persistent_id``).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar, Final

from ckptmove.errors import DamagedPickle
from ckptmove.model import StorageRef, TensorRecord
from ckptmove.pickles.compact_memo import NeedsEveryOperation
from ckptmove.pickles.rebuild_arguments import (
    LARGEST,
    NotATensor,
    arguments,
    bytes_of,
    contiguous,
    count,
    device_text,
    dtype_name,
    geometry,
    items,
    lazy_kind,
    numpy_shape,
    sizes,
    sparse_parts,
    view_of,
)
from ckptmove.pickles.storage_id import FIELDS
from ckptmove.pickles.tree import Call, Global, Node, Opaque, Persistent, PlainStorage, PlainTensor, Tuple
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.torch_facts.dtypes import ITEM_BYTES, PACKED, SCRIPT_STORAGE_DTYPE, STORAGE_DTYPE
from ckptmove.torch_facts.layouts import SPARSE_PARTS
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_SINCE, modern_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.model import Role
    from ckptmove.pickles.tree import Value

    _Rebuild = Callable[["TensorReader", Tuple, str, Role], TensorRecord]

#: Index of the first field of a StorageRef with sites.
_SITES: Final = 5
#: torch checks the name of the class only; a cast writes the module again.
_STORAGE_MODULES: Final = frozenset({"torch", "torch.cuda", "torch.storage"})
#: A parameter of a subclass of a wrapper is three calls deep.
_MOST_NESTED: Final = 16
#: Nodes of unusual arguments that are searched in one pickle; beyond that, arguments count as computed by code.
_MOST_SEARCHED: Final = 100_000
#: Classes that are not a tensor subclass.
_PLAIN_TYPES: Final = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})


class TensorReader:
    """Convert calls to tensor records, and collect their storages.

    Use one reader for each pickle: its tensors share storages.
    """

    def __init__(self) -> None:
        #: Other values of the last tensor: the Python attributes of a subclass or a parameter, the ``torch.device`` of
        #: a wrapper.
        self.attached: list[Node] = []
        #: Tensors that reach past the end of their storage: name, and number of missing bytes.
        self.overruns: list[tuple[str, int]] = []
        self._storages: dict[str, StorageRef] = {}
        #: Storages by the ``id`` of their node, from `gather`.
        self._gathered: dict[int, StorageRef] = {}
        #: All tag sites and class sites of storages with several nodes. Most have one.
        self._sites: dict[str, tuple[dict[int, None], dict[int, None]]] = {}
        self._functions: dict[int, _Rebuild | None] = {}
        self._nesting = 0
        self._searched = 0

    def storages(self) -> tuple[StorageRef, ...]:
        """Return every storage so far, in the order of first use."""
        for key, (tags, classes) in self._sites.items():
            self._storages[key] = self._storages[key]._replace(tag_sites=tuple(tags), class_sites=tuple(classes))
        return tuple(self._storages.values())

    def gather(self, persistents: Iterable[Persistent]) -> None:
        """Add all storages of a pickle, including those that no tensor uses: torch creates them too."""
        for node in persistents:
            if type(node) is PlainStorage:
                known = self._storages.setdefault(node.ref.key, node.ref)
                if known is not node.ref and known[:_SITES] != node.ref[:_SITES]:
                    raise NeedsEveryOperation  # the first one counts for all tensors
                continue
            try:
                self._gathered[id(node)] = self._storage(node)
            except (NotATensor, ValueError):  # a try without an error is free since Python 3.11
                continue  # not the id of a storage

    def is_tensor(self, value: Value) -> bool:
        """Whether a value is a call of one of torch's rebuild functions."""
        return type(value) is PlainTensor or (type(value) is Call and self._function(value) is not None)

    def tensor(self, call: Call | PlainTensor, name: str, role: Role) -> TensorRecord | None:
        """Return the record of the tensor that a call would rebuild, and set ``attached``.

        None if other code in the pickle computes an argument, so that the tensor is not known.
        """
        if self.attached:
            self.attached = []
        if isinstance(call, PlainTensor):
            return _plain(call, name, role)
        try:
            rebuild = self._functions.get(id(call.func)) or self._known(call)
            return rebuild(self, arguments(call), name, role)
        except (NotATensor, IndexError, ValueError) as error:
            if self._is_computed(call.args):
                return None
            raise DamagedPickle(
                f"tensor '{name[:200]}' is not written as torch does", offset=call.args_start
            ) from error

    def _is_computed(self, args: Value) -> bool:
        """Whether the arguments contain a call that torch's weights-only unpickler rejects."""
        seen: set[int] = set()
        stack = [args]
        while stack:
            node = stack.pop()
            if not isinstance(node, Node) or id(node) in seen:
                continue
            seen.add(id(node))
            self._searched += 1
            is_unknown = type(node) is Opaque or (
                type(node) is Call and modern_name(node.name) not in WEIGHTS_ONLY_SINCE
            )
            if is_unknown or self._searched > _MOST_SEARCHED:
                return True
            stack += node.members()
        return False

    def storage(self, node: Persistent, name: str, role: Role) -> TensorRecord | None:
        """Return a storage that was saved without a tensor as a 1-d record; None if the id is not a storage."""
        try:
            storage = self._storage(node)
            first, numel = view_of(node) or (0, storage.numel)
        except (NotATensor, ValueError):
            return None
        nbytes = numel * ITEM_BYTES[storage.dtype]
        return TensorRecord(
            name, role, storage.device, storage.dtype, (numel,), (1,), storage.key, first, nbytes, "storage"
        )

    # --- dispatch ----------------------------------------------------------------------------------------------------

    def _function(self, call: Call) -> _Rebuild | None:
        """Return the method for a call, cached by the node of its function: a pickle names each function once."""
        try:
            return self._functions[id(call.func)]
        except KeyError:
            found = self._REBUILDS.get(call.name)
            if found is TensorReader._from_type:  # a subclass may have a rebuild function of its own
                wrapped = call.arguments[0] if call.arguments else None
                return found if type(wrapped) is Global and wrapped.full_name in self._REBUILDS else None
            self._functions[id(call.func)] = found
            return found

    def _known(self, call: Call) -> _Rebuild:
        found = self._function(call)
        if found is None:
            raise NotATensor
        return found

    def _inner(self, value: Value, name: str, role: Role) -> TensorRecord:
        """Return the record of a tensor in the arguments of another tensor."""
        if type(value) is PlainTensor:
            return _plain(value, name, role)
        if type(value) is not Call:
            raise NotATensor
        return self._nested_rebuild(self._known(value), arguments(value), name, role)

    def _nested_rebuild(self, rebuild: _Rebuild, args: Tuple, name: str, role: Role) -> TensorRecord:
        self._nesting += 1
        try:
            if self._nesting > _MOST_NESTED:
                raise NotATensor
            return rebuild(self, args, name, role)
        finally:
            self._nesting -= 1

    def _part(self, value: Value, name: str, label: str, role: Role) -> TensorRecord:
        """Return a dense part of a sparse, nested or quantized tensor."""
        record = self._inner(value, f"{name}.{label}" if name else label, role)
        if record.parts:
            raise NotATensor
        return record

    def _from_type(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``_rebuild_from_type_v2(func, type, args, state)``: a subclass around another rebuild function."""
        function, kind, inner = args.items[:3]
        rebuild = self._REBUILDS.get(function.full_name) if type(function) is Global else None
        if rebuild is None or type(kind) is not Global or type(inner) is not Tuple:
            raise NotATensor
        record = self._nested_rebuild(rebuild, inner, name, role)
        self._attach(args, 3)
        return record if kind.full_name in _PLAIN_TYPES else record._replace(subclass=kind.full_name)

    def _attach(self, args: Tuple, index: int) -> None:
        value = args.items[index] if len(args.items) > index else None
        if isinstance(value, Node):
            self.attached.append(value)

    # --- storages ----------------------------------------------------------------------------------------------------

    def _storage(self, value: Value) -> StorageRef:
        """``('storage', class, key, location, numel)``; a legacy stream adds a sixth field, see :func:`view_of`."""
        gathered = self._gathered.get(id(value))
        if gathered is not None:
            return gathered
        pid = value.pid if type(value) is Persistent else None
        if type(pid) is not Tuple:
            raise NotATensor
        word, kind, key, device, numel = pid.items[:FIELDS]
        starts = pid.starts
        if type(key) is int:
            key = str(count(key))
        if word != "storage" or type(key) is not str or type(kind) is not Global or type(device) is not str:
            raise NotATensor
        if kind.module not in _STORAGE_MODULES:
            raise NotATensor
        storage = self._storages.get(key)
        if storage is None:
            dtype = STORAGE_DTYPE.get(kind.name) or SCRIPT_STORAGE_DTYPE.get(kind.name, "")
            if not dtype or type(numel) is not int or not 0 <= numel <= LARGEST // ITEM_BYTES[dtype]:
                raise NotATensor
            nbytes = numel * ITEM_BYTES[dtype]
            storage = StorageRef(key, device, dtype, numel, nbytes, (starts[3],), (starts[1],))
            self._storages[key] = storage
        elif (
            storage.tag_sites and storage.tag_sites[0] != starts[3]
        ):  # a tensor with two paths has the same sites twice
            tags, classes = self._sites.setdefault(key, ({storage.tag_sites[0]: None}, {storage.class_sites[0]: None}))
            tags[starts[3]] = None
            classes[starts[1]] = None
        return storage

    def _view(self, storage: StorageRef, dtype: str, args: Tuple, name: str, role: Role) -> TensorRecord:
        """Return a tensor over a storage, from the arguments that all rebuild functions of dense tensors share."""
        found = args.items
        offset = found[1]
        if type(offset) is not int or not 0 <= offset <= LARGEST:
            raise NotATensor
        shape, stride, numel, span = geometry(found[2], found[3])
        item_bytes = ITEM_BYTES[dtype]
        if numel * item_bytes > LARGEST:
            raise NotATensor
        room = storage.nbytes
        view = view_of(found[0])
        if view is not None:
            room = min(room, sum(view) * item_bytes)
            offset += view[0]
        if span and (offset + span) * item_bytes > room:
            missing = -(-(offset + span) // PACKED.get(dtype, 1)) * item_bytes - room
            if missing > 0:
                self.overruns.append((name, missing))
        return TensorRecord(
            name, role, storage.device, dtype, shape, stride, storage.key, offset, numel * item_bytes,
            "tensor" if len(found) < 7 else lazy_kind(found[6]), "",  # only v2 has metadata
            len(found) > 4 and found[4] is True,  # v1 has four arguments
        )  # fmt: skip

    # --- one method for each rebuild function ------------------------------------------------------------------------

    def _dense(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(storage, storage_offset, size, stride[, requires_grad, hooks[, metadata]])``."""
        storage = self._storage(args.items[0])
        return self._view(storage, storage.dtype, args, name, role)

    def _dense_v3(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """As v2, but with an untyped storage and the dtype as seventh argument."""
        return self._view(self._storage(args.items[0]), dtype_name(args.items[6]), args, name, role)

    def _parameter(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(data, requires_grad, hooks[, state])``."""
        record = self._inner(args.items[0], name, role)
        self._attach(args, 3)
        kind = "parameter" if record.kind == "tensor" else record.kind
        return record._replace(kind=kind, requires_grad=args.items[1] is True)

    def _quantized(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(storage, storage_offset, size, stride, quantizer_params, requires_grad, hooks)``."""
        storage = self._storage(args.items[0])
        record = self._view(storage, storage.dtype, args, name, role)._replace(requires_grad=args.items[5] is True)
        parts: list[TensorRecord] = [record._replace(name=f"{name}.values" if name else "values")]
        for label, value in zip(("scheme", "scales", "zero_points"), items(args.items[4]), strict=False):
            if isinstance(value, Call | PlainTensor):  # per-channel parameters are tensors themselves
                parts.append(self._part(value, name, label, role))
        return record._replace(kind="quantized", parts=tuple(parts) if len(parts) > 1 else ())

    def _sparse(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """A sparse tensor of several dense tensors; see :func:`sparse_parts`."""
        layout, data, size = sparse_parts(args)
        labels = SPARSE_PARTS[layout]
        parts = tuple(self._part(value, name, label, role) for label, value in zip(labels, data, strict=True))
        shape, values = sizes(size), parts[-1]
        return TensorRecord(
            name, role, values.device, values.dtype, shape, (), values.storage, 0, sum(part.nbytes for part in parts),
            layout, "", values.requires_grad, parts,
        )  # fmt: skip

    def _nested(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(buffer, sizes, strides, storage_offsets)``."""
        labels = ("buffer", "sizes", "strides", "storage_offsets")
        parts = tuple(self._part(value, name, label, role) for label, value in zip(labels, args.items, strict=True))
        return parts[0]._replace(name=name, kind="nested", stride=(), parts=parts)

    def _meta(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(dtype, size, stride, requires_grad)``."""
        dtype, shape = dtype_name(args.items[0]), sizes(args.items[1])
        return TensorRecord(
            name, role, "meta", dtype, shape, sizes(args.items[2]), None, 0, 0, "meta", "", args.items[3] is True
        )

    def _wrapper(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(cls, dtype, size, stride, storage_offset, layout, device, requires_grad)``: no bytes of its own."""
        dtype, shape = dtype_name(args.items[1]), sizes(args.items[2])
        kind, device = args.items[0], args.items[6]
        if type(kind) is not Global:
            raise NotATensor
        bytes_of(shape, dtype)  # rejects sizes that no tensor can have
        self._attach(args, 6)
        return TensorRecord(
            name, role, device_text(device) or NO_DEVICE, dtype, shape, sizes(args.items[3]), None,
            count(args.items[4]), 0, "wrapper-subclass", kind.full_name, args.items[7] is True,
        )  # fmt: skip

    def _device_data(self, args: Tuple, name: str, role: Role) -> TensorRecord:
        """``(numpy array or cpu tensor, dtype, device, requires_grad)``: how xla tensors are saved."""
        data, device = args.items[0], args.items[2]
        dtype = dtype_name(args.items[1])
        if type(device) is not str or type(data) is not Call:
            raise NotATensor
        inner = self._part(data, name, "data", role) if self.is_tensor(data) else None
        shape = inner.shape if inner else numpy_shape(data)
        return TensorRecord(
            name, role, device, dtype, shape, contiguous(shape), inner.storage if inner else None, 0,
            bytes_of(shape, dtype), "device-data", "", args.items[3] is True, (), args.starts[2],
        )  # fmt: skip

    #: Methods by the full name of torch's function. In the class body, where the methods are names.
    _REBUILDS: ClassVar[dict[str, _Rebuild]] = {
        "torch._utils._rebuild_tensor": _dense,
        "torch._utils._rebuild_tensor_v2": _dense,
        "torch._utils._rebuild_tensor_v3": _dense_v3,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._utils._rebuild_qtensor": _quantized,
        "torch._utils._rebuild_sparse_tensor": _sparse,
        "torch._utils._rebuild_nested_tensor": _nested,
        "torch._utils._rebuild_meta_tensor_no_storage": _meta,
        "torch._utils._rebuild_wrapper_subclass": _wrapper,
        "torch._utils._rebuild_device_tensor_from_numpy": _device_data,
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_data,
        "torch._utils._rebuild_xla_tensor": _device_data,
        "torch._tensor._rebuild_from_type_v2": _from_type,
        "torch._tensor._rebuild_from_type": _from_type,
        "torch.tensor._rebuild_from_type": _from_type,
    }


def _plain(tensor: PlainTensor, name: str, role: Role) -> TensorRecord:
    storage = tensor.storage.ref
    nbytes = prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    return TensorRecord(
        name, role, storage.device, tensor.dtype, tensor.shape, tensor.stride, storage.key, tensor.offset, nbytes,
        requires_grad=tensor.requires_grad,
    )  # fmt: skip
