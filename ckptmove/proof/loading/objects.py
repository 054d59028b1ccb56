"""Build the objects of a tree as ``torch.load`` would: dicts, lists, tensors, numbers.

Only functions and classes that torch's own weights-only unpickler allows by default are called, with arguments from the
tree. Nothing is imported, and nothing that ``torch.serialization.add_safe_globals`` allows is called.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._weights_only_unpickler import _get_allowed_globals

from ckptmove.errors import LimitExceeded
from ckptmove.pickles.tree import (
    NEWOBJ,
    ByteArray,
    Call,
    Dict,
    FrozenSet,
    Global,
    List,
    Node,
    Persistent,
    PlainTensor,
    Python2Str,
    Set,
    Tuple,
)
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.pickles.tree import Value

#: Number of arguments of ``_rebuild_tensor_v2`` without metadata.
_DENSE_ARGUMENTS: Final = 6
_DENSE: Final = "torch._utils._rebuild_tensor_v2"


#: Containers that later operations fill, and those that torch fills after a call.
_EMPTY: Final[dict[type, Callable[[], Any]]] = {List: list, Dict: dict, Set: set}
_MAPPINGS: Final = (dict, OrderedDict, Counter)
#: Classes whose arguments have members that are hashed.
_HASHING: Final = (set, OrderedDict, Counter)
#: The only encoding in which pickle writes bytes as text. Any other name would be imported as a codec.
_ENCODE: Final = "_codecs.encode"
_BYTES: Final = "latin1"
#: Nesting depth of tuples that are hashed, and their number in one level. Python hashes tuples recursively in C,
#: without a check of the stack, and shared ones again each time.
_NESTING: Final = (list, tuple)
_DEEPEST: Final = 100
_WIDEST: Final = 1_000_000
#: Values of the tree that have another type in Python.
_ATOMS: Final[dict[type, Callable[[Any], Any]]] = {Python2Str: str, ByteArray: bytearray}


#: Errors of torch's rebuild functions. A device that torch was not compiled for is an AssertionError.
REJECTED: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class NotAllowed(Exception):
    """A name that weights-only mode does not allow, or a call that it does not make."""


def build(root: Value, storage: Callable[[Persistent], Any], deepest: int) -> Any:
    """Build the object of a tree. A node that occurs several times becomes one object.

    Args:
        storage: returns the typed storage of a persistent id, one object for each storage.
        deepest: nesting depth that is allowed.
    """
    # The rebuild functions put sparse tensors on this list, and torch.load does not check them by default.
    unchecked = torch._utils._sparse_tensors_to_validate
    try:
        made = _Builder(storage, deepest).build(root)
        unchecked[:] = [tensor for tensor in unchecked if not tensor.is_meta]
        with torch.sparse.check_sparse_tensor_invariants():
            torch._utils._validate_loaded_sparse_tensors()
    finally:
        unchecked.clear()
    return made


class _Builder:
    """Objects by the ``id`` of their nodes.

    A container is empty when its members are visited, since they may contain it, and filled after them.
    """

    def __init__(self, storage: Callable[[Persistent], Any], deepest: int) -> None:
        self._storage, self._deepest = storage, deepest
        self._allowed: dict[str, Any] = _get_allowed_globals()
        self._made: dict[int, Any] = {}

    def build(self, root: Value) -> Any:
        """The object of a node or an atom."""
        made = self._made
        opened: set[int] = set()
        late: list[Node] = []
        todo: list[tuple[Node, Callable[[Any], None] | None]] = self._unmade((root,))
        depth = 0
        while todo:
            node, finish = todo.pop()
            key = id(node)
            if finish is not None:
                depth -= 1
                if finish == self._fill and self._lacks(node):
                    late.append(node)  # a member is a tuple that contains this container
                    continue
                finish(node)
                if type(node) is Call and finish == self._make and _filling(node):
                    depth += 1
                    todo.append((node, self._fill))
                    todo += self._unmade(_filling(node))
            elif key not in made and key not in opened:
                opened.add(key)
                depth += 1
                if depth > self._deepest:
                    raise LimitExceeded("the depth of a pickle", limit=self._deepest, actual=depth)
                empty = _EMPTY.get(type(node))
                if empty is not None:
                    made[key] = empty()
                todo.append((node, self._make if empty is None else self._fill))
                todo += self._unmade(node.arguments if type(node) is Call else node.members())
        for node in late:
            self._fill(node)
        return self._object(root)

    def _unmade(self, members: Iterable[Value]) -> list[tuple[Node, Callable[[Any], None] | None]]:
        """The nodes without an object among some values. Dense tensors and storages are built at once."""
        found: list[tuple[Node, Callable[[Any], None] | None]] = []
        made = self._made
        for member in members:
            if not isinstance(member, Node) or id(member) in made:
                continue
            if type(member) is PlainTensor:
                storage = self._storage(member.storage)
                geometry = member.offset, member.shape, member.stride, member.requires_grad
                made[id(member)] = _dense(storage, *geometry)
            elif type(member) is Call and (dense := _dense_arguments(member)) is not None:
                made[id(member)] = _dense(self._storage(dense[0]), *dense[1:])
            else:
                found.append((member, None))
        return found

    def _object(self, value: Value) -> Any:
        if isinstance(value, Node):
            return self._made[id(value)]
        return _ATOMS[type(value)](value) if type(value) in _ATOMS else value

    def _lacks(self, node: Node) -> bool:
        members = _filling(node) if type(node) is Call else node.members()
        return any(isinstance(member, Node) and id(member) not in self._made for member in members)

    def _objects(self, values: Iterable[Value]) -> list[Any]:
        return [self._object(value) for value in values]

    def _make(self, node: Node) -> None:
        """Make the object of a node that is no container."""
        made: Any
        if type(node) is Tuple:
            made = tuple(self._objects(node.items))
        elif isinstance(node, FrozenSet):
            made = frozenset(_hashable(self._objects(node.items)))
        elif type(node) is Persistent:
            made = self._storage(node)
        elif type(node) is Call:
            made = self._called(node)
        else:
            made = self._named(node)
        self._made[id(node)] = made

    def _named(self, node: Value) -> Any:
        """The function, class or constant of a name."""
        name = modern_name(node.full_name) if type(node) is Global else "an object without a name"
        if name not in self._allowed:
            raise NotAllowed(name)
        return self._allowed[name]

    def _called(self, call: Call) -> Any:
        """The result of a call, as in torch/_weights_only_unpickler.py ``Unpickler.load``."""
        function = self._named(call.func)
        if call.kwargs is not None or type(call.args) is not Tuple:
            raise NotAllowed(f"the arguments of {call.name}")
        arguments = self._objects(call.args.items)
        if call.name == _ENCODE and arguments[1:] != [_BYTES]:
            raise NotAllowed(f"the encoding of {_ENCODE}")
        if function in _HASHING:
            _hashable(arguments)
        is_new = call.opcode == NEWOBJ and function is not torch.nn.Parameter
        return function.__new__(function, *arguments) if is_new else function(*arguments)

    def _fill(self, node: Node) -> None:
        """Put the members into a container, or the items and the state into the result of a call."""
        target: Any = self._made[id(node)]
        if type(node) is Dict:
            _assign(target, self._objects(node.flat))
        elif type(node) is Call:
            self._add(node, target)
        else:
            members = self._objects(node.members())
            if type(node) is Set:
                target.update(_hashable(members))
            else:
                target.extend(members)

    def _add(self, call: Call, target: Any) -> None:
        """Add the items and the state to the result of a call, if torch's weights-only unpickler does."""
        if call.appended is not None or (call.assigned is not None and type(target) not in _MAPPINGS):
            raise NotAllowed(f"the items of {call.name}")
        if call.assigned is not None:
            _assign(target, self._objects(call.assigned.flat))
        if call.state is None:
            return
        state = self._object(call.state)
        if type(target) is torch.Tensor:
            target.set_(*state)
        elif type(target) is torch.nn.Parameter:
            target.__setstate__(state)
        elif type(target) is OrderedDict:
            target.__dict__.update(state)
        else:
            raise NotAllowed(f"the state of {call.name}")


def _filling(call: Any) -> tuple[Value, ...]:
    """What later operations add to the result of a call; nodes only of lists that it is not."""
    assigned = () if call.assigned is None else call.assigned.flat
    return tuple(value for value in (*assigned, call.appended, call.state) if value is not None)


def _assign(target: Any, flat: list[Any]) -> None:
    for key, value in zip(_hashable(flat[::2]), flat[1::2], strict=True):
        target[key] = value


def _hashable(values: list[Any]) -> list[Any]:
    """The values, if no tuple among them, or in a list among them, is nested so deeply that its hash fails."""
    level: list[Any] = values
    for _ in range(_DEEPEST):
        level = [item for one in level if isinstance(one, _NESTING) for item in one]
        if not level:
            return values
        if len(level) > _WIDEST:
            break
    raise ValueError("a key or a member of a set is nested too deeply")


def _dense(storage: Any, offset: int, shape: Any, stride: Any, requires_grad: bool) -> Any:
    """A dense tensor, as ``_rebuild_tensor_v2`` makes it; that also searches for a fake mode, which takes longer."""
    made = torch._utils._rebuild_tensor(storage, offset, shape, stride)
    made.requires_grad = requires_grad
    made._backward_hooks = OrderedDict()
    return made


def _dense_arguments(call: Call) -> tuple[Any, ...] | None:
    """The arguments of a dense tensor, without its hooks, if they are written as torch does: a shortcut for most."""
    args = call.args
    if type(args) is not Tuple or len(args.items) != _DENSE_ARGUMENTS or call.name != _DENSE or _filling(call):
        return None
    storage, offset, size, stride, requires_grad, hooks = args.items
    if type(storage) is not Persistent or type(size) is not Tuple or type(stride) is not Tuple:
        return None
    if type(hooks) is not Call or hooks.name != "collections.OrderedDict" or hooks.arguments or _filling(hooks):
        return None
    return storage, offset, size.items, stride.items, requires_grad
