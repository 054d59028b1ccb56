"""Validate the class names in a ``.metadata``, and parse the objects of torch's classes: the file has no checksum.

Classes from other packages are accepted: a custom planner or storage may write any.

From torch/distributed/checkpoint/metadata.py, filesystem.py and planner.py of torch 2.0 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle
from ckptmove.pickles.tree import Call, Dict, Global, List, Node, Opaque, Persistent, PlainObject, Sequence, Tuple
from ckptmove.torch_facts.layouts import SPARSE_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as AnySequence

    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
_PLANNER: Final = "torch.distributed.checkpoint.planner"
#: Module of ``TensorProperties`` up to torch 2.2.
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"
_PROPERTIES: Final = frozenset({f"{METADATA}.TensorProperties", f"{_SHARDED}.TensorProperties"})
_MEMORY_FORMATS: Final = frozenset({f"{METADATA}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING"})
_MEMORY_FORMAT_NAMES: Final = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_LAYOUTS: Final = frozenset(
    {"torch.strided", "torch._mkldnn", "torch.jagged", *(f"torch.{one}" for one in SPARSE_PARTS)}
)
_LAYOUT: Final = "torch.serialization._get_layout"
_GETATTR: Final = frozenset({"builtins.getattr", "__builtin__.getattr"})
#: All classes of torch's modules that a ``.metadata`` may name.
_CLASSES: Final[dict[str, tuple[str, ...]]] = {
    METADATA: (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    _FILESYSTEM: ("SerializationFormat", "_StorageInfo", "_StoragePrefix"),
    _PLANNER: (
        "BytesIOWriteData", "LoadItemType", "LoadPlan", "ReadItem", "SavePlan", "TensorWriteData", "WriteItem",
        "WriteItemType",
    ),
}  # fmt: skip
_NAMES: Final = (
    _PROPERTIES | _MEMORY_FORMATS | {f"{module}.{name}" for module, names in _CLASSES.items() for name in names}
)
#: Other names that torch and Python write there. No known name differs from one of them in one letter.
_FAMILIAR: Final = _NAMES | {
    "torch.Size", _LAYOUT, *_GETATTR, "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath", "collections.OrderedDict",
}  # fmt: skip
#: Number of fields of ``TensorProperties``, up to torch 2.14 and later: with the strides of the whole tensor.
_PROPERTIES_HELD: Final = (5, 6)
_SHOWN: Final = 80


def require_loadable(machine: Machine) -> None:
    """Raise DamagedPickle for a ``.metadata`` that ``pickle.load`` refuses in every process."""
    for name, offset in machine.globals.items():
        if _is_misnamed(name):
            raise DamagedPickle(f"torch has no '{name[:_SHOWN]}', named", offset=offset)
    seen: set[int] = set()
    waiting: list[tuple[Value, int]] = [(machine.root, machine.begin)]
    while waiting:
        value, start = waiting.pop()
        if isinstance(value, Opaque | Persistent):
            raise DamagedPickle("a persistent id or extension code, which torch does not resolve,", offset=start)
        if not isinstance(value, Sequence | Dict | Call) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Sequence):
            waiting += _complex(value.items, value.starts)
        elif isinstance(value, Dict):
            _require_keys(value)
            waiting += _complex(value.flat, value.starts)
        else:
            waiting += _parts(value)


def _complex(values: AnySequence[Value], starts: AnySequence[int]) -> Iterator[tuple[Value, int]]:
    """Those of some values that can hold others, each with its start."""
    both = zip(values, starts, strict=True)
    return ((value, start) for value, start in both if type(value) is not PlainObject and isinstance(value, Node))


def _parts(call: Call) -> list[tuple[Value, int]]:
    """The members of a call, each with its start in the pickle."""
    is_method = type(call.func) is Call and call.func.name in _GETATTR  # Python pickles bound methods so
    if not (type(call.func) is Global or is_method) or type(call.args) is not Tuple:
        raise DamagedPickle("a call of a value that is not a class", offset=call.args_start)
    places: list[tuple[Value, int]] = [
        (call.func, call.args_start),
        (call.args, call.args_start),
        (call.kwargs, call.args_start),
        (call.state, call.state_start),
    ]
    return places + [(more, call.args_start) for more in (call.appended, call.assigned) if more is not None]


def _require_keys(table: Dict) -> None:
    for key, start in zip(table.flat[::2], table.starts[::2], strict=True):
        if isinstance(key, Dict | List):
            raise DamagedPickle("a key that Python cannot hash", offset=start)


def _is_misnamed(name: str) -> bool:
    """Whether a name is in one of torch's modules but unknown there, or one letter away from a known name."""
    if name in _FAMILIAR:
        return False
    if name.rpartition(".")[0] in _CLASSES:
        return True
    return any(differs_by_one(name, one) for one in _FAMILIAR)


def differs_by_one(text: str, other: str) -> bool:
    """Whether two texts of one length differ in one letter, as after a flipped bit."""
    return len(text) == len(other) and sum(map(str.__ne__, text, other)) == 1


def is_plain(call: Call) -> bool:
    """Whether an object is built as Python pickles a dataclass: without arguments, then with its state."""
    return (
        type(call.args) is Tuple
        and not call.args.items
        and call.kwargs is None
        and call.appended is None
        and call.assigned is None
    )


def properties_of(value: Value) -> tuple[str, bool] | None:
    """The dtype and ``requires_grad`` of a ``TensorProperties``; None if the value is not a valid one.

    The state has the same first five fields in each version: dtype, layout, ``requires_grad``, memory format and
    ``pin_memory``. Since torch 2.15 strides, or None, come after them.
    """
    state = value.state if type(value) is Call and value.name in _PROPERTIES and is_plain(value) else None
    if type(state) is not Tuple or len(state.items) not in _PROPERTIES_HELD:
        return None
    dtype, layout, requires_grad, memory_format, _, *strides = state.items
    if not all(one is None or _is_shape(one) for one in strides):
        return None
    if type(dtype) is not Global or dtype.module != "torch":
        return None
    return (dtype.name, requires_grad is True) if _is_layout(layout) and _is_memory_format(memory_format) else None


def _is_shape(value: Value) -> bool:
    return type(value) is Tuple and all(type(one) is int for one in value.items)


def _is_layout(value: Value) -> bool:
    return type(value) is Call and value.name == _LAYOUT and _only(value) in _LAYOUTS


def _is_memory_format(value: Value) -> bool:
    """Whether a value is ``_MEM_FORMAT_ENCODING(0)``; Python 3.11.0 to 3.11.3 pickle it by name."""
    if type(value) is not Call:
        return False
    if value.name in _MEMORY_FORMATS:
        return _only(value) in {0, 1, 2}
    enumeration, *named = value.args.items if value.name in _GETATTR and type(value.args) is Tuple else (None,)
    is_known = type(enumeration) is Global and enumeration.full_name in _MEMORY_FORMATS
    return is_known and len(named) == 1 and named[0] in _MEMORY_FORMAT_NAMES


def _only(call: Call) -> Value:
    """The argument of a call with one argument."""
    return call.args.items[0] if type(call.args) is Tuple and len(call.args.items) == 1 else None
