"""Read optimizers in one flat dict, as ``torch.distributed.checkpoint.state_dict.get_state_dict`` can return them.

From ``_flatten_optim_state_dict`` there: the keys are ``state.NAME.KEY``, where dicts in a state are flattened too, and
``param_groups.NAME.OPTION``, the options of the group for each parameter. Which parameters share a group is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import FLAT_OPTIONS, members, parameter_of_rate, unique
from ckptmove.pickles.tree import Dict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.checkpoint.inventory.shapes import Member
    from ckptmove.pickles.tree import Value

_STATE: Final = "state."
#: Beginnings of the keys of a flat optimizer, which may be in a dict with other keys.
FLAT_KEYS: Final = (_STATE, FLAT_OPTIONS)
#: Maximum number of parts of a key after its parameter.
_DEEPEST: Final = 8


class FlatOptimizer(NamedTuple):
    """A dict whose keys begin with ``state.`` and ``param_groups.``, by parameter."""

    state: Dict  # dict of the state of each parameter, by parameter name
    groups: tuple[tuple[str, Dict], ...]  # name and options of each parameter
    options: Dict  # options of all parameters by their whole keys
    others: Dict  # all other pairs

    def option_members(self) -> Iterator[Member]:
        """Iterate over the options by their whole keys. A generator, which keeps ``options`` alive."""
        yield from members(self.options)


def split_by_parameter(pairs: Dict) -> FlatOptimizer:
    """Group the state and the options of a flat optimizer by parameter, in time proportional to the length of its keys.

    A key belongs to the longest parameter name that it begins with. If it begins with none, the parameter has lost its
    learning rate, and its name is the key without the last part.
    """
    rates = (key for key in pairs.flat[::2] if type(key) is str and key.startswith(FLAT_OPTIONS))
    names = set(map(parameter_of_rate, rates))
    names.discard("")
    states: list[tuple[str, str, Value, int]] = []
    groups: dict[str, Dict] = {}
    options, others = Dict([], []), Dict([], [])
    listed: set[int] = set()
    for key, value, start in unique(pairs):
        begin, name, rest = split_key(key, names) if type(key) is str else ("", "", "")
        if not name:
            _put(others, key, value, start)
        elif begin == _STATE:
            states.append((name, name + rest, value, start))
        elif rest != ".param_names":
            _put(groups.setdefault(name, Dict([], [])), rest[1:], value, start)
            _put(options, key, value, start)
        elif id(value) not in listed:  # the options of all parameters share one list of all names
            listed.add(id(value))
            _put(options, key, value, start)
    return FlatOptimizer(_nested(states), tuple(groups.items()), options, others)


def split_key(key: str, names: Collection[str]) -> tuple[str, str, str]:
    """Split a key of a flat optimizer into ``state.`` or ``param_groups.``, the name of the parameter, and the rest.

    The first two are empty for a key of another kind.
    """
    begin = next((one for one in FLAT_KEYS if key.startswith(one)), "")
    name = _owner(key[len(begin) :], names) if begin else ""
    return (begin, name, key[len(begin) + len(name) :]) if name else ("", "", key)


def _nested(states: list[tuple[str, str, Value, int]]) -> Dict:
    """Nest the state of each parameter: a key with dots makes dicts, unless a prefix of it is a key as well."""
    taken = {path for _, path, _, _ in states}
    state = Dict([], [])
    held: dict[str, Dict] = {}
    for name, path, value, start in states:
        into = _dict_at(state, name, name, held)
        end = len(name)
        while (dot := path.find(".", end + 1)) != -1 and path[:dot] not in taken:
            into = _dict_at(into, path[end + 1 : dot], path[:dot], held)
            end = dot
        _put(into, path[end + 1 :], value, start)
    return state


def _dict_at(into: Dict, key: str, path: str, held: dict[str, Dict]) -> Dict:
    """Return the dict at a path; create it the first time."""
    if path not in held:
        held[path] = Dict([], [])
        _put(into, key, held[path], -1)
    return held[path]


def _put(into: Dict, key: Value, value: Value, start: int) -> None:
    into.flat += key, value
    into.starts += -1, start


def _owner(path: str, names: Collection[str]) -> str:
    """Return the parameter of a key below ``state`` or ``param_groups``; empty if the key has only one part."""
    name = path
    for _ in range(_DEEPEST):
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return path.rpartition(".")[0]
