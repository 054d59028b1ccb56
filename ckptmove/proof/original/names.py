"""The names and dtypes that a conversion must give to tensors, from its options alone.

It says a second time what the options mean, and shares no code with the conversion that it is held against.
"""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import translate
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

from ckptmove.checkpoint.entries import entries
from ckptmove.checkpoint.file_names import SHARD_FILE
from ckptmove.checkpoint.state_dicts import AVERAGED, INNER_WRAPPERS, MODULE
from ckptmove.model import Role
from ckptmove.torch_facts.dtypes import CAST_DOWN, CASTABLE_FLOATS

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator, Sequence

    from ckptmove.checkpoint.entries import StoredMember
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import TensorRecord
    from ckptmove.moves import MoveRequest, Remap

#: Roles of the parts whose dicts of tensors are state_dicts.
_STATE_DICTS: Final = frozenset({"model", "ema", "criterion"})
_ROLES: Final = frozenset(get_args(Role))


class Wanted(NamedTuple):
    """A tensor of the source, and what it must be in the output."""

    part: OpenPart  # its file in the source
    record: TensorRecord
    name: str  # its name in the output
    dtypes: frozenset[str]  # possible dtypes of each dense part that has `record.dtype`
    is_kept: bool  # whether the options keep it
    is_inside: bool  # whether a pickled object holds it: an object may be in several places, and has one name here


class _Home(NamedTuple):
    """The state_dict or the optimizer of a tensor, and its key there."""

    family: str  # which keys belong together: the path of their dict, for shards of any of their files
    before: str  # the path of the dict, with a dot
    key: str  # key of the tensor, or of its parameter
    after: str  # what follows the key in the name of the tensor: `.exp_avg`


def wanted(checkpoint: OpenCheckpoint, request: MoveRequest, *, is_joined: bool) -> list[Wanted]:
    """All tensors of the source of a conversion.

    Args:
        is_joined: whether the output is one file, or new shards of one.
    """
    options = request.remap
    groups = _groups([part.name for part in checkpoint.parts]) if is_joined else {}
    placed = [(part, *found) for part in checkpoint.parts for found in _placed(part, options)]
    keys: dict[str, dict[str, None]] = {}
    for _, _, home, _ in placed:
        if home is not None:
            keys.setdefault(home.family, {})[home.key] = None
    renamed = {family: new_keys(own, options) for family, own in keys.items()}
    found = []
    for part, record, home, holder in placed:
        own = part.own_name(record.name)
        if home is not None:
            own = f"{home.before}{renamed[home.family][home.key]}{home.after}"
        if options.as_root:
            name = part.full_name(own)[len(options.as_root) + 1 :]
        else:
            name = f"{groups[part.name]}{own}" if is_joined else part.full_name(own)
        is_kept, is_inside = _is_kept(record, holder, options), not holder.is_tensor
        found.append(Wanted(part, record, name, _dtypes(record, request), is_kept, is_inside))
    return found


def _groups(names: Sequence[str]) -> dict[str, str]:
    """What is in front of the names of each file in one file of several: its path without the suffix, and a dot.

    It is empty if there is one file, or the shards of one, and for a distributed checkpoint in the directory itself.
    """
    bases = {name: _base(name) for name in names}
    alone = {base for base, count in Counter(bases.values()).items() if count == 1}
    shards = {name for name in names if SHARD_FILE.fullmatch(name)}
    found = {name: base if base in alone or name in shards else name for name, base in bases.items()}
    return {name: f"{group}." if group and len({*found.values()}) > 1 else "" for name, group in found.items()}


def _base(name: str) -> str:
    return re.sub(r"-\d{5}-of-\d{5}\.[a-z]+$|\.(safetensors|bin|pt|pth|ckpt|pkl|tar)$", "", name)


def new_keys(keys: Collection[str], options: Remap) -> dict[str, str]:
    """The new key of each key of a state_dict: prefixes are removed, then keys renamed, then a prefix is added."""
    new = dict(zip(keys, keys, strict=True))
    if options.strip_prefix is not None:
        prefixes = options.strip_prefix or (*INNER_WRAPPERS, MODULE)
        inner = "|".join(re.escape(one) for one in prefixes if one in INNER_WRAPPERS)
        if inner:
            new = {old: re.sub(rf"(^|(?<=\.))({inner})", "", key) for old, key in new.items()}
        pending = [one for one in prefixes if one not in INNER_WRAPPERS]
        while True:
            front = [key for key in new.values() if key != AVERAGED]
            prefix = next((one for one in pending if front and all(_follows(key, one) for key in front)), None)
            if prefix is None:
                break
            new = {old: key.removeprefix(prefix) for old, key in new.items()}
            if options.strip_prefix:
                pending.remove(prefix)
    return {old: options.add_prefix + _renamed(key, options.rename) for old, key in new.items()}


def _follows(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and key != prefix


def _renamed(key: str, pairs: Iterable[tuple[str, str]]) -> str:
    """The key by the first glob that matches it; each ``*`` of the new name stands for the text that one matched."""
    for old, new in pairs:
        found = re.fullmatch("(.*?)".join(map(re.escape, old.split("*"))), key, re.DOTALL)
        if found is not None:
            first, *rest = new.split("*")
            return first + "".join(text + part for text, part in zip(found.groups(), rest, strict=True))
    return key


def _placed(part: OpenPart, options: Remap) -> Iterator[tuple[TensorRecord, _Home | None, StoredMember]]:
    """The tensors of a part, each with its place in a state_dict or an optimizer with named parameters, and its entry.

    The entry is that of the object that holds the tensor, if one does. A pickled module is a state_dict once ``plain``
    has replaced it.
    """
    shared = SHARD_FILE.fullmatch(part.name) is not None
    members = entries(part.tree(), part.inventory, part.name)
    by_path = {one.path: one for one in members}
    of_optimizers = dict(_of_optimizers(part))
    for record in part.inventory.tensors:
        name = path = part.own_name(record.name)
        while path not in by_path:
            path = path.rpartition(".")[0]
        member = by_path[path]
        holder = members[member.parent] if member.is_tensor and isinstance(member.key, str) else member
        is_home = holder is not member or (not member.is_tensor and (options.plain or member.same != -1))
        home = of_optimizers.get(record.name)
        if home is None and is_home and record.role in _STATE_DICTS and holder.role in _STATE_DICTS:
            before = f"{holder.path}." if holder.path else ""
            key = path[len(before) :] if holder is not member else name[len(before) :]
            home = _Home(f"{'' if shared else part.name}/{holder.path}", before, key, name[len(before + key) :])
        yield record, home, member


def _of_optimizers(part: OpenPart) -> Iterator[tuple[str, _Home]]:
    """The state of optimizers that name their parameters, by the names of its tensors."""
    for optimizer in part.inventory.optimizers:
        where = part.own_name(optimizer.where) if optimizer.where else ""
        before = f"{where}.state." if where else "state."
        for entry in optimizer.state:
            for _, record in entry.tensors if not entry.key.isdecimal() else ():
                after = part.own_name(record.name)[len(before) + len(entry.key) :]
                yield record.name, _Home(f"{part.name}/{where}.state", before, entry.key, after)


def _is_kept(record: TensorRecord, member: StoredMember, options: Remap) -> bool:
    """Whether the options keep a tensor; an object has a role of its own."""
    name, roles = record.name, {record.role, member.role}
    if options.as_root:
        if not name.startswith(f"{options.as_root}."):
            return False
        name = name[len(options.as_root) + 1 :]
    if options.only and not _matches(name, roles, options.only):
        return False
    return not _matches(name, roles, options.drop)


def _matches(name: str, roles: Container[str | None], words: Iterable[str]) -> bool:
    """Whether a word is the role of a tensor, or a glob of its name or of a path around it."""
    ends = [place for place, letter in enumerate(name) if letter == "."]
    paths = [name, *(name[:end] for end in ends)]
    return any(
        word in roles if word in _ROLES else any(re.match(translate(word), path) for path in paths) for word in words
    )


def _dtypes(record: TensorRecord, request: MoveRequest) -> frozenset[str]:
    """The dtypes that a tensor may have in the output. Scalars of an optimizer keep theirs."""
    role = "model" if request.remap.as_root and record.role == "ema" else record.role
    new = {role or "model": dtype for role, dtype in request.remap.dtype}.get(role)
    is_scalar = record.role == "optimizer" and not record.shape
    if new is not None and record.dtype in CASTABLE_FLOATS and not is_scalar:
        return frozenset({new})
    cast = CAST_DOWN.get(record.dtype) if request.cast else None
    return frozenset({record.dtype} | ({cast} if cast else set()))
