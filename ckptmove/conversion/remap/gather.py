"""Gather the files of a checkpoint into the one value that a single new file holds."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.entries import entries
from ckptmove.checkpoint.file_names import SHARD_FILE
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import NotGathered
from ckptmove.pickles.build import new_dict, ordered_dict
from ckptmove.pickles.tree import Dict, Node, nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import Inventory
    from ckptmove.pickles.tree import Value

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".tar")


def require_gatherable(inventory: DirectoryInventory) -> None:
    """Raise NotGathered if the files hold the state of several runs, or of parts of parameters."""
    if inventory.sharding:
        raise NotGathered(inventory.path, inventory.sharding)
    if inventory.checkpoints:
        one = inventory.checkpoints[-1] if inventory.form is None else ""  # convert takes no path inside of an archive
        raise NotGathered(inventory.path, "it holds several checkpoints", one)


def lost_order(root: Value, inventory: Inventory) -> dict[int, int]:
    """Ranks of the model's parameters in the order of an optimizer, by the ``id`` of their nodes.

    Empty unless the files have lost the order of the model, as safetensors does, which sorts its tensors. Parameters of
    one shape may be ranked in another order than the model has: no file tells it. A state_dict is loaded by name, and
    an optimizer that names its parameters needs no order.
    """
    if not isinstance(inventory, DirectoryInventory) or not inventory.order_lost:
        return {}
    matches = chain.from_iterable(pairing.matches for pairing in pair_all(inventory) if pairing.how != "names")
    ranks = {tensor.name: rank for rank, (_, tensor) in enumerate(matches) if tensor is not None}
    return {id(entry.value): ranks[entry.path] for entry in entries(root, inventory) if entry.path in ranks}


def gather(root: Dict, path: str) -> Value:
    """The value of one file: a state_dict for its shards; a dict by file name for several files.

    ``root`` has the trees by the paths of their files.
    """
    groups: dict[str, list[tuple[str, Value]]] = {}
    names = _group_names([cast("str", key) for key in root.keys()])
    for key, value, _ in root.pairs():
        groups.setdefault(names[cast("str", key)], []).append((cast("str", key), value))
    values = {name: _joined(files, path) for name, files in groups.items()}
    if len(values) == 1:
        return next(iter(values.values()))
    whole = as_dict(values.get(""))  # a distributed checkpoint in the directory itself
    if whole is not None and values.keys().isdisjoint(whole.keys()):
        del values[""]
    else:
        whole = new_dict()
    return new_dict([*((key, value) for key, value, _ in whole.pairs()), *values.items()])


def gathered_names(parts: Sequence[OpenPart]) -> set[str]:
    """Names of the tensors in the value of :func:`gather`, if its files were not changed before."""
    keys = _group_names(part.name for part in parts)
    is_single = len({*keys.values()}) == 1
    return {
        part.own_name(tensor.name) if is_single or not part.name else f"{keys[part.name]}.{part.own_name(tensor.name)}"
        for part in parts
        for tensor in part.inventory.tensors
    }


def globs(names: Iterable[str]) -> dict[str, str]:
    """The keys of :func:`gather` for some files, each with a glob of its files: their name, if it is one file."""
    found: dict[str, str] = {}
    for name, key in _group_names(names).items():
        found[key] = f"{key}-*" if key in found else name
    return found


def _group_names(names: Iterable[str]) -> dict[str, str]:
    """The key of each file: its name without its suffix, if no other file has that, or that of its shards."""
    bases = {name: _base(name) for name in names}
    firsts: dict[str, str] = {}
    doubled: set[str] = set()
    for name, base in bases.items():
        first = firsts.setdefault(base, name)
        if first != name and not (SHARD_FILE.fullmatch(first) and SHARD_FILE.fullmatch(name)):
            doubled.add(base)
    return {name: name if base in doubled else base for name, base in bases.items()}


def _base(name: str) -> str:
    """Name of a file without its suffix, and without the number of a shard."""
    if SHARD_FILE.fullmatch(name):
        return name.rsplit("-", 3)[0]
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)


def _joined(files: Sequence[tuple[str, Value]], path: str) -> Value:
    if len(files) == 1:
        return files[0][1]
    joined: list[tuple[Value, Value]] = []
    seen: dict[Value, str] = {}
    for name, value in files:
        pairs = as_dict(value)
        if pairs is None:
            raise NotGathered(path, f"{name} is not a state_dict")
        for key, member, _ in pairs.pairs():
            if not isinstance(key, Node) and seen.setdefault(key, name) != name:
                raise NotGathered(path, f"'{key_text(key)}' is in {seen[key]} and in {name}")
            joined.append((key, member))
    return ordered_dict(new_dict(joined))


def put_in_order(root: Value, ranks: Mapping[int, int]) -> None:
    """Sort the keys of the model's state_dicts by the ranks of its parameters, as of :func:`lost_order`."""
    for pairs in nodes(root) if ranks else ():
        if type(pairs) is Dict and any(id(member) in ranks for member in pairs.flat[1::2]):
            _sort(pairs, ranks)


def _sort(pairs: Dict, ranks: Mapping[int, int]) -> None:
    """Sort the keys of a state_dict by the ranks of its parameters; buffers follow the parameters of their module."""
    modules: dict[str, int] = {}
    for key, member, _ in pairs.pairs():
        module = _module(key)
        modules[module] = max(modules.get(module, -1), ranks.get(id(member), -1))
    last = len(ranks)

    def rank(pair: tuple[Value, Value, int]) -> int:
        own = ranks.get(id(pair[1]), modules[_module(pair[0])])
        return last if own < 0 else own

    ordered = sorted(pairs.pairs(), key=rank)
    pairs.flat = [item for key, member, _ in ordered for item in (key, member)]
    pairs.starts = [-1] * len(pairs.flat)


def _module(key: Value) -> str:
    return key.rpartition(".")[0] if type(key) is str else ""
