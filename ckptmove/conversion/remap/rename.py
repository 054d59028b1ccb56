"""Change the keys of state_dicts and of optimizers: ``--strip-prefix``, ``--rename`` and ``--add-prefix``."""

from __future__ import annotations

import difflib
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.checkpoint.entries import entries, pairs_of
from ckptmove.checkpoint.inventory.flattened import FLAT_KEYS, split_key
from ckptmove.checkpoint.inventory.shapes import as_dict, attributes
from ckptmove.checkpoint.state_dicts import AVERAGED, INNER_WRAPPERS, MODULE, inner_wrappers, without_inner_wrappers
from ckptmove.conversion.remap.errors import KeysCollide, NoMatch, PartialPrefix
from ckptmove.errors import UsageError
from ckptmove.moves import Renamed
from ckptmove.pickles.tree import Call, Sequence, Tuple, items_of
from ckptmove.text import Argument

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from ckptmove.checkpoint.entries import StoredMember
    from ckptmove.model import Inventory, OptimizerRecord
    from ckptmove.moves import Remap
    from ckptmove.pickles.tree import Dict, Node, Value

#: Roles of the parts whose dicts of tensors are state_dicts.
_STATE_DICTS: Final = frozenset({"model", "ema", "criterion"})
#: Suffix of a key of any value, torch/nn/modules/module.py ``_EXTRA_STATE_KEY_SUFFIX``.
_EXTRA_STATE: Final = "_extra_state"
#: Names that an error shows, and names that a mistyped one is compared with.
_SHOWN: Final = 4
_EXAMPLES: Final = 2
_MOST_KEYS: Final = 1000
_LONGEST: Final = 200


class KeyMap:
    """The new keys of one state_dict: first prefixes are removed, then keys are renamed, then a prefix is added.

    A prefix that only wrappers write is removed at every place of a key, and ``module.`` in front as often as every key
    begins with it. Any other prefix of the request is removed once, in front. The buffer ``n_averaged`` of
    ``AveragedModel`` has no prefix and keeps its key. The first pair of ``rename`` that matches a key applies; a ``*``
    matches any text, the shortest first.

    Attributes:
        used: the options that apply to a key, each with its word, as in :class:`NoMatch`.
    """

    def __init__(self, remap: Remap, keys: Collection[str], where: str = "") -> None:
        """Choose the prefixes that every key has.

        ``keys`` are all of the state_dict, if it is in several files those of all files. ``where`` is its path, for
        errors.
        """
        self._globs = [_Glob.of(source, target) for source, target in remap.rename]
        self._added = remap.add_prefix
        self._inner: frozenset[str] = frozenset()
        self._stripped: list[str] = []
        self.used: set[tuple[str, str]] = {("--add-prefix", self._added)} if keys else set()
        if remap.strip_prefix is not None:
            self._choose(remap.strip_prefix, keys)
        for key in map(self._strip, keys) if self._globs else ():
            self.used.update(("--rename", glob.word) for glob in self._globs_of(key))
        sources: dict[str, str] = {}
        for key in keys:
            target = self(key)
            if target.startswith(".") and not key.startswith("."):
                raise UsageError(f"'{key:.200}' would become '{target:.200}', which begins with a dot")
            if sources.setdefault(target, key) != key:
                raise KeysCollide(where, target, (sources[target], key))

    def _choose(self, prefixes: tuple[str, ...], keys: Collection[str]) -> None:
        self._inner = frozenset(prefixes or INNER_WRAPPERS).intersection(chain.from_iterable(map(inner_wrappers, keys)))
        self.used.update(("--strip-prefix", prefix if prefixes else "") for prefix in self._inner)
        pending = [prefix for prefix in prefixes or (MODULE,) if prefix not in INNER_WRAPPERS]
        left = dict.fromkeys(map(self._strip, keys))
        left.pop(AVERAGED, None)
        while left:
            prefix = next((one for one in pending if all(_has(key, one) for key in left)), None)
            if prefix is None:
                break
            self._stripped.append(prefix)
            self.used.add(("--strip-prefix", prefix if prefixes else ""))
            if prefixes:
                pending.remove(prefix)
            left = dict.fromkeys(key[len(prefix) :] for key in left)
            left.pop(AVERAGED, None)
        # A module below the wrappers may be named like one.
        for prefix in pending if prefixes or not (self._stripped or self._inner) else ():
            having = [key for key in left if _has(key, prefix)]
            if having:
                lacking = [key for key in left if not _has(key, prefix)]
                raise PartialPrefix(prefix, tuple(having[:_EXAMPLES]), tuple(lacking[:_EXAMPLES]))

    def __call__(self, key: str) -> str:
        stripped = self._strip(key)
        renamed = next((glob.replace(stripped) for glob in self._globs_of(stripped)), stripped)
        return self._added + renamed

    def module(self, path: str) -> str:
        """Return the new path of a module, as in ``_metadata`` of a state_dict; the path of the root is empty."""
        target = self(f"{path}." if path else "")
        return target.removesuffix(".") if target.endswith(".") or not target else path

    def _strip(self, key: str) -> str:
        key = without_inner_wrappers(key, self._inner) if self._inner else key
        for prefix in self._stripped:
            key = key.removeprefix(prefix)
        return key

    def _globs_of(self, key: str) -> Iterator[_Glob]:
        """Iterate over the only glob that applies to a key, or over nothing."""
        return islice((glob for glob in self._globs if glob.texts(key) is not None), 1)


class _Glob(NamedTuple):
    """A pair of ``rename``: the texts around each ``*`` in the old keys and in the new ones."""

    word: str
    source: list[str]
    target: list[str]

    @classmethod
    def of(cls, source: str, target: str) -> _Glob:
        glob = cls(f"{source}={target}", source.split("*"), target.split("*"))
        if len(glob.source) != len(glob.target):
            raise UsageError(f"{Argument('rename')} '{glob.word:.200}' needs the same number of * in OLD and in NEW")
        return glob

    def texts(self, key: str) -> list[str] | None:
        """Return the text that each ``*`` matches, the shortest first; None if the key does not match."""
        head, *middle = self.source
        if not middle:
            return [] if key == head else None
        tail = middle.pop()
        begin, end = len(head), len(key) - len(tail)
        if end < begin or not key.startswith(head) or not key.endswith(tail):
            return None
        texts = []
        for part in middle:
            at = key.find(part, begin, end)
            if at < 0:
                return None
            texts.append(key[begin:at])
            begin = at + len(part)
        return [*texts, key[begin:end]]

    def replace(self, key: str) -> str:
        """Return the new key of one that matches."""
        texts = [*(self.texts(key) or ()), ""]
        return "".join([part for pair in zip(self.target, texts, strict=True) for part in pair])


def rename(root: Value, inventory: Inventory, remap: Remap, shared: KeyMap | None = None) -> tuple[Renamed, ...]:
    """Change the keys of every state_dict and of every optimizer that names its parameters, in place.

    A state_dict is a dict with tensors in a part with the role ``model``, ``ema`` or ``criterion``. Its ``_metadata``
    follows its keys. In an optimizer these are the keys of its state, and the names in its groups.

    Args:
        root: root of the tree: that of the file, or the value at ``remap.as_root``.
        inventory: inventory of the file, before any change.
        shared: the new keys of a state_dict in several files, if this file is one of them. A prefix or a glob that
            matches nothing in this file is then no error.

    Returns:
        The changed keys, each with the path of its dict or list in ``inventory``.
    """
    if remap.strip_prefix is None and not remap.add_prefix and not remap.rename:
        return ()
    base = f"{remap.as_root}." if remap.as_root else ""
    renaming = _Renaming(remap, shared)
    found = entries(root, inventory, remap.as_root)
    paths = [base + entry.path if index else remap.as_root for index, entry in enumerate(found)]
    flat = {optimizer.where for optimizer in inventory.optimizers if optimizer.is_flat}
    inside: set[int] = set()  # extra state in a state_dict may have dicts of its own
    for index, group in groupby(islice(enumerate(found), 1, None), key=lambda numbered: numbered[1].parent):
        members = dict(group)
        others = FLAT_KEYS if paths[index] in flat else ()
        keys = {at: cast("str", member.key) for at, member in members.items() if _is_key(member, others)}
        if index in inside:
            inside.update(members)
        elif found[index].role in _STATE_DICTS and any(members[at].is_tensor for at in keys):
            inside.update(keys)
            renaming.state_dict(paths[index], found[index].value, [*keys.values()])
    values: dict[str, Value] = {}
    for path, entry in zip(paths, found, strict=True):
        values.setdefault(path, entry.value)
    for optimizer in inventory.optimizers:
        pairs = pairs_of(values.get(optimizer.where))
        if pairs is not None:
            (renaming.flat_optimizer if optimizer.is_flat else renaming.optimizer)(optimizer, pairs)
    if shared is None:
        renaming.check()
    return tuple(renaming.renamed)


def _is_key(entry: StoredMember, others: tuple[str, ...]) -> bool:
    """Whether an entry belongs to a state_dict. The key of a plain value next to one has no dot."""
    key = entry.key
    return (
        isinstance(key, str)
        and entry.role != "optimizer"
        and not key.startswith(others)
        and (entry.is_tensor or "." in key or key.endswith(_EXTRA_STATE))
    )


def _has(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and len(key) > len(prefix)


class _Renaming:
    """The changes in one tree."""

    def __init__(self, remap: Remap, shared: KeyMap | None) -> None:
        self.renamed: list[Renamed] = []
        self._remap = remap
        self._shared = shared
        self._used: set[tuple[str, str]] = set()
        self._examples: list[str] = []
        self._done: set[int] = set()

    def _map(self, where: str, keys: Collection[str]) -> KeyMap:
        made = KeyMap(self._remap, keys, where)
        self._used |= made.used
        self._examples += islice(keys, _MOST_KEYS)
        return made

    def state_dict(self, where: str, value: Value, keys: Collection[str]) -> None:
        """Change the keys of a state_dict, and the paths of modules in its ``_metadata``."""
        new = self._shared or self._map(where, keys)
        self._keys(where, cast("Dict", as_dict(value)), {key: new(key) for key in keys})
        attached = attributes(value) if type(value) is Call else None
        versions = pairs_of(attached.get("_metadata")) if attached is not None else None
        if versions is not None and self._is_first(versions):
            # The wrapper's own path is empty and comes first: that of the module inside replaces it.
            paths = {new.module(key) if isinstance(key, str) else key: one for key, one, _ in versions.pairs()}
            versions.flat[:] = [item for pair in paths.items() for item in pair]
            versions.starts[:] = [-1] * len(versions.flat)

    def optimizer(self, record: OptimizerRecord, pairs: Dict) -> None:
        """Change the names of parameters in the groups and in the state."""
        prefix = f"{record.where}." if record.where else ""
        lists = []
        for place, item in enumerate(items_of(pairs.get("param_groups"))):
            group = as_dict(item)
            for key in ("params", "param_names"):
                listed = group.get(key) if group is not None else None
                lists.append((f"{prefix}param_groups.{place}.{key}", listed))
        state = cast("Dict", as_dict(pairs.get("state")))
        names = {name: None for _, listed in lists for name in items_of(listed)} | dict.fromkeys(state.keys())
        keys = [name for name in names if isinstance(name, str) and not name.isdecimal()]
        new = self._map(record.where, keys)
        targets = {key: new(key) for key in keys}
        for where, listed in lists:
            self._names(where, listed, lambda name: targets.get(name, name))
        if self._is_first(state):
            self._keys(f"{prefix}state", state, targets)

    def flat_optimizer(self, record: OptimizerRecord, pairs: Dict) -> None:
        """Change the names of parameters in the keys of a flat optimizer, and in its lists of names."""
        if not self._is_first(pairs):
            return
        names = {name for group in record.groups for name in group.params}
        parts = {key: split_key(key, names) for key in pairs.keys() if isinstance(key, str)}
        new = self._map(record.where, dict.fromkeys(name for _, name, _ in parts.values() if name))
        prefix = f"{record.where}." if record.where else ""
        for key, (_, name, rest) in parts.items():
            if name and rest == ".param_names":
                self._names(prefix + key, pairs.get(key), new)
        self._keys(
            record.where, pairs, {key: begin + new(name) + rest for key, (begin, name, rest) in parts.items() if name}
        )

    def _is_first(self, value: Node) -> bool:
        """Whether a value that several paths may lead to is met for the first time."""
        is_first = id(value) not in self._done
        self._done.add(id(value))
        return is_first

    def _keys(self, where: str, pairs: Dict, targets: Mapping[str, str]) -> None:
        sources: dict[str, str] = {}
        for place in range(0, len(pairs.flat), 2):
            key = pairs.flat[place]
            if isinstance(key, str):
                target = targets.get(key, key)
                if sources.setdefault(target, key) != key:
                    raise KeysCollide(where, target, (sources[target], key))
                pairs.flat[place] = self._note(where, key, target)

    def _names(self, where: str, listed: Value, new: Callable[[str], str]) -> None:
        if isinstance(listed, Sequence) and self._is_first(listed):
            items = [self._note(where, item, new(item)) if isinstance(item, str) else item for item in listed.items]
            listed.items = tuple(items) if isinstance(listed, Tuple) else items

    def _note(self, where: str, source: str, target: str) -> str:
        if source == target:
            return source
        self.renamed.append(Renamed(where, source, target))
        return target

    def check(self) -> None:
        """Refuse options that no state_dict and no optimizer uses."""
        remap = self._remap
        words = [("--strip-prefix", prefix) for prefix in remap.strip_prefix or ("",)]
        asked = [
            *(words if remap.strip_prefix is not None else ()),
            *(("--rename", f"{source}={target}") for source, target in remap.rename),
            *([("--add-prefix", remap.add_prefix)] if remap.add_prefix else ()),
        ]
        for option, word in asked:
            if (option, word) not in self._used:
                raise NoMatch(option, word, self._similar(option, word))

    def _similar(self, option: str, word: str) -> tuple[str, ...]:
        """Return beginnings of keys, or keys that are similar to a glob."""
        if option != "--rename":
            return tuple(islice(dict.fromkeys("".join(key.partition(".")[:2]) for key in self._examples), _SHOWN))
        short = [key for key in self._examples[:_MOST_KEYS] if len(key) <= _LONGEST]
        near = difflib.get_close_matches(word.partition("=")[0][:_LONGEST], short, n=_SHOWN)
        return tuple(near or short[:_SHOWN])
