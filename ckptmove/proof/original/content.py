"""Pair tensors of two checkpoints whose names differ: by their content, and by the change that most names have."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptmove.proof.original.values import digest
from ckptmove.proof.restored.survey import NOT_COMPARED
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.torch_facts.dtypes import CAST_DOWN, CASTABLE_FLOATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.state_dicts import RootKeys
    from ckptmove.comparison.counterparts import Stored
    from ckptmove.proof.tensors.pieces import TensorSource

#: Dtypes of the dense parts of a tensor.
_Dtypes: TypeAlias = "tuple[str, ...]"


class _Content(NamedTuple):
    """What equal tensors have in common."""

    shape: tuple[int, ...]
    dtypes: _Dtypes
    digests: tuple[bytes | None, ...]  # of each dense part; None if it has none


def pair_by_content(
    mine: Sequence[Stored], theirs: Sequence[Stored], own: TensorSource, others: TensorSource
) -> list[tuple[Stored, Stored]]:
    """Pairs of tensors with the same shape and bits, in the order of ``mine``.

    Tensors of the original are cast by torch to the dtypes that tensors of their shape have in the checkpoint. Of
    several with the same content, the one whose name ends alike is chosen.

    Args:
        mine: tensors of the checkpoint without a counterpart.
        theirs: tensors of the original without a counterpart.
        own: values of the checkpoint.
        others: values of the original.
    """
    ours = [one for one in mine if one.record.kind not in NOT_COMPARED]
    wanted: dict[tuple[int, ...], dict[_Dtypes, None]] = defaultdict(dict)
    for one in ours:
        wanted[one.record.shape][_dtypes(one)] = None
    by_content: dict[_Content, list[Stored]] = defaultdict(list)
    for two in theirs:
        for dtypes in wanted.get(two.record.shape, ()) if two.record.kind not in NOT_COMPARED else ():
            if may_be_cast(_dtypes(two), dtypes):
                by_content[_content(two, others, dtypes)].append(two)
    pairs: list[tuple[Stored, Stored]] = []
    taken: set[int] = set()
    for one in ours if by_content else ():
        content = _content(one, own, _dtypes(one))
        alike = by_content.get(content, [])
        free = [two for two in alike if id(two) not in taken] or alike
        if free and None not in content.digests:
            two = max(free, key=lambda found: common_end(one.record.name, found.record.name))
            taken.add(id(two))
            pairs.append((one, two))
    return pairs


def pair_by_change(
    pairs: Sequence[tuple[Stored, Stored]], mine: Sequence[Stored], theirs: Sequence[Stored], roots: RootKeys
) -> list[tuple[Stored, Stored]]:
    """The pairs by content, but by name where half of the tensors of a state_dict have one change of their names.

    A damaged tensor then has its counterpart too, and two that were exchanged have each other's.

    Args:
        pairs: the pairs by content.
        mine: tensors of the checkpoint without a counterpart of the same name.
        theirs: those of the original.
        roots: root keys of the checkpoint.
    """
    groups: dict[object, list[Stored]] = defaultdict(list)
    for one in mine:
        groups[group_of(one, roots)].append(one)
    changes: dict[object, Counter[tuple[str, str]]] = defaultdict(Counter)
    for one, two in pairs:
        changes[group_of(one, roots)][change_of(one.record.name, two.record.name)] += 1
    by_name = {two.record.name: two for two in theirs}
    found: list[tuple[Stored, Stored]] = []
    for group, (((before, after), count), *_) in ((key, own.most_common()) for key, own in changes.items()):
        for one in groups[group] if 2 * count >= len(groups[group]) else ():
            counterpart = by_name.get(after + one.record.name[len(before) :])
            if counterpart is not None and one.record.name.startswith(before):
                found.append((one, counterpart))
    taken = {id(stored) for pair in found for stored in pair}
    return found + [pair for pair in pairs if taken.isdisjoint(map(id, pair))]


def group_of(stored: Stored, roots: RootKeys) -> object:
    """The state_dict of a tensor, and its role."""
    return stored.record.role, roots.split(stored.record.name)[0]


def change_of(name: str, original: str) -> tuple[str, str]:
    """What two names have in front of their common end, with its dot."""
    kept = common_end(name, original)
    fronts = (one.split(".")[: -kept or None] for one in (name, original))
    first, second = (f"{'.'.join(front)}." if front else "" for front in fronts)
    return first, second


def common_end(one: str, other: str) -> int:
    """Number of parts that two dotted names have in common at their ends."""
    count = 0
    for mine, theirs in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _dtypes(stored: Stored) -> _Dtypes:
    return tuple(part.dtype for part in stored.record.dense())


def may_be_cast(source: _Dtypes, target: _Dtypes) -> bool:
    """Whether dtypes are the same, or a conversion may cast those that differ: all are floating."""
    return len(source) == len(target) and all(
        old == new or {old, new} <= CASTABLE_FLOATS or CAST_DOWN.get(old) == new
        for old, new in zip(source, target, strict=True)
    )


def _content(stored: Stored, values: TensorSource, dtypes: _Dtypes) -> _Content:
    """What a tensor has in common with an equal one, once it is cast."""
    pairs = zip(stored.record.dense(), dtypes, strict=True)
    digests = tuple(digest(values.tensor(part).to(dtype_of(dtype))) for part, dtype in pairs)
    return _Content(stored.record.shape, dtypes, digests)
