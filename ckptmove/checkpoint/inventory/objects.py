"""List the members of pickled objects: modules, optimizers and objects of unknown classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.shapes import (
    as_dict,
    attributes,
    key_fault,
    key_text,
    members,
    state_dict_of,
    string_keys,
    unique,
)
from ckptmove.pickles.tree import Call, Dict, Node, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.inventory.optimizers import OptimizerDraft
    from ckptmove.checkpoint.inventory.shapes import Member
    from ckptmove.pickles.tree import Value

_REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
#: Classes that TorchScript compiles from the code of its archive.
_SCRIPT_CLASSES: Final = "__torch__."
#: Functions that give TorchScript the type of a list or a dict: ``restore_type_tag(value, type)``.
_SCRIPT_TYPES: Final = "torch.jit._pickle."


def unwrapped(call: Call) -> tuple[Value, int] | None:
    """Return the list or dict in a type tag of TorchScript, and its start; None for other calls."""
    if not call.name.startswith(_SCRIPT_TYPES) or type(call.args) is not Tuple or not call.args.items:
        return None
    value = call.args.items[0]
    return None if type(value) is Call else (value, call.args.starts[0])


def extent(call: Call) -> int:
    """Return the number of attributes and arguments that are read to classify an object."""
    first = call.args.items[0] if isinstance(call.args, Sequence) and call.args.items else None
    state = attributes(call)
    pairs = 0 if state is None else len(state.flat)
    return pairs + (len(first.flat) if type(first) is Dict else len(first.items) if isinstance(first, Sequence) else 0)


def is_enum(call: Call) -> bool:
    """Whether a call has the form of a member of an enum: its class, called with a plain value."""
    has_more = call.state is not None or call.appended is not None or call.assigned is not None
    return not has_more and len(call.arguments) == 1 and not isinstance(call.arguments[0], Node)


def module_attributes(call: Call) -> Dict | None:
    """Return the attributes of a pickled ``nn.Module`` or of a TorchScript module, or None for other calls.

    For a ``torch.fx.GraphModule`` they are in the arguments: ``reduce_graph_module(dict, import_block)``.
    """
    if call.name.startswith(_SCRIPT_CLASSES):
        return attributes(call)
    for pairs in (attributes(call), as_dict(call.arguments[0]) if call.arguments else None):
        if pairs is not None and _has_registries(pairs):
            return pairs
    return None


def registered_members(pairs: Dict) -> Iterator[Member]:
    """Iterate over parameters, buffers and submodules of a module, in the order of its ``state_dict()``.

    In a TorchScript module these are all its attributes.
    """
    if not _has_registries(pairs):
        yield from members(pairs)
    for registry in _REGISTRIES:
        registered = as_dict(pairs.get(registry))
        yield from members(registered) if registered is not None else ()


def plain_members(pairs: Dict) -> Iterator[Member]:
    """Iterate over the other attributes of a module, which may contain tensors too."""
    if not _has_registries(pairs):
        return iter(())
    return (member for member in members(pairs) if member[0] not in _REGISTRIES)


def _has_registries(pairs: Dict) -> bool:
    return string_keys(pairs).issuperset(_REGISTRIES)


def sequence_members(value: Sequence) -> Iterator[Member]:
    """Iterate over the items of a sequence, named by their indices."""
    return zip(map(str, range(len(value.items))), value.items, value.starts, strict=True)


def state_members(state: Dict, draft: OptimizerDraft) -> Iterator[Member]:
    """Iterate over the state of an optimizer by parameter; in a pickled optimizer, the keys are the parameters."""
    for key, value, start in unique(state):
        yield draft.object_keys.get(id(key)) or key_text(key), value, start


def object_members(call: Call) -> Iterator[Member]:
    """Iterate over the arguments, items and attributes of an object of an unknown class."""
    if isinstance(call.func, Call):
        yield "func", call.func, -1
    for holder in (call.args, call.appended):
        if isinstance(holder, Sequence):
            yield from sequence_members(holder)
        elif isinstance(holder, Node):
            yield "args", holder, -1
    keywords = as_dict(call.kwargs)
    yield from members(keywords) if keywords is not None else ()
    yield from value_members(call.state)


def dict_kind(node: Node, pairs: Dict) -> str:
    """Return ``dict`` for a plain dict, else the name of its class, or why its keys do not allow a rebuild."""
    fault = key_fault(pairs)
    if fault:
        return fault
    return node.name if type(node) is Call and node.name != "collections.OrderedDict" else "dict"


def dict_members(call: Call, pairs: Dict) -> Iterator[Member]:
    """Iterate over the items of a dict subclass, then over its arguments and attributes of other names."""
    yield from members(pairs)
    if call.assigned is None:
        return  # the items come from the arguments
    keys: set[str] | None = None
    for member in object_members(call):
        if keys is None:  # most have no such member
            keys = string_keys(pairs) | {"_metadata"}  # module versions of a state_dict
        if member[0] not in keys:
            yield member


def value_members(state: Value) -> Iterator[Member]:
    """Iterate over the attributes in a state, or over the state itself if a ``__getstate__`` returned another value."""
    pairs = state_dict_of(state)
    if pairs is not None:
        yield from members(pairs)
    elif isinstance(state, Sequence):
        yield from sequence_members(state)
    elif isinstance(state, Node):
        yield "state", state, -1


def attached_members(value: Value) -> Iterator[Member]:
    """Iterate over the members of a value attached to a tensor: the device of a wrapper, or Python attributes."""
    if type(value) is Call and value.name == "torch.device":
        yield "device", value, -1
    else:
        yield from value_members(value)
