"""The part of a tensor that one rank has saved with ``torch.save``, as a DTensor or a ShardedTensor."""

from __future__ import annotations

from itertools import accumulate, product
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.chunks import Chunk
from ckptmove.pickles.rebuild_arguments import NotATensor, items
from ckptmove.pickles.tree import Call, Dict, Global
from ckptmove.torch_facts.weights_only import SHARDED_TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.pickles.tree import Value

    #: Indices of an axis of the whole tensor: first, and end (exclusive).
    Run = tuple[int, int]

#: Full names of the class DTensor; the second up to torch 2.4.
DTENSOR: Final = frozenset({"torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor"})
CLASSES: Final = DTENSOR | {SHARDED_TENSOR}
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_WRAPPER: Final = "torch._utils._rebuild_wrapper_subclass"
_PARAMETER: Final = "torch._utils._rebuild_parameter"


class Placement(NamedTuple):
    """How a tensor is placed on one dimension of a mesh."""

    axis: int | None  # axis of the tensor that is split; None if each rank has all of it
    factor: int = 1  # number of parts that are split one by one, as `_StridedShard` does; 1 for `Shard`


class LocalShard(NamedTuple):
    """The part of a tensor that one rank has saved."""

    shape: tuple[int, ...]  # shape of the whole tensor
    mesh: tuple[int, ...]  # size of the mesh along each of its dimensions
    coordinate: tuple[int, ...]  # place of the rank in the mesh
    rank: int  # global rank of the process
    ranks: tuple[int, ...]  # global ranks of the mesh, or of the larger mesh that it is sliced from
    placements: tuple[Placement, ...]  # placement of the tensor on each dimension of the mesh
    #: indices that the rank holds along each axis of the tensor, in the order of the local tensor.
    runs: tuple[tuple[Run, ...], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(end - first for first, end in axis) for axis in self.runs)

    def boxes(self) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
        """The parts of the whole tensor that the rank holds, each with its offsets in the local tensor."""
        axes = [
            list(zip(axis, accumulate((end - first for first, end in axis), initial=0), strict=False))
            for axis in self.runs
        ]
        for box in product(*axes):
            offsets, lengths = tuple(run[0] for run, _ in box), tuple(run[1] - run[0] for run, _ in box)
            yield Chunk(offsets, lengths), tuple(local for _, local in box)


def shard_call(value: Value) -> Call | None:
    """The call that rebuilds a DTensor or a ShardedTensor, or that in a parameter; None for any other value."""
    if type(value) is Call and value.name == _PARAMETER and value.arguments:
        value = value.arguments[0]
    if type(value) is not Call or value.name != _FROM_TYPE or len(value.arguments) != 4:  # with a state
        return None
    function, kind, *_ = value.arguments
    if type(function) is not Global or function.full_name != _WRAPPER:
        return None
    return value if type(kind) is Global and kind.full_name in CLASSES else None


def slots(state: Value) -> Mapping[str, Value]:
    """Attributes in ``__slots__``, the second part of a state without ``__dict__``; errors as of `attributes`."""
    return _members(items(state)[1])


def attributes(value: Value) -> Mapping[str, Value]:
    """Attributes of an object, by name."""
    return _members(value.state if type(value) is Call else None)


def _members(value: Value) -> Mapping[str, Value]:
    if type(value) is not Dict:
        raise NotATensor
    return {key: member for key, member, _ in value.pairs() if type(key) is str}
