"""How the objects of a checkpoint look in the tree: dicts in their several disguises, modules, schedulers, scalers.

Never walks: it looks at one node and its direct members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.pickles.tree import Call, Dict, List, Node, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.pickles.tree import Value

    #: Name in the path, value and start of one member.
    Member: TypeAlias = tuple[str, Value, int]

_ORDERED_DICT: Final = "collections.OrderedDict"
_SCHEDULER_KEYS: Final = (frozenset({"last_epoch", "_step_count"}), frozenset({"num_bad_epochs", "patience"}))
_SCALER_KEYS: Final = frozenset({"scale", "growth_factor", "_growth_tracker"})
_RNG_FILE_KEYS: Final = frozenset({"python", "numpy", "cpu"})
_MODULE_KEYS: Final = frozenset({"_parameters", "_buffers", "_modules"})
_LONGEST_KEY: Final = 1000


def as_dict(value: Value) -> Dict | None:
    """The pairs of a dict, or of an object that is one: an OrderedDict, a defaultdict, a dict subclass; else None."""
    if type(value) is Dict:
        return value
    if type(value) is not Call:
        return None
    if value.assigned is not None:
        return value.assigned
    if value.name == _ORDERED_DICT:
        return _python2_ordered_dict(value)
    return None


def _python2_ordered_dict(call: Call) -> Dict:
    """Python 2 wrote an OrderedDict's pairs as its argument: ``OrderedDict([[key, value], ...])``."""
    result = Dict([], [])
    arguments = call.args.items if type(call.args) is Tuple else []
    pairs = arguments[0] if arguments else None
    for pair in pairs.items if isinstance(pairs, Sequence) else ():
        if isinstance(pair, Sequence) and len(pair.items) == 2:  # noqa: PLR2004  key and value
            result.flat += pair.items
            result.starts += pair.starts
    return result


def members(pairs: Dict) -> Iterator[Member]:
    """The members of a dict by name, each key once with its last value, as Python would have it."""
    last = {_hashable(key): (key, value, start) for key, value, start in pairs.pairs()}
    return ((key_text(key), value, start) for key, value, start in last.values())


def _hashable(key: Value) -> object:
    # NaN differs from itself and would be kept twice, as in Python; nodes compare by identity.
    return key


def key_text(key: Value) -> str:
    """A key as a part of a path."""
    if type(key) is str:
        return key
    if isinstance(key, bytes):
        return key[:_LONGEST_KEY].decode("utf-8", "backslashreplace")
    if isinstance(key, Tuple):
        return f"({', '.join(key_text(item) for item in key.items if not isinstance(item, Node))})"
    if isinstance(key, int) and key.bit_length() > _LONGEST_KEY:
        return hex(key)[:_LONGEST_KEY]  # str() of it is quadratic, and refused by Python from 4,300 digits on
    return f"<{type(key).__name__.lower()}>" if isinstance(key, Node) else str(key)


def attributes(call: Call) -> Dict | None:
    """What BUILD would put into an object's ``__dict__``: its state, or the dicts of a (dict, slots) pair."""
    state = call.state
    if type(state) is Tuple:
        merged = Dict([], [])
        for item in state.items:
            part = as_dict(item)
            if part is not None:
                merged.flat += part.flat
                merged.starts += part.starts
        return merged if merged.flat else None
    return as_dict(state)


def is_module(pairs: Dict) -> bool:
    """Whether an object's attributes are those of an ``nn.Module``."""
    return _MODULE_KEYS.issubset(string_keys(pairs))


def is_optimizer(pairs: Dict) -> bool:
    """Whether a dict is the state_dict of an optimizer, or the attributes of one."""
    return type(pairs.get("param_groups")) is List and as_dict(pairs.get("state")) is not None


def is_scheduler(keys: set[str]) -> bool:
    """Whether keys are those of a learning-rate scheduler's state_dict."""
    return any(wanted <= keys for wanted in _SCHEDULER_KEYS)


def is_scaler(keys: set[str]) -> bool:
    """Whether keys are those of ``GradScaler.state_dict()``."""
    return keys >= _SCALER_KEYS


def is_rng_file(keys: set[str]) -> bool:
    """Whether keys are those of the ``rng_state.pth`` of the Hugging Face Trainer."""
    return keys >= _RNG_FILE_KEYS


def string_keys(pairs: Dict) -> set[str]:
    """The keys of a dict that are strings."""
    return {key for key in pairs.keys() if type(key) is str}  # noqa: SIM118  a Dict node is no mapping
