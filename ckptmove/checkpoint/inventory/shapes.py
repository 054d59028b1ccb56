"""How the objects of a checkpoint look in the tree: dicts in their several disguises, schedulers, scalers, optimizers.

Never walks: it looks at one node and its direct members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.pickles.tree import Call, Dict, Global, List, Node, Sequence, Tuple
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.model import Role
    from ckptmove.pickles.tree import Value

    #: Name in the path, value and start of one member.
    Member: TypeAlias = tuple[str, Value, int]

#: Classes whose calls are dicts even where nothing was put into them.
_DICT_CLASSES: Final = frozenset(
    {"collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict"}
)
_SCHEDULER_KEYS: Final = (
    frozenset({"last_epoch", "_step_count"}),
    frozenset({"last_epoch", "_last_lr"}),
    frozenset({"last_epoch", "base_lrs"}),
    frozenset({"num_bad_epochs", "patience"}),
    frozenset({"_schedulers", "_last_lr"}),
    frozenset({"param_group_field", "base_values"}),  # timm
)
_SCALER_KEYS: Final = frozenset({"scale", "growth_factor", "_growth_tracker"})
#: ``rng_state.pth`` of the Hugging Face Trainer, ``random_states_0.pkl`` of Accelerate.
_RNG_FILE_KEYS: Final = (frozenset({"python", "numpy", "cpu"}), frozenset({"random_state", "torch_manual_seed"}))
_LONGEST_KEY: Final = 1000
_MOST_ITEMS: Final = 32


def as_dict(value: Value) -> Dict | None:
    """The pairs of a dict, or of an object that is one: an OrderedDict, a defaultdict, a dict subclass; else None."""
    if type(value) is Dict:
        return value
    if type(value) is not Call:
        return None
    if value.assigned is not None:
        return value.assigned
    if modern_name(value.name) in _DICT_CLASSES:
        return _from_arguments(value)
    return None


def _from_arguments(call: Call) -> Dict:
    """A Counter's dict, or the pairs of Python 2: ``OrderedDict([[key, value], ...])``."""
    result = Dict([], [])
    arguments = call.args.items if type(call.args) is Tuple else []
    pairs = arguments[0] if arguments else None
    if type(pairs) is Dict:
        return pairs
    for pair in pairs.items if isinstance(pairs, Sequence) else ():
        if isinstance(pair, Sequence) and len(pair.items) == 2:  # noqa: PLR2004  # key and value
            result.flat += pair.items
            result.starts += pair.starts
    return result


def unique(pairs: Dict) -> Iterable[tuple[Value, Value, int]]:
    """Each key of a dict once, at its first place and with its last value, as Python would have it."""
    flat = pairs.flat
    if len(set(flat[::2])) * 2 == len(flat) and not any(type(key) is Tuple for key in flat[::2]):
        return pairs.pairs()
    last: dict[object, tuple[Value, Value, int]] = {}
    for key, value, start in pairs.pairs():
        # A NaN differs from itself and stays apart, as in Python; nodes other than tuples compare by identity.
        like = _comparable(key)
        last[like] = (last[like][0] if like in last else key, value, start)
    return last.values()


def _comparable(key: Value) -> object:
    """What a key compares by: a tuple of atoms by its items."""
    if type(key) is Tuple and len(key.items) <= _MOST_ITEMS and not any(isinstance(item, Node) for item in key.items):
        return tuple(key.items)
    return key


def members(pairs: Dict) -> Iterator[Member]:
    """The members of a dict by name, each key once with its last value; a key that may hold tensors comes too."""
    keys = pairs.flat[::2]
    if len(string_keys(pairs)) == len(keys):
        return zip(keys, pairs.flat[1::2], pairs.starts[1::2], strict=True)  # type: ignore[arg-type]  # all are str
    return _named(unique(pairs))


def _named(triples: Iterable[tuple[Value, Value, int]]) -> Iterator[Member]:
    for key, value, start in triples:
        yield key_text(key), value, start
        if isinstance(key, Node):
            yield f"{key_text(key)}.key", key, -1


def key_text(key: Value) -> str:
    """A key as a part of a path."""
    if type(key) is str:
        return key
    if isinstance(key, bytes):
        return key[:_LONGEST_KEY].decode("utf-8", "backslashreplace")
    if isinstance(key, int) and key.bit_length() > _LONGEST_KEY:
        return hex(key)[:_LONGEST_KEY]  # str() of it is quadratic, and refused by Python from 4,300 digits on
    return _node_text(key) if isinstance(key, Node) else str(key)


def _node_text(key: Node) -> str:
    if isinstance(key, Tuple):
        return f"({', '.join(key_text(item) for item in key.items[:_MOST_ITEMS] if not isinstance(item, Node))})"
    if isinstance(key, Global):
        return key.full_name
    if isinstance(key, Call) and key.name == "_codecs.encode":  # how protocol 2 writes bytes
        text = key.args.items[0] if isinstance(key.args, Sequence) and key.args.items else None
        return text if type(text) is str else "<bytes>"
    return f"<{type(key).__name__.lower()}>"


def key_fault(pairs: Dict) -> str:
    """Why a dict cannot be rebuilt from its members by name; empty where it can."""
    if len(string_keys(pairs)) * 2 == len(pairs.flat):
        return ""
    keys = [key for key, _, _ in unique(pairs)]
    if any(isinstance(key, Node) for key in keys):
        return "a dict with keys that are objects"
    return "" if len(set(map(key_text, keys))) == len(keys) else "a dict with keys that read alike"


def attributes(call: Call) -> Dict | None:
    """What BUILD would put into an object's ``__dict__``: its state, or the dicts of a (dict, slots) pair."""
    return state_dict_of(call.state)


def state_dict_of(state: Value) -> Dict | None:
    """The attributes in a state as ``object.__getstate__`` makes it, or None where it is something else."""
    if type(state) is Tuple:
        merged = Dict([], [])
        for item in state.items:
            part = as_dict(item)
            if part is not None:
                merged.flat += part.flat
                merged.starts += part.starts
        return merged if merged.flat else None
    return as_dict(state)


def optimizer_state(pairs: Dict) -> Dict | None:
    """The ``state`` of an optimizer's state_dict, or of the attributes of one; None where a dict is neither.

    ``torch.optim.Optimizer.load_state_dict`` only iterates over groups and their params: tuples will do.
    """
    return as_dict(pairs.get("state")) if isinstance(pairs.get("param_groups"), List | Tuple) else None


def role_of_keys(keys: set[str]) -> Role | None:
    """The role of a dict by its keys: the state of a scheduler or a ``GradScaler``, or a file of random states."""
    if any(wanted <= keys for wanted in _SCHEDULER_KEYS):
        return "scheduler"
    if keys >= _SCALER_KEYS:
        return "scaler"
    return "rng" if any(wanted <= keys for wanted in _RNG_FILE_KEYS) else None


def has_module_versions(call: Call) -> bool:
    """Whether an OrderedDict has the ``_metadata`` that ``Module.state_dict()`` gives it."""
    state = attributes(call)
    return state is not None and "_metadata" in string_keys(state)


def string_keys(pairs: Dict) -> set[str]:
    """The keys of a dict that are strings."""
    return {key for key in pairs.flat[::2] if type(key) is str}
