"""Read the part of a ShardedTensor that one rank has saved: its local shard, and the offsets in the metadata.

FSDP1 makes them for ``StateDictType.SHARDED_STATE_DICT``: one shard for each rank, and none for the last ranks if the
tensor has fewer rows than ranks. ShardedTensors with several shards for a rank are not read.

From torch/distributed/_shard/: sharded_tensor/api.py (``__getstate__``), sharded_tensor/shard.py and metadata.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.formats.chunks import Chunk
from ckptmove.formats.local_shards import LocalShard, Placement, attributes, slots
from ckptmove.pickles.rebuild_arguments import NotATensor, count, items, sizes
from ckptmove.pickles.tree import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.pickles.tree import Value

#: The number of ranks is only a number in the file.
_MOST_RANKS: Final = 1 << 16


def read_shard(call: Call) -> LocalShard:
    """Read the part of a ShardedTensor that a file holds, given the result of :func:`shard_call`."""
    _, metadata, group, *_ = items(call.arguments[3])
    whole, process = attributes(metadata), attributes(group)
    shape = sizes(whole.get("size"))
    rank, ranks = count(process.get("global_rank")), count(process.get("global_world_size"))
    if ranks > _MOST_RANKS or not shape:
        raise NotATensor
    shard = _only_shard(call)
    own = _chunk(shard.get("metadata")) if shard else Chunk((0,) * len(shape), (0, *shape[1:]))
    chunks = [_chunk(one) for one in items(whole.get("shards_metadata"))]
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in (own, *chunks)):
        raise NotATensor
    axes = {axis for chunk in chunks for axis, size in enumerate(shape) if chunk.sizes[axis] != size}
    return LocalShard(
        shape=shape,
        mesh=(count(process.get("local_world_size")),),
        coordinate=(count(process.get("local_rank")),),
        rank=rank,
        ranks=tuple(range(ranks)),
        placements=(Placement(min(axes, default=None)),),
        runs=tuple(((own.offsets[axis], own.end(axis)),) for axis in range(len(shape))),
    )


def local_tensor(call: Call) -> Value:
    """The node of the shard of a ShardedTensor, given the result of :func:`shard_call`; None without one."""
    return _only_shard(call).get("tensor")


def _only_shard(call: Call) -> Mapping[str, Value]:
    """The attributes of the shard of this rank; empty without one."""
    shards = items(items(call.arguments[3])[0])
    if len(shards) > 1:
        raise NotATensor
    return _slots(shards[0]) if shards else {}


def _chunk(metadata: Value) -> Chunk:
    own = _slots(metadata)
    return Chunk(sizes(own.get("shard_offsets")), sizes(own.get("shard_sizes")))


def _slots(value: Value) -> Mapping[str, Value]:
    return slots(value.state if type(value) is Call else None)
