"""Where the tensors of a tree stand, and what is written with each besides what its record says.

Never says twice what a record says: storage, offset, size, stride, dtype, device and requires_grad are not looked at.

The argument orders are those of the rebuild functions in torch/_utils.py and torch/_tensor.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.pickles.rebuild_arguments import SPARSE_PARTS, NotATensor, items, sparse_parts
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Dict, Node, Persistent, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.pickles.tree import Value

    #: A name below the tensor, empty for what are its own items or attributes; and a number that tells these apart.
    _Key = tuple[str, int]

#: By call around another tensor's: places of the dicts that hang on it, of hooks and of attributes.
_AROUND: Final = {
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
#: By rebuild function: the kind of tensor, and places of the arguments that no record tells: by name, and dicts.
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


class TensorNode(NamedTuple):
    """What is written with a tensor besides what its record says.

    Attributes:
        kind: of the tensor; those of different kinds are told apart by their records.
        rest: what no record tells.
    """

    kind: str
    rest: Mapping[_Key, Value]


class TensorNodes:
    """Tells the tensors of trees from everything else; one serves for as long as the trees are held."""

    def __init__(self) -> None:
        self._reader = TensorReader()
        self._seen: dict[int, Node] = {}
        self._holders: set[int] = set()

    def is_tensor(self, value: Value) -> bool:
        """Whether a value is a tensor, or a storage that was saved by itself."""
        if type(value) is Persistent:
            return type(value.pid) is Tuple and value.pid.items[:1] == ("storage",)
        return type(value) is Call and self._reader.is_tensor(value)

    def node(self, value: Value) -> TensorNode | None:
        """What is written with a tensor; None where a value is none."""
        if not self.is_tensor(value):
            return None
        rest: dict[_Key, Value] = {}
        while type(value) is Call and value.name in _AROUND:
            found = _items(value)
            rest |= {("", len(rest) + place): _pairs(found, at) for place, at in enumerate(_AROUND[value.name])}
            if value.name.startswith("torch._utils."):
                value = _item(found, 0)
            else:
                value = Call(_item(found, 0), _item(found, 2), -1)
        kind, arguments = _rest(value) if type(value) is Call else ("storage", {})
        return TensorNode(kind, rest | arguments)

    def hold(self, value: Value) -> bool:
        """Whether a value is a list, a dict or the like with a tensor somewhere in it."""
        if isinstance(value, Node) and id(value) not in self._seen:
            self._look_into(value)
        return id(value) in self._holders and not self.is_tensor(value)

    def _look_into(self, root: Node) -> None:
        """Note which of all the nodes below one hold tensors; each is looked at once."""
        parents: dict[int, list[int]] = {}
        found: list[int] = []
        stack = [root]
        self._seen[id(root)] = root
        while stack:
            node = stack.pop()
            if self.is_tensor(node):
                found.append(id(node))
                continue
            for _, value in members(node):
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


def members(node: Value) -> Iterator[tuple[str, Value]]:
    """Name and value of each thing in a list, a dict or the like; nothing for other objects."""
    pairs = as_dict(node)
    if isinstance(node, Sequence):
        yield from ((str(place), item) for place, item in enumerate(node.items))
    elif pairs is not None:
        yield from ((key_text(key), value) for key, value, _ in pairs.pairs())


def _rest(call: Call) -> tuple[str, dict[_Key, Value]]:
    """The kind of a tensor, and the arguments that no record tells."""
    if call.name == _SPARSE:
        return _sparse(call)
    found = _items(call)
    kind, named, dicts = _ARGUMENTS.get(call.name, (call.name, {}, ()))
    rest: dict[_Key, Value] = {(name, 0): _item(found, at) for name, at in named.items()}
    quantizer = _item(found, 4)
    if call.name == _QUANTIZED and isinstance(quantizer, Sequence):
        rest = {(name, 0): value for name, value in zip(_QUANTIZER, quantizer.items, strict=False)}
    # Apart from the dicts of the calls around this one.
    return kind, rest | {("", -1 - place): _pairs(found, at) for place, at in enumerate(dicts)}


def _sparse(call: Call) -> tuple[str, dict[_Key, Value]]:
    """The dense tensors of a sparse one, and whether it is coalesced, which TorchScript and old files do not tell."""
    try:
        args = Tuple(_items(call), ())
        layout, parts, _ = sparse_parts(args)
        told = () if type(args.items[0]) is int else items(args.items[1])[len(parts) + 1 :]
        rest: dict[_Key, Value] = {(label, 0): part for label, part in zip(SPARSE_PARTS[layout], parts, strict=True)}
    except (NotATensor, IndexError, ValueError):  # where no record is made of it
        return call.name, {("", -1): call.args}
    return layout, rest | {("is_coalesced", 0): bool(told and told[0] is True)}


def _items(call: Call) -> tuple[Value, ...]:
    return call.args.items if type(call.args) is Tuple else ()


def _item(found: tuple[Value, ...], place: int) -> Value:
    return found[place] if len(found) > place else None


def _pairs(found: tuple[Value, ...], place: int) -> Value:
    """An argument that is a dict, and may be of any kind, None, or left out where it is empty."""
    value = _item(found, place)
    return Dict([], []) if value is None else as_dict(value) or value
