"""Optimizers in one flat dict, as ``get_state_dict`` of ``torch.distributed.checkpoint.state_dict`` can make them.

Never changes a path: what it nests has the dots of the keys that it was cut from.

From ``_flatten_optim_state_dict`` there: ``state.NAME.KEY``, where dicts in a state are flattened too, and for each
parameter by itself the options of its group, ``param_groups.NAME.OPTION``. Which parameters shared a group is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import members, unique
from ckptmove.pickles.tree import Dict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ckptmove.checkpoint.inventory.shapes import Member
    from ckptmove.pickles.tree import Value

_STATE: Final = "state."
_OPTIONS: Final = "param_groups."
#: The option that every optimizer has.
_RATE: Final = ".lr"
#: How many parts a key may have below its parameter.
_DEEPEST: Final = 8


class FlatOptimizer(NamedTuple):
    """A dict whose keys begin with ``state.`` and ``param_groups.``, sorted out.

    Attributes:
        state: for the name of each parameter a dict of what there is for it.
        groups: the name of each parameter, with its options.
        options: the options of all by their whole keys.
        others: the pairs that are neither.
    """

    state: Dict
    groups: tuple[tuple[str, Dict], ...]
    options: Dict
    others: Dict

    def option_members(self) -> Iterator[Member]:
        """The options by their whole keys; a generator, so that what it lists lives for as long as it does."""
        yield from members(self.options)


def is_flat_optimizer(keys: Iterable[str]) -> bool:
    """Whether a dict with these keys has the learning rate of a parameter."""
    return any(key.startswith(_OPTIONS) and _rated(key) for key in keys)


def sort_out(pairs: Dict) -> FlatOptimizer:
    """The state and the options in a flat optimizer by parameter, in time in proportion to the length of its keys.

    A key belongs to the longest name of a parameter that it begins with; where it begins with none, its last part is
    what it says of a parameter that has lost its learning rate.
    """
    names = {_rated(key) for key in pairs.keys() if type(key) is str and key.startswith(_OPTIONS)}  # noqa: SIM118  # no mapping
    names.discard("")
    states: list[tuple[str, str, Value, int]] = []
    groups: dict[str, Dict] = {}
    options, others = Dict([], []), Dict([], [])
    listed: set[int] = set()
    for key, value, start in unique(pairs):
        begin = next((one for one in (_STATE, _OPTIONS) if type(key) is str and key.startswith(one)), "")
        path = key[len(begin) :] if type(key) is str and begin else ""
        name = _owner(path, names)
        option = path[len(name) + 1 :]
        if not name:
            _put(others, key, value, start)
        elif begin == _STATE:
            states.append((name, path, value, start))
        elif option != "param_names":
            _put(groups.setdefault(name, Dict([], [])), option, value, start)
            _put(options, key, value, start)
        elif id(value) not in listed:  # one list with the names of all, to which the options of each refer
            listed.add(id(value))
            _put(options, key, value, start)
    return FlatOptimizer(_nested(states), tuple(groups.items()), options, others)


def _nested(states: list[tuple[str, str, Value, int]]) -> Dict:
    """What there is for each parameter, in dicts where a key has parts; a path that has a value too is no dict."""
    taken = {path for _, path, _, _ in states}
    state = Dict([], [])
    held: dict[str, Dict] = {}
    for name, path, value, start in states:
        into = _below(state, name, name, held)
        end = len(name)
        while (dot := path.find(".", end + 1)) != -1 and path[:dot] not in taken:
            into = _below(into, path[end + 1 : dot], path[:dot], held)
            end = dot
        _put(into, path[end + 1 :], value, start)
    return state


def _below(into: Dict, key: str, path: str, held: dict[str, Dict]) -> Dict:
    """The dict at a path, made and put in its place where it is the first time."""
    if path not in held:
        held[path] = Dict([], [])
        _put(into, key, held[path], -1)
    return held[path]


def _put(into: Dict, key: Value, value: Value, start: int) -> None:
    into.flat += key, value
    into.starts += -1, start


def _rated(key: str) -> str:
    """The parameter that a key gives the learning rate of; empty where it gives none."""
    return key[len(_OPTIONS) : -len(_RATE)] if key.endswith(_RATE) else ""


def _owner(path: str, names: Collection[str]) -> str:
    """The parameter that a key below ``state`` or ``param_groups`` is for; empty where there is no room for one."""
    name = path
    for _ in range(_DEEPEST):
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return path.rpartition(".")[0]
