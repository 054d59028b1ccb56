"""Find the tensors of a tree, and the values in their calls that are not in a tensor record.

A record has storage, offset, size, stride, dtype, device and requires_grad. The argument orders are those of the
rebuild functions in torch/_utils.py and torch/_tensor.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.pickles.build import new_dict
from ckptmove.pickles.rebuild_arguments import NotATensor, items, sparse_parts
from ckptmove.pickles.storage_id import storage_id
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Node, Persistent, Sequence, Tuple
from ckptmove.torch_facts.layouts import SPARSE_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.pickles.tree import Value

    #: Name of a part, empty for the attributes and hooks of the tensor itself; and a number that distinguishes these.
    _Key = tuple[str, int]

#: Functions that wrap another rebuild function: indices of their arguments with hooks and attributes.
_WRAPPERS: Final = {
    "torch._utils._rebuild_parameter": (2,),
    "torch._utils._rebuild_parameter_with_state": (2, 3),
    "torch._tensor._rebuild_from_type_v2": (3,),
    "torch._tensor._rebuild_from_type": (3,),
    "torch.tensor._rebuild_from_type": (3,),
}
_QUANTIZED: Final = "torch._utils._rebuild_qtensor"
_QUANTIZER: Final = ("scheme", "scales", "zero_points", "axis")
_SPARSE: Final = "torch._utils._rebuild_sparse_tensor"
_DEVICE_DATA: Final = ("device data", {"data": 0}, ())
#: Rebuild functions: kind of the tensor, indices of arguments that are not in a record by name, indices of dicts.
_ARGUMENTS: Final[dict[str, tuple[str, dict[str, int], tuple[int, ...]]]] = {
    "torch._utils._rebuild_tensor": ("dense", {}, ()),
    "torch._utils._rebuild_tensor_v2": ("dense", {}, (5, 6)),
    "torch._utils._rebuild_tensor_v3": ("dense", {}, (5, 7)),
    "torch._utils._rebuild_nested_tensor": (
        "nested",
        {"buffer": 0, "sizes": 1, "strides": 2, "storage_offsets": 3},
        (),
    ),
    _QUANTIZED: ("quantized", {}, (6,)),
    "torch._utils._rebuild_wrapper_subclass": ("wrapper", {"storage_offset": 4, "layout": 5}, ()),
    "torch._utils._rebuild_device_tensor_from_numpy": _DEVICE_DATA,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _DEVICE_DATA,
    "torch._utils._rebuild_xla_tensor": _DEVICE_DATA,
}
#: Functions whose first two arguments are a storage and an offset.
DENSE_REBUILDS: Final = frozenset(name for name, (kind, _, _) in _ARGUMENTS.items() if kind == "dense")


class TensorNode(NamedTuple):
    """Values of a tensor that are not in its record."""

    kind: str  # kind of the tensor; records of different kinds differ
    rest: Mapping[_Key, Value]  # the values


class TensorNodes:
    """Recognizes the tensors of trees. It caches nodes by ``id``, so use it only while the trees are alive."""

    def __init__(self) -> None:
        self._reader = TensorReader()
        self._seen: dict[int, Node] = {}
        self._holders: set[int] = set()

    def is_tensor(self, value: Value) -> bool:
        """Whether a value is a tensor, or a storage that was saved without a tensor."""
        if type(value) is Persistent:
            return storage_id(value) is not None
        return type(value) is Call and self._reader.is_tensor(value)

    def node(self, value: Value) -> TensorNode | None:
        """Return the values of a tensor that are not in its record; None if the value is not a tensor."""
        if not self.is_tensor(value):
            return None
        rest: dict[_Key, Value] = {}
        while type(value) is Call and value.name in _WRAPPERS:
            found = value.arguments
            rest |= {("", len(rest) + place): _pairs(found, at) for place, at in enumerate(_WRAPPERS[value.name])}
            if value.name.startswith("torch._utils."):
                value = _item(found, 0)
            else:
                value = Call(_item(found, 0), _item(found, 2), -1)
        kind, arguments = _unrecorded(value) if type(value) is Call else ("storage", {})
        return TensorNode(kind, rest | arguments)

    def hold(self, value: Value) -> bool:
        """Whether a value is a container with a tensor at any depth."""
        if isinstance(value, Node) and id(value) not in self._seen:
            self._find_holders(value)
        return id(value) in self._holders and not self.is_tensor(value)

    def _find_holders(self, root: Node) -> None:
        """Find the nodes below ``root`` that contain tensors; visit each node once."""
        parents: dict[int, list[int]] = {}
        found: list[int] = []
        stack = [root]
        self._seen[id(root)] = root
        while stack:
            node = stack.pop()
            if self.is_tensor(node):
                found.append(id(node))
                continue
            for _, value in named_items(node):
                if not isinstance(value, Node):
                    continue
                parents.setdefault(id(value), []).append(id(node))
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    stack.append(value)
                elif id(value) in self._holders:
                    found.append(id(value))
        while found:
            one = found.pop()
            self._holders.add(one)
            found += (parent for parent in parents.pop(one, ()) if parent not in self._holders)


def named_items(node: Value) -> Iterator[tuple[str, Value]]:
    """Iterate over name and value of the members of a list, tuple, set or dict; nothing for other values."""
    pairs = as_dict(node)
    if isinstance(node, Sequence):
        yield from ((str(place), item) for place, item in enumerate(node.items))
    elif pairs is not None:
        yield from ((key_text(key), value) for key, value, _ in pairs.pairs())


def _unrecorded(call: Call) -> tuple[str, dict[_Key, Value]]:
    """Return the kind of a tensor, and its arguments that are not in a record."""
    if call.name == _SPARSE:
        return _sparse(call)
    found = call.arguments
    kind, named, dicts = _ARGUMENTS.get(call.name, (call.name, {}, ()))
    rest: dict[_Key, Value] = {(name, 0): _item(found, at) for name, at in named.items()}
    quantizer = _item(found, 4)
    if call.name == _QUANTIZED and isinstance(quantizer, Sequence):
        rest = {(name, 0): value for name, value in zip(_QUANTIZER, quantizer.items, strict=False)}
    # Negative numbers, to distinguish them from the dicts of the outer calls.
    return kind, rest | {("", -1 - place): _pairs(found, at) for place, at in enumerate(dicts)}


def _sparse(call: Call) -> tuple[str, dict[_Key, Value]]:
    """Return the dense parts of a sparse tensor, and ``is_coalesced``, which TorchScript and old files do not store."""
    try:
        args = Tuple(call.arguments, ())
        layout, parts, _ = sparse_parts(args)
        coalesced = () if type(args.items[0]) is int else items(args.items[1])[len(parts) + 1 :]
        rest: dict[_Key, Value] = {(label, 0): part for label, part in zip(SPARSE_PARTS[layout], parts, strict=True)}
    except (NotATensor, IndexError, ValueError):  # it has no record either
        return call.name, {("", -1): call.args}
    return layout, rest | {("is_coalesced", 0): bool(coalesced and coalesced[0] is True)}


def _item(found: tuple[Value, ...], place: int) -> Value:
    return found[place] if len(found) > place else None


def _pairs(found: tuple[Value, ...], place: int) -> Value:
    """Return an argument that is a dict of any class; if it is empty, it may be None or absent."""
    value = _item(found, place)
    return new_dict() if value is None else as_dict(value) or value
