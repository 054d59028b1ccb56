"""Recognize dicts, state_dicts, schedulers, scalers and optimizers by one node and its direct members."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from ckptmove.pickles.tree import Call, Dict, Global, List, Node, PlainTensor, Sequence, Tuple, items_of
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.model import Role
    from ckptmove.pickles.tree import Value

    Member: TypeAlias = tuple[str, Value, int]  # name in the path, value and start

#: Classes whose objects are dicts, also when empty.
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
#: All keys of the schedulers of SpeechBrain (speechbrain/nnet/schedulers.py): scripts have some of them at their root.
_SPEECHBRAIN_SCHEDULERS: Final = frozenset(
    {
        frozenset({"losses", "n_steps"}),
        frozenset({"losses", "anchor", "patience_counter"}),
        frozenset({"losses", "clr_iterations"}),
        frozenset({"hyperparam_value", "metric_values", "current_patient"}),
        frozenset({"base_lr", "n_warmup_steps", "decay_factor", "decay_steps", "current_step"}),
        frozenset({"initial_value", "num_warmup_steps", "num_training_steps", "current_step"}),
        frozenset({"base_lr", "warmup", "power", "cooldown", "total_steps"}),
    }
)
_SCALER_KEYS: Final = frozenset({"scale", "growth_factor", "_growth_tracker"})
#: ``rng_state.pth`` of the Hugging Face Trainer, ``random_states_0.pkl`` of Accelerate.
_RNG_FILE_KEYS: Final = (frozenset({"python", "numpy", "cpu"}), frozenset({"random_state", "torch_manual_seed"}))
#: Beginning of the keys of options in a flat optimizer, and the end of one that every optimizer has.
FLAT_OPTIONS: Final = "param_groups."
_RATE: Final = ".lr"
_LONGEST_KEY: Final = 1000
_MOST_ITEMS: Final = 32


def as_dict(value: Value) -> Dict | None:
    """Return the pairs of a dict or a dict subclass (OrderedDict, defaultdict); None for any other value."""
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
    """Return the pairs in the arguments: the dict of a Counter, or Python 2's ``OrderedDict([[key, value], ...])``."""
    result = Dict([], [])
    arguments = call.args.items if type(call.args) is Tuple else []
    pairs = arguments[0] if arguments else None
    if type(pairs) is Dict:
        return pairs
    for pair in items_of(pairs):
        if isinstance(pair, Sequence) and len(pair.items) == 2:  # key and value
            result.flat += pair.items
            result.starts += pair.starts
    return result


def unique(pairs: Dict) -> Iterable[tuple[Value, Value, int]]:
    """Return each key of a dict once, at its first position and with its last value, as in Python."""
    if _are_distinct(pairs):
        return pairs.pairs()
    last: dict[object, tuple[Value, Value, int]] = {}
    for key, value, start in pairs.pairs():
        # A NaN differs from any other key, as in Python; nodes other than tuples compare by identity.
        like = _comparable(key)
        last[like] = (last[like][0] if like in last else key, value, start)
    return last.values()


def _are_distinct(pairs: Dict) -> bool:
    """Whether the keys of a dict differ, as far as that is quickly known."""
    kinds = set(map(type, pairs.keys()))
    if kinds == {int}:  # a set of millions takes eight times the memory of a list
        numbers = sorted(cast("Iterator[int]", pairs.keys()))
        return all(map(int.__lt__, numbers, islice(numbers, 1, None)))
    return Tuple not in kinds and len(set(pairs.keys())) * 2 == len(pairs.flat)


def _comparable(key: Value) -> object:
    """Return the value that a key compares by: for a tuple of atoms, its items."""
    if type(key) is Tuple and len(key.items) <= _MOST_ITEMS and not any(isinstance(item, Node) for item in key.items):
        return tuple(key.items)
    return key


def members(pairs: Dict) -> Iterator[Member]:
    """Iterate over the members of a dict, each key once with its last value; keys that are objects are members too."""
    if len(string_keys(pairs)) * 2 == len(pairs.flat):
        return pairs.pairs()  # type: ignore[return-value]  # all keys are str
    return _named(unique(pairs))


def _named(triples: Iterable[tuple[Value, Value, int]]) -> Iterator[Member]:
    for key, value, start in triples:
        yield key_text(key), value, start
        if isinstance(key, Node):
            yield f"{key_text(key)}.key", key, -1


def key_text(key: Value) -> str:
    """Return a key as a part of a path."""
    if type(key) is str:
        return key
    if isinstance(key, bytes):
        return key[:_LONGEST_KEY].decode("utf-8", "backslashreplace")
    if isinstance(key, int) and key.bit_length() > _LONGEST_KEY:
        return hex(key)[:_LONGEST_KEY]  # str() takes quadratic time, and Python refuses more than 4,300 digits
    return _node_text(key) if isinstance(key, Node) else str(key)


def _node_text(key: Node) -> str:
    if isinstance(key, Tuple):
        own = [item for item in key.items[:_MOST_ITEMS] if not isinstance(item, Node) or type(item) is Global]
        return f"({', '.join(map(key_text, own))})"
    if isinstance(key, Global):
        return key.full_name
    if isinstance(key, Call) and key.name == "_codecs.encode":  # bytes in protocol 2
        text = key.args.items[0] if isinstance(key.args, Sequence) and key.args.items else None
        return text if type(text) is str else "<bytes>"
    return "<call>" if type(key) is PlainTensor else f"<{type(key).__name__.lower()}>"


def key_fault(pairs: Dict) -> str:
    """Return why a dict cannot be rebuilt from its members by name; empty if it can."""
    if len(string_keys(pairs)) * 2 == len(pairs.flat):
        return ""
    keys = [key for key, _, _ in unique(pairs)]
    if any(isinstance(key, Node) for key in keys):
        return "a dict with keys that are objects"
    return "" if len(set(map(key_text, keys))) == len(keys) else "a dict with keys of the same text"


def attributes(call: Call) -> Dict | None:
    """Return the attributes that BUILD would set on an object."""
    return state_dict_of(call.state)


def state_dict_of(state: Value) -> Dict | None:
    """Return the attributes in a state of ``object.__getstate__``: a dict or a (dict, slots) pair; None for others."""
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
    """Return the ``state`` in the state_dict or the attributes of an optimizer; None for other dicts.

    ``param_groups`` may be a tuple: ``torch.optim.Optimizer.load_state_dict`` only iterates over it.
    """
    return as_dict(pairs.get("state")) if isinstance(pairs.get("param_groups"), List | Tuple) else None


def role_of_keys(keys: set[str]) -> Role | None:
    """Return the role of a dict by its keys: scheduler, ``GradScaler``, or file of RNG states."""
    if any(wanted <= keys for wanted in _SCHEDULER_KEYS) or keys in _SPEECHBRAIN_SCHEDULERS:
        return "scheduler"
    if keys >= _SCALER_KEYS:
        return "scaler"
    return "rng" if any(wanted <= keys for wanted in _RNG_FILE_KEYS) else None


def has_module_versions(call: Call) -> bool:
    """Whether an OrderedDict has the attribute ``_metadata`` that ``Module.state_dict()`` sets."""
    state = attributes(call)
    return state is not None and "_metadata" in string_keys(state)


def string_keys(pairs: Dict) -> set[str]:
    """Return the keys of a dict that are strings."""
    return {key for key in pairs.keys() if type(key) is str}


def is_flat_optimizer(keys: Iterable[str]) -> bool:
    """Whether a dict with these keys has the learning rate of a parameter, as a flat optimizer has."""
    return any(key.startswith(FLAT_OPTIONS) and parameter_of_rate(key) for key in keys)


def parameter_of_rate(key: str) -> str:
    """Return the parameter whose learning rate a key of a flat optimizer is; empty for other keys."""
    return key[len(FLAT_OPTIONS) : -len(_RATE)] if key.endswith(_RATE) else ""
