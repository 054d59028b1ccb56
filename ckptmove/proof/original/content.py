"""Pair tensors of two checkpoints whose names differ by their content."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptmove.proof.original.values import digest
from ckptmove.proof.restored.survey import NOT_COMPARED
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.torch_facts.dtypes import CASTABLE_FLOATS

if TYPE_CHECKING:
    from collections.abc import Sequence

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
            if _may_be_cast(_dtypes(two), dtypes):
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


def _may_be_cast(source: _Dtypes, target: _Dtypes) -> bool:
    """Whether dtypes are the same, or torch casts those that differ: all are floating."""
    return len(source) == len(target) and all(
        old == new or {old, new} <= CASTABLE_FLOATS for old, new in zip(source, target, strict=True)
    )


def _content(stored: Stored, values: TensorSource, dtypes: _Dtypes) -> _Content:
    """What a tensor has in common with an equal one, once it is cast."""
    pairs = zip(stored.record.dense(), dtypes, strict=True)
    digests = tuple(digest(values.tensor(part).to(dtype_of(dtype))) for part, dtype in pairs)
    return _Content(stored.record.shape, dtypes, digests)
