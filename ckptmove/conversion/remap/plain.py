"""Replace the objects of a tree by values that ``torch.load(weights_only=True)`` loads.

The replacements are dicts, lists, tuples, strings and numbers, which every supported torch loads. Bytes and bytearrays
(since torch 2.5), complex numbers (since torch 2.6) and newer dtypes stay, because they have no other plain form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.inventory.numpy_scalars import bytes_of
from ckptmove.checkpoint.inventory.objects import extent
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, state_dict_of, string_keys
from ckptmove.conversion.remap.errors import NotPlain
from ckptmove.conversion.remap.state_dicts import ModuleState, is_module, object_state
from ckptmove.conversion.remap.values import UNKNOWN, VALUES, NoPlainValue, callable_name
from ckptmove.errors import LimitExceeded
from ckptmove.moves import Replaced
from ckptmove.pickles.build import new_dict, new_tuple
from ckptmove.pickles.storage_id import storage_id
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import (
    NEWOBJ,
    REDUCE,
    ByteArray,
    Call,
    Dict,
    Global,
    List,
    Node,
    Opaque,
    Persistent,
    PlainStorage,
    PlainTensor,
    Python2Str,
    Sequence,
    Set,
    Tuple,
    nodes,
    tuple_items,
)
from ckptmove.torch_facts.harmless import is_class
from ckptmove.torch_facts.verdicts import classify, is_dangerous
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value

    #: Path of a value from the root: that of its container and its key, or None at the root.
    _Link: TypeAlias = "tuple[_Link, str] | None"

#: Functions that rebuild a tensor subclass: ``(func, type, args, state)``. Libraries copy the old one of torch.
_FROM_TYPE: Final = ("._rebuild_from_type", "._rebuild_from_type_v2")
_FROM_TYPE_V2: Final = "torch._tensor._rebuild_from_type_v2"
_WRAPPER: Final = "torch._utils._rebuild_wrapper_subclass"
_DEVICE_DATA: Final = "torch._utils._rebuild_device_tensor_from_numpy"
#: Names that weights-only mode allows, but not in every supported torch, and that have another plain form.
_REPLACED: Final = frozenset({"builtins.set"})
#: Functions that rebuild a dense tensor, and the first argument that is not its storage or its shape.
_DENSE: Final = frozenset(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
_HOOKS: Final = 5
#: Largest integer of LONG1 in bits. torch's weights-only unpickler has no LONG4.
_MOST_BITS: Final = 8 * 255 - 1
#: Largest number of items in a key, with those of the tuples in it.
_LARGEST_KEY: Final = 1000
_TWO_FORMS: Final = "it has a value and attributes"
_ITSELF: Final = "its value is the object itself"
_KINDS: Final = {"_codecs.encode": "bytes", "builtins.bytearray": "bytearray", "builtins.complex": "complex"}


def make_plain(root: Value, limits: Limits) -> tuple[Value, tuple[Replaced, ...]]:
    """Replace every object that ``torch.load(weights_only=True)`` rejects, in place.

    Returns the new root, and the replacements in the order of the file.
    """
    plain = _Plain(limits)
    plain.choose(root)
    return plain.put_in_place(root)


def require_plain(root: Value, limits: Limits) -> None:
    """Check what :func:`make_plain` checks, on a tree that stays as it is. It may be one that cannot be edited."""
    _Plain(limits).choose(root)


def _hostile(root: Value) -> Iterator[tuple[str, str, str]]:
    """Yield path, name and reason of each function that no library's object holds."""
    seen: set[int] = set()
    stack: list[tuple[Value, _Link]] = [(root, None)]
    while stack:
        node, link = stack.pop()
        if not isinstance(node, Node) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is Global and _is_hostile(node):
            yield _path(link), node.full_name, "it can run code, and no checkpoint needs it"
        stack += reversed(list(_children(node, link)))


def _is_hostile(node: Global) -> bool:
    """Whether a name is dangerous, and none that torch's own objects hold (a compiled module), or a method of a class.

    Nothing is called here: such objects have a plain value, or are refused for what they are.
    """
    name = modern_name(node.full_name)
    is_held = name.startswith(("torch.", "numpy.")) or is_class(name.rpartition(".")[0])
    return is_dangerous(name) and not is_held


def _children(node: Node, link: _Link) -> Iterator[tuple[Value, _Link]]:
    """Iterate over the nodes and large integers directly in a node, with their paths.

    Arguments, items and state of a call have the path of the call.
    """
    if isinstance(node, Sequence):
        yield from ((item, (link, str(index))) for index, item in enumerate(node.items) if _is_visited(item))
    elif type(node) is Dict:
        for key, value, _ in node.pairs():
            if _is_visited(key):
                yield key, (link, f"{key_text(key)}.key")
            if _is_visited(value):
                yield value, (link, key_text(key))
    elif not (type(node) is Call and _is_common_tensor(node)):
        members = node.members()
        if type(node) is Call and type(node.args) is Tuple:
            members = (node.func, *node.args.items, *members[2:])
        yield from ((value, link) for value in members if _is_visited(value))


def _is_common_tensor(call: Call) -> bool:
    """Whether nothing in a call but its storage and its shape can be an object: a shortcut for most tensors."""
    return call.name in _DENSE and not any(
        isinstance(value, Node) and not (type(value) is Call and _is_empty_dict(value))
        for value in call.arguments[_HOOKS:]
    )


def _is_empty_dict(call: Call) -> bool:
    return call.name == "collections.OrderedDict" and not any(call.arguments) and call.state is call.assigned is None


def _is_visited(value: Value) -> bool:
    return isinstance(value, Node) or (type(value) is int and value.bit_length() > _MOST_BITS)


def _path(link: _Link) -> str:
    parts: list[str] = []
    while link is not None:
        link, part = link
        parts.append(part)
    return ".".join(reversed(parts))


class _Plain:
    """One pass over a tree: first choose the replacements, then put them in their places."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._reader = TensorReader()
        self._values = 0
        #: Every visited node by its ``id``. Replaced nodes must stay alive, or a new node could get the same ``id``.
        self._seen: dict[int, Node] = {}
        self._new: dict[int, Value] = {}
        self._links: dict[int, _Link] = {}
        self._encoded: dict[int, tuple[bytes, Call]] = {}
        #: Path, class and new value of each replacement, and the name of the new type if it is not that of the value.
        self._noted: list[tuple[_Link, str, Value, str]] = []
        self._refused: list[tuple[str, str, str]] = []
        #: Calls that the new file makes as every torch does.
        self._reduced: list[Call] = []

    def choose(self, root: Value) -> None:
        """Choose the replacement of every node below the root. The tree does not change."""
        if any(type(node) is Global and _is_hostile(node) for node in nodes(root)):
            raise NotPlain(tuple(_hostile(root)), is_dangerous=True)
        stack: list[tuple[Value, _Link]] = [(root, None)]
        while stack:
            value, link = stack.pop()
            if not isinstance(value, Node):
                self._check_atom(value, link)
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                try:
                    new = self._replacement(value, link)
                except NoPlainValue as error:
                    self._refused.append((self._where(link), _class_of(value), error.why))
                    continue
                if new is not value:
                    self._put(value, new, link)
                    stack.append((new, link))
                elif type(value) is not Persistent:  # the id of a storage is not a value of the file
                    stack += reversed(list(_children(value, link)))
        self._check_keys()
        if self._refused:
            raise NotPlain(tuple(self._refused))

    def put_in_place(self, root: Value) -> tuple[Value, tuple[Replaced, ...]]:
        """Replace everything below the root by what was chosen."""
        for call in self._reduced:
            call.opcode = REDUCE
        for node in self._seen.values():
            self._fill(node)
        replaced = [
            Replaced(self._where(link), source, target or self._kind(self._resolved(new)))
            for link, source, new, target in self._noted
        ]
        return self._resolved(root), tuple(replaced)

    def _where(self, link: _Link) -> str:
        path = _path(link)
        self._spend(len(path))
        return path

    def _spend(self, values: int) -> None:
        self._values += values
        if self._values > self._limits.visits:
            raise LimitExceeded("plain values", limit=self._limits.visits, actual=self._values)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _check_atom(self, value: Value, link: _Link) -> None:
        if type(value) is int and value.bit_length() > _MOST_BITS:
            why = "weights-only mode loads integers of at most 255 bytes"
            self._refused.append((self._where(link), "builtins.int", why))

    def _put(self, value: Node, new: Value, link: _Link) -> None:
        """Note a replacement, unless it leads back to the value."""
        if self._resolved(new) is value:
            self._refused.append((self._where(link), _class_of(value), _ITSELF))
        else:
            self._new[id(value)] = new

    def _replacement(self, node: Node, link: _Link) -> Value:
        """Return the plain value of a node: the node itself if only its members change."""
        if type(node) is Call:
            return self._object(node, link)
        if isinstance(node, Set):
            return self._note(link, "builtins.set", List(node.items, node.starts))
        if isinstance(node, Sequence | Dict):
            self._spend(len(node.members()))
            if type(node) is Dict and any(isinstance(key, Node) for key in node.flat[::2]):
                self._links[id(node)] = link
            return node
        if type(node) is Opaque:
            raise NoPlainValue("its value is not in the file")
        if storage_id(node) is not None or isinstance(node, PlainTensor | PlainStorage):
            return node
        name = callable_name(node)
        return node if _is_allowed(name) else self._note(link, name, name)

    def _note(self, link: _Link, source: str, new: Value, target: str = "") -> Value:
        self._noted.append((link, source, new, target))
        return new

    def _object(self, call: Call, link: _Link) -> Value:
        name = modern_name(call.name)
        if name.endswith(_FROM_TYPE) or self._reader.is_tensor(call):
            return self._tensor(call, name, link)
        if _is_allowed(name) and call.kwargs is None:
            self._reduced.append(call)  # the only call that every torch makes for these names
            return call
        if name == "builtins.bytes" and bytes_of(call) is not None:  # b"" in protocol 2
            return self._encode(b"")
        self._spend(extent(call))
        if name.startswith("omegaconf."):
            return self._note(link, name, self._container(call))
        if is_module(call):
            state = ModuleState(self._limits, self._spend).read(call)
            return self._note(link, call.name, state, "state_dict")
        source, value = self._plain_value(call, name)
        return self._note(link, source, value)

    def _plain_value(self, call: Call, name: str) -> tuple[str, Value]:
        """Return the class of an object and its plain value."""
        if call.kwargs is not None and call.state is None and not call.assigned and not call.appended:
            raise NoPlainValue(UNKNOWN)
        convert = VALUES.get(name)
        if convert is not None:
            return name, convert(call)
        name, args, is_new = _constructor(call, name)
        pairs = as_dict(call)
        if pairs is not None or call.appended is not None:
            if not _repeats(call.state, pairs):
                raise NoPlainValue(_TWO_FORMS)
            return name, call.appended if pairs is None else pairs
        if not name:
            raise NoPlainValue("another call computes its class")
        if call.state is not None:
            if is_new and args:  # a string or a tuple of a class with attributes
                raise NoPlainValue(_TWO_FORMS)
            return name, self._attributes(call, name, args)
        return name, _built(name, args, is_new=is_new)

    def _attributes(self, call: Call, name: str, args: tuple[Value, ...]) -> Value:
        """Return the attributes of an object, or the state that its ``__getstate__`` returned."""
        if any(value is not None and type(value) is not Global for value in args):
            raise NoPlainValue(_TWO_FORMS)
        parts = tuple_items(call.state)
        is_pair = len(parts) == 2 and all(part is None or as_dict(part) is not None for part in parts)
        pairs = state_dict_of(call.state) if is_pair else as_dict(call.state)
        if pairs is None:
            return new_dict() if is_pair else call.state
        state = object_state(name, pairs, self._is_tensor)
        return pairs if state is None else state

    def _container(self, call: Call) -> Value:
        """Return the content of an omegaconf container, or the value of a node."""
        pairs = as_dict(call.state)
        for key in ("_content", "_val"):
            value = pairs.get(key) if pairs is not None else None
            if value is call:
                raise NoPlainValue(_ITSELF)
            if pairs is not None and key in string_keys(pairs):
                return value
        if pairs is None:
            return self._plain_value(call, modern_name(call.name))[1]
        return pairs

    # --- tensors -----------------------------------------------------------------------------------------------------

    def _is_tensor(self, value: Value) -> bool:
        return type(value) is Call and self._reader.is_tensor(value)

    def _tensor(self, call: Call, name: str, link: _Link) -> Value:
        """Return a tensor that weights-only mode rebuilds: for a subclass, its plain tensor."""
        args = call.arguments
        if name.endswith(_FROM_TYPE):
            return self._subclass(call, name, link)
        kind = args[0] if args else None
        if name == _WRAPPER and not (type(kind) is Global and _is_allowed(kind.full_name)):
            raise NoPlainValue("a wrapper subclass has no bytes of its own")
        if not _is_rebuilt(name):
            raise NoPlainValue("not every torch.load(weights_only=True) rebuilds it")
        return call

    def _subclass(self, call: Call, name: str, link: _Link) -> Value:
        args = call.arguments
        inner = Call(args[0], args[2], -1) if len(args) > 2 else None  # function, class, arguments
        if inner is None or not self._reader.is_tensor(inner) or inner.name == _WRAPPER or not _is_rebuilt(inner.name):
            raise NoPlainValue("only its class rebuilds the tensor")
        kind = callable_name(args[1])
        if name == _FROM_TYPE_V2 and _is_allowed(kind):
            return call
        return self._note(link, kind, inner, "torch.Tensor")

    # --- putting in place --------------------------------------------------------------------------------------------

    def _check_keys(self) -> None:
        """Refuse dicts whose keys are equal or not hashable after the replacement."""
        for identity, link in self._links.items():
            keys = self._seen[identity].members()[::2]
            new = [_hashed(key, self._resolved) for key in keys]
            if None in new:
                self._refused.append((self._where(link), "builtins.dict", "one of its keys would not be hashable"))
            elif len(set(new)) < len({_hashed(key, lambda value: value) for key in keys}):
                self._refused.append((self._where(link), "builtins.dict", "two of its keys would be equal"))

    def _fill(self, node: Node) -> None:
        """Put the replacements of a node's members in their places."""
        if type(node) is Tuple:
            node.items = tuple(map(self._resolved, node.items))
        elif isinstance(node, List):
            node.items[:] = map(self._resolved, node.items)
        elif type(node) is Dict:
            node.flat[:] = map(self._resolved, node.flat)
        elif type(node) is Call and id(node) not in self._new:
            node.state = self._resolved(node.state)
            if type(node.args) is Tuple:
                self._fill(node.args)

    def _resolved(self, value: Value) -> Value:
        """Return the final replacement of a value: the value itself if it has none."""
        passed: list[int] = []
        while isinstance(value, Node) and id(value) in self._new:
            passed.append(id(value))
            value = self._new[id(value)]
        for identity in passed:
            self._new[identity] = value
        if isinstance(value, bytes):
            return self._encode(value)
        return str(value) if type(value) is Python2Str else value

    def _kind(self, value: Value) -> str:
        """Return the name of a plain type, as a reader of the new file sees it."""
        if isinstance(value, Call):
            name = "torch.Tensor" if self._is_tensor(value) else _KINDS.get(value.name, value.name)
            return "dict" if as_dict(value) is not None else name
        if isinstance(value, Node):
            return type(value).__name__.lower()
        return type(value).__name__ if value is not None else "None"

    def _encode(self, value: bytes) -> Call:
        """Return bytes as protocol 2 writes them: weights-only mode has no opcode for bytes."""
        kept = self._encoded.get(id(value))
        if kept is None:
            call = Call(Global("_codecs", "encode"), Tuple((value.decode("latin-1"), "latin1"), (-1, -1)), -1)
            if type(value) is ByteArray:
                call = Call(Global("builtins", "bytearray"), Tuple((call,), (-1,)), -1)
            kept = self._encoded[id(value)] = value, call
        return kept[1]


def _constructor(call: Call, name: str) -> tuple[str, tuple[Value, ...], bool]:
    """Return the class of an object, the arguments, and whether they are those of ``__new__``."""
    args = call.arguments
    if name == "copyreg._reconstructor" and args:
        # ``(class, base, value)``, where the value is that of a list, a tuple or another builtin base.
        return callable_name(args[0]), () if args[2:] == (None,) else args[2:], True
    if name in {"copyreg.__newobj__", "copyreg.__newobj_ex__"} and args:
        return callable_name(args[0]), args[1:], True
    return name, args, call.opcode == NEWOBJ


def _built(name: str, args: tuple[Value, ...], *, is_new: bool) -> Value:
    """Return the value of an object without a state: an enum, a namedtuple, or a subclass of a builtin."""
    is_class = is_new or name.rpartition(".")[2].lstrip("_")[:1].isupper()
    if is_class and not args:
        return new_dict()
    if is_class and len(args) == 1 and (not isinstance(args[0], Call) or as_dict(args[0]) is not None):
        return args[0]
    if is_class:  # a namedtuple, or an object whose __reduce__ gives the arguments of its class
        return new_tuple(*args)
    raise NoPlainValue(UNKNOWN)


def _repeats(state: Value, items: Dict | None) -> bool:
    """Whether a dict or a list has no attributes but its own items, as after ``self.__dict__ = self``."""
    own, known = as_dict(state), set() if items is None else string_keys(items)
    return state is None or (own is not None and string_keys(own) <= known)


def _hashed(key: Value, resolved: Callable[[Value], Value]) -> tuple[object, ...] | None:
    """Return what a key compares by; None if it is not hashable, or very large."""
    found: list[object] = []
    stack = [key]
    while stack and len(found) <= _LARGEST_KEY:
        value = resolved(stack.pop())
        if type(value) is Tuple:
            found.append((len(value.items),))
            stack += value.items
        elif isinstance(value, Sequence | Dict) or (type(value) is Call and as_dict(value) is not None):
            return None
        else:
            found.append(id(value) if isinstance(value, Node) else value)
    return None if stack else tuple(found)


def _is_allowed(name: str) -> bool:
    return classify(name).weights_only and modern_name(name) not in _REPLACED


def _is_rebuilt(name: str) -> bool:
    """Whether weights-only mode rebuilds tensors with a function; numpy arrays become lists, which are no tensors."""
    return name != _DEVICE_DATA and _is_allowed(name)


def _class_of(node: Node) -> str:
    if type(node) is Call:
        is_subclass = node.name.endswith(_FROM_TYPE) and len(node.arguments) > 1
        kind = node.arguments[1] if is_subclass else None
        return kind.full_name if type(kind) is Global else node.name or "a call"
    return node.full_name if type(node) is Global else type(node).__name__.lower()
